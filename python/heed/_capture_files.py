# Files of heed.capture: the text, the folder of the model, the safetensors file.
"""The parts of heed.capture that need neither PyTorch nor Transformers."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import struct
from pathlib import Path


class CaptureError(RuntimeError):
    """A capture that cannot be made; the message is one line naming the culprit."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


def read_text(path):
    """The text of a UTF-8 file that holds more than white space."""
    try:
        words = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise CaptureError(f"{path}: not UTF-8 text (byte {e.start})") from e
    except OSError as e:
        raise CaptureError(f"{path}: {e.strerror}, expected a text file") from e
    if not words.strip():
        raise CaptureError(f"{path}: the text is empty")
    return words


def check_out(path):
    """Refuses, before any work, a path that write_tensors cannot write."""
    if path.suffix != ".safetensors":
        raise CaptureError(f"{path}: expected a name ending in .safetensors")
    if not path.parent.is_dir():
        raise CaptureError(f"{path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise CaptureError(f"{path}: is a folder, expected a file")


def find_model(name):
    """Finds the folder of the model of that name.

    The folder of a model is the one with the fewest levels, in the named folder
    or in the installed package of that name, that holds a config.json with a
    model_type.

    Returns:
      (folder or hub name for from_pretrained, "folder" | "package" | "hub").
    """
    kind, roots = "folder", [Path(name)]
    package = name.replace("-", "_")
    if not roots[0].is_dir():
        kind, roots = "package", []
        spec = package.isidentifier() and importlib.util.find_spec(package)
        if spec and spec.submodule_search_locations:
            roots = [Path(p) for p in spec.submodule_search_locations]
    found = [p.parent for root in roots for p in root.rglob("config.json")
             if _is_model(p)]
    depth = min((len(p.parts) for p in found), default=0)
    found = sorted(p for p in found if len(p.parts) == depth)
    if len(found) > 1:
        raise CaptureError(f"{name}: holds several models, name one of "
                           + " ".join(map(str, found)))
    if found:
        return str(found[0]), kind
    if kind == "folder":
        raise CaptureError(f"{name}: no config.json of a Transformers model in "
                           "this folder or below it")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise CaptureError(f"{name}: no such model folder")
    return name, "hub"


def _is_model(config):
    """Returns whether a config.json is that of a model, not that of a pooling layer."""
    try:
        fields = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(fields, dict) and "model_type" in fields


def write_tensors(path, tensors, metadata):
    """Writes {name: (dtype, shape, bytes)}, whole or not at all.

    Equal arguments give equal bytes (the order of the safetensors package's
    metadata is random), and the data starts at a multiple of 64.

    Returns:
      The number of bytes of the file.
    """
    header, end = {"__metadata__": dict(sorted(metadata.items()))}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [end, end + len(data)]}
        end += len(data)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-(8 + len(head)) % 64)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "xb") as f:
            f.write(struct.pack("<Q", len(head)) + head)
            for _, _, data in tensors.values():
                f.write(data)
        os.replace(part, path)
    except OSError as e:
        raise CaptureError(f"{path}: cannot be written: {e.strerror}") from e
    finally:
        part.unlink(missing_ok=True)
    return 8 + len(head) + end
