# heed.torch.attention: the bits of the NumPy functions, derivatives, and PyTorch's own checks of an operator.
import math
import os
import subprocess
import sys
from functools import partial

import fresh
import numpy as np
import pytest
from at_once import run_at_once
from test_attention_backward import OPTIONS, problem

torch = pytest.importorskip("torch")

import heed  # noqa: E402
import heed.torch  # noqa: E402
from heed.torch import attention  # noqa: E402

OPTIONS = {**OPTIONS, "mask": {"mask": np.arange(7 * 9).reshape(7, 9) % 3 > 0}}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DIFFERENTIABLE = ("bias", "sinks", "alibi", "log_decay", "relative_bias")


def tensors(options, dtype=None):
    """Options with tensors for arrays, bias in `dtype`."""
    result = {}
    for name, value in options.items():
        if isinstance(value, tuple) and name == "segments":
            value = tuple(torch.from_numpy(np.ascontiguousarray(x)) for x in value)
        elif isinstance(value, np.ndarray):
            value = torch.from_numpy(np.ascontiguousarray(value))
        if isinstance(value, torch.Tensor) and value.is_floating_point() and dtype is not None:
            value = value.to(dtype)
        result[name] = value
    return result


def to_numpy(x):
    return x.detach().to(torch.float64).numpy()


def leaves(*shapes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def qkv(B=2, Tq=5, Tk=6, Hq=4, Hkv=2, D=8, Dv=7, **rest):
    return leaves((B, Tq, Hq, D), (B, Tk, Hkv, D), (B, Tk, Hkv, Dv), **rest)


# --- the same bits as from NumPy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_bits_of_the_numpy_functions(rng, name, dtype):
    if dtype == torch.bfloat16:
        pytest.importorskip("ml_dtypes")
    q, k, v, do, dlse = (torch.from_numpy(x) for x in problem(rng))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v, do, dlse = q.to(dtype), k.to(dtype), v.to(dtype), do.to(dtype), dlse.to(wide)
    options = tensors(OPTIONS[name])
    wanted = [x for x in (q, k, v, *(options.get(n) for n in DIFFERENTIABLE)) if isinstance(x, torch.Tensor)]
    o, lse = heed.attention(q, k, v, return_lse=True, **options)
    g = heed.attention_backward(do, q, k, v, o, lse, dlse=dlse, need_dbias="bias" in options, **options)
    expected = [g.dq, g.dk, g.dv]
    expected += [getattr(g, f"d{n}") for n in DIFFERENTIABLE if isinstance(options.get(n), torch.Tensor)]

    for x in wanted:
        x.requires_grad_()
    got_o, got_lse = attention(q, k, v, return_lse=True, **options)
    assert got_o.dtype == dtype and got_lse.dtype == wide
    np.testing.assert_array_equal(to_numpy(got_o), o.astype(np.float64))
    np.testing.assert_array_equal(to_numpy(got_lse), lse)
    for x, got, want in zip(wanted, torch.autograd.grad((got_o, got_lse), wanted, (do, dlse)), expected, strict=True):
        assert got.dtype == x.dtype and got.shape == x.shape
        np.testing.assert_array_equal(to_numpy(got), np.asarray(want, np.float64))


def test_packed_sequences(rng):
    q, k, v = (torch.from_numpy(rng.standard_normal((11, 2, 4))).requires_grad_() for _ in range(3))
    cu = torch.tensor([0, 4, 4, 11], dtype=torch.int32)
    o, lse = attention(q, k, v, causal=True, cu_seqlens_q=cu, return_lse=True)
    assert o.shape == (11, 2, 4) and lse.shape == (2, 11)
    parts = [attention(q[a:b][None], k[a:b][None], v[a:b][None], causal=True)[0] for a, b in ((0, 4), (4, 11))]
    assert torch.equal(o, torch.cat(parts))
    assert torch.autograd.gradcheck(
        lambda *x: attention(*x, causal=True, cu_seqlens_q=cu, return_lse=True), (q, k, v)
    )
    o4, lse4 = attention(q[None], k[None], v[None], causal=True, cu_seqlens_q=[0, 4, 4, 11], return_lse=True)
    assert torch.equal(o4[0], o) and torch.equal(lse4, lse)


def test_strided_tensors_are_read_in_place_and_others_copied(rng):
    fused = torch.from_numpy(rng.standard_normal((2, 6, 3, 4, 8)))  # a projection that holds q, k and v
    q, k, v = fused.unbind(2)
    expected = attention(q.contiguous(), k.contiguous(), v.contiguous())
    assert torch.equal(attention(q, k, v), expected)
    turned = q.transpose(1, 3).contiguous().transpose(1, 3)
    assert torch.equal(attention(turned, k, v), expected)
    leaf = turned.detach().requires_grad_()
    assert torch.equal(
        torch.autograd.grad(attention(leaf, k, v).sum(), leaf)[0],
        torch.autograd.grad(attention(p := q.detach().requires_grad_(), k, v).sum(), p)[0],
    )
    # The gradient of a sum is one number with strides of zero.
    leaf = q.detach().requires_grad_()
    ones = torch.autograd.grad(attention(leaf, k, v), leaf, torch.ones_like(expected))[0]
    assert torch.equal(torch.autograd.grad(attention(leaf, k, v).sum(), leaf)[0], ones)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_first(dtype):
    q, k, v = qkv(dtype=dtype)
    operator = torch.ops.heed.attention
    expected, lse = operator(q, k, v, causal=True)
    grads = torch.autograd.grad(expected.sum(), (q, k, v))
    swapped = [x.detach().transpose(1, 2).clone().requires_grad_() for x in (q, k, v)]
    o, lse_swapped = operator(*swapped, True, causal=True)
    assert torch.equal(o.transpose(1, 2), expected) and torch.equal(lse, lse_swapped)
    assert o.transpose(1, 2).is_contiguous()
    for got, want in zip(torch.autograd.grad(o.sum(), swapped), grads):
        assert torch.equal(got.transpose(1, 2), want)


# --- derivatives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
def test_gradcheck_of_every_option(rng, name):
    q, k, v, _, _ = (torch.from_numpy(x) for x in problem(rng, shape=(2, 7, 9, 4, 2, 3, 2)))
    options = tensors(OPTIONS[name], torch.float64)
    names = [n for n in DIFFERENTIABLE if isinstance(options.get(n), torch.Tensor)]
    if name.startswith("sinks") or "-inf" in str(options.get("bias")):
        for n in names:  # finite differences of an infinity are none
            options[n] = torch.nan_to_num(options[n], neginf=-30.0)
    inputs = [x.requires_grad_() for x in (q, k, v, *(options.pop(n) for n in names))]

    def function(q, k, v, *rest):
        o, lse = attention(q, k, v, return_lse=True, **options, **dict(zip(names, rest)))
        return o, torch.where(lse.isinf(), 0.0, lse)

    assert torch.autograd.gradcheck(function, inputs, fast_mode=len(names) > 0)


@pytest.mark.parametrize("seed", range(40))
def test_gradcheck_of_combinations(seed):
    rng = np.random.default_rng(seed)
    B, Hkv, group, Tq, Tk = (int(rng.integers(1, n)) for n in (3, 3, 3, 7, 8))
    Hq = Hkv * group
    inputs = leaves((B, Tq, Hq, 3), (B, Tk, Hkv, 3), (B, Tk, Hkv, 2), seed=seed)
    options, names = {"causal": bool(rng.integers(2)), "align": str(rng.choice(["top_left", "bottom_right"]))}, []
    if rng.integers(2):
        options["window"] = tuple(int(n) for n in rng.integers(-1, 4, 2))
    if rng.integers(2):
        options["key_lengths"] = rng.integers(0, Tk + 1, B).tolist()
    if rng.integers(2):
        options["dropout"], options["seed"] = 0.4, int(rng.integers(2**63)) * 2 + 1
    if rng.integers(2):
        options["softcap"] = 2.0
    if rng.integers(2):
        options["chunk"] = int(rng.integers(1, 5))
    if rng.integers(2):
        options["mask"] = torch.from_numpy(rng.integers(0, 4, (B, 1, Tq, Tk)) > 0)
    for name, shape in (("bias", (1, Hq, Tq, Tk)), ("sinks", (Hq,)), ("alibi", (Hq,))):
        if rng.integers(2):
            names.append(name)
            inputs += leaves(shape, seed=seed + 1)
    if options["causal"] and rng.integers(2):
        names.append("log_decay")
        inputs += tuple((-x.detach().abs()).requires_grad_() for x in leaves((B, Tk, Hq), seed=seed + 2))

    def function(q, k, v, *rest):
        o, lse = attention(q, k, v, return_lse=True, **options, **dict(zip(names, rest)))
        return o, torch.where(lse.isinf(), 0.0, lse)

    assert torch.autograd.gradcheck(function, inputs)


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the operators that run below autograd."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append((str(function), args))
        return function(*args, **(kwargs or {}))

    def of(self, name):
        return [args for function, args in self.calls if function == f"heed.{name}.default"]


def test_only_needed_gradients_are_computed():
    q, k, v = qkv()
    bias, sinks = leaves((1, 4, 5, 6), (4,))
    o = attention(q.detach(), k, v.detach(), bias=bias.detach(), sinks=sinks)
    with Calls() as record:
        o.sum().backward()
    (arguments,) = record.of("attention_backward")
    assert list(arguments[7]) == [False, True, False, False, True, False, False, False]
    assert k.grad is not None and sinks.grad is not None and q.grad is None and bias.grad is None


def test_no_graph_without_a_gradient():
    q, k, v = qkv()
    assert attention(q, k, v).requires_grad
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad
    with torch.inference_mode():
        assert attention(q, k, v).is_inference()
    assert not attention(q.detach(), k.detach(), v.detach()).requires_grad


def test_gradient_through_lse_alone():
    q, k, v = qkv()
    _, lse = attention(q, k, v, return_lse=True)
    got = torch.autograd.grad(lse.square().sum(), (q, k))
    logits = torch.einsum("bihgd,bjhd->bhgij", q.unflatten(2, (2, 2)), k) / math.sqrt(8)
    expected = torch.autograd.grad(logits.logsumexp(-1).square().sum(), (q, k))
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def allocated(function):
    """(what the function returns, bytes that PyTorch allocated for it)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = function()
    return result, sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())


def test_nothing_is_allocated_beyond_results():
    q, k, v = qkv(Tq=200, Tk=300, dtype=torch.float32)
    k.requires_grad_(False)
    attention(q, k, v, causal=True).sum().backward()
    do = torch.ones(2, 200, 4, 7)
    (o, lse), forward = allocated(lambda: attention(q, k, v, causal=True, return_lse=True))
    assert forward == o.nbytes + lse.nbytes
    _, backward = allocated(lambda: torch.autograd.grad(o, (q, v), do))
    assert backward == q.nbytes + v.nbytes


# --- what PyTorch does with operators ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["plain", "many", "heads first", "f32"])
def test_opcheck(case):
    q, k, v = qkv(dtype=torch.float32 if case == "f32" else torch.float64)
    bias, sinks, alibi, log_decay, relative_bias = leaves((2, 4, 5, 6), (4,), (4,), (2, 6, 4), (4, 3))
    arguments, options = (q, k, v), {}
    if case == "many":
        arguments += (False, 0.3, True, "bottom_right", [3, 0], None, bias, sinks, alibi, 5.0, torch.tensor([4, 6]))
        options = {"log_decay": log_decay, "relative_bias": relative_bias}
    if case == "heads first":
        arguments = tuple(x.detach().transpose(1, 2).requires_grad_() for x in arguments) + (True,)
    torch.library.opcheck(torch.ops.heed.attention.default, arguments, options)


def test_opcheck_of_the_backward_operator():
    q, k, v = (x.detach() for x in qkv())
    bias = torch.randn(1, 4, 5, 6, dtype=torch.float64)
    o, lse = torch.ops.heed.attention(q, k, v, bias=bias)
    for needed in ([True, False, True, True] + [False] * 4, [False] * 3 + [True] + [False] * 4):
        arguments = (torch.randn_like(o), torch.randn_like(lse), q, k, v, o, lse, needed)
        torch.library.opcheck(torch.ops.heed.attention_backward.default, arguments, {"bias": bias})


def check_compiled(function, compiled, lengths):
    for length in lengths:
        inputs = qkv(Tq=length, Tk=length + 1, seed=length) + leaves((1, 4, length, length + 1), seed=1)
        got, expected = compiled(*inputs), function(*inputs)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        for a, b in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(expected, inputs)):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def trained(q, k, v, bias):
    scale = q.shape[-1] ** -0.5
    o, lse = attention(q * 2, k, v, causal=True, bias=bias, window=(3, 0), scale=scale, return_lse=True)
    return o.sin().sum() + lse.sum()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_without_graph_breaks_for_all_lengths(backend):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(trained, fullgraph=True, dynamic=True, backend=backend)
    check_compiled(trained, compiled, (5, 9, 12))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_compile_with_dropout_and_lists():
    torch._dynamo.reset()
    q, k, v = (x.detach() for x in qkv())

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(q, k, v):
        return attention(q, k, v, dropout=0.5, key_lengths=[3, 5], align=torch.tensor([1, 2]))

    torch.manual_seed(1)
    first, second = compiled(q, k, v), compiled(q, k, v)
    torch.manual_seed(1)
    assert torch.equal(compiled(q, k, v), first) and not torch.equal(first, second)


def test_dropout_takes_its_seed_from_torch():
    q, k, v = (x.detach() for x in qkv(Tq=30, Tk=40))
    torch.manual_seed(3)
    a, b = attention(q, k, v, dropout=0.5), attention(q, k, v, dropout=0.5)
    torch.manual_seed(3)
    assert torch.equal(attention(q, k, v, dropout=0.5), a) and not torch.equal(a, b)
    state = torch.get_rng_state()
    attention(q, k, v)
    attention(q, k, v, dropout=0.5, seed=2**64 - 1)
    assert torch.equal(torch.get_rng_state(), state)
    given = heed.attention(q, k, v, dropout=0.5, seed=2**64 - 1)
    np.testing.assert_array_equal(attention(q, k, v, dropout=0.5, seed=2**64 - 1).numpy(), given)


def test_autocast():
    q, k, v = qkv(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, lse = attention(q, k, v, return_lse=True)
        wide = attention(*(x.double() for x in (q, k, v)))
    assert o.dtype == torch.bfloat16 and lse.dtype == torch.float32 and wide.dtype == torch.float64
    assert torch.equal(o, attention(*(x.bfloat16() for x in (q, k, v))))
    o.float().sum().backward()
    assert q.grad.dtype == torch.float32


def test_vmap_and_per_sample_gradients():
    x, y, z = (t.detach() for t in leaves((3, 2, 5, 4, 8), (3, 2, 6, 2, 8), (2, 6, 2, 7)))
    bias = torch.randn(3, 4, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(
        torch.vmap(lambda a, b: attention(a, b, z, causal=True))(x, y),
        torch.stack([attention(a, b, z, causal=True) for a, b in zip(x, y)]), rtol=0, atol=0,
    )
    torch.testing.assert_close(
        torch.vmap(lambda a, b: attention(a, y[0], z, bias=b[None]), in_dims=(0, 0))(x, bias),
        torch.stack([attention(a, y[0], z, bias=b[None]) for a, b in zip(x, bias)]), rtol=0, atol=0,
    )
    loss = lambda a, b: attention(a, b, z, causal=True, return_lse=True)[0].sin().sum()  # noqa: E731
    got = torch.vmap(torch.func.grad(loss, argnums=(0, 1)))(x, y)
    for i in range(3):
        a, b = x[i].clone().requires_grad_(), y[i].clone().requires_grad_()
        for mapped, one in zip(got, torch.autograd.grad(loss(a, b), (a, b))):
            assert torch.equal(mapped[i], one)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(lambda a: attention(a, y[0], z, dropout=0.5))(x)
    same = torch.vmap(lambda a: attention(a, y[0], z, dropout=0.5), randomness="same")(x[:1].expand(3, -1, -1, -1, -1))
    assert torch.equal(same[0], same[2])
    other = torch.vmap(lambda a: attention(a, y[0], z, dropout=0.5), randomness="different")(
        x[:1].expand(3, -1, -1, -1, -1))
    assert not torch.equal(other[0], other[2])


def test_activation_checkpointing():
    q, k, v = qkv(Tq=20, Tk=20)

    def function(q):
        return attention(q, k, v, causal=True, dropout=0.3).sin().sum()

    torch.manual_seed(5)
    expected = torch.autograd.grad(function(q), (q, k, v))
    torch.manual_seed(5)
    loss = torch.utils.checkpoint.checkpoint(function, q, use_reentrant=False)
    torch.manual_seed(99)
    for a, b in zip(torch.autograd.grad(loss, (q, k, v)), expected):
        assert torch.equal(a, b)


def test_meta_and_fake_tensors():
    q, k, v = (x.detach().to("meta") for x in qkv(dtype=torch.bfloat16))
    o, lse = attention(q, k, v, return_lse=True)
    assert o.device.type == "meta" and o.shape == (2, 5, 4, 7) and lse.shape == (2, 4, 5) and lse.dtype == torch.float32
    with pytest.raises(heed.InvalidArgument, match="attention: k is on cpu, expected meta as q"):
        attention(q, torch.zeros(2, 6, 2, 8, dtype=torch.bfloat16), v)
    with pytest.raises(heed.InvalidArgument, match="attention: v is on meta, expected cpu as q"):
        attention(torch.zeros(2, 5, 4, 8), torch.zeros(2, 6, 2, 8), v)
    with pytest.raises(heed.InvalidArgument, match="attention: v has dtype torch.float32"):
        attention(q, k, v.float())
    with pytest.raises(heed.InvalidArgument, match="retention: k is on cpu, expected meta as q"):
        heed.torch.retention(q, torch.zeros(q.shape, dtype=q.dtype), v)
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (torch.empty(2, 5, 4, 8, requires_grad=True) for _ in range(3))
        o = attention(q, k, v, causal=True)
        o.sum().backward()
        assert q.grad.shape == q.shape


def test_export():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, causal=True)

    inputs = tuple(x.detach() for x in qkv())
    exported = torch.export.export(Model(), inputs)
    assert torch.equal(exported.module()(*inputs), Model()(*inputs))


# --- threads and processes --------------------------------------------------------------------------------------------


def test_several_python_threads_at_once():
    problems = [qkv(Tq=30 + 7 * i, Tk=40, seed=i, dtype=torch.float32) for i in range(5)]
    expected = [torch.autograd.grad(attention(*p, causal=True).sum(), p) for p in problems]

    def work(offset):
        for i in range(20):
            n = (i + offset) % len(problems)
            grads = torch.autograd.grad(attention(*problems[n], causal=True).sum(), problems[n])
            assert all(torch.equal(a, b) for a, b in zip(grads, expected[n]))

    run_at_once(*(partial(work, offset) for offset in range(4)))


def run_python(code):
    return fresh.python(code, timeout=120)


PROBLEM = """
import os, torch, heed.torch
torch.manual_seed(0)
torch.set_num_threads(2)
q = torch.randn(2, 300, 4, 32, requires_grad=True)
def grad():
    return torch.autograd.grad(heed.torch.attention(q, q, q, causal=True).sum(), q)[0]
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads by /proc")
def test_work_runs_on_the_threads_of_pytorch():
    result = run_python(PROBLEM + """
count = lambda: len(os.listdir("/proc/self/task"))
(torch.randn(2000, 1000).sin().sum() * q).sum().backward()
before = count()
grad()
assert count() == before, (before, count())
for n in (1, 2, 3):
    torch.set_num_threads(n)
    assert torch.equal(grad(), grad())
""")
    assert result.returncode == 0, result.stderr


def test_fork_and_data_loader_workers():
    result = run_python(PROBLEM + """
expected = grad()
o = heed.torch.attention(q, q, q).detach().numpy()
pid = os.fork()
if pid == 0:  # PyTorch's own parallel functions would hang here
    with torch.no_grad():
        os._exit(0 if (heed.torch.attention(q, q, q).numpy() == o).all() else 1)
assert os.waitpid(pid, 0)[1] == 0

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        with torch.no_grad():
            return heed.torch.attention(q, q, q, causal=True)[0]

whole = heed.torch.attention(q, q, q, causal=True)[0].detach()
for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context="fork"):
    assert all(torch.equal(x, whole) for x in batch)
assert torch.equal(grad(), expected)
""")
    assert result.returncode == 0, result.stderr


def test_heed_does_not_import_torch():
    code = ("import sys, heed; heed.alibi_slopes(4); assert 'torch' not in sys.modules and 'transformers' not in "
            "sys.modules")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- arguments --------------------------------------------------------------------------------------------------------


def test_out_and_lists():
    q, k, v = (x.detach() for x in qkv())
    out = torch.full((2, 5, 4, 7), math.nan, dtype=torch.float64)
    result, lse = attention(q, k, v, out=out, return_lse=True, key_lengths=[6, 2], sinks=[0.5] * 4, alibi=[0.1] * 4)
    assert result is out
    o, expected = attention(q, k, v, return_lse=True, key_lengths=torch.tensor([6, 2]), sinks=torch.full((4,), 0.5),
                            alibi=torch.full((4,), 0.1, dtype=torch.float64))
    torch.testing.assert_close(out, o, rtol=1e-12, atol=0)
    assert torch.equal(lse, expected)
    for name, x in (("q", q.clone().requires_grad_()), ("out", out.clone().requires_grad_())):
        given = {"q": q, "out": out, name: x}
        with pytest.raises(heed.InvalidArgument, match=f"attention: {name} requires a gradient"):
            attention(given["q"], k, v, out=given["out"])


BAD = {
    "numpy": (lambda q, k, v: attention(q.numpy(), k, v), r"q is of type ndarray, expected a tensor"),
    "mixed dtypes": (lambda q, k, v: attention(q, k.float(), v), r"k has dtype f32, expected f64"),
    "complex": (lambda q, k, v: attention(q.to(torch.complex128), k, v), r"q has dtype c128"),
    "integers": (lambda q, k, v: attention(q, k, v.int()), r"v has dtype i32"),
    "sparse": (lambda q, k, v: attention(q, k.to_sparse(), v), r"k is a sparse_coo tensor on cpu"),
    "quantized": (
        lambda q, k, v: attention(q, k, torch.quantize_per_tensor(v.float(), 0.1, 0, torch.quint8)),
        r"v is a quantized tensor",
    ),
    "nested": (lambda q, k, v: attention(torch.nested.nested_tensor([q[0]]), k, v), r"q is a nested tensor"),
    "jagged": (
        lambda q, k, v: attention(torch.nested.nested_tensor([q[0]], layout=torch.jagged), k, v),
        r"q is a nested tensor"
    ),
    "rank": (lambda q, k, v: attention(q[0, 0], k, v), r"q has shape \[4, 8\]"),
    "rank of v": (lambda q, k, v: attention(q, k, v[0]), r"v has shape \[6, 2, 7\]"),
    "channels": (lambda q, k, v: attention(q, k[..., :5], v), r"k has shape \[2,6,2,5\], expected \[2,6,2,8\]"),
    "window": (lambda q, k, v: attention(q, k, v, window=(-2, 1)), r"window\[0\] is -2"),
    "window of three": (lambda q, k, v: attention(q, k, v, window=(1, 2, 3)), r"window is"),
    "align": (lambda q, k, v: attention(q, k, v, align="middle"), r"align is 'middle'"),
    "aligns": (lambda q, k, v: attention(q, k, v, align=[1, 2, 3]), r"align has shape \[3\]"),
    "scale": (lambda q, k, v: attention(q, k, v, scale=math.nan), r"scale is nan"),
    "dropout": (lambda q, k, v: attention(q, k, v, dropout=1.5), r"dropout is 1.5"),
    "seed": (lambda q, k, v: attention(q, k, v, dropout=0.5, seed=-1), r"seed is -1"),
    "seed tensor": (
        lambda q, k, v: attention(q, k, v, dropout=0.5, seed=torch.zeros(2, dtype=torch.int64)), r"seed is"
    ),
    "threads": (lambda q, k, v: attention(q, k, v, threads=0), r"threads is 0"),
    "sinks": (lambda q, k, v: attention(q, k, v, sinks="abc"), r"sinks is of type str"),
    "mask": (lambda q, k, v: attention(q, k, v, mask=torch.ones(2, 4, 5, 6)), r"mask has dtype f32"),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case):
    call, message = BAD[case]
    with pytest.raises(heed.InvalidArgument, match="^attention: .*" + message):
        call(*(x.detach() for x in qkv()))


def test_unknown_keyword():
    q, k, v = qkv()
    with pytest.raises(TypeError, match="casual"):
        attention(q, k, v, casual=True)


def test_the_docstring_is_about_pytorch():
    assert "In PyTorch." in attention.__doc__ and "In Python." not in attention.__doc__
    assert "s_ij" in attention.__doc__
