"""The highest rates that the device reaches, for the roofline: products of large matrices, and copies of long tensors."""

import torch

from benchmarks.timer import Timer

SIDE = {"cuda": 8192, "cpu": 1024}  # rows and columns of the matrices
COPIED = {"cuda": 2**28, "cpu": 2**24}  # fp32 values, several times any cache


def measure(timer: Timer) -> dict[str, float]:
    """{"memory": GB/s read and written, precision: TFLOP/s}; a CPU has fp32 alone."""
    device, found = timer.device, {"memory": memory(timer)}
    operands = torch.randn(2, SIDE[device.type], SIDE[device.type], device=device)
    found["fp32"] = _product(timer, operands, "highest")
    if device.type == "cuda":
        found["tf32"] = _product(timer, operands, "high")
        found["fp16"] = _product(timer, operands.half(), "highest")
    return found


def memory(timer: Timer) -> float:
    """GB/s read and written by ``copy_``."""
    source = torch.randn(COPIED[timer.device.type], device=timer.device)
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / timer.copy(target, source).median / 1e6


def _product(timer: Timer, operands, precision) -> float:
    """TFLOP/s of a product; ``precision``: torch's name of the precision that fp32 products may use."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        return 2 * operands.shape[1] ** 3 / timer(lambda: torch.mm(*operands)).median / 1e9
    finally:
        torch.set_float32_matmul_precision(before)
