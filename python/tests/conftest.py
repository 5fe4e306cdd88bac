# Fixtures of all Python tests: seeded data, a browser, the default number of threads, own warnings as errors.
import sys
from pathlib import Path

import numpy as np
import pytest
from browser import browser, one_browser, shipped  # noqa: F401

import heed

ROOT = Path(__file__).resolve().parents[2]


def pytest_configure(config):
    """A warning raised in, or for, a line of this repository is an error; those of other packages stay warnings."""
    folders = ("python/tests", "benchmarks", "examples", "tools")
    ours = sorted({"heed", *(file.stem for folder in folders for file in (ROOT / folder).rglob("*.py"))})
    config.addinivalue_line("filterwarnings", rf"error:::({'|'.join(ours)})(\.|$)")
    # heed gives these warnings once per process, in whichever test first passes odd numbers or shapes.
    config.addinivalue_line("filterwarnings", "ignore:.*(refuses them|swap these two axes)$")


@pytest.fixture
def rng():
    return np.random.default_rng(20260801)


@pytest.fixture
def uncapped(monkeypatch):
    """HEED_ISA caps no target, whatever the environment of the tests says."""
    monkeypatch.delenv("HEED_ISA", raising=False)


@pytest.fixture(autouse=True)
def own_draws(request):
    """A test draws the same numbers alone as after any others: generators start anew."""
    for generator in vars(request.module).values():
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = np.random.default_rng(0).bit_generator.state
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def default_settings():
    yield
    heed.set_num_threads(None)
    heed.set_checks(False)
    heed.set_strict(False)
