"""How the kernel takes its operands and gives its result: dtypes and memory formats."""

from dataclasses import dataclass

import torch

from numba_impl.problem import Problem


@dataclass(frozen=True)
class Form:
    """Formats are "nchw" or "nhwc"."""

    x: torch.dtype
    x_format: str
    bias: torch.dtype
    out: torch.dtype  # gy has it, too; every operand is rounded to it
    out_format: str
    packed: bool  # whether the weights are, in fp32; else they are as users have them, in fp32

    @property
    def staged(self) -> bool:
        """Whether pixels go to shared memory through registers: those of 16 bits are widened on the way, autocast's rounded."""
        return self.x != torch.float32 or self.x != self.out


def form_of(problem: Problem, tile_packs) -> Form:
    """A problem's, where a tile needs packed weights, or does not."""
    plain = problem.weight.dtype == problem.dtype == torch.float32 and problem.weight.format == "nchw"
    bias = problem.x.dtype if problem.bias is None else problem.bias.dtype
    return Form(problem.x.dtype, problem.x.format, bias, problem.dtype, problem.format, tile_packs or not plain)


def staged(problem: Problem) -> bool:
    """``Form.staged``, which decides on the tile."""
    return form_of(problem, False).staged
