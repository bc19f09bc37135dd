"""The check of results in 16 bits: float64 on the rounded operands, and eager PyTorch's own error in the same dtype.

Each operation rounds to the dtype, and eager has one after the other, so that no tighter bound than eager's own error is at hand.
With x, weight and bias (and gy) rounded to the dtype and the chain in float64 as the truth, ours may have

- a relative L2 error over the whole tensor of at most 1.05 times eager's, plus that of the truth rounded to the dtype once, which
  is half an ulp's share;
- a largest error of at most twice eager's, plus that of the truth rounded once: the L2 error would not show a few wrong values.

NaN where eager has none is wrong by either. In training both hold for each gradient of x, weight and bias. There ``gy`` is 0
where the value before the clamp is within 4 ulps of a bound: which side it falls on is rounding's choice.
"""

import torch
from torch.nn.functional import mish

from benchmarks import measure, training
from benchmarks.measure import CONSTANTS, Contender, Training, Work
from benchmarks.results import Errors
from numba_impl import convolution, oracle
from numba_impl.epilogue import MISH_ADD_HARDTANH_SCALE as CHAIN

LEEWAY = 1.05  # times eager's relative L2 error
FURTHEST = 2  # times eager's largest error: which values lie worst differs with the order of sums
ULPS = 4  # of a value at the clamp's bounds, which are of size 1: more than the roundings before the clamp


def verify(contender: Contender, eager: Contender, work: Work, dtype):
    """(the call to time, its ``Errors``) of a contender whose products and result have ``dtype``.

    In training the call is the step, which is checked after the forward. Raises ``oracle.Wrong`` beyond the bounds.
    """
    layers = [each.build(CONSTANTS) for each in (contender, eager)]
    with measure.named(contender.name, contender.label):
        z = pre_activation(work, dtype)
        found = require("the output", *(layer(work.x) for layer in layers), CHAIN.forward(z, CONSTANTS), dtype)
        if not work.training:
            return lambda: layers[0](work.x), Errors(output=found.largest)
        steps = [training.build_step(each, work) for each in (contender, eager)]
        truth = gradients(work, z, dtype)
        named = zip(("x", "weight", "bias"), *(step() for step in steps), truth, strict=True)
        worst = max(require(f"the gradient of {name}", *tensors, dtype).relative for name, *tensors in named)
    return steps[0], Errors(gradient=worst)


def draw(work: Work, dtype) -> Training:
    """A random gy [N, C_out, H_out, W_out] of ``dtype``, 0 where the clamp's side is rounding's choice."""
    value = mish(pre_activation(work, dtype)) + CONSTANTS.add_value
    nearest = torch.minimum((value - CONSTANTS.min_val).abs(), (value - CONSTANTS.max_val).abs())
    gy = torch.randn(work.case.output_shape, device=work.x.device)
    return Training(gy.masked_fill_(nearest < ULPS * torch.finfo(dtype).eps, 0).to(dtype), {})


def pre_activation(work: Work, dtype):
    """In float64, of operands rounded to ``dtype``."""
    x, weight, bias, geometry = work.operands
    return convolution.forward(*_rounded(dtype, x, weight, bias), geometry)


def gradients(work: Work, z, dtype) -> tuple:
    """Of x, weight and bias in float64, from the pre-activation ``z`` in float64."""
    x, weight, _, geometry = work.operands
    x, weight, gy = _rounded(dtype, x, weight, work.training.gy)
    g = CHAIN.gradient(z, gy, CONSTANTS)
    return *convolution.gradients(g, x, weight, geometry, True, True), g.sum((0, 2, 3))


def require(what, got, eager, want, dtype) -> oracle.Errors:
    """The errors of ``got`` against ``want`` in float64. Raises ``oracle.Wrong`` beyond the bounds."""
    found, theirs, once = (errors(t, want) for t in (got, eager, want.to(dtype)))
    for kind, own, limit in (
        ("relative L2 error", found.relative, LEEWAY * theirs.relative + once.relative),
        ("largest error", found.largest, FURTHEST * theirs.largest + once.largest),
    ):
        if not own <= limit:
            raise oracle.Wrong(f"{kind} of {what} {own:.3g}, allowed {limit:.3g}")
    return found


def errors(got, want) -> oracle.Errors:
    """Of ``got`` against ``want`` in float64."""
    difference = got.detach().double() - want
    return oracle.Errors(difference.abs().amax().item(), (difference.norm() / want.norm()).item())


def _rounded(dtype, *tensors):
    """In float64, rounded to ``dtype``."""
    return (t.detach().to(dtype).double() for t in tensors)
