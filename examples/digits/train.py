# Trains a reader of handwritten digits with any mechanism, or with each, and compares it with baselines.
"""Printed is the share of held-out images that are right, and what simple models of scikit-learn get right of them.

    python examples/digits/train.py --mechanism attention --out model.safetensors
    python examples/digits/train.py --all
"""

from digits import TASK  # first: it says where classifier is

from classifier import main

if __name__ == "__main__":
    raise SystemExit(main(TASK, __doc__))
