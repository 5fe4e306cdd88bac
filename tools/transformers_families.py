#!/usr/bin/env python3
"""Writes the table of docs/transformers.md: which families of the installed Transformers run on heed.

Usage: transformers_families.py [PAGE]. Every modeling file of Transformers is read, none is imported. The text of PAGE
between the two comments `families` is replaced. Needs the packages heed and transformers.
"""
import ast
import re
import sys
from pathlib import Path

import transformers

from heed.transformers import _families

PAGE = Path(__file__).resolve().parent.parent / "docs/transformers.md"
MARKED = re.compile(r"(<!-- families -->\n).*?(<!-- /families -->)", re.S)
OPTIONS = {"softcap": "soft cap", "s_aux": "sinks", "sinks": "sinks of each query", "position_bias": "position bias",
           "indices": "chosen keys", "block_indices": "chosen blocks, refused"}


def sources():
    """{family: source}, in alphabetical order; a folder with several modeling files has a family for each."""
    found = {}
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        name = file.stem.removeprefix("modeling_")
        found[name if name.startswith(file.parent.name) else f"{file.parent.name}, {name}"] = file.read_text()
    return found


def passed_options(source):
    """The members of OPTIONS that calls of the attention interface have as keywords."""
    if not any(f"{option}=" in source for option in OPTIONS):
        return set()
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return {keyword.arg for call in calls if isinstance(call.func, ast.Name) and call.func.id == "attention_interface"
            for keyword in call.keywords}


def notes(source):
    """Notes for users on a family that runs on heed."""
    options = passed_options(source)
    found = [words for option, words in OPTIONS.items() if option in options]
    if re.search(r"\b(and|or)_mask_function=|\bblock_sequence_ids=", source):
        found.append("masks of its own, dense if not known")
    if "_supports_sdpa = True" not in source:
        found.append("a mask that it looks into is 0 and finfo.min")
    return "; ".join(found)


def table():
    """The text between the comments."""
    kinds = {}
    for family, source in sources().items():
        kinds.setdefault(_families.kind(source), {})[family] = source
    yes, own, without = kinds["interface"], {**kinds["own"], **kinds["mixed"]}, kinds["none"]
    lines = [
        f"Transformers {transformers.__version__}: {len(yes)} families run on heed, {len(own)} have attention in code "
        f"of their own and do not; {len(without)} have no attention layers but those of models inside them, or none. "
        "What else a family has beside attention of queries and keys (deformable, linear, pooled) stays as it is.",
        "", "| family | on heed | with |", "| --- | --- | --- |",
    ]
    lines += [f"| {family} | yes | {notes(source)} |" if family in yes else f"| {family} | no | |"
              for family, source in sorted({**yes, **own}.items())]
    return "\n".join([*lines, "", "Without attention layers of their own: " + ", ".join(without) + "."])


def main():
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    text, count = MARKED.subn(lambda match: match[1] + table() + "\n" + match[2], page.read_text())
    if count != 1:
        sys.exit(f"{page}: has {count} places for a table, expected one between the comments `families`")
    page.write_text(text)


if __name__ == "__main__":
    main()
