"""The maps of wgmma and ldmatrix, alone and together."""

import numpy as np
import pytest

from numba_impl.cuda import fragments
from tests.cuda.tensor_core import THREADS, as_operand, as_weights, load_fragment, once


@pytest.mark.parametrize("columns", [8, 16, 24, 64, 256])
def test_accumulators_are_each_element_once(columns):
    row, column = fragments.accumulator(THREADS[:, None], np.arange(columns // 2))
    assert once(64 * columns, row * columns + column)


def test_operands_are_each_element_once():
    row, k = fragments.operand(THREADS[:, None], np.arange(4))
    assert once(64 * 16, row * 16 + k, row * 16 + k + 1)


def test_loaded_rows_fill_the_operands():
    a = np.arange(64 * 16).astype(np.float16).reshape(64, 16)
    row, k = fragments.loaded_row(THREADS)
    loaded = load_fragment(a.view(np.uint8).ravel(), row * 32 + k * 2)
    assert np.array_equal(as_operand(loaded), a)


@pytest.mark.parametrize("columns", [8, 24, 64])
def test_matrix_elements_are_where_wgmma_looks(columns):
    """By a descriptor: 16 of depth after another."""
    b = np.arange(32 * columns).astype(np.float16).reshape(32, columns)
    memory = np.full(b.size, np.nan, np.float16)
    k, column = np.ogrid[:32, :columns]
    memory[fragments.matrix_element(k, column, columns)] = b
    for step in range(2):
        found = as_weights(memory.view(np.uint8), 2 * columns * step, columns)
        assert np.array_equal(found, b[16 * step : 16 * step + 16])


@pytest.mark.parametrize("columns", [8, 24, 64])
def test_descriptors_say_where_the_core_matrices_are(columns):
    """In bytes / 16: bits 16 ... 29 from 8 k to the next, bits 32 ... 45 from 8 columns to the next; nothing else is set."""
    descriptor, at = fragments.descriptor(columns), fragments.matrix_element
    assert descriptor >> 16 & 0x3FFF == 2 * (at(8, 0, columns) - at(0, 0, columns)) / 16
    assert descriptor >> 32 & 0x3FFF == 2 * (at(0, 8, columns) - at(0, 0, columns)) / 16
    assert descriptor & ~(0x3FFF << 16 | 0x3FFF << 32) == 0
