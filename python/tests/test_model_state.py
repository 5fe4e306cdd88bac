# Tests of a model's state: kept in a file between runs of `heed generate`, and read by rotary scalings.
"""Against uncut runs, and against Transformers, whose caches keep rotated keys."""

import json
import shutil

import numpy as np
import pytest
from cli_program import document, heed, load, needs_program, refused, save
from test_model_transformers import DECODER, MODELS, PROMPT, error, folder  # noqa: F401
from test_model_transformers import save as save_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = needs_program

KINDS = ["llama", "mistral", "gpt2", "mamba2", "rwkv"]
BOTH = ["--prompt-ids", "5,17,3,98;41,8"]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("draws", [[], ["--temperature", 2, "--seed", 7]])
def test_runs_with_a_cache_make_the_tokens_of_one(folder, tmp_path, name, draws):  # noqa: F811
    whole = document("generate", folder(name), *BOTH, "--tokens", 12, *draws)["tokens"]
    cache, made = tmp_path / "state.safetensors", [[], []]
    for run, tokens in enumerate((5, 1, 6)):
        done = document("generate", folder(name), *(BOTH if run == 0 else []), "--tokens", tokens, "--cache", cache,
                        *draws)
        for row, more in zip(made, done["tokens"]):
            row += more
        assert done["cache"]["path"] == str(cache) and done["cache"]["resumed"] == (run > 0)
        # The last token of each sequence is still to be seen.
        assert done["cache"]["lengths"] == [len(made[0]) + 4 - 1, len(made[1]) + 2 - 1]
    assert made == whole
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


def test_prompts_go_behind_what_has_been_seen(folder, tmp_path):  # noqa: F811
    cache = tmp_path / "state.safetensors"
    model = transformers.Qwen3ForCausalLM.from_pretrained(folder("qwen3"), attn_implementation="eager").eval()
    sequences = [PROMPT[:4], PROMPT[6:8]]

    def go_on(prompts, tokens):
        ids = ["--prompt-ids", ";".join(",".join(map(str, prompt)) for prompt in prompts)]
        done = document("generate", folder("qwen3"), *ids, "--tokens", tokens, "--cache", cache)
        assert done["prompts"] == prompts
        for sequence, prompt, made in zip(sequences, prompts, done["tokens"]):
            sequence += prompt
            for token in made:
                with torch.no_grad():
                    last = model(torch.tensor([sequence])).logits[0, -1].numpy()
                assert last[token] > last.max() - 1e-4 * np.abs(last).max()
                sequence.append(token)

    prompts, sequences = sequences, [[], []]
    go_on(prompts, 3)
    go_on([[9, 9, 1], []], 2)  # one sequence has nothing new
    go_on([[4], [77]], 0)  # a prompt that is seen, and nothing behind it
    go_on([[5], [6]], 4)
    _, metadata = load(cache)
    assert metadata["heed_state"] == "qwen3" and metadata["batch"] == "2" and metadata["version"] == "1"


def test_what_a_cache_does_not_fit_is_one_line_and_leaves_it_as_it_was(folder, tmp_path):  # noqa: F811
    cache = tmp_path / "state.safetensors"
    document("generate", folder("llama"), *BOTH, "--tokens", 2, "--cache", cache)
    before = cache.read_bytes()

    def refuse(status, model, *args):
        line = refused(status, "generate", folder(model), *args)
        assert cache.read_bytes() == before
        return line

    with_cache = ["--cache", cache]
    assert "metadata 'heed_state' is 'llama', expected gpt2: the state is of another model" in refuse(
        1, "gpt2", *BOTH, *with_cache)
    assert "metadata 'model' is '" in refuse(1, "llama_scaled", *BOTH, *with_cache)  # the models have equal sizes
    assert f"{cache}: has 2 sequences, expected 1, one for each prompt" in refuse(
        1, "llama", "--prompt-ids", "1", *with_cache)
    assert "ids has an element 99, expected 0 to 98" in refuse(1, "llama", "--prompt-ids", "1;99", *with_cache)
    assert "both --logits and --cache, expected one of them" in refuse(2, "llama", *BOTH, *with_cache, "--logits",
                                                                       tmp_path / "l.npy")
    assert "--prompt-ids is '1,,2;3'" in refuse(2, "llama", "--prompt-ids", "1,,2;3", *with_cache)
    absent = tmp_path / "absent.safetensors"
    assert (f"--prompt-ids is missing, expected token ids: there is no file {absent} to "
            "continue from" in refuse(2, "llama", "--cache", absent))
    assert "--prompt-ids is '1;', expected token ids" in refuse(2, "llama", "--prompt-ids", "1;", "--cache", absent)
    assert "no/such/folder" in refuse(1, "llama", *BOTH, "--cache", tmp_path / "no/such/folder")
    assert not absent.exists()
    # A prompt has been seen to its end and no token waits: there is nothing to go on from.
    document("generate", folder("llama"), *BOTH, "--tokens", 0, "--cache", absent)
    assert "prompts has an empty one, expected at least one token in each" in refused(
        1, "generate", folder("llama"), "--cache", absent)


def test_hostile_caches(folder, tmp_path):  # noqa: F811
    cache = tmp_path / "state.safetensors"
    document("generate", folder("mamba"), *BOTH, "--tokens", 2, "--cache", cache)
    good, metadata = load(cache)

    def refuse(change, **facts):
        tensors = {name: ("I64" if x.dtype == np.int64 else "F32", x) for name, x in {**good, **change}.items()}
        save(cache, tensors, metadata | facts)
        line = refused(1, "generate", folder("mamba"), *BOTH, "--cache", cache)
        assert line.startswith(f"heed: {cache}: "), line
        return line

    assert "tensor 'lengths' has shape [2], expected [1000000000000]" in refuse({}, batch=str(10**12))
    assert "expected a number" in refuse({}, batch="2 ")
    assert "tensor 'layers.1.scan' has shape" in refuse({"layers.1.scan": np.zeros((2, 3, 4), np.float32)})
    assert "tensor 'pending' has an element 99, expected -1 to 98" in refuse({"pending": np.array([1, 99])})
    assert "tensor 'lengths' has an element -1, expected 0 to" in refuse({"lengths": np.array([-1, 5])})
    cache.write_bytes(cache.read_bytes()[:-5])
    assert str(cache) in refused(1, "generate", folder("mamba"), *BOTH, "--cache", cache)
    save(cache, {"k": ("F32", np.zeros(3))})
    assert "metadata has no 'heed_state'" in refused(1, "generate", folder("mamba"), *BOTH, "--cache", cache)


def test_text_output_has_the_tokens_alone(folder, tmp_path):  # noqa: F811
    done = heed("generate", folder("llama"), "--prompt-ids", "1,2,3", "--tokens", 4, "--cache", tmp_path / "c")
    assert done.returncode == 0 and done.stderr == "" and done.stdout.count("\n") == 1 and done.stdout.count(",") == 3


ORIGINAL = 16  # tokens of the lengths that scalings begin at
SCALED = {
    "dynamic": {"max_position_embeddings": ORIGINAL,
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    "longrope": {"max_position_embeddings": 4 * ORIGINAL,
                 "rope_parameters": {"rope_type": "longrope",
                                     "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL,
                                     "short_factor": [1.0, 1.2, 1.4, 2.0], "long_factor": [1.5, 2.0, 3.0, 4.0]}},
    "longrope_factor": {"max_position_embeddings": 4 * ORIGINAL,
                        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4,
                                            "original_max_position_embeddings": ORIGINAL, "factor": 8.0,
                                            "attention_factor": 1.25, "short_factor": [1.0] * 4,
                                            "long_factor": [1.0, 2.0, 3.0, 4.0]}},
}


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    made = {}

    def make(kind):
        if kind not in made:
            path = tmp_path_factory.mktemp(kind)
            MODELS[f"llama_{kind}"] = ("LlamaForCausalLM", {**DECODER, **SCALED[kind]})
            save_model(f"llama_{kind}", path)
            del MODELS[f"llama_{kind}"]
            made[kind] = path
        return made[kind]

    return make


def opened(path):
    """A new model: Transformers remembers the longest sequence that a dynamic model has seen."""
    return transformers.LlamaForCausalLM.from_pretrained(path, attn_implementation="eager").eval()


@pytest.mark.parametrize("kind", SCALED)
def test_whole_sequences_are_turned_by_their_length(scaled, tmp_path, kind):
    ids = [(7 * i + 3) % 99 for i in range(3 * ORIGINAL)]
    lengths = [ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 3 * ORIGINAL]
    out = tmp_path / "logits.npy"
    rows = ";".join(",".join(map(str, ids[:length])) for length in lengths)
    # The rows are one batch: none depends on another's length.
    document("generate", scaled(kind), "--prompt-ids", rows, "--tokens", 0, "--logits", out)
    for row, length in zip(np.load(out), lengths):
        with torch.no_grad():
            expected = opened(scaled(kind))(torch.tensor([ids[:length]])).logits[0].numpy()
        assert error(row[:length], expected) < 1e-4, length


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("length", [ORIGINAL - 5, ORIGINAL + 3])
def test_steps_across_the_original_length_are_those_of_transformers_with_its_cache(scaled, tmp_path, kind, length):
    ids = [(5 * i + 1) % 99 for i in range(length)]
    model, cache, tokens = opened(scaled(kind)), None, []
    with torch.no_grad():
        step = torch.tensor([ids])
        for _ in range(12):
            done = model(step, past_key_values=cache, use_cache=True)
            cache = done.past_key_values
            two = done.logits[0, -1].topk(2)
            assert two.values[0] - two.values[1] > 1e-3  # no near tie that rounding could turn
            tokens.append(int(two.indices[0]))
            step = torch.tensor([tokens[-1:]])
    prompt = ["--prompt-ids", ",".join(map(str, ids))]
    assert document("generate", scaled(kind), *prompt, "--tokens", 12)["tokens"] == [tokens]
    # Generation continues from a saved state.
    state = tmp_path / "state.safetensors"
    first = document("generate", scaled(kind), *prompt, "--tokens", 4, "--cache", state)["tokens"][0]
    assert first + document("generate", scaled(kind), "--tokens", 8, "--cache", state)["tokens"][0] == tokens


def test_an_original_length_beside_the_scaling_counts(scaled, tmp_path):
    shutil.copytree(scaled("longrope"), tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    config["original_max_position_embeddings"] = ORIGINAL // 2  # as Phi-3 has it, before what the scaling says
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    out = tmp_path / "logits.npy"
    document("generate", tmp_path / "m", "--prompt-ids", ",".join(map(str, ids)), "--tokens", 0, "--logits", out)
    with torch.no_grad():
        expected = opened(tmp_path / "m")(torch.tensor([ids])).logits[0].numpy()
        other = opened(scaled("longrope"))(torch.tensor([ids])).logits[0].numpy()
    assert error(np.load(out)[0], expected) < 1e-4 and error(other, expected) > 1e-3


@pytest.mark.parametrize("change, expected", [
    ({"long_factor": None}, "scaling.long_factor has 0 numbers, expected 4"),
    ({"short_factor": [1.0] * 3}, "scaling.short_factor has 3 numbers"),
    ({"short_factor": [1.0, 1.0, 1.0, 0.0]}, "scaling.short_factor contains 0"),
    ({"long_factor": "x"}, "'long_factor' is"),
    ({"original_max_position_embeddings": 0}, "'original_max_position_embeddings' is '0', expected a number"),
    ({"original_max_position_embeddings": 1}, "is 1, expected a number above 1"),
    ({"rope_type": "dynamic"}, "scaling."),
])
def test_wrong_scalings(scaled, tmp_path, change, expected):
    shutil.copytree(scaled("longrope"), tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    config["rope_parameters"] |= change
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    line = refused(1, "generate", tmp_path / "m", "--prompt-ids", "1")
    assert line.startswith(f"heed: {tmp_path / 'm'}") and expected in line, line
