"""Kernels of few threads: the simulator needs a millisecond for each, and their loops run many times."""

import functools

import pytest

from numba_impl.backends.composite import elementwise

build_small = functools.cache(elementwise.build.__wrapped__)


@pytest.fixture
def few_threads(monkeypatch):
    for name, value in {"THREADS": 8, "BLOCKS": 2, "build": build_small}.items():
        monkeypatch.setattr(elementwise, name, value)


def small(test):
    """Decorator: a test of few threads, for the simulator and the GPU."""
    return pytest.mark.simulator(pytest.mark.usefixtures("few_threads")(test))
