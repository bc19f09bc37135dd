"""What several files share: sizes, backends, kinds of tensor, and the layer called one way."""

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from numba_impl import conv_transpose2d_mish_add_hardtanh_scale
from numba_impl.case import Case
from numba_impl.epilogue import MISH_ADD_HARDTANH_SCALE, Constants
from numba_impl.gpu import Gpu
from numba_impl.problem import Operand, Problem

# hardtanh's bounds: as in the layer, and open, so that no error hides behind a clamp.
CLAMPED = Constants(add_value=-0.5, scale=2.0)
OPEN = Constants(add_value=-0.5, scale=2.0, min_val=float("-inf"), max_val=float("inf"))
# Bounds that fp32 holds, so that mish(z) + add_value meets either exactly for some z.
MET = Constants(add_value=0.125, scale=-0.7, min_val=-0.125, max_val=0.875)

SENTINEL = 12345.678
# 16-bit words on either side of a guarded tensor, and their bits, a NaN's in fp16, in bf16 and, two of them, in fp32: reading one
# spoils a result, writing one changes it. And the bits of what has not been written: such a NaN's, but none that GPUs compute.
GUARD, GUARD_BITS, UNWRITTEN = 2048, 0x7FE5, 0x7FDA

# Environment in which a script, wherever it is, imports what the tests do.
IMPORTS = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, sys.path)])}


# A small layer: as a module's arguments, and as a case.
SIZES = dict(in_channels=6, out_channels=5, kernel_size=3, stride=2, padding=1, output_padding=1)
USUAL = Case((2, 6, 7, 9), 5, 3, 2, 1, 1)

# The shapes that bench.py --suite measures: the benchmark, and four from networks.
BENCHMARK = Case((128, 64, 128, 128), 64, 3, 2, 1, 1)
NETWORK_SHAPES = [
    Case((16, 256, 32, 32), 128, 4, 2, 1),
    Case((16, 128, 64, 64), 64, 2, 2),
    Case((8, 64, 128, 128), 32, 3, 2, 1, 1),
    Case((4, 48, 37, 53), 24, 5, 3, 2, 1),
]

# An A100, an H200 and a B200.
GPUS = {
    capability: Gpu(capability, multiprocessors, shared - 1024, shared)
    for capability, multiprocessors, shared in [((8, 0), 108, 167_936), ((9, 0), 132, 233_472), ((10, 0), 148, 233_472)]
}

# Where and by whom a call is served: None is dispatch's own choice.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BACKENDS = [
    *(pytest.param("cpu", name, id=f"cpu-{name}") for name in ("cpu", "reference", None)),
    *(pytest.param("cuda", name, id=f"cuda-{name}", marks=pytest.mark.gpu) for name in ("tiled", "composite", "reference", None)),
]
every_device = pytest.mark.parametrize("device", DEVICES)
every_backend = pytest.mark.parametrize(("device", "backend"), BACKENDS)


def expanded(x):
    return x[:1, :1].expand_as(x)


# A tensor's values in any memory layout.
VIEWS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "expanded": expanded,
    "sliced": lambda x: torch.cat([x, x, x], 3)[:, :, :, 1 : 1 + x.shape[3]],
    "every_second": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "batch_last": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "misaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}


class Guarded:
    """A NaN-filled ``tensor`` between two guard zones; starts ``offset`` values past 16-byte alignment."""

    def __init__(self, shape, device, offset=0, around=GUARD_BITS, dtype=torch.float32):
        words, self.around = dtype.itemsize // 2, around
        sizes = [GUARD + offset * words, torch.Size(shape).numel() * words, GUARD]
        self.before, values, self.after = torch.full((sum(sizes),), around, dtype=torch.int16, device=device).split(sizes)
        self.tensor = values.fill_(UNWRITTEN).view(dtype).view(shape)

    @classmethod
    def of(cls, values, offset=0, around=GUARD_BITS):
        """With these values, contiguous."""
        guarded = cls(values.shape, values.device, offset, around, values.dtype)
        guarded.tensor.copy_(values)
        return guarded

    def check(self):
        """Assert that the guard zones are what they were, bit for bit."""
        assert all((zone == self.around).all() for zone in (self.before, self.after)), "written outside the tensor"


def captured(model, x):
    """(a CUDA graph of one call, the call's result), after a call in which it compiles and cuDNN chooses."""
    model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x)
    return graph, y


def problem(case, device="cpu", operation="forward", dtype=torch.float32, **changes):
    """The ``Problem`` of a case as the backends see it, made by hand: contiguous, in fp32, unless ``changes`` say otherwise."""

    def operand(shape):
        return Operand(torch.Size(shape), dtype, "nchw")

    fields = dict(
        epilogue=MISH_ADD_HARDTANH_SCALE,
        weight=operand(case.weight_shape),
        bias=operand((case.out_channels,)) if case.bias else None,
        gy=operand(case.output_shape) if operation == "pre_gradient" else None,
        geometry=case.geometry,
    )
    return Problem(operation, operand(case.x), torch.device(device), **fields | changes)


def apply(x, weight, bias, case, add_value=-0.5, scale=2.0, precision="fp32", backend=None):
    """The functional form on a case's tensors and geometry."""
    return conv_transpose2d_mish_add_hardtanh_scale(
        x,
        weight,
        bias,
        case.stride,
        case.padding,
        case.output_padding,
        add_value=add_value,
        scale=scale,
        precision=precision,
        backend=backend,
    )


def eager(x, module, add_value=-0.5, scale=2.0):
    """The chain of the reference model."""
    return nn.functional.hardtanh(nn.functional.mish(module(x)) + add_value, -1, 1) * scale


def bits(t):
    """The bits of a tensor of at least 2 bytes a value, so that NaN equals itself and zeros have signs."""
    return t.detach().contiguous().view(torch.int16 if t.itemsize == 2 else torch.int32)


def assert_same(got, want, size=1.0):
    """Bit-equal on the CPU; on a GPU within a few roundings of ``size``, since cuDNN's sums may come in any order."""
    tolerance = 0 if got.device.type == "cpu" else 64 * torch.finfo(want.dtype).eps
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * size, equal_nan=True)
