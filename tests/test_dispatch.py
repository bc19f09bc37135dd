"""Which backend serves a call, and what ``explain`` says of it; no GPU is needed to decide."""

import sys
import warnings

import pytest
import torch

from model_numba import ModelNumba
from numba_impl import cuda_support, dispatch
from tests.cases import BENCHMARK, GPUS, NETWORK_SHAPES, Case, problem

SMALL = Case((2, 4, 5, 6), 3, 3, 2, 1, 1)


@pytest.fixture
def kernels_run(monkeypatch):
    """An H200 on which kernels run, as far as decisions ask for one."""
    monkeypatch.setattr(cuda_support, "runs_kernels", lambda device: (device.type == "cuda", f"x is on {device}"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: GPUS[9, 0])


def cuda_problem(case=BENCHMARK, **changes):
    return problem(case, "cuda", **changes)


def test_order():
    assert [name for name in dispatch.BACKENDS if name != "hopper"] == ["tiled", "composite", "cpu", "reference"]


def test_the_benchmark_goes_to_the_tiled_kernel(kernels_run):
    assert dispatch.choose(cuda_problem()) == ("tiled", {})


@pytest.mark.parametrize("case", NETWORK_SHAPES, ids=str)
def test_a_cuda_problem_goes_to_a_kernel(case, kernels_run):
    name, declined = dispatch.choose(cuda_problem(case))
    assert name in ("tiled", "composite")
    assert all(reason for reason in declined.values())


def test_tf32_goes_to_the_composite(kernels_run):
    name, declined = dispatch.choose(cuda_problem(precision="tf32"))
    assert name == "composite"
    assert list(declined) == ["tiled"] and "tf32" in declined["tiled"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (dict(dtype=torch.float16), "float16"),
        (dict(dtype=torch.bfloat16), "bfloat16"),
        (dict(dtype=torch.float64), "float64"),
        (dict(needs_grad=True), "gradients"),
        (dict(autocast=True), "autocast"),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_no_kernel_serves_goes_to_the_reference(changes, why, device, kernels_run):
    name, declined = dispatch.choose(problem(SMALL, device, **changes))
    assert name == "reference"
    assert list(declined) == [backend for backend in dispatch.BACKENDS if backend != "reference"]
    ours = ["cpu"] if device == "cpu" else ["tiled", "composite"]
    assert all(why in declined[backend] for backend in ours)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_devices(device):
    name, declined = dispatch.choose(problem(SMALL, device))
    assert name == ("cpu" if device == "cpu" else "reference")
    assert all(device in declined[backend] for backend in ("tiled", "composite"))


def test_old_gpus_are_served_by_torch(monkeypatch):
    monkeypatch.setattr(cuda_support, "capability", lambda device: (7, 5))
    name, declined = dispatch.choose(cuda_problem())
    assert name == "reference"
    assert "(7, 5)" in declined["tiled"] and "(8, 0)" in declined["tiled"]


@pytest.mark.parametrize("name", ["tiled", "composite"])
def test_a_forced_backend_serves_or_raises(name, kernels_run):
    assert dispatch.choose(cuda_problem(SMALL), name) == (name, {})
    with pytest.raises(ValueError, match=f"backend '{name}' cannot serve this call: .*gradients"):
        dispatch.choose(cuda_problem(needs_grad=True), name)


@pytest.mark.parametrize("case", [BENCHMARK, *NETWORK_SHAPES, Case((1, 64, 8, 8), 64, 3, 2, 1, 1)], ids=str)
def test_the_tiled_kernel_serves_where_it_was_measured_to_be_faster(case, kernels_run):
    assert dispatch.choose(cuda_problem(case)) == ("tiled", {})


@pytest.mark.parametrize("case", [Case((1, 512, 4, 4), 256, 4, 2, 1), Case((1, 512, 7, 7), 512, 3, 1, 1)], ids=str)
def test_few_long_sums_go_to_the_composite(case, kernels_run):
    name, declined = dispatch.choose(cuda_problem(case))
    assert name == "composite" and "cycles" in declined["tiled"]
    assert dispatch.choose(cuda_problem(case), "tiled") == ("tiled", {})


def test_a_forced_backend_need_not_pay(kernels_run, monkeypatch):
    monkeypatch.setattr(dispatch.BACKENDS["tiled"], "pays", lambda problem: (False, "it is slower here"), raising=False)
    name, declined = dispatch.choose(cuda_problem())
    assert (name, declined) == ("composite", {"tiled": "it is slower here"})
    assert dispatch.choose(cuda_problem(), "tiled") == ("tiled", {})


def test_explain():
    with torch.no_grad():
        lines = ModelNumba(4, 3, 3, 2, 1, 1, 0.5, 2).explain(torch.randn(2, 4, 5, 6)).splitlines()
    assert lines[0] == "cpu: serves 2x4x5x6 -> 2x3x10x12 on cpu in fp32"
    declined = [line.split(":")[0] for line in lines[1:]]
    assert [name for name in declined if name != "hopper"] == ["tiled", "composite"]
    assert all("declined" in line and "cpu" in line for line in lines[1:])


def test_explain_says_how_to_be_served():
    text = ModelNumba(4, 3, 3, 2, 1, 1, 0.5, 2).explain(torch.randn(4, 5, 6))
    assert text.startswith("reference: serves")
    assert "cpu: declined, gradients are needed" in text and "torch.no_grad()" in text


def test_explain_obeys_a_forced_backend():
    model = ModelNumba(4, 3, 3, 2, 1, 1, 0.5, 2, backend="reference")
    assert model.explain(torch.randn(2, 4, 5, 6)).startswith("reference: serves")
    model.backend = "tiled"
    with pytest.raises(ValueError, match="backend 'tiled' cannot serve"):
        model.explain(torch.randn(2, 4, 5, 6))


@pytest.fixture
def without_libraries(monkeypatch):
    """A capable GPU under a CUDA build of torch, but the compiler libraries cannot be imported."""
    monkeypatch.setattr(cuda_support, "capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    cuda_support.missing_libraries.cache_clear()
    yield
    cuda_support.missing_libraries.cache_clear()


def test_missing_libraries_are_named_once_and_torch_serves(without_libraries):
    with pytest.warns(RuntimeWarning, match=r"pip install .*cu13") as caught:
        name, declined = dispatch.choose(cuda_problem())
    assert len(caught) == 1
    assert name == "reference"
    assert all("cu13" in declined[backend] for backend in ("tiled", "composite"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch.choose(cuda_problem())
