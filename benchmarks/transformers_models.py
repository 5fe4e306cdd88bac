#!/usr/bin/env python3
# Whole models of Transformers with heed and without: prefill, a training step, greedy tokens.
"""A Llama-like model (8 layers, width 512, 1024 tokens) and a Mistral-like one (window 512, 8192 tokens), once with
attn_implementation="heed" and once with "sdpa"; recurrent and hybrid models and DeepSeek-V4 (4 layers, width 512, 1024
tokens), once accelerated and once as they are. Random weights in float32: the same logits and losses first, then times
in turns. Peak memory is that of a process of its own for each side.

Usage: transformers_models.py [FILTER] [--threads 2] [--rounds 3] [--json]
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import turns

SIZES = dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
             vocab_size=1024, attention_dropout=0.0)
RECURRENT = dict(hidden_size=512, num_hidden_layers=4, vocab_size=1024, pad_token_id=0, bos_token_id=1, eos_token_id=2)
HYBRID = dict(RECURRENT, intermediate_size=1408, num_attention_heads=8, num_key_value_heads=2, head_dim=64)
MAMBA2 = dict(mamba_n_heads=16, mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1)
GDN = dict(HYBRID, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=64, linear_value_head_dim=64,
           layer_types=["linear_attention"] * 3 + ["full_attention"])

# Models that accelerate() knows: classes and options of their configurations. One layer of four is attention in a
# hybrid, all have both in Falcon-H1.
RECURRENCES = {
    "mamba": ("MambaForCausalLM", RECURRENT),
    "mamba2": ("Mamba2ForCausalLM", dict(RECURRENT, num_heads=16, head_dim=64, n_groups=1)),
    "qwen3_next": ("Qwen3NextForCausalLM", dict(
        GDN, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=352, shared_expert_intermediate_size=352)),
    "bamba": ("BambaForCausalLM", dict(HYBRID, **MAMBA2, attn_layer_indices=[3])),
    "falcon_h1": ("FalconH1ForCausalLM", dict(HYBRID, **MAMBA2, mamba_d_ssm=1024)),
    "granite_hybrid": ("GraniteMoeHybridForCausalLM", dict(
        HYBRID, **MAMBA2, layer_types=["mamba"] * 3 + ["attention"], shared_intermediate_size=1408,
        num_local_experts=0)),
    "nemotron_h": ("NemotronHForCausalLM", dict(
        HYBRID, layers_block_type=["linear_attention"] * 3 + ["full_attention"], ssm_state_size=128,
        mamba_num_heads=16, mamba_head_dim=64, n_groups=1)),
    "olmo_hybrid": ("OlmoHybridForCausalLM", dict(GDN, linear_num_key_heads=8)),
    "qwen3_5": ("Qwen3_5ForCausalLM", GDN),
    "minimax": ("MiniMaxForCausalLM", dict(
        HYBRID, layer_types=["linear_attention"] * 3 + ["full_attention"], num_local_experts=2,
        num_experts_per_tok=1)),
    "lfm2": ("Lfm2ForCausalLM", dict(HYBRID, layer_types=["conv"] * 3 + ["full_attention"])),
    "deepseek_v4": ("DeepseekV4ForCausalLM", dict(
        RECURRENT, num_attention_heads=16, head_dim=64, q_lora_rank=256, o_groups=2, o_lora_rank=128,
        layer_types=["compressed_sparse_attention", "heavily_compressed_attention"] * 2, index_n_heads=8,
        index_head_dim=32, index_topk=64, moe_intermediate_size=352, n_routed_experts=4, num_experts_per_tok=2,
        hc_mult=2)),
}
FAMILIES = {
    "llama": ("LlamaForCausalLM", SIZES),
    # Two layers keep a run of 8192 tokens short.
    "mistral": ("MistralForCausalLM", dict(SIZES, num_hidden_layers=2, sliding_window=512)),
    **RECURRENCES,
}
JOBS = {"llama/prefill": 1024, "llama/train": 1024, "llama/generate128": 1024, "mistral/prefill": 8192,
        "mistral/train": 8192,
        **{f"{name}/{what}": 1024 for name in RECURRENCES for what in ("prefill", "train", "generate128")}}


def make(family, with_heed, length):
    """(model, tokens)."""
    import torch
    import transformers

    import heed.transformers

    heed.transformers.register()
    torch.manual_seed(0)
    model_class, sizes = FAMILIES[family]
    model_class = getattr(transformers, model_class)
    attention = "num_attention_heads" in sizes
    config = model_class.config_class(**sizes, **({"max_position_embeddings": 2 * length} if attention else {}))
    model = model_class(config)
    if attention:
        model.set_attn_implementation("heed" if with_heed else "sdpa" if model._supports_sdpa else "eager")
    if with_heed and family in RECURRENCES:
        model.acceleration = heed.transformers.accelerate(model, strict=True)
    return model, torch.randint(3, sizes["vocab_size"], (1, length))


def job(name, with_heed):
    """A function that does the job once and returns a number that both sides must share."""
    import torch

    family, what = name.split("/")
    model, tokens = make(family, with_heed, JOBS[name])
    if what == "prefill":
        def run():
            with torch.no_grad():
                return float(model(tokens).logits.float().square().mean())
    elif what == "train":
        def run():
            model.zero_grad()
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            return float(loss.detach()) + float(model.get_input_embeddings().weight.grad.norm())
    else:
        def run():
            with torch.no_grad():
                out = model.generate(tokens, max_new_tokens=128, do_sample=False, eos_token_id=None, pad_token_id=0)
            return float((out * torch.arange(1, out.shape[1] + 1)).sum())
    return run


def peak_mebibytes(name, with_heed, threads):
    """The peak memory of a process that does the job twice, above what it held before."""
    code = ("import re; import transformers_models as m; import torch; "
            "high = lambda: int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]) / 1024; "
            f"torch.set_num_threads({threads}); r = m.job({name!r}, {with_heed}); before = high(); r(); r(); "
            "print(high() - before)")
    here = os.path.dirname(os.path.abspath(__file__))
    output = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True, check=True).stdout
    return float(output.split()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filter", nargs="?", default=".", help="regular expression of the jobs")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    import torch
    import transformers

    import heed

    torch.set_num_threads(options.threads)
    versions = {"cpu": turns.cpu_name(), "heed": heed.__version__, "torch": torch.__version__,
                "transformers": transformers.__version__, "threads": options.threads}
    if not options.json:
        print(", ".join(f"{key} {value}" for key, value in versions.items()), flush=True)
    rows = []
    for name in JOBS:
        if not re.search(options.filter, name):
            continue
        ours, theirs = job(name, True), job(name, False)
        a, b = ours(), theirs()
        if not abs(a - b) <= 1e-4 * abs(b):
            raise SystemExit(f"{name}: not timed: heed gives {a}, without it {b}")
        pairs = []
        for _ in range(options.rounds):
            times = []
            for run in (ours, theirs):
                begin = time.perf_counter()
                run()
                times.append(time.perf_counter() - begin)
            pairs.append(times)
        row = {"name": name, "heed_seconds": statistics.median(p[0] for p in pairs),
               "other_seconds": statistics.median(p[1] for p in pairs),
               "ratio": statistics.median(p[1] / p[0] for p in pairs),
               "heed_mebibytes": peak_mebibytes(name, True, options.threads),
               "other_mebibytes": peak_mebibytes(name, False, options.threads)}
        rows.append(row)
        if not options.json:
            print(f"{name:<20} heed {row['heed_seconds']:7.3f} s {row['heed_mebibytes']:6.0f} MiB   without "
                  f"{row['other_seconds']:7.3f} s {row['other_mebibytes']:6.0f} MiB   {row['ratio']:.2f}x", flush=True)
    if options.json:
        print(json.dumps({**versions, "jobs": rows}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
