#!/usr/bin/env python3
# Instructions of kernels per pair and per update of a state element, counted by QEMU, for ARM beside AVX2.
"""Runs passes of mechanisms of two builds under QEMU's user mode and counts the instructions of their kernels:
functions of a SIMD target's namespace. Unlike times, counts need no such CPU and are the same every time; they leave
out caches, latencies and how many instructions a cycle takes. Kernels must have symbols: builds are not stripped.

Usage: count_instructions.py [--x86 build/release] [--arm build/aarch64-linux] [FILTER]
"""

import argparse
import pathlib
import re
import subprocess
import tempfile

TOKENS, HEADS, CHANNELS = 512, 2, 64
PLUGIN = pathlib.Path(__file__).with_name("instructions") / "plugin.c"
PAIRS = HEADS * TOKENS**2
UPDATES = HEADS * TOKENS * CHANNELS**2
# Mechanism, variant, dtype, what is counted per element of, and their number.
JOBS = [
    ("attention", "", "f32", "pair", PAIRS),
    ("attention", "causal", "f32", "pair", HEADS * TOKENS * (TOKENS + 1) // 2),
    ("attention", "", "bf16", "pair", PAIRS),
    *((name, "", "f32", "update", UPDATES) for name in ("linear_attention", "simple_gla", "gla", "ssd", "delta_rule",
                                                        "gated_delta_rule", "kda")),
]
# Emulator, its arguments, namespaces of the kernels, and the target that they are compiled for at best.
X86 = (["qemu-x86_64", "-cpu", "max"], "N_AVX2", "avx2")
ARM = (["qemu-aarch64", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu"], "N_NEON", "tiles")


def counted(machine, plugin, build, job):
    """The instructions of a call: what the program takes for two, less what it takes for one."""
    emulator, namespaces, target = machine

    def instructions(calls):
        run = [*emulator, "-plugin", f"{plugin},symbol={namespaces}", pathlib.Path(build, "bin/run_pass"), *job,
               *map(str, (TOKENS, HEADS, CHANNELS)), target, str(calls)]
        result = subprocess.run(run, capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(f"{' '.join(map(str, run))}: {result.stderr}")
        return int(re.search(r"(\d+) instructions", result.stderr)[1])

    return instructions(2) - instructions(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filter", nargs="?", default=".", help="regular expression of mechanisms")
    parser.add_argument("--x86", default="build/release")
    parser.add_argument("--arm", default="build/aarch64-linux")
    options = parser.parse_args()
    for build in (options.x86, options.arm):
        subprocess.run(["cmake", "--build", build, "--target", "run_pass"], check=True, stdout=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory() as folder:
        plugin = pathlib.Path(folder, "count.so")
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", plugin, PLUGIN], check=True)
        print(f"{TOKENS} tokens, {HEADS} heads of {CHANNELS} channels, one thread")
        print(f"{'instructions per':48}{'AVX2':>8}{'NEON':>8}{'ratio':>8}")
        for mechanism, variant, dtype, unit, number in JOBS:
            if not re.search(options.filter, mechanism):
                continue
            for of_pass in ("forward", "backward"):
                job = (mechanism, of_pass, variant, dtype)
                x86, arm = counted(X86, plugin, options.x86, job), counted(ARM, plugin, options.arm, job)
                name = " ".join(filter(None, (mechanism, variant, dtype, of_pass)))
                print(f"{name:40}{unit:8}{x86 / number:8.2f}{arm / number:8.2f}{arm / x86:8.2f}", flush=True)


if __name__ == "__main__":
    main()
