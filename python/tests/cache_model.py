# A cache as plain lists of rows, and attention over it in float64: the reference in tests of heed's caches.
import numpy as np
import pytest

import heed

TOLERANCE = {"f64": 1e-12, "f32": 4e-6, "f16": 2e-3, "bf16": 1.6e-2}
DTYPES = list(TOLERANCE)


def numpy_dtype(name):
    """NumPy's dtype of this name; a test that needs ml_dtypes is skipped where that is missing."""
    if name == "bf16":
        return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.dtype({"f64": "f8", "f32": "f4", "f16": "f2"}[name])


def normal(rng, *shape, dtype="f32"):
    return rng.standard_normal(shape).astype(numpy_dtype(dtype))


class Model:
    """The content of a KVCache, or with a window of a RingKVCache: a list of (key, value) for each sequence."""

    def __init__(self, batch, value_dim=None, window=None, sink_tokens=0):
        self.tokens = [[] for _ in range(batch)]
        self.appended = [0] * batch
        self.latent, self.window, self.sinks = value_dim, window, sink_tokens

    @property
    def lengths(self):
        return [len(tokens) for tokens in self.tokens]

    def append(self, k, v=None, lengths=None):
        k = np.asarray(k, np.float64)
        v = k[..., : self.latent] if v is None else np.asarray(v, np.float64)
        for b, tokens in enumerate(self.tokens):
            self.appended[b] = k.shape[1] if lengths is None else lengths[b]
            tokens += [(k[b, t], v[b, t]) for t in range(self.appended[b])]

    def trim(self, lengths):
        for b, n in enumerate(lengths):
            before = min(len(self.tokens[b]) - self.appended[b], n)
            self.appended[b] = n - before
            del self.tokens[b][n:]

    def reorder(self, indices):
        self.tokens = [list(self.tokens[i]) for i in indices]
        self.appended = [self.appended[i] for i in indices]

    def fork(self):
        other = Model(0, self.latent, self.window, self.sinks)
        other.tokens, other.appended = [list(tokens) for tokens in self.tokens], list(self.appended)
        return other

    def attend(self, q, *, causal=True, scale=None):
        """(o, lse)."""
        q = np.asarray(q, np.float64)
        B, T, Hq, D = q.shape
        width = next((v.shape[-1] for tokens in self.tokens for _, v in tokens), 1)
        o, lse = np.zeros((B, T, Hq, width)), np.full((B, Hq, T), -np.inf)
        for b, tokens in enumerate(self.tokens):
            for i in range(min(T, self.appended[b])):
                at = len(tokens) - self.appended[b] + i
                seen = [j for j in range(len(tokens)) if not causal or j <= at]
                if self.window is not None:
                    seen = [j for j in seen if j > at - self.window or j < self.sinks]
                k = np.stack([tokens[j][0] for j in seen])
                v = np.stack([tokens[j][1] for j in seen])
                if self.latent is not None:
                    k, v = k[:, None], v[:, None]
                for h in range(Hq):
                    g = h // (Hq // k.shape[1])
                    s = k[:, g] @ q[b, i, h] * (D**-0.5 if scale is None else scale)
                    e = np.exp(s - s.max())
                    o[b, i, h], lse[b, h, i] = e / e.sum() @ v[:, g], s.max() + np.log(e.sum())
        return o, lse


def check(cache, model, q, **options):
    """attend of a cache gives what its model gives."""
    assert cache.lengths.tolist() == model.lengths and cache.appended.tolist() == model.appended
    o, lse = cache.attend(q, return_lse=True, **options)
    assert o.dtype == q.dtype and o.shape == (*q.shape[:3], cache.value_dim)
    assert lse.dtype == (np.float64 if cache.dtype == "f64" else np.float32)
    expected, expected_lse = model.attend(q, **options)
    if not sum(model.lengths):
        expected = np.zeros(o.shape)
    tolerance = TOLERANCE[cache.dtype]
    np.testing.assert_allclose(np.asarray(o, np.float64), expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=max(tolerance, 1e-12), atol=tolerance)
    return o


def new_cache(kind, batch=2, heads=2, dim=8, value_dim=6, dtype="f32", **options):
    """(cache, model) of a class of heed, with small sizes."""
    if kind == "latent":
        cache = heed.LatentKVCache(batch, value_dim, dim - value_dim, dtype=dtype, **options)
        return cache, Model(batch, value_dim)
    if kind == "ring":
        options = {"window": 5, "sink_tokens": 2, **options}
        cache = heed.RingKVCache(batch, heads, dim, value_dim, dtype=dtype, **options)
        return cache, Model(batch, window=options["window"], sink_tokens=options["sink_tokens"])
    if kind == "contiguous":
        options = {"page": None, "capacity": 200, **options}
    return heed.KVCache(batch, heads, dim, value_dim, dtype=dtype, **options), Model(batch)


def grow(rng, cache, model, tokens, lengths=None):
    """Appends the same random rows to a cache and its model."""
    if isinstance(cache, heed.LatentKVCache):
        rows = (normal(rng, cache.batch, tokens, cache.dim, dtype=cache.dtype),)
    else:
        rows = tuple(normal(rng, cache.batch, tokens, cache.heads, width, dtype=cache.dtype)
                     for width in (cache.dim, cache.value_dim))
    cache.append(*rows, lengths=lengths)
    model.append(*rows, lengths=lengths)
    return rows
