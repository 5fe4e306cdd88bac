#!/usr/bin/env python3
# heed beside ONNX Runtime's GroupQueryAttention: one new token against keys and values in tensors, interleaved.
"""Every line: both outputs are compared with float64, then timed in turns; printed is ONNX Runtime's time over heed's,
and the goal.

Keys and values are [1, H, T, D] contiguous, 8 heads of 128 channels, float32. ONNX Runtime has its past and present
bound to the same memory, so that nothing but the new row is copied; heed.attention reads the same tensors, without a
cache of its own. One thread is timed by the CPU time of the process. Without onnxruntime and onnx (pip install
onnxruntime onnx) nothing is measured.

Usage: compare_onnx.py [FILTER] [--json] [--threads 1,2] [--rounds 9]
Example: compare_onnx.py 'G1/.*threads:1'
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import turns

HEADS, DIM = 8, 128
TOLERANCE = 2e-6  # absolute, in float32; outputs are about 0.02
GOAL = 1.0  # for one thread and one query head per key head


def lines(threads):
    """(name, keys, query heads per key head, threads)."""
    return [(f"G{group}/T{keys}/threads:{t}", keys, group, t) for group in (1, 4, 8) for keys in (4096, 32768)
            for t in threads]


def session_of(onnxruntime, onnx, group, threads):
    """A session of one GroupQueryAttention."""
    helper, proto = onnx.helper, onnx.TensorProto
    names = ["q", "k", "v", "past_k", "past_v", "last", "total"]
    node = helper.make_node("GroupQueryAttention", names, ["o", "present_k", "present_v"], domain="com.microsoft",
                            num_heads=HEADS * group, kv_num_heads=HEADS)
    row, cache = [1, 1, HEADS * DIM], [1, HEADS, "T", DIM]
    shapes = {"q": [1, 1, HEADS * group * DIM], "k": row, "v": row, "past_k": cache, "past_v": cache}
    inputs = [helper.make_tensor_value_info(name, proto.FLOAT, shape) for name, shape in shapes.items()]
    inputs += [helper.make_tensor_value_info("last", proto.INT32, [1]),
               helper.make_tensor_value_info("total", proto.INT32, [1])]
    outputs = [helper.make_tensor_value_info("o", proto.FLOAT, shapes["q"]),
               *(helper.make_tensor_value_info(name, proto.FLOAT, cache) for name in ("present_k", "present_v"))]
    model = helper.make_model(helper.make_graph([node], "g", inputs, outputs),
                              opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)])
    model.ir_version = min(model.ir_version, onnx.IR_VERSION, 10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # else they take heed's time
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def measure(np, heed, onnxruntime, onnx, line, rounds):
    """A dict of one line."""
    name, keys, group, threads = line
    random = np.random.default_rng(1)
    q = random.standard_normal((1, HEADS * group, 1, DIM), dtype=np.float32)
    k, v = (random.standard_normal((1, HEADS, keys, DIM), dtype=np.float32) for _ in range(2))
    q1, k1, v1 = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    session = session_of(onnxruntime, onnx, group, threads)
    binding = session.io_binding()
    value = onnxruntime.OrtValue.ortvalue_from_numpy
    held = {name: value(np.ascontiguousarray(x[:, :, -1]).reshape(1, 1, -1)) for name, x in (("k", k), ("v", v))}
    held |= {"q": value(q.reshape(1, 1, -1)), "past_k": value(k), "past_v": value(v),
             "last": value(np.array([keys - 1], np.int32)), "total": value(np.array([keys], np.int32))}
    for name_of, x in held.items():
        binding.bind_ortvalue_input(name_of, x)
    for of in ("k", "v"):
        binding.bind_ortvalue_output(f"present_{of}", held[f"past_{of}"])
    output = value(np.zeros((1, 1, HEADS * group * DIM), np.float32))
    binding.bind_ortvalue_output("o", output)

    def ours():
        return heed.attention(q1, k1, v1, threads=threads)

    def theirs():
        session.run_with_iobinding(binding)
        return output

    repeated = [np.repeat(x, group, axis=1).astype(np.float64) for x in (k, v)]
    s = q.astype(np.float64) @ repeated[0].swapaxes(-1, -2) * DIM**-0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    reference = (p / p.sum(-1, keepdims=True)) @ repeated[1]
    error = max(float(abs(o.reshape(reference.shape) - reference).max()) for o in (ours(), theirs().numpy()))
    if not error <= TOLERANCE:
        raise SystemExit(f"{name}: not timed: error {error:.1e}, expected at most {TOLERANCE:.0e}")
    return turns.timed_beside_peer(name, ours, theirs, threads, rounds, error, GOAL if group == threads == 1 else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    turns.add_arguments(parser, rounds=9, threads="1,2")
    options = parser.parse_args()
    chosen = turns.chosen_lines(parser, options, lines)
    options.tokens = 1
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        print(f"skipped: {error.name} is not installed (pip install onnxruntime onnx)")
        return 0
    import numpy as np

    import heed
    installed = {"cpu": turns.cpu_name(), "heed": heed.__version__, "onnxruntime": onnxruntime.__version__}
    turns.report(installed, "one token, keys in tensors", 36,
                 (measure(np, heed, onnxruntime, onnx, line, options.rounds) for line in chosen), options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
