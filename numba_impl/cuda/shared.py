"""Shared memory declared once: fields with shape and type, from which the kernel's offsets and the block's bytes follow."""

import functools
import math
from collections import namedtuple
from typing import NamedTuple

import numpy as np

BARRIER = np.uint64  # an mbarrier


class Field(NamedTuple):
    """An array in shared memory; it begins at a multiple of its element's size, or of ``align`` bytes if that is more."""

    name: str
    shape: tuple[int, ...]
    dtype: type[np.generic]
    align: int = 1


class Place(NamedTuple):
    """Where a field lies, in bytes. Kernels take it as a constant."""

    at: int  # of its first byte
    step: int  # from one element of its first axis to the next
    size: int


class Layout:
    """Fields one after another, each at the first byte that suits it.

    ``places``: a tuple of ``Place``, named as the fields are. ``bytes``: all that a block needs.
    """

    def __init__(self, *fields: Field):
        places, end = [], 0
        for _, shape, dtype, align in fields:
            element = np.dtype(dtype).itemsize
            at = -(-end // max(align, element)) * max(align, element)
            size = math.prod(shape) * element
            places.append(Place(at, size // shape[0], size))
            end = at + size
        self.bytes, self._names, self._places = end, [field.name for field in fields], places

    @functools.cached_property
    def places(self):
        """Made when it is asked for: a named tuple's type takes long to make, and a choice among layouts looks at their bytes."""
        return namedtuple("Places", self._names)(*self._places)
