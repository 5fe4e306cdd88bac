# heed.attention: every option and edge against NumPy in float64, and guarantees to callers.
import naive
import numpy as np
import pytest

import heed

TOLERANCE = {np.float32: 4e-6, np.float64: 4e-14}  # relative to the largest value; logits here are below 30


def problem(rng, B=2, Tq=7, Tk=9, Hq=4, Hkv=2, D=8, Dv=5, dtype=np.float32):
    shapes = (B, Tq, Hq, D), (B, Tk, Hkv, D), (B, Tk, Hkv, Dv)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def check(q, k, v, **options):
    """heed's result, compared with the naive one."""
    o, lse = heed.attention(q, k, v, return_lse=True, **options)
    expected_o, expected_lse = naive.attention(q, k, v, **options)
    dtype = q.dtype.type
    assert o.dtype == dtype and lse.dtype == dtype and o.shape == expected_o.shape and lse.shape == expected_lse.shape
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(expected_lse))
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(o, expected_o, rtol=0, atol=tolerance * max(1, np.abs(v, dtype=float).max(initial=0)))
    seen = ~np.isneginf(lse)
    np.testing.assert_allclose(lse[seen], expected_lse[seen], rtol=tolerance, atol=tolerance * 10)
    return o, lse


B, TQ, TK, HQ = 2, 7, 9, 4
LOG_DECAY = -np.linspace(0, 1, 2 * 9 * 4).reshape(2, 9, 4)[:, ::-1] ** 2

OPTIONS = {
    "plain": {},
    "scale": {"scale": -0.7},
    "scale zero": {"scale": 0},
    "causal": {"causal": True},
    "top left": {"causal": True, "align": "top_left"},
    "align": {"causal": True, "align": np.array([3, -2])},
    "align int32": {"causal": True, "align": np.array([3, -2], np.int32)},
    "align list": {"causal": True, "align": [3, -2]},
    "window": {"window": (2, 1)},
    "window left": {"window": (2, -1)},
    "window list": {"window": [-1, 0]},
    "causal window": {"causal": True, "window": (1, 0)},
    "sink tokens": {"causal": True, "window": (1, 0), "sink_tokens": 2},
    "prefix": {"causal": True, "align": "top_left", "prefix": [3, 0]},
    "chunk": {"chunk": 4},
    "chunk causal starts": {"chunk": 3, "causal": True, "key_starts": [2, 1]},
    "key lengths": {"key_lengths": np.array([9, 4], np.int32)},
    "key starts": {"key_starts": [0, 5], "key_lengths": [6, 9]},
    "no key": {"key_starts": [7, 0], "key_lengths": [3, 9]},
    "query lengths": {"query_lengths": [7, 3]},
    "segments pair": {"segments": (np.array([[0, 0, 1, 1, 2, 2, -1]] * 2),
                                   np.array([[0, 1, 1, 2, 2, 3, 3, -1, -1]] * 2))},
    "softcap": {"softcap": 1.5, "scale": 2.0},
    "sinks": {"sinks": np.array([0.5, -1.0, 3.0, -np.inf])},
    "sinks list": {"sinks": [0.5, -1.0, 3.0, 0.0]},
    "alibi": {"alibi": np.array([0.5, 0.25, 0.125, 0.0], np.float32)},
    "alibi batch": {"alibi": np.linspace(0, 1, 8).reshape(2, 4), "causal": True},
    "alibi list": {"alibi": [0.5, 0.25, 0.125, 0.0]},
    "relative bias": {"relative_bias": np.linspace(-2, 1, 20).reshape(4, 5)},
    "relative bias f32": {"relative_bias": np.linspace(1, -1, 48, dtype=np.float32).reshape(4, 12)[:, ::-1],
                          "causal": True, "align": [3, -2]},
    "log decay": {"log_decay": LOG_DECAY, "causal": True},
    "log decay f32": {"log_decay": 3 * LOG_DECAY.astype(np.float32), "causal": True, "align": "top_left",
                      "window": (4, 0)},
    "log decay prefix": {"log_decay": LOG_DECAY, "causal": True, "prefix": [3, 8], "key_lengths": [9, 6],
                         "softcap": 1.5},
    "dropout": {"dropout": 0.3, "seed": 2**64 - 1, "dropout_offset": 2**32 - 1},
    "dropout causal": {"dropout": 0.5, "seed": 7, "causal": True, "align": [-3, 100]},
    "high": {"precision": "highest"},
    "invariant": {"invariant": True, "causal": True},
    "defaults": {"scale": None, "window": None, "prefix": None, "chunk": None, "segments": None, "key_lengths": None,
                 "key_starts": None, "query_lengths": None, "mask": None, "bias": None, "alibi": None, "softcap": None,
                 "relative_bias": None, "sinks": None, "log_decay": None, "cu_seqlens_q": None, "cu_seqlens_k": None,
                 "out": None,
                 "threads": None},
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", OPTIONS)
def test_option_agrees_with_the_equations(rng, name, dtype):
    check(*problem(rng, dtype=dtype), **OPTIONS[name])


@pytest.mark.parametrize("shape", [(B, HQ, TQ, TK), (1, 1, TQ, TK), (B, 1, 1, TK), (TQ, TK), (HQ, 1, TK), (1, 1)])
def test_mask_and_bias_broadcast(rng, shape):
    q, k, v = problem(rng)
    mask, bias = rng.random(shape) < 0.6, rng.standard_normal(shape).astype(np.float32)
    check(q, k, v, mask=mask)
    check(q, k, v, bias=bias)
    check(q, k, v, bias=bias.astype(np.float64), mask=mask, causal=True)


def test_bias_of_minus_infinity_masks_and_the_smallest_number_does_not(rng):
    q, k, v = problem(rng)
    bias = np.zeros((TQ, TK), np.float32)
    bias[2] = -np.inf
    bias[3] = np.finfo(np.float32).min
    o, lse = check(q, k, v, bias=bias)
    assert not o[:, 2].any() and np.isneginf(lse[:, :, 2]).all()
    assert o[:, 3].all()


def test_one_array_of_segments_serves_both_sides(rng):
    q, k, v = problem(rng, Tq=6, Tk=6)
    segments = np.array([[0, 0, 1, 1, 1, -1], [4, 4, 4, 4, 5, 5]], np.int32)
    check(q, k, v, segments=segments, causal=True)
    np.testing.assert_array_equal(heed.attention(q, k, v, segments=segments.tolist()),
                                  heed.attention(q, k, v, segments=(segments, segments)))


@pytest.mark.parametrize("seed", range(40))
def test_random_combination_agrees_with_the_equations(seed):
    rng = np.random.default_rng(seed)
    B, Tq, Tk = rng.integers(1, 4), rng.integers(0, 40), rng.integers(0, 90)
    Hkv, G, D, Dv = rng.integers(1, 3), rng.integers(1, 4), rng.integers(1, 40), rng.integers(1, 40)
    q, k, v = problem(rng, B, Tq, Tk, Hkv * G, Hkv, D, Dv, rng.choice([np.float32, np.float64]))
    pairs = tuple(int(n) if rng.random() < 0.6 else 1 for n in (B, Hkv * G, Tq, Tk))
    choices = {
        "scale": lambda: float(rng.uniform(-1, 1)), "causal": lambda: True, "softcap": lambda: 2.0,
        "align": lambda: rng.choice(["bottom_right", "top_left"]) if rng.random() < 0.5 else rng.integers(-5, 50, B),
        "window": lambda: tuple(int(x) for x in rng.integers(-1, 20, 2)),
        "sink_tokens": lambda: int(rng.integers(0, 6)),
        "prefix": lambda: rng.integers(0, Tk + 2, B), "chunk": lambda: int(rng.integers(1, 30)),
        "segments": lambda: (rng.integers(-1, 3, (B, Tq)), rng.integers(-1, 3, (B, Tk))),
        "key_lengths": lambda: rng.integers(0, Tk + 1, B), "key_starts": lambda: rng.integers(0, Tk + 1, B),
        "query_lengths": lambda: rng.integers(0, Tq + 1, B), "mask": lambda: rng.random(pairs) < 0.7,
        "bias": lambda: rng.standard_normal(pairs).astype(np.float32), "alibi": lambda: rng.random(Hkv * G),
        "sinks": lambda: rng.standard_normal(Hkv * G), "dropout": lambda: 0.25,
        "relative_bias": lambda: rng.standard_normal((Hkv * G, int(rng.integers(1, 40)))),
        "seed": lambda: int(rng.integers(2**63)),
        "invariant": lambda: True, "threads": lambda: int(rng.integers(1, 4)),
    }
    options = {name: make() for name, make in choices.items() if rng.random() < 0.35}
    if options.get("causal") and rng.random() < 0.5:
        options["log_decay"] = -rng.random((B, Tk, Hkv * G))
    if "dropout" in options:  # without one a call draws its own
        options.setdefault("seed", 0)
    if isinstance(options.get("align"), np.str_):
        options["align"] = str(options["align"])
    check(q, k, v, **options)


CU_Q, CU_K = [0, 3, 3, 10, 11], np.array([0, 5, 6, 20, 20])


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"causal": True, "align": "top_left"}, {"align": [0, 4, -1, 2], "causal": True},
    {"window": (2, 0), "sink_tokens": 1, "softcap": 4.0}, {"chunk": 3}, {"alibi": [0.5, 0.25, 1.0, 0.1]},
    {"alibi": np.linspace(0, 1, 16).reshape(4, 4)}, {"relative_bias": np.linspace(-1, 1, 12).reshape(4, 3)},
    {"sinks": [0.0, 1.0, -1.0, 2.0]}, {"dropout": 0.4, "seed": 3},
    {"log_decay": -np.linspace(0, 1, 23 * 4).reshape(23, 4), "causal": True},
    {"log_decay": -np.linspace(0, 1, 23 * 4).reshape(1, 23, 4), "causal": True}, {"invariant": True}])
@pytest.mark.parametrize("rank", [3, 4])
def test_packed_sequences(rng, options, rank):
    # One query and three keys more than the sequences have.
    q, k, v = (x if rank == 4 else x[0] for x in problem(rng, B=1, Tq=12, Tk=23))
    o, lse = check(q, k, v, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, **options)
    assert o.ndim == rank and lse.shape == (4, 12)
    assert not o.reshape(12, 4, -1)[11].any() and np.isneginf(lse[:, 11]).all()


def test_packed_keys_default_to_the_boundaries_of_the_queries(rng):
    q, k, v = (x[0] for x in problem(rng, B=1, Tq=9, Tk=9))
    cu = np.array([0, 4, 9], np.int32)
    np.testing.assert_array_equal(heed.attention(q, k, v, cu_seqlens_q=cu, causal=True),
                                  heed.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True))


@pytest.mark.parametrize(("B", "Tq", "Tk"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
def test_empty_sizes(rng, B, Tq, Tk):
    o, lse = check(*problem(rng, B=B, Tq=Tq, Tk=Tk), causal=True)
    assert not o.any() and np.isneginf(lse).all()


def test_what_a_row_does_not_see_cannot_reach_it(rng):
    q, k, v = problem(rng, B=1)
    o, lse = heed.attention(q, k, v, causal=True, return_lse=True)
    k[:, 5], v[:, 5] = np.nan, np.inf
    poisoned, poisoned_lse = heed.attention(q, k, v, causal=True, return_lse=True)
    np.testing.assert_array_equal(poisoned[:, :3], o[:, :3])  # rows 0 to 2 have positions 2 to 4
    np.testing.assert_array_equal(poisoned_lse[..., :3], lse[..., :3])
    assert np.isnan(poisoned[:, 3:]).all() and np.isnan(poisoned_lse[..., 3:]).all()


def test_bits_do_not_depend_on_threads(rng):
    q, k, v = problem(rng, B=3, Tq=130, Tk=200, Hq=6, Hkv=3, D=24, Dv=20)
    one = heed.attention(q, k, v, causal=True, threads=1)
    for threads in (2, 3, 8, None):
        np.testing.assert_array_equal(heed.attention(q, k, v, causal=True, threads=threads), one)
    heed.set_num_threads(2)
    np.testing.assert_array_equal(heed.attention(q, k, v, causal=True), one)


def test_bits_do_not_depend_on_batch_padding_or_packing(rng):
    q, k, v = problem(rng, B=3, Tq=20, Tk=30)
    lengths = np.array([30, 17, 5])
    whole = heed.attention(q, k, v, key_lengths=lengths)
    for b, n in enumerate(lengths):
        alone = heed.attention(q[b:b + 1], k[b:b + 1, :n], v[b:b + 1, :n])
        np.testing.assert_array_equal(whole[b:b + 1], alone)
    packed = heed.attention(q.reshape(60, 4, 8), *(np.concatenate([x[b, :n] for b, n in enumerate(lengths)])
                                                   for x in (k, v)),
                            cu_seqlens_q=[0, 20, 40, 60], cu_seqlens_k=np.concatenate([[0], lengths.cumsum()]))
    np.testing.assert_array_equal(packed.reshape(whole.shape), whole)


@pytest.mark.parametrize("cuts", [(0, 1, 2, 3), (0, 16, 33), (0, 7, 8, 31)])
def test_invariant_path_splits_anywhere(rng, cuts):
    q, k, v = problem(rng, B=1, Tq=40, Tk=40)
    options = {"causal": True, "invariant": True, "window": (11, 0)}
    whole = heed.attention(q, k, v, **options)
    bounds = [*cuts, 40]
    chunks = [heed.attention(q[:, a:b], k[:, :b], v[:, :b], **options)
              for a, b in zip(bounds, bounds[1:], strict=False)]
    np.testing.assert_array_equal(np.concatenate(chunks, axis=1), whole)


def test_dropout_draws_a_fresh_seed_unless_one_is_given(rng):
    q, k, v = (rng.standard_normal((1, 30, 2, 4)) for _ in range(3))
    calls = [lambda: heed.attention(q, k, v, dropout=0.5), lambda: heed.attention(q, k, v, dropout=0.5, seed=None)]
    for call in calls:
        assert (call() != call()).any()
        np.random.seed(5)
        first = call()
        np.random.seed(5)
        np.testing.assert_array_equal(call(), first)
    np.random.seed(5)
    state = np.random.get_state()[2]
    heed.attention(q, k, v)  # draws nothing
    assert np.random.get_state()[2] == state
    o, lse = heed.attention(q, k, v, dropout=0.5, seed=3, return_lse=True)
    with pytest.raises(heed.InvalidArgument,
                       match="attention_backward: seed is None, expected that of the forward pass"):
        heed.attention_backward(o, q, k, v, o, lse, dropout=0.5)


def test_dropout_keeps_the_expected_share_and_follows_its_seed(rng):
    q, k = (np.zeros((1, 64, 2, 4), np.float32) for _ in range(2))
    v = np.ones((1, 64, 2, 1), np.float32)
    o = heed.attention(q, k, v, dropout=0.25, seed=5)
    assert abs(o.mean() - 1) < 0.02
    np.testing.assert_array_equal(heed.attention(q, k, v, dropout=0.25, seed=5), o)
    assert (heed.attention(q, k, v, dropout=0.25, seed=6) != o).any()
    assert (heed.attention(q, k, v, dropout=0.25, seed=5, dropout_offset=1) != o).any()
