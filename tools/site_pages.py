#!/usr/bin/env python3
"""Writes the sources of the documentation site: docs/ as it is, a page per public header, the command line's help.

Usage: site_pages.py OUTPUT [PROGRAM]. A header is public if heed/heed.h includes it, by name or as a mechanism's. The
page of a header has its opening comment, the Python functions whose docstrings repeat its text, every declaration with
its comment and, where the header's folder is a mechanism's own, the README.md beside it. In a page of docs/,
`<!-- help VERB -->` becomes the output of `PROGRAM VERB --help`, and `<!-- mechanisms -->` a table of all mechanisms:
equations from their headers, state and cost from `PROGRAM list`, speed from RESULTS, empty where that has none. Links
to files that have no page become plain text.
"""
import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

from docstrings import NAMESPACE, blocks, uncomment

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/crossover.json"  # written by `scripts/bench crossover --json`
INCLUDE = re.compile(r'^#include "(heed/[^"]+)"', re.M)
FENCE = re.compile(r"^(```.*?^```$)", re.M | re.S)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)]*)?\)")
DECLARED = (re.compile(r"^(?:template <.*>\n)?((?:struct|class|enum class) (?:HEED_API )?\w+)", re.M),
            re.compile(r"^(?:HEED_API|inline|constexpr) [\w:<>,&* ]*?\b(\w+)\(", re.M),
            re.compile(r"^(?:inline )?constexpr [\w:<>]+ (\w+) =", re.M))


def escape(text):
    return re.sub(r"([\\`*_{}\[\]<>#$~|])", r"\\\1", text)


def prose(comment):
    """A comment as Markdown: what is indented stays as it is written, the rest flows."""
    parts, kind = [], None
    for line in comment.split("\n"):
        new = "text" if line.startswith("  ") else "blank" if not line.strip() else "flow"
        if new == "blank" and kind == "text":
            parts[-1][1].append("")
            continue
        if new != kind or new == "blank":
            parts.append((new, []))
        parts[-1][1].append(line)
        kind = new
    written = []
    for kind, lines in parts:
        if kind == "text":
            written.append("```text\n" + textwrap.dedent("\n".join(lines)).rstrip() + "\n```")
        elif kind == "flow":
            written.append(escape("\n".join(lines)))
    return "\n\n".join(written)


def title_of(code):
    """The title of a declaration: `Forward`, `struct Options`."""
    for pattern in DECLARED:
        if names := pattern.findall(code):
            return ", ".join(dict.fromkeys(n.replace("HEED_API ", "") for n in names))
    return ""


def parse(header):
    """(opening comment, [(title, comment, code)]) of a header."""
    lines = header.read_text(encoding="ascii").split("\n")
    start = next(i for i, line in enumerate(lines) if not line.startswith("//"))
    begin = next((i for i, line in enumerate(lines) if NAMESPACE.match(line)), None)
    if begin is None:
        return uncomment(lines[:start]), []
    end = next(i for i, line in enumerate(lines)
               if line.startswith(f"}}  // namespace {NAMESPACE.match(lines[begin])[1]}"))
    declarations = []
    for comment, code in blocks(lines[begin + 1:end]):
        title = title_of(code)
        if declarations and not comment and (not title or title in declarations[-1][0]):
            declarations[-1][2] += "\n" + code
        elif code:
            declarations.append([title, comment, code])
    return uncomment(lines[:start]), declarations


def python_signature(name, node):
    """A function of the stub as it is called."""
    for argument in [*node.args.args, *node.args.kwonlyargs]:
        argument.annotation = None
    node.args.args = [argument for argument in node.args.args if argument.arg != "self"]
    node.args.kwarg = node.args.kwarg and ast.arg(node.args.kwarg.arg)
    signature = f"{name}({ast.unparse(node.args)})"
    return "\n".join(textwrap.wrap(signature, 88, subsequent_indent="    ", break_long_words=False))


def python_functions():
    """{name: (signature, docstring)} of the installed package's stub; of a class with the signatures of its methods."""
    spec = importlib.util.find_spec("heed")
    stub = Path(spec.origin).parent / "_core.pyi"
    functions = {}
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name not in functions and not node.name.startswith("_"):
            functions[node.name] = python_signature(f"heed.{node.name}", node), ast.get_docstring(node) or ""
        if isinstance(node, ast.ClassDef):
            methods = {}
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and (method.name == "__init__" or method.name[0] != "_"):
                    name = f"heed.{node.name}" + ("" if method.name == "__init__" else f".{method.name}")
                    is_property = any(isinstance(x, ast.Name) and x.id == "property" for x in method.decorator_list)
                    methods.setdefault(name, name if is_property else python_signature(name, method))
            if methods:
                functions[node.name] = "\n".join(methods.values()), ast.get_docstring(node) or ""
    return functions


def public_headers():
    """The headers that heed/heed.h includes: by name, and those of all mechanisms, whose list the build generates."""
    named = [ROOT / name for name in INCLUDE.findall((ROOT / "heed/heed.h").read_text())]
    mechanisms = [header for folder in mechanism_folders().values() for header in sorted(folder.glob("*.h"))
                  if not re.search(r"(_(internal|case|py)|-inl)\.h$", header.name)]
    return [header for header in named if header.exists()] + mechanisms


def mechanism_folders():
    """{name: folder} of the table of contents."""
    folders = re.findall(r"^heed_add_op\((\S+)\)", (ROOT / "heed/ops/CMakeLists.txt").read_text(), re.M)
    return {folder.rsplit("/", 1)[1]: ROOT / "heed/ops" / folder for folder in folders}


def equation(comment):
    """The first indented lines of a header's opening, as a table's cell; what stands far to the right is no code."""
    block = re.search(r"(?:^  +\S.*\n?)+", comment, re.M)
    lines = []
    for line in block[0].rstrip().split("\n") if block else []:
        code, *notes = re.split(r" {3,}", line.strip())
        lines.append("".join([f"`{code}`".replace("|", r"\|"), *(f"&emsp;{escape(note)}" for note in notes)]))
    return "<br>".join(lines)


def nanoseconds(seconds):
    return f"{1e9 * seconds:,.0f}" if seconds * 1e9 >= 10 else f"{1e9 * seconds:.1f}"


def mechanism_table(listed, equations, results):
    """The table of `heed list --json`'s rows, and a line that says where its figures are from."""
    measured = {row["mechanism"]: row for row in results.get("rows", [])}
    lines = ["| mechanism | equation | state | flops | ns: forward, backward, one token | cheaper from |",
             "|---|---|---|---|---|---|"]
    for row in listed:
        cells = measured.get(row["name"], {})
        passes = [cells.get(name) or {} for name in ("forward", "backward", "step")]
        speed = [nanoseconds(p["seconds_per_token"]) if "seconds_per_token" in p else "-" for p in passes]
        begins = [str(p.get("from") or "-") for p in passes]
        lines.append("| " + " | ".join([
            f"[{row['name']}](mechanisms/{row['name']}.md)", equations[row["name"]], escape(row["state"]),
            escape(row["flops"]), ", ".join(speed) if cells else "", ", ".join(begins) if set(begins) != {"-"} else ""])
                     + " |")
    if not results:
        return ("\n".join(lines) + "\n\nNo speed has been recorded for this version: `scripts/bench crossover` "
                "measures it.")
    return "\n".join(lines) + (
        f"\n\nMeasured on {escape(results['cpu'])} by `{results['command']}`: {results['dtype']}, "
        f"{results['channels']} channels, {results['heads']} heads, "
        f"{results['threads']} thread{'s' if results['threads'] > 1 else ''}; nanoseconds per token and head at "
        f"{results['tokens']} tokens. *Cheaper from*: the tokens from which each of the three takes less time than "
        "heed's own exact attention, causal, of the same sizes.")


def fold(text):
    return " ".join(text.split())


class Site:
    def __init__(self, output, program):
        self.output, self.program = output, program
        self.headers = public_headers()
        self.pages = {ROOT / "heed/heed.h": "index.md"}  # file in the repository -> page
        for page in (ROOT / "docs").rglob("*.md"):
            self.pages[page] = str(page.relative_to(ROOT / "docs"))
        for header in self.headers:
            self.pages[header] = f"{self.group(header)}/{header.stem}.md"
            if self.readme(header):
                self.pages[self.readme(header)] = self.pages[header]
        self.python = python_functions()
        self.shown = set()  # Python functions that have a page

    @staticmethod
    def group(header):
        folder = header.relative_to(ROOT).parts[1:]
        if folder[0] != "ops":
            return "base"
        return "parts" if folder[1] in ("positions", "mechanism") else "mechanisms"

    @staticmethod
    def readme(header):
        readme = header.parent / "README.md"
        return readme if header.parent.name == header.stem and readme.exists() else None

    def link(self, text, origin, page):
        """Relative links of a file in the repository, as links between pages."""
        def one(match):
            label, target, anchor = match.groups()
            if re.match(r"\w+:", target):
                return match[0]
            other = self.pages.get((origin.parent / target).resolve())
            if other is None:
                return label
            relative = os.path.relpath(other, Path(page).parent)
            return f"[{label}]({relative}{anchor or ''})"
        parts = FENCE.split(text)
        return "".join(part if part.startswith("```") else LINK.sub(one, part) for part in parts)

    def help(self, text):
        def one(match):
            words = [self.program, *match[1].split(), "--help"]
            result = subprocess.run(words, check=True, capture_output=True, text=True)
            return "```text\n" + result.stdout.rstrip() + "\n```"
        return re.sub(r"<!-- help ?([a-z ]*?) ?-->", one, text)

    def mechanisms(self, text):
        if "<!-- mechanisms -->" not in text:
            return text
        listed = json.loads(subprocess.run([self.program, "list", "--json"], check=True, capture_output=True, text=True)
                            .stdout)
        equations = {name: equation(parse(folder / f"{name}.h")[0]) for name, folder in mechanism_folders().items()}
        results = json.loads(RESULTS.read_text())["crossover"] if RESULTS.exists() else {}
        return text.replace("<!-- mechanisms -->", mechanism_table(listed, equations, results))

    def header_page(self, header):
        page = self.pages[header]
        opening, declarations = parse(header)
        texts = [fold(opening)[:200]] + [fold(comment)[:200] for _, comment, _ in declarations if len(comment) > 60]
        own = [name for name, (_, doc) in self.python.items() if any(text in fold(doc) for text in texts)]
        self.shown.update(own)
        lines = [f"# {header.stem}", prose(opening), f'```cpp\n#include "{header.relative_to(ROOT)}"\n```']
        if own:
            lines += ["## From Python", "```python\n" + "\n".join(self.python[name][0] for name in own) + "\n```"]
        for title, comment, code in declarations:
            lines += [f"## {title}" if title else "", prose(comment), f"```cpp\n{code.replace('HEED_API ', '')}\n```"]
        if readme := self.readme(header):
            text = self.link(readme.read_text(), readme, page)
            parts = FENCE.split(text)  # headings go one level down, as the page has a title
            lines.append("".join(p if p.startswith("```") else re.sub(r"^#", "##", p, flags=re.M) for p in parts))
        return "\n\n".join(filter(None, lines)) + "\n"

    def write(self):
        shutil.rmtree(self.output, ignore_errors=True)
        shutil.copytree(ROOT / "docs", self.output, ignore=shutil.ignore_patterns("_build"))
        for header in self.headers:
            path = self.output / self.pages[header]
            path.parent.mkdir(exist_ok=True)
            path.write_text(self.header_page(header))
        for source in (ROOT / "docs").rglob("*.md"):
            page = str(source.relative_to(ROOT / "docs"))
            (self.output / page).write_text(self.mechanisms(self.help(self.link(source.read_text(), source, page))))
        rest = [signature for name, (signature, _) in sorted(self.python.items()) if name not in self.shown]
        with (self.output / "python.md").open("a") as file:
            file.write("\n```python\n" + "\n".join(rest) + "\n```\n")


def main():
    output = Path(sys.argv[1]).resolve()
    program = sys.argv[2] if len(sys.argv) > 2 else str(ROOT / "build/release/bin/heed")
    Site(output, program).write()


if __name__ == "__main__":
    main()
