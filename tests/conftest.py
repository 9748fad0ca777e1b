"""What is done around every test."""

import gc
import logging

import pytest

from planner._graph_capture.plain_step.observed_loss import LossWatch
from planner._graph_capture.torch_compat import active_modes


def pytest_runtest_teardown():
    """A model whose last step had no backward still watches for it."""
    for mode in reversed(active_modes()):
        if isinstance(mode, LossWatch):
            mode.end()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Leave alone what only costs time."""
    # Measurements and plans collect garbage, which takes as long as there are objects: a million
    # when torch and transformers are loaded.  What was there before need not be looked at.
    gc.collect()
    gc.freeze()
    _leave_traces_alone()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call():
    _leave_traces_alone()


def _leave_traces_alone():
    """pytest listens to each logger that does not propagate, in each phase of a test; torch prints
    every graph for this one as soon as anybody does."""
    traces = logging.getLogger("torch.__trace")
    for handler in traces.handlers[:]:
        if type(handler).__module__.startswith("_pytest."):
            traces.removeHandler(handler)
