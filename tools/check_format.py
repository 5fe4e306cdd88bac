#!/usr/bin/env python3
"""Compares every C++ file with what clang-format makes of it by .clang-format; `--fix` rewrites the files that differ.

Usage: check_format.py [--fix]. Exits 1 if a file differs, and 77 (skipped) where clang-format is missing: other
versions
format a few lines in other ways, so that only the one in pyproject.toml decides.
"""
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("heed", "cli", "python", "tests", "benchmarks", "examples")
SUFFIXES = (".h", ".cc", ".cu")


def required_version():
    return re.search(r'"clang-format==([0-9.]+)"', (ROOT / "pyproject.toml").read_text())[1]


def find_program(version):
    """The path of clang-format in this version, looked up in .venv and on the PATH, or None."""
    for program in (ROOT / ".venv/bin/clang-format", shutil.which("clang-format")):
        if program and Path(program).exists():
            found = subprocess.run([program, "--version"], capture_output=True, text=True)
            if found.returncode == 0 and version in found.stdout:
                return program
    return None


def main():
    version = required_version()
    program = find_program(version)
    if program is None:
        print(f"clang-format {version} is not installed: scripts/setup installs it into .venv")
        return 77
    files = [f for folder in FOLDERS for f in sorted((ROOT / folder).rglob("*")) if f.suffix in SUFFIXES]
    arguments = ["-i"] if "--fix" in sys.argv[1:] else ["--dry-run", "--Werror"]
    return subprocess.run([program, *arguments, *files], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
