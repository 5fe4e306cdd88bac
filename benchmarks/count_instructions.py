#!/usr/bin/env python3
# Instructions of kernels per pair and per update of a state element, counted by QEMU, for ARM beside AVX2.
"""Runs `heed run` of two builds under QEMU's user mode and counts the instructions of their kernels: functions of a
SIMD target's namespace. Unlike times, counts need no such CPU and are the same every time; they leave out caches,
latencies and how many instructions a cycle takes. Kernels must have symbols: builds are not stripped.

Usage: count_instructions.py [--x86 build/release/bin/heed] [--arm build/aarch64-linux/bin/heed] [FILTER]
"""

import argparse
import pathlib
import re
import subprocess
import tempfile

import numpy as np

TOKENS, HEADS, CHANNELS = 512, 2, 64
PLUGIN = pathlib.Path(__file__).with_name("count_instructions.c")


def inputs(rng, *names):
    """Tensors of one sequence: gates are log decays and write strengths in their usual ranges."""
    heads, channels = (1, TOKENS, HEADS), (1, TOKENS, HEADS, CHANNELS)
    make = {"log_decay": lambda: -rng.exponential(0.1, heads), "beta": lambda: rng.uniform(0, 1, heads),
            "log_decays": lambda: -rng.exponential(0.1, channels)}
    found = {}
    for name in names:
        x = make[name]() if name in make else rng.standard_normal(channels)
        if name == "k" and "beta" in names:
            x /= np.linalg.norm(x, axis=-1, keepdims=True)  # a delta rule is stable for keys of norm 1
        found["log_decay" if name == "log_decays" else name] = x.astype(np.float32)
    return found


PAIRS = HEADS * TOKENS**2
UPDATES = HEADS * TOKENS * CHANNELS**2
# Mechanism, options, inputs, what is counted per element of, and their number.
JOBS = [
    ("attention", [], "q k v", "pair", PAIRS),
    ("attention", ["--causal"], "q k v", "pair", HEADS * TOKENS * (TOKENS + 1) // 2),
    ("attention", ["--dtype", "bf16"], "q k v", "pair", PAIRS),
    ("linear_attention", [], "q k v", "update", UPDATES),
    ("simple_gla", [], "q k v log_decay", "update", UPDATES),
    ("gla", [], "q k v log_decays", "update", UPDATES),
    ("delta_rule", [], "q k v beta", "update", UPDATES),
    ("gated_delta_rule", [], "q k v log_decay beta", "update", UPDATES),
    ("kda", [], "q k v log_decays beta", "update", UPDATES),
]


def counted(emulator, plugin, program, namespaces, mechanism, options, path):
    """The instructions of the namespaces' functions in one of the calls, all equal, that the program times."""
    run = [*emulator, "-plugin", f"{plugin},symbol={namespaces},calls=TimeOnce", program, "run", mechanism, path,
           "--threads", "1", *options]
    result = subprocess.run(run, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(run)}: {result.stderr}")
    instructions, calls = map(int, re.search(r"(\d+) instructions in (\d+) calls", result.stderr).groups())
    return instructions / calls


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filter", nargs="?", default=".", help="regular expression of mechanisms")
    parser.add_argument("--x86", default="build/release/bin/heed")
    parser.add_argument("--arm", default="build/aarch64-linux/bin/heed")
    options = parser.parse_args()
    from safetensors.numpy import save_file
    with tempfile.TemporaryDirectory() as folder:
        plugin = pathlib.Path(folder, "count.so")
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", plugin, PLUGIN], check=True)
        print(f"{TOKENS} tokens, {HEADS} heads of {CHANNELS} channels, forward, one thread")
        print(f"{'instructions per':40}{'AVX2':>8}{'NEON':>8}{'ratio':>8}")
        for mechanism, extra, names, unit, number in JOBS:
            if not re.search(options.filter, mechanism):
                continue
            path = pathlib.Path(folder, "inputs.safetensors")
            save_file(inputs(np.random.default_rng(1), *names.split()), path)
            x86 = counted(["qemu-x86_64", "-cpu", "max"], plugin, options.x86, "N_AVX2", mechanism,
                          [*extra, "--isa", "avx2"], path)
            arm = counted(["qemu-aarch64", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu"], plugin, options.arm,
                          "N_NEON", mechanism, extra, path)
            print(f"{' '.join([mechanism, *extra]):33}{unit:7}{x86 / number:8.2f}{arm / number:8.2f}{arm / x86:8.2f}",
                  flush=True)


if __name__ == "__main__":
    main()
