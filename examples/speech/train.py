# Trains a recogniser of ten spoken words with any mechanism, or with each, and compares it with baselines.
"""Printed is the share of held-out recordings that are right, of voices that have not been heard, and what a simple
model gets right.

    python examples/speech/train.py --mechanism s4d --out model.safetensors
    python examples/speech/train.py --all
"""

from speech import TASK  # first: it says where classifier is

from classifier import main

if __name__ == "__main__":
    raise SystemExit(main(TASK, __doc__))
