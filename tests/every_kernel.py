"""Every kernel on small odd shapes, beside float64: ``python -m tests.every_kernel``, a program for compute-sanitizer.

Data are drawn and results compared on the CPU, so that few kernels but ours run. docs/checks.md has the commands.
"""

import time

import torch

from numba_impl import dispatch
from numba_impl.backends.composite import channel_sum
from numba_impl.backends.composite import elementwise as pointwise
from numba_impl.backends.composite import elementwise_gradient as pointwise_backward
from numba_impl.backends.hopper import kernel as hopper
from numba_impl.backends.hopper import weights as split
from numba_impl.backends.tiled.weights import unpack_split
from numba_impl.cuda import tensor_map
from tests.accuracy import U, check_epilogue, check_epilogue_gradient, check_layer, check_layer_gradient
from tests.cases import CLAMPED, Case, problem

# Rows that begin at every fourth float, and at any; more than one tile or strip, the last of them a piece.
TILED = [Case((2, 5, 7, 22), 6, 3, 2, 1, 1), Case((1, 3, 5, 6), 5, (4, 5), (2, 3), (1, 2), (1, 0))]
HOPPER = [Case((2, 24, 3, 68), 8, 3, 2, 1, 1), Case((2, 24, 3, 67), 8, 3, 2, 1)]
SIZE = 1003


def on_gpu(*tensors):
    return [tensor.cuda() for tensor in tensors]


def run_pointwise():
    x = torch.randn(SIZE)
    y = torch.empty(SIZE, device="cuda")
    pointwise.launch(x.cuda(), y, *CLAMPED)
    check_epilogue(y.cpu(), x, CLAMPED)


def run_pointwise_backward():
    z, gy = torch.randn(SIZE), torch.randn(SIZE)
    g, clamped = torch.empty(2, SIZE, device="cuda")
    pointwise_backward.launch(*on_gpu(z, gy), g, *CLAMPED)
    pointwise.launch(z.cuda(), clamped, *CLAMPED._replace(scale=1.0))
    check_epilogue_gradient(g.cpu(), z, gy, clamped.cpu(), CLAMPED)


def run_split():
    weight = torch.randn(24, 8, 3, 3)
    packed, factors, x_map = split.outputs(weight.cuda())
    split.launch(weight.cuda(), packed, factors, x_map, tuple(range(tensor_map.WORDS)))
    bound = 2.0**-22 * weight.abs().amax((0, 2, 3)).view(-1, 1, 1)
    assert ((unpack_split(packed.cpu(), factors.cpu(), 24) - weight).abs() <= bound).all()
    assert x_map.tolist() == list(range(tensor_map.WORDS))


def run_channel_sum():
    g = torch.randn(3, 5, 13, 401)
    error = channel_sum.launch(g.cuda()).cpu() - g.double().sum((0, 2, 3))
    assert (error.abs() <= 16 * U * g.abs().double().sum((0, 2, 3))).all()


def run_tiled():
    for case in TILED:
        run_layer("tiled", case, *case.draw())


def run_hopper():
    """Besides products, a row that is computed in plain fp32 since a value is NaN."""
    for case in HOPPER:
        x, weight, bias = case.draw()
        x[1, 2, 1, 5] = float("nan")
        for precision in ("fp32", "tf32"):
            run_layer("hopper", case, x, weight, bias, precision)


def run_layer(name, case, x, weight, bias, precision="fp32"):
    """Forward and backward of a backend."""
    gy, tensors = torch.randn(case.output_shape), on_gpu(x, weight, bias)
    described = problem(case, tensors[0].device, precision=precision)
    y = dispatch.prepare(described, name)(*tensors, CLAMPED).cpu()
    g = dispatch.prepare(described, name, backward=True)(*tensors, CLAMPED, gy.cuda()).cpu()
    check_layer(y, x, weight, bias, case.geometry, CLAMPED, precision)
    check_layer_gradient(g, x, weight, bias, gy, case.geometry, CLAMPED, precision)


def main():
    runs = [run_pointwise, run_pointwise_backward, run_split, run_channel_sum, run_tiled]
    if torch.cuda.get_device_capability() == hopper.CAPABILITY:
        runs.append(run_hopper)
    for run in runs:
        start = time.perf_counter()
        run()
        print(f"{run.__name__}: right, {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
