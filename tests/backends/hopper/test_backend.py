"""What a plan decides, and what it leaves to the tensors' addresses; on the CPU, with launches that only note what they get."""

import pytest
import torch

from numba_impl.backends.hopper import backend
from numba_impl.backends.hopper.layout import Config
from numba_impl.cuda import tensor_map
from numba_impl.cuda.kernel import Kernel
from tests.cases import OPEN, Case, Guarded, problem

WORDS = tuple(range(tensor_map.WORDS))


@pytest.fixture
def launched(monkeypatch):
    """[(the kernel's config, its numbers, the arrays), ...]; the maps of tensors are ``WORDS``."""
    found = []

    def prepare(kernel, device, grid, *numbers):
        def launch(arrays, more=(), constants=()):
            found.append((kernel.config, (grid, *numbers, *more), arrays))

        return launch

    monkeypatch.setattr(Kernel, "prepare", prepare)
    monkeypatch.setattr(tensor_map, "encode", lambda address, shape, box: WORDS)
    return found


def drawn(case, operation, x_offset=0, gy_offset=0):
    x, weight, bias = case.draw()
    tensors = [Guarded.of(x, x_offset).tensor, weight, bias]
    if operation == "pre_gradient":
        tensors.append(Guarded.of(torch.randn(case.output_shape), gy_offset).tensor)
    return tensors


@pytest.mark.parametrize("operation", ["forward", "pre_gradient"])
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize(
    ("width", "x_offset", "gy_offset", "vector", "bulk"),
    [
        *[(64, 0, 0, 4, True), (64, 1, 0, 4, False), (64, 0, 2, 2, True), (64, 4, 1, 1, True)],
        *[(65, 0, 0, 2, False), (65, 0, 1, 1, False), (66, 0, 0, 4, False)],
    ],
)
def test_kernels_by_size_and_address(operation, precision, width, x_offset, gy_offset, vector, bulk, launched):
    """Outputs by the largest vectors that rows and gy allow; x by the bulk copy engine where it and its rows are aligned."""
    if operation == "forward" and gy_offset:
        pytest.skip("there is no gy")
    case = Case((2, 24, 3, width), 8, 3, 2, 1, 1)
    plan = backend.plan(problem(case, "cpu", operation, permitted=precision))
    assert plan.precision == precision
    tensors = drawn(case, operation, x_offset, gy_offset)
    for _ in range(2):
        out = plan(*tensors, constants=OPEN)
        assert out.shape == case.output_shape
        (_, numbers, (weight, packed, factors, x_map)), (config, hopper_numbers, arrays) = launched[-2:]
        assert numbers == (8, 24, 8, WORDS if bulk else tensor_map.NONE) and weight is tensors[1]
        assert Config(24, 8, 3 if precision == "fp32" else 1, vector, bulk, operation) in config
        strips = -(-width // 64)
        assert hopper_numbers == (strips, 6, strips, (3, width, 6, 2 * width))  # by one multiprocessor, the simulator's
        want = [tensors[0], packed, factors, x_map, *tensors[1:], out]
        assert all(a is b for a, b in zip(arrays, want, strict=True))
    assert len(launched) == 4


def test_tensors_are_made_contiguous(launched):
    case = Case((2, 8, 3, 5), 8, 3, 2, 1, 1)
    x, weight, bias, gy = drawn(case, "pre_gradient")
    plan = backend.plan(problem(case, "cpu", "pre_gradient"))
    strided = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x, weight, gy)]
    plan(*strided[:2], bias.repeat_interleave(2)[::2], strided[2], constants=OPEN)
    arrays = launched[-1][2]
    given = {0: x, 4: weight, 5: bias, 6: gy}
    assert all(arrays[i].is_contiguous() and torch.equal(arrays[i], t) for i, t in given.items())


def test_no_bias_is_zeros(launched):
    case = Case((1, 8, 3, 5), 16, 3, 2, 1, bias=False)
    backend.plan(problem(case, "cpu"))(*drawn(case, "forward"), constants=OPEN)
    assert torch.equal(launched[-1][2][5], torch.zeros(16))


def test_an_empty_batch_launches_nothing(launched):
    case = Case((0, 8, 3, 5), 8, 3, 2, 1)
    assert backend.plan(problem(case, "cpu"))(*drawn(case, "forward"), constants=OPEN).shape == case.output_shape
    assert not launched


def test_packed_weights_lie_as_shared_memory_has_them(launched):
    """The bulk copy takes them as they are: hi alone, or hi and lo."""
    case = Case((1, 40, 3, 5), 24, 3, 2, 1)
    for precision in ("fp32", "tf32"):
        described = problem(case, "cpu", permitted=precision)
        backend.plan(described)(*drawn(case, "forward"), constants=OPEN)
        packed, weights = launched[-1][2][1], backend.config(described).shared.places.weights
        assert packed[0].nbytes == weights.step and weights.size == (2 if precision == "fp32" else 1) * weights.step
