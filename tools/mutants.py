#!/usr/bin/env python3
"""Mutation test: small mistakes, planted in a copy of the tree and made one at a time, which some test should notice.

Usage: mutants.py [--seed N]... [--count N] [--files GLOB]... [--only NAME]... [--list] [--limit S] [--jobs N] [--dir D]

tools/mutations.py makes the mutants; no text of the code is stored. A seed draws them, the same ones on every machine
for the same tree. All are compiled at once, in a build for one SIMD target alone, AVX2 on x86-64, and an environment
variable chooses one of them (tools/mutant.h). A run of every test without a mutant says which mutants each
chunk of the tests reaches. Each mutant then meets the chunks that reach it, the quickest first, until one fails. One
that is reached by none survives. A mutant of what the compiler alone evaluates cannot be chosen at run time, and is
counted apart.
Survivors are printed with their diff. Some of them change speed alone, so the exit status is 1 only where something
does not run.
"""
import argparse
import difflib
import fnmatch
import functools
import hashlib
import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from mutations import edits, parsed, planted

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv/bin/python"
PYTHON = VENV if VENV.exists() else Path(sys.executable)
FILES = ("heed/core", "heed/cuda", "heed/engines", "heed/io", "heed/layers", "heed/mechanism", "heed/model", "heed/ops",
         "heed/patterns", "heed/simd", "heed/state", "python")
# Tests, what they are made of, and what they compare with.
LEFT_ALONE = re.compile(r".*(_test|_case|_reference|_rounding)(_internal)?\.\w+|.*/(tests|cases|reference)/.*")
REACHED_BYTES = 1 << 14  # kHeedMutants of tools/mutant.h
TESTS_OF_CHUNK = 10
NOT_HERE = {
    "CostTest.AWindowCostsWhatAWindowContains",  # measures time
    # Tests that need AMX, which the only target of this build does not have.
    "KernelsTest.EveryDTypeButF64GetsMatrixTilesWhereTheseAre",
    "KernelsTest.Int8KeysGetProductsOfBytesWhereTheCPUHasThem",
    "KernelsTest.TheTargetIsTheOneThatTheContextAllows",
    "Units/Tiles.AreTaken/Emulated",
    "Units/Tiles.HighPrecisionIsThreeProductsAndOtherwiseNothing/Emulated"}


class MutantError(Exception):
    """The tree or the machine is not as it should be."""


def tracked_files():
    """Tracked and new files, relative to the root."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"],
                            capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        names = listed.stdout.splitlines()
    else:  # an archive of the sources
        names = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if not re.match(
            r"(build|\..*)/", path.relative_to(ROOT).as_posix())]
    return sorted(name for name in set(names) if (ROOT / name).is_file() and "__pycache__" not in name)


class Mutant:
    """One mistake. Its number chooses it at run time."""

    def __init__(self, name, file, text, edit):
        self.name, self.file, self.clean, self.edit, self.number = name, file, text, edit, 0
        line = text[text.rfind("\n", 0, edit.begin) + 1:edit.end]
        # A function of tools/mutant.h; None where neither of the two compiles.
        self.chooser = "HeedMutantAtRunTime" if re.search(r"\b(constexpr|enum|case)\b", line) else "HeedMutant"
        if self.is_python:
            self.chooser = "heed_mutant"

    def diff(self):
        before, after = self.clean.splitlines(keepends=True), self.edit.apply(self.clean).splitlines(keepends=True)
        return "".join(difflib.unified_diff(before, after, self.file, self.name, n=2))

    @property
    def is_python(self):
        return self.file.endswith(".py")

    def choice(self, code):
        return code.choice(self.edit, f"{self.chooser}({self.number})") if self.chooser else None

    def retreat(self, of_constant):
        self.chooser = "HeedMutantAtRunTime" if of_constant and self.chooser == "HeedMutant" else None


def mutants_of(patterns):
    """Every mutant of the files that a glob or a folder names, by name."""
    mutants = {}
    for file in tracked_files():
        if not file.endswith((".cc", ".h", ".py")) or LEFT_ALONE.fullmatch(file):
            continue
        if any(fnmatch.fnmatch(file, pattern) or file.startswith(pattern.rstrip("/") + "/") for pattern in patterns):
            text = (ROOT / file).read_text()
            for edit in edits(file, text):
                name = name_of(file, text, edit)
                mutants[name] = functools.partial(Mutant, name, file, text, edit)
    return mutants


def name_of(path, text, edit):
    """The name of a mutant: its place and its rule."""
    line = text.count("\n", 0, edit.begin) + 1
    return f"{path}:{line}:{edit.begin - text.rfind(chr(10), 0, edit.begin)}:{edit.rule}"


def draw(names, seed, count):
    """Some of the names, each rule in turn, by a hash: the same on every machine, and of every Python."""
    def key(name):
        return hashlib.sha256(f"{seed} {name}".encode()).digest()

    rules = defaultdict(list)
    for name in sorted(names, key=key):
        rules[name.rpartition(":")[2]].append(name)
    order = sorted(rules, key=key)
    turns = zip_longest(*(rules[rule] for rule in order))
    return [name for turn in turns for name in turn if name][:count]


def plant(mutants):
    """The text of one file with its mutants, of C++ without a line more."""
    file, text, choices = mutants[0].file, mutants[0].clean, []
    code = parsed(file, text)
    for mutant in mutants:
        choice = mutant.choice(code)
        if choice and not any(a < choice[0] < b < choice[1] or choice[0] < a < choice[1] < b for a, b, _, _ in choices):
            choices.append(choice)
        else:
            mutant.chooser = None
    # The first blank line of C++ is before or between the includes.
    both = planted(text, choices)
    return both if file.endswith(".py") else re.sub(r"\n\n", '\n#include "tools/mutant.h"\n', both, count=1)


def blamed(output, mutants):
    """(mutant, of a constant) for those without which the output of a failed build would have fewer errors."""
    of_file = {}
    for mutant in mutants:
        if not mutant.is_python and (choice := mutant.choice(parsed(mutant.file, mutant.clean))):
            lines = [mutant.clean.count("\n", 0, offset) + 1 for offset in choice[:2]]
            of_file.setdefault(mutant.file, []).append((range(lines[0], lines[1] + 1), mutant))
    found = {}
    for section in output.split("\nFAILED: ")[1:]:
        places = [(re.sub(r"^(\.\./)*(.*/tree/)?", "", file), int(line), message) for file, line, message in
                  re.findall(r"^([^\s:]+):(\d+)(?::\d+)?:(.*)", section, re.M)]
        errors = [place for place in places if re.match(r" (fatal )?error:", place[2])]
        # Notes name the place where an error in another file comes from.
        for some in (errors, places):
            hits = {mutant: any(re.search("constant|constexpr", message) for _, _, message in errors)
                    for file, line, _ in some for lines, mutant in of_file.get(file, ()) if line in lines}
            if hits:
                break
        found.update(hits)
    return found


class Chunk(NamedTuple):
    """Tests that one process runs: of a program, or a file of python/tests."""
    program: str
    tests: tuple


class Bench:
    """A copy of the tree in which mutants are planted, and its build."""

    def __init__(self, folder, jobs, mutants):
        self.tree, self.folder, self.jobs, self.mutants = folder / "tree", folder, jobs, mutants
        self.build = self.tree / "build/release"  # where the Python tests look for programs
        self.package, self.seconds, self.reached, self.failures = folder / "package", {}, {}, []
        with_python = any(mutant.file.startswith("python/") or "_py." in mutant.file for mutant in mutants)
        self.write(tracked_files())
        flags = "-O1 -DNDEBUG -w"
        if platform.machine() in ("x86_64", "AMD64"):
            # AVX2, the target of most CPUs, which leaves AMX and other targets unreached. Highway requires AES as well.
            flags += " -march=haswell -maes -DHEED_ONE_TARGET=1"
        self.run(["cmake", "-G", "Ninja", "-S", self.tree, "-B", self.build, "-DCMAKE_BUILD_TYPE=Release",
                  f"-DCMAKE_CXX_FLAGS_RELEASE={flags}", "-DBUILD_SHARED_LIBS=OFF",
                  "-DHEED_BUILD_BENCHMARKS=OFF", f"-DCMAKE_PREFIX_PATH={ROOT}/.cache/highway/install",
                  f"-DHEED_BUILD_PYTHON={'ON' if with_python else 'OFF'}", f"-DPython_EXECUTABLE={PYTHON}"])
        self.programs = ["heed_op_tests", *sorted(file.stem for file in (self.tree / "tests").glob("*_test.cc"))]
        self.targets, self.python_tests = self.programs, []
        if with_python:
            self.targets = [*self.programs, "_core", "_core_stub", "heed_cli", "heed_cuda_emulated"]
            self.python_tests = sorted(f"python/tests/{file.name}" for file in (
                self.tree / "python/tests").glob("test_*.py"))

    def write(self, names):
        """The files of the copy, each where it differs alone, so that a kept build folder stays fresh."""
        for name in names:
            source, to = ROOT / name, self.tree / name
            some = [mutant for mutant in self.mutants if mutant.file == name and not mutant.is_python]
            content = plant(some).encode() if some else source.read_bytes()
            if not to.exists() or to.read_bytes() != content:
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, to)
                to.write_bytes(content)
        self.digest = hashlib.sha256("".join(mutant.name for mutant in self.mutants).encode())
        for file in sorted(f for f in self.tree.rglob("*") if f.is_file()):
            name = file.relative_to(self.tree).as_posix()
            if not name.startswith("build/"):
                self.digest.update(name.encode() + file.read_bytes()) if (ROOT / name).is_file() else file.unlink()

    @staticmethod
    def run(command):
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise MutantError(f"{command[0]} failed:\n{(done.stdout + done.stderr)[-3000:]}")
        return done.stdout

    def compile(self):
        """Compiles everything, but for the mutants that do not compile."""
        # Objects of the files with mutants come first, by Ninja's names for them.
        own = sorted({f"{self.tree / mutant.file}^" for mutant in self.mutants if mutant.file.endswith(".cc")})
        for targets in (own, self.targets):
            command = ["cmake", "--build", self.build, "-j", self.jobs, "--target", *targets, "--", "-k", "0"]
            while targets and (done := subprocess.run([str(c) for c in command], capture_output=True, text=True,
                                                      check=False)).returncode:
                (self.folder / "errors.txt").write_text(done.stdout)
                if not (found := blamed(done.stdout, self.mutants)):
                    raise MutantError(f"the copy does not compile:\n{done.stdout[-3000:]}")
                for mutant, of_constant in found.items():
                    mutant.retreat(of_constant)
                print(f"{len(found)} mutants do not compile, or not as they were planted", flush=True)
                self.write(sorted({mutant.file for mutant in found}))

    # Tests.

    def chunks(self):
        found = [Chunk("pytest", (file,)) for file in self.python_tests]
        for program in self.programs:
            listed = self.run([self.build / "bin" / program, "--gtest_list_tests"])
            for suite, names in re.findall(r"^(\S+\.)(?: +#.*)?\n((?: +\S.*\n)+)", listed, re.M):
                tests = [suite + name for name in re.findall(r"^ +(\S+)", names, re.M)]
                tests = [test for test in tests if test not in NOT_HERE and "DISABLED_" not in test]
                found += [Chunk(program, tuple(tests[k:k + TESTS_OF_CHUNK]))
                          for k in range(0, len(tests), TESTS_OF_CHUNK)]
        return found

    def fails(self, chunk, timeout, **more):
        """The failing test, or None. Tests run as in scripts/test, whatever --deep sets for others."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEED_")}
        environment.update({f"HEED_{name}": str(value) for name, value in more.items()})
        if chunk.program == "pytest":
            command = [PYTHON, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *chunk.tests]
            environment.update(PYTHONPATH=str(self.package), HEED_BIN=str(self.build / "bin/heed"),
                               OMP_WAIT_POLICY="passive")
            failure, successes = r"^(?:FAILED|ERROR) (\S+)", (0, 5)  # 5: nothing there to run
        else:
            command = [self.build / "bin" / chunk.program, "--gtest_brief=1", "--gtest_fail_fast"]
            environment["GTEST_FILTER"] = ":".join(chunk.tests)
            failure, successes = r"^\[  FAILED  \] ([^\s,]+)", (0,)
        with subprocess.Popen([str(c) for c in command], cwd=self.tree, env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True) as process:
            try:
                output, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return f"{chunk.program}: no end after {timeout:.0f} s, {chunk.tests[0]}"
        if failed := re.search(failure, output, re.M):
            return f"{chunk.program}: {failed.group(1)}"
        if process.returncode < 0:
            return f"{chunk.program}: {signal.Signals(-process.returncode).name}, {chunk.tests[0]}"
        if process.returncode not in successes:
            return f"{chunk.program}: exit {process.returncode}, {output.strip().rpartition(chr(10))[2]}"
        return None

    def make_package(self):
        """heed as it would be installed, with the mutants of Python."""
        shutil.rmtree(self.package, ignore_errors=True)
        shutil.copytree(self.tree / "python/heed", self.package / "heed", ignore=shutil.ignore_patterns("__pycache__"))
        for file in [*self.build.glob("_core*.so"), *self.build.glob("_core*.pyi")]:
            shutil.copy(file, self.package / "heed")
        if (self.build / "torch.pyi").exists():
            shutil.copy(self.build / "torch.pyi", self.package / "heed/torch/__init__.pyi")
        shutil.copy(ROOT / "tools/mutant.py", self.package / "sitecustomize.py")
        for file in {mutant.file for mutant in self.mutants if mutant.is_python}:
            text = plant([mutant for mutant in self.mutants if mutant.file == file])
            (self.package / file.removeprefix("python/")).write_text(text)

    def measure(self):
        """Runs the tests without a mutant: the seconds of each chunk, and the mutants that it reaches.

        Tests of Python that fail, as those do that compile the graph of a function with mutants, are left out of their
        chunk; other chunks that fail are left out whole.
        """
        kept = self.folder / f"reached-{self.digest.hexdigest()[:16]}.json"
        if kept.exists():
            for program, tests, seconds, reached in json.loads(kept.read_text()):
                self.seconds[Chunk(program, tuple(tests))] = seconds
                self.reached[Chunk(program, tuple(tests))] = set(reached)
            return

        def measure(chunk):
            with tempfile.NamedTemporaryFile() as file:
                file.truncate(REACHED_BYTES)
                begin = time.monotonic()
                failure = self.fails(chunk, None, MUTANTS_REACHED=file.name)
                seconds, content = time.monotonic() - begin, Path(file.name).read_bytes()
            if failure and (test := re.match(r"pytest: ([^\s\[]+::[^\s\[]+)", failure)):
                print(f"fails without a mutant: {failure}", flush=True)
                self.failures.append(failure)
                return measure(Chunk("pytest", (*chunk.tests, f"--deselect={test[1]}")))
            return chunk, failure, seconds, {k for k, byte in enumerate(content) if byte}

        chunks = self.chunks()
        with ThreadPoolExecutor(self.jobs) as pool:
            for chunk, failure, seconds, reached in pool.map(measure, chunks):
                if failure:
                    print(f"fails without a mutant: {failure}", flush=True)
                    self.failures.append(failure)
                else:
                    self.seconds[chunk], self.reached[chunk] = seconds, reached
        kept.write_text(json.dumps([[*c, self.seconds[c], sorted(self.reached[c])] for c in self.seconds]))

    def try_mutant(self, mutant, limit):
        """The seconds and the outcome of a mutant, and what is said of it."""
        begin, spent = time.monotonic(), 0
        chunks = sorted((c for c in self.seconds if mutant.number in self.reached[c]), key=self.seconds.get)
        if not mutant.chooser:
            return 0, "not compiled", ""
        if not chunks:
            return 0, *(("constant", "") if mutant.chooser == "HeedMutantAtRunTime" else ("survived", "not reached"))
        for k, chunk in enumerate(chunks):
            if limit and spent > limit:
                return time.monotonic() - begin, "survived", f"the first {k} of {len(chunks)} chunks that reach it"
            spent += self.seconds[chunk]
            if failure := self.fails(chunk, 30 + 5 * self.seconds[chunk], MUTANT=mutant.number):
                return time.monotonic() - begin, "killed", failure
        return time.monotonic() - begin, "survived", f"reached by {len(chunks)} chunks"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", action="append", help="what draws the mutants (again for more); by default 1")
    parser.add_argument("--count", type=int, default=20, help="how many are drawn by each seed")
    parser.add_argument("--files", action="append", metavar="GLOB",
                        help=f"files or folders (again for more); by default {' '.join(FILES)}")
    parser.add_argument("--only", action="append", metavar="NAME", help="run this mutant (may be given again)")
    parser.add_argument("--list", action="store_true", help="print the diffs of those drawn and no more")
    parser.add_argument("--limit", type=float, metavar="S", help="stop after tests that take S s without a mutant")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers, and mutants, at once")
    parser.add_argument("--dir", type=Path, default=ROOT / "build/mutants", help="folder of the copy and its build")
    args = parser.parse_args()
    patterns = args.files or [name.partition(":")[0] for name in args.only or ()] or FILES
    makers = mutants_of(patterns)
    if unknown := set(args.only or ()) - makers.keys():
        parser.error(f"no mutant {', '.join(sorted(unknown))}; --list shows some")
    names = args.only or dict.fromkeys(name for seed in args.seed or ["1"] for name in draw(makers, seed, args.count))
    mutants = [makers[name]() for name in names]
    if not 0 < len(mutants) < REACHED_BYTES:
        parser.error(f"{len(mutants)} mutants in {' '.join(patterns)}")
    if args.list:
        print("".join(mutant.diff() for mutant in mutants), end="")
        return

    begin = time.monotonic()
    for number, mutant in enumerate(mutants, 1):
        mutant.number = number
    bench = Bench(args.dir.resolve(), args.jobs, mutants)
    bench.compile()
    print(f"{len(mutants)} of {len(makers)} mutants, compiled after {time.monotonic() - begin:.0f} s", flush=True)
    # Tests inherit the limit: a mutant may allocate without end.
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    if bench.python_tests:
        bench.make_package()
    bench.measure()
    print(f"{len(bench.seconds)} chunks of tests, which take {sum(bench.seconds.values()):.0f} s, ran after "
          f"{time.monotonic() - begin:.0f} s", flush=True)
    outcomes, survivors = Counter(), []
    with ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(bench.try_mutant, mutant, args.limit): mutant for mutant in mutants}
        for future in as_completed(running):
            mutant, (seconds, outcome, by) = running[future], future.result()
            outcomes[outcome] += 1
            survivors += [(mutant, by)] if outcome == "survived" else []
            print(f"{seconds:5.0f} s  {outcome:12} {mutant.name}  {by}", flush=True)
    for mutant, by in survivors:
        print(f"\nsurvivor {mutant.name}, {by}\n{mutant.diff()}", end="")
    print(f"\n{len(mutants)} mutants in {time.monotonic() - begin:.0f} s: {outcomes['killed']} killed, "
          f"{outcomes['survived']} survived, {outcomes['constant']} of constants, which are not chosen at run time, "
          f"{outcomes['not compiled']} did not compile")
    if bench.failures:
        raise MutantError(f"tests that fail without a mutant were left out: {', '.join(bench.failures)}")


if __name__ == "__main__":
    try:
        main()
    except MutantError as problem:
        sys.exit(f"mutants: {problem}")
