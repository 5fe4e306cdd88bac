# The package heed.transformers: models of Transformers on heed's attention and recurrences.
"""heed in models of Transformers: their attention, their recurrences, and their encoders without padding.

    import heed.transformers
    heed.transformers.register()
    model = AutoModel.from_pretrained(..., attn_implementation="heed")

    heed.transformers.accelerate(model)  # Mamba, gated DeltaNet, RWKV, xLSTM, ...
    heed.transformers.accelerate(model, group=group)  # and sequences divided among processes
    heed.transformers.unpad(model)  # BERT and other encoders without the rows of their padding
"""

from __future__ import annotations

import inspect

import transformers

from heed import Unsupported
from heed.transformers._accelerate import Acceleration, accelerate
from heed.transformers._unpad import unpad

__all__ = ["Acceleration", "accelerate", "register", "unpad"]


def register() -> None:
    """Registers "heed" as attention implementation, attention function and mask function; once or more often.

    From then on `attn_implementation="heed"` runs a model's attention on heed, in inference and in training, and so
    does `model.set_attn_implementation("heed")`. Masks stay what they mean (causal, windows, chunks, packed sequences,
    padding), and are not made in memory. A process that unpickles such a model has registered by that. Models whose
    attention never calls Transformers' interface take their default implementation instead, with a warning; models
    without attention, such as Mamba-2, have a warning that nothing of them runs on heed. Raises heed.Unsupported where
    Transformers makes masks in another way.
    """
    try:
        from transformers import masking_utils

        from heed.transformers import _attention, _families, _masks

        understood = "q_offset" in inspect.signature(masking_utils.sdpa_mask).parameters
    except (ImportError, AttributeError, TypeError):
        understood = False
    if not understood:
        version = transformers.__version__
        raise Unsupported(f"register: transformers has version {version}, expected 5.23 or one with the same masks")

    transformers.AttentionInterface.register("heed", _attention.attention)
    masking_utils.AttentionMaskInterface.register("heed", _masks.mask)
    _families.watch()
