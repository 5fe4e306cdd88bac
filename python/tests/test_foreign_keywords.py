# Keywords of other libraries: the TypeError names heed's keyword.
import importlib

import numpy as np
import pytest

import heed

WORDS = {
    "is_causal": "causal", "attn_mask": "mask", "window_size": "window", "softmax_scale": "scale",
    "dropout_p": "dropout", "enable_gqa": "nothing", "alibi_slopes": "alibi", "key_padding_mask": "key_lengths",
}
GATED_WORDS = {
    "g": "log_decay", "gk": "log_decay", "output_final_state": "return_state", "return_final_states": "return_state",
    "initial_states": "initial_state", "chunk_size": "nothing",
}
X = np.ones((1, 3, 1, 4), "f4")


def doors():
    yield heed, X
    torch = pytest.importorskip("torch")
    yield importlib.import_module("heed.torch"), torch.from_numpy(X)


@pytest.mark.parametrize("word", WORDS)
def test_attention(word):
    for door, x in doors():
        with pytest.raises(TypeError, match=rf"^attention\(\) got an unexpected keyword argument '{word}': "
                           f"here that is {WORDS[word]}"):
            door.attention(x, x, x, **{word: True})


@pytest.mark.parametrize("word", GATED_WORDS)
def test_recurrences(word):
    for door, x in doors():
        with pytest.raises(TypeError, match=rf"^gla\(\) got an unexpected keyword argument '{word}': "
                           f"here that is {GATED_WORDS[word]}"):
            door.gla(x, x, x, -x, **{word: True})


def test_words_that_a_function_has_no_other_for():
    for door, x in doors():
        with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'$"):
            door.attention(x, x, x, nonsense=1)
        with pytest.raises(TypeError, match="unexpected keyword argument 'attn_mask'$"):
            door.gla(x, x, x, -x, attn_mask=1)
