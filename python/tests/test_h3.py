# H3 by its other definitions: linear attention with keys that decay by a kernel, and S4D between two gates.
# The other tests are in test_scans.py.
import numpy as np
import pytest
from scans import arguments, call, naive, state_of

import heed

SIZES = [{"T": 9, "N": 3}, {"T": 200, "N": 20}, {"T": 130, "N": 70, "d": 2}]
each = pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "T{T}_N{N}".format(**sizes))
MODES = ("log_dt", "log_A_real", "A_imag", "C")


def shifted(values):
    """The keys after their taps."""
    k, W = values["k"], values["shift"].shape[1]
    taps = values["shift"].reshape(*k.shape[2:], W)
    keys = values["shift_D"].reshape(k.shape[2:]) * k
    for s in range(min(W, k.shape[1])):
        keys[:, s:] += taps[..., s] * k[:, : k.shape[1] - s]
    return keys


@each
def test_it_is_linear_attention_with_a_kernel_over_distances(sizes):
    values = arguments("h3", **sizes)
    T = sizes["T"]
    kernel = heed.s4d_kernel(*(values[key] for key in MODES), T)
    kernel[:, 0] += values["D"]
    ages = np.subtract.outer(np.arange(T), np.arange(T))
    weights = np.where(ages < 0, 0, kernel[:, np.maximum(ages, 0)])
    scores = np.einsum("bthi,bshi->bhts", values["q"], shifted(values)) * weights
    expected = np.einsum("bhts,bshj->bthj", scores, values["v"])
    for method in ("auto", "recurrent", "convolution"):
        np.testing.assert_allclose(call("h3", values, method=method), expected, rtol=1e-9, atol=1e-9)


def test_heads_of_one_channel_are_s4d_between_gates():
    values = arguments("h3", d=1, H=6, T=50)
    inside = (shifted(values) * values["v"])[..., 0].swapaxes(1, 2)
    o = heed.s4d(inside, *(values[key] for key in MODES), D=values["D"])
    np.testing.assert_allclose(call("h3", values)[..., 0], values["q"][..., 0] * o.swapaxes(1, 2), rtol=1e-12,
                               atol=1e-12)


def test_one_tap_needs_no_tail():
    values = arguments("h3", W=1)
    o, state = call("h3", values, return_state=True)
    assert state.tail.shape == (2, 0, 2, 3)
    bare = {key: x for key, x in values.items() if key != "shift_D"}
    one = bare | {"k": shifted(values), "shift": np.ones((6, 1))}
    np.testing.assert_allclose(call("h3", one), o, rtol=1e-12, atol=1e-12)


@each
def test_gradients_of_both_ways_agree(sizes):
    values = arguments("h3", **sizes)
    do = np.random.default_rng(1).standard_normal(values["q"].shape)
    recurrent, convolved = (
        call("h3", values, do, suffix="_backward", method=method, lengths=[sizes["T"], 5])
        for method in ("recurrent", "convolution"))
    for name, a, b in zip(recurrent._fields[:-1], recurrent, convolved):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9 * np.abs(a).max(), err_msg=name)


def test_fewer_tokens_than_taps_keep_keys_of_the_tail():
    values, initial = arguments("h3", T=2), state_of("h3")
    _, state = call("h3", values, initial_state=initial, return_state=True)
    assert type(state) is heed.H3State and state._fields == ("tail", "S")
    assert np.array_equal(state.tail, np.concatenate([initial.tail, values["k"]], 1)[:, 2:])
    _, state = call("h3", values, initial_state=(initial.tail, None), return_state=True)
    np.testing.assert_allclose(state.S, naive("h3", values, heed.H3State(initial.tail, np.zeros_like(initial.S)))[1].S,
                               rtol=1e-12, atol=1e-12)


def test_explain_says_which_way_and_why():
    values = {key: x.shape for key, x in arguments("h3", T=64).items()}
    assert heed.explain("h3", **values)["kernel"] == "heads"
    assert heed.explain("h3", method="convolution", **values)["kernel"] == "heads_convolution"
    state = tuple(x.shape for x in state_of("h3"))
    assert heed.explain("h3", method="convolution", initial_state=state, **values)["kernel"] == "heads"


def test_states_that_are_no_pair_are_refused():
    values, initial = arguments("h3"), state_of("h3")
    token = {key: x[:, 0] if x.ndim == 4 else x for key, x in values.items()}
    for state in (initial.S, (initial.tail,), (*initial, initial.S), "tail"):
        with pytest.raises(heed.InvalidArgument, match=r"h3: initial_state is .*, expected arrays \(tail, S\)"):
            call("h3", values, initial_state=state)
        with pytest.raises(heed.InvalidArgument, match=r"h3_step: state is .*, expected arrays \(tail, S\)"):
            call("h3", token, suffix="_step", state=state)
    with pytest.raises(heed.InvalidArgument, match="h3_step: state.S is absent, expected a tensor"):
        call("h3", token, suffix="_step", state=(initial.tail, None))
    with pytest.raises(heed.InvalidArgument,
                       match=r"h3: initial_state.tail has shape \[2,2,2,3\], expected \[2,3,2,3\]"):
        call("h3", values, initial_state=(initial.tail[:, 1:], initial.S))
