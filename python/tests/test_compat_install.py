# `import heed.compat.install`: code that imports GPU libraries finds heed; an installed library is not replaced.
import os
import re
from pathlib import Path

import fresh
import pytest

pytest.importorskip("torch")

from test_compat_signatures import DOORS, places_of

ROOT = Path(__file__).resolve().parents[2]


def run(program, *path, packages=()):
    found = os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")])
    result = fresh.python(program, packages=packages, env={**os.environ, "PYTHONPATH": found})
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_function_is_where_its_library_has_it():
    lines = ["import heed.compat.install, heed.compat.install"]
    for library, door in DOORS.items():
        for name in door.PLACES:
            for path in places_of(door, name):
                module, own = f"{library}.{path}".rsplit(".", 1)
                lines += [f"from {module} import {own}", f"from heed.compat import {library} as door",
                          f"assert {own} is door.{name}"]
                package, _, last = module.rpartition(".")
                if last == own:
                    lines += [f"import {module}; assert {module}.{own} is {own}"]
                elif own == name:
                    lines += [f"from {package} import {own} as again; assert again is {own}"]
    lines += ["from fla.ops.gsa import chunk_gsa",
              "import flash_attn.flash_attn_interface as f, causal_conv1d, mamba_ssm, fla.ops",
              "print(flash_attn.__version__, fla.__version__, set(f.__all__) < set(flash_attn.__all__))",
              "import sys; print(sum(type(x).__name__ == '_Finder' for x in sys.meta_path))"]
    lines[-2:-2] = ["import flash_attn, fla"]
    assert run("\n".join(lines)) == "2.8.4 0.5.2 True\n1\n"


def test_what_is_not_there_is_not_found():
    code = """
import heed.compat.install, importlib.util, warnings
for module in ("fla.models", "fla.ops.utils.pooling", "fla.ops.gl", "mamba_ssm.utils.generation", "flash_attn.losses",
               "flash_attn_2"):
    try:
        __import__(module)
    except ModuleNotFoundError as error:
        print(error)
try:
    from fla.ops.gla import chunk_simple_gla
except ImportError as error:
    print(error)
print(importlib.util.find_spec("flash_attn").origin)
"""
    lines = run(code).splitlines()
    assert lines[:6] == [f"No module named {name!r}" for name in (
        "fla.models", "fla.ops.utils.pooling", "fla.ops.gl", "mamba_ssm.utils", "flash_attn.losses", "flash_attn_2")]
    assert lines[6].startswith("cannot import name 'chunk_simple_gla' from 'fla.ops.gla'")
    assert lines[7] == "heed.compat.flash_attn"


@pytest.mark.parametrize("order", ["import heed.compat.install, flash_attn", "import flash_attn, heed.compat.install"])
def test_a_library_that_is_installed_stays(order, tmp_path):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn/__init__.py").write_text("flash_attn_func = 'the original'\n")
    code = f"""{order}
print(flash_attn.flash_attn_func)
try:
    import flash_attn.flash_attn_interface
except ModuleNotFoundError as error:
    print(error)
from fla.ops import chunk_gla
print(chunk_gla.__module__)
"""
    assert run(code, tmp_path).splitlines() == [
        "the original", "No module named 'flash_attn.flash_attn_interface'", "heed.compat.fla"]


def test_nothing_happens_without_the_import():
    code = ("import heed.compat.fla, sys, importlib.util as u; "
            "print(u.find_spec('fla'), 'heed.compat.install' in sys.modules)")
    assert run(code) == "None False\n"


def test_transformers_goes_on_as_before():
    pytest.importorskip("transformers")
    code = """
import heed.compat.install, torch
from transformers import Mamba2Config, Mamba2ForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next
config = Mamba2Config(hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8, n_groups=1, state_size=4,
                      vocab_size=20)
print(Mamba2ForCausalLM(config)(torch.ones(1, 5, dtype=int)).logits.shape)
"""
    assert run(code, packages=["transformers"]) == "torch.Size([1, 5, 20])\n"


def test_the_example_trains():
    text = run(ROOT / "examples/gpu_model/train.py")
    bits = [float(x) for x in re.findall(r"^step +\d+  (\S+) bits/byte$", text, re.M)]
    assert len(bits) == 7 and bits[0] > 7 and bits[-1] < 3.5
    assert "heed" not in re.sub("nothing here knows heed", "", (ROOT / "examples/gpu_model/hybrid_lm.py").read_text())
