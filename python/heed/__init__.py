# The package heed: attention mechanisms on CPUs, on NumPy and any other array with DLPack.
"""Attention mechanisms on CPUs.

Every function lives in the extension module heed._core and takes arrays that are
on the CPU and have DLPack or the buffer protocol, in the layout [B, T, H, D].
help(heed.attention) has the mathematics, shapes and errors.
"""

from heed import _core, patterns, select
from heed._advise import Advice, Candidate, advise
from heed._core import *  # noqa: F403
from heed._core import InvalidArgument, Unsupported

TYPE_CHECKING = False  # typing's own, without the import of typing
if TYPE_CHECKING:
    from heed import _typing as _typing

__version__: str = vars(_core)["__version__"]
__all__ = [name for name in dir(_core) if not name.startswith("_")]
__all__ += ["__version__", "Advice", "Candidate", "advise", "patterns", "select"]


class _Signature:
    """The __signature__ of a function or method of _core, made on first use."""

    def __get__(self, function, cls=None):
        if function is None:
            raise AttributeError("__signature__")  # the type itself has none
        from heed import _signatures

        return _signatures.of(function)


class _ClassSignature:
    """The __signature__ of a class of _core without one in C++; classes made from it have their own."""

    def __init__(self, owner, text):
        self.owner, self.text = owner, text

    def __get__(self, instance, cls=None):
        if cls is not self.owner:
            raise AttributeError("__signature__")
        from heed import _signatures

        return _signatures.parse(self.text)


# help() and pickle read attributes that Python's functions have and nanobind's lack.
_method = _core.KVCacheBase.trim
_function_type, _method_type, _bound_type = type(_core.explain), type(_method), type(_method.__get__(_core))
for _type in (_function_type, _method_type, _bound_type):
    _core._add_attribute(_type, "__signature__", _Signature())
    # The text alone: nanobind writes the signature of every overload before it.
    _core._add_attribute(_type, "__doc__", property(lambda function: function.__nb_signature__[0][1]))
    # pickle finds functions by name.
    _core._add_attribute(_type, "__reduce__", lambda function: function.__qualname__)
_core._add_attribute(_bound_type, "__reduce__", lambda method: (getattr, (method.__self__, method.__name__)))
# inspect and pydoc take for data what has no __get__. These bind to nothing more.
for _type in (_function_type, _bound_type):
    _core._add_attribute(_type, "__get__", lambda function, *_: function)

for _class in (*vars(_core).values(),):
    if isinstance(_class, type):
        _class.__module__ = "heed"  # the names that users catch and see in tracebacks
        if issubclass(_class, Exception):
            _class.__signature__ = _ClassSignature(_class, "def __init__(*args)")
_core.KVCacheBase.__signature__ = _ClassSignature(_core.KVCacheBase, "def __init__()")
_core.Pattern.__signature__ = _ClassSignature(_core.Pattern, "def __init__()")
_core.View.__signature__ = _ClassSignature(_core.View, "def __init__()")
