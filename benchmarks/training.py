"""One step of training, the forward and then the gradients of x, weight and bias: checked against float64."""

import torch

from benchmarks import measure
from benchmarks.measure import CONSTANTS, Contender, Training, Work
from benchmarks.results import Errors
from numba_impl import oracle


def draw(work: Work, precisions) -> Training:
    """A random gy, 0 where the clamp's side is rounding's choice, and the float64 gradients from it with their bounds."""
    gy = oracle.clear_of_edges(torch.randn(work.case.output_shape, device=work.x.device), *work.operands, CONSTANTS, "tf32")
    x, weight, bias, geometry = work.operands
    truth = {
        precision: oracle.Gradients.of(x, weight, bias, gy, geometry, CONSTANTS, precision)
        for precision in {*precisions, "tf32"}  # peers are held to TF32's
    }
    return Training(gy, truth)


def verify(contender: Contender, work: Work):
    """(the step to time, its ``Errors``), of the gradients of all images, and for ours first of the forward.

    Raises ``oracle.Wrong`` beyond the bounds.
    """
    if contender.ours:
        measure.verify(contender, work)
    step = build_step(contender, work)
    with measure.named(contender.name, contender.held_to):
        return step, Errors(gradient=work.training.truth[contender.held_to].check(step()).relative)


def build_step(contender: Contender, work: Work):
    """A function without arguments: forward and backward, which gives the gradients of (x, weight, bias)."""
    layer = contender.build(CONSTANTS)
    x, gy = (contender.laid_out(t) for t in (work.x, work.training.gy))
    inputs = x.detach().requires_grad_(), *layer.parameters()

    @torch.enable_grad()
    def step():
        return torch.autograd.grad(layer(inputs[0]), inputs, gy)

    return step
