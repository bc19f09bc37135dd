"""Numbers as they lie in memory, of 4 or 2 bytes, and as kernels compute with them: in fp32."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from numba.cuda import types

from numba_impl.cuda.device import device
from numba_impl.cuda.ptx import maths


class Values(NamedTuple):
    """How a kernel takes the elements of a torch dtype; ``widen`` and ``narrow`` are device functions."""

    type: types.Type  # of an element in memory: 16 bits go as an integer
    bytes: int
    widen: Callable  # an element -> fp32
    narrow: Callable  # fp32 -> an element, to nearest even
    round: Callable  # fp32 -> fp32 that the dtype holds

    @property
    def vector(self) -> int:
        """Elements of 16 bytes."""
        return 16 // self.bytes


@functools.cache
def of(dtype: torch.dtype) -> Values:
    """Of float32, bfloat16 or float16."""
    if dtype == torch.float32:
        return Values(types.float32, 4, _same, _same, _same)
    widen, narrow = {
        torch.bfloat16: (maths.from_bfloat16, maths.bfloat16),
        torch.float16: (maths.from_half, maths.half),
    }[dtype]

    @device
    def rounded(x):
        return widen(narrow(x))

    return Values(types.int16, 2, widen, narrow, rounded)


@device
def _same(x):
    return x
