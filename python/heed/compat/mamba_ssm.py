# heed.compat.mamba_ssm: the functions and modules of mamba-ssm on heed.
"""Functions of `mamba_ssm.ops` and modules, as of version 2.3.2: Mamba-1 with [B, D, T], Mamba-2 with [B, T, H, P].

Last states have a gradient, and dt_limit holds wherever it is given, in steps too. A complex A is refused. Modules for
which heed has no mechanism exist by name, and a call raises heed.Unsupported.
"""

from __future__ import annotations

from typing import Any

from heed.compat import _mamba_functions, _mamba_modules
from heed.compat._door import lacking

__version__ = "2.3.2"  # whose functions these are

_LACKING = {
    "Mamba3": "modules.mamba3",
    "MambaLMHeadModel": "models.mixer_seq_simple",
}
PLACES: dict[str, str] = {**_mamba_functions.PLACES, **_mamba_modules.PLACES, **_LACKING}  # where the library has each

for _of in (_mamba_functions, _mamba_modules):
    globals().update({_name: getattr(_of, _name) for _name in _of.PLACES})
for _name in _LACKING:
    globals()[_name] = lacking(_name)
for _name in PLACES:
    globals()[_name].__module__ = __name__

__all__: list[str] = []
__all__ += sorted(PLACES)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"heed.compat.mamba_ssm has no {name!r}")
