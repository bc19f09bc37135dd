"""CUDA: the tiled kernel, in strict fp32, with a tile chosen for the problem."""

from collections.abc import Callable

import torch

from numba_impl import gpu
from numba_impl.backends.base import FORMATS, LAYER, Backend, Plan, why_not_kernel
from numba_impl.backends.tiled import cost
from numba_impl.backends.tiled.tile import Tile
from numba_impl.backends.tiled.weights import packer
from numba_impl.problem import Problem


def why_not(problem: Problem) -> str:
    if reason := why_not_kernel(problem, LAYER, dtypes=(torch.float32,)):
        return reason
    tile = tile_for(problem)
    if tile is None:
        return f"no tile holds the sums of {problem.geometry} in registers and its stages in shared memory"
    return too_large(problem, tile)


def cycles(problem: Problem) -> float:
    return cost.cycles(problem.geometry, tile_for(problem), problem.size, gpu.of(problem.device))


def plan(problem: Problem) -> Plan:
    tile = tile_for(problem)
    fill, pack = filler(problem, tile), packer(problem.geometry, tile)
    shape, dtype, device = problem.output_shape, problem.dtype, problem.device

    def run(x, weight, bias, *gy_and_constants):
        *gy, constants = gy_and_constants
        out = torch.empty(shape, dtype=dtype, device=device)
        bias = None if bias is None else bias.contiguous()
        fill(x.contiguous(), pack(weight), bias, [g.contiguous() for g in gy], out, constants)
        return out.contiguous(memory_format=FORMATS[problem.format])

    return Plan(problem, run)


def tile_for(problem: Problem) -> Tile | None:
    """The tile for a problem on its device."""
    return cost.choose(problem.geometry, problem.size, gpu.of(problem.device))


def too_large(problem: Problem, tile: Tile) -> str:
    """Why the kernel's 32-bit numbers do not hold a problem's sizes; empty if they do."""
    _, in_channels, out_channels, height, width = problem.size
    if in_channels * height * width >= 2**31:
        return "an image has 2^31 values or more"
    if max(problem.output_shape[1:]) >= 2**31:
        return "an output has 2^31 channels, rows or columns, or more"
    if tile.grid(problem.geometry, problem.size)[-1] >= 2**31:
        return "it would take 2^31 blocks or more"
    if -(-in_channels // tile.depth) * tile.depth * out_channels * problem.geometry.taps >= 2**31:
        return "the weight has 2^31 values or more"
    return ""


def filler(problem: Problem, tile: Tile) -> Callable:
    """A function ``(x, weight, bias, gy, out, constants)`` that fills ``out`` [N, C_out, H_out, W_out] with the kernel of a tile.

    All are contiguous. ``weight`` is what ``packer`` makes of it for this tile, ``bias`` None if the problem has none,
    ``gy`` a list of the gradient at the output, or empty if the operation takes none.
    """
    from numba_impl.backends.tiled.kernel import build

    geometry, (_, out_channels, out_height, out_width) = problem.geometry, problem.output_shape
    *tiles, blocks = tile.grid(geometry, problem.size)
    if not blocks:
        return lambda *arguments: None
    sizes = problem.in_channels, problem.height, problem.width, out_channels, out_height, out_width
    bias_size = 0 if problem.bias is None else out_channels
    kernel = build(geometry, tile, problem.operation, problem.epilogue)
    launch = kernel.prepare(problem.device, blocks, sizes, tuple(tiles), bias_size)
    # Where they are aligned, outputs may be stored by four, and weights copied by four.
    wide, whole = out_width % 4 == tile.cols * geometry.cols.stride % 4 == 0, out_channels * geometry.taps % 4 == 0

    def fill(x, weight, bias, gy, out, constants):
        arrays = x, weight, x if bias is None else bias, *gy, out
        vectors = wide and (arrays[3].data_ptr() | out.data_ptr()) % 16 == 0
        launch(arrays, (vectors, whole and weight.data_ptr() % 16 == 0), constants)

    return fill


BACKEND = Backend(why_not, cycles, plan)
