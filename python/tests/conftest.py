# Shared by all Python tests: seeded data, a browser, and threads put back to their default.
import numpy as np
import pytest
from browser import browser, one_browser, shipped  # noqa: F401

import heed


@pytest.fixture
def rng():
    return np.random.default_rng(20260801)


@pytest.fixture(autouse=True)
def default_settings():
    yield
    heed.set_num_threads(None)
    heed.set_checks(False)
    heed.set_strict(False)
