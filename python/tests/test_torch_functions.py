# heed.torch's other functions: the NumPy functions' values on tensors, derivatives where they exist, else errors.
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import heed  # noqa: E402
import heed.torch  # noqa: E402

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("options", [{"interleaved": True}, {"interleaved": False, "dim": 4, "base": 500.0},
                                     {"interleaved": False, "scaling": YARN, "inverse": True}])
def test_rotary(rng, options):
    x, positions = torch.from_numpy(rng.standard_normal((2, 5, 3, 8))).requires_grad_(), torch.tensor([0, 1, 4, 5, 17])

    def function(x):
        return heed.torch.rotary(x, positions, **options)

    np.testing.assert_array_equal(function(x).detach(), heed.rotary(x.detach(), positions, **options))
    assert torch.autograd.gradcheck(function, (x,)) and torch.autograd.gradgradcheck(function, (x,))
    assert torch.equal(heed.torch.rotary(x, [0, 1, 4, 5, 17], **options), function(x))


@pytest.mark.parametrize("options",
                         [{"bidirectional": True}, {"bidirectional": False, "max_distance": 20, "align": "top_left"}])
def test_t5_bias(rng, options):
    table = torch.from_numpy(rng.standard_normal((16, 3))).requires_grad_()

    def function(table):
        return heed.torch.t5_bias(table, 9, 30, **options)

    np.testing.assert_array_equal(function(table).detach(), heed.t5_bias(table.detach(), 9, 30, **options))
    assert torch.autograd.gradcheck(function, (table,)) and torch.autograd.gradgradcheck(function, (table,))


def test_operators_of_positions():
    x, positions = torch.randn(2, 5, 3, 8, requires_grad=True), torch.arange(5)
    torch.library.opcheck(torch.ops.heed.rotary.default, (x, positions, 1e4, None, True, "None", False))
    table = torch.randn(8, 3, requires_grad=True)
    torch.library.opcheck(torch.ops.heed.t5_bias.default, (table, 5, 7, True, 128, "bottom_right"))
    compiled = torch.compile(lambda x: heed.torch.rotary(x, positions, interleaved=True, scaling=YARN), fullgraph=True,
                             backend="aot_eager")
    longrope = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0, 2.0, 3.0, 4.0],
                "long_factor": (2.0, 2.0, 3.0, 4.0), "original_max_position_embeddings": 16}
    np.testing.assert_array_equal(heed.torch.rotary(x, positions, interleaved=True, scaling=longrope).detach(),
                                  heed.rotary(x.detach(), positions, interleaved=True, scaling=longrope))
    assert torch.equal(compiled(x), heed.torch.rotary(x, positions, interleaved=True, scaling=YARN))


def test_sixteen_bits():
    pytest.importorskip("ml_dtypes")
    x = torch.randn(5, 3, 8)
    wide = heed.torch.rotary(x.bfloat16().float(), torch.arange(5), interleaved=True)
    got = heed.torch.rotary(x.bfloat16(), torch.arange(5), interleaved=True)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), wide, rtol=2**-8, atol=1e-6)


def test_functions_without_gradients(rng):
    q, k = (torch.from_numpy(rng.standard_normal((1, 6, 2, 8))) for _ in range(2))
    weights = heed.torch.attention_weights(q, k, causal=True)
    np.testing.assert_array_equal(weights, heed.attention_weights(q, k, causal=True))
    np.testing.assert_array_equal(heed.torch.attention_map(q, k, size=(2, 3)), heed.attention_map(q, k, size=(2, 3)))
    np.testing.assert_array_equal(heed.torch.sinusoidal(5, 6), heed.sinusoidal(5, 6))
    np.testing.assert_array_equal(heed.torch.alibi_slopes(12), heed.alibi_slopes(12))
    parts = [heed.torch.attention(q, k[:, a:b], k[:, a:b], return_lse=True) for a, b in ((0, 4), (4, 6))]
    merged, _ = heed.torch.merge_attention(parts)
    torch.testing.assert_close(merged, heed.torch.attention(q, k, k), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("call", [
    lambda x: heed.torch.attention_weights(x, x), lambda x: heed.torch.attention_map(x.detach(), k=x),
    lambda x: heed.torch.merge_attention([(x, x[..., 0].transpose(1, 2))])])
def test_a_gradient_that_does_not_exist_is_refused(call):
    x = torch.randn(1, 6, 2, 8, requires_grad=True)
    with pytest.raises(heed.InvalidArgument, match="requires a gradient"):
        call(x)
    with torch.no_grad():
        call(x)


def test_import_is_light():
    code = "import heed.torch, sys; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_docstrings():
    assert "angle_i" in heed.torch.rotary.__doc__ and "as a new tensor" in heed.torch.rotary.__doc__
    for line in ("Pools P of every head", "size     (rows, columns) of the picture"):
        assert line in heed.torch.attention_map.__doc__ and line in heed.attention_map.__doc__
