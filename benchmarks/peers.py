"""What the layer is measured against: the same layer in plain PyTorch."""

import copy
import functools

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.measure import UNCLAMPED, Contender, Work
from numba_impl.backends import reference
from numba_impl.problem import Constants, Geometry


class Plain(nn.Module):
    """The layer as one writes it."""

    def __init__(self, conv: nn.ConvTranspose2d, constants: Constants):
        super().__init__()
        self.conv_transpose = conv
        self.constants = constants

    def forward(self, x):
        return reference.mish_add_hardtanh_scale(self.conv_transpose(x), self.constants)


class PixelShuffle(nn.Module):
    """The parity split, for kernel 3, stride 2, padding 1 and output padding 1 alone.

    A 2 x 2 convolution computes the four parities of each output channel as four channels, which
    ``pixel_shuffle`` interleaves.
    """

    GEOMETRY = Geometry.of(3, 2, 1, 1)

    def __init__(self, conv: nn.ConvTranspose2d, constants: Constants):
        super().__init__()
        self.weight = nn.Parameter(self.rearrange(conv.weight))
        self.bias = nn.Parameter(conv.bias.repeat_interleave(4))
        self.constants = constants

    @classmethod
    def rearrange(cls, weight):
        """[C_in, C_out, 3, 3] -> [C_out * 4 parities, C_in, 2, 2]."""
        c_in, c_out, kh, kw = weight.shape
        split = weight.new_zeros(c_out, 2, 2, c_in, 2, 2)  # output channel, parities, input channel, shifts
        rows, cols = cls.GEOMETRY.rows, cls.GEOMETRY.cols
        for i in range(kh):
            for j in range(kw):
                split[:, rows.parities[i], cols.parities[j], :, rows.shifts[i], cols.shifts[j]] = weight[:, :, i, j].T
        return split.reshape(4 * c_out, c_in, 2, 2)

    def forward(self, x):
        # A cell meets the pixels below and to the right of its own. Padding there alone, by F.pad, is 1 % faster in NCHW, and
        # slower in channels_last, which is the faster of the two.
        z = F.conv2d(x, self.weight, self.bias, padding=1)[:, :, 1:, 1:]
        return reference.mish_add_hardtanh_scale(F.pixel_shuffle(z, 2), self.constants)


def peers(work: Work, precisions, compiled=True) -> dict[str, list[Contender]]:
    """By precision, those that make sense on the device and for the geometry, in the order of the table.

    What is compiled is compiled once: its convolution is cuDNN's, which looks at the precision at each call.
    """
    if compiled:
        torch._dynamo.reset()  # a fresh compilation for each case, not a more general one
    build = functools.cache(functools.partial(_build, work.conv))
    found = {}
    for precision in precisions:
        formats = (False, True) if precision == "tf32" else (False,)
        kinds = [("eager", Plain, False, last) for last in formats]
        if compiled:
            kinds.append(("torch.compile", Plain, True, False))
            if work.x.is_cuda and not no_pixel_shuffle(work):
                kinds += [("pixel-shuffle compiled", PixelShuffle, True, last) for last in (False, True)]
        found[precision] = [_peer(build, precision, *kind) for kind in kinds]
    return found


def no_pixel_shuffle(work: Work) -> str:
    """Why the pixel-shuffle rewrite has no row, or nothing."""
    if work.gradients:
        return "its weights are not the layer's"
    return "" if work.case.geometry == PixelShuffle.GEOMETRY else "it is for k3 s2 p1 op1 alone"


def _peer(build, precision, name, module, compiled, channels_last) -> Contender:
    build = functools.partial(build, module, compiled, channels_last)
    return Contender(name + ", channels_last" * channels_last, precision, False, build, channels_last)


def _build(conv, module, compiled, channels_last, constants):
    layer = module(conv, constants)
    if channels_last:
        layer = copy.deepcopy(layer).to(memory_format=torch.channels_last)  # the other rows share conv
    if not compiled or constants == UNCLAMPED:  # for the second error a second compilation would take longer than the row
        return layer
    return torch.compile(layer, dynamic=False)
