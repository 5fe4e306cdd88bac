#!/usr/bin/env python3
# Recurrent mechanisms of heed beside other libraries that run them on a CPU, in one process, interleaved.
"""Every line: the peer's output (and gradients) are compared with heed's, then both are timed in turns; printed is the
peer's time over heed's, and the goal where there is one. A peer that is not installed, or lacks what a line needs, is
named and left out; `pip install onnxruntime onnx jax` brings two of them.

Peers: ONNX Runtime's contrib operator LinearAttention; the causal product of pytorch-fast-transformers, C++; the chunk
form of linear attention in plain PyTorch, as GPU libraries arrange it; the recurrence in plain PyTorch, token by token;
the same as a scan of JAX, compiled; MesaNet by chunks and by direct solutions; TTT-Linear by mini-batches; torch.fft;
Mamba, Mamba-2, RecurrentGemma, Qwen3-Next, Kimi Linear, xLSTM and RWKV-4 as Transformers computes them where no GPU
library is. One thread is timed by the CPU time of the process, as some of them work on threads of their own.

Usage: compare_recurrent.py [FILTER] [--json] [--threads 1] [--rounds 5] [--tokens 2048]
Example: compare_recurrent.py 'gla/.*/jax'
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import turns
from mesa_peers import mesa_chunks, mesa_solve
from recurrent_problems import (
    DeltaProblem,
    MesaProblem,
    MlstmProblem,
    Problem,
    Rwkv4Problem,
    ScanProblem,
    SsdProblem,
    TttProblem,
)
from ttt_peers import ttt_dual

TOLERANCE = 1e-4  # relative, of sums over thousands of tokens in float32, on both sides
CHUNK = 64


class Missing(Exception):
    """A peer that cannot run here."""


def transformers_mamba(problem, backward):
    function = of_transformers("mamba.modeling_mamba", "mamba_selective_scan")

    def scan(u, delta, A, B, C, D):
        o = function(u, delta, A, B, C, D, delta_softplus=True)
        return o[0] if isinstance(o, tuple) else o

    return problem.by_autograd(scan, backward)


def transformers_rglru(problem, backward):
    module = "recurrent_gemma.modeling_recurrent_gemma"
    scan, root = (of_transformers(module, "RecurrentGemmaRglru")._rnn_scan,
                  of_transformers(module, "SqrtBoundDerivative"))
    torch = problem.torch

    def function(x, input_gate, recurrence_gate, a):
        reset = (torch.arange(x.shape[1]) == 0)[None, :, None]
        log_a = -8.0 * recurrence_gate.sigmoid() * torch.nn.functional.softplus(a)
        multiplier = reset + ~reset * root.apply(1 - torch.exp(2 * log_a))
        return scan(None, x * input_gate.sigmoid() * multiplier, log_a.exp(), reset, None)[0]

    return problem.by_autograd(function, backward)


def s4d_fft(problem, backward):
    """S4D as in the S4 package: the kernel by its powers, then transforms."""
    torch = problem.torch

    def function(u, log_dt, log_A_real, A_imag, C, D):
        dt, A = log_dt.exp()[:, None], torch.complex(-log_A_real.exp(), A_imag)
        weights = torch.view_as_complex(C.contiguous()) * ((dt * A).exp() - 1) / A
        powers = torch.exp((dt * A)[..., None] * torch.arange(u.shape[-1]))
        kernel = 2 * torch.einsum("hn,hnl->hl", weights, powers).real
        n = 2 * u.shape[-1]
        return torch.fft.irfft(torch.fft.rfft(u, n=n) * torch.fft.rfft(kernel, n=n),
                               n=n)[..., : u.shape[-1]] + D[:, None] * u

    return problem.by_autograd(function, backward)


def jax_mamba(problem, backward):
    try:
        import jax
        import jax.numpy as jnp
    except ImportError as error:
        raise Missing(f"{error.name} is not installed") from error
    if problem.torch.get_num_threads() > 1:
        raise Missing("JAX takes the threads of the process, not a number of them: measured with --threads 1 alone")
    arrays = [jnp.asarray(x.numpy()) for x in problem.leaves]
    d_o = jnp.asarray(problem.d_o.numpy())

    def function(u, delta, A, B, C, D):
        def step(h, token):
            u, s, B, C = token
            h = jnp.exp(s[:, None] * A) * h + (s * u)[:, None] * B
            return h, h @ C

        tokens = (u[0].T, jax.nn.softplus(delta[0]).T, B[0].T, C[0].T)
        return (jax.lax.scan(step, jnp.zeros(A.shape), tokens)[1].T + D[:, None] * u[0])[None]

    compiled = jax.jit(with_gradients(jax, function, d_o) if backward else lambda *inputs: (function(*inputs),))
    return lambda: [jax.device_get(x) for x in jax.block_until_ready(compiled(*arrays))]


def torch_fft(problem, backward):
    """The long convolution as in S4 and Hyena: transforms of twice the length."""
    fft = problem.torch.fft

    def function(u, kernel):
        n = 2 * u.shape[-1]
        return fft.irfft(fft.rfft(u, n=n) * fft.rfft(kernel, n=n), n=n)[..., : u.shape[-1]]

    return problem.by_autograd(function, backward)


def of_transformers(module, name):
    try:
        return getattr(__import__(f"transformers.models.{module}", fromlist=[name]), name)
    except (ImportError, AttributeError) as error:
        raise Missing(f"transformers has no {module}.{name}") from error


def transformers_gated_delta(problem, backward):
    function = of_transformers("qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule")
    return problem.by_autograd(lambda q, k, v, g, beta: function(q, k, v, g, beta)[0], backward)


def transformers_kda(problem, backward):
    function = of_transformers("kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention")
    return problem.by_autograd(lambda q, k, v, g, beta: function(q, k, v, g, beta)[0], backward)


def transformers_mlstm(problem, backward):
    function = of_transformers("xlstm.modeling_xlstm", "mlstm_chunkwise_native_autograd")

    def with_tokens_first(*inputs):
        o = function(*(x.transpose(1, 2).contiguous() for x in inputs))
        return (o[0] if isinstance(o, tuple) else o).transpose(1, 2)

    return problem.by_autograd(with_tokens_first, backward)


def transformers_rwkv4(problem, backward):
    function = of_transformers("rwkv.modeling_rwkv", "rwkv_linear_attention_cpu")
    return problem.by_autograd(lambda k, v, w, u: function((-w).log(), u, k, v)[0], backward)


def transformers_ssd(problem, backward):
    try:
        import transformers
        from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
    except ImportError as error:
        raise Missing(f"{error.name} is not installed, or has no mamba2_chunk_scan") from error
    chunk_size = transformers.Mamba2Config().chunk_size

    def function(x, dt, A, B, C, D, bias):
        return mamba2_chunk_scan(x, dt, A, B, C, chunk_size=chunk_size, D=D, dt_bias=bias, dt_softplus=True)

    return problem.by_autograd(function, backward)


def chunk_form(problem, backward):
    """o = scale (Q S + lower(Q K^T .* decays) V) per chunk, S carried over, without a gate or with one per token."""
    torch, scale = problem.torch, problem.scale
    if problem.gate is not None and problem.gate.dim() != 3:
        raise Missing("the chunk form has no gate per channel")
    if problem.shape[0] % CHUNK:
        raise Missing(f"the chunk form needs a multiple of {CHUNK} tokens")

    def function(q, k, v, gate=None):
        q, k, v = (x.transpose(1, 2).unflatten(2, (-1, CHUNK)) for x in (q, k, v))  # [B, H, chunks, CHUNK, D]
        lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
        state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
        outputs = []
        if gate is None:
            inner = (q @ k.transpose(-1, -2)).masked_fill(~lower, 0) @ v
            for i in range(q.shape[2]):
                outputs.append(q[:, :, i] @ state + inner[:, :, i])
                state = state + k[:, :, i].transpose(-1, -2) @ v[:, :, i]
        else:
            total = gate.transpose(1, 2).unflatten(2, (-1, CHUNK)).cumsum(-1)
            difference = total.unsqueeze(-1) - total.unsqueeze(-2)
            decays = difference.masked_fill(~lower, -float("inf")).exp()
            inner = (q @ k.transpose(-1, -2) * decays) @ v
            from_start = total.exp().unsqueeze(-1)
            to_end = (total[..., -1:] - total).exp().unsqueeze(-1)
            for i in range(q.shape[2]):
                outputs.append((q[:, :, i] * from_start[:, :, i]) @ state + inner[:, :, i])
                state = (total[:, :, i, -1].exp()[..., None, None] * state
                         + (k * to_end)[:, :, i].transpose(-1, -2) @ v[:, :, i])
        return scale * torch.stack(outputs, 2).flatten(2, 3).transpose(1, 2)

    return problem.by_autograd(function, backward)


def torch_loop(problem, backward):
    """Token by token, as reference implementations are written."""
    torch, scale = problem.torch, problem.scale

    def function(q, k, v, gate=None):
        state = q.new_zeros(1, q.shape[2], q.shape[3], v.shape[3])
        outputs = []
        decays = None if gate is None else gate.exp()
        for t in range(q.shape[1]):
            update = k[:, t, :, :, None] * v[:, t, :, None, :]
            if decays is not None:
                decay = decays[:, t]
                update = update + state * (decay[..., None] if decay.dim() == 3 else decay[..., None, None])
            else:
                update = update + state
            state = update
            outputs.append((q[:, t, :, :, None] * state).sum(-2))
        return scale * torch.stack(outputs, 1)

    return problem.by_autograd(function, backward)


def idiap(problem, backward):
    try:
        from fast_transformers.causal_product import causal_dot_product
    except Exception as error:  # a half-built extension raises anything
        raise Missing(f"pytorch-fast-transformers: {error}") from error
    if problem.gate is not None:
        raise Missing("pytorch-fast-transformers has no gates")

    def function(q, k, v):
        o = causal_dot_product(*(x.transpose(1, 2).contiguous() for x in (q, k, v)))
        return problem.scale * o.transpose(1, 2)

    return problem.by_autograd(function, backward)


def onnx(problem, backward):
    if backward:
        raise Missing("ONNX Runtime's operator has no backward pass")
    try:
        import onnx as format_of
        import onnxruntime
        from onnx import TensorProto, helper
    except ImportError as error:
        raise Missing(f"{error.name} is not installed") from error
    tokens, heads, keys, values = problem.shape
    sizes = {"q": heads * keys, "k": heads * keys, "v": heads * values}
    names, rule = ["q", "k", "v"], "linear"
    if problem.gate is not None:
        names, rule = ["q", "k", "v", "", "gate"], "gated"
        sizes["gate"] = heads * (keys if problem.gate.dim() == 4 else 1)
    if isinstance(problem, DeltaProblem):
        names, rule = [*names, "beta"], "gated_delta"
        sizes["beta"] = heads
    node = helper.make_node("LinearAttention", names, ["o", "state"], domain="com.microsoft", update_rule=rule,
                            q_num_heads=heads, kv_num_heads=heads, scale=problem.scale)
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, tokens, size])
                      for name, size in sizes.items()],
        [helper.make_tensor_value_info("o", TensorProto.FLOAT, [1, tokens, heads * values])])
    model = helper.make_model(graph,
                              opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)])
    model.ir_version = min(model.ir_version, format_of.IR_VERSION, 10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = problem.torch.get_num_threads(), 1
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises many types
        raise Missing(f"onnxruntime {onnxruntime.__version__}: {str(error).splitlines()[0][:120]}") from error
    feed = {name: x.reshape(1, tokens, -1).numpy() for name, x in zip(sizes, problem.leaves, strict=True)}
    return lambda: [session.run(["o"], feed)[0].reshape(1, tokens, heads, values)]


def with_gradients(jax, function, d_o):
    def both(*inputs):
        o, pull = jax.vjp(function, *inputs)
        return (o, *pull(d_o))

    return both


def jax_scan(problem, backward):
    try:
        import jax
        import jax.numpy as jnp
    except ImportError as error:
        raise Missing(f"{error.name} is not installed") from error
    if problem.torch.get_num_threads() > 1:
        raise Missing("JAX takes the threads of the process, not a number of them: measured with --threads 1 alone")
    scale = problem.scale
    arrays = [jnp.asarray(x.detach().numpy()[0]) for x in problem.leaves]
    d_o = jnp.asarray(problem.d_o.numpy()[0])

    def function(*inputs):
        q, k, v = inputs[:3]

        def step(state, token):
            q, k, v = token[:3]
            decay = jnp.exp(token[3]) if len(token) > 3 else jnp.ones(())
            decay = decay[..., None] if decay.ndim == 2 else decay.reshape(-1, 1, 1)
            state = decay * state
            if len(token) > 4:  # the delta rule first removes the key's old value
                v = token[4][:, None] * (v - jnp.einsum("hk,hkv->hv", k, state))
            state = state + k[:, :, None] * v[:, None, :]
            return state, jnp.einsum("hk,hkv->hv", q, state)

        state = jnp.zeros((q.shape[1], q.shape[2], v.shape[2]))
        return scale * jax.lax.scan(step, state, inputs)[1]

    compiled = jax.jit(with_gradients(jax, function, d_o) if backward else lambda *inputs: (function(*inputs),))
    return lambda: [jax.device_get(x)[None] for x in jax.block_until_ready(compiled(*arrays))]


PEERS = {"onnxruntime": onnx, "idiap": idiap, "chunks": chunk_form, "loop": torch_loop, "jax": jax_scan}
PEERS_OF = {
    "ssd": {"transformers": transformers_ssd},
    "gated_delta_rule": {"transformers": transformers_gated_delta, "onnxruntime": onnx, "jax": jax_scan},
    "kda": {"transformers": transformers_kda, "jax": jax_scan},
    "mesa": {"chunks": mesa_chunks, "solve": mesa_solve},
    "ttt_linear": {"dual": ttt_dual},
    "mlstm": {"transformers": transformers_mlstm},
    "rwkv4": {"transformers": transformers_rwkv4},
    "selective_scan": {"transformers": transformers_mamba, "jax": jax_mamba},
    "rg_lru": {"transformers": transformers_rglru},
    "s4d": {"torch.fft": s4d_fft},
    "long_convolution": {"torch.fft": torch_fft},
    "long_convolution_65536": {"torch.fft": torch_fft},
}
PROBLEMS = {"ssd": SsdProblem, "gated_delta_rule": DeltaProblem, "kda": DeltaProblem, "mesa": MesaProblem,
            "ttt_linear": TttProblem, "mlstm": MlstmProblem, "rwkv4": Rwkv4Problem, "selective_scan": ScanProblem,
            "rg_lru": ScanProblem, "s4d": ScanProblem, "long_convolution": ScanProblem,
            "long_convolution_65536": ScanProblem}
# Heads, keys, values.
SHAPES = {"linear": (12, 64, 64), "simple_gla": (6, 64, 128), "gla": (6, 64, 128), "ssd": (24, 128, 64),
          "gated_delta_rule": (6, 128, 128), "kda": (6, 128, 128), "mesa": (4, 64, 64), "ttt_linear": (4, 64, 64),
          "mlstm": (6, 128, 128), "rwkv4": (6, 128, 128),
          "selective_scan": (12, 16, 128), "rg_lru": (20, 1, 128), "s4d": (4, 32, 128),
          "long_convolution": (6, 128, 128), "long_convolution_65536": (1, 16, 16)}
# Tokens where they are not the usual number; training alone takes fewer where autograd keeps a tensor per token.
TOKENS = {"long_convolution_65536": 65536}
TRAINED_TOKENS = {"selective_scan": 512, "rg_lru": 512, "mesa": 1024}
GOALS = {("linear", "forward", "onnxruntime"): 5, ("gla", "forward", "onnxruntime"): 3, ("linear", "train", "idiap"): 8,
         ("linear", "train", "chunks"): 8, ("gla", "train", "loop"): 40, ("gla", "train", "jax"): 40,
         ("ssd", "forward", "transformers"): 15, ("ssd", "train", "transformers"): 15,
         ("gated_delta_rule", "forward", "transformers"): 3.5, ("gated_delta_rule", "train", "transformers"): 4,
         ("gated_delta_rule", "forward", "onnxruntime"): 1.3, ("gated_delta_rule", "forward", "jax"): 2.5,
         ("gated_delta_rule", "train", "jax"): 30,
         ("kda", "forward", "transformers"): 25, ("kda", "train", "transformers"): 150,
         **{("mesa", kind, peer): 5 for kind in ("forward", "train") for peer in ("chunks", "solve")},
         ("ttt_linear", "forward", "dual"): 5, ("ttt_linear", "train", "dual"): 5,
         ("mlstm", "forward", "transformers"): 2.2, ("mlstm", "train", "transformers"): 3,
         ("selective_scan", "forward", "transformers"): 40, ("selective_scan", "train", "transformers"): 60,
         ("selective_scan", "forward", "jax"): 4, ("selective_scan", "train", "jax"): 10,
         ("rg_lru", "forward", "transformers"): 8, ("rg_lru", "train", "transformers"): 100,
         ("rwkv4", "forward", "transformers"): 20, ("rwkv4", "train", "transformers"): 100,
         **{(name, kind, "torch.fft"): 2 for name in ("long_convolution", "long_convolution_65536")
            for kind in ("forward", "train")}}


def peers_of(mechanism):
    return PEERS_OF.get(mechanism, PEERS)


def lines(threads):
    """(name, mechanism, pass, peer, threads)."""
    return [(f"{mechanism}/{kind}/{peer}/threads:{t}", mechanism, kind, peer, t)
            for mechanism in SHAPES for kind in ("forward", "train") for peer in peers_of(mechanism) for t in threads]


def difference(mine, other):
    """The largest relative difference of two lists of arrays."""
    import numpy as np
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(mine, other, strict=True))


def measure(torch, heed, line, options):
    name, mechanism, kind, peer, threads = line
    torch.set_num_threads(threads)
    tokens = TOKENS.get(mechanism, options.tokens)
    if kind == "train":
        tokens = min(tokens, TRAINED_TOKENS.get(mechanism, tokens))
    problem = PROBLEMS.get(mechanism, Problem)(torch, heed, mechanism, tokens, *SHAPES[mechanism])
    ours = problem.ours(kind == "train", threads)
    try:
        theirs = peers_of(mechanism)[peer](problem, kind == "train")
        result = theirs()
    except Missing as error:
        return {"name": name, "skipped": str(error)}
    error = difference(ours(), result)
    if not error <= TOLERANCE:
        raise SystemExit(f"{name}: not timed: results differ by {error:.1e}, expected at most {TOLERANCE:.0e}")
    return turns.timed_beside_peer(name, ours, theirs, threads, options.rounds, error,
                                   GOALS.get((mechanism, kind, peer)))


def versions():
    """{name: version} of the installed peers."""
    found = {}
    for name in ("torch", "onnxruntime", "jax", "transformers"):
        try:
            found[name] = __import__(name).__version__
        except ImportError:
            found[name] = None
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    turns.add_arguments(parser, rounds=5)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of each problem")
    options = parser.parse_args()
    chosen = turns.chosen_lines(parser, options, lines)
    try:
        import torch
    except ImportError:
        print("compare_recurrent.py: PyTorch is not installed here: run scripts/setup, then .venv/bin/python",
              file=sys.stderr)
        return 1
    import heed
    installed = {"cpu": turns.cpu_name(), "heed": heed.__version__, **versions()}
    turns.report(installed, "float32", 40, (measure(torch, heed, line, options) for line in chosen), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
