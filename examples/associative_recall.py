# Trains a small attention model on associative recall, in NumPy: after eight pairs of a key and a value comes one of
# the keys again, and the model has to say its value. Without looking at the key nobody can do better than ln 8 = 2.08
# nats; the goal is 0.05.
import sys

import numpy as np

import heed

PAIRS, KEYS, VALUES, HEADS, DIM, BATCH, STEPS, GOAL = 8, 16, 16, 2, 16, 64, 200, 0.05
WIDTH = HEADS * DIM
rng = np.random.default_rng(0)
shapes = {"embed": (KEYS + VALUES, WIDTH), "q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH),
          "out": (WIDTH, VALUES)}
model = {name: rng.standard_normal(shape) / WIDTH**0.5 for name, shape in shapes.items()}
mean, square = ({name: np.zeros(shape) for name, shape in shapes.items()} for _ in range(2))


def heads(x):
    return x.reshape(BATCH, -1, HEADS, DIM)


for step in range(1, STEPS + 1):
    keys = rng.permuted(np.tile(np.arange(KEYS), (BATCH, 1)), axis=1)[:, :PAIRS]
    values = rng.integers(VALUES, size=(BATCH, PAIRS))
    tokens = np.stack([keys, KEYS + values], axis=2).reshape(BATCH, 2 * PAIRS)
    asked, every = rng.integers(PAIRS, size=BATCH), np.arange(BATCH)
    query, answer = keys[every, asked], values[every, asked]

    # Every token is looked up by the token before it.
    x, before, after = model["embed"], tokens[:, :-1], tokens[:, 1:]
    q, k, v = heads(x[query] @ model["q"]), heads(x[before] @ model["k"]), heads(x[after] @ model["v"])
    o, lse = heed.attention(q, k, v, return_lse=True)
    logits = o.reshape(BATCH, WIDTH) @ model["out"]
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    loss, right = -logits[every, answer].mean(), (logits.argmax(axis=1) == answer).mean()

    dlogits = (np.exp(logits) - np.eye(VALUES)[answer]) / BATCH
    g = heed.attention_backward(heads(dlogits @ model["out"].T), q, k, v, o, lse)
    dq, dk, dv = (d.reshape(BATCH, -1, WIDTH) for d in (g.dq, g.dk, g.dv))
    grads = {"embed": np.zeros(shapes["embed"]), "out": o.reshape(BATCH, WIDTH).T @ dlogits}
    for name, d, ids in (("q", dq, query[:, None]), ("k", dk, before), ("v", dv, after)):
        grads[name] = np.einsum("bti,btj->ij", x[ids], d)
        np.add.at(grads["embed"], ids, d @ model[name].T)
    for name, d in grads.items():  # Adam
        mean[name] += 0.1 * (d - mean[name])
        square[name] += 0.01 * (d * d - square[name])
        model[name] -= 0.003 * mean[name] / (1 - 0.9**step) / (np.sqrt(square[name] / (1 - 0.99**step)) + 1e-8)
    if step % 25 == 0 or step == 1:
        print(f"step {step:3}  loss {loss:.4f}  right {right:.0%}")

print(f"loss {loss:.4f}, goal {GOAL}: {'reached' if loss < GOAL else 'NOT reached'}")
sys.exit(0 if loss < GOAL else 1)
