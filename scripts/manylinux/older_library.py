#!/usr/bin/env python3
"""Writes the source of a shared library that has an older version's symbols and no code: the linker takes it for the
older version, which it binds programs to.

Usage: older_library.py READELF LIBRARY OUTPUT VERSION... Writes OUTPUT.s and OUTPUT.map, the linker's version script.
Each VERSION is the newest of its kind: with GLIBCXX_3.4.24, symbols of GLIBCXX_3.4.25 are left out. Kinds of which no
version is given are left out too. Of a symbol with several versions the newest that is left is taken.
"""
import re
import subprocess
import sys
from collections import defaultdict

SYMBOL = re.compile(r"\s*\d+: [0-9a-f]+\s+(\w+) (\w+)\s+(?:GLOBAL|WEAK|UNIQUE)\s+DEFAULT.*\s\d+ (\S+?)@@?([\w.]+)$")
SECTIONS = {"OBJECT": (".bss", "object"), "TLS": ('.section .tbss,"awT",%nobits', "tls_object")}


def kind_and_number(version):
    match = re.fullmatch(r"([A-Z]+)_([\d.]+)", version)
    return (match[1], [int(part) for part in match[2].split(".")]) if match else (version, [])


def symbols_of(readelf, library, newest):
    """Returns {name: (version, type, number of bytes)}."""
    listing = subprocess.run([readelf, "--dyn-syms", "--wide", library], check=True, capture_output=True, text=True)
    symbols = {}
    for match in filter(None, map(SYMBOL.match, listing.stdout.splitlines())):
        num_bytes, type_, name, version = match.groups()
        kind, number = kind_and_number(version)
        if kind not in newest or number > newest[kind]:
            continue
        if name not in symbols or kind_and_number(symbols[name][0])[1] < number:
            symbols[name] = (version, type_, int(num_bytes, 0))
    return symbols


def main():
    readelf, library, output, *versions = sys.argv[1:]
    newest = dict(map(kind_and_number, versions))
    symbols = symbols_of(readelf, library, newest)
    by_version = defaultdict(list)
    with open(output + ".s", "w") as assembly:
        for name, (version, type_, num_bytes) in sorted(symbols.items()):
            by_version[version].append(name)
            section, type_ = SECTIONS.get(type_, (".text", "function"))
            print(f"{section}\n.globl {name}\n.type {name}, %{type_}\n.size {name}, {num_bytes}\n"
                  f"{name}: .zero {max(num_bytes, 1)}", file=assembly)
    missing = newest.keys() - {kind_and_number(version)[0] for version in by_version}
    if missing:
        sys.exit(f"{library} has no symbols of {' '.join(sorted(missing))}")
    with open(output + ".map", "w") as script:
        for version, names in sorted(by_version.items()):
            print(f"{version} {{ global: {' '.join(name + ';' for name in names)} }};", file=script)


if __name__ == "__main__":
    main()
