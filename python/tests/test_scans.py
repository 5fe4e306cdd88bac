# Mechanisms on the scan engine from NumPy: agreement with definitions, layouts, states, options, gradients, errors.
import numpy as np
import pytest
from scans import (
    DESCRIPTIONS, NAMES, SIZES, arguments, arrays_of, at_tokens, axes_of, call, close_enough, naive, of_each, output_at,
    state_of, time_axis,
)

import heed

SETTINGS = {"selective_scan": [{}, {"delta_softplus": True}], "rg_lru": [{}, {"c": 3.0}], "hgrn": [{}],
            "s4d": [{"method": method, "discretization": rule} for method in ("recurrent", "convolution")
                    for rule in ("zoh", "bilinear")], "h3": [{"method": "recurrent"}, {"method": "convolution"}]}
CASES = [(name, settings) for name in NAMES for settings in SETTINGS[name]]
each = pytest.mark.parametrize("name", NAMES)


def same(a, b):
    """States of the same bits."""
    return all(np.array_equal(x, y) for x, y in zip(arrays_of(a), arrays_of(b), strict=True))


def assert_close(a, b, **tolerance):
    """Compares outputs or states that agree up to rounding."""
    for x, y in zip(arrays_of(a), arrays_of(b), strict=True):
        np.testing.assert_allclose(x, y, **tolerance)


def with_forms(name):
    """All inputs, in each form that some of them have; then what is not optional."""
    ranks = {len(form) for axes in DESCRIPTIONS[name]["axes"].values() for form in axes.split("|") if "|" in axes}
    for rank in ranks or {None}:
        values = arguments(name, rank=rank)
        yield values
    if DESCRIPTIONS[name]["optional"]:
        yield {key: x for key, x in values.items() if key not in DESCRIPTIONS[name]["optional"]}


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_outputs_and_states_are_those_of_the_definition(name, settings):
    for values in with_forms(name):
        for initial in (None, state_of(name)):
            for T in (SIZES["T"], 1, 0):
                part = at_tokens(name, values, slice(T))
                o, state = call(name, part, initial_state=initial, return_state=True, **settings)
                expected, last = naive(name, part, initial, **settings)
                np.testing.assert_allclose(o, expected, rtol=1e-12, atol=1e-12)
                assert_close(state, last, rtol=1e-12, atol=1e-12)


@each
def test_inputs_by_position_are_those_by_name(name):
    values = arguments(name)
    positional = DESCRIPTIONS[name]["positional"]
    given = list(values.values())[:positional]
    rest = dict(list(values.items())[positional:])
    assert np.array_equal(getattr(heed, name)(*given, **rest), call(name, values))
    with pytest.raises(TypeError, match="positional"):
        getattr(heed, name)(*given, given[0], **rest)


@each
def test_dtypes_of_outputs_and_states(name):
    for dtype, state_dtype, error in ((np.float32, np.float32, 1e-4), (np.float16, np.float32, 2e-2)):
        values = arguments(name, dtype=dtype)
        o, state = call(name, values, return_state=True)
        assert o.dtype == dtype and all(x.dtype == state_dtype for x in arrays_of(state))
        wide = {key: x.astype(np.float64) for key, x in values.items()}
        np.testing.assert_allclose(o.astype(float), naive(name, wide)[0], rtol=error, atol=error)
    mixed = {key: x.astype(np.float32) if time_axis(name, key, x) is None else x for key, x in values.items()}
    assert np.array_equal(call(name, mixed), call(name, values))


@each
def test_bits_do_not_depend_on_layouts_and_results_lie_as_the_input_does(name):
    values = arguments(name, dtype=np.float32, D=34, T=50)
    first = next(iter(values))
    initial = state_of(name, np.float32, D=34)
    do = np.random.default_rng(1).standard_normal(values[first].shape).astype(np.float32)
    o = call(name, values, initial_state=initial)
    gradients = call(name, values, do, suffix="_backward", initial_state=initial)

    def swapped(x):
        return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2) if x.ndim > 2 else x

    def gathered(x):
        return np.repeat(np.repeat(x, 2, -1), 2, -2)[..., ::2, ::2] if x.ndim > 2 else x

    for change in (swapped, gathered, lambda x: np.flip(np.flip(x).copy())):
        others = {key: change(x) for key, x in values.items()}
        again = call(name, others, initial_state=initial)
        assert np.array_equal(again, o)
        assert again.strides == (swapped(o) if change is swapped else o).strides
        for a, b in zip(call(name, others, do, suffix="_backward", initial_state=initial), gradients, strict=True):
            assert same(a, b)
    assert heed.explain(name, **others)["copies"] == []
    for threads in (1, 2, 5):
        assert np.array_equal(call(name, values, initial_state=initial, threads=threads), o)
        again = call(name, values, do, suffix="_backward", initial_state=initial, threads=threads)
        assert all(same(a, b) for a, b in zip(again, gradients, strict=True))


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_splits_and_steps_continue_a_sequence(name, settings):
    for rank in (3, 4) if name == "selective_scan" else (None,):
        values = arguments(name, dtype=np.float32, rank=rank)
        initial = state_of(name, np.float32)
        whole, last = call(name, values, initial_state=initial, return_state=True, **settings)
        parts, state = [], initial
        for tokens in (slice(0, 7), slice(7, 7), slice(7, 17)):
            o, state = call(name, at_tokens(name, values, tokens), initial_state=state, return_state=True, **settings)
            parts.append(o)
        for t in range(17, SIZES["T"]):
            o = call(name, at_tokens(name, values, t), suffix="_step", state=state, **settings)
            np.testing.assert_allclose(o, output_at(name, whole, t), **close_enough(name))
        axis = time_axis(name, DESCRIPTIONS[name]["inputs"][0], whole)
        np.testing.assert_allclose(np.concatenate(parts, axis), output_at(name, whole, slice(17)), **close_enough(name))
        assert_close(state, last, **close_enough(name))


def reversed_in_time(name, values):
    return at_tokens(name, values, slice(None, None, -1))


@each
def test_packed_sequences_lengths_and_direction(name):
    values = arguments(name, B=1)
    first = next(iter(values))
    initial = state_of(name, B=3)
    bounds = [0, 4, 4, 15]
    packed, states = call(name, values, cu_seqlens=bounds, initial_state=initial, return_state=True)
    assert not output_at(name, packed, slice(15, None)).any()
    assert same(of_each(lambda x: x[1], states), of_each(lambda x: x[1], initial))
    part = at_tokens(name, values, slice(4, 15))
    one, third, last = (of_each(lambda x, i=i: x[i : i + 1], y) for i, y in ((0, initial), (2, initial), (2, states)))
    o, state = call(name, part, initial_state=third, return_state=True)
    assert np.array_equal(output_at(name, packed, slice(4, 15)), o) and same(last, state)
    padded, state = call(name, values, starts=[4], lengths=[15], initial_state=third, return_state=True)
    assert np.array_equal(output_at(name, padded, slice(4, 15)), o) and same(last, state)
    assert not output_at(name, padded, slice(4)).any()
    backwards = call(name, reversed_in_time(name, values), initial_state=one)
    again = call(name, values, reverse=True, initial_state=one)
    assert np.array_equal(again, output_at(name, backwards, slice(None, None, -1)))
    # A token that does not count is never read, whatever is in it.
    spoiled = {key: x.copy() for key, x in values.items()}
    for key, x in spoiled.items():
        axis = time_axis(name, key, x)
        if axis is not None:
            at_tokens(name, {key: x}, slice(15, None))[key][...] = np.nan
    do = np.ones_like(values[first])
    clean = call(name, values, do, suffix="_backward", lengths=[15])
    for a, b in zip(call(name, spoiled, do, suffix="_backward", lengths=[15])[:-1], clean[:-1], strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_gradients_are_differences(name, settings, reverse):
    rng = np.random.default_rng(2)
    for values in with_forms(name):
        initial = state_of(name)
        do, dstate = (rng.standard_normal(next(iter(values.values())).shape),
                      of_each(lambda x: rng.standard_normal(x.shape), initial))
        options = settings | {"reverse": reverse, "lengths": [SIZES["T"], 9]}

        def loss():
            o, state = call(name, values, initial_state=initial, return_state=True, **options)
            return (o * do).sum() + sum((x * dx).sum()
                                        for x, dx in zip(arrays_of(state), arrays_of(dstate), strict=True))

        gradients = call(name, values, do, suffix="_backward", initial_state=initial, dstate=dstate, **options)
        assert gradients._fields == (*("d" + x for x in DESCRIPTIONS[name]["inputs"]), "dinitial_state")
        pairs = [(values[key], getattr(gradients, "d" + key)) for key in values]
        for array, gradient in (*pairs, *zip(arrays_of(initial), arrays_of(gradients.dinitial_state), strict=True)):
            assert gradient.shape == array.shape and gradient.dtype == array.dtype
            for _ in range(6):
                at = tuple(rng.integers(size) for size in array.shape)
                kept, sides = array[at], []
                for h in (1e-6, -1e-6):
                    array[at] = kept + h
                    sides.append(loss())
                array[at] = kept
                np.testing.assert_allclose(gradient[at], (sides[0] - sides[1]) / 2e-6, rtol=2e-6, atol=1e-7)
        bare = {key: x for key, x in values.items() if key not in DESCRIPTIONS[name]["optional"]}
        none = call(name, bare, do, suffix="_backward", **settings)
        assert none.dinitial_state is None
        assert all(getattr(none, "d" + key) is None for key in DESCRIPTIONS[name]["optional"])


@each
def test_explain_and_out(name):
    values = arguments(name, dtype=np.float32)
    report = heed.explain(name, **{key: x.shape for key, x in values.items()})
    assert report["copies"] == [] and ("one pair" if name == "h3" else "in lanes") in report["why"]
    out = np.empty_like(next(iter(values.values())))
    assert call(name, values, out=out) is out
    assert np.array_equal(out, call(name, values))


@each
def test_a_nan_stays_in_its_channel(name):
    """H3 has it in all of the head, as its queries see the next channels of keys."""
    values = arguments(name, dtype=np.float32)
    key = {"selective_scan": "delta", "s4d": "u", "h3": "k"}.get(name, "x")
    axes = axes_of(name, key)
    spoiled = {"B": 1, "D": 3, "H": 1, "d": 2, "T": 9}
    values[key][tuple(spoiled[axis] for axis in axes)] = np.nan
    lost = np.isnan(call(name, values))
    for where in np.ndindex(lost.shape):
        place = dict(zip(axes, where))
        assert lost[where] == (place["T"] >= 9
                               and all(place[axis] == spoiled[axis] for axis in axes if axis not in "Td"))


@each
def test_errors_name_the_argument(name):
    values = arguments(name)
    first = DESCRIPTIONS[name]["inputs"][0]
    x = values[first]
    expected = ", ".join(axes_of(name, first))
    initial = state_of(name)
    cases = [
        ({"lengths": [21, 22]}, r"lengths\[1\] is 22, expected 0 to T = 21"),
        ({"initial_state": of_each(lambda x: x[:1], initial)}, r"initial_state.* has shape .*, expected \[2,"),
        ({"initial_state": of_each(lambda x: x.astype(np.float32), initial)},
         "initial_state.* has dtype f32, expected f64"),
        ({"out": x[:1]}, "out has shape .*, expected"),
        ({first: x[0]}, rf"{first} has shape .*, expected \[{expected}\]"),
        ({first: x.astype(int)}, f"{first} has dtype"),
        ({"cu_seqlens": [0, 21]}, "a leading axis of 1 with cu_seqlens"),
    ]
    if name == "selective_scan":
        three = np.repeat(values["B"], 2, axis=1)[:, :3]
        five = np.concatenate([values["B"], three], axis=1)
        cases += [
            ({"A": values["A"][:, 0]}, r"A has shape \[6\], expected \[D, N\]"),
            ({"A": values["A"][:3]}, r"A has shape \[3,5\], expected \[6,5\]"),
            ({"B": five, "C": five}, r"B has shape \[2,5,5,21\], expected .* G >= 1 dividing D = 6"),
            ({"C": three}, r"C has shape \[2,3,5,21\], expected"),
            ({"delta_softplus": 1}, "delta_softplus is 1"),
            ({"z": values["z"][:, :3]}, r"z has shape \[2,3,21\], expected \[2,6,21\]"),
        ]
    if name == "s4d":
        cases += [
            ({"method": "fast"}, "method is 'fast', expected one of 'auto', 'recurrent', 'convolution'"),
            ({"discretization": 1}, "discretization is 1, expected 'zoh', 'bilinear'"),
            ({"C": values["C"][..., :1]}, r"C has shape \[6,5,1\], expected \[6,5,2\]"),
            ({"A_imag": values["A_imag"][:, :4]}, r"A_imag has shape \[6,4\], expected \[6,5\]"),
        ]
    if name == "h3":
        cases += [
            ({"initial_state": initial.S}, r"initial_state is .*, expected arrays \(tail, S\)"),
            ({"initial_state": (initial.tail, initial.S[..., :1])}, r"initial_state.S has shape"),
            ({"k": values["k"][:, :20]}, r"k has shape \[2,20,2,3\], expected \[2,21,2,3\]"),
            ({"shift": values["shift"][:5]}, r"shift has shape \[5,4\], expected \[6,4\]"),
            ({"shift": values["shift"][:, :0]}, r"shift has shape \[6,0\], expected"),
            ({"log_dt": np.zeros(6)}, r"log_dt has shape \[6\], expected \[2\]"),
            ({"shift_D": np.zeros(2)}, r"shift_D has shape \[2\], expected \[6\]"),
            ({"method": "fft"}, "method is 'fft', expected one of 'auto', 'recurrent', 'convolution'"),
        ]
    if name == "rg_lru":
        cases += [({"c": 0.0}, "c is 0, expected a positive number"), ({"a": values["a"][1:]}, "a has shape")]
    for spoiled, message in cases:
        with pytest.raises(heed.InvalidArgument, match=f"^{name}: .*{message}"):
            call(name, values | spoiled)
    with pytest.raises(TypeError, match="nonsense"):
        call(name, values, nonsense=1)
    with pytest.raises(TypeError, match=first):
        getattr(heed, name)()
    token = at_tokens(name, values, 0)
    with pytest.raises(TypeError, match="state"):
        call(name, token, suffix="_step")
    with pytest.raises(heed.InvalidArgument, match=f"^{name}_step: state.* has shape"):
        call(name, token, suffix="_step", state=of_each(lambda x: x[:, :1].copy(), initial))
    with pytest.raises(heed.InvalidArgument, match=f"^{name}_step: {first} has shape"):
        call(name, values, suffix="_step", state=initial)
    with pytest.raises(heed.InvalidArgument, match=f"^{name}_backward: do has shape"):
        call(name, values, x[:1], suffix="_backward")


@pytest.mark.parametrize(("name", "key"), [(name, key) for name in NAMES
                                           for key in ("A", "log_decay") if key in DESCRIPTIONS[name]["inputs"]])
def test_checks_refuse_what_would_grow(name, key):
    values = arguments(name)
    values[key].flat[7] = 1e-3
    call(name, values)
    heed.set_checks(True)
    try:
        with pytest.raises(heed.InvalidArgument, match=f"{name}: {key} has an element 0.001, expected <= 0 everywhere"):
            call(name, values)
    finally:
        heed.set_checks(False)


def test_a_positive_decay_counts_as_zero():
    values = arguments("hgrn")
    ones = values | {"log_decay": np.where(values["log_decay"] < -0.3, 2.0, values["log_decay"])}
    zeros = values | {"log_decay": np.minimum(ones["log_decay"], 0)}
    assert np.array_equal(call("hgrn", ones), call("hgrn", zeros))


def test_a_step_whose_constants_could_be_tokens_is_refused():
    values = at_tokens("selective_scan", arguments("selective_scan", rank=3, B=6), 0)
    state = state_of("selective_scan", B=6)
    with pytest.raises(heed.InvalidArgument, match=r"B has shape \[6,5\], expected \[B, 1, N\] or \[B, D, N\]"):
        call("selective_scan", values, suffix="_step", state=state)
    clear = values | {"B": values["B"][:, None], "C": values["C"][:, None]}
    call("selective_scan", clear, suffix="_step", state=state)
