# heed.merge_attention: partial results over disjoint key sets merge into the whole.
import numpy as np
import producers
import pytest

import heed


@pytest.fixture
def qkv(rng):
    return [rng.standard_normal(shape) for shape in ((2, 5, 4, 8), (2, 11, 2, 8), (2, 11, 2, 6))]


def partials(q, k, v, cuts, dtype=np.float32, **options):
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    return [heed.attention(q, k[:, a:b], v[:, a:b], return_lse=True, **options)
            for a, b in zip(cuts, cuts[1:], strict=False)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 2e-6), (np.float64, 1e-14)])
@pytest.mark.parametrize("cuts", [(0, 11), (0, 4, 11), (0, 1, 1, 6, 10, 11)])
def test_parts_make_the_whole(qkv, dtype, tolerance, cuts):
    whole, whole_lse = heed.attention(*(x.astype(dtype) for x in qkv), return_lse=True)
    o, lse = heed.merge_attention(partials(*qkv, cuts, dtype))
    assert o.dtype == dtype and lse.dtype == dtype and o.flags.owndata and lse.flags.owndata
    np.testing.assert_allclose(o, whole, atol=tolerance)
    np.testing.assert_allclose(lse, whole_lse, atol=tolerance)


def test_sinks_count_once(qkv):
    sinks = [0.5, -1.0, 2.0, 0.0]
    expected, expected_lse = heed.attention(*(x.astype(np.float32) for x in qkv), sinks=sinks, return_lse=True)
    for given in (sinks, np.array(sinks, np.float32), producers.Unversioned(np.array(sinks))):
        o, lse = heed.merge_attention(partials(*qkv, (0, 3, 11)), sinks=given)
        np.testing.assert_allclose(o, expected, atol=2e-6)
        np.testing.assert_allclose(lse, expected_lse, atol=2e-6)


def test_a_part_without_keys_changes_nothing(qkv):
    parts = partials(*qkv, (0, 5, 11))
    empty = (np.zeros_like(parts[0][0]), np.full_like(parts[0][1], -np.inf))
    for merged in (heed.merge_attention([empty, *parts]), heed.merge_attention([*parts, empty])):
        for x, y in zip(merged, heed.merge_attention(parts), strict=True):
            np.testing.assert_array_equal(x, y)
    o, lse = heed.merge_attention([empty, empty])
    assert not o.any() and np.isneginf(lse).all()


@pytest.mark.parametrize("rank", [3, 4])
def test_packed_parts(qkv, rank):
    q, k, v = (x[:1] if rank == 4 else x[0] for x in (y.astype(np.float32) for y in qkv))
    token = rank - 3
    cu, whole = [0, 2, 5], None
    whole, whole_lse = heed.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=[0, 5, 11], return_lse=True)
    first = np.r_[0:2, 5:8]
    rest = np.r_[2:5, 8:11]
    parts = [heed.attention(q, np.take(k, keys, token), np.take(v, keys, token), cu_seqlens_q=cu,
                            cu_seqlens_k=cu_k, return_lse=True)
             for keys, cu_k in ((first, [0, 2, 5]), (rest, [0, 3, 6]))]
    o, lse = heed.merge_attention(parts)
    assert o.shape == whole.shape and lse.shape == whole_lse.shape == (4, 5)
    np.testing.assert_allclose(o, whole, atol=2e-6)
    np.testing.assert_allclose(lse, whole_lse, atol=2e-6)


def test_parts_of_any_layout_and_container(qkv):
    parts = partials(*qkv, (0, 5, 11))
    expected = heed.merge_attention(parts)
    strided = [(np.ascontiguousarray(o.swapaxes(1, 2)).swapaxes(1, 2), np.asfortranarray(lse)) for o, lse in parts]
    for given in (tuple(parts), (p for p in parts), [list(p) for p in parts], strided,
                  [tuple(producers.Versioned(x) for x in p) for p in parts]):
        for x, y in zip(heed.merge_attention(given), expected, strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_double_part_makes_a_double_result(qkv):
    narrow, wide = partials(*qkv, (0, 5, 11)), partials(*qkv, (0, 5, 11), np.float64)
    o, lse = heed.merge_attention([narrow[0], wide[1]])
    assert o.dtype == lse.dtype == np.float64


def test_an_error_of_the_iterable_is_the_caller_s_own(qkv):
    def broken():
        yield partials(*qkv, (0, 11))[0]
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="^mine$"):
        heed.merge_attention(broken())


def test_errors(qkv):
    parts = partials(*qkv, (0, 5, 11))
    o, lse = parts[0]
    for wrong, message in [
        ([], r"parts is empty, expected at least one pair"),
        (3, r"parts is 3, expected a sequence of pairs \(o, lse\)"),
        ([(o,)], r"parts\[0\] is .*, expected a pair \(o, lse\)"),
        ([(o, lse), o], r"parts\[1\] is of type numpy.ndarray, expected a pair"),
        ([(o, None)], r"parts\[0\].lse is None, expected an array"),
        ([(o, lse), (o[:, :4], lse)], r"parts\[1\].o has shape \[2,4,4,6\], expected \[2,5,4,6\]"),
        ([(o, lse), (o, lse[:1])], r"parts\[1\].lse has shape \[1,4,5\], expected \[2,4,5\]"),
        ([(o[0, 0], lse)], r"parts\[0\].o has shape \[4,6\], expected"),
        ([(o, lse[0, 0])], r"parts\[0\].lse has shape \[5\], expected"),
        ([(o.astype(np.int64), lse)], r"parts\[0\].o has dtype i64, expected"),
        ([(o, lse.astype(np.int64))], r"parts\[0\].lse has dtype i64, expected"),
    ]:
        with pytest.raises(heed.InvalidArgument, match=f"^merge_attention: {message}"):
            heed.merge_attention(wrong)
    with pytest.raises(heed.InvalidArgument, match=r"^merge_attention: sinks has shape \[1\], expected \[4\]"):
        heed.merge_attention(parts, sinks=[1.0])
    with pytest.raises(TypeError):
        heed.merge_attention(parts, [1.0])
    with pytest.raises(TypeError):
        heed.merge_attention(parts, sink=[1.0])
