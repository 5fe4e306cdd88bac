# Docstrings: each describes all arguments in Python's words, and every example in one runs.
import doctest
import inspect
import pydoc
import re

import pytest

import heed
import heed.torch  # noqa: F401
from heed import _core, _signatures
from test_signatures import PUBLIC

OURS = {name: thing for name, thing in PUBLIC.items()
        if name.startswith("heed.") and hasattr(thing, "__nb_signature__")}
WITHOUT_EXAMPLES = ("get_num_threads", "set_checks", "set_num_threads", "set_strict", "load_cache")


def parameters(thing):
    """The names of the parameters in the signature."""
    return [name for name in _signatures.parse(thing.__nb_signature__[0][0]).parameters if name != "self"]


def said_of(name, doc):
    """The text beside an argument in the list of arguments."""
    match = re.search(rf"^( *){name}  +(\S.*(?:\n\1 {{{len(name)},}} +\S.*)*)$", doc, re.MULTILINE)
    return match and " ".join(match[2].split())


@pytest.mark.parametrize("name", OURS)
def test_every_argument_is_explained(name):
    doc = OURS[name].__nb_signature__[0][1]
    elsewhere = parameters(heed.attention) if "of heed.attention" in (said_of("options", doc) or "") else []
    for parameter in parameters(OURS[name]):
        if parameter in elsewhere:
            continue
        said = said_of(parameter, doc)
        assert (said and len(said) > 4) or re.search(rf"`{parameter}`", doc), f"{name}: nothing is said of {parameter}"


def test_parameters_are_those_of_the_signature():
    assert parameters(heed.gla) == list(inspect.signature(heed.gla).parameters)
    assert parameters(heed.attention) == list(inspect.signature(heed.attention).parameters)
    assert parameters(heed.KVCache.attend) == list(inspect.signature(heed.KVCache.attend).parameters)[1:]
    assert said_of("q", "  q   the\n      query\n  kk  key") == "the query"
    assert said_of("k", "  q   the\n      query\n  kk  key") is None


@pytest.mark.parametrize("name", _core._mechanisms)
def test_shapes_of_all_tensors(name):
    tensors = {"do", "dstate", *_core._mechanisms[name]["inputs"]}
    for function in (name, f"{name}_backward", f"{name}_step"):
        doc = getattr(getattr(heed, function, None), "__doc__", "")
        for tensor in tensors & set(parameters(getattr(heed, function))) if doc else ():
            said = said_of(tensor, doc)
            assert said.startswith("[") or tensor in ("do", "dstate"), (function, tensor, said)
            assert not (function.endswith("_step") and said.startswith("[B, T")), (function, tensor, said)


ALL = {name: thing.__doc__ or "" for name, thing in PUBLIC.items() if name.startswith(("heed.", "heed.torch."))}
FOREIGN = {
    r"as above": "what stands above is in a header",
    r"\bk[A-Z][a-z]\w*": "an enumerator", r"::": "a name of C++", r"\b(?:Backward)?Workspace\(\)": "a function of C++",
    r"\bContext\b": "a class of C++",
    r"\bThrows\b": "C++", r"Overloaded function": "a signature twice", r"README\.md": "a file",
    r"\b(?:Forward|Backward|Attend|Explain|Append|Trim)(?:\(\))?(?=[ .,;:'])": "a function of C++", r"std::": "C++",
    r"heed\._typing": "a private module", r"\bd_(?:o|lse|final)(?![a-z])": "an argument of C++",
}


@pytest.mark.parametrize("name", ALL)
def test_docstrings_are_of_python(name):
    if name.startswith("heed.torch.MultiheadAttention"):
        pytest.skip("PyTorch's own methods")
    for pattern, what in FOREIGN.items():
        found = re.search(pattern, ALL[name])
        assert found is None, f"{name}: {found[0]!r} is {what}"


@pytest.mark.parametrize("name", [name for name, thing in PUBLIC.items() if not isinstance(thing, type)])
def test_help_has_one_signature_and_the_text(name):
    text = pydoc.render_doc(PUBLIC[name], renderer=pydoc.plaintext)
    assert len(re.findall(rf"^ *{name.rsplit('.', 1)[1]}\(.*", text, re.MULTILINE)) == 1
    assert PUBLIC[name].__doc__.split("\n")[0] in text and " object" not in text.split("\n")[2]


def test_functions_are_listed_as_functions():
    listed = pydoc.render_doc(heed, renderer=pydoc.plaintext).partition("\nFUNCTIONS\n")[2]
    assert "\n    gla(" in listed and "\n    attention(" in listed


EXAMPLES = {name: thing for name, thing in PUBLIC.items()
            if ">>>" in (thing.__doc__ or "") and name.startswith("heed.")}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name):
    thing = EXAMPLES[name]
    test = doctest.DocTestParser().get_doctest(thing.__doc__, {}, name, None, None)
    assert test.examples[-1].want, "an example ends in what it shows"
    report = []
    runner = doctest.DocTestRunner()
    runner.run(test, out=report.append, clear_globs=False)
    assert runner.failures == 0, "".join(report)
    for key, x in test.globs.items():  # decays shrink states, and steps go forward
        if key == "A" or key.startswith("log_decay"):
            assert (x <= 0).all()
        if key in ("beta", "delta", "dt"):
            assert (x >= 0).all()


def test_every_function_and_cache_has_an_example():
    functions = [name for name in heed.__all__ if hasattr(getattr(heed, name), "__nb_signature__")]
    caches = ["KVCache", "RingKVCache", "LatentKVCache"]
    assert [name for name in functions + caches if f"heed.{name}" not in EXAMPLES] == [
        n for n in functions if n in WITHOUT_EXAMPLES]
