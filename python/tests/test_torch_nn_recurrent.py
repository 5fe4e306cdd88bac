# Recurrent layers of heed.torch.nn against Transformers' modules or compositions: weights, outputs, gradients, states.
import copy
import pickle
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch.nn.functional as F  # noqa: E402
from transformers.models.mamba.modeling_mamba import MambaMixer  # noqa: E402
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer  # noqa: E402
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet  # noqa: E402
from transformers.models.rwkv.modeling_rwkv import RwkvSelfAttention  # noqa: E402

import heed  # noqa: E402
import rwkv6_model  # noqa: E402
import heed.torch.nn as layers  # noqa: E402

from torch_nn_checks import check_decodes, check_same, check_steps, loaded, randomise, relative, rows  # noqa: E402

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99}
GATED_DELTA = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2,
               "intermediate_size": 48, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
               "linear_key_head_dim": 8, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 3,
               "layer_types": ["linear_attention", "full_attention"]}

# {name: (layer, module of Transformers, configuration)}
MIXERS = {
    "mamba": (layers.Mamba, MambaMixer, lambda: transformers.MambaConfig(**SIZES, state_size=8, time_step_rank=4)),
    "mamba biased": (layers.Mamba, MambaMixer, lambda: transformers.MambaConfig(
        **SIZES, state_size=5, time_step_rank=3, expand=1, use_bias=True, use_conv_bias=False, conv_kernel=1)),
    "mamba2": (layers.Mamba2, Mamba2Mixer, lambda: transformers.Mamba2Config(
        **SIZES, num_heads=8, head_dim=8, state_size=16, n_groups=2, chunk_size=16)),
    "mamba2 limited": (layers.Mamba2, Mamba2Mixer, lambda: transformers.Mamba2Config(
        **SIZES, num_heads=4, head_dim=16, state_size=8, n_groups=1, chunk_size=16, conv_kernel=1, use_bias=True,
        use_conv_bias=False, time_step_limit=(0.9, 1.2))),
    "gated delta": (layers.GatedDeltaNet, Qwen3NextGatedDeltaNet, lambda: transformers.Qwen3NextConfig(**GATED_DELTA)),
    "rwkv4": (layers.Rwkv4, RwkvSelfAttention,
              lambda: transformers.RwkvConfig(**SIZES, attention_hidden_size=48, context_length=64)),
}


@pytest.mark.parametrize("name", MIXERS)
def test_mixers_as_transformers_have_them(name):
    layer_class, original_class, config = MIXERS[name]
    original = randomise(original_class(config(), 0))
    layer = loaded(layer_class.from_config(config()), original)
    check_steps(layer, rows(2, 23, 32))
    if name == "rwkv4":  # whose backward pass Transformers does not have
        assert relative(layer(rows(2, 23, 32)), original(rows(2, 23, 32))[0]) <= 1e-5
        check_same(layer, lambda x: plain_rwkv4(original, x), original, rows(2, 23, 32))
    else:  # gradients of decays are differences of sums that are larger, in float32
        check_same(layer, original, original, rows(2, 23, 32), of_weights=5e-5)


def test_gated_delta_of_one_tap():
    config, x = transformers.Qwen3NextConfig(**{**GATED_DELTA, "linear_conv_kernel_dim": 1}), rows(2, 23, 32)
    original = randomise(Qwen3NextGatedDeltaNet(config, 0))
    layer = loaded(layers.GatedDeltaNet.from_config(config), original)
    check_steps(layer, x)
    assert relative(layer(x), original(x)) <= 1e-5 and layer.new_state(2).conv.shape == (2, 56, 0)


def test_rwkv6_as_its_equations_have_it():
    original = rwkv6_model.randomise(rwkv6_model.TimeMixing(32, 24, 6, 5, 7, 64e-5), 2)
    layer = loaded(layers.Rwkv6(32, attention_hidden_size=24, head_size=6, mix_rank=5, decay_rank=7), original)
    check_same(layer, original, original, rows(2, 23, 32), of_weights=5e-5)
    check_steps(layer, rows(2, 23, 32))
    config = SimpleNamespace(hidden_size=64, head_size=16, head_size_divisor=3)
    published = layers.Rwkv6.from_config(config)
    assert (published.ln_x.eps == 1e-5 * 9 and published.time_maa_w2.shape == (5, 32, 64)
            and published.time_faaaa.shape == (4, 16))
    loaded(published, rwkv6_model.TimeMixing(64, 64, 16, 32, 64, 9e-5))
    assert layers.Rwkv6.from_config(SimpleNamespace(hidden_size=4096, head_size=64, head_size_divisor=8),
                                    device="meta").time_decay_w1.shape == (4096, 128)


def plain_rwkv4(module, x):
    """RWKV-4's time mixing, token by token, from its equations."""
    before = F.pad(x, (0, 0, 1, -1))
    k, v, r = (x * mix + before * (1 - mix)
               for mix in (module.time_mix_key, module.time_mix_value, module.time_mix_receptance))
    k, v, r = module.key(k), module.value(v), torch.sigmoid(module.receptance(r))
    num, den, outputs = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), []
    for t in range(x.shape[1]):
        now = torch.exp(k[:, t])
        bonus = torch.exp(module.time_first) * now
        outputs.append((num + bonus * v[:, t]) / (den + bonus))
        decay = torch.exp(-torch.exp(module.time_decay))
        num, den = decay * num + now * v[:, t], decay * den + now
    return module.output(r * torch.stack(outputs, 1))


def test_retention_is_its_composition():
    layer = randomise(layers.MultiScaleRetention(32, 4, value_factor=3, eps=1e-5))
    assert list(layer.state_dict()) == [f"{name}_proj.weight" for name in ("q", "k", "v", "g", "out")]

    def plain(x):
        q, k, v = (project(x).unflatten(-1, (4, -1)) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
        half = 10000.0 ** (-torch.arange(4) / 4)
        angles = torch.outer(torch.arange(x.shape[1]), half)[:, None]

        def turn(z):
            return torch.cat([z[..., :4] * angles.cos() - z[..., 4:] * angles.sin(),
                              z[..., 4:] * angles.cos() + z[..., :4] * angles.sin()], -1)

        distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        decay = torch.where(distance >= 0, torch.log(1 - 2.0 ** (-5 - torch.arange(4)))[:, None, None] * distance,
                            -torch.inf).exp()
        o = torch.einsum("bthd,bshd,hts,bshv->bthv", turn(q), turn(k), decay, v) / 8**0.5
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5)
        return layer.out_proj(F.silu(layer.g_proj(x)) * o.flatten(2))

    other = copy.deepcopy(layer)
    check_same(other, plain, layer, rows(2, 19, 32))
    check_steps(layer, rows(2, 19, 32))
    given = layers.MultiScaleRetention(32, 2, log_decay=[-0.5, -1.0])
    assert given.log_decay.tolist() == [-0.5, -1.0]


@pytest.mark.parametrize("method, taps", [("recurrent", 4), ("convolution", 1)])
def test_h3_is_its_composition(method, taps):
    layer = randomise(layers.H3(12, head_dim=3, state_size=6, taps=taps, method=method))
    with torch.no_grad():
        layer.log_dt.sub_(2)

    def plain(x):
        q, k, v = (project(x).unflatten(-1, (4, 3)) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
        taps = layer.shift.unflatten(0, (4, 3))
        shifted = layer.shift_D.view(4, 3) * k
        for lag in range(layer.shift.shape[1]):
            shifted = shifted + F.pad(k, (0, 0, 0, 0, lag, 0))[:, : x.shape[1]] * taps[..., lag]
        dt, A = layer.log_dt.exp()[:, None], torch.complex(-layer.log_A_real.exp(), layer.A_imag)
        decay = torch.exp(dt * A)
        weights = torch.view_as_complex(layer.C) * (decay - 1) / A
        kernel = 2 * (weights[..., None] * decay[..., None] ** torch.arange(x.shape[1])).sum(1).real
        distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        matrix = kernel[:, distance.clamp(min=0)] * (distance >= 0) + layer.D[:, None, None] * torch.eye(x.shape[1])
        return layer.out_proj(torch.einsum("bthd,bshd,hts,bshv->bthv", q, shifted, matrix, v).flatten(2))

    other = copy.deepcopy(layer)
    check_same(other, plain, layer, rows(2, 17, 12), tolerance=3e-5, of_weights=1e-4)
    check_steps(layer, rows(2, 17, 12), tolerance=2e-5)


RECURRENCES = {
    "linear_attention": "qkv", "based": "qkv", "retention": "qkv", "lightning": "qkv", "simple_gla": "qkv",
    "gla": "qkv", "hgrn2": "qi", "mlstm": "qkv", "rwkv5": "rkv", "rwkv6": "rkv", "delta_rule": "qkv",
    "gated_delta_rule": "qkv", "kda": "qkv", "gdn2": "qkv", "comba": "qkv", "rwkv7": "rkv"}


@pytest.mark.parametrize("name", RECURRENCES)
def test_a_block_around_any_recurrence(name):
    layer = randomise(layers.GatedLinearAttention(32, 4, name, key_dim=6, value_dim=10))
    x = rows(2, 23, 32)
    check_steps(layer, x, tolerance=2e-5)
    given = {key: layer.get_submodule(f"{key}_proj")(x).unflatten(-1, (4, -1)) for key in RECURRENCES[name]}

    def gate(key, map, per_head=False):
        of = (layer.get_parameter(key) if key in dict(layer.named_parameters())
              else layer.get_submodule(f"{key}_proj")(x).unflatten(-1, (4, -1)))
        return map(of)[..., 0] if per_head else map(of)
    one_decay, one_beta = (name in ("lightning", "simple_gla", "gated_delta_rule", "comba"),
                           name in ("delta_rule", "gated_delta_rule", "kda", "comba"))
    if one_beta or name in ("gdn2", "rwkv7"):
        given["k"] = given["k"] / (given["k"].square().sum(-1, keepdim=True) + 1e-6).sqrt()
    if name not in ("linear_attention", "based", "retention", "mlstm", "delta_rule"):
        given["log_decay"] = gate("log_decay", lambda z: F.logsigmoid(z) / 16, one_decay)
    if one_beta:
        given["beta"] = gate("beta", torch.sigmoid, True)
    if name == "mlstm":
        given |= {"i": gate("i", lambda z: z, True), "f": gate("f", lambda z: z, True)}
    if name in ("rwkv5", "rwkv6"):
        given["u"] = gate("u", lambda z: z)
    if name == "gdn2":
        given |= {"erase": gate("erase", torch.sigmoid), "write": gate("write", torch.sigmoid)}
    if name == "comba":
        given["p"] = gate("p", lambda z: z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt())
    if name == "rwkv7":
        given |= {"a": -given["k"], "b": given["k"] * gate("share", torch.sigmoid)}
    o = getattr(heed.torch, name)(**given)
    o = layer.norm.weight * o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-6)
    expected = layer.o_proj((o * F.silu(layer.g_proj(x)).unflatten(-1, (4, -1))).flatten(2))
    assert relative(layer(x), expected) <= 1e-5
    loss = rows(*expected.shape, seed=9)
    theirs = torch.autograd.grad((expected * loss).sum(), list(layer.parameters()))
    ours = torch.autograd.grad((layer(x) * loss).sum(), list(layer.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).abs().max()) <= 2e-5 * float(max(b.abs().max(), 0.01 * max(y.abs().max() for y in theirs)))


def test_settings_of_the_recurrence():
    layer = layers.GatedLinearAttention(32, 4, "linear_attention", options={"feature_map": "relu", "normalize": False})
    state = layer.new_state(2)
    assert list(state.tensors) == ["S"] and state.S.shape == (2, 4, 8, 8)
    with torch.no_grad():
        x = rows(2, 5, 32)
        assert relative(layer(x, state), layer(x)) < 1e-6
    assert list(layers.GatedLinearAttention(32, 4, "mlstm").new_state(3).tensors) == ["S", "z", "m"]


LAYERS = {
    "Mamba": lambda **factory: layers.Mamba(32, **factory),
    "Mamba2": lambda **factory: layers.Mamba2(32, 4, 8, state_size=8, **factory),
    "GatedDeltaNet": lambda **factory: layers.GatedDeltaNet(32, 2, 4, key_head_dim=8, value_head_dim=8, **factory),
    "Rwkv4": lambda **factory: layers.Rwkv4(32, **factory),
    "Rwkv6": lambda **factory: layers.Rwkv6(32, head_size=8, **factory),
    "MultiScaleRetention": lambda **factory: layers.MultiScaleRetention(32, 4, **factory),
    "H3": lambda **factory: layers.H3(32, head_dim=8, state_size=6, **factory),
    "GatedLinearAttention": lambda **factory: layers.GatedLinearAttention(32, 4, **factory),
}


@pytest.mark.parametrize("name", LAYERS)
def test_sixteen_bits(name):
    layer = randomise(LAYERS[name](dtype=torch.bfloat16))
    x, wide = rows(2, 9, 32).bfloat16(), copy.deepcopy(layer).float()
    y = layer(x)
    assert y.dtype == torch.bfloat16 and relative(y.float(), wide(x.float())) < 0.1
    y.float().sum().backward()
    with torch.no_grad():
        state = layer.new_state(2)
        stepped = torch.stack([layer.step(x[:, t], state) for t in range(9)], 1)
        assert stepped.dtype == torch.bfloat16 and relative(stepped.float(), y.float()) < 0.1
        assert all(x.dtype == torch.float32 or key == "shift" for key, x in state.tensors.items())


@pytest.mark.parametrize("name", LAYERS)
def test_float64(name):
    layer, x = randomise(LAYERS[name]().double()), rows(2, 13, 32).double()
    check_steps(layer, x, tolerance=1e-12)
    assert all(x.dtype == torch.float64 for x in layer.new_state(1).tensors.values())
    assert relative(copy.deepcopy(layer).float()(x.float()).double(), layer(x)) < 1e-4


@pytest.mark.parametrize("name", LAYERS)
def test_no_state_depends_on_the_default_dtype(name):
    layer, x = randomise(LAYERS[name](dtype=torch.float32)), rows(2, 13, 32)
    try:
        torch.set_default_dtype(torch.bfloat16)
        check_steps(layer, x, tolerance=2e-5)
        narrow = LAYERS[name]()
        check_decodes(narrow, x.bfloat16())
        assert {x.dtype for key, x in narrow.new_state(1).tensors.items() if key != "shift"} == {torch.float32}
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(name, dtype):
    layer, x = randomise(LAYERS[name]()), rows(2, 9, 32).to(dtype)
    wide = layer(x.float())
    with torch.autocast("cpu", torch.bfloat16):
        check_decodes(layer, x, wide)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert layer.step(x[:, 0], layer.new_state(2)).dtype == layer(x).dtype == torch.bfloat16


@pytest.mark.parametrize("name", LAYERS)
def test_weights_that_are_loaded_are_all_that_there_is(name):
    layer, x = randomise(LAYERS[name]()), rows(2, 9, 32)
    with torch.device("meta"):
        of_nothing = LAYERS[name]()
    for other in (of_nothing, LAYERS[name](device="meta"), copy.deepcopy(layer)):
        other = other.to_empty(device="cpu")
        for buffer in other.buffers():
            buffer.fill_(torch.nan)
        assert torch.equal(loaded(other, layer)(x), layer(x))


def test_no_dtype_rounds_the_decay_of_retention():
    layer = layers.MultiScaleRetention(32, 4)
    exact = torch.log1p(-torch.exp2(-5 - torch.arange(4, dtype=torch.float64)))
    assert torch.equal(layer.bfloat16().float().log_decay, exact.float())
    torch.testing.assert_close(layer.half().double().log_decay, exact, rtol=1e-15, atol=0)


@torch.no_grad()
def test_sixteen_bits_do_not_round_the_decay_of_mamba2():
    """Rows of zeros leave the decay of the state alone."""
    layer = layers.Mamba2(32, 8, 4, dtype=torch.bfloat16)
    layer.A_log.copy_(torch.linspace(0, 1, 8))
    layer.dt_bias.fill_(-3)
    layer.conv1d.bias.zero_()
    state = layer.new_state(2)
    state.tensors["ssm"] = torch.ones_like(state.ssm)
    layer(torch.zeros(2, 64, 32, dtype=torch.bfloat16), state)
    step = torch.nn.functional.softplus(layer.dt_bias.double())
    expected = torch.exp(-64 * step * layer.A_log.double().exp())[:, None, None]
    torch.testing.assert_close(state.ssm.double(), expected.expand_as(state.ssm), rtol=1e-4, atol=0)


def test_states():
    layer, x = randomise(layers.Mamba(8, state_size=4)), rows(3, 5, 8)
    state = layer.new_state(3)
    assert repr(state) == "<heed.torch.nn.State: lengths=[0, 0, 0], conv=[3, 16, 3], ssm=[3, 16, 4]>"
    assert state.nbytes == 4 * 3 * 16 * 7 and state.batch == 3
    with torch.no_grad():
        layer(x, state)
    forks = state.fork(), copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state))
    state.reorder([2, 0, 0])
    for fork in forks:
        assert fork.lengths.tolist() == [5, 5, 5] and torch.equal(fork.ssm[[2, 0, 0]], state.ssm)
    for indices in ([0, 1], [0, 1, 3], [0, -1, 1], [0.0, 1.0, 2.0]):
        with pytest.raises(heed.InvalidArgument, match="^State.reorder: indices is"):
            state.reorder(indices)
    with pytest.raises(AttributeError, match="'State' object has no attribute 'S'"):
        state.S
    before = state.fork()
    with torch.no_grad(), pytest.raises(heed.InvalidArgument, match="Mamba: lengths is"):
        layer(x, state, lengths=[6, 0, 0])
    assert torch.equal(before.ssm, state.ssm) and state.lengths.tolist() == [5, 5, 5]
    empty = layer.new_state(0)
    with torch.no_grad():
        assert layer(x[:0], empty).shape == (0, 5, 8) and layer(x[:, :0], state).shape == (3, 0, 8)
    assert state.lengths.tolist() == [5, 5, 5]


@pytest.mark.parametrize("call, message", [
    (lambda: layers.Mamba(32, state_size=0), "Mamba: state_size is 0, expected an int of at least 1"),
    (lambda: layers.Mamba2(32, 3, 8, n_groups=2), "Mamba2: num_heads is 3, expected a multiple of n_groups, 2"),
    (lambda: layers.Mamba2(32, 4, 8, time_step_limit=(0, "inf")),
     r"Mamba2: time_step_limit is \(0, 'inf'\), expected two numbers"),
    (lambda: layers.GatedDeltaNet(32, 2, 3, key_head_dim=4, value_head_dim=4),
     "GatedDeltaNet: num_value_heads is 3, expected a multiple of num_key_heads"),
    (lambda: layers.Rwkv4(True), "Rwkv4: hidden_size is True, expected an int"),
    (lambda: layers.Rwkv6(36, head_size=8), "Rwkv6: attention_hidden_size is 36, expected a multiple of head_size, 8"),
    (lambda: layers.Rwkv6.from_config(SimpleNamespace(hidden_size=64)),
     "Rwkv6.from_config: config is a SimpleNamespace without head_size"),
    (lambda: layers.MultiScaleRetention(36, 4, log_decay=[0.0]),
     r"MultiScaleRetention: hidden_size is 36, expected a multiple of 2 num_heads, 8"),
    (lambda: layers.MultiScaleRetention(32, 4, log_decay=[0.0]),
     r"MultiScaleRetention: log_decay has shape \[1\], expected \[4\]"),
    (lambda: layers.H3(32, head_dim=5), "H3: hidden_size is 32, expected a multiple of head_dim, 5"),
    (lambda: layers.H3(32, state_size=3), "H3: state_size is 3, expected a multiple of a pair of modes, 2"),
    (lambda: layers.GatedLinearAttention(32, 4, "ssd"),
     "GatedLinearAttention: recurrence is 'ssd', expected one of 'linear_attention', 'based'"),
    (lambda: layers.GatedLinearAttention(30, 4),
     "GatedLinearAttention: hidden_size is 30, expected a multiple of num_heads, 4"),
    (lambda: layers.Mamba(32)(rows(2, 3, 31)), r"Mamba: x has shape \[2, 3, 31\], expected \[B, T, 32\]"),
    (lambda: layers.Mamba(32)(rows(2, 3, 32), layers.Mamba(32).new_state(2)),
     "Mamba: state is given where gradients are on"),
    (lambda: layers.Mamba(32).step(rows(2, 32), heed.torch.KVCache(2, 1, 4)),
     "Mamba: state is of type KVCache, expected a State of new_state"),
])
def test_errors_name_the_argument(call, message):
    with pytest.raises(heed.InvalidArgument, match="^" + message):
        call()
