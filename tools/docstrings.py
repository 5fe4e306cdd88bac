#!/usr/bin/env python3
"""Turns the comments of a public header into docstrings, so that C++ and Python have one text.

Usage: docstrings.py OUTPUT HEADER. OUTPUT is a C++ header with, for each function `Name` of a header in namespace
`heed::x`, a constant `heed::x::doc::kName`: the header's opening comment (for its first function), the structs that it
takes and returns field by field (where they first appear), and its own comment. For each class `Name` there is kName: the
opening comment, its own, the structs that its constructor takes and that one's comment; and kNameMethod for each public method
that has a comment. A binding includes the output for heed/ops/f/x/x.h as "docstrings/x.h".
"""
import re
import sys
from pathlib import Path

NAMESPACE = re.compile(r"^namespace ([\w:]+) \{$")
STRUCT = re.compile(r"^struct (\w+) \{")
FUNCTION = re.compile(r"^HEED_API ([\w:<>,&* ]*?)\b(\w+)\((.*)\);$", re.DOTALL)
CLASS = re.compile(r"^class (?:HEED_API )?(\w+)(?: : [\w ]+)? \{")
METHOD = re.compile(r"^(?:explicit |static )?([\w:<>,&* ]*?)\b(\w+)\((.*?)\)(?: const)?(?: noexcept)?(?:;| \{)", re.DOTALL)
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
    fields, above = [], None
    for line in map(str.strip, code.split("\n")[1:-1]):
        if match := FIELD.match(line):
            fields.append([match[1], " ".join(filter(None, [above, match[2]]))])
            above = None
        elif line.startswith("//") and above is not None:  # after an empty line: of the next field
            above = f"{above} {line[2:].strip()}".strip()
        elif line.startswith("//") and fields:  # goes on from the line above
            fields[-1][1] += " " + line[2:].strip()
        elif line:
            raise ValueError(f"not a field: {line}")
        else:
            above = ""
    if not any(text for _, text in fields):
        return ""
    width = max(len(name) for name, _ in fields) + 2
    return "\n".join(f"  {name:{width}}{text}".rstrip() for name, text in fields)


def described(structs, words):
    """What there is to say of the structs among `words`, each of which is said once."""
    for word in re.findall(r"\w+", words):
        if word in structs:
            comment, code = structs.pop(word)
            yield "\n".join(filter(None, [f"{word}:", comment, struct_fields(code)]))


def joined(*parts):
    return "\n\n".join(part.strip("\n") for part in parts if part)


def class_docstrings(name, opening, comment, code):
    """{name: docstring} of a class and, with its name before theirs, of its public methods."""
    lines = [re.sub("^  ", "", line) for line in code.split("\n")[1:-1]]
    ends = [i for i, line in enumerate(lines) if line.strip() in ("private:", "protected:")]
    lines = [line for line in lines[: min(ends, default=len(lines))] if line.strip() != "public:"]
    structs, found = {}, {name: joined(opening, comment)}
    for text, block in blocks(lines):
        if match := STRUCT.match(block):
            structs[match[1]] = text, block
        elif (match := METHOD.match(block)) and text:
            result, method, parameters = match.groups()
            said = [*described(structs, f"{parameters} {result}"), text]
            if method == name:
                found[name] = joined(found[name], *said)
            else:
                words = method.split("_")
                found[name + "".join(word[0].upper() + word[1:] for word in words)] = joined(*said)
    return found


def docstrings(text):
    """(namespace, {function or class: docstring}) of a header."""
    lines = text.split("\n")
    start = next(i for i, line in enumerate(lines) if not line.startswith("//"))
    opening = uncomment(lines[:start])
    begin = next(i for i, line in enumerate(lines) if NAMESPACE.match(line))
    namespace = NAMESPACE.match(lines[begin])[1]
    end = next(i for i, line in enumerate(lines) if line.startswith(f"}}  // namespace {namespace}"))
    structs, found = {}, {}
    declared = list(blocks(lines[begin + 1:end]))
    has_class = any(CLASS.match(code) for _, code in declared)  # of which the opening comment speaks
    for comment, code in declared:
        struct, _, after = code.partition("\n};\n")
        if (match := STRUCT.match(code)) and after:  # what the function after it returns, of which the comment speaks
            structs[match[1]] = "", struct + "\n};"
            code = after
        if match := STRUCT.match(code):
            structs[match[1]] = comment, code
        elif match := CLASS.match(code):
            found.update(class_docstrings(match[1], opening, comment, code))
        elif match := FUNCTION.match(code):
            result, name, parameters = match.groups()
            first = "" if found or has_class else opening
            found[name] = joined(first, *described(structs, f"{parameters} {result}"), comment)
    return namespace, found


def main():
    output, header = map(Path, sys.argv[1:])
    namespace, found = docstrings(header.read_text(encoding="ascii"))
    lines = [f"// Docstrings of {header.name}, generated from its comments by tools/docstrings.py.", "#pragma once", ""]
    lines.append(f"namespace {namespace}::doc {{")
    lines += [f'inline constexpr char k{name}[] = R"doc({text})doc";' for name, text in found.items()]
    lines += [f"}}  // namespace {namespace}::doc", ""]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n".join(lines), encoding="ascii")


if __name__ == "__main__":
    main()
