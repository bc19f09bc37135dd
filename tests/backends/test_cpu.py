"""The CPU backend's epilogue and its gradient: its own exp2 against float64, for every kind of value; chunks and threads."""

import importlib.util
import math
import os
import subprocess
import sys

import pytest
import torch

from numba_impl import arguments, dispatch
from numba_impl.backends import cpu as backend_cpu
from numba_impl.epilogue import MISH_ADD_HARDTANH_SCALE as CHAIN
from numba_impl.epilogue import Constants
from numba_impl.oracle import BARE, check_epilogue, check_epilogue_gradient, check_layer
from tests.backends.values import CONSTANTS, SPECIAL, around_the_bounds, special_pairs
from tests.cases import CLAMPED, IMPORTS, OPEN, VIEWS, Case, apply, bits


def activate(x, y, constants):
    """The epilogue of x, in place if y is x, by the backend's plan."""
    return dispatch.plan(arguments.activation("activate", CHAIN, arguments.kind("x", x), ""), "cpu")(x, y, constants=constants)


def differentiate(z, gy, constants):
    """The epilogue's gradient, in the memory of z."""
    backend_cpu._run(CHAIN, "gradient", (z, gy), constants)
    return z


def check(x, constants):
    check_epilogue(activate(x, None, constants), x, constants)


@pytest.mark.parametrize("constants", [BARE, OPEN, CLAMPED, Constants(-2.0, 2.0), Constants(0.25, 3.0, 0.0, 0.0)], ids=str)
def test_special_values(constants):
    values = torch.tensor(SPECIAL)
    check(torch.cat([values, -values]), constants)


def test_every_exponent():
    """All signs and exponents, a thousand drawn mantissas each."""
    patterns = torch.arange(512)[:, None] << 23 | torch.randint(2**23, (512, 1000))
    check(patterns.to(torch.int32).view(torch.float32), BARE)


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
    assert activate(x, x, OPEN) is x
    check_epilogue(x, before[8 + offset : 8 + offset + size], OPEN)
    assert torch.equal(memory[: 8 + offset], before[: 8 + offset])
    assert torch.equal(memory[8 + offset + size :], before[8 + offset + size :])


def test_memory_order_is_kept():
    x = torch.randn(2, 5, 6, 7).to(memory_format=torch.channels_last)
    y = activate(x, None, OPEN)
    assert y.stride() == x.stride()
    check_epilogue(y, x, OPEN)


@pytest.mark.parametrize("images", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("weight_view", ["contiguous", "channels_last"])
@pytest.mark.parametrize("view", ["contiguous", "channels_last"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_few_images_at_a_time(images, channels, view, weight_view, monkeypatch):
    """torch's convolution may give channels_last for a weight of that format, and for an x of one channel, which has either."""
    case = Case((5, channels, 4, 6), 2, 3, 2, 1, 1)
    x, weight, bias = case.draw()
    weight = VIEWS[weight_view](weight)
    monkeypatch.setattr(backend_cpu, "CHUNK", images * math.prod(case.output_shape[1:]))
    with torch.no_grad():
        y = apply(VIEWS[view](x), weight, bias, case, CLAMPED.add_value, CLAMPED.scale, backend="cpu")
    check_layer(y, x, weight, bias, case.geometry, CLAMPED)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_are_torchs(threads, monkeypatch):
    """On one it does not so much as ask Numba for threads, which a forked process may not start."""
    import numba

    asked, set_num_threads, numbas = [], numba.set_num_threads, numba.get_num_threads()
    numba.set_num_threads(1)
    monkeypatch.setattr(numba, "set_num_threads", lambda n: asked.append(n) or set_num_threads(n))

    if threads > numba.config.NUMBA_NUM_THREADS:
        pytest.skip("Numba has fewer threads")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(torch.randn(1000), OPEN)
        assert asked == ([threads, 1] if threads > 1 else [])
    finally:
        torch.set_num_threads(before)
        set_num_threads(numbas)


def test_more_threads_than_numba_has():
    import numba

    before = torch.get_num_threads()
    torch.set_num_threads(numba.config.NUMBA_NUM_THREADS + 3)
    try:
        check(torch.randn(1000), OPEN)
    finally:
        torch.set_num_threads(before)


def check_backward(z, gy, constants):
    clamped = activate(z, None, constants._replace(scale=1.0))
    before, g = gy.clone(), z.clone()
    assert differentiate(g, gy, constants) is g
    assert torch.equal(bits(gy), bits(before)), "the gradient at the output was written"
    check_epilogue_gradient(g, z, gy, clamped, constants)


@pytest.mark.parametrize("constants", CONSTANTS, ids=str)
def test_backward_of_special_values(constants):
    check_backward(*special_pairs("cpu"), constants)


@pytest.mark.parametrize("constants", CONSTANTS, ids=str)
def test_backward_at_the_clamps_bounds(constants):
    z = around_the_bounds(constants, 10_000)
    check_backward(z, torch.ones_like(z), constants)


@pytest.mark.parametrize("constants", [BARE, CLAMPED], ids=str)
def test_backward_over_a_dense_sweep(constants):
    z = torch.cat([torch.linspace(-110, 30, 1_000_001), torch.randn(1_000_000)])
    check_backward(z, torch.randn(z.shape), constants)


def test_backward_of_every_exponent():
    z = (torch.arange(512)[:, None] << 23 | torch.randint(2**23, (512, 100))).to(torch.int32).view(torch.float32)
    check_backward(z, torch.ones_like(z), BARE)


@pytest.mark.parametrize("specials", [False, True])
@pytest.mark.parametrize("constants", [OPEN, CLAMPED, Constants(-2.0, 2.0)], ids=str)
def test_backward_is_torchs(constants, specials):
    """In fp32: as near to autograd as float64 lets both be, zeros and NaN at the same places."""
    z, gy = special_pairs("cpu") if specials else (3 * torch.randn(100_000), torch.randn(100_000))
    kept = (z > -80) | ~z.isfinite()  # below, torch's own mish' is lost in numbers below 2^-126
    z, gy = z[kept], gy[kept]
    leaf = z.clone().requires_grad_()
    CHAIN.forward(leaf, constants).backward(gy)
    g = differentiate(z.clone(), gy, constants)
    torch.testing.assert_close(g, leaf.grad, rtol=2e-5, atol=2e-5, equal_nan=True)
    assert torch.equal(g == 0, leaf.grad == 0)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 8, 9, 31, 33, 1000])
def test_backward_on_threads_writes_nothing_else(size, threads):
    memory, gy = torch.randn(size + 16), torch.randn(size)
    before, z = memory.clone(), memory[7 : 7 + size]
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_backward(z, gy, OPEN)
        differentiate(z, gy, OPEN)
    finally:
        torch.set_num_threads(torch_threads)
    assert torch.equal(memory[:7], before[:7]) and torch.equal(memory[7 + size :], before[7 + size :])


def test_backward_keeps_memory_order():
    z, gy = (torch.randn(2, 5, 6, 7).to(memory_format=torch.channels_last) for _ in range(2))
    check_backward(z, gy, CLAMPED)


# Calls, of which the first warns that the backend is out of service; the results are eager's.
WITHOUT_NUMBA = """
import sys, warnings
import torch
if sys.argv[1] == "a NumPy that Numba refuses":
    sys.modules["numba"] = None
from model_numba import ModelNumba
torch.set_num_threads(2)
model, x = ModelNumba(4, 3, 3, 2, 1, 1, -0.5, 2), torch.randn(2, 4, 5, 6)
x[0, 0, 0, 0] = float("inf")
with warnings.catch_warnings(record=True) as caught, torch.no_grad():
    warnings.simplefilter("always")
    for _ in range(2):
        torch.testing.assert_close(model(x), model.plain()(x), equal_nan=True)
(warning,) = caught
assert "'cpu' is out of service" in str(warning.message) and sys.argv[2] in str(warning.message), warning.message
"""


@pytest.mark.parametrize(
    ("fault", "environment", "words"),
    [
        ("no threading layer", {"NUMBA_THREADING_LAYER": "tbb"}, "NUMBA_THREADING_LAYER"),
        ("no compiler", {"NUMBA_DISABLE_JIT": "1"}, "NUMBA_DISABLE_JIT is set"),
        ("a NumPy that Numba refuses", {}, "Numba cannot be imported"),
    ],
    ids=["no threading layer", "no compiler", "no Numba"],
)
def test_numbas_own_failures(fault, environment, words):
    pytest.importorskip("numba")
    if fault == "no threading layer" and importlib.util.find_spec("tbb"):
        pytest.skip("TBB is installed")
    environment = os.environ | IMPORTS | environment
    command = [sys.executable, "-c", WITHOUT_NUMBA, fault, words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
