# `import heed.compat.install`: code that imports fla, mamba_ssm, causal_conv1d or flash_attn finds heed.
"""One line in front of a model file that was written for GPUs:

    import heed.compat.install

From then on `from fla.ops.gla import chunk_gla`, `import causal_conv1d`, `from flash_attn import flash_attn_func`,
`from mamba_ssm.ops.selective_scan_interface import selective_scan_fn` and their like give the functions of heed.compat,
wherever Python does not find the library itself: one that is installed stays what it is. Modules that hold no such
function are not there.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

LIBRARIES = ("causal_conv1d", "flash_attn", "fla", "mamba_ssm")


def _places(door: ModuleType) -> Iterator[tuple[str, str, str]]:
    """Each name of a door, a module that has it, and what it is called there."""
    for name, places in door.PLACES.items():
        for at in (places,) if isinstance(places, str) else places:
            module, _, own = at.partition(":")
            yield name, module, own or name


class _Loader(importlib.abc.Loader):
    def __init__(self, names: dict[str, Any], version: str):
        self._names, self._version = names, version

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None  # Python's own

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = f"Functions of heed.compat in the place of {module.__name__}, which is not installed."
        module.__dict__.update(self._names, __all__=sorted(self._names), __version__=self._version)


class _Finder(importlib.abc.MetaPathFinder):
    """Asked after all others, so that it never hides a library."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        library, _, place = fullname.partition(".")
        if library not in LIBRARIES:
            return None
        parent = sys.modules.get(library)
        if place and not isinstance(getattr(parent, "__loader__", None), _Loader):
            return None  # the library is there, and has no such module
        door = importlib.import_module(f"heed.compat.{library}")
        prefix, names, exists = place and f"{place}.", {}, False
        for name, at, own in _places(door):
            rest = f"{at}.".removeprefix(prefix)
            if not f"{at}.".startswith(prefix):
                continue
            exists = True
            # A package has what its modules have, but for a function with the name of its module, and for what the door
            # calls otherwise than that module does.
            if not rest.startswith(f"{name}.") and (own == name or not rest):
                names[own] = getattr(door, name)
        if not exists:
            return None
        return importlib.machinery.ModuleSpec(
            fullname, _Loader(names, door.__version__), origin=door.__name__, is_package=True
        )


if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.append(_Finder())
