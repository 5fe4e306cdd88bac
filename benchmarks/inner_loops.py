#!/usr/bin/env python3
# The inner loops of kernels for a CPU that is not there: their instructions, and cycles by llvm-mca.
"""For each product of a cross build, the best loops of its object file, of those with ten multiplications or more:
instructions, products and loads of one round, and cycles on each CPU by LLVM's model of it, as the share of them that
the products alone would take. The best have the largest shares on the first CPU; whole tiles have them. Nothing runs:
caches, branches and what is between the loops are not counted.

Usage: inner_loops.py [BUILD FOLDER, default build/aarch64-linux] [--cpu neoverse-v2,neoverse-n1] [--loops 1]
"""

import argparse
import collections
import pathlib
import re
import shutil
import subprocess

# Names, object files below the engines' folder, functions by a regular expression, and the instruction that multiplies.
LOOPS = [
    ("attention f32, logits", "softmax/block_f32", r"LogitProducts<", "fmla"),
    ("attention f32, outputs", "softmax/block_f32", r"AddTile<false>", "fmla"),
    ("attention f32, gradients", "softmax/backward_f32", r"AccumulateRows<.*false>", "fmla"),
    ("attention bf16, logits", "softmax/block_bf16", r"LogitProducts<", "bfmmla"),
    ("attention bf16, outputs", "softmax/block_bf16", r"AddValues<.*false>", "bfmmla"),
    ("attention bf16, gradients", "softmax/backward_bf16", r"AccumulateRows<.*false>", "bfmmla"),
    ("recurrences f32, forward", "recurrence/forward_f32", r"", "fmla"),
    ("recurrences f32, backward", "recurrence/backward_f32", r"", "fmla"),
    ("delta rules f32", "recurrence/delta_f32", r"", "fmla"),
]
BRANCH = re.compile(r"(?:b|b\.\w+|cbn?z|tbn?z)\s+(?:[^<]*?,\s*)?([0-9a-f]+) <")

Loop = collections.namedtuple("Loop", "body products loads")


def functions(path, objdump):
    """Pairs of the name of a function and its instructions, as (address, text)."""
    text = subprocess.run([objdump, "-d", "-C", "--no-show-raw-insn", path], capture_output=True, text=True,
                          check=True).stdout
    for part in text.split("\n\n"):
        head, _, body = part.strip().partition("\n")
        name = re.fullmatch(r"[0-9a-f]+ <(.*)>:", head)
        lines = [re.match(r"\s*([0-9a-f]+):\s+(.*)", line) for line in body.splitlines()]
        if name:
            yield name[1], [(int(m[1], 16), m[2].strip()) for m in lines if m]


def innermost_loops(instructions, multiplies):
    """Loops without a branch in them, by the jump back at their ends."""
    place = {address: i for i, (address, _) in enumerate(instructions)}
    for end, (_, text) in enumerate(instructions):
        target = BRANCH.match(text)
        begin = place.get(int(target[1], 16), end + 1) if target else end + 1
        body = [text for _, text in instructions[begin:end]]
        if body and not any(BRANCH.match(text) or text.startswith("ret") for text in body):
            products = sum(text.split()[0] == multiplies for text in body)
            yield Loop(body, products, sum(text.startswith("ld") for text in body))


def cycles(body, cpu, mca):
    """Cycles of a round of many by the model of a CPU, and what its ports allow at least."""
    rounds = 300
    text = "\n".join(re.sub(r"\s*(//|<).*", "", line) for line in body)
    out = subprocess.run([mca, "-mtriple=aarch64", f"-mcpu={cpu}", "-mattr=+bf16", f"-iterations={rounds}"], input=text,
                         capture_output=True, text=True, check=True).stdout
    return int(re.search(r"Total Cycles:\s+(\d+)", out)[1]) / rounds, float(
        re.search(r"Block RThroughput:\s+([\d.]+)", out)[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", nargs="?", default="build/aarch64-linux")
    parser.add_argument("--cpu", default="neoverse-v2,neoverse-n1")
    parser.add_argument("--loops", type=int, default=1, help="loops of each product")
    parser.add_argument("--objdump", default="aarch64-linux-gnu-objdump")
    options = parser.parse_args()
    mca = next((p for v in range(30, 17, -1) for p in [f"llvm-mca-{v}", f"/usr/lib/llvm-{v}/bin/llvm-mca"]
                if shutil.which(p)), "llvm-mca")
    cpus = options.cpu.split(",")
    folder = pathlib.Path(options.build, "CMakeFiles/heed_objects.dir")
    print(f"{'':28}{'instructions':>13}{'products':>9}{'loads':>6}" + "".join(f"{cpu:>14}" for cpu in cpus))
    for name, file, function, multiplies in LOOPS:
        path = next(folder.glob(f"**/heed/engines/{file}.cc.o"), None)
        if path is None:
            print(f"{name:28}  not compiled")
            continue
        loops = [loop for text, instructions in functions(path, options.objdump) if re.search(function, text)
                 for loop in innermost_loops(instructions, multiplies) if loop.products >= 10]
        # A template has many instances: of those with equal numbers of products and instructions one is shown.
        once = {(loop.products, len(loop.body)): loop for loop in loops}
        rows = []
        for loop in once.values():
            lanes = "8h" if multiplies == "bfmmla" else "4s"
            products = [f"{multiplies} v0.4s, v1.{lanes}, v2.{lanes}"] * loop.products
            rows.append(([cycles(products, cpu, mca)[1] / cycles(loop.body, cpu, mca)[0] for cpu in cpus], loop))
        for shares, loop in sorted(rows, key=lambda row: row[0], reverse=True)[:options.loops]:
            print(f"{name:28}{len(loop.body) + 1:13}{loop.products:9}{loop.loads:6}" +
                  "".join(f"{share:14.2f}" for share in shares), flush=True)


if __name__ == "__main__":
    main()
