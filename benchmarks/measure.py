"""Check one way to compute the layer against float64."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.results import Case, Errors
from numba_impl.backends import reference
from numba_impl.problem import Constants

UNCLAMPED = Constants(0.0, 1.0, -float("inf"), float("inf"))  # plain mish: no clamp hides an error
OUTPUT_BOUND = {"fp32": 2e-5, "tf32": 1e-2}  # absolute, times the scale
UNCLAMPED_BOUND = {"fp32": 1e-6, "tf32": 1e-3}
SLICE = 2**25  # output values checked at a time: 256 MiB in float64


class WrongResult(Exception):
    """A result is further from float64 than its precision explains."""


@dataclass(frozen=True)
class Gradients:
    """``gy``, y's [N, C_out, H_out, W_out] in fp32, and the ``exact`` ones of (x, weight, bias) from it, in float64."""

    gy: torch.Tensor
    exact: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Work:
    """A case with its tensors on a device; ``gradients``: None where the forward alone is timed."""

    case: Case
    conv: nn.ConvTranspose2d
    x: torch.Tensor
    gradients: Gradients | None = None

    @classmethod
    def draw(cls, case: Case, device, seed) -> "Work":
        torch.manual_seed(seed)
        shape = case.shape[1], case.out_channels, case.kernel_size, case.stride, case.padding, case.output_padding
        return cls(case, nn.ConvTranspose2d(*shape).to(device), torch.randn(case.shape, device=device))

    @property
    def constants(self) -> Constants:
        return Constants(self.case.add_value, self.case.scale)


@dataclass(frozen=True)
class Contender:
    """One way to compute the layer: ``build(constants)`` gives the function of x that is checked and timed.

    In training the function is a module, whose parameters are the weight and the bias.
    """

    name: str
    precision: str
    ours: bool
    build: Callable[[Constants], Callable]
    channels_last: bool = False

    def laid_out(self, t):
        return t.contiguous(memory_format=torch.channels_last) if self.channels_last else t


def peak_memory(function, device) -> int | None:
    """Bytes that a call allocates at the most, over what is allocated before it; None on a CPU, which does not tell."""
    if device.type == "cpu":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function()
    return torch.cuda.max_memory_allocated(device) - before


def verify(contender: Contender, work: Work):
    """(the call to time, its ``Errors``): the result for all of x, against float64 computed a few images at a time.

    Raises ``WrongResult`` beyond the bounds; a peer may be as inexact as TF32 in any precision.
    """
    x = contender.laid_out(work.x)
    weight, bias = work.conv.weight.double(), work.conv.bias.double()

    def exact(images):
        return reference.conv_transpose2d(work.x[images].double(), weight, bias, work.case.geometry)

    unclamped = contender.build(UNCLAMPED)(x)
    function = contender.build(work.constants)
    found = differences(function(x), unclamped, exact, work.constants)
    check(contender.name, contender.precision if contender.ours else "tf32", found, work.case.scale)
    return lambda: function(x), found


def differences(output, unclamped, exact, constants) -> Errors:
    """Of results from float64; ``exact(images)`` is the pre-activation of a slice of the batch."""
    images = images_at_a_time(output)
    largest, wrong, total = [], [], []
    for first in range(0, output.shape[0], images):
        part = slice(first, first + images)
        z = exact(part)
        mish = reference.mish_add_hardtanh_scale(z, UNCLAMPED)
        largest.append((output[part] - reference.mish_add_hardtanh_scale(z, constants)).abs().max())
        wrong.append((unclamped[part] - mish).square().sum())
        total.append(mish.square().sum())
    relative = (torch.stack(wrong).sum() / torch.stack(total).sum()).sqrt()
    return Errors(torch.stack(largest).max().item(), relative.item())  # both keep NaN


def images_at_a_time(output) -> int:
    """How many images of ``output`` make a slice, at least one."""
    return max(1, SLICE // max(1, output[0].numel()))


def check(name, precision, found: Errors, scale):
    """Raises ``WrongResult`` unless both errors are within the bounds of a precision; NaN is not."""
    for what, error, bound in (
        ("largest output error", found.output, OUTPUT_BOUND[precision] * scale),
        ("unclamped relative L2 error", found.unclamped, UNCLAMPED_BOUND[precision]),
    ):
        require(name, precision, what, error, bound)


def require(name, precision, what, error, bound):
    """Raises ``WrongResult`` unless an error is within its bound."""
    if not error <= bound:
        raise WrongResult(f"{name} is wrong: {what} {error:.3g}, allowed in {precision} {bound:.3g}")
