"""The program for compute-sanitizer is right, and leaves no kernel out."""

import pytest
import torch

from numba_impl.cuda import kernel as launch
from tests import every_kernel

BUILT_FOR = "forward", "pre_gradient", "activate", "bfloat16"
ELEMENTWISE = {"elementwise activate", "elementwise pre_gradient", "channel_sum"}
EITHER = ELEMENTWISE | {"tiled forward", "tiled pre_gradient", "pack"}  # in fp32 and in 16 bits
KERNELS = EITHER | {f"{name} bfloat16" for name in EITHER}
ON_HOPPER = {"split", "hopper forward", "hopper pre_gradient"}


@pytest.mark.gpu
def test_every_kernel_is_launched(monkeypatch):
    launched, plain = set(), launch.Launch.__call__

    def record(prepared, *args, **kwargs):
        kernel = prepared._kernel
        launched.add(" ".join([kernel.function.__name__, *(word for word in BUILT_FOR if word in repr(kernel.config))]))
        plain(prepared, *args, **kwargs)

    monkeypatch.setattr(launch.Launch, "__call__", record)
    every_kernel.main()
    assert launched == KERNELS | (ON_HOPPER if torch.cuda.get_device_capability() == (9, 0) else set())
