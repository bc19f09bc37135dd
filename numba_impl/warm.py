"""``python -m numba_impl warm`` compiles the kernels that calls of the layer need before they come, for the cache on disk."""

import logging
import sys

import torch

from numba_impl import dispatch, functional
from numba_impl.arguments import PRECISIONS
from numba_impl.cuda import cache


def main(args) -> int:
    """Print each call, and a line for each kernel when it is ready; return the exit status."""
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    logging.getLogger("numba_impl").setLevel(logging.INFO)
    try:
        if not torch.cuda.is_available():
            raise RuntimeError("there is no CUDA device, and only its kernels are kept")
        print(f"kept in {cache.folder()}", flush=True)
        for shape in args.shapes:
            for precision in PRECISIONS if args.precision == "both" else (args.precision,):
                call(shape, precision, args, "cuda")
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"error: {error}")
        return 1
    return 0


def call(shape, precision, args, device):
    """Call the layer on zeros, by the backend that dispatch chooses, and with ``args.train`` its backward."""
    settings = args.stride, args.padding, args.output_padding
    conv = torch.nn.ConvTranspose2d(shape[1], args.out_channels, args.kernel, *settings, device=device)
    x = torch.zeros(shape, device=device, requires_grad=args.train)
    arguments = x, conv.weight, conv.bias, *settings
    problem = functional.describe(*arguments, precision)
    print(dispatch.explain(problem).splitlines()[0], flush=True)
    with torch.set_grad_enabled(args.train):
        y = functional.conv_transpose2d_mish_add_hardtanh_scale(*arguments, add_value=0.5, scale=2, precision=precision)
    if args.train:
        torch.autograd.grad(y, arguments[:3], y)
