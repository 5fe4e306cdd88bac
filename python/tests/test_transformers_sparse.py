# heed.transformers.accelerate on Longformer, LED, BigBird and BigBird-Pegasus: outputs and gradients of the originals.
import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from recurrent_models import attributes, copies  # noqa: E402

import heed  # noqa: E402
from heed.transformers import _sparse, accelerate  # noqa: E402

transformers.logging.set_verbosity_error()
SIZES = dict(vocab_size=60, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
             hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2)
ENCODER_DECODER = dict(vocab_size=60, d_model=32, encoder_layers=2, decoder_layers=1, encoder_attention_heads=4,
                       decoder_attention_heads=4, encoder_ffn_dim=40, decoder_ffn_dim=40, dropout=0.0,
                       attention_dropout=0.0, activation_dropout=0.0)
T, BLOCK = 4 * 13 - 3, 4  # no multiple of a block or a window


def model_of(name, **options):
    """A model with random weights large enough for softmax to choose."""
    if name.startswith("Longformer"):
        sizes = {**SIZES, "attention_window": [4, 8], "max_position_embeddings": 80}
    elif name.startswith("LED"):
        sizes = {**ENCODER_DECODER, "attention_window": [4, 8], "max_encoder_position_embeddings": 80}
    elif name.startswith("BigBirdPegasus"):
        sizes = {**ENCODER_DECODER, "block_size": BLOCK, "num_random_blocks": 2, "max_position_embeddings": 80}
    else:
        sizes = {**SIZES, "block_size": BLOCK, "num_random_blocks": 2, "max_position_embeddings": 80}
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**{**sizes, **options})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query" in name or "key" in name:
                parameter.mul_(30)
    return model


def inputs(model, padding="none", seed=1, tokens=T):
    """Two rows, of which the second is padded; Longformer has global tokens, not the same in each."""
    x = torch.randint(5, 60, (2, tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(x)
    left, right = {"none": (0, tokens), "right": (0, tokens - 10), "left": (7, tokens), "holes": (0, tokens)}[padding]
    mask[1, :left] = mask[1, right:] = 0
    if padding == "holes":
        mask[:, 20:23] = 0
    given = {"input_ids": x.where(mask == 1, 0), "attention_mask": mask}
    if model.config.model_type in ("longformer", "led"):
        marks = torch.zeros_like(x)
        marks[0, [0, 30]] = marks[1, [8, 31, 32]] = 1
        given["global_attention_mask"] = marks
    return given


def results(model, given):
    """The last hidden states of an encoder where no token is padding, and the gradient of every parameter."""
    model.zero_grad()
    encoder = model.get_encoder() if model.config.is_encoder_decoder else model
    o = encoder(**given)[0]
    valid = o[given["attention_mask"] == 1]
    weights = torch.randn(valid.shape, generator=torch.Generator().manual_seed(3)).to(valid.dtype)
    (valid * weights).sum().backward()
    return valid.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(before, after, tolerance=1e-5):
    torch.testing.assert_close(before[0], after[0], atol=tolerance * float(before[0].abs().max()), rtol=0)
    assert before[1].keys() == after[1].keys()
    largest = max(float(x.abs().max()) for x in before[1].values())
    for name, gradient in before[1].items():
        torch.testing.assert_close(gradient, after[1][name], atol=10 * tolerance * largest, rtol=0,
                                   msg=lambda m: f"{name}: {m}")


MODELS = ["LongformerModel", "LongformerForMaskedLM", "LEDModel", "BigBirdModel", "BigBirdForMaskedLM",
          "BigBirdPegasusModel"]
LAYER = {"longformer": "LongformerSelfAttention", "led": "LEDEncoderSelfAttention",
         "big_bird": "BigBirdBlockSparseAttention", "bigbird_pegasus": "BigBirdPegasusBlockSparseAttention"}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("padding", ["none", "right", "left", "holes"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_the_original(name, padding, training):
    model = model_of(name).train(training)
    given = inputs(model, padding)
    before = results(model, given)
    with accelerate(model, strict=True) as report:
        assert ({(entry.call, entry.by) for entry in report.replaced} == {("forward", "attention")}
                and len(report.replaced) == 2)
        after = results(model, given)
        assert report.declined == report.left == []
    assert_same(before, after)
    assert not torch.equal(before[0], after[0])  # it was heed
    again = results(model, given)
    assert torch.equal(again[0], before[0])  # undone: to the bit
    assert all("forward" not in layer.__dict__ for layer in model.modules())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["LongformerModel", "BigBirdModel"])
def test_other_dtypes(name, dtype):
    model = model_of(name)
    given = inputs(model, "right")
    # Longformer's own gradients in float64 are NaN.
    before = results(model if dtype == torch.float64 else model.to(dtype), given)
    accelerate(model.to(dtype))
    after = results(model, given)
    assert after[0].dtype == dtype
    assert_same(before, (after[0].to(before[0].dtype), {name: x.to(before[0].dtype) for name, x in after[1].items()}),
                1e-5 if dtype == torch.float64 else 0.05)


@pytest.mark.parametrize("padding", ["left", "holes"])
@pytest.mark.parametrize("name", ["LongformerModel", "LEDModel", "BigBirdModel", "BigBirdPegasusModel"])
@torch.no_grad()
def test_padding_may_be_nan(name, padding):
    model = model_of(name)
    given = inputs(model, padding)
    encoder = model.get_encoder() if model.config.is_encoder_decoder else model
    accelerate(model)
    expected = encoder(**given)[0]
    model.get_input_embeddings().weight[0] = torch.nan  # the row of the padding token
    valid, rows = given["attention_mask"] == 1, []
    for layer in encoder.modules():
        if type(layer).__name__ in LAYER.values():
            layer.register_forward_hook(lambda layer, x, y: rows.append(y[0]))
    assert torch.equal(encoder(**given)[0][valid], expected[valid])
    assert len(rows) == 2 and not any(x[:, : valid.shape[1]][~valid].any() for x in rows)


def test_longformer_without_global_tokens_and_with_the_same_in_each_row():
    model = model_of("LongformerModel")
    given = inputs(model, "right")
    for marks in (None, [0, 1, 2], [0]):
        given["global_attention_mask"] = None
        if marks is not None:
            given["global_attention_mask"] = torch.zeros_like(given["input_ids"])
            given["global_attention_mask"][:, marks] = 1
        before = results(model, given)
        with accelerate(model):
            assert_same(before, results(model, given))


def test_padded_rows_of_longformer_are_the_zeros_of_the_original():
    layer = model_of("LongformerModel").encoder.layer[0].attention.self
    x = torch.randn(2, 12, 32)
    mask = torch.zeros(2, 12)
    mask[0, 9:], mask[1, 4], mask[1, 0] = -10000.0, -10000.0, 10000.0
    call = dict(attention_mask=mask, is_index_masked=mask < 0, is_index_global_attn=mask > 0, is_global_attn=True)
    before = layer(x, **call)
    accelerate(layer)
    after = layer(x, **call)
    assert len(after) == 1 and not after[0][0, 9:].any() and not after[0][1, 4].any()
    torch.testing.assert_close(before[0], after[0], atol=1e-5, rtol=0)


def test_dropout_follows_the_generator_of_pytorch():
    model = model_of("LongformerModel", attention_probs_dropout_prob=0.5).train()
    given = inputs(model)
    accelerate(model)
    torch.manual_seed(5)
    first, other = model(**given)[0], model(**given)[0]
    torch.manual_seed(5)
    assert torch.equal(model(**given)[0], first) and not torch.equal(first, other)
    model.eval()
    assert torch.equal(model(**given)[0], model(**given)[0])


@pytest.mark.parametrize("name", ["LongformerModel", "BigBirdModel"])
def test_weights_are_left_to_the_original_and_the_report_says_so(name):
    model = model_of(name)
    given = inputs(model)
    before = model(**given, output_attentions=True)
    report = accelerate(model)
    after = model(**given, output_attentions=True)
    assert (all(torch.equal(a, b) for a, b in zip(before.attentions, after.attentions, strict=True))
            and before.attentions)
    assert torch.equal(before[0], after[0])
    reason = "output_attentions was asked for, expected False: heed never has the weights"
    assert {entry.reason for entry in report.declined} == {reason}
    assert "ran as before: output_attentions was asked for" in str(report)


def test_the_report_says_which_random_blocks_there_are():
    text = str(accelerate(model_of("BigBirdModel")))
    assert "attention.self: forward -> attention (random blocks as Transformers has them: drawn in training, in" in text
    text = str(accelerate(model_of("BigBirdModel"), bigbird="paper"))
    assert "attention (random blocks are drawn from the layer's seed, in evaluation too" in text
    assert "forward -> attention\n" in str(accelerate(model_of("LongformerModel"))) + "\n"
    with pytest.raises(heed.InvalidArgument, match="accelerate: bigbird is 'google', expected 'original' or 'paper'"):
        accelerate(model_of("BigBirdModel"), bigbird="google")


# 1024 is a length with a plan of its own, whose blocks come twice; 960 is not.
@pytest.mark.parametrize("tokens", [1024, 960])
def test_random_blocks_are_those_that_the_original_draws(tokens):
    sizes = dict(block_size=64, num_random_blocks=3, max_position_embeddings=1024, num_hidden_layers=1)
    model = model_of("BigBirdModel", **sizes).train()
    given = inputs(model, "right", tokens=tokens)
    np.random.seed(7)
    before = results(model, given)
    accelerate(model)
    np.random.seed(7)
    assert_same(before, results(model, given))
    # The caller's random state does not change.
    assert np.random.randint(1 << 30) == np.random.RandomState(7).randint(1 << 30)
    parts = _sparse._bigbird_parts(model.encoder.layer[0].attention.self, tokens)
    assert len(parts) == (2 if tokens == 1024 else 1)
    assert sum(part.density(tokens, tokens, heads=4) for part, _ in parts) < 0.7


def test_the_papers_blocks_are_the_same_in_training_and_evaluation():
    model = model_of("BigBirdModel", num_hidden_layers=1)
    given = inputs(model, "right")
    original = model(**given)[0]
    accelerate(model, bigbird="paper")
    layer = model.encoder.layer[0].attention.self
    seen = {}
    layer.register_forward_hook(lambda module, args, output: seen.update(x=args[0], o=output[0]))
    o = model(**given)[0]
    assert torch.equal(o, model.train()(**given)[0]) and not torch.allclose(o, original, atol=1e-3)
    x = seen["x"]
    tokens = x.shape[1]  # a multiple of the block
    q, k, v = (f(x).unflatten(-1, (4, 8)).transpose(1, 2) for f in (layer.query, layer.key, layer.value))
    keep = torch.from_numpy(heed.patterns.bigbird(BLOCK, 2, seed=layer.seed).mask(tokens, tokens, heads=4, batch=2))
    padded = torch.nn.functional.pad(given["attention_mask"], (0, tokens - T)) == 1
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep & padded[:, None, None])
    expected = expected.transpose(1, 2).flatten(2) * padded[..., None]
    torch.testing.assert_close(seen["o"], expected, atol=1e-5, rtol=0)


def test_a_sequence_of_padding_alone_has_no_nans():
    model = model_of("BigBirdModel")
    given = inputs(model)
    given["attention_mask"][1] = 0
    accelerate(model)
    o = model(**given)[0]
    o[0].square().sum().backward()
    assert o.isfinite().all() and all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["LongformerForMaskedLM", "BigBirdForMaskedLM"])
def test_weights_stay_and_copies_work(name, tmp_path):
    model = model_of(name)
    given = inputs(model, "right")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    report = accelerate(model)
    logits = model(**given).logits
    model.save_pretrained(tmp_path)
    assert state.keys() == model.state_dict().keys() and all(torch.equal(state[key], x)
                                                             for key, x in model.state_dict().items())
    torch.testing.assert_close(copy.deepcopy(model)(**given).logits, logits, atol=1e-4, rtol=0)
    loaded = type(model).from_pretrained(tmp_path)
    report.undo()
    assert torch.equal(loaded.eval()(**given).logits, model(**given).logits)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("bigbird", ["original", "paper"])
def test_copies_are_plain_and_can_be_accelerated(name, bigbird):
    model = model_of(name)
    plain = attributes(model)
    report = accelerate(model, bigbird=bigbird)
    for other in copies(model):
        assert attributes(other) == plain
        assert accelerate(other, strict=True, bigbird=bigbird).replaced == report.replaced
    report.undo()
    assert attributes(model) == plain


@pytest.mark.parametrize("bigbird", ["original", "paper"])
def test_compiled_models_compute_what_others_do(bigbird):
    model = model_of("BigBirdModel", num_hidden_layers=1)
    given = inputs(model)
    accelerate(model, bigbird=bigbird)
    before = model(**given)[0]
    torch.testing.assert_close(torch.compile(model, backend="eager")(**given)[0], before, atol=1e-5, rtol=0)
