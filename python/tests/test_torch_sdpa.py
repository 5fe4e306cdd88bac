# heed.torch.scaled_dot_product_attention against the math backend of PyTorch's own.
import itertools

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import heed  # noqa: E402
from heed.torch import scaled_dot_product_attention  # noqa: E402

ORIGINAL = F.scaled_dot_product_attention
# Parts of the largest value; 16-bit results are compared with the math backend in float64 on the same numbers.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)
LOWEST = {dtype: torch.finfo(dtype).min for dtype in DTYPES}
B, H, E, EV = 2, 3, 8, 5


pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(20260801)


def math_backend(*args, **kwargs):
    with sdpa_kernel(SDPBackend.MATH):
        return ORIGINAL(*args, **kwargs)


def leaf(shape, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()


def inputs(L=6, S=9, dtype=torch.float64, batch=(B, H)):
    return leaf((*batch, L, E), dtype), leaf((*batch, S, E), dtype), leaf((*batch, S, EV), dtype)


def wide(x):
    is_float = isinstance(x, torch.Tensor) and x.is_floating_point()
    return x.detach().double().requires_grad_(x.requires_grad) if is_float else x


def close(got, expected, dtype, computed=None):
    assert got.shape == expected.shape and got.dtype == dtype
    bound = TOLERANCE[computed or dtype] * max(1, expected.abs().max().item() if expected.numel() else 0)
    torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=bound)


def check(query, key, value, attn_mask=None, **options):
    """Result and gradients are the math backend's."""
    o = scaled_dot_product_attention(query, key, value, attn_mask, **options)
    arguments = (query, key, value, attn_mask)
    if query.dtype not in (torch.float64, torch.float32):
        arguments = tuple(wide(x) for x in arguments)
    expected = math_backend(*arguments, **options)
    close(o, expected, query.dtype)
    wanted = [i for i, x in enumerate(arguments) if x is not None and x.requires_grad]
    if not wanted:
        return o
    do = torch.randn_like(o)
    got = torch.autograd.grad(o, [(query, key, value, attn_mask)[i] for i in wanted], do)
    wanted_there = [arguments[i] for i in wanted]
    there = torch.autograd.grad(expected, wanted_there, do.to(expected.dtype), materialize_grads=True)
    for i, x, y in zip(wanted, got, there):
        close(x, y, (query, key, value, attn_mask)[i].dtype, query.dtype)
    return o


def bools(*shape, probability=0.6):
    return torch.rand(shape) < probability


MASKS = {
    "none": lambda L, S, dtype: None,
    "pairs": lambda L, S, dtype: bools(L, S),
    "keys": lambda L, S, dtype: bools(B, 1, 1, S),
    "keys of one axis": lambda L, S, dtype: bools(S),
    "queries": lambda L, S, dtype: bools(B, 1, L, 1),
    "heads": lambda L, S, dtype: bools(H, 1, S),
    "dense": lambda L, S, dtype: bools(B, H, L, S),
    "scalar": lambda L, S, dtype: torch.tensor(True),
    "nothing": lambda L, S, dtype: torch.zeros(L, S, dtype=torch.bool),
    "expanded": lambda L, S, dtype: bools(B, 1, 1, S).expand(B, H, L, S),
    "transposed": lambda L, S, dtype: bools(S, L).T,
    "float pairs": lambda L, S, dtype: leaf((L, S), dtype),
    "float keys": lambda L, S, dtype: leaf((B, 1, 1, S), dtype),
    "float heads": lambda L, S, dtype: leaf((1, H, L, S), dtype),
    "float queries": lambda L, S, dtype: leaf((B, H, L, 1), dtype),
    "float dense": lambda L, S, dtype: leaf((B, H, L, S), dtype),
    "float expanded": lambda L, S, dtype: leaf((1, 1, L, S), dtype).expand(B, H, L, S),
    "float32": lambda L, S, dtype: leaf((L, S), torch.float32),
    "float scalar": lambda L, S, dtype: leaf((), dtype).detach(),  # the gradient would sum to 0
    "float empty rows": lambda L, S, dtype: torch.zeros(L, S).masked_fill(~bools(L, 1), -torch.inf).to(dtype),
    "float lowest": lambda L, S, dtype: torch.zeros(L, S, dtype=dtype).masked_fill(~bools(L, S), LOWEST[dtype]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, dtype):
    for L, S in ((6, 9), (7, 7), (9, 4), (1, 5)):
        check(*inputs(L, S, dtype), MASKS[name](L, S, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [None, 0.4, -0.7, 0.0, 1])
def test_causal_and_scale(scale, dtype):
    for L, S, is_causal in itertools.product((6, 9, 1), (9, 3, 1), (False, True)):
        check(*inputs(L, S, dtype), is_causal=is_causal, scale=scale)


def test_a_row_without_a_key_is_zero_and_has_no_gradient():
    q, k, v = inputs(4, 4)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    o = scaled_dot_product_attention(q, k, v, mask)
    o.sum().backward()
    assert not o[:, :, 2].any() and not q.grad[:, :, 2].any() and q.grad[:, :, 1].all() and not v.grad.isnan().any()


HEADS = [(4, 2, 2), (4, 1, 1), (6, 3, 3), (4, 4, 4), (4, 2, 1), (6, 2, 3), (0, 2, 2), (0, 0, 0)]


@pytest.mark.parametrize("heads", HEADS)
def test_groups_of_heads(heads):
    for batch in ((), (2,), (2, 3)):
        shapes = [(*batch, n, length, size) for n, length, size in zip(heads, (6, 9, 9), (E, E, EV))]
        q, k, v = map(leaf, shapes)
        for mask in (None, bools(heads[0], 6, 1), leaf((1, 6, 9))):
            check(q, k, v, mask, enable_gqa=True)
        check(q, k, v, is_causal=True, enable_gqa=True)
    check(leaf((2, 4, 3, E)), leaf((1, 2, 5, E)), leaf((2, 5, EV)), bools(2, 1, 1, 5), enable_gqa=True)


BATCHES = [  # query, key, value, masks
    ((), (), (), [(), (6, 1)]),
    ((3,), (3,), (3,), [(3, 6, 9), (9,)]),
    ((), (3,), (), [(3, 1, 9)]),
    ((2, 4), (2, 1), (2, 1), [(2, 1, 6, 9), (4, 1, 9)]),
    ((2, 4), (2, 1), (2, 4), [(1, 4, 1, 9)]),
    ((2, 1), (1, 3), (2, 3), [(2, 3, 6, 9)]),
    ((2, 3), (2, 3), (1, 3), [(3, 1, 9)]),
    ((2, 1), (2, 1), (2, 3), [(2, 1, 6, 9)]),
    ((2, 3), (3,), (), [(2, 1, 6, 9)]),
    ((2, 3, 4), (2, 3, 4), (2, 3, 4), [(3, 1, 6, 9), (2, 1, 4, 6, 1), (6, 9), (2, 3, 1, 1, 9), (1, 1, 1, 6, 9)]),
    ((2, 3, 4), (3, 4), (4,), [(3, 1, 6, 9), (2, 1, 1, 1, 9)]),
    ((2, 3, 4), (2, 1, 4), (1, 3, 1), [(2, 3, 4, 6, 9)]),
    ((2, 3, 2, 2), (1, 3, 1, 2), (2, 1, 2, 1), [(2, 1, 2, 1, 6, 9), (3, 1, 1, 1, 9)]),
    ((1, 1, 2), (1, 1, 2), (1, 1, 2), [(1, 1, 2, 6, 1)]),
    ((0, 3), (0, 3), (0, 3), [(6, 9)]),
    ((2, 0), (2, 0), (2, 1), [(6, 9)]),
    ((1, 3, 2), (0, 1, 2), (3, 1), [(0, 1, 1, 6, 9)]),
]


@pytest.mark.parametrize("query, key, value, masks", BATCHES, ids=lambda x: str(x))
def test_batch_axes_broadcast(query, key, value, masks):
    q, k, v = leaf((*query, 6, E)), leaf((*key, 9, E)), leaf((*value, 9, EV))
    check(q, k, v)
    check(q, k, v, is_causal=True)
    for shape in masks:
        check(q, k, v, bools(*shape))
        check(q, k, v, leaf(shape))


@pytest.mark.parametrize("seed", range(40))
def test_random_call(seed):
    torch.manual_seed(seed)

    def draw(*choices):
        return choices[torch.randint(len(choices), ()).item()]

    rank = draw(0, 1, 2, 2, 3, 4)
    axes = [draw(1, 2, 3) for _ in range(rank)]
    L, S, gqa = draw(1, 2, 7), draw(1, 3, 8), rank > 0 and draw(True, False)

    def some(axes, drop):
        return [draw(n, n, 1) for n in axes][(draw(0, 1, len(axes)) if drop else 0) :]

    q, k, v = ([*some(axes[:-1], True), axes[-1]] if gqa else some(axes, True) for _ in range(3))
    if gqa:
        q[-1] = 4 * axes[-1]
    scores = torch.broadcast_shapes(q[:-1], k[:-1]) + (q[-1],) if gqa else torch.broadcast_shapes(q, k)
    mask = draw(None, bools, lambda *shape: leaf(shape))
    q, k, v = leaf((*q, L, E)), leaf((*k, S, E)), leaf((*v, S, EV))
    if draw(True, False):
        q, k = (x.detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_() for x in (q, k))
    if mask is not None:
        mask = mask(*some((*scores, L, S), True))
    options = {"is_causal": mask is None and draw(True, False), "scale": draw(None, 0.3), "enable_gqa": gqa}
    check(q, k, v, mask, **options)


@pytest.mark.parametrize("empty", ["L", "S", "E", "EV", "E and EV"])
def test_axes_of_size_0(empty):
    sizes = {"L": 6, "S": 9, "E": E, "EV": EV} | dict.fromkeys(empty.split(" and "), 0)
    for batch in ((), (2, 3)):
        q, k, v = (leaf((*batch, sizes[n], sizes[m])) for n, m in (("L", "E"), ("S", "E"), ("S", "EV")))
        check(q, k, v, is_causal=True)
        for mask in (None, bools(sizes["L"], 1), leaf((sizes["S"],))):
            check(q, k, v, mask)


class Calls(TorchDispatchMode):
    """The arguments of each call of heed's operator."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.heed.attention.default:
            self.calls.append(args)
        return func(*args, **(kwargs or {}))


def test_nothing_is_copied_or_expanded():
    q, k, v = (torch.randn(shape).transpose(1, 2) for shape in ((B, 6, H, E), (B, 9, H, E), (B, 9, H, EV)))
    mask = torch.ones((B, 1, 1, 9), dtype=torch.bool)
    many = torch.randn(5, B, H, 6, E)
    with Calls() as seen:
        o = scaled_dot_product_attention(q, k, v)
        scaled_dot_product_attention(q, k, v, mask)
        scaled_dot_product_attention(q[None], k[None], v[None], mask[0, 0])
        scaled_dot_product_attention(q, k[0, :1], v[0, :1], torch.zeros(1, 9))
        scaled_dot_product_attention(many, k, v)
        windows = scaled_dot_product_attention(q[None].expand(5, -1, -1, -1, -1), k[:, :1], v, mask)
        torch.testing.assert_close(windows[3], scaled_dot_product_attention(q, k[:, :1].expand_as(k), v, mask))
    assert o.transpose(1, 2).is_contiguous()
    storages = {x.untyped_storage().data_ptr() for x in (q, k, v, mask, many)}
    for args in seen.calls:
        assert all(x.untyped_storage().data_ptr() in storages for x in args[:3])
        assert args[3] is True and len(args) <= 17
    masks = [[x for x in args[4:] if isinstance(x, torch.Tensor)] for args in seen.calls]
    assert masks[0] == [] and masks[1][0] is mask
    assert masks[2][0].shape == masks[3][0].shape == (1, 1, 1, 9)
    assert seen.calls[3][1].shape == (B, 1, 9, E) and len(seen.calls) == 4 + 2 + 2 + 1  # the axes 5 and B are not one
    assert scaled_dot_product_attention(q[0], k[0], v[0]).is_contiguous()


def test_causal_bias_objects_stay_structure():
    for L, S in ((6, 9), (7, 7)):
        q, k, v = inputs(L, S)
        biases = causal_upper_left(L, S), causal_lower_right(L, S)
        with Calls() as seen:
            upper, lower = (scaled_dot_product_attention(q, k, v, bias) for bias in biases)
        assert not any(isinstance(x, torch.Tensor) for args in seen.calls for x in args[3:])
        close(upper, ORIGINAL(q, k, v, biases[0]), q.dtype)
        close(lower, ORIGINAL(q, k, v, biases[1]), q.dtype)
    for bias in (causal_upper_left(3, 4), causal_lower_right(3, 3)):  # PyTorch ignores these sizes
        close(scaled_dot_product_attention(q, k, v, bias), upper, q.dtype)


def test_dropout():
    q, k = torch.zeros(1, 2, 64, 4), torch.zeros(1, 2, 200, 4)
    v = torch.eye(200).expand(1, 2, 200, 200)

    def weights(p, *mask):
        return scaled_dot_product_attention(q, k, v, *mask, dropout_p=p)

    torch.manual_seed(3)
    first, second = weights(0.3), weights(0.3)
    torch.manual_seed(3)
    assert torch.equal(weights(0.3), first) and not torch.equal(first, second)
    kept = first != 0
    torch.testing.assert_close(first[kept], torch.full_like(first[kept], 1 / 200 / 0.7))
    assert abs(kept.double().mean() - 0.7) < 0.01 and not torch.equal(kept[0, 0], kept[0, 1])
    masked = weights(0.3, bools(200))
    assert 0 < (masked != 0).double().mean() < 0.6
    assert not weights(1.0).any() and torch.equal(weights(-0.5), weights(0.0))

    def with_dropout(*args):
        torch.manual_seed(5)
        return scaled_dot_product_attention(*args, dropout_p=0.4)

    assert torch.autograd.gradcheck(with_dropout, inputs(3, 4))
    q, k, v = inputs(3, 4)
    scaled_dot_product_attention(q, k, v, leaf((3, 4)), dropout_p=1.0).sum().backward()
    assert not q.grad.any() and not v.grad.any()


def test_autocast():
    q, k, v = inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for mask in (None, leaf((6, 9), torch.float32), leaf((6, 9), torch.bfloat16), bools(6, 9)):
            for arguments in ((q, k, v), (q.bfloat16(), k, v)):
                o = scaled_dot_product_attention(*arguments, mask)
                assert o.dtype == torch.bfloat16
                expected = ORIGINAL(*arguments, mask)
                assert expected.dtype == torch.bfloat16
                torch.testing.assert_close(o, expected, rtol=0, atol=0.05)
    o.sum().backward()
    assert q.grad.dtype == torch.float32


def test_only_the_needed_gradients():
    for needed in itertools.product((False, True), repeat=3):
        q, k, v = (x.detach().requires_grad_(need) for x, need in zip(inputs(), needed))
        assert check(q, k, v, bools(6, 9)).requires_grad == any(needed)
    q, k, v = (x.detach() for x in inputs())
    bias = leaf((6, 1))
    check(q, k, v, bias)


def test_transforms_and_tensors_without_data():
    q, k, v = (x.detach() for x in inputs())
    mask = bools(9)
    mapped = torch.vmap(lambda q, k: scaled_dot_product_attention(q, k, v, mask))(q[None], k[None])
    close(mapped[0], math_backend(q, k, v, mask), torch.float64)
    grad = torch.func.grad(lambda q: scaled_dot_product_attention(q, k, v).sum())(q)
    close(grad, torch.func.grad(lambda q: math_backend(q, k, v).sum())(q), torch.float64)
    o = scaled_dot_product_attention(*(x.to("meta") for x in (q, k, v)), mask.to("meta"))
    assert o.device.type == "meta" and o.shape == (B, H, 6, EV)
    for order in (lambda f: torch.func.jvp(f, (q,), (q,))[1], lambda f: torch.func.hessian(f)(q)):
        ours, expected = (order(lambda q, f=f: f(q, k, v).square().sum()) for f in (
            scaled_dot_product_attention, math_backend))
        close(ours, expected, torch.float64)


q4, k4, v4 = torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 5, 6)
BAD = {
    "query has shape [8], expected at least 2 axes": (q4[0, 0, 0], k4, v4, {}),
    "value has shape [5, 6], expected at least 3 axes": (q4, k4, v4[0, 0], {"enable_gqa": True}),
    "key has shape [2, 2, 5, 8], expected first axes that broadcast with [2, 4]": (q4, k4[:, :2], v4[:, :2], {}),
    "value has shape [2, 2, 5, 6], expected first axes that broadcast with [2, 4]": (q4, k4, v4[:, :2], {}),
    "key has shape [3, 4, 5, 8], expected first axes": (q4, torch.zeros(3, 4, 5, 8), v4, {}),
    "key has shape [2, 3, 5, 8], expected a number of heads that": (q4, k4[:, :3], v4[:, :3], {"enable_gqa": True}),
    "value has shape [2, 3, 5, 6], expected a number of heads": (q4, k4, v4[:, :3], {"enable_gqa": True}),
    "expected a number of heads that divides the 2": (q4[:, :2], k4, v4, {"enable_gqa": True}),
    "expected a number of heads that divides the 1": (q4[:, :1], k4, v4, {"enable_gqa": True, "attn_mask": bools(5)}),
    "key has shape [2, 4, 5, 7], expected a last axis of 8 as query": (q4, k4[..., :7], v4, {}),
    "key has shape [2, 4, 5, 1], expected a last axis of 0": (q4[..., :0], k4[..., :1], v4, {}),
    "value has shape [2, 4, 4, 6], expected 5 rows as key": (q4, k4, v4[:, :, :4], {}),
    "value has shape [2, 4, 1, 6], expected 5 rows": (q4, k4, v4[:, :, :1], {"attn_mask": bools(3, 5)}),
    "key has dtype torch.float64, expected torch.float32 as query": (q4, k4.double(), v4, {}),
    "query has dtype torch.int64": (q4.long(), k4.long(), v4.long(), {}),
    "attn_mask has dtype torch.int32, expected torch.bool, torch.float32 or torch.float32 as query":
        (q4, k4, v4, {"attn_mask": torch.zeros(3, 5, dtype=torch.int32)}),
    "attn_mask has dtype torch.float64": (q4, k4, v4, {"attn_mask": torch.zeros(3, 5, dtype=torch.float64)}),
    "attn_mask has dtype torch.bfloat16": (q4, k4, v4, {"attn_mask": torch.zeros(1, 1, 3, 5).bfloat16()}),
    "attn_mask has shape [3, 4], expected one that broadcasts to [2, 4, 3, 5]":
        (q4, k4, v4, {"attn_mask": bools(3, 4)}),
    "attn_mask has shape [1, 1, 1, 3, 5], expected": (q4, k4, v4, {"attn_mask": bools(1, 1, 1, 3, 5)}),
    "attn_mask has shape [2, 4, 3, 5], expected one that broadcasts to [2, 1, 3, 5]":
        (q4[:, :1], k4[:, :1], v4, {"attn_mask": bools(2, 4, 3, 5)}),
    "attn_mask has shape [3, 5], expected one that broadcasts to [2, 4, 1, 5]":
        (q4[:, :, :1], k4, v4, {"attn_mask": bools(3, 5)}),
    "attn_mask has shape [4, 5], expected [3, 5]": (q4, k4, v4, {"attn_mask": causal_lower_right(4, 5)}),
    "is_causal is True, expected False": (q4, k4, v4, {"attn_mask": bools(1, 1, 3, 5), "is_causal": True}),
    "is_causal is True": (q4, k4, v4, {"attn_mask": causal_upper_left(3, 5), "is_causal": True}),
    "dropout_p is 1.5": (q4, k4, v4, {"dropout_p": 1.5}),
    "query is of type list, expected a tensor": ([1.0], k4, v4, {}),
    "key is of type ndarray, expected a tensor": (q4, k4.numpy(), v4, {}),
    "attn_mask is of type list": (q4, k4, v4, {"attn_mask": [True]}),
    "query is a sparse_coo tensor": (q4.to_sparse(), k4, v4, {}),
}


@pytest.mark.parametrize("message", BAD)
def test_what_pytorch_refuses_is_refused_by_name(message):
    q, k, v, options = BAD[message]
    with pytest.raises(Exception):  # whatever PyTorch raises
        math_backend(q, k, v, **options)
    with pytest.raises(heed.InvalidArgument) as error:
        scaled_dot_product_attention(q, k, v, **options)
    assert message in str(error.value) and "\n" not in str(error.value)


def nested():
    x = torch.nested.nested_tensor([torch.randn(5, 2, 8), torch.randn(3, 2, 8)], layout=torch.jagged)
    return x.transpose(1, 2)


def test_nested_tensors_are_refused():
    with pytest.raises(heed.InvalidArgument, match="nested tensor"):
        scaled_dot_product_attention(*[nested()] * 3)
    strided = torch.nested.nested_tensor([torch.randn(2, 5, 8)], layout=torch.strided)
    for arguments in ((strided, strided, strided), (q4, strided, strided)):
        with pytest.raises(heed.InvalidArgument, match="is a nested tensor"):
            scaled_dot_product_attention(*arguments)


class Graphs:
    """A backend that keeps the names of each graph's functions."""

    def __init__(self):
        torch.compiler.reset()
        self.all = []

    def __call__(self, module, example_inputs):
        self.all.append([str(node.target) for node in module.graph.nodes if node.op.startswith("call")])
        return torch._dynamo.lookup_backend("aot_eager")(module, example_inputs)

    def of_heed(self):
        return ["heed.attention.default" in graph for graph in self.all]


def test_compiled_without_a_graph_break():
    graphs = Graphs()
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, dynamic=True, backend=graphs)
    counts = []
    for L, batch in ((6, (2, 3)), (7, (4, 3))):
        q, k, v = inputs(L, batch=batch)
        for options in ({}, {"is_causal": True, "scale": 0.3}, {"attn_mask": bools(9)}, {"dropout_p": 0.5}):
            o = compiled(q, k, v, **options)
            assert "dropout_p" in options or torch.allclose(o, math_backend(q, k, v, **options))
            assert all(x.isfinite().all() for x in torch.autograd.grad(o.sum(), (q, k, v)))
        counts.append(len(graphs.all))
    assert counts[0] == counts[1]  # other sizes run in the same graphs
    q, k, v, mask = leaf((2, 3, 2, 6, E)), leaf((2, 1, 2, 9, E)), leaf((3, 2, 9, EV)), leaf((2, 1, 1, 6, 1))
    close(compiled(q, k, v, mask), math_backend(q, k, v, mask), q.dtype)
    for sequences, size in ((1, E), (2, 0)):  # errors that only a call with data finds
        q, k, v = leaf((2, 3, 6, size)), leaf((2, 3, 9, size)), leaf((sequences, 3, 9, EV))
        close(compiled(q, k, v), math_backend(q, k, v), q.dtype)
    assert all(graphs.of_heed())
