#!/usr/bin/env python3
"""Checks programs and libraries for macOS where nothing runs them: tools/check_mach_o.py FOLDER VERSION

Each is code for 64-bit ARM and this version of macOS, is signed, needs no library but the system's and heed's, and
looks for these beside itself alone, in no folder of the machine that built it. Prints what it has read; exits with 1 on
a mistake, and where there is nothing to check.
"""
import collections
import os
import re
import struct
import sys

MAGIC, ARM64, MACOS = 0xFEEDFACF, 0x0100000C, 1
KINDS = {2: "programs", 6: "libraries", 8: "modules"}
# Load commands (mach-o/loader.h).
ID_DYLIB, CODE_SIGNATURE, RPATH, BUILD_VERSION = 0xD, 0x1D, 0x8000001C, 0x32
NEEDS = {0xC, 0x80000018, 0x8000001F, 0x80000023}  # a library: at once, weak, re-exported, upward
LIBRARIES = re.compile(r"/usr/lib/libSystem\.B\.dylib|@rpath/libheed[a-z_]*\.[0-9.]*dylib")


def load_commands(data, count):
    at = 32
    for _ in range(count):
        command, size = struct.unpack_from("<2I", data, at)
        yield command, data[at:at + size]
        at += size


def text(body):  # of a command with a name, whose offset is the first field
    return body[struct.unpack_from("<I", body, 8)[0]:].split(b"\0")[0].decode()


def version(number):
    return f"{number >> 16}.{number >> 8 & 255}"


def check(data, wanted, found, needed):
    """Yields what is wrong with a file's bytes; counts it in `found` and its libraries in `needed`."""
    _, cpu, _, kind, count = struct.unpack_from("<5I", data)
    found[KINDS.get(kind, f"files of kind {kind}")] += 1
    if cpu != ARM64:
        yield f"has code for CPU {cpu:#x}, expected {ARM64:#x}, ARM of 64 bits"
    commands = list(load_commands(data, count))
    systems = [struct.unpack_from("<2I", body, 8) for command, body in commands if command == BUILD_VERSION]
    if [(system, version(least)) for system, least in systems] != [(MACOS, wanted)]:
        yield f"is for {[(system, version(least)) for system, least in systems]}, expected macOS {wanted}"
    if not any(command == CODE_SIGNATURE for command, _ in commands):
        yield "is not signed, and such CPUs run nothing unsigned"
    for command, body in commands:
        if command in NEEDS:
            needed[text(body)] += 1
            if not LIBRARIES.fullmatch(text(body)):
                yield f"needs the library {text(body)}"
        if command == RPATH and not text(body).startswith("@loader_path"):
            yield f"looks for libraries in {text(body)}"
        if command == ID_DYLIB and text(body).startswith("/"):
            yield f"is to be found as {text(body)}"


def main(folder, wanted):
    found, needed, mistakes = collections.Counter(), collections.Counter(), []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "CMakeFiles"]  # objects, and what CMake tries compilers with
        for path in (os.path.join(parent, name) for name in names):
            if os.path.islink(path):
                continue
            with open(path, "rb") as file:
                if file.read(4) != struct.pack("<I", MAGIC):
                    continue
                data = file.seek(0) or file.read()
            mistakes += [f"{path}: {mistake}" for mistake in check(data, wanted, found, needed)]
    print(*mistakes, sep="\n", end="\n" * bool(mistakes))
    print(", ".join(f"{count} {kind}" for kind, count in sorted(found.items())) or f"{folder} has no such file",
          f"for macOS {wanted} on 64-bit ARM; libraries that they need:", *sorted(needed))
    return bool(mistakes) or not found


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
