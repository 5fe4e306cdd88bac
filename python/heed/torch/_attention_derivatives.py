# Derivatives of forward mode of attention, and of its backward pass.
"""The operator `torch.ops.heed.attention_derivatives`.

A backward pass gives the gradients J^T (do, dlse) of attention, whose Jacobian is J. For a direction x' of the
arguments x, the operator computes the derivative (o', lse') = J x' of the results, and the gradient with respect to x
of

  L = <do, o'> + <dlse, lse'> = <J^T (do, dlse), x'>,

which is what a second derivative consists of: L is the product of the gradients with x', and as second derivatives are
symmetric, its gradient is the derivative of the gradients in the direction x' as well.

In the notation of attention.h, with s'_ij = f'_ij scale (<q'_i, k_j> + <q_i, k'_j>) + alibi'_ij + r'_ij + F'_ij +
bias'_ij, the factor g_ij = Z_ij / (1 - dropout) of dropout, and the mean m_i = w_i lse'_i + (1 - w_i) sink'_h:

  lse'_i = sum_j P_ij s'_ij
  o'_i   = w_i sum_j g_ij P_ij ((s'_ij - m_i) v_j + v'_j)
  dS_ij  = P_ij (w_i g_ij <do_i, v_j> - w_i <do_i, o_i> + dlse_i)
  E_ij   = (s'_ij - m_i) dS_ij + P_ij (w_i g_ij <do_i, v'_j> - w_i <do_i, o'_i> + dlse_i (m_i - lse'_i))

E_ij is the gradient of L with respect to a logit, and with e_ij = scale (<q'_i, k_j> + <q_i, k'_j>)

  dq_i = scale sum_j ((E_ij f'_ij + dS_ij f''_ij e_ij) k_j + dS_ij f'_ij k'_j),  and likewise dk_j
  dv_j = sum_i w_i g_ij P_ij (s'_ij - m_i) do_i
  dsinks_h = -sum_i (1 - w_i) (<do_i, o_i> (sink'_h - m_i) + <do_i, o'_i>)

Products of tiles are PyTorch's, P is heed's, and a tile has a bounded size: memory is linear in the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from heed import Unsupported, _core
from heed.torch import _dispatch
from heed.torch._options import Options

_TILE, _ROWS = 1 << 19, 64  # elements of a tile, more where 64 rows of one head have more


class _Call:
    """Arguments of attention, and the sequences in it."""

    def __init__(self, q: Tensor, k: Tensor, lse: Tensor, table: Options, options: Sequence[Any]):
        self.q, self.k, self.lse = q, k, lse
        given = dict(zip(table.names, options))
        self.options = dict(zip(table.names, table.defaults)) | given
        self.packed = self.options["cu_seqlens_q"] is not None
        self.heads_first = self.options["heads_first"] and not self.packed
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        scale = self.options["scale"]
        self.scale = q.shape[-1] ** -0.5 if scale is None else scale
        # Without sinks, P is relative to the keys alone.
        self.of_weights = list((self.options | {"sinks": None}).values())

    def sequences(self) -> Iterator[_Sequences]:
        """Each sequence, or several together if their tiles are small and their positions the same."""
        if self.packed:
            of_queries, of_keys = self.options["cu_seqlens_q"], self.options["cu_seqlens_k"]
            queries = of_queries.tolist()
            keys = queries if of_keys is None else of_keys.tolist()
            for i in range(len(queries) - 1):
                yield _Sequences(self, range(i, i + 1), slice(*queries[i:i + 2]), slice(*keys[i:i + 2]))
            return
        tokens, heads = (2, 1) if self.heads_first else (1, 2)
        batch, rows, keys, step = self.q.shape[0], self.q.shape[tokens], self.k.shape[tokens], 1
        if self.options["query_starts"] is None and self.options["key_lengths"] is None:
            step = max(1, _TILE // max(1, self.q.shape[heads] * rows * keys))
        for i in range(0, batch, step):
            yield _Sequences(self, range(i, min(i + step, batch)), slice(0, rows), slice(0, keys))

    def tile(self, sequences: range, head: int, row: int, key: int, size: Sequence[int], *, dropout: bool) -> Tensor:
        """P of these heads, rows and keys of each sequence, with the factor of dropout or without."""
        out = self.q.new_empty(size, dtype=self.dtype)
        for i, of_sequence in zip(sequences, out):
            _core._torch_attention_weights(self.q, self.k, self.lse, i, head, row, key, dropout, of_sequence,
                                           *self.of_weights)
        return out


class _Sequences:
    """Sequences of a call with as many tokens and the same positions of queries; one if they are packed."""

    def __init__(self, call: _Call, indices: range, rows: slice, keys: slice):
        self.call, self.indices, self.rows, self.keys = call, indices, rows, keys
        self.places = slice(indices.start, indices.stop)
        options, index = call.options, indices.start
        self.num_rows, self.num_keys = rows.stop - rows.start, keys.stop - keys.start
        starts = options["query_starts"]
        if starts is not None:
            self.start = int(starts[index])
        else:
            self.start = self.num_keys - self.num_rows if options["align"] == "bottom_right" else 0
        lengths = options["key_lengths"]
        self.end = self.num_keys if lengths is None else int(lengths[index])

    def of(self, x: Tensor, tokens: slice) -> Tensor:
        """A view [sequences, heads, tokens, channels] of q, k, v, o, or of a tensor like them."""
        if self.call.packed:
            return (x if x.dim() == 4 else x[None])[:, tokens].transpose(1, 2)
        return x[self.places] if self.call.heads_first else x[self.places].transpose(1, 2)

    def of_lse(self, x: Tensor) -> Tensor:
        """A view [sequences, heads, rows] of lse, or of a tensor like it."""
        return x[None, :, self.rows] if self.call.packed else x[self.places]

    def of_decays(self, x: Tensor) -> Tensor:
        """A view [sequences, heads, keys] of log_decay, or of a tensor like it."""
        if self.call.packed:
            return (x if x.dim() == 3 else x[None])[:, self.keys].mT
        return x[self.places].mT

    def of_slopes(self, x: Tensor) -> Tensor:
        """A view [sequences or 1, heads] of alibi, or of a tensor like it."""
        return x[None] if x.dim() == 1 else x[self.places]

    def visible_keys(self, rows: slice) -> slice:
        """Keys outside of which these rows see none."""
        options, begin, end = self.call.options, 0, self.num_keys
        first, last = self.start + rows.start, self.start + rows.stop - 1
        if options["causal"] and options["prefix"] is None:
            end = min(end, last + 1)
        left, right = options["window"] or (-1, -1)
        if options["sink_tokens"] == 0:
            begin = max(begin, first - left) if left >= 0 else begin
            end = min(end, last + right + 1) if right >= 0 else end
        return slice(min(begin, self.num_keys), max(end, min(begin, self.num_keys)))

    def positions(self, rows: slice) -> Tensor:
        return torch.arange(self.start + rows.start, self.start + rows.stop, device="cpu")


def _wide(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).contiguous()


def _part(x: Tensor, *places: Any) -> Tensor:
    """The part of a tensor that broadcasts to [B, H, Q, K] at these places of the axes, with all four axes."""
    x = x[(None,) * (4 - x.dim())]
    return x[tuple(slice(0, 1) if size == 1 else place for size, place in zip(x.shape, places))]


class _Derivatives:
    """o', lse' and the gradients of L, tile by tile."""

    def __init__(self, call: _Call, tangents: dict[str, Any], incoming: Sequence[Any], tensors: Sequence[Tensor],
                 results: Sequence[Tensor], gradients: dict[str, Tensor]):
        self.call, self.tangents, self.incoming, self.tensors = call, tangents, incoming, tensors
        self.o_along, self.lse_along = results
        self.gradients = gradients
        self.backward = any(x is not None for x in incoming) and bool(gradients)
        numbers = [x for x in (*tensors, *tangents.values(), *incoming) if x is not None]
        # A key that a row does not see may be infinite or NaN.
        self.is_finite = all(bool(torch.isfinite(x.sum(dtype=call.dtype))) for x in numbers)

    def add(self, s: _Sequences) -> None:
        dtype = self.call.dtype
        q, k, v, o = (None if x is None else _wide(s.of(x, tokens), dtype) for x, tokens in zip(
            self.tensors, (s.rows, s.keys, s.keys, s.rows)))
        dq, dk, dv = (None if x is None else _wide(s.of(x, tokens), dtype) for x, tokens in zip(
            (self.tangents[name] for name in "qkv"), (s.rows, s.keys, s.keys)))
        do, dlse = self.incoming
        do = None if do is None else _wide(s.of(do, s.rows), dtype)
        dlse = None if dlse is None else s.of_lse(dlse).to(dtype)
        count, heads, key_heads = q.shape[0], q.shape[1], k.shape[1]
        group = heads // max(key_heads, 1)
        rows = max(1, min(s.num_rows, _ROWS))
        step = min(key_heads, max(1, _TILE // max(1, count * group * rows * s.num_keys)))
        if step == key_heads:
            rows = max(rows, min(s.num_rows, _TILE // max(1, count * heads * s.num_keys)))
        if self.call.options["causal"]:  # a quarter of the rows skips keys that none of them sees
            rows = min(rows, max(_ROWS, s.num_rows // 4))
        found = {name: torch.zeros_like(x) for name, x in zip("kv", (k, v))} | {"q": torch.zeros_like(q)}
        decays = q.new_zeros((count, heads, s.num_keys + 1), dtype=torch.float64)
        for head in range(0, key_heads, step):
            for row in range(0, s.num_rows, rows):
                tile = _Tile(self, s, slice(head, min(head + step, key_heads)), group,
                             slice(row, min(row + rows, s.num_rows)))
                if tile.keys.start < tile.keys.stop:
                    tile.compute((q, k, v, o), (dq, dk, dv), do, dlse, found, decays)
        for name, x in found.items():
            if name in self.gradients:
                s.of(self.gradients[name], s.rows if name == "q" else s.keys).copy_(x)
        if "log_decay" in self.gradients:
            s.of_decays(self.gradients["log_decay"]).copy_(decays.cumsum(2)[..., :-1])


class _Tile:
    """Some rows of some key heads: tensors [key heads of all sequences, rows of all query heads, keys or channels]."""

    def __init__(self, of: _Derivatives, s: _Sequences, key_heads: slice, group: int, rows: slice):
        self.of, self.s, self.key_heads, self.rows = of, s, key_heads, rows
        self.heads = slice(key_heads.start * group, key_heads.stop * group)
        self.keys = s.visible_keys(rows)
        count, keys = len(s.indices), self.keys.stop - self.keys.start
        self.num_heads = count * (key_heads.stop - key_heads.start)
        self.shape = (count, self.heads.stop - self.heads.start, rows.stop - rows.start, keys)

    def by_row(self, x: Tensor) -> Tensor:
        return x[:, self.heads, self.rows].reshape(self.num_heads, -1, x.shape[-1])

    def by_key(self, x: Tensor) -> Tensor:
        return x[:, self.key_heads, self.keys].flatten(0, 1)

    def by_head(self, tile: Tensor) -> Tensor:
        """[sequences, query heads, rows, ..] of a tensor [key heads, rows of all query heads, ..]."""
        return tile.view(*self.shape[:3], *tile.shape[2:])

    def add_by_key(self, found: Tensor, x: Tensor) -> None:
        to = found[:, self.key_heads, self.keys]
        to += x.view(to.shape)

    def compute(self, tensors: Any, tangents: Any, do: Any, dlse: Any, found: dict[str, Tensor],
                decays: Tensor) -> None:
        of, s, call = self.of, self.s, self.of.call
        q, k, v, o = tensors
        q, k, v, o = self.by_row(q), self.by_key(k), self.by_key(v), None if o is None else self.by_row(o)
        q_along, k_along, v_along = tangents
        q_along = None if q_along is None else self.by_row(q_along)
        k_along, v_along = (None if x is None else self.by_key(x) for x in (k_along, v_along))
        size = (self.num_heads, q.shape[1], self.shape[3])
        place = (s.indices, self.heads.start, self.rows.start, self.keys.start, self.shape)
        P = call.tile(*place, dropout=False).view(size)
        kept = call.tile(*place, dropout=True).view(size) if call.options["dropout"] else P
        unseen = None if of.is_finite else P == 0

        def product(x: Tensor, y: Tensor) -> Tensor:
            tile = torch.bmm(x, y.mT)
            return tile if unseen is None else tile.masked_fill_(unseen, 0)

        def weighted(weights: Tensor, x: Tensor) -> Tensor:
            return torch.bmm(weights, x if of.is_finite else torch.nan_to_num(x, 0, 0, 0))

        # Logits.
        along = P.new_zeros(()) if q_along is None else product(q_along * call.scale, k)
        along = along.expand(size) if k_along is None else product(q * call.scale, k_along).add_(along)
        along = along.contiguous()
        cap, slope, curvature = call.options["softcap"], None, None
        if cap:
            tanh = torch.tanh_(product(q * (call.scale / cap), k))
            slope = 1 - tanh * tanh
            curvature = tanh.mul_(slope).mul_(along).mul_(-2 / cap)  # f'' e
            along = along * slope
        self._add_to_logits(self.by_head(along))
        # Results.
        lse = s.of_lse(call.lse)[:, self.heads, self.rows].to(call.dtype)
        w, sink = self._shares(lse)
        lse_along = (P * along).sum(-1)
        mean = w * lse_along + sink
        along -= mean[..., None]
        moved = kept * along
        o_along = weighted(moved, v)
        if v_along is not None:
            o_along += weighted(kept, v_along)
        o_along *= w[..., None]
        s.of(of.o_along, s.rows)[:, self.heads, self.rows] = self.by_head(o_along).to(of.o_along.dtype)
        s.of_lse(of.lse_along)[:, self.heads, self.rows] = self.by_head(lse_along).to(of.lse_along.dtype)
        if not of.backward:
            return
        # Gradients of L.
        rows = torch.zeros_like(mean)
        if do is not None:
            do = self.by_row(do)
            rows = w * (do * o).sum(-1)
            of_o = (do * o_along).sum(-1)
        else:
            do, of_o = torch.zeros_like(o_along), torch.zeros_like(mean)
        shift = w * of_o
        if dlse is not None:
            dlse = dlse[:, self.heads, self.rows].reshape(mean.shape)
            rows = rows - dlse
            shift = shift - dlse * (mean - lse_along)
        by_w = do * w[..., None]
        dS, E = product(by_w, v), None if v_along is None else product(by_w, v_along)
        if kept is P:
            dS = dS.sub_(rows[..., None]).mul_(P)
            E = P * -shift[..., None] if E is None else E.sub_(shift[..., None]).mul_(P)
        else:
            dS = dS.mul_(kept).sub_(P * rows[..., None])
            E = (0 if E is None else E.mul_(kept)) - P * shift[..., None]
        E.addcmul_(along, dS)
        self._add_to_gradients(E, decays)
        if "sinks" in of.gradients:
            of_sinks = ((self._sink_along() - mean) * (do * o).sum(-1) + of_o) * (1 - w)
            of.gradients["sinks"][self.heads] -= self.by_head(of_sinks).sum((0, 2))
        if slope is not None:
            E = E.mul_(slope).addcmul_(curvature, dS)
            dS.mul_(slope)
        if "q" in of.gradients:
            dq = weighted(E, k)
            if k_along is not None:
                dq += weighted(dS, k_along)
            found["q"][:, self.heads, self.rows] = self.by_head(dq).mul_(call.scale)
        if "k" in of.gradients:
            dk = torch.bmm(E.mT, q)
            if q_along is not None:
                dk.baddbmm_(dS.mT, q_along)
            self.add_by_key(found["k"], dk.mul_(call.scale))
        if "v" in of.gradients:
            self.add_by_key(found["v"], torch.bmm(moved.mT, by_w))

    def _sink_along(self) -> Any:
        """The tangent of sinks for each row, or 0."""
        along = self.of.tangents["sinks"]
        if along is None:
            return 0
        along = along[self.heads, None].to(self.of.call.dtype)
        return along.expand(self.shape[:3]).reshape(self.num_heads, -1)

    def _shares(self, lse: Tensor) -> tuple[Tensor, Any]:
        """w, and what the tangent of the sink adds to the mean."""
        sinks = self.of.call.options["sinks"]
        if sinks is None:
            return lse.new_ones(()).expand(self.num_heads, lse.numel() // self.num_heads), 0
        w = torch.sigmoid(lse - sinks[self.heads, None].to(lse.dtype))
        w = w.masked_fill_(torch.isneginf(lse), 0).view(self.num_heads, -1)
        return w, (1 - w) * self._sink_along()

    def _distances(self) -> Tensor:
        keys = torch.arange(self.keys.start, self.keys.stop, device="cpu")
        return (self.s.positions(self.rows)[:, None] - keys).abs_().to(self.of.call.dtype)

    def _in_span(self, span: int) -> tuple[Tensor, Tensor]:
        """Distances of rows to keys, and which of them a relative bias has; 0 stands for others."""
        keys = torch.arange(self.keys.start, self.keys.stop, device="cpu")
        distances = self.s.positions(self.rows)[:, None] - keys
        inside = (distances >= 0) & (distances < span)
        return distances.masked_fill_(~inside, 0), inside

    def _last_decays(self) -> Tensor:
        """For each row, the last key whose decay its logits contain, below 0 where there is none."""
        return self.s.positions(self.rows).clamp_(max=self.s.end - 1)

    def _add_to_logits(self, along: Tensor) -> None:
        """Adds bias', alibi', relative_bias' and F' to a tile [sequences, heads, rows, keys]."""
        tangents, s, dtype = self.of.tangents, self.s, along.dtype
        if tangents["bias"] is not None:
            along += _part(tangents["bias"], s.places, self.heads, self.rows, self.keys).to(dtype)
        if tangents["alibi"] is not None:
            slopes = s.of_slopes(tangents["alibi"])[:, self.heads]
            along -= slopes[..., None, None].to(dtype) * self._distances()
        if tangents["relative_bias"] is not None:
            of_heads = tangents["relative_bias"][self.heads].to(dtype)
            distances, inside = self._in_span(of_heads.shape[1])
            along += of_heads[:, distances].masked_fill_(~inside, 0)
        if tangents["log_decay"] is not None:
            sums = s.of_decays(tangents["log_decay"])[:, self.heads].double().cumsum(2)
            last = self._last_decays()
            sums = sums - sums[..., last[-1:].clamp(min=0)]  # small near the rows
            forgotten = sums[..., last.clamp(min=0), None] - sums[..., None, self.keys]
            keys = torch.arange(self.keys.start, self.keys.stop, device="cpu")
            along += forgotten.masked_fill_(keys > last[:, None], 0).to(dtype)

    def _add_to_gradients(self, E: Tensor, decays: Tensor) -> None:
        """Adds the gradients of biases, alibi and the log decays. `decays[s]` is that of s without that of s - 1."""
        gradients, s, E = self.of.gradients, self.s, self.by_head(E)
        if "bias" in gradients:
            to = _part(gradients["bias"], s.places, self.heads, self.rows, self.keys)
            to += E.sum_to_size(to.shape)
        if "alibi" in gradients:
            to = s.of_slopes(gradients["alibi"])[:, self.heads]
            to -= (E * self._distances()).sum((2, 3)).sum_to_size(to.shape)
        if "relative_bias" in gradients:
            to = gradients["relative_bias"][self.heads]
            distances, inside = self._in_span(to.shape[1])
            to.index_add_(1, distances[inside], E.sum(0)[:, inside].to(to.dtype))
        if "log_decay" in gradients:
            last = self._last_decays()
            keys = torch.arange(self.keys.start, self.keys.stop, device="cpu")
            E = E.double().masked_fill(keys > last[:, None], 0)
            decays[:, self.heads, self.keys.start + 1:self.keys.stop + 1] += E.sum(2)
            decays[:, self.heads] = decays[:, self.heads].index_add(2, last.clamp(min=-1) + 1, E.sum(3), alpha=-1)


def define(table: Options, backward: Any, gradient_like: Any) -> Any:
    """Makes the operator for attention's options and its backward operator."""
    differentiable = ["q", "k", "v", *(option.name for option in table.table if option.has_gradient)]
    count = len(differentiable)

    def new_results(arguments: Sequence[Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
        q, k, v, o, lse, needed, *options = arguments[count + 2:]
        given = dict(zip(("q", "k", "v", *table.names), (q, k, v, *options)))
        gradients = {name: gradient_like(given[name]) for name, need in zip(differentiable, needed) if need}
        return [torch.empty_like(o, memory_format=torch.contiguous_format), torch.empty_like(lse)], gradients

    def kernel(*arguments: Any) -> list[Tensor]:
        tangents, incoming = dict(zip(differentiable, arguments)), arguments[count:count + 2]
        q, k, v, o, lse, _, *options = arguments[count + 2:]
        results, gradients = new_results(arguments)
        call = _Call(q, k, lse, table, options)
        # Sums over sequences, heads and rows.
        sums = {name: torch.zeros_like(x, dtype=x.dtype if name in "qkv" else torch.promote_types(x.dtype, call.dtype))
                for name, x in gradients.items()}
        for x in results:
            x.zero_()
        derivatives = _Derivatives(call, tangents, incoming, (q, k, v, o), results, sums)
        for sequences in call.sequences():
            derivatives.add(sequences)
        return [*results, *(x.to(gradients[name].dtype) for name, x in sums.items())]

    def meta(*arguments: Any) -> list[Tensor]:
        results, gradients = new_results(arguments)
        return [*results, *gradients.values()]

    def gradients(needed: Sequence[bool], of_results: Sequence[Any], *arguments: Any) -> dict[int, Any]:
        """The gradients of o' and lse', which are L for what arrives there."""
        grad_o, grad_lse, *others = of_results
        if any(x is not None for x in others):
            raise Unsupported("attention: a third derivative was asked for, which heed does not have")
        given = arguments[count + 2:]
        tensors, options = given[:5], given[6:]
        first = count + 2
        at = [*range(first, first + 3), *(first + 6 + i for i, x in enumerate(table.table) if x.has_gradient)]
        if grad_o is None:
            grad_o = torch.zeros_like(tensors[3])
        of_tangents = list(needed[:count])
        found = dict(zip((i for i in range(count) if of_tangents[i]),
                         backward(grad_o, grad_lse, *tensors, of_tangents, *options))) if any(of_tangents) else {}
        wanted = [i < len(needed) and needed[i] for i in at]
        if any(wanted):
            _, _, *of_tensors = operator(*arguments[:count], grad_o, grad_lse, *tensors, wanted, *options)
            found |= dict(zip((i for i, want in zip(at, wanted) if want), of_tensors))
        return found

    def no_tangents(*_: Any) -> Any:
        raise Unsupported("attention: a second forward derivative was asked for, which heed does not have, "
                          "expected one in forward and one in reverse mode, as in torch.func.hessian")

    names = [*(f"the tangent of {name}" for name in differentiable), "the gradient of o", "the gradient of lse",
             "q", "k", "v", "o", "lse", "needed", *table.names]
    tangents = "".join(f"Tensor? {name}_along, " for name in differentiable)
    operator = _dispatch.define(
        "attention_derivatives",
        f"({tangents}Tensor? grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
        f"bool[] needed, {table.schema}) -> Tensor[]",
        kernel, meta, gradients=gradients, tangents=no_tangents, names=names)
    return operator
