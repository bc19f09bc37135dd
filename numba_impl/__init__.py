"""Fused ConvTranspose2d + Mish + Add + Hardtanh + Scale, as Numba kernels on PyTorch tensors.

The layers, from the top; each imports only from below:

    functional          the layer and its activation as functions of tensors
    dispatch            which backend serves a call, and why
    backend_tiled       CUDA: the fused kernel          backend_cpu   CPU: torch's convolution + njit
    backend_composite   CUDA: torch's convolution + the pointwise kernel
    reference           plain PyTorch: the truth, and what serves the rest
    kernels/tiled       parity-split, shared-memory tiled transposed convolution, epilogue fused
    kernels/pointwise   the epilogue alone
    kernels/device      inlining and unrolling          kernels/ptx   instructions that Numba lacks
    launch              compilation, torch's stream and device, array exchange
    packing             weights in the kernels' layouts
    epilogue            the scalar maths, once for every target
    problem             geometry, parity algebra, checks of every argument
"""

from numba_impl.functional import conv_transpose2d_mish_add_hardtanh_scale, mish_add_hardtanh_scale

__all__ = ["conv_transpose2d_mish_add_hardtanh_scale", "mish_add_hardtanh_scale"]
