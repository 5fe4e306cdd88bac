"""tools/mutant.h for Python: heed_mutant(number), a builtin of processes that find this file as sitecustomize.py."""
import builtins
import mmap
import os

active, reached = int(os.environ.get("HEED_MUTANT", "0")), bytearray(1 << 14)
if name := os.environ.get("HEED_MUTANTS_REACHED"):
    with open(name, "r+b") as file:
        reached = mmap.mmap(file.fileno(), len(reached))


def heed_mutant(number):
    reached[number] = 1
    return number == active


builtins.heed_mutant = heed_mutant
