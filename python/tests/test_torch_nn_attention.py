# heed.torch.nn: attention layers beside Transformers' modules: weights by name, outputs, gradients, token by token.
import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.models.bart.modeling_bart import BartAttention  # noqa: E402
from transformers.models.bert.modeling_bert import BertAttention  # noqa: E402
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2  # noqa: E402
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3  # noqa: E402
from transformers.models.llama import modeling_llama as llama  # noqa: E402
from transformers.models.mistral import modeling_mistral as mistral  # noqa: E402
from transformers.models.qwen2 import modeling_qwen2 as qwen2  # noqa: E402
from transformers.models.qwen3 import modeling_qwen3 as qwen3  # noqa: E402

import heed  # noqa: E402
import heed.torch.nn as layers  # noqa: E402

from torch_nn_checks import (  # noqa: E402
    check_decodes, check_padding, check_same, check_steps, loaded, randomise, relative, rows,
)

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
         "num_hidden_layers": 2, "vocab_size": 99, "max_position_embeddings": 64, "attn_implementation": "eager"}
LATENT = {**SIZES, "num_key_value_heads": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
          "v_head_dim": 6}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
        "mscale": 0.8, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
LAYERS = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}

# {name: (module of Transformers, its attention, its rotary encoding, class of configuration, configuration, layer)}
DECODERS = {
    "llama": (llama, "LlamaAttention", "LlamaRotaryEmbedding", transformers.LlamaConfig, SIZES, 0),
    "llama biased": (llama, "LlamaAttention", "LlamaRotaryEmbedding", transformers.LlamaConfig,
                     {**SIZES, "attention_bias": True}, 0),
    "llama 3": (llama, "LlamaAttention", "LlamaRotaryEmbedding", transformers.LlamaConfig,
                {**SIZES, "rope_parameters": LLAMA3, "head_dim": 12}, 0),
    "mistral": (mistral, "MistralAttention", "MistralRotaryEmbedding", transformers.MistralConfig,
                {**SIZES, "sliding_window": 5}, 0),
    "qwen2": (qwen2, "Qwen2Attention", "Qwen2RotaryEmbedding", transformers.Qwen2Config,
              {**SIZES, **LAYERS, "use_sliding_window": True}, 0),
    "qwen2 windowed": (qwen2, "Qwen2Attention", "Qwen2RotaryEmbedding", transformers.Qwen2Config,
                       {**SIZES, **LAYERS, "use_sliding_window": True}, 1),
    "qwen3": (qwen3, "Qwen3Attention", "Qwen3RotaryEmbedding", transformers.Qwen3Config, {**SIZES, "head_dim": 8}, 0),
    "deepseek 2": (deepseek_v2, "DeepseekV2Attention", "DeepseekV2RotaryEmbedding", transformers.DeepseekV2Config,
                   LATENT, 0),
    "deepseek 2 without ranks": (deepseek_v2,
                                 "DeepseekV2Attention", "DeepseekV2RotaryEmbedding", transformers.DeepseekV2Config,
                                 {**LATENT, "q_lora_rank": None, "attention_bias": True}, 0),
    "deepseek 3": (deepseek_v3, "DeepseekV3Attention", "DeepseekV3RotaryEmbedding", transformers.DeepseekV3Config,
                   {**LATENT, "q_lora_rank": 12}, 0),
    "deepseek 3 with YaRN": (deepseek_v3, "DeepseekV3Attention",
                             "DeepseekV3RotaryEmbedding", transformers.DeepseekV3Config,
                             {**LATENT, "q_lora_rank": None, "rope_interleave": False, "rope_parameters": YARN}, 0),
}


def decoder(name):
    """(the layer, Transformers' module as a function of x, that module)."""
    module, attention, rotary, config_class, sizes, index = DECODERS[name]
    config = config_class(**sizes)
    original = randomise(getattr(module, attention)(config, index))
    turn = getattr(module, rotary)(config)
    if "deepseek" in name:
        layer = loaded(layers.LatentAttention.from_config(config), original)
    else:
        layer = loaded(layers.GroupedQueryAttention.from_config(config, index), original)
    window = 4 if name in ("mistral", "qwen2 windowed") else 10**6

    def function(x):
        at = torch.arange(x.shape[1])
        keep = (at <= at[:, None]) & (at >= at[:, None] - window)
        mask = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)[None, None]
        return original(hidden_states=x, position_embeddings=turn(x, at[None]), attention_mask=mask)[0]

    return layer, function, original


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_as_transformers_have_them(name):
    layer, function, original = decoder(name)
    check_same(layer, function, original, rows(2, 23, 32))
    check_steps(layer, rows(2, 23, 32))


def test_the_first_half_of_a_decoder_layer():
    config = transformers.LlamaConfig(**SIZES)
    original = randomise(llama.LlamaDecoderLayer(config, 0))
    layer = layers.Residual(layers.GroupedQueryAttention.from_config(config), eps=config.rms_norm_eps)
    weights = {key: x for key, x in original.state_dict().items() if key.startswith(("self_attn.", "input_layernorm."))}
    layer.load_state_dict(weights)
    x = rows(2, 9, 32)
    at = torch.arange(9)[None]
    mask = torch.full((9, 9), torch.finfo(torch.float32).min).triu(1)[None, None]
    turned = llama.LlamaRotaryEmbedding(config)(x, at)
    expected = x + original.self_attn(original.input_layernorm(x), position_embeddings=turned, attention_mask=mask)[0]
    assert relative(layer(x), expected) <= 1e-5
    check_steps(layer, x)
    post = layers.Residual(layers.Rwkv4(32), order="post", norm="layer", names=("mix", "after"))
    assert torch.equal(post(x), post.after(x + post.mix(x)))


def test_options_of_attention_reach_it():
    layer = randomise(layers.GroupedQueryAttention(32, 4, 2, softcap=2.0, rotary_dim=4, scale=0.3, window=6))
    x, segments = rows(2, 12, 32), (torch.arange(12) // 5).expand(2, -1).int()
    y = layer(x, segments=segments, sinks=torch.ones(4), positions=torch.arange(12) % 5)
    q, k, v = (project(x).unflatten(-1, (-1, 8)) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = (heed.torch.rotary(z, torch.arange(12) % 5, dim=4, interleaved=False) for z in (q, k))
    o = heed.torch.attention(q, k, v, causal=True, window=(5, 0), softcap=2.0, scale=0.3, segments=segments,
                             sinks=torch.ones(4))
    assert torch.equal(y, layer.o_proj(o.flatten(2)))
    check_steps(layer, x, sinks=torch.ones(4))
    state = layer.new_state(2, capacity=12, page=None, quantize="int8")
    with torch.no_grad():
        assert relative(layer(x, state), layer(x)) < 0.05 and state.quantize == "int8"


@pytest.mark.parametrize("causal", [False, True])
def test_multihead_attention_as_in_bart(causal):
    config = transformers.BartConfig(d_model=32, encoder_attention_heads=4, decoder_attention_heads=4,
                                     attn_implementation="eager")
    original = randomise(BartAttention(32, 4, is_causal=causal, config=config, layer_idx=0))
    layer = loaded(layers.MultiheadAttention.from_config(config, causal=causal), original)
    mask = torch.full((11, 11), torch.finfo(torch.float32).min).triu(1)[None, None] if causal else None
    check_same(layer, lambda x: original(x, attention_mask=mask)[0], original, rows(2, 11, 32))
    if causal:
        check_steps(layer, rows(2, 11, 32))


def test_multihead_attention_as_in_bert():
    config = transformers.BertConfig(**{name: x for name, x in SIZES.items() if name != "num_key_value_heads"})
    original = randomise(BertAttention(config)).eval()
    layer = loaded(layers.MultiheadAttention.from_config(config), original).eval()
    x = rows(2, 11, 32)
    check_same(layer, lambda x: original(x)[0], original, x)
    hidden = torch.zeros(2, 1, 1, 11)
    hidden[1, ..., 6:] = torch.finfo(torch.float32).min
    expected = original(x, attention_mask=hidden)[0]
    y = layer(x, lengths=[11, 6])
    assert relative(y[0], expected[0]) <= 1e-5 and relative(y[1, :6], expected[1, :6]) <= 1e-5
    assert relative(layer(x, mask=hidden == 0), expected) <= 1e-5
    layer.train()
    torch.manual_seed(1)
    first = layer(x)
    torch.manual_seed(1)
    assert torch.equal(layer(x), first) and relative(first, expected) > 1e-2  # dropout


def test_cross_attention():
    config = transformers.BartConfig(d_model=32, encoder_attention_heads=4, decoder_attention_heads=4,
                                     attn_implementation="eager")
    original = randomise(BartAttention(32, 4, config=config, layer_idx=0))
    layer = loaded(layers.MultiheadAttention.from_config(config, memory_size=32), original)
    x, memory = rows(2, 11, 32), rows(2, 7, 32)
    check_same(lambda x: layer(x, memory=memory), lambda x: original(x, key_value_states=memory)[0], original, x,
               module=layer)
    wide = randomise(layers.MultiheadAttention(32, 4, memory_size=20, key_bias=False))
    memory = rows(2, 7, 20)
    assert wide.k_proj.bias is None and wide.k_proj.weight.shape == (32, 20)
    state, n = wide.new_state(2), torch.tensor([7, 3])
    check_padding(lambda m, lengths: wide(x[:, :7], memory=m, memory_lengths=lengths), memory, wide.parameters())
    with torch.no_grad():
        expected = wide(x, memory=memory, memory_lengths=n)
        assert relative(expected[1:], wide(x[1:], memory=memory[1:, :3])) <= 1e-6
        first = wide(x[:, :1], state, memory=memory, memory_lengths=n)
        later = torch.stack([wide.step(x[:, t], state) for t in range(1, 11)], 1)
    assert relative(torch.cat([first, later], 1), expected) <= 1e-6
    assert relative(layers.MultiheadAttention.new_state(wide, 2).k, torch.empty(2, 0, 4, 8)) == 0


@pytest.mark.parametrize("names", ["bart", "bert"])
def test_norms_around_multihead_attention(names):
    for norm in (None, "post", "pre"):
        layer = randomise(layers.MultiheadAttention(32, 4, norm=norm, names=names, causal=True))
        inner = randomise(layers.MultiheadAttention(32, 4, causal=True))
        of = {"self.query": "q_proj", "self.key": "k_proj", "self.value": "v_proj", "output.dense": "out_proj"}
        renamed = {of.get(key.rpartition(".")[0], key.rpartition(".")[0]) + "." + key.rpartition(".")[2]: x
                   for key, x in layer.state_dict().items() if "orm" not in key}
        inner.load_state_dict(renamed)
        x = rows(2, 9, 32)
        after = {"bart": "layer_norm", "bert": "output.LayerNorm"}[names]
        expected = {None: lambda: inner(x), "post": lambda: layer.get_submodule(after)(x + inner(x)),
                    "pre": lambda: x + inner(layer.get_submodule(after)(x))}[norm]()
        assert torch.equal(layer(x), expected)
        check_steps(layer, x)


def test_copies_dtypes_and_autocast():
    for layer in (layers.GroupedQueryAttention(32, 4, 2, dtype=torch.bfloat16),
                  layers.MultiheadAttention(32, 4, causal=True, dtype=torch.bfloat16),
                  layers.LatentAttention(32, 2, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
                                         dtype=torch.bfloat16)):
        x = rows(2, 9, 32).bfloat16()
        wide = copy.deepcopy(layer).float()
        assert relative(layer(x).float(), wide(x.float())) < 0.05
        state = layer.new_state(2)
        assert state.dtype is torch.bfloat16
        with torch.no_grad():
            assert relative(layer(x, state).float(), wide(x.float())) < 0.05
            assert relative(layer.step(x[:, 0], state.fork()).float(),
                            wide.step(x[:, 0].float(), _fed(wide, x.float()))) < 0.05
        for given in (x, x.float()):
            whole = wide(x.float())
            with torch.autocast("cpu", torch.bfloat16):
                assert wide(given).dtype == torch.bfloat16
                check_decodes(wide, given, whole)
        check_steps(copy.deepcopy(layer).double(), x.double(), tolerance=1e-12)


def _fed(layer, x):
    state = layer.new_state(len(x))
    with torch.no_grad():
        layer(x, state)
    return state


@torch.no_grad()
def _given_positions(layer, x):
    return layer(x, layer.new_state(2), positions=torch.arange(5))


SMALL = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}


@pytest.mark.parametrize("call, message", [
    (lambda: layers.GroupedQueryAttention(0, 4),
     "GroupedQueryAttention: hidden_size is 0, expected an int of at least 1"),
    (lambda: layers.GroupedQueryAttention(32, 4, 3),
     "GroupedQueryAttention: num_heads is 4, expected a multiple of num_kv_heads, 3"),
    (lambda: layers.GroupedQueryAttention(30, 4),
     "GroupedQueryAttention: hidden_size is 30, expected a multiple of num_heads, 4"),
    (lambda: layers.GroupedQueryAttention(32, 4, window=0), "GroupedQueryAttention: window is 0, expected"),
    (lambda: layers.GroupedQueryAttention.from_config(object()),
     "GroupedQueryAttention.from_config: config is a object without hidden_size"),
    (lambda: layers.LatentAttention(32, 4, **{**SMALL, "v_head_dim": "6"}),
     "LatentAttention: v_head_dim is '6', expected an int"),
    (lambda: layers.LatentAttention(32, 4, **SMALL)(torch.zeros(2, 3, 31)),
     r"LatentAttention: x has shape \[2, 3, 31\], expected \[B, T, 32\]"),
    (lambda: layers.MultiheadAttention(32, 5),
     "MultiheadAttention: hidden_size is 32, expected a multiple of num_heads, 5"),
    (lambda: layers.MultiheadAttention(32, 4, norm="both"),
     "MultiheadAttention: norm is 'both', expected one of None, 'post', 'pre'"),
    (lambda: layers.MultiheadAttention(32, 4, names="gpt2"),
     "MultiheadAttention: names is 'gpt2', expected one of 'bart', 'bert'"),
    (lambda: layers.MultiheadAttention(32, 4, memory_size=8, causal=True),
     "MultiheadAttention: causal is True with a memory_size"),
    (lambda: layers.MultiheadAttention(32, 4).new_state(2), "MultiheadAttention.new_state: the layer looks ahead"),
    (lambda: layers.MultiheadAttention(32, 4)(rows(1, 2, 32), memory=rows(1, 2, 32)),
     "MultiheadAttention: memory is given, expected none"),
    (lambda: layers.MultiheadAttention(32, 4, memory_size=8)(rows(1, 2, 32)),
     r"MultiheadAttention: memory is None, expected \[B, S, 8\]"),
    (lambda: layers.MultiheadAttention(32, 4, memory_size=8)(rows(1, 2, 32), memory=rows(1, 2, 9)),
     r"MultiheadAttention: memory has shape \[1, 2, 9\]"),
    (lambda: layers.Residual(torch.nn.Linear(2, 2)),
     "Residual: layer is of type Linear, expected a layer of heed.torch.nn"),
    (lambda: layers.Residual(layers.Rwkv4(8), order="around"),
     "Residual: order is 'around', expected one of 'pre', 'post'"),
    (lambda: layers.Residual(layers.Rwkv4(8), names=("a", "a")), "Residual: names is"),
])
def test_errors_name_the_argument(call, message):
    with pytest.raises(heed.InvalidArgument, match="^" + message):
        call()


def test_errors_of_calls():
    layer, x = layers.GroupedQueryAttention(32, 4, 2), rows(2, 5, 32)
    state = layer.new_state(2)
    for call, message in (
            (lambda: layer(x.numpy()), "GroupedQueryAttention: x is of type ndarray, expected a tensor"),
            (lambda: layer(x[0]), r"GroupedQueryAttention: x has shape \[5, 32\], expected \[B, T, 32\]"),
            (lambda: layer(x, lengths=[6, 1]),
             r"GroupedQueryAttention: lengths is \[6, 1\], expected \[2\] ints from 0 to 5"),
            (lambda: layer(x, lengths=[1.5, 1]), "GroupedQueryAttention: lengths is"),
            (lambda: layer(x, state),
             r"GroupedQueryAttention: state is given where gradients are on, expected torch.no_grad\(\)"),
            (lambda: layer(x[:1], state), "GroupedQueryAttention: state is of 2 sequences, expected 1 as x"),
            (lambda: _given_positions(layer, x),
             "GroupedQueryAttention: positions is given beside a state, expected none"),
            (lambda: _given_positions(layers.LatentAttention(32, 4, **SMALL), x),
             "LatentAttention: positions is given beside a state"),
            (lambda: layer(x, 3), "GroupedQueryAttention: state is of type int, expected a KVCache of new_state"),
            (lambda: layer.step(x, state), r"GroupedQueryAttention.step: x has shape \[2, 5, 32\], expected \[B, 32\]"),
            (lambda: layer.step(x[:, 0], None),
             "GroupedQueryAttention.step: state is None, expected what new_state gives")):
        with pytest.raises(heed.InvalidArgument, match="^" + message):
            call()
    assert state.lengths.tolist() == [0, 0]
    with pytest.raises(TypeError, match="windw"):
        layer(x, windw=3)
