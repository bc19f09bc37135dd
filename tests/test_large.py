"""Sizes whose indices leave 32 bits, on a GPU: every value written, and right at the ends and where an index passes 2^31 bytes.

A crop of x alone gives the outputs of its cells, but for the last row and column, so that float64 of all is not needed.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from numba_impl import convolution, dispatch, mish_add_hardtanh_scale
from numba_impl.oracle import check_epilogue, check_layer, check_layer_gradient
from numba_impl.problem import Geometry
from tests.cases import OPEN, Case, problem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("whole_gpu")]

RESERVE = 30e9  # bytes that the suite's other processes may need on the GPU meanwhile
INDICES = 2**29, 2**30, 2**31, 2**32  # at which bytes leave 31 bits and 32, and values
NEAR, EDGE = 8, 2  # cells around a place, and of a strip along an edge
FEW = 2**28  # values, up to which all are compared


def square(batch, in_channels, side, out_channels):
    return Case((batch, in_channels, side, side), out_channels, 3, 2, 1, 1)


# x's planes are 2.15e9 bytes, y's as many values.
PLANES = 23_200
FORWARD = {
    "tiled, 33 channels": ("tiled", square(1, 1, 4096, 33)),
    "tiled, planes": ("tiled", square(1, 2, PLANES, 2)),
    "tiled, images": ("tiled", square(600, 8, 700, 2)),
    "tiled, 70,000 images": ("tiled", square(70_000, 1, 2, 3)),
    "composite, 33 channels": ("composite", square(1, 1, 4096, 33)),
    "composite, 70,000 images": ("composite", square(70_000, 1, 2, 3)),
    "hopper, y's planes": ("hopper", square(1, 8, PLANES // 2, 8)),
    "hopper, planes": ("hopper", square(1, 8, PLANES, 8)),
    "hopper, images": ("hopper", square(70, 8, 1000, 8)),
    "hopper, 70,000 images": ("hopper", square(70_000, 8, 2, 8)),
}
# Less the one that would need 155 GB.
BACKWARD = {name: values for name, values in FORWARD.items() if name != "hopper, planes"}


def need(values):
    """Skip unless as many fp32 values fit beside what others need."""
    free, _ = torch.cuda.mem_get_info()
    needed = 4 * values + RESERVE
    if free < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB of free GPU memory, there are {free / 1e9:.0f}")


def places(case):
    """(image, row, column) of a cell, wherever an index into x or y passes one of these."""
    for shape, cell in ((case.x, 1), (case.output_shape, 2)):
        for index in INDICES:
            if index < math.prod(shape):
                image, _, row, column = map(int, np.unravel_index(index, shape))
                yield image, row // cell, column // cell


def crops(case):
    """(image, first row, last row, first column, last column), in cells: the edges of the first and last image, and places."""
    batch, _, height, width = case.x
    for image in {0, batch - 1}:
        for first in (0, height - EDGE):
            yield image, first, first + EDGE, 0, width
        for first in (0, width - EDGE):
            yield image, 0, height, first, first + EDGE
    for image, row, column in places(case):
        yield image, max(0, row - NEAR), min(height, row + NEAR), max(0, column - NEAR), min(width, column + NEAR)


def check(case, x, weight, bias, y, gy=None):
    """``y`` is the layer's result or, with ``gy``, the gradient at the pre-activation."""
    if y.numel() <= FEW:
        compare(y, x, weight, bias, gy, case.geometry)
        return
    assert not any(plane.isnan().any() for plane in itertools.chain(*y)), "a value was not written"
    for image, top, bottom, left, right in crops(case):
        geometry = Geometry.of(3, 2, 1, (int(bottom == case.x[2]), int(right == case.x[3])))
        rows, cols = geometry.rows.output_size(bottom - top), geometry.cols.output_size(right - left)

        inputs = slice(image, image + 1), slice(None), slice(top, bottom), slice(left, right)
        outputs = *inputs[:2], slice(2 * top, 2 * top + rows), slice(2 * left, 2 * left + cols)
        compare(y[outputs], x[inputs], weight, bias, None if gy is None else gy[outputs], geometry)


def compare(y, x, weight, bias, gy, geometry):
    if gy is None:
        check_layer(y, x, weight, bias, geometry, OPEN)
    else:
        check_layer_gradient(y, x, weight, bias, gy, geometry, OPEN)


def run(name, case, request, gradient=False):
    if name == "hopper":
        request.getfixturevalue("hopper")
    need(math.prod(case.x) + (2 if gradient else 1) * math.prod(case.output_shape))
    x, weight, bias = case.draw("cuda")
    if name == "composite":
        try:
            convolution.forward(x, weight, bias, case.geometry)
        except RuntimeError as error:
            pytest.skip(f"torch's convolution does not serve it: {error}")
    gy = [torch.randn(case.output_shape, device="cuda")] if gradient else []
    described = problem(case, x.device, operation="pre_gradient" if gradient else "forward")
    check(case, x, weight, bias, dispatch.plan(described, name)(x, weight, bias, *gy, constants=OPEN), *gy)


@pytest.mark.parametrize(("name", "case"), FORWARD.values(), ids=FORWARD)
def test_forward(name, case, request):
    run(name, case, request)


@pytest.mark.parametrize(("name", "case"), BACKWARD.values(), ids=BACKWARD)
def test_gradient(name, case, request):
    run(name, case, request, gradient=True)


@pytest.mark.parametrize("inplace", [True, False])
def test_epilogue_alone(inplace):
    """A value's result depends on the value alone, so that every block of the same values comes out as the first."""
    shape = 2, 3, 19_200, 19_200
    need(math.prod(shape) * (1 if inplace else 2))
    x, block = torch.empty(shape, device="cuda"), 3 * torch.randn(1_000_003, device="cuda")
    for part in x.view(-1).split(len(block)):
        part.copy_(block[: len(part)])
    y = mish_add_hardtanh_scale(x, *OPEN, inplace=inplace)
    assert (y is x) == inplace
    first = y.view(-1)[: len(block)].clone()
    check_epilogue(first, block, OPEN)
    for part in y.view(-1).split(len(block)):
        assert torch.equal(part, first[: len(part)])
