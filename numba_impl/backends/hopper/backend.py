"""CUDA on Hopper: the tensor-core kernel, at fp32 or TF32 accuracy."""

import torch

from numba_impl import convolution, gpu
from numba_impl.backends.base import FORMATS, LAYER, Backend, Plan, passes, why_not_kernel
from numba_impl.backends.hopper import cost
from numba_impl.backends.hopper.layout import BOX, GEOMETRY, MAX_CHANNELS, Config, grid, too_large
from numba_impl.problem import Problem

CAPABILITY = (9, 0)  # wgmma and setmaxnreg are of sm_90a alone


def why_not(problem: Problem) -> str:
    if reason := why_not_kernel(problem, LAYER, dtypes=(torch.float32,)):
        return reason
    found = gpu.of(problem.device)
    if found.capability != CAPABILITY:
        return f"it uses instructions of compute capability {CAPABILITY} alone, {problem.device} has {found.capability}"
    sizes = tuple((axis.kernel_size, axis.stride, axis.padding) for axis in (problem.geometry.rows, problem.geometry.cols))
    kernel_size, stride, padding = served = GEOMETRY.rows.kernel_size, GEOMETRY.rows.stride, GEOMETRY.rows.padding
    if sizes != (served, served):
        return f"it is for kernel {kernel_size}, stride {stride}, padding {padding} alone, not {problem.geometry}"
    for name, channels in (("in", problem.in_channels), ("out", problem.out_channels)):
        if channels % 8 or channels > MAX_CHANNELS:
            return f"it is for multiples of 8 up to {MAX_CHANNELS} channels, not {channels} {name}"
    needed = config(problem).shared.bytes
    if needed > found.shared_per_block:
        return f"it needs {needed} bytes of shared memory a block, {problem.device} has {found.shared_per_block}"
    return too_large(problem.batch, problem.height, problem.width)


def cycles(problem: Problem) -> float:
    multiprocessors = gpu.of(problem.device).multiprocessors
    fused = cost.cycles(config(problem), problem.batch, problem.height, problem.width, multiprocessors)
    return fused + (passes(problem, 1) if problem.format == "nhwc" else 0)


def plan(problem: Problem) -> Plan:
    """The kernel knows NCHW alone, so that other formats are copied."""
    fill, shape, device, memory_format = filler(problem), problem.output_shape, problem.device, FORMATS[problem.format]

    def run(x, weight, bias, *others):
        *gy, constants = others
        out = torch.empty(*shape, dtype=torch.float32, device=device)
        fill(x.contiguous(), weight.contiguous(), bias, [t.contiguous() for t in gy], out, constants)
        return out.contiguous(memory_format=memory_format)

    return Plan(problem, run, convolution.precision(problem))


def config(problem: Problem, vector=1, bulk=True) -> Config:
    """The kernel's, by default less what the tensors' addresses decide, on which neither time nor shared memory depend."""
    terms = 3 if convolution.precision(problem) == "fp32" else 1
    return Config(problem.in_channels, problem.out_channels, terms, vector, bulk, problem.operation)


def filler(problem: Problem):
    """A function of (x, weight, bias or None, [] or [gy], out, constants), contiguous tensors, that fills ``out``."""
    from numba_impl.backends.hopper import kernel, weights
    from numba_impl.cuda import tensor_map

    device, (batch, in_channels, out_channels, height, width) = problem.device, problem.size
    shape, box, (out_height, out_width) = tuple(problem.x.shape), (BOX, 1, in_channels, 1), problem.output_shape[2:]
    strips, units, blocks = grid(batch, height, width, gpu.of(device).multiprocessors)
    split = weights.prepare(in_channels, out_channels, device)
    launches = {}  # (vector, bulk) -> launch: tensors may lie in memory in a few ways that want kernels of their own

    def launch_for(vector, bulk):
        if (vector, bulk) not in launches:
            built = kernel.build(config(problem, vector, bulk), problem.epilogue)
            launches[vector, bulk] = built.prepare(device, blocks, units, strips, (height, width, out_height, out_width))
        return launches[vector, bulk]

    def fill(x, weight, bias, gy, out, constants):
        if not batch:
            return
        bias = weight.new_zeros(out_channels) if bias is None else bias.contiguous()
        packed, factors, x_map = weights.empty(in_channels, out_channels, device)
        bulk = tensor_map.fits(x.data_ptr(), shape)
        split((weight, packed, factors, x_map), (tensor_map.encode(x.data_ptr(), shape, box) if bulk else tensor_map.NONE,))
        vector = next(v for v in (4, 2, 1) if out_width % v == 0 and not any(t.data_ptr() % (4 * v) for t in (*gy, out)))
        launch_for(vector, bulk)((x, packed, factors, x_map, weight, bias, *gy, out), constants=constants)

    return fill


BACKEND = Backend(why_not, cycles, plan)
