"""Every kernel on small odd shapes, beside float64: ``python -m tests.every_kernel``, a program for compute-sanitizer.

Data are drawn and results compared on the CPU, so that few kernels but ours run. docs/checks.md has the commands.
"""

import time
from functools import partial

import torch

from numba_impl import arguments, dispatch, gpu
from numba_impl.epilogue import MISH_ADD_HARDTANH_SCALE as CHAIN
from numba_impl.oracle import U, check_epilogue, check_layer, check_layer_gradient
from tests.cases import CLAMPED, Case, problem

# Rows that begin at every fourth float, and at any; more than one tile or strip, the last of them a piece.
LAYERS = {
    "tiled": [
        Case((2, 5, 7, 22), 6, 3, 2, 1, 1),
        Case((1, 3, 5, 6), 5, (4, 5), (2, 3), (1, 2), (1, 0)),
        Case((1, 3, 3, 5), 9, 16, 8, 4),  # a block has the rows of one parity
    ],
    "composite": [Case((2, 5, 7, 22), 6, 3, 2, 1, 1)],
    "hopper": [Case((2, 24, 3, 68), 8, 3, 2, 1, 1), Case((2, 24, 3, 67), 8, 3, 2, 1)],
}
SIZE = 1003
NARROW = torch.bfloat16  # fp16's kernels differ in the conversions alone


def run_epilogue(dtype=torch.float32):
    x = torch.randn(SIZE).to(dtype)
    given = x.cuda()
    y = dispatch.plan(arguments.activation("activate", CHAIN, arguments.kind("x", given), ""), "composite")(
        given, None, constants=CLAMPED
    )
    check_epilogue(y.cpu(), x, CLAMPED)


def run_channel_sum(dtype=torch.float32):
    """Of planes that are read value by value, and by vectors."""
    for width in (401, 408):
        g = torch.randn(3, 5, 13, width).to(dtype)
        given = g.cuda()
        sums = dispatch.plan(arguments.channel_sum(arguments.kind("g", given)), "composite")(given)
        error = sums.cpu() - g.double().sum((0, 2, 3))
        assert (error.abs() <= 16 * U * g.abs().double().sum((0, 2, 3))).all()


def run_layers(name, dtype=torch.float32):
    """Besides products, on Hopper, a row that is computed in plain fp32 since a value is NaN."""
    for case in LAYERS[name]:
        x, weight, bias = case.draw(dtype=dtype)
        if name == "hopper":
            x[1, 2, 1, 5] = float("nan")
        for precision in ("fp32", "tf32") if name == "hopper" else ("fp32",):
            run_layer(name, case, x, weight, bias, precision)


def run_layer(name, case, x, weight, bias, precision):
    """Forward and pre-gradient of a backend."""
    gy, tensors = torch.randn(case.output_shape).to(x.dtype), [t.cuda() for t in (x, weight, bias)]
    described = partial(problem, case, tensors[0].device, dtype=x.dtype, permitted=precision)
    forward, gradient = (dispatch.plan(described(operation=operation), name) for operation in ("forward", "pre_gradient"))
    y = forward(*tensors, constants=CLAMPED).cpu()
    g = gradient(*tensors, gy.cuda(), constants=CLAMPED).cpu()
    check_layer(y, x, weight, bias, case.geometry, CLAMPED, precision, between=forward.between)
    check_layer_gradient(g, x, weight, bias, gy, case.geometry, CLAMPED, precision, between=gradient.between)


def main():
    runs = {"epilogue": run_epilogue, "channel sum": run_channel_sum} | {name: partial(run_layers, name) for name in LAYERS}
    if gpu.of(torch.device("cuda", 0)).capability != (9, 0):
        del runs["hopper"]
    narrow = {"epilogue": run_epilogue, "channel sum": run_channel_sum}
    narrow |= {name: partial(run_layers, name) for name in ("tiled", "composite")}
    runs |= {f"{name} in bf16": partial(run, dtype=NARROW) for name, run in narrow.items()}
    for name, run in runs.items():
        start = time.perf_counter()
        run()
        print(f"{name}: right, {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
