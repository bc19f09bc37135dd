"""The table of backends. Where two are predicted to take the same time, the first serves."""

from numba_impl.backends import cpu, reference
from numba_impl.backends.composite import backend as composite
from numba_impl.backends.hopper import backend as hopper
from numba_impl.backends.tiled import backend as tiled

BACKENDS = {
    "hopper": hopper.BACKEND,
    "tiled": tiled.BACKEND,
    "composite": composite.BACKEND,
    "cpu": cpu.BACKEND,
    "reference": reference.BACKEND,
}
