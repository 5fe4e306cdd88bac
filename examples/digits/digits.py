# Handwritten digits as sequences of 16 patches, for classifiers whose mechanism is picked by name.
"""The data are those of scikit-learn: 1797 images of 8 x 8 pixels, from the UCI repository. A fifth is held out, the
same one always. A token is a patch of 2 x 2 pixels: their values, and a vector for its place. Nothing says which
patches are neighbours."""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import heed.torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tasks"))
from classifier import Data, Task
from layer import QKV, S4D, SELECTIVE_SCAN, VALUE, Input, Mechanism
from training import need

PIXELS, PATCHES, HELD_OUT = 64, 16, 360
FEATURES, RANKS = 64, 8  # directions of Performer, projected tokens of Linformer


def small(*shape: int) -> Tensor:
    return torch.randn(shape) * shape[-1] ** -0.5


DIRECTIONS = Input("MK", constant=True, start=lambda m, k: heed.torch.orthogonal_features(m, k, seed=1).float(),
                   learned=False)
PROJECTED = Input("MT", constant=True, start=small)

# The mechanisms, each with what it takes; classify.cc has the same table.
MECHANISMS = {
    "none": Mechanism({"v": VALUE}),
    "attention": Mechanism(QKV, key=16),
    "bigbird": Mechanism(QKV, {"pattern": heed.patterns.bigbird(block=1, random=2)}, key=16, function="attention"),
    "performer": Mechanism(QKV | {"projection": DIRECTIONS}, {"kernel": "relu"}, key=16, rows=FEATURES),
    "linformer": Mechanism(QKV | {"e": PROJECTED, "f": PROJECTED}, key=16, rows=RANKS),
    "selective_scan": SELECTIVE_SCAN,
    "s4d": S4D,
}


class Patches(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.values, self.places = nn.Linear(4, width), nn.Parameter(torch.randn(PATCHES, width) * 0.5)

    def forward(self, images: Tensor) -> Tensor:
        patches = images.unflatten(1, (4, 2, 4, 2)).transpose(2, 3).flatten(3).flatten(1, 2)  # [B, 16, 4]
        return self.values(patches) + self.places


def load() -> Data:
    images, classes = need("sklearn.datasets", "scikit-learn").load_digits(return_X_y=True)
    images, order = (images / 16).astype(np.float32), np.random.default_rng(0).permutation(len(images))
    held_out, rest = order[:HELD_OUT], order[HELD_OUT:]
    return Data(images[rest], classes[rest], images[held_out], classes[held_out])


def shifted(images: Tensor, draws: torch.Generator) -> Tensor:
    """Digits shifted by up to one pixel each way."""
    rows = F.pad(images.unflatten(1, (8, 8)), (1, 1, 1, 1))
    by = torch.randint(3, (len(images), 2), generator=draws)
    down, right = (by[:, i, None] + torch.arange(8) for i in (0, 1))
    return rows[torch.arange(len(images))[:, None, None], down[:, :, None], right[:, None, :]].flatten(1)


def baselines(data: Data) -> dict[str, float]:
    means = np.stack([data.train_x[data.train_y == digit].mean(0) for digit in range(10)])
    nearest = ((data.test_x[:, None] - means) ** 2).sum(2).argmin(1)
    regression = need("sklearn.linear_model", "scikit-learn").LogisticRegression(max_iter=1000).fit(
        data.train_x, data.train_y)
    return {"nearest mean": float((nearest == data.test_y).mean()),
            "logistic regression": float(regression.score(data.test_x, data.test_y))}


TASK = Task(name="digits", result="image", labels=tuple("0123456789"), tokens=PATCHES, mechanisms=MECHANISMS,
            stem=Patches, load=load, augment=shifted, baselines=baselines, layers=2, width=64, heads=4, dropout=0.1,
            steps=2200, batch=64, rate=4e-3)
