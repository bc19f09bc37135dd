"""What the KernelBench harness does with ``model_numba.py``: loads its text, seeds a twin, compares, runs it repeatedly."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.cases import BENCHMARK, IMPORTS, every_device

ROOT = Path(__file__).parent.parent
ARGUMENTS = (64, 64, 3, 2, 1, 1, 0.5, 2)
SHAPES = {"cpu": (2, 64, 8, 8), "cuda": BENCHMARK.x}
SEEDS = range(5)


class Model(nn.Module):
    """The plain model."""

    def __init__(self, in_channels, out_channels, kernel_size, stride, padding, output_padding, add_value, scale):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose2d(in_channels, out_channels, kernel_size, stride, padding, output_padding)
        self.add_value, self.scale = add_value, scale

    def forward(self, x):
        x = nn.functional.mish(self.conv_transpose(x)) + self.add_value
        return nn.functional.hardtanh(x, min_val=-1, max_val=1) * self.scale


def from_text(folder):
    namespace = {}
    exec(compile((ROOT / "model_numba.py").read_text(), "<string>", "exec"), namespace)
    return namespace["ModelNew"]


def from_file(folder):
    file = folder / "generated_kernel.py"
    file.write_text((ROOT / "model_numba.py").read_text())
    spec = importlib.util.spec_from_file_location("generated_kernel", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ModelNew


LOADERS = {"text": from_text, "file": from_file}
every_loader = pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)


def seeded(kind, device):
    torch.manual_seed(42)
    model = kind(*ARGUMENTS)
    return model.cuda() if device == "cuda" else model


def inputs(seed, device):
    """On the GPU drawn there, since the CPU takes seconds."""
    torch.manual_seed(seed)
    return torch.rand(SHAPES[device], device="cuda:0" if device == "cuda" else "cpu")


def check(kind, device):
    theirs, ours = (seeded(each, device) for each in (Model, kind))
    assert ours.training
    for seed in SEEDS:
        x = inputs(seed, device)
        want, got = theirs(x), ours(x)
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@every_loader
@every_device
def test_correct(load, device, tmp_path):
    check(load(tmp_path), device)


@pytest.mark.gpu
@every_loader
def test_correct_without_tf32(load, tmp_path, conv_precision):
    """``conv_precision`` sets the flag back."""
    torch.backends.cudnn.allow_tf32 = False
    check(load(tmp_path), "cuda")


@pytest.mark.gpu
@every_loader
def test_timed_runs(load, tmp_path):
    model, x = seeded(load(tmp_path), "cuda"), inputs(0, "cuda")
    for _ in range(3):
        model(x)
    torch.cuda.synchronize()
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        y = model(x)
        end.record()
        torch.cuda.synchronize()
        assert start.elapsed_time(end) > 0
    assert y.isfinite().all()


SCRIPT = """
import pathlib, sys
from tests import test_kernelbench

test_kernelbench.check(test_kernelbench.LOADERS[sys.argv[1]](pathlib.Path.cwd()), sys.argv[2])
"""


def without_caches(folder):
    """Environment whose caches and home lie below a regular file, where not even root can write."""
    (folder / "file").write_text("")
    places = ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "CUDA_CACHE_PATH")
    return os.environ | dict.fromkeys(places, str(folder / "file" / "nowhere")) | IMPORTS


@every_device
def test_without_a_cache_directory(device, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-W", "error", str(script), "file", device]
    environment = without_caches(tmp_path)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("numba_impl keeps no compiled kernels") == (device == "cuda")
