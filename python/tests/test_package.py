# The package itself: docstrings, stubs, the cost of an import, ALiBi slopes.
import ast
import importlib.metadata
import importlib.util
import inspect
import os
import pathlib
import pydoc
import re
import shutil
import subprocess
import sys
import sysconfig

import numpy as np
import pytest
from cli_program import ROOT

import heed
import heed.__main__
from heed import _core
from type_checker import check_types

FOLDER = pathlib.Path(heed.__file__).parent
SIGNATURE = [
    "q", "k", "v", "*", "scale=None", "causal=False", "align='bottom_right'", "window=None", "sink_tokens=0",
    "prefix=None", "chunk=None", "segments=None", "key_lengths=None", "key_starts=None", "query_lengths=None",
    "mask=None", "bias=None", "alibi=None", "relative_bias=None", "softcap=None", "sinks=None", "log_decay=None",
    "pattern=None",
    "dropout=0.0", "seed=None", "dropout_offset=0", "cu_seqlens_q=None", "cu_seqlens_k=None", "precision='highest'",
    "invariant=False", "return_lse=False", "comm=None", "method='auto'", "order='contiguous'", "out=None",
    "threads=None"]


def stub():
    return ast.parse((FOLDER / "_core.pyi").read_text())


def stubbed(name):
    return [node for node in stub().body if isinstance(node, ast.FunctionDef) and node.name == name]


def test_public_names():
    for name in ("attention", "attention_backward", "AttentionGradients", "attention_weights", "attention_map",
                 "merge_attention", "explain", "alibi_slopes", "rotary", "sinusoidal", "t5_bias", "t5_bias_backward",
                 "linformer", "linformer_backward", "longformer", "longformer_backward",
                 "merge_linear", "merge_linear_backward", "nsa", "nsa_backward", "NSACache", "certified_attention",
                 "compressed_attention", "compressed_attention_backward", "CompressedAttentionGradients",
                 "attention_residual", "attention_residual_backward", "AttentionResidualGradients",
                 "log_linear_attention", "log_linear_attention_backward", "log_linear_attention_step",
                 "mesa", "mesa_backward", "mesa_step", "MesaGradients",
                 "titans", "titans_backward", "titans_step", "TitansGradients",
                 "ttt_linear", "ttt_linear_backward", "ttt_linear_step", "TttLinearGradients",
                 "parallax_attention", "parallax_attention_backward", "ParallaxAttentionGradients",
                 "path_attention", "path_attention_backward", "path_attention_keys", "PathAttentionGradients",
                 "wall_attention", "wall_attention_backward", "wall_attention_keys", "WallAttentionGradients",
                 "deltaformer", "deltaformer_backward", "deltaformer_values", "DeltaformerGradients",
                 "orthogonal_features", "KVCacheBase", "KVCache", "RingKVCache", "LatentKVCache", "load_cache",
                 "view", "View", "advise", "Advice", "Candidate", "set_num_threads", "get_num_threads", "set_checks",
                 "set_strict", "InvalidArgument", "Unsupported", "FileError", "__version__"):
        assert name in heed.__all__ and hasattr(heed, name)
    assert issubclass(heed.InvalidArgument, ValueError) and issubclass(heed.Unsupported, RuntimeError)
    assert heed.InvalidArgument.__module__ == heed.KVCache.__module__ == "heed"
    assert re.fullmatch(r"\d+\.\d+\.\d+", heed.__version__)


def test_version_is_the_distribution_s():
    try:
        assert importlib.metadata.version("heed-attention") == heed.__version__
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("heed is on the path, not installed")


def test_the_citation_agrees_with_the_package():
    yaml, tomllib = pytest.importorskip("yaml"), pytest.importorskip("tomllib")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (citation["license"], citation["authors"]) == (project["license"],
                                                          project["authors"]) and citation["cff-version"] == "1.2.0"
    (license_file,) = project["license-files"]
    assert "Apache License" in (ROOT / license_file).read_text()


def help_of(thing):
    return pydoc.render_doc(thing, renderer=pydoc.plaintext)


def test_help_has_signature_equation_shapes_keep_rule_errors_and_source():
    doc = help_of(heed.attention)
    for text in ("attention(q", "scale: 'float | None' = None", "s_ij = f(scale * <q_i, k_j>) + alibi_ij + r_ij "
                 "+ F_ij + bias_ij", "o_i  = w_i * sum_j P_ij Z_ij / (1 - dropout) v_j", "[B, Tk, Hkv, Dv]",
                 "keep = s <= j < n", "p_i - left <= j <= p_i + right",
                 "Raises InvalidArgument", "arXiv:2205.14135", "heed.InvalidArgument"):
        assert text in doc, text
    merge = help_of(heed.merge_attention)
    for text in ("merge_attention(parts", "M = max_s lse_s", "sinks"):
        assert text in merge, text
    backward = help_of(heed.attention_backward)
    for text in ("attention_backward(do", "need_dbias: 'bool' = False",
                 "dS_ij   = P_ij (g_i Z_ij <do_i, v_j> - delta_i)", "need_dbias  whether", "heed.AttentionGradients"):
        assert text in backward, text
    assert "arXiv:2108.12409" in heed.alibi_slopes.__doc__
    for text in ("rotary(x", "interleaved: 'bool'", "y_b = f (x_b cos angle_i + x_a sin angle_i)", "arXiv:2104.09864",
                 "longrope  w_i / long_factor[i]", "original_max_position_embeddings  L0", "arXiv:2309.00071"):
        assert text in help_of(heed.rotary), text
    for name in heed.__all__:
        assert name == "__version__" or inspect.getdoc(getattr(heed, name)), name


def test_docstrings_of_caches():
    for of, texts in (
            (heed.KVCache, ("B sequences, T tokens",
                            "capacity         tokens that a sequence may have", "None is one contiguous block")),
            (heed.KVCacheBase, ("Tokens are in pages that never move",)),
            (heed.RingKVCache, ("[0, sink_tokens) and [max(0, n - window + 1), length)",)),
            (heed.LatentKVCache, ("`latent` elements, which are also the token's value",)),
            (heed.KVCache.append, ("append(self, k", "lengths    [batch]: new rows of each sequence, from 0 to T")),
            (heed.KVCache.attend, ("attend(self, q", "Row i of sequence b has position lengths[b] - "
                                   "appended[b] + i")), (heed.LatentKVCache.attend, ("scale: 'float',",)),
            (heed.KVCache.import_pages, ("Block tables of another library", "heads_first    whether")),
            (heed.KVCache.share, ("`batch` sequences that all begin as",)),
            (heed.load_cache, ("max_bytes", "an OSError"))):
        for text in texts:
            assert text in help_of(of), (of, text)
    for cls in (heed.KVCacheBase, heed.KVCache, heed.RingKVCache, heed.LatentKVCache):
        for name in dir(cls):
            assert name.startswith("_") or inspect.getdoc(getattr(cls, name)), (cls, name)


def test_docstring_names_every_option():
    doc = heed.attention.__doc__.split("Arguments:")[1]
    for parameter in SIGNATURE:
        name = parameter.split("=")[0]
        assert name == "*" or re.search(rf"\b{name}\b", doc), name


def test_stub_has_the_signature():
    plain, with_lse = stubbed("attention")
    arguments = plain.args
    written = [a.arg for a in arguments.args] + ["*"] + [
        f"{a.arg}={ast.unparse(d)}" for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    assert written == SIGNATURE
    assert keywords_of(with_lse)["return_lse"] == ("Literal[True]", None)


CACHE_SIGNATURES = {
    ("KVCache", "__init__"): "self batch heads dim value_dim=None * capacity=None page=64 dtype='f32' quantize=None "
    "rotary=None log_decay_heads=None sketch=None",
    ("RingKVCache", "__init__"): "self batch heads dim value_dim=None * window sink_tokens=0 dtype='f32' rotary=None "
    "positions='absolute'",
    ("LatentKVCache", "__init__"): "self batch latent rope * capacity=None page=64 dtype='f32'",
    ("KVCache", "append"): "self k v lengths=None * log_decay=None",
    ("RingKVCache", "append"): "self k v lengths=None",
    ("LatentKVCache", "append"): "self rows lengths=None",
    ("KVCache", "fork"): "self", ("KVCacheBase", "trim"): "self lengths", ("KVCacheBase", "save"): "self path",
    ("KVCache", "share"): "prefix_cache batch",
}


def test_stub_has_the_signatures_of_caches():
    classes = {node.name: node for node in stub().body if isinstance(node, ast.ClassDef)}
    for (name, method), signature in CACHE_SIGNATURES.items():
        arguments = next(node for node in classes[name].body
                         if isinstance(node, ast.FunctionDef) and node.name == method).args
        first = len(arguments.args) - len(arguments.defaults)
        written = [a.arg for a in arguments.args[:first]]
        written += [f"{a.arg}={ast.unparse(d)}"
                    for a, d in zip(arguments.args[first:], arguments.defaults, strict=True)]
        written += ["*"] if arguments.kwonlyargs else []
        written += [a.arg + (f"={ast.unparse(d)}" if d else "")
                    for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
        assert " ".join(written) == signature, (name, method)


def keywords_of(function):
    return {a.arg: (ast.unparse(a.annotation), d and ast.unparse(d))
            for a, d in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)}


def test_every_function_has_the_options_as_attention_has_them():
    plain, with_lse = map(keywords_of, stubbed("attention"))
    assert {**plain, "return_lse": None} == {**with_lse, "return_lse": None}
    results = {"return_lse", "out"}
    for_processes = {name: kind for name, kind in plain.items() if name in ("comm", "method", "order")}
    assert for_processes.items() <= keywords_of(stubbed("attention_backward")[0]).items()
    options = {name: kind for name, kind in plain.items() if name not in results | for_processes.keys()}
    of_packed = {"cu_seqlens_q", "cu_seqlens_k"}
    for name, own, missing in (("attention_backward", {"dlse", "need_dbias", *for_processes}, set()),
                               ("attention_weights", {"lse", "rows", "heads"}, of_packed),
                               ("attention_map", {"size", "reduce"}, of_packed), ("view", {"tokens"}, of_packed)):
        taken = keywords_of(stubbed(name)[0])
        assert {key: kind for key, kind in taken.items() if key not in own} == {
            key: kind for key, kind in options.items() if key not in missing}, name
    # A cache has no options that it knows itself, or that training needs; it is causal by default and may need scale.
    known = {"causal", "align", "key_lengths", "query_lengths", "dropout", "seed", "dropout_offset", "log_decay",
             "scale"} | of_packed
    classes = {node.name: node for node in stub().body if isinstance(node, ast.ClassDef)}
    for name in ("KVCache", "RingKVCache", "LatentKVCache"):
        bounds = {"epsilon", "level", "return_bound"} if name == "KVCache" else set()
        for method in classes[name].body:
            if getattr(method, "name", "") in ("attend", "quantization_bound"):
                taken = keywords_of(method)
                assert {key: kind for key, kind in taken.items()
                        if key not in {"causal", "tree", "scale", "comm", *bounds, *results}} == {
                            key: kind for key, kind in options.items() if key not in known}, name
                if method.name == "attend":
                    first = (["scale", "causal", "tree", "return_lse"] if name == "LatentKVCache"
                             else ["causal", "tree", "return_lse"])
                    assert list(taken)[:len(first)] == first and taken["causal"] == ("bool", "True")
                assert taken["scale"] == (("float", None) if name == "LatentKVCache" else options["scale"])


def test_no_door_lacks_an_option_of_the_header():
    torch = pytest.importorskip("torch")
    import heed.torch

    spec = importlib.util.spec_from_file_location("docstrings", ROOT / "tools/docstrings.py")
    docstrings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(docstrings)
    header = docstrings.Header(ROOT / "heed/ops/exact/attention/attention.h")
    fields = docstrings.fields_of(dict(header.arguments)["Options"], header.enums)
    fields = {name for names, _ in fields for name in names.split(", ")}
    assert len(fields) > 25 and fields == {name for name, *_ in heed._core._attention_options} - {"threads"}
    for name in ("attention", "attention_backward"):
        assert fields <= {a.name for a in getattr(torch.ops.heed, name).default._schema.arguments}
    unions = {"query_starts": "align", "segments_q": "segments", "segments_k": "segments"}
    keywords = {unions.get(name, name) for name in fields}
    for function in (heed.attention, heed.attention_backward, heed.torch.attention):
        assert keywords <= set(inspect.signature(function).parameters), function
    text = heed.attention.__doc__.split("Arguments:")[1]
    assert all(re.search(rf"^  {name} +\S", text, re.MULTILINE) for name in keywords)
    given = heed.torch._operators.attention_options.given
    of_arrays = inspect.signature(heed.attention).parameters
    for name in keywords - {"seed"}:  # any other value than the default reaches the operator
        flag_or_numbers = True if of_arrays[name].default is False else [7]
        value = {"align": "top_left", "pattern": heed.patterns.atrous(2)}.get(name, flag_or_numbers)
        assert given({name: value}, heed.torch.attention), name


CONSUMER = """
import numpy as np
import heed

q = np.zeros((1, 4, 2, 8), np.float32)
o = heed.attention(q, q, q, causal=True, window=(3, 0), key_lengths=[4], align=np.zeros(1, np.int64))
shape: tuple[int, ...] = o.shape
p, lse = heed.attention(q, q, q, return_lse=True, softcap=3.0, segments=(q, q))
g = heed.attention_backward(p, q, q, q, p, lse, dlse=lse, causal=True, sinks=[0.5, 0.5], need_dbias=False)
widths: tuple[int, ...] = g.dq.shape + (g.dv if g.dbias is None else g.dbias).shape
g.dsinks.shape  # wrong: union-attr
gradients: heed.AttentionGradients = g
heed.attention_backward(p, q, q, q, p, lse, out=p)  # wrong: call-arg
merged, _ = heed.merge_attention([(p, lse)], sinks=[0.5, 0.5])
pairs: int = heed.explain("attention", q=(1, 2, 3, 4), causal=True)["visited_pairs"]
slope = float(heed.alibi_slopes(8)[0])
r = heed.rotary(q, [[0, 1, 2, 3]], interleaved=True, scaling={"rope_type": "linear", "factor": 2.0}, inverse=True)
table = heed.sinusoidal(4, 8, interleaved=False) + float(r[0, 0, 0, 0])
bias = heed.t5_bias(q[0, 0], 4, 4, bidirectional=False, align="top_left")
dtable: tuple[int, ...] = heed.t5_bias_backward(bias, 4, 4, buckets=32, bidirectional=False).shape
heed.rotary(q, np.arange(4))  # wrong: call-arg
heed.set_num_threads(None)
heed.set_checks(True)
threads = heed.get_num_threads() + 1
version = heed.__version__.upper()
advice = heed.advise(q, q, q, length=128, error=0.1, purpose="decode", tensors={"beta": q}, dtypes=["f32"])
best: heed.Candidate = advice[0]
took: float = best.seconds + advice.length
heed.advise((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)).left_out.items()
heed.advise(q, q, q, purpose="inference")  # wrong: arg-type
try:
    heed.attention(q, q, q, windw=(3, 0))  # wrong: call-overload
except heed.InvalidArgument as error:
    print(error.args)
heed.attention("text", q, q)  # wrong: call-overload
cache = heed.KVCache(1, 2, 8, capacity=None, page=None, dtype="bf16", quantize="int8")
cache.append(q, q, [4])
cache.append(q, q, lengths=np.array([4]))
tokens: list[int] = cache.fork().lengths.tolist() + [cache.nbytes]
o = cache.attend(q, window=(3, 0), tree=[-1, 0], threads=1)
p, lse = heed.KVCache.share(cache, 4).attend(q, return_lse=True, scale=0.1)
cache.attend(q, key_lengths=[4])  # wrong: call-overload
latent = heed.LatentKVCache(1, 6, 2)
latent.append(q, [4])
o = latent.attend(q, scale=0.3, softcap=2.0)
latent.attend(q)  # wrong: call-overload
ring = heed.RingKVCache(1, 2, 8, window=4, sink_tokens=1, rotary={"interleaved": True, "base": 5e5}, positions="cache")
heed.KVCache(1, 2, 8, rotary={"base": 5e5})  # wrong: arg-type
heed.RingKVCache(1, 2, 8)  # wrong: call-arg
heed.KVCache(1, 2, 8, dtype="float32")  # wrong: arg-type
ring.save("path")
loaded = heed.load_cache("path", max_bytes=2**30)
pages: int | None = loaded.page if isinstance(loaded, heed.KVCache) else None
page: str = heed.view(q, q, tokens=["a", "b", "c", "d"], causal=True, window=(3, 0)).html
heed.view(q, q, token=["a", "b", "c", "d"])  # wrong: call-arg
shown: heed.View = heed.view(q, q)
shown.height = 500
shown.save("page.html")
heed.attentoin  # wrong: attr-defined
"""


def test_a_strictly_typed_consumer(tmp_path):
    pytest.importorskip("mypy", reason="optional: the type checker")
    check_types(CONSUMER, tmp_path)


def test_the_package_is_marked_as_typed():
    assert (FOLDER / "py.typed").exists()


def test_import_is_light():
    code = "import sys, heed; print([m for m in ('numpy', 'torch', 'jax', 'ml_dtypes', 'typing') if m in sys.modules])"
    code = f"import sys; sys.path[:0] = [{str(FOLDER.parent)!r}]; {code}"
    result = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("order", [("heed", "numpy"), ("numpy", "heed")])
def test_imports_in_any_order(order):
    code = (f"import {order[0]}, {order[1]}; x = numpy.ones((1, 3, 2, 4), numpy.float32)\n"
            "assert (heed.attention(x, x, x) == 1).all() and (numpy.sort(x.ravel()[::-1]) == 1).all()")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=FOLDER.parent)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads ELF")
def test_the_module_exports_nothing_but_its_entry():
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is not there")
    result = subprocess.run([nm, "--dynamic", "--defined-only", "--format=posix", _core.__file__],
                            check=True, capture_output=True, text=True)
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["PyInit__core"]


@pytest.mark.parametrize("place", ["default", f"{os.name}_user"])
def test_the_program_is_found_where_pip_puts_it(tmp_path, monkeypatch, capsys, place):
    """It is beside the interpreter's programs, or in the user's own folder (pip install --user), and nowhere else."""
    started = []
    monkeypatch.setattr(sysconfig, "get_path", lambda _, scheme="default": str(tmp_path / scheme))
    monkeypatch.setattr(os, "execv", lambda program, arguments: started.append((program, arguments[1:])))
    monkeypatch.setattr(subprocess, "call", lambda arguments: started.append((arguments[0], arguments[1:])) or 0)
    monkeypatch.setattr(sys, "argv", ["heed", "info"])
    name = "heed.exe" if os.name == "nt" else "heed"
    for other in ("posix_home", place):
        assert heed.__main__.main() == 1 and not started
        assert str(tmp_path / place / name) in capsys.readouterr().err
        (tmp_path / other).mkdir()
        (tmp_path / other / name).touch()
    assert heed.__main__.main() == 0 and started[0] == (str(tmp_path / place / name), ["info"])


def test_alibi_slopes():
    np.testing.assert_array_equal(heed.alibi_slopes(8), 2.0 ** -np.arange(1, 9))
    slopes = heed.alibi_slopes(12)
    assert slopes.dtype == np.float32 and slopes.shape == (12,) and slopes.flags.owndata
    np.testing.assert_allclose(slopes, [*2.0 ** -np.arange(1, 9), *2.0 ** -np.arange(0.5, 4.5)], rtol=1e-7)
    np.testing.assert_array_equal(heed.alibi_slopes(1), [2.0**-8])


def test_settings_answer():
    assert heed.set_checks(True) is None and heed.set_strict(False) is None
    assert heed.set_num_threads(2) is None and heed.get_num_threads() == 2


SECOND_INTERPRETER = """
try:
    import _interpreters
    other = _interpreters.create("legacy")
except ImportError:
    import _xxsubinterpreters as _interpreters
    other = _interpreters.create()
import heed

cache = heed.KVCache(1, 1, 8)
try:
    print(_interpreters.run_string(other, "import heed"))
except Exception as error:
    print(error)
assert cache.batch == 1  # the first goes on
"""


def test_a_second_interpreter_is_refused():
    result = subprocess.run([sys.executable, "-c", SECOND_INTERPRETER], capture_output=True, text=True, check=False)
    if "No module named" in result.stderr:
        pytest.skip("this Python shows no other interpreters")
    assert (result.returncode, result.stderr) == (0, "")
    assert "expected one interpreter per process" in result.stdout
