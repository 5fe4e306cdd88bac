# The package heed.compat: functions of libraries written for GPUs, by their own names, on heed.
"""Doors for model code that was written for GPUs.

`heed.compat.fla`, `heed.compat.mamba_ssm`, `heed.compat.causal_conv1d` and `heed.compat.flash_attn` have the functions
of the libraries of these names: their arguments, defaults, layouts and results, on torch tensors of the CPU, with
gradients. `import heed.compat.install` lets code that imports those libraries find these functions, wherever a library
is not installed.

An argument that says how a GPU computes and not what (`WITHOUT_EFFECT` lists them) is accepted and does nothing.
Whatever else heed cannot do is refused by name: heed.Unsupported.
"""

from heed.compat._door import WITHOUT_EFFECT

__all__ = ["WITHOUT_EFFECT"]
