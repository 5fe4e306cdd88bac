# The training that the examples byte_lm, digits and speech share: the optimiser, and a loop that reports progress.
"""fit() trains; stop() and need() end a program with a sentence instead of a traceback."""

import importlib
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "build/tasks"


def stop(sentence: str) -> NoReturn:
    """Ends the program as the others of heed end: one line, status 1."""
    print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr)
    raise SystemExit(1)


def need(package: str, project: str) -> Any:
    """A module that heed itself does not need."""
    try:
        return importlib.import_module(package)
    except ImportError:
        stop(f"needs the package {project}, which is not installed: python -m pip install {project}")


def program(name: str) -> Path:
    """A C++ program of the examples, built."""
    path = ROOT / "build/release/bin" / name
    if not path.exists():
        stop(f"needs {path.relative_to(ROOT)}, which is not built: scripts/setup builds it")
    return path


def fit(model: nn.Module, steps: int, rate: float,
        draw: Callable[[], tuple[Tensor, int]], evaluate: Callable[[], tuple[Any, str]], *, unit: str, every: int = 50,
        nats_to: float = 1.0) -> tuple[Any, float, float]:
    """Trains by AdamW with a warm start and half a cosine down to a tenth of the rate. draw() gives the loss of a batch
    and how many of `unit` it has; evaluate() gives a result and says it. Returns the last result, the seconds that
    learning took, without those of evaluations, and how many of `unit` that was per second."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() == 2]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() != 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0}],
                                  rate)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * i / steps)))
    seen, since, before, total, learning, began = [], 0, 0.0, 0, 0.0, time.perf_counter()
    result = None
    for step in range(1, steps + 1):
        now = time.perf_counter()
        loss, number = draw()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        seen.append(loss.item())
        learning += time.perf_counter() - now
        since, total = since + number, total + number
        if step % every == 0 or step in (1, steps):
            model.eval()
            with torch.no_grad():
                result, said = evaluate()
            model.train()
            print(f"step {step:4}  train {nats_to * sum(seen) / len(seen):.3f}  {said}  "
                  f"{since / (learning - before):.0f} {unit}/s  {time.perf_counter() - began:.0f} s", flush=True)
            seen, since, before = [], 0, learning
    return result, learning, total / learning
