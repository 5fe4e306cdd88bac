# The newest forms in plain PyTorch, written with matrix products where they can be: the peers of compare_forms.py.
# Tensors are [B, T, H, D].
import torch

BLOCK = 64  # rows of wall_attention: whole matrices of D channels would fill the memory
MINI_BATCH = 16


def heads_first(*tensors):
    return [x.transpose(1, 2) for x in tensors]


def from_heads(o):
    return o.transpose(1, 2)


def later(tokens, diagonal=1):
    """[T, T]: pairs that a causal row does not see."""
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(diagonal)


def decays(gate):
    """[B, H, T, T]: the sum of log decays between two tokens, -infinity above the diagonal."""
    total = gate.transpose(1, 2).cumsum(-1)
    return (total[..., None] - total[..., None, :]).masked_fill(later(gate.shape[1]), -float("inf"))


def relative_bias(q, k, v, *, causal, relative_bias):
    tokens, span = q.shape[1], relative_bias.shape[1]
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    bias = relative_bias[:, distance.clamp(0, span - 1)].masked_fill(distance >= span, 0)
    bias = bias.masked_fill(distance < 0, -float("inf"))
    return from_heads(torch.nn.functional.scaled_dot_product_attention(*heads_first(q, k, v), attn_mask=bias))


def attention_residual(query, residuals):
    normalised = residuals * (residuals.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    return ((normalised @ query).softmax(0)[..., None] * residuals).sum(0)


def compressed_attention(q, k, v, k_cmp, v_cmp, *, ratio, window):
    row, key, compressed = (torch.arange(n) for n in (q.shape[1], k.shape[1], k_cmp.shape[1]))
    age = row[:, None] - key
    seen = torch.cat([(age >= 0) & (age < window), (compressed + 1) * ratio <= row[:, None] + 1], 1)
    keys = heads_first(q, torch.cat([k, k_cmp], 1), torch.cat([v, v_cmp], 1))
    return from_heads(torch.nn.functional.scaled_dot_product_attention(*keys, attn_mask=seen))


def mamba3(q, k, v, log_decay, dt, trap, theta):
    """All pairs of tokens at once: each key is written by its own token and by the next one."""
    angle = (dt[..., None] * theta).cumsum(1)
    turn = torch.polar(torch.ones_like(angle), angle)

    def rotated(x):
        return torch.view_as_real(torch.view_as_complex(x[:, :, 0].unflatten(-1, (-1, 2))) * turn).flatten(-2)

    own, next_one = trap.sigmoid() * dt, (1 - trap.sigmoid()) * dt
    own, next_one = heads_first(own, next_one)
    both = own + torch.nn.functional.pad(next_one[..., 1:], (0, 1))
    eye = torch.eye(q.shape[1])
    weights = decays(log_decay).exp() * (both[..., None, :] * (1 - eye) + own[..., None, :] * eye)
    q, k, v = heads_first(rotated(q), rotated(k), v[:, :, 0])
    return from_heads((q @ k.mT * weights) @ v)[:, :, None]


def log_linear_attention(q, k, v, level_scales, *, log_decay):
    place = torch.arange(q.shape[1])
    levels = (place[:, None] ^ place).float().frexp().exponent.long()  # 0, or 1 + the place of the highest bit
    scales = level_scales.transpose(1, 2)
    scales = scales.gather(-1, levels.expand(*scales.shape[:2], -1, -1))
    q, k, v = heads_first(q, k, v)
    return from_heads((q @ k.mT * decays(log_decay).exp() * scales) @ v)


def preconditioned(q, k, v, log_decay, beta, log_decay_A, beta_A):
    """Token by token."""
    gate = (log_decay if log_decay.dim() == 4 else log_decay[..., None]).exp()
    gate_A = log_decay_A[..., None].exp()
    state, A, outputs = q.new_zeros(q.shape[0], *q.shape[2:], v.shape[-1]), torch.zeros_like(q[:, 0]), []
    for t in range(q.shape[1]):
        A = gate_A[:, t] * A + beta_A[:, t, :, None] * k[:, t] ** 2
        r = (A + 1e-6).log() + 0.2
        written = 1.5 ** (-r / (1 + r.abs())) * k[:, t]
        state = gate[:, t, ..., None] * state
        error = v[:, t] - (k[:, t, :, None] @ state)[:, :, 0]
        state = state + (beta[:, t, :, None] * written)[..., None] * error[:, :, None]
        outputs.append((q[:, t, :, None] @ state)[:, :, 0])
    return q.shape[-1] ** -0.5 * torch.stack(outputs, 1)


def titans(q, k, v, weight, bias, theta, alpha, eta):
    """Mini-batch by mini-batch, each in matrix products: the dual form."""
    def normalised(z):
        variance, mean = torch.var_mean(z, -1, unbiased=False, keepdim=True)
        r = (variance + 1e-6).rsqrt()
        return (z - mean) * r, r

    def products(log_factor):  # [..., t, s]: of the factors of tokens s + 1 ... t
        total = log_factor.cumsum(-1)
        return (total[..., None] - total[..., None, :]).masked_fill(later(MINI_BATCH), -float("inf")).exp(), total.exp()

    q, k, v, theta, alpha, eta = (x.split(MINI_BATCH, 2) for x in heads_first(q, k, v, theta, alpha, eta))
    w, c = weight[:, None], bias[:, None]
    M = S = w.new_zeros(q[0].shape[0], q[0].shape[1], q[0].shape[-1], v[0].shape[-1])
    outputs = []
    for query, key, value, rate, decay, momentum in zip(q, k, v, theta, alpha, eta, strict=True):
        x, r = normalised(key @ M)
        u = w * (w * x + c - value + key)
        g = r * (u - u.mean(-1, keepdim=True) - x * (x * u).mean(-1, keepdim=True))
        kept, of_M = products((-decay).log1p())
        carried, of_S = products(momentum.log())
        steps, of_S_in_M = -2 * (kept @ carried) * rate[..., None, :], kept @ of_S[..., None]
        y = of_M[..., None] * (query @ M) + of_S_in_M * (query @ S) + (steps * (query @ key.mT)) @ g
        outputs.append(y + w * normalised(y)[0] + c)
        last = -2 * carried[..., -1, :] * rate
        M = (of_M[..., -1, None, None] * M + of_S_in_M[..., -1:, :] * S + (key * steps[..., -1, :, None]).mT @ g)
        S = of_S[..., -1, None, None] * S + (key * last[..., None]).mT @ g
    return from_heads(torch.cat(outputs, 2))


def path_attention(q, k, v, w, beta, log_forget):
    """The UT transform of the whole sequence."""
    scale = q.shape[-1] ** -0.5
    q, k, v, w, beta = heads_first(q, k, v, w, beta)
    factor, tokens = beta[..., None], q.shape[2]
    matrix = torch.eye(tokens) + (factor * (w @ w.mT)).tril(-1)
    passed = torch.linalg.solve_triangular(matrix, (factor * (w @ k.mT)).tril(-1), upper=False)
    logits = scale * (q @ k.mT - (q @ w.mT).tril() @ passed) + decays(log_forget)
    return from_heads(logits.softmax(-1) @ v)


def wall_attention(q, k, v, log_decay, log_forget):
    scale, tokens = q.shape[-1] ** -0.5, q.shape[1]
    forgotten = decays(log_forget)
    q, k, v, total = heads_first(q, k, v, log_decay.cumsum(1))
    outputs = []
    for begin in range(0, tokens, BLOCK):
        end = min(begin + BLOCK, tokens)
        hidden = later(tokens)[begin:end, :end, None]
        passed = (total[:, :, begin:end, None] - total[:, :, None, :end]).masked_fill(hidden, -float("inf")).exp()
        logits = torch.einsum("bhin,bhjn,bhijn->bhij", q[:, :, begin:end], k[:, :, :end], passed)
        logits = scale * logits + forgotten[:, :, begin:end, :end]
        outputs.append(logits.softmax(-1) @ v[:, :, :end])
    return from_heads(torch.cat(outputs, 2))


def deltaformer(q, k, v, beta):
    """The values by one triangular solution of the whole sequence."""
    scale, tokens = q.shape[-1] ** -0.5, q.shape[1]
    q, k, v, beta = heads_first(q, k, v, beta)
    read = (scale * (k @ k.mT)).masked_fill(later(tokens, 0), -float("inf"))
    read = torch.cat([torch.zeros_like(read[..., :1, :]), read[..., 1:, :].softmax(-1)], -2)
    u = torch.linalg.solve_triangular(torch.eye(tokens) + beta[..., None] * read, v, upper=False)
    return from_heads((scale * (q @ k.mT)).masked_fill(later(tokens), -float("inf")).softmax(-1) @ u)


def parallax_attention(q, r, k, v):
    scale, tokens = q.shape[-1] ** -0.5, q.shape[1]
    q, r, k, v = heads_first(q, r, k, v)
    weights = (scale * (q @ k.mT)).masked_fill(later(tokens), -float("inf")).softmax(-1)
    second = r @ k.mT
    return from_heads((weights * (1 + (weights * second).sum(-1, keepdim=True) - second)) @ v)


PLAIN = {"relative_bias": relative_bias, "attention_residual": attention_residual,
         "compressed_attention": compressed_attention, "mamba3": mamba3, "log_linear_attention": log_linear_attention,
         "precond_delta_rule": preconditioned, "precond_kda": preconditioned, "titans": titans,
         "path_attention": path_attention, "wall_attention": wall_attention, "deltaformer": deltaformer,
         "parallax_attention": parallax_attention}
