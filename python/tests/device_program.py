# Tensors of a CUDA device without a GPU: heed.torch on stand-ins. test_devices.py runs this in processes of its own.
"""A stand-in is a tensor of which PyTorch believes that it is on cuda:0, with memory on the host. This file replaces
PyTorch's part: it lends tensors, gives the current stream and computes on stand-ins. The rest is heed's: operators and
their gradients, arguments and outputs as views of a device, and kernels of the emulated device, which the host loads as
a libheed_cuda. A PyTorch without CUDA records no graph of such tensors, so the checks call backward operators as
autograd does. Each check prints its name when it has passed."""
import ctypes
import itertools
import sys
from pathlib import Path

import numpy as np
import torch

import heed
import heed.torch
import producers
import test_bindings

KEYS, KEY = torch._C.DispatchKeySet, torch._C.DispatchKey
EMULATED = Path(__file__).resolve().parents[2] / "build/release/emulated/libheed_cuda.so"
STREAM = 0x5EED0
CODES = {torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.float32: (2, 32), torch.float64: (2, 64),
         torch.int64: (0, 64), torch.int32: (0, 32), torch.bool: (6, 8)}


class OnDevice(torch.Tensor):
    """`x` as if on a device: heed finds its memory at `address`, and that of results at addresses without memory."""

    @staticmethod
    def __new__(cls, x, address=None, index=0):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, strides=x.stride(), dtype=x.dtype,
                                                   device=f"cuda:{index}")

    def __init__(self, x, address=None, index=0):
        self.x, self.address, self.index = x, address, index
        self.sizes, self.strides = (ctypes.c_int64 * 8)(*x.shape), (ctypes.c_int64 * 8)(*x.stride())

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.namespace == "heed":  # to what is registered for CUDA
            return func.redispatch(KEYS(KEY.CUDA), *args)
        kwargs = {key: "cpu" if key == "device" else x for key, x in (kwargs or {}).items()}
        plain = torch.utils._pytree.tree_map(lambda x: x.x if isinstance(x, OnDevice) else x, (args, kwargs))
        address = next((x.address for x in args if isinstance(x, OnDevice)), None)
        if address is not None and func is not torch.ops.aten.detach.default:
            address = next(nowhere)
        return torch.utils._pytree.tree_map(lambda x: OnDevice(x, address) if isinstance(x, torch.Tensor) else x,
                                            func(*plain[0], **plain[1]))


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(producers.DLTensor))
def lend(x, out):
    code, bits = CODES[x.dtype]
    if not isinstance(x, OnDevice):
        sizes, strides = (ctypes.c_int64 * 8)(*x.shape), (ctypes.c_int64 * 8)(*x.stride())
        lent.append((sizes, strides))
        out[0] = producers.DLTensor(x.data_ptr(), 1, 0, x.dim(), code, bits, 1, sizes, strides, 0)
    else:
        out[0] = producers.DLTensor(x.x.data_ptr() if x.address is None else x.address, 2, x.index, x.dim(), code, bits,
                                    1, x.sizes, x.strides, 0)
    return 0


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
def current_stream(device_type, index, out):
    asked.append((device_type, index))
    out[0] = STREAM + index
    return 0


class Exchange(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("previous", ctypes.c_void_p),
                ("unused", ctypes.c_void_p * 3), ("lend", ctypes.c_void_p), ("current_stream", ctypes.c_void_p)]


class Host:
    """Connects heed.torch as at import, but to another table; the type is torch.Tensor as before."""

    def connect(self):
        self.table = Exchange(1, 3, None, (None,) * 3, ctypes.cast(lend, ctypes.c_void_p),
                              ctypes.cast(current_stream, ctypes.c_void_p))
        self.capsule = producers.new_capsule(ctypes.addressof(self.table), b"dlpack_exchange_api", None)
        original, torch.Tensor.__dlpack_c_exchange_api__ = torch.Tensor.__dlpack_c_exchange_api__, self.capsule
        heed.torch._operators._connect()
        torch.Tensor.__dlpack_c_exchange_api__ = original


asked, lent, host = [], [], Host()
nowhere = itertools.count(1 << 40, 1 << 24)  # addresses at which there is nothing


def pair(*shape, dtype=torch.bfloat16):
    """A pair of tensors with equal numbers, on the CPU and on the device."""
    x = torch.randn(*shape).to(dtype)
    return x, OnDevice(x.clone())


def close(x, expected, bound=2e-2):
    assert isinstance(x, OnDevice) and x.device == torch.device("cuda:0"), x.device
    expected = expected.detach().double()
    difference = (x.x.double() - expected).abs().max()
    assert difference <= bound * expected.abs().max(), difference


def agree(operator, differentiate, inputs, *options):
    """Results and gradients on the device are those on the CPU."""
    on_cpu = [x.detach().requires_grad_() for x, _ in inputs]
    expected = operator(*on_cpu, *options)
    incoming = torch.randn(expected[0].shape).to(expected[0].dtype)
    expected[0].backward(incoming)
    given = [x for _, x in inputs]
    results = operator(*given, *options)
    for got, wanted in zip(results, expected, strict=True):
        close(got, wanted)
    kept = results if operator is torch.ops.heed.attention else ()
    of_results = (OnDevice(incoming), *[None] * (len(results) - 1))
    found = differentiate([True] * len(given), of_results, *given, *options, *kept)
    for i, x in enumerate(on_cpu):
        close(found[i], x.grad)


def refused(call, *words):
    try:
        call()
    except (heed.InvalidArgument, heed.Unsupported) as error:
        assert all(word in str(error) for word in words), str(error)
    else:
        raise AssertionError(f"not refused: {words}")


def check_attention():
    options = heed.torch._operators.attention_options.given({"causal": True}, heed.torch.attention)
    inputs = [pair(2, 40, heads, 64) for heads in (4, 2, 2)]
    agree(torch.ops.heed.attention, heed.torch._operators._differentiate, inputs, *options)
    assert asked and set(asked) == {(2, 0)} and library.emulated_last_stream() == STREAM


def check_numbers_of_heads_on_either_device():
    q, k, v = (pair(2, 24, 4, 32) for _ in range(3))
    on_host = {"alibi": torch.rand(4), "sinks": torch.rand(4)}
    expected = heed.torch.attention(q[0], k[0], v[0], causal=True, dropout=0.25, seed=7, **on_host)
    for numbers in (on_host, {name: OnDevice(x) for name, x in on_host.items()}):
        close(heed.torch.attention(q[1], k[1], v[1], causal=True, dropout=0.25, seed=7, **numbers), expected)
    for name, x in on_host.items():
        refused(lambda name=name, x=x: heed.torch.attention(q[1], k[1], v[1], **{name: OnDevice(x, index=1)}), name,
                "is on cuda:1, expected cuda:0 as q")


def check_gradients_of_numbers_of_heads():
    table = heed.torch._operators.attention_options
    inputs = [pair(2, 24, heads, 32) for heads in (4, 2, 2)]
    values = {name: torch.rand(4) for name in ("alibi", "sinks")}
    on_cpu = {name: x.clone().requires_grad_() for name, x in values.items()}
    o = heed.torch.attention(*(x for x, _ in inputs), causal=True, **on_cpu)
    incoming = torch.randn(o.shape).to(o.dtype)
    o.backward(incoming)
    given = [x for _, x in inputs]
    options = table.given({"causal": True, **{name: OnDevice(x) for name, x in values.items()}}, heed.torch.attention)
    results = torch.ops.heed.attention(*given, *options)
    needed = [isinstance(x, OnDevice) for x in (*given, *options)]
    found = heed.torch._operators._differentiate(needed, (OnDevice(incoming), None), *given, *options, *results)
    at = {option.name: 3 + i for i, option in enumerate(table.table)}
    for name, x in on_cpu.items():
        close(found[at[name]], x.grad)


def check_out_and_heads_first():
    q, k, v = (pair(1, 24, 4, 32) for _ in range(3))
    out = OnDevice(torch.full((1, 24, 4, 32), float("nan"), dtype=torch.bfloat16))
    assert heed.torch.attention(q[1], k[1], v[1], out=out) is out
    close(out, heed.torch.attention(q[0], k[0], v[0]))
    swapped = [[x.transpose(1, 2) for x in (y[0], y[1])] for y in (q, k, v)]
    o = torch.ops.heed.attention(*(x[1] for x in swapped), True)[0]
    close(o.transpose(1, 2), heed.torch.attention(q[0], k[0], v[0]))


def check_recurrence():
    inputs = [pair(2, 30, 3, 16) for _ in range(3)]
    decay = -torch.rand(2, 30, 3, 16).bfloat16()
    inputs.append((decay, OnDevice(decay)))
    agree(torch.ops.heed.gla, heed.torch._mechanisms.mechanisms["gla"].differentiate, inputs)
    on_cpu = heed.torch.gla(*(x[0] for x in inputs), return_state=True)
    for got, expected in zip(heed.torch.gla(*(x[1] for x in inputs), return_state=True), on_cpu, strict=True):
        close(got, expected)
    assert library.emulated_last_stream() == STREAM
    lengths = torch.tensor([30, 11])
    close(heed.torch.gla(*(x[1] for x in inputs), lengths=lengths),
          heed.torch.gla(*(x[0] for x in inputs), lengths=lengths))
    refused(lambda: heed.torch.gla(*(x[1] for x in inputs), lengths=OnDevice(lengths)),
            "gla: lengths is on cuda:0, expected the CPU")


def check_steps():
    """One token, the state in place."""
    heads, numbers, group, writes = (2, 3, 16), (2, 3), (2, 1, 16), (2, 2, 3, 16)
    for name, shapes, decays in (("gla", [heads] * 4, 3), ("simple_gla", [*[heads] * 3, numbers], 3),
                                 ("gated_delta_rule", [*[heads] * 3, numbers, numbers], 3),
                                 ("delta_product", [heads, writes, writes, numbers, writes[:-1]], 3),
                                 ("ssd", [heads, numbers, (3,), group, group], 2)):
        step = getattr(heed.torch, f"{name}_step")
        inputs = [torch.rand(*shape).bfloat16() * (-1 if i == decays else 1) for i, shape in enumerate(shapes)]
        given, on_cpu = [*map(OnDevice, inputs)], torch.randn(2, 3, 16, 16)
        on_device = OnDevice(on_cpu.clone())
        version, out = on_device._version, OnDevice(torch.empty(heads, dtype=torch.bfloat16))
        for options in ({}, {"out": out}):
            expected = step(*inputs, on_cpu)
            o = step(*given, on_device, **options)
            assert not options or o is out
            close(o, expected)
            close(on_device, on_cpu)
        assert on_device._version > version and library.emulated_last_stream() == STREAM
        refused(lambda: step(*given, on_cpu), f"{name}_step: state is on the CPU, expected cuda:0")
        refused(lambda: step(given[0], inputs[1], *given[2:], on_device), f"{name}_step: ",
                "is on the CPU, expected cuda:0")
        wanted = OnDevice(inputs[0]).requires_grad_()
        refused(lambda: step(wanted, *given[1:], on_device), "requires a gradient")


def check_autocast():
    q, k, v = (pair(1, 16, 2, 32, dtype=torch.float32) for _ in range(3))
    decay = torch.full((1, 16, 2, 32), -0.1)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)  # as torch.autocast does where there is a device
    o, of_gla = heed.torch.attention(q[1], k[1], v[1]), heed.torch.gla(q[1], k[1], v[1], OnDevice(decay))
    torch.set_autocast_enabled("cuda", False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        on_cpu = heed.torch.attention(q[0], k[0], v[0])
        close(of_gla, heed.torch.gla(q[0], k[0], v[0], decay))
    assert o.dtype == of_gla.dtype == on_cpu.dtype == torch.bfloat16
    close(o, on_cpu)


def check_mixed_devices_name_the_argument():
    q, k, v = (pair(1, 8, 2, 32) for _ in range(3))
    refused(lambda: heed.torch.attention(q[1], k[0], v[1]), "attention: k is on the CPU, expected cuda:0 as q")
    refused(lambda: heed.torch.attention(q[0], k[1], v[0]), "attention: k is on cuda:0, expected the CPU")
    refused(lambda: heed.torch.attention(q[1], k[1], OnDevice(v[0], index=1)),
            "attention: v is on cuda:1, expected cuda:0 as q")
    refused(lambda: heed.torch.gla(q[1], k[1], v[0], q[1]), "gla: v is on the CPU, expected cuda:0")


def check_nothing_is_copied():
    q, k, v = (pair(1, 32, 2, 32) for _ in range(3))
    flipped = OnDevice(q[0].transpose(1, 3))
    refused(lambda: heed.torch.attention(flipped, k[1], v[1]),
            "attention: q is on cuda:0 and its last axis is not contiguous")


def check_a_pytorch_that_does_not_tell_streams():
    x = pair(1, 8, 2, 32)
    host.table.current_stream = None
    refused(lambda: heed.torch.attention(x[1], x[1], x[1]), "this PyTorch does not tell its streams")
    heed.torch.attention(x[0], x[0], x[0])
    host.table.current_stream = ctypes.cast(current_stream, ctypes.c_void_p)


def check_shapes_without_data():
    """In a traced graph results are on the tensors' device, and constants may be on the CPU."""
    with torch._subclasses.FakeTensorMode():
        q, k = (torch.empty(2, 8, heads, 32, dtype=torch.bfloat16, device="cuda") for heads in (4, 2))
        o, lse = torch.ops.heed.attention(q, k, k, alibi=torch.empty(4))
        assert o.shape == q.shape and o.device == lse.device == q.device and lse.dtype == torch.float32
        needed = [True, False, True, *[False] * len(heed.torch._operators._DIFFERENTIABLE)]
        assert [x.device for x in torch.ops.heed.attention_backward(o, None, q, k, k, o, lse, needed)] == [q.device] * 2
        on_cpu = torch.empty(2, 8, 2, 32, dtype=torch.bfloat16)
        refused(lambda: heed.torch.attention(on_cpu, k, on_cpu), "attention: k is on cuda:0, expected cpu as q")
        assert heed.torch.gla(k, k, k, k).device == q.device


def check_memory_of_a_device_is_not_read():
    """Every mechanism gets tensors at addresses without memory, and there is no library for devices."""
    others = {"linformer": {"q": (1, 4, 2, 8), "k": (1, 4, 2, 8), "v": (1, 4, 2, 8), "e": (3, 4), "f": (3, 4)},
              "causal_conv1d": {"x": (1, 8, 4), "weight": (8, 3)}}
    for name, mechanism in heed.torch._mechanisms.mechanisms.items():
        values = test_bindings.values_of(name) or {key: np.zeros(shape) for key, shape in others[name].items()}
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            tensors = {key: torch.from_numpy(x) for key, x in values.items()}
            tensors = {key: OnDevice(x.to(dtype) if x.is_floating_point() else x, next(nowhere))
                       for key, x in tensors.items()}
            refused(lambda: getattr(heed.torch, name)(**tensors), name)
            arguments = mechanism.complete(tuple(tensors.get(key) for key in mechanism.inputs))
            gradients = mechanism.new_output(arguments[mechanism.output]), *[None] * (mechanism.num_incoming - 1)
            needed = [arguments[i] is not None for i in mechanism.differentiable]
            refused(lambda: mechanism.backward_operator(*gradients, needed, *arguments), name)
            if mechanism.states:
                states = [OnDevice(torch.empty(mechanism.shape_of(x, arguments, 1), dtype=torch.float32), next(nowhere))
                          for x in mechanism.states if mechanism.settings.get(x.setting, True)]
                state = mechanism.state_type(*states) if len(states) > 1 else states[0]
                forms = {key: next(form.split(", ") for form in forms if form.count(",") + 1 == tensors[key].dim())
                         for key, forms in zip(mechanism.inputs, mechanism.forms) if key in tensors}
                token = {key: OnDevice(x.x.select(forms[key].index("T"), 0), next(nowhere)) if "T" in forms[key] else x
                         for key, x in tensors.items()}
                refused(lambda: getattr(heed.torch, f"{name}_step")(**token, state=state), f"{name}_step")
    x = OnDevice(torch.zeros(1, 8, 2, 32, dtype=torch.bfloat16), address=next(nowhere))
    refused(lambda: heed.torch.attention(x, x, x), "attention: no kernel for this problem: ",
            "softmax_cuda is not there")
    for dtype in (torch.int32, torch.int64):
        for name in ("align", "key_lengths", "key_starts", "query_lengths", "prefix", "segments"):
            numbers = OnDevice(torch.zeros((1, 8) if name == "segments" else (1,), dtype=dtype), address=next(nowhere))
            refused(lambda name=name, numbers=numbers: heed.torch.attention(x, x, x, **{name: numbers}),
                    f"attention: {name}", "is on cuda:0, expected the CPU")
    seed = OnDevice(torch.zeros((), dtype=torch.int64), address=next(nowhere))
    refused(lambda: heed.torch.attention(x, x, x, dropout=0.5, seed=seed),
            "attention: seed is on cuda:0, expected the CPU")
    for call in (lambda: heed.attention(x, x, x), lambda: heed.torch.attention_weights(x, x),
                 lambda: heed.torch.rotary(x, [0] * 8, interleaved=False)):
        refused(call, "on")


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}

if __name__ == "__main__":
    torch.manual_seed(3)
    host.connect()
    library = ctypes.CDLL("libheed_cuda.so") if len(sys.argv) == 1 else None
    if library is not None:
        library.emulated_last_stream.restype = ctypes.c_void_p
    for name, check in CHECKS.items():
        if (name == "memory_of_a_device_is_not_read") == (library is None):
            check()
            print(name, flush=True)
