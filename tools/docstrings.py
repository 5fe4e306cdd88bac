#!/usr/bin/env python3
"""Turns the comments of a public header into docstrings, so that C++ and Python have one text.

Usage: docstrings.py OUTPUT HEADER. OUTPUT is a C++ header with, for each function `Name` of a header in namespace
`heed::x`, a constant `heed::x::doc::kName`: the header's opening comment (for its first function), what is said of the
structs that it takes and returns (where they first appear), and its own comment. For each class `Name` there is kName:
the opening comment, its own, and its constructor's; and kNameMethod for each public method that has a comment. All of
it in the words of Python. Fields of structs that are arguments (Inputs, Options and their like) stand in a table of
their own, kFields of header.h being kHeaderFields: bindings make a line of it for each parameter. Structs that come
from another header, by `using x::Options` or as a base, bring its fields and the text of its opening. A mechanism,
which has a Forward, has all of these together as kDocs. A binding includes the output for heed/ops/f/x/x.h as
"docstrings/x.h".
"""
import json
import re
import sys
from pathlib import Path

NAMESPACE = re.compile(r"^namespace ([\w:]+) \{$")
TEMPLATE = "template <class View>\n"  # of the tensors and states of a mechanism
STRUCT = re.compile(r"^struct (\w+)(?: : [\w:]+)? \{")
FUNCTION = re.compile(r"^HEED_API ([\w:<>,&* ]*?)\b(\w+)\((.*)\);$", re.DOTALL)
CLASS = re.compile(r"^class (?:HEED_API )?(\w+)(?: : [\w ]+)? \{")
METHOD = re.compile(r"^(?:explicit |static )?([\w:<>,&* ]*?)\b(\w+)\((.*?)\)(?: const)?(?: noexcept)?(?:;| \{)",
                    re.DOTALL)
FIELD = re.compile(r"^([\w:<>]+) ([\w, ]+?)(?: = [^;]*)?;(?:\s*// (.*))?$")
ENUM = re.compile(r"^enum class (\w+) \{(.*)\};", re.DOTALL)
USING = re.compile(r"^using (\w+)::(\w+);$", re.MULTILINE)
BASE = re.compile(r"^struct \w+ : (\w+)::(\w+) \{")
INCLUDE = re.compile(r'^#include "(heed/(?:ops|mechanism)/[^"]+)"', re.MULTILINE)
ARGUMENTS = re.compile(r"(Tensors|Inputs|Options|Outputs|Gradients|Selection|States?|Tables)$")
ROOT = Path(__file__).resolve().parent.parent


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


def snake(name):
    """KVCache is not for this: ReluSquared, Append."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def enum_values(text):
    """[(value in Python, comment)] of what is between an enum's braces; a comment may begin with the value: 'x': ..."""
    values = []
    for line in text.split("\n") if "//" in text else text.split(","):
        if match := re.match(r"\s*k(\w+),?\s*(?://\s*(?:'(\w+)': )?(.*))?$", line):
            values.append((match[2] or snake(match[1]), match[3] or ""))
    return values


def said_of_enum(values):
    if any(comment for _, comment in values):
        return "; ".join(f"'{value}' is {comment}" for value, comment in values)
    return " or ".join(f"'{value}'" for value, _ in values)


def fields_of(code, enums=()):
    """[[names, comment]] of a struct. A comment to the right of a field goes on below it; one that begins where fields
    do is of the next."""
    fields, above = [], ""
    for line in code.split("\n")[1:-1]:
        is_below = line.startswith("   ")
        line = line.strip()
        if match := FIELD.match(line):
            kind = said_of_enum(enums[match[1]]) if match[1] in enums else None
            fields.append([match[2], " ".join(filter(None, [above, match[3], kind]))])
            above = ""
        elif line.startswith("//") and not is_below:
            above = f"{above} {line[2:].strip()}".strip()
        elif line.startswith("//") and fields:
            fields[-1][1] += " " + line[2:].strip()
        elif line and "operator==" not in line:
            raise ValueError(f"not a field: {line}")
    return fields


def struct_fields(code):
    """`name  comment` for each field of a struct, names aligned."""
    fields = fields_of(code)
    if not any(text for _, text in fields):
        return ""
    width = max(len(name) for name, _ in fields) + 2
    return "\n".join(f"  {name:{width}}{text}".rstrip() for name, text in fields)


def described(structs, words):
    """Yields the comments of the structs among `words`, each struct once."""
    for word in re.findall(r"\w+", words):
        if word in structs:
            comment, code = structs.pop(word)
            if ARGUMENTS.search(word):
                yield comment
            else:
                yield "\n".join(filter(None, [f"{word}:", comment, struct_fields(code)]))


def joined(*parts):
    return "\n\n".join(part.strip("\n") for part in parts if part)


def class_docstrings(name, opening, comment, code):
    """{name: docstring} of a class and, by qualified name, of its public methods; and its argument structs."""
    lines = [re.sub("^  ", "", line) for line in code.split("\n")[1:-1]]
    ends = [i for i, line in enumerate(lines) if line.strip() in ("private:", "protected:")]
    lines = [line for line in lines[: min(ends, default=len(lines))] if line.strip() != "public:"]
    structs, found, arguments = {}, {name: joined(opening, comment)}, []
    for text, block in blocks(lines):
        if match := STRUCT.match(block):
            structs[match[1]] = text, block
            arguments.append((match[1], block))
        elif (match := METHOD.match(block)) and text:
            result, method, parameters = match.groups()
            said = [*described(structs, f"{parameters} {result}"), text]
            if method == name:
                found[name] = joined(found[name], *said)
            else:
                words = method.split("_")
                found[name + "".join(word[0].upper() + word[1:] for word in words)] = joined(*said)
    return found, arguments


class Header:
    """The documentation in a header: of its functions and classes, and of the fields of its structs."""

    def __init__(self, path):
        text = path.read_text(encoding="ascii")
        lines = text.split("\n")
        start = next(i for i, line in enumerate(lines) if not line.startswith("//"))
        begin = next(i for i, line in enumerate(lines) if NAMESPACE.match(line))
        self.path, self.opening = path, uncomment(lines[:start])
        self.namespace = NAMESPACE.match(lines[begin])[1]
        end = next(i for i, line in enumerate(lines) if line.startswith(f"}}  // namespace {self.namespace}"))
        declared = list(blocks(lines[begin + 1:end]))
        self.structs, self.enums, self.found, self.usings = {}, {}, {}, []
        self.brings = [Header(ROOT / name) for name in INCLUDE.findall(text) if (ROOT / name).exists()]
        has_class = any(CLASS.match(code) for _, code in declared)  # the opening comment describes it
        self.arguments = []  # (struct, its code), in order
        structs = {}
        for comment, code in declared:
            code = code.removeprefix(TEMPLATE)
            struct, _, after = code.partition("\n};\n")
            # The comment describes the function after the struct, which returns it.
            if (match := STRUCT.match(code)) and after:
                structs[match[1]] = "", struct + "\n};"
                code = after
            if match := STRUCT.match(code):
                structs[match[1]] = comment, code
                self.structs[match[1]] = comment, code
                self.arguments.append((match[1], code))
                self.usings += [base.groups() for base in [BASE.match(code)] if base]
            elif match := ENUM.match(code):
                self.enums[match[1]] = enum_values(match[2])
            elif names := USING.findall(code):
                self.usings += names
            elif match := CLASS.match(code):
                found, arguments = class_docstrings(match[1], self.opening, comment, code)
                self.found.update(found)
                self.arguments += arguments
            elif match := FUNCTION.match(code):
                result, name, parameters = match.groups()
                first = "" if self.found or has_class else joined(self.opening, self.brought())
                words = f"{parameters} {result}" + (" Tensors States" if "Inputs" in parameters else "")
                self.found[name] = joined(first, *described(structs, words), comment)

    def source(self):
        """The header whose structs are this one's arguments, or None."""
        return next((header for header in self.brings if any(header.namespace.endswith("::" + of)
                                                             for of, _ in self.usings)), None)

    def brought(self):
        """The source header's text on sizes and tensors: its opening but for the first paragraph. A header that has
        sizes of its own takes none of it."""
        source = self.source()
        return "" if source is None or "\n\nSizes:" in self.opening else joined(*source.opening.split("\n\n")[1:])

    def fields(self):
        """{field: what is said of it}: this header's, then those of the header that it takes its arguments from."""
        fields = {}
        for name, code in self.arguments:
            if ARGUMENTS.search(name):
                for names, text in fields_of(code, self.enums):
                    for field in names.split(", "):
                        if text:
                            fields.setdefault(field, text)
        if source := self.source():
            fields = {**source.fields(), **fields}
        return fields


def in_python(text, namespace):
    """The words of C++ as those of Python."""
    function = "heed." + namespace.rsplit("::", 1)[-1]
    rules = (
        (r"\s+Memory beyond the arguments:\s+BackwardWorkspace\(\)\.", ""),
        (r"\bWorkspace\(\)", "workspace_bytes of heed.explain"),
        (r"(?<=[.:)])\s+[A-Z][^.:]*:\s+\S*README\.md(?: of \w+)?\.", ""), (r",\s+see\s+README\.md", ""),
        (r"\bThrows\b", "Raises"), (r"\bthrows\b", "raises"), (r"\b[Oo]n throw,", "Then"),
        (r"unless the\s+Context checks", "unless heed.set_checks(True)"),
        (r"by\s+a\s+strict\s+Context", "with heed.set_strict(True)"),
        (r"disagrees\s+with\s+the\s+above", "disagrees with what is said here"),
        (r"\bas above\b", f"as in {function}"), (r"\bsaid above\b", "said here"),
        (r"std::bad_alloc", "MemoryError"), (r"\b(\w+::)+k(?=[A-Z])", "k"),
        (r"\b(?:attention|heed)::(?=[A-Z])", ""),
        (r"\b[A-Z]\w*::([A-Z]\w*)(\(\))?", lambda m: snake(m[1]) + "()" if m[0].split("::")[0].startswith("KVCacheBase")
         else f"{m[0].split('::')[0]}.{snake(m[1])}"),
        (r"\bForward(?:\(\))?(?!\w)", function), (r"\bExplain(?:\(\))?(?!\w)", "heed.explain"),
        (r"\bAttend(?:\(\))?(?!\w)", "attend()"),
        (r"\bQuantise\b", "quantize"), (r"\b([A-Z][a-z]+(?:[A-Z][a-z]+)*)\(\)", lambda m: snake(m[1]) + "()"),
        (r"\bk([A-Z][a-z]\w*)\b", lambda m: f"'{snake(m[1])}'"),
        (r"\bd_final, final\b", "dstate, state"),
        (r"\bd_final\b", "dstate"), (r"\bd_(o|u|lse)(?![a-z])", lambda m: "d" + m[1]),
        (r"\bi8\b", "int8"), (r"`true`|\btrue\b", "True"), (r"`false`|\bfalse\b", "False"),
    )
    for pattern, word in rules:
        text = re.sub(pattern, word if callable(word) else lambda m: in_place_of(m[0], word), text)
    return text


def in_place_of(old, new):
    """New words, on two lines where the old ones were."""
    return "\n".join(new.rsplit(" ", 1)) if "\n" in old and " " in new else new


def camel(stem):
    return "".join(word.capitalize() for word in stem.split("_"))


def literal(text):
    return json.dumps(text)


def main():
    output, path = map(Path, sys.argv[1:])
    header = Header(path)
    lines = [f"// Docstrings of {path.name}, generated from its comments by tools/docstrings.py.", "#pragma once", "",
             '#include "python/docstring.h"', "", f"namespace {header.namespace}::doc {{"]
    lines += [f'inline constexpr char k{name}[] = R"doc({in_python(text, header.namespace)})doc";'
              for name, text in header.found.items()]
    fields = [f"    {{{literal(name)}, {literal(in_python(text, header.namespace))}}},"
              for name, text in header.fields().items()]
    table = f"k{camel(path.stem)}Fields"
    lines += [f"inline constexpr heed::python::Said {table}[] = {{", *(fields or ['    {"", ""},']), "};"]
    if "Forward" in header.found:
        step = "kStep" if "Step" in header.found else '""'
        backward = "kBackward" if "Backward" in header.found else '""'
        lines.append(f"inline constexpr heed::python::Docs kDocs = {{kForward, {backward}, {step}, {table}}};")
    lines += [f"}}  // namespace {header.namespace}::doc", ""]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n".join(lines), encoding="ascii")


if __name__ == "__main__":
    main()
