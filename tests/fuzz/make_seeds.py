#!/usr/bin/env python3
"""Writes the seeds of the fuzz targets: small valid inputs from which fuzzing starts, and earlier findings.

Usage: make_seeds.py FOLDER. Makes FOLDER/<target>/<name>, and FOLDER/<target>.dict for libFuzzer where words help.
"""
import json
import math
import random
import struct
import sys
from pathlib import Path


def safetensors(tensors, metadata=None, text=None):
    """The file of {name: (dtype, shape, bytes)}; or of any header text."""
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = (text if text is not None else json.dumps(header)).encode()
    return struct.pack("<Q", len(text)) + text + data


def npy(text, data=b"", version=1):
    text = text.encode() + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(text)) + text + data


def layers(dtype, size, shape, prefixes=("",), **metadata):
    count = 1
    for n in shape:
        count *= n
    content = bytes(size * count)
    return safetensors({p + x: (dtype, shape, content) for p in prefixes for x in "qkv"}, metadata)


SAFETENSORS = {
    "empty": safetensors({}),
    "two": safetensors({"a": ("F32", [1, 2], bytes(8)), "b": ("BOOL", [3], b"\0\1\1")}, {"format": "pt"}),
    "odd": safetensors({"a": ("U8", [1], b"x"), "b": ("F16", [2], bytes(4))}),
    "unknown": safetensors({"a": ("F8_E4M3", [2, 2], bytes(4)), "b": ("F4", [2], b"1")}),
    "scalar": safetensors({"": ("I64", [], bytes(8))}),
    "no_elements": safetensors({"x": ("F64", [0, 3], b"")}),
}

TENSOR_FILES = {
    "plain": layers("F32", 4, [2, 1, 2]),
    "half": layers("BF16", 2, [1, 2, 1, 2], causal="true"),
    "layers": layers("F64", 8, [1, 2, 2], ("layers.0.", "layers.10."), **{
        "layers.10.window": "3,-1", "scale": "0.5", "softcap": "30", "layers.0.causal": "True",
        "tokens": '["a\\u00e9", "' + "\u4e2d" * 40 + '"]', "not_recorded": "sinks"}),
    # A tensor without elements, but with sizes that are too large for a loop.
    "huge_heads": layers("F16", 2, [0, 1 << 40, 1]),
    "huge_batch": layers("BF16", 2, [1 << 40, 0, 1, 1]),
    "huge_tokens": layers("F16", 2, [1 << 20, 1 << 30, 0, 1]),
}

NPY = {
    "f4": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }", bytes(24)),
    "f8": npy("{'descr': '<f8', 'fortran_order': True, 'shape': (1,2), }", bytes(16), 2),
    "bool": npy("{\"descr\": '|b1', 'fortran_order': False, 'shape': (3,)}", b"\0\1\0", 3),
    "scalar": npy("{'shape': (), 'fortran_order': False, 'descr': '<i8'}  ", bytes(8)),
    "none": npy("{'descr': '<f2', 'fortran_order': False, 'shape': (0, 9), }"),
}

COMMAND_LINES = {
    "machine": b"--threads\n4\n--isa\nAVX2",
    "tiles": b"--isa=tiles\n--mechanisms=attention,gla",
    "tensors": b"FILE\n--layer\na.1\n--heads\n0,3\n--dtype\nf64",
    "arrays": b"--q\na\n--k\nb\n--v\nc",
    "math": b"--causal\n--window\n-1,0\n--scale\n1e-3\n--softcap\n30",
    "pattern": b"--pattern\nper_head([atrous(2), atrous(3), bigbird(block=64, random=3), atrous(1)])\n--causal",
    "misfit": b"--pattern=per_head([atrous(2)])",
    "wrong": b"--threads=0\n--layer=7\n--no-causal",
}


# The first eight bytes describe a call of 99 rows, 199 keys, 4 heads over 2 and one sequence, nine two sequences.
PATTERNS = {str(n): b"\x63\xc7\1\1\0\0" + bytes([255 * (n % 2), n]) + expression for n, expression in enumerate((
    b"sliding_window(10, 3) | global_tokens([0, 60])", b"dilated(3, 70) & atrous(2)", b"strided(13) | "
    b"fixed(16, summary=2)", b"longformer(window=20, tokens=[0, 99])", b"bigbird(block=16, random=1, seed=5)",
    b"random_blocks(2, 32)", b"streaming(4, 30)", b"neighborhood(7) & (atrous(3) | atrous(2))",
    b"blocks([[True, False], [False, True]], (64, 40))", b"csr([0, 2, 3, 3, 4], [0, 3, 1, 2], 50)",
    b"per_head([atrous(2), atrous(3), neighborhood(5), fixed(8, 0)])", b"((((atrous(1)))))",
    b"sliding_window(4611686018427387903)", b"bigbird(1, 100)", b"blocks([[[True]], [[False]]], 200)"))}
PATTERNS["by_batch"] = b"\x63\xc7\1\1\0\xff\3\xff\0global_tokens([[0, 99], [7, -1]])"
PATTERNS["keys"] = b"\2\xc7\1\1\0\0\0\0keys([[[0, 3, 150], [7, -1, 2]]])"


def options():
    """Calls of attention: any bytes describe one."""
    generator = random.Random(1)
    return {str(n): generator.randbytes(generator.choice((30, 60, 100, 200))) for n in range(64)}


def cache_parts(kind, *, batch=1, heads=1, dim=1, value_dim=1, capacity=-1, page=64, window=0, sink_tokens=0,
                lengths=(2,), quantize="none", prefix=0, rotary=None, sketch=False, kept=None):
    """Tensors and metadata as Save() of caches writes them; `kept` are the rows of each sequence in the file."""
    names = ["rows"] if kind == "latent" else ["k", "v"]
    widths = dict(zip(("k", "v", "rows"), (dim, value_dim, dim)))
    tensors = {"lengths": ("I64", [batch], struct.pack(f"<{batch}q", *lengths)),
               "appended": ("I64", [batch], struct.pack(f"<{batch}q", *[min(1, n) for n in lengths]))}
    metadata = {"heed_cache": kind, "version": "1", "dtype": "f32", "quantize": quantize, "shared_prefix": str(prefix)}
    for name in ("batch", "heads", "dim", "value_dim", "capacity", "page", "window", "sink_tokens"):
        metadata[name] = str(locals()[name])
    if kind == "ring":
        tensors["first_kept"] = ("I64", [batch], struct.pack(f"<{batch}q", *[max(0, n - window) for n in lengths]))
    if sketch:
        metadata["sketch"] = "int8"
    if rotary:
        nan = float("nan")
        metadata |= {"rotary_pairs": "half_split", "rotary_type": rotary}
        tensors["rotary"] = ("F64", [13],
                             struct.pack("<13d", 1e4, nan, nan, nan if rotary == "default" else 2.0, *[nan] * 9))
    parts = [("prefix", prefix)] if prefix else []
    parts += [(str(b), (kept or lengths)[b] - prefix) for b in range(batch)]
    for name in names:
        for suffix, rows in parts:
            sizes = [rows] if kind == "latent" else [rows, heads]
            count = rows * heads
            if quantize == "int8":
                words = (widths[name] + 3) // 4
                tensors[f"{name}.{suffix}"] = ("I32", [*sizes, words], bytes([1, 0, 0, 0]) * count * words)
                tensors[f"{name}_scale.{suffix}"] = ("F32", sizes, struct.pack("<f", 0.5) * count)
            else:
                tensors[f"{name}.{suffix}"] = ("F32", [*sizes, widths[name]],
                                               struct.pack("<f", 1) * count * widths[name])
    return tensors, metadata


def saved_cache(kind, **options):
    return safetensors(*cache_parts(kind, **options))


def saved_state(family, states, *, width, layers, lengths, pending=-1, caches=(), capacity=-1, page=64):
    """A model's state of 5 tokens as ModelState::Save() writes it: `states` are shapes, `caches` are cache_parts()."""
    batch = len(lengths)
    metadata = {"heed_state": family, "version": "1", "model": "0" * 16, "vocabulary": "5", "width": str(width),
                "layers": str(layers), "batch": str(batch), "capacity": str(capacity), "page": str(page)}
    tensors = {"lengths": ("I64", [batch], struct.pack(f"<{batch}q", *lengths)),
               "pending": ("I64", [batch], struct.pack(f"<{batch}q", *[pending] * batch)),
               "last": ("I64", [batch], struct.pack(f"<{batch}q", *[3 if n else -1 for n in lengths]))}
    for name, shape in states.items():
        tensors[name] = ("F32", [batch, *shape], struct.pack("<f", 0.5) * (batch * math.prod(shape)))
    for prefix, (of_cache, facts) in caches:
        tensors |= {prefix + name: tensor for name, tensor in of_cache.items()}
        metadata |= {prefix + name: fact for name, fact in facts.items()}
    return safetensors(tensors, metadata)


SAVED_CACHES = {
    "kv": saved_cache("kv", heads=2, dim=2, page=2, lengths=(3,)),
    "contiguous": saved_cache("kv", capacity=4, page=0),
    "int8": saved_cache("kv", dim=3, page=1, quantize="int8"),
    "shared": saved_cache("kv", batch=2, page=4, lengths=(3, 4), prefix=2),
    "ring": saved_cache("ring", window=2, sink_tokens=1, lengths=(9,), kept=(3,)),
    "latent": saved_cache("latent", dim=3, value_dim=2),
    "rotary": saved_cache("kv", dim=2, rotary="linear"),
    "sketch": saved_cache("kv", batch=2, heads=2, dim=2, lengths=(3, 2), prefix=2, sketch=True),
    "empty": saved_cache("kv", heads=1 << 40, lengths=(0,)),
    "empty_sketch": saved_cache("kv", heads=1 << 40, lengths=(0,), sketch=True),
}


def llama_state(lengths, **options):
    keys = cache_parts("kv", batch=len(lengths), dim=4, value_dim=4, lengths=lengths, rotary="default", **options)
    return saved_state("llama", {}, width=4, layers=2, lengths=lengths, caches=[("layers.0.keys.", keys)], **options)


SAVED_STATES = {
    "llama": llama_state((2, 1)),
    "llama_empty": llama_state((0,), page=0, capacity=3),
    "mamba": saved_state("mamba", {"layers.0.conv": (4, 3), "layers.0.scan": (4, 2)}, width=2, layers=1, lengths=(3,)),
    "byte_lm": saved_state("heed_byte_lm", {"layers.0.S": (1, 1, 2), "layers.0.z": (1, 1), "layers.0.m": (1,)}, width=2,
                           layers=2, lengths=(1, 0)),
    "pending": saved_state("heed_byte_lm", {"layers.0.S": (1, 1, 2), "layers.0.z": (1, 1), "layers.0.m": (1,)}, width=2,
                           layers=2, lengths=(7,), pending=4),
}

SIZES = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
RECURRENT = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
MODEL_FOLDERS = {name: json.dumps(config).encode() for name, config in {
    "llama": {"model_type": "llama", **SIZES, "rope_parameters": YARN, "eos_token_id": [1, 2]},
    "qwen2": {"model_type": "qwen2", **SIZES, "use_sliding_window": True,
              "layer_types": ["full_attention", "sliding_attention"]},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 4, "attention_bias": True,
              "rope_scaling": {"type": "linear", "factor": 2.0}},
    "gpt2": {"model_type": "gpt2", "vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2,
             "scale_attn_by_inverse_layer_idx": True},
    "bert": {"model_type": "bert", **SIZES, "hidden_act": "gelu"},
    "mamba": {"model_type": "mamba", **RECURRENT, "time_step_rank": "auto", "expand": 2},
    "mamba2": {"model_type": "mamba2", **RECURRENT, "num_heads": 2, "head_dim": 8, "n_groups": 1,
               "time_step_limit": [0.0, float("inf")]},
    "rwkv": {"model_type": "rwkv", **RECURRENT, "rescale_every": 1, "attention_hidden_size": None},
    "byte_lm": {"model_type": "heed_byte_lm", **SIZES, "mechanism": "retention", "key_dim": 4, "sliding_window": 256},
    "dynamic": {"model_type": "mistral", **SIZES, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
                "max_position_embeddings": 64},
    "longrope": {"model_type": "llama", **SIZES,
                 "rope_parameters": {"rope_type": "longrope", "short_factor": [1, 1.5], "long_factor": [2, 4]},
                 "max_position_embeddings": 64, "original_max_position_embeddings": 16},
    "embedding": {"model_type": "qwen2", **SIZES, "is_causal": False, "dtype": "bfloat16", "rope_theta": 1e6},
    "generation": {"eos_token_id": [1, 2], "do_sample": True},
    "index": {"metadata": {"total_size": 8},
              "weight_map": {"a.weight": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}},
}.items()}

FITS = [{"work": work, "dtype": dtype, "threads": threads, "seconds": {"call": 3e-6, unit: 1.25e-11}}
        for work, dtype, threads, unit in (("attention prefill", "f32", 2, "flop"),
                                           ("gla decode", "bf16", 1, "state_byte"))]
COST_MODELS = {name: json.dumps({"heed_cost_model": 1, "cpu": "CPU", "version": "0.1.0", "target": "AVX2", "threads": 2,
                                 "seconds": 83.25, "errors": errors, "fits": fits}).encode()
               for name, errors, fits in (("whole", [0.05, 0.125], FITS), ("empty", [], []))}

WORDS = {
    "safetensors": ["__metadata__", '"dtype":"', '"shape":[', '"data_offsets":[', "F32", "BF16", "BOOL", "F4", "]},\"",
                    "\\\\u0000"],
    "npy": ["'descr': ", "'fortran_order': ", "'shape': (", "True", "False", "'<f4'", "'|b1'", "'<i8'", ",), }",
            "\\x93NUMPY"],
    "command_line": ["--threads",
                     "--isa", "--layer", "--heads", "--dtype", "--window", "--scale", "--softcap", "--causal",
                     "--no-causal", "--mechanisms", "--pattern", "atrous(2)", "\\x0a", "=", "AVX2", "1e308"],
    "pattern": ["sliding_window(", "dilated(", "atrous(", "strided(",
                "fixed(", "global_tokens([", "longformer(", "random_blocks(", "bigbird(", "streaming(",
                "neighborhood(", "blocks([[", "csr([", "keys([[[", "per_head([", ", ", ")", "]", " | ", " & ",
                "(", "-1", "True", "False", "block=", "seed=", "2305843009213693951"],
}
WORDS["tensor_file"] = WORDS["safetensors"] + ["layers.0.q", ".k", ".v", "window", "scale", "causal", "softcap", "-1,0"]

WORDS["saved_cache"] = WORDS["safetensors"] + ["heed_cache", "shared_prefix", "capacity", "window", "ring", "latent",
                                               "int8", "sketch"]

WORDS["saved_state"] = WORDS["saved_cache"] + ["heed_state", "layers.0.", "keys.", "pending", "last", "lengths",
                                               "llama", "mamba", "heed_byte_lm"]

WORDS["model_folder"] = ['"model_type":', '"weight_map":',
                         '"hidden_size":', '"num_hidden_layers":', '"rope_parameters":{', "null", "true", "Infinity",
                         "16777216", "9223372036854775807", "1e308", "../", '"__float__"', "[[[[", '{"a":']

WORDS["cost_model"] = ['"heed_cost_model":', '"cpu":',
                       '"threads":', '"seconds":{', '"errors":[', '"fits":[{', '"work":', '"dtype":"bf16"', "null",
                       "true", "1e308", "-1", "9223372036854775807", "Infinity", "[[[[", '{"a":']


def main():
    folder = Path(sys.argv[1])
    all_seeds = {"safetensors": SAFETENSORS, "npy": NPY, "command_line": COMMAND_LINES, "attention_options": options(),
                 "saved_cache": SAVED_CACHES, "saved_state": SAVED_STATES,
                 "pattern": PATTERNS, "model_folder": MODEL_FOLDERS, "cost_model": COST_MODELS,
                 "tensor_file": {name: b"\0\0\0" + content for name, content in TENSOR_FILES.items()}}
    for target, seeds in all_seeds.items():
        (folder / target).mkdir(parents=True, exist_ok=True)
        for name, content in seeds.items():
            (folder / target / name).write_bytes(content)
    for target, words in WORDS.items():
        lines = ['"' + w.replace('"', '\\"') + '"\n' for w in words]
        (folder / f"{target}.dict").write_text("".join(lines))
    (folder / "stamp").touch()


if __name__ == "__main__":
    main()
