# heed.torch.replace_sdpa in all its ways: names of the function, modules, fall-backs, nesting, threads, torch.compile.
import threading

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from test_torch_sdpa import EV, B, E, Graphs, H, ORIGINAL, bools, close, inputs, k4, nested, q4, v4  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.attention.bias import causal_upper_left  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as imported  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import heed  # noqa: E402
from heed.torch import replace_sdpa, scaled_dot_product_attention  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
]


@pytest.fixture(autouse=True)
def put_back():
    torch.manual_seed(20260801)
    yield
    assert F.scaled_dot_product_attention is ORIGINAL


def attribute(*args, **kwargs):
    return F.scaled_dot_product_attention(*args, **kwargs)


WAYS = pytest.mark.parametrize("call", [attribute, imported], ids=["attribute", "from-import"])


def tangent_of(call, *args, **kwargs):
    """A call that heed refuses and PyTorch runs: a second derivative in forward mode."""
    def along(function):
        return lambda q: torch.func.jvp(function, (q,), (torch.ones_like(q),))[1]

    return along(along(lambda q: call(q, *args[1:], **kwargs)))(args[0])


@WAYS
def test_calls_run_on_heed_and_are_recorded_once(call):
    q, k, v = (x.detach() for x in inputs())
    mask = bools(6, 9)
    with replace_sdpa() as record:
        o = call(q, k, v)
        masked = call(query=q, key=k, value=v, attn_mask=mask, scale=0.5)
        ours = scaled_dot_product_attention(q, k, v)
    assert torch.equal(o, ours) and torch.equal(masked, scaled_dot_product_attention(q, k, v, mask, scale=0.5))
    shapes = ((B, H, 6, E), (B, H, 9, E), (B, H, 9, EV))
    assert record == [(True, None, (*shapes, None)), (True, None, (*shapes, (6, 9)))]
    assert record[0].ran is True and record[0].reason is None and record[1].shapes == (*shapes, (6, 9))
    call(q, k, v)
    assert len(record) == 2


@WAYS
def test_what_heed_cannot_run_falls_back(call):
    x = nested()
    with replace_sdpa() as record:
        o = call(x, x, x)
    expected = call(x, x, x)
    assert all(torch.equal(a, b) for a, b in zip(o.unbind(), expected.unbind()))
    assert record == [(False, record[0].reason, (None,) * 4)] and "nested" in record[0].reason

    q, k, v = (x.detach() for x in inputs(7, 7))
    for mask in (None, bools(7, 7), causal_upper_left(7, 7)):
        with replace_sdpa() as record:
            got = tangent_of(call, q, k, v, mask)
        torch.testing.assert_close(got, tangent_of(call, q, k, v, mask))
        assert [entry.ran for entry in record] == [False] and "derivative" in record[0].reason


class Own(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return "own" if func is ORIGINAL else super().__torch_function__(func, types, args, kwargs or {})


class Plain(torch.Tensor):
    pass


@WAYS
def test_classes_of_tensors(call):
    for position in range(4):
        arguments = [q4, k4, v4, bools(3, 5)]
        arguments[position] = arguments[position].as_subclass(Own)
        with replace_sdpa() as record:
            assert call(*arguments) == "own"
        assert [entry.ran for entry in record] == [False] and "of type Own, which overrides" in record[0].reason
    with replace_sdpa() as record:
        assert type(call(q4.as_subclass(Plain), k4, nn.Parameter(v4))) is Plain
    assert [entry.ran for entry in record] == [True]


@WAYS
def test_what_nobody_can_run_pytorch_refuses(call):
    with replace_sdpa() as record:
        with pytest.raises(RuntimeError, match="must match"):
            call(q4, k4[:, :2], v4[:, :2])
        with pytest.raises(TypeError):
            call(q4, k4)
        call(q4, k4, v4)
    assert [entry.ran for entry in record] == [False, True] and "key has shape" in record[0].reason


@WAYS
def test_strict_raises(call):
    with replace_sdpa(strict=True) as record:
        call(q4, k4, v4)
        with pytest.raises(heed.Unsupported, match="derivative"):
            tangent_of(call, q4, k4, v4)
        with pytest.raises(heed.Unsupported, match="nested"):
            call(nested(), nested(), nested())
        call(q4, k4, v4)
    assert [entry.ran for entry in record] == [True, True]


def test_modules_of_pytorch():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    decoder = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 8)
    for module, args, calls in ((attention, (x, x, x, None, False), 1), (layer, (x,), 1), (decoder, (x, x), 2)):
        expected = module(*args)
        with replace_sdpa(strict=True) as record:
            o = module(*args)
        torch.testing.assert_close(o, expected)
        assert [entry[:2] for entry in record] == [(True, None)] * calls and record[0].shapes[0] == (2, 2, 5, 4)

    with torch.no_grad():  # in eval mode there is a fast path without the function, but not for PyTorch's modes
        for module, args, _ in ((attention.eval(), (x, x, x, None, False), 1), (layer.eval(), (x,), 1)):
            with replace_sdpa() as record:
                o = module(*args)
            torch.testing.assert_close(o, module(*args))
            assert len(record) == 1 and record[0].ran


def test_a_model_is_no_argument():
    with pytest.raises(heed.InvalidArgument, match="replace_sdpa: strict is Linear.*, expected True or False"):
        with replace_sdpa(nn.Linear(2, 2)):
            pass


@WAYS
def test_of_nested_blocks_the_innermost_counts(call):
    with replace_sdpa() as outer:
        call(q4, k4, v4)
        with replace_sdpa() as inner:
            call(q4, k4, v4)
            tangent_of(call, q4, k4, v4)
        with pytest.raises(heed.Unsupported), replace_sdpa(strict=True):
            tangent_of(call, q4, k4, v4)
        tangent_of(call, q4, k4, v4)
        call(q4, k4, v4)
    assert [x.ran for x in inner] == [True, False] and [x.ran for x in outer] == [True, False, True]


@WAYS
def test_an_exception_ends_the_block(call):
    with pytest.raises(KeyError), replace_sdpa() as record:
        call(q4, k4, v4)
        raise KeyError
    call(q4, k4, v4)
    assert len(record) == 1 and F.scaled_dot_product_attention is ORIGINAL


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        o = func(*args, **(kwargs or {}))
        return 2 * o if func is ORIGINAL else o


def test_other_replacements_stay(monkeypatch):
    q, k, v = (x.detach() for x in inputs())
    with Doubling(), replace_sdpa() as record:
        torch.testing.assert_close(tangent_of(imported, q, k, v), 2 * tangent_of(attribute, q, k, v) / 2)
    assert len(record) == 2
    seen = []

    def foreign(*args, **kwargs):
        seen.append(args)
        return ORIGINAL(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", foreign)
        with replace_sdpa() as record:
            attribute(q, k, v)
            tangent_of(attribute, q, k, v)
        assert [x.ran for x in record] == [True, False] and len(seen) == 1 and F.scaled_dot_product_attention is foreign

    with replace_sdpa() as record:  # replaced again in the block, and left so
        ours = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = theirs = lambda *args: ours(*args)
        attribute(q, k, v)
    try:
        assert F.scaled_dot_product_attention is theirs and len(record) == 1
        close(attribute(q, k, v), ORIGINAL(q, k, v), q.dtype)
        assert len(record) == 1
    finally:
        F.scaled_dot_product_attention = ORIGINAL


def test_a_block_is_for_its_thread():
    def in_thread(function):
        failures = []

        def run():
            try:
                function()
            except BaseException as error:  # whatever it is, it fails the test
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread, failures

    def join(thread, failures):
        thread.join(60)
        assert not thread.is_alive() and not failures

    def plain():
        assert tangent_of(attribute, q4, k4, v4).shape == (2, 4, 3, 6)
        imported(q4, k4, v4)

    first_is_out, second_is_in, records = threading.Event(), threading.Event(), []

    def second():
        with replace_sdpa(strict=True) as record:
            second_is_in.set()
            assert first_is_out.wait(60)
            attribute(q4, k4, v4)
            imported(q4, k4, v4)
            records.append(record)

    with replace_sdpa(strict=True) as record:
        join(*in_thread(plain))
        other = in_thread(second)
        assert second_is_in.wait(60)
        attribute(q4, k4, v4)
    first_is_out.set()
    join(*other)
    assert len(record) == 1 and [len(r) for r in records] == [2] and F.scaled_dot_product_attention is ORIGINAL

    def many():
        for _ in range(50):
            with replace_sdpa() as mine, replace_sdpa():
                attribute(q4, k4, v4)
            assert mine == []

    for thread in [in_thread(many) for _ in range(4)]:
        join(*thread)


def test_checkpoint_in_a_block():
    q, k, v = inputs()

    def gradient(run):
        torch.manual_seed(4)
        q.grad = None
        run(lambda *x: attribute(*x, dropout_p=0.5).square(), q, k, v).sum().backward()
        return q.grad

    with replace_sdpa() as record:
        expected = gradient(lambda function, *x: function(*x))
        for reentrant in (False, True):
            got = gradient(lambda function, *x: checkpoint(function, *x, use_reentrant=reentrant))  # noqa: B023
            torch.testing.assert_close(got, expected)
    assert len(record) >= 3 and all(x.ran for x in record)


# --- torch.compile ----------------------------------------------------------------------------------------------------


@WAYS
def test_compiled_code_in_and_out_of_blocks(call):
    graphs = Graphs()
    q, k, v = inputs()
    compiled = torch.compile(lambda q, k, v: call(q, k, v, is_causal=True) + 1, fullgraph=True, backend=graphs)
    expected = ORIGINAL(q, k, v, is_causal=True) + 1
    do = torch.randn_like(expected)
    expected_gradient = torch.autograd.grad(expected, q, do)[0]
    for _ in range(10):  # compiled twice, not once for each block
        close(compiled(q, k, v), expected, q.dtype)
        with replace_sdpa() as record:
            for _ in range(2):
                o = compiled(q, k, v)
                close(o, expected, q.dtype)
                close(torch.autograd.grad(o, q, do)[0], expected_gradient, q.dtype)
        assert record == []  # calls in a graph are not recorded
    assert graphs.of_heed() == [False, True]
    graphs = Graphs()
    with replace_sdpa():
        close(compiled(q, k, v), expected, q.dtype)
    close(compiled(q, k, v), expected, q.dtype)


def ran_on_heed(function, *args):
    with torch.profiler.profile() as profile:
        function(*args)
    return any(event.key == "heed::attention" for event in profile.key_averages())


def test_compiled_modules_in_a_block():
    Graphs()
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, 8)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), layer(x))
        assert not ran_on_heed(compiled, x)
        with replace_sdpa():
            torch.testing.assert_close(compiled(x), layer(x))
            assert ran_on_heed(compiled, x)
    layer.eval()
    with torch.no_grad(), replace_sdpa():
        compiled(x)
        assert not ran_on_heed(compiled, x)  # the fast path
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            Graphs()
            compiled(x)
            assert ran_on_heed(compiled, x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


@WAYS
def test_compiled_calls_that_fall_back_are_recorded(call):
    def function(q, k, v):
        return call(q + 0, k, v) + 1

    graphs = Graphs()
    compiled = torch.compile(function, backend=graphs)
    x = nested()
    with replace_sdpa() as record:
        for _ in range(2):
            o = compiled(x, x, x)
            with pytest.raises(RuntimeError, match="must match"):
                compiled(q4, k4[:, :2], v4[:, :2])
    assert all(torch.equal(a, b) for a, b in zip(o.unbind(), function(x, x, x).unbind()))
    assert [entry.ran for entry in record] == [False] * 4 and not any(graphs.of_heed())
    with replace_sdpa(strict=True), pytest.raises(heed.Unsupported, match="nested"):
        compiled(x, x, x)
    graphs = Graphs()
    with replace_sdpa(), pytest.raises(Exception, match="torch.compiler.disable"):
        torch.compile(function, backend=graphs, fullgraph=True)(x, x, x)


def test_a_block_in_compiled_code_breaks_the_graph():
    def function(q, k, v):
        with replace_sdpa():
            return F.scaled_dot_product_attention(q, k, v)

    graphs = Graphs()
    q, k, v = inputs()
    close(torch.compile(function, backend=graphs)(q, k, v), ORIGINAL(q, k, v), q.dtype)
    graphs = Graphs()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(function, backend=graphs, fullgraph=True)(q, k, v)
