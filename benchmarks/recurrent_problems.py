# The problems of compare_recurrent.py.
"""Inputs of each recurrent mechanism, and heed's side of a comparison: a function that returns o, or o and the
gradients of the inputs, in their order."""


class Problem:
    """Inputs of one mechanism as PyTorch tensors, [B, T, H, D] contiguous, and heed's side."""

    def __init__(self, torch, heed, name, tokens, heads, keys, values):
        generator = torch.Generator().manual_seed(1)

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        self.torch, self.heed, self.name = torch, heed, name
        self.shape = (tokens, heads, keys, values)
        self.q, self.k = normal(1, tokens, heads, keys), normal(1, tokens, heads, keys)
        self.v, self.d_o = normal(1, tokens, heads, values), normal(1, tokens, heads, values)
        self.gate = None
        if name != "linear":
            shape = (1, tokens, heads) if name == "simple_gla" else (1, tokens, heads, keys)
            self.gate = -0.1 * torch.rand(*shape, generator=generator)
        self.scale = 1.0 if name == "linear" else keys ** -0.5
        self.leaves = [x for x in (self.q, self.k, self.v, self.gate) if x is not None]

    def call(self):
        """heed's function, its arguments and its keywords."""
        if self.name == "linear":
            return (self.heed.linear_attention, self.heed.linear_attention_backward,
                    dict(feature_map="identity", normalize=False))
        function = getattr(self.heed, self.name)
        return function, getattr(self.heed, f"{self.name}_backward"), {}

    def ours(self, backward, threads):
        forward, gradients, options = self.call()
        arrays = [x.detach().numpy() for x in self.leaves]
        d_o = self.d_o.numpy()

        def run():
            o = forward(*arrays, threads=threads, **options)
            if not backward:
                return [o]
            g = gradients(d_o, *arrays, threads=threads, **options)
            return [o, g.dq, g.dk, g.dv, *([g.dlog_decay] if self.gate is not None else [])]

        return run

    def by_autograd(self, function, backward):
        """A peer that is a function of tensors [B, T, H, D]."""
        leaves = [x.detach().clone().requires_grad_(backward) for x in self.leaves]

        def run():
            for leaf in leaves:
                leaf.grad = None
            with self.torch.set_grad_enabled(backward):
                o = function(*leaves)
                if not backward:
                    return [o.detach().numpy()]
                o.backward(self.d_o)
            return [o.detach().numpy(), *(leaf.grad.numpy() for leaf in leaves)]

        return run


class SsdProblem(Problem):
    """Mamba-2 as its layers call it: x [B, T, H, P], B, C [B, T, 1, N] of one group, dt, A, D and dt_bias per head."""

    def __init__(self, torch, heed, name, tokens, heads, keys, values):
        super().__init__(torch, heed, "linear", tokens, heads, keys, values)
        generator = torch.Generator().manual_seed(2)
        dt, bias = torch.randn(1, tokens, heads, generator=generator), torch.randn(heads, generator=generator)
        rates = -torch.arange(1, heads + 1, dtype=torch.float32)  # as the layer begins
        self.name, self.leaves = name, [self.v, dt, rates, self.k[:, :, :1], self.q[:, :, :1], torch.ones(heads),
                                        bias - 4]

    def ours(self, backward, threads):
        x, dt, A, B, C, D, bias = (leaf.contiguous().numpy() for leaf in self.leaves)
        options = dict(D=D, dt_bias=bias, dt_softplus=True, threads=threads)
        d_o = self.d_o.numpy()

        def run():
            o = self.heed.ssd(x, dt, A, B, C, **options)
            if not backward:
                return [o]
            g = self.heed.ssd_backward(d_o, x, dt, A, B, C, **options)
            return [o, g.dx, g.ddt, g.dA, g.dB, g.dC, g.dD, g.ddt_bias]

        return run


class GatedProblem(Problem):
    """A mechanism whose gradients have the names of its arguments."""

    def ours(self, backward, threads):
        arrays = [leaf.contiguous().numpy() for leaf in self.leaves]
        forward, gradients, d_o = (getattr(self.heed, self.name), getattr(self.heed, f"{self.name}_backward"),
                                   self.d_o.numpy())

        def run():
            o = forward(*arrays, threads=threads)
            return [o, *gradients(d_o, *arrays, threads=threads)[:-1]] if backward else [o]

        return run


class DeltaProblem(GatedProblem):
    """q, k of norm 1, v, log decays per token or per channel of keys, beta."""

    def __init__(self, torch, heed, name, tokens, heads, keys, values):
        super().__init__(torch, heed, "gla" if name == "kda" else "simple_gla", tokens, heads, keys, values)
        self.name, self.k = name, torch.nn.functional.normalize(self.k, dim=-1)
        self.beta = torch.rand(1, tokens, heads, generator=torch.Generator().manual_seed(2))
        self.leaves = [self.q, self.k, self.v, self.gate, self.beta]


class MesaProblem(DeltaProblem):
    """q, k of norm 1, v, beta, the regularisation and log decays, with 30 steps of the solver."""

    def __init__(self, torch, heed, name, tokens, heads, keys, values):
        super().__init__(torch, heed, name, tokens, heads, keys, values)
        lamb = 0.75 + torch.rand(heads, keys, generator=torch.Generator().manual_seed(3))
        self.leaves = [self.q, self.k, self.v, self.beta, lamb, self.gate]

    def ours(self, backward, threads):
        *arrays, gate = (leaf.contiguous().numpy() for leaf in self.leaves)
        d_o, options = self.d_o.numpy(), dict(log_decay=gate, threads=threads)

        def run():
            if not backward:
                return [self.heed.mesa(*arrays, **options)]
            o, x = self.heed.mesa(*arrays, **options, return_solution=True)
            return [o, *self.heed.mesa_backward(d_o, *arrays, **options, solution=x)[:-1]]

        return run


class TttProblem(Problem):
    """q and k of norm 1, v, the norm's weight and bias, learning rates, the first W and b."""

    def __init__(self, torch, heed, name, tokens, heads, keys, values):
        super().__init__(torch, heed, "linear", tokens, heads, keys, values)
        generator = torch.Generator().manual_seed(2)
        self.q, self.k = (torch.nn.functional.normalize(x, dim=-1) for x in (self.q, self.k))
        norm = 1 + 0.1 * torch.randn(heads, values, generator=generator), torch.zeros(heads, values)
        eta = 0.01 * torch.rand(1, tokens, heads, generator=generator)
        W = 0.3 * torch.randn(1, heads, keys, values, generator=generator)
        self.name, self.leaves = name, [self.q, self.k, self.v, *norm, eta, W, torch.zeros(1, heads, 1, values)]

    def ours(self, backward, threads):
        import numpy as np
        *arrays, W, b = (leaf.contiguous().numpy() for leaf in self.leaves)
        first = np.concatenate([W, b], 2)
        d_o, options = self.d_o.numpy(), dict(initial_state=np.stack([first, np.zeros_like(first)], 2), threads=threads)

        def run():
            o = self.heed.ttt_linear(*arrays, **options)
            if not backward:
                return [o]
            g = self.heed.ttt_linear_backward(d_o, *arrays, **options)
            of_first = g.dinitial_state[:, :, 0]
            return [o, *g[:6], of_first[:, :, :-1], of_first[:, :, -1:]]

        return run


class MlstmProblem(GatedProblem):
    def __init__(self, torch, heed, name, tokens, heads, keys, values):
        super().__init__(torch, heed, "linear", tokens, heads, keys, values)
        generator = torch.Generator().manual_seed(2)
        i, f = (torch.randn(1, tokens, heads, generator=generator) for _ in range(2))
        self.name, self.leaves = name, [self.q, self.k, self.v, i, 3 + f]


class Rwkv4Problem(GatedProblem):
    """k and v [B, T, C], the decay and the bonus per channel."""

    def __init__(self, torch, heed, name, tokens, heads, keys, values):
        super().__init__(torch, heed, "linear", tokens, heads, keys, values)
        generator = torch.Generator().manual_seed(2)
        w, u = (torch.randn(heads * values, generator=generator) for _ in range(2))
        self.name, self.d_o = name, self.d_o.flatten(2)
        self.leaves = [self.k.flatten(2), self.v.flatten(2), -w.exp(), u]


class ScanProblem(GatedProblem):
    """A scan of heads * values channels: the gradient of the state is left out."""

    def __init__(self, torch, heed, name, tokens, heads, keys, values):
        generator = torch.Generator().manual_seed(2)

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        self.torch, self.heed, self.name, self.options = torch, heed, name.removesuffix("_65536"), {}
        channels = heads * values
        u = normal(1, channels, tokens)
        if name == "selective_scan":  # Mamba's, keys states per channel
            rates = -torch.arange(1.0, keys + 1).repeat(channels, 1)
            self.leaves = [u, normal(1, channels, tokens) - 3, rates, normal(1, keys, tokens), normal(1, keys, tokens),
                           torch.ones(channels)]
            self.options = {"delta_softplus": True}
        elif name == "s4d":  # keys modes per channel, as S4D begins
            rates = torch.full((channels, keys), 0.5).log(), torch.pi * torch.arange(float(keys)).repeat(channels, 1)
            self.leaves = [u, normal(channels) - 4, *rates, normal(channels, keys, 2), torch.ones(channels)]
        elif self.name == "long_convolution":  # the kernel is as long as the sequence
            self.leaves = [u, normal(channels, tokens)]
        else:
            self.leaves = [u.transpose(1, 2).contiguous(), *(normal(1, tokens, channels) for _ in range(2)),
                           normal(channels)]
        self.d_o = torch.randn(self.leaves[0].shape, generator=generator)

    def ours(self, backward, threads):
        arrays, d_o = [leaf.numpy() for leaf in self.leaves], self.d_o.numpy()
        forward, gradients = getattr(self.heed, self.name), getattr(self.heed, f"{self.name}_backward")

        def run():
            o = forward(*arrays, threads=threads, **self.options)
            return [o, *gradients(d_o, *arrays, threads=threads, **self.options)[: len(arrays)]] if backward else [o]

        return run
