# S4D's two views and its kernel, which other scans lack. The other tests are in test_scans.py.
import numpy as np
import pytest
from scans import arguments, call, naive, s4d_modes

import heed

PARAMETERS = ("log_dt", "log_A_real", "A_imag", "C")
SIZES = [{"T": 9, "N": 3}, {"T": 300, "N": 20}, {"T": 130, "N": 70}]
each = pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "T{T}_N{N}".format(**sizes))
both = pytest.mark.parametrize("discretization", ["zoh", "bilinear"])


def kernel_of(values, length, **options):
    return heed.s4d_kernel(*(values[key] for key in PARAMETERS), length, **options)


@each
@both
def test_both_views_and_the_convolution_with_the_kernel_agree(sizes, discretization):
    values = arguments("s4d", **sizes)
    expected, _ = naive("s4d", values, discretization=discretization)
    for method in ("auto", "recurrent", "convolution"):
        o = call("s4d", values, method=method, discretization=discretization)
        np.testing.assert_allclose(o, expected, rtol=1e-10, atol=1e-11)
    kernel = kernel_of(values, sizes["T"], discretization=discretization)
    o = heed.long_convolution(values["u"], kernel, values["D"])
    np.testing.assert_allclose(o, expected, rtol=1e-10, atol=1e-11)
    a, b, C = s4d_modes(values, discretization)
    powers = a[..., None] ** np.arange(sizes["T"])
    np.testing.assert_allclose(kernel, 2 * ((C * b)[..., None] * powers).sum(1).real, rtol=1e-10, atol=1e-11)


@each
@both
def test_gradients_of_both_views_agree(sizes, discretization):
    values = arguments("s4d", **sizes)
    do = np.random.default_rng(1).standard_normal(values["u"].shape)
    options = {"suffix": "_backward", "discretization": discretization, "lengths": [sizes["T"], 5]}
    methods = ("recurrent", "convolution")
    recurrent, convolved = (call("s4d", values, do, method=method, **options) for method in methods)
    for name, a, b in zip(recurrent._fields[:-1], recurrent, convolved):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9 * np.abs(a).max(), err_msg=name)


@both
def test_gradients_of_the_kernel_are_differences(discretization):
    values = arguments("s4d", T=40)
    rng = np.random.default_rng(2)
    dkernel = rng.standard_normal((6, 40))
    parameters = [values[key] for key in PARAMETERS]
    gradients = heed.s4d_kernel_backward(dkernel, *parameters, discretization=discretization)
    assert gradients._fields == tuple("d" + key for key in PARAMETERS)
    for array, gradient in zip(parameters, gradients, strict=True):
        assert gradient.shape == array.shape and gradient.dtype == array.dtype
        for _ in range(6):
            at = tuple(rng.integers(size) for size in array.shape)
            kept, sides = array[at], []
            for h in (1e-6, -1e-6):
                array[at] = kept + h
                sides.append((heed.s4d_kernel(*parameters, 40, discretization=discretization) * dkernel).sum())
            array[at] = kept
            np.testing.assert_allclose(gradient[at], (sides[0] - sides[1]) / 2e-6, rtol=1e-5, atol=1e-6)


def test_slow_and_fast_rates_are_exact():
    """(e^z - 1) / z where z is tiny, and decays to nothing within a token."""
    values = {"u": np.ones((1, 3, 20)),
              "log_dt": np.array([-30.0, 0.0, 3.0]), "log_A_real": np.array([[-20.0], [4.0], [2.0]]),
              "A_imag": np.array([[1e-9], [0.0], [50.0]]), "C": np.ones((3, 1, 2))}
    o, state = call("s4d", values, return_state=True)
    dt = np.exp(values["log_dt"])
    # No decay: dt per token, read with 2 Re(1 + i).
    np.testing.assert_allclose(state[0, 0, 0], [20 * dt[0], 0], rtol=1e-12, atol=1e-20)
    np.testing.assert_allclose(o[0, 0], 2 * dt[0] * np.arange(1, 21), rtol=1e-12)
    a, b, _ = s4d_modes(values)
    np.testing.assert_allclose(state[0, 1:, 0, 0], b[1:, 0].real, rtol=1e-12)
    gradients = call("s4d", values, np.ones((1, 3, 20)), suffix="_backward")
    assert all(np.isfinite(gradient).all() for gradient in gradients[:-2])


def test_rates_beyond_reason_stay_finite():
    values = arguments("s4d", T=40)
    values["log_A_real"][1] = 800.0  # whose exponential is infinite
    values["A_imag"][2] = 1e7
    for discretization in ("zoh", "bilinear"):
        o = call("s4d", values, discretization=discretization)
        assert np.isfinite(o).all()
        shared = values["D"][1] * values["u"][:, 1]
        with np.errstate(all="ignore"):
            a, _, _ = s4d_modes(values, discretization)
        assert abs(a[2]).max() <= 1 and np.abs(o[:, 2]).max() < 1e3
        if discretization == "zoh":
            np.testing.assert_allclose(o[:, 1], shared, rtol=1e-12, atol=1e-12)
        gradients = call("s4d", values, np.ones_like(o), suffix="_backward", discretization=discretization)
        assert all(np.isfinite(x).all() for x in gradients[:-1])


def test_explain_says_which_view_and_why():
    shapes = {"u": (2, 6, 64), "log_dt": (6,), "log_A_real": (6, 5), "A_imag": (6, 5), "C": (6, 5, 2)}
    assert heed.explain("s4d", **shapes)["kernel"] == "modes"
    assert heed.explain("s4d", method="convolution", **shapes)["kernel"] == "convolution_direct"
    many = shapes | {"u": (2, 6, 640), "log_A_real": (6, 80), "A_imag": (6, 80), "C": (6, 80, 2)}
    assert heed.explain("s4d", **many)["kernel"] == "convolution_fourier"
    assert heed.explain("s4d", initial_state=(2, 6, 80, 2), **many)["kernel"] == "modes"


def test_dtypes_and_errors_of_the_kernel():
    values = arguments("s4d")
    assert kernel_of(values, 0).shape == (6, 0) and kernel_of(values, 7).dtype == np.float64
    narrow = {key: x.astype(np.float32) for key, x in values.items()}
    kernel = kernel_of(narrow, 50)
    assert kernel.dtype == np.float32
    np.testing.assert_allclose(kernel, kernel_of({key: x.astype(float) for key, x in narrow.items()}, 50), atol=2e-5)
    for spoiled, message in [
        ({"C": values["C"][:5]}, r"s4d_kernel: C has shape \[5,5,2\], expected \[6,5,2\]"),
        ({"log_dt": values["C"]}, r"s4d_kernel: log_dt has shape \[6,5,2\], expected"),
        ({"log_A_real": values["log_A_real"].astype(int)}, "s4d_kernel: log_A_real has dtype"),
    ]:
        with pytest.raises(heed.InvalidArgument, match=message):
            kernel_of(values | spoiled, 7)
    with pytest.raises(heed.InvalidArgument, match="s4d_kernel: length is -1"):
        kernel_of(values, -1)
    with pytest.raises(heed.InvalidArgument,
                       match="s4d_kernel: discretization is 'euler', expected one of 'zoh', 'bilinear'"):
        kernel_of(values, 7, discretization="euler")
    with pytest.raises(TypeError, match="length"):
        heed.s4d_kernel(*(values[key] for key in PARAMETERS))
    with pytest.raises(heed.InvalidArgument, match=r"s4d_kernel_backward: dkernel has shape \[7\], expected \[6, L\]"):
        heed.s4d_kernel_backward(np.ones(7), *(values[key] for key in PARAMETERS))
