import pytest

from benchmarks import timer
from benchmarks.results import Timing


@pytest.fixture
def hurried(monkeypatch):
    """Calls a function once for each figure."""

    def once(function, milliseconds):
        function()
        return Timing.of([1.0])

    monkeypatch.setattr(timer, "launches_on_cpu", once)
