# ONNX's LinearAttention: every node test of the installed package, through the adapter in this file.
import numpy as np
import pytest

import heed

onnx = pytest.importorskip("onnx", "1.23")

import onnx.backend.test.case.node as node_tests  # noqa: E402
# The import adds the node tests of LinearAttention to the list.
import onnx.backend.test.case.node.linear_attention  # noqa: E402, F401, F811

# Test cases whose graph is one node; the others are its expansions into smaller nodes.
CASES = [case for case in node_tests._NodeTestCases
         if [n.op_type for n in case.model.graph.node] == ["LinearAttention"]]


def attributes_of(node):
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def rule_of(node):
    return attributes_of(node).get("update_rule", b"gated_delta").decode()


def linear_attention(node, query, key, value, past_state=None, decay=None, beta=None):
    """Heads are packed into the last axis, and query heads may share a state: each has its own here."""
    attributes, rule = attributes_of(node), rule_of(node)
    queries, keys, scale = attributes["q_num_heads"], attributes["kv_num_heads"], attributes.get("scale", 0)
    group = queries // keys

    def heads(x, count):
        return np.repeat(x.reshape(*x.shape[:2], count, -1), queries // count, axis=2)

    q, k, v = heads(query, queries), heads(key, keys), heads(value, keys)
    options = {"return_state": True, "scale": scale or q.shape[-1] ** -0.5}
    if past_state is not None:
        options["initial_state"] = np.repeat(past_state.astype(np.float32), group, axis=1)
    gates = [] if decay is None else [heads(decay, keys)]
    scalar = decay is not None and decay.shape[-1] == keys
    gates = [g[..., 0] for g in gates] if scalar else gates
    if beta is not None:
        gates.append(heads(beta, beta.shape[-1])[..., 0])
    functions = {"linear": heed.linear_attention, "gated": heed.simple_gla if scalar else heed.gla,
                 "delta": heed.delta_rule, "gated_delta": heed.gated_delta_rule if scalar else heed.kda}
    if rule == "linear":
        options |= {"feature_map": "identity", "normalize": False}
    o, state = functions[rule](q, k, v, *gates, **options)
    dtype = query.dtype if past_state is None else past_state.dtype
    return o.reshape(*query.shape[:2], -1), state[:, ::group].astype(dtype)


def test_there_are_node_tests_of_every_rule():
    assert {rule_of(case.model.graph.node[0]) for case in CASES} == {"linear", "gated", "delta", "gated_delta"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_node(case):
    node = case.model.graph.node[0]
    for inputs, outputs in case.data_sets:
        given = dict(zip((name for name in node.input if name), inputs, strict=True))
        arguments = [given.get(name) for name in node.input]
        assert all(isinstance(x, np.ndarray) for x in given.values())
        for got, expected in zip(linear_attention(node, *arguments), outputs, strict=True):
            assert got.dtype == expected.dtype and got.shape == expected.shape
            rounding = 2e-3 if expected.dtype == np.float16 else 2e-6
            np.testing.assert_allclose(got, expected, rtol=rounding, atol=rounding)
