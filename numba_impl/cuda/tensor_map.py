"""How Hopper's bulk copy engine is told of a tensor: the driver's 128 bytes, which name a box of it and what lies outside."""

import ctypes
import functools

from cuda.bindings import driver

WORDS = 16  # of 64 bits
ALIGNED = 16  # bytes, of the tensor's address and of its rows
NONE = (0,) * WORDS  # instead of the map of a tensor that does not fit


def fits(address, shape) -> bool:
    """Whether the engine can load from a tensor [N, C, H, W] at an address, fp32 and contiguous."""
    return address % ALIGNED == 0 and 4 * shape[3] % ALIGNED == 0 and all(shape)


@functools.lru_cache(maxsize=256)
def encode(address, shape, box) -> tuple[int, ...]:
    """The map of a tensor [N, C, H, W] that fits, for boxes (width, height, channels, images), with zeros outside of it.

    The last maps are remembered: to ask the driver takes longer than a launch, and memory comes again at the same addresses.
    Raises RuntimeError where the driver refuses.
    """
    sizes = tuple(reversed(shape))  # the innermost first, as the driver has them, and ``box``
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
