#!/usr/bin/env python3
"""Mutation test: small defects, planted one at a time in a copy of the tree, each of which some test must notice.

Usage: mutants.py [--list] [--only NAME]... [--jobs N] [--dir FOLDER]. Exits 1 if a mutant survives, does not apply or
does not compile. The defects are tools/mutants/*.txt. A mutant is:

    [name]
    file = path
    tests = program:filter program:filter    (GoogleTest filters, tried first; then everything)
            pytest:file.py pytest:file.py::test  (of python/tests, for defects of the Python package)
    why = what would be wrong
    --- the text that must occur exactly once in the file, on the lines below
    +++ what replaces it, on the lines below

with more pairs of --- and +++ where one edit is not enough. The copy is built without optimising much and for this
machine's best SIMD target alone; after each mutant the objects of the clean tree are put back, so that only what a
mutant touches is compiled.
"""
import argparse
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv/bin/python"
PYTHON = VENV if VENV.exists() else Path(sys.executable)
COPIED = ("CMakeLists.txt", "benchmarks", "cli", "cmake", "data", "docs", "examples", "heed", "heed.pc.in", "python", "tests", "tools")
TIMEOUT_SECONDS = 300  # of the tests that a mutant names; one that hangs is noticed too
TIMEOUT_OF_ALL_SECONDS = 1800  # of all tests of one program
NOT_HERE = "-" + ":".join((
    "CostTest.AWindowCostsWhatAWindowContains",  # measures time
    # These need matrix tiles, which the one target of this build does not have.
    "KernelsTest.EveryDTypeButF64GetsMatrixTilesWhereTheseAre",
    "KernelsTest.Int8KeysGetProductsOfBytesWhereTheCPUHasThem",
    "KernelsTest.TheTargetIsTheOneThatTheContextAllows"))


class MutantError(Exception):
    """A mutant or the tree is not as it should be."""


class CompileError(MutantError):
    """It does not compile."""


class Mutant:
    def __init__(self, name, where):
        self.name, self.where = name, where
        self.file, self.tests, self.why, self.edits = "", [], "", []

    def mutate(self, text):
        for old, new in self.edits:
            if text.count(old) != 1:
                raise MutantError(f"{self.name}: {self.file} has {text.count(old)} times, expected once:\n{old}")
            text = text.replace(old, new)
        return text


def parse(path):
    """The mutants of one file."""
    mutants, part = [], None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        where = f"{path.name}:{number}"
        if header := re.fullmatch(r"\[(\w+)\]", line):
            mutants.append(Mutant(header.group(1), where))
            part = None
        elif line == "---":
            mutants[-1].edits.append([[], []])
            part = mutants[-1].edits[-1][0]
        elif line == "+++":
            part = mutants[-1].edits[-1][1]
        elif part is not None:
            part.append(line)
        elif field := re.fullmatch(r"(file|tests|why) = (.*)", line):
            value = field.group(2)
            setattr(mutants[-1], field.group(1), value.split() if field.group(1) == "tests" else value)
        elif line and not line.startswith("#"):
            raise MutantError(f"{where}: what is this? {line}")
    for mutant in mutants:
        mutant.edits = [tuple("\n".join(lines).rstrip("\n") for lines in edit) for edit in mutant.edits]
        if not (mutant.file and mutant.tests and mutant.why and mutant.edits and all(edit[0] for edit in mutant.edits)):
            raise MutantError(f"{mutant.where}: {mutant.name} lacks a file, tests, why or an edit")
    return mutants


def all_mutants():
    mutants = [mutant for path in sorted((ROOT / "tools/mutants").glob("*.txt")) for mutant in parse(path)]
    names = [mutant.name for mutant in mutants]
    if twice := {name for name in names if names.count(name) > 1}:
        raise MutantError(f"names used twice: {', '.join(sorted(twice))}")
    return mutants


def same_file(a, b):
    return b.exists() and a.stat().st_size == b.stat().st_size and a.read_bytes() == b.read_bytes()


def copy_tree(to):
    """Tracked and new files, each only where it differs, so that a kept build folder stays fresh."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "--", *COPIED],
                            capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        names = set(listed.stdout.splitlines())
    else:  # an archive of the sources
        files = [f for top in COPIED for f in ([ROOT / top] if (ROOT / top).is_file() else (ROOT / top).rglob("*"))]
        names = {f.relative_to(ROOT).as_posix() for f in files if f.is_file()}
    names = {name for name in names if (ROOT / name).is_file() and "__pycache__" not in name}
    for name in names:
        if not same_file(ROOT / name, to / name):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    for file in [f for f in to.rglob("*") if f.is_file() and f.relative_to(to).as_posix() not in names]:
        file.unlink()


class Snapshot:
    """The files of a build folder, kept with their times, to return to."""

    def __init__(self, folder, keep):
        self.folder, self.keep = folder, keep
        shutil.rmtree(keep, ignore_errors=True)
        shutil.copytree(folder, keep, symlinks=True)
        self.stats = self._stats()

    def _stats(self):
        stats = {}
        for path, _, names in os.walk(self.folder):
            for name in names:
                stat = os.lstat(os.path.join(path, name))
                stats[os.path.relpath(os.path.join(path, name), self.folder)] = (stat.st_size, stat.st_mtime_ns)
        return stats

    def restore(self):
        now = self._stats()
        for name in now.keys() - self.stats.keys():
            (self.folder / name).unlink()
        for name, stat in self.stats.items():
            if now.get(name) != stat:
                shutil.copy2(self.keep / name, self.folder / name, follow_symlinks=False)


class Bench:
    """A copy of the tree with its build."""

    def __init__(self, folder, jobs, with_python):
        self.tree, self.build, self.jobs = folder / "tree", folder / "build", jobs
        self.tree.mkdir(parents=True, exist_ok=True)
        copy_tree(self.tree)
        flags = "-O1 -DNDEBUG" + (" -march=native" if platform.machine() in ("x86_64", "AMD64") else "")
        self._run(["cmake", "-G", "Ninja", "-S", self.tree, "-B", self.build, "-DCMAKE_BUILD_TYPE=Release",
                   f"-DCMAKE_CXX_FLAGS_RELEASE={flags}", "-DBUILD_SHARED_LIBS=OFF",
                   "-DHEED_BUILD_BENCHMARKS=OFF", f"-DCMAKE_PREFIX_PATH={ROOT}/.cache/highway/install",
                   f"-DHEED_BUILD_PYTHON={'ON' if with_python else 'OFF'}", f"-DPython_EXECUTABLE={PYTHON}"])
        # The quick ones first.
        programs = [f.stem for f in (self.tree / "tests").glob("*_test.cc")]
        first = ["semantics_test", "heed_op_tests", "contract_test", "cost_test"]
        self.programs = [p for p in first if p == "heed_op_tests" or p in programs]
        self.programs += sorted(p for p in programs if p not in first)

    @staticmethod
    def _run(command):
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = (done.stdout + done.stderr).splitlines()
            errors = [line for line in lines if re.search(r"error|assert", line, re.I)] or lines[-30:]
            raise CompileError(f"{command[0]} failed:\n" + "\n".join(errors[:10]))

    def compile(self, *targets):
        names = {"pytest": ["_core", "heed_cli"]}
        targets = [name for target in targets for name in names.get(target, [target])]
        self._run(["cmake", "--build", self.build, "-j", self.jobs, "--target", *targets])

    def killer(self, program, test_filter, timeout=TIMEOUT_SECONDS):
        """What fails in a program, or None. A filter that names no test is an error."""
        if program == "pytest":
            return self.failure_in_python(test_filter)
        command = [str(self.build / "bin" / program), f"--gtest_filter={test_filter}", "--gtest_brief=1",
                   "--gtest_fail_fast", "--gtest_catch_exceptions=1"]
        seeds = {"HEED_TEST_SEEDS": "2000"}  # more than scripts/test has
        with subprocess.Popen(command, cwd=self.tree, env={**seeds, **os.environ}, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True) as process:
            try:
                output, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return f"{program}: no end after {timeout} s"
        if failed := re.search(r"^\[  FAILED  \] ([^\s,]+)", output, re.M):
            return f"{program}: {failed.group(1)}"
        if process.returncode != 0:
            return f"{program}: exit {process.returncode}" + (" (crash)" if process.returncode < 0 else "")
        if re.search(r"^\[=+\] 0 tests", output, re.M):
            raise MutantError(f"{program} has no test {test_filter}")
        return None

    def failure_in_python(self, file):
        """What fails in a file of python/tests, run on the package as it would be installed, or None."""
        package = self.tree.parent / "package"
        shutil.rmtree(package, ignore_errors=True)
        shutil.copytree(self.tree / "python/heed", package / "heed")
        for module in self.build.glob("_core*.so"):
            shutil.copy(module, package / "heed")
        here = {"PYTHONPATH": str(package), "HEED_BIN": str(self.build / "bin/heed")}
        try:
            done = subprocess.run([PYTHON, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file],
                                  cwd=self.tree / "python/tests", env={**os.environ, **here},
                                  capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"pytest: no end after {TIMEOUT_SECONDS} s"
        if failed := re.search(r"^FAILED (\S+)", done.stdout, re.M):
            return f"pytest: {failed.group(1)}"
        if done.returncode < 0:
            return f"pytest: exit {done.returncode} (crash)"
        if done.returncode != 0:
            raise MutantError(f"pytest {file} does not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return None

    def everything(self):
        for program in self.programs:
            if killer := self.killer(program, NOT_HERE, TIMEOUT_OF_ALL_SECONDS):
                return killer
        return None

    def try_mutant(self, mutant):
        """Who kills it, or None."""
        path = self.tree / mutant.file
        clean, stat = path.read_bytes(), path.stat()
        try:
            path.write_text(mutant.mutate(clean.decode()))
            for test in mutant.tests:
                program, _, test_filter = test.partition(":")
                self.compile(program)
                if killer := self.killer(program, test_filter):
                    return killer
            self.compile(*self.programs)
            return self.everything()
        except CompileError as error:
            if "static assertion failed" in str(error) or "static_assert failed" in str(error):
                return "the compiler: static assertion"
            raise
        finally:
            path.write_bytes(clean)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--list", action="store_true", help="print names and reasons, check that all apply, no more")
    parser.add_argument("--only", action="append", metavar="NAME", help="run this mutant (may be given again)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at once")
    parser.add_argument("--dir", type=Path, default=ROOT / "build/mutants", help="folder of the copy and its build")
    args = parser.parse_args()
    mutants = all_mutants()
    if unknown := set(args.only or ()) - {mutant.name for mutant in mutants}:
        parser.error(f"no mutant {', '.join(sorted(unknown))}; --list shows them")
    if args.only:
        mutants = [mutant for mutant in mutants if mutant.name in args.only]
    for mutant in mutants:  # before anything is built
        mutant.mutate((ROOT / mutant.file).read_text())
        if args.list:
            print(f"{mutant.name}: {mutant.why} ({mutant.file})")
    if args.list:
        return 0
    begin = time.monotonic()
    named = {test.partition("::")[0] if test.startswith("pytest:") else test
             for mutant in mutants for test in mutant.tests}
    has_python = any(test.startswith("pytest:") for test in named)
    bench = Bench(args.dir, args.jobs, with_python=has_python)
    bench.compile(*bench.programs, *(["pytest"] if has_python else []))
    # All tests are for all mutants: of a few, those that they name.
    killers = (bench.killer(*test.partition(":")[::2]) for test in sorted(named))
    killer = next(filter(None, killers), None) or (None if args.only else bench.everything())
    if killer:
        raise MutantError(f"the tree fails without a mutant: {killer}")
    snapshot = Snapshot(bench.build, args.dir / "clean")
    print(f"{len(mutants)} mutants; the tree passes after {time.monotonic() - begin:.0f} s", flush=True)
    bad = []
    for mutant in mutants:
        start = time.monotonic()
        try:
            killer = bench.try_mutant(mutant)
            outcome = f"killed by {killer}" if killer else "SURVIVED"
        except MutantError as error:
            killer, outcome = None, f"ERROR: {error}"
        if not killer:
            bad.append(mutant.name)
        snapshot.restore()
        print(f"{mutant.name:28} {time.monotonic() - start:4.0f} s  {outcome}", flush=True)
    survivors = f"; not: {', '.join(bad)}" if bad else ""
    print(f"{len(mutants) - len(bad)} of {len(mutants)} mutants killed in {time.monotonic() - begin:.0f} s{survivors}")
    return 1 if bad else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MutantError as problem:
        sys.exit(f"mutants: {problem}")
