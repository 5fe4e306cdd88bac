#!/usr/bin/env python3
"""Compares every C++ file with clang-format's output by .clang-format, and checks every Python file with ruff.

Usage: check_format.py [--fix]. Exits 1 if a file differs or breaks a rule, and 77 (skipped) where a tool is missing:
only the versions in pyproject.toml decide, as others format a few lines in other ways. `--fix` rewrites the C++ files
that differ, and the Python files whose violations ruff can fix.
"""
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("heed", "cli", "python", "tests", "benchmarks", "examples", "tools", "docs")
SUFFIXES = (".h", ".cc", ".cu")


def required_version(name):
    return re.search(rf'"{name}==([0-9.]+)"', (ROOT / "pyproject.toml").read_text())[1]


def find_program(name):
    """The path of a program in its required version, looked up in .venv and on the PATH, or None."""
    version = required_version(name)
    for program in (ROOT / ".venv/bin" / name, shutil.which(name)):
        if program and Path(program).exists():
            found = subprocess.run([program, "--version"], capture_output=True, text=True)
            if found.returncode == 0 and re.search(rf"\b{re.escape(version)}\b", found.stdout):
                return program
    print(f"{name} {version} is not installed: scripts/setup installs it into .venv")
    return None


def files(*suffixes):
    return [f for folder in FOLDERS for f in sorted((ROOT / folder).rglob("*")) if f.suffix in suffixes]


def main():
    fix = "--fix" in sys.argv[1:]
    clang_format, ruff = find_program("clang-format"), find_program("ruff")
    codes = []
    if clang_format:
        arguments = ["-i"] if fix else ["--dry-run", "--Werror"]
        codes.append(subprocess.run([clang_format, *arguments, *files(*SUFFIXES)], cwd=ROOT).returncode)
    if ruff:
        arguments = ["--fix"] if fix else []
        codes.append(subprocess.run([ruff, "check", "--quiet", "--no-cache", "--output-format=concise", *arguments,
                                     *files(".py")], cwd=ROOT).returncode)
    if any(codes):
        return 1
    return 0 if clang_format and ruff else 77


if __name__ == "__main__":
    sys.exit(main())
