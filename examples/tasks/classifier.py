# A classifier of sequences: a stem given by the task, layers with one mechanism, the mean over tokens, and logits.
"""A Task describes data and model; main() is the program that trains it, with one mechanism or with each in turn."""

import argparse
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import results
import training
from layer import EPS, Layer, Mechanism


class Data(NamedTuple):
    """Sequences [N, numbers] f32 and their classes [N]: those to learn from, and those held out."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


class Task(NamedTuple):
    name: str  # names its folder, and its program example_<name>
    result: str  # names its file of results
    labels: tuple[str, ...]
    tokens: int
    mechanisms: dict[str, Mechanism]
    stem: Callable[[int], nn.Module]  # takes a width and maps [B, numbers] to [B, tokens, width]
    load: Callable[[], Data]
    augment: Callable[[Tensor, torch.Generator], Tensor]  # a batch that is learned from, changed as its class allows
    baselines: Callable[[Data], dict[str, float]]  # by what they are: the share that they get right
    layers: int
    width: int
    heads: int
    dropout: float
    steps: int
    batch: int
    rate: float


class Classifier(nn.Module):
    def __init__(self, task: Task, mechanism: str):
        super().__init__()
        self.task, self.mechanism = task, mechanism
        self.stem = task.stem(task.width)
        self.layers = nn.ModuleList(
            Layer(mechanism, task.mechanisms[mechanism], task.width, task.heads, task.dropout, task.tokens)
            for _ in range(task.layers))
        self.norm, self.head = nn.RMSNorm(task.width, EPS), nn.Linear(task.width, len(task.labels))

    def forward(self, sequences: Tensor) -> Tensor:
        """Logits [B, classes] of sequences [B, numbers]."""
        x, positions = self.stem(sequences), torch.arange(self.task.tokens)
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(self.norm(x).mean(1))

    def save(self, path: Path) -> None:
        """One file with everything that classify.cc needs. Sizes are those of its tensors."""
        from safetensors.torch import save_file

        metadata = {"mechanism": self.mechanism, "heads": str(self.task.heads), "labels": ",".join(self.task.labels)}
        save_file(self.state_dict(), path, metadata)


@torch.no_grad()
def logits_of(model: nn.Module, x: np.ndarray) -> np.ndarray:
    return torch.cat([model(part) for part in torch.from_numpy(x).split(64)]).numpy()


def train(model: Classifier, data: Data, steps: int, seed: int = 0) -> tuple[float, float, float]:
    """The share of held-out sequences that are right, the seconds it took, and sequences per second."""
    task, draws = model.task, torch.Generator().manual_seed(seed)
    x, y = torch.from_numpy(data.train_x), torch.from_numpy(data.train_y)
    order = torch.empty(0, dtype=torch.int64)

    def draw():
        nonlocal order
        if len(order) < task.batch:
            order = torch.cat([order, torch.randperm(len(x), generator=draws)])
        chosen, order = order[: task.batch], order[task.batch:]
        return F.cross_entropy(model(task.augment(x[chosen], draws)), y[chosen]), len(chosen)

    def evaluate():
        right = float((logits_of(model, data.test_x).argmax(1) == data.test_y).mean())
        return right, f"held out {right:.1%} right"

    return training.fit(model, steps, task.rate, draw, evaluate, unit="sequences")


def classify(task: Task, model: Path, sequences: Path, logits: Path) -> float:
    """Runs the C++ program; writes its logits, and returns the microseconds that a sequence took."""
    done = subprocess.run([training.program(f"example_{task.name}"), model, sequences, "--logits", logits],
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        training.stop(done.stderr.strip())
    return float(re.fullmatch(r"([\d.]+) us per sequence, one thread\n", done.stderr)[1])


def deployed(model: Classifier, data: Data, path: Path) -> tuple[float, float]:
    """Accuracy and microseconds per sequence of the C++ program with the file; its logits must be Python's."""
    sequences, logits = path.with_suffix(".sequences.npy"), path.with_suffix(".logits.npy")
    np.save(sequences, data.test_x)
    seconds = min(classify(model.task, path, sequences, logits) for _ in range(3))
    of_cpp, of_python = np.load(logits), logits_of(model.eval(), data.test_x)
    difference = float(np.abs(of_cpp - of_python).max())
    if not difference < 1e-4 * max(1, float(np.abs(of_python).max())):
        training.stop(f"logits of C++ differ from those of Python by {difference:.1e}, expected less than 1e-4 of "
                      "the largest")
    return float((of_cpp.argmax(1) == data.test_y).mean()), seconds


def row_of(task: Task, mechanism: str, data: Data, seed: int, out: Path, timed: bool) -> dict[str, Any]:
    """Trains, writes the model, and lets C++ use it."""
    torch.manual_seed(seed)
    model = Classifier(task, mechanism)
    weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{mechanism}: {weights} weights, {len(data.train_x)} sequences to learn from", flush=True)
    right, seconds, speed = train(model, data, task.steps, seed)
    model.save(out)
    in_cpp, microseconds = deployed(model, data, out)
    print(f"{mechanism}: {right:.1%} right, in C++ {in_cpp:.1%}\n", flush=True)
    return results.row(mechanism, timed, {"right": in_cpp, "weights": weights},
                       {"train_seconds": seconds, "train_per_second": speed, "cpp_microseconds": microseconds})


def main(task: Task, description: str) -> int:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    results.add_arguments(parser, task.mechanisms, task.result)
    parser.add_argument("--steps", type=int, default=task.steps)
    options = parser.parse_args()
    task = task._replace(steps=options.steps)
    data = task.load()
    baselines = task.baselines(data)
    print(", ".join(f"{name}: {right:.1%} right" for name, right in baselines.items()), flush=True)
    bar = max(baselines.values())
    if not options.all:
        torch.manual_seed(options.seed)
        model = Classifier(task, options.mechanism)
        right, *_ = train(model, data, task.steps, options.seed)
        if options.out:
            model.save(options.out)
        print(f"{options.mechanism}: {right:.1%} right, the best of the above {bar:.1%}: "
              f"{'above' if right > bar else 'NOT above'} the bar")
        return 0 if right > bar else 1
    training.program(f"example_{task.name}")
    head = {"baselines": baselines, "train": len(data.train_x), "held_out": len(data.test_x), "tokens": task.tokens,
            "steps": task.steps}
    return results.run_all(options, task.result, head, task.mechanisms, lambda mechanism, out: row_of(
        task, mechanism, data, options.seed, out, not options.untimed))
