# heed.orthogonal_features: an independent draw from the same counters, by NumPy's QR, and its errors.
import numpy as np
import pytest

import heed

MASK = 0xFFFFFFFF


def philox(counter, key):
    """Philox4x32-10 with Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        low, high = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(high >> 32) ^ c[1] ^ k[0], high & MASK, (low >> 32) ^ c[3] ^ k[1], low & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def deviates(seed, stream, block, j, d):
    values = []
    for p in range((d + 1) // 2):
        w = philox((p, j, block, stream), (seed & MASK, seed >> 32))
        u, v = (((w[i] << 32 | w[i + 1]) >> 11) / 2**53 for i in (0, 2))
        values.append(np.sqrt(-2 * np.log(1 - u)) * np.array([np.cos(2 * np.pi * v), np.sin(2 * np.pi * v)]))
    return np.concatenate(values)[:d]


def draw(m, d, seed, scaling, haar_fix):
    rows = []
    for block in range(-(-m // d)):
        Q, R = np.linalg.qr(np.stack([deviates(seed, 2**31, block, j, d) for j in range(d)], axis=1))
        if haar_fix:
            Q = Q * np.where(np.diag(R) < 0, -1, 1)
        for j in range(d):
            norm = np.sqrt(d) if scaling else np.linalg.norm(deviates(seed, 2**31 + 1, block, j, d))
            rows.append(norm * Q[:, j])
    return np.array(rows[:m])


@pytest.mark.parametrize("scaling", [0, 1])
@pytest.mark.parametrize("haar_fix", [True, False])
def test_values_are_those_of_numpys_qr(scaling, haar_fix):
    for m, d, seed in ((20, 8, 3), (5, 3, 2**64 - 1), (7, 16, 0), (3, 1, 9)):
        ours = heed.orthogonal_features(m, d, seed, scaling=scaling, haar_fix=haar_fix)
        assert ours.shape == (m, d) and ours.dtype == np.float64
        np.testing.assert_allclose(ours, draw(m, d, seed, scaling, haar_fix), rtol=0, atol=1e-10)


def test_defaults_and_prefixes():
    w = heed.orthogonal_features(40, 16, 1)
    assert np.array_equal(w, heed.orthogonal_features(40, 16, 1, scaling=0, haar_fix=True))
    assert np.array_equal(w[:21], heed.orthogonal_features(21, 16, 1))
    assert not np.array_equal(w, heed.orthogonal_features(40, 16, 2))
    blocks = w[:32].reshape(2, 16, 16)
    gram = blocks @ blocks.transpose(0, 2, 1)
    np.testing.assert_allclose(gram, gram * np.eye(16), rtol=0, atol=1e-12)


@pytest.mark.parametrize("arguments, options, message", [
    ((0, 4, 1), {}, "m is 0"), ((4, 0, 1), {}, "d is 0"), ((4, 4097, 1), {}, "d is 4097"),
    ((4, 4, -1), {}, "seed is -1"), ((4, 4, 2**64), {}, "seed is"), ((4, 4, 1), {"scaling": 2}, "scaling is 2"),
    ((4, 4, 1), {"haar_fix": 1}, "haar_fix is 1"), ((2**24 + 1, 4, 1), {}, "m is"), ((4.0, 4, 1), {}, "m is 4.0"),
])
def test_errors(arguments, options, message):
    with pytest.raises(heed.InvalidArgument, match=f"orthogonal_features: {message}"):
        heed.orthogonal_features(*arguments, **options)


def test_tensors():
    torch = pytest.importorskip("torch")
    import heed.torch

    w = heed.torch.orthogonal_features(20, 8, 3)
    assert w.dtype == torch.float64 and np.array_equal(w.numpy(), heed.orthogonal_features(20, 8, 3))
