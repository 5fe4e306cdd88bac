# Trains the model of hybrid_lm.py, which imports GPU libraries, on a CPU by one more import. The text is its source.
import sys
from pathlib import Path

import heed.compat.install  # noqa: F401
import torch
import torch.nn.functional as F
from hybrid_lm import HybridLM

LENGTH, BATCH = 128, 8


def main(steps=60):
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).with_name("hybrid_lm.py").read_bytes()))
    model = HybridLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(steps):
        begins = torch.randint(len(text) - LENGTH, (BATCH, 1))
        tokens = text[begins + torch.arange(LENGTH)]
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:3}  {loss.item() / 0.6931:.2f} bits/byte")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
