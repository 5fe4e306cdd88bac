# TTT-Linear in plain PyTorch, in the dual form of its paper: the peer of compare_recurrent.py.
MINI_BATCH = 16


def ttt_dual(problem, backward):
    """Mini-batch by mini-batch, with the gradient of the norm written out: autograd differentiates it."""
    torch = problem.torch

    def normalised(z):
        variance, mean = torch.var_mean(z, -1, unbiased=False, keepdim=True)
        r = (variance + 1e-6).rsqrt()
        return (z - mean) * r, r

    def function(q, k, v, weight, bias, eta, W, b):
        q, k, v = (x.transpose(1, 2).split(MINI_BATCH, 2) for x in (q, k, v))  # [B, H, MINI_BATCH, D]
        rates = eta.transpose(1, 2)[..., None].split(MINI_BATCH, 2)
        w, c, o = weight[:, None], bias[:, None], []
        for query, key, value, rate in zip(q, k, v, rates):
            x, r = normalised(key @ W + b)
            y = w * (w * x + c - value + key)
            g = r * (y - y.mean(-1, keepdim=True) - x * (x * y).mean(-1, keepdim=True))
            read = query @ W + b - rate * ((query @ key.mT).tril() @ g + g.cumsum(2))
            o.append(query + w * normalised(read)[0] + c)
            last = rate[:, :, -1:] * g
            W, b = W - key.mT @ last, b - last.sum(2, keepdim=True)
        return torch.cat(o, 2).transpose(1, 2)

    return problem.by_autograd(function, backward)
