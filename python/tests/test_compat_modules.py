# heed.compat's modules of fla and mamba_ssm and its padding and rotary functions, against plain references in float64.
import itertools
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

from torch_nn_checks import relative  # noqa: E402

import heed  # noqa: E402
from heed.compat import fla, flash_attn, mamba_ssm  # noqa: E402


def normal(*shape, seed=0, grad=True):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_(grad)


def check(results, expected, leaves):
    """Values and gradients of one tensor or several."""
    results, expected = ((x,) if isinstance(x, torch.Tensor) else tuple(x) for x in (results, expected))
    weights = [normal(*x.shape, seed=50 + i, grad=False) for i, x in enumerate(expected)]
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    got, wanted = (torch.autograd.grad(sum((x * w).sum() for x, w in zip(xs, weights)), leaves, retain_graph=True)
                   for xs in (results, expected))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@torch.no_grad()
def randomise(module, seed=3):
    for i, parameter in enumerate(module.parameters()):
        noise = normal(*parameter.shape, seed=seed + i, grad=False).to(parameter.dtype)
        parameter.copy_(0.3 * noise if parameter.dim() > 1 else 1 + 0.2 * noise)
    return module


# --- norms ------------------------------------------------------------------------------------------------------------


def plain_norm(x, weight, bias, eps, rms, groups=1):
    """Group by group."""
    parts = []
    for part in x.chunk(groups, -1):
        middle = 0 if rms else part.mean(-1, keepdim=True)
        variance = ((part - middle) ** 2).mean(-1, keepdim=True)
        parts.append((part - middle) / (variance + eps).sqrt())
    y = torch.cat(parts, -1) * (1 if weight is None else weight)
    return y if bias is None else y + bias


NORMS = {  # {name: (constructor of 12 channels, rms, groups, activation of a gate)}
    "LayerNorm": (lambda **o: fla.LayerNorm(12, bias=True, eps=0.1, **o), False, 1, None),
    "RMSNorm": (lambda **o: fla.RMSNorm(12, eps=0.1, **o), True, 1, None),
    "GroupNorm": (lambda **o: fla.GroupNorm(3, 12, bias=True, eps=0.1, **o), False, 3, None),
    "GroupNorm rms": (lambda **o: fla.GroupNorm(4, 12, eps=0.1, is_rms_norm=True, **o), True, 4, None),
    "FusedLayerNormGated": (lambda **o: fla.FusedLayerNormGated(12, bias=True, eps=0.1, **o), False, 1, "silu"),
    "FusedRMSNormGated": (lambda **o: fla.FusedRMSNormGated(12, eps=0.1, **o), True, 1, "silu"),
    "FusedRMSNormGated sigmoid": (lambda **o: fla.FusedRMSNormGated(12, eps=0.1, activation="sigmoid", **o), True, 1,
                                  "sigmoid"),
    "FusedLayerNormSwishGate": (lambda **o: fla.FusedLayerNormSwishGate(12, eps=0.1, **o), False, 1, "silu"),
    "FusedRMSNormSwishGate": (lambda **o: fla.FusedRMSNormSwishGate(12, eps=0.1, **o), True, 1, "silu"),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("affine, residual, prenorm",
                         [(True, True, True), (True, False, False), (False, True, False), (False, False, True)])
def test_norms(name, affine, residual, prenorm):
    make, rms, groups, activation = NORMS[name]
    norm = randomise(make(elementwise_affine=affine, dtype=torch.float64))
    x, other, gate = normal(2, 5, 12), normal(2, 5, 12, seed=1) if residual else None, normal(2, 5, 12, seed=2)
    whole = x + other if residual else x
    y = plain_norm(whole, norm.weight, norm.bias, 0.1, rms, groups)
    inputs = [x] if activation is None else [x, gate]
    if activation is not None:
        y = y * torch.sigmoid(gate) * (gate if activation == "silu" else 1)
    leaves = [z for z in (*inputs, other, *norm.parameters()) if z is not None]
    check(norm(*inputs, residual=other, prenorm=prenorm), (y, whole) if prenorm else y, leaves)
    if "Gated" not in name:
        assert set(norm.state_dict()) == ({"weight"} | ({"bias"} if norm.bias is not None else set()) if affine
                                          else set())


@pytest.mark.parametrize("name, rms, groups",
                         [("LayerNormLinear", False, 1), ("RMSNormLinear", True, 1), ("GroupNormLinear", False, 3)])
def test_norms_with_a_product(name, rms, groups):
    sizes = (3, 12) if groups > 1 else (12,)
    norm = randomise(getattr(fla, name)(*sizes, bias=True, dtype=torch.float64))
    x, weight, bias = normal(2, 5, 12), normal(7, 12, seed=1), normal(7, seed=2)
    expected = plain_norm(x, norm.weight, norm.bias, 1e-5, rms, groups) @ weight.T + bias
    check(norm(x, weight, bias), expected, (x, weight, bias, *norm.parameters()))


@pytest.mark.parametrize("name, rms", [("FusedLayerNormSwishGateLinear", False), ("FusedRMSNormSwishGateLinear", True)])
def test_gated_norms_with_a_product(name, rms):
    norm = randomise(getattr(fla, name)(12, dtype=torch.float64))
    x, gate, weight = normal(2, 5, 12), normal(2, 5, 12, seed=3), normal(7, 12, seed=1)
    expected = plain_norm(x, norm.weight, None, 1e-5, rms) * gate * torch.sigmoid(gate) @ weight.T
    check(norm(x, gate, weight), expected, (x, gate, weight, norm.weight))
    with pytest.raises(heed.InvalidArgument, match=f"{name}: weight is None"):
        norm(x, gate)


def test_functions_of_norms_are_their_modules():
    x, w, b, g = (normal(2, 4, 12, grad=False), normal(12, seed=1, grad=False), normal(12, seed=2, grad=False),
                  normal(2, 4, 12, seed=3, grad=False))
    m, c = normal(5, 12, seed=4, grad=False), normal(5, seed=5, grad=False)
    for got, expected in (
            (fla.layer_norm(x, w, b), plain_norm(x, w, b, 1e-5, False)),
            (fla.layer_norm(x, w, b, is_rms_norm=True), plain_norm(x, w, b, 1e-5, True)),
            (fla.rms_norm(x, w, b, eps=0.2), plain_norm(x, w, b, 0.2, True)),
            (fla.group_norm(x, w, b, num_groups=4), plain_norm(x, w, b, 1e-5, False, 4)),
            (fla.layer_norm_linear(x, w, b, m, c, num_groups=2), plain_norm(x, w, b, 1e-5, False, 2) @ m.T + c),
            (fla.rms_norm_linear(x, w, b, m, None), plain_norm(x, w, b, 1e-5, True) @ m.T),
            (fla.layer_norm_gated(x, g, w, b), plain_norm(x, w, b, 1e-6, False) * g * torch.sigmoid(g)),
            (fla.rms_norm_gated(x, g, w, None, "sigmoid"), plain_norm(x, w, None, 1e-6, True) * torch.sigmoid(g)),
            (fla.layer_norm_swish_gate_linear(x, g, w, b, m, c), plain_norm(x, w, b, 1e-6, False)
             * g * torch.sigmoid(g) @ m.T + c), (fla.rms_norm_swish_gate_linear(x, g, w, None, m, None),
                                                 plain_norm(x, w, None, 1e-6, True) * g * torch.sigmoid(g) @ m.T)):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_residuals_keep_their_dtype():
    norm = fla.RMSNorm(12, dtype=torch.bfloat16)
    x, residual = torch.randn(3, 12).bfloat16(), torch.randn(3, 12)
    y, past = norm(x, residual=residual, prenorm=True)
    assert (y.dtype, past.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(past, x.float() + residual)
    assert norm(x, prenorm=True, residual_in_fp32=True)[1].dtype == torch.float32
    assert norm(x, prenorm=True)[1].dtype == torch.bfloat16


@pytest.mark.parametrize("rms, gated, before, group",
                         list(itertools.product((True, False), (True, False), (True, False), (None, 4))))
def test_gated_norms_of_mamba(rms, gated, before, group):
    kind = mamba_ssm.RMSNormGated if rms else mamba_ssm.LayerNormGated
    norm = randomise(kind(12, eps=0.1, group_size=group, norm_before_gate=before, dtype=torch.float64))
    x, z = normal(2, 5, 12), normal(2, 5, 12, seed=1)
    gate = z * torch.sigmoid(z) if gated else 1
    groups = 3 if group else 1
    expected = (plain_norm(x, norm.weight, norm.bias, 0.1, rms, groups) * gate if before
                else plain_norm(x * gate, norm.weight, norm.bias, 0.1, rms, groups))
    check(norm(x, z if gated else None), expected, (x, *((z,) if gated else ()), *norm.parameters()))
    function = mamba_ssm.rmsnorm_fn if rms else mamba_ssm.layernorm_fn
    assert torch.equal(function(x, norm.weight, norm.bias, z if gated else None, 0.1, group, before),
                       norm(x, z if gated else None))
    assert list(norm.state_dict()) == (["weight"] if rms else ["weight", "bias"])


def test_plain_norms_of_mamba():
    x, w, b, residual = normal(2, 5, 12), normal(12, seed=1), normal(12, seed=2), normal(2, 5, 12, seed=3)
    y, past = mamba_ssm.layer_norm_fn(x, w, b, residual, eps=0.1, prenorm=True)
    check((y, past), (plain_norm(x + residual, w, b, 0.1, False), x + residual), (x, w, b, residual))
    check(mamba_ssm.layer_norm_fn(x, w, None, is_rms_norm=True), plain_norm(x, w, None, 1e-6, True), (x, w))
    check(mamba_ssm.rms_norm_fn(x, w, b, residual), plain_norm(x + residual, w, b, 1e-6, True), (x, w, b, residual))
    norm = randomise(mamba_ssm.RMSNorm(12, dtype=torch.float64))
    check(norm(x, residual), plain_norm(x + residual, norm.weight, None, 1e-5, True), (x, residual, norm.weight))
    for options, message in (({"x1": x}, "x1 is given as Tensor"), ({"dropout_p": 0.1}, "dropout_p is 0.1"),
                             ({"return_dropout_mask": True}, "return_dropout_mask")):
        with pytest.raises(heed.Unsupported, match=f"layer_norm_fn: {message}"):
            mamba_ssm.layer_norm_fn(x, w, b, **options)


# --- fla.modules ------------------------------------------------------------------------------------------------------


def plain_convolution(x, weight, bias, before, silu):
    """One sequence x [T, D] behind the last W inputs, before [D, W]: rows, and the last W inputs now."""
    W = weight.shape[1]
    inputs = torch.cat((before.T, x))
    rows = [(inputs[t + 1:t + 1 + W] * weight.T).sum(0) + (0 if bias is None else bias) for t in range(len(x))]
    y = torch.stack(rows) if rows else x
    return y * torch.sigmoid(y) if silu else y, inputs[len(inputs) - W:].T


@pytest.mark.parametrize("bias, activation, cached, taps",
                         [(True, "silu", True, 4), (False, None, False, 4), (True, "swish", True, 1)])
@pytest.mark.parametrize("lengths", [[9, 9], [2, 2], [1, 5, 0, 7]])
def test_short_convolutions(bias, activation, cached, taps, lengths):
    layer = randomise(fla.ShortConvolution(6, taps, bias=bias, activation=activation, dtype=torch.float64))
    assert {key: list(x.shape) for key, x in layer.state_dict().items()} == {"weight": [6, 1, taps],
                                                                             **({"bias": [6]} if bias else {})}
    packed = len(set(lengths)) > 1
    total, bounds = sum(lengths), torch.tensor([0, *itertools.accumulate(lengths)])
    x = normal(1, total, 6) if packed else normal(len(lengths), lengths[0], 6)
    cache = normal(len(lengths), 6, taps, seed=1) if cached else None
    residual = normal(*x.shape, seed=2)
    parts = [plain_convolution(x.reshape(-1, 6)[begin:end], layer.weight[:, 0], layer.bias,
                               torch.zeros(6, taps).double() if cache is None else cache[i], activation is not None)
             for i, (begin, end) in enumerate(itertools.pairwise(bounds.tolist()))]
    y = torch.cat([rows for rows, _ in parts]).reshape(x.shape) + residual
    leaves = [z for z in (x, cache, residual, *layer.parameters()) if z is not None]
    options = {"residual": residual, "cache": cache, "cu_seqlens": bounds if packed else None}
    check(layer(x, output_final_state=True, **options), (y, torch.stack([last for _, last in parts])), leaves)
    y_alone, nothing = layer(x, **options)
    assert nothing is None
    torch.testing.assert_close(y_alone, y)
    mask = torch.ones(x.shape[:2])
    mask[:, :1] = 0
    if not packed:
        before = x.detach().clone()
        expected = layer(x * mask[..., None], cache=cache)[0]
        for padded in (x, x.detach().masked_fill(mask[..., None] == 0, torch.nan)):
            torch.testing.assert_close(layer(padded, mask=mask, cache=cache)[0], expected)
        assert torch.equal(x, before)


def test_steps_of_short_convolutions_change_the_cache():
    layer = randomise(fla.ShortConvolution(6, 4, bias=True, dtype=torch.float64)).requires_grad_(False)
    x, cache = normal(3, 9, 6, grad=False), torch.zeros(3, 6, 4, dtype=torch.float64)
    whole, last = layer(x, output_final_state=True)
    y, cache = layer(x[:, :6], cache=cache, output_final_state=True)
    rows = [y]
    for t in range(6, 9):
        given = cache
        kind = t % 3
        if kind == 0:
            y, cache = layer(x[:, t:t + 1], cache=given, output_final_state=True)
        elif kind == 1:
            y, cache = fla.causal_conv1d_update(x[:, t], given, None, layer.weight[:, 0], layer.bias, "silu")
            y = y[:, None]
        else:  # one token of each sequence, packed
            y, cache = layer.step(x[:, t][None], None, given, True, torch.arange(4))
            y = y.transpose(0, 1)
        assert cache is given
        rows.append(y)
    torch.testing.assert_close(torch.cat(rows, 1), whole)
    with pytest.raises(TypeError, match="nonsense"):
        layer(x, nonsense=1)
    torch.testing.assert_close(cache, last)


def test_rows():
    x, y = normal(2, 5, 6), normal(2, 5, 6, seed=1)
    sigmoid = lambda z: 1 / (1 + torch.exp(-z))  # noqa: E731
    check(fla.l2norm(x, 0.3), x / ((x * x).sum(-1, keepdim=True) + 0.3).sqrt(), (x,))
    assert fla.L2Norm(output_dtype=torch.bfloat16)(x).dtype == torch.bfloat16
    check(fla.swiglu(x, y), x * sigmoid(x) * y, (x, y))
    weight, bias = normal(4, 6, seed=2), normal(4, seed=3)
    check(fla.swiglu_linear(x, y, weight, bias), (x * sigmoid(x) * y) @ weight.T + bias, (x, y, weight, bias))
    check(fla.logsigmoid(x, 4.0), torch.log(sigmoid(x)) / 4, (x,))
    check(fla.sqrelu(x), x.clamp(min=0) ** 2, (x,))
    gelu = lambda z: z / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)))  # noqa: E731
    check(fla.bias_gelu_impl(x, y), gelu(x + y), (x, y))
    for name, function in {"swish": lambda z: z * sigmoid(z), "silu": lambda z: z * sigmoid(z), "sigmoid": sigmoid,
                           "gelu": gelu, "relu": lambda z: z.clamp(min=0)}.items():
        check(fla.ACT2FN[name](x), function(x), (x,))
    mlp = randomise(fla.GatedMLP(6, intermediate_size=10).double())
    gate = x @ mlp.gate_proj.weight.T
    check(mlp(x), (gate * sigmoid(gate) * (x @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T, (x, *mlp.parameters()))
    assert fla.GatedMLP(96).intermediate_size == 256 and fla.GatedMLP(384).intermediate_size == 1024
    with pytest.raises(heed.Unsupported, match="GatedMLP: hidden_act is 'powlu', expected 'swish'"):
        fla.GatedMLP(6, hidden_act="powlu")


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("lengths", [[5, 5], [2, 0, 1, 4]])
def test_token_shift(lengths, cached):
    packed, bounds = len(set(lengths)) > 1, [0, *itertools.accumulate(lengths)]
    x = normal(1, sum(lengths), 3) if packed else normal(len(lengths), lengths[0], 3)
    cache = normal(len(lengths), 3, seed=1) if cached else None
    deltas, lasts = [], []
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        before = cache[i] if cached else torch.zeros(3).double()
        for row in x.reshape(-1, 3)[begin:end]:
            deltas.append(before - row)
            before = row
        lasts.append(before)
    options = {"cu_seqlens": torch.tensor(bounds) if packed else None, "cache": cache}
    leaves = (x, cache) if cached else (x,)
    check(fla.token_shift(x, output_cache=True, **options), (torch.stack(deltas).reshape(x.shape), torch.stack(lasts)),
          leaves)
    assert torch.equal(fla.token_shift(x, **options), fla.token_shift(x, output_cache=True, **options)[0])


def turned(x, angle, interleaved):
    """A row's pairs of channels, each rotated by its angle."""
    y, width = x.clone(), len(angle)
    for i, a in enumerate(angle):
        one, two = (2 * i, 2 * i + 1) if interleaved else (i, i + width)
        y[..., one] = x[..., one] * a.cos() - x[..., two] * a.sin()
        y[..., two] = x[..., one] * a.sin() + x[..., two] * a.cos()
    return y


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, [4, 0, 1]])
@pytest.mark.parametrize("packed", [False, True])
def test_rotary_positions(interleaved, offsets, packed):
    lengths = [2, 5, 0] if packed else [4, 4, 4]
    angles = torch.outer(torch.arange(20.0), 10000 ** (-torch.arange(3) / 3)).double()
    x = normal(7, 2, 8) if packed else normal(3, 4, 2, 8)
    begins = offsets if isinstance(offsets, list) else [offsets] * 3
    rows = iter(x.reshape(-1, 2, 8))
    expected = torch.stack([turned(next(rows), angles[begin + t], interleaved) for begin, n in zip(begins, lengths)
                            for t in range(n)]).reshape(x.shape)
    bounds = torch.tensor([0, 2, 7, 7]) if packed else None
    given = torch.tensor(offsets) if isinstance(offsets, list) else offsets
    cos, sin = angles.cos(), angles.sin()
    check(flash_attn.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=given, cu_seqlens=bounds), expected,
          (x,))
    of_fla = fla.rotary_embedding(x[None] if packed else x, cos, sin, interleaved, seqlen_offsets=given,
                                  cu_seqlens=bounds)
    torch.testing.assert_close(of_fla.reshape(x.shape), expected)
    written = x.detach().clone()
    assert flash_attn.apply_rotary_emb(written, cos, sin, interleaved, True, given, bounds) is written
    torch.testing.assert_close(written, expected.detach())
    q, k = fla.RotaryEmbedding(6, interleaved=interleaved)(*([x[None] if packed else x] * 2), seqlen_offset=given,
                                                           cu_seqlens=bounds)
    torch.testing.assert_close(q.reshape(x.shape), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(q, k)


def test_rotary_errors():
    x, table = torch.zeros(2, 4, 1, 8), torch.zeros(6, 3)
    for call, message in (
            (lambda: flash_attn.apply_rotary_emb(x, table, table, seqlen_offsets=3),
             r"apply_rotary_emb: cos has shape \[6, 3\], expected at least 7 rows, at most 4 columns"),
            (lambda: flash_attn.apply_rotary_emb(x, table, table[:, :2]), "apply_rotary_emb: sin has shape"),
            (lambda: flash_attn.apply_rotary_emb(x, table, table, seqlen_offsets=-1),
             "apply_rotary_emb: seqlen_offsets is -1"),
            (lambda: flash_attn.apply_rotary_emb(x, table, table, cu_seqlens=torch.tensor([0, 4])),
             r"apply_rotary_emb: x has shape \[2, 4, 1, 8\], expected \[T, H, D\]"),
            (lambda: fla.rotary_embedding(x, None, table), "rotary_embedding: cos is of type NoneType")):
        with pytest.raises(heed.InvalidArgument, match=message):
            call()
    with pytest.raises(heed.Unsupported, match="RotaryEmbedding: scale_base is given as float, expected None"):
        fla.RotaryEmbedding(8, scale_base=512.0)


def plain_losses(logits, target, smoothing=0.0, scale=1.0, square=0.0, cap=None):
    """Row by row; ignored rows are 0."""
    rows = []
    for z, label in zip(logits * scale, target.tolist()):
        z = cap * torch.tanh(z / cap) if cap else z
        lse = torch.log(torch.exp(z).sum())
        rows.append((lse - (1 - smoothing) * z[label] - smoothing * z.mean() + square * lse**2) if label != -100
                    else z.sum() * 0)
    return torch.stack(rows)


def test_rows_that_losses_ignore_may_be_nan():
    target = torch.tensor([3, -100, 0])
    spoil = (target == -100)[:, None]
    x, weight, bias, logits = normal(3, 5), normal(9, 5, seed=1), normal(9, seed=2), normal(3, 9, seed=3)
    calls = ((logits, lambda z: fla.FusedCrossEntropyLoss(label_smoothing=0.1, lse_square_scale=0.3)(z, target),
              [logits]),
             (x, lambda z: fla.FusedLinearCrossEntropyLoss(label_smoothing=0.1)(z, target, weight, bias),
              [x, weight, bias]))
    for rows, loss, leaves in calls:
        check([loss(rows.masked_fill(spoil, torch.nan))], [loss(rows.masked_fill(spoil, 0))], leaves)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, {"logit_scale": 0.5, "logit_softcapping": 2.0}])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses(options, reduction):
    logits, target = normal(6, 9), torch.tensor([3, -100, 0, 8, -100, 1])
    names = {"label_smoothing": "smoothing", "logit_scale": "scale", "logit_softcapping": "cap"}
    rows = plain_losses(logits, target, square=0.3, **{names[key]: value for key, value in options.items()})
    reduce = {"mean": lambda x: x.sum() / 4, "sum": torch.sum, "none": lambda x: x}[reduction]
    loss = fla.FusedCrossEntropyLoss(reduction=reduction, lse_square_scale=0.3, return_z_loss=True, **options)
    got, of_lse = loss(logits, target)
    check(got, reduce(rows), (logits,))
    without = plain_losses(logits, target, **{names[key]: value for key, value in options.items()})
    torch.testing.assert_close(of_lse, reduce(rows - without).detach())
    if reduction != "none":
        x, weight, bias = normal(2, 3, 5), normal(9, 5, seed=1), normal(9, seed=2)
        rows = plain_losses(x.flatten(0, 1) @ weight.T + bias, target,
                            **{names[key]: value for key, value in options.items()})
        linear = fla.FusedLinearCrossEntropyLoss(reduction=reduction, **options)
        check(linear(x, target.view(2, 3), weight, bias), reduce(rows), (x, weight, bias))
    for kind in (fla.FusedCrossEntropyLoss, fla.FusedLinearCrossEntropyLoss):
        with pytest.raises(heed.InvalidArgument, match="reduction is 'most'"):
            kind(reduction="most")


def test_losses_of_bf16_logits_are_computed_in_float32():
    logits, target = normal(6, 9).detach().to(torch.bfloat16), torch.tensor([3, -100, 0, 8, -100, 1])
    for got, expected in zip(fla.cross_entropy_loss(logits, target, logit_scale=0.3, lse_square_scale=0.1),
                             fla.cross_entropy_loss(logits.float(), target, logit_scale=0.3, lse_square_scale=0.1)):
        assert got.dtype == torch.float32 and torch.equal(got, expected)


# --- padding ----------------------------------------------------------------------------------------------------------


def test_padding_of_flash_attn():
    x = normal(3, 4, 2, 5)
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]])
    more = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    kept = [(0, 0), (0, 1), (1, 1), (1, 2), (1, 3)]
    rows, indices, bounds, longest, used = flash_attn.unpad_input(x, mask)
    check(rows, torch.stack([x[at] for at in kept]), (x,))
    assert (indices.tolist(), bounds.tolist(), longest, used.tolist()) == ([0, 1, 5, 6, 7], [0, 2, 5, 5], 3, [2, 3, 0])
    assert bounds.dtype == torch.int32 and used.dtype == torch.int32
    back = flash_attn.pad_input(rows, indices, 3, 4)
    check(back, x * mask[..., None, None], (x,))
    _, indices, bounds, longest, used = flash_attn.unpad_input(x, mask.bool(), more.bool())
    assert (indices.tolist(), bounds.tolist(), longest, used.tolist()) == (
        [0, 1, 2, 5, 6, 7], [0, 3, 6, 6], 3, [2, 3, 0])
    inside = torch.tensor([[2, 1, 0, 0], [4, 0, 0, 0], [1, 1, 0, 0]])
    rows, indices, bounds, longest = flash_attn.unpad_input_for_concatenated_sequences(x, inside)
    assert (indices.tolist(), bounds.tolist(), longest) == ([0, 1, 2, 4, 5, 6, 7, 8, 9], [0, 2, 3, 7, 8, 9], 4)
    assert torch.equal(rows, x.flatten(0, 1)[indices])
    flat = x.flatten(0, 1)
    part, whole = flash_attn.index_first_axis_residual(flat, indices)
    check((part, whole), (torch.stack([flat[i] for i in indices]), flat), (x,))
    with pytest.raises(heed.InvalidArgument,
                       match=r"unpad_input: attention_mask has shape \[3, 4\], expected \[4, 3\]"):
        flash_attn.unpad_input(x.transpose(0, 1), mask)


def test_padding_of_fla():
    k, v = normal(3, 4, 5), normal(3, 4, 2, 2, seed=1)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]])
    q = normal(3, 4, 5, seed=2)
    rows, (ks, vs), indices, (cu_q, cu_k), most = fla.unpad_input(q, (k, v), mask, 4)
    at = [2, 3, 4, 5, 6, 7, 11]
    check((rows, ks, vs), tuple(torch.stack([x.flatten(0, 1)[i] for i in at]) for x in (q, k, v)), (q, k, v))
    assert indices.tolist() == at and cu_q.tolist() == cu_k.tolist() == [0, 2, 6, 7] and most == (4, 4)
    check(fla.pad_input(rows, indices, 3, 4), q * mask[..., None], (q,))
    (one,), (ks,), indices, (cu_q, cu_k), most = fla.unpad_input((q[:, :1],), (k,), mask, 1, keepdim=True)
    assert one.shape == (1, 3, 5) and ks.shape == (1, 7, 5) and (cu_q.tolist(), cu_k.tolist(),
                                                                 most) == ([0, 1, 2, 3], [0, 2, 6, 7], (1, 4))
    assert torch.equal(one[0], q[:, 0])
    with pytest.raises(heed.Unsupported, match="unpad_input: q_len is 2, expected 1 or the length of the states, 4"):
        fla.unpad_input(q[:, :2], (k,), mask, 2)
    bounds = fla.prepare_cu_seqlens_from_mask(mask)
    assert bounds.tolist() == [0, 2, 6, 7] and bounds.dtype == torch.int32 and fla.get_unpad_data(mask)[2] == 4
    assert fla.prepare_lens(bounds).tolist() == fla.prepare_lens_from_mask(mask).tolist() == [2, 4, 1]
    assert fla.prepare_cu_seqlens_from_lens(torch.tensor([2, 4, 1]), torch.int64).dtype == torch.int64
    assert fla.prepare_token_indices(bounds).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [1, 2], [1, 3], [2, 0]]


# --- mixers of mamba_ssm ----------------------------------------------------------------------------------------------


def generate(layer, x, first):
    """A prompt and the tokens behind it, one by one, as mamba_ssm's generation calls a layer."""
    inference = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
    with torch.no_grad():
        rows = [layer(x[:, :first], inference_params=inference)]
        for t in range(first, x.shape[1]):
            inference.seqlen_offset = t
            rows.append(layer(x[:, t:t + 1], inference_params=inference))
    return torch.cat(rows, 1), inference.key_value_memory_dict[layer.layer_idx]


@pytest.mark.parametrize("options", [{}, {"d_state": 5, "d_conv": 3, "expand": 3, "dt_rank": 2, "bias": True,
                                          "conv_bias": False}, {"d_conv": 1}])
def test_mamba_is_the_mixer_of_transformers(options):
    mamba = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    from transformers import MambaConfig

    layer = randomise(mamba_ssm.Mamba(24, layer_idx=4, **options))
    assert layer.dt_rank == options.get("dt_rank", 2)  # "auto": 24 / 16, rounded up
    config = MambaConfig(hidden_size=24, state_size=layer.d_state, conv_kernel=layer.d_conv, expand=layer.expand,
                         time_step_rank=layer.dt_rank, use_bias="bias" in options, use_conv_bias="bias" not in options)
    original = mamba.MambaMixer(config, 0)
    original.load_state_dict(layer.state_dict(), strict=True)
    x = normal(2, 13, 24, grad=False).float()
    y = layer(x)
    assert relative(y, original(x)) <= 1e-5
    loss = normal(*y.shape, seed=7, grad=False).float()
    parameters = [original.get_parameter(name) for name, _ in layer.named_parameters()]
    for a, b in zip(torch.autograd.grad((y * loss).sum(), list(layer.parameters())),
                    torch.autograd.grad((original(x) * loss).sum(), parameters), strict=True):
        assert float((a - b).abs().max()) <= 5e-5 * float(b.abs().max())
    for first in (1, 2, 7):
        generated, (conv, ssm) = generate(layer, x, first)
        assert relative(generated, y) <= 1e-5
        assert conv.shape == (2, layer.d_inner, layer.d_conv) and ssm.shape == (2, layer.d_inner, layer.d_state)
    half = mamba_ssm.Mamba(24, dtype=torch.bfloat16)
    assert half.A_log.dtype == half.D.dtype == torch.float32 and half(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{}, {"d_conv": 3, "bias": True, "conv_bias": False, "dt_limit": (0.9, 1.2),
                                          "ngroups": 1}, {"d_conv": 1}])
def test_mamba2_is_the_mixer_of_transformers(options):
    mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    from transformers import Mamba2Config

    options = {"ngroups": 2, **options}
    layer = randomise(mamba_ssm.Mamba2(24, d_state=6, headdim=8, layer_idx=1, **options))
    config = Mamba2Config(hidden_size=24, num_heads=6, head_dim=8, state_size=6,
                          n_groups=layer.ngroups, conv_kernel=layer.d_conv, chunk_size=16, use_bias="bias" in options,
                          use_conv_bias="bias" not in options, time_step_limit=layer.dt_limit)
    original = mamba2.Mamba2Mixer(config, 0)
    original.load_state_dict(layer.state_dict(), strict=True)
    x = normal(2, 13, 24, grad=False).float()
    y = layer(x)
    assert relative(y, original(x)) <= 1e-5
    torch.testing.assert_close(layer(x.flatten(0, 1), seqlen=13), y.flatten(0, 1))
    for first in (1, 2, 7):
        generated, (conv, ssm) = generate(layer, x, first)
        assert relative(generated, y) <= 1e-5
        assert conv.shape == (2, layer.conv1d.weight.shape[0], layer.d_conv) and ssm.shape == (2, 6, 8, 6)


@pytest.mark.parametrize("options", [{"rmsnorm": False}, {"norm_before_gate": True}, {"D_has_hdim": True},
                                     {"d_ssm": 16}, {"d_ssm": 32, "D_has_hdim": True, "rmsnorm": False}])
def test_mamba2_is_its_equations(options):
    layer = randomise(mamba_ssm.Mamba2(24, d_state=5, headdim=8, layer_idx=0, **options).double())
    x = normal(2, 9, 24)
    rest, H, inner = layer.d_inner - layer.d_ssm, layer.nheads, layer.d_ssm

    def plain(x):
        gate, beside, z, u, dt = (x @ layer.in_proj.weight.T).split((rest, rest, inner, inner + 10, H), -1)
        padded = torch.cat((u.new_zeros(2, 3, inner + 10), u), 1)
        u = sum(padded[:, i:i + 9] * layer.conv1d.weight[:, 0, i] for i in range(4)) + layer.conv1d.bias
        u, B, C = (u * torch.sigmoid(u)).split((inner, 5, 5), -1)
        dt, A = torch.log(1 + torch.exp(dt + layer.dt_bias)), -torch.exp(layer.A_log)
        S, rows = u.new_zeros(2, H, 8, 5), []
        skip = layer.D.view(H, -1)
        for t in range(9):
            heads = u[:, t].view(2, H, 8)
            S = (torch.exp(dt[:, t] * A)[..., None, None] * S
                 + (dt[:, t, :, None] * heads)[..., None] * B[:, t, None, None])
            rows.append((torch.einsum("bhpn,bn->bhp", S, C[:, t]) + skip * heads).flatten(1))
        y = torch.stack(rows, 1)
        open_gate = z * torch.sigmoid(z)
        if not layer.rmsnorm:
            y = y * open_gate
        elif layer.norm.norm_before_gate:
            y = plain_norm(y, layer.norm.weight, None, 1e-5, True) * open_gate
        else:
            y = plain_norm(y * open_gate, layer.norm.weight, None, 1e-5, True)
        return torch.cat((gate * torch.sigmoid(gate) * beside, y), -1) @ layer.out_proj.weight.T

    y = layer(x)
    check(y, plain(x), (x, *layer.parameters()))
    generated, _ = generate(layer, x.detach(), 4)
    torch.testing.assert_close(generated, y.detach(), rtol=1e-9, atol=1e-9)


def test_packed_sequences_and_their_states():
    layer = randomise(mamba_ssm.Mamba2(24, d_state=5, headdim=8, layer_idx=0))
    x, bounds = normal(1, 11, 24, grad=False).float(), torch.tensor([0, 4, 5, 11])
    index = torch.repeat_interleave(torch.arange(3), torch.diff(bounds))[None].int()
    y = layer(x, seq_idx=index)
    for begin, end in itertools.pairwise(bounds.tolist()):
        torch.testing.assert_close(y[:, begin:end], layer(x[:, begin:end]), rtol=1e-5, atol=1e-5)
    inference = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
    with torch.no_grad():
        layer(x, seq_idx=index, cu_seqlens=bounds, inference_params=inference)
        inference.seqlen_offset = 1
        more = normal(3, 1, 24, seed=5, grad=False).float()
        stepped = layer(more, inference_params=inference)
        for i, (begin, end) in enumerate(itertools.pairwise(bounds.tolist())):
            whole = layer(torch.cat((x[:, begin:end], more[i:i + 1]), 1))
            torch.testing.assert_close(stepped[i, 0], whole[0, -1], rtol=1e-5, atol=1e-5)


def test_mixers_refuse_what_they_cannot_do():
    with pytest.raises(heed.Unsupported, match="Mamba2: process_group is given as object, expected None"):
        mamba_ssm.Mamba2(24, headdim=8, process_group=object())
    with pytest.raises(heed.InvalidArgument, match="Mamba2: d_ssm is 48, expected a multiple of headdim, 7"):
        mamba_ssm.Mamba2(24, headdim=7)
    with pytest.raises(heed.InvalidArgument, match="Mamba: dt_init is 'most', expected one of 'random', 'constant'"):
        mamba_ssm.Mamba(24, dt_init="most")
    layer = mamba_ssm.Mamba(24)
    with pytest.raises(heed.InvalidArgument,
                       match="Mamba: layer_idx is None, expected a number beside inference_params"):
        layer(torch.zeros(1, 1, 24), inference_params=SimpleNamespace(seqlen_offset=0, key_value_memory_dict={}))
    constant = mamba_ssm.Mamba(32, dt_init="constant", dt_scale=2.0)
    assert bool((constant.dt_proj.weight == 2 * 2**-0.5).all())
    for kind in (mamba_ssm.Mamba, mamba_ssm.Mamba2):
        steps = F.softplus(getattr(kind(64), "dt_proj", SimpleNamespace(bias=None)).bias if kind is mamba_ssm.Mamba
                           else kind(64).dt_bias)
        assert 0.99e-3 <= steps.min().item() and steps.max().item() <= 0.101
