"""CUDA: the tiled kernel, with a tile chosen for the problem."""

import torch

from numba_impl import gpu as cuda_support
from numba_impl.problem import Constants, Problem


def precision(problem: Problem) -> str:
    """Strict, also where TF32 is permitted."""
    return "fp32"


def supports(problem: Problem):
    ok, reason = cuda_support.serves(problem)
    if not ok:
        return ok, reason
    from numba_impl.backends.tiled import kernel as tiled

    tile = tile_for(problem)
    if tile is None:
        return False, f"no tile holds the sums of {problem.geometry} in registers and its stages in shared memory"
    reason = tiled.too_large(problem.geometry, tile, *problem.size)
    return not reason, reason


def pays(problem: Problem):
    """Whether the kernel is predicted to be faster than torch's convolution with the pointwise kernel, and if not, why.

    Few cells and many input channels make few blocks with long sums, which cuDNN splits; and it may use TF32.
    """
    from numba_impl.backends.tiled import cost as tiles

    multiprocessors = torch.cuda.get_device_properties(problem.device).multi_processor_count
    own = tiles.cycles(problem.geometry, tile_for(problem), problem.size, multiprocessors)
    other = tiles.composite_cycles(problem.geometry, problem.size, multiprocessors, cuda_support.cudnn_precision(problem))
    return own < other, f"it would take some {own / 1e3:.0f} thousand cycles, the composite {other / 1e3:.0f}"


def prepare(problem: Problem, backward):
    from numba_impl.backends.tiled import kernel as tiled

    geometry, tile, device, shape = problem.geometry, tile_for(problem), problem.device, problem.output_shape
    pack, launch = tiled.packer(geometry, tile), tiled.plan(geometry, tile, *problem.size, backward).prepare(device)

    def run(x, weight, bias, constants: Constants, gy):
        out = torch.empty(*shape, dtype=torch.float32, device=device)
        bias = None if bias is None else bias.contiguous()
        outputs = [gy.contiguous(), out] if backward else [out]
        launch(x.contiguous(), pack(weight), bias, outputs, constants)
        return out

    return run


def tile_for(problem: Problem):
    """The tile for a problem on its device, or None."""
    from numba_impl.backends.tiled import cost as tiles

    device = torch.cuda.get_device_properties(problem.device)
    limits = device.multi_processor_count, device.shared_memory_per_block_optin, device.shared_memory_per_multiprocessor
    return tiles.choose(problem.geometry, problem.size, *limits)
