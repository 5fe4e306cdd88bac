#!/usr/bin/env python3
"""The lint of words: how comments begin, and names that the field does not use.

Usage: check_words.py [--count | --list] [ROOT]. Without an option it exits 1 if a count exceeds its bound below.
--count prints the comments with a bad beginning per folder and the uses of each banned word, --list prints where they
are. Bounds only go down: whoever removes some lowers the number to what is left.
"""
import collections
import re
import sys
from pathlib import Path

FOLDERS = ("heed", "cli", "python", "tests", "benchmarks", "examples", "tools", "cmake")
CODE = (".h", ".cc", ".cu")
SELF = ("tools/check_words.py", "tests/check_words_test.py")

# A comment is a sentence with a subject. These words begin one that has lost it, or that needs the line before it.
BEGINNING = re.compile(
    r"(?:Of|Those|That|The same(?=[ ,.;:]*(?:[,.;:]|of|as|for|with|without|in|on|to|by)\b)|The same[.,;:]|What|"
    r"Whatever|Whether|Which|Whichever|Who|Whose|Where|Wherever|How|Why|So|As|Likewise|Its?|Their|Theirs|Them|They|"
    r"These(?! [a-z]+s\b)|"
    r"This(?: one|(?= (?:is|has|of|in)\b))|And|Or|But|Nor|Into|To be|Than|Beside)(?!')(?!\w)")
MAX_BEGINNINGS = 3

# Banned word: how often C++ files have it, in comments and in names (any of "matrix tile", matrix_tiles, kMatrixTile).
# The field's words for them are AMX tile, warpgroup, WGMMA, TMA load, tensor map, barrier, SM, bf16 split, swizzle
# atom, m-fragment or column block, pass or sweep, boundary, probability, prefetch, tile list, query per lane, u term,
# split-KV, small-M, use, rotate.
MAX_USES = {
    "matrix tile": 1, "group of warp": 0, "product of group": 0, "bulk cop": 0, "row map": 0, "publish shared": 0,
    "load matrices": 0, "multiprocessor": 0, "piece": 169, "bf16 pair": 6, "panel": 281, "strip": 2, "walk": 106,
    "against time": 4, "border": 51, "weigh": 20, "ask for": 2, "asks for": 2, "look ahead": 0, "kept list": 0,
    "visit": 474, "rows in lanes": 11, "early decay": 0, "late decay": 0, "bonus form": 0, "sharer": 0, "few rows": 22,
    "mended": 0, "stand": 19, "there is none": 6, "turn": 105}
ENDINGS = r"(?:s|es|ed|d|ing|y|ies)?(?![a-z])"


def pattern_of(words):
    """Matches the words as text or as part of a name in snake_case or CamelCase, with any regular ending."""
    first, *rest = (re.escape(word) for word in words.split())
    begin = f"(?:(?<![A-Za-z]){first}|{first.capitalize()})"
    return re.compile(begin + "".join(rf"s?(?:[ _-]?|\s*\n\s*//\s*)(?i:{word})" for word in rest) + ENDINGS)


def comments(path, text):
    """(line, text of the first line) of each block of comments, and of each docstring."""
    mark = "//" if path.endswith(CODE) else "#"
    inside = False
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if line.startswith(mark):
            if not inside:
                yield number, line[len(mark):].strip()
            inside = True
        else:
            inside = False
            if mark == "#" and (docstring := re.match(r'r?"""(.+)', line)):
                yield number, docstring.group(1)


def files_of(root):
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            path = file.relative_to(root).as_posix()
            if file.suffix in (*CODE, ".py") and "__pycache__" not in path and path not in SELF:
                yield path, file.read_text(errors="replace")


def bad_beginnings(root):
    """(path, line, text) of each comment that begins with a word that it must not begin with."""
    return [(path, line, first) for path, text in files_of(root) for line, first in comments(path, text)
            if BEGINNING.match(first)]


def uses(root, words=None):
    """{banned word: [(path, line, text)]}: its uses in C++ files."""
    found = {word: [] for word in (MAX_USES if words is None else words)}
    patterns = {word: pattern_of(word) for word in found}
    for path, text in files_of(root):
        if path.endswith(CODE):
            for word, pattern in patterns.items():
                if word.split()[0][1:] not in text:
                    continue
                for match in pattern.finditer(text):
                    line = text.count("\n", 0, match.start())
                    found[word].append((path, line + 1, text.split("\n")[line].strip()))
    return found


def excesses(root, max_beginnings=None, max_uses=None):
    """Messages, one per bound that is exceeded."""
    count, bound = len(bad_beginnings(root)), MAX_BEGINNINGS if max_beginnings is None else max_beginnings
    if count > bound:
        yield f"{count} comments begin without a subject, at most {bound} may"
    bounds = MAX_USES if max_uses is None else max_uses
    for word, places in uses(root, bounds).items():
        if len(places) > bounds[word]:
            yield f'"{word}": {len(places)} uses, at most {bounds[word]}'


def main():
    arguments = [a for a in sys.argv[1:] if not a.startswith("--")]
    root = Path(arguments[0] if arguments else Path(__file__).parent.parent)
    if "--list" in sys.argv:
        for path, line, text in bad_beginnings(root) + sum(uses(root).values(), []):
            print(f"{path}:{line}: {text}")
    elif "--count" in sys.argv:
        beginnings = bad_beginnings(root)
        folders = collections.Counter("/".join(path.split("/")[:-1][:2]) for path, _, _ in beginnings)
        for folder, count in sorted(folders.items()):
            print(f"{count:5} {folder}")
        print(f"{len(beginnings):5} comments begin without a subject, at most {MAX_BEGINNINGS} may")
        for word, places in uses(root).items():
            print(f'{len(places):5} "{word}", at most {MAX_USES[word]}')
    else:
        found = list(excesses(root))
        print("\n".join(found) + ("\nplaces: tools/check_words.py --list" if found else ""))
        return 1 if found else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
