# One process of a group that shares a sequence, for test_torch_distributed.py:
#   python distributed_worker.py CHECK RANK RANKS FILE
# It compares its part with what it computes of the whole, and ends with a traceback if they differ.
import datetime
import importlib.util
import os
import sys

import mechanisms
import numpy as np
import scans
import torch
import torch.distributed as dist

import heed
import heed.torch
import heed.torch.distributed as distributed
from heed.torch import _group

FLOATS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}
HEADER = 10 * 8  # bytes of the comparison of calls
STATEFUL = [name for name in mechanisms.NAMES if mechanisms.DESCRIPTIONS[name]["has_state"]]


def world():
    return dist.group.WORLD


def cuts(tokens):
    """Parts of uneven size, off the grid of 64 tokens."""
    ranks = dist.get_world_size()
    return [0, *(tokens * (i + 1) // (ranks + 1) + i for i in range(ranks - 1)), tokens]


def part(x, tokens, axis=1):
    borders, rank = cuts(tokens), dist.get_rank()
    return x.narrow(axis, borders[rank], borders[rank + 1] - borders[rank])


def error(got, expected):
    if expected.numel() == 0:
        return 0.0
    apart = torch.where(got == expected, 0, (got - expected).abs())  # maxima of no tokens are -inf
    return (apart.max() / (expected.abs().nan_to_num(posinf=0).max() + 1e-30)).item()


def expect(got, expected, tolerance, what):
    assert got.shape == expected.shape, (what, got.shape, expected.shape)
    assert error(got.detach(), expected.detach()) <= tolerance, (what, error(got.detach(), expected.detach()))


def all_states(states):
    states = states if isinstance(states, tuple) else (states,)
    return [x for x in states if x is not None]


def compare(name, values, tokens, axes, options=None, states=None, relay=False, dtype=torch.float64, same_bits=False):
    """One mechanism's outputs, states and gradients, of the whole and of parts. `axes`: that of tokens by tensor."""
    function, options = getattr(heed.torch, name), dict(options or {})
    values = {key: torch.from_numpy(np.ascontiguousarray(x)) for key, x in values.items()}
    values = {key: x.to(dtype) if x.is_floating_point() else x for key, x in values.items()}
    rank, ranks = dist.get_rank(), dist.get_world_size()
    first, last = (ranks - 1, 0) if options.get("reverse") else (0, ranks - 1)

    def leaves(of):
        return {key: x.detach().clone().requires_grad_(x.is_floating_point()) for key, x in of.items()}

    def initial():
        return None if states is None else tuple(x.detach().clone().requires_grad_(has) for x, has in states)

    def given(x):
        return {} if x is None else {"initial_state": x if len(x) > 1 else x[0]}

    whole, before = leaves(values), initial()
    o, final = function(**whole, **options, **given(before), return_state=True)
    generator = torch.Generator().manual_seed(1)
    d_o = torch.randn(o.shape, dtype=torch.float64, generator=generator).to(o.dtype)
    d_final = [torch.randn(x.shape, dtype=torch.float64, generator=generator).to(x.dtype) for x in all_states(final)]

    def loss(o, d_o, final):
        terms = [(x * d).sum() for x, d in zip(all_states(final), d_final) if x.requires_grad]
        return (o * d_o).sum() + sum(terms)

    loss(o, d_o, final).backward()
    own = leaves({key: x if axes[key] is None else part(x, tokens, axes[key]) for key, x in values.items()})
    before_here = initial()
    o_axis = next(axis for axis in axes.values() if axis is not None)
    here, state = function(**own, **options, **(given(before_here) if rank == first else {}), return_state="all",
                           group=world(), relay=relay, segment=29)
    tolerance = FLOATS[dtype]
    what = f"{name} {options} relay={relay} {dtype} rank {rank} of {ranks}"
    expect(here, part(o, tokens, o_axis), tolerance, f"{what} o")
    for x, expected in zip(all_states(state), all_states(final), strict=True):
        expect(x, expected, tolerance, f"{what} state")
    if same_bits:
        assert torch.equal(here, part(o, tokens, o_axis)), f"{what}: other bits"
    terms = loss(here, part(d_o, tokens, o_axis), state)
    if rank != last:  # the loss of the states counts once
        terms = (here * part(d_o, tokens, o_axis)).sum() + 0 * sum(x.sum() for x in all_states(state))
    terms.backward()
    for key, x in own.items():
        if not x.requires_grad:
            continue
        got, expected = x.grad.clone(), whole[key].grad
        if axes[key] is None:
            dist.all_reduce(got)
        else:
            expected = part(expected, tokens, axes[key])
        expect(got, expected, 20 * tolerance, f"{what} d{key}")
    if states is not None and rank == first:
        for x, expected in zip(before_here, before):
            if x.requires_grad:
                expect(x.grad, expected.grad, 20 * tolerance, f"{what} dinitial_state")


def recurrent(name, tokens, **sizes):
    values = mechanisms.arguments(name, T=tokens, **sizes)
    for left_out in ("log_decay_v", "kv_mask"):
        values.pop(left_out, None)
    axes = {key: None if key in mechanisms.CONSTANT or x.ndim < 3 else 1 for key, x in values.items()}
    settings = mechanisms.DESCRIPTIONS[name]["settings"]
    return values, axes, {"causal": True} if "causal" in settings else {}


def check_recurrences():
    for name in STATEFUL:
        values, axes, options = recurrent(name, 90, K=7, V=5)
        for relay in (False, True):
            compare(name, values, 90, axes, options, relay=relay)
        compare(name, values, 90, axes, options | {"lengths": [80, 33], "starts": [5, 31]})
        if name != "delta_product":
            compare(name, values, 90, axes, options, dtype=torch.float32)
        compare(name, values, 90, axes, options | {"reverse": True})
        packed = {key: x if axes[key] is None else x[:1] for key, x in values.items()}
        compare(name, packed, 90, axes, options | {"cu_seqlens": [0, 20, 20, 61, 90]})


def check_states():
    rng = torch.Generator().manual_seed(7)
    for name in STATEFUL:
        description = mechanisms.DESCRIPTIONS[name]
        values, axes, options = recurrent(name, 60, K=7, V=5)
        function = getattr(heed, name)
        _, final = function(**{key: x[:, :20] if axes[key] else x for key, x in values.items()}, **options,
                            return_state=True)
        final = final if isinstance(final, tuple) else (final,)
        states = [torch.from_numpy(x) for x in final]
        states = [(x * (1 + 0.1 * torch.rand(x.shape, generator=rng, dtype=x.dtype)) if i < 2 else x,
                   description["states"][i][2]) for i, x in enumerate(states)]
        for relay in (False, True):
            compare(name, values, 60, axes, options, states=states, relay=relay)
    values, axes, _ = recurrent("gla", 60)
    values["log_decay_v"] = -np.random.default_rng(1).exponential(size=values["v"].shape)
    compare("gla", values, 60, axes | {"log_decay_v": 1})


def check_scans():
    for name in (*scans.NAMES, "causal_conv1d"):
        if name == "causal_conv1d":
            rng = np.random.default_rng(3)
            values = {"x": rng.standard_normal((2, 6, 50)), "weight": rng.standard_normal((6, 4)),
                      "bias": rng.standard_normal(6)}
            axes = {"x": 2, "weight": None, "bias": None}
        else:
            values = scans.arguments(name, T=50)
            forms = {key: scans.axes_of(name, key, x.ndim) if "|" in scans.DESCRIPTIONS[name]["axes"][key]
                     else scans.axes_of(name, key) for key, x in values.items()}
            axes = {key: form.index("T") if "T" in form else None for key, form in forms.items()}
        for relay in (False, True):
            compare(name, values, 50, axes, relay=relay)
        compare(name, values, 50, axes, {"lengths": [44, 17]})
        compare(name, values, 50, axes, {"reverse": True})
        compare(name, values, 50, axes, dtype=torch.float32)


def check_bits():
    """Parts at multiples of 64 tokens with relay=True have the bits of one process; without, those of any number of
    ranks that cut at the same segments."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    tokens = 64 * 2 * ranks
    for name in ("gla", "gated_delta_rule", "mlstm", "ssd"):
        values, axes, options = recurrent(name, tokens)
        values = {key: torch.from_numpy(x).float() for key, x in values.items()}
        function = getattr(heed.torch, name)
        own = {key: x if axes[key] is None else distributed.shard(x, world()) for key, x in values.items()}
        expected = distributed.shard(function(**values, **options), world())
        assert torch.equal(function(**own, **options, group=world(), relay=True), expected), name
        here = function(**own, **options, group=world(), segment=64)
        alone = dist.new_group([rank], use_local_synchronization=True)
        whole = function(**values, **options, group=alone, segment=64)
        assert torch.equal(here, distributed.shard(whole, world())), f"{name}: segments"


def check_attention():
    H = 2 * dist.get_world_size()
    for tokens, order in ((70, "contiguous"), (70, "zigzag"), (64 * 2 * dist.get_world_size(), "zigzag")):
        generator = torch.Generator().manual_seed(3)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        heads = torch.rand(H, generator=generator, dtype=torch.float64)
        rows = normal(1, H, tokens, tokens)
        all_options = [
            {}, {"causal": True}, {"causal": True, "window": (20, 0)}, {"window": (30, 10)}, {"softcap": 4.0},
            {"causal": True, "softcap": 5.0, "sinks": heads},
            {"causal": True, "alibi": heads}, {"bias": rows}, {"mask": rows > -0.5, "causal": True},
            {"log_decay": -torch.rand(2, tokens, H, generator=generator, dtype=torch.float64), "causal": True},
            {"key_lengths": [50, 33], "causal": True}, {"causal": True, "chunk": 32},
            {"causal": True, "prefix": [9, 20]},
            {"causal": True, "window": (9, 0), "sink_tokens": 3},
            {"segments": torch.arange(tokens).div(23, rounding_mode="floor").expand(2, tokens)},
            {"query_lengths": [tokens, 41], "key_starts": [7, 33], "causal": True, "align": [0, 5]},
            {"pattern": heed.patterns.dilated(9, 5) | heed.patterns.global_tokens([3])},
            {"causal": True, "dropout": 0.25, "seed": 5},
        ]
        packed_options = [
            {}, {"causal": True, "window": (12, 0)}, {"causal": True, "alibi": heads, "sinks": heads},
            {"causal": True, "dropout": 0.25, "seed": 5, "pattern": heed.patterns.atrous(3)},
        ]
        q, d_o = normal(2, tokens, H, 8), normal(2, tokens, H, 8)
        for kv_heads in (H, 1):
            k, v = normal(2, tokens, kv_heads, 8), normal(2, tokens, kv_heads, 8)
            for dtype in FLOATS:
                for options in all_options:
                    compare_attention([q, k, v], d_o, options, order, dtype)
                for options in packed_options:
                    offsets = {"cu_seqlens_q": [0, 11, 11, 60, tokens - 2]}
                    compare_attention([q[0], k[0], v[0]], d_o[0],
                                      options | offsets, order, dtype)


def compare_attention(tensors, d_o, options, order, dtype):
    rows = {"bias": 2, "mask": 2, "log_decay": 1, "segments": 1}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # A list: all ranks sum up gradients in the order of the options, which a set's order is not.
    differentiable = [key for key, x in options.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    options = {key: x.to(dtype if key == "bias" else wide, copy=True).requires_grad_() if key in differentiable else x
               for key, x in options.items()}
    axis = tensors[0].dim() - 3

    def shard(x, dim=axis):
        return distributed.shard(x, world(), dim=dim, order=order)

    whole = [x.to(dtype, copy=True).requires_grad_() for x in tensors]
    o = heed.torch.attention(*whole, **options)
    o.backward(d_o.to(dtype))
    not_on_a_ring = {"chunk", "log_decay", "pattern", "dropout"} & options.keys()
    for method in ("auto", "all_gather", *["ring"] * (not not_on_a_ring)):
        what = (list(options), order, dtype, method)
        parts = [shard(x.to(dtype)).clone().requires_grad_() for x in tensors]
        own = {key: shard(x, rows[key]) if key in rows else x for key, x in options.items()}
        own |= {key: own[key].detach().clone().requires_grad_() for key in differentiable}
        here = heed.torch.attention(*parts, **own, group=world(), method=method, order=order)
        if method == "ring":
            expect(here, shard(o), FLOATS[dtype], what)
        else:
            assert torch.equal(here, shard(o)), what
        here.backward(shard(d_o.to(dtype)))
        heads = [x.shape[-2] % dist.get_world_size() == 0 for x in tensors]
        same = method == "auto" and order == "contiguous" and all(heads) and options.keys().isdisjoint(
            {"alibi", "sinks", "log_decay", "bias", "mask", "pattern", "dropout"})  # exchanges tokens for heads
        for got, x in zip(parts, whole):
            assert not same or torch.equal(got.grad, shard(x.grad)), what
            expect(got.grad, shard(x.grad), 20 * FLOATS[dtype], what)
        for key in differentiable:
            got, expected = own[key].grad, options[key].grad
            if key in rows:
                expected = shard(expected, rows[key])
            else:
                dist.all_reduce(got)
            expect(got, expected, 40 * FLOATS[dtype], (*what, f"d{key}"))


def check_seeds():
    """Without a seed ranks drop the pairs that rank 0 has drawn, in both passes."""
    torch.manual_seed(1 + dist.get_rank())
    q = torch.randn(1, 40, 2, 8, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    own = distributed.shard(q, world()).clone().requires_grad_()
    o = heed.torch.attention(own, own, own, causal=True, dropout=0.4, group=world())
    gradient, = torch.autograd.grad(o.sum(), own)
    torch.manual_seed(1)
    whole = q.requires_grad_()
    expected = heed.torch.attention(whole, whole, whole, causal=True, dropout=0.4)
    assert torch.equal(o, distributed.shard(expected, world()))
    expect(gradient, distributed.shard(torch.autograd.grad(expected.sum(), whole)[0], world()), 1e-12, "dropout")


def check_caches():
    """Each rank's cache holds a part of the keys; one has none, and the last has those of the rows."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(9)
    T, rows = 90, 5
    borders = [0, 0, *(T * i // ranks for i in range(2, ranks)), T][: ranks] + [T]
    k, v = (torch.randn(2, T, 2, 8, generator=generator) for _ in range(2))
    q, sinks = torch.randn(2, rows, 4, 8, generator=generator), torch.rand(4, generator=generator)
    for kind in (torch.float32, torch.bfloat16):
        whole, own = (heed.torch.KVCache(2, 2, 8, dtype=kind) for _ in range(2))
        for part_of in (slice(0, T - rows), slice(T - rows, T)):
            whole.append(k[:, part_of].to(kind), v[:, part_of].to(kind))
        borders_here = [borders[rank], *[T - rows] * (rank == ranks - 1), borders[rank + 1]]
        for begin, end in zip(borders_here, borders_here[1:]):
            own.append(*(x[:, begin:end].to(kind) for x in (k, v)))
        for options in ({}, {"softcap": 4.0, "scale": 0.3}, {"sinks": sinks}):
            expected, lse = whole.attend(q.to(kind), return_lse=True, **options)
            o, of_all = own.attend(q.to(kind), return_lse=True, group=world(), **options)
            expect(o, expected, FLOATS[kind], ("cache", kind, list(options)))
            expect(of_all, lse, 2e-5, "lse of a cache")
            whole_here = own.attend(q.to(kind), return_lse=True, group=world(), **options)
            assert torch.equal(whole_here[0], o) and torch.equal(whole_here[1], of_all)
            out = torch.empty_like(o)
            assert own.attend(q.to(kind), group=world(), out=out, **options) is out or torch.equal(out, o)
    rotated = heed.torch.KVCache(2, 2, 8, dtype=kind, rotary={"interleaved": False})
    for cache, options in ((own, {"window": (3, 0)}), (heed.torch.RingKVCache(2, 2, 8, dtype=kind, window=8), {}),
                           (rotated, {}), (own, {"epsilon": 0.1})):
        try:
            cache.attend(q.to(kind), group=world(), **options)
        except heed.Unsupported:
            continue
        raise AssertionError(f"{type(cache).__name__} with {options} was not refused")


def check_shards():
    for shape, dim in (((2, 70, 3), 1), ((2, 70, 3), -2), ((500,), 0), ((2, 1, 3), 1)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(5)).requires_grad_()
        for order in ("contiguous", "zigzag"):
            own = distributed.shard(x, world(), dim=dim, order=order)
            whole = distributed.unshard(own, world(), dim=dim, order=order)
            assert torch.equal(whole, x), (shape, order)
            gradient, = torch.autograd.grad(whole, own, torch.ones_like(x))
            assert bool((gradient == dist.get_world_size()).all()), "the loss is the sum of those of all ranks"
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    q = torch.randn(1, 40, 2, 8, generator=torch.Generator().manual_seed(6))
    own = distributed.shard(q, mesh)
    o = heed.torch.attention(own, own, own, causal=True, group=mesh)
    assert torch.equal(o, distributed.shard(heed.torch.attention(q, q, q, causal=True), mesh)), "a DeviceMesh"
    own = torch.full((2, dist.get_rank() * 3 % 5, 2), float(dist.get_rank()))
    whole = distributed.unshard(own, world())
    assert whole.shape[1] == sum(rank * 3 % 5 for rank in range(dist.get_world_size()))


def check_bytes():
    """The bytes that each rank receives: the summaries of all segments, and nothing of the size of the tokens."""
    received = []
    plain = _group._all_gather
    _group._all_gather = lambda out, x, **more: (received.append(out.numel()), plain(out, x, **more))[1]
    ranks = dist.get_world_size()
    B, HV, K, V = 2, 4, 12, 10
    for name, of_transition in (("gla", K), ("gated_delta_rule", K * K)):
        values, axes, _ = recurrent(name, 64 * ranks, K=K, V=V)
        own = {key: distributed.shard(torch.from_numpy(x), world()).requires_grad_() for key, x in values.items()}
        received.clear()
        o = getattr(heed.torch, name)(**own, group=world())
        forward = list(received)
        received.clear()
        o.sum().backward()
        summary = B * HV * (K * V + of_transition) * 8
        assert forward == [ranks * HEADER, ranks * summary], (name, forward)
        assert received == [ranks * HEADER, ranks * B * HV * K * V * 8], (name, received)


def check_refusals():
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    values, axes, _ = recurrent("gla", 64)
    own = {key: part(torch.from_numpy(x), 64) for key, x in values.items()}

    def expect_refusal(kind, text, function, *arguments, **options):
        try:
            function(*arguments, **options)
        except kind as refused:
            assert text in str(refused), (text, str(refused))
        else:
            raise AssertionError(f"{text}: nothing was refused")

    gla, attention, bad = heed.torch.gla, heed.torch.attention, heed.InvalidArgument
    expect_refusal(bad, "scale=", gla, **own, group=world(), scale=2.0 if rank == last else 1.0)
    one = {key: x.float() if rank == last else x for key, x in own.items()}
    expect_refusal(bad, "rank", gla, **one, group=world())
    one = own | {"q": own["q"].int()} if rank == last else own
    expect_refusal(bad, "q", gla, **one, group=world())
    expect_refusal(bad, "q", attention, one["q"], own["k"], own["k"], group=world())
    one = own | {"q": own["q"][..., :3]} if rank == last else own
    expect_refusal(bad, "gla", gla, **one, group=world())
    one = {key: x[..., :1, :] if rank == last else x for key, x in own.items()}
    expect_refusal(bad, f"rank {last}", gla, **one, group=world())
    expect_refusal(bad, "gradient", gla, **{k: x.clone().requires_grad_(rank == last) for k, x in own.items()},
                   group=world())
    one = own | {"k": own["k"][:, 1:]} if rank == last else own
    expect_refusal(bad, "tokens", gla, **one, group=world())
    one = own | {"q": own["q"][0]} if rank == last else own
    expect_refusal(bad, "q has shape", gla, **one, group=world())
    expect_refusal(bad, "lengths", gla, **own, group=world(), lengths=[64, 65])
    packed = {key: x[:1] for key, x in own.items()}
    for offsets in ([0, 40, 30, 64], [0, 63], [1, 64]):
        expect_refusal(bad, "cu_seqlens", gla, **packed, group=world(), cu_seqlens=offsets)
    expect_refusal(bad, "ProcessGroup", gla, **own, group=3)
    expect_refusal(bad, "segment", gla, **own, group=world(), segment=0)
    expect_refusal(bad, "relay", gla, **own, relay=1)
    q, k, v = own["q"], own["k"], own["k"]
    blocks = heed.patterns.row_blocks(np.zeros((1, q.shape[1], 1), int))
    expect_refusal(heed.Unsupported, "row_blocks", attention, q, k, v, group=world(), pattern=blocks)
    for option, value in {"dropout": 0.1, "pattern": heed.patterns.atrous(2), "chunk": 8}.items():
        expect_refusal(heed.Unsupported, f"{option} is given on a ring", attention, q, k, v, group=world(),
                       method="ring", **{option: value})
    expect_refusal(bad, "gradients of q", attention, q.clone().requires_grad_(rank == last), k, v, group=world())
    expect_refusal(bad, "cu_seqlens_q", attention, q[0], k[0], v[0], group=world(), cu_seqlens_q=[0, 30, 20])
    expect_refusal(heed.Unsupported, "out", attention, q, k, v, group=world(), out=torch.empty_like(q))
    expect_refusal(bad, "method", attention, q, k, v, group=world(), method="ring of fire")
    expect_refusal(bad, "order", attention, q, k, v, group=world(), order="spiral")
    expect_refusal(bad, "causal", attention, q, k, v, group=world(), causal=rank == last)
    expect_refusal(bad, "tokens", attention, q, k[:, 1:], v[:, 1:], group=world())
    expect_refusal(heed.Unsupported, "causal is", heed.torch.linear_attention, q, k, v, causal=False,
                   group=world())
    expect_refusal(TypeError, "group", heed.torch.efficient_attention, q, k, v, group=world())
    x = part(torch.randn(2, 64, 4), 64)
    expect_refusal(heed.Unsupported, "first segment", heed.torch.rg_lru, x, x, x, torch.ones(4), group=world(),
                   starts=[60, 0])
    expect_refusal(bad, "order", distributed.shard, q, world(), order="spiral")
    expect_refusal(bad, "dim", distributed.shard, q, world(), dim=7)
    assert attention(q, k, v, group=world(), align="bottom_right", dropout=0.0).shape == q.shape
    # Nothing was left behind: the next call is computed.
    whole = gla(**{key: torch.from_numpy(x) for key, x in values.items()})
    expect(gla(**own, group=world()), part(whole, 64), 1e-12, "after a refusal")


def check_few_tokens():
    """Ranks without tokens, and fewer tokens than ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for tokens_of in ([0] * ranks, [1] + [0] * (ranks - 1), [0] * (ranks - 1) + [3]):
        tokens, begin = sum(tokens_of), sum(tokens_of[:rank])
        for name in ("gla", "kda", "mlstm"):
            values, axes, _ = recurrent(name, tokens)
            values = {key: torch.from_numpy(x) for key, x in values.items()}
            function = getattr(heed.torch, name)
            o, state = function(**values, return_state=True)
            own = {key: x[:, begin: begin + tokens_of[rank]].clone().requires_grad_() for key, x in values.items()}
            for relay in (False, True):
                here, final = function(**own, group=world(), return_state="all", relay=relay)
                expect(here, o[:, begin: begin + tokens_of[rank]], 1e-12, (name, tokens_of))
                for x, expected in zip(all_states(final), all_states(state)):
                    expect(x, expected, 1e-12, (name, tokens_of, "state"))
                (here.sum() + sum(x.sum() for x in all_states(final) if x.requires_grad)).backward()
        q = torch.randn(2, tokens_of[rank], 4, 8)
        assert heed.torch.attention(q, q, q, causal=True, group=world()).shape == q.shape


def check_models():
    """Models of Transformers, where it is installed."""
    if importlib.util.find_spec("transformers"):
        importlib.import_module("distributed_models").check()


def check_every_family():
    if importlib.util.find_spec("transformers"):
        importlib.import_module("distributed_models").check_every_family()


def check_death():
    """A rank that ends before its call: the others raise an error instead of waiting for ever."""
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(0)
    values, _, _ = recurrent("gla", 64)
    try:
        heed.torch.gla(**{key: part(torch.from_numpy(x), 64) for key, x in values.items()}, group=world())
    except RuntimeError:
        os._exit(0)
    raise AssertionError("a call without one of its ranks returned")


if __name__ == "__main__":
    check, rank, ranks, file = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks,
                            timeout=datetime.timedelta(seconds=60))
    for name in check.split(","):
        globals()[f"check_{name}"]()
    dist.destroy_process_group()
