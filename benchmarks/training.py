"""One step of training, the forward and then the gradients of x, weight and bias: checked against float64."""

import torch

from benchmarks import measure
from benchmarks.measure import OUTPUT_BOUND, UNCLAMPED, Contender, Gradients, Work
from benchmarks.results import Errors
from numba_impl.backends import reference

BOUND = {"fp32": 1e-4, "tf32": 1e-2}  # relative L2 of a gradient: TF32's is 3e-4
EDGE = OUTPUT_BOUND["tf32"]  # nearer to a bound of the clamp than this, rounding decides on which side a value lies


def draw(work: Work) -> Gradients:
    """A random gy, 0 where the exact result lies at the clamp's edge, so that either side is right; and what follows from it."""
    gy = torch.randn(work.case.output_shape, device=work.x.device)
    images = measure.images_at_a_time(gy)
    parts = [_exact(work, *part) for part in zip(work.x.split(images), gy.split(images), strict=True)]
    of_x, of_weight, of_bias = zip(*parts, strict=True)
    return Gradients(gy, (torch.cat(of_x), sum(of_weight), sum(of_bias)))


@torch.enable_grad()
def _exact(work: Work, x, gy):
    """The float64 gradients from some images. ``gy`` becomes 0 at the clamp's edge."""
    constants = work.constants
    inputs = [t.detach().double().requires_grad_() for t in (x, work.conv.weight, work.conv.bias)]
    z = reference.conv_transpose2d(*inputs, work.case.geometry)
    y = reference.mish_add_hardtanh_scale(z, constants)
    clamped = reference.mish_add_hardtanh_scale(z.detach(), UNCLAMPED) + constants.add_value
    for bound in (constants.min_val, constants.max_val):
        gy.masked_fill_((clamped - bound).abs() < EDGE, 0)
    return torch.autograd.grad(y, inputs, gy.double())


def verify(contender: Contender, work: Work):
    """(the step to time, its ``Errors``); the gradients of all images are checked, and of ours first the forward.

    Raises ``WrongResult`` beyond the bounds; a peer may be as inexact as TF32 in any precision.
    """
    if contender.ours:
        measure.verify(contender, work)
    step = build_step(contender, work)
    found = error_of(step(), work.gradients.exact)
    precision = contender.precision if contender.ours else "tf32"
    measure.require(contender.name, precision, "relative L2 error of a gradient", found, BOUND[precision])
    return step, Errors(gradient=found)


def build_step(contender: Contender, work: Work):
    """A function without arguments: forward and backward, which gives the gradients of (x, weight, bias)."""
    layer = contender.build(work.constants)
    x, gy = (contender.laid_out(t) for t in (work.x, work.gradients.gy))
    inputs = x.detach().requires_grad_(), *layer.parameters()

    @torch.enable_grad()
    def step():
        return torch.autograd.grad(layer(inputs[0]), inputs, gy)

    return step


def error_of(gradients, exact) -> float:
    """The largest relative L2 error of any; keeps NaN."""
    errors = [(found - right).norm() / right.norm() for found, right in zip(gradients, exact, strict=True)]
    return torch.stack(errors).max().item()
