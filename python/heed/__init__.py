# The package heed: attention mechanisms on CPUs, on NumPy and any other array with DLPack.
"""Attention mechanisms on CPUs.

Every function lives in the extension module heed._core and takes arrays that are
on the CPU and have DLPack or the buffer protocol, in the layout [B, T, H, D].
help(heed.attention) has the mathematics, shapes and errors.
"""

from collections import namedtuple as _namedtuple

from heed import _core
from heed._core import *  # noqa: F403
from heed._core import InvalidArgument, Unsupported

TYPE_CHECKING = False  # typing's own, without the import of typing
if TYPE_CHECKING:
    from heed import _typing as _typing  # the stub of _core names its types by it
    from heed._typing import AttentionGradients as AttentionGradients
else:
    AttentionGradients = _namedtuple("AttentionGradients", "dq dk dv dbias dsinks dalibi", module="heed")
    AttentionGradients.__doc__ = """What attention_backward returns: the gradients of q, k, v, bias, sinks and alibi.

    Each has the shape and dtype of what it is the gradient of; None where that was not given, and dbias is None without
    need_dbias=True."""

__version__: str = vars(_core)["__version__"]
__all__ = [name for name in dir(_core) if not name.startswith("_")]
__all__ += ["AttentionGradients", "__version__"]

# The names that users catch and see in tracebacks.
for _class in (*vars(_core).values(),):
    if isinstance(_class, type):
        _class.__module__ = "heed"
