#!/usr/bin/env python3
"""Draws docs/images/plot_map.png and plot_crossovers.png with heed.plot, from the shipped tensors and from
benchmarks/results/crossover.json.

Usage: plot_pictures.py. Needs the package with its extra `plot`.
"""
import json
import struct
from pathlib import Path

import matplotlib

matplotlib.use("agg")

import numpy as np

import heed.plot

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs/images"
LAYER, HEAD, TOKENS = 2, 11, 30


def read(path, names):
    """(float32 arrays of these names, the metadata) of a .safetensors file of float16."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8:8 + size])
    arrays = (np.frombuffer(raw[8 + size:][slice(*header[name]["data_offsets"])], np.float16)
              .reshape(header[name]["shape"]) for name in names)
    return [x.astype(np.float32) for x in arrays], header["__metadata__"]


def main():
    (q, k), facts = read(ROOT / "data/minilm_alice.safetensors", [f"layers.{LAYER}.{name}" for name in "qk"])
    q, k = (x.reshape(-1, *x.shape[-3:])[:, :TOKENS] for x in (q, k))
    ax = heed.plot.attention_map(q, k, tokens=json.loads(facts["tokens"])[:TOKENS], head=HEAD)
    ax.figure.savefig(IMAGES / "plot_map.png", dpi=110)
    ax = heed.plot.crossovers(json.loads((ROOT / "benchmarks/results/crossover.json").read_text()))
    ax.figure.savefig(IMAGES / "plot_crossovers.png", dpi=110)


if __name__ == "__main__":
    main()
