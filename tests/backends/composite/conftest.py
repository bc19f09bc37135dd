"""Kernels of few threads: the simulator needs a millisecond for each, and their loops run many times."""

import functools

import pytest

from numba_impl.backends.composite import channel_sum, elementwise

build_small, build_sums = (functools.cache(module.build.__wrapped__) for module in (elementwise, channel_sum))


@pytest.fixture
def few_threads(monkeypatch):
    for name, value in {"THREADS": 8, "BLOCKS": 2, "build": build_small}.items():
        monkeypatch.setattr(elementwise, name, value)


@pytest.fixture
def small_pieces(monkeypatch):
    """Sums of so few values that several pieces and parts are soon seen."""
    for name, value in {"THREADS": 4, "PIECE": 64, "BLOCKS": 4, "build": build_sums}.items():
        monkeypatch.setattr(channel_sum, name, value)


def small(test):
    """Decorator: a test of few threads, for the simulator and the GPU."""
    return pytest.mark.simulator(pytest.mark.usefixtures("few_threads")(test))
