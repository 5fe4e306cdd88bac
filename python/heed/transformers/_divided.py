# Models of Transformers over a sequence that the processes of a group hold in parts: accelerate(group=).
"""accelerate(group=) replaces everything in a model that mixes tokens.

Attention, recurrences and short convolutions call heed with `group=`. Embeddings, norms, projections and experts work
on each token alone and stay as they are. The `forward` of the model itself makes positions absolute, labels shifted
across the borders of ranks, and masks that are only a rule. A module that is none of these is refused by its path.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

import heed
import heed.torch
from heed import InvalidArgument, Unsupported
from heed.torch import _group
from heed.transformers import _layers
from heed.transformers._accelerate import (Acceleration, Change, Replaced, _change_functions, _change_method,
                                            _rebound)
from heed.transformers._attention import _refused_options, _wants_weights

# Folders of Transformers whose decoders are compared with one process.
_FAMILIES = frozenset("""
    afmoe apertus arcee bamba bitnet cohere cohere2 deepseek_v3 diffllama ernie4_5 exaone4 falcon_h1 falcon_mamba
    flex_olmo gemma gemma2 gemma3 glm glm4 glm4_moe gpt_oss granite granitemoe granitemoehybrid granitemoeshared
    helium hunyuan_v1_dense hy_v3 hyperclovax jais2 jamba kimi_linear lfm2 lfm2_moe llama mamba mamba2 minimax
    minimax_m2 ministral ministral3 mistral mixtral nanochat nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe persimmon
    phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next seed_oss smollm3 solar_open
    stablelm starcoder2 vaultgemma zamba zamba2
""".split())
# Modules that compute each token alone: of PyTorch by class, of these families by the end of the name.
_POINTWISE = frozenset({nn.Linear, nn.Embedding, nn.Dropout, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.Sequential,
                        nn.SiLU, nn.GELU, nn.ReLU, nn.Sigmoid, nn.Tanh})
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_POINTWISE_NAME = re.compile(r"(MLP|Norm|NormGated|RotaryEmbedding|WordEmbedding|Experts|Router|MoE|Block|DecoderLayer|"
                             r"HybridLayer|ForgetGate)$")
_MASK_NAME = re.compile(r"create_\w*mask")
_IGNORED = -100  # the label of tokens without one


class Rule(NamedTuple):
    """The keys that a query sees, passed on by a model in the place of a mask: those before it, and itself."""

    window: int | None = None  # this many at most


def _causal(config: Any, *args: Any, or_mask_function: Any = None, and_mask_function: Any = None,
            block_sequence_ids: Any = None, **options: Any) -> Rule:
    """create_causal_mask."""
    if any(x is not None for x in (or_mask_function, and_mask_function, block_sequence_ids)):
        raise Unsupported("accelerate: a mask function of its own is given with a group, expected causal attention")
    return Rule()


def _windowed(config: Any, *args: Any, **options: Any) -> Rule:
    """create_sliding_window_causal_mask."""
    _causal(config, *args, **options)
    return Rule(config.sliding_window)


_MASKS = {
    "create_causal_mask": _causal,
    "create_sliding_window_causal_mask": _windowed,
    "create_recurrent_attention_mask": lambda *args, **options: None,  # nothing is padded
}


class _Interface:
    """Transformers' table of attention functions, in which every name is heed's in a group."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def get_interface(self, name: str, default: Callable) -> Callable:
        return functools.partial(_attention, self.group)


def _attention(
    group: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Rule,
    scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None, s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of [B, H, T, D] of this rank's tokens to those of all ranks: [B, T, Hq, Dv]."""
    name = type(module).__name__
    if not isinstance(attention_mask, Rule):
        raise Unsupported(f"accelerate: {name} has a mask of type {type(attention_mask).__name__} in a group, expected "
                          "that of its model")
    for option in (*_refused_options(type(module)), "sinks", "position_bias", "indices"):
        if options.get(option) is not None:
            raise Unsupported(f"accelerate: {option} was given by {name} in a group, expected None")
    if _wants_weights(options):
        raise Unsupported("accelerate: output_attentions is True in a group, expected False")
    window = None if attention_mask.window is None else (attention_mask.window - 1, 0)
    o = heed.torch.attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), causal=True, window=window, scale=scaling,
        softcap=softcap, sinks=s_aux, dropout=dropout if module.training else 0.0, group=group,
    )
    return o, None


class _Call(NamedTuple):
    """The result of an agreement between ranks."""

    counts: list[int]  # tokens of each rank
    begin: int  # tokens of earlier ranks


class _Model:
    """The models inside of a model, which pass one call on to each other."""

    def __init__(self, group: _group.Group) -> None:
        self.group = group
        self.call: _Call | None = None

    def wrap(self, path: str, model: PreTrainedModel) -> Callable:
        """The `forward` of a model, whose masks are rules."""
        original = type(model).forward
        plain = inspect.unwrap(original)
        masks = {name: _MASKS[name] for name in plain.__code__.co_names if name in _MASKS}
        rebound = _rebound(original, masks) if masks else original
        if rebound is None:
            raise Unsupported(f"accelerate: {_named(path, model)}: a decorator hides the code of forward")
        signature = inspect.signature(original)

        def run(model: PreTrainedModel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            if self.call is not None:
                return rebound(model, **self.arrange(signature, _given(signature, model, args, kwargs)))
            given, self.call = self.agree(signature, model, args, kwargs)
            try:
                return rebound(model, **self.arrange(signature, given))
            finally:
                self.call = None

        @functools.wraps(original)
        def forward(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            # No compiler traces what ranks send each other.
            call = torch._dynamo.disable(run) if torch.compiler.is_compiling() else run
            return call(model, args, kwargs)

        return forward

    def arrange(self, signature: inspect.Signature, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a model inside of a call."""
        x = _rows(given)
        if "position_ids" in signature.parameters and given.get("position_ids") is None and isinstance(x, Tensor):
            assert self.call is not None
            given["position_ids"] = (self.call.begin + torch.arange(x.shape[1]))[None]
        return given | {"attention_mask": None, "use_cache": False}

    def agree(
        self, signature: inspect.Signature, model: PreTrainedModel, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], _Call]:
        """The arguments with absolute positions and shifted labels; raises on every rank what one rank refuses."""
        given: dict[str, Any] = {}
        numbers, text, error = [0, 0, 0], "", None
        try:
            given = _given(signature, model, args, kwargs)
            numbers, text = _checked(model, given, self.group.rank == 0)
        except (InvalidArgument, Unsupported, TypeError) as refused:
            error = refused

        def describe() -> str:
            if error is not None:
                raise error
            return text

        agreed = self.group.agree(numbers, describe)
        if error is not None:
            raise error
        counts, firsts, labels = (list(of_ranks) for of_ranks in zip(*agreed))
        if 0 in counts:
            raise Unsupported(f"accelerate: rank {counts.index(0)} has no tokens, expected some on every rank")
        begins = [sum(counts[:rank]) for rank in range(len(counts))]
        for rank, first in enumerate(firsts):
            if first - firsts[0] != begins[rank] and given.get("position_ids") is not None:
                raise InvalidArgument(f"accelerate: position_ids of rank {rank} begin at {first}, expected "
                                      f"{firsts[0] + begins[rank]}: positions are those of the whole sequence")
        if given.get("labels") is not None:
            ignored = given.get("ignore_index", _IGNORED)
            shifted = given.get("shift_labels")
            # Losses view them, which parts of a tensor may not allow.
            given["shift_labels"] = self.shift(given["labels"], ignored) if shifted is None else shifted.contiguous()
            if given.get("num_items_in_batch") is None:
                given["num_items_in_batch"] = sum(labels)
        return given, _Call(counts, begins[self.group.rank])

    def shift(self, labels: Tensor, ignored: int) -> Tensor:
        """The label of the next token of each, of which the last is the first label of the next rank."""
        firsts = self.group.gather(labels[:, 0])
        after = self.group.rank + 1
        last = firsts[after] if after < self.group.size else torch.full_like(firsts[0], ignored)
        return torch.cat([labels[:, 1:], last[:, None]], 1)


def _named(path: str, module: nn.Module) -> str:
    return type(module).__name__ + (path and f" at {path}")


def _rows(given: Mapping[str, Any]) -> Any:
    embedded = given.get("inputs_embeds")
    return given.get("input_ids") if embedded is None else embedded


def _given(signature: inspect.Signature, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict:
    """The arguments of a call by name."""
    bound = signature.bind(model, *args, **kwargs)
    result: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        result |= value if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return result


def _checked(model: PreTrainedModel, given: Mapping[str, Any], first_rank: bool) -> tuple[list[int], str]:
    """The numbers that ranks exchange, tokens, first position and labels that count, and the text to compare."""
    where = f"accelerate: {type(model).__name__}"
    x = _checked_rows(where, given)
    _refuse_options(where, model, given)
    _check_mask(where, given.get("attention_mask"), x)
    first = _first_position(where, given.get("position_ids"))
    count = 0
    if given.get("labels") is not None:
        _check_loss(where, model)
        count = _counted(given, first_rank)
    names = sorted(name for name, value in given.items() if isinstance(value, (Tensor, bool, int, float, str)))

    def without(name: str, value: Tensor) -> int | None:
        return 1 if value.dim() > 1 else None

    call = _group.described(names, [given[name] for name in names], without)
    modes = f"training={model.training} gradients={torch.is_grad_enabled()}"
    return [x.shape[1], first, count], f"{type(model).__name__}{call} {modes} heed {heed.__version__}"


def _checked_rows(where: str, given: Mapping[str, Any]) -> Tensor:
    """Ids or embedded ids of this rank's tokens, which have the shapes of labels and positions."""
    x = _rows(given)
    if not isinstance(x, Tensor) or x.dim() < 2:
        raise InvalidArgument(f"{where}: input_ids {_kind(x)}, expected shape [B, T]")
    if x.device.type != "cpu":
        raise Unsupported(f"{where}: input_ids is on {x.device}, expected the CPU with a group")
    for name in ("labels", "shift_labels", "position_ids"):
        value, shapes = given.get(name), [list(x.shape[:2])]
        if name == "position_ids":
            shapes.append([1, x.shape[1]])
        if value is not None and not (isinstance(value, Tensor) and list(value.shape) in shapes):
            raise InvalidArgument(f"{where}: {name} {_kind(value)}, expected shape {shapes[0]}")
    return x


def _kind(x: Any) -> str:
    return f"has shape {list(x.shape)}" if isinstance(x, Tensor) else f"is of type {type(x).__name__}"


def _refuse_options(where: str, model: PreTrainedModel, given: Mapping[str, Any]) -> None:
    for name in ("past_key_values", "cache_params", "state", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx"):
        if given.get(name) is not None:
            raise Unsupported(f"{where}: {name} is given with a group, expected None")
    for name in ("use_cache", "output_attentions", "output_router_logits"):
        value = given.get(name)
        if value is None and name != "use_cache":  # whose default a group replaces by False
            value = getattr(model.config, name, None)
        if value:
            raise Unsupported(f"{where}: {name} is True with a group, expected False")
    if given.get("is_causal", True) is False or getattr(model.config, "is_causal", True) is False:
        raise Unsupported(f"{where}: is_causal is False with a group, expected causal attention")


def _check_mask(where: str, mask: Any, x: Tensor) -> None:
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape == x.shape[:2] and bool((mask == 1).all())):
        raise Unsupported(f"{where}: attention_mask is not 1 for each of {list(x.shape[:2])} tokens, expected that or "
                          "None with a group: all sequences of a batch have one length")


def _first_position(where: str, positions: Tensor | None) -> int:
    if positions is None:
        return 0
    if bool((positions.diff(dim=1) != 1).any()) or bool((positions != positions[:1]).any()):
        raise Unsupported(f"{where}: position_ids restart or differ between rows, expected numbers that rise by one "
                          "with a group: one sequence in each row")
    return int(positions[0, 0]) if positions.numel() else 0


def _counted(given: Mapping[str, Any], first_rank: bool) -> int:
    """The labels of this rank that some token predicts."""
    shifted = given.get("shift_labels")
    labels = given["labels"][:, int(first_rank):] if shifted is None else shifted
    return int((labels != given.get("ignore_index", _IGNORED)).sum())


def _check_loss(where: str, model: PreTrainedModel) -> None:
    if model.loss_function is not ForCausalLMLoss:
        raise Unsupported(f"{where}: labels are given beside a loss function other than ForCausalLMLoss, expected "
                          "None: compute the loss of the logits")
    if getattr(model.config, "z_loss_coefficient", 0):
        raise Unsupported(f"{where}: labels are given with z_loss_coefficient={model.config.z_loss_coefficient}, "
                          "expected 0 with a group")


def _refuse_to_generate(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """generate()."""
    raise Unsupported(f"accelerate: {type(model).__name__}.generate is called with a group, which holds no cache; "
                      "expected a call after undo()")


def _owner(module: nn.Module) -> type:
    """The class whose `forward` a module has."""
    return next(base for base in type(module).__mro__ if "forward" in vars(base))


def _family(owner: type) -> str | None:
    """The family of a class of a modeling file; None of others."""
    found = re.fullmatch(r"transformers\.models\.(\w+)\.modeling_\1", owner.__module__)
    return found and found[1]


def _rope_types(module: nn.Module) -> list[str]:
    types = getattr(module, "rope_type", None)
    return list(types.values()) if isinstance(types, dict) else [types] if isinstance(types, str) else []


def _why_not(module: nn.Module, parent_convolves: bool) -> str | None:
    """Returns why a module that mixes no tokens is not known to be one; None if it is."""
    owner = _owner(module)
    if owner is nn.Module:
        return None if isinstance(module, _CONTAINERS) else "has no forward"
    if owner in _POINTWISE or (owner is nn.Conv1d and parent_convolves):
        return None
    if owner.__module__ == "transformers.activations":
        return None
    family = _family(owner)
    if family is not None and family not in _FAMILIES:
        return f"is of the family {family!r}, expected one of {', '.join(sorted(_FAMILIES))}"
    if family is None or not _POINTWISE_NAME.search(owner.__name__):
        return "is not known to compute each token alone"
    for kind in _rope_types(module):
        if kind in ("dynamic", "longrope"):
            return f"has rope_type={kind!r}, whose frequencies depend on the tokens of the call"
    return None


def _mixes(owner: type, called: frozenset[str]) -> Callable | None:
    """Makes the change of a recurrence or a short convolution; None of other modules."""
    method = _layers.METHODS.get(owner.__name__)
    if method is not None and method.divides:
        return functools.partial(_change_method, known=method)
    return None if called.isdisjoint(_layers.FUNCTIONS) else _change_functions


def _changes(report: Acceleration, model: nn.Module, group: _group.Group) -> list[Change]:
    """All changes of a model; raises Unsupported if one of its modules cannot be divided."""
    changes: list[Change] = []
    models, convolves = _Model(group), set()
    for path, module in model.named_modules():
        where = f"accelerate: {_named(path, module)}"
        if "forward" in module.__dict__:
            raise Unsupported(f"{where}: forward has been replaced on this instance already")
        owner = _owner(module)
        names = getattr(inspect.unwrap(owner.forward), "__code__", None)
        called = frozenset(names.co_names) if names is not None else frozenset()
        known = _family(owner) in _FAMILIES
        if known and isinstance(module, PreTrainedModel):
            if not owner.__name__.endswith(("ForCausalLM", "Model")):
                raise Unsupported(f"{where}: is not divided among ranks, expected a class ...ForCausalLM or ...Model")
            unknown = sorted(name for name in called if _MASK_NAME.match(name) and name not in _MASKS)
            if unknown:
                raise Unsupported(f"{where}: is not divided among ranks: it calls {unknown[0]}")
            changes.append(Change(module, "forward", models.wrap(path, module)))
            if hasattr(module, "generate"):
                changes.append(Change(module, "generate", _refuse_to_generate))
        elif known and "ALL_ATTENTION_FUNCTIONS" in called:
            if not getattr(module, "is_causal", True):
                raise Unsupported(f"{where}: is_causal is False, expected causal attention")
            forward = _rebound(owner.forward, {"ALL_ATTENTION_FUNCTIONS": _Interface(group.group)})
            if forward is None:
                raise Unsupported(f"{where}: a decorator hides the code of forward")
            changes.append(Change(module, "forward", forward))
            report.replaced.append(Replaced(path, "forward", "attention"))
        elif known and (mixes := _mixes(owner, called)):
            changes += mixes(report, path, module, group=group.group)
            if report.left:
                raise Unsupported(f"{where}: {report.left[0].call} {report.left[0].reason}")
            if "causal_conv1d_fn" in called:
                convolves.add(path)
        elif (reason := _why_not(module, path.rpartition(".")[0] in convolves)) is not None:
            raise Unsupported(f"{where}: is not divided among ranks: it {reason}")
    if not any(isinstance(change.layer, PreTrainedModel) for change in changes):
        raise Unsupported(f"accelerate: {type(model).__name__} is no model of Transformers, which a group needs")
    return changes


def accelerate(model: nn.Module, group: Any) -> Acceleration:
    """The part of heed.transformers.accelerate that concerns a group."""
    of, report = _group.Group("accelerate", group), Acceleration(model)
    changes: list[Change] = []
    error: Unsupported | None = None
    try:
        changes = _changes(report, model, of)
    except Unsupported as refused:
        error = refused

    def describe() -> str:
        if error is not None:
            raise error
        return f"{type(model).__name__} {report.replaced} heed {heed.__version__}"

    of.agree([], describe)
    if error is not None:
        raise error
    for change in changes:
        report._set(*change)
    return report
