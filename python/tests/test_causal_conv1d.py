# causal_conv1d from NumPy: agreement with its definition, layouts, states, options, gradients, errors.
import numpy as np
import pytest

import heed

rng = np.random.default_rng(7)


def problem(B=2, D=19, T=50, W=4, dtype=np.float64):
    x, weight, bias = (rng.standard_normal(shape).astype(dtype) for shape in ((B, D, T), (D, W), (D,)))
    initial = rng.standard_normal((B, D, W - 1)).astype(np.float64 if dtype == np.float64 else np.float32)
    return x, weight, bias, initial


def naive(x, weight, bias=0.0, initial=None, silu=False):
    """o and the final state, by the definition."""
    B, D, T = x.shape
    W = weight.shape[1]
    inputs = np.concatenate([np.zeros((B, D, W - 1)) if initial is None else initial, x], 2)
    p = sum(weight[:, j, None] * inputs[:, :, j : j + T] for j in range(W)) + np.asarray(bias)[..., None]
    return p / (1 + np.exp(-p)) if silu else p, inputs[:, :, T:]


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("W", [1, 2, 4, 9])
def test_outputs_and_states_are_those_of_the_definition(activation, W):
    x, weight, bias, initial = problem(W=W)
    for T in (50, 3, 0):
        o, state = heed.causal_conv1d(
            x[:, :, :T], weight, bias, activation=activation, initial_state=initial, return_state=True
        )
        expected, last = naive(x[:, :, :T], weight, bias, initial, activation is not None)
        np.testing.assert_allclose(o, expected, rtol=0, atol=1e-12)
        assert np.array_equal(state, last) and state.shape == (2, 19, W - 1)
    np.testing.assert_allclose(heed.causal_conv1d(x, weight), naive(x, weight)[0], rtol=0, atol=1e-12)


def test_dtypes_of_inputs_weights_and_states():
    for dtype, state_dtype in ((np.float64, np.float64), (np.float32, np.float32), (np.float16, np.float32)):
        x, weight, bias, _ = problem(dtype=dtype)
        o, state = heed.causal_conv1d(x, weight, bias, return_state=True)
        assert o.dtype == dtype and state.dtype == state_dtype
        assert np.array_equal(state, x[:, :, -3:].astype(state_dtype))
    o = heed.causal_conv1d(x, weight.astype(np.float32), bias.astype(np.float32))
    assert np.array_equal(o, heed.causal_conv1d(x, weight, bias))


def test_bits_do_not_depend_on_layouts_and_results_lie_as_x_does():
    x, weight, bias, initial = problem(dtype=np.float32, T=200)
    do = rng.standard_normal(x.shape).astype(np.float32)
    options = {"activation": "silu", "initial_state": initial}
    o = heed.causal_conv1d(x, weight, bias, **options)
    gradients = heed.causal_conv1d_backward(do, x, weight, bias, **options)
    assert o.flags.c_contiguous
    last = np.ascontiguousarray(x.transpose(0, 2, 1)).transpose(0, 2, 1)
    wide = np.empty((2, 19, 400), np.float32)[:, :, ::2]
    wide[:] = x
    for other in (last, wide, x[:, ::-1][:, ::-1]):
        again = heed.causal_conv1d(other, weight, bias, **options)
        assert np.array_equal(again, o)
        assert again.strides == (other.strides if other is last else o.strides)
        for a, b in zip(heed.causal_conv1d_backward(do, other, weight, bias, **options), gradients, strict=True):
            assert np.array_equal(a, b)
    backwards = heed.causal_conv1d(x[:, :, ::-1], weight, bias, **options)
    assert np.array_equal(heed.causal_conv1d(x, weight, bias, reverse=True, **options)[:, :, ::-1], backwards)
    assert heed.explain("causal_conv1d", x=last, weight=weight)["copies"] == []


@pytest.mark.parametrize("W", [1, 4])
def test_steps_continue_a_sequence(W):
    x, weight, bias, initial = problem(W=W, dtype=np.float32)
    for b in (bias, None):
        whole, last = heed.causal_conv1d(x, weight, b, activation="silu", initial_state=initial, return_state=True)
        _, state = heed.causal_conv1d(x[:, :, :44], weight, b, initial_state=initial, return_state=True)
        for t in range(44, 50):
            o = heed.causal_conv1d_step(x[:, :, t], weight, b, state, activation="silu")
            assert np.array_equal(o, whole[:, :, t])
        assert np.array_equal(state, last)


@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_are_differences(reverse):
    x, weight, bias, initial = problem(T=20)
    do, dstate = rng.standard_normal(x.shape), rng.standard_normal(initial.shape)
    options = {"activation": "silu", "initial_state": initial, "reverse": reverse, "lengths": [20, 2]}

    def loss():
        o, state = heed.causal_conv1d(x, weight, bias, return_state=True, **options)
        return (o * do).sum() + (state * dstate).sum()

    gradients = heed.causal_conv1d_backward(do, x, weight, bias, dstate, **options)
    assert gradients._fields == ("dx", "dweight", "dbias", "dinitial_state")
    assert type(gradients).__name__ == "CausalConv1dGradients"
    for gradient, array in zip(gradients, (x, weight, bias, initial), strict=True):
        assert gradient.shape == array.shape and gradient.dtype == array.dtype
        for _ in range(20):
            at = tuple(rng.integers(size) for size in array.shape)
            kept, sides = array[at], []
            for h in (1e-6, -1e-6):
                array[at] = kept + h
                sides.append(loss())
            array[at] = kept
            np.testing.assert_allclose(gradient[at], (sides[0] - sides[1]) / 2e-6, rtol=1e-6, atol=1e-7)
    none = heed.causal_conv1d_backward(do, x, weight)
    assert none.dbias is None and none.dinitial_state is None


def test_packed_sequences_and_lengths():
    x, weight, bias, _ = problem(B=1)
    packed, states = heed.causal_conv1d(x, weight, bias, cu_seqlens=[0, 20, 20, 45], return_state=True)
    assert states.shape == (3, 19, 3) and not packed[:, :, 45:].any() and not states[1].any()
    o, state = heed.causal_conv1d(x[:, :, 20:45], weight, bias, return_state=True)
    assert np.array_equal(packed[:, :, 20:45], o) and np.array_equal(states[2:], state)
    padded = heed.causal_conv1d(x, weight, bias, starts=[20], lengths=[45])
    assert np.array_equal(padded[:, :, 20:45], o) and not padded[:, :, :20].any()
    initial = rng.standard_normal((3, 19, 3))
    packed = heed.causal_conv1d(x, weight, bias, cu_seqlens=[0, 20, 20, 45], initial_state=initial)
    alone = heed.causal_conv1d(x[:, :, 20:45], weight, bias, initial_state=initial[2:])
    assert np.array_equal(packed[:, :, 20:45], alone)


def test_explain_and_out():
    x, weight, bias, _ = problem(dtype=np.float32)
    report = heed.explain("causal_conv1d", x=(2, 19, 50), weight=(19, 4))
    assert report["kernel"] == "causal_conv1d_f32" and report["flops"] == 2 * 2 * 19 * 50 * 4
    assert "tokens in lanes" in report["why"]
    out = np.empty_like(x)
    assert heed.causal_conv1d(x, weight, bias, out=out) is out
    assert np.array_equal(out, heed.causal_conv1d(x, weight, bias))


def test_errors_name_the_argument():
    x, weight, bias, initial = problem()
    cases = [
        ({"lengths": [50, 51]}, r"causal_conv1d: lengths\[1\] is 51, expected 0 to T = 50"),
        ({"initial_state": initial[:, :, :2]},
         r"causal_conv1d: initial_state has shape \[2,19,2\], expected \[2,19,3\]"),
        ({"initial_state": initial.astype(np.float32)}, "causal_conv1d: initial_state has dtype f32, expected f64"),
        ({"activation": "relu"}, "causal_conv1d: activation is 'relu', expected None, 'silu' or 'swish'"),
        ({"out": np.empty((2, 19, 49))}, r"causal_conv1d: out has shape \[2,19,49\], expected \[2,19,50\]"),
        ({"x": x[0]}, r"causal_conv1d: x has shape \[19,50\], expected \[B, D, T\]"),
        ({"weight": weight[:, 0]}, r"causal_conv1d: weight has shape \[19\], expected \[D, W\] with W >= 1"),
        ({"weight": weight[1:]}, r"causal_conv1d: weight has shape \[18,4\], expected \[19,4\]"),
        ({"bias": bias[1:]}, r"causal_conv1d: bias has shape \[18\], expected \[19\]"),
    ]
    for spoiled, message in cases:
        arguments = {"x": x, "weight": weight, "bias": bias, **spoiled}
        with pytest.raises(heed.InvalidArgument, match=message):
            heed.causal_conv1d(**arguments)
    with pytest.raises(TypeError, match="nonsense"):
        heed.causal_conv1d(x, weight, nonsense=1)
    with pytest.raises(TypeError, match="weight"):
        heed.causal_conv1d(x)
    with pytest.raises(TypeError, match="state"):
        heed.causal_conv1d_step(x[:, :, 0], weight, bias)
    with pytest.raises(heed.InvalidArgument, match=r"causal_conv1d_step: state has shape \[2,19,2\]"):
        heed.causal_conv1d_step(x[:, :, 0], weight, bias, initial[:, :, :2])
    with pytest.raises(heed.InvalidArgument, match=r"causal_conv1d_backward: do has shape \[2,19,49\]"):
        heed.causal_conv1d_backward(x[:, :, 1:], x, weight)
