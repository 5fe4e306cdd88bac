# Under set_checks a call that reads [B, H, T, D] as [B, T, H, D] is reported, once in a process.
import importlib.util
import subprocess
import sys

import fresh
import pytest

PROGRAM = """
import sys, warnings
import numpy as np
import heed
if sys.argv[1] == "torch":
    import torch
    import heed.torch as heed_
    ones = torch.ones
else:
    import heed as heed_
    ones = lambda *shape: np.ones(shape, np.float32)

def attention(tokens, heads, keys=None, key_heads=None):
    k = ones(2, keys or tokens, key_heads or heads, 8)
    heed_.attention(ones(2, tokens, heads, 8), k, k)

def gla(tokens, heads, **options):
    x = ones(2, tokens, heads, 8)
    heed_.gla(x, x, x, -x, **options)

def ssd(tokens, heads, groups=None):
    b = ones(2, tokens, groups or heads, 8)
    heed_.ssd(ones(2, tokens, heads, 8), ones(2, tokens, heads), -ones(heads), b, b)

def said(call, *sizes, **options):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call(*sizes, **options)
    return [str(warning.message) for warning in seen]

usual = [(attention, 8, 8), (gla, 8, 8), (attention, 1, 32), (gla, 1, 32),  # the first token of a text
         (attention, 1, 32, 4096, 8), (attention, 5, 32, 4096, 32),         # tokens over a cache's keys
         (attention, 6, 32, 6, 4), (ssd, 6, 24, 1), (attention, 0, 4)]      # a short text: fewer heads of keys
wrong = {"attention": (attention, 4, 100), "multi-query": (attention, 4, 100, 1, 100), "gla": (gla, 4, 100),
         "ssd": (ssd, 4, 100)}
wrong = wrong[sys.argv[2]]
assert not said(*wrong)  # nobody asked
heed.set_checks(True)
for call in usual:
    assert not said(*call), call
assert not said(gla, 4, 100, initial_state=ones(2, 100, 8, 8))
if sys.argv[1] == "torch":  # heads first, and known to be
    x = ones(2, 4, 100, 8).transpose(1, 2)
    assert not said(heed_.scaled_dot_product_attention, x, x, x)
message = said(*wrong)
assert len(message) == 1 and not said(*wrong)
assert message[0] == (f"{wrong[0].__name__}: as [B, T, H, D] these tensors are 4 tokens of 100 heads; "
                      "if they are [B, H, T, D], swap these two axes"), message
"""


@pytest.mark.parametrize("call", ["attention", "multi-query", "gla", "ssd"])
@pytest.mark.parametrize("package", ["numpy", "torch"])
def test_heads_before_tokens_are_reported_once(package, call):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not there")
    if package == "torch":
        result = fresh.python(PROGRAM, package, call)
    else:
        result = subprocess.run([sys.executable, "-c", PROGRAM, package, call], capture_output=True, text=True,
                                check=False)
    assert result.returncode == 0, result.stderr
