# heed below PyTorch's own operators: the implementations "heed" and "heed-wide" of torch.nn.attention's registry.
import contextlib
import importlib.util
import sys
import threading
import types
import unittest

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from fresh import python  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import attention as registry  # noqa: E402

import heed  # noqa: E402
from heed.torch import provider_stats  # noqa: E402

if not hasattr(registry, "register_flash_attention_impl"):
    pytest.skip("this PyTorch has no registry of attention implementations", allow_module_level=True)

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# Parts of the largest value. 16-bit results are compared with float64 ones on the same numbers.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}
NOTHING = {"forward": 0, "backward": 0, "widened": 0, "declined": {}}

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script"),
    pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching"),
]


@contextlib.contextmanager
def provider(name="heed"):
    registry.activate_flash_attention_impl(name)
    try:
        yield
    finally:
        registry.restore_flash_attention_impl()


@pytest.fixture(autouse=True)
def clean():
    torch.manual_seed(20260801)
    assert registry.current_flash_attention_impl() is None
    yield
    assert registry.current_flash_attention_impl() is None
    assert "heed" not in torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention_for_cpu")


def close(got, expected, bound):
    assert got.shape == expected.shape and got.dtype == expected.dtype
    if got.numel():
        torch.testing.assert_close(got, expected, rtol=0, atol=bound * max(1, expected.abs().max().item()))


def with_and_without(call, name="heed"):
    """Results of `call` on PyTorch's kernels and on heed."""
    torch.manual_seed(7)
    expected = call()
    with provider(name):
        torch.manual_seed(7)
        got = call()
    return got, expected


def same_with_provider(call, name="heed", bound=2e-5):
    """Runs `call` both ways, compares its tensors, and returns the stats."""
    got, expected = with_and_without(call, name)
    for a, b in zip(got, expected, strict=True):
        close(a, b, bound)
    return provider_stats()


# --- the registry -----------------------------------------------------------------------------------------------------


def test_the_import_registers_and_activates_nothing():
    result = python("""
import torch
before = torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention_for_cpu")
assert "heed" not in torch.nn.attention.list_flash_attention_impls()
import heed.torch
assert {"heed", "heed-wide"} <= set(torch.nn.attention.list_flash_attention_impls())
assert torch.nn.attention.current_flash_attention_impl() is None
assert torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention_for_cpu") == before
assert heed.torch.provider_stats() == {"forward": 0, "backward": 0, "widened": 0, "declined": {}}
""")
    assert result.returncode == 0, result.stderr


def test_activation_and_restoration_in_any_order(recwarn):
    q = torch.randn(1, 2, 5, 8)
    registry.restore_flash_attention_impl()  # PyTorch logs a sentence
    for name in ("heed", "heed", "heed-wide", "heed"):
        registry.activate_flash_attention_impl(name)
        assert registry.current_flash_attention_impl() == name and provider_stats() == NOTHING
        F.scaled_dot_product_attention(q, q, q)
        flash(q, q[:, :1].contiguous(), q[:, :1].contiguous())
        assert provider_stats() == {**NOTHING, "forward": 2}
    registry.restore_flash_attention_impl()
    registry.restore_flash_attention_impl()
    F.scaled_dot_product_attention(q, q, q)
    assert provider_stats() == {**NOTHING, "forward": 2}  # of the last activation
    assert not recwarn.list


def test_two_providers():
    q = torch.randn(1, 2, 5, 8)
    calls = []

    def kernel(query, key, value, *args, **kwargs):
        calls.append(args)
        return torch.empty_like(query), query.new_empty(query.shape[:3])

    class Handle:
        def __init__(self):
            self.library = torch.library.Library("aten", "IMPL")
            self.library.impl(flash._schema.name, kernel, "CPU")

        def remove(self):
            self.library = None

    registry.register_flash_attention_impl("test-provider", register_fn=Handle)
    with provider():
        registry.activate_flash_attention_impl("test-provider")
        F.scaled_dot_product_attention(q, q, q)
        assert len(calls) == 1 and provider_stats() == NOTHING
        registry.activate_flash_attention_impl("heed")
        F.scaled_dot_product_attention(q, q, q)
        assert len(calls) == 1 and provider_stats()["forward"] == 1

    other = Handle()  # past the registry
    with provider():
        F.scaled_dot_product_attention(q, q, q)
        flash(q, q, q, 0.5)  # heed passes this on to the kernel below it
        assert len(calls) == 2 and provider_stats()["forward"] == 1
        other.remove()
        F.scaled_dot_product_attention(q, q, q)
        with pytest.raises(heed.Unsupported, match="dropout_p is 0.5.*had another library's kernel"):
            flash(q, q, q, 0.5)
    with pytest.raises(RuntimeError, match="dropout > 0"):
        flash(q, q, q, 0.5)


def test_pytorch_without_the_registry():
    result = python("""
import torch
for name in dir(torch.nn.attention):
    if "flash_attention_impl" in name:
        delattr(torch.nn.attention, name)
import heed.torch
try:
    heed.torch.provider_stats()
except heed.Unsupported as error:
    print(error)
q = torch.randn(1, 4, 2, 8)
heed.torch.attention(q, q, q)
""")
    assert result.returncode == 0, result.stderr
    assert "provider_stats: this PyTorch lacks torch.nn.attention.register_flash_attention_impl" in result.stdout


# --- the operator's contract ------------------------------------------------------------------------------------------


def contiguous(*shape):
    return torch.randn(shape)


def transposed(b, h, t, d):
    return torch.randn(b, t, h, d).transpose(1, 2)


def spaced(b, h, t, d):
    return torch.randn(b, h, t, 2 * d)[..., :d]


MASKS = {
    "none": lambda b, h, t, s: {},
    "causal": lambda b, h, t, s: {"is_causal": True},
    "scaled": lambda b, h, t, s: {"scale": 0.3},
    "2-D mask": lambda b, h, t, s: {"attn_mask": torch.randn(t, s)},
    "4-D mask": lambda b, h, t, s: {"attn_mask": torch.randn(b, 1, 1, s), "scale": 0.5},
    "hidden rows": lambda b, h, t, s: {"attn_mask": torch.randn(t, s).masked_fill(torch.arange(t)[:, None] % 3 == 1,
                                                                                -torch.inf)},
    "mask and causal": lambda b, h, t, s: {"attn_mask": torch.randn(1, h, t, s), "is_causal": True},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("make", [contiguous, transposed, spaced], ids=["BHTD", "BTHD", "spaced"])
def test_results_have_the_values_and_layouts_of_pytorch_s(make, dtype, mask):
    for b, h, hk, t, s, d in ((2, 3, 3, 5, 7, 8), (1, 4, 2, 6, 4, 16), (2, 1, 1, 1, 9, 8)):
        q, k, v = (make(*shape).to(dtype) for shape in ((b, h, t, d), (b, hk, s, d), (b, hk, s, d)))
        options = {name: x.to(dtype) if isinstance(x, torch.Tensor) else x
                   for name, x in MASKS[mask](b, h, t, s).items()}
        do = torch.randn(b, h, t, d).to(dtype)
        o, lse = flash(q, k, v, **options)
        gradients = flash_backward(do, q, k, v, o, lse, 0.0, options.pop("is_causal", False), **options)
        options = {**options, "is_causal": mask.endswith("causal")}
        with provider():
            got = flash(q, k, v, **options)
            options.pop("is_causal")
            of_heed = flash_backward(do, q, k, v, *got, 0.0, mask.endswith("causal"), **options)
            mixed = flash_backward(do, q, k, v, o, lse, 0.0, mask.endswith("causal"), **options)
            assert provider_stats() == {**NOTHING, "forward": 1, "backward": 2}
        back = flash_backward(do, q, k, v, *got, 0.0, mask.endswith("causal"), **options)
        for a, b_ in zip((*got, *of_heed, *mixed, *back), (o, lse, *gradients * 3), strict=True):
            assert a.stride() == b_.stride() and a.dtype == b_.dtype and not a.isnan().any()
            close(a, b_, TOLERANCE[dtype])


def test_what_heed_declines_is_pytorch_s_and_counted():
    q, k, v = (torch.randn(2, 3, 6, 8) for _ in range(3))
    declined = {
        "dropout_p is 0.5": lambda: flash(q, k, v, 0.5),
        "attn_mask is torch.bool": lambda: flash(q, k, v, attn_mask=torch.ones(6, 6, dtype=torch.bool)),
        "with 3 axes": lambda: flash(q, k, v, attn_mask=torch.ones(3, 6, 6)),
        "query has 3 axes": lambda: flash(q[0], k[0], v[0]),
        "expected f32 as q": lambda: flash(q, k.double(), v),
        "dtype torch.int64": lambda: flash(q.long(), k.long(), v.long()),
    }
    with provider():
        for reason, call in declined.items():
            with pytest.raises(RuntimeError) as info:
                call()
            assert type(info.value) is RuntimeError, reason  # in PyTorch's words
        counts = provider_stats()["declined"]
        assert len(counts) == len(declined)
        assert all(any(reason in key for key in counts) for reason in declined) and set(counts.values()) == {1}
    got, expected = with_and_without(lambda: flash(q, k, v, scale=torch.inf))
    assert provider_stats()["forward"] == 0 and list(provider_stats()["declined"].values()) == [1]
    torch.testing.assert_close(got, expected, equal_nan=True)


def test_reasons_are_limited():
    q = torch.randn(1, 1, 2, 2)
    with provider():
        for n in range(1, 111):
            with pytest.raises(RuntimeError):
                flash(q, q, q, n / 1000)
        counts = provider_stats()["declined"]
        assert len(counts) == 101 and sum(counts.values()) == 110 and counts["other reasons"] == 10


def test_rows_without_keys_and_empty_tensors():
    with provider():
        o, lse = flash(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 0, 8), torch.randn(1, 2, 0, 8))
        assert (o == 0).all()
        for shape in ((0, 2, 3, 8), (1, 2, 0, 8)):
            o, lse = flash(torch.randn(shape), torch.randn(shape[0], 2, 4, 8), torch.randn(shape[0], 2, 4, 8))
            assert o.shape == shape and lse.shape == shape[:3]


@pytest.fixture
def op(monkeypatch):
    """PyTorch's description of the function for its own tests."""
    if importlib.util.find_spec("expecttest") is None:  # it has the base class of tests, which no sample needs
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        monkeypatch.setitem(sys.modules, "expecttest", stub)
    methods = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    (op,) = (x for x in methods.op_db if x.name == "nn.functional.scaled_dot_product_attention")
    return op


def test_samples_of_pytorch_s_own_tests(op):

    def run(sample, dtype):
        def convert(x):
            return x.detach().to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

        torch.manual_seed(1)
        q, k, v = (convert(x).requires_grad_() for x in (sample.input, *sample.args))
        o = op.op(q, k, v, **{name: convert(x) for name, x in sample.kwargs.items()})
        return [o.detach(), *torch.autograd.grad(o.sin().sum(), (q, k, v), allow_unused=True)]

    ran = {"heed": 0, "heed-wide": 0}
    for dtype, tolerance in TOLERANCE.items():
        samples = list(op.sample_inputs("cpu", dtype, requires_grad=True))
        for sample in samples:
            drops = sample.kwargs.get("dropout_p", 0) > 0
            expected = run(sample, dtype)
            exact = expected if dtype == torch.float64 else run(sample, torch.float64)
            for name in ran:
                with provider(name):
                    got = run(sample, dtype)
                    stats = provider_stats()
                ran[name] += stats["forward"] + stats["widened"]
                assert stats["declined"] == {} and (stats["forward"] == stats["backward"] or stats["widened"])
                for a, b, c in zip(got, expected, exact, strict=True):
                    assert a.shape == b.shape and a.dtype == b.dtype and (name == "heed-wide" or
                                                                          a.stride() == b.stride())
                    if not drops:  # samples are so large that a softmax is nearly one key
                        error, theirs = ((x.double() - c).abs().max() for x in (a, b))
                        assert error <= 2 * theirs + tolerance * max(1, c.abs().max().item())
    assert ran["heed"] >= 20 and ran["heed-wide"] >= 80


# --- code that was not written for heed -------------------------------------------------------------------------------


def encoder(nested, dropout=0.0):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)


PADDING = torch.arange(6) >= torch.tensor([[6], [4]])


@pytest.mark.parametrize("nested", [False, True])
def test_transformer_encoder(nested):
    model, x = encoder(nested), torch.randn(2, 6, 16)

    def trained():
        y = model(x, src_key_padding_mask=PADDING)
        return (y, *torch.autograd.grad(y.square().sum(), list(model.parameters())))

    assert same_with_provider(trained) == {**NOTHING, "forward": 2, "backward": 2}
    model.eval()
    assert same_with_provider(trained) == {**NOTHING, "forward": 2, "backward": 2}
    with torch.no_grad():  # PyTorch's fast path of eval mode asks no operator of attention
        assert same_with_provider(lambda: [model(x, src_key_padding_mask=PADDING)]) == NOTHING
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            stats = same_with_provider(lambda: [model(x, src_key_padding_mask=PADDING)])
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        assert stats == {**NOTHING, "forward": 2}


def test_multihead_attention():
    layer, x = nn.MultiheadAttention(16, 4, batch_first=True), torch.randn(2, 6, 16)
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    stats = same_with_provider(lambda: [
        layer(x, x, x, need_weights=False)[0],
        layer(x, x, x, need_weights=False, attn_mask=causal, is_causal=True)[0],
        layer(x, x, x, need_weights=False, key_padding_mask=PADDING)[0]])
    assert stats == {**NOTHING, "forward": 3}


@pytest.mark.parametrize("name, calls", [("llama", 2), ("whisper", 6)])
def test_models_of_transformers(name, calls):
    pytest.importorskip("transformers")
    import tiny_models

    model, inputs = tiny_models.build(name, "sdpa"), tiny_models.inputs(name, "left" if name == "llama" else None)

    def trained():
        (logits,) = tiny_models.outputs(model(**inputs))
        leaves = [x for x in model.parameters() if x.requires_grad]
        return (logits, *torch.autograd.grad(logits.square().mean(), leaves))

    assert same_with_provider(trained, bound=1e-4) == {**NOTHING, "forward": calls, "backward": calls}
    if name == "llama":
        with torch.no_grad():
            got, expected = with_and_without(lambda: model.generate(inputs["input_ids"], max_new_tokens=4))
        assert torch.equal(got, expected) and provider_stats()["forward"] > 0


def function(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def trained(call, shape=(2, 4, 5, 8)):
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    o = call(q, k, v)
    return (o, *torch.autograd.grad(o.square().sum(), (q, k, v)))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_graphs(backend):
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    with provider():  # compiled with it, then without it, then with it
        trained(compiled)
        assert provider_stats() == {**NOTHING, "forward": 1, "backward": 1}
    stats = same_with_provider(lambda: trained(compiled))
    assert stats == {**NOTHING, "forward": 1, "backward": 1}
    torch.manual_seed(7)
    expected = trained(function)
    with provider():
        torch.manual_seed(7)
        for a, b in zip(trained(compiled), expected, strict=True):
            close(a, b, 2e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


def test_exported_graphs():
    class Model(nn.Module):
        def forward(self, q, k, v):
            return function(q, k, v)

    q, k, v = (torch.randn(2, 4, 5, 8) for _ in range(3))
    with provider():
        exported = torch.export.export(Model(), (q, k, v))
    assert not any("heed" in str(node.target) for node in exported.graph.nodes)
    model = exported.module()
    assert same_with_provider(lambda: [model(q, k, v)]) == {**NOTHING, "forward": 1}


def test_a_profiler_names_heed_and_restoring_brings_pytorch_back():
    def names():
        with torch.profiler.profile() as profile:
            trained(function)
        return {event.name: event.cpu_parent.name for event in profile.events() if event.name.startswith("heed")}

    assert names() == {}
    with provider():
        assert names() == {"heed::attention": flash._schema.name,
                           "heed::attention_backward": flash_backward._schema.name}
    assert names() == {}


def test_autocast_threads_and_inference_mode():
    q, k, v = (torch.randn(2, 4, 5, 8) for _ in range(3))

    def cast():
        with torch.autocast("cpu", torch.bfloat16):
            return [F.scaled_dot_product_attention(q, k, v)]

    got, (expected,) = with_and_without(cast)
    assert got[0].dtype == expected.dtype == torch.bfloat16 and provider_stats()["forward"] == 1
    with torch.inference_mode():
        assert same_with_provider(lambda: [F.scaled_dot_product_attention(q, k, v)])["forward"] == 1
    with provider():
        workers = [threading.Thread(target=lambda: [trained(function) for _ in range(20)]) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert provider_stats() == {**NOTHING, "forward": 60, "backward": 60}


def test_transforms_of_torch_func():
    q, k, v = (torch.randn(3, 2, 4, 5, 8) for _ in range(3))
    loss = lambda x: F.scaled_dot_product_attention(x, k[0], v[0]).square().sum()  # noqa: E731
    assert same_with_provider(lambda: [torch.func.grad(loss)(q[0])])["backward"] == 1
    assert same_with_provider(lambda: [torch.vmap(F.scaled_dot_product_attention)(q, k, v)])["forward"] == 3


def test_samples_have_the_second_derivatives_of_the_math_path(op):
    """PyTorch's own kernel has none."""

    def run(sample):
        tensors = [(x * 0.1).detach().requires_grad_() for x in (sample.input, *sample.args)]
        o = op.op(*tensors, **sample.kwargs)
        first = torch.autograd.grad(o.sin().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(x.cos().sum() for x in first), tensors)

    ran = 0
    for sample in op.sample_inputs("cpu", torch.float64, requires_grad=True):
        if sample.kwargs.get("dropout_p", 0) > 0:
            continue
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            expected = run(sample)
        for name in ("heed", "heed-wide"):
            with provider(name):
                got = run(sample)
                ran += provider_stats()["backward"] > 0
            for x, y in zip(got, expected, strict=True):
                torch.testing.assert_close(x, y, atol=1e-9, rtol=1e-9)
    assert ran >= 8


def test_second_derivatives_and_what_heed_declines():
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.randn(5, 5, dtype=torch.float64)

    def function(*tensors):
        return F.scaled_dot_product_attention(*tensors, attn_mask=mask)

    with provider():
        assert torch.autograd.gradgradcheck(function, (q, k, v), fast_mode=True)
        hessian = torch.func.jacrev(torch.func.jacrev(lambda x: function(x, x, x).square().sum()))(q.detach())
        o = F.scaled_dot_product_attention(q, k, v, scale=float("inf"))  # which heed declines
        assert torch.autograd.grad(o.sum(), q, create_graph=True)[0].isnan().all()
        with pytest.raises(RuntimeError, match="flash_attention_for_cpu_backward is not implemented"):
            (first,) = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, scale=float("inf")).sum(), q,
                                           create_graph=True)
            first.sum().backward()
        assert provider_stats()["declined"]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = torch.autograd.functional.hessian(lambda x: function(x, x, x).square().sum(), q.detach())
    torch.testing.assert_close(hessian, expected, atol=1e-9, rtol=1e-9)


def test_a_forked_process():
    result = python("""
import os, torch, heed.torch
torch.nn.attention.activate_flash_attention_impl("heed")
q = torch.randn(2, 4, 64, 16)
o = torch.nn.functional.scaled_dot_product_attention(q, q, q)
pid = os.fork()
if pid == 0:
    same = torch.equal(torch.nn.functional.scaled_dot_product_attention(q, q, q), o)
    os._exit(0 if same and heed.torch.provider_stats()["forward"] == 2 else 1)
assert os.waitpid(pid, 0)[1] == 0
torch.nn.attention.restore_flash_attention_impl()
""")
    assert result.returncode == 0, result.stderr


# --- the wide door ----------------------------------------------------------------------------------------------------


def on_math_path():
    """Calls that PyTorch computes without its operator."""
    q, k, v = (torch.randn(2, 4, 5, 8, requires_grad=True) for _ in range(3))
    bias = torch.randn(5, 5, requires_grad=True)
    narrow = v[..., :3]
    turned = v.transpose(2, 3).contiguous().transpose(2, 3)
    return [
        ("three axes", lambda: F.scaled_dot_product_attention(q[0], k[0], v[0], is_causal=True), (q, k, v)),
        ("five axes", lambda: F.scaled_dot_product_attention(q[None], k[None], v[None]), (q, k, v)),
        ("narrow values", lambda: F.scaled_dot_product_attention(q, k, narrow, scale=0.5), (q, k, v)),
        ("a learned bias", lambda: F.scaled_dot_product_attention(q, k, v, bias), (q, k, v, bias)),
        ("a mask of 3 axes", lambda: F.scaled_dot_product_attention(q, k, v, bias.new_zeros(4, 5, 5)), (q, k, v)),
        ("broadcast keys", lambda: F.scaled_dot_product_attention(q, k[:1], v[:1]), (q, k, v)),
        ("one key head", lambda: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1]), (q, k, v)),
        ("strided rows", lambda: F.scaled_dot_product_attention(q, k, turned), (q, k, v)),
    ]


def test_the_wide_door():
    for name, call, leaves in on_math_path():
        def run(call=call, leaves=leaves):
            o = call()
            return (o, *torch.autograd.grad(o.square().sum(), leaves))

        assert same_with_provider(run) == NOTHING, name
        assert same_with_provider(run, "heed-wide") == {**NOTHING, "widened": 1}, name

    q = torch.randn(2, 4, 5, 8)
    with provider("heed-wide"):
        F.scaled_dot_product_attention(q, q, q)
        assert provider_stats() == {**NOTHING, "forward": 1}  # through the narrow one, as ever
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        assert provider_stats()["widened"] == 1
        with registry.sdpa_kernel(registry.SDPBackend.MATH):  # PyTorch's math path on demand
            F.scaled_dot_product_attention(q, q, q)
            F.scaled_dot_product_attention(q[0], q[0], q[0])
        assert provider_stats() == {**NOTHING, "forward": 1, "widened": 1}
        jagged = torch.nested.nested_tensor([torch.randn(2, 3, 8), torch.randn(2, 4, 8)])
        assert F.scaled_dot_product_attention(jagged, jagged, jagged).is_nested
        with pytest.raises(RuntimeError):  # of a shape that nobody takes
            F.scaled_dot_product_attention(q, q[..., :7], q)

        def along(function):
            return lambda x: torch.func.jvp(function, (x,), (x,))[1]

        along(along(lambda x: F.scaled_dot_product_attention(x, x, x)))(q[0])
        reasons = list(provider_stats()["declined"])
        assert len(reasons) == 2 and "forward derivative" in reasons[1]
    assert "heed" not in torch._C._dispatch_dump("aten::scaled_dot_product_attention")


def test_the_wide_door_with_dropout():
    model, x = encoder(False, dropout=0.1), torch.randn(2, 6, 16)
    with provider("heed-wide"):
        model(x).sum().backward()
        assert provider_stats() == {**NOTHING, "widened": 2}
    with provider():
        model(x).sum().backward()
        assert provider_stats() == NOTHING  # PyTorch takes its math path


def test_the_wide_door_in_graphs():
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v).flatten(-2), fullgraph=True,
                             backend="aot_eager")
    for shape in ((4, 5, 8), (2, 4, 5, 8)):
        torch.manual_seed(7)
        expected = trained(lambda q, k, v: F.scaled_dot_product_attention(q, k, v).flatten(-2), shape)
        with provider("heed-wide"):
            torch.manual_seed(7)
            for a, b in zip(trained(compiled, shape), expected, strict=True):
                close(a, b, 2e-5)
            stats = provider_stats()
            assert stats["widened"] if len(shape) == 3 else stats["forward"] == 1
    torch._dynamo.reset()
    with provider("heed-wide"):
        assert "heed-wide" in torch.compiler.config.cache_key_tag
    with provider():
        trained(compiled, (4, 5, 8))
        assert provider_stats() == NOTHING and torch.compiler.config.cache_key_tag == ""
