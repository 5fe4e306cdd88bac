# heed.torch.nn: the encoders' sparse attention beside Transformers' modules; the package; what operators run.
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel  # noqa: E402
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention  # noqa: E402

import heed  # noqa: E402
import heed.torch.nn as layers  # noqa: E402

from torch_nn_checks import check_same, loaded, randomise, relative, rows  # noqa: E402

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 99}


def longformer():
    config = transformers.LongformerConfig(**SIZES, attention_window=[8, 4], attention_probs_dropout_prob=0.0)
    original = randomise(LongformerSelfAttention(config, 1))
    return loaded(layers.LongformerAttention.from_config(config, 1), original), original


def run_longformer(original, x, global_tokens, lengths):
    masked = torch.arange(x.shape[1]) >= lengths[:, None]
    mask = torch.zeros(x.shape[:2]).masked_fill(masked, -10000.0).masked_fill(global_tokens & ~masked, 10000.0)
    return original(x, mask, masked, global_tokens, bool(global_tokens.any()))[0]


@pytest.mark.parametrize("marked", ["none", "some", "unequal"])
def test_longformer_as_transformers_have_it(marked):
    layer, original = longformer()
    global_tokens = torch.zeros(2, 24, dtype=torch.bool)
    if marked != "none":
        global_tokens[:, [0, 9]] = True
    if marked == "unequal":
        global_tokens[1, 9] = False
    whole = torch.tensor([24, 24])
    if marked == "none":  # weights of global tokens have no gradient
        for name in ("query_global", "key_global", "value_global"):
            assert torch.equal(layer.get_submodule(name).weight, original.get_submodule(name).weight)
        assert relative(layer(rows(2, 24, 32)), run_longformer(original, rows(2, 24, 32), global_tokens, whole)) <= 1e-5
    else:
        check_same(lambda x: layer(x, global_tokens=global_tokens),
                   lambda x: run_longformer(original, x, global_tokens, whole), original, rows(2, 24, 32), module=layer)
    lengths = torch.tensor([24, 13])
    expected = run_longformer(original, rows(2, 24, 32), global_tokens, lengths)
    y = layer(rows(2, 24, 32), global_tokens=global_tokens, lengths=lengths)
    assert relative(y, expected) <= 1e-5 and not y[1, 13:].any()
    # Layers with random="paper" take any length.
    assert relative(layer(rows(2, 24, 32)[:, :23]), layer(rows(2, 24, 32), lengths=[23, 23])[:, :23]) <= 1e-6


def bigbird():
    config = transformers.BigBirdConfig(**SIZES, block_size=4, num_random_blocks=2, use_bias=False,
                                        max_position_embeddings=64)
    original = randomise(BigBirdBlockSparseAttention(config, 3))
    return loaded(layers.BigBirdAttention.from_config(config, 3), original), original


def run_bigbird(original, x, lengths):
    present = (torch.arange(x.shape[1]) < lengths[:, None]).float()
    blocked, band, of_rows, of_keys = BigBirdModel.create_masks_for_block_sparse_attn(present, 4)
    return original(x, band, of_rows, of_keys, blocked, blocked)[0]


def test_bigbird_as_transformers_evaluate_it():
    layer, original = bigbird()
    assert (layer.seed, layer.block, layer.num_random) == (3, 4, 2) and layer.query.bias is None
    whole = torch.tensor([32, 32])
    check_same(layer, lambda x: run_bigbird(original, x, whole), original, rows(2, 32, 32))
    lengths = torch.tensor([32, 21])
    y = layer(rows(2, 32, 32), lengths=lengths)
    assert relative(y, run_bigbird(original, rows(2, 32, 32), lengths)) <= 1e-5 and not y[1, 21:].any()


def test_bigbird_as_the_paper_has_it():
    layer, _ = bigbird()
    layer.random = "paper"
    x = rows(2, 45, 32)
    q, k, v = (project(x).unflatten(-1, (4, 8)) for project in (layer.query, layer.key, layer.value))
    pattern = heed.patterns.bigbird(4, 2, 3)
    assert torch.equal(layer(x), heed.torch.attention(q, k, v, pattern=pattern).flatten(2))
    layer.train()
    layer(x).sum().backward()
    assert layer.query.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("call, message", [
    (lambda: layers.LongformerAttention(32, 5, 4),
     "LongformerAttention: hidden_size is 32, expected a multiple of num_heads, 5"),
    (lambda: layers.LongformerAttention(32, 4, 0), "LongformerAttention: window is 0, expected an int of at least 1"),
    (lambda: longformer()[0](rows(2, 8, 32), global_tokens=torch.zeros(2, 7, dtype=torch.bool)),
     r"LongformerAttention: global_tokens is torch.bool \[2, 7\], expected bool \[2, 8\]"),
    (lambda: longformer()[0].new_state(2), "LongformerAttention.new_state: the layer looks ahead"),
    (lambda: longformer()[0].step(rows(2, 32), 1),
     "LongformerAttention: state is of type int, expected None: the layer looks ahead"),
    (lambda: layers.BigBirdAttention(32, 4, random="none"),
     "BigBirdAttention: random is 'none', expected one of 'original', 'paper'"),
    (lambda: bigbird()[0](rows(2, 30, 32)),
     "BigBirdAttention: x has 30 tokens, expected a multiple of block, 4, of at least 12"),
    (lambda: bigbird()[0](rows(2, 8, 32)), "BigBirdAttention: x has 8 tokens, expected"),
])
def test_errors_name_the_argument(call, message):
    with pytest.raises(heed.InvalidArgument, match="^" + message):
        call()


def test_transformers_is_not_needed():
    code = ("import sys; sys.modules['transformers'] = None; import heed.torch.nn as layers; import torch\n"
            "layers.Mamba(8)(torch.zeros(1, 2, 8)); layers.BigBirdAttention(8, 2, block=2)(torch.zeros(1, 6, 8))")
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layer", [
    layers.MultiheadAttention(16, 2, causal=True), layers.GroupedQueryAttention(16, 2, 1, qk_norm=True),
    layers.LatentAttention(16, 2, kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
    layers.Mamba(16), layers.Mamba2(16, 4, 8, state_size=8),
    layers.GatedDeltaNet(16, 2, 2, key_head_dim=4, value_head_dim=4), layers.Rwkv4(16),
    layers.MultiScaleRetention(16, 2), layers.H3(16), layers.GatedLinearAttention(16, 2, "kda"),
], ids=lambda layer: type(layer).__name__)
def test_layers_compile_without_a_break_of_the_graph(layer):
    torch._dynamo.reset()
    compiled, x = torch.compile(layer, backend="aot_eager", fullgraph=True), rows(2, 7, 16)
    y, expected = compiled(x), layer(x)
    assert torch.equal(y, expected)
    ours, theirs = (torch.autograd.grad(z.square().sum(), list(layer.parameters())) for z in (y, expected))
    assert all(relative(a, b) <= 1e-5 for a, b in zip(ours, theirs) if b.abs().max() > 1e-4)
    torch._dynamo.reset()


def test_every_layer_says_its_equation_shapes_source_and_state():
    for name in layers.__all__:
        thing = getattr(layers, name)
        assert thing.__module__ == "heed.torch.nn" and thing.__doc__
        if name not in ("State", "Residual"):
            assert "y = " in thing.__doc__ or "y_i = " in thing.__doc__, name
            assert "[B, T, hidden_size]" in thing.__doc__ and "arXiv:" in thing.__doc__, name
            assert ("State: " in thing.__doc__) == (thing.new_state is not layers.Residual.__mro__[1].new_state), name
