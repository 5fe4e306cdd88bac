# Position encodings: independent NumPy formulas, the dict of a Transformers config, and errors.
import math

import numpy as np
import pytest

import heed


def rotate(x, positions, frequencies, interleaved, factor=1.0):
    """x [B, T, H, D] by complex numbers: pair i turns by position * frequency."""
    d = 2 * len(frequencies)
    head, rest = x[..., :d].astype(np.float64), x[..., d:]
    pairs = head[..., 0::2] + 1j * head[..., 1::2] if interleaved else head[..., : d // 2] + 1j * head[..., d // 2:]
    angles = np.asarray(positions, np.float64)[..., None] * frequencies
    pairs = pairs * (factor * np.exp(1j * angles))[..., None, :]
    both = [pairs.real, pairs.imag]
    turned = np.stack(both, -1).reshape(head.shape) if interleaved else np.concatenate(both, -1)
    return np.concatenate([turned, rest], -1)


def frequencies(dim, base=10000.0):
    return base ** -(np.arange(0, dim, 2) / dim)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("positions", [np.arange(7), np.arange(7, dtype=np.int32) - 3,
                                       np.arange(14).reshape(2, 7) * 500, [3, 1, 4, 1, 5, 9, 2], [[0] * 7, [8] * 7]])
def test_rotary(rng, interleaved, positions):
    x = rng.standard_normal((2, 7, 3, 16))
    y = heed.rotary(x, positions, interleaved=interleaved)
    assert y.dtype == np.float64 and y.flags.owndata
    np.testing.assert_allclose(y, rotate(x, positions, frequencies(16), interleaved), rtol=0, atol=1e-11)
    back = heed.rotary(y, positions, interleaved=interleaved, inverse=True)
    np.testing.assert_allclose(back, x, rtol=0, atol=1e-14)
    np.testing.assert_array_equal(heed.rotary(x[0], np.asarray(positions).reshape(-1, 7)[0], interleaved=interleaved),
                                  y[0])


def test_rotary_of_a_part_with_another_base(rng):
    x = rng.standard_normal((1, 9, 2, 13)).astype(np.float32)
    y = heed.rotary(x, np.arange(9), base=500.0, dim=6, interleaved=True)
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, rotate(x, np.arange(9), frequencies(6, 500.0), True), rtol=1e-7, atol=1e-13)
    np.testing.assert_array_equal(y[..., 6:], x[..., 6:])
    by_dict = heed.rotary(x, np.arange(9), interleaved=True, scaling={"rope_theta": 500, "partial_rotary_factor": 0.5})
    np.testing.assert_array_equal(by_dict, y)  # int(13 * 0.5) = 6


@pytest.mark.parametrize(("name", "unit"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_in_16_bits_is_the_rounded_result(rng, name, unit, interleaved):
    dtype = np.float16
    if name == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes", reason="optional: bfloat16 arrays").bfloat16
    x = rng.standard_normal((1, 5, 2, 38)).astype(dtype)
    y = heed.rotary(x, np.arange(5), interleaved=interleaved)
    assert y.dtype == dtype
    exact = rotate(x, np.arange(5), frequencies(38), interleaved)
    # One rounding, and a little for the one to f32 before; atol is for subnormal results.
    np.testing.assert_allclose(y.astype(np.float64), exact, rtol=1.001 * unit, atol=2.0**-25)


def test_rotary_reads_strides_in_place(rng):
    qkv = rng.standard_normal((2, 6, 3, 4, 8)).astype(np.float32)
    q = qkv[:, ::-1, 1]
    expected = heed.rotary(q.copy(), np.arange(6), interleaved=False)
    np.testing.assert_array_equal(heed.rotary(q, np.arange(6), interleaved=False), expected)
    swapped = np.swapaxes(qkv[:, :, 0], 2, 3)  # the last axis is not contiguous, so that it is copied
    np.testing.assert_array_equal(heed.rotary(swapped, np.arange(12)[::2], interleaved=True),
                                  heed.rotary(swapped.copy(), np.arange(12)[::2], interleaved=True))


def interpolated(dim, base, factor, original, fast, slow, truncate=True):
    """YaRN's frequencies."""
    low, high = (dim * math.log(original / (n * 2 * math.pi)) / (2 * math.log(base)) for n in (fast, slow))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    w = frequencies(dim, base)
    return w / factor * ramp + w * (1 - ramp)


def banded(dim, base, factor, low, high, original):
    """Llama 3's frequencies."""
    w = frequencies(dim, base)
    t = (original * w / (2 * np.pi) - low) / (high - low)
    return np.where(t > 1, w, np.where(t < 0, w / factor, (1 - t) * w / factor + t * w))


W = frequencies(32)
LONG = [1.0 + 0.5 * i for i in range(16)]
SHORT = [1 + i / 100 for i in range(16)]
DEEPSEEK = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 1.0}
CONFIGS = [  # positions reach 1000
    ({}, W, 1),
    ({"rope_type": "default", "type": "default"}, W, 1),
    ({"rope_type": "linear", "factor": 4.0}, W / 4, 1),
    ({"type": "linear", "factor": 4, "attention_factor": None}, W / 4, 1),
    ({"rope_type": "ntk", "factor": 3}, frequencies(32, 10000 * 3 ** (32 / 30)), 1),
    ({"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 250},
     frequencies(32, 10000 * (2 * 1001 / 250 - 1) ** (32 / 30)), 1),
    ({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 2048}, W, 1),
    ({"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 256},
     interpolated(32, 10000, 16, 256, 32, 1), 0.1 * math.log(16) + 1),
    ({"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 512, "truncate": False,
      "beta_fast": 20.0, "beta_slow": 2.0, "rope_theta": 150000}, interpolated(32, 150000, 32, 512, 20, 2, False),
     0.1 * math.log(32) + 1),
    (DEEPSEEK, interpolated(32, 10000, 40, 256, 32, 1), 1),
    (DEEPSEEK | {"mscale": 0.707}, interpolated(32, 10000, 40, 256, 32, 1),
     (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1)),
    ({"rope_type": "yarn", "factor": 4, "max_position_embeddings": 256, "attention_factor": 0.9},
     interpolated(32, 10000, 4, 256, 32, 1), 0.9),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 512}, banded(32, 10000, 8, 1, 4, 512), 1),
    ({"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 1000,
      "max_position_embeddings": 32000}, W / LONG, math.sqrt(1 + math.log(32) / math.log(1000))),
    ({"type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 1001,
      "factor": 4}, W / SHORT, math.sqrt(1 + math.log(4) / math.log(1001))),
    ({"type": "longrope", "short_factor": tuple(SHORT), "long_factor": LONG, "original_max_position_embeddings": 4096,
      "attention_factor": 1.5}, W / SHORT, 1.5),
]


@pytest.mark.parametrize(("scaling", "expected", "factor"), CONFIGS)
def test_scaling(rng, scaling, expected, factor):
    x = rng.standard_normal((1, 3, 2, 32))
    positions = np.array([0, 7, 1000])
    y = heed.rotary(x, positions, interleaved=False, scaling=scaling)
    np.testing.assert_allclose(y, rotate(x, positions, expected, False, factor), rtol=0, atol=1e-10)


X = np.zeros((2, 3, 2, 8), np.float32)
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
WRONG = [
    ({"x": X[0, 0]}, r"x has shape \[2,8\], expected \[B, T, H, D\] or \[T, H, D\] with D >= 1"),
    ({"x": X.astype(np.int32)}, "x has dtype i32, expected f64, f32, bf16 or f16"),
    ({"x": None}, "x is None, expected an array on the CPU"),
    ({"x": "text"}, "x is 'text', expected an array on the CPU"),
    ({"positions": [0, 1]}, r"positions has shape \[2\], expected \[3\] or \[2,3\]"),
    ({"positions": [0.0, 1.0, 2.0]}, "positions has dtype f64, expected i32 or i64"),
    ({"positions": [0, 1, 2**40]}, r"positions contains 1099511627776, expected -2\^31 to 2\^31"),
    ({"positions": 3}, "positions is 3, expected an array on the CPU"),
    ({"base": "10"}, "base is '10', expected a finite number"),
    ({"base": 1.0}, "base is 1, expected a finite number above 1"),
    ({"base": None}, "base is None, expected a finite number"),
    ({"dim": 5}, "dim is 5, expected an even number from 2 to D, 8"),
    ({"dim": 10}, "dim is 10, expected an even number from 2 to D, 8"),
    ({"dim": 4.0}, "dim is 4.0, expected an int"),
    ({"interleaved": None}, "interleaved is None, expected True or False"),
    ({"interleaved": 1}, "interleaved is 1, expected True or False"),
    ({"inverse": 0}, "inverse is 0, expected True or False"),
    ({"scaling": "yarn"}, "scaling is 'yarn', expected the dict of a Transformers config"),
    ({"scaling": {1: 2}}, "scaling's key is 1, expected a string"),
    ({"scaling": {"type": "mrope"}}, "scaling.rope_type is 'mrope', expected 'default', 'linear', 'ntk', "),
    ({"scaling": {"type": 3}}, "scaling.type is 3, expected a string"),
    ({"scaling": {"type": "linear", "rope_type": "yarn"}}, "scaling has two different types"),
    ({"scaling": {"type": "linear"}}, "scaling.factor is missing, expected a number for rope_type 'linear'"),
    ({"scaling": {"type": "linear", "factor": None}}, "scaling.factor is missing"),
    ({"scaling": {"type": "linear", "factor": "2"}}, "scaling.factor is '2', expected a finite number"),
    ({"scaling": {"type": "linear", "factor": 0}}, "scaling.factor is 0, expected a finite number above 0"),
    ({"scaling": {"factor": 2}}, "scaling.factor is given, expected none for rope_type 'default'"),
    ({"scaling": YARN | {"low_freq_factor": 1}},
     "scaling.low_freq_factor is given, expected none for rope_type 'yarn'"),
    ({"scaling": YARN | {"mrope_section": [1, 2]}}, "scaling has the key 'mrope_section', expected only keys of "),
    ({"scaling": YARN | {"short_mscale": 1.2}}, "scaling has the key 'short_mscale', expected only keys of "),
    ({"scaling": {"full_attention": YARN}}, "scaling has the key 'full_attention', expected only keys of "),
    ({"scaling": YARN | {"truncate": 1}}, "scaling.truncate is 1, expected True or False"),
    ({"scaling": {"type": "yarn", "factor": 2}}, "scaling.original_max_position_embeddings is missing"),
    ({"scaling": {"type": "longrope", "short_factor": [1, 1], "long_factor": [1, 1]}},
     "scaling.short_factor has 2 numbers, expected 4, half of dim"),
    ({"scaling": {"type": "longrope", "short_factor": 1.0}}, "scaling.short_factor is 1.0, expected a list of numbers"),
    ({"scaling": {"type": "longrope", "long_factor": [1, "2"]}},
     r"scaling.long_factor\[1\] is '2', expected a finite number"),
    ({"scaling": {"rope_theta": 500.0}, "base": 400.0}, "base differs from scaling.rope_theta, expected"),
    ({"scaling": {"partial_rotary_factor": 0.5}, "dim": 6}, "dim is 6, expected 4 by scaling.partial_rotary_factor"),
    ({"scaling": {"partial_rotary_factor": 1e300}}, "scaling.partial_rotary_factor is out of range, expected above 0"),
    ({"scaling": {"partial_rotary_factor": 0.4}}, "dim is 3, expected an even number"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_rotary_refuses(change, message):
    arguments = {"x": X, "positions": np.arange(3), "interleaved": False} | change
    x, positions = arguments.pop("x"), arguments.pop("positions")
    with pytest.raises(heed.InvalidArgument, match="^rotary: " + message):
        heed.rotary(x, positions, **arguments)


def test_the_pairing_has_no_default():
    with pytest.raises(TypeError, match="interleaved"):
        heed.rotary(X, np.arange(3))
    with pytest.raises(TypeError, match="positional"):
        heed.rotary(X, np.arange(3), 10000.0)
    with pytest.raises(TypeError, match="positions"):
        heed.rotary(X, interleaved=True)
    with pytest.raises(TypeError, match="bidirectional"):
        heed.t5_bias(np.zeros((32, 1)), 2, 2)
    with pytest.raises(TypeError, match="buckets"):
        heed.t5_bias_backward(np.zeros((1, 2, 2)), 2, 2, bidirectional=True)


def test_sinusoidal():
    table = heed.sinusoidal(50, 6)
    assert table.dtype == np.float32 and table.shape == (50, 6)
    angles = np.arange(50)[:, None] * 10000.0 ** -(np.arange(0, 6, 2) / 6)
    np.testing.assert_allclose(table[:, 0::2], np.sin(angles), rtol=1e-7, atol=1e-13)
    np.testing.assert_allclose(table[:, 1::2], np.cos(angles), rtol=1e-7, atol=1e-13)
    angles = np.arange(50)[:, None] * 10000.0 ** -(np.arange(3) / 2)
    both = np.concatenate([np.sin(angles), np.cos(angles)], -1)
    np.testing.assert_allclose(heed.sinusoidal(50, 6, interleaved=False), both, rtol=1e-7, atol=1e-13)
    np.testing.assert_allclose(heed.sinusoidal(3, 5)[:, 4], np.sin(np.arange(3) * 10000**-0.8), rtol=1e-7)
    assert heed.sinusoidal(0, 4).shape == (0, 4)


@pytest.mark.parametrize(("arguments", "message"), [
    ((-1, 4), "T is -1, expected an int from 0"), ((3, 0), "D is 0, expected an int from 1"),
    ((3.0, 4), "T is 3.0, expected an int"), ((3, None), "D is None, expected an int")])
def test_what_sinusoidal_refuses(arguments, message):
    with pytest.raises(heed.InvalidArgument, match="^sinusoidal: " + message):
        heed.sinusoidal(*arguments)
    with pytest.raises(heed.InvalidArgument, match="^sinusoidal: interleaved is 1, expected True or False"):
        heed.sinusoidal(3, 4, interleaved=1)


def buckets_of(distance, buckets, bidirectional, max_distance):
    """The formula, with a hair added so that a distance on a limit is on its upper side."""
    nb = buckets // 2 if bidirectional else buckets
    n = np.abs(distance) if bidirectional else np.maximum(-distance, 0)
    m = nb // 2
    steps = np.log(np.maximum(n, m) / m) / math.log(max_distance / m) * (nb - m)
    bucket = np.where(n < m, n, np.minimum(nb - 1, m + np.floor(steps + 1e-9).astype(int)))
    return bucket + (nb * (distance > 0) if bidirectional else 0)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize(("buckets", "max_distance", "Tq", "Tk"),
                         [(32, 128, 40, 300), (32, 128, 300, 40), (8, 20, 9, 60)])
def test_t5_bias_and_its_gradient(rng, bidirectional, align, buckets, max_distance, Tq, Tk):
    table = rng.standard_normal((buckets, 3)).astype(np.float32)
    options = {"bidirectional": bidirectional, "max_distance": max_distance, "align": align}
    bias = heed.t5_bias(table, Tq, Tk, **options)
    start = Tk - Tq if align == "bottom_right" else 0
    bucket = buckets_of(np.arange(Tk) - (start + np.arange(Tq))[:, None], buckets, bidirectional, max_distance)
    np.testing.assert_array_equal(bias, np.moveaxis(table[bucket], -1, 0))
    dbias = rng.standard_normal((3, Tq, Tk))
    dtable = heed.t5_bias_backward(dbias, Tq, Tk, buckets=buckets, **options)
    expected = np.zeros((buckets, 3))
    np.add.at(expected, bucket, np.moveaxis(dbias, 0, -1))
    assert dtable.dtype == np.float64
    np.testing.assert_allclose(dtable, expected, rtol=0, atol=1e-11)
    np.testing.assert_allclose((dbias * bias).sum(), (dtable * table).sum(), rtol=1e-10)


def test_t5_bias_in_attention(rng):
    q, k = (rng.standard_normal((1, t, 2, 8)).astype(np.float32) for t in (5, 9))
    table = rng.standard_normal((32, 2)).astype(np.float32)
    o = heed.attention(q, k, k, scale=1.0, bias=heed.t5_bias(table, 5, 9, bidirectional=False))
    s = np.einsum("bihd,bjhd->bhij", q, k) + np.moveaxis(
        table[buckets_of(np.arange(9) - np.arange(4, 9)[:, None], 32, False, 128)], -1, 0)
    p = np.exp(s - s.max(-1, keepdims=True))
    np.testing.assert_allclose(o, np.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdims=True), k), atol=1e-5)


TABLE = np.zeros((32, 2), np.float32)


@pytest.mark.parametrize(("change", "message"), [
    ({"table": TABLE[0]}, r"table has shape \[2\], expected \[buckets, H\]"),
    ({"table": TABLE.astype(int)}, "table has dtype i64, expected f64, f32, bf16 or f16"),
    ({"table": TABLE[:31]}, r"table.shape\[0\] is 31, expected an even number of at least 4"),
    ({"Tq": -1}, "Tq is -1, expected an int from 0"), ({"Tk": 2.0}, "Tk is 2.0, expected an int"),
    ({"max_distance": 8}, "max_distance is 8, expected more than the 8 distances"),
    ({"bidirectional": 1}, "bidirectional is 1, expected True or False"),
    ({"align": "middle"}, "align is 'middle', expected 'bottom_right' or 'top_left'"),
    ({"align": 3}, "align is 3, expected 'bottom_right' or 'top_left'")])
def test_what_t5_bias_refuses(change, message):
    arguments = {"table": TABLE, "Tq": 3, "Tk": 4, "bidirectional": True} | change
    with pytest.raises(heed.InvalidArgument, match="^t5_bias: " + message):
        heed.t5_bias(arguments.pop("table"), arguments.pop("Tq"), arguments.pop("Tk"), **arguments)


@pytest.mark.parametrize(("change", "message"), [
    ({"dbias": np.zeros((2, 3, 5))}, r"dbias has shape \[2,3,5\], expected \[H, 3, 4\]"),
    ({"dbias": np.zeros((3, 4))}, r"dbias has shape \[3,4\], expected \[H, 3, 4\]"),
    ({"buckets": 0}, "buckets is 0, expected an int from 1"), ({"buckets": 6.0}, "buckets is 6.0, expected an int"),
    ({"buckets": 2}, "buckets is 2, expected an even number of at least 4")])
def test_what_t5_bias_backward_refuses(change, message):
    arguments = {"dbias": np.zeros((2, 3, 4)), "buckets": 32, "bidirectional": True} | change
    with pytest.raises(heed.InvalidArgument, match="^t5_bias_backward: " + message):
        heed.t5_bias_backward(arguments.pop("dbias"), 3, 4, **arguments)
