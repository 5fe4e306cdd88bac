# heed.attention_backward: every option against the chain rule in NumPy, and guarantees to callers.
import pickle

import naive
import numpy as np
import pytest

import heed

DTYPES = [np.float64, np.float32, np.float16]
try:
    from ml_dtypes import bfloat16
    DTYPES.append(bfloat16)
except ImportError:  # optional
    bfloat16 = None

FIELDS = ("dq", "dk", "dv", "dbias", "dsinks", "dalibi", "dlog_decay", "drelative_bias")
GIVEN = ("bias", "sinks", "alibi", "log_decay", "relative_bias")
B, TQ, TK, HQ, HKV, D, DV = 2, 7, 9, 4, 2, 8, 5


def problem(rng, dtype=np.float64, shape=(B, TQ, TK, HQ, HKV, D, DV)):
    """q, k, v, do, dlse."""
    B, Tq, Tk, Hq, Hkv, D, Dv = shape
    shapes = (B, Tq, Hq, D), (B, Tk, Hkv, D), (B, Tk, Hkv, Dv), (B, Tq, Hq, Dv)
    q, k, v, do = (rng.standard_normal(s).astype(dtype) for s in shapes)
    wide = np.float64 if dtype == np.float64 else np.float32
    return q, k, v, do, rng.standard_normal((B, Hq, Tq)).astype(wide)


def backward(do, q, k, v, dlse=None, need_dbias=None, **options):
    o, lse = heed.attention(q, k, v, return_lse=True, **options)
    need = "bias" in options if need_dbias is None else need_dbias
    return heed.attention_backward(do, q, k, v, o, lse, dlse=dlse, need_dbias=need, **options)


# Relative to the largest value of a gradient. f64 and f32: some tens of roundings. 16 bits: the result is rounded once,
# but so was o, from which every gradient but dv is computed; in dalibi that is multiplied by distances.
TOLERANCE = {"float64": 2e-14, "float32": 5e-6, "float16": 3e-3, "bfloat16": 3e-2}


def check(q, k, v, do, dlse=None, **options):
    """heed's gradients, compared with the naive ones."""
    g = backward(do, q, k, v, dlse, **options)
    expected = naive.attention_backward(do, q, k, v, dlse=dlse, **options)
    inputs = {"dq": q, "dk": k, "dv": v, **{f"d{name}": options.get(name) for name in GIVEN}}
    assert g._fields == FIELDS
    for name in FIELDS:
        got, of = getattr(g, name), inputs[name]
        if of is None:
            assert got is None, name
            continue
        assert isinstance(got, np.ndarray) and got.shape == np.shape(of) and got.dtype == np.asarray(of).dtype, name
        scale = max(np.abs(expected[name]).max(initial=0), 1)
        tolerance = max(TOLERANCE[str(got.dtype)], TOLERANCE[str(q.dtype)])
        np.testing.assert_allclose(got.astype(np.float64), expected[name], rtol=0, atol=tolerance * scale, err_msg=name)
    return g


LOG_DECAY = -np.linspace(0, 1, 2 * 9 * 4).reshape(2, 9, 4)[:, ::-1] ** 2

OPTIONS = {
    "plain": {},
    "scale": {"scale": -0.7},
    "causal": {"causal": True},
    "top left": {"causal": True, "align": "top_left"},
    "align list": {"causal": True, "align": [3, -2]},
    "window": {"window": (2, 1)},
    "causal window": {"causal": True, "window": (1, 0), "sink_tokens": 2},
    "prefix": {"causal": True, "align": "top_left", "prefix": [3, 0]},
    "chunk": {"chunk": 4},
    "key lengths": {"key_lengths": [9, 4], "key_starts": [2, 1]},
    "no key": {"key_starts": [7, 0], "key_lengths": [3, 9]},
    "query lengths": {"query_lengths": [7, 3]},
    "segments": {"segments": (np.array([[0, 0, 1, 1, 2, 2, -1]] * 2), np.array([[0, 1, 1, 2, 2, 3, 3, -1, -1]] * 2))},
    "softcap": {"softcap": 1.5, "scale": 2.0},
    "sinks": {"sinks": np.array([0.5, -1.0, 3.0, -np.inf])},
    "sinks list": {"sinks": [0.5, -1.0, 3.0, 0.0], "causal": True},
    "alibi": {"alibi": np.array([0.5, 0.25, 0.125, 0.0], np.float32)},
    "alibi batch": {"alibi": np.linspace(0, 1, 8).reshape(2, 4), "causal": True},
    "alibi list": {"alibi": [0.5, 0.25, 0.125, 0.0]},
    "relative bias": {"relative_bias": np.linspace(-2, 1, 20).reshape(4, 5)},
    "relative bias f32": {"relative_bias": np.linspace(1, -1, 48, dtype=np.float32).reshape(4, 12), "causal": True,
                          "align": [3, -2]},
    "relative bias of 1": {"relative_bias": np.array([[0.5], [1.0], [-1.0], [0.0]]), "causal": True, "window": (4, 0)},
    "log decay": {"log_decay": LOG_DECAY, "causal": True},
    "log decay f32": {"log_decay": 3 * LOG_DECAY.astype(np.float32), "causal": True, "align": "top_left",
                      "window": (4, 0)},
    "log decay prefix": {"log_decay": LOG_DECAY, "causal": True, "prefix": [3, 8], "key_lengths": [9, 6],
                         "softcap": 1.5, "sinks": [0.0, 1.0, -1.0, 2.0], "dropout": 0.3, "seed": 4},
    "dropout": {"dropout": 0.3, "seed": 2**64 - 1, "dropout_offset": 2**32 - 1},
    "dropout sinks": {"dropout": 0.5, "seed": 7, "causal": True, "align": [-3, 100], "sinks": [0.0, 1.0, -1.0, 2.0]},
    "everything": {"causal": True, "window": (5, 0), "softcap": 2.0, "sinks": [0.0, 1.0, -1.0, 2.0], "alibi": [0.5] * 4,
                   "bias": np.linspace(-1, 1, TQ * TK).reshape(TQ, TK), "dropout": 0.2, "seed": 3,
                   "relative_bias": np.linspace(-1, 1, 12).reshape(4, 3),
                   "key_lengths": [9, 5]},
    "defaults": {"scale": None, "window": None, "prefix": None, "chunk": None, "segments": None, "key_lengths": None,
                 "key_starts": None, "query_lengths": None, "mask": None, "alibi": None, "softcap": None, "sinks": None,
                 "cu_seqlens_q": None, "cu_seqlens_k": None, "threads": None, "precision": "highest"},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_option_agrees_with_the_chain_rule(rng, name, dtype):
    q, k, v, do, dlse = problem(rng, dtype)
    check(q, k, v, do, **OPTIONS[name])
    check(q, k, v, do, dlse, **OPTIONS[name])


@pytest.mark.parametrize("shape", [(B, HQ, TQ, TK), (1, 1, TQ, TK), (B, 1, 1, TK), (TQ, TK), (HQ, 1, TK), (HQ, TQ, 1),
                                   (1, 1), (TK,), (1,), ()])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_the_gradient_of_a_bias_has_its_shape_and_dtype(rng, shape, dtype):
    q, k, v, do, dlse = problem(rng, np.float32)
    bias = rng.standard_normal(shape).astype(dtype)
    check(q, k, v, do, dlse, bias=bias)
    g = check(q, k, v, do, dlse, bias=bias, causal=True, mask=rng.random((TQ, TK)) < 0.8)
    assert g.dbias.shape == shape and g.dbias.dtype == dtype


@pytest.mark.parametrize("rows", [1, 2, 15, 33])
@pytest.mark.parametrize("dtype", DTYPES)
@np.errstate(invalid="ignore")  # in the definition: other gradients of that key
def test_an_infinite_key_under_a_soft_cap_is_one_more_key(rng, dtype, rows):
    """Kernels that take rows by pairs must not multiply it by a row that there is not."""
    q, k, v, do, _ = problem(rng, dtype, (1, rows, 5, 1, 1, 8, 8))
    k[0, 3, 0, 2] = np.inf
    q[..., 2] = np.abs(q[..., 2].astype(np.float32)).astype(dtype)
    g = backward(do, q, k, v, softcap=2.0)
    expected = naive.attention_backward(do, q, k, v, softcap=2.0)["dv"]
    tolerance = TOLERANCE[str(g.dv.dtype)] * np.abs(expected).max()
    np.testing.assert_allclose(g.dv.astype(np.float64), expected, rtol=0, atol=tolerance)


def test_a_repeated_bias_has_a_gradient_for_every_repetition(rng):
    q, k, v, do, _ = problem(rng)
    row = rng.standard_normal(TK)
    for repeated in (np.broadcast_to(row, (B, HQ, TQ, TK)), np.broadcast_to(row[:, None], (TK, TK))[:TQ]):
        g = check(q, k, v, do, bias=repeated)
        np.testing.assert_array_equal(g.dbias, backward(do, q, k, v, bias=repeated.copy()).dbias)


@pytest.mark.parametrize("shape", [(1, 33, 65, 6, 2, 24, 20), (2, 130, 70, 2, 2, 64, 64), (1, 1, 40, 4, 1, 16, 3),
                                   (3, 40, 40, 1, 1, 1, 1)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_awkward_sizes_agree_with_the_chain_rule(rng, shape, dtype):
    q, k, v, do, dlse = problem(rng, dtype, shape)
    check(q, k, v, do, dlse, causal=True, sinks=rng.standard_normal(shape[3]))
    check(q, k, v, do, dlse, window=(9, 3), bias=rng.standard_normal(shape[1:3]))


@pytest.mark.parametrize("shape", [(0, 3, 4, 2, 1, 8, 8), (2, 0, 4, 2, 1, 8, 8), (2, 3, 0, 2, 1, 8, 8)])
def test_empty_sizes_give_zeros(rng, shape):
    q, k, v, do, dlse = problem(rng, np.float32, shape)
    g = check(q, k, v, do, dlse, sinks=[1.0, 2.0], alibi=[1.0, 2.0], bias=np.zeros((1, 1)))
    assert all(not gradient.any() for gradient in g if gradient is not None)


CU_Q, CU_K = [0, 3, 3, 10, 11], np.array([0, 5, 6, 20, 20])


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"causal": True, "align": "top_left"}, {"align": [0, 4, -1, 2], "causal": True},
    {"window": (2, 0), "sink_tokens": 1, "softcap": 4.0}, {"chunk": 3}, {"alibi": [0.5, 0.25, 1.0, 0.1]},
    {"alibi": np.linspace(0, 1, 16).reshape(4, 4)}, {"sinks": [0.0, 1.0, -1.0, 2.0]}, {"dropout": 0.4, "seed": 3},
    {"log_decay": -np.linspace(0, 1, 23 * 4).reshape(23, 4), "causal": True},
    {"log_decay": -np.linspace(0, 1, 23 * 4).reshape(1, 23, 4), "causal": True}])
@pytest.mark.parametrize("rank", [3, 4])
def test_packed_sequences(rng, options, rank):
    # One query and three keys more than the sequences have.
    q, k, v, do, dlse = problem(rng, shape=(1, 12, 23, HQ, HKV, D, DV))
    q, k, v, do = (x if rank == 4 else x[0] for x in (q, k, v, do))
    g = check(q, k, v, do, dlse[0], cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, **options)
    assert not g.dq.reshape(12, -1)[11].any() and not g.dk.reshape(23, -1)[20:].any()
    assert not g.dv.reshape(23, -1)[20:].any() and g.dv.any()


DIFFERENCES = {
    "plain": {}, "causal": {"causal": True}, "window": {"window": (2, 1)},
    "sinks": {"sinks": np.array([0.5, -1.0, 3.0, 0.0])}, "alibi": {"alibi": np.linspace(0, 1, 8).reshape(2, 4)},
    "bias": {"bias": np.linspace(-1, 1, HQ * TK).reshape(HQ, 1, TK)}, "softcap": {"softcap": 1.5},
    "dropout": {"dropout": 0.3, "seed": 11, "sinks": np.array([0.5, -1.0, 3.0, 0.0])},
    "everything": {"causal": True, "softcap": 2.0, "sinks": np.array([0.5, -1.0, 3.0, 0.0]), "dropout": 0.2, "seed": 0,
                   "alibi": np.linspace(0, 1, 4), "bias": np.linspace(-1, 1, TK), "key_starts": [1, 4]},
    "log decay": {"causal": True, "log_decay": LOG_DECAY, "sinks": np.array([0.5, -1.0, 3.0, 0.0]), "dropout": 0.2,
                  "seed": 0},
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_gradients_are_the_limit_of_differences(rng, name):
    """Differences of heed.attention itself, in random directions, use no formula of a gradient."""
    q, k, v, do, dlse = problem(rng)
    inputs = {"q": q, "k": k, "v": v, **{n: x for n, x in DIFFERENCES[name].items() if n in GIVEN}}
    options = {n: x for n, x in DIFFERENCES[name].items() if n not in inputs}
    g = backward(do, dlse=dlse, **inputs, **options)

    def value(**changed):
        o, lse = heed.attention(**{**inputs, **changed}, **options, return_lse=True)
        return (do * o).sum() + (dlse * lse)[lse > -np.inf].sum()

    step = 1e-5  # errors of step^2 from the third derivative and of 1e-14 / step from rounding
    for argument, x in inputs.items():
        direction = rng.standard_normal(x.shape)
        slope = (value(**{argument: x + step * direction}) - value(**{argument: x - step * direction})) / (2 * step)
        np.testing.assert_allclose((getattr(g, "d" + argument) * direction).sum(), slope, rtol=1e-6, atol=1e-6,
                                   err_msg=argument)


def test_result_is_a_named_tuple(rng):
    q, k, v, do, _ = problem(rng)
    g = backward(do, q, k, v)
    dq, dk, dv, *others = g
    assert type(g) is heed.AttentionGradients and isinstance(g, tuple) and g._fields == FIELDS
    assert dq is g.dq and dk is g.dk and dv is g.dv and others == [None] * 5
    assert list(g._asdict()) == list(FIELDS) and repr(g).startswith("AttentionGradients(dq=array(")
    assert type(pickle.loads(pickle.dumps(g))) is heed.AttentionGradients
    assert all(gradient.flags.owndata and gradient.flags.c_contiguous for gradient in g[:3])


def test_what_is_not_given_or_not_asked_for_is_none(rng):
    q, k, v, do, _ = problem(rng)
    bias, sinks, alibi = np.zeros((TQ, TK)), np.zeros(HQ), np.zeros(HQ)
    for given in ({}, {"bias": bias}, {"sinks": sinks}, {"alibi": alibi},
                  {"bias": bias, "sinks": sinks, "alibi": alibi}):
        for need in {False, "bias" in given}:
            g = backward(do, q, k, v, need_dbias=need, **given)
            there = {name for name in FIELDS if getattr(g, name) is not None}
            assert there == {"dq", "dk", "dv", *("d" + n for n in given if n != "bias" or need)}
            for name in ("dq", "dk", "dv", "dsinks", "dalibi"):  # whatever else is computed
                if name in there and need:
                    np.testing.assert_array_equal(getattr(g, name),
                                                  getattr(backward(do, q, k, v, need_dbias=False, **given), name))


@pytest.mark.skipif(bfloat16 is None, reason="optional: ml_dtypes")
def test_every_gradient_has_the_dtype_of_its_own_input(rng):
    q, k, v, do, _ = problem(rng, np.float16)
    options = {"bias": np.zeros((1, TK), np.float32), "sinks": np.zeros(HQ, bfloat16), "alibi": np.zeros(HQ),
               "causal": True, "log_decay": np.zeros((B, TK, HQ), np.float32),
               "relative_bias": np.zeros((HQ, 3), np.float16)}
    assert [str(x.dtype) for x in check(q, k, v, do, **options)] == [
        "float16", "float16", "float16", "float32", "bfloat16", "float64", "float32", "float16"]


def test_strided_arrays_give_the_same_bits(rng):
    q, k, v, do, dlse = problem(rng, np.float32)
    bias = rng.standard_normal((HQ, TQ, TK)).astype(np.float32)
    o, lse = heed.attention(q, k, v, bias=bias, return_lse=True)
    expected = heed.attention_backward(do, q, k, v, o, lse, dlse=dlse, bias=bias, need_dbias=True)
    heads_first = [x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in (do, q, k, v, o)]
    every_second = [np.repeat(x, 2, axis=-1)[..., ::2] for x in (do, q, k, v, o, lse, dlse, bias)]
    fortran = [np.asfortranarray(x) for x in (do, q, k, v, o, lse, dlse, bias)]
    for do_, q_, k_, v_, o_, lse_, dlse_, bias_ in ([*heads_first, lse, dlse, bias], every_second, fortran):
        for x in (do_, q_, k_, v_, o_, lse_, dlse_, bias_):
            x.flags.writeable = False  # read, and no more
        g = heed.attention_backward(do_, q_, k_, v_, o_, lse_, dlse=dlse_, bias=bias_, need_dbias=True)
        for got, same in zip(g[:4], expected[:4], strict=True):
            np.testing.assert_array_equal(got, same)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_threads(rng, dtype):
    q, k, v, do, dlse = problem(rng, dtype, (1, 300, 333, 2, 1, 24, 20))
    options = {"causal": True, "alibi": [0.1, 0.2], "sinks": [0.0, 1.0], "bias": rng.standard_normal((300, 333)),
               "log_decay": -0.1 * rng.random((1, 333, 2)), "relative_bias": rng.standard_normal((2, 50))}
    one = backward(do, q, k, v, dlse, threads=1, **options)
    for threads in (2, 3):
        for got, same in zip(backward(do, q, k, v, dlse, threads=threads, **options), one, strict=True):
            np.testing.assert_array_equal(got, same)
    assert all(np.isfinite(x.astype(np.float64)).all() and x.any() for x in one)


def test_a_nan_reaches_what_sees_it_and_nothing_else(rng):
    q, k, v, do, _ = problem(rng, np.float32, (1, TQ, TQ, HQ, HKV, D, DV))
    clean = backward(do, q, k, v, causal=True)
    q[:, 3] = np.nan
    g = backward(do, q, k, v, causal=True)
    rows = np.arange(TQ) != 3
    np.testing.assert_array_equal(g.dq[:, rows], clean.dq[:, rows])
    np.testing.assert_array_equal(g.dk[:, 4:], clean.dk[:, 4:])
    np.testing.assert_array_equal(g.dv[:, 4:], clean.dv[:, 4:])
    assert np.isnan(g.dk[:, :4]).all() and np.isnan(g.dv[:, :4]).all()


def call(**changed):
    q, k, v, do, dlse = problem(np.random.default_rng(1), np.float32)
    o, lse = heed.attention(q, k, v, return_lse=True)
    return {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse, "dlse": dlse, **changed}


GOOD = call()
WRONG = [
    ({"do": GOOD["do"][:, :6]}, r"do has shape \[2,6,4,5\], expected \[2,7,4,5\]"),
    ({"do": GOOD["do"][0]}, r"do has shape \[7,4,5\], expected \[2,7,4,5\]"),
    ({"do": GOOD["do"].astype(np.float64)}, "do has dtype f64, expected f32"),
    ({"do": GOOD["do"].astype(np.int64)}, "do has dtype i64, expected f32"),
    ({"do": None}, "do is None, expected an array on the CPU"),
    ({"do": "text"}, "do is 'text', expected an array on the CPU"),
    ({"o": GOOD["o"][..., :4]}, r"o has shape \[2,7,4,4\], expected \[2,7,4,5\]"),
    ({"o": GOOD["o"].astype(np.float16)}, "o has dtype f16, expected f32"),
    ({"lse": GOOD["lse"][:, :3]}, r"lse has shape \[2,3,7\], expected \[2,4,7\]"),
    ({"lse": GOOD["lse"].swapaxes(1, 2)}, r"lse has shape \[2,7,4\], expected \[2,4,7\]"),
    ({"lse": GOOD["lse"].astype(np.float64)}, "lse has dtype f64, expected f32"),
    ({"lse": None}, "lse is None, expected an array on the CPU"),
    ({"dlse": GOOD["dlse"][:1]}, r"dlse has shape \[1,4,7\], expected \[2,4,7\]"),
    ({"dlse": GOOD["dlse"].astype(np.float64)}, "dlse has dtype f64, expected f32"),
    ({"q": GOOD["q"][0]}, r"q has shape \[7,4,8\], expected \[B, T, Hq, D\]"),
    ({"k": GOOD["k"][:1]}, r"k has shape \[1,9,2,8\], expected \[2,9,2,8\]"),
    ({"v": GOOD["v"].astype(np.float64)}, "v has dtype f64, expected f32 as q"),
    ({"need_dbias": True}, "need_dbias is True without a bias, expected bias with it"),
    ({"need_dbias": 1}, "need_dbias is 1, expected True or False"),
    ({"bias": np.zeros((3, 9)), "need_dbias": True}, r"bias has shape \[3,9\], expected one that broadcasts"),
    ({"bias": np.zeros((7, 9), np.int64), "need_dbias": True}, "bias has dtype i64, expected a float dtype"),
    ({"alibi": np.zeros(3)}, r"alibi has shape \[3\], expected \[4\]"),
    ({"sinks": np.zeros(2)}, r"sinks has shape \[2\], expected \[4\]"),
    ({"align": [0]}, r"align has shape \[1\], expected \[2\]"),
    ({"window": (-2, 0)}, r"window\[0\] is -2, expected an int"),
    ({"cu_seqlens_q": [0, 7]}, r"[qk] has shape \[2,.*\], expected"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_wrong_argument_is_named(changed, message):
    with pytest.raises(heed.InvalidArgument, match=f"^attention_backward: {message}"):
        heed.attention_backward(**call(**changed))


def test_the_lse_of_doubles_is_double(rng):
    q, k, v, do, dlse = problem(rng)
    o, lse = heed.attention(q, k, v, return_lse=True)
    with pytest.raises(heed.InvalidArgument, match="attention_backward: lse has dtype f32, expected f64"):
        heed.attention_backward(do, q, k, v, o, lse.astype(np.float32))
    with pytest.raises(heed.InvalidArgument, match="attention_backward: dlse has dtype f32, expected f64"):
        heed.attention_backward(do, q, k, v, o, lse, dlse=dlse.astype(np.float32))


def test_wrong_call_is_a_type_error():
    given = [GOOD[name] for name in ("do", "q", "k", "v", "o", "lse")]
    for positional, keywords, message in [
            (given, {"out": None}, "unexpected keyword argument 'out'"),
            (given, {"return_lse": True}, "unexpected keyword argument 'return_lse'"),
            (given, {"rows": [1]}, "unexpected keyword argument 'rows'"),
            ([*given, GOOD["dlse"]], {}, "takes 6 positional arguments but 7 were given"),
            (given, {"do": given[0]}, "multiple values for argument 'do'"),
            ([], {}, "missing required argument: 'do'"),
            *((given[:n], {}, f"missing required argument: '{name}'") for n, name in enumerate("qkvo", 1)),
            (given[:5], {}, "missing required argument: 'lse'")]:
        with pytest.raises(TypeError, match=rf"attention_backward\(\) .*{message}"):
            heed.attention_backward(*positional, **keywords)


def test_positions_and_keywords_are_the_same():
    g = heed.attention_backward(*(GOOD[n] for n in ("do", "q", "k", "v", "o", "lse")), dlse=GOOD["dlse"])
    for got, same in zip(heed.attention_backward(**GOOD)[:3], g[:3], strict=True):
        np.testing.assert_array_equal(got, same)
