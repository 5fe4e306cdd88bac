# The attention function of heed.transformers: every argument against models with "eager" and "sdpa".
import inspect

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.masking_utils")

from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.models.gemma2 import modeling_gemma2  # noqa: E402
from transformers.models.gpt_oss import modeling_gpt_oss  # noqa: E402
from transformers.models.t5 import modeling_t5  # noqa: E402

import heed  # noqa: E402
from heed.transformers import _masks  # noqa: E402
from heed.transformers._attention import attention  # noqa: E402

B, HQ, HKV, TQ, TK, D = 2, 4, 2, 5, 7, 8
FLOAT_MIN = torch.finfo(torch.float32).min


class Module(torch.nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        self.num_key_value_groups = HQ // HKV
        for name, value in attributes.items():
            setattr(self, name, value)


def problem(rows=TQ, keys=TK, heads=HKV, dv=D, batch=B, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (batch, HQ, rows, D), (batch, heads, keys, D), (batch, heads, keys, dv)
    return tuple(torch.randn(shape, generator=g).requires_grad_() for shape in shapes)


def leaf(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).requires_grad_()


def gradients(o, *inputs):
    weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(9))
    return torch.autograd.grad((o * weights).sum(), inputs, retain_graph=True)


def assert_same(ours, expected, inputs, atol=2e-6):
    assert ours.shape == expected.shape
    torch.testing.assert_close(ours, expected, rtol=0, atol=atol)
    for mine, theirs in zip(gradients(ours, *inputs), gradients(expected, *inputs)):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=5 * atol)


BOOL = torch.rand(B, 1, TQ, TK, generator=torch.Generator().manual_seed(3)) < 0.6
BOOL[..., 0] = True
FLOAT = torch.randn(B, HQ, TQ, TK, generator=torch.Generator().manual_seed(4)).masked_fill(~BOOL, FLOAT_MIN)
MASKS = {"none": None, "bool": BOOL, "bool of heads": FLOAT > 0.5, "bool [Tq, Tk]": BOOL[0, 0],
         "bool [B, 1, 1, Tk]": BOOL[:, :, :1], "float": FLOAT, "float of one head": FLOAT[:, :1],
         "float [Tq, Tk]": FLOAT[0, 0]}
MASKS["bool of heads"][..., 1] = True


@pytest.mark.parametrize("bias", [False, True], ids=["", "position bias"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_are_those_of_sdpa(mask, bias):
    inputs = problem(dv=6)
    options = {"scaling": 0.4, "is_causal": False}
    if bias:
        options["position_bias"] = leaf(1, HQ, TQ, TK)
        inputs += (options["position_bias"],)
    ours, weights = attention(Module(), *inputs[:3], MASKS[mask], **options)
    expected, _ = sdpa_attention_forward(Module(), *inputs[:3], MASKS[mask], **options)
    assert weights is None and ours.is_contiguous()
    assert_same(ours, expected, inputs)


@pytest.mark.parametrize("bias", [False, True], ids=["", "position bias"])
@pytest.mark.parametrize("module", [{}, {"is_causal": True}, {"is_causal": False}], ids=["", "causal", "not causal"])
@pytest.mark.parametrize("argument", [None, True, False])
@pytest.mark.parametrize("rows", [1, TQ, TK])
def test_without_a_mask_causality_is_that_of_sdpa(rows, argument, module, bias):
    inputs = problem(rows)
    options = {"is_causal": argument}
    if bias:
        options["position_bias"] = leaf(1, HQ, rows, TK)
        inputs += (options["position_bias"],)
    ours, _ = attention(Module(**module), *inputs[:3], None, **options)
    expected, _ = sdpa_attention_forward(Module(**module), *inputs[:3], None, **options)
    assert_same(ours, expected, inputs)


def structured(rows=TQ, keys=TK, padding=None):
    return _masks.mask(B, rows, keys, keys - rows, attention_mask=padding)


def additive(mask):
    return torch.zeros(mask.shape).masked_fill(~(mask | False), FLOAT_MIN)


def test_structure_joins_a_position_bias_with_a_gradient():
    inputs = (*problem(heads=HQ), leaf(1, HQ, TQ, TK))
    padding = torch.ones(B, TK, dtype=torch.bool)
    padding[1, :2] = False
    ours, _ = attention(Module(), *inputs[:3], structured(padding=padding), scaling=1.0, position_bias=inputs[3])
    expected, _ = modeling_t5.eager_attention_forward(Module(), *inputs[:3], additive(structured(padding=padding)),
                                                      scaling=1.0, position_bias=inputs[3])
    assert_same(ours, expected, inputs)


def test_a_row_that_sees_no_key_is_zero():
    padding = torch.ones(B, TK, dtype=torch.bool)
    padding[1, :4] = False  # rows have positions 2 .. 6: the first two of sequence 1 see no key
    q, k, v = problem()
    ours, _ = attention(Module(), q, k, v, structured(padding=padding))
    assert not ours[1, :2].any() and ours[1, 2:].abs().min() > 0 and ours[0].abs().min() > 0
    assert not gradients(ours, q)[0][1, :, :2].any()


@pytest.mark.parametrize("output_attentions", [False, True])
def test_softcap_is_that_of_gemma2(output_attentions):
    inputs = problem()
    options = {"scaling": 0.9, "softcap": 0.7, "output_attentions": output_attentions}
    ours, weights = attention(Module(), *inputs, structured(), **options)
    expected, expected_weights = modeling_gemma2.eager_attention_forward(Module(), *inputs, additive(structured()),
                                                                         **options)
    assert_same(ours, expected, inputs)
    if output_attentions:
        assert_same(weights, expected_weights, inputs[:2])


@pytest.mark.parametrize("output_attentions", [False, True])
def test_sinks_are_those_of_gpt_oss(output_attentions):
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0], requires_grad=True)
    inputs = (*problem(), sinks)
    module = Module(sinks=sinks)
    ours, weights = attention(module, *inputs[:3], structured(), scaling=0.9, s_aux=sinks,
                              output_attentions=output_attentions)
    expected, expected_weights = modeling_gpt_oss.eager_attention_forward(module, *inputs[:3], additive(structured()),
                                                                          scaling=0.9)
    assert_same(ours, expected, inputs)
    if output_attentions:
        assert_same(weights, expected_weights, (*inputs[:2], sinks))


@pytest.mark.parametrize("output_attentions", [False, True])
def test_sinks_of_each_query(output_attentions):
    sinks = leaf(B, HQ, TQ, 1)
    inputs = (*problem(heads=HQ), sinks)
    ours, weights = attention(Module(), *inputs[:3], structured(), scaling=0.9, sinks=sinks,
                              output_attentions=output_attentions)
    logits = inputs[0] @ inputs[1].transpose(2, 3) * 0.9 + additive(structured())
    expected_weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
    assert_same(ours, (expected_weights @ inputs[2]).transpose(1, 2).contiguous(), inputs)
    if output_attentions:
        assert_same(weights, expected_weights, (*inputs[:2], sinks))


@pytest.mark.parametrize("mask", ["none", "structured", "holes", "bool"])
def test_indices_are_the_only_keys_that_are_seen(mask):
    holes = torch.ones(B, TK, dtype=torch.bool)
    holes[0, 3] = False
    masks = {"none": None, "structured": structured(), "holes": structured(padding=holes), "bool": BOOL}
    inputs = problem()
    indices = torch.stack([torch.randperm(TK, generator=torch.Generator().manual_seed(n))[:3] for n in range(B * TQ)])
    indices = indices.view(B, TQ, 3).to(torch.int32)
    indices[..., 0] = 0
    chosen = torch.zeros(B, 1, TQ, TK, dtype=torch.bool).scatter(-1, indices[:, None].long(), True)
    dense = chosen if mask == "none" else masks[mask] & chosen
    ours, _ = attention(Module(), *inputs, masks[mask], is_causal=False, indices=indices)
    expected, _ = sdpa_attention_forward(Module(), *inputs, dense)
    assert_same(ours, expected, inputs)


@pytest.mark.parametrize("output_attentions", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_padding_may_be_anything(value, output_attentions):
    inputs, padding = problem(), torch.ones(B, TK, dtype=torch.bool)
    padding[1, :2] = False
    options = {"attention_mask": structured(padding=padding), "output_attentions": output_attentions}
    expected, _ = attention(Module(), *inputs, **options)
    spoiled = [x.masked_fill(~padding[:, None, :, None], value) for x in inputs[1:]]
    assert_same(attention(Module(), inputs[0], *spoiled, **options)[0], expected, inputs)


def test_one_query_sequence_for_all_keys():
    q, k, v = problem()
    ours, _ = attention(Module(), q[:1], k, v, None, is_causal=False)
    expected, _ = attention(Module(), q[:1].expand(B, -1, -1, -1), k, v, None, is_causal=False)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    q, k, v = (x.detach().to(dtype) for x in problem())
    expected, _ = attention(Module(), *(x.float() for x in (q, k, v)), structured())
    for options in ({}, {"output_attentions": True}):
        ours, weights = attention(Module(), q, k, v, structured(), **options)
        assert ours.dtype is dtype and (weights is None or weights.dtype is dtype)
        torch.testing.assert_close(ours.float(), expected, rtol=0, atol={torch.float64: 2e-6}.get(dtype, 0.02))


@pytest.mark.parametrize("output_attentions", [False, True])
def test_dropout_follows_the_generator_and_keeps_the_mean(output_attentions):
    q, k, v = problem()
    module = Module().train()
    padding = torch.ones(B, TK, dtype=torch.bool)
    padding[1, :2] = False
    mask = structured(padding=padding)
    options = {"dropout": 0.4, "output_attentions": output_attentions}

    def run(seed):
        torch.manual_seed(seed)
        return attention(module, q, k, v, mask, **options)[0]

    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))
    assert all(torch.equal(a, b) for a, b in zip(gradients(run(1), q, k, v), gradients(run(1), q, k, v)))
    expected, _ = attention(module, q, k, v, mask)
    mean = torch.stack([run(seed).detach() for seed in range(300)]).mean(0)
    torch.testing.assert_close(mean, expected, rtol=0, atol=0.25)
    assert (mean - expected).abs().mean() < 0.05
    torch.testing.assert_close(attention(module.eval(), q, k, v, mask, **options)[0], expected, rtol=0, atol=2e-6)


@pytest.fixture(params=["eager", "compiled"])
def call(request):
    """heed's attention function as it is, and in a graph: what it refuses depends on neither."""
    torch._dynamo.reset()
    yield attention if request.param == "eager" else torch.compile(attention, backend="eager")
    torch._dynamo.reset()


def test_what_is_not_understood_is_refused(call):
    q, k, v = (x.detach() for x in problem())
    harmless = {"position_ids": torch.arange(TQ)[None], "use_cache": True, "cu_seq_lens_q": torch.tensor([0, TQ]),
                "max_length_q": TQ, "sliding_window": 3, "num_items_in_batch": 7, "block_indices": None, "cache": None}
    ours, _ = call(Module(), q, k, v, BOOL, **harmless)
    assert torch.equal(ours, attention(Module(), q, k, v, BOOL)[0])
    for name in ("block_indices", "cache"):
        with pytest.raises(heed.Unsupported, match=f"attention: {name} was given by Module, expected None"):
            call(Module(), q, k, v, BOOL, **{name: torch.zeros(1)})


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, own_option=None, **kwargs):
    """A call as in a modeling file: heed's attention looks here for options that a model of this module may pass."""


def test_an_option_of_the_model_s_own_eager_attention_is_refused(call):
    q, k, v = (x.detach() for x in problem())
    assert "own_option" in inspect.signature(eager_attention_forward).parameters
    call(Module(), q, k, v, BOOL, own_option=None, another=5)
    with pytest.raises(heed.Unsupported, match="own_option was given by Module"):
        call(Module(), q, k, v, BOOL, own_option=5)
