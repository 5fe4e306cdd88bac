# heed.torch's caches: the bits of heed's on tensors, errors where a gradient is required, autocast, compiled callers.
import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cache_model import Model, new_cache  # noqa: E402

import heed  # noqa: E402
import heed.torch  # noqa: E402

DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def rows(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(7)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("by_name", [True, False])
def test_every_dtype_decodes_as_attention_does(name, by_name):
    dtype = DTYPES[name]
    cache = heed.torch.KVCache(2, 2, 8, 6, dtype=name if by_name else dtype)
    assert cache.dtype is dtype and f"dtype={dtype}" in repr(cache) and repr(cache).startswith("<heed.torch.KVCache: ")
    k, v, q = rows(2, 40, 2, 8, dtype=dtype), rows(2, 40, 2, 6, dtype=dtype), rows(2, 40, 4, 8, dtype=dtype)
    for begin, end in ((0, 33), (33, 34), (34, 40)):
        cache.append(k[:, begin:end], v[:, begin:end])
        o, lse = cache.attend(q[:, begin:end], return_lse=True, invariant=True)
        expected, expected_lse = heed.torch.attention(
            q[:, begin:end], k[:, :end], v[:, :end], causal=True, return_lse=True, invariant=True)
        assert torch.equal(o, expected) and torch.equal(lse, expected_lse)
    assert torch.equal(cache.lengths, torch.tensor([40, 40])) and torch.equal(cache.appended, torch.tensor([6, 6]))


@pytest.mark.parametrize("kind", ["paged", "contiguous", "ring", "latent"])
def test_the_bits_of_heed(kind):
    scale = {"scale": 0.3} if kind == "latent" else {}
    plain, model = new_cache(kind)
    cache = plain._fork_as(getattr(heed.torch, type(plain).__name__))
    assert isinstance(cache, type(plain)) and isinstance(model, Model)
    for tokens, lengths in ((5, [5, 2]), (1, None), (3, torch.tensor([0, 3]))):
        new = (rows(2, tokens, 8),) if kind == "latent" else (rows(2, tokens, 2, 8), rows(2, tokens, 2, 6))
        cache.append(*new, lengths=lengths)
        plain.append(*new, lengths=lengths)
        q = rows(2, tokens, 4, 8)
        for options in ({}, {"softcap": 3.0, "alibi": torch.tensor([0.1, 0.2, 0.3, 0.4]), "sinks": [1.0] * 4,
                             "threads": 2}):
            o, lse = cache.attend(q, return_lse=True, **options, **scale)
            assert torch.is_tensor(o) and o.is_contiguous() and not o.requires_grad
            for x, y in zip((o, lse), plain.attend(q, return_lse=True, **options, **scale), strict=True):
                np.testing.assert_array_equal(x, y)


def test_what_makes_caches_makes_caches_of_tensors(tmp_path):
    one = heed.torch.KVCache(1, 2, 8)
    one.append(rows(1, 70, 2, 8), rows(1, 70, 2, 8))
    assert type(one.fork()) is type(copy.deepcopy(one)) is heed.torch.KVCache
    assert type(heed.torch.KVCache.share(one, 3)) is heed.torch.KVCache
    assert heed.torch.KVCache.share(one.fork(), 3).shared_prefix == 70
    pool = rows(4, 3, 2, 8, dtype=torch.bfloat16)
    pages = heed.torch.KVCache.import_pages(pool, pool, torch.tensor([0, 2, 3]), [3, 1, 0], torch.tensor([1, 2]),
                                            page=8)
    assert type(pages) is heed.torch.KVCache and pages.lengths.tolist() == [4, 2] and pages.dtype is torch.bfloat16
    for cache in (one, heed.torch.RingKVCache(2, 1, 4, window=3),
                  heed.torch.LatentKVCache(1, 6, 2, dtype=torch.float16)):
        cache.save(tmp_path / "cache")
        loaded = heed.torch.load_cache(tmp_path / "cache")
        assert type(loaded) is type(cache) and repr(loaded) == repr(cache)
        assert type(heed.load_cache(tmp_path / "cache")) is type(cache).__mro__[1]
    latent = heed.torch.LatentKVCache(1, 6, 2)
    latent.append(rows(1, 4, 8))
    assert heed.torch.LatentKVCache.share(latent, 2).attend(rows(2, 4, 3, 8), scale=0.2).shape == (2, 4, 3, 6)
    one.trim(torch.tensor([3]))
    one.reorder(torch.tensor([0], dtype=torch.int32))
    assert one.lengths.tolist() == [3]


def test_out_and_strides():
    cache = heed.torch.KVCache(2, 2, 8)
    cache.append(rows(2, 2, 5, 8).transpose(1, 2), rows(2, 8, 2, 5).permute(0, 3, 2, 1))
    q = rows(2, 4, 5, 8).transpose(1, 2)
    out = torch.full((2, 5, 4, 8), float("nan"))
    assert cache.attend(q, out=out) is out and torch.equal(out, cache.attend(q))
    o, lse = cache.attend(q, out=out, return_lse=True)
    assert o is out and lse.shape == (2, 4, 5)


def test_gradients_are_refused():
    cache = heed.torch.KVCache(1, 1, 4)
    x, wants = rows(1, 2, 1, 4), rows(1, 2, 1, 4).requires_grad_()
    cache.append(x, x)
    latent = heed.torch.LatentKVCache(1, 3, 1)
    for call, name in (
            (lambda: cache.append(wants, x), "KVCache.append: k"),
            (lambda: cache.append(x, v=wants), "KVCache.append: v"), (lambda: cache.attend(wants), "KVCache.attend: q"),
            (lambda: cache.attend(x, out=wants.clone()), "KVCache.attend: out"),
            (lambda: cache.attend(x, sinks=torch.zeros(1, requires_grad=True)), "KVCache.attend: sinks"),
            (lambda: latent.append(wants[:, 0]), "LatentKVCache.append: rows"),
            (lambda: heed.torch.KVCache.import_pages(wants, x, [0, 1], [0], [1]), "KVCache.import_pages: ")):
        with pytest.raises(heed.InvalidArgument, match=f"^{name}.* requires a gradient"):
            call()
    assert cache.lengths.tolist() == [2]
    with torch.no_grad():
        cache.append(wants, wants)
        o = cache.attend(wants)
    with torch.inference_mode():
        assert torch.equal(cache.attend(wants.clone()), o)
    assert torch.equal(cache.attend(wants.detach()), o)


def test_errors():
    cache = heed.torch.KVCache(1, 1, 4)
    x = rows(1, 2, 1, 4)
    cache.append(x, x)
    for call, message in (
            (lambda: cache.attend(x.double()), "KVCache.attend: q has dtype f64, expected f32 as the cache"),
            (lambda: cache.attend(x[0]), r"KVCache.attend: q has shape \[2,1,4\], expected \[1,T,H,4\]"),
            (lambda: cache.attend(x.numpy()), "KVCache.attend: q is of type ndarray, expected a tensor"),
            (lambda: cache.attend(x, return_lse=1), "KVCache.attend: return_lse is 1, expected True or False"),
            (lambda: cache.attend(x, out=x), "KVCache.attend: out overlaps q"),
            (lambda: cache.attend(x, out=rows(1, 2, 1, 3)),
             r"KVCache.attend: out has shape \[1,2,1,3\], expected \[1,2,1,4\]"),
            (lambda: cache.attend(x.to_sparse()),
             "KVCache.attend: q is a sparse_coo tensor on cpu, expected a strided"),
            (lambda: cache.attend(x.to("meta")), "KVCache.attend: q is a strided tensor on meta, expected a strided"),
            (lambda: cache.append(x, x.to("meta")),
             "KVCache.append: v is a strided tensor on meta, expected a strided"),
            (lambda: cache.append(x.to(torch.complex64), x), "KVCache.append: k has dtype c64, expected"),
            (lambda: cache.append(x, x, lengths=[3]), r"KVCache.append: lengths\[0\] is 3, expected 0 to 2"),
            (lambda: cache.attend(x, key_lengths=torch.tensor([1])),
             "KVCache.attend: key_lengths is given, expected none"),
            (lambda: heed.torch.KVCache(1, 1, 4, dtype=torch.int8),
             "KVCache: dtype is torch.int8, expected a float dtype"),
            (lambda: heed.torch.RingKVCache(1, 1, 4, window=2, dtype="half"),
             "RingKVCache: dtype is 'half', expected 'f64'")):
        with pytest.raises(heed.InvalidArgument, match=f"^{message}"):
            call()
    with pytest.raises(TypeError, match="unexpected keyword argument 'windw'"):
        cache.attend(x, windw=(1, 0))
    assert cache.lengths.tolist() == [2]


def test_autocast():
    cache = heed.torch.KVCache(1, 1, 4, dtype=torch.bfloat16)
    x = rows(1, 2, 1, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache.append(x, x)
        o = cache.attend(x)
    assert o.dtype == torch.bfloat16 and torch.equal(o, cache.attend(x.bfloat16()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_autocast_beside_a_cache_of_another_dtype(dtype):
    """Results of autocast's products take the cache's dtype."""
    x = rows(1, 2, 1, 4).bfloat16()
    for make in (heed.torch.KVCache, lambda *sizes, **of: heed.torch.RingKVCache(*sizes, window=4, **of)):
        cache, plain = make(1, 1, 4, dtype=dtype), make(1, 1, 4, dtype=dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cache.append(x, x)
            o = cache.attend(x)
        plain.append(x.to(dtype), x.to(dtype))
        assert o.dtype == dtype and torch.equal(o, plain.attend(x.to(dtype)))
    latents, rank = heed.torch.LatentKVCache(1, 4, 2, dtype=dtype), rows(1, 2, 1, 6).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        latents.append(rank[:, :, 0])
        assert latents.attend(rank, scale=0.5).dtype == dtype


def step(cache, x, lengths=None):
    """Two turns, of which none may be left out or change its place."""
    cache.append(x * 2, x, lengths)
    o, lse = cache.attend(x + 1, return_lse=True, sinks=[0.5, 1.0], segments=None)
    cache.append(x, x * 3)
    return o + cache.attend(x, window=(4, 0), out=torch.empty_like(x)), lse


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options, message", [
    ({"return_lse": 1}, "KVCache.attend: return_lse is 1, expected True or False"),
    ({"out": torch.empty(2, 2, 1, 4)}, "KVCache.attend: out "),
    ({"out": torch.empty(1, 2, 1, 4, dtype=torch.float64)}, "KVCache.attend: out "),
    ({"return_bound": True}, "KVCache.attend: return_bound is "),
])
def test_a_compiled_function_refuses_what_another_does(options, message):
    torch._dynamo.reset()
    cache, x = heed.torch.KVCache(1, 1, 4), rows(1, 2, 1, 4)
    cache.append(x, x)
    for call in (cache.attend, torch.compile(lambda q, **options: cache.attend(q, **options), backend="eager")):
        with pytest.raises(heed.InvalidArgument, match=message):
            call(x, **options)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_decodes_without_a_break_of_the_graph(backend):
    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    cache, plain = heed.torch.KVCache(2, 2, 8), heed.torch.KVCache(2, 2, 8)
    for lengths in (None, None, torch.tensor([2, 3])):
        x = rows(2, 3, 2, 8)
        for got, expected in zip(compiled(cache, x, lengths), step(plain, x, lengths), strict=True):
            assert torch.equal(got, expected)
        assert torch.equal(cache.lengths, plain.lengths)
    one, of_one, single = heed.torch.KVCache(1, 2, 8), x[:1], torch.tensor([3])
    one.append(of_one, of_one)
    for made in (one.fork(), copy.copy(one), heed.torch.KVCache.share(one, 1)):
        compiled(made, of_one, single)
        assert made.lengths[0] == one.lengths[0] + 6
    assert torch.equal(cache.lengths, plain.lengths)
    ring, latent = heed.torch.RingKVCache(1, 2, 8, window=3), heed.torch.LatentKVCache(1, 6, 2)
    ring.append(of_one, of_one)
    attend = torch.compile(lambda cache, x, **options: cache.attend(x, **options), backend=backend, fullgraph=True)
    assert torch.equal(attend(ring, of_one), ring.attend(of_one))
    latent_rows = torch.compile(lambda cache, x: cache.append(x), backend=backend, fullgraph=True)
    latent_rows(latent, of_one[:, :, 0])
    assert torch.equal(attend(latent, of_one, scale=0.2), latent.attend(of_one, scale=0.2))
    with pytest.raises(Exception, match="key_lengths"):
        attend(latent, of_one, scale=0.2, key_lengths=torch.tensor([1]))
    torch._dynamo.reset()


def test_operators():
    cache, x = heed.torch.KVCache(2, 2, 8), rows(2, 3, 2, 8)
    torch.library.opcheck(torch.ops.heed.cache_append.default, (cache._handle, x, x, torch.tensor([3, 1])))
    options = {"softcap": 2.0, "key_starts": torch.tensor([1, 0]), "causal": True}
    torch.library.opcheck(torch.ops.heed.cache_attend.default, (cache._handle, x, 8), options)
    o, _ = torch.ops.heed.cache_attend(cache._handle, x, 8, **options)
    assert torch.equal(o, cache.attend(x, **options))
    x.requires_grad_()
    for call in (lambda: torch.ops.heed.cache_append(cache._handle, x, x),
                 lambda: torch.ops.heed.cache_attend(cache._handle, x, 8)):
        with pytest.raises(heed.InvalidArgument, match="requires a gradient"):
            call()


def test_docstrings():
    assert "In PyTorch." in heed.torch.KVCache.__doc__ and "In Python." not in heed.torch.KVCache.__doc__
    assert "as tensors; o is `out`" in heed.torch.KVCache.attend.__doc__
    assert heed.torch.load_cache.__doc__ in heed.load_cache.__doc__


class TestNSA:
    """heed.torch.NSACache: heed's, on tensors."""

    OPTIONS = {"block": 4, "stride": 2, "length": 6, "count": 4, "window": 7}

    def inputs(self, dtype=torch.float32):
        return (*(rows(2, 30, heads, dim, dtype=dtype) for heads, dim in ((4, 6), (2, 6), (2, 5))),
                rows(2, 30, 4, 3, dtype=dtype))

    @pytest.mark.parametrize("dtype", DTYPES.values())
    def test_token_by_token_it_has_the_bits_of_heed(self, dtype):
        name = next(key for key, x in DTYPES.items() if x is dtype)
        cache = heed.torch.NSACache(2, 2, 6, 5, dtype=dtype, **self.OPTIONS)
        plain = heed.NSACache(2, 2, 6, 5, dtype=name, **self.OPTIONS)
        q, k, v, gates = self.inputs(dtype)
        for begin, end in ((0, 17), (17, 18), (18, 30)):
            now = slice(begin, end)
            cache.append(k[:, now], v[:, now])
            plain.append(k[:, now], v[:, now])
            o = cache.attend(q[:, now], gates[:, now], threads=1)
            as_given = torch.empty_like(o)
            plain.attend(q[:, now], gates[:, now], out=as_given)
            assert torch.equal(o, as_given) and o.dtype is dtype
        whole = heed.torch.nsa(q.float(), k.float(), v.float(), gates.float(), **self.OPTIONS)[:, now]
        tolerance = {"rtol": 0, "atol": 2e-6} if dtype in (torch.float32, torch.float64) else {"rtol": 0.1, "atol": 0.1}
        torch.testing.assert_close(o.float(), whole, **tolerance)
        assert cache.lengths.tolist() == [30, 30] and cache.appended.tolist() == [12, 12] and cache.dtype is dtype

    def test_windows_of_a_model_forks_and_copies(self):
        q, k, v, gates = self.inputs()
        windows = rows(2, 13, 2, 6), rows(2, 13, 2, 5)
        cache = heed.torch.NSACache(2, 2, 6, 5, **self.OPTIONS)
        cache.append(k[:, :29], v[:, :29], compressed=[x[:, :12] for x in windows])
        forks = [cache.fork(), copy.copy(cache), copy.deepcopy(cache)]
        whole = heed.torch.nsa(q, k, v, gates, compressed=windows, **self.OPTIONS)[:, 29:]
        for fork in forks:
            assert type(fork) is heed.torch.NSACache and repr(fork).startswith(
                "<heed.torch.NSACache: batch=2, heads=2, dim=6")
            fork.append(k[:, 29:], v[:, 29:], compressed=[x[:, 12:] for x in windows])
            torch.testing.assert_close(fork.attend(q[:, 29:], gates[:, 29:]), whole, rtol=0, atol=2e-6)
        assert cache.lengths.tolist() == [29, 29]
        assert type(copy.copy(heed.NSACache(1, 1, 4))) is heed.NSACache

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_a_compiled_function_decodes(self, backend):
        torch._dynamo.reset()

        def turn(cache, q, k, v, gates, windows=None):
            cache.append(k, v, None, compressed=windows)
            o = cache.attend(q, gates, scale=0.3)
            return o + cache.attend(q, 2 * gates, out=torch.empty_like(o))

        compiled = torch.compile(turn, backend=backend, fullgraph=True)
        for windows in (None, (rows(2, 13, 2, 6), rows(2, 13, 2, 5))):
            cache, plain = (heed.torch.NSACache(2, 2, 6, 5, **self.OPTIONS) for _ in range(2))
            x = self.inputs()
            assert torch.equal(compiled(cache, *x, windows), turn(plain, *x, windows))
            assert torch.equal(cache.lengths, plain.lengths)
        torch._dynamo.reset()
        q, gates = x[0].requires_grad_(), x[3]
        with pytest.raises(heed.InvalidArgument, match="q requires a gradient"):
            torch.ops.heed.nsa_cache_attend(cache._handle, q, gates, 5)
        torch.library.opcheck(torch.ops.heed.nsa_cache_attend.default, (cache._handle, q.detach(), gates, 5))

    def test_autocast(self):
        cache = heed.torch.NSACache(2, 2, 6, 5, dtype=torch.bfloat16, **self.OPTIONS)
        q, k, v, gates = self.inputs()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cache.append(k, v)
            o = cache.attend(q, gates)
        assert o.dtype == torch.bfloat16 and torch.equal(o, cache.attend(q.bfloat16(), gates.bfloat16()))

    def test_errors(self):
        cache, (q, k, v, gates) = heed.torch.NSACache(2, 2, 6, 5), self.inputs()
        wants = v.clone().requires_grad_()
        cache.append(k, v)
        for call, message in (
                (lambda: cache.append(k, wants), "NSACache.append: v requires a gradient"),
                (lambda: cache.append(k, v, compressed=(k, wants)), "NSACache.append: compressed requires a gradient"),
                (lambda: cache.append(k, v, compressed=k[0]), "NSACache.append: compressed"),
                (lambda: cache.attend(q.requires_grad_(), gates), "NSACache.attend: q requires a gradient"),
                (lambda: cache.attend(q.detach(), gates.numpy()),
                 "NSACache.attend: gates is of type ndarray, expected a tensor"),
                (lambda: cache.attend(q.detach().double(), gates), "NSACache.attend: q has dtype f64, expected f32"),
                (lambda: cache.attend(q.detach()[0], gates), r"NSACache.attend: q has shape \[30,4,6\]"),
                (lambda: cache.attend(q.detach(), gates.to("meta")),
                 "NSACache.attend: gates is a strided tensor on meta"),
                (lambda: cache.attend(q.detach(), gates, out=torch.empty(2, 30, 4, 6)),
                 "NSACache.attend: out has shape"),
                (lambda: heed.torch.NSACache(2, 2, 6, dtype=torch.int8),
                 "NSACache: dtype is torch.int8, expected a float dtype")):
            with pytest.raises(heed.InvalidArgument, match=f"^{message}"):
                call()
        assert cache.lengths.tolist() == [30, 30]
