# Block masks of FlexAttention as patterns: kept pairs, outputs against flex_attention, gradients against autograd.
import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

import heed  # noqa: E402
import heed.torch  # noqa: E402
from heed.torch import pattern_from_block_mask  # noqa: E402

B, H = 2, 4
DOCUMENTS = torch.tensor([[0] * 37 + [1] * 80 + [2] * 83, [0] * 100 + [1] * 100])
OFFSETS = torch.tensor([3, 60, 0, 11])
LENGTHS = torch.tensor([200, 121])


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q >= k) & (q - k <= 50)


def documents(b, h, q, k):
    return DOCUMENTS[b][q] == DOCUMENTS[b][k]  # a table within a table: right for one pair at a time alone


def by_head(b, h, q, k):
    return (q - k).abs() <= OFFSETS[h]


def by_both(b, h, q, k):
    return (k < LENGTHS[b]) & ((q >= k) | (h == 1)) & (DOCUMENTS[b, q] == DOCUMENTS[b, k])


def prefix(b, h, q, k):
    return (q >= k) | (k < 20)


def far_and_global(b, h, q, k):
    return (q < 2) | (k < 2) | ((q - k) % 70 == 0)


def nothing_in_some_rows(b, h, q, k):
    return (q % 3 != 0) & (k > 90)


# mask function, whether by batch entry, by head
MASKS = {f.__name__: (f, *by) for f, *by in (
    (causal, 0, 0), (window, 0, 0), (documents, 1, 0), (by_head, 0, 1), (by_both, 1, 1), (prefix, 0, 0),
    (far_and_global, 0, 0), (nothing_in_some_rows, 0, 0))}
each = pytest.mark.parametrize("name", MASKS)
sizes = pytest.mark.parametrize("size", [128, (32, 64), (48, 80), 7, 300, (1, 200)], ids=str)


def block_mask(name, Tq=200, Tk=200, size=128):
    mask_mod, by_batch, by_heads = MASKS[name]
    batch, heads = B if by_batch else None, H if by_heads else None
    return flex.create_block_mask(mask_mod, batch, heads, Tq, Tk, device="cpu", BLOCK_SIZE=size)


def dense(name, Tq=200, Tk=200):
    return flex.create_mask(MASKS[name][0], B, H, Tq, Tk, device="cpu")


def tensors(Tq=200, Tk=200, key_heads=H, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    shapes = (B, Tq, H, 8), (B, Tk, key_heads, 8), (B, Tk, key_heads, 8)
    return [torch.randn(*shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes]


def by_autograd(q, k, v, keep):
    """Attention to the pairs of a dense mask: FlexAttention has no gradients on a CPU."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    logits = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    weights = torch.exp(logits - logits.detach().amax(-1, keepdim=True)) * keep
    return torch.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdim=True).clamp(min=1e-300), v)


def assert_as_flex(name, mask, q, k, v):
    """Outputs are those of flex_attention, gradients those of the dense mask; rows that keep nothing are 0 in all."""
    o = heed.torch.attention(q, k, v, pattern=pattern_from_block_mask(mask))
    heads_first = (x.detach().transpose(1, 2) for x in (q, k, v))
    of_flex = flex.flex_attention(*heads_first, block_mask=mask, enable_gqa=k.shape[2] != q.shape[2]).transpose(1, 2)
    torch.testing.assert_close(o.detach(), of_flex, atol=1e-12, rtol=0)
    expected = by_autograd(q, k, v, dense(name, q.shape[1], k.shape[1]))
    torch.testing.assert_close(o, expected, atol=1e-12, rtol=0)
    d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(2), dtype=o.dtype)
    for a, b in zip(torch.autograd.grad(o, (q, k, v), d_o), torch.autograd.grad(expected, (q, k, v), d_o), strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=0)


@each
@sizes
def test_pairs_are_those_of_the_mask_function(name, size):
    pattern = pattern_from_block_mask(block_mask(name, size=size))
    for align in ("top_left", "bottom_right", [5, 0]):  # rows are those of the call, whatever their positions
        assert np.array_equal(pattern.mask(200, 200, heads=H, batch=B, align=align), dense(name).numpy())


@each
def test_outputs_and_gradients(name):
    assert_as_flex(name, block_mask(name), *tensors())
    assert_as_flex(name, block_mask(name, size=(16, 48)), *tensors(key_heads=2))


@pytest.mark.parametrize("lengths", [(1, 1), (1, 190), (190, 1), (65, 130), (129, 127)])
def test_odd_lengths(lengths):
    for name in ("causal", "by_both", "far_and_global"):
        mask = block_mask(name, *lengths, size=64)
        assert np.array_equal(pattern_from_block_mask(mask).mask(*lengths, heads=H, batch=B),
                              dense(name, *lengths).numpy())
        assert_as_flex(name, mask, *tensors(*lengths))


def test_the_mask_function_is_asked_of_partial_blocks_alone(monkeypatch):
    asked, create = [], flex.create_mask

    def counted(mask_mod, *shape, **options):
        asked.append(np.prod(shape))
        return create(mask_mod, *shape, **options)

    mask = block_mask("causal", size=8)
    monkeypatch.setattr(flex, "create_mask", counted)
    pattern_from_block_mask(mask)
    assert sum(asked) == int(mask.kv_num_blocks.sum()) * 8 * 8 == 25 * 8 * 8
    long = flex.BlockMask.from_kv_blocks(  # 2^18 rows: a table of all pairs would be 2^36
        torch.ones(1, 1, 2048, dtype=torch.int32), torch.arange(2048, dtype=torch.int32)[None, None, :, None],
        mask_mod=causal, compute_q_blocks=False, seq_lengths=(1 << 18, 1 << 18))
    long = pattern_from_block_mask(long)
    q = torch.ones(1, 1 << 18, 1, 1)
    o = heed.torch.attention(q, q, torch.arange(float(1 << 18))[None, :, None, None], pattern=long)
    within = torch.arange(1 << 18) % 128  # means of its own block up to the row
    torch.testing.assert_close(o.flatten(), torch.arange(float(1 << 18)) - within / 2)

    def never(b, h, q, k):
        raise AssertionError("there are no partial blocks")

    counts, columns = torch.zeros(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    full_columns = columns + torch.tensor([[1], [0]])
    whole = flex.BlockMask.from_kv_blocks(counts, columns, counts + 1, full_columns, BLOCK_SIZE=8, mask_mod=never)
    pattern = pattern_from_block_mask(whole)
    assert repr(pattern) == "block_mask(<16 x 16 in blocks of 8 x 8: 2 whole, 0 in part>)"
    assert np.array_equal(pattern.mask(16, 16)[0, 0], np.kron([[0, 1], [1, 0]], np.ones((8, 8))))


def test_lists_in_any_order_of_any_rank_and_longer_than_the_lengths():
    counts = torch.tensor([3, 1], dtype=torch.int32)
    columns = torch.tensor([[2, 0, 3, 7], [1, 9, 9, 9]], dtype=torch.int32)  # the last of these are never looked at
    mask = flex.BlockMask.from_kv_blocks(counts, columns, counts - 1, columns, BLOCK_SIZE=8, mask_mod=causal,
                                         seq_lengths=(15, 20), compute_q_blocks=False)
    # Blocks 2 and 0 of row 0 are in both lists and whole; block 3 is beyond the keys.
    expected = np.zeros((15, 20), bool)
    expected[:8, :8] = expected[:8, 16:] = True
    expected[8:, 8:16] = np.tril(np.ones((7, 8)))
    assert np.array_equal(pattern_from_block_mask(mask).mask(15, 20)[0, 0], expected)
    empty = flex.create_block_mask(causal, None, None, 8, 0, device="cpu")
    assert pattern_from_block_mask(empty).mask(8, 0).shape == (1, 1, 8, 0)


def test_such_a_pattern_is_a_value_of_its_own():
    mask = block_mask("window", size=32)
    pattern, again = pattern_from_block_mask(mask), pattern_from_block_mask(mask)
    assert repr(pattern).startswith("block_mask(<200 x 200 in blocks of 32 x 32: ")
    assert pattern == pattern and hash(pattern) == hash(pattern) and pattern != again
    with pytest.raises(heed.InvalidArgument, match="parse: expression has 'block_mask"):
        heed.patterns.parse(repr(pattern))
    both = pattern & heed.patterns.atrous(3) | heed.patterns.global_tokens([199])
    atrous, last = (x.mask(200, 200) for x in (heed.patterns.atrous(3), heed.patterns.global_tokens([199])))
    expected = dense("window").numpy() & atrous | last
    assert np.array_equal(both.mask(200, 200, heads=H, batch=B), expected)


def test_it_lives_until_the_backward_pass_and_compiles():
    q, k, v = tensors()
    expected = torch.autograd.grad(heed.torch.attention(q, k, v, mask=dense("by_both")).square().sum(), (q, k, v))
    loss = heed.torch.attention(q, k, v, pattern=pattern_from_block_mask(block_mask("by_both"))).square().sum()
    gc.collect()
    pattern = pattern_from_block_mask(block_mask("by_both"))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(*x):
        return heed.torch.attention(*x, pattern=pattern).square().sum()

    for of in (loss, compiled(q, k, v)):
        for a, b in zip(torch.autograd.grad(of, (q, k, v)), expected, strict=True):
            assert torch.equal(a, b)


def test_errors():
    q, k, v = tensors()
    for wrong in (None, dense("causal"), causal):
        with pytest.raises(heed.InvalidArgument,
                           match="pattern_from_block_mask: block_mask is of type .*, expected a BlockMask"):
            pattern_from_block_mask(wrong)
    counts, columns = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    short = flex.BlockMask.from_kv_blocks(counts, columns, seq_lengths=(200, 200))
    with pytest.raises(heed.InvalidArgument, match="block_mask lists 1 rows of blocks, expected 2 for its lengths"):
        pattern_from_block_mask(short)
    for lengths, got in (((199, 200), "199 rows and 200 keys"), ((200, 256), "200 rows and 256 keys")):
        pattern = pattern_from_block_mask(block_mask("causal", *lengths))
        with pytest.raises(heed.InvalidArgument,
                           match=f"attention: pattern has a block mask of {got}, expected 200 and 200"):
            heed.torch.attention(q, k, v, pattern=pattern)
    with pytest.raises(heed.InvalidArgument, match="pattern has a block mask of 2 batch entries, expected 1"):
        heed.torch.attention(q[:1], k[:1], v[:1], pattern=pattern_from_block_mask(block_mask("documents")))
    with pytest.raises(heed.InvalidArgument, match="pattern has a block mask of 4 heads, expected 1 or 2 as q"):
        heed.torch.attention(q[:, :, :2], k[:, :, :2], v[:, :, :2],
                             pattern=pattern_from_block_mask(block_mask("by_head")))
    with pytest.raises(RuntimeError, match="sliced BlockMask"):
        pattern_from_block_mask(block_mask("documents")[0:1])
