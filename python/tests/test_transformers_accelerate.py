# heed.transformers.accelerate: the same logits, gradients and generated tokens, and a report of the replaced functions.
import copy
import gc
import re
import types
import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import recurrent_models  # noqa: E402
from recurrent_models import FAMILIES, TAPS, build, tokens  # noqa: E402

import heed  # noqa: E402
from heed.transformers import _layers, accelerate  # noqa: E402

NAMES = [name for name, family in FAMILIES.items() if hasattr(transformers, family.model)]


def results(model, x, **options):
    """Logits and the gradient of every parameter."""
    model.zero_grad()
    out = model(x, **{"labels": x, "use_cache": False, **options})
    out.loss.backward()
    return out.logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_near(a, b, tolerance=2e-5):
    assert a.dtype == b.dtype
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(float(a.detach().abs().max()), 1e-2))


def assert_same_results(before, after, tolerance=2e-5):
    assert_near(before[0], after[0], tolerance)
    assert before[1].keys() == after[1].keys()
    for name, gradient in before[1].items():
        assert_near(gradient, after[1][name], 10 * tolerance)


def generated(model, x):
    return model.generate(x, max_new_tokens=12, do_sample=False, eos_token_id=None)


def test_every_family_is_there():
    assert NAMES == list(FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_logits_gradients_and_tokens_are_the_same(name):
    model, x = build(name), tokens()
    before, sequence = results(model, x), generated(model, x)
    with accelerate(model, strict=True) as report:
        assert {entry.by for entry in report.replaced} == set(FAMILIES[name].by)
        assert_same_results(before, results(model, x))
        assert torch.equal(generated(model, x), sequence)
        assert report.declined == report.left == []
    after = results(model, x)
    assert torch.equal(after[0], before[0])  # undone: to the bit


@pytest.mark.parametrize("name", NAMES)
def test_every_replaced_call_computes_with_heed(name, monkeypatch):
    called = set()
    report = accelerate(model := build(name))
    for by in FAMILIES[name].by:
        original = getattr(heed.torch, by)
        monkeypatch.setattr(heed.torch, by, lambda *a, _by=by, _f=original, **k: (called.add(_by), _f(*a, **k))[1])
    generated(model, tokens())
    assert called == {entry.by for entry in report.replaced}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("rwkv", "xlstm")])  # these two take no mask
def test_padding(name):
    model, x = build(name), tokens()
    mask = torch.ones_like(x)
    mask[1, :9] = 0
    before = model(x, attention_mask=mask, use_cache=False).logits
    accelerate(model)
    after = model(x, attention_mask=mask, use_cache=False).logits
    assert_near(before[0], after[0])
    assert_near(before[1, 9:], after[1, 9:])


def test_padding_on_the_right_beside_compressed_keys():
    model, x = build("deepseek_v4"), tokens()
    mask = torch.ones_like(x)
    mask[1, 9:] = 0
    labels = x.masked_fill(mask == 0, -100)
    expected = results(model, x, attention_mask=mask, labels=labels)
    report = accelerate(model, strict=True)
    found = results(model, x, attention_mask=mask, labels=labels)
    assert_same_results(*((logits[mask.bool()], gradients) for logits, gradients in (expected, found)))
    assert not report.declined


@torch.no_grad()
def test_padding_on_the_left_beside_compressed_keys_is_declined():
    model, x = build("deepseek_v4"), tokens()
    mask = torch.ones_like(x)
    mask[1, :9] = 0
    before = model(x, attention_mask=mask).logits
    report = accelerate(model, strict=True)
    assert torch.equal(model(x, attention_mask=mask).logits, before)
    assert {entry.layer for entry in report.declined} == {"model.layers.1.self_attn", "model.layers.2.self_attn"}
    assert all("padding" in entry.reason for entry in report.declined)


@torch.no_grad()
def test_padding_of_lightning_attention_may_be_nan():
    model = build("minimax")
    accelerate(model, strict=True)
    layer = next(m for m in model.modules() if type(m).__name__ == "MiniMaxLightningAttention")
    x, mask = torch.randn(2, 37, 32), torch.ones(2, 37, dtype=torch.bool)
    mask[1, :9] = False
    for dtype in (torch.bool, torch.int64):
        expected, state = layer(x, None, mask.to(dtype))
        o, spoiled = layer(x.masked_fill(~mask[..., None], torch.nan), None, mask.to(dtype))
        assert torch.equal(o[mask], expected[mask]) and torch.equal(spoiled, state)


def in_pieces(model, x, ends):
    """Logits of the tokens up to each of `ends`, with the model's own cache."""
    key = {"rwkv": "state", "xlstm": "cache_params", "mamba": "cache_params", "mamba2": "cache_params",
           "falcon_mamba": "cache_params"}.get(model.config.model_type, "past_key_values")
    out, parts, begin = {}, [], 0
    with torch.no_grad():
        for end in ends:
            out = model(x[:, begin:end], use_cache=True, **({key: out[key]} if out else {}))
            parts.append(out.logits)
            begin = end
    return torch.cat(parts, 1)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "recurrent_gemma"])  # whose layers keep states
def test_states_go_from_call_to_call(name):
    model, x, ends = build(name), tokens(23), (20, 21, 22, 23)
    before = in_pieces(model, x, ends)
    accelerate(model)
    assert_near(before, in_pieces(model, x, ends), 5e-5)


@pytest.mark.parametrize("name", [name for name in NAMES if "causal_conv1d" in FAMILIES[name].by])
def test_convolutions_of_one_tap(name):
    """Transformers keeps one column for them, which no step of heed writes to."""
    known = vars(getattr(transformers, FAMILIES[name].model).config_class())
    model, x, ends = build(name, **{key: 1 for key in TAPS if key in known}), tokens(12), (5, 9, 10, 11, 12)
    before = in_pieces(model, x, ends)
    report = accelerate(model, strict=True)
    assert_near(before, in_pieces(model, x, ends), 5e-5)
    assert not report.declined


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["mamba", "mamba2", "qwen3_next", "recurrent_gemma", "minimax"])
def test_other_dtypes(name, dtype):
    if dtype == torch.float64 and name in ("qwen3_next", "minimax"):
        pytest.skip("PyTorch multiplies the weights of experts in no float64")
    model, x = build(name).to(dtype), tokens()
    with torch.no_grad():
        before = model(x, use_cache=False).logits
        accelerate(model)
        after = model(x, use_cache=False).logits
    assert_near(before, after, 0.05 if dtype.itemsize == 2 else 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("gated", [False, True])
def test_functions_of_mamba2_compute_in_float32(gated):
    """Rows and parameters of bfloat16 beside a state of float32, as some models keep it."""
    torch.manual_seed(0)
    B, T, H, P, N = 2, 5, 3, 4, 6
    sizes = {"x": (B, T, H, P), "dt": (B, T, H), "A": (H,), "B": (B, T, 1, N), "C": (B, T, 1, N), "D": (H,),
             "bias": (H,), "z": (B, T, H, P), "state": (B, H, P, N)}
    given = {name: torch.randn(size).to(torch.bfloat16) for name, size in sizes.items()}
    given["A"] = -given["A"].abs()

    def results(dtype):
        x, dt, A, B, C, D, bias, z, state = (t.to(dtype) for t in given.values())
        z = z if gated else None
        chunks = _layers._ssd(
            x, dt, A, B, C, 4, D=D, dt_bias=bias, dt_softplus=True, z=z, initial_states=state, return_final_states=True)
        state = state.float()
        in_head = [t[..., None].expand(*t.shape, P) for t in (dt[:, 0], D, bias)]
        step = _layers._ssd_step(
            state, x[:, 0], in_head[0], A[:, None, None].expand(H, P, N), B[:, 0], C[:, 0], *in_head[1:], True,
            z[:, 0] if gated else None)
        assert step.dtype == dtype
        return *chunks, step, state

    for wide, found in zip(results(torch.float32), results(torch.bfloat16), strict=True):
        assert torch.equal(found, wide.to(found.dtype))


def test_other_instances_stay_what_they_were():
    one, other = build("mamba2"), build("mamba2")
    layer = type(one.backbone.layers[0].mixer)
    forward = layer.forward
    accelerate(one)
    assert layer.forward is forward
    assert "forward" not in other.backbone.layers[0].mixer.__dict__
    x = tokens()
    assert_near(other(x, use_cache=False).logits, one(x, use_cache=False).logits)


def test_twice():
    model = build("mamba2")
    first = accelerate(model)
    second = accelerate(model)
    assert not second.replaced
    assert all("already" in entry.reason for entry in second.left)
    second.undo()
    assert "forward" in model.backbone.layers[0].mixer.__dict__
    first.undo()
    first.undo()
    assert "forward" not in model.backbone.layers[0].mixer.__dict__


def test_undo_leaves_what_came_after():
    model = build("mamba2")
    report = accelerate(model)
    mixer = model.backbone.layers[0].mixer
    mixer.forward = later = types.MethodType(lambda self, *a, **k: None, mixer)
    report.undo()
    assert mixer.__dict__["forward"] is later


@pytest.mark.parametrize("name", NAMES)
def test_copies_are_plain_and_can_be_accelerated(name):
    model = build(name)
    plain = recurrent_models.attributes(model)
    report = accelerate(model)
    for other in recurrent_models.copies(model):
        assert recurrent_models.attributes(other) == plain
        with accelerate(other, strict=True) as again:
            assert again.replaced == report.replaced
        assert recurrent_models.attributes(other) == plain != recurrent_models.attributes(model)
    report.undo()
    assert recurrent_models.attributes(model) == plain


def test_copies_have_weights_of_their_own():
    model, x = build("qwen3_next"), tokens()
    accelerate(model)
    logits = model(x, use_cache=False).logits
    for other in recurrent_models.copies(model):
        assert_near(other(x, use_cache=False).logits, logits)
        accelerate(other)
        assert torch.equal(other(x, use_cache=False).logits, logits)
        with torch.no_grad():
            other.model.layers[0].linear_attn.out_proj.weight.zero_()
        assert not torch.equal(other(x, use_cache=False).logits, logits)
    assert torch.equal(model(x, use_cache=False).logits, logits)


def test_a_copy_keeps_a_method_that_came_after():
    model = build("mamba2")
    accelerate(model)
    model.backbone.layers[0].mixer.forward = abs
    assert copy.deepcopy(model).backbone.layers[0].mixer.forward is abs


def test_a_report_keeps_no_model():
    model = build("rwkv")
    report, gone = accelerate(model), [weakref.ref(part) for part in model.modules()]
    del model
    gc.collect()
    assert not any(part() for part in gone)
    report.undo()


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_compiled(name):
    model, x = build(name), tokens()
    accelerate(model)
    with torch.no_grad():
        expected = model(x, use_cache=False).logits
        breaks = torch._dynamo.explain(model)(x, use_cache=False).graph_break_count
        torch._dynamo.reset()
        assert_near(torch.compile(model, backend="aot_eager")(x, use_cache=False).logits, expected)
    torch._dynamo.reset()
    plain = torch._dynamo.explain(build(name))(x, use_cache=False).graph_break_count
    torch._dynamo.reset()
    assert breaks <= plain


def test_checkpointed():
    model, x = build("qwen3_next").train(), tokens()
    model.config.use_cache = False
    before = results(model, x)
    model.gradient_checkpointing_enable()
    accelerate(model)
    assert_same_results(before, results(model, x))


def test_a_hook_of_accelerate_is_called():
    """Offloaded weights arrive by hooks of children whose weights are read without calling them."""
    model = build("mamba2")
    accelerate(model)
    seen = []
    hook = types.SimpleNamespace(pre_forward=lambda module: seen.append(module), post_forward=lambda module, out: None)
    model.backbone.layers[0].mixer.conv1d._hf_hook = hook
    model(tokens(), use_cache=False)
    assert seen == [model.backbone.layers[0].mixer.conv1d]


def test_what_heed_declines_runs_as_before():
    model, x = build("mamba2", hidden_act="gelu"), tokens()
    before = model(x, use_cache=False).logits
    report = accelerate(model)
    assert_near(before, model(x, use_cache=False).logits)
    assert [(entry.call, entry.reason) for entry in report.declined] == [
        ("causal_conv1d_fn", "activation is 'gelu', expected 'silu', 'swish' or None")] * 2
    assert "ran as before: activation is 'gelu'" in str(report)


@pytest.mark.parametrize("name, value", [("seq_idx", torch.zeros(1, 4)), ("cu_seqlens", torch.tensor([0, 4]))])
def test_packed_rows_are_refused_as_before(name, value):
    assert _layers.refuses((), {name: value}) == f"{name} was given, expected None"
    model = build("qwen3_next")
    layer = model.model.layers[0].linear_attn
    accelerate(model)
    call = layer.forward.__func__.__wrapped__.__globals__["torch_chunk_gated_delta_rule"]
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match="packed"):
        call(q, q, q, g=-torch.rand(1, 4, 2), beta=torch.rand(1, 4, 2), **{name: value})


def test_other_devices_are_declined():
    assert "expected the CPU" in _layers.refuses((torch.empty(2, device="meta"),), {})
    assert "float8" in _layers.refuses((), {"k": torch.empty(2, dtype=torch.float8_e4m3fn)})


def test_steps_decline_what_they_would_get_wrong():
    state = torch.zeros(1, 2, 3, 4, requires_grad=True)
    x, dt, B = torch.randn(1, 2, 3), torch.rand(1, 2, 1).expand(-1, -1, 3), torch.randn(1, 1, 4)
    A = (-torch.ones(2, 1, 1)).expand(-1, 3, 4)
    assert "gradient" in _layers._ssd_step(state, x, dt, A, B, B).reason
    assert "float32" in _layers._ssd_step(state.detach().half(), x, dt, A, B, B).reason
    assert "dt differs within a head" in _layers._ssd_step(state.detach(), x, dt.clone(), A, B, B).reason
    assert "A differs within a head" in _layers._ssd_step(state.detach(), x, dt, A.clone(), B, B).reason


@pytest.mark.parametrize("length, taps", [(3, 4), (4, 4), (6, 4), (1, 1), (3, 1)])
@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 5)])
def test_steps_of_a_convolution_leave_the_state_of_the_original(length, taps, bias):
    """A state may be longer than the taps reach."""
    from transformers.models.mamba2.modeling_mamba2 import causal_conv1d_update

    x, weight, state = torch.randn(2, 5, 1), torch.randn(5, taps), torch.randn(2, 5, length)
    of_heed = state.clone()
    expected = causal_conv1d_update(x, state, weight, bias, "silu")
    with torch.no_grad():
        torch.testing.assert_close(_layers._causal_conv1d_step(x, of_heed, weight, bias, "silu"), expected)
    assert torch.equal(of_heed, state)
    two = _layers._causal_conv1d_step(x.expand(-1, -1, 2), of_heed, weight, bias, "silu")
    assert two.reason == f"2 tokens beside a state of {length}, expected one"


def test_several_sequences_in_a_row_of_recurrent_gemma():
    model, x = build("recurrent_gemma"), tokens(20)
    positions = torch.cat([torch.arange(12), torch.arange(8)])[None].expand(2, -1)
    before = model(x, position_ids=positions, use_cache=False).logits
    report = accelerate(model)
    assert_near(before, model(x, position_ids=positions, use_cache=False).logits)
    assert {entry.call for entry in report.declined} == {"forward"}
    assert all("a position is 0 inside of a row" in entry.reason for entry in report.declined)


def test_models_without_recurrences():
    config = transformers.LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                                      num_attention_heads=4)
    model = transformers.LlamaForCausalLM(config)
    report = accelerate(model)
    assert report.replaced == report.left == []
    assert str(report) == "LlamaForCausalLM: 0 calls run on heed, 0 could not be replaced"
    with pytest.raises(heed.Unsupported, match="accelerate: LlamaForCausalLM has no layer that heed knows"):
        accelerate(model, strict=True)


@pytest.mark.parametrize("given, message", [
    ((None,), "model is of type NoneType, expected a torch.nn.Module"),
    (({"model": 1},), "model is of type dict, expected a torch.nn.Module"),
    (("mamba2",), "model is of type str, expected a torch.nn.Module"),
    ((transformers.Mamba2Model,), "model is the class Mamba2Model, expected a torch.nn.Module"),
    ((torch.nn.Linear(2, 2), "yes"), "strict is 'yes', expected True or False"),
])
def test_what_is_no_model_is_refused(given, message):
    with pytest.raises(heed.InvalidArgument, match=f"^accelerate: {message}$"):
        accelerate(*given)


def test_a_group_needs_torch_distributed():
    with pytest.raises(heed.InvalidArgument, match="accelerate: group is given, expected None"):
        accelerate(build("mamba2"), group=object())


def test_the_page_names_the_families_that_a_group_takes():
    from heed.transformers import _divided

    page = Path(__file__).resolve().parents[2] / "docs/distributed.md"
    named = re.search(r"compared with\s+one process: (.*?)\.$", page.read_text(), re.M | re.S)[1]
    assert set(re.split(r",\s+", named)) == _divided._FAMILIES


def changed_forward(parameters):
    """A layer like those of Transformers whose function takes other parameters."""
    scope = {}
    exec(f"def causal_conv1d_fn({parameters}): return 0\n"
         "def forward(self, x): return causal_conv1d_fn(x)", scope)
    return type("Layer", (torch.nn.Module,), {"forward": scope["forward"]})


def test_functions_that_changed_are_left_alone():
    model = torch.nn.Sequential(changed_forward("hidden_states, weight, gate")())
    report = accelerate(model)
    assert not report.replaced
    assert report.left[0][:2] == ("0", "causal_conv1d_fn")
    assert report.left[0].reason == ("has the parameters hidden_states, weight, gate, expected hidden_states, weight, "
                                     "bias, activation")
    with pytest.raises(heed.Unsupported, match="0: causal_conv1d_fn has the parameters"):
        accelerate(model, strict=True)
    assert "forward" not in model[0].__dict__


def test_a_decorator_that_hides_its_function():
    layer = changed_forward("hidden_states, weight, bias")
    plain = layer.forward
    kept = [plain]

    def forward(self, x):
        return kept[0](self, x)

    forward.__wrapped__ = plain
    layer.forward = forward
    report = accelerate(torch.nn.Sequential(layer()))
    assert report.left[0].reason == "a decorator hides the code of forward"
    assert not report.replaced
