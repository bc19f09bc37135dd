"""How Hopper's bulk copy engine is told of a tensor: the driver's 128 bytes, which name a box of it and what lies outside."""

import ctypes
import functools

from cuda.bindings import driver

WORDS = 16  # of 64 bits
ALIGNED = 16  # bytes, of the tensor's address and of its rows


def fits(x) -> bool:
    """Whether the engine can load from x [N, C, H, W], fp32 and contiguous."""
    return x.numel() > 0 and x.shape[3] * x.element_size() % ALIGNED == 0 and x.data_ptr() % ALIGNED == 0


def encode(x, box) -> tuple[int, ...]:
    """The map of x [N, C, H, W], fp32 and contiguous, for boxes (width, height, channels, images), with zeros outside of x.

    All are zeros where x does not fit. Raises RuntimeError where the driver refuses.
    """
    return _encode(x.data_ptr(), tuple(reversed(x.shape)), box) if fits(x) else (0,) * WORDS


@functools.lru_cache(maxsize=256)
def _encode(address, sizes, box):
    """``sizes`` and ``box`` begin with the innermost, as the driver has them."""
    strides = [4 * sizes[0], 4 * sizes[0] * sizes[1], 4 * sizes[0] * sizes[1] * sizes[2]]
    status, encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        len(sizes),
        address,
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(stride) for stride in strides],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"no tensor map at address {address:#x} for sizes {sizes} and boxes {box}: {status.name}")
    return tuple(ctypes.c_int64(int(word)).value for word in encoded.opaque)  # signed, as the kernel's arguments are
