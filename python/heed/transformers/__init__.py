# The package heed.transformers: any model of Transformers on heed's attention.
"""heed as an attention implementation of Transformers.

    import heed.transformers
    heed.transformers.register()
    model = AutoModel.from_pretrained(..., attn_implementation="heed")
"""

from __future__ import annotations

import inspect

import transformers
from transformers import AttentionInterface

from heed import Unsupported

__all__ = ["register"]


def register() -> None:
    """Registers "heed" as attention implementation, attention function and mask function; once or more often.

    From then on `attn_implementation="heed"` runs a model's attention on heed, in inference and in training, and so does
    `model.set_attn_implementation("heed")`. Masks stay what they mean (causal, windows, chunks, packed sequences,
    padding), and are not made in memory. Models whose attention never calls Transformers' interface take their default
    implementation instead, with a warning. Raises heed.Unsupported where Transformers is too old.
    """
    try:
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
        known = "q_offset" in inspect.signature(sdpa_mask).parameters
    except ImportError:
        known = False
    if not known:
        raise Unsupported(f"register: transformers has version {transformers.__version__}, expected 5.23 or newer")

    from heed.transformers import _attention, _families, _masks

    AttentionInterface.register("heed", _attention.attention)
    AttentionMaskInterface.register("heed", _masks.mask)
    _families.watch()
