# The recurrences of heed.compat.fla against loops over tokens in float64: rows, states, gradients, packing, direction.
import inspect
import itertools

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

import heed  # noqa: E402
from heed.compat import fla  # noqa: E402

SIZES = {"B": 2, "T": 7, "H": 2, "K": 4, "V": 3, "D": 5, "N": 14}  # N: rows of two delta steps per token


# --- one token of each mechanism: state and inputs of a token to its row before scaling, and the state after it -------
# States are [B, H, K, V], the inputs of a token [B, H, ...].


def outer(k, v):
    return k.unsqueeze(-1) * v.unsqueeze(-2)


def read(S, q):
    return (S * q.unsqueeze(-1)).sum(-2)


def decayed(S, g):
    return S * g.exp().reshape(*g.shape, *[1] * (S.dim() - g.dim()))


def gated(S, q, k, v, g=None, g_gamma=None, gk=None, gv=None):
    for decay in (g, gk):
        S = S if decay is None else decayed(S, decay)
    S = S if g_gamma is None else S * g_gamma.exp().reshape(-1, 1, 1)
    S = (S if gv is None else S * gv.exp().unsqueeze(-2)) + outer(k, v)
    return read(S, q), S


def delta(S, q, k, v, beta=None, g=None, gk=None, p=None):
    for decay in (g, gk):
        S = S if decay is None else decayed(S, decay)
    u = v - read(S, k if p is None else p)
    S = S + outer(k, u if beta is None else beta.unsqueeze(-1) * u)
    return read(S, q), S


def erasing(S, q, k, v, g, b, w):
    S = decayed(S, g)
    S = S + outer(k, w * v - read(S, b * k))
    return read(S, q), S


def product(S, q, k, v, g, beta):
    S = S if g is None else decayed(S, g)
    for j in range(2):  # k [B, 2, H, K]
        S = S + outer(k[:, j], beta[:, j, :, None] * (v[:, j] - read(S, k[:, j])))
    return read(S, q), S


def bonus(S, r, k, v, w, u):
    return read(S + outer(u * k, v), r), decayed(S, w) + outer(k, v)


def low_rank(S, q, k, v, a, b, gk=None):
    S = (S if gk is None else decayed(S, gk)) + outer(b, read(S, a)) + outer(k, v)
    return read(S, q), S


def goose(S, r, w, k, v, a, b):
    return low_rank(S, r, k, v, a, b, w)


def goose_of_layer(S, r, w, k, v, kk, a):
    return low_rank(S, r, k, v, -kk, kk * a, w)


def elementwise(S, x, g):
    S = g.exp() * S + x
    return S, S


def retention(S, q, k, v):
    return gated(S, q, k, v, g_gamma=torch.tensor([1 - 2.0**-5, 1 - 2.0**-6], dtype=torch.float64).log())


def ladder(S, q, k, v, layer_idx, num_layers):
    return gated(S, q, k, v, g_gamma=-(8 / 2) * (1 - layer_idx / num_layers) * torch.arange(2.0).double())


QKV = "q:BTHK k:BTHK v:BTHV"
DPLR = f"{QKV} a:BTHK b:BTHK"
GOOSE = "r:BTHK w:BTHK k:BTHK v:BTHV"
# {function: (inputs, one token, constants)}; log decays and rates are made such by their names.
CASES = {
    "chunk_gla": (f"{QKV} g:BTHK", gated), "fused_chunk_gla": (f"{QKV} g:BTHK", gated),
    "fused_recurrent_gla": (f"{QKV} gk:BTHK", gated),
    "fused_recurrent_gla, both sides": (f"{QKV} gk:BTHK gv:BTHV", gated),
    "fused_recurrent_gla, values alone": (f"{QKV} gv:BTHV", gated), "fused_recurrent_gla, ungated": (QKV, gated),
    "chunk_simple_gla": (f"{QKV} g:BTH", gated), "chunk_simple_gla, of heads": (f"{QKV} g_gamma:H", gated),
    "chunk_simple_gla, both": (f"{QKV} g:BTH g_gamma:H", gated), "chunk_simple_gla, none": (QKV, gated),
    "fused_chunk_simple_gla": (f"{QKV} g:BTH", gated), "fused_recurrent_simple_gla": (f"{QKV} g:BTH", gated),
    "parallel_simple_gla": (f"{QKV} g:BTH", gated),
    "chunk_retention": (QKV, retention), "fused_chunk_retention": (QKV, retention),
    "fused_recurrent_retention": (QKV, retention), "parallel_retention": (QKV, retention),
    "chunk_lightning_attn": (QKV, ladder, {"layer_idx": 1, "num_layers": 3}),
    "fused_recurrent_lightning_attn": (QKV, ladder, {"layer_idx": 2, "num_layers": 3}),
    "chunk_linear_attn": (QKV, gated, {"normalize": False}),
    "fused_chunk_linear_attn": (QKV, gated, {"normalize": False}), "fused_recurrent_linear_attn": (QKV, gated),
    "chunk_delta_rule": (f"{QKV} beta:BTH", delta), "fused_chunk_delta_rule": (f"{QKV} beta:BTH", delta),
    "fused_recurrent_delta_rule": (f"{QKV} beta:BTH", delta), "fused_recurrent_delta_rule, whole": (QKV, delta),
    "parallel_delta_rule": (f"{QKV} beta:BTH", delta), "chunk_gated_delta_rule": (f"{QKV} g:BTH beta:BTH", delta),
    "chunk_gdn": (f"{QKV} g:BTH beta:BTH", delta), "fused_recurrent_gated_delta_rule": (f"{QKV} g:BTH beta:BTH", delta),
    "fused_recurrent_gated_delta_rule, of channels": (f"{QKV} gk:BTHK beta:BTH", delta),
    "fused_recurrent_gated_delta_rule, both": (f"{QKV} g:BTH gk:BTHK beta:BTH", delta),
    "fused_recurrent_gated_delta_rule, ungated": (QKV, delta), "fused_recurrent_gdn": (f"{QKV} g:BTH beta:BTH", delta),
    "chunk_kda": (f"{QKV} g:BTHK beta:BTH", delta), "fused_recurrent_kda": (f"{QKV} g:BTHK beta:BTH", delta),
    "chunk_gdn2": (f"{QKV} g:BTHK b:BTHK w:BTHV", erasing),
    "fused_recurrent_gdn2": (f"{QKV} g:BTHK b:BTHK w:BTHV", erasing),
    "chunk_comba": (f"{QKV} p:BTHK g:BTH beta:BTH", delta),
    "fused_recurrent_comba": (f"{QKV} p:BTHK g:BTH beta:BTH", delta),
    "chunk_comba, p is k": (f"{QKV} g:BTH", delta, {"p": None}),
    "chunk_gated_delta_product": ("q:BTHK k:BNHK v:BNHV g:BTH beta:BNH", product, {"num_householder": 2}),
    "chunk_gated_delta_product, ungated": ("q:BTHK k:BNHK v:BNHV beta:BNH", product, {"num_householder": 2, "g": None}),
    "chunk_dplr_delta_rule": (f"{DPLR} gk:BTHK", low_rank),
    "fused_recurrent_dplr_delta_rule": (f"{DPLR} gk:BTHK", low_rank),
    "chunk_iplr_delta_rule": (DPLR, low_rank), "fused_recurrent_iplr_delta_rule": (DPLR, low_rank),
    "chunk_rwkv6": (f"{GOOSE} u:HK", bonus), "fused_recurrent_rwkv6": (f"{GOOSE} u:HK", bonus),
    "chunk_rwkv7": (f"{GOOSE} a:BTHK b:BTHK", goose), "fused_recurrent_rwkv7": (f"{GOOSE} a:BTHK b:BTHK", goose),
    "fused_mul_recurrent_rwkv7": (f"{GOOSE} kk:BTHK a:BTHK", goose_of_layer),
    "chunk_hgrn": ("x:BTD g:BTD", elementwise), "fused_recurrent_hgrn": ("x:BTD g:BTD", elementwise),
}
UNSCALED = {"chunk_rwkv7", "fused_mul_recurrent_rwkv7", "chunk_hgrn", "fused_recurrent_hgrn"}


class Case:
    def __init__(self, label, seed=0, packed=None):
        text, self.token, *constants = CASES[label]
        self.name = label.partition(",")[0]
        self.function = getattr(fla, self.name)
        self.signature = inspect.signature(self.function).parameters
        self.constants = constants[0] if constants else {}
        generator = torch.Generator().manual_seed(seed)
        self.inputs = {}
        for name, axes in (part.split(":") for part in text.split()):
            shape = [1 if packed and axis == "B" else SIZES[axis] for axis in axes]
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            if name in ("g", "gk", "gv", "g_gamma", "w") and self.token is not erasing or name == "g":
                x = F.logsigmoid(x)
            x = torch.sigmoid(x) if name == "beta" else x * 0.5 if name in ("a", "b", "kk", "k", "p") else x
            self.inputs[name] = x.requires_grad_()
        self.axes = dict(part.split(":") for part in text.split())
        sequences = len(packed) - 1 if packed else SIZES["B"]
        state = (sequences, SIZES["D"]) if "x" in self.inputs else (sequences, SIZES["H"], SIZES["K"], SIZES["V"])
        self.initial = torch.randn(state, generator=generator, dtype=torch.float64).requires_grad_()
        self.weights = [torch.randn(size, generator=generator, dtype=torch.float64)
                        for size in ((1 if packed else SIZES["B"], SIZES["T"], *state[1:2], *state[3:]), state)]
        self.scale = 1.0 if self.name in UNSCALED else SIZES["K"] ** -0.5

    def loop(self, initial, packed=None, reverse=False, scale=None):
        """Rows and last states."""
        scale = self.scale if scale is None else scale
        rows = SIZES["T"]
        spans = list(itertools.pairwise(packed)) if packed else [(0, rows)]
        outs, states = [], []
        for i, (begin, end) in enumerate(spans):
            S = initial[i:i + 1] if packed else initial
            found = {}
            for t in range(begin, end)[:: -1 if reverse else 1]:
                at = {name: x if self.axes[name][0] != "B" else
                      x[:, 2 * t:2 * t + 2] if "N" in self.axes[name] else x[:, t] for name, x in self.inputs.items()}
                o, S = self.token(S, **{**self.constants_of_token(), **at})
                found[t] = o * scale
            outs += [found[t] for t in range(begin, end)]
            states.append(S)
        return torch.stack(outs, 1), torch.cat(states) if packed else states[0]

    def constants_of_token(self):
        return {key: x for key, x in self.constants.items() if key not in ("normalize", "num_householder")}

    def call(self, **options):
        return self.function(**self.inputs, **self.constants, **options)


def close(got, expected, tolerance=1e-10):
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def check(case, result, expected):
    """Rows, states, and the gradients of both."""
    close(result[0], expected[0])
    close(result[1], expected[1])
    leaves = [*case.inputs.values(), case.initial]
    got, wanted = (torch.autograd.grad(sum((x * w).sum() for x, w in zip(pair, case.weights)), leaves)
                   for pair in (result, expected))
    for name, a, b in zip([*case.inputs, "initial_state"], got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9,
                                   msg=lambda text, name=name: f"gradient of {name}: {text}")


def labels(*needed, without=()):
    names = {label: inspect.signature(getattr(fla, label.partition(",")[0])).parameters for label in CASES}
    return [x for x in CASES if all(key in names[x] for key in needed) and not any(key in names[x] for key in without)]


def test_every_function_of_the_table_has_a_case():
    assert {label.partition(",")[0] for label in CASES} == set(fla._TABLE)


@pytest.mark.parametrize("label", CASES)
def test_defaults(label):
    case = Case(label)
    o, state = case.call()
    rows, last = case.loop(torch.zeros_like(case.initial))
    close(o, rows)
    if case.name == "fused_recurrent_rwkv7":  # whose output_final_state is True
        close(state, last)
    else:
        assert state is None


@pytest.mark.parametrize("label", labels("output_final_state"))
def test_states_and_gradients(label):
    case = Case(label)
    check(case, case.call(initial_state=case.initial, output_final_state=True), case.loop(case.initial))


@pytest.mark.parametrize("label", labels("scale", "output_final_state"))
def test_a_scale_of_the_caller(label):
    case = Case(label)
    check(case, case.call(scale=0.3, initial_state=case.initial, output_final_state=True),
          case.loop(case.initial, scale=0.3))


@pytest.mark.parametrize("label", labels("cu_seqlens", "output_final_state"))
def test_packed(label):
    packed = [0, 3, 3, 4, 7]
    case = Case(label, packed=packed)
    result = case.call(initial_state=case.initial, output_final_state=True, cu_seqlens=torch.tensor(packed))
    check(case, result, case.loop(case.initial, packed))


@pytest.mark.parametrize("label", labels("reverse"))
def test_reverse(label):
    case = Case(label)
    result = case.call(initial_state=case.initial, output_final_state=True, reverse=True)
    check(case, result, case.loop(case.initial, reverse=True))


@pytest.mark.parametrize("label", labels("state_v_first"))
def test_states_with_values_first(label):
    case = Case(label)
    o, state = case.call(initial_state=case.initial.transpose(2, 3).contiguous(), output_final_state=True,
                         state_v_first=True)
    check(case, (o, state.transpose(2, 3)), case.loop(case.initial))
    if "transpose_state_layout" in case.signature:
        again = case.call(initial_state=case.initial.transpose(2, 3), output_final_state=True,
                          transpose_state_layout=True)
        close(again[1], state)


# --- normalised linear attention --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"])
@pytest.mark.parametrize("initial", ["none", "S", "S and z"])
def test_normalised(name, initial):
    case = Case(name)
    q, k, v = (case.inputs[key].detach().abs() for key in "qkv")
    S = case.initial.detach() if initial != "none" else torch.zeros_like(case.initial)
    z = torch.rand(2, 1, 2, 4, dtype=torch.float64) if initial == "S and z" else torch.zeros(
        2, 1, 2, 4, dtype=torch.float64)
    given = {"none": None, "S": S, "S and z": (S, z)}[initial]
    o, (last, last_z) = getattr(fla, name)(q, k, v, initial_state=given, output_final_state=True, normalize=True)
    sums = z + k.cumsum(1)
    for t in range(7):
        S = S + outer(k[:, t], v[:, t])
        close(o[:, t], read(S, q[:, t]) / ((q[:, t] * sums[:, t]).sum(-1, keepdim=True) + 2e-10))
    close(last, S)
    close(last_z, sums[:, -1:])
    if name.startswith("chunk"):
        rows, nothing = fla.chunk_linear_attn(q, k, v, initial_state=given)
        assert nothing is None
        close(rows, o)


# --- what kernels of the library do on the way in ---------------------------------------------------------------------


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize("label", labels("use_qk_l2norm_in_kernel"))
def test_rows_of_length_one(label):
    case = Case(label)
    result = case.call(initial_state=case.initial, output_final_state=True, use_qk_l2norm_in_kernel=True)
    given = dict(case.inputs)
    for key in ("q", "k", "p"):
        if key in given:
            case.inputs[key] = unit(given[key])
    expected = case.loop(case.initial)
    case.inputs = given
    check(case, result, expected)


@pytest.mark.parametrize("label", labels("use_beta_sigmoid_in_kernel"))
@pytest.mark.parametrize("twice", [False, True])
def test_beta_before_its_sigmoid(label, twice):
    case = Case(label)
    if "beta" not in case.inputs:
        pytest.skip("no beta")
    result = case.call(initial_state=case.initial, output_final_state=True, use_beta_sigmoid_in_kernel=True,
                       allow_neg_eigval=twice)
    given = dict(case.inputs)
    case.inputs["beta"] = torch.sigmoid(given["beta"]) * (2 if twice else 1)
    expected = case.loop(case.initial)
    case.inputs = given
    check(case, result, expected)
    if twice:
        with pytest.raises(heed.InvalidArgument, match="allow_neg_eigval is True, expected use_beta_sigmoid_in_kernel"):
            case.call(allow_neg_eigval=True)


@pytest.mark.parametrize("label", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda",
                                   "fused_recurrent_kda", "chunk_gdn2", "fused_recurrent_gdn2"])
@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("has_rate", [True, False])
def test_gates_before_their_activation(label, bound, has_rate):
    case = Case(label)
    per_head = case.inputs["g"].dim() == 3
    if per_head and (bound is not None or not has_rate):
        pytest.skip("gates of heads have neither")
    A = torch.tensor([0.3, -0.2], dtype=torch.float64) if has_rate else None
    bias = torch.linspace(-1, 1, 2 if per_head else 8, dtype=torch.float64)
    options = {"use_gate_in_kernel": True, "A_log": A, "dt_bias": bias,
               **({} if bound is None else {"lower_bound": bound})}
    if bound is None and not has_rate:
        with pytest.raises(heed.InvalidArgument, match=f"{label}: A_log is None, expected a tensor"):
            case.call(**options)
        return
    result = case.call(initial_state=case.initial, output_final_state=True, **options)
    given, x = dict(case.inputs), case.inputs["g"]
    x = x + (bias if per_head else bias.reshape(2, 4))
    rate = torch.ones(2, dtype=torch.float64) if A is None else A.exp()
    rate = rate if per_head else rate[:, None]
    case.inputs["g"] = -rate * F.softplus(x) if bound is None else bound * torch.sigmoid(rate * x)
    gates = case.inputs["g"]
    expected = case.loop(case.initial)
    case.inputs = given
    check(case, result, expected)
    if not per_head:
        close(fla.fused_kda_gate(given["g"], A, bias, bound, torch.float64), gates)
    else:
        close(fla.fused_gdn_gate(given["g"], A, bias, torch.float64), gates)
        assert fla.fused_gdn_gate(given["g"], A).dtype == torch.float32


def test_gates_of_bf16_are_computed_in_float32():
    g = torch.linspace(-3, 3, 16).reshape(1, 2, 2, 4).to(torch.bfloat16)
    A, rounded = torch.tensor([0.3, -0.2, 0.1, 0.5]), torch.linspace(-1, 1, 8).to(torch.bfloat16)
    assert torch.equal(fla.fused_gdn_gate(g, A), fla.fused_gdn_gate(g.float(), A))
    assert torch.equal(fla.fused_kda_gate(g, A[:2]), fla.fused_kda_gate(g.float(), A[:2]))
    assert torch.equal(fla.fused_gdn_gate(g, A, rounded[:4]), fla.fused_gdn_gate(g.float(), A, rounded[:4].float()))
    assert torch.equal(fla.fused_kda_gate(g, A[:2], rounded),
                       fla.fused_kda_gate(g.float(), A[:2], rounded.float()))


# --- dtypes, fewer key heads, other people's references ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("label", labels("output_final_state"))
def test_dtypes(label, dtype):
    case = Case(label)
    inputs = {key: x.detach().to(torch.float32 if x.dim() < 4 and key != "x" or key in ("g", "w", "gk") else dtype)
              for key, x in case.inputs.items()}
    state = case.initial.detach().to(dtype)  # heed's own functions want float32
    o, last = case.function(**inputs, **case.constants, initial_state=state, output_final_state=True)
    assert (o.dtype, last.dtype) == (dtype, torch.float32)
    rows, end = case.loop(case.initial)
    tolerance = 2e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(o.double(), rows, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(last.double(), end, rtol=tolerance, atol=tolerance)


def test_value_heads_share_a_key_head():
    q, k = (torch.randn(2, 6, 2, 4) for _ in range(2))
    v, g, beta = torch.randn(2, 6, 4, 3), F.logsigmoid(torch.randn(2, 6, 4)), torch.rand(2, 6, 4)
    wide = [x.repeat_interleave(2, dim=2) for x in (q, k)]
    o, state = fla.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    rows, last = fla.chunk_gated_delta_rule(*wide, v, g, beta, output_final_state=True)
    torch.testing.assert_close(o, rows)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_the_fallback_of_transformers(name):
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    reference = getattr(modeling, f"torch_{name.replace('fused_', '')}")
    q, k, v = (torch.randn(2, 70, 2, 8) for _ in range(3))
    g, beta = F.logsigmoid(torch.randn(2, 70, 2)), torch.rand(2, 70, 2)
    options = {"g": g, "beta": beta, "initial_state": torch.randn(2, 2, 8, 8), "output_final_state": True,
               "use_qk_l2norm_in_kernel": True}
    for got, expected in zip(getattr(fla, name)(q, k, v, **options), reference(q, k, v, **options), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
