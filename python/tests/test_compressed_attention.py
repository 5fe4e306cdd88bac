# heed.compressed_attention and heed.torch.compress: against plain NumPy, attention, Transformers' DeepSeek-V4, from
# files and in PyTorch.
import itertools
import json
import subprocess

import numpy as np
import pytest

import heed
from cli_program import HEED, document, load, needs_program, save

RNG = np.random.default_rng(0)
NAMES = ("q", "k", "v", "k_cmp", "v_cmp")


def inputs(B=2, Tq=40, Tk=40, H=4, Hkv=2, D=6, Dv=5, ratio=4, dtype=np.float64):
    """q, k, v, k_cmp, v_cmp."""
    N = Tk // ratio
    return [RNG.standard_normal(shape).astype(dtype) for shape in (
        (B, Tq, H, D), (B, Tk, Hkv, D), (B, Tk, Hkv, Dv), (B, N, Hkv, D), (B, N, Hkv, Dv))]


def places(B, Tq, Tk, lengths=None, starts=None, cu_seqlens=None, ratio=4):
    """Each row's position in its sequence, -1 if it has none, and the sequence's first compressed key: [B, Tq]."""
    begin, end, first_key = (np.full((B, Tq), x) for x in (0, Tk, 0))
    if starts is not None:
        begin[:] = np.array(starts)[:, None]
    if lengths is not None:
        end[:] = np.array(lengths)[:, None]
    if cu_seqlens is not None:
        end[:], keys = 0, 0
        for first, last in itertools.pairwise(cu_seqlens):
            begin[:, first:last], end[:, first:last], first_key[:, first:last] = first, last, keys
            keys += (last - first) // ratio
    token = np.arange(Tk - Tq, Tk)
    return np.where((begin <= token) & (token < end), token - begin, -1), first_key


def choice(B=2, Tq=40, Tk=40, heads=None, count=3, ratio=4, **sequences):
    """Random complete keys of each row, in random order, -1 among them where there are too few."""
    chosen = np.full((B, Tq, *(() if heads is None else (heads,)), count), -1)
    position, _ = places(B, Tq, Tk, **sequences, ratio=ratio)
    for at in np.ndindex(chosen.shape[:-1]):
        complete = (position[at[:2]] + 1) // ratio
        n = min(complete, count)
        chosen[at][RNG.permutation(count)[:n]] = RNG.permutation(complete)[:n]
    return chosen


def naive(q, k, v, k_cmp, v_cmp, *, ratio, window, chosen=None, sinks=None, scale=None, **sequences):
    """o and lse from the definition."""
    (B, Tq, H, D), Tk, Hkv, N = q.shape, k.shape[1], k.shape[2], k_cmp.shape[1]
    scale = D**-0.5 if scale is None else scale
    at = np.arange(Tk - Tq, Tk)[:, None] - np.arange(Tk)  # tokens from key to row
    position, first_key = places(B, Tq, Tk, **sequences, ratio=ratio)
    keep = np.zeros((B, H, Tq, Tk + N), bool)
    keep[..., :Tk] = ((at >= 0) & (at < window) & (at <= position[..., None]))[:, None]
    for b, h, i in np.ndindex(B, H, Tq):
        first, complete = Tk + first_key[b, i], (position[b, i] + 1) // ratio
        if chosen is None:
            keep[b, h, i, first:first + complete] = True
        else:
            row = chosen[b, i] if chosen.ndim == 3 else chosen[b, i, h // (H // Hkv)]
            keep[b, h, i, first + row[row >= 0]] = True
    wide = lambda x, y: np.repeat(np.concatenate([x, y], 1), H // Hkv, axis=2)  # noqa: E731
    s = np.where(keep, np.einsum("bihd,bjhd->bhij", q, wide(k, k_cmp)) * scale, -np.inf)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(s).sum(-1))
    total = np.exp(lse) + (0 if sinks is None else np.exp(np.asarray(sinks))[:, None])
    p = np.divide(np.exp(s), total[..., None], out=np.zeros_like(s), where=total[..., None] > 0)
    return np.einsum("bhij,bjhd->bihd", p, wide(v, v_cmp)), lse


CASES = {
    "all": {},
    "chosen": {"chosen": choice()},
    "chosen by head": {"chosen": choice(heads=2, count=12).astype(np.int32)},
    "sinks": {"sinks": RNG.standard_normal(4), "scale": 0.7},
    "chosen, sinks": {"chosen": choice(count=2), "sinks": [0.5, -1, 2, 0]},
    "no window": {"window": 0, "sinks": np.zeros(4)},
    "a window of all": {"window": 100, "chosen": choice()},
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_definition(case):
    given, options = inputs(), {"ratio": 4, "window": 7, **CASES[case]}
    o, lse = heed.compressed_attention(*given, **options, return_lse=True)
    expected = naive(*given, **options)
    np.testing.assert_allclose(o, expected[0], rtol=0, atol=1e-13)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-13, atol=1e-13)
    np.testing.assert_array_equal(heed.compressed_attention(*given, **options, threads=1), o)


SEQUENCES = {
    "padded on the left": {"starts": [5, 0]},
    "padded on the right": {"lengths": np.array([31, 40], np.int32)},
    "padded": {"starts": [5, 20], "lengths": [31, 20]},
    "packed": {"cu_seqlens": [0, 9, 9, 27, 38]},
}


@pytest.mark.parametrize("chosen", [None, "chosen", "by head"])
@pytest.mark.parametrize("case", SEQUENCES)
def test_sequences_are_the_definition(case, chosen):
    sequences = SEQUENCES[case]
    B, rows = (1, 40) if case == "packed" else (2, 33)
    given, sinks = inputs(B=B, Tq=rows), RNG.standard_normal(4)
    options = {"ratio": 4, "window": 7, "sinks": sinks, **sequences}
    if chosen is not None:
        options["chosen"] = choice(B, rows, 40, 2 if chosen == "by head" else None, **sequences)
    o, lse = heed.compressed_attention(*given, **options, return_lse=True)
    expected = naive(*given, **options)
    np.testing.assert_allclose(o, expected[0], rtol=0, atol=1e-13)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-13, atol=1e-13)
    position, _ = places(B, rows, 40, **sequences)
    assert not o[position < 0].any() and np.isneginf(lse.transpose(0, 2, 1)[position < 0]).all()
    out = np.full_like(o, np.nan)
    assert heed.compressed_attention(*given, **options, out=out) is out
    np.testing.assert_array_equal(out, o)


def test_padding_is_not_read():
    """Tokens outside of a sequence and compressed keys beyond it are NaN; gradients are those of the sequence alone."""
    q, k, v, k_cmp, v_cmp = given = inputs(B=2, dtype=np.float32)
    do = RNG.standard_normal((2, 40, 4, 5)).astype(np.float32)
    tokens, keys = [(5, 38), (0, 21)], [8, 5]
    chosen = choice(starts=[5, 0], lengths=[38, 21])
    for b, (begin, end) in enumerate(tokens):
        for x in (q, k, v, do):
            x[b, :begin] = x[b, end:] = np.nan
        k_cmp[b, keys[b]:] = v_cmp[b, keys[b]:] = np.nan
    for more in ({}, {"chosen": chosen}):
        options = {"ratio": 4, "window": 6, **more}
        g = heed.compressed_attention_backward(do, *given, **options, starts=[5, 0], lengths=[38, 21])
        for b, (begin, end) in enumerate(tokens):
            own, count = slice(begin, end), keys[b]
            alone = heed.compressed_attention_backward(
                do[b:b + 1, own], *(x[b:b + 1, own] for x in (q, k, v)), *(x[b:b + 1, :count] for x in (k_cmp, v_cmp)),
                **{name: x[b:b + 1, own] if name == "chosen" else x for name, x in options.items()})
            for name in ("dq", "dk", "dv"):
                np.testing.assert_array_equal(getattr(g, name)[b, own], getattr(alone, name)[0])
                assert not getattr(g, name)[b, :begin].any() and not getattr(g, name)[b, end:].any()
            for name in ("dk_cmp", "dv_cmp"):
                np.testing.assert_array_equal(getattr(g, name)[b, :count], getattr(alone, name)[0])
                assert not getattr(g, name)[b, count:].any()


def test_a_padded_batch_is_decoded_with_the_last_tokens():
    q, k, v, k_cmp, v_cmp = inputs()
    options = {"ratio": 4, "window": 6, "starts": [7, 0]}
    whole = heed.compressed_attention(q, k, v, k_cmp, v_cmp, **options)
    for t in (6, 7, 8, 20, 39):
        few = slice(max(t - 5, 0), t + 1)
        o = heed.compressed_attention(q[:, t:t + 1], k[:, few], v[:, few], k_cmp, v_cmp, **options, start=t)
        np.testing.assert_allclose(o, whole[:, t:t + 1], rtol=0, atol=1e-14)


@pytest.mark.parametrize("rows", [1, 7])
def test_prefill_with_a_cache(rows):
    """The last rows, with all keys or with those of their windows."""
    q, k, v, k_cmp, v_cmp = inputs()
    chosen = choice()
    whole = heed.compressed_attention(q, k, v, k_cmp, v_cmp, ratio=4, window=6, chosen=chosen)[:, -rows:]
    options = {"ratio": 4, "window": 6, "chosen": chosen[:, -rows:]}
    o = heed.compressed_attention(q[:, -rows:], k, v, k_cmp, v_cmp, **options)
    np.testing.assert_allclose(o, whole, rtol=0, atol=1e-14)
    few = slice(40 - rows - 5, None)
    o = heed.compressed_attention(q[:, -rows:], k[:, few], v[:, few], k_cmp, v_cmp, **options, start=40 - rows)
    np.testing.assert_allclose(o, whole, rtol=0, atol=1e-14)


def test_sparse_attention_of_deepseek_v32_is_a_case():
    """Ratio 1 without a window: attention to the keys that an indexer chose."""
    q, k, v, _, _ = inputs()
    pattern = heed.select.indexer(q, k[:, :, 0], np.ones((2, 40, 4)), count=8)
    o = heed.compressed_attention(q, k, v, k, v, ratio=1, window=0, chosen=pattern)
    np.testing.assert_allclose(o, heed.attention(q, k, v, causal=True, pattern=pattern), rtol=0, atol=1e-14)


def test_an_indexer_of_compressed_keys():
    q, k, v, k_cmp, v_cmp = inputs()
    pattern = heed.select.indexer(q, k_cmp[:, :, 0], np.ones((2, 40, 4)), count=3, ratio=4, start=0)
    scores = np.maximum(np.einsum("bihd,bcd->bihc", q, k_cmp[:, :, 0]), 0).sum(2)
    chosen = np.full((2, 40, 3), -1)
    for b, i in np.ndindex(2, 40):
        best = np.argsort(-scores[b, i, :(i + 1) // 4], kind="stable")[:3]
        chosen[b, i, :len(best)] = best
    for given in (pattern, chosen):
        o = heed.compressed_attention(q, k, v, k_cmp, v_cmp, ratio=4, window=5, chosen=given)
        np.testing.assert_allclose(o, naive(q, k, v, k_cmp, v_cmp, ratio=4, window=5, chosen=chosen)[0], rtol=0,
                                   atol=1e-13)
    with pytest.raises(heed.InvalidArgument, match="chosen is .*, expected an int array of keys, or a pattern of"):
        heed.compressed_attention(q, k, v, k_cmp, v_cmp, ratio=4, window=5, chosen=heed.patterns.sliding_window(3))
    with pytest.raises(heed.InvalidArgument, match="chosen has key .* in row .*, expected -1, or one of the"):
        heed.compressed_attention(q, k, v, k_cmp, v_cmp, ratio=4, window=5, chosen=heed.select.indexer(
            q, k_cmp[:, :, 0], np.ones((2, 40, 4)), count=3, causal=False))


@pytest.mark.parametrize("case", ["all", "chosen, sinks", "no window"])
def test_gradients_agree_with_finite_differences(case):
    q, k, v, k_cmp, v_cmp = given = inputs(B=1, Tq=24, Tk=30, H=4, Hkv=2, D=3, Dv=2)
    options = {"ratio": 4, "window": 4, **CASES[case]}
    if "chosen" in options:
        options["chosen"] = choice(1, 24, 30)
    sinks = np.array(options.pop("sinks"), float) if "sinks" in options else None
    do, dlse = RNG.standard_normal((1, 24, 4, 2)), RNG.standard_normal((1, 4, 24))

    def loss():
        o, lse = heed.compressed_attention(*given, sinks=sinks, **options, return_lse=True)
        seen = np.isfinite(lse)
        return (o * do).sum() + (lse[seen] * dlse[seen]).sum()

    g = heed.compressed_attention_backward(do, *given, sinks=sinks, dlse=dlse, **options)
    o, lse = heed.compressed_attention(*given, sinks=sinks, **options, return_lse=True)
    again = heed.compressed_attention_backward(do, *given, sinks=sinks, o=o, lse=lse, dlse=dlse, **options)
    assert type(g) is heed.CompressedAttentionGradients
    assert g._fields == ("dq", "dk", "dv", "dk_cmp", "dv_cmp", "dsinks") and (g.dsinks is None) == (sinks is None)
    for x, gradient, same in zip([*given, sinks], g, again, strict=True):
        if x is None:
            continue
        np.testing.assert_array_equal(gradient, same)
        for at in RNG.choice(x.size, min(8, x.size), replace=False):
            flat, sides = x.reshape(-1), []
            for step in (1e-6, -1e-6):
                flat[at] += step
                sides.append(loss())
                flat[at] -= step
            assert (sides[0] - sides[1]) / 2e-6 == pytest.approx(gradient.reshape(-1)[at], abs=1e-7)


def test_explain():
    shapes = {"q": (1, 4096, 16, 64), "k": (1, 4096, 1, 64), "v": (1, 4096, 1, 64), "k_cmp": (1, 1024, 1, 64),
              "v_cmp": (1, 1024, 1, 64)}
    of_all = heed.explain("compressed_attention", **shapes, ratio=4, window=128)
    few = heed.explain("compressed_attention", **shapes, ratio=4, window=128, chosen=(1, 4096, 64))
    assert few["kernel"].startswith("compressed_attention on softmax_")
    assert few["visited_pairs"] < of_all["visited_pairs"]
    kept = 16 * (np.minimum(np.arange(4096) + 1, 128) + np.minimum((np.arange(4096) + 1) // 4, 64)).sum()
    assert few["flops"] == 2 * 128 * kept


def test_errors():
    q, k, v, k_cmp, v_cmp = given = inputs()
    call = lambda *x, **options: heed.compressed_attention(*x, **{"ratio": 4, "window": 7, **options})  # noqa: E731
    wrong = choice()
    wrong[1, 20] = [2, 5, 0]
    twice = choice()
    twice[1, 20] = [2, -1, 2]
    for function, message in [
        (lambda: call(*given, ratio=0), "ratio is 0, expected an int"),
        (lambda: call(*given, window=-1), "window is -1, expected an int"),
        (lambda: call(*given, window=2.0), "window is 2.0, expected an int"),
        (lambda: call(*given, start=-1), "start is -1, expected an int"),
        (lambda: call(q[:, :30], *given[1:], start=3), "start is 3, expected 10 or more, as k has 40 tokens"),
        (lambda: call(*given, scale=np.inf), "scale is inf"),
        (lambda: call(*given, lengths=[40, 41]), r"lengths\[1\] is 41, expected 0 to T = 40"),
        (lambda: call(*given, starts=[0]), r"starts has shape \[1\], expected \[2\]"),
        (lambda: call(*given, cu_seqlens=[0, 40]), r"k has shape \[2,40,2,6\], expected a leading axis of 1 with"),
        (lambda: call(*(x[:1] for x in given), cu_seqlens=[0, 40], start=0), "start is given, expected none beside"),
        (lambda: call(q, k[:, :39], v[:, :39], k_cmp, v_cmp), "q has 40 tokens, expected at most the 39 of k"),
        (lambda: call(q, k, v, k_cmp[:, :9], v_cmp), "k_cmp has 9 compressed keys, expected 10 or more"),
        (lambda: call(*given, start=4), "k_cmp has 10 compressed keys, expected 11 or more"),
        (lambda: call(q, k, v, k_cmp, v_cmp[:1]), r"v_cmp has shape \[1,10,2,5\], expected \[2,N,2,5\]"),
        (lambda: call(q, k, v, k_cmp[0], v_cmp), r"k_cmp has shape \[10,2,6\], expected \[B, N, Hkv, D\]"),
        (lambda: call(q, k, v, k_cmp.astype(np.float32), v_cmp), "k_cmp has dtype f32, expected f64"),
        (lambda: call(*given, sinks=[0.0] * 3), r"sinks has shape \[3\], expected \[4\]"),
        (lambda: call(*given, chosen=wrong[:, :9]), r"chosen has shape \[2,9,3\], expected \[2,40,n\] or \[2,40,2,n\]"),
        (lambda: call(*given, chosen=wrong), "chosen has key 5 in row 20 of sequence 1, expected -1, or one of the 5"),
        (lambda: call(*given, chosen=twice), "chosen has key 2 twice in row 20 of sequence 1, expected it once"),
        (lambda: call(*given, chosen=wrong.astype(float)), "chosen has dtype"),
        (lambda: call(*given, out=np.zeros((2, 40, 4, 4))), r"out has shape \[2,40,4,4\]"),
        (lambda: heed.compressed_attention_backward(q, *given, ratio=4, window=7),
         r"do has shape \[2,40,4,6\], expected \[2,40,4,5\]"),
        (lambda: heed.compressed_attention_backward(v, *given, ratio=4, window=7, o=v), "lse is None, expected o and"),
    ]:
        with pytest.raises(heed.InvalidArgument, match=rf"^compressed_attention(_backward)?: {message}"):
            function()
    for function, name in [(lambda: heed.compressed_attention(*given, window=3), "ratio"),
                           (lambda: heed.compressed_attention(*given, ratio=3), "window"),
                           (lambda: heed.compressed_attention(q, k, v, ratio=3, window=4), "k_cmp"),
                           (lambda: call(*given, cu_seqlens_q=[0, 40]), "cu_seqlens_q")]:
        with pytest.raises(TypeError, match=name):
            function()


@needs_program
def test_from_a_file(tmp_path):
    given = inputs(B=1, Tq=300, Tk=300, dtype=np.float32)
    file, out = tmp_path / "x.safetensors", tmp_path / "o.safetensors"
    save(file, {name: ("F32", x) for name, x in zip(NAMES, given, strict=True)})
    assert document("run", "compressed_attention", file, "-o", out)["output"]["shape"] == [1, 300, 4, 5]
    np.testing.assert_array_equal(load(out)[0]["o"], heed.compressed_attention(*given, ratio=4, window=128))
    (row,) = document("compare", file, "-m", "compressed_attention", "--dtype", "f32")["rows"]
    assert row["max_error"] > 1e-3
    listed = json.loads(subprocess.run([HEED, "list", "--json"], capture_output=True, check=True, text=True).stdout)
    assert [x["passes"] for x in listed if x["name"] == "compressed_attention"] == [["forward", "backward"]]


TORCH = {  # sizes and options
    "all": (dict(B=1, Tq=9, Tk=12, H=2, Hkv=1, D=3, Dv=2), dict(ratio=4, window=3)),
    "chosen": (dict(B=2, Tq=6, Tk=9, H=2, Hkv=2, D=2, Dv=2, ratio=2), dict(ratio=2, window=2, scale=0.6)),
    "no window": (dict(B=1, Tq=6, Tk=6, H=4, Hkv=2, D=2, Dv=2, ratio=1), dict(ratio=1, window=0)),
    "no complete key": (dict(B=1, Tq=3, Tk=5, H=2, Hkv=1, D=2, Dv=2, ratio=5), dict(ratio=8, window=2)),
    "padded": (dict(B=2, Tq=6, Tk=9, H=2, Hkv=1, D=2, Dv=2, ratio=2),
               dict(ratio=2, window=3, starts=[0, 4], lengths=[7, 9])),
    "packed": (dict(B=1, Tq=9, Tk=9, H=2, Hkv=1, D=2, Dv=2, ratio=2),
               dict(ratio=2, window=3, cu_seqlens=[0, 3, 3, 8])),
    "padded, chosen": (dict(B=2, Tq=6, Tk=9, H=2, Hkv=2, D=2, Dv=2, ratio=2),
                       dict(ratio=2, window=2, starts=[1, 4], lengths=[9, 8])),
    "packed, chosen": (dict(B=1, Tq=9, Tk=9, H=2, Hkv=2, D=2, Dv=2, ratio=2),
                       dict(ratio=2, window=2, cu_seqlens=[0, 3, 8])),
}


def with_leaves(case, dtype=None):
    """A function of tensors that returns o and lse, and these, the sinks at last."""
    torch = pytest.importorskip("torch")
    import heed.torch

    sizes, options = TORCH[case]
    arrays = [*inputs(**sizes), RNG.standard_normal(sizes["H"])]
    if "chosen" in case or case == "no window":
        of = {name: sizes[name] for name in ("B", "Tq", "Tk", "ratio")}
        of |= {name: x for name, x in options.items() if name in ("lengths", "starts", "cu_seqlens")}
        options = options | {"chosen": torch.from_numpy(choice(**of, count=2, heads=sizes["Hkv"]))}
    leaves = [torch.from_numpy(x).to(dtype).requires_grad_() for x in arrays]

    def function(*x):
        o, lse = heed.torch.compressed_attention(*x[:5], sinks=x[5], **options, return_lse=True)
        return o, torch.where(lse == -torch.inf, 0, lse)

    return function, leaves


def test_in_torch():
    torch = pytest.importorskip("torch")
    import heed.torch

    arrays, sinks, chosen = inputs(B=1), RNG.standard_normal(4), choice(B=1)
    leaves = [torch.from_numpy(x).requires_grad_() for x in (*arrays, sinks)]
    options = {"ratio": 4, "window": 6}
    o, lse = heed.torch.compressed_attention(*leaves[:5], sinks=leaves[5], chosen=torch.from_numpy(chosen), **options,
                                             return_lse=True)
    np.testing.assert_array_equal(o.detach().numpy(),
                                  heed.compressed_attention(*arrays, sinks=sinks, chosen=chosen, **options))
    do, dlse = RNG.standard_normal(o.shape), RNG.standard_normal(lse.shape)
    torch.autograd.backward((o, lse), (torch.from_numpy(do), torch.from_numpy(dlse)))
    g = heed.compressed_attention_backward(do, *arrays, sinks=sinks, chosen=chosen, dlse=dlse, **options)
    for leaf, expected in zip(leaves, g, strict=True):
        np.testing.assert_array_equal(leaf.grad.numpy(), expected)
    index = heed.select.indexer(leaves[0], leaves[3][:, :, 0], torch.ones(1, 40, 4, dtype=torch.float64), count=3,
                                ratio=4, start=0)
    o = heed.torch.compressed_attention(*leaves[:5], chosen=index, **options)
    np.testing.assert_array_equal(o.detach().numpy(), heed.compressed_attention(*arrays, chosen=index, **options))
    torch.library.opcheck(torch.ops.heed.compressed_attention.default,
                          (*leaves[:5], leaves[5], torch.from_numpy(chosen), 4, 6, *[None] * 6))
    cu_seqlens = torch.tensor([0, 17, 40])
    torch.library.opcheck(torch.ops.heed.compressed_attention.default,
                          (*leaves[:5], leaves[5], None, 4, 6, None, None, None, None, cu_seqlens, None))
    with pytest.raises(heed.InvalidArgument, match="compressed_attention: chosen is of type"):
        heed.torch.compressed_attention(*leaves[:5], chosen=3, **options)
    with pytest.raises(heed.InvalidArgument, match="compressed_attention: ratio is 0"):
        heed.torch.compressed_attention(*leaves[:5], ratio=0, window=1)


@pytest.mark.parametrize("case", TORCH)
def test_derivatives(case):
    torch = pytest.importorskip("torch")
    function, leaves = with_leaves(case)
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("dtype, share", [("float32", 1e-5), ("bfloat16", 0.03)])
def test_gradients_in_other_dtypes(dtype, share):
    torch = pytest.importorskip("torch")
    function, narrow = with_leaves("all", getattr(torch, dtype))
    wide = [x.detach().double().requires_grad_() for x in narrow]
    found = torch.autograd.grad(function(*narrow)[0].float().sin().sum(), narrow)
    expected = torch.autograd.grad(function(*wide)[0].sin().sum(), wide)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == getattr(torch, dtype)
        assert (x.double() - y).norm() <= share * y.norm()


@pytest.mark.parametrize("sequences", [{}, {"starts": [3, 0], "lengths": [40, 35]}], ids=["whole", "padded"])
def test_compiled_and_under_autocast(sequences):
    torch = pytest.importorskip("torch")
    import heed.torch

    given = [torch.from_numpy(x) for x in inputs(dtype=np.float32)]
    options = {"ratio": 4, "window": 6, "chosen": torch.from_numpy(choice(**sequences))}
    options |= {name: torch.tensor(x) for name, x in sequences.items()}
    function = lambda *x: heed.torch.compressed_attention(*x, **options)  # noqa: E731
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    leaves, others = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    o, expected = compiled(*leaves), function(*others)
    assert torch.equal(o, expected)
    o.square().sum().backward()
    expected.square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(leaves, others, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        o = function(*given)
    assert o.dtype == torch.bfloat16 and torch.equal(o, function(*(x.bfloat16() for x in given)))


@pytest.mark.parametrize("overlap", [False, True])
def test_compress_is_the_definition(overlap):
    torch = pytest.importorskip("torch")
    import heed.torch

    ratio, D = 4, 3
    width = 2 * D if overlap else D
    values, gates = (torch.randn(2, 18, 2, width, dtype=torch.float64, requires_grad=True) for _ in range(2))
    bias = torch.randn(ratio, width, dtype=torch.float64, requires_grad=True)
    y = heed.torch.compress(values, gates, bias, ratio=ratio, overlap=overlap)
    assert y.shape == (2, 4, 2, D)
    for b, w, h, e in np.ndindex(2, 4, 2, D):
        slots = [(ratio * w + t, t, e + (D if overlap else 0)) for t in range(ratio)]
        if overlap and w > 0:
            slots += [(ratio * (w - 1) + t, t, e) for t in range(ratio)]
        p = torch.softmax(torch.stack([gates[b, at, h, c] + bias[t, c] for at, t, c in slots]), 0)
        expected = sum(p[n] * values[b, at, h, c] for n, (at, _, c) in enumerate(slots))
        torch.testing.assert_close(y[b, w, h, e], expected, rtol=0, atol=1e-14)
    function = lambda *x: heed.torch.compress(*x, ratio=ratio, overlap=overlap)  # noqa: E731
    assert torch.autograd.gradcheck(function, (values, gates, bias), fast_mode=True)
    # To continue a sequence, the last window comes again.
    again = function(values[:, 4:], gates[:, 4:], bias)[:, 1:]
    torch.testing.assert_close(again, y[:, 2:], rtol=0, atol=1e-14)
    assert function(values[:, :3], gates[:, :3], bias).shape == (2, 0, 2, D)
    narrow = function(*(x.detach().bfloat16() for x in (values, gates, bias)))
    assert narrow.dtype == torch.bfloat16
    for call, message in [
        (lambda: function(values, gates[:1], bias), "gates has shape"),
        (lambda: function(values, gates, bias[:3]), r"bias has shape \[3, \d\], expected \[4, ..., \d\]"),
        (lambda: heed.torch.compress(values, gates, ratio=0), "ratio is 0"),
        (lambda: heed.torch.compress(values[..., :3], gates[..., :3], ratio=4, overlap=True), "values is .* of shape"),
        (lambda: heed.torch.compress(values, None, ratio=4), "gates is of type NoneType"),
    ]:
        with pytest.raises(heed.InvalidArgument, match=f"^compress: {message}"):
            call()


class TestDeepSeekV4:
    """Transformers' attention of DeepSeek-V4 on random weights."""

    @pytest.fixture(autouse=True)
    def _model(self, monkeypatch):
        self.torch = torch = pytest.importorskip("torch")
        self.v4 = v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
        torch.manual_seed(0)
        self.config = v4.DeepseekV4Config(
            vocab_size=16, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, head_dim=16, q_lora_rank=12,
            o_groups=2, o_lora_rank=8, sliding_window=6, index_n_heads=3, index_head_dim=8, index_topk=3,
            layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
            compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
            max_position_embeddings=64, attn_implementation="eager")
        self.calls, eager = {}, v4.eager_attention_forward

        def record(name, function):
            def call(*args, **kwargs):
                result = function(*args, **kwargs)
                self.calls[name] = args, result
                return result
            return call

        monkeypatch.setattr(v4, "eager_attention_forward", record("attention", eager))
        monkeypatch.setattr(v4.DeepseekV4IndexerScorer, "forward", record(
            "scorer", v4.DeepseekV4IndexerScorer.forward))
        monkeypatch.setattr(v4.DeepseekV4Indexer, "forward", record("indexer", v4.DeepseekV4Indexer.forward))

    def run(self, layer, tokens=30):
        torch, v4 = self.torch, self.v4
        module = v4.DeepseekV4Attention(self.config, layer).double().eval()
        for x in module.parameters():
            torch.nn.init.normal_(x, std=0.3)
        rotary = v4.DeepseekV4RotaryEmbedding(self.config)
        hidden = torch.randn(2, tokens, 24, dtype=torch.float64)
        positions = torch.arange(tokens)[None].expand(2, -1)
        turned = {name: rotary(hidden, positions, layer_type=name) for name in ("main", "compress")}
        before = torch.arange(tokens)[:, None] - torch.arange(tokens)
        mask = torch.where((before >= 0) & (before < 6), 0.0, -torch.inf).double().expand(2, 1, -1, -1)
        with torch.no_grad():
            module(hidden, turned, positions, mask)
        (_, q, kv, _, mask, *_), (o, _) = self.calls["attention"]
        return module, hidden, q.transpose(1, 2), kv.transpose(1, 2), mask, o

    @pytest.mark.parametrize("layer", [0, 1])
    def test_the_core_of_a_layer(self, layer):
        import heed.torch

        module, _, q, kv, mask, expected = self.run(layer)
        raw, compressed = kv[:, :30].contiguous(), kv[:, 30:].contiguous()
        ratio, chosen = (4, 8)[layer], None
        if layer == 0:
            (_, chosen) = self.calls["indexer"]
            assert chosen.shape == (2, 30, 3)
        o = heed.torch.compressed_attention(q, raw, raw, compressed, compressed, ratio=ratio, window=6, chosen=chosen,
                                            sinks=module.sinks.detach(), scale=module.scaling)
        self.torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-6)

    def test_its_indexer(self):
        self.run(0)
        (scorer, q, keys, hidden), _ = self.calls["scorer"]
        weights = scorer.weights_proj(hidden).detach()
        pattern = heed.select.indexer(q, keys, weights, count=3, ratio=4, start=0)
        ours = heed._core._keys_of_pattern(pattern)
        assert np.array_equal(np.sort(self.calls["indexer"][1].numpy(), -1), np.sort(ours, -1))

    @pytest.mark.parametrize("layer", [0, 1])
    def test_its_compression(self, layer):
        import heed.torch

        module, hidden, _, kv, _, _ = self.run(layer)
        compressor = module.compressor
        y = heed.torch.compress(compressor.kv_proj(hidden), compressor.gate_proj(hidden), compressor.position_bias,
                                ratio=(4, 8)[layer], overlap=layer == 0)
        y = compressor.kv_norm(y)
        at = self.torch.arange(y.shape[1])[None].expand(2, -1) * (4, 8)[layer]
        cos, sin = compressor.rotary_emb(y, position_ids=at, layer_type="compress")
        y = self.v4.apply_rotary_pos_emb(y.unsqueeze(1), cos, sin).squeeze(1)
        self.torch.testing.assert_close(y, kv[:, 30:, 0], rtol=1e-5, atol=1e-6)
