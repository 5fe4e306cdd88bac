# Inputs that heed.attention refuses: the message names operation, argument, actual and expected value.
import numpy as np
import pytest

import heed

Q = np.zeros((2, 6, 4, 8), np.float32)
K = np.zeros((2, 9, 2, 8), np.float32)
V = np.zeros((2, 9, 2, 5), np.float32)
PACKED = {"q": Q[0], "k": K[0], "v": V[0], "cu_seqlens_q": [0, 6], "cu_seqlens_k": [0, 9]}

WRONG = [
    ({"q": Q[0]}, r"q has shape \[6,4,8\], expected \[B, T, Hq, D\]"),
    ({"k": K[0]}, r"k has shape \[9,2,8\], expected \[B, T, Hkv, D\]"),
    ({"v": V[None]}, r"v has shape \[1,2,9,2,5\], expected \[B, T, Hkv, Dv\]"),
    ({"k": K[:1]}, r"k has shape \[1,9,2,8\], expected \[2,9,2,8\]"),
    ({"v": V[:, :8]}, r"v has shape \[2,8,2,5\], expected \[2,9,2,5\]"),
    ({"k": K[..., :7]}, r"k has shape \[2,9,2,7\], expected \[2,9,2,8\]"),
    ({"q": Q[:, :, :3]}, "q has 3 heads, expected a multiple of the 2 heads of k"),
    ({"q": Q[..., :0], "k": K[..., :0]}, "q has shape .*, expected D >= 1"),
    ({"v": V[..., :0]}, "v has shape .*, expected Dv >= 1"),
    ({"k": K.astype(np.float64)}, "k has dtype f64, expected f32 as q"),
    ({"q": Q.astype(np.int64)}, "q has dtype i64, expected f64, f32, bf16 or f16"),
    ({"q": Q.astype(np.int16)}, "q has dtype i16, expected f64, f32, bf16 or f16"),
    ({"q": Q.astype(np.longdouble)}, f"q has dtype f{8 * np.dtype(np.longdouble).itemsize}, expected f64"),
    ({"q": Q.astype(">f4")}, "q has dtype big-endian '>f', expected f64"),
    ({"q": Q.astype(np.complex64)}, "q has dtype c64, expected f64"),
    ({"q": Q.astype(object)}, "q has dtype 'O', expected f64"),
    ({"q": Q.astype("M8[s]")}, r"q cannot be read \(.*\), expected an array on the CPU"),
    ({"q": Q.astype([("a", "f4")])}, "q has dtype .*, expected f64"),
    ({"q": "text"}, "q is 'text', expected an array on the CPU"),
    ({"q": None}, "q is None, expected an array on the CPU"),
    ({"q": [[1.0]]}, r"q is \[\[1.0\]\], expected an array on the CPU"),
    ({"q": object()}, "q is of type object, expected an array on the CPU"),
    ({"q": b"bytes"}, "q has dtype u8, expected f64"),
    ({"scale": "1"}, "scale is '1', expected a finite number"),
    ({"scale": float("nan")}, "scale is nan, expected a finite number"),
    ({"scale": float("inf")}, "scale is inf, expected a finite number"),
    ({"scale": 10**400}, "scale is .*, expected a finite number"),
    ({"scale": 1e39}, "scale is 1e\\+39, expected a finite number"),
    ({"scale": True}, "scale is True, expected a finite number"),
    ({"scale": 1j}, "scale is of type complex, expected a finite number"),
    ({"scale": np.zeros(3)}, "scale is of type numpy.ndarray, expected a finite number"),
    ({"causal": 1}, "causal is 1, expected True or False"),
    ({"causal": None}, "causal is None, expected True or False"),
    ({"invariant": "yes"}, "invariant is 'yes', expected True or False"),
    ({"return_lse": 0}, "return_lse is 0, expected True or False"),
    ({"align": "middle"}, "align is 'middle', expected 'bottom_right', 'top_left' or an int array"),
    ({"align": 3}, "align is 3, expected 'bottom_right', 'top_left' or an int array"),
    ({"align": None}, "align is None, expected 'bottom_right', 'top_left' or an int array"),
    ({"align": [0.0, 1.0]}, "align has dtype f64, expected i(32 or i)?64"),
    ({"align": [0]}, r"align has shape \[1\], expected \[2\]"),
    ({"align": [0, 2**62]}, "align contains 4611686018427387904, expected"),
    ({"window": 3}, r"window is 3, expected a pair \(left, right\) of ints of at least -1"),
    ({"window": (1, 2, 3)}, r"window is \(1, 2, 3\), expected a pair"),
    ({"window": (-2, 0)}, r"window\[0\] is -2, expected an int of at least -1"),
    ({"window": (0, -2)}, r"window\[1\] is -2, expected an int of at least -1"),
    ({"window": (1.0, 0)}, r"window\[0\] is 1.0, expected an int"),
    ({"window": (True, 0)}, r"window\[0\] is True, expected an int"),
    ({"window": (2**63, 0)}, r"window\[0\] is 9223372036854775808, expected an int"),
    ({"sink_tokens": -1}, "sink_tokens is -1, expected an int of at least 0"),
    ({"sink_tokens": None}, "sink_tokens is None, expected an int"),
    ({"prefix": [-1, 0]}, "prefix contains -1, expected 0 to"),
    ({"prefix": [0]}, r"prefix has shape \[1\], expected \[2\]"),
    ({"chunk": 0}, "chunk is 0, expected an int of at least 1"),
    ({"segments": np.zeros((2, 6), np.int64)}, r"segments of k has shape \[2,6\], expected \[2,9\]"),
    ({"segments": (np.zeros((2, 6), np.int64),)},
     r"segments is of type tuple, expected an int array \[B, T\] or a pair"),
    ({"segments": (np.zeros((2, 6)), np.zeros((2, 9)))}, "segments of q has dtype f64, expected i32 or i64"),
    ({"segments": (None, np.zeros((2, 9), np.int64))}, "segments of q is None, expected an array"),
    ({"key_lengths": [10, 0]}, "key_lengths contains 10, expected 0 to 9"),
    ({"key_lengths": [-1, 0]}, "key_lengths contains -1, expected 0 to 9"),
    ({"key_lengths": [1.5, 2.5]}, "key_lengths has dtype f64, expected i32 or i64"),
    ({"key_lengths": [True, False]}, "key_lengths has dtype bool, expected i32 or i64"),
    ({"key_lengths": np.array([1, 2], np.uint8)}, "key_lengths has dtype u8, expected i32 or i64"),
    ({"key_lengths": [2**70, 0]}, "key_lengths has dtype 'O', expected i32 or i64"),
    ({"key_lengths": [[1], [1, 2]]}, r"key_lengths is \[\[1\], \[1, 2\]\], expected numbers of one shape"),
    ({"key_lengths": []}, r"key_lengths has shape \[0\], expected \[2\]"),
    ({"key_lengths": 5}, "key_lengths is 5, expected an array"),
    ({"key_starts": [[0, 0]]}, r"key_starts has shape \[1,2\], expected \[2\]"),
    ({"query_lengths": [7, 0]}, "query_lengths contains 7, expected 0 to 6"),
    ({"mask": np.ones((6, 9))}, r"mask has dtype f64, expected bool"),
    ({"mask": np.ones((6, 9), np.uint8)}, r"mask has dtype u8, expected bool"),
    ({"mask": np.ones((6, 8), bool)}, r"mask has shape \[6,8\], expected one that broadcasts to \[2,4,6,9\]"),
    ({"mask": np.ones((1, 1, 1, 6, 9), bool)}, r"mask has shape \[1,1,1,6,9\], expected one that broadcasts"),
    ({"mask": [[True]]}, r"mask is \[\[True\]\], expected an array on the CPU"),
    ({"bias": np.ones((6, 9), np.int64)}, "bias has dtype i64, expected a float dtype"),
    ({"bias": np.ones((3, 6, 9))}, r"bias has shape \[3,6,9\], expected one that broadcasts to \[2,4,6,9\]"),
    ({"alibi": [0.5]}, r"alibi has shape \[1\], expected \[4\]"),
    ({"alibi": np.zeros((1, 4))}, r"alibi has shape \[1,4\], expected \[2,4\]"),
    ({"alibi": [1, 2, 3, 4]}, "alibi has dtype i64, expected a float dtype"),
    ({"relative_bias": np.zeros((2, 5))}, r"relative_bias has shape \[2,5\], expected \[4,span\], span >= 1"),
    ({"relative_bias": np.zeros((4, 0))}, r"relative_bias has shape \[4,0\], expected \[4,span\], span >= 1"),
    ({"relative_bias": np.zeros(4)}, r"relative_bias has shape \[4\], expected \[4,span\], span >= 1"),
    ({"relative_bias": np.zeros((4, 5), np.int64)}, "relative_bias has dtype i64, expected a float dtype"),
    ({"relative_bias": [[0.0]] * 4}, r"relative_bias is .*, expected an array on the CPU"),
    ({"log_decay": np.zeros((2, 9, 2)), "causal": True}, r"log_decay has shape \[2,9,2\], expected \[2,9,4\]"),
    ({"log_decay": np.zeros((2, 9, 4))}, "log_decay is given without causal, expected causal with it"),
    ({"log_decay": [[[0.0]]], "causal": True}, r"log_decay is \[\[\[0.0\]\]\], expected an array on the CPU"),
    ({"sinks": np.zeros(2)}, r"sinks has shape \[2\], expected \[4\]"),
    ({"softcap": -1.0}, "softcap is -1, expected a finite number above 0"),
    ({"softcap": float("nan")}, "softcap is nan, expected a finite number"),
    ({"dropout": 1.0}, "dropout is 1, expected 0 <= dropout < 1"),
    ({"dropout": -0.1}, "dropout is -0.1, expected 0 <= dropout < 1"),
    ({"dropout": float("nan")}, "dropout is nan, expected a finite number"),
    ({"seed": -1}, r"seed is -1, expected an int from 0 to 2\^64 - 1"),
    ({"seed": 2**64}, r"seed is 18446744073709551616, expected an int from 0 to 2\^64 - 1"),
    ({"seed": 1.0}, r"seed is 1.0, expected an int from 0 to 2\^64 - 1"),
    ({"dropout_offset": 2**32}, "dropout_offset is 4294967296, expected an int from 0 to 4294967295"),
    ({"precision": "low"}, "precision is 'low', expected 'highest' or 'high'"),
    ({"precision": 3}, "precision is 3, expected 'highest' or 'high'"),
    ({"threads": 0}, "threads is 0, expected an int from 1 to 4096"),
    ({"threads": 5000}, "threads is 5000, expected an int from 1 to 4096"),
    ({"threads": 1.5}, "threads is 1.5, expected an int"),
    ({"cu_seqlens_k": [0, 9]}, "cu_seqlens_q is absent, expected it together with cu_seqlens_k"),
    ({"cu_seqlens_q": [0, 6]}, r"[qk] has shape \[2,.*\], expected"),
    ({**PACKED, "cu_seqlens_q": [0, 4, 3]}, "cu_seqlens_q descends from 4 to 3, expected ascending"),
    ({**PACKED, "cu_seqlens_q": [1, 6]}, "cu_seqlens_q begins with 1, expected 0"),
    ({**PACKED, "cu_seqlens_q": [0, 7]}, "cu_seqlens_q ends with 7, expected at most 6 tokens"),
    ({**PACKED, "cu_seqlens_q": []}, r"cu_seqlens_q has shape \[0\], expected \[B \+ 1\]"),
    ({**PACKED, "cu_seqlens_k": [0, 4, 9]}, "cu_seqlens_k has 3 boundaries, expected 2 as cu_seqlens_q"),
    ({**PACKED, "mask": np.ones((6, 9), bool)}, "mask is given with cu_seqlens_q, expected it only without"),
    ({**PACKED, "key_lengths": [9]}, "key_lengths is given with cu_seqlens_q, expected it only without"),
    ({**PACKED, "q": Q[0, 0]}, r"q has shape \[4,8\], expected \[T_total, Hq, D\]"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_wrong_argument_is_named(arguments, message):
    with pytest.raises(heed.InvalidArgument, match=f"^attention: {message}") as caught:
        heed.attention(**{"q": Q, "k": K, "v": V, **arguments})
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("positional", "keywords", "message"), [
    ((Q, K, V), {"windows": (1, 1)}, r"attention\(\) got an unexpected keyword argument 'windows'"),
    ((Q, K), {}, r"attention\(\) missing required argument: 'v'"),
    ((), {}, r"attention\(\) missing required argument: 'q'"),
    ((Q, K, V, 1.0), {}, r"attention\(\) takes 3 positional arguments but 4 were given"),
    ((Q, K, V), {"q": Q}, r"attention\(\) got multiple values for argument 'q'"),
])
def test_wrong_call_is_a_type_error(positional, keywords, message):
    with pytest.raises(TypeError, match=message):
        heed.attention(*positional, **keywords)


def test_arguments_may_be_keywords_and_numpy_scalars():
    o = heed.attention(v=V, q=Q, k=K, scale=np.float32(0.5), causal=np.True_, window=(np.int32(2), np.int64(0)),
                       seed=np.uint64(2**64 - 1), sink_tokens=np.int8(1), softcap=2, threads=np.int64(1))
    assert o.shape == (2, 6, 4, 5)


def test_the_errors_of_settings():
    for function in (heed.set_checks, heed.set_strict):
        with pytest.raises(heed.InvalidArgument, match="on is 1, expected True or False"):
            function(1)
    for wrong in (0, -1, 4097, 1.0, True, "2"):
        with pytest.raises(heed.InvalidArgument, match="set_num_threads: threads is "):
            heed.set_num_threads(wrong)
    for wrong in (0, -3, 2.0, None, 2**40):
        with pytest.raises(heed.InvalidArgument, match="alibi_slopes: heads is "):
            heed.alibi_slopes(wrong)


def test_a_result_too_large_for_the_machine_is_an_error():
    q = np.broadcast_to(np.zeros((1, 1, 1, 1), np.float32), (2**30, 2**20, 1, 1))
    with pytest.raises((MemoryError, ValueError)):
        heed.attention(q, q, q)
