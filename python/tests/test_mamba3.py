# Mamba-3 in NumPy and PyTorch, beside a loop over tokens in PyTorch's float64.
"""heed.mamba3 and heed.torch.mamba3: values, gradients, states, packing, steps and what they refuse."""

import math

import numpy as np
import pytest
import torch

import heed
import heed.torch
from heed.compat.mamba_ssm import mamba3_siso_combined

NAMES = ("q", "k", "v", "log_decay", "dt", "trap", "theta")


def arguments(seed=0, B=2, T=11, R=2, H=1, HV=2, K=6, V=5, P=2):
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    tensors = {"q": normal(B, T, R, H, K), "k": normal(B, T, R, H, K), "v": normal(B, T, R, HV, V),
               "log_decay": -0.3 * normal(B, T, HV).abs(), "dt": 0.1 + normal(B, T, HV).abs(),
               "trap": normal(B, T, HV), "theta": normal(B, T, HV, P)}
    biases = {"q_bias": normal(HV, R, K), "k_bias": normal(HV, R, K)}
    state = (normal(B, HV, K, V), normal(B, HV, P), normal(B, R, HV, K), normal(B, R, HV, V))
    return tensors, biases, state


def rotated(x, angle):
    """Pairs of channels as complex numbers."""
    P = angle.shape[-1]
    turned = torch.view_as_complex(x[..., : 2 * P].unflatten(-1, (P, 2)).contiguous()) * torch.exp(1j * angle)
    return torch.cat([torch.view_as_real(turned).flatten(-2), x[..., 2 * P:]], -1)


def loop(tensors, q_bias=None, k_bias=None, state=None, scale=1.0):
    """The definition, one token after another."""
    q, k, v, log_decay, dt, trap, theta = (tensors[x] for x in NAMES)
    heads = v.shape[3] // q.shape[3]
    q, k = q.repeat_interleave(heads, 3), k.repeat_interleave(heads, 3)
    q = q if q_bias is None else q + q_bias.transpose(0, 1)
    k = k if k_bias is None else k + k_bias.transpose(0, 1)
    if state is None:
        S, angle = v.new_zeros(v.shape[0], v.shape[3], k.shape[4], v.shape[4]), torch.zeros_like(theta[:, 0])
        k_before, v_before = torch.zeros_like(k[:, 0]), torch.zeros_like(v[:, 0])
    else:
        S, angle, k_before, v_before = state
    outputs = []
    for t in range(q.shape[1]):
        angle = angle + dt[:, t, :, None] * theta[:, t]
        q_t, k_t = rotated(q[:, t], angle[:, None]), rotated(k[:, t], angle[:, None])
        part = torch.sigmoid(trap[:, t])
        S = S + ((1 - part) * dt[:, t])[..., None, None] * torch.einsum("brhk,brhv->bhkv", k_before, v_before)
        S = torch.exp(log_decay[:, t])[..., None, None] * S
        S = S + (part * dt[:, t])[..., None, None] * torch.einsum("brhk,brhv->bhkv", k_t, v[:, t])
        outputs.append(scale * torch.einsum("brhk,bhkv->brhv", q_t, S))
        k_before, v_before = k_t, v[:, t]
    return torch.stack(outputs, 1), (S, angle, k_before, v_before)


def assert_states(got, want, tolerance=1e-10):
    for name, a, b in zip(("S", "angle", "k", "v"), got, want):
        difference = torch.as_tensor(a).double() - b
        if name == "angle":
            difference = torch.remainder(difference + math.pi, 2 * math.pi) - math.pi
        assert difference.abs().max() < tolerance, name


@pytest.mark.parametrize("R", [1, 2, 3])
@pytest.mark.parametrize("with_state", [False, True])
def test_values_gradients_and_states_are_those_of_the_loop(R, with_state):
    tensors, biases, state = arguments(R, T=70, R=R, H=2, HV=4)
    leaves = [x.requires_grad_() for x in (*tensors.values(), *biases.values(), *(state if with_state else ()))]
    given = state if with_state else None
    want, final = loop(tensors, **biases, state=given, scale=0.5)
    o, got = heed.torch.mamba3(*tensors.values(), **biases, initial_state=given, return_state=True, scale=0.5)
    assert (o - want).abs().max() < 1e-11
    assert_states([x.detach() for x in got], [x.detach() for x in final])
    weights = [torch.randn_like(x) for x in (o, *final)]
    expected = torch.autograd.grad([want, *final], leaves, weights)
    for name, a, b in zip((*tensors, *biases, "S", "angle", "k", "v"),
                          torch.autograd.grad([o, *got], leaves, weights), expected):
        assert (a - b).abs().max() <= 1e-10 * (1 + b.abs().max()), name


def test_numpy_has_the_same_values_gradients_and_steps():
    tensors, biases, state = arguments(3)
    numpy = [x.numpy() for x in tensors.values()]
    options = {name: x.numpy() for name, x in biases.items()}
    initial = tuple(x.numpy() for x in state)
    o, final = heed.mamba3(*numpy, **options, initial_state=initial, return_state=True)
    want, wanted = loop(tensors, **biases, state=state)
    assert np.abs(o - want.numpy()).max() < 1e-11
    assert final._fields == ("S", "angle", "k", "v")
    assert_states(final, wanted)
    now = tuple(x.copy() for x in initial)
    for t in range(o.shape[1]):
        token = [np.ascontiguousarray(x[:, t]) for x in numpy]
        assert np.abs(heed.mamba3_step(*token, now, **options) - o[:, t]).max() < 1e-11
    assert_states(now, wanted)
    gradients = heed.mamba3_backward(np.ones_like(o), *numpy, **options, initial_state=initial)
    leaves = [x.requires_grad_() for x in (*tensors.values(), *biases.values(), *state)]
    expected = torch.autograd.grad(loop(tensors, **biases, state=state)[0].sum(), leaves)
    got = [*gradients[:9], *gradients.dinitial_state]
    for a, b in zip(got, expected):
        assert np.abs(a - b.numpy()).max() < 1e-10


@pytest.mark.parametrize("cut", [1, 3, 64])
def test_a_sequence_may_be_split_anywhere(cut):
    tensors, biases, state = arguments(4, T=67)
    whole, final = heed.torch.mamba3(*tensors.values(), **biases, initial_state=state, return_state=True)
    parts, now = [], state
    for part in (slice(0, cut), slice(cut, None)):
        o, now = heed.torch.mamba3(*(x[:, part] for x in tensors.values()), **biases, initial_state=now,
                                   return_state=True)
        parts.append(o)
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-11
    assert_states(now, final)


def test_packed_and_padded_sequences_do_not_see_each_other():
    tensors, biases, _ = arguments(5, B=1, T=30)
    bounds = torch.tensor([0, 7, 7, 30])
    o, states = heed.torch.mamba3(*tensors.values(), **biases, cu_seqlens=bounds, return_state=True)
    for i, (begin, end) in enumerate(((0, 7), (7, 30))):
        part = {name: x[:, begin:end] for name, x in tensors.items()}
        want, final = loop(part, **biases)
        assert (o[:, begin:end] - want).abs().max() < 1e-11
        assert_states([x[2 * i: 2 * i + 1] for x in states], final)
    assert all(x[1].abs().max() == 0 for x in states)
    padded = heed.torch.mamba3(*tensors.values(), **biases, lengths=torch.tensor([7]))
    assert torch.equal(padded[:, :7], o[:, :7]) and padded[:, 7:].abs().max() == 0
    back = heed.torch.mamba3(*(x.flip(1) for x in tensors.values()), **biases, reverse=True)
    assert (back.flip(1) - loop(tensors, **biases)[0]).abs().max() < 1e-11


def test_angles_of_long_sequences_stay_accurate():
    # 200,000 steps of half a radian: sums in float32 would be wrong by more than a degree.
    T = 200_000
    shape = (1, T, 1, 1)
    q = torch.zeros(*shape, 2)
    q[..., 0] = 1
    k = torch.zeros_like(q)
    k[:, 0, ..., 0] = 1
    numbers = torch.zeros(1, T, 1)
    o, state = heed.torch.mamba3(q, k, torch.ones(*shape, 1), numbers, numbers + 0.5, numbers + 40,
                                 torch.ones(1, T, 1, 1), return_state=True)
    assert abs(float(o[0, -1]) - 0.5 * math.cos(0.5 * (T - 1))) < 1e-6
    assert abs(float(state.angle) - math.remainder(0.5 * T, 2 * math.pi)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    tensors, biases, _ = arguments(6, T=40, K=16, V=8)
    low = {name: x.to(dtype) for name, x in tensors.items()}
    o = heed.torch.mamba3(*low.values(), **biases)
    want, _ = loop({name: x.double() for name, x in low.items()}, **biases)
    assert o.dtype == dtype
    assert (o.double() - want).abs().max() <= max(2e-6, torch.finfo(dtype).eps) * want.abs().max()


def test_second_derivatives():
    tensors, biases, state = arguments(7, B=1, T=4, K=4, V=2, P=1)
    leaves = [x.requires_grad_() for x in (*tensors.values(), *biases.values(), *state)]

    def call(*x):
        return heed.torch.mamba3(*x[:7], q_bias=x[7], k_bias=x[8], initial_state=x[9:], return_state=True)[0]

    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("change, message", [
    (dict(theta=(2, 11, 2, 4)), "theta has shape [2,11,2,4], expected 1 <= P <= K / 2, K = 6"),
    (dict(k=(2, 11, 1, 1, 6)), "k has shape [2,11,1,1,6], expected [2,11,2,1,6]"),
    (dict(v=(2, 11, 2, 3, 5)), "log_decay has shape [2,11,2], expected [2,11,3]"),
    (dict(q=(2, 11, 1, 6)), "q has shape [2,11,1,6]"),
    (dict(dt=(2, 11, 1)), "dt has shape [2,11,1], expected [2,11,2]"),
])
def test_shapes_that_disagree_are_named(change, message):
    tensors, _, _ = arguments(8)
    numpy = {name: x.numpy() for name, x in tensors.items()}
    numpy |= {name: np.zeros(shape) for name, shape in change.items()}
    with pytest.raises(heed.InvalidArgument) as error:
        heed.mamba3(*numpy.values())
    assert message in str(error.value)


def test_compat_has_the_function_of_mamba_ssm():
    tensors, biases, (S, angle, k, v) = arguments(10, R=1)
    q_bias, k_bias = (x[:, 0] for x in biases.values())
    D, Z = torch.randn(2, dtype=torch.float64), torch.randn_like(tensors["v"][:, :, 0])
    given = [tensors[x][:, :, 0] for x in "qkv"] + [tensors[x].transpose(1, 2) for x in ("log_decay", "dt", "trap")]
    o, *final = mamba3_siso_combined(*given, q_bias, k_bias, tensors["theta"], D, Z,
                                     Input_States=(angle, S.mT, k[:, 0], v[:, 0]), return_final_states=True)
    rates = tensors | {"theta": math.pi * torch.tanh(tensors["theta"])}
    want, (S, angle, k, v) = loop(rates, **biases, state=(S, angle, k, v))
    want = (want[:, :, 0] + D[:, None] * given[2]) * Z * torch.sigmoid(Z)
    assert (o - want).abs().max() < 1e-11
    assert_states([final[1].mT, final[0], final[2][:, None], final[3][:, None]], (S, angle, k, v))
    assert final[0].min() >= 0
    assert torch.equal(mamba3_siso_combined(*given, q_bias, k_bias, tensors["theta"]),
                       mamba3_siso_combined(*given, q_bias, k_bias, tensors["theta"], return_final_states=True)[0])


def test_segments_are_refused():
    tensors, _, _ = arguments(9)
    with pytest.raises((heed.InvalidArgument, heed.Unsupported), match="rotated by the angle"):
        heed.mamba3(*(x.numpy() for x in tensors.values()), segment=64)
