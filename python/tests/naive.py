# Attention in NumPy and float64, written from the equations alone: what the tests compare with.
import numpy as np

M0, M1, W0, W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85
MASK = 0xFFFFFFFF


def philox(counter, key):
    """Philox4x32-10 of four arrays of words under a key of two words."""
    c = [np.asarray(word, np.uint64) for word in np.broadcast_arrays(*counter)]
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(M0), c[2] * np.uint64(M1)
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k0), p1 & np.uint64(MASK),
             (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k1), p0 & np.uint64(MASK)]
        k0, k1 = (k0 + W0) & MASK, (k1 + W1) & MASK
    return c


def kept(positions, keys, row, dropout, seed, offset):
    """Dropout's keep bits of one (sequence, head), [Tq, Tk]."""
    p = (positions[:, None] % 2**32).astype(np.uint64)
    words = philox((keys[None, :] >> 2, p, row, offset), (seed & MASK, seed >> 32))
    word = np.choose(keys[None, :] & 3, np.stack(words)) if len(keys) else np.zeros((len(positions), 0))
    return word < round((1 - dropout) * 2**32)


def keep_mask(b, p, j, Tk, *, causal, window, sink_tokens, prefix, chunk, segments, key_lengths, key_starts, mask, h):
    s = 0 if key_starts is None else int(key_starts[b])
    n = Tk if key_lengths is None else int(key_lengths[b])
    i = np.arange(len(p))
    p, jj = p[:, None], j[None, :]
    keep = np.broadcast_to((s <= jj) & (jj < n), (len(i), len(j))).copy()
    if segments is not None:
        sq, sk = segments if isinstance(segments, tuple) else (segments, segments)
        sq, sk = np.asarray(sq)[b][:, None], np.asarray(sk)[b][None, :]
        keep &= (sq == sk) & (sq >= 0)
    if mask is not None:
        keep &= mask[b, h]
    if causal:
        keep &= (jj <= p) | (jj - s < (0 if prefix is None else int(prefix[b])))
    if window is not None:
        left, right = window
        inside = np.ones_like(keep)
        if left >= 0:
            inside &= jj >= p - left
        if right >= 0:
            inside &= jj <= p + right
        keep &= inside | (jj - s < sink_tokens)
    if chunk is not None:
        keep &= (jj - s) // chunk == (p - s) // chunk
    return keep


def attention(q, k, v, *, scale=None, causal=False, align="bottom_right", window=None, sink_tokens=0, prefix=None,
              chunk=None, segments=None, key_lengths=None, key_starts=None, query_lengths=None, mask=None, bias=None,
              alibi=None, softcap=None, sinks=None, dropout=0.0, seed=0, dropout_offset=0, cu_seqlens_q=None,
              cu_seqlens_k=None, **_):
    """(o, lse) in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    options = {"scale": scale, "causal": causal, "window": window, "sink_tokens": sink_tokens, "chunk": chunk,
               "softcap": softcap, "sinks": sinks, "dropout": dropout, "seed": seed, "dropout_offset": dropout_offset}
    if cu_seqlens_q is not None:
        rank = q.ndim
        q, k, v = (x.reshape(x.shape[-3:]) for x in (q, k, v))
        o, lse = np.zeros((*q.shape[:2], v.shape[2])), np.full((q.shape[1], q.shape[0]), -np.inf)
        cu_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        for b in range(len(cu_seqlens_q) - 1):
            rows, keys = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
            slopes = None if alibi is None else np.broadcast_to(alibi, (len(cu_seqlens_q) - 1, q.shape[1]))[b]
            start = align if isinstance(align, str) else align[b:b + 1]
            o[rows], lse[:, rows] = (x[0] for x in _dense(
                q[None, rows], k[None, keys], v[None, keys], align=start, alibi=slopes, first=b, **options))
        return (o[None] if rank == 4 else o), lse
    return _dense(q, k, v, align=align, prefix=prefix, segments=segments, key_lengths=key_lengths,
                  key_starts=key_starts, query_lengths=query_lengths, mask=mask, bias=bias, alibi=alibi, **options)


def _dense(q, k, v, *, scale, causal, align, window, sink_tokens, chunk, softcap, sinks, dropout, seed, dropout_offset,
           prefix=None, segments=None, key_lengths=None, key_starts=None, query_lengths=None, mask=None, bias=None,
           alibi=None, first=0):
    B, Tq, Hq, D = q.shape
    Tk, Hkv, Dv = v.shape[1:]
    scale = D**-0.5 if scale is None else scale
    pairs = (B, Hq, Tq, Tk)
    mask = None if mask is None else np.broadcast_to(mask, pairs)
    bias = None if bias is None else np.broadcast_to(np.asarray(bias, np.float64), pairs)
    alibi = None if alibi is None else np.broadcast_to(np.asarray(alibi, np.float64), (B, Hq))
    o, lse = np.zeros((B, Tq, Hq, Dv)), np.full((B, Hq, Tq), -np.inf)
    for b in range(B):
        start = {"bottom_right": Tk - Tq, "top_left": 0}[align] if isinstance(align, str) else int(align[b])
        p, j = start + np.arange(Tq), np.arange(Tk)
        rows = Tq if query_lengths is None else int(query_lengths[b])
        for h in range(Hq):
            g = h // (Hq // Hkv)
            s = scale * (q[b, :, h] @ k[b, :, g].T)
            if softcap:
                s = softcap * np.tanh(s / softcap)
            if alibi is not None:
                s = s - alibi[b, h] * np.abs(p[:, None] - j[None, :])
            if bias is not None:
                s = s + bias[b, h]
            keep = keep_mask(b, p, j, Tk, causal=causal, window=window, sink_tokens=sink_tokens, prefix=prefix,
                             chunk=chunk, segments=segments, key_lengths=key_lengths, key_starts=key_starts,
                             mask=mask, h=h)
            z = kept(p, j, (first + b) * Hq + h, dropout, seed, dropout_offset) if dropout else 1.0
            s = np.where(keep, s, -np.inf)
            for i in range(rows):
                seen = np.flatnonzero(s[i] > -np.inf)
                if not len(seen):
                    continue
                top = s[i, seen].max()
                e = np.exp(s[i, seen] - top)
                lse[b, h, i] = top + np.log(e.sum())
                weights = e / e.sum() * (z[i, seen] if dropout else 1.0) / (1 - dropout)
                if sinks is not None:
                    weights = weights / (1 + np.exp(sinks[h] - lse[b, h, i]))
                o[b, i, h] = weights @ v[b, seen, g]
    return o, lse
