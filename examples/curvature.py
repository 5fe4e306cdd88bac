# Second derivatives of attention in training, on the handwritten digits of scikit-learn: a penalty on the gradient with
# respect to the image (Drucker, Le Cun, "Double backpropagation", 1991), which makes a model less sensitive to noise,
# and the curvature of what was learned, by products of the Hessian with vectors and, of a few weights, by the Hessian.
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.func import functional_call, grad, hessian, jvp

import heed.torch

WIDTH, HEADS, STEPS, BATCH, PENALTY, NOISE = 32, 4, 100, 128, 0.05, 0.5


class Model(nn.Module):
    """Attention between the 8 rows of an image of 8 x 8, from which the mean over rows gives the class."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.place = nn.Parameter(0.1 * torch.randn(8, WIDTH))
        self.up, self.out = nn.Linear(WIDTH, 64), nn.Linear(64, 10)

    def forward(self, image):
        x = self.embed(image) + self.place
        q, k, v = (y.unflatten(-1, (HEADS, -1)) for y in self.qkv(x).chunk(3, dim=-1))
        x = x + heed.torch.attention(q, k, v).flatten(-2)
        return self.out(torch.tanh(self.up(x.mean(1))))


def train(images, classes, penalty):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(STEPS):
        batch = torch.randint(len(images), (BATCH,))
        x = images[batch].requires_grad_()
        loss = nn.functional.cross_entropy(model(x), classes[batch])
        if penalty:  # of each image's own loss, which is BATCH times its share of the mean
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + penalty * (BATCH * slope).square().sum((1, 2)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def largest_curvature(loss, weights, steps=12):
    """The largest eigenvalue of the Hessian, by power iteration: a product with it is a derivative of the gradient."""
    along, value = {name: torch.randn_like(x) for name, x in weights.items()}, None
    for _ in range(steps):
        norm = sum(x.square().sum() for x in along.values()).sqrt()
        along = {name: x / norm for name, x in along.items()}
        _, product = jvp(grad(loss), (weights,), (along,))
        value = sum((product[name] * along[name]).sum() for name in along)
        along = product
    return value.item()


images, classes = load_digits(return_X_y=True)
images, classes = torch.tensor(images, dtype=torch.float32).view(-1, 8, 8) / 16, torch.tensor(classes)
held_out = torch.arange(len(images)) % 5 == 0
noise = NOISE * torch.randn(images[held_out].shape, generator=torch.Generator().manual_seed(1))
right = {}
for name, penalty in (("plain", 0), ("penalty", PENALTY)):
    model = train(images[~held_out], classes[~held_out], penalty).double()
    x, y = images[held_out].double(), classes[held_out]
    clean, noisy = ((model(z).argmax(1) == y).double().mean().item() for z in (x, x + noise.double()))

    def loss(weights, model=model, x=x[:100], y=y[:100]):
        return nn.functional.cross_entropy(functional_call(model, weights, (x,)), y)

    weights = {name: p.detach() for name, p in model.named_parameters()}
    # The whole Hessian with respect to the biases of one query head.
    few = weights["qkv.bias"][:WIDTH // HEADS]

    def of_few(bias, loss=loss, weights=weights):
        return loss(weights | {"qkv.bias": torch.cat([bias, weights["qkv.bias"][len(bias):]])})

    matrix = hessian(of_few)(few)
    symmetric = (matrix - matrix.T).abs().max() <= 1e-12 * matrix.abs().max() + 1e-15
    right[name] = noisy
    largest = largest_curvature(loss, weights)
    print(f"{name:8} right {clean:.1%}, with noise {noisy:.1%}; largest curvature {largest:.2f}; "
          f"Hessian of {len(few)} biases symmetric: {bool(symmetric)}")

reached = right["penalty"] > right["plain"] + 0.05
print(f"the penalty makes {100 * (right['penalty'] - right['plain']):.0f} more of 100 noisy images right, goal 5: "
      f"{'reached' if reached else 'NOT reached'}")
sys.exit(0 if reached else 1)
