# Records the attention calls of a Transformers model, for heed.capture.
"""A temporary attention function that records and then does the ordinary work."""

from __future__ import annotations

import sys

from heed import InvalidArgument

_NAME = "heed_capture"


def record(model, inputs, dtype=None):
    """Runs `model(**inputs)` and records each call of its attention function.

    Args:
      model: a Transformers model; its attention implementation is switched to a
        recording one for the call and restored after it.
      inputs: keyword arguments of the model, batch size 1.
      dtype: torch dtype of the records; None keeps the model's.

    Returns:
      A list, one entry per call: (number of the layer or None, (q, k, v), facts);
      q, k and v are [1, T, H, D], facts a dict of strings.
    """
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        kind = (f"the class {model.__name__}" if isinstance(model, type)
                else f"of type {type(model).__name__}")
        raise InvalidArgument(f"record: model is {kind}, expected a "
                              "transformers.PreTrainedModel")
    configs = {id(m.config): m.config for m in model.modules()
               if isinstance(m, PreTrainedModel)}.values()
    saved = [(c, c._attn_implementation) for c in configs]
    base = "sdpa" if all(name == "sdpa" for _, name in saved) else "eager"
    calls = []

    def attend(module, query, key, value, attention_mask, *args, **kwargs):
        qkv = tuple(x.detach().transpose(1, 2).contiguous().to(dtype or x.dtype)
                    for x in (query, key, value))
        calls.append((getattr(module, "layer_idx", None), qkv,
                      _facts(module, query, key, attention_mask, kwargs)))
        home = sys.modules[type(module).__module__]
        known = getattr(home, "ALL_ATTENTION_FUNCTIONS", AttentionInterface())
        ordinary = known.get(base, getattr(home, "eager_attention_forward", None))
        return ordinary(module, query, key, value, attention_mask, *args, **kwargs)

    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, AttentionMaskInterface()[base])
    use_cache = getattr(model.config, "use_cache", None)
    try:
        model.set_attn_implementation(_NAME)
        model.config.use_cache = False
        with torch.no_grad():
            model(**inputs)
    finally:
        model.config.use_cache = use_cache
        for config, name in saved:
            config._attn_implementation = name
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(_NAME, None)
    return calls


def _facts(module, query, key, mask, kwargs):
    """The options that define the attention of one call besides q, k and v, as strings."""
    import torch
    T, S = query.shape[2], key.shape[2]
    scale = kwargs.get("scaling")
    causal = kwargs.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    left_out = {name for name in ("position_bias", "s_aux")
                if kwargs.get(name) is not None}

    # The mask that was really used decides, not what the module says of itself.
    if mask is None:
        keep = torch.ones(1, T, S, dtype=torch.bool)
        keep = keep.tril() if causal else keep
    else:
        mask = mask.reshape(-1, *mask.shape[-2:])[..., :S].expand(-1, T, -1)
        keep = mask
        if mask.dtype != torch.bool:
            keep = mask > torch.finfo(mask.dtype).min / 2
            if bool(mask[keep].any()):
                left_out.add("mask")  # an additive bias
    ahead = torch.arange(S)[None, :] - torch.arange(T)[:, None]
    seen = ahead[keep.any(dim=0)]
    left, right = int(-seen.min()), int(seen.max())
    band = bool((keep == ((ahead <= right) & (ahead >= -left))).all())
    if not band:
        left_out.add("mask")  # chunks, blocks, ...

    if T > 1:
        causal = right == 0
    facts = {"scale": repr(query.shape[-1] ** -0.5 if scale is None
                           else float(scale)),
             "causal": "true" if causal else "false"}
    if band and (left < T - 1 or 0 < right < S - 1):
        facts["window"] = (f"{left if left < T - 1 else -1},"
                           f"{right if right < S - 1 else -1}")
    if kwargs.get("softcap") is not None:
        facts["softcap"] = repr(float(kwargs["softcap"]))
    if left_out:
        facts["not_recorded"] = ",".join(sorted(left_out))
    return facts


def merge_facts(facts):
    """{layer: facts} as one dict: plain keys where every layer agrees."""
    merged = {}
    for key in sorted({key for f in facts.values() for key in f}):
        values = {n: f[key] for n, f in facts.items() if key in f}
        if len(values) == len(facts) and len(set(values.values())) == 1:
            merged[key] = next(iter(values.values()))
        else:
            merged.update({f"layers.{n}.{key}": v for n, v in values.items()})
    return merged


def number_layers(calls):
    """{layer: ((q, k, v), facts)} in order.

    A layer has the number that its module has in the model (so in a hybrid model
    the numbers have holes), or where those are missing or repeat, that of its
    call.
    """
    numbers = [n for n, _, _ in calls]
    if None in numbers or len(set(numbers)) < len(numbers):
        numbers = list(range(len(calls)))
    layers = dict(zip(numbers, (call[1:] for call in calls)))
    return {n: layers[n] for n in sorted(layers)}
