# Hybrids of exact and linear attention on PyTorch tensors, as small functions with gradients: LoLCATs, whose two parts
# share a denominator, Based, whose layers alternate, and Infini-attention, which gates a memory against its own
# segment. Run, it shows what each makes of one sequence.
import torch
import torch.nn.functional as F

import heed.torch as heed


def older(x, window):
    """x [B, T, H, D] moved back by `window` tokens, zeros coming in front: a key of 0 contributes nothing."""
    return F.pad(x[:, : max(x.shape[1] - window, 0)], (0, 0, 0, 0, min(window, x.shape[1]), 0))


def linear_parts(phi_q, phi_k, v, window):
    """Numerator and denominator of linear attention over everything older than the window; a column of ones beside the
    values sums what they are weighted with."""
    ones = torch.ones_like(v[..., :1])
    both = heed.linear_attention(
        phi_q, older(phi_k, window), older(torch.cat([v, ones], -1), window), feature_map="identity", normalize=False
    )
    return both[..., :-1], both[..., -1]


def largest_logit(q, k, window, scale):
    """[B, H, T]: over the window, the row itself included; one product per key of it, nothing of size T x T."""
    largest = (q * k).sum(-1)
    for back in range(1, min(window, q.shape[1])):
        logit = (q[:, back:] * k[:, :-back]).sum(-1)
        largest = torch.cat([largest[:, :back], torch.maximum(largest[:, back:], logit)], 1)
    return scale * largest.transpose(1, 2)


def hedgehog(x, weight):
    """Features of LoLCATs: softmax over channels of a projection [H, D, F] and of its negative."""
    y = torch.einsum("bthd,hdf->bthf", x, weight)
    return torch.cat([y.softmax(-1), (-y).softmax(-1)], -1)


def lolcats(q, k, v, weight_q, weight_k, gate, *, window=64):
    """Softmax over the last `window` keys and softmax features for all older ones, one denominator; gate [H] in (0, 1)
    multiplies the exact part. The largest logit of the window is part of the definition: exp(s - m) stands beside
    features that know no m."""
    scale = q.shape[-1] ** -0.5
    o, lse = heed.attention(q, k, v, causal=True, window=(window - 1, 0), scale=scale, return_lse=True)
    num, den = linear_parts(hedgehog(q, weight_q), hedgehog(k, weight_k), v, window)
    return heed.merge_linear(o, lse - largest_logit(q, k, window, scale), num, den, gate=gate)


def based(layers, window=64):
    """Layers alternate: those of even number are linear attention by the Taylor series of exp, the others a window of
    softmax. `layers` has q, k and v of each."""
    return [
        heed.based(q, k, v) if i % 2 == 0 else heed.attention(q, k, v, causal=True, window=(window - 1, 0))
        for i, (q, k, v) in enumerate(layers)
    ]


def infini_attention(q, k, v, beta, *, segment=2048):
    """Softmax within segments, and what linear attention remembers of all segments before; beta [H] gates the two
    outputs. q and k of the memory should not be rotated."""
    own = heed.attention(q, k, v, causal=True, chunk=segment)
    phi_q, phi_k = F.elu(q) + 1, F.elu(k) + 1
    v1 = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    remembered, state = [], None
    for begin in range(0, q.shape[1], segment):
        rows = slice(begin, begin + segment)
        # Keys of 0 read the memory and leave it as it is; what comes after them is remembered for the next segment.
        nothing = torch.zeros_like(phi_k[:, rows])
        options = {"feature_map": "identity", "normalize": False, "initial_state": state}
        remembered.append(heed.linear_attention(phi_q[:, rows], nothing, v1[:, rows], **options))
        _, state = heed.linear_attention(phi_q[:, rows], phi_k[:, rows], v1[:, rows], return_state=True, **options)
    both = torch.cat(remembered, 1)
    memory = both[..., :-1] / both[..., -1:].clamp_min(1e-12)  # nothing yet: 0
    share = beta.sigmoid()[:, None]
    return share * memory + (1 - share) * own


def main():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 512, 4, 16, requires_grad=True) for _ in range(3))
    weight_q, weight_k = (torch.randn(4, 16, 8) / 4 for _ in range(2))
    exact = heed.attention(q, k, v, causal=True)
    for name, o in (
        ("window of 64 alone", heed.attention(q, k, v, causal=True, window=(63, 0))),
        ("lolcats", lolcats(q, k, v, weight_q, weight_k, torch.full((4,), 0.9))),
        ("based, its two layers", sum(based([(q, k, v)] * 2)) / 2),
        ("infini-attention", infini_attention(q, k, v, torch.zeros(4), segment=64)),
    ):
        (gradient,) = torch.autograd.grad(o.square().sum(), q)
        error = ((o - exact).norm() / exact.norm()).item()
        print(f"{name:22} differs from softmax by {error:.2f} of it, gradient of q {gradient.norm():.2f}")


if __name__ == "__main__":
    main()
