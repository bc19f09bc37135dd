"""What is measured, and the check against float64 that comes before any timing."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.results import Errors
from numba_impl import oracle
from numba_impl.case import Case
from numba_impl.epilogue import Constants
from numba_impl.oracle import BARE

CONSTANTS = Constants(add_value=0.5, scale=2.0)  # KernelBench's


@dataclass(frozen=True)
class Training:
    """y's gradient ``gy`` [N, C_out, H_out, W_out] in fp32, and what follows from it in float64, by precision."""

    gy: torch.Tensor
    truth: dict[str, oracle.Gradients]


@dataclass(frozen=True)
class Work:
    """A case with its tensors on a device; ``training``: None where the forward alone is timed."""

    case: Case
    conv: nn.ConvTranspose2d
    x: torch.Tensor
    training: Training | None = None

    @classmethod
    def draw(cls, case: Case, device, seed) -> "Work":
        torch.manual_seed(seed)
        numbers = case.kernel_size, case.stride, case.padding, case.output_padding
        conv = nn.ConvTranspose2d(case.x[1], case.out_channels, *numbers, bias=case.bias)
        return cls(case, conv.to(device), torch.randn(case.x, device=device))

    @property
    def operands(self) -> tuple:
        """(x, weight, bias, geometry), as the oracle takes them."""
        return self.x, self.conv.weight, self.conv.bias, self.case.geometry


@dataclass(frozen=True)
class Contender:
    """One way to compute the layer: ``build(constants)`` gives the function of x that is checked and timed.

    In training the function is a module, whose parameters are the weight and the bias. ``precision``: that PyTorch's flags
    permit meanwhile; ``column``: of the map of models, which says more than the precision.
    """

    name: str
    precision: str
    ours: bool
    build: Callable[[Constants], Callable]
    channels_last: bool = False
    column: str = ""

    def laid_out(self, t):
        return t.contiguous(memory_format=torch.channels_last) if self.channels_last else t

    @property
    def label(self) -> str:
        """What its row says of how it computes."""
        return self.column or self.precision

    @property
    def held_to(self) -> str:
        """The precision whose error bounds it must keep: a peer may be as inexact as TF32 in any precision."""
        return self.precision if self.ours else "tf32"


def verify(contender: Contender, work: Work):
    """(the call to time, its ``Errors``), of the result for all of x. Raises ``oracle.Wrong`` beyond the bounds."""
    x = contender.laid_out(work.x)
    function = contender.build(CONSTANTS)
    with named(contender.name, contender.held_to):
        unclamped = oracle.check_layer(contender.build(BARE)(x), *work.operands, BARE, contender.held_to)
        output = oracle.check_layer(function(x), *work.operands, CONSTANTS, contender.held_to)
    return lambda: function(x), Errors(output.largest, unclamped.relative)


@contextmanager
def named(name, precision):
    """Says in an ``oracle.Wrong`` who is wrong."""
    try:
        yield
    except oracle.Wrong as error:
        raise oracle.Wrong(f"{name} is wrong in {precision}: {error}") from error


def peak_memory(function, device) -> int | None:
    """Bytes that a call allocates at the most, beyond those allocated before it; None on a CPU, which does not tell."""
    if device.type == "cpu":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function()
    return torch.cuda.max_memory_allocated(device) - before
