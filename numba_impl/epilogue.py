"""What follows the convolution: an activation with its gradient, written once for every target, and the table of them.

An epilogue maps one pre-activation z, with a few fp32 constants, to one output. Kernels and CPU loops are built with its
device functions; ``forward`` and ``gradient`` say the same in PyTorch, for the reference.
"""

import functools
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

LOG2E = np.float32(1.4426950408889634)
ONE, TWO, FOUR = map(np.float32, (1, 2, 4))
# From here on tanh(softplus(v)) rounds to 1; it also keeps e * (e + 2) finite.
SATURATED = np.float32(20)


class Operations(NamedTuple):
    """A target's compiler of scalar functions, and its operations on fp32."""

    jit: Callable
    exp2: Callable
    reciprocal: Callable
    minimum: Callable  # keeps NaN
    maximum: Callable  # keeps NaN


@dataclass(frozen=True, eq=False, repr=False)
class Epilogue:
    """An activation. ``constants`` is everywhere a tuple of floats, in the order of ``parameters``."""

    name: str
    parameters: tuple[str, ...]
    build_forward: Callable[[Operations], Callable]  # (z, constants) -> y, fp32 scalars
    build_gradient: Callable[[Operations], Callable]  # (z, gy, constants) -> the gradient at z from gy at y
    forward: Callable[[torch.Tensor, tuple], torch.Tensor]  # differentiable
    gradient: Callable[[torch.Tensor, torch.Tensor, tuple], torch.Tensor]
    check: Callable[..., tuple]  # of the constants as users give them: as floats; raises TypeError and ValueError, naming one

    def __repr__(self) -> str:
        return f"Epilogue({self.name!r})"

    def config(self, *others) -> tuple | None:
        """What a kernel is built from, as ``Kernel`` keeps it on disk by; None for an epilogue that this package does not hold,
        as nothing would show that it has changed."""
        ours = self.build_forward.__module__.partition(".")[0] == __name__.partition(".")[0]
        return (self.name, *others) if ours else None


class Constants(NamedTuple):
    """The constants of y = hardtanh(mish(z) + add_value, min_val, max_val) * scale."""

    add_value: float
    scale: float
    min_val: float = -1.0
    max_val: float = 1.0

    @classmethod
    def of(cls, add_value, scale, min_val=-1.0, max_val=1.0) -> "Constants":
        """Checked. Raises TypeError for what is no real number, ValueError for an empty interval."""
        values = {"add_value": add_value, "scale": scale, "min_val": min_val, "max_val": max_val}
        for name, value in values.items():
            if not isinstance(value, numbers.Real) or isinstance(value, bool):
                raise TypeError(f"{name} must be a real number, got {value!r}")
        if not min_val <= max_val:
            raise ValueError(f"min_val must not exceed max_val, got min_val={min_val} and max_val={max_val}")
        try:
            return cls(*map(float, values.values()))
        except OverflowError:
            raise ValueError(f"add_value, scale, min_val and max_val must fit a float, got {tuple(values.values())}") from None


def layer_constants(add_value, scale) -> Constants:
    """``Constants.of(add_value, scale)``, remembered; but for zeros, as 0.0 and -0.0 are one key."""
    plain = type(add_value) in (float, int) and type(scale) in (float, int)
    return _remembered_constants(add_value, scale) if plain and add_value and scale else Constants.of(add_value, scale)


_remembered_constants = functools.lru_cache(maxsize=256, typed=True)(Constants.of)


def _build_chain(operations: Operations):
    """``hardtanh(mish(z) + add_value, min_val, max_val) * scale``.

    mish(z) = z * tanh(log(1 + e)) = z * n / (n + 2) with e = exp(z) and n = e * (e + 2): no
    subtraction, so that it keeps its relative accuracy for negative z. NaN and infinities come out
    as in torch: mish(nan) = mish(-inf) = nan, mish(inf) = inf.
    """
    jit, _, _, minimum, maximum = operations
    tanh_softplus = _build_tanh_softplus(operations)

    @jit
    def mish_add_hardtanh_scale(z, constants):
        add_value, scale, low, high = constants
        tanh, _, _ = tanh_softplus(min(z, SATURATED))
        mish = z * tanh
        return minimum(maximum(mish + add_value, low), high) * scale

    return mish_add_hardtanh_scale


def _build_chain_gradient(operations: Operations):
    """The gradient of the chain. With its e and n, and r = 1 / (n + 2),

        mish'(z) = n r + 4 z e (e + 1) r^2

    has no cancellation but where it crosses 0, at z = -1.19. The gradient is 0 at both of hardtanh's
    bounds and beyond them, whatever ``gy``, and there the forward's output stands at a bound: the same
    operations decide. NaN and infinities come out as in torch: NaN wherever z is not finite. A finite z
    whose mish(z) + add_value is NaN gets 0.
    """
    tanh_softplus = _build_tanh_softplus(operations)

    @operations.jit
    def gradient(z, gy, constants):
        add_value, scale, low, high = constants
        capped = min(z, SATURATED)
        tanh, e, r = tanh_softplus(capped)
        mish = z * tanh
        value = mish + add_value
        slope = tanh + capped * (FOUR * e * (e + ONE)) * (r * r)
        inside = (low < value) & (value < high)
        return (gy * scale) * slope if inside else z - z  # z - z is NaN where z is not finite

    return gradient


def _build_tanh_softplus(operations: Operations):
    """``tanh_softplus(z)`` of z up to ``SATURATED``: (n r, e, r), the first of them tanh(log(1 + e))."""
    jit, exp2, reciprocal, _, _ = operations

    @jit
    def tanh_softplus(z):
        e = exp2(z * LOG2E)
        n = e * (e + TWO)
        r = reciprocal(n + TWO)
        return n * r, e, r

    return tanh_softplus


def _chain(z, constants):
    add_value, scale, low, high = constants
    return F.hardtanh(F.mish(z) + add_value, low, high) * scale


def _chain_gradient(z, gy, constants):
    add_value, scale, low, high = constants
    inside = torch.ops.aten.hardtanh_backward(gy * scale, F.mish(z) + add_value, low, high)
    return torch.ops.aten.mish_backward(inside, z)


MISH_ADD_HARDTANH_SCALE = Epilogue(
    name="mish_add_hardtanh_scale",
    parameters=Constants._fields,
    build_forward=_build_chain,
    build_gradient=_build_chain_gradient,
    forward=_chain,
    gradient=_chain_gradient,
    check=Constants.of,
)

EPILOGUES = (MISH_ADD_HARDTANH_SCALE,)
