#!/usr/bin/env python3
"""libheed.so exports heed's own symbols and no others: no Highway, no JSON, no instance of a standard template.

Usage: exported_symbols_test.py NM LIBRARY.
"""
import re
import subprocess
import sys

# Mangled names of things in namespace heed, and of the type information and tables of its classes.
OWN = re.compile(r"_ZT[ISV]N4heed|_ZNK?4heed")
# Function templates of an exported class cannot be hidden; each instance belongs to a kernel.
BODIES = re.compile(r"_ZZN4heed7Context11ParallelFor")
EXPECTED = ("_ZN4heed9attention7Forward", "_ZN4heed7ContextC1Ei", "_ZTIN4heed15InvalidArgumentE")
PRIVATE = ("3hwy", "8nlohmann", "N_SSE2", "N_AVX")  # foreign, or compiled per target


def main():
    nm, library = sys.argv[1:]
    result = subprocess.run([nm, "--dynamic", "--defined-only", "--format=posix", library], check=True,
                            capture_output=True, text=True)
    names = [line.split()[0].split("@")[0] for line in result.stdout.splitlines()]
    names = [name for name in names if not BODIES.match(name)]
    wrong = [name for name in names if not OWN.match(name) or any(part in name for part in PRIVATE)]
    wrong += [f"missing: {start}" for start in EXPECTED if not any(name.startswith(start) for name in names)]
    print(*wrong, sep="\n")
    print(f"{len(names)} symbols, {len(wrong)} of them wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
