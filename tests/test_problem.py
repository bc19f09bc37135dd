"""The parity algebra and the output sizes, against the definition and against torch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from numba_impl.arguments import permitted
from numba_impl.problem import Geometry


@st.composite
def axes(draw, most=6):
    """(input size, kernel size, stride, padding, output padding) with at least one output position."""
    stride = draw(st.integers(1, 4))
    size, kernel = draw(st.integers(1, most)), draw(st.integers(1, 7))
    output_padding = draw(st.integers(0, stride - 1))
    largest = ((size - 1) * stride + kernel + output_padding - 1) // 2
    return size, kernel, stride, draw(st.integers(0, largest)), output_padding


def geometry_of(rows, cols):
    return Geometry.of(*zip(rows[1:], cols[1:], strict=True))


def scatter(x, weight, axis_rows, axis_cols):
    """Transposed convolution by its definition: every input pixel adds its multiple of the kernel to the output."""
    (height, width), (kh, kw) = x.shape, weight.shape
    y = np.zeros((axis_rows.output_size(height), axis_cols.output_size(width)))
    for h, w, a, b in np.ndindex(height, width, kh, kw):
        row = h * axis_rows.stride - axis_rows.padding + a
        col = w * axis_cols.stride - axis_cols.padding + b
        if 0 <= row < y.shape[0] and 0 <= col < y.shape[1]:
            y[row, col] += x[h, w] * weight[a, b]
    return y


def gather(x, weight, rows, cols):
    """The same by parities and shifts, as the kernel does it: a dense correlation for each parity."""
    height, width = x.shape
    y = np.zeros((rows.cells(height) * rows.stride, cols.cells(width) * cols.stride))
    for i, j, a, b in np.ndindex(rows.cells(height), cols.cells(width), *weight.shape):
        h, w = i + rows.shifts[a], j + cols.shifts[b]
        if 0 <= h < height and 0 <= w < width:
            y[i * rows.stride + rows.parities[a], j * cols.stride + cols.parities[b]] += x[h, w] * weight[a, b]
    return y[: rows.output_size(height), : cols.output_size(width)]


@settings(max_examples=50)
@given(rows=axes(most=4), cols=axes(most=4), seed=st.integers(0, 2**32 - 1))
def test_parity_split_is_the_definition(rows, cols, seed):
    geometry, random = geometry_of(rows, cols), np.random.default_rng(seed)
    x = random.integers(-9, 10, (rows[0], cols[0])).astype(float)
    weight = random.integers(-9, 10, (rows[1], cols[1])).astype(float)
    want = scatter(x, weight, geometry.rows, geometry.cols)
    np.testing.assert_array_equal(gather(x, weight, geometry.rows, geometry.cols), want)
    theirs = torch.nn.functional.conv_transpose2d(
        torch.from_numpy(x)[None, None],
        torch.from_numpy(weight)[None, None],
        None,
        geometry.stride,
        geometry.padding,
        geometry.output_padding,
    )
    np.testing.assert_array_equal(theirs[0, 0].numpy(), want)


@given(rows=axes(most=200), cols=axes(most=200))
def test_output_size_is_torchs(rows, cols):
    geometry = geometry_of(rows, cols)
    x = torch.empty(1, 1, rows[0], cols[0], device="meta")
    weight = torch.empty(1, 1, rows[1], cols[1], device="meta")
    y = torch.nn.functional.conv_transpose2d(x, weight, None, geometry.stride, geometry.padding, geometry.output_padding)
    assert y.shape[2:] == (geometry.rows.output_size(rows[0]), geometry.cols.output_size(cols[0]))


@given(axis=axes(most=50))
def test_cells_cover_the_output_and_no_more(axis):
    rows = geometry_of(axis, axis).rows
    cells, size = rows.cells(axis[0]), rows.output_size(axis[0])
    assert (cells - 1) * rows.stride < size <= cells * rows.stride


@given(axis=axes())
def test_shifts_lie_within_the_reach(axis):
    rows = geometry_of(axis, axis).rows
    assert {shift - rows.first_shift for shift in rows.shifts} <= set(range(rows.reach + 1))


def test_the_benchmark_geometry():
    """k3 s2 p1: even outputs meet the middle tap, odd ones the outer two, of which the first lies one pixel on."""
    axis = Geometry.of(3, 2, 1, 1).rows
    assert axis.parities == (1, 0, 1)
    assert axis.shifts == (1, 0, 0)
    assert (axis.first_shift, axis.reach) == (0, 1)


def test_one_pixel_gives_the_kernels_lower_right():
    geometry, weight = Geometry.of(3, 2, 1, 1), np.arange(9.0).reshape(3, 3)
    np.testing.assert_array_equal(gather(np.ones((1, 1)), weight, geometry.rows, geometry.cols), weight[1:, 1:])


@pytest.mark.parametrize("pair", [(3, 4), [3, 4]], ids=str)
def test_pairs(pair):
    geometry = Geometry.of(pair, stride=(1, 2))
    assert (geometry.rows.kernel_size, geometry.cols.kernel_size) == (3, 4)
    assert (geometry.rows.stride, geometry.cols.stride) == geometry.stride == (1, 2)


@pytest.mark.parametrize(
    ("precision", "device", "flag", "want"),
    [
        ("fp32", "cuda", "tf32", "fp32"),
        ("tf32", "cuda", "ieee", "tf32"),
        (None, "cuda", "tf32", "tf32"),
        (None, "cuda", "ieee", "fp32"),
        (None, "cpu", "tf32", "fp32"),
    ],
)
def test_precision(precision, device, flag, want, conv_precision):
    conv_precision(flag)
    assert permitted(precision, device == "cuda") == want


@pytest.mark.parametrize(("allowed", "want"), [(True, "tf32"), (False, "fp32")])
def test_precision_follows_the_old_flag(allowed, want, conv_precision):
    torch.backends.cudnn.allow_tf32 = allowed
    assert permitted(None, True) == want
