# heed.compat.flash_attn and the softmax functions of heed.compat.fla against dense softmax in float64.
import itertools

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

import heed  # noqa: E402
from heed.compat import fla, flash_attn  # noqa: E402

INF = float("inf")


def normal(*shape, seed=0, grad=True):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_(grad)


def dense(q, k, v, *, scale=None, causal=False, window=(-1, -1), softcap=0.0, alibi=None, keep=None, bias=None,
          sinks=None, start=None):
    """o and lse of one softmax per row, [B, T, H, D]; row i has position i + start, start by default Tk - Tq."""
    G = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(G, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    p = torch.arange(q.shape[1])[:, None] + (k.shape[1] - q.shape[1] if start is None else start)
    j = torch.arange(k.shape[1])[None]
    seen = torch.ones(s.shape[-2:], dtype=torch.bool) if keep is None else keep
    if causal:
        seen = seen & (j <= p)
    if window[0] >= 0:
        seen = seen & (j >= p - window[0])
    if window[1] >= 0:
        seen = seen & (j <= p + window[1])
    if alibi is not None:
        s = s - alibi.reshape(-1, q.shape[2], 1, 1) * (p - j).abs()
    s = (s if bias is None else s + bias).masked_fill(~seen, -INF)
    wide = s if sinks is None else torch.cat((s, sinks.reshape(1, -1, 1, 1).expand(*s.shape[:3], 1)), -1)
    weights = torch.nan_to_num(torch.softmax(wide, -1))[..., : s.shape[-1]]
    return torch.einsum("bhij,bjhd->bihd", weights, v), torch.logsumexp(s, -1)


def check(result, expected, leaves, tolerance=1e-10):
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    got, wanted = (torch.autograd.grad((x * weights).sum(), leaves, allow_unused=True) for x in (result, expected))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


# --- flash_attn -------------------------------------------------------------------------------------------------------

ALIBI = torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=torch.float64)
OPTIONS = [
    {}, {"causal": True}, {"softmax_scale": 0.2}, {"window_size": (3, 0)},
    {"window_size": (-1, 2)}, {"window_size": (2, -1)}, {"causal": True, "window_size": (2, 2)},
    {"softcap": 1.5}, {"alibi_slopes": ALIBI, "causal": True}, {"alibi_slopes": torch.stack((ALIBI, 2 * ALIBI))},
    {"deterministic": True, "causal": True, "softcap": 3.0, "softmax_scale": 1.0},
]
TRANSLATED = {"softmax_scale": "scale", "window_size": "window", "alibi_slopes": "alibi"}


def of_dense(options):
    return {TRANSLATED.get(key, key): x for key, x in options.items() if key != "deterministic"}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("rows", [5, 9, 12])  # fewer than keys, as many, more: rows without a key
def test_flash_attn_func(options, rows):
    q, k, v = normal(2, rows, 4, 8), normal(2, 9, 2, 8, seed=1), normal(2, 9, 2, 8, seed=2)
    expected, lse = dense(q, k, v, **of_dense(options))
    check(flash_attn.flash_attn_func(q, k, v, **options), expected, (q, k, v))
    o, of_rows, nothing = flash_attn.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    torch.testing.assert_close(of_rows, lse)
    assert torch.equal(o, flash_attn.flash_attn_func(q, k, v, **options)) and nothing.numel() == 0
    kv = torch.stack((k, v), 2)
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, kv, **options), o)
    if rows == 9:
        whole = torch.stack((q, *(x.repeat_interleave(2, 2) for x in (k, v))), 2)
        torch.testing.assert_close(flash_attn.flash_attn_qkvpacked_func(whole, **options), expected)


def of_each(bounds_q, bounds_k, tensors, compute):
    spans = zip(itertools.pairwise(bounds_q), itertools.pairwise(bounds_k))
    q, k, v = tensors
    return torch.cat([compute(q[None, a:b], k[None, c:d], v[None, c:d])[0] for (a, b), (c, d) in spans])


@pytest.mark.parametrize("options", [x for x in OPTIONS if getattr(x.get("alibi_slopes"), "ndim", 1) == 1])
def test_flash_attn_varlen(options):
    bounds_q, bounds_k = [0, 3, 3, 4, 9], [0, 4, 6, 8, 12]
    q, k, v = normal(9, 4, 8), normal(12, 2, 8, seed=1), normal(12, 2, 8, seed=2)
    expected = of_each(bounds_q, bounds_k, (q, k, v), lambda *x: dense(*x, **of_dense(options))[0])
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in (bounds_q, bounds_k))
    arguments = (cu_q, cu_k, 5, 4)
    check(flash_attn.flash_attn_varlen_func(q, k, v, *arguments, **options), expected, (q, k, v))
    o, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, *arguments, **options, return_attn_probs=True)
    assert lse.shape == (4, 9)
    assert torch.equal(flash_attn.flash_attn_varlen_kvpacked_func(q, torch.stack((k, v), 1), *arguments, **options), o)
    same = of_each(bounds_q, bounds_q, (q, q, q), lambda *x: dense(*x, **of_dense(options))[0])
    packed = flash_attn.flash_attn_varlen_qkvpacked_func(torch.stack((q, q, q), 1), cu_q, 5, **options)
    torch.testing.assert_close(packed, same)


def test_flash_attn_varlen_reads_pages():
    bounds_q, lengths = [0, 2, 5], [7, 5]
    q, pages_k, pages_v = normal(5, 4, 8), normal(6, 4, 2, 8, seed=1), normal(6, 4, 2, 8, seed=2)
    table = torch.tensor([[3, 0], [5, 1]], dtype=torch.int32)
    k, v = (torch.cat([x[row.long()].flatten(0, 1)[:n] for row, n in zip(table, lengths)]) for x in (pages_k, pages_v))
    bounds_k = torch.tensor([0, 7, 12], dtype=torch.int32)
    expected = of_each(bounds_q, bounds_k.tolist(), (q, k, v), lambda *x: dense(*x, causal=True)[0])
    result = flash_attn.flash_attn_varlen_func(q, pages_k, pages_v, torch.tensor(bounds_q), bounds_k, 3, 7, causal=True,
                                               block_table=table)
    check(result, expected, (q, pages_k, pages_v))


def test_flash_attn_drops_and_repeats():
    q = torch.ones(1, 4, 2, 8)
    v = torch.randn(1, 400, 2, 8)
    torch.manual_seed(3)
    o = flash_attn.flash_attn_func(q, torch.ones_like(v), v, dropout_p=0.4)
    torch.manual_seed(3)
    assert torch.equal(o, flash_attn.flash_attn_func(q, torch.ones_like(v), v, dropout_p=0.4))
    assert not torch.equal(o[:, 0], o[:, 1])
    with pytest.raises(heed.Unsupported,
                       match="flash_attn_func: return_attn_probs is True with dropout_p, expected False"):
        flash_attn.flash_attn_func(q, v, v, dropout_p=0.4, return_attn_probs=True)


# --- flash_attn_with_kvcache ------------------------------------------------------------------------------------------


def turned(x, positions, cos, sin, interleaved):
    x, width = x.clone(), cos.shape[1]
    for b, t in itertools.product(range(x.shape[0]), range(x.shape[1])):
        for i in range(width):
            m, n = (2 * i, 2 * i + 1) if interleaved else (i, i + width)
            c, s = cos[positions[b][t], i], sin[positions[b][t], i]
            first, second = x[b, t, :, m].clone(), x[b, t, :, n].clone()
            x[b, t, :, m], x[b, t, :, n] = c * first - s * second, s * first + c * second
    return x


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (3, 0)},
                                     {"causal": True, "softcap": 2.0, "alibi_slopes": ALIBI}])
@pytest.mark.parametrize("place", ["plain", "chosen", "pages"])
@pytest.mark.parametrize("new, rotary", [(0, None), (2, None), (2, True), (2, False)])
def test_flash_attn_with_kvcache(options, place, new, rotary):
    generator = torch.Generator().manual_seed(5)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, lengths, lead = random(2, 3, 4, 8), [6, 9], [0, 2]
    keys, values, fresh_k, fresh_v = random(2, 12, 2, 8), random(2, 12, 2, 8), random(2, 2, 2, 8), random(2, 2, 2, 8)
    arguments = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32), **options}
    k_cache, v_cache, of_sequences = keys.clone(), values.clone(), lambda x: x
    if place == "chosen":
        arguments["cache_batch_idx"] = torch.tensor([2, 0], dtype=torch.int32)
        k_cache, v_cache = random(3, 12, 2, 8), random(3, 12, 2, 8)
        k_cache[[2, 0]], v_cache[[2, 0]] = keys, values
        of_sequences = lambda x: x[[2, 0]]  # noqa: E731
    elif place == "pages":
        table = torch.tensor([[4, 1, 0], [2, 5, 3]], dtype=torch.int32)
        arguments["block_table"] = table
        k_cache, v_cache = random(7, 4, 2, 8), random(7, 4, 2, 8)
        for cache, x in ((k_cache, keys), (v_cache, values)):
            cache[table.long()] = x.unflatten(1, (3, 4))
        of_sequences = lambda x: x[table.long()].flatten(1, 2)  # noqa: E731
    if place != "pages":
        arguments["cache_leftpad"] = torch.tensor(lead, dtype=torch.int32)
    if new:
        arguments |= {"k": fresh_k, "v": fresh_v}
    query, local = q, bool(options.get("causal") or "window_size" in options)
    if rotary is not None:
        angles = torch.arange(16)[:, None] / torch.tensor([1.0, 7.0])
        arguments |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": rotary}
        fresh_k = turned(fresh_k, [[n, n + 1] for n in lengths], angles.cos(), angles.sin(), rotary)
        query = turned(q, [[n + t * local for t in range(3)] for n in lengths], angles.cos(), angles.sin(), rotary)
    before = k_cache.clone()
    o, lse = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, **arguments, return_softmax_lse=True)
    for b, n in enumerate(lengths):
        begin, end = 0 if place == "pages" else lead[b], n + new
        k, v = keys[b, :n], values[b, :n]
        if new:
            k, v = torch.cat((k, fresh_k[b])), torch.cat((v, fresh_v[b]))
        rows, sums = dense(query[b:b + 1], k[None, begin:], v[None, begin:], **of_dense(options))
        torch.testing.assert_close(o[b], rows[0], rtol=1e-6, atol=1e-6)  # angles are applied in float32
        torch.testing.assert_close(lse[b], sums[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(of_sequences(k_cache)[b, :end], k, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(of_sequences(v_cache)[b, :end], v)
    assert (k_cache != before).any(-1).any(-1).sum() == 2 * new
    if not new:
        assert torch.equal(flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, **arguments), o)


def test_a_cache_says_what_it_cannot_do_and_stays():
    call = flash_attn.flash_attn_with_kvcache
    q, cache = torch.randn(2, 1, 2, 4), torch.randn(2, 8, 2, 4)
    new, table = {"k": q, "v": q}, torch.tensor([[0, 1], [1, 0]])
    for options, message in (
            ({"k": q}, "v is None, expected a tensor beside k"),
            ({**new, "cache_seqlens": 8},
             r"cache_seqlens is \[8, 8\] before 1 new tokens, expected at least 0 and room for 8"),
            ({**new, "cache_seqlens": torch.tensor([3])}, r"cache_seqlens has shape \[1\], expected \[2\]"),
            ({"rotary_cos": torch.ones(9, 2)}, "rotary_cos or rotary_sin is given alone, expected both, and k and v"),
            ({**new, "rotary_cos": torch.ones(7, 2), "rotary_sin": torch.ones(7, 2)},
             r"rotary_cos has shape \[7, 2\], expected at least 8 rows"),
            ({**new, "v": q[:, :, :1]}, r"v has shape \[2, 1, 1, 4\], expected \[2, 1, 2, 4\]"),
            ({**new, "cache_seqlens": 3, "alibi_slopes": torch.ones(3)},
             "flash_attn_with_kvcache: alibi_slopes has shape"),
            ({**new, "cache_seqlens": 3, "cache_leftpad": torch.tensor([9, 0])},
             "flash_attn_with_kvcache: cache_leftpad"),
            ({**new, "cache_seqlens": 9, "block_table": table - 1},
             r"block_table is .*, expected pages from 0 to 1 for lengths of \[10, 10\]"),
            ({**new, "block_table": table[0]}, "block_table has shape"),
            ({"cache_batch_idx": torch.tensor([0, 2])}, r"cache_batch_idx is \[0, 2\], expected from 0 to 1"),
            ({"k": q.clone().requires_grad_(), "v": q}, "k requires a gradient")):
        before = cache.clone()
        with pytest.raises(heed.InvalidArgument, match=message):
            call(q, cache, cache, **options)
        assert torch.equal(cache, before)
    torch.testing.assert_close(call(q, cache, cache, cache_seqlens=5), call(q, cache[:, :5], cache[:, :5]))
    torch.testing.assert_close(call(q, cache, cache, cache_seqlens=8, block_table=torch.tensor([[0, -1], [1, 9]])),
                               call(q, cache, cache))
    with pytest.raises(heed.InvalidArgument,
                       match="flash_attn_varlen_func: block_table is .*, expected pages from 0 to 1"):
        bounds = torch.tensor([0, 1, 2]), torch.tensor([0, 9, 10])
        flash_attn.flash_attn_varlen_func(q[:, 0], cache, cache, *bounds, 1, 9, block_table=table - 1)


# --- softmax attention of fla -----------------------------------------------------------------------------------------


def decay_bias(g):
    """Sums of log gates [B, T, H] over j < s <= i."""
    sums = g.cumsum(1).transpose(1, 2)
    return sums.unsqueeze(-1) - sums.unsqueeze(-2)


@pytest.mark.parametrize("has_gates, window, has_sinks, scale",
                         [(0, None, 0, None), (1, None, 0, 0.3), (0, 3, 1, None), (1, 4, 1, 0.2)])
@pytest.mark.parametrize("packed", [None, [0, 4, 5, 9]])
def test_parallel_attn(has_gates, window, has_sinks, scale, packed):
    B = 1 if packed else 2
    q, k, v = normal(B, 9, 4, 8), normal(B, 9, 2, 8, seed=1), normal(B, 9, 2, 6, seed=2)
    g = F.logsigmoid(normal(B, 9, 4, seed=3, grad=False)).requires_grad_() if has_gates else None
    sinks = normal(4, seed=4) if has_sinks else None
    outs = []
    for begin, end in itertools.pairwise(packed or [0, 9]):
        bias = None if g is None else decay_bias(g[:, begin:end])
        outs.append(dense(*(x[:, begin:end] for x in (q, k, v)), scale=scale, causal=True, bias=bias, sinks=sinks,
                          window=(-1 if window is None else window - 1, -1))[0])
    cu = None if packed is None else torch.tensor(packed)
    result = fla.parallel_attn(q, k, v, g, scale, window, cu, sink_bias=sinks)
    check(result, torch.cat(outs, 1), [x for x in (q, k, v, g, sinks) if x is not None])
    if has_gates and not has_sinks:
        assert torch.equal(fla.parallel_forgetting_attn(q, k, v, g, scale, window, cu), result)


@pytest.mark.parametrize("scaled", [False, True])
def test_attn_decoding_one_step(scaled):
    bounds = [0, 4, 5, 9]
    q, k, v = normal(1, 3, 4, 8), normal(1, 9, 2, 8, seed=1), normal(1, 9, 2, 8, seed=2)
    g, sinks = F.logsigmoid(normal(1, 9, 4, seed=3, grad=False)), normal(4, seed=4)
    outs = []
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        bias = decay_bias(g[:, begin:end] * (0.3 if scaled else 1))[:, :, -1:]
        outs.append(dense(q[:, i:i + 1], k[:, begin:end], v[:, begin:end], scale=0.3, bias=bias, sinks=sinks)[0])
    result = fla.attn_decoding_one_step(q, k, v, g, 0.3, torch.tensor(bounds), scaled, sink_bias=sinks)
    check(result, torch.cat(outs, 1), (q, k, v, sinks))


def chosen(logits, allowed, forced, count):
    """The `count` best of a row of importances, forced ones first."""
    scores = logits.masked_fill(~allowed, -INF).masked_fill(forced, INF)
    best = scores.topk(min(count, len(scores))).indices
    return best[scores[best] > -INF]


def nsa(q, k, v, g_cmp, g_slc, g_swa, index, count, block, window, scale):
    """Native sparse attention of one sequence, [T, H, D], row by row."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    T, G = q.shape[0], q.shape[1] // k.shape[1]
    cut = range(0, T, block)
    means_k, means_v = (torch.stack([x[i:i + block].mean(0) for i in cut]) for x in (k, v))
    rows = []
    for t in range(T):
        heads = []
        for h in range(q.shape[1]):
            kv, o, whole = h // G, 0, torch.arange(len(cut)) * block + block - 1 <= t
            group = slice(kv * G, kv * G + G)
            if g_cmp is not None and whole.any():
                weights = torch.softmax(scale * means_k[whole, kv] @ q[t, h], 0)
                o = g_cmp[t, h] * weights @ means_v[whole, kv]
            if index is None:
                s = (scale * q[t, group] @ means_k[:, kv].T).masked_fill(~whole, -INF)
                block_of, own = torch.arange(len(cut)), t // block
                forced = (block_of == own) | (block_of == own - 1) | (block_of == 0)
                blocks = chosen(torch.nan_to_num(s.softmax(-1)).mean(0), whole, forced, count)
            else:
                blocks = index[t, kv][:count if isinstance(count, int) else count[t, kv]]
            keys = torch.tensor(sorted({j for b in blocks.tolist() if b >= 0
                                        for j in range(b * block, min(b * block + block, t + 1))}), dtype=int)
            gate = 1 if g_slc is None else g_slc[t, h]
            o = o + (gate * torch.softmax(scale * k[keys, kv] @ q[t, h], 0) @ v[keys, kv] if len(keys) else 0)
            if window:
                near = slice(max(0, t - window + 1), t + 1)
                o = o + g_swa[t, h] * torch.softmax(q.shape[-1] ** -0.5 * k[near, kv] @ q[t, h], 0) @ v[near, kv]
            heads.append(o if isinstance(o, torch.Tensor) else torch.zeros(v.shape[-1], dtype=torch.float64))
        rows.append(torch.stack(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("packed", [None, [0, 13, 23]])
@pytest.mark.parametrize("kind", ["chosen", "chosen, no gate, no window", "given", "given, counts", "given alone"])
def test_parallel_nsa(kind, packed):
    B, T, block, count = (1 if packed else 2), 23, 4, 4
    q, k, v = normal(B, T, 4, 8), normal(B, T, 2, 8, seed=1), normal(B, T, 2, 8, seed=2)
    g_cmp, g_slc, g_swa = (torch.sigmoid(normal(B, T, 4, seed=s, grad=False)).requires_grad_() for s in (3, 4, 5))
    window, index, counts, scale = 5, None, count, 0.5
    if kind == "chosen, no gate, no window":
        g_slc, g_swa, window, scale = None, None, 0, None
    if "given" in kind:
        index = torch.randint(-1, 6, (B, T, 2, count), generator=torch.Generator().manual_seed(1))
        index = torch.where(index * block > torch.arange(T)[:, None, None], -1, index)
        g_cmp = None if kind == "given alone" else g_cmp
    if kind == "given, counts":
        counts = torch.randint(1, count + 1, (B, T, 2), generator=torch.Generator().manual_seed(2))
    outs = []
    for begin, end in itertools.pairwise(packed or [0, T]):
        of_batch = []
        for b in range(B):
            parts = [x if x is None else x[b, begin:end] for x in (q, k, v, g_cmp, g_slc, g_swa, index)]
            of_batch.append(nsa(*parts, counts if isinstance(counts, int) else counts[b, begin:end], block, window,
                                scale))
        outs.append(torch.stack(of_batch))
    result = fla.parallel_nsa(q, k, v, g_cmp, g_slc, g_swa, index, counts, block, window, scale,
                              None if packed is None else torch.tensor(packed))
    check(result, torch.cat(outs, 1), [x for x in (q, k, v, g_cmp, g_slc, g_swa) if x is not None])


@pytest.mark.parametrize("tokens", [3, 11])
def test_parallel_nsa_reads_no_block_that_was_not_chosen(tokens):
    q, k, v, g = (normal(1, tokens, 4, 8), normal(1, tokens, 2, 8, seed=1), normal(1, tokens, 2, 8, seed=2),
                  torch.rand(1, tokens, 4))
    index = torch.where(torch.arange(tokens) < 9, 0, -1)[None, :, None, None].expand(1, tokens, 2, 1)
    last = torch.arange(tokens)[:, None, None] >= 9  # in a block without an end
    o, expected = (fla.parallel_nsa(q, k.masked_fill(last, x), v.masked_fill(last, x), g, g, None, index, 1, 4)
                   for x in (torch.nan, 0))
    torch.testing.assert_close(o, expected)


def test_parallel_nsa_in_16_bits_with_gates_of_32():
    q, k, v, g = normal(1, 9, 4, 8), normal(1, 9, 2, 8, seed=1), normal(1, 9, 2, 8, seed=2), torch.rand(1, 9, 4)
    expected = fla.parallel_nsa(q, k, v, g.double(), g.double(), g.double(), block_size=4, window_size=3)
    o = fla.parallel_nsa(*(x.bfloat16() for x in (q, k, v)), g, g, g, block_size=4, window_size=3)
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o.double(), expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("topk", [1, 3, 9])
def test_parallel_moba(topk):
    bounds, chunk = [0, 21, 24, 40], 5
    q, k, v = (normal(1, 40, 2, 8, seed=s) for s in range(3))
    rows = []
    for begin, end in itertools.pairwise(bounds):
        n = end - begin
        means = torch.stack([k[0, i:min(i + chunk, end)].mean(0) for i in range(begin, end, chunk)])
        keep = torch.zeros(2, n, n, dtype=torch.bool)
        for t, h in itertools.product(range(n), range(2)):
            past = (means[:t // chunk, h] @ q[0, begin + t, h]).topk(min(topk - 1, t // chunk)).indices
            for c in [*past.tolist(), t // chunk]:
                keep[h, t, c * chunk:min(c * chunk + chunk, t + 1)] = True
        rows.append(dense(*(x[:, begin:end] for x in (q, k, v)), keep=keep)[0])
    check(fla.parallel_moba(q, k, v, torch.tensor(bounds, dtype=torch.int32), 21, chunk, topk), torch.cat(rows, 1),
          (q, k, v))


# --- Based, RWKV-4 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["parallel_based", "fused_chunk_based"])
@pytest.mark.parametrize("scale, norm", [(None, True), (0.4, True), (None, False)])
def test_based(name, scale, norm):
    q, k, v = (normal(2, 9, 2, 4, seed=s) for s in range(3))
    x = torch.einsum("bihd,bjhd->bhij", q, k) * (0.5 if scale is None else scale)
    a = (1 + x + x * x / 2).tril()
    o = torch.einsum("bhij,bjhd->bihd", a, v)
    o = o / (a.sum(-1).transpose(1, 2).unsqueeze(-1) + 1e-6) if norm else o
    check(getattr(fla, name)(q, k, v, scale, norm), o, (q, k, v))


def test_rwkv4():
    w, u, k, v = normal(5), normal(5, seed=1), normal(2, 6, 5, seed=2), normal(2, 6, 5, seed=3)
    state = torch.stack((normal(2, 1, 5, seed=4, grad=False), torch.rand(2, 1, 5).double() + 0.5,
                         normal(2, 1, 5, seed=5, grad=False)), 1)
    state.requires_grad_()
    num, den = (state[:, i, 0] * state[:, 2, 0].exp() for i in (0, 1))
    rows = []
    for t in range(6):
        now = (u + k[:, t]).exp()
        rows.append((num + now * v[:, t]) / (den + now))
        num, den = (x * (-w.exp()).exp() + k[:, t].exp() * y for x, y in ((num, v[:, t]), (den, 1)))
    o, last = fla.fused_recurrent_rwkv4(w, u, k, v, state)
    assert last.shape == (2, 3, 1, 5)
    check(o, torch.stack(rows, 1), (w, u, k, v, state))
    torch.testing.assert_close(last[:, 0, 0] * last[:, 2, 0].exp(), num)
    torch.testing.assert_close(last[:, 1, 0] * last[:, 2, 0].exp(), den)
    for i, name in enumerate(("w", "u", "k", "v", "state")):
        arguments = [w, u, k, v, state]
        arguments[i] = None
        with pytest.raises(heed.InvalidArgument, match=f"fused_recurrent_rwkv4: {name} is of type NoneType"):
            fla.fused_recurrent_rwkv4(*arguments)
