# Patterns from NumPy: values, expressions, masks, and attention with them, bit for bit that with their masks.
import numpy as np
import pytest

import heed

P = heed.patterns
RNG = np.random.default_rng(3)
B, TQ, TK, HQ, HK = 2, 150, 200, 4, 2
INDEX = np.stack([np.sort(RNG.choice(TK, 5, replace=False)) for _ in range(B * TQ)]).reshape(B, TQ, 5)
PATTERNS = {
    "sliding_window": P.sliding_window(10, 3),
    "dilated": P.dilated(3, 70),
    "strided": P.strided(13),
    "fixed": P.fixed(16, 2),
    "global_tokens": P.global_tokens([[0, 60], [7, -1]]),
    "longformer": P.longformer(20, [0, 199]),
    "bigbird": P.bigbird(16, 1, seed=5),
    "random_blocks": P.random_blocks(2, 32),
    "streaming": P.streaming(4, 30),
    "neighborhood": P.neighborhood(7),
    "blocks": P.blocks(RNG.random((HQ, 13, 13)) < 0.3, (16, 17)),
    "csr": P.csr([0, 2, 3, 3, 4], [0, 3, 1, 2], 50),
    "row_blocks": P.row_blocks(INDEX % 7 + 7 * np.arange(5), 6),
    "keys": P.keys(INDEX),
    "per_head": P.per_head([P.atrous(i + 2) for i in range(HQ)]),
    "union": (P.sliding_window(8) | P.global_tokens([3])) & P.atrous(2) | P.neighborhood(3),
}
each = pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)


def inputs(dtype=np.float32):
    shapes = {"q": (B, TQ, HQ, 16), "k": (B, TK, HK, 16), "v": (B, TK, HK, 24)}
    return {key: RNG.standard_normal(shape).astype(dtype) for key, shape in shapes.items()}


def mask_of(pattern, **options):
    return pattern.mask(TQ, TK, heads=HQ, batch=B, **options)


@each
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "align": "top_left", "window": (90, 0)},
                                     {"align": [20, -4]}])
def test_attention_has_the_bits_of_that_with_a_mask(pattern, options):
    x = inputs()
    at = {"align": options["align"]} if "align" in options else {}
    # These patterns become one problem per residue, or per row, and lists of blocks are not computed with AMX.
    if pattern in (PATTERNS["dilated"], PATTERNS["strided"], PATTERNS["keys"], PATTERNS["row_blocks"]):
        options = {**options, "invariant": True}
    masked = {**options, "mask": mask_of(pattern, **at)}
    o, lse = heed.attention(**x, **options, pattern=pattern, return_lse=True)
    expected = heed.attention(**x, **masked, return_lse=True)
    assert np.array_equal(o, expected[0]) and np.array_equal(lse, expected[1])
    do = RNG.standard_normal(o.shape).astype(np.float32)
    gradients = heed.attention_backward(do, **x, o=o, lse=lse, **options, pattern=pattern)
    for a, b in zip(gradients[:3], heed.attention_backward(do, **x, o=o, lse=lse, **masked)[:3], strict=True):
        assert np.array_equal(a, b)
    for choice in (options, masked):
        choice.pop("invariant", None)  # weights have one path
    weights = heed.attention_weights(x["q"], x["k"], **options, pattern=pattern)
    assert np.array_equal(weights, heed.attention_weights(x["q"], x["k"], **masked))
    assert not weights[~masked["mask"]].any()


@each
def test_what_nobody_keeps_is_never_read(pattern):
    x = inputs()
    clean, (kept_k, kept_v) = heed.attention(**x, pattern=pattern), (x["k"].copy(), x["v"].copy())
    unseen = ~mask_of(pattern).reshape(B, HK, HQ // HK, TQ, TK).any((2, 3)).transpose(0, 2, 1)
    kept_k[unseen] = kept_v[unseen] = np.nan
    assert np.array_equal(heed.attention(x["q"], kept_k, kept_v, pattern=pattern), clean)
    # A value that some rows keep reaches no others.
    kept_v = x["v"].copy()
    kept_v[:, 77] = np.nan
    o = heed.attention(x["q"], x["k"], kept_v, pattern=pattern)
    reached = mask_of(pattern)[..., 77].transpose(0, 2, 1)
    assert np.array_equal(np.isnan(o).any(-1), reached) and np.array_equal(o[~reached], clean[~reached])


@each
def test_threads_and_equal_sets_change_no_bits(pattern):
    x = inputs(np.float16)
    o = heed.attention(**x, pattern=pattern)
    assert all(np.array_equal(heed.attention(**x, pattern=pattern, threads=n), o) for n in (1, 3))
    again = heed.attention(**x, pattern=P.blocks(mask_of(pattern), 1), align="top_left")
    assert np.array_equal(again, heed.attention(**x, align="top_left", mask=mask_of(pattern)))


@each
def test_expressions_densities_and_equality(pattern):
    text = repr(pattern)
    if "<" not in text:
        again = P.parse(text)
        assert again == pattern and hash(again) == hash(pattern) and repr(again) == text
    assert pattern != P.sliding_window(11, 3) and pattern == pattern
    for causal in (False, True):
        mask = mask_of(pattern, causal=causal)
        all_pairs = np.tril(np.ones((TQ, TK)), TK - TQ).sum() if causal else TQ * TK
        assert np.isclose(pattern.density(TQ, TK, heads=HQ, batch=B, causal=causal), mask.sum() / (all_pairs * HQ * B))


def test_masks_and_densities_are_not_causal_by_default():
    pattern = P.sliding_window(1, 1)
    assert pattern.mask(3, 3)[0, 0].tolist() == [[True, True, False], [True, True, True], [False, True, True]]
    assert np.isclose(pattern.density(3, 3), 7 / 9) and np.isclose(pattern.density(3, 3, causal=True), 5 / 6)


def test_positions_that_never_meet_are_dense_problems():
    x = inputs()
    for pattern in (P.dilated(20, 7), P.atrous(9), P.strided(11), P.sliding_window(5, 5) | P.dilated(3, 9)):
        explained = heed.explain("attention", **x, pattern=pattern)
        assert "by residue" in explained["why"] and not explained["invariant"]
        o = heed.attention(**x, pattern=pattern)
        assert np.allclose(o, heed.attention(**x, mask=mask_of(pattern)), atol=2e-6)
        tiled = heed.attention(**x, pattern=pattern, invariant=True)
        assert np.array_equal(tiled, heed.attention(**x, mask=mask_of(pattern), invariant=True))


def test_a_cache_attends_to_the_keys_so_far():
    x = inputs()
    cache = heed.KVCache(B, HK, 16, 24)
    cache.append(x["k"][:, :150], x["v"][:, :150])
    for pattern in (P.streaming(4, 30), P.dilated(20, 7), P.bigbird(16, 1)):
        expected = heed.attention(
            x["q"][:, :9], x["k"][:, :150], x["v"][:, :150], causal=True, align="top_left", pattern=pattern,
            invariant=True)
        assert np.array_equal(cache.attend(x["q"][:, :9], pattern=pattern), expected)
    for t in range(150, 160):
        cache.append(x["k"][:, t : t + 1], x["v"][:, t : t + 1])
        so_far = (x["q"][:, :1], x["k"][:, : t + 1], x["v"][:, : t + 1])
        expected = heed.attention(*so_far, causal=True, pattern=P.bigbird(16, 1), invariant=True)
        assert np.array_equal(cache.attend(x["q"][:, :1], pattern=P.bigbird(16, 1)), expected)


def test_packed_sequences_have_positions_of_their_own():
    q, k, v = (RNG.standard_normal((90, 4, 16)).astype(np.float32) for _ in range(3))
    bounds = [0, 20, 20, 90]
    for pattern in (P.longformer(6, [0]), P.bigbird(8, 1), P.global_tokens([[1], [0], [5]])):
        o = heed.attention(q, k, v, cu_seqlens_q=bounds, causal=True, pattern=pattern)
        for i, (a, b) in enumerate(zip(bounds, bounds[1:])):
            alone = pattern if "[[" not in repr(pattern) else P.global_tokens([[1], [0], [5]][i])
            part = heed.attention(q[None, a:b], k[None, a:b], v[None, a:b], causal=True, pattern=alone)
            assert np.array_equal(o[a:b], part[0])


def test_explain_counts_tiles():
    shape = (1, 8192, 4, 64)
    dense = heed.explain("attention", q=shape, k=shape, v=shape)
    sparse = heed.explain("attention", q=shape, k=shape, v=shape, pattern=P.longformer(512, [0, 1]))
    assert sparse["visited_pairs"] < 0.11 * dense["visited_pairs"] and sparse["flops"] < 0.1 * dense["flops"]


@pytest.mark.parametrize(("build", "table"), [
    (lambda table: P.blocks(table, (16, 17)), RNG.random((HQ, 13, 13)) < 0.3),
    (P.global_tokens, np.array([0, 60])),
    (lambda table: P.row_blocks(table, 6), INDEX[0] % 7 + 7 * np.arange(5)),
    (lambda table: P.row_blocks(table, 6) | P.atrous(3), INDEX[0][:, None] % 7 + 7 * np.arange(5)),
    (P.keys, INDEX[0]),
], ids=["blocks", "global_tokens", "row_blocks", "row_blocks_by_head", "keys"])
def test_a_table_of_one_batch_entry_serves_all(build, table):
    x, one, each = inputs(), build(table[None]), build(np.stack([table] * B))
    o, lse = heed.attention(**x, pattern=one, return_lse=True)
    assert np.array_equal(o, heed.attention(**x, pattern=each)) and np.array_equal(mask_of(one), mask_of(each))
    do = RNG.standard_normal(o.shape).astype(np.float32)
    for a, b in zip(*(heed.attention_backward(do, **x, o=o, lse=lse, pattern=p)[:3] for p in (one, each)), strict=True):
        assert np.array_equal(a, b)


def test_calls_without_rows_keys_or_sequences_have_masks():
    for sizes in ({"Tq": 0, "Tk": 3}, {"Tq": 3, "Tk": 0}, {"Tq": 3, "Tk": 3, "batch": 0}):
        assert P.atrous(2).density(**sizes) == 0
        assert P.atrous(2).mask(**sizes).shape == (sizes.get("batch", 1), 1, sizes["Tq"], sizes["Tk"])


def test_errors_name_the_argument():
    x = inputs()
    cases = [
        (lambda: P.sliding_window(-1), "sliding_window: left is -1, expected 0 or more"),
        (lambda: P.sliding_window(1.5), "sliding_window: left is 1.5, expected an int"),
        (lambda: P.dilated(1, 0), "dilated: step is 0, expected 1 or more"),
        (lambda: P.global_tokens([-2]), "global_tokens: tokens has -2"),
        (lambda: P.global_tokens([0.5]), "global_tokens: tokens"),
        (lambda: P.blocks([[1, 2]]), "blocks: keep"),
        (lambda: P.blocks(np.ones((2, 2), bool), (1, 2, 3)), "blocks: block is no size, expected an int, or two"),
        (lambda: P.csr([0, 2], [3, 3]), "csr: columns has 3 behind 3 in row 0"),
        (lambda: P.csr([1, 2], [0, 3]), "csr: row_ptr begins with 1, expected 0"),
        (lambda: P.csr([0, 2, 1], [0, 3]),
         "csr: row_ptr goes from 2 to 1 at 1, expected numbers that ascend from 0 to 2"),
        (lambda: P.csr([0, 1], [0, 3]), "csr: row_ptr ends with 1, expected 2, the size of columns"),
        (lambda: P.csr([], []), r"csr: row_ptr has shape \[0\], expected nq \+ 1 numbers"),
        (lambda: P.csr([[0, 1], [0, 1]], [0]), "csr: row_ptr begins with 0, expected 1 as the head before ends"),
        (lambda: P.blocks([[True], [True, False]]),
         r"blocks: keep is \[\[True\], \[True, False\]\], expected numbers of one shape, bool"),
        (lambda: P.blocks(np.ones((0, 2, 2), bool)), r"blocks: keep has shape \[0,2,2\], expected 1 head or more"),
        (lambda: P.per_head([]), "per_head: heads is empty, expected a pattern for each head"),
        (lambda: P.keys(np.zeros((1, 1, 2), int)), "keys: index has key 0 twice, expected it once"),
        (lambda: P.per_head(3), "per_head: heads is 3, expected a list of patterns"),
        (lambda: P.per_head([P.atrous(2), 3]), "per_head: heads is .*, expected a list of patterns"),
        (lambda: P.bigbird(seed=-1), "bigbird: seed is -1"),
        (lambda: P.parse("atrous(2"), "parse: expression has the end at character 9, expected ','"),
        (lambda: P.parse("csr([0, 1], [0, 3])"), "csr: row_ptr ends with 1, expected 2"),
        (lambda: P.parse(3), "parse: expression is 3, expected a string"),
        (lambda: P.atrous(2).mask(-1, 3), "mask: Tq is -1"),
        (lambda: P.keys(INDEX).mask(9, 9), "mask: pattern has keys of shape"),
        (lambda: P.atrous(2).mask(3, 3, heads=0), "mask: heads is 0, expected an int from 1 to"),
        (lambda: P.atrous(2).mask(3, 3, batch=-1), "mask: batch is -1, expected an int from 0 to"),
        (lambda: P.atrous(2).mask(3, 3, heads=2, key_heads=3),
         "mask: key_heads is 3, expected one that divides heads, 2"),
        (lambda: P.atrous(2).density(3, 3, heads=0), "density: heads is 0, expected an int from 1 to"),
        (lambda: P.atrous(2).density(3, 3, align="left"), "density: align is 'left'"),
        (lambda: P.atrous(2).density(3, 3, align=[0, 1]), r"density: align has shape \[2\], expected \[1\]"),
        (lambda: P.atrous(2).density(3, 3, align=3),
         "density: align is 3, expected 'bottom_right', 'top_left' or an int array"),
        (lambda: P.atrous(2).density(3, 3, align=[-2**63]),
         "density: align contains -9223372036854775808, expected a position"),
        (lambda: heed.attention(**x, pattern=np.ones((3, 3), bool)),
         "attention: pattern is .*, expected a pattern of heed.patterns"),
        (lambda: heed.attention(**x, pattern="atrous(2)"), "attention: pattern is 'atrous\\(2\\)', expected a pattern"),
        (lambda: heed.attention(**x, pattern=P.per_head([P.atrous(2)])), "pattern has 1 heads, expected 4 as q"),
        (lambda: heed.attention(**x, pattern=P.keys(INDEX[:1, 1:])),
         r"pattern has keys of shape \[1,149,n\], expected \[2,150,n\]"),
    ]
    for call, message in cases:
        with pytest.raises(heed.InvalidArgument, match=message):
            call()
    with pytest.raises(TypeError):
        P.atrous(2) | 3
