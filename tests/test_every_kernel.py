"""The program for compute-sanitizer is right, and leaves no kernel out."""

import pytest
import torch

from numba_impl.cuda import kernel as launch
from tests import every_kernel

KERNELS = {"pointwise", "pointwise_backward", "split", "channel_sum", "tiled", "tiled_backward", "hopper", "hopper_backward"}


@pytest.mark.gpu
def test_every_kernel_is_launched(monkeypatch):
    launched, plain = set(), launch.Launch.start

    def record(prepared, values):
        launched.add(prepared._kernel.function.__name__)
        plain(prepared, values)

    monkeypatch.setattr(launch.Launch, "start", record)
    every_kernel.main()
    elsewhere = set() if torch.cuda.get_device_capability() == (9, 0) else {"split", "hopper", "hopper_backward"}
    assert launched | elsewhere == KERNELS
