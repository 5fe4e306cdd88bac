# MesaNet in plain PyTorch, as others write it: the peers of compare_recurrent.py.
CHUNK = 64  # tokens


def mesa_chunks(problem, backward):
    """Conjugate gradients of all tokens at once, on chunks of tokens: autograd differentiates each step."""
    torch = problem.torch

    def function(q, k, v, beta, lamb, gate):
        q, k, v = (x.transpose(1, 2).unflatten(2, (-1, CHUNK)) for x in (q, k, v))  # [B, H, chunks, CHUNK, D]
        beta, gate = (x.transpose(1, 2).unflatten(2, (-1, CHUNK)) for x in (beta, gate))
        total = gate.cumsum(-1)
        later = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
        weights = (total[..., None] - total[..., None, :]).masked_fill(later, -float("inf")).exp() * beta[..., None, :]
        row, written = torch.cat([k, v], -1), (k * weights[..., -1, :, None]).mT
        state, before = k.new_zeros(*k.shape[:2], k.shape[-1], row.shape[-1]), []
        for i in range(k.shape[2]):
            before.append(state)
            state = total[:, :, i, -1].exp()[..., None, None] * state + written[:, :, i] @ row[:, :, i]
        H_kk, H_kv = torch.stack(before, 2).split((k.shape[-1], v.shape[-1]), -1)
        since = total.exp()[..., None]

        def read(x, H, rows):
            return (since * x) @ H + ((x @ k.mT) * weights) @ rows

        x, r, p = torch.zeros_like(q), q, q
        rr = (r * r).sum(-1, keepdim=True)
        for _ in range(30):
            Ap = read(p, H_kk, k) + lamb[None, :, None, None] * p
            step = rr / (p * Ap).sum(-1, keepdim=True)
            x, r, before = x + step * p, r - step * Ap, rr
            rr = (r * r).sum(-1, keepdim=True)
            p = r + rr / before * p
        return read(x, H_kv, v).flatten(2, 3).transpose(1, 2)

    return problem.by_autograd(function, backward)


def mesa_solve(problem, backward):
    """A direct solution of each token's system."""
    torch = problem.torch

    def function(q, k, v, beta, lamb, gate):
        row, written, decays = torch.cat([k, v], -1), beta[..., None] * k, gate.exp()[..., None, None]
        state, states = q.new_zeros(1, q.shape[2], q.shape[3], row.shape[-1]), []
        for t in range(q.shape[1]):
            state = decays[:, t] * state + written[:, t, :, :, None] * row[:, t, :, None]
            states.append(state)
        H = torch.stack(states, 1)
        x = torch.linalg.solve(H[..., : q.shape[3]] + torch.diag_embed(lamb), q)
        return (x[..., None] * H[..., q.shape[3]:]).sum(-2)

    return problem.by_autograd(function, backward)
