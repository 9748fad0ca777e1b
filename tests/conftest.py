"""What is done around every test."""

import gc

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Measurements and plans collect garbage, which takes as long as there are objects: a million
    when torch and transformers are loaded.  What was there before the test need not be looked at.
    """
    gc.collect()
    gc.freeze()
