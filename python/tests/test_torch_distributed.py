# Sequences divided among processes (gloo): each rank's part is that of one process. distributed_worker.py compares.
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("PyTorch is built without torch.distributed", allow_module_level=True)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/long_document.py"
WORKER = Path(__file__).with_name("distributed_worker.py")
CHECKS = ["recurrences", "states", "scans", "attention", "bits,seeds,shards,bytes,refusals,few_tokens,caches,models",
          "death"]
MORE_RANKS = [int(n) for n in os.environ.get("HEED_TEST_RANKS", "").split(",") if n]


def run(check, ranks, folder):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HEED_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, WORKER, check, str(rank), str(ranks), str(folder / "store")], text=True,
                         env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(ranks)
    ]
    outputs = []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=250 * max(ranks, 2))[0])  # more ranks share the cores
    finally:
        for process in processes:
            process.kill()
    for rank, (process, output) in enumerate(zip(processes, outputs)):
        assert process.returncode == 0, f"rank {rank} of {ranks}:\n{output[-4000:]}"


@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks_compute_what_one_process_does(check, tmp_path):
    run(check, 2, tmp_path)


@pytest.mark.parametrize("ranks", [1, 3, *MORE_RANKS])
def test_other_numbers_of_ranks(ranks, tmp_path):
    more = ",recurrences,states,scans,attention,refusals,models,every_family" if ranks in MORE_RANKS else ""
    run("bits,shards,few_tokens,caches" + more, ranks, tmp_path)


def test_a_text_shared_by_two_processes_has_the_losses_of_one():
    def losses(*launcher):
        done = subprocess.run([sys.executable, *launcher, EXAMPLE, "--tokens", "2000", "--steps", "3"], text=True,
                              capture_output=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stdout + done.stderr
        return [float(x) for x in re.findall(r"^step +\d+  loss (\S+)", done.stdout, re.M)]

    alone = losses()
    shared = losses("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert len(alone) == 3 and alone[2] < alone[0] - 0.5
    assert shared == pytest.approx(alone, abs=1e-5)


def test_a_group_needs_torch_distributed():
    import heed.torch
    x = torch.zeros(1, 4, 1, 8)
    with pytest.raises(heed.InvalidArgument, match="not initialised"):
        heed.torch.attention(x, x, x, group=object())
    assert heed.torch.attention(x, x, x, group=None).shape == x.shape
    assert heed.torch.gla(x, x, x, -torch.ones(1, 4, 1, 8), group=None).shape == x.shape
