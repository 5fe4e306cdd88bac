# Rows of selectors in `heed compare`, against attention with heed.select's choice for the same tensors.
import numpy as np
import pytest
from cli_program import SHIPPED, attention, document, load, needs_program, qkv, save

pytestmark = needs_program


def test_compare_rows_of_selectors_are_attention_with_what_they_choose(tmp_path):
    select = pytest.importorskip("heed").select
    file = save(tmp_path / "x.safetensors", qkv(T=300))
    rows = document("compare", file, "--causal", "-m", "attention", "--dtype", "f64")["rows"]
    given, _ = load(file)
    q, k, v = (given[name].astype(np.float64) for name in "qkv")
    expected = attention(q, k, v, causal=True)
    patterns = [select.top_blocks(q, k, count=2, block=16, score=score) for score in ("mean", "box")] + [
        select.cumulative(q, k, mass=0.9, block=16),
        select.vertical_slash(q, k, verticals=9, slashes=18, sinks=9, local=18)]
    chosen = [row for row in rows if row["selector"]]
    assert [row["selector"][:10] for row in chosen] == ["top_blocks", "top_blocks", "cumulative", "vertical_s"]
    for row, pattern in zip(chosen, patterns, strict=True):
        assert row["options"]["causal"] and row["visited_pairs"] <= rows[0]["visited_pairs"]
        kept = pattern.mask(300, 300, heads=4, key_heads=2)
        sparse = attention(q, k, v, causal=True, pattern=lambda i, j, kept=kept: kept)
        assert row["max_error"] == pytest.approx(abs(sparse - expected).max(), rel=1e-9)


def test_compare_has_selectors_where_nothing_is_typed():
    rows = document("compare", SHIPPED, "--layer", "layers.3", "-m", "attention", "--dtype", "f32")["rows"]
    chosen = {row["selector"]: row for row in rows if row["selector"]}
    assert list(chosen) == ["top_blocks(2, 16, mean)", "top_blocks(2, 16, box)", "cumulative(0.9, 16)"]
    assert all(row["options"].keys() <= {"scale"} and row["max_error"] > 1e-4 for row in chosen.values())
    assert not any(row["selector"] for row in document("compare", SHIPPED, "-m", "attention", "--window", "9,9",
                                                       "--dtype", "f32")["rows"])
