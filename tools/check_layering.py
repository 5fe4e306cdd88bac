#!/usr/bin/env python3
"""The layering lint: permitted includes, banned calls in library files, and the form of every file.

Usage: check_layering.py [ROOT]. Prints one line per violation; exits 1 if there is one. The rules are
docs/architecture.md's.
"""
import re
import sys
from pathlib import Path

FOLDERS = ("heed", "cli", "python", "tests", "benchmarks", "examples", "tools")
MAX_LINES = 600
MAX_COLUMNS = 120

TOP = 8  # files that use all of the library
# First match wins. A suffix outranks the folder.
RANKS = [(re.compile(pattern), rank) for pattern, rank in (
    (r".*_(test|py)\.\w+$", TOP), (r".*_case\.\w+$", 6),
    (r"heed/core/", 0), (r"heed/(simd|io|cuda)/", 1),
    (r"heed/(engines|patterns|mechanism|ops/positions|ops/\w+/common)/", 2), (r"heed/state/", 3),
    (r"heed/ops/\w+/\w+/", 4),
    (r"heed/(layers|model|distributed)/", 5), (r"heed/heed\.h$", 5), (r"heed/(harness|advise)/", 6),
    (r"heed/pages/", 7), (r"(tests|cli|python|benchmarks|examples)/", TOP))]

INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]', re.M)
OP = re.compile(r"heed/ops/(?!positions/)(\w+/(?!common/)\w+)/")
# The one operation that others may include, and the others: they are calls of it and share its whole contract,
# options, their checks, its reference.
SHARED_OP, COMPOSED_OP = "exact/attention", re.compile(r"sparse/")
COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
OS_HEADER = re.compile(r"(sys|linux|mach|asm)/.*|(unistd|fcntl|pthread|sched|windows|cpuid|dlfcn|signal)\.h")
OF_SYSTEM = re.compile(r"heed/core/(cpu|os|os_posix|os_wasi|os_windows)\.")
CUDA_HEADER = re.compile(r"cuda\w*\.h|driver_types\.h")
OF_CUDA = re.compile(r"heed/cuda/|tests/cuda/|.*\.cu$")
MPI_HEADER, OF_MPI = "mpi.h", "heed/distributed/mpi.h"
STANDARD_HEADER = re.compile(r"[a-z_0-9]+")
TARGET_INCLUDE = re.compile(r'^#define\s+HWY_TARGET_INCLUDE\s+"([^"]*)"', re.M)
# References read nothing that kernels run with, so that an error in it is on one side alone.
OF_KERNELS = re.compile(r"\b(?:k?Definition|DefinitionOf|StateTensors|RangesOf)\b")
NAMESPACE = re.compile(r"^namespace ?([\w:]*) ?\{|^\}  // namespace", re.M)
TYPE = re.compile(r"^(?:template <[^;{]*>\s)?(?:struct|class|union) (\w+)(?: final)?(?: : [^;{]*)? \{", re.M)
VARIABLES = ("HEED_ISA", "HEED_DISTRIBUTED_CHECKS")
OF_CACHES = ("XDG_CACHE_HOME", "HOME")  # where the user's files are, which the program asks for
BANNED = (
    (re.compile(r"\b(?:printf|fprintf|vprintf|puts|fputs|putchar|perror)\s*\(|std::(?:cout|cerr|clog)\b|fmt::print\b"),
     "prints"),
    (re.compile(r"\b(?:abort|terminate|exit|_exit|quick_exit)\s*\(|\bHWY_(?:ASSERT|ABORT)\b"), "ends the process"),
)


def rank_of(path):
    return next((rank for pattern, rank in RANKS if pattern.match(path)), None)


def blank(match):
    """Comments and string contents vanish; line numbers stay."""
    return re.sub(r"[^\n]", " ", match.group())


def line_of(text, position):
    return text.count("\n", 0, position) + 1


def check_text(path, data):
    """Form, in every file: ASCII, a first line that says what the file is, a bounded length."""
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.isascii():
            yield number, "not ASCII"
        if len(line) > MAX_COLUMNS:
            yield number, f"longer than {MAX_COLUMNS} columns"
    first = lines[0].strip()
    if not first.startswith(b"//" if path.endswith((".h", ".cc", ".cu")) else (b"#", b'"""', b'r"""')):
        yield 1, "the first line is not a comment that says what the file is"
    if data.count(b"\n") > MAX_LINES:
        yield MAX_LINES + 1, f"longer than {MAX_LINES} lines"


def check_includes(path, text, code):
    """Ranks, ops that include ops, operating system headers, third parties in headers that users include."""
    rank, own_op = rank_of(path), OP.match(path)
    is_test = re.search(r"_test\.\w+$", path) or path.startswith("tests/")
    public = (rank is not None and rank <= 5 and path.endswith(".h") and not re.search(r"(_internal|-inl)\.h$", path)
              and re.match(r"heed/(core|io|ops|patterns)/|heed/heed\.h", path))
    for match in INCLUDE.finditer(text):
        if not code[match.start():match.end()].strip():
            continue  # commented out
        line, (quote, name) = line_of(text, match.start(2)), match.groups()
        other = rank_of(name)
        if rank is not None and other is not None and other > rank:
            yield line, f"rank {rank} includes {name} of rank {other}"
        other_op = OP.match(name)
        composed = own_op and other_op and other_op.group(1) == SHARED_OP and COMPOSED_OP.match(own_op.group(1))
        if own_op and other_op and own_op.group(1) != other_op.group(1) and not composed and not is_test:
            yield line, f"an operation includes another: {name}"
        if (path.startswith("heed/") and not is_test and OS_HEADER.fullmatch(name)
            and not OF_SYSTEM.match(path)):
            yield line, f"operating system header <{name}> outside heed/core/os.*"
        if CUDA_HEADER.fullmatch(name) and not OF_CUDA.match(path):
            yield line, f"CUDA header <{name}> outside heed/cuda/ and *.cu"
        if name == MPI_HEADER and path != OF_MPI:
            yield line, f"<mpi.h> outside {OF_MPI}: heed_distributed links no MPI"
        if path.startswith("heed/") and rank != TOP and re.match(r"nanobind/|pybind11/|Python\.h", name):
            yield line, f"{name}: only *_py.cc knows Python"
        foreign = not STANDARD_HEADER.fullmatch(name) if quote == "<" else not name.startswith("heed/")
        if public and foreign:
            yield line, f"third-party include {name} in a public header"


def check_bans(path, code):
    """The library never prints, never ends the process."""
    if not path.startswith("heed/") or rank_of(path) == TOP:
        return
    for pattern, what in BANNED:
        for match in pattern.finditer(code):
            yield line_of(code, match.start()), f"{what}: {match.group().strip()}"


def check_references(path, code):
    """A reference states its mathematics by itself."""
    if re.search(r"_(reference|rounding)(_internal)?\.\w+$", path):
        for match in OF_KERNELS.finditer(code):
            yield line_of(code, match.start()), f"a reference reads what kernels run with: {match.group()}"


def defined_types(path, text):
    """(line, name) of each type that a source file of the library defines, with its namespaces but anonymous ones."""
    if not path.startswith("heed/") or not path.endswith(".cc"):
        return
    marks = sorted([*NAMESPACE.finditer(text), *TYPE.finditer(text)], key=lambda match: match.start())
    namespaces = []
    for match in marks:
        if match.re is TYPE:
            if "" not in namespaces:
                yield line_of(text, match.start()), "::".join([*namespaces, match.group(1)])
        elif match.group(1) is not None:
            namespaces.append(match.group(1))
        elif namespaces:
            namespaces.pop()


def environment_reads(path, text, code):
    """(line, variable) of each getenv in the library."""
    if path.startswith("heed/") and rank_of(path) != TOP:
        for match in re.finditer(r"\bgetenv\s*\(", code):
            argument = re.match(r'\s*"([^"]*)"', text[match.end():])
            yield line_of(code, match.start()), argument.group(1) if argument else "?"


def check_tree(root):
    """All violations, as (path, line, what)."""
    reads, types = [], {}
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            path = file.relative_to(root).as_posix()
            if file.suffix not in (".h", ".cc", ".cu", ".py") or "__pycache__" in path:
                continue
            data = file.read_bytes()
            yield from ((path, *v) for v in check_text(path, data))
            if file.suffix == ".py":
                continue
            text = data.decode("utf-8", "replace")
            code = COMMENT_OR_STRING.sub(blank, text)
            # An include's name is a string too: look at it in text, at whether it counts in code.
            yield from ((path, *v) for v in check_includes(path, text, code))
            yield from ((path, *v) for v in check_bans(path, code))
            yield from ((path, *v) for v in check_references(path, code))
            for line, name in defined_types(path, text):
                if types.setdefault(name, path) != path:  # one definition: the linker would mix their functions
                    yield path, line, f"{name} is another type in {types[name]}"
            reads += [(path, *read) for read in environment_reads(path, text, code)]
            for match in TARGET_INCLUDE.finditer(text):
                if match.group(1) != path:
                    yield path, line_of(text, match.start()), f"HWY_TARGET_INCLUDE is {match.group(1)}, not this file"
    for path, line, variable in reads:
        if variable in OF_CACHES and OF_SYSTEM.match(path):
            continue
        if variable not in VARIABLES or path != next(p for p, _, v in reads if v == variable):
            yield path, line, f"reads the environment: {variable} ({' and '.join(VARIABLES)} may be read, in one file)"


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent)
    violations = list(check_tree(root))
    for path, line, what in violations:
        print(f"{path}:{line}: {what}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
