"""The peers: the same layer in plain PyTorch."""

import copy
import functools
import inspect

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.measure import Contender, Work
from numba_impl.epilogue import MISH_ADD_HARDTANH_SCALE, Constants
from numba_impl.oracle import BARE
from numba_impl.problem import Geometry


class Plain(nn.Module):
    """The layer as a user of PyTorch writes it."""

    def __init__(self, conv: nn.ConvTranspose2d, constants: Constants):
        super().__init__()
        self.conv_transpose = conv
        self.constants = constants

    def forward(self, x):
        return MISH_ADD_HARDTANH_SCALE.forward(self.conv_transpose(x), self.constants)


class PixelShuffle(nn.Module):
    """The parity split in PyTorch's operations, for kernel 3, stride 2, padding 1 and output padding 1 alone.

    A 2 x 2 convolution computes the four parities of each output channel as four channels. ``pixel_shuffle``
    interleaves them.
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
        # A cell meets the pixels below and to the right of its own. F.pad pads there alone: it is 1 % faster in NCHW, but slower
        # in channels_last, which is the faster format of the two.
        z = F.conv2d(x, self.weight, self.bias, padding=1)[:, :, 1:, 1:]
        return MISH_ADD_HARDTANH_SCALE.forward(F.pixel_shuffle(z, 2), self.constants)


def peers(work: Work, precisions, compiled=True) -> dict[str, list[Contender]]:
    """{precision: peers that suit the device and the geometry, in the table's order}.

    A compiled peer is compiled once for all precisions: its convolution is cuDNN's, which looks at the precision at each call.
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
    """Why the pixel-shuffle rewrite has no row; empty if it has one."""
    if work.training:
        return "its weights are not the layer's"
    return "" if work.case.geometry == PixelShuffle.GEOMETRY else "it is for k3 s2 p1 op1 alone"


def autotunes_transposed() -> bool:
    """Whether torch's compiler has a Triton template to try for transposed convolutions.

    That is so where the lowering of convolutions names a template of a transposed convolution, or of a convolution's gradient of
    its input, which is the same thing.
    """
    from torch._inductor.kernel import conv
    from torch._inductor.select_algorithm import TritonTemplate

    known = (getattr(conv, name, None) for name in inspect.unwrap(conv.convolution).__code__.co_names)
    names = [each.name for each in known if isinstance(each, TritonTemplate)]
    return any(part in name for name in names for part in ("transpose", "bwd_input"))


def _peer(build, precision, name, module, compiled, channels_last) -> Contender:
    build = functools.partial(build, module, compiled, channels_last)
    return Contender(name + ", channels_last" * channels_last, precision, False, build, channels_last)


def _build(conv, module, compiled, channels_last, constants):
    layer = module(conv, constants)
    if channels_last:
        layer = copy.deepcopy(layer).to(memory_format=torch.channels_last)  # the other rows share conv
    if not compiled or constants == BARE:  # a second compilation, for the second error, would take longer than the row
        return layer
    return torch.compile(layer, dynamic=False)
