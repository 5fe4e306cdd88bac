# heed.torch.Compressor and CompressedKVCache: any division of a sequence against one call, and what they refuse.
import numpy as np
import pytest
import torch

import heed
import heed.torch
from heed.torch import CompressedKVCache, Compressor


def normal(*shape, dtype=torch.float64, seed=0):
    return torch.from_numpy(np.random.default_rng([seed, *shape]).standard_normal(shape)).to(dtype)


DIVISIONS = [[1] * 23, [23], [3, 4, 1, 9, 6], [8, 8, 7], [0, 5, 0, 18]]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_a_compressor_continues_a_sequence(division, overlap):
    values, gates = normal(2, 23, 3, 8), 2 * normal(2, 23, 3, 8, seed=1)
    bias = normal(4, 3, 8)
    compressor, rows, at, forks = Compressor(ratio=4, overlap=overlap, bias=bias), [], 0, []
    for count in division:
        forks.append((compressor.fork(), at, len(rows)))
        rows.append(compressor.append(values[:, at:at + count], gates[:, at:at + count]))
        at += count
    expected = heed.torch.compress(values, gates, bias, ratio=4, overlap=overlap)
    assert torch.allclose(torch.cat(rows, 1), expected, atol=1e-14)
    for fork, at, count in forks:
        rest = fork.append(values[:, at:], gates[:, at:])
        assert torch.allclose(torch.cat([*rows[:count], rest], 1), expected, atol=1e-14)


def test_gradients_pass_through_what_a_compressor_keeps():
    values, gates = normal(1, 10, 6), normal(1, 10, 6, seed=1)

    def pieces(values, gates):
        compressor = Compressor(ratio=4, overlap=True)
        return torch.cat([compressor.append(values[:, i:j], gates[:, i:j]) for i, j in ((0, 3), (3, 7), (7, 10))], 1)

    inputs = [x.clone().requires_grad_() for x in (values, gates)]
    weights = normal(1, 2, 3)
    found = torch.autograd.grad((pieces(*inputs) * weights).sum(), inputs)
    expected = torch.autograd.grad((heed.torch.compress(*inputs, ratio=4, overlap=True) * weights).sum(), inputs)
    assert all(torch.allclose(x, y, atol=1e-14) for x, y in zip(found, expected))


def test_a_refused_append_changes_nothing():
    compressor = Compressor(ratio=4)
    values = normal(1, 6, 8)
    compressor.append(values[:, :3], values[:, :3])
    for wrong in (values.float()[:, 3:], values[:, 3:, :4], values[:, None, 3:]):
        with pytest.raises(heed.InvalidArgument, match="Compressor.append: values"):
            compressor.append(wrong, values[:, 3:])
    rest = compressor.append(values[:, 3:], values[:, 3:])
    assert torch.equal(rest, heed.torch.compress(values, values, ratio=4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("division", DIVISIONS, ids=str)
@pytest.mark.parametrize("ratio, window, chosen", [(4, 6, False), (4, 6, True), (3, 1, False), (1, 0, True)])
def test_a_cache_continues_a_sequence(ratio, window, chosen, division, dtype):
    B, T, H, Hkv, D, Dv = 2, 23, 4, 2, 8, 5
    q, k, v = normal(B, T, H, D, dtype=dtype), normal(B, T, Hkv, D, dtype=dtype), normal(B, T, Hkv, Dv, dtype=dtype)
    k_cmp, v_cmp = (normal(B, T // ratio, Hkv, x, dtype=dtype, seed=2) for x in (D, Dv))
    sinks = normal(H)
    complete = (torch.arange(T) + 1) // ratio
    choice = torch.stack([torch.where(complete > i, complete - 1 - i, -1) for i in range(3)], -1).expand(B, T, 3)
    options = {"sinks": sinks, "scale": 0.4}
    o, lse = heed.torch.compressed_attention(q, k, v, k_cmp, v_cmp, ratio=ratio, window=window, return_lse=True,
                                             chosen=choice if chosen else None, **options)
    cache = CompressedKVCache(B, Hkv, D, Dv, ratio=ratio, window=window, dtype=dtype)
    at, wide = 0, torch.float64 if dtype == torch.float64 else torch.float32
    tolerance = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for count in division:
        end = at + count
        new = slice(at // ratio, end // ratio)
        cache.append(k[:, at:end], v[:, at:end], compressed=(k_cmp[:, new], v_cmp[:, new]))
        found = cache.attend(q[:, at:end], chosen=choice[:, at:end] if chosen else None, return_lse=True, **options)
        assert found[0].dtype == dtype and found[1].dtype == wide
        assert torch.allclose(found[0].double(), o[:, at:end].double(), atol=tolerance)
        assert torch.allclose(found[1], lse[..., at:end], atol=1e-5)
        at = end
    assert cache.length == T and cache.nbytes > 0 and f"length={T}" in repr(cache)


def test_old_tokens_are_dropped():
    cache, x = CompressedKVCache(1, 1, 64, ratio=128, window=16), normal(1, 1, 1, 64, dtype=torch.float32)
    compressed = x, x
    for t in range(4096):
        cache.append(x, x, compressed=compressed if t % 128 == 127 else None)
    assert cache.length == 4096
    assert cache.nbytes < 4 * 200 * 64 * 4  # 4096 tokens would be 2 MB


def test_forks_do_not_see_each_other():
    x = normal(1, 30, 1, 4)
    cache = CompressedKVCache(1, 1, 4, ratio=8, window=4, dtype="f64")
    cache.append(x[:, :20], x[:, :20], compressed=(x[:, :2], x[:, :2]))
    fork = cache.fork()
    cache.append(x[:, 20:21], x[:, 20:21])
    fork.append(-x[:, 20:21], -x[:, 20:21])
    whole = heed.torch.compressed_attention(x[:, :21], x[:, :21], x[:, :21], x[:, :2], x[:, :2], ratio=8, window=4)
    assert torch.allclose(cache.attend(x[:, 20:21]), whole[:, 20:], atol=1e-14)
    assert not torch.allclose(fork.attend(x[:, 20:21]), whole[:, 20:], atol=1e-3)


@pytest.mark.parametrize("change, message", [
    ({"batch": 0}, "batch is 0, expected an int of at least 1"),
    ({"ratio": 0}, "ratio is 0, expected an int of at least 1"),
    ({"window": -1}, "window is -1, expected an int of at least 0"),
    ({"dtype": torch.int8}, "dtype is torch.int8"),
    ({"dtype": "f8"}, "dtype is 'f8'"),
])
def test_sizes_of_a_cache_are_checked(change, message):
    with pytest.raises(heed.InvalidArgument, match=f"CompressedKVCache: {message}"):
        CompressedKVCache(**{"batch": 1, "heads": 2, "dim": 4, "ratio": 4, "window": 8} | change)


def test_what_a_cache_refuses_leaves_it_as_it_was():
    cache = CompressedKVCache(1, 2, 4, 3, ratio=4, window=8)
    k, v = normal(1, 4, 2, 4, dtype=torch.float32), normal(1, 4, 2, 3, dtype=torch.float32)
    rows = k[:, :1], v[:, :1]
    for arguments, message in (
        (((k, v), {}), "compressed is None, expected 1 rows, as 4 tokens complete as many windows of 4"),
        (((k, v), {"compressed": k}), "compressed is of type Tensor, expected a pair"),
        (((k, v), {"compressed": (k, v)}), r"k_cmp is torch.float32 \[1, 4, 2, 4\], expected .* \[1, 1, 2, 4\]"),
        (((k[:, :3], v), {}), r"v is .* \[1, 4, 2, 3\], expected .* \[1, 3, 2, 3\]"),
        (((k.double(), v), {"compressed": rows}), "k is torch.float64"),
        (((k, "v"), {"compressed": rows}), "v is of type str, expected a tensor"),
        (((k.clone().requires_grad_(), v), {"compressed": rows}), "k requires a gradient"),
    ):
        with pytest.raises(heed.InvalidArgument, match=f"CompressedKVCache.append: {message}"):
            cache.append(*arguments[0], **arguments[1])
        assert cache.length == 0
    cache.append(k, v, compressed=rows)
    q = normal(1, 5, 2, 4, dtype=torch.float32)
    for query, message in ((q, "q has 5 rows, expected at most the 4 tokens"), (q[:, :1, :, :3], "q is .* expected"),
                           (q[:, :2].double(), "q is torch.float64"), (None, "q is of type NoneType")):
        with pytest.raises(heed.InvalidArgument, match=f"CompressedKVCache.attend: {message}"):
            cache.attend(query)


def test_a_layer_of_both():
    """A window of tokens and compressed keys of one projection, token by token, as a model decodes."""
    tokens, ratio = normal(1, 40, 2, 12), 4
    values, gates, q = tokens, normal(1, 40, 2, 12, seed=1), normal(1, 40, 4, 6)
    k = tokens[..., :6]
    whole = heed.torch.compress(values, gates, ratio=ratio, overlap=True)
    expected = heed.torch.compressed_attention(q, k, k, whole, whole, ratio=ratio, window=5)
    compressor = Compressor(ratio=ratio, overlap=True)
    cache = CompressedKVCache(1, 2, 6, ratio=ratio, window=5, dtype=torch.float64)
    for t in range(40):
        at = slice(t, t + 1)
        rows = compressor.append(values[:, at], gates[:, at])
        cache.append(k[:, at], k[:, at], compressed=(rows, rows))
        assert torch.allclose(cache.attend(q[:, at]), expected[:, at], atol=1e-13)
