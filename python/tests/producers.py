# Objects that export arrays by DLPack alone, in every version and form that producers use.
import ctypes

import numpy as np


class Unversioned:
    """Before DLPack 1.0: no max_version."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class NoDevice:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **_):
        return self.array.__dlpack__()


class Cuda(Unversioned):
    def __dlpack_device__(self):
        return (2, 0)


class Refuses(Unversioned):
    def __dlpack__(self, **_):
        raise BufferError("not today")


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


class Managed(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", DLTensor)]


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


CODES = {"i": 0, "f": 2, "b": 6}  # by NumPy's kinds


class Versioned:
    """DLPack 1.x written out by hand: null strides, a byte offset, flags, and a count of deleted exports."""

    def __init__(self, array, flags=0, major=1, code=None, bits=None, lanes=1, device=1, strides=None, null=False):
        array = np.ascontiguousarray(array)
        self.array, self.deleted, self.exported = array, 0, 0
        self.padded = np.concatenate([np.zeros(3, array.dtype), array.ravel()])
        self.shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self.strides = None if strides is None else (ctypes.c_int64 * array.ndim)(*strides)
        self.deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.delete)
        data, offset = (None, 0) if null else (self.padded.ctypes.data, 3 * array.itemsize)
        tensor = DLTensor(data, device, 0, array.ndim, CODES[array.dtype.kind] if code is None else code,
                          8 * array.itemsize if bits is None else bits, lanes, self.shape, self.strides, offset)
        self.managed = Managed(major, 0, None, ctypes.cast(self.deleter, ctypes.c_void_p), flags, tensor)

    def delete(self, _):
        self.deleted += 1

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        assert max_version >= (1, 0)
        self.exported += 1
        return new_capsule(ctypes.addressof(self.managed), b"dltensor_versioned", None)

    def __dlpack_device__(self):
        return (1, 0)
