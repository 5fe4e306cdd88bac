#!/usr/bin/env python3
"""Writes the tables of docs/tasks.md and of the examples' README.md anew, from benchmarks/results.

Usage: task_page.py [FILE]... A table stands between `<!-- results NAME -->` and `<!-- end -->`, where NAME is language, image or speech,
or `length PASS QUANTITY` as in length.json: `length forward seconds`. Where there are no results there is a line that says so.
"""
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "examples/tasks"))
import results  # noqa: E402

PAGES = (ROOT / "docs/tasks.md", *(ROOT / f"examples/{name}/README.md" for name in ("byte_lm", "digits", "speech")))
BLOCK = re.compile(r"<!-- results ([a-z ]+) -->\n.*?<!-- end -->", re.S)


def block(match):
    name, *rest = match[1].split()
    path = results.FOLDER / f"{name}.json"
    if not path.exists():
        said = "Nothing has been measured."
    else:
        document = json.loads(path.read_text())
        said = results.length_table(*rest, document) if rest else results.table(name, document)
    return f"<!-- results {match[1]} -->\n{said}\n<!-- end -->"


def main():
    for page in map(Path, sys.argv[1:] or PAGES):
        page.write_text(BLOCK.sub(block, page.read_text()))


if __name__ == "__main__":
    main()
