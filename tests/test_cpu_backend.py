"""The CPU backend's epilogue: its own exp2 against float64, for every kind of value; its chunks and threads."""

import math

import pytest
import torch

from numba_impl import backend_cpu
from numba_impl.problem import Constants
from tests.accuracy import check_epilogue, check_layer
from tests.cases import CLAMPED, OPEN, VIEWS, Case, apply
from tests.test_pointwise import SPECIAL

BARE = Constants(0.0, 1.0, float("-inf"), float("inf"))  # mish alone


def check(x, constants):
    check_epilogue(backend_cpu.activate(x, torch.full_like(x, float("nan")), constants), x, constants)


@pytest.mark.parametrize("constants", [BARE, OPEN, CLAMPED, Constants(-2.0, 2.0), Constants(0.25, 3.0, 0.0, 0.0)], ids=str)
def test_special_values(constants):
    values = torch.tensor(SPECIAL)
    check(torch.cat([values, -values]), constants)


def test_every_exponent():
    """All signs and exponents, a thousand drawn mantissas each."""
    bits = torch.arange(512)[:, None] << 23 | torch.randint(2**23, (512, 1000))
    check(bits.to(torch.int32).view(torch.float32), BARE)


@pytest.mark.parametrize("constants", [BARE, CLAMPED], ids=str)
def test_a_dense_sweep(constants):
    """Where exp neither vanishes nor saturates, three million neighbouring values and drawn ones."""
    check(torch.linspace(-110, 30, 3_000_001), constants)
    check(torch.randn(1_000_000), constants)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 8, 9, 31, 33, 1000])
@pytest.mark.parametrize("offset", [0, 1])
def test_sizes_and_neighbours(size, offset):
    memory = torch.randn(size + 16)
    before, x = memory.clone(), memory[8 + offset : 8 + offset + size]
    assert backend_cpu.activate(x, x, OPEN) is x
    check_epilogue(x, before[8 + offset : 8 + offset + size], OPEN)
    assert torch.equal(memory[: 8 + offset], before[: 8 + offset])
    assert torch.equal(memory[8 + offset + size :], before[8 + offset + size :])


def test_memory_order_is_kept():
    x = torch.randn(2, 5, 6, 7).to(memory_format=torch.channels_last)
    y = torch.empty_like(x)
    backend_cpu.activate(x, y, OPEN)
    assert y.stride() == x.stride()
    check_epilogue(y, x, OPEN)


@pytest.mark.parametrize("images", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("view", ["contiguous", "channels_last"])
def test_a_few_images_at_a_time(images, view, monkeypatch):
    case = Case((5, 3, 4, 6), 2, 3, 2, 1, 1)
    x, weight, bias = case.draw()
    monkeypatch.setattr(backend_cpu, "CHUNK", images * math.prod(case.output_shape[1:]))
    with torch.no_grad():
        y = apply(VIEWS[view](x), weight, bias, case, CLAMPED.add_value, CLAMPED.scale, backend="cpu")
    check_layer(y, x, weight, bias, case.geometry, CLAMPED)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_are_torchs(threads):
    import numba

    if threads > numba.config.NUMBA_NUM_THREADS:
        pytest.skip("Numba has fewer threads")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(torch.randn(1000), OPEN)
        assert numba.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_more_threads_than_numba_has():
    import numba

    before = torch.get_num_threads()
    torch.set_num_threads(numba.config.NUMBA_NUM_THREADS + 3)
    try:
        check(torch.randn(1000), OPEN)
    finally:
        torch.set_num_threads(before)
