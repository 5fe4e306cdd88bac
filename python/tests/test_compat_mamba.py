# heed.compat.mamba_ssm and heed.compat.causal_conv1d against loops over tokens in float64, and layers of Transformers.
import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

import heed  # noqa: E402
from heed.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states  # noqa: E402
from heed.compat.mamba_ssm import (  # noqa: E402
    mamba_chunk_scan_combined, mamba_inner_fn, mamba_split_conv1d_scan_combined, selective_scan_fn,
    selective_state_update)

INF = float("inf")


def normal(*shape, seed=0, grad=True, scale=1.0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return x.requires_grad_(grad)


def check(results, expected, leaves):
    """Values and gradients of all of them."""
    weights = [normal(*x.shape, seed=50 + i, grad=False) for i, x in enumerate(expected)]
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    got, wanted = (torch.autograd.grad(sum((x * w).sum() for x, w in zip(xs, weights)), leaves)
                   for xs in (results, expected))
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, msg=lambda text, i=i: f"gradient {i}: {text}")


# --- causal_conv1d ----------------------------------------------------------------------------------------------------


def convolved(x, weight, bias, before, activation):
    """[B, D, T] after `before` [B, D, W - 1], tap by tap."""
    W, T = weight.shape[1], x.shape[2]
    y = torch.cat((before, x), 2)
    o = sum(weight[:, i, None] * y[:, :, i:i + T] for i in range(W)) + (0 if bias is None else bias[:, None])
    return o * torch.sigmoid(o) if activation else o, y[:, :, y.shape[2] - W + 1:]


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("has_bias, has_states", [(True, True), (False, False)])
@pytest.mark.parametrize("tokens, taps", [(1, 4), (9, 4), (3, 1)])
def test_causal_conv1d_fn(activation, has_bias, has_states, tokens, taps):
    x, weight, bias = normal(2, 5, tokens), normal(5, taps, seed=1), normal(5, seed=2) if has_bias else None
    states = normal(2, 5, taps - 1, seed=3) if has_states else None
    zeros = torch.zeros(2, 5, taps - 1).double()
    expected = convolved(x, weight, bias, zeros if states is None else states, activation)
    leaves = [y for y in (x, weight, bias, states) if y is not None]
    options = {"initial_states": states, "activation": activation}
    check(causal_conv1d_fn(x, weight, bias, return_final_states=True, **options), expected, leaves)
    torch.testing.assert_close(causal_conv1d_fn(x, weight, bias, **options), expected[0])
    out = torch.empty(2, 5, taps - 1, dtype=torch.float64)
    with torch.no_grad():
        assert causal_conv1d_fn(x, weight, bias, return_final_states=True, final_states_out=out, **options)[1] is out
    torch.testing.assert_close(out, expected[1].detach())


def test_causal_conv1d_fn_begins_again_where_the_index_changes():
    x, weight, bias = normal(2, 5, 12), normal(5, 4, seed=1), normal(5, seed=2)
    index = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3, [-1] * 2 + [4] * 10], dtype=torch.int32)
    rows = []
    for b, spans in enumerate([[(0, 5), (5, 9), (9, 12)], [(0, 2), (2, 12)]]):
        parts = [convolved(x[b:b + 1, :, i:j], weight, bias, torch.zeros(1, 5, 3).double(), "silu")[0]
                 for i, j in spans]
        rows.append(torch.cat(parts, 2) * (index[b] >= 0))
    check([causal_conv1d_fn(x, weight, bias, index, activation="silu")], [torch.cat(rows)], (x, weight, bias))
    unread = torch.where(index.unsqueeze(1) < 0, torch.nan, x)
    torch.testing.assert_close(causal_conv1d_fn(unread, weight, bias, index, activation="silu"), torch.cat(rows))
    for name, value in (("initial_states", x[..., :3]), ("return_final_states", True)):
        with pytest.raises(heed.InvalidArgument, match=f"causal_conv1d_fn: {name} is given beside seq_idx"):
            causal_conv1d_fn(x, weight, seq_idx=index, **{name: value})
    with pytest.raises(heed.InvalidArgument, match=r"seq_idx has shape \[12\], expected \[2, 12\]"):
        causal_conv1d_fn(x, weight, seq_idx=index[0])
    with pytest.raises(heed.InvalidArgument, match=r": initial_states has shape \[2,5,2\]"):
        causal_conv1d_fn(x, weight, initial_states=x[..., :2].detach())
    with pytest.raises(heed.InvalidArgument, match="causal_conv1d_fn: activation"):
        causal_conv1d_fn(x, weight, activation="gelu")


@pytest.mark.parametrize("size, taps", [(3, 4), (4, 4), (7, 4), (0, 1), (1, 1)])
@pytest.mark.parametrize("rows", [None, 1, 2, 9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@torch.no_grad()
def test_causal_conv1d_update(size, taps, rows, dtype):
    weight, bias = normal(5, taps, seed=1), normal(5, seed=2)
    x = normal(3, 5, *([] if rows is None else [rows])).to(dtype)
    tokens = x.unsqueeze(-1) if rows is None else x
    state = normal(3, 5, size, seed=3).to(dtype)
    expected, _ = convolved(tokens.double(), weight, bias, state[..., size - taps + 1:].double(), "silu")
    after = torch.cat((state, tokens), 2)[..., tokens.shape[-1]:]
    indices = torch.tensor([4, 0, -1], dtype=torch.int32)  # the third is padding
    pool = torch.zeros(6, 5, size, dtype=dtype)
    pool[[4, 0, 1]] = state
    chosen = causal_conv1d_update(x, pool, weight, bias, "silu", conv_state_indices=indices)
    o = causal_conv1d_update(x, state, weight, bias, "silu")
    assert o.shape == x.shape and o.dtype == dtype and torch.equal(state, after)
    torch.testing.assert_close(o.double().reshape(expected.shape), expected,
                               rtol=1e-10 if dtype == torch.float64 else 2e-2, atol=1e-2 * (dtype != torch.float64))
    assert torch.equal(chosen[:2], o[:2]) and (chosen[2] == 0).all()
    assert (torch.equal(pool[[4, 0]], after[:2]) and (pool[[2, 3, 5]] == 0).all()
            and (size == 0 or not torch.equal(pool[1], after[2])))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("of_weights", [torch.bfloat16, torch.float32, torch.float64])
def test_parameters_of_another_dtype(dtype, of_weights):
    x, weight, bias = normal(2, 5, 9).to(dtype), normal(5, 4, seed=1).to(of_weights), normal(5, seed=2).to(of_weights)
    o, states = causal_conv1d_fn(x, weight, bias, activation="silu", return_final_states=True)
    expected, last = convolved(x.double(), weight.double(), bias.double(), torch.zeros(2, 5, 3).double(), "silu")
    assert o.dtype == states.dtype == dtype
    torch.testing.assert_close(o.double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5,
                               atol=1e-2 if dtype == torch.bfloat16 else 1e-6)
    torch.testing.assert_close(states.double(), last)


@pytest.mark.parametrize("size, taps", [(6, 4), (2, 1), (0, 1)])
@torch.no_grad()
def test_causal_conv1d_update_in_a_ring(size, taps):
    weight, x = normal(5, taps, seed=1), normal(2, 5, 20)
    whole, _ = convolved(x, weight, None, torch.zeros(2, 5, taps - 1).double(), None)
    ring, position, outs = torch.zeros(2, 5, size, dtype=torch.float64), 0, []
    for n in (1, 2, 9, 1, 3, 4):
        outs.append(causal_conv1d_update(x[..., position:position + n], ring, weight,
                                         cache_seqlens=torch.tensor([position] * 2)))
        position += n
    torch.testing.assert_close(torch.cat(outs, 2), whole)
    for t in range(20 - size, 20):
        torch.testing.assert_close(ring[..., t % size], x[..., t])


def test_causal_conv1d_update_refuses():
    x, weight = torch.randn(2, 5), torch.randn(5, 4)
    for state, message in ((torch.zeros(2, 5, 2),
                            r"conv_state has shape \[2, 5, 2\], expected \[2, 5, S\], S at least 3"),
                           (torch.zeros(3, 5, 4), "conv_state has shape")):
        with pytest.raises(heed.InvalidArgument, match=message):
            causal_conv1d_update(x, state, weight)
    with pytest.raises(heed.InvalidArgument, match="causal_conv1d_update: weight requires a gradient"):
        causal_conv1d_update(x, torch.zeros(2, 5, 4), weight.requires_grad_())


def test_causal_conv1d_varlen_states():
    x, states = torch.randn(9, 3), torch.zeros(3, 3, 4)
    for i, (begin, end) in enumerate([(0, 2), (2, 8), (8, 9)]):
        n = min(4, end - begin)
        states[i, :, 4 - n:] = x[end - n:end].T
    assert torch.equal(causal_conv1d_varlen_states(x, torch.tensor([0, 2, 8, 9]), 4), states)
    assert causal_conv1d_varlen_states(x[:0], torch.tensor([0, 0]), 4).equal(torch.zeros(1, 3, 4))


@pytest.mark.parametrize("value", [torch.nan, INF, -INF])
def test_states_of_packed_sequences_hold_their_own_inputs_alone(value):
    x = torch.arange(1.0, 9).unsqueeze(1)
    x[:3] = value
    states = causal_conv1d_varlen_states(x, torch.tensor([0, 3, 5, 8]), 4)
    expected = torch.tensor([[0, value, value, value], [0, 0, 4, 5], [0, 6, 7, 8]]).unsqueeze(1)
    torch.testing.assert_close(states, expected, rtol=0, atol=0, equal_nan=True)


# --- Mamba-1 ----------------------------------------------------------------------------------------------------------


def scanned(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, state=None):
    """Channel d reads B and C of group d // (D / G), [B, G, N, T]."""
    d = delta if delta_bias is None else delta + delta_bias[:, None]
    d = F.softplus(d) if delta_softplus else d
    B, C = (x.expand(u.shape[0], u.shape[2], *x.shape).movedim(1, 3) if x.dim() == 2 else
            (x.unsqueeze(1) if x.dim() == 3 else x).repeat_interleave(u.shape[1] // (1 if x.dim() == 3 else x.shape[1]),
                                                                      1) for x in (B, C))
    S, outs = torch.zeros(*u.shape[:2], A.shape[1]).double() if state is None else state, []
    for t in range(u.shape[2]):
        S = (d[:, :, t, None] * A).exp() * S + d[:, :, t, None] * B[..., t] * u[:, :, t, None]
        outs.append((S * C[..., t]).sum(-1))
    y = torch.stack(outs, 2) + (0 if D is None else D[:, None] * u)
    return y if z is None else y * F.silu(z), S


@pytest.mark.parametrize("B_shape, C_shape", [((2, 3, 7), (2, 3, 7)), ((2, 2, 3, 7), (2, 2, 3, 7)), ((4, 3), (2, 3, 7)),
                                              ((2, 1, 3, 7), (4, 3))])
@pytest.mark.parametrize("all_options", [False, True])
def test_selective_scan_fn(B_shape, C_shape, all_options):
    u, delta, A = (normal(2, 4, 7), normal(2, 4, 7, seed=1).detach().abs().requires_grad_(),
                   (-normal(4, 3, seed=2).detach().exp()).requires_grad_())
    B, C = normal(*B_shape, seed=3), normal(*C_shape, seed=4)
    extra = (normal(4, seed=5), normal(2, 4, 7, seed=6), normal(4, seed=7), True) if all_options else ()
    leaves = [x for x in (u, delta, A, B, C, *extra) if isinstance(x, torch.Tensor)]
    expected = scanned(u, delta, A, B, C, *extra)
    check(selective_scan_fn(u, delta, A, B, C, *extra, return_last_state=True), expected, leaves)
    torch.testing.assert_close(selective_scan_fn(u, delta, A, B, C, *extra), expected[0])


@pytest.mark.parametrize("given", [False, True])
def test_mamba_inner_fn(given):
    D, N, rank, T = 4, 3, 2, 6
    xz, conv, conv_bias = normal(2, 2 * D, T), normal(D, 1, 4, seed=1), normal(D, seed=2)
    x_proj, delta_proj, out_proj, out_bias = (normal(rank + 2 * N, D, seed=3), normal(D, rank, seed=4),
                                              normal(5, D, seed=5), normal(5, seed=6))
    A, bias, skip = (-normal(D, N, seed=7).detach().exp()).requires_grad_(), normal(D, seed=8), normal(D, seed=9)
    leaves = [xz, conv, conv_bias, x_proj, delta_proj, out_proj, out_bias, A, bias, skip]
    options = {"D": skip, "delta_bias": bias}
    if given:
        options |= {"B": normal(2, N, T, seed=10), "C_proj_bias": normal(N, seed=11),
                    "c_rms_weight": normal(N, seed=12), "dt_rms_weight": normal(D, seed=13)}
        leaves += [options[key] for key in ("B", "C_proj_bias", "c_rms_weight", "dt_rms_weight")]
    x, z = xz[:, :D], xz[:, D:]
    x, _ = convolved(x, conv[:, 0], conv_bias, torch.zeros(2, D, 3).double(), "silu")
    rows = torch.einsum("rd,bdt->brt", x_proj, x)
    delta, B, C = torch.einsum("dr,brt->bdt", delta_proj, rows[:, :rank]), rows[:, rank:rank + N], rows[:, -N:]

    def normed(y, weight):
        return y / (y.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight[:, None]

    if given:
        B, C, delta = (options["B"], normed(C + options["C_proj_bias"][:, None], options["c_rms_weight"]),
                       normed(delta, options["dt_rms_weight"]))
    y, _ = scanned(x, delta, A, B, C, skip, z, bias, True)
    expected = torch.einsum("ed,bdt->bte", out_proj, y) + out_bias
    check([mamba_inner_fn(xz, conv, conv_bias, x_proj, delta_proj, out_proj, out_bias, A, **options)], [expected],
          leaves)


@pytest.mark.parametrize("heads", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("whole", [False, True])
@torch.no_grad()
def test_selective_state_update(heads, dtype, whole):
    channels = (6,) if heads is None else (heads, 5)
    groups, N, rows = (1 if heads is None else 2), 3, 3
    state, x, dt = (normal(rows, *channels, *n, seed=i) for i, n in enumerate([(N,), (), ()]))
    A = -normal(*channels, N, seed=3).exp()
    B, C = (normal(rows, groups, N, seed=s) for s in (4, 5))
    D, z, bias = (normal(*shape, seed=s) for s, shape in ((6, channels), (7, (rows, *channels)), (8, channels)))
    if heads is not None:  # one number for each head, as Mamba-2 has it
        dt, A, bias = dt[..., :1].expand(-1, -1, 5), A[:, :1, :1].expand(-1, 5, N), bias[:, :1].expand(-1, 5)
    options = {"D": D, "z": z, "dt_bias": bias, "dt_softplus": True} if whole else {}

    def flat(y, axis):
        return y.reshape(*y.shape[:axis], -1) if axis == 1 else y.reshape(-1, *y.shape[len(channels):])

    of_reference = [flat(options.get("D", D), 0), flat(z, 1)[..., None], flat(bias, 0), True] if whole else []
    expected, last = scanned(flat(x, 1)[..., None], flat(dt if whole else dt.abs(), 1)[..., None],
                             flat(A, 0), B[..., None], C[..., None], *of_reference,
                             state=state.reshape(rows, -1, N).to(dtype).double())
    dt = dt if whole else dt.abs()
    if heads is None:
        B, C = B[:, 0], C[:, 0]
    moving = [y.to(dtype) for y in (x, dt)]
    options = {key: y.to(dtype) if key == "z" else y for key, y in options.items()}
    kept = state.to(dtype)
    pool = torch.zeros(5, *channels, N, dtype=dtype)
    pool[[3, 1, 4]] = kept
    o = selective_state_update(kept, *moving, A, B.to(dtype), C.to(dtype), **options)
    again = selective_state_update(pool, *moving, A, B.to(dtype), C.to(dtype), **options,
                                   state_batch_indices=torch.tensor([3, 1, 4]))
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 0.1}[dtype]
    assert o.shape == x.shape and o.dtype == dtype
    torch.testing.assert_close(o.double().reshape(rows, -1), expected[..., 0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(kept.double().reshape(rows, -1, N), last, rtol=tolerance, atol=tolerance)
    assert torch.equal(again, o) and torch.equal(pool[[3, 1, 4]], kept) and (pool[[0, 2]] == 0).all()


def test_selective_state_update_refuses():
    state, x, A, B = torch.zeros(2, 6, 3), torch.randn(2, 6), -torch.rand(6, 3), torch.randn(2, 3)
    for changed, message in (
            ({"A": A[:5]}, r"selective_state_update: A has shape \[5, 3\], expected \[6, 3\]"),
            ({"state": state[0]}, r"state has shape \[6, 3\], expected"),
            ({"state": state[:1]}, "expected 2 sequences as x"), ({"D": torch.ones(2)}, "D has shape"),
            ({"state_batch_indices": torch.tensor([0, -1])}, "state_batch_indices is"),
            ({"A": A.clone().requires_grad_()}, "A requires a gradient"),
            ({"B": torch.randn(2, 4)}, "selective_state_update: B has shape")):
        arguments = {"state": state, "x": x, "dt": x, "A": A, "B": B, "C": B, **changed}
        with pytest.raises(heed.InvalidArgument, match=message):
            selective_state_update(**arguments)
        assert (state == 0).all()
    with pytest.raises(heed.Unsupported, match="A has dtype torch.complex64"):
        selective_state_update(state, x, x, A.to(torch.complex64), B, B)


# --- Mamba-2 ----------------------------------------------------------------------------------------------------------


def dual(x, dt, A, B, C, D=None, z=None, dt_bias=None, state=None, dt_softplus=False, dt_limit=(0.0, INF)):
    """One sequence of a batch: [B, T, H, P], B and C [B, T, G, N]."""
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    H = x.shape[2]
    B, C = (y.repeat_interleave(H // y.shape[2], 2) for y in (B, C))
    S, outs = torch.zeros(x.shape[0], H, x.shape[3], B.shape[3]).double() if state is None else state, []
    for t in range(x.shape[1]):
        decay = (dt[:, t] * A).exp()[..., None, None]
        S = decay * S + dt[:, t, :, None, None] * x[:, t, :, :, None] * B[:, t, :, None]
        outs.append((S * C[:, t, :, None]).sum(-1))
    y = torch.stack(outs, 1) + (0 if D is None else (D if D.dim() == 2 else D[:, None]) * x)
    return y if z is None else y * F.silu(z), S


def of_mamba2(rows=2, tokens=11, D_shape=(4,)):
    given = {"x": normal(rows, tokens, 4, 3), "dt": normal(rows, tokens, 4, seed=1),
             "A": (-normal(4, seed=2).detach().exp()).requires_grad_(), "B": normal(rows, tokens, 2, 5, seed=3),
             "C": normal(rows, tokens, 2, 5, seed=4), "D": normal(*D_shape, seed=5),
             "z": normal(rows, tokens, 4, 3, seed=6), "dt_bias": normal(4, seed=7)}
    return given, normal(rows, 4, 3, 5, seed=8)


@pytest.mark.parametrize("D_shape", [(4,), (4, 3)])
def test_mamba_chunk_scan_combined(D_shape):
    given, initial = of_mamba2(D_shape=D_shape)
    options = {"dt_softplus": True, "dt_limit": (0.1, 1.5)}
    expected = dual(**given, state=initial, **options)
    leaves = [*given.values(), initial]
    result = mamba_chunk_scan_combined(chunk_size=8, **given, initial_states=initial, return_final_states=True,
                                       **options)
    check(result, expected, leaves)
    five = [given[key].detach() for key in ("x", "dt", "A", "B", "C")]
    five[1] = five[1].abs()
    torch.testing.assert_close(mamba_chunk_scan_combined(*five, 64), dual(*five)[0])


@pytest.mark.parametrize("first", [0, 3])
def test_mamba_chunk_scan_combined_begins_again_where_the_index_changes(first):
    given, initial = of_mamba2()
    index = torch.tensor([[first] * 4 + [first + 1] * 7, [0] * 2 + [1] * 3 + [2] * 6], dtype=torch.int32)
    outs, ends = [], []
    for b, spans in enumerate([[(0, 4), (4, 11)], [(0, 2), (2, 5), (5, 11)]]):
        parts = []
        for i, j in spans:
            own = {key: x[b:b + 1, i:j] if x.dim() > 2 else x for key, x in given.items()}
            begin = initial[b:b + 1] if i == 0 and index[b, 0] == 0 else None
            parts.append(dual(**own, state=begin, dt_softplus=True))
        outs.append(torch.cat([o for o, _ in parts], 1))
        ends.append(parts[-1][1])
    options = {"seq_idx": index, "dt_softplus": True, "return_final_states": True}
    result = mamba_chunk_scan_combined(chunk_size=4, **given, initial_states=initial, **options)
    check(result, (torch.cat(outs), torch.cat(ends)), [*given.values(), initial])
    unread = initial.masked_fill((index[:, 0] != 0)[:, None, None, None], torch.nan)
    torch.testing.assert_close(mamba_chunk_scan_combined(chunk_size=4, **given, initial_states=unread, **options),
                               result)


def test_mamba_chunk_scan_combined_gives_the_states_of_packed_sequences():
    given, initial = of_mamba2(rows=1)
    bounds = torch.tensor([0, 4, 4, 11], dtype=torch.int32)
    index = torch.tensor([[0] * 4 + [2] * 7], dtype=torch.int32)
    parts = [dual(**{key: x[:, i:j] if x.dim() > 2 else x for key, x in given.items()}, state=begin, dt_softplus=True)
             for i, j, begin in ((0, 4, initial), (4, 11, None))]
    states = torch.cat((parts[0][1], torch.zeros_like(initial), parts[1][1]))
    options = {"initial_states": initial, "seq_idx": index, "cu_seqlens": bounds, "dt_softplus": True,
               "return_varlen_states": True}
    expected = torch.cat([o for o, _ in parts], 1), states
    check(mamba_chunk_scan_combined(chunk_size=4, **given, **options), expected, [*given.values(), initial])
    _, final, varlen = mamba_chunk_scan_combined(chunk_size=4, **given, **options, return_final_states=True)
    torch.testing.assert_close(final, states[-1:])
    torch.testing.assert_close(varlen, states)
    with pytest.raises(heed.InvalidArgument,
                       match="seq_idx is None, expected a tensor where return_varlen_states is True"):
        mamba_chunk_scan_combined(chunk_size=4, **given, **{**options, "seq_idx": None})
    with pytest.raises(heed.InvalidArgument,
                       match=r"cu_seqlens is \[0, 5, 11\], expected the bounds that seq_idx has: \[0, 4, 11\]"):
        mamba_chunk_scan_combined(chunk_size=4, **given, **{**options, "cu_seqlens": torch.tensor([0, 5, 11])})
    with pytest.raises(heed.InvalidArgument, match="initial_states has shape"):
        mamba_chunk_scan_combined(chunk_size=4, **given, **{**options, "initial_states": initial[:, :2]})


@pytest.mark.parametrize("norm, before", [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("cut", [False, True])
def test_mamba_split_conv1d_scan_combined(norm, before, cut):
    H, P, G, N, T = 4, 3, 2, 5, 8
    width, wide = H * P, H * P + 2 * G * N
    whole, conv, conv_bias = normal(2, T, width + wide + H), normal(wide, 4, seed=1), normal(wide, seed=2)
    bias, A, D = normal(H, seed=3), (-normal(H, seed=4).detach().exp()).requires_grad_(), normal(H, seed=5)
    weight, proj, proj_bias = normal(width, seed=6), normal(7, width, seed=7), normal(7, seed=8)
    leaves = [whole, conv, conv_bias, bias, A, D, proj, proj_bias, *([weight] if norm else [])]
    index = torch.tensor([[0] * 3 + [1] * 5, [0] * 8]) if cut else None
    spans = [[(0, 3), (3, 8)], [(0, 8)]] if cut else [[(0, 8)], [(0, 8)]]
    outs, ends = [], []
    for b in range(2):
        for i, j in spans[b]:
            z, xBC, dt = whole[b:b + 1, i:j].split((width, wide, H), -1)
            xBC = convolved(xBC.mT, conv, conv_bias, torch.zeros(1, wide, 3).double(), "silu")[0].mT
            x, B, C = xBC.split((width, G * N, G * N), -1)
            x, B, C = x.reshape(1, j - i, H, P), B.reshape(1, j - i, G, N), C.reshape(1, j - i, G, N)
            y, S = dual(x, dt, A, B, C, D, None, bias, dt_softplus=True)
            y, gate = y.reshape(1, j - i, width), F.silu(z)
            if norm:
                y = y if before else y * gate
                of_groups = y.reshape(1, j - i, G, -1)
                y = (of_groups / (of_groups.square().mean(-1, keepdim=True) + 1e-6).sqrt()).reshape(y.shape) * weight
            outs.append(y if norm and not before else y * gate)
        ends.append(S)
    flat = torch.cat(outs, 1).reshape(2, T, width)
    result = mamba_split_conv1d_scan_combined(
        whole, conv, conv_bias, bias, A, D, 4, seq_idx=index, return_final_states=True, rmsnorm_weight=weight if norm
        else None, outproj_weight=proj, outproj_bias=proj_bias, headdim=P, ngroups=G, norm_before_gate=before)
    check(result, (flat @ proj.T + proj_bias, torch.cat(ends)), leaves)
    with pytest.raises(heed.Unsupported, match="zxbcdt has shape"):
        mamba_split_conv1d_scan_combined(F.pad(whole, (0, 2)), conv, conv_bias, bias, A, D, 4, headdim=P, ngroups=G)
    with pytest.raises(heed.InvalidArgument, match="headdim is None, expected an int where D is"):
        mamba_split_conv1d_scan_combined(whole, conv, conv_bias, bias, A, D, 4)


# --- layers of Transformers, which compute the same without a kernel --------------------------------------------------


@torch.no_grad()
def test_a_mamba_layer_of_transformers():
    modeling = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    torch.manual_seed(0)
    mixer = modeling.MambaMixer(modeling.MambaConfig(hidden_size=12, state_size=4, time_step_rank=3), layer_idx=0)
    x = torch.randn(2, 9, 12)
    xz = mixer.in_proj(x).mT
    o = mamba_inner_fn(xz, mixer.conv1d.weight, mixer.conv1d.bias, mixer.x_proj.weight, mixer.dt_proj.weight,
                       mixer.out_proj.weight, mixer.out_proj.bias, -torch.exp(mixer.A_log), D=mixer.D,
                       delta_bias=mixer.dt_proj.bias)
    torch.testing.assert_close(o, mixer(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_mamba2_layer_of_transformers():
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    torch.manual_seed(0)
    config = modeling.Mamba2Config(hidden_size=16, state_size=4, num_heads=4, head_dim=8, n_groups=1, chunk_size=4)
    mixer = modeling.Mamba2Mixer(config, layer_idx=0)
    mixer.dt_bias.normal_()
    x = torch.randn(2, 9, 16)
    o = mamba_split_conv1d_scan_combined(
        mixer.in_proj(x), mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, mixer.dt_bias,
        -torch.exp(mixer.A_log), mixer.D, 4, rmsnorm_weight=mixer.norm.weight, rmsnorm_eps=mixer.norm.variance_epsilon,
        outproj_weight=mixer.out_proj.weight, outproj_bias=mixer.out_proj.bias, headdim=8, ngroups=1,
        norm_before_gate=False)
    torch.testing.assert_close(o, mixer(x), rtol=1e-4, atol=1e-5)


def test_steps_in_inference_mode():
    with torch.inference_mode():
        state, rows = torch.zeros(2, 6, 3), torch.ones(2, 6)
        selective_state_update(state, rows, rows, -torch.ones(6, 3), torch.ones(2, 3), torch.ones(2, 3))
        inputs = torch.zeros(2, 6, 4)
        causal_conv1d_update(rows, inputs, torch.ones(6, 4))
        assert (state == 1).all() and inputs.sum(0)[:, -1].eq(2).all()
