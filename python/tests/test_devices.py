# heed.torch with tensors of a GPU, on stand-ins for them: runs the checks of device_program.py.
import os
import subprocess
import sys
from pathlib import Path

import pytest

import heed

pytest.importorskip("torch")
FOLDER = Path(__file__).resolve().parent
EMULATED = FOLDER.parents[1] / "build/release/emulated"
PROGRAM = (FOLDER / "device_program.py").read_text()
CHECKS = [line.split("(")[0].removeprefix("def check_")
          for line in PROGRAM.splitlines() if line.startswith("def check_")]
ALONE = "memory_of_a_device_is_not_read"


def run(*arguments, **environment):
    return subprocess.run([sys.executable, FOLDER / "device_program.py", *arguments], capture_output=True, text=True,
                          check=False, env={**os.environ, **environment}, timeout=300)


@pytest.fixture(scope="module")
def emulated():
    if not (EMULATED / "libheed_cuda.so").exists() or (Path(heed._core.__file__).parent / "libheed_cuda.so").exists():
        pytest.skip("no emulated device was built, or the package has kernels of its own")
    return run(LD_LIBRARY_PATH=str(EMULATED))


@pytest.mark.parametrize("name", [name for name in CHECKS if name != ALONE])
def test_on_an_emulated_device(emulated, name):
    assert name in emulated.stdout.split(), emulated.stderr


def test_memory_of_a_device_is_not_read():
    done = run("without")
    assert done.stdout.split() == [ALONE] and done.returncode == 0, done.stderr
