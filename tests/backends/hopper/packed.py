"""The weights as the Hopper kernel takes them, and back, in torch."""

import torch

from numba_impl.cuda import fragments


def pack(halves, padded):
    """fp16 hi and lo, [C_in, C_out, 3, 3], in the kernel's layout: int32 [2, 9, padded / 8, C_out, 4], each a pair of fp16."""
    c_in, c_out = halves[0].shape[:2]
    packed = torch.zeros(2, 9, padded * c_out, dtype=torch.float16)
    c, channel, tap = torch.meshgrid(*map(torch.arange, (c_in, c_out, 9)), indexing="ij")
    for number, half in enumerate(halves):
        packed[number, tap, fragments.matrix_element(c, channel, c_out)] = half.reshape(c_in, c_out, 9)
    return packed.view(torch.int32).reshape(2, 9, padded // 8, c_out, 4)


def unpack(packed, factors, in_channels):
    """Weights [C_in, C_out, 3, 3] fp64, (hi + lo) * factor, from ``pack``'s layout and factors [C_out]."""
    both = packed.view(torch.float16).double().sum(0)
    flat = both.permute(1, 3, 2, 0).reshape(-1, len(factors), 9)
    return (flat[:in_channels] * factors[:, None]).reshape(in_channels, -1, 3, 3)
