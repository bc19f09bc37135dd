"""CUDA: the tiled kernel, with sums in strict fp32, and a tile chosen for the problem."""

import functools
from collections.abc import Callable

import torch

from numba_impl import gpu
from numba_impl.backends.base import FORMATS, LAYER, Backend, Plan, why_not_kernel
from numba_impl.backends.tiled import cost
from numba_impl.backends.tiled.form import form_of, staged
from numba_impl.backends.tiled.tile import Tile
from numba_impl.problem import Problem


def why_not(problem: Problem) -> str:
    if reason := why_not_kernel(problem, LAYER):
        return reason
    tile = tile_for(problem)
    if tile is None:
        return f"no tile holds the sums of {problem.geometry} in registers and its stages in shared memory"
    return too_large(problem, tile)


def cycles(problem: Problem) -> float:
    return cost.cycles(problem.geometry, tile_for(problem), problem.size, gpu.of(problem.device))


def plan(problem: Problem) -> Plan:
    fill, shape, memory_format = filler(problem, tile_for(problem)), problem.output_shape, FORMATS[problem.format]
    new = functools.partial(torch.empty, shape, dtype=problem.dtype, device=problem.device, memory_format=memory_format)
    of_x = FORMATS[problem.x.format]

    def forward(x, weight, bias, constants):
        out = new()
        fill(x.contiguous(memory_format=of_x), weight, bias, (), out, constants)
        return out

    def pre_gradient(x, weight, bias, gy, constants):
        out = new()
        fill(x.contiguous(memory_format=of_x), weight, bias, (gy.contiguous(memory_format=memory_format),), out, constants)
        return out

    return Plan(problem, forward if problem.operation == "forward" else pre_gradient)


def tile_for(problem: Problem) -> Tile | None:
    """The tile for a problem on its device."""
    return cost.choose(problem.geometry, problem.size, gpu.of(problem.device), staged(problem))


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

    ``x``, ``gy`` and ``out`` are contiguous in their formats, weight and bias of any strides; ``bias`` is None if the problem has
    none, ``gy`` a tuple of the gradient at the output, or empty if the operation takes none.
    """
    from numba_impl.backends.tiled.kernel import build
    from numba_impl.backends.tiled.weights import packer

    geometry, (_, out_channels, out_height, out_width) = problem.geometry, problem.output_shape
    form = form_of(problem, tile.packs(geometry))
    *tiles, blocks = tile.grid(geometry, problem.size)
    if not blocks:
        return lambda *arguments: None
    sizes = problem.in_channels, problem.height, problem.width, out_channels, out_height, out_width
    bias_size = 0 if problem.bias is None else out_channels
    kernel = build(geometry, tile, problem.operation, problem.epilogue, form)
    launch = kernel.prepare(problem.device, blocks, sizes, tuple(tiles), bias_size)
    arrange = packer(problem, tile) if form.packed else torch.Tensor.contiguous
    # Where they are aligned, outputs may be stored by four, and weights copied by four.
    run, of_thread = (out_width, tile.cols * geometry.cols.stride) if form.out_format == "nchw" else (out_channels, tile.channels)
    wide, aligned = run % 4 == of_thread % 4 == 0, 4 * form.out.itemsize
    whole = not form.packed and out_channels * geometry.taps % 4 == 0

    def fill(x, weight, bias, gy, out, constants):
        weight, bias = arrange(weight), x if bias is None else bias.contiguous()
        vectors = wide and out.data_ptr() % aligned == 0 and not (gy and gy[0].data_ptr() % aligned)
        launch((x, weight, bias, *gy, out), (vectors, whole and weight.data_ptr() % 16 == 0), constants)

    return fill


BACKEND = Backend(why_not, cycles, plan)
