#!/usr/bin/env python3
"""Mutation test: small mistakes, planted one at a time in a copy of the tree, each of which some test should notice.

Usage: mutants.py [--seed N] [--count N] [--files GLOB]... [--only NAME]... [--list] [--near] [--jobs N] [--dir FOLDER]

tools/mutations.py makes the mutants; no text of the code is stored. A seed draws them, the same ones on every machine
for the same tree. Each is compiled once, in a build for one SIMD target alone, AVX2 on x86-64. Tests near its file run
first, then all: of C++ every test program that contains it, of Python and of bindings all of python/tests. A mutant
whose object files are those of the clean tree is equivalent, and one that does not compile is no mutant: both are
counted apart.
Survivors are printed with their diff. Some of them change speed alone, so the exit status is 1 only where something
does not run.
"""
import argparse
import difflib
import fnmatch
import functools
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from mutations import draw, edits, name_of

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv/bin/python"
PYTHON = VENV if VENV.exists() else Path(sys.executable)
FILES = ("heed/core", "heed/engines", "heed/io", "heed/layers", "heed/model", "heed/ops", "heed/simd", "heed/state",
         "python")
# Tests, what they are made of, and what they compare with.
LEFT_ALONE = re.compile(r".*(_test|_case|_reference|_rounding)(_internal)?\.\w+|.*/(tests|cases)/.*")
NOT_HERE = "-" + ":".join((
    "CostTest.AWindowCostsWhatAWindowContains",  # measures time
    # Tests that need AMX, which the only target of this build does not have.
    "KernelsTest.EveryDTypeButF64GetsMatrixTilesWhereTheseAre",
    "KernelsTest.Int8KeysGetProductsOfBytesWhereTheCPUHasThem",
    "KernelsTest.TheTargetIsTheOneThatTheContextAllows"))


class MutantError(Exception):
    """The tree or the machine is not as it should be."""


class CompileError(MutantError):
    """A mutant does not compile."""


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


def limit_memory():
    """Limits the memory of a test's process, as a mutant may allocate without end."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))


class Mutant:
    def __init__(self, name, file, text, edit):
        self.name, self.file, self.clean, self.text = name, file, text, edit.apply(text)

    def diff(self):
        before, after = self.clean.splitlines(keepends=True), self.text.splitlines(keepends=True)
        return "".join(difflib.unified_diff(before, after, self.file, self.name, n=2))

    @property
    def is_python(self):
        return self.file.endswith(".py")

    @property
    def needs_package(self):
        return self.file.startswith("python/") or self.file.endswith(("_py.cc", "_py.h"))


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


class Includes:
    """The include graph, with which tests near a file are found."""

    TEST = re.compile(r"^(TYPED_)?TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\)", re.M)

    def __init__(self):
        files = [name for name in tracked_files() if name.endswith((".cc", ".h"))]
        self.texts = {name: (ROOT / name).read_text() for name in files}
        self.of = {name: set(re.findall(r'^#include "(heed/[^"]+)"', text, re.M)) for name, text in self.texts.items()}
        self.by_stem = {}
        for name in files:
            if not re.search(r"_(test|case)\.\w+$|/cases/", name):
                self.by_stem.setdefault(self.stem(name), []).append(name)
        self.python_tests = {name: (ROOT / name).read_text() for name in tracked_files()
                             if re.fullmatch(r"python/tests/test_\w+\.py", name)}

    @staticmethod
    def stem(name):
        return re.sub(r"((_internal)|(-inl))?\.\w+$", "", name)

    @staticmethod
    def mechanism_of(name):
        """The folder of the mechanism that a file belongs to, or None."""
        match = re.match(r"heed/ops/\w+/(?!common/)\w+(?=/)", name)
        return match and match.group()

    @staticmethod
    def folder_of(name):
        engine = re.match(r"heed/engines/\w+(?=/)", name)
        return engine.group() if engine else os.path.dirname(name)

    @functools.cached_property
    def folders_of_mechanisms(self):
        """The folders whose code each mechanism calls, an engine with all of its folders being one."""
        used = {}
        for folder in set(filter(None, map(self.mechanism_of, self.of))):
            seen = set()
            left = [name for name in self.of if re.match(rf"{folder}/(?!.*(_(test|case|py)\.|/cases/))", name)]
            while left:
                name = left.pop()
                if name not in seen:
                    seen.add(name)
                    left += [other for file in self.of.get(name, ()) for other in self.by_stem.get(self.stem(file), [])]
            used[folder] = {self.folder_of(name) for name in seen}
        return used

    def filter_of(self, files):
        """The GoogleTest filter of the tests in some files."""
        tests = [match.groups() for file in files for match in self.TEST.finditer(self.texts[file])]
        return ":".join(f"{suite}/*.{test}" if typed else f"{suite}.{test}:*/{suite}.{test}/*"
                        for typed, suite, test in tests)

    def near(self, file):
        """(program, filter) pairs: the tests that most likely notice a mutant of this file."""
        if file.startswith("python/") or file.endswith(("_py.cc", "_py.h")):
            return self.near_in_python(file)
        folder, stem = os.path.dirname(file), self.stem(file)
        if folder.endswith("/cuda"):
            programs = [name[6:-3] for name in self.texts if re.fullmatch(r"tests/cuda_\w*test\.cc", name)]
            named = [name for name in programs if folder.split("/")[-2] in name]
            return [(program, "*") for program in named or programs]
        headers = {name for name in self.texts if name.endswith(".h") and (
            self.stem(name) == stem or any(self.stem(other) == stem for other in self.of[name]))}
        own = [name for name in self.texts if name.endswith("_test.cc") and (
            name.startswith(folder + "/") or headers & self.of[name])]
        # A program of its own has little else in it.
        found = [("heed_op_tests", self.filter_of([name for name in own if not name.startswith("tests/")]))]
        found += [(os.path.basename(name)[:-3], "*") for name in own if name.startswith("tests/")]
        names = sorted(os.path.basename(mechanism) for mechanism, folders in self.folders_of_mechanisms.items()
                       if self.folder_of(file) in folders or mechanism == self.mechanism_of(file))
        if len(names) < len(self.folders_of_mechanisms):
            found += [("conformance_test", ":".join(f"*/{name}_*" for name in names)),
                      ("random_options_test", ":".join(f"*/{name}" for name in names))]
        else:
            found += [("conformance_test", "*")]
        return [(program, tests) for program, tests in found if tests]

    def near_in_python(self, file):
        """The files of python/tests that import a module or speak of it, those with its name first."""
        words = set(re.split(r"[/_.]+", file)) - {"python", "heed", "py", "cc", "h", "", "ops", "init", "nn", "caches"}
        module = re.sub(r"^python/|(/__init__)?\.py$", "", file).replace("/", ".")
        parent, _, last = module.rpartition(".")
        speaks = re.compile(rf"\b({re.escape(module)}\b|from {re.escape(parent)} import [^\n]*\b{last}\b)")
        scores = {name: 2 * len(words & set(re.split(r"[/_.]+", name))) + 2 * bool(speaks.search(text))
                  + (f"import {parent}" in text if parent != "heed" else 0) for name, text in self.python_tests.items()}
        tests = sorted((name for name, score in scores.items() if score), key=lambda name: (-scores[name], name))
        return [("pytest", " ".join(tests[:12]))] if tests else []


class Bench:
    """A copy of the tree with its build, and the clean build to compare with and to return to."""

    def __init__(self, folder, jobs, with_python):
        self.tree, self.keep, self.jobs = folder / "tree", folder / "clean", jobs
        self.build = self.tree / "build/release"  # where the Python tests look for programs
        self.package, self.timeouts = folder / "package", {}
        self.copy_tree()
        flags = "-O1 -DNDEBUG"
        if platform.machine() in ("x86_64", "AMD64"):
            # AVX2, the target of most CPUs: AMX is emulated there. Highway requires AES as well.
            flags += " -march=haswell -maes -DHEED_ONE_TARGET=1"
        self._run(["cmake", "-G", "Ninja", "-S", self.tree, "-B", self.build, "-DCMAKE_BUILD_TYPE=Release",
                   f"-DCMAKE_CXX_FLAGS_RELEASE={flags}", "-DBUILD_SHARED_LIBS=OFF",
                   "-DHEED_BUILD_BENCHMARKS=OFF", f"-DCMAKE_PREFIX_PATH={ROOT}/.cache/highway/install",
                   f"-DHEED_BUILD_PYTHON={'ON' if with_python else 'OFF'}", f"-DPython_EXECUTABLE={PYTHON}"])
        programs = {f.stem for f in (self.tree / "tests").glob("*_test.cc")} | {"heed_op_tests"}
        first = ["semantics_test", "heed_op_tests", "contract_test", "conformance_test"]  # the quick ones
        self.programs = [p for p in first if p in programs] + sorted(programs - set(first))

    def copy_tree(self):
        """Each file only where it differs, so that a kept build folder stays fresh."""
        names = set(tracked_files())
        for name in names:
            source, to = ROOT / name, self.tree / name
            if not to.exists() or to.read_bytes() != source.read_bytes():
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, to)
        for file in [f for f in self.tree.rglob("*") if f.is_file()]:
            name = file.relative_to(self.tree).as_posix()
            if name not in names and not name.startswith("build/"):
                file.unlink()

    @staticmethod
    def _run(command):
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = (done.stdout + done.stderr).splitlines()
            errors = [line for line in lines if re.search(r"error|assert", line, re.I)] or lines[-30:]
            raise CompileError(f"{command[0]} failed:\n" + "\n".join(errors[:10]))

    def compile(self, *targets):
        names = {"pytest": ["_core", "_core_stub", "heed_cli", "heed_cuda_emulated"]}
        targets = [name for target in targets for name in names.get(target, [target])]
        self._run(["cmake", "--build", self.build, "-j", self.jobs, "--target", *targets])

    # The clean build.

    def _stats(self):
        stats = {}
        for path, _, names in os.walk(self.build):
            for name in names:
                stat = os.lstat(os.path.join(path, name))
                stats[os.path.relpath(os.path.join(path, name), self.build)] = (stat.st_size, stat.st_mtime_ns)
        return stats

    def remember(self):
        """The build as it is now is the clean one."""
        shutil.rmtree(self.keep, ignore_errors=True)
        shutil.copytree(self.build, self.keep, symlinks=True)
        self.stats = self._stats()

    def restore(self):
        now = self._stats()
        for name in now.keys() - self.stats.keys():
            (self.build / name).unlink()
        for name, stat in self.stats.items():
            if now.get(name) != stat:
                shutil.copy2(self.keep / name, self.build / name, follow_symlinks=False)

    def differs(self, name):
        """Returns whether a file of the build differs from that of the clean build."""
        ours, clean = self.build / name, self.keep / name
        return not clean.exists() or ours.read_bytes() != clean.read_bytes()

    def changes_objects(self):
        now = self._stats()
        return any(name.endswith(".o") and now[name] != self.stats.get(name) and self.differs(name) for name in now)

    # Tests.

    def run_tests(self, build, program, tests, timeout):
        """The failing test, or None. Tests run as in scripts/test, whatever --deep sets for others."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEED_")}
        if program == "pytest":
            workers = ["-n", str(self.jobs), "--dist", "worksteal"] if tests == "python/tests" else []
            command = [PYTHON, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *workers, *tests.split()]
            environment.update(PYTHONPATH=str(self.make_package(build)), HEED_BIN=str(build / "bin/heed"),
                               OMP_WAIT_POLICY="passive")
            failure, successes = r"^(?:FAILED|ERROR) (\S+)", (0, 5)  # 5: nothing there to run
        else:
            command = [build / "bin" / program, f"--gtest_filter={tests}", "--gtest_brief=1", "--gtest_fail_fast"]
            failure, successes = r"^\[  FAILED  \] ([^\s,]+)", (0,)
        with subprocess.Popen([str(c) for c in command], cwd=self.tree, env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
                              preexec_fn=limit_memory) as process:
            try:
                output, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return f"{program}: no end after {timeout:.0f} s"
        if failed := re.search(failure, output, re.M):
            return f"{program}: {failed.group(1)}"
        if process.returncode < 0:
            return f"{program}: {signal.Signals(-process.returncode).name}"
        if process.returncode not in successes:
            return f"{program}: exit {process.returncode}, {output.strip().rpartition(chr(10))[2]}"
        return None

    def make_package(self, build):
        """heed as it would be installed."""
        shutil.rmtree(self.package, ignore_errors=True)
        shutil.copytree(self.tree / "python/heed", self.package / "heed", ignore=shutil.ignore_patterns("__pycache__"))
        for file in [*build.glob("_core*.so"), *build.glob("_core*.pyi")]:
            shutil.copy(file, self.package / "heed")
        if (build / "torch.pyi").exists():
            shutil.copy(build / "torch.pyi", self.package / "heed/torch/__init__.pyi")
        return self.package

    def timeout(self, program, tests):
        """Five times what the clean tree takes, which has to pass."""
        if (program, tests) not in self.timeouts:
            begin = time.monotonic()
            if failure := self.run_tests(self.keep, program, tests, None):
                raise MutantError(f"the tree fails without a mutant: {failure}")
            self.timeouts[program, tests] = 30 + 5 * (time.monotonic() - begin)
        return self.timeouts[program, tests]

    def try_mutant(self, mutant, near, all_tests):
        """The outcome of a mutant, and the test that noticed it."""
        if not all_tests:
            everything = []
        elif mutant.needs_package:
            everything = [("pytest", "python/tests")]
        else:
            everything = [(program, NOT_HERE) for program in self.programs]
        for program, tests in [*near, *everything]:
            if program == "pytest":
                self.timeout(program, tests)  # before the mutant is in the tree, whose files these tests read
        path = self.tree / mutant.file
        stat = path.stat()
        try:
            path.write_text(mutant.text)
            return self._try_planted(mutant, path, [*near, *everything])
        except CompileError as error:
            if re.search(r"static.assert\w* failed", str(error)):
                return "killed", "the compiler: static assertion"
            return "not compiled", ""
        finally:
            path.write_text(mutant.clean)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            self.restore()

    def _try_planted(self, mutant, path, all_tests):
        if mutant.file.endswith(".cc"):
            self.compile(f"{path}^")  # Ninja's name for what is made of this source
            if not self.changes_objects():
                return "equivalent", ""
        compiled = set()
        for program, tests in all_tests:
            if not mutant.is_python and program not in compiled:
                self.compile(program)
                compiled.add(program)
            # A program without the mutant in it has nothing to say.
            if program != "pytest" and not self.differs(f"bin/{program}"):
                continue
            if failure := self.run_tests(self.build, program, tests, self.timeout(program, tests)):
                return "killed", failure
        return "survived" if mutant.is_python or self.changes_objects() else "equivalent", ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", default="1", help="what draws the mutants")
    parser.add_argument("--count", type=int, default=20, help="how many are drawn")
    parser.add_argument("--files", action="append", metavar="GLOB",
                        help=f"files or folders (again for more); by default {' '.join(FILES)}")
    parser.add_argument("--only", action="append", metavar="NAME", help="run this mutant (may be given again)")
    parser.add_argument("--list", action="store_true", help="print the diffs of those drawn and no more")
    parser.add_argument("--near", action="store_true", help="run the tests near each mutant's file alone")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at once")
    parser.add_argument("--dir", type=Path, default=ROOT / "build/mutants", help="folder of the copy and its build")
    args = parser.parse_args()
    patterns = args.files or [name.partition(":")[0] for name in args.only or ()] or FILES
    makers = mutants_of(patterns)
    if unknown := set(args.only or ()) - makers.keys():
        parser.error(f"no mutant {', '.join(sorted(unknown))}; --list shows some")
    mutants = [makers[name]() for name in args.only or draw(makers, args.seed, args.count)]
    if not mutants:
        parser.error(f"nothing to change in {' '.join(patterns)}")
    if args.list:
        print("".join(mutant.diff() for mutant in mutants), end="")
        return

    begin, includes = time.monotonic(), Includes()
    near = {mutant.name: includes.near(mutant.file) for mutant in mutants}
    with_python = any(mutant.needs_package for mutant in mutants)
    bench = Bench(args.dir.resolve(), args.jobs, with_python)
    if args.near:
        targets = {program for tests in near.values() for program, _ in tests}
    else:
        targets = {program for m in mutants for program in (["pytest"] if m.needs_package else bench.programs)}
    bench.compile(*sorted(targets))
    bench.remember()
    print(f"{len(mutants)} of {len(makers)} mutants, compiled after {time.monotonic() - begin:.0f} s", flush=True)
    outcomes, survivors = Counter(), []
    for mutant in mutants:
        start = time.monotonic()
        outcome, by = bench.try_mutant(mutant, near[mutant.name], all_tests=not args.near)
        outcomes[outcome] += 1
        survivors += [mutant] if outcome == "survived" else []
        print(f"{time.monotonic() - start:5.0f} s  {outcome:12} {mutant.name}  {by}", flush=True)
    for mutant in survivors:
        print(f"\nsurvivor {mutant.name}\n{mutant.diff()}", end="")
    print(f"\n{len(mutants)} mutants in {time.monotonic() - begin:.0f} s: {outcomes['killed']} killed, "
          f"{outcomes['survived']} survived, {outcomes['equivalent']} equivalent (the same object code), "
          f"{outcomes['not compiled']} did not compile")


if __name__ == "__main__":
    try:
        main()
    except MutantError as problem:
        sys.exit(f"mutants: {problem}")
