# Attention and its derivative in NumPy and float64, written from the equations alone: the reference of the tests.
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
              alibi=None, relative_bias=None, softcap=None, sinks=None, log_decay=None, dropout=0.0, seed=0,
              dropout_offset=0, cu_seqlens_q=None, cu_seqlens_k=None, **_):
    """(o, lse) in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    options = {"scale": scale, "causal": causal, "window": window, "sink_tokens": sink_tokens, "chunk": chunk,
               "softcap": softcap, "sinks": sinks, "dropout": dropout, "seed": seed, "dropout_offset": dropout_offset,
               "relative_bias": relative_bias}
    if cu_seqlens_q is not None:
        rank = q.ndim
        q, k, v = (x.reshape(x.shape[-3:]) for x in (q, k, v))
        o, lse = np.zeros((*q.shape[:2], v.shape[2])), np.full((q.shape[1], q.shape[0]), -np.inf)
        for b, rows, keys, own in sequences(cu_seqlens_q, cu_seqlens_k, align, alibi, log_decay):
            o[rows], lse[:, rows] = (x[0] for x in _dense(
                q[None, rows], k[None, keys], v[None, keys], first=b, **own, **options))
        return (o[None] if rank == 4 else o), lse
    return _dense(q, k, v, align=align, prefix=prefix, segments=segments, key_lengths=key_lengths,
                  key_starts=key_starts, query_lengths=query_lengths, mask=mask, bias=bias, alibi=alibi,
                  log_decay=log_decay, **options)


def sequences(cu_q, cu_k, align, alibi, log_decay):
    """(index, rows, keys, its own align, alibi and log_decay) of each packed sequence."""
    cu_k = cu_q if cu_k is None else cu_k
    for b in range(len(cu_q) - 1):
        slopes = None if alibi is None else np.broadcast_to(alibi, (len(cu_q) - 1, np.shape(alibi)[-1]))[b]
        own = {"align": align if isinstance(align, str) else align[b:b + 1], "alibi": slopes}
        if log_decay is not None:
            own["log_decay"] = np.reshape(log_decay, np.shape(log_decay)[-2:])[None, cu_k[b]:cu_k[b + 1]]
        yield b, slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1]), own


def crosses(p, Tk, last):
    """[Tq, Tk, Tk]: whether the step s, of the valid keys, comes after key j and not after the row at p."""
    s, j = np.arange(Tk), np.arange(Tk)[:, None]
    return (j < s) & (s <= np.asarray(p)[:, None, None]) & (s < last)


def forgotten(log_decay, p, last):
    """[Tq, Tk]: the sum of log_decay over the steps between key and row."""
    return np.where(crosses(p, len(log_decay), last), log_decay, 0).sum(2)


def _heads(q, k, v, *, scale=None, align="bottom_right", softcap=None, dropout=0.0, seed=0, dropout_offset=0,
           causal=False, window=None, sink_tokens=0, chunk=None, prefix=None, segments=None, key_lengths=None,
           key_starts=None, query_lengths=None, mask=None, bias=None, alibi=None, relative_bias=None, log_decay=None,
           first=0, **_):
    """For each (sequence, query head): indices, key head, p - j, logits, slope of the soft cap, dropout factor."""
    B, Tq, Hq, D = q.shape
    Tk, Hkv = v.shape[1:3]
    scale = D**-0.5 if scale is None else scale
    pairs = (B, Hq, Tq, Tk)
    mask = None if mask is None else np.broadcast_to(mask, pairs)
    bias = None if bias is None else np.broadcast_to(np.asarray(bias, np.float64), pairs)
    alibi = None if alibi is None else np.broadcast_to(np.asarray(alibi, np.float64), (B, Hq))
    for b in range(B):
        start = {"bottom_right": Tk - Tq, "top_left": 0}[align] if isinstance(align, str) else int(align[b])
        p, j = start + np.arange(Tq), np.arange(Tk)
        before = p[:, None] - j[None, :]
        rows = Tq if query_lengths is None else int(query_lengths[b])
        for h in range(Hq):
            g = h // (Hq // Hkv)
            s, slope = scale * (q[b, :, h] @ k[b, :, g].T), 1.0
            if softcap:
                t = np.tanh(s / softcap)
                s, slope = softcap * t, 1 - t**2
            if alibi is not None:
                s = s - alibi[b, h] * np.abs(before)
            if relative_bias is not None:
                line = np.asarray(relative_bias, np.float64)[h]
                inside = (before >= 0) & (before < len(line))
                s = s + np.where(inside, line[np.where(inside, before, 0)], 0)
            if log_decay is not None:
                s = s + forgotten(np.asarray(log_decay, np.float64)[b, :, h], p,
                                  Tk if key_lengths is None else int(key_lengths[b]))
            if bias is not None:
                s = s + bias[b, h]
            keep = keep_mask(b, p, j, Tk, causal=causal, window=window, sink_tokens=sink_tokens, prefix=prefix,
                             chunk=chunk, segments=segments, key_lengths=key_lengths, key_starts=key_starts,
                             mask=mask, h=h)
            keep[rows:] = False
            z = kept(p, j, (first + b) * Hq + h, dropout, seed, dropout_offset) if dropout else np.ones_like(s)
            yield b, h, g, before, np.where(keep, s, -np.inf), slope, z / (1 - dropout)


def _dense(q, k, v, *, sinks, **options):
    B, Tq, Hq, _ = q.shape
    o, lse = np.zeros((B, Tq, Hq, v.shape[3])), np.full((B, Hq, Tq), -np.inf)
    for b, h, g, _, s, _, z in _heads(q, k, v, **options):
        for i in range(Tq):
            seen = np.flatnonzero(s[i] > -np.inf)
            if not len(seen):
                continue
            top = s[i, seen].max()
            e = np.exp(s[i, seen] - top)
            lse[b, h, i] = top + np.log(e.sum())
            weights = e / e.sum() * z[i, seen]
            if sinks is not None:
                weights = weights / (1 + np.exp(sinks[h] - lse[b, h, i]))
            o[b, i, h] = weights @ v[b, seen, g]
    return o, lse


def attention_backward(do, q, k, v, *, dlse=None, align="bottom_right", bias=None, alibi=None, sinks=None,
                       log_decay=None, cu_seqlens_q=None, cu_seqlens_k=None, **options):
    """{"dq": ..., "dalibi": ...} in float64: the derivative of sum(do * o) + sum(dlse * lse), by the chain rule."""
    do, q, k, v = (np.asarray(x, np.float64) for x in (do, q, k, v))
    options["sinks"] = sinks
    if cu_seqlens_q is None:
        dlse = np.zeros((q.shape[0], q.shape[2], q.shape[1])) if dlse is None else np.asarray(dlse, np.float64)
        g = _dense_backward(do, dlse, q, k, v, align=align, bias=bias, alibi=alibi, log_decay=log_decay, **options)
    else:
        shapes = [x.shape for x in (q, k, v)]
        do, q, k, v = (x.reshape(x.shape[-3:]) for x in (do, q, k, v))
        dlse = np.zeros(q.shape[1::-1]) if dlse is None else np.asarray(dlse, np.float64)
        g = {"dq": np.zeros_like(q), "dk": np.zeros_like(k), "dv": np.zeros_like(v), "dsinks": np.zeros(q.shape[1]),
             "dalibi": np.zeros((len(cu_seqlens_q) - 1, q.shape[1])), "dlog_decay": np.zeros((k.shape[0], q.shape[1])),
             "drelative_bias": 0}
        for b, rows, keys, own in sequences(cu_seqlens_q, cu_seqlens_k, align, alibi, log_decay):
            one = _dense_backward(do[None, rows], dlse[None, :, rows], q[None, rows], k[None, keys], v[None, keys],
                                  first=b, **own, **options)
            g["dq"][rows], g["dk"][keys], g["dv"][keys] = one["dq"][0], one["dk"][0], one["dv"][0]
            g["dsinks"] += one["dsinks"]
            g["drelative_bias"] = g["drelative_bias"] + one["drelative_bias"]
            g["dalibi"][b] = one["dalibi"][0]
            g["dlog_decay"][keys] = one["dlog_decay"][0]
        g.update({name: g[name].reshape(shape) for name, shape in zip(("dq", "dk", "dv"), shapes, strict=True)})
    for name, x in (("bias", bias), ("alibi", alibi)):
        g["d" + name] = None if x is None else _sum_to(g["d" + name], np.shape(x))
    if log_decay is not None:
        g["dlog_decay"] = g["dlog_decay"].reshape(np.shape(log_decay))
    if options.get("relative_bias") is None:
        g["drelative_bias"] = None
    return {**g, "dsinks": None if sinks is None else g["dsinks"]}


def _sum_to(x, shape):
    """Sums x over its broadcast axes to `shape`."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(tuple(axis for axis, size in enumerate(shape) if size == 1), keepdims=True)


def _dense_backward(do, dlse, q, k, v, *, sinks, scale=None, **options):
    B, Tq, Hq, D = q.shape
    scale = D**-0.5 if scale is None else scale
    g = {"dq": np.zeros_like(q), "dk": np.zeros_like(k), "dv": np.zeros_like(v), "dsinks": np.zeros(Hq),
         "dbias": np.zeros((B, Hq, Tq, k.shape[1])), "dalibi": np.zeros((B, Hq)),
         "dlog_decay": np.zeros((B, k.shape[1], Hq)),
         "drelative_bias": np.zeros((Hq, 0))}
    if options.get("relative_bias") is not None:
        g["drelative_bias"] = np.zeros(np.shape(options["relative_bias"]))
    span = g["drelative_bias"].shape[1]
    align, lengths = options.get("align", "bottom_right"), options.get("key_lengths")
    for b, h, kv, before, s, slope, z in _heads(q, k, v, scale=scale, **options):
        rows = np.flatnonzero((s > -np.inf).any(1))  # the others are constant
        s, z, before = s[rows], z[rows], before[rows]
        slope = np.broadcast_to(slope, (Tq, k.shape[1]))[rows]
        top = s.max(1, keepdims=True) if len(rows) else 0
        lse = top + np.log(np.exp(s - top).sum(1, keepdims=True))
        P = np.exp(s - lse)
        w = np.ones_like(lse) if sinks is None else 1 / (1 + np.exp(sinks[h] - lse))
        # o = w * (P * z) @ v
        g["dv"][b, :, kv] += (w * P * z).T @ do[b, rows, h]
        dPz = do[b, rows, h] @ v[b, :, kv].T
        dw = (dPz * P * z).sum(1, keepdims=True)
        dP = w * dPz * z
        # w = sigmoid(lse - sink)
        dlogit = dw * w * (1 - w)
        g["dsinks"][h] -= dlogit.sum()
        # P = softmax(s), and lse has the derivative P
        ds = P * (dP - (dP * P).sum(1, keepdims=True)) + P * (dlogit + dlse[b, h, rows, None])
        g["dbias"][b, h, rows] = ds
        g["dalibi"][b, h] = -(ds * np.abs(before)).sum()
        inside = (before >= 0) & (before < span)
        np.add.at(g["drelative_bias"][h], before[inside], ds[inside])
        start = {"bottom_right": k.shape[1] - Tq, "top_left": 0}[align] if isinstance(align, str) else int(align[b])
        last = k.shape[1] if lengths is None else int(lengths[b])
        g["dlog_decay"][b, :, h] = np.einsum("ij,ijs->s", ds, crosses(start + rows, k.shape[1], last))
        ds = scale * ds * slope
        g["dq"][b, rows, h] = ds @ k[b, :, kv]
        g["dk"][b, :, kv] += ds.T @ q[b, rows, h]
    return g
