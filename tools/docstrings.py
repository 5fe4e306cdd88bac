#!/usr/bin/env python3
"""Turns the comments of a public header into docstrings, so that C++ and Python have one text.

Usage: docstrings.py OUTPUT HEADER. OUTPUT is a C++ header with, for each function `Name` of a header in namespace
`heed::x`, a constant `heed::x::doc::kName`: the header's opening comment (for its first function), the structs that it
takes and returns field by field (where they first appear), and its own comment. A binding includes the output for
heed/ops/f/x/x.h as "docstrings/x.h".
"""
import re
import sys
from pathlib import Path

NAMESPACE = re.compile(r"^namespace ([\w:]+) \{$")
STRUCT = re.compile(r"^struct (\w+) \{")
FUNCTION = re.compile(r"^HEED_API ([\w:<>,&* ]*?)\b(\w+)\((.*)\);$", re.DOTALL)
FIELD = re.compile(r"^[\w:<>]+ ([\w, ]+?)(?: = [^;]*)?;(?:\s*// (.*))?$")


def uncomment(lines):
    """The text of `//` lines."""
    return "\n".join(re.sub(r"^// ?", "", line) for line in lines)


def blocks(lines):
    """(comment, code) of each declaration: `//` lines and what follows them, up to a blank line outside braces."""
    comment, code = [], []
    for line in lines:
        if not code and line.startswith("//"):
            comment.append(line)
        elif line.strip() or sum(c.count("{") - c.count("}") for c in code) > 0:
            code.append(line)
        elif comment or code:
            yield uncomment(comment), "\n".join(code)
            comment, code = [], []
    if comment or code:
        yield uncomment(comment), "\n".join(code)


def struct_fields(code):
    """`name  comment` for each field of a struct, names aligned."""
    fields = []
    for line in map(str.strip, code.split("\n")[1:-1]):
        if match := FIELD.match(line):
            fields.append([match[1], match[2] or ""])
        elif line.startswith("//") and fields:  # goes on from the line above
            fields[-1][1] += " " + line[2:].strip()
        elif line:
            raise ValueError(f"not a field: {line}")
    if not any(text for _, text in fields):
        return ""
    width = max(len(name) for name, _ in fields) + 2
    return "\n".join(f"  {name:{width}}{text}".rstrip() for name, text in fields)


def docstrings(text):
    """(namespace, {function: docstring}) of a header."""
    lines = text.split("\n")
    start = next(i for i, line in enumerate(lines) if not line.startswith("//"))
    opening = uncomment(lines[:start])
    begin = next(i for i, line in enumerate(lines) if NAMESPACE.match(line))
    namespace = NAMESPACE.match(lines[begin])[1]
    end = next(i for i, line in enumerate(lines) if line.startswith(f"}}  // namespace {namespace}"))
    structs, functions = {}, {}
    for comment, code in blocks(lines[begin + 1:end]):
        if match := STRUCT.match(code):
            structs[match[1]] = "\n".join(filter(None, [f"{match[1]}:", comment, struct_fields(code)]))
        elif match := FUNCTION.match(code):
            result, name, parameters = match.groups()
            used = [structs.pop(word) for word in re.findall(r"\w+", f"{parameters} {result}") if word in structs]
            parts = [*([] if functions else [opening]), *used, comment]
            functions[name] = "\n\n".join(part.strip("\n") for part in parts if part)
    return namespace, functions


def main():
    output, header = map(Path, sys.argv[1:])
    namespace, functions = docstrings(header.read_text(encoding="ascii"))
    lines = [f"// Docstrings of {header.name}, generated from its comments by tools/docstrings.py.", "#pragma once", ""]
    lines.append(f"namespace {namespace}::doc {{")
    lines += [f'inline constexpr char k{name}[] = R"doc({text})doc";' for name, text in functions.items()]
    lines += [f"}}  // namespace {namespace}::doc", ""]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n".join(lines), encoding="ascii")


if __name__ == "__main__":
    main()
