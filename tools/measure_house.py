#!/usr/bin/env python3
"""Counts how large the parts of the tree are and how clean its text is, beside the goals of the redesign.

Usage: measure_house.py [ROOT]. Prints a line per measure: at the outset, today, the goal. Files are those that git
tracks. A count
that needs a tool which is missing (check_words.py, clang-format) is a dash.
"""
import collections
import importlib
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

CODE = (".h", ".cc", ".cu", ".cuh")
NAMES = ("Call", "Row", "Problem", "State", "Mechanism")
# A definition without indentation is a member of a namespace: .clang-format indents members of classes.
DEFINITION = re.compile(rf"^(?:struct|class)(?: HEED_API)? ({'|'.join(NAMES)})\b[^;]*\{{", re.M)
MECHANISM_SCAFFOLDING = re.compile(r"_case\.|_test\.|reference")


class Tree:
    """The files that git tracks below `root`, read once."""

    def __init__(self, root):
        self.root = root
        listed = subprocess.run(["git", "-C", root, "ls-files", "-z"], capture_output=True, text=True,
                                check=True).stdout
        self.paths = [path for path in listed.split("\0") if path and (root / path).is_file()]
        self.texts = {}

    def text(self, path):
        if path not in self.texts:
            self.texts[path] = (self.root / path).read_text(errors="replace")
        return self.texts[path]

    def lines(self, paths):
        return sum(self.text(path).count("\n") for path in paths)

    def below(self, *folders):
        return [path for path in self.paths if path.startswith(tuple(folder + "/" for folder in folders))]

    def code(self, *folders):
        return [path for path in (self.below(*folders) if folders else self.paths) if path.endswith(CODE)]


def references_and_cases(tree):
    return tree.lines(path for path in tree.code("heed") if re.search(r"reference|_case", path))


def mechanism_library(tree):
    rooms = ("heed/mechanism", "python/mechanism")
    return tree.lines(path for path in tree.code(*rooms) if not MECHANISM_SCAFFOLDING.search(path))


def mutants(tree):
    return tree.lines(path for path in tree.below("tools", "tests")
                      if re.search(r"mutant|mutation", path) and path.endswith(".py"))


def family_files(tree):
    return len(tree.below(*(f"heed/ops/{family}" for family in ("gated", "delta", "linear", "ssm"))))


def bad_beginnings(tree):
    try:
        return len(importlib.import_module("check_words").bad_beginnings(tree.root))
    except ImportError:
        return None


def long_lines(tree):
    return sum(len(line) > 120 for path in tree.code() for line in tree.text(path).split("\n"))


def unformatted_files(tree):
    check = importlib.import_module("check_format")
    program = check.find_program("clang-format")
    if program is None:
        return None
    done = subprocess.run([program, "--dry-run", *tree.code(*check.FOLDERS)], cwd=tree.root, capture_output=True,
                          text=True)
    return len(set(re.findall(r"^(.+?):\d+:\d+: .*-Wclang-format-violations", done.stderr, re.M)))


def types_by_name(tree):
    """{name: how many types of namespace level have it}, outside of tests."""
    product = [path for path in tree.code("heed", "cli", "python") if "_test." not in path]
    return collections.Counter(name for path in product for name in DEFINITION.findall(tree.text(path)))


def types_of_many_meanings(tree):
    return sum(types_by_name(tree).values())


# Each measure: how it is counted, its value at the outset (27 November 2026), and the goal.
MEASURES = (
    ("references and cases, lines", references_and_cases, 16600, 9000),
    ("mechanism library and bindings, lines", mechanism_library, 3900, 2500),
    ("tools of mutants and their test, lines", mutants, 9300, 500),
    ("files of gated, delta, linear, ssm", family_files, 238, 160),
    ("comments that begin without a subject", bad_beginnings, 743, 50),
    ("C++ lines of more than 120 columns", long_lines, None, 0),
    ("C++ files that clang-format would change", unformatted_files, 971, 0),
    (f"types named {', '.join(NAMES)}", types_of_many_meanings, 46, None),
)


def main():
    tree = Tree(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve())
    print(f"{'':50} {'outset':>7} {'today':>7} {'goal':>7}")
    for text, measure, outset, goal in MEASURES:
        cells = ("-" if x is None else f"{x:,}" for x in (outset, measure(tree), goal))
        print(f"{text:50}", *(f"{cell:>7}" for cell in cells))
    print("types:", ", ".join(f"{count} {name}" for name, count in types_by_name(tree).most_common()))


if __name__ == "__main__":
    main()
