# Results of the three tasks as files, one row per mechanism, and as tables.
"""benchmarks/results/<name>.json has what was measured: rows that are there are not measured again, so that a run that
was ended goes on where it was. Nothing here needs PyTorch."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))
from turns import cpu_name  # noqa: E402

FOLDER = ROOT / "benchmarks/results"
UNTIMED = "-"


def row(mechanism: str, timed: bool, found: dict[str, Any], times: dict[str, float]) -> dict[str, Any]:
    """A row of a file. Times of a machine that did other things besides are nothing to write down."""
    import torch

    where = {"cpu": cpu_name(), "threads": torch.get_num_threads()} if timed else {"cpu": None, "threads": None}
    return {"mechanism": mechanism, **found, **(times if timed else dict.fromkeys(times)), **where}


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"rows": []}


def write(path: Path, document: dict[str, Any]) -> None:
    """All of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(new, path)


def add_arguments(parser: argparse.ArgumentParser, mechanisms: Iterable[str], name: str,
                  out: str = "write the model to this .safetensors file") -> None:
    one = parser.add_mutually_exclusive_group(required=True)
    one.add_argument("--mechanism", choices=list(mechanisms))
    one.add_argument("--all", action="store_true", help="train with each mechanism, and write a table")
    parser.add_argument("--out", help=out)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=FOLDER / f"{name}.json",
                        help="of --all: what is there is not measured again")
    parser.add_argument("--untimed", action="store_true",
                        help="of --all: leave times out, on a machine that does other things too")


def run_all(options: argparse.Namespace, name: str, head: dict[str, Any], mechanisms: Iterable[str],
            measure: Callable[[str, Path], dict[str, Any]]) -> int:
    """A row for each mechanism whose row is not there yet, or has no times and shall have some; then the table."""
    models = ROOT / "build/tasks" / name
    models.mkdir(parents=True, exist_ok=True)
    before = read(options.results)
    rows = {found["mechanism"]: found for found in before["rows"]}
    if {**before, "rows": []} != {**head, "rows": []}:
        rows = {}  # the recorded rows have other steps or data
    missing = [m for m in mechanisms if m not in rows or (rows[m]["cpu"] is None and not options.untimed)]
    for number, mechanism in enumerate(missing, 1):
        print(f"{number} of {len(missing)}: ", end="")
        rows[mechanism] = measure(mechanism, models / f"{mechanism}.safetensors")
        write(options.results, {**head, "rows": [rows[m] for m in mechanisms if m in rows]})
    print(table(name, read(options.results)))
    return 0


# --- tables -----------------------------------------------------------------------------------------------------------


def number(x: float | None, digits: int = 0, scale: float = 1) -> str:
    return UNTIMED if x is None else f"{scale * x:,.{digits}f}"


Columns = dict[str, Callable[[dict[str, Any]], str]]


def classified(what: str, cpp: str, digits: int, scale: float) -> Columns:
    """Columns of a task that tells classes of `what` apart; `cpp` names the time of one in C++."""
    return {
        "right": lambda r: f"{r['right']:.1%}",
        "weights": lambda r: number(r["weights"]),
        "training, s": lambda r: number(r["train_seconds"]),
        f"{what}/s learned": lambda r: number(r["train_per_second"]),
        cpp: lambda r: number(r["cpp_microseconds"], digits, scale),
    }


COLUMNS: dict[str, Columns] = {
    "language": {
        "bits per byte": lambda r: f"{r['bits']:.3f}",
        "state, bytes": lambda r: number(r["state_bytes"]),
        "weights": lambda r: number(r["weights"]),
        "training, s": lambda r: number(r["train_seconds"]),
        "bytes/s learned": lambda r: number(r["train_per_second"]),
        "bytes/s written in C++": lambda r: number(r["cpp_per_second"]),
    },
    "image": classified("images", "us per image in C++", 0, 1),
    "speech": classified("words", "ms per word in C++", 2, 1e-3),
}


def table(name: str, document: dict[str, Any]) -> str:
    """Markdown, the best row last."""
    columns = COLUMNS[name]
    rows = sorted(document["rows"], key=lambda r: -r["bits"] if "bits" in r else r["right"])
    lines = ["| mechanism | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    lines += ["| " + " | ".join([r["mechanism"], *(cell(r) for cell in columns.values())]) + " |" for r in rows]
    where = sorted({f"{r['cpu']}, {r['threads']} threads" for r in rows if r["cpu"] is not None})
    lines += ["", f"{bars(document)} {document['steps']} steps of training. "
              + (f"Times: {'; '.join(where)}; C++ on one thread." if where else "Times have not been measured.")]
    return "\n".join(lines)


def bars(document: dict[str, Any]) -> str:
    """A sentence on the baselines that a table's rows have to exceed."""
    if "bar" in document:
        return f"Counts of three bytes need {document['bar']:.3f} bits."
    return "Right without any of it: " + ", ".join(f"{name} {right:.1%}"
                                                   for name, right in document["baselines"].items()) + "."


def length_table(what: str, quantity: str, document: dict[str, Any]) -> str:
    """Milliseconds or megabytes of one pass by length, and their growth over the last doubling of the length."""
    rows = [r for r in document["rows"] if r["pass"] == what]
    tokens = sorted({n for r in rows for n in r["tokens"]})
    lines = ["| mechanism | " + " | ".join(f"{n:,}" for n in tokens) + " | doubled |", "|---" * (len(tokens) + 2) + "|"]
    for r in rows:
        found = dict(zip(r["tokens"], (x * 1e3 if quantity == "seconds" else x for x in r[quantity])))
        cells = ["" if n not in found else f"{found[n]:,.0f}" if found[n] >= 100 else f"{found[n]:.1f}" for n in tokens]
        growth = ([f"x {r[quantity][-1] / r[quantity][-2]:.1f}"] if len(r[quantity]) > 1 and r[quantity][-2] > 0
                  else [""])
        lines.append("| " + " | ".join([r["mechanism"], *cells, *growth]) + " |")
    unit = "Milliseconds" if quantity == "seconds" else "Megabytes at the peak"
    return "\n".join(lines) + f"\n\n{unit}: {document['cpu']}, {document['threads']} threads."
