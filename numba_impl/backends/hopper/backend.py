"""CUDA on Hopper: the tensor-core kernel, at fp32 or TF32 accuracy."""

import torch

from numba_impl import gpu as cuda_support
from numba_impl.backends.tiled import backend as backend_tiled
from numba_impl.problem import Constants, Problem

AXIS = 3, 2, 1  # kernel, stride, padding

precision = cuda_support.precision


def supports(problem: Problem):
    ok, reason = cuda_support.serves(problem)
    if not ok:
        return ok, reason
    from numba_impl.backends.hopper import kernel as hopper

    capability = cuda_support.capability(problem.device)
    if capability != hopper.CAPABILITY:
        return False, f"it uses instructions of compute capability {hopper.CAPABILITY} alone, {problem.device} has {capability}"
    if any((axis.kernel_size, axis.stride, axis.padding) != AXIS for axis in (problem.geometry.rows, problem.geometry.cols)):
        return False, f"it is for kernel {AXIS[0]}, stride {AXIS[1]}, padding {AXIS[2]} alone, not {problem.geometry}"
    for name, channels in (("in", problem.in_channels), ("out", problem.out_channels)):
        if channels % 8 or channels > hopper.MAX_CHANNELS:
            return False, f"it is for multiples of 8 up to {hopper.MAX_CHANNELS} channels, not {channels} {name}"
    needed = config(problem).shared_bytes
    available = torch.cuda.get_device_properties(problem.device).shared_memory_per_block_optin
    if needed > available:
        return False, f"it needs {needed} bytes of shared memory a block, {problem.device} has {available}"
    reason = hopper.too_large(problem.batch, problem.height, problem.width)
    return not reason, reason


def pays(problem: Problem):
    """Whether the kernel is predicted to be faster than the tiled one, and if not, why.

    Its blocks start with the weights, 147 KB in fp32, split by a kernel before it: too much for a few cells.
    """
    from numba_impl.backends.hopper import kernel as hopper
    from numba_impl.backends.tiled import cost as tiles

    tile = backend_tiled.tile_for(problem)
    if tile is None:
        return True, ""
    multiprocessors = torch.cuda.get_device_properties(problem.device).multi_processor_count
    own = hopper.cycles(config(problem), problem.batch, problem.height, problem.width, multiprocessors)
    other = tiles.cycles(problem.geometry, tile, problem.size, multiprocessors)
    return own < other, f"it would take some {own / 1e3:.0f} thousand cycles, the tiled kernel {other / 1e3:.0f}"


def terms(problem: Problem) -> int:
    return 3 if precision(problem) == "fp32" else 1


def config(problem: Problem):
    """The kernel's, less what the alignment of the output decides."""
    from numba_impl.backends.hopper import kernel as hopper

    return hopper.Config(problem.in_channels, problem.out_channels, terms(problem), vector=1)


def prepare(problem: Problem, backward):
    from numba_impl.backends.hopper import kernel as hopper
    from numba_impl.backends.hopper import weights as split

    shape = problem.output_shape
    pack, number = split.prepare(problem.in_channels, problem.out_channels, problem.device), terms(problem)

    def run(x, weight, bias, constants: Constants, gy):
        packed, factors, x_map = split.outputs(weight)
        x, weight = x.contiguous(), weight.contiguous()
        pack((weight, packed, factors, x_map), (hopper.map_of(x),))
        bias = weight.new_zeros(problem.out_channels) if bias is None else bias.contiguous()
        out = torch.empty(*shape, dtype=torch.float32, device=weight.device)
        outputs = [gy.contiguous(), out] if backward else [out]
        hopper.start(x, packed, factors, x_map, weight, bias, outputs, number, constants)
        return out

    return run
