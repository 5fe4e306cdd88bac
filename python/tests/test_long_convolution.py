# long_convolution from NumPy: agreement with the definition by both methods, layouts, sequences, gradients, errors.
import numpy as np
import pytest
from scans import DESCRIPTIONS, arguments, call

import heed

NAME = "long_convolution"
# Tap by tap, one block, and several.
SIZES = [{"T": 21, "L": 6}, {"T": 300, "L": 300}, {"T": 700, "L": 200}]
each = pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "T{T}_L{L}".format(**sizes))


def convolved(kernel, x):
    """Along the last axis, channel by channel."""
    return np.stack([[np.convolve(k, row)[: len(row)] for k, row in zip(kernel, rows, strict=True)] for rows in x])


def naive(values):
    o = convolved(values["kernel"], values["u"])
    return o + values["D"][:, None] * values["u"] if "D" in values else o


@each
def test_the_output_is_that_of_the_definition(sizes):
    values = arguments(NAME, **sizes)
    np.testing.assert_allclose(call(NAME, values), naive(values), rtol=1e-11, atol=1e-11)
    positional = heed.long_convolution(values["u"], values["kernel"])
    np.testing.assert_allclose(positional, convolved(values["kernel"], values["u"]), rtol=1e-11, atol=1e-11)
    for dtype, error in ((np.float32, 1e-4), (np.float16, 0.3)):
        narrow = {key: x.astype(dtype) for key, x in values.items()}
        o = call(NAME, narrow)
        assert o.dtype == dtype
        np.testing.assert_allclose(o.astype(float), naive({key: x.astype(float) for key, x in narrow.items()}),
                                   atol=error)
    mixed = {key: x.astype(np.float32) if x.ndim < 3 else x for key, x in values.items()}
    assert np.array_equal(call(NAME, mixed), call(NAME, {key: x.astype(float) for key, x in mixed.items()}))


@each
def test_bits_do_not_depend_on_layouts_and_threads(sizes):
    values = arguments(NAME, dtype=np.float32, D=34, **sizes)
    do = np.random.default_rng(1).standard_normal(values["u"].shape).astype(np.float32)
    o, gradients = call(NAME, values), call(NAME, values, do, suffix="_backward")
    assert gradients._fields == ("du", "dkernel", "dD")

    def swapped(x):
        return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2) if x.ndim > 2 else x

    for change in (swapped, lambda x: np.repeat(x, 2, -1)[..., ::2], lambda x: np.flip(np.flip(x).copy())):
        others = {key: change(x) for key, x in values.items()}
        again = call(NAME, others)
        assert np.array_equal(again, o) and again.strides == (swapped(o) if change is swapped else o).strides
        for a, b in zip(call(NAME, others, do, suffix="_backward"), gradients, strict=True):
            assert np.array_equal(a, b)
    for threads in (1, 2, 5):
        assert np.array_equal(call(NAME, values, threads=threads), o)
        again = call(NAME, values, do, suffix="_backward", threads=threads)
        assert all(np.array_equal(a, b) for a, b in zip(again, gradients, strict=True))


@each
def test_packed_sequences_lengths_and_direction(sizes):
    values = arguments(NAME, B=1, **sizes)
    T, u = sizes["T"], values["u"]
    middle = slice(4, T - 5)
    part = values | {"u": u[..., middle], "kernel": values["kernel"][:, : T - 9]}
    alone = call(NAME, part)
    packed = call(NAME, values, cu_seqlens=[0, 4, 4, T - 5])
    np.testing.assert_allclose(packed[..., middle], alone, rtol=1e-11, atol=1e-11)
    assert not packed[..., T - 5 :].any()
    padded = call(NAME, values, starts=[4], lengths=[T - 5])
    assert np.array_equal(padded[..., middle], packed[..., middle]) and not padded[..., :4].any()
    backwards = call(NAME, values | {"u": u[..., ::-1]})
    assert np.array_equal(call(NAME, values, reverse=True), backwards[..., ::-1])


@each
@pytest.mark.parametrize("options", [{}, {"reverse": True, "lengths": [19, 15], "starts": [0, 3]}])
def test_gradients_are_differences(sizes, options):
    values = arguments(NAME, **sizes)
    rng = np.random.default_rng(2)
    do = rng.standard_normal(values["u"].shape)
    gradients = call(NAME, values, do, suffix="_backward", **options)
    for key, array in values.items():
        gradient = getattr(gradients, "d" + key)
        assert gradient.shape == array.shape and gradient.dtype == array.dtype
        for _ in range(8):
            at, kept, sides = tuple(rng.integers(min(size, 16)) for size in array.shape), 0, []
            kept = array[at]
            for h in (1e-5, -1e-5):
                array[at] = kept + h
                sides.append((call(NAME, values, **options) * do).sum())
            array[at] = kept
            np.testing.assert_allclose(gradient[at], (sides[0] - sides[1]) / 2e-5, rtol=1e-6, atol=1e-6)
    bare = {key: values[key] for key in ("u", "kernel")}
    assert call(NAME, bare, do, suffix="_backward").dD is None


def test_explain_says_which_method_and_why():
    short = heed.explain(NAME, u=(2, 6, 21), kernel=(6, 6))
    assert short["kernel"] == "convolution_direct" and "tap by tap" in short["why"]
    long = heed.explain(NAME, u=(2, 6, 700), kernel=(6, 200))
    assert long["kernel"] == "convolution_fourier" and "Fourier" in long["why"] and long["copies"] == []


def test_there_is_no_state():
    values = arguments(NAME)
    assert not hasattr(heed, f"{NAME}_step") and DESCRIPTIONS[NAME]["state_axes"] == []
    for option in ("initial_state", "return_state", "dstate"):
        with pytest.raises(TypeError, match=option):
            call(NAME, values, **{option: None})


def test_errors_name_the_argument():
    values = arguments(NAME)
    u, kernel = values["u"], values["kernel"]
    for spoiled, message in [
        ({"u": u[0]}, r"u has shape \[6,21\], expected \[B, D, T\]"),
        ({"u": u.astype(int)}, "u has dtype"),
        ({"kernel": np.ones((6, 22))}, r"kernel has shape \[6,22\], expected \[D, L\] with L <= T = 21"),
        ({"kernel": kernel[:5]}, r"kernel has shape \[5,6\], expected \[6,6\]"),
        ({"D": values["D"][:5]}, r"D has shape \[5\], expected \[6\]"),
        ({"lengths": [21, 22]}, r"lengths\[1\] is 22, expected 0 to T = 21"),
        ({"cu_seqlens": [0, 21]}, "a leading axis of 1 with cu_seqlens"),
        ({"out": u[:1].copy()}, "out has shape"),
    ]:
        with pytest.raises(heed.InvalidArgument, match=f"^{NAME}: .*{message}"):
            call(NAME, values | spoiled)
    with pytest.raises(heed.InvalidArgument, match=f"^{NAME}_backward: do has shape"):
        call(NAME, values, u[:1], suffix="_backward")
    with pytest.raises(TypeError, match="kernel"):
        heed.long_convolution(u)
