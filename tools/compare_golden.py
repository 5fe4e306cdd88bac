#!/usr/bin/env python3
"""Compares outputs that golden_test wrote on several SIMD targets (HEED_TEST_WRITE_GOLDEN=FOLDER), as a Markdown table.

Usage: compare_golden.py FOLDER TARGET TARGET...
Each row compares a target with the first. A cell is about one dtype: how many passes of mechanisms have equal bits, and
for the others the median and the largest of their differences. The difference of a pass is the largest of an element of
its outputs, in units in the last place of the largest number among them: some gradients are zero but for rounding.
"""
import collections
import pathlib
import statistics
import sys

import torch
from safetensors import safe_open

FRACTION_BITS = {"f64": 52, "f32": 23, "bf16": 7, "f16": 10}


def passes_of(file):
    """Returns the names of outputs by dtype, and by mechanism, pass and problem."""
    found = {dtype: collections.defaultdict(list) for dtype in FRACTION_BITS}
    for name in file.keys():
        mechanism, which, dtype, problem, _ = name.split()
        found[dtype][mechanism, which, problem].append(name)
    return found


def difference(a, b, names, dtype):
    """Returns the difference of a pass, or 0 if all bits are equal."""
    largest_difference = largest = 0.0
    for name in names:
        x, y = a.get_tensor(name), b.get_tensor(name)
        if x.numel() == 0:
            continue
        equal = torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        x, y = x.double(), y.double()
        largest = max(largest, torch.where(x.isfinite(), x.abs(), 0.0).max().item())
        if not equal:
            apart = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs())
            largest_difference = max(largest_difference, apart.max().item())
    exponent = torch.frexp(torch.tensor(largest)).exponent.item() - 1
    return largest_difference / 2.0 ** (exponent - FRACTION_BITS[dtype])


def cell(a, b, passes, dtype):
    found = {key: difference(a, b, names, dtype) for key, names in passes.items()}
    if not found:
        return "-"
    unequal = [x for x in found.values() if x > 0]
    text = f"{len(found) - len(unequal)} of {len(found)}"
    if not unequal:
        return text
    worst = max(found, key=found.get)
    print(f"{dtype}: {found[worst]:.3g} in {' '.join(worst)}", file=sys.stderr)
    return f"{text}; {statistics.median(unequal):.2g}, {max(unequal):.2g}"


def main():
    folder, targets = pathlib.Path(sys.argv[1]), sys.argv[2:]
    print(f"| {targets[0]} and | " + " | ".join(FRACTION_BITS) + " |")
    print("|---" * (1 + len(FRACTION_BITS)) + "|", flush=True)
    with safe_open(folder / f"{targets[0]}.safetensors", "pt") as first:
        for target in targets[1:]:
            with safe_open(folder / f"{target}.safetensors", "pt") as other:
                cells = [cell(first, other, passes, dtype) for dtype, passes in passes_of(other).items()]
            print(f"| {target} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
