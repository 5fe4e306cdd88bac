# A language model of three kinds of layers as one writes it for a GPU: nothing here knows heed.
import torch
import torch.nn.functional as F
from causal_conv1d import causal_conv1d_fn
from fla.modules import FusedRMSNormGated, RMSNorm, ShortConvolution
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from flash_attn import flash_attn_func
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
from torch import nn


class Attention(nn.Module):
    """Softmax attention, half as many key heads as query heads, over a window."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.dim = heads, width // heads
        self.qkv, self.out = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x):
        q, k, v = (
            self.qkv(x)
            .unflatten(-1, (2 * self.heads, self.dim))
            .split((self.heads, self.heads // 2, self.heads // 2), dim=2)
        )
        o = flash_attn_func(q, k, v, causal=True, window_size=(63, 0))
        return self.out(o.flatten(2))


class GatedDeltaNet(nn.Module):
    """A matrix of memory per head that decays, and in which a key's old value gives way to its new one."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.conv, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            ShortConvolution(3 * width, 4),
            nn.Linear(width, width),
        )
        self.gates, self.z, self.norm = (
            nn.Linear(width, 2 * heads),
            nn.Linear(width, width),
            FusedRMSNormGated(width // heads),
        )

    def forward(self, x):
        y, _ = self.conv(self.qkv(x))
        q, k, v, z = (t.unflatten(-1, (self.heads, -1)) for t in (*y.chunk(3, dim=-1), self.z(x)))
        g, beta = self.gates(x).chunk(2, dim=-1)
        o, _ = chunk_gated_delta_rule(q, k, v, g=F.logsigmoid(g + 3), beta=beta.sigmoid(), use_qk_l2norm_in_kernel=True)
        return self.out(self.norm(o, z).flatten(2))


class Mamba2(nn.Module):
    """A state space per head, with B and C of the token, and a gate."""

    def __init__(self, width, heads, state=16):
        super().__init__()
        self.heads, self.state, self.sizes = heads, state, (width, width + 2 * state, heads)
        self.proj, self.conv, self.out = (
            nn.Linear(width, sum(self.sizes)),
            nn.Conv1d(width + 2 * state, width + 2 * state, 4, groups=width + 2 * state),
            nn.Linear(width, width),
        )
        self.A_log, self.D = nn.Parameter(torch.zeros(heads)), nn.Parameter(torch.ones(heads))
        self.dt_bias = nn.Parameter(torch.zeros(heads))

    def forward(self, x):
        z, xBC, dt = self.proj(x).split(self.sizes, dim=-1)
        weight, bias = self.conv.weight.squeeze(1), self.conv.bias
        xBC = causal_conv1d_fn(xBC.transpose(1, 2), weight, bias, activation="silu").transpose(1, 2)
        y, B, C = xBC.split((self.sizes[0], self.state, self.state), dim=-1)
        y, z = (t.unflatten(-1, (self.heads, -1)) for t in (y, z))
        o = mamba_chunk_scan_combined(
            y,
            dt,
            -self.A_log.exp(),
            B.unsqueeze(2),
            C.unsqueeze(2),
            chunk_size=256,
            D=self.D,
            z=z,
            dt_bias=self.dt_bias,
            dt_softplus=True,
        )
        return self.out(o.flatten(2))


class HybridLM(nn.Module):
    def __init__(self, vocabulary=256, width=64, heads=4):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Mamba2(width, heads), GatedDeltaNet(width, heads), Attention(width, heads)])
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(4))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x))
        return self.head(self.norms[3](x))
