# Comparisons in tests of heed.torch.nn: a layer with Transformers' module or a composition, steps with whole sequences.
"""Weights, outputs, gradients and states of layers."""

import copy

import torch


def rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def randomise(module, seed=3):
    """Weights of a size that matters, whatever a module begins with."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.3 * noise if parameter.dim() > 1 else 1 + 0.2 * noise)
    return module.eval()


def loaded(layer, original):
    """Loads the weights of another module, which has the same names and shapes in any order, into the layer."""
    result = layer.load_state_dict(original.state_dict(), strict=True)
    assert not result.missing_keys and not result.unexpected_keys
    assert {key: x.shape for key, x in layer.state_dict().items()} == {key: x.shape
                                                                       for key, x in original.state_dict().items()}
    return layer.eval()


def relative(got, expected):
    if not expected.numel():
        return 0.0 if got.shape == expected.shape else float("inf")
    return float(((got - expected).abs().max() / expected.abs().max()).detach())


def check_same(layer, function, original, x, tolerance=1e-5, module=None, of_weights=2e-5):
    """Outputs and the gradients of x and of every weight are those of `function`, which runs `original`."""
    module = layer if module is None else module
    a, b = (x.clone().requires_grad_() for _ in range(2))
    y, expected = layer(a), function(b)
    assert y.shape == expected.shape and relative(y, expected) <= tolerance
    loss = rows(*y.shape, seed=9)
    (y * loss).sum().backward()
    (expected * loss).sum().backward()
    assert relative(a.grad, b.grad) <= tolerance
    theirs = {name: parameter.grad for name, parameter in original.named_parameters()}
    most = max(x.abs().max() for x in theirs.values())
    for name, parameter in module.named_parameters():  # the gradient of a key's bias is 0 but for rounding
        error = (parameter.grad - theirs[name]).abs().max()
        assert error <= of_weights * max(theirs[name].abs().max(), 0.05 * most), name


def check_padding(layer, x, parameters):
    """NaN in the padding of x reaches no output of a token and no gradient of a weight."""
    found = []
    for value in (0.0, torch.nan):
        y = layer(torch.cat((x[:1], x[1:].index_fill(1, torch.arange(2, x.shape[1]), value))), lengths=[x.shape[1], 2])
        parts, parameters = (y[0], y[1, :2]), list(parameters)
        found.append([*parts, *torch.autograd.grad(sum(z.square().sum() for z in parts), parameters)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@torch.no_grad()
def check_decodes(layer, x, whole=None, tolerance=0.05):
    """A prompt and tokens one by one are the whole, to the precision of 16 bits."""
    state, whole = layer.new_state(len(x)), layer(x) if whole is None else whole
    parts = [layer(x[:, :5], state), *(layer.step(x[:, t], state)[:, None] for t in range(5, x.shape[1]))]
    assert relative(torch.cat(parts, 1).float(), whole.float()) < tolerance


def check_steps(layer, x, tolerance=5e-6, **options):
    """A prompt, single tokens and the rest at once equal the whole, also with unequal lengths, forks and reorders."""
    check_padding(lambda x, lengths: layer(x, lengths=lengths, **options), x, layer.parameters())
    with torch.no_grad():
        whole, state = layer(x, **options), layer.new_state(len(x))
        parts = [layer(x[:, :6], state, **options)]
        parts += [layer.step(x[:, t], state, **options)[:, None] for t in (6, 7)]
        fork, copied = state.fork(), copy.deepcopy(state)
        parts.append(layer.step(x[:, 8], state, **options)[:, None])
        parts.append(layer(x[:, 9:], state, **options))
        assert relative(torch.cat(parts, 1), whole) <= tolerance
        assert state.lengths.tolist() == [x.shape[1]] * len(x) and state.nbytes > 0 and state.batch == len(x)
        for other in (fork, copied):
            assert other.lengths.tolist() == [8] * len(x)
            assert relative(layer(x[:, 8:], other, **options), whole[:, 8:]) <= tolerance
        counts = torch.tensor([6, 2])
        padded = layer(x[:, :6], lengths=counts, **options)
        assert relative(padded[0], whole[0, :6]) <= tolerance and relative(padded[1, :2], whole[1, :2]) <= tolerance
        state = layer.new_state(2)
        layer(x[:, :6], state, lengths=counts, **options)
        assert state.lengths.tolist() == [6, 2]
        layer(x[:, 6:8], state, lengths=[1, 0], **options)
        state.reorder([1, 0])
        y = layer.step(torch.stack([x[1, 2], x[0, 7]]), state, **options)
        assert relative(y, torch.stack([whole[1, 2], whole[0, 7]])) <= tolerance
        assert state.lengths.tolist() == [3, 8]
