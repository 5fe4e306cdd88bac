# heed.torch.MultiheadAttention against torch.nn.MultiheadAttention: results, gradients, state, and the choice of side.
import copy
import itertools
import pickle

import pytest

torch = pytest.importorskip("torch")

from test_torch_sdpa import TOLERANCE, Calls, wide  # noqa: E402
from torch import nn  # noqa: E402

import heed  # noqa: E402
from heed.torch import MultiheadAttention  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:Support for mismatched", "ignore:The PyTorch API of nested tensors", "ignore:.*nested_tensor"
)
N, L, S, E, HEADS = 2, 3, 5, 8, 2
OPTIONS = ("bias", "add_bias_kv", "add_zero_attn", "batch_first", "other_sizes")
CONSTRUCTORS = [dict(zip(OPTIONS, flags)) for flags in itertools.product((True, False), repeat=len(OPTIONS))]
NAMES = ["-".join(name for name in OPTIONS if options[name]) or "none" for options in CONSTRUCTORS]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(20260801)


def modules(dtype=torch.float64, other_sizes=False, **options):
    """PyTorch's module with random parameters, and heed's with the same."""
    if other_sizes:
        options |= {"kdim": 6, "vdim": 7}
    theirs = nn.MultiheadAttention(E, HEADS, dtype=dtype, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = MultiheadAttention(E, HEADS, dtype=dtype, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def sequences(module, length, width, batch=N):
    lead = (length,) if batch is None else (batch, length) if module.batch_first else (length, batch)
    return torch.randn((*lead, width), dtype=module.out_proj.weight.dtype).requires_grad_()


def close(got, expected, dtype):
    assert got.shape == expected.shape and got.dtype == dtype
    bound = 20 * TOLERANCE[dtype] * max(1, expected.abs().max().item())
    torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=bound)


def check(theirs, ours, inputs, on_heed=True, **options):
    """Results and all gradients are PyTorch's; heed's operator runs or not."""
    inputs = list(inputs)
    masks = [x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    distinct = list({id(x): x for x in inputs}.values())
    dtype = inputs[0].dtype
    results = []
    for module in (ours, theirs):
        with Calls() as seen:
            o, weights = module(*inputs, need_weights=False, **options)
        assert weights is None and len(seen.calls) == (module is ours and on_heed)
        do = torch.ones_like(o).cumsum(0).cos()
        wanted = [*distinct, *module.parameters(), *masks]
        results.append([o, *torch.autograd.grad(o, wanted, do, materialize_grads=True)])
    for got, expected in zip(*results, strict=True):
        close(got, expected, dtype)
    return o


def masks(dtype, batch=N, queries=L, keys=S):
    """Every kind of key_padding_mask with every kind of attn_mask; of each bool kind some row is all hidden."""
    lead = () if batch is None else (batch,)
    padding = torch.rand(*lead, keys) < 0.4
    padding[..., -1] = True
    pairs = torch.rand(queries, keys) < 0.4
    pairs[1] = True
    heads = torch.rand((batch or 1) * HEADS, queries, keys) < 0.4

    def floats(*shape):
        return torch.randn(shape, dtype=dtype).masked_fill(torch.rand(shape) < 0.2, -torch.inf).requires_grad_()

    paddings = (None, padding, torch.ones_like(padding), floats(*padding.shape))
    return itertools.product(paddings, (None, pairs, heads, floats(*pairs.shape), floats(*heads.shape)))


@pytest.mark.parametrize("options", CONSTRUCTORS, ids=NAMES)
def test_results_and_gradients(options):
    theirs, ours = modules(**options)
    query = sequences(theirs, L, E)
    key, value = sequences(theirs, S, theirs.kdim), sequences(theirs, S, theirs.vdim)
    for padding, mask in masks(query.dtype):
        check(theirs, ours, (query, key, value), key_padding_mask=padding, attn_mask=mask)
    if theirs.kdim == theirs.vdim:
        check(theirs, ours, (query, key, key), key_padding_mask=torch.rand(N, S) < 0.4)
    if theirs.kdim == theirs.vdim == E:
        check(theirs, ours, (query, query, query), attn_mask=torch.rand(N * HEADS, L, L) < 0.4)
        check(theirs, ours, (query, query, sequences(theirs, L, E)))


@pytest.mark.parametrize("options", CONSTRUCTORS, ids=NAMES)
def test_causal_hint(options):
    theirs, ours = modules(**options)
    for queries, keys in ((S, S), (L, S), (S, L)):
        inputs = [sequences(theirs, n, m) for n, m in ((queries, E), (keys, theirs.kdim), (keys, theirs.vdim))]
        mask = torch.ones(queries, keys, dtype=torch.bool).triu(1)
        additive = torch.zeros(queries, keys, dtype=torch.float64).masked_fill(mask, -torch.inf)
        below = torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)
        for padding, attn_mask in itertools.product((None, torch.rand(N, keys) < 0.4), (mask, additive, below)):
            check(theirs, ours, inputs, key_padding_mask=padding, attn_mask=attn_mask, is_causal=True)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("other_sizes", [True, False])
def test_one_sequence_without_a_batch_axis(batch_first, other_sizes):
    theirs, ours = modules(batch_first=batch_first, other_sizes=other_sizes, add_bias_kv=True)
    inputs = [sequences(theirs, n, m, None) for n, m in ((L, E), (S, theirs.kdim), (S, theirs.vdim))]
    for padding, mask in masks(torch.float64, None):
        check(theirs, ours, inputs, key_padding_mask=padding, attn_mask=mask)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_dtypes(dtype):
    """16 bits against PyTorch in float64, since PyTorch rounds at other places."""
    theirs, ours = modules(dtype, batch_first=True)
    query, key = sequences(ours, L, E), sequences(ours, S, E)
    theirs = theirs.double()
    for padding, mask in masks(dtype):
        o = ours(query, key, key, padding, False, mask)[0]
        expected = theirs(wide(query), wide(key), wide(key), wide(padding), False, wide(mask))[0]
        close(o, expected, dtype)
    with torch.autocast("cpu", torch.bfloat16):
        for module in (modules(torch.float32, batch_first=True)[1], theirs.float()):
            o = module(query.float(), key.float(), key.float(), need_weights=False)[0]
            assert o.dtype == torch.bfloat16


def test_masks_reach_heed_as_they_are():
    _, ours = modules(batch_first=True)
    x = sequences(ours, L, E)
    padding, pairs = torch.rand(N, L) < 0.4, torch.rand(L, L) < 0.4
    floats = [torch.zeros(m.shape, dtype=torch.float64) for m in (padding, pairs)]
    causal = torch.ones(L, L, dtype=torch.bool).triu(1)
    with Calls() as seen:
        for mask, other, hint in ((padding, None, 0), (padding, pairs, 0), (floats[0], None, 0), (padding, causal, 1),
                                  (None, causal, 1), (None, pairs, 0), (padding, floats[1], 0), floats + [0]):
            assert ours(x, x, x, mask, False, other, is_causal=bool(hint))[0].shape == x.shape
    shapes = [[tuple(a.shape) for a in args[3:] if isinstance(a, torch.Tensor)] for args in seen.calls]
    by_key, by_pair = (N, 1, 1, L), (1, 1, L, L)
    padded = [by_pair, (N, L), (N, L)]
    assert shapes == [[by_key], padded, [by_key], [by_key], [], [by_pair], [by_pair, by_key], [(N, 1, L, L)]]
    assert [args[5] for args in seen.calls] == [False, False, False, True, True, False, False, False]
    for args in seen.calls:  # one product for q, k and v, and no copy of it
        assert len({a.untyped_storage().data_ptr() for a in args[:3]}) == 1


@pytest.mark.parametrize("options", CONSTRUCTORS, ids=NAMES)
def test_state_and_construction(options):
    theirs, ours = modules(**options)
    assert list(ours.state_dict()) == list(theirs.state_dict()) and isinstance(ours, nn.MultiheadAttention)
    back = modules(**options)[0]
    back.load_state_dict(ours.state_dict())
    for other in (back, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        for name, value in theirs.state_dict().items():
            assert torch.equal(other.state_dict()[name], value)
    sizes = {"kdim": 6, "vdim": 7} if options["other_sizes"] else {}
    options = {name: value for name, value in options.items() if name != "other_sizes"} | sizes
    initial = []
    for kind in (nn.MultiheadAttention, MultiheadAttention):
        torch.manual_seed(7)
        initial.append(kind(E, HEADS, **options).state_dict())
    assert all(torch.equal(initial[0][name], initial[1][name]) for name in initial[0])


def test_a_module_converted_in_place():
    layer = nn.TransformerEncoderLayer(E, HEADS, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    x = torch.randn(N, S, E, dtype=torch.float64)
    padding = torch.tensor([[False] * 5, [False, False, True, True, True]])
    causal = nn.Transformer.generate_square_subsequent_mask(S, dtype=torch.float64)
    arguments = [(x,), (x, None, padding), (x, causal, padding, True), (x, causal)]
    expected = [layer(*args) for args in arguments]
    layer.self_attn.__class__ = MultiheadAttention
    for args, o in zip(arguments, expected):
        with Calls() as seen:
            close(layer(*args), o, torch.float64)
        assert len(seen.calls) == 1
    layer.eval()
    with torch.no_grad():  # where PyTorch would not call its own module
        for args, o in zip(arguments, expected):
            with Calls() as seen:
                close(layer(*args), o, torch.float64)
            assert len(seen.calls) == 1


def test_encoders_in_eval_mode_run_on_heed():
    layer = nn.TransformerEncoderLayer(E, HEADS, 16, batch_first=True, dtype=torch.float64).eval()
    x = torch.randn(N, S, E, dtype=torch.float64)
    padding = torch.tensor([[False] * 5, [False, False, True, True, True]])
    with torch.no_grad():
        expected = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)(x, src_key_padding_mask=padding)
        layer.self_attn.__class__ = MultiheadAttention
        with pytest.warns(UserWarning, match="_qkv_same_embed_dim"):  # no nested tensors
            encoder = nn.TransformerEncoder(layer, 2)
        with Calls() as seen:
            close(encoder(x, src_key_padding_mask=padding), expected, torch.float64)
        assert len(seen.calls) == 2
        compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
        close(compiled(x, src_key_padding_mask=padding), expected, torch.float64)


def test_what_pytorch_calls_later_still_works():
    """Initialising again, copies and pickles, for weights in one and apart."""
    for sizes in ({}, {"kdim": 6, "vdim": 7}):
        module = MultiheadAttention(E, HEADS, **sizes)
        torch.manual_seed(3)
        module._reset_parameters()
        theirs = nn.MultiheadAttention(E, HEADS, **sizes)
        torch.manual_seed(3)
        theirs._reset_parameters()
        for name, value in theirs.state_dict().items():
            assert "out_proj" in name or torch.equal(module.state_dict()[name], value)
        x = [torch.randn(5, 2, width) for width in (E, sizes.get("kdim", E), sizes.get("vdim", E))]
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            for need_weights in (False, True):
                assert torch.equal(other(*x, need_weights=need_weights)[0], module(*x, need_weights=need_weights)[0])


@pytest.mark.parametrize("average", [True, False])
def test_weights_are_pytorchs(average):
    theirs, ours = modules(batch_first=True)
    x = sequences(ours, L, E)
    for training in (True, False):
        padding = torch.tensor([[False] * L, [False, True, True]])
        with Calls() as seen:
            got = ours.train(training)(x, x, x, padding, average_attn_weights=average)
        expected = theirs.train(training)(x, x, x, padding, average_attn_weights=average)
        assert not seen.calls and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert got[1].shape == ((N, L, L) if average else (N, HEADS, L, L))


def test_dropout():
    ours = MultiheadAttention(E, HEADS, dropout=0.5, batch_first=True)
    x = sequences(ours, 60, E)

    def run(seed):
        torch.manual_seed(seed)
        return ours(x, x, x, need_weights=False)[0]

    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))
    mean = torch.stack([run(seed) for seed in range(200)]).mean(0)
    ours.eval()
    assert torch.equal(run(1), run(2))
    assert (mean - run(1)).abs().max() < 0.25 * run(1).abs().max()
    everything = MultiheadAttention(E, HEADS, dropout=1.0, batch_first=True)
    assert torch.equal(everything(x, x, x, need_weights=False)[0], everything.out_proj.bias.expand(N, 60, E))


def test_eval_mode_runs_on_heed():
    theirs, ours = (module.eval() for module in modules(batch_first=True))
    x = sequences(ours, L, E).detach()
    with torch.no_grad(), Calls() as seen:
        close(ours(x, x, x, need_weights=False)[0], theirs(x, x, x, need_weights=False)[0], torch.float64)
    assert len(seen.calls) == 1


def test_what_pytorch_runs():
    theirs, ours = (module.eval() for module in modules(torch.float32, batch_first=True))
    nested = torch.nested.nested_tensor([torch.randn(3, E), torch.randn(2, E)])
    with torch.no_grad(), Calls() as seen:
        for x, y in zip(ours(nested, nested, nested, need_weights=False)[0].unbind(),
                        theirs(nested, nested, nested, need_weights=False)[0].unbind(), strict=True):
            assert torch.equal(x, y)
        x = torch.randn(N, L, E, device="meta")
        assert ours.to("meta")(x, x, x, need_weights=False)[0].shape == (N, L, E)
    assert not seen.calls


x3 = torch.zeros(N, L, E)
REFUSED = {
    "axes": (x3[0, 0], x3, x3, {}),
    "key axes": (x3, x3[0], x3[0], {}),
    "width": (x3[..., :6], x3[..., :6], x3[..., :6], {}),
    "key and value": (x3, x3, x3[:, :2], {}),
    "batch": (x3, x3[:1], x3[:1], {}),
    "padding shape": (x3, x3, x3, {"key_padding_mask": torch.zeros(N, L + 1) > 0}),
    "padding of one": (x3, x3, x3, {"key_padding_mask": torch.zeros(1, L) > 0}),
    "padding axes": (x3, x3, x3, {"key_padding_mask": torch.zeros(L) > 0}),
    "padding dtype": (x3, x3, x3, {"key_padding_mask": torch.zeros(N, L, dtype=torch.int32)}),
    "mask shape": (x3, x3, x3, {"attn_mask": torch.zeros(1, L) > 0}),
    "mask of sequences": (x3, x3, x3, {"attn_mask": torch.zeros(N, L, L) > 0}),
    "mask axes": (x3, x3, x3, {"attn_mask": torch.zeros(N, HEADS, L, L) > 0}),
    "mask dtype": (x3, x3, x3, {"attn_mask": torch.zeros(L, L, dtype=torch.int32)}),
    "mask of float64": (x3, x3, x3, {"attn_mask": torch.zeros(L, L, dtype=torch.float64)}),
    "hint alone": (x3, x3, x3, {"is_causal": True}),
    "dtype": (x3.double(), x3.double(), x3.double(), {}),
    "complex": (x3 + 0j, x3 + 0j, x3 + 0j, {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_pytorch_refuses_is_refused_in_its_words(name):
    *inputs, options = REFUSED[name]
    theirs, ours = modules(torch.float32, batch_first=True)
    with pytest.raises(Exception) as expected:  # whatever PyTorch raises
        theirs(*inputs, need_weights=False, **options)
    with pytest.raises(expected.type) as error:
        ours(*inputs, need_weights=False, **options)
    assert not isinstance(error.value, heed.InvalidArgument)
    assert str(error.value) == str(expected.value) or name == "dtype"  # there the words are those of some kernel


def test_compiled_without_a_graph_break():
    theirs, ours = modules(torch.float64, batch_first=True)
    torch.compiler.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x = sequences(ours, L, E)
    for padding, mask in ((None, None), (torch.rand(N, L) < 0.4, torch.rand(L, L) < 0.4)):
        o = compiled(x, x, x, padding, False, mask)[0]
        expected = theirs(x, x, x, padding, False, mask)[0]
        close(o, expected, torch.float64)
        close(torch.autograd.grad(o.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0], torch.float64)
