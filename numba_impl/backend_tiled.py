"""CUDA: the tiled kernel, with a tile chosen for the problem."""

import torch

from numba_impl import cuda_support, packing
from numba_impl.problem import Constants, Problem


def supports(problem: Problem):
    ok, reason = cuda_support.serves(problem)
    if not ok:
        return ok, reason
    if problem.precision != "fp32":
        return False, f"it computes in strict fp32, and {problem.precision} is asked for or permitted"
    from numba_impl.kernels import tiled

    return tiled.supports(problem)


def run(x, weight, bias, constants: Constants, problem: Problem):
    from numba_impl.kernels import tiled

    tile = tiled.choose(problem)
    out = torch.empty(problem.output_shape, dtype=x.dtype, device=x.device)
    tiled.launch(
        x.contiguous(),
        packing.pack_tiled(weight, tile.depth, tile.tile_channels),
        packing.pack_bias(bias, problem.out_channels, tile.tile_channels, weight),
        out, problem.geometry, tile, constants.add_value, constants.scale, constants.min_val, constants.max_val,
    )
    return out
