# Arrays in and out of heed.attention: layouts, DLPack, buffers, and written memory.
import array

import numpy as np
import producers
import pytest

import heed


@pytest.fixture
def qkv(rng):
    return [rng.standard_normal((2, 6, 4, 8), dtype=np.float32) for _ in range(3)]


def fused(q, k, v):
    stacked = np.stack([q, k, v], axis=2)
    return stacked[:, :, 0], stacked[:, :, 1], stacked[:, :, 2]


def unaligned(x):
    raw = np.zeros(x.nbytes + 1, np.uint8)[1:]
    raw[:] = x.view(np.uint8).ravel()
    return raw.view(x.dtype).reshape(x.shape)


def odd_strides(x):
    record = np.zeros(x.shape, [("x", x.dtype), ("pad", np.uint8)])
    record["x"] = x
    return record["x"]


LAYOUTS = {
    "BHTD": lambda *qkv: [np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in qkv],
    "reversed": lambda *qkv: [np.ascontiguousarray(x[::-1, ::-1, ::-1])[::-1, ::-1, ::-1] for x in qkv],
    "fused": fused,
    "every other token": lambda *qkv: [np.repeat(x, 2, axis=1)[:, ::2] for x in qkv],
    "last axis strided": lambda *qkv: [np.repeat(x, 2, axis=3)[..., ::2] for x in qkv],
    "last axis reversed": lambda *qkv: [np.ascontiguousarray(x[..., ::-1])[..., ::-1] for x in qkv],
    "fortran": lambda *qkv: [np.asfortranarray(x) for x in qkv],
    "unaligned": lambda *qkv: [unaligned(x) for x in qkv],
    "odd strides": lambda *qkv: [odd_strides(x) for x in qkv],
    "memoryview": lambda *qkv: [memoryview(x) for x in qkv],
    "unversioned DLPack": lambda *qkv: [producers.Unversioned(x) for x in qkv],
    "DLPack without device": lambda *qkv: [producers.NoDevice(x) for x in qkv],
    "versioned DLPack": lambda *qkv: [producers.Versioned(x) for x in qkv],
    "read-only DLPack": lambda *qkv: [producers.Versioned(x, flags=1) for x in qkv],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_changes_no_bit(qkv, name):
    expected = heed.attention(*qkv, causal=True)
    np.testing.assert_array_equal(heed.attention(*LAYOUTS[name](*qkv), causal=True), expected)


def test_read_only_arrays(qkv):
    expected = heed.attention(*qkv)
    for x in qkv:
        x.flags.writeable = False
    np.testing.assert_array_equal(heed.attention(*qkv), expected)


def test_expanded_batch_and_heads_are_read_in_place(qkv):
    q, k, v = qkv
    wide = [np.broadcast_to(x[:1, :, :1], q.shape) for x in (k, v)]
    np.testing.assert_array_equal(heed.attention(q, *wide), heed.attention(q, *(np.array(x) for x in wide)))
    assert heed.explain("attention", q=q, k=wide[0], v=wide[1])["copies"] == []


def test_expanded_mask_and_bias(qkv, rng):
    column = rng.random((2, 1, 6, 1)) < 0.5
    mask = np.broadcast_to(column, (2, 4, 6, 6))
    np.testing.assert_array_equal(heed.attention(*qkv, mask=mask), heed.attention(*qkv, mask=column))
    bias = np.where(column, 0, -np.inf)
    np.testing.assert_array_equal(heed.attention(*qkv, bias=np.broadcast_to(bias, (2, 4, 6, 6))),
                                  heed.attention(*qkv, mask=column))
    transposed = np.asfortranarray(np.array(mask))
    np.testing.assert_array_equal(heed.attention(*qkv, mask=transposed), heed.attention(*qkv, mask=column))


def test_a_dlpack_export_is_deleted_once(qkv):
    shared = [producers.Versioned(x) for x in qkv]
    heed.attention(*shared)
    assert [x.exported for x in shared] == [x.deleted for x in shared] == [1, 1, 1]
    with pytest.raises(heed.InvalidArgument):
        heed.attention(*shared, scale="x")
    with pytest.raises(heed.InvalidArgument):
        heed.attention(*shared, window=(-9, 0))
    assert all(x.exported == x.deleted for x in shared)


@pytest.mark.parametrize(("producer", "message"), [
    (producers.Cuda, "q is on DLPack device type 2 .CUDA., expected an array on the CPU"),
    (producers.Refuses, "q cannot be read .*not today"),
    (lambda x: producers.Versioned(x, device=2), "q is on DLPack device type 2"),
    (lambda x: producers.Versioned(x, major=2), "q has DLPack version 2"),
    (lambda x: producers.Versioned(x, code=0, bits=16), "q has dtype i16"),
    (lambda x: producers.Versioned(x, code=1, bits=8), "q has dtype u8"),
    (lambda x: producers.Versioned(x, code=5, bits=64), "q has dtype c64"),
    (lambda x: producers.Versioned(x, code=10, bits=8), "q has dtype DLPack type 10 of bits 8"),
    (lambda x: producers.Versioned(x, lanes=4), "q has dtype f32x4"),
    (lambda x: producers.Versioned(np.zeros((1,) * 7, np.float32)), "q has rank 7, expected at most 6"),
    (lambda x: producers.Versioned(x, strides=[2**62, 1, 1, 1]), "q has "),
])
def test_bad_dlpack_producers(qkv, producer, message):
    with pytest.raises(heed.InvalidArgument, match=f"^attention: {message}"):
        heed.attention(producer(qkv[0]), *qkv[1:])


def test_interrupt_inside_a_producer_is_not_swallowed(qkv):
    class Interrupted(producers.Unversioned):
        def __dlpack__(self, **_):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        heed.attention(Interrupted(qkv[0]), *qkv[1:])


def test_vectors_may_be_any_buffer_or_list(qkv):
    expected = heed.attention(*qkv, key_lengths=np.array([3, 6]))
    for lengths in ([3, 6], (3, 6), array.array("i", [3, 6]), np.array([3, 0, 6], np.int32)[::2],
                    producers.Unversioned(np.array([3, 6])), [np.int64(3), 6]):
        np.testing.assert_array_equal(heed.attention(*qkv, key_lengths=lengths), expected)


def test_results_own_their_memory(qkv):
    o, lse = heed.attention(*qkv, return_lse=True)
    for x in (o, lse):
        assert type(x) is np.ndarray and x.flags.owndata and x.flags.writeable and x.flags.c_contiguous


def test_out_is_filled_and_returned(qkv):
    expected, expected_lse = heed.attention(*qkv, return_lse=True)
    out = np.full_like(qkv[0], np.nan)
    assert heed.attention(*qkv, out=out) is out
    np.testing.assert_array_equal(out, expected)
    o, lse = heed.attention(*qkv, out=out, return_lse=True)
    assert o is out
    np.testing.assert_array_equal(lse, expected_lse)


def test_out_may_have_strides_and_may_be_dlpack(qkv):
    expected = heed.attention(*qkv)
    base = np.full((2, 4, 12, 8), np.nan, np.float32)
    out = base[:, :, ::-2].transpose(0, 2, 1, 3)
    assert heed.attention(*qkv, out=out) is out
    np.testing.assert_array_equal(out, expected)
    assert np.isnan(base[:, :, ::2]).all()
    target = producers.Unversioned(np.zeros_like(expected))
    assert heed.attention(*qkv, out=target) is target
    np.testing.assert_array_equal(target.array, expected)


def test_q_k_v_may_be_the_same_array(qkv):
    q = qkv[0]
    np.testing.assert_array_equal(heed.attention(q, q, q), heed.attention(q, q.copy(), q.copy()))


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(("make", "message"), [
    (lambda q: np.zeros((2, 6, 4, 9), np.float32), r"out has shape \[2,6,4,9\], expected \[2,6,4,8\]"),
    (lambda q: np.zeros((6, 4, 8), np.float32), r"out has shape \[6,4,8\], expected \[2,6,4,8\]"),
    (lambda q: np.zeros(q.shape), "out has dtype f64, expected f32"),
    (lambda q: np.zeros(q.shape, np.int16), "out has dtype i16"),
    (lambda q: np.zeros((2, 6, 8, 4), np.float32).swapaxes(2, 3), "out has stride 4 on its last axis, expected"),
    (read_only, "out is read-only, expected a writable array"),
    (lambda q: producers.Versioned(q, flags=1), "out is read-only, expected a writable array"),
    (lambda q: producers.Versioned(q, flags=2), "out is exported as a copy"),
    (lambda q: np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), q.shape, (0, 0, 0, 4)), "out has strides "),
    (lambda q: unaligned(np.zeros_like(q)), "out is not aligned"),
    (lambda q: [0.0], r"out is \[0.0\], expected an array on the CPU"),
    (lambda q: q, "out overlaps q, expected memory of its own"),
    (lambda q: q[::-1], "out overlaps q"),
])
def test_wrong_out(qkv, make, message):
    before = [x.copy() for x in qkv]
    with pytest.raises(heed.InvalidArgument, match=f"^attention: {message}"):
        heed.attention(*qkv, out=make(qkv[0]))
    for x, y in zip(qkv, before, strict=True):
        np.testing.assert_array_equal(x, y)


def test_bfloat16_of_ml_dtypes_is_understood(qkv):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="optional: bfloat16 arrays")
    narrow = [x.astype(ml_dtypes.bfloat16) for x in qkv]
    assert heed.explain("attention", q=qkv[0], k=qkv[1], v=qkv[2], bias=np.zeros((1, 1), ml_dtypes.bfloat16))
    bias = np.array([[0.5]], ml_dtypes.bfloat16)
    np.testing.assert_array_equal(heed.attention(*qkv, bias=bias), heed.attention(*qkv, bias=bias.astype(np.float32)))
    with pytest.raises(heed.InvalidArgument, match="k has dtype bf16, expected f32 as q"):
        heed.attention(qkv[0], narrow[1], qkv[2])
    try:
        o = heed.attention(*narrow)
    except heed.Unsupported as error:
        assert str(error).startswith("attention: ") and "bf16" in str(error)
    else:
        assert o.dtype == ml_dtypes.bfloat16


def test_torch_tensors(qkv):
    torch = pytest.importorskip("torch", reason="optional: interoperation with PyTorch")
    tensors = [torch.from_numpy(x) for x in qkv]
    np.testing.assert_array_equal(heed.attention(*tensors), heed.attention(*qkv))
    lengths, mask = torch.tensor([3, 6]), torch.ones(6, 6, dtype=torch.bool)
    np.testing.assert_array_equal(heed.attention(*tensors, key_lengths=lengths, mask=mask),
                                  heed.attention(*qkv, key_lengths=[3, 6]))
    out = torch.empty_like(tensors[0])
    assert heed.attention(*tensors, out=out) is out
    np.testing.assert_array_equal(out.numpy(), heed.attention(*qkv))
    with pytest.raises(heed.InvalidArgument, match=r"attention: q cannot be read .*grad"):
        heed.attention(tensors[0].requires_grad_(), *tensors[1:])


def test_jax_arrays(qkv):
    jax = pytest.importorskip("jax", reason="optional: interoperation with JAX")
    np.testing.assert_array_equal(heed.attention(*(jax.numpy.asarray(x) for x in qkv)), heed.attention(*qkv))
    with pytest.raises(heed.InvalidArgument, match="attention: out is read-only"):
        heed.attention(*qkv, out=jax.numpy.zeros(qkv[0].shape))
