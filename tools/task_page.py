#!/usr/bin/env python3
"""Writes the tables of docs/tasks.md and of the examples' README.md again, from benchmarks/results.

Usage: task_page.py [FILE]... A table is between `<!-- results NAME -->` and `<!-- end -->`, where NAME is language,
image or speech, or `length PASS QUANTITY` as in length.json: `length forward seconds`; `picture NAME` is the picture
that task_charts.py draws. A table without results is a line that says so.
"""
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "examples/tasks"))
import results  # noqa: E402
import task_charts  # noqa: E402

PAGES = (ROOT / "docs/tasks.md", *(ROOT / f"examples/{name}/README.md" for name in ("byte_lm", "digits", "speech")))
NOTHING = "Nothing has been measured."
BLOCK = re.compile(r"<!-- results ([a-z ]+) -->\n.*?<!-- end -->", re.S)


PICTURES = {
    "tasks": "For each task a line per mechanism: how good, beside the bars to beat, and how long its training took",
    "length": "Time forward, time of training, and memory of training, by the number of tokens, on logarithmic axes"}


def said(name, *rest):
    """The content of a block."""
    if name == "picture":
        has = (results.FOLDER / f"{one}.json" for one in (task_charts.NAMES_OF_TASKS if rest[0] == "tasks" else rest))
        return f"![{PICTURES[rest[0]]}](images/{rest[0]}.svg)" if any(path.exists() for path in has) else NOTHING
    path = results.FOLDER / f"{name}.json"
    if not path.exists():
        return NOTHING
    document = json.loads(path.read_text())
    return results.length_table(*rest, document) if rest else results.table(name, document)


def block(match):
    return f"<!-- results {match[1]} -->\n{said(*match[1].split())}\n<!-- end -->"


def main():
    for page in map(Path, sys.argv[1:] or PAGES):
        page.write_text(BLOCK.sub(block, page.read_text()))


if __name__ == "__main__":
    main()
