# Masks of heed.transformers: structure is recognised, means what the dense mask means, and yields to operations.
import copy
import pickle
import random

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("transformers.masking_utils")

from heed.transformers import _attention, _masks, _recognise, _structure  # noqa: E402
from heed.transformers._masks import StructuredMask  # noqa: E402

B, T = 2, 9


class Module(torch.nn.Module):
    is_causal = True


def both(function, rows=T, keys=T, q_offset=0, k_offset=0, padding=None, batch=B, **options):
    """heed's mask and the dense one of Transformers."""
    call = dict(batch_size=batch, q_length=rows, kv_length=keys, q_offset=q_offset, kv_offset=k_offset,
                mask_function=function, attention_mask=padding)
    return _masks.mask(**call, **options), hf.sdpa_mask(**call, allow_is_causal_skip=False)


def heads(mask_shape, generator):
    batch, _, rows, keys = mask_shape
    return (torch.randn(batch, 2, n, 8, generator=generator) for n in (rows, keys, keys))


def assert_means(ours, dense):
    """Attention under our mask is attention under the dense mask, and so is the mask in memory."""
    q, k, v = heads(dense.shape, torch.Generator().manual_seed(1))
    expected = torch.ops.heed.attention.default(q, k, v, heads_first=True, mask=dense)[0].transpose(1, 2)
    o, _ = _attention.attention(Module().eval(), q, k, v, ours)
    torch.testing.assert_close(o, expected, rtol=0, atol=2e-6)
    if ours is None:
        assert dense.all()
    else:
        assert ours.shape == dense.shape and ours.dtype is torch.bool and torch.equal(ours | False, dense)


def structure(function, *args, **options):
    ours, dense = both(function, *args, **options)
    assert isinstance(ours, StructuredMask)
    assert_means(ours, dense)
    s = ours.structure
    return {name: getattr(s, name) for name in s._fields if getattr(s, name) is not None
            and not (name == "align" and s.align == "bottom_right") and not (name == "causal" and not s.causal)}


def lists(options):
    return {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in options.items()}


causal, full = hf.causal_mask_function, hf.bidirectional_mask_function
sliding, around = hf.sliding_window_causal_mask_function, hf.sliding_window_bidirectional_mask_function


def chunked(size, left_padding):
    return hf.chunked_causal_mask_function(size, torch.tensor(left_padding))


def blocks(*rows, over=causal):
    """Causal, or of one block: a digit each; one row is both."""
    ids = torch.tensor([[-1 if c == "." else int(c) for c in row] for row in rows]).expand(B, -1)
    return hf.or_masks(over, hf.blockwise_overlay(ids))


def padding(*rows):
    return torch.tensor([[c == "x" for c in row] for row in rows])


LEFT = padding("..xxxxxxx", "xxxxxxxxx")

KNOWN = {
    "causal": ((causal,), {}, {"causal": True}),
    "causal in a long cache": ((causal, 3, 9, 6), {}, {"causal": True}),
    "causal in a static cache, empty": ((causal, 3, 9, 0), {}, {"causal": True, "align": "top_left"}),
    "causal in a static cache": ((causal, 3, 9, 2), {}, {"causal": True, "query_starts": [2, 2]}),
    "tensor as offset": ((causal, 3, 9, torch.tensor(2)), {}, {"causal": True, "query_starts": [2, 2]}),
    "one query in a static cache": ((causal, 1, 9, 4), {}, {"causal": True, "query_starts": [4, 4]}),
    "one query in a sliding cache": ((sliding(4), 1, 4, 8, 5), {"allow_is_causal_skip": False}, {}),
    "window": ((sliding(4),), {}, {"causal": True, "window": (3, -1)}),
    "window of all": ((sliding(9),), {}, {"causal": True}),
    "window of all but one": ((sliding(8),), {}, {"causal": True, "window": (7, -1)}),
    "window in a static cache": ((sliding(2), 3, 9, 2), {},
                                 {"causal": True, "window": (1, -1), "query_starts": [2, 2]}),
    "window in a cache": ((sliding(4), 1, 9, 8), {}, {"window": (3, -1)}),
    "window in a shortened cache": ((sliding(4), 2, 5, 8, 5), {}, {"causal": True, "window": (3, -1)}),
    "both ways": ((around(3),), {}, {"window": (3, 3)}),
    "both ways, all": ((around(8),), {"allow_is_bidirectional_skip": False}, {}),
    "both ways, nearly all": ((around(7),), {}, {"window": (7, 7)}),
    "two windows": ((hf.and_masks(sliding(5), around(3)),), {}, {"causal": True, "window": (3, -1)}),
    "chunks": ((chunked(4, [0, 0]),), {}, {"causal": True, "chunk": 4}),
    "one chunk": ((chunked(9, [0, 0]),), {}, {"causal": True}),
    "chunks from the first token": ((chunked(4, [2, 0]),), {"padding": LEFT},
                                    {"causal": True, "chunk": 4, "key_starts": [2, 0]}),
    "one chunk from the first token": ((chunked(7, [2, 2]),), {"padding": LEFT[:1].expand(2, -1)},
                                       {"causal": True, "key_starts": [2, 2]}),
    "chunks in a shortened cache": ((chunked(4, [0, 0]), 1, 6, 9, 4), {}, {"chunk": 4}),
    "chunks that a cache cuts": ((chunked(4, [0, 0]), 1, 5, 9, 5), {},
                                 {"segments_q": [[1], [1]], "segments_k": [[0, 0, 0, 1, 1]] * 2}),
    "left padding": ((causal,), {"padding": LEFT}, {"causal": True, "key_starts": [2, 0]}),
    "right padding": ((causal,), {"padding": padding("xxxxxx...", "xxxxxxxxx")},
                      {"causal": True, "key_lengths": [6, 9]}),
    "padding on both sides": ((full,), {"padding": padding(".xxxxx...", "..xxxxxxx")},
                              {"key_starts": [1, 2], "key_lengths": [6, 9]}),
    "a row of padding": ((full,), {"padding": padding(".........", "xxxxxxxxx")}, {"key_lengths": [0, 9]}),
    "padding shorter than the cache": ((causal, 2, 9, 4), {"padding": padding("xxxxxx", "..xxxx")},
                                       {"causal": True, "query_starts": [4, 4], "key_lengths": [6, 6],
                                        "key_starts": [0, 2]}),
    "padding longer than the keys": ((full, 3, 4, 5, 3), {"padding": padding("....xxxxx", "xxxxxxx..")},
                                     {"key_starts": [1, 0]}),
    "holes": ((causal,), {"padding": padding("xx.xxxxxx", "xxxxxxxxx")},
              {"causal": True, "mask": [[[[c == "x" for c in "xx.xxxxxx"]]], [[[True] * 9]]]}),
    "padding inside": ((hf.and_masks(causal, hf.padding_mask_function(LEFT)),), {},
                       {"causal": True, "key_starts": [2, 0]}),
    "offsets": ((hf.add_offsets_to_mask_function(sliding(3), 4, 2),), {},
                {"causal": True, "window": (2, -1), "query_starts": [2, 2]}),
    "prefix": ((blocks("555......", "........."),), {}, {"causal": True, "prefix": [3, 0]}),
    "prefix under a window": ((hf.and_masks(blocks("0000....."), hf.sliding_window_overlay(3)),), {},
                              {"causal": True, "window": (2, -1), "prefix": [4, 4]}),
    "prefix after padding": ((blocks("..0000..."), 6, 9, 3), {"padding": LEFT[:1].expand(2, -1)},
                             {"causal": True, "key_starts": [2, 2], "prefix": [4, 4]}),
    "blocks of the past": ((blocks("00.11...."), 2, 9, 7), {}, {"causal": True}),
}


@pytest.mark.parametrize("case", KNOWN)
def test_known_masks_are_options(case):
    args, options, expected = KNOWN[case]
    assert lists(structure(*args, **options)) == expected


DENSE = {
    "custom": (lambda b, h, q, k: (q + k) % 3 != 0, {}),
    "custom and causal": (hf.and_masks(causal, lambda b, h, q, k: k != 2), {}),
    "custom or causal": (hf.or_masks(causal, lambda b, h, q, k: k == 8), {}),
    "two blocks": (blocks("00.11...."), {}),
    "a block in the middle": (blocks(".000....."), {}),
    "a block after padding": (blocks("..00....."), {"padding": LEFT[:1].expand(2, -1)}),
    "a block beside a block": (blocks("0011....."), {}),
    "a block over a window": (blocks("0000.....", over=sliding(3)), {}),
    "offsets of chunks": (hf.add_offsets_to_mask_function(chunked(3, [0, 0]), 1, 1), {}),
    "two distances": (hf.and_masks(sliding(3), hf.add_offsets_to_mask_function(causal, 2, 0)), {}),
    "positions that jump": (hf.packed_sequence_compatibility_function(
        causal, torch.tensor([[0, 1, 2, 4, 5, 6, 7, 8, 9]] * 2), torch.zeros(2, 9, dtype=torch.int64)), {}),
    "segments that come again": (hf.packed_sequence_compatibility_function(
        causal, torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]] * 2), torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0, 0]] * 2)), {}),
}


@pytest.mark.parametrize("case", DENSE)
def test_whatever_is_in_doubt_is_dense(case):
    function, options = DENSE[case]
    ours, dense = both(function, **options)
    assert type(ours) is torch.Tensor and torch.equal(ours, dense)
    assert_means(ours, dense)


def test_tables_behind_offsets_are_not_read():
    table = torch.zeros(2, 9, dtype=torch.bool)
    for inner in (chunked(3, [0, 0]), hf.padding_mask_function(table), hf.blockwise_overlay(table.long()),
                  hf.packed_sequence_mask_function(table.long())):
        for offsets in ((1, 1), (0, 0), (2, 1)):
            assert _recognise.read(hf.add_offsets_to_mask_function(inner, *offsets)) is None
    for function in (hf.add_offsets_to_mask_function(blocks("000......"), 1, 1),
                     hf.remap_positions_for_packed_sequence(hf.padding_mask_function(table), table.long())):
        assert _recognise.read(function) is None


def packed(lengths):
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return positions, hf.find_packed_sequence_indices(positions)


@pytest.mark.parametrize("window", [None, 3])
def test_packed_sequences_are_segments(window):
    positions, ids = packed([4, 2, 3])
    base = causal if window is None else sliding(window)
    function = hf.packed_sequence_compatibility_function(base, positions, ids)
    expected = {"causal": True, "segments_q": ids.tolist(), "segments_k": ids.tolist()}
    assert lists(structure(function, batch=1)) == expected | ({"window": (window - 1, -1)} if window else {})


def test_negative_segments_attend_each_other():
    ids = torch.tensor([[-1, 0, 0, 0, 1, 1, 1, -1, -1]] * 2)
    s = structure(hf.and_masks(full, hf.packed_sequence_mask_function(ids)))
    assert s["segments_q"].tolist() == (ids + 1).tolist()


def test_chunks_of_packed_sequences_begin_with_each():
    positions, ids = packed([5, 4])
    s = structure(hf.packed_sequence_compatibility_function(chunked(3, [0]), positions, ids), batch=1)
    assert torch.unique(s["segments_q"], return_inverse=True)[1].tolist() == [[0, 0, 0, 1, 1, 2, 2, 2, 3]]


def random_padding(r, batch, length):
    kind = r.choice(["none", "all", "left", "right", "both", "holes", "empty row"])
    if kind == "none":
        return None
    mask = torch.ones(batch, length, dtype=torch.bool)
    for row in mask:
        first, last = r.randrange(length), r.randrange(length)
        if kind in ("left", "both"):
            row[:first] = False
        if kind in ("right", "both"):
            row[last + 1:] = False
        if kind == "holes":
            row[first] = row[last] = False
    if kind == "empty row":
        mask[r.randrange(batch)] = False
    return mask


def random_function(r, batch, length, left_padding):
    base = r.choice([causal, full, sliding(r.randint(1, length + 1)), around(r.randint(0, length)),
                     hf.chunked_causal_mask_function(r.randint(1, length), left_padding)])
    ids = torch.tensor([[-1] * length] * batch)
    for row in ids:
        begin = r.choice([0, 0, r.randrange(length)])
        row[begin:begin + r.randint(0, length)] = 3
    custom = lambda b, h, q, k: (q * 3 + k * 5) % 7 > 1  # noqa: E731
    wrap = r.choice(["", "", "", "custom and", "custom or", "blocks", "blocks under a window", "packed", "packed only",
                     "packed and chunks", "offsets"])
    if wrap.startswith("custom"):
        return (hf.and_masks if wrap.endswith("and") else hf.or_masks)(base, custom), False
    if wrap.startswith("blocks"):
        function = hf.or_masks(base, hf.blockwise_overlay(ids))
        return (hf.and_masks(function, hf.sliding_window_overlay(4)) if "window" in wrap else function), None
    if wrap.startswith("packed"):
        lengths = [r.randint(1, length) for _ in range(length)]
        positions = torch.cat([torch.arange(n) for n in lengths])[None, :length].expand(batch, -1)
        segments = torch.cumsum(torch.diff(positions, prepend=positions[:, :1] - 1) != 1, -1)
        if wrap == "packed only":
            return hf.and_masks(base, hf.packed_sequence_mask_function(segments)), True
        if wrap == "packed and chunks":
            base = hf.and_masks(base, hf.chunked_overlay(r.randint(1, 4), left_padding * 0))
        function = hf.packed_sequence_compatibility_function(base, positions, segments)
        return function, True if base.__code__ is not hf.and_masks().__code__ else None
    if wrap == "offsets":
        return hf.add_offsets_to_mask_function(base, r.randint(0, 3), r.randint(0, 3)), None
    return base, True


@pytest.mark.parametrize("seed", range(40))
def test_random_masks_mean_what_transformers_means(seed):
    r = random.Random(seed)
    structured = 0
    for _ in range(10):
        batch, keys, k_offset = r.randint(1, 3), r.randint(1, 12), r.choice([0, 0, 0, r.randint(0, 5)])
        rows = r.choice([1, keys, r.randint(1, keys)])
        q_offset = k_offset + r.choice([0, keys - rows, r.randint(0, keys - rows)])
        length = k_offset + keys
        mask = random_padding(r, batch, length + r.choice([0, 0, 2]))
        left = torch.zeros(batch, dtype=torch.int64) if mask is None else (mask.cumsum(-1) == 0).sum(-1)
        function, expected = random_function(r, batch, length, left)
        skip = {"allow_is_causal_skip": r.random() < 0.5, "allow_is_bidirectional_skip": False}
        ours, dense = both(function, rows, keys, q_offset, k_offset, mask, batch, **skip)
        assert_means(ours, dense)
        known = ours is None or isinstance(ours, StructuredMask)
        assert expected is None or known == expected
        structured += known
    assert structured >= 2


def test_none_is_returned_where_nothing_is_masked_and_it_is_allowed():
    everything = torch.ones(B, T, dtype=torch.bool)
    assert both(full, padding=everything, allow_is_bidirectional_skip=True)[0] is None
    assert both(full, padding=LEFT, allow_is_bidirectional_skip=True)[0] is not None
    assert both(around(8), allow_is_bidirectional_skip=True)[0] is None
    assert both(full, allow_is_bidirectional_skip=False)[0] is not None
    assert both(causal, 1, T, 8)[0] is None
    assert both(causal, 1, T, 8, allow_is_causal_skip=False)[0] is not None
    assert both(causal, 1, T, 7)[0] is not None
    assert both(causal)[0] is not None and both(causal, 3, T, 6)[0] is not None
    bidirectional_decoder = transformers.LlamaConfig(is_causal=False)  # whose attention layers say that they are causal
    assert both(full, allow_is_bidirectional_skip=True, config=bidirectional_decoder)[0] is not None


def test_offset_of_a_static_cache_is_read_at_once():
    offset = torch.tensor(3)
    ours, dense = both(causal, 2, T, offset)
    offset += 2
    assert_means(ours, dense)


@pytest.fixture
def made(monkeypatch):
    """The number of masks that were made in memory."""
    made, make_dense = [], _masks.make_dense
    monkeypatch.setattr(_masks, "make_dense", lambda *args: made.append(args) or make_dense(*args))
    return made


def test_mask_stays_out_of_memory_until_an_operation_touches_it(made):
    mask, dense = both(causal, padding=LEFT)
    assert mask.shape == (B, 1, T, T) and mask.ndim == 4 and mask.dtype is torch.bool and mask.device.type == "cpu"
    for same in (mask.to(torch.bool), mask.contiguous(), mask.cpu(), mask.detach(), mask[:, :, :, :T], mask[...]):
        assert isinstance(same, StructuredMask) and same.structure is mask.structure
    repr(mask)
    assert not made
    assert torch.equal(mask & dense, dense) and len(made) == 1
    assert torch.equal(mask[:, :, 2:, 1:], dense[:, :, 2:, 1:]) and len(made) == 1


OPERATIONS = {
    "index": lambda m: m[:, 0, 3], "expand": lambda m: m.expand(-1, 4, -1, -1), "not": lambda m: ~m,
    "and": lambda m: m & torch.ones(T, dtype=torch.bool), "float": lambda m: m.float() * 2,
    "where": lambda m: torch.where(m, 0.0, -1.0), "list": lambda m: torch.cat([m, m], -1), "clone": lambda m: m.clone(),
    "fill": lambda m: torch.zeros(B, 1, T, T).masked_fill(~m, 5), "pad": lambda m: torch.nn.functional.pad(m, (0, 2)),
    "copy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "reduce": lambda m: m.any(-1),
    "numpy": lambda m: torch.from_numpy(m.numpy()), "tolist": lambda m: torch.tensor(m.tolist()),
    "double": lambda m: m.to(torch.float64),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_see_the_dense_mask(name):
    mask, dense = both(causal, padding=LEFT)
    result = OPERATIONS[name](mask)
    assert type(result) is torch.Tensor and torch.equal(result, OPERATIONS[name](dense))


def test_writing_replaces_the_structure():
    mask, dense = both(causal, batch=1)
    alias = mask.detach()
    mask &= torch.arange(T) != 0
    dense[..., 0] = False
    assert mask.structure is alias.structure is None
    assert_means(mask, dense)
    assert_means(alias, dense)


def test_masks_of_another_shape_are_dense(made):
    mask, dense = both(causal, batch=1)
    q, k, v = (torch.randn(3, 2, T, 8) for _ in range(3))
    o, _ = _attention.attention(Module(), q, k, v, mask)
    expected, _ = _attention.attention(Module(), q, k, v, dense)
    assert made and torch.equal(o, expected)


def test_tracing_gets_the_mask_of_transformers():
    compiled = torch.compile(lambda: _masks.mask(1, T, T, allow_is_causal_skip=False) | False, backend="eager")
    assert torch.equal(compiled(), both(causal, batch=1)[1])
    inside = torch.compile(lambda m: m[:, :, 1:] | False, backend="eager")
    mask, dense = both(causal)
    assert torch.equal(inside(mask), dense[:, :, 1:])
    assert _masks.mask(1, T, T, device="meta", allow_is_causal_skip=False).device.type == "meta"


def misread(function, pattern, shift, positions):
    return _recognise._by_distance(pattern, shift, _recognise._cell(function, "sliding_window"), None)


@pytest.fixture
def changed_window(monkeypatch):
    """Simulates a new version of Transformers that counts windows differently."""
    code = hf.sliding_window_overlay(1).__code__
    monkeypatch.setattr(_structure, "_agreed", {})
    monkeypatch.setattr(_recognise, "_READERS", {**_recognise._READERS, code: misread})


def test_readers_that_a_new_version_proves_wrong_are_dropped(changed_window):
    with pytest.warns(UserWarning, match="a mask function has changed"):
        ours, dense = both(sliding(4))
    assert type(ours) is torch.Tensor and torch.equal(ours, dense)


def test_the_first_mask_of_a_kind_is_verified(changed_window, monkeypatch):
    monkeypatch.setattr(_structure, "_check_readers", lambda: None)
    for window in (4, 1, 8):
        ours, dense = both(sliding(window))
        assert type(ours) is torch.Tensor and torch.equal(ours, dense)
        _structure._agreed.clear()
    both(causal)
    assert isinstance(both(causal)[0], StructuredMask)
