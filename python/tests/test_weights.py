# heed.attention_weights and heed.attention_map against plain NumPy.
import numpy as np
import pytest

import heed


def softmax_of(q, k, keep=None, scale=None):
    """P [B, H, Tq, Tk] in float64."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    s = np.einsum("bihd,bjhd->bhij", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if keep is not None:
        s = np.where(keep, s, -np.inf)
    with np.errstate(invalid="ignore"):
        p = np.exp(s - np.maximum(s.max(-1, keepdims=True), -1e300))
        return np.nan_to_num(p / p.sum(-1, keepdims=True))


@pytest.fixture(params=["float64", "float32", "float16"])
def qk(request):
    rng = np.random.default_rng(3)
    return [rng.standard_normal((2, t, h, 16)).astype(request.param) for t, h in ((70, 4), (90, 2))]


def test_weights_agree_with_numpy(qk):
    q, k = qk
    w = heed.attention_weights(q, k, causal=True)
    keep = np.arange(90) <= np.arange(70)[:, None] + 20
    assert w.dtype == np.float32 and w.shape == (2, 4, 70, 90)
    np.testing.assert_allclose(w, softmax_of(q, k, keep), rtol=1e-5, atol=1e-8)
    assert (w[..., ~keep] == 0).all()


def test_rows_heads_and_lse(qk):
    q, k = qk
    whole = heed.attention_weights(q, k, window=(10, 3))
    _, lse = heed.attention(q, k, k, window=(10, 3), return_lse=True)
    some = heed.attention_weights(q, k, window=(10, 3), rows=[69, 0, 7], heads=np.array([3, 1]), lse=lse)
    assert some.shape == (2, 2, 3, 90)
    np.testing.assert_allclose(some, whole[:, [3, 1]][:, :, [69, 0, 7]], rtol=1e-5)


@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_map_pools(qk, reduce):
    q, k = qk
    w = softmax_of(q, k)
    expected = np.empty((2, 4, 8, 5))
    rows, columns = np.arange(70) * 8 // 70, np.arange(90) * 5 // 90
    for r in range(8):
        for c in range(5):
            expected[:, :, r, c] = getattr(np, reduce)(w[:, :, rows == r][..., columns == c], axis=(2, 3))
    got = heed.attention_map(q, k, size=(8, 5), reduce=reduce)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=2e-5)


def test_map_is_never_larger_than_the_tokens():
    q = np.ones((1, 3, 1, 4), np.float32)
    m = heed.attention_map(q, q)
    assert m.shape == (1, 1, 3, 3)
    np.testing.assert_allclose(m, np.full((1, 1, 3, 3), 1 / 3), rtol=1e-6)
    assert heed.attention_map(q[:, :0], q).shape == (1, 1, 0, 3)


def test_sinks_lower_the_sum_and_dropout_does_not_show(qk):
    q, k = qk
    w = heed.attention_weights(q, k, sinks=[0.0, 1.0, -np.inf, np.inf])
    _, lse = heed.attention(q, k, k, return_lse=True)
    sums = 1 / (1 + np.exp(np.array([0.0, 1.0, -np.inf, np.inf])[:, None] - lse))
    np.testing.assert_allclose(w.sum(-1), sums, rtol=1e-5, atol=1e-7)
    assert (heed.attention_weights(q, k, dropout=0.5, seed=1) == heed.attention_weights(q, k)).all()


@pytest.mark.parametrize("options, message", [
    ({"rows": [70]}, r"attention_weights: rows contains 70, expected 0 to 69"),
    ({"heads": [1.5]}, r"attention_weights: heads"),
    ({"lse": np.zeros((2, 4, 5))}, r"attention_weights: lse has shape \[2,4,5\], expected \[2,4,70\]"),
    ({"cu_seqlens_q": [0, 70]}, r"attention_weights: cu_seqlens_q is given, expected padded sequences"),
    ({"window": (1,)}, r"attention_weights: window"),
])
def test_errors(qk, options, message):
    with pytest.raises(heed.InvalidArgument, match=message):
        heed.attention_weights(*qk, **options)


def test_errors_of_the_map(qk):
    for options, message in (({"size": (0, 4)}, r"attention_map: size\[0\] is 0"),
                             ({"size": 3}, r"attention_map: size is 3"),
                             ({"reduce": "sum"}, r"attention_map: reduce is 'sum', expected 'mean' or 'max'")):
        with pytest.raises(heed.InvalidArgument, match=message):
            heed.attention_map(*qk, **options)
    with pytest.raises(TypeError, match="unexpected keyword argument 'rows'"):
        heed.attention_map(*qk, rows=[1])
    with pytest.raises(TypeError, match="unexpected keyword argument 'out'"):
        heed.attention_weights(*qk, out=None)
