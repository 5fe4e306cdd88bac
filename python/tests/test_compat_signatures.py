# heed.compat: the originals' signatures, arguments accepted without effect, refused arguments, and types.
import importlib
import inspect
import re

import pytest

torch = pytest.importorskip("torch")
from compat_signatures import SIGNATURES  # noqa: E402
from type_checker import check_types  # noqa: E402

import heed  # noqa: E402
from heed.compat import WITHOUT_EFFECT, causal_conv1d, fla, flash_attn, mamba_ssm  # noqa: E402

LACKING = {"causal_conv1d": {}, "fla": fla._LACKING | fla._LACKING_MODULES, "flash_attn": flash_attn._LACKING,
           "mamba_ssm": mamba_ssm._LACKING}
DOORS = {"causal_conv1d": causal_conv1d, "fla": fla, "flash_attn": flash_attn, "mamba_ssm": mamba_ssm}
# Keywords that originals read out of **kwargs, or that older versions had.
UNLISTED = {"A_log", "chunk_size", "dt_bias", "head_first", "transpose_state_layout", "use_gate_in_kernel"}
# The library has these as functions of any keywords that say that they are gone: here they are as they were.
GONE = {"fused_chunk_gla", "fused_chunk_delta_rule"}


def places_of(door, name):
    """The modules that have it, its own first, and what each calls it."""
    given = door.PLACES[name]
    for place in (given,) if isinstance(given, str) else given:
        module, _, own = place.partition(":")
        yield f"{module}.{own or name}"


OBJECTS = {f"{library}.{path}": getattr(door, name) for library, door in DOORS.items() for name in door.PLACES
           for path in places_of(door, name)}


def function_of(path):
    """A function or class, or a method of a class."""
    return OBJECTS[path] if path in OBJECTS else getattr(OBJECTS[path.rsplit(".", 1)[0]], path.rsplit(".", 1)[1])


def text_of(parameters):
    """The signature without annotations, as in the record."""
    return str(inspect.Signature([x.replace(annotation=x.empty) for x in parameters]))[1:-1]


@pytest.mark.parametrize("path", SIGNATURES)
def test_the_original_s_signature(path):
    recorded, parameters = SIGNATURES[path], list(inspect.signature(function_of(path)).parameters.values())
    parameters = [x for x in parameters if x.kind is not x.VAR_KEYWORD and x.name != "self"]
    if path.rsplit(".", 1)[1] in GONE:
        assert recorded == "**kwargs"
        return
    takes_more = recorded.endswith("**kwargs")
    recorded = recorded.removesuffix("**kwargs").rstrip(", ")
    own_keywords = "*" in recorded.split(", ")
    listed = [x for x in parameters if x.kind is not x.KEYWORD_ONLY or (own_keywords and x.name not in UNLISTED)]
    assert text_of(listed) == recorded
    more = {x.name for x in parameters if x not in listed}
    assert more <= UNLISTED and (takes_more or not more)


def test_the_record_is_of_all_functions_and_says_where_they_are():
    firsts = {f"{library}.{next(places_of(door, name))}" for library, door in DOORS.items()
              for name in door.PLACES if name not in LACKING[library]}
    assert firsts - {"fla.modules.activations.ACT2FN"} == {path for path in SIGNATURES if path in OBJECTS}
    for door in DOORS.values():
        assert set(door.__all__) == set(door.PLACES) and re.fullmatch(r"\d+\.\d+\.\d+", door.__version__)
        for name in door.__all__:
            if name != "ACT2FN":
                assert getattr(door, name).__name__ == name and inspect.getdoc(getattr(door, name))
                assert getattr(door, name).__module__ == door.__name__


def gla_inputs(dtype=torch.float32):
    q, k, v = (torch.randn(1, 5, 2, 4, dtype=dtype) for _ in range(3))
    return q, k, v, -torch.rand(1, 5, 2, 4)


def test_what_is_about_a_gpu_changes_nothing():
    q, k, v, g = gla_inputs()
    o, _ = fla.chunk_gla(q, k, v, g)
    assert torch.equal(fla.chunk_gla(q, k, v, g, cu_seqlens_cpu=torch.tensor([0, 5]))[0], o)
    of_heads = g[..., 0]
    beta = torch.rand(1, 5, 2)
    assert torch.equal(fla.chunk_kda(q, k, v, g, beta, safe_gate=True, disable_recompute=True, chunk_size=32,
                                     lower_bound=-5.0)[0],
                       fla.chunk_kda(q, k, v, g, beta)[0])
    assert torch.equal(fla.chunk_gated_delta_rule(q, k, v, of_heads, beta, chunk_indices=beta, chunk_size=16,
                                                  A_log=beta)[0],
                       fla.chunk_gated_delta_rule(q, k, v, of_heads, beta)[0])
    used = {key for path in SIGNATURES for key in inspect.signature(function_of(path)).parameters} & WITHOUT_EFFECT
    assert used == WITHOUT_EFFECT, "no function has the others"


@pytest.mark.parametrize("name, options, refused", [
    ("chunk_kda", {"cp_context": object()}, "cp_context is given as object, expected None"),
    ("chunk_kda", {"return_intermediate_states": True}, "return_intermediate_states is True, expected False"),
    ("chunk_gated_delta_rule", {"cp_context": object()}, "cp_context"),
    ("chunk_gated_delta_rule", {"head_first": True}, "head_first is True, expected False"),
    ("fused_recurrent_gated_delta_rule", {"gv": torch.zeros(1, 5, 2, 4)}, "gv is given as Tensor, expected None"),
    ("parallel_delta_rule", {"output_attentions": True}, "output_attentions is True, expected False"),
    ("parallel_retention", {"output_attentions": True}, "output_attentions"),
    ("chunk_retention", {"head_first": True}, "head_first"), ("parallel_based", {"head_first": True}, "head_first"),
    ("parallel_attn", {"head_first": True}, "head_first")])
def test_what_heed_cannot_do_is_refused_by_name(name, options, refused):
    q, k, v, g = gla_inputs()
    arguments = {"q": q, "k": k, "v": v, "g": g if "kda" in name else g[..., 0], "beta": torch.rand(1, 5, 2)}
    wanted = inspect.signature(getattr(fla, name)).parameters
    with pytest.raises(heed.Unsupported, match=f"^{name}: {refused}"):
        getattr(fla, name)(**{key: x for key, x in arguments.items() if key in wanted}, **options)


def test_parallel_nsa_refuses():
    q, k, v, _ = gla_inputs()
    gate, bounds = torch.rand(1, 5, 2), torch.tensor([0, 5])
    for options, message in (
            ({}, "g_cmp is None, expected a gate where no block_indices are given"),
            ({"g_cmp": gate, "block_counts": torch.ones(1, 5, 2)}, "block_counts is a Tensor, expected one int"),
            ({"g_cmp": gate, "cu_seqlens": (bounds, torch.tensor([0, 2, 5]))},
             "cu_seqlens differs for queries and keys")):
        with pytest.raises(heed.Unsupported, match=f"parallel_nsa: {message}"):
            fla.parallel_nsa(q, k, v, **options)
    with pytest.raises(heed.InvalidArgument,
                       match="parallel_nsa: g_swa is None, expected a gate where window_size is not 0"):
        fla.parallel_nsa(q, k, v, gate, window_size=3)
    with pytest.raises(heed.InvalidArgument, match="parallel_nsa: block_size is 0"):
        fla.parallel_nsa(q, k, v, gate, block_size=0)


@pytest.mark.parametrize("library, name",
                         [(library, name) for library, names in LACKING.items() for name in sorted(names)])
def test_mechanisms_that_heed_lacks(library, name):
    with pytest.raises(heed.Unsupported, match=f"{name}: (heed does not have this mechanism|its step is not)"):
        getattr(DOORS[library], name)(torch.zeros(1), scale=2)


def test_errors_have_the_words_of_the_function():
    q, k, v, g = gla_inputs()
    beta = torch.rand(1, 5, 2)
    for call, message in (
            (lambda: fla.chunk_gla(q, k, v, g[..., :3]), r"chunk_gla: g has shape \[1,5,2,3\], expected \[1,5,2,4\]"),
            (lambda: fla.chunk_gla(q, k.double(), v, g), "chunk_gla: k has dtype f64, expected f32"),
            (lambda: fla.chunk_gla("q", k, v, g), "chunk_gla: q is of type str, expected a tensor"),
            (lambda: fla.fused_recurrent_gla(q, k, v, gk=g, gv=g[:, :3]), "fused_recurrent_gla: gv has shape"),
            (lambda: fla.chunk_gla(q, k, v, g, initial_state=torch.zeros(1, 2, 3, 4)),
             "chunk_gla: initial_state has shape"),
            (lambda: fla.chunk_gla(q, k, v, g, cu_seqlens=[0, 9]), "chunk_gla: cu_seqlens"),
            (lambda: fla.chunk_rwkv6(q, k, v, g, torch.zeros(3, 4)), "chunk_rwkv6: u has shape"),
            (lambda: fla.chunk_rwkv7(q, g[:, :4], k, v, q, k), "chunk_rwkv7: w has shape"),
            (lambda: fla.chunk_gdn2(q, k, v, g, g[..., :2], v), "chunk_gdn2: b has shape"),
            (lambda: fla.chunk_gated_delta_product(q, k, v, None, beta, 2),
             r"chunk_gated_delta_product: k has shape \[1, 5, 2, 4\], expected 5 \* 2 rows"),
            (lambda: fla.chunk_simple_gla(q, k, v, g_gamma=torch.zeros(3)), "chunk_simple_gla: g_gamma has shape"),
            (lambda: fla.parallel_attn(q, k, v, g), "parallel_attn: g has shape"),
            (lambda: fla.parallel_attn(q, k, v, sink_bias=torch.zeros(3)), "parallel_attn: sink_bias has shape"),
            (lambda: fla.attn_decoding_one_step(q, k, v), "attn_decoding_one_step: cu_seqlens is None"),
            (lambda: flash_attn.flash_attn_func(q, k, v, dropout_p=1.5), "flash_attn_func: dropout_p is 1.5"),
            (lambda: flash_attn.flash_attn_func(q, k[:, :, :, :3], v), "flash_attn_func: k has shape"),
            (lambda: flash_attn.flash_attn_qkvpacked_func(q),
             r"flash_attn_qkvpacked_func: qkv has shape \[1, 5, 2, 4\], expected \[..., 3, H, D\]"),
            (lambda: mamba_ssm.selective_scan_fn(q[0], k[0], g[0, 0, :, :2], v[0], v[0], torch.zeros(3)),
             "selective_scan_fn: D has shape"),
            (lambda: causal_conv1d.causal_conv1d_fn(q[0], k[0, 0, :1]), "causal_conv1d_fn: weight has shape")):
        with pytest.raises(heed.InvalidArgument, match=message):
            call()


def test_calls_are_bound_as_python_binds_them():
    q, k, v, g = gla_inputs()
    for call, message in (
            (lambda: fla.chunk_gla(q, k, v), r"chunk_gla\(\) is missing the argument 'g'"),
            (lambda: fla.chunk_gla(q, k, v, g, g=g), r"chunk_gla\(\) got multiple values for argument 'g'"),
            (lambda: fla.chunk_gla(q, k, v, g, scael=1), r"chunk_gla\(\) got an unexpected keyword argument 'scael'"),
            (lambda: fla.chunk_retention(q, k, v, None, None, False, None, 64),
             r"chunk_retention\(\) takes 7 positional arguments but 8")):
        with pytest.raises(TypeError, match=message):
            call()
    with pytest.raises(AttributeError, match="heed.compat.fla has no 'chunk_nothing'"):
        fla.chunk_nothing  # noqa: B018
    o, state = fla.chunk_gla(q, k, v, g, 0.5, None, True)
    again = fla.chunk_gla(g=g, v=v, k=k, q=q, output_final_state=True, scale=0.5)
    assert torch.equal(o, again[0]) and torch.equal(state, again[1])


def test_compiled_without_a_break():
    q, k, v, g = gla_inputs()
    o, state = torch.compile(fla.chunk_gla, fullgraph=True, backend="eager")(q, k, v, g, output_final_state=True)
    expected = fla.chunk_gla(q, k, v, g, output_final_state=True)
    assert torch.equal(o, expected[0]) and torch.equal(state, expected[1])
    attend = torch.compile(flash_attn.flash_attn_func, fullgraph=True, backend="eager")
    assert torch.equal(attend(q, k, v, causal=True), flash_attn.flash_attn_func(q, k, v, causal=True))


CONSUMER = """
import heed.compat.install
from heed.compat.causal_conv1d import causal_conv1d_fn
from heed.compat.fla import chunk_gla
from heed.compat.flash_attn import flash_attn_func
from heed.compat.mamba_ssm import selective_scan_fn

libraries: tuple[str, ...] = heed.compat.install.LIBRARIES
gpu: frozenset[str] = heed.compat.WITHOUT_EFFECT
o, state = chunk_gla(1, 2, 3, 4)
print(causal_conv1d_fn, flash_attn_func, selective_scan_fn)
heed.compat.nothing  # wrong: attr-defined
"""


def test_a_strictly_typed_consumer(tmp_path):
    pytest.importorskip("mypy", reason="optional: the type checker")
    check_types(CONSUMER, tmp_path)


def test_every_door_is_a_module_of_the_package():
    for library in importlib.import_module("heed.compat.install").LIBRARIES:
        assert DOORS[library].__name__ == f"heed.compat.{library}"
