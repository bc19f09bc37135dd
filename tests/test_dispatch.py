"""Which backend serves a call, and what ``explain`` says of it; no GPU is needed to decide."""

import sys
import warnings
from dataclasses import replace

import pytest
import torch

from model_numba import ModelNumba
from numba_impl import dispatch, gpu
from numba_impl.arguments import PRECISIONS, TRANSFORMED, UNCAST
from numba_impl.epilogue import Constants
from numba_impl.oracle import check_layer
from tests.cases import BENCHMARK, GPUS, NETWORK_SHAPES, Case, apply, problem

SMALL = Case((2, 4, 5, 6), 3, 3, 2, 1, 1)


@pytest.fixture
def kernels_run(monkeypatch):
    """An H200 on which kernels run, as far as decisions ask for one."""
    monkeypatch.setattr(gpu, "missing_libraries", lambda: "")
    monkeypatch.setattr(gpu, "of", lambda device: GPUS[9, 0])


def cuda_problem(case=BENCHMARK, **changes):
    return problem(case, "cuda", **changes)


def test_order():
    assert list(dispatch.BACKENDS) == ["hopper", "tiled", "composite", "cpu", "reference"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_benchmark_goes_to_the_tensor_cores(precision, kernels_run):
    assert dispatch.choose(cuda_problem(permitted=precision))[0] == "hopper"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_on_other_gpus_the_benchmark_goes_to_the_tiled_kernel(capability, kernels_run, monkeypatch):
    monkeypatch.setattr(gpu, "of", lambda device: replace(GPUS[9, 0], capability=capability))
    name, declined = dispatch.choose(cuda_problem())
    assert name == "tiled" and str(capability) in declined["hopper"]


@pytest.fixture
def h200(kernels_run, monkeypatch):
    """Gives a function that changes what is known of the H200."""
    return lambda **changes: monkeypatch.setattr(gpu, "of", lambda device: replace(GPUS[9, 0], **changes))


# Bytes of shared memory a block, and who serves the benchmark in fp32 and in TF32.
SMALLER = [(200_000, "tiled", "hopper"), (50_000, "tiled", "composite"), (1_000, "composite", "composite")]


@pytest.mark.parametrize(("shared", "fp32", "tf32"), SMALLER)
def test_a_gpu_of_less_shared_memory_is_served_by_the_next_backend(shared, fp32, tf32, h200):
    h200(shared_per_block=shared)
    name, declined = dispatch.choose(cuda_problem())
    assert name == fp32 and f"cuda has {shared}" in declined["hopper"]
    assert name == "tiled" or "no tile" in declined["tiled"]
    assert dispatch.choose(cuda_problem(permitted="tf32"))[0] == tf32


@pytest.mark.parametrize("count", [1, 7, 16, 1000])
def test_a_slice_of_a_gpu_is_given_blocks_for_its_multiprocessors(count, h200):
    h200(multiprocessors=count)
    assert dispatch.choose(cuda_problem(permitted="tf32"))[0] == "hopper"
    assert not dispatch.BACKENDS["tiled"].why_not(cuda_problem())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("changes", "precision", "name"),
    [
        (dict(multiprocessors=7), "fp32", None),
        (dict(shared_per_block=100_000), "fp32", "tiled"),
        (dict(shared_per_block=1_000), "fp32", "composite"),
        (dict(shared_per_block=1_000), "tf32", "composite"),
        (dict(capability=(8, 0)), "fp32", "tiled"),
        (dict(capability=(8, 0)), "tf32", "composite"),
        (dict(capability=(7, 5)), "fp32", "reference"),
    ],
    ids=str,
)
def test_a_gpu_that_says_it_is_smaller(changes, precision, name, monkeypatch):
    """The layer is right there, and so is every backend that still serves."""
    case = Case((5, 64, 40, 72), 64, 3, 2, 1, 1)
    x, weight, bias = case.draw("cuda")
    smaller, described = replace(gpu.of(x.device), **changes), problem(case, x.device, permitted=precision)
    monkeypatch.setattr(gpu, "of", lambda device: smaller)
    chosen, _ = dispatch.choose(described)
    assert name in (None, chosen)
    for backend in ("hopper", "tiled", "composite", "reference", None):
        if backend is None or not dispatch.BACKENDS[backend].why_not(described):
            y = apply(x, weight, bias, case, precision=precision, backend=backend)
            check_layer(y, x, weight, bias, case.geometry, Constants(-0.5, 2.0), precision)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (Case((16, 64, 64, 64), 64, 4, 2, 1), "kernel 3"),
        (Case((16, 64, 64, 64), 64, 3, 1, 1), "stride 2"),
        (Case((16, 64, 64, 64), 64, 3, 2, 0, 1), "padding 1"),
        (Case((16, 64, 64, 64), 64, (3, 5), 2, 1, 1), "kernel 3"),
        (Case((16, 60, 64, 64), 64, 3, 2, 1, 1), "60 in"),
        (Case((16, 72, 64, 64), 64, 3, 2, 1, 1), "72 in"),
        (Case((16, 64, 64, 64), 3, 3, 2, 1, 1), "3 out"),
        (Case((16, 64, 64, 64), 128, 3, 2, 1, 1), "128 out"),
    ],
    ids=str,
)
def test_outside_the_tensor_core_kernel(case, why, kernels_run):
    name, declined = dispatch.choose(cuda_problem(case))
    assert name in ("tiled", "composite") and why in declined["hopper"]
    with pytest.raises(ValueError, match=f"backend 'hopper' cannot serve this call: .*{why}"):
        dispatch.choose(cuda_problem(case), "hopper")


@pytest.mark.parametrize(
    ("backend", "case", "why"),
    [
        ("tiled", Case((1, 2, 2**15, 2**15), 3, 3, 2, 1, 1), "2\\^31 values"),
        ("tiled", Case((1, 1, 1, 1), 2**31, 1), "2\\^31 channels"),
        ("tiled", Case((2**31, 1, 1, 1), 3, 3, 2, 1, 1), "2\\^31 blocks"),
        ("hopper", Case((2**31, 8, 1, 1), 8, 3, 2, 1, 1), "32-bit"),
        ("hopper", Case((1, 8, 1, 2**30 - 1), 8, 3, 2, 1, 1), "32-bit"),
    ],
    ids=str,
)
def test_what_32_bits_do_not_count_is_declined(backend, case, why, kernels_run):
    with pytest.raises(ValueError, match=f"backend '{backend}' cannot serve this call: .*{why}"):
        dispatch.choose(cuda_problem(case), backend)


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        ("tiled", Case((1, 2, 2**15, 2**15 - 1), 3, 3, 2, 1, 1)),
        ("tiled", Case((1, 1, 1, 1), 2**27 - 1, 1)),
        ("hopper", Case((2**16, 8, 2**14, 1), 8, 3, 2, 1, 1)),
    ],
    ids=str,
)
def test_what_they_count_is_served(backend, case, kernels_run):
    assert dispatch.choose(cuda_problem(case), backend) == (backend, {})


@pytest.mark.parametrize("output_padding", [0, 1, (0, 1), (1, 0)])
@pytest.mark.parametrize("channels", [(8, 64), (64, 8), (24, 40), (56, 32)])
def test_inside_the_tensor_core_kernel(channels, output_padding, kernels_run):
    case = Case((16, channels[0], 65, 63), channels[1], 3, 2, 1, output_padding)
    assert dispatch.choose(cuda_problem(case))[0] == "hopper"


def test_few_cells_go_to_the_tiled_kernel(kernels_run):
    name, declined = dispatch.choose(cuda_problem(Case((1, 64, 8, 8), 64, 3, 2, 1, 1)))
    assert name == "tiled" and "cycles" in declined["hopper"]


@pytest.mark.parametrize("by_flags", [True, False])
@pytest.mark.parametrize(("batch", "name", "precision"), [(1, "tiled", "fp32"), (128, "hopper", "tf32")])
def test_tf32_is_a_permission(batch, name, precision, by_flags, kernels_run):
    """For few cells the tiled kernel is faster in fp32 than the tensor cores, and than torch's convolution in TF32."""
    permitted = cuda_problem(Case((batch, 64, 8, 128), 64, 3, 2, 1, 1), permitted="tf32", by_flags=by_flags)
    assert dispatch.choose(permitted)[0] == name
    assert dispatch.explain(permitted).splitlines()[0].endswith(f"in {precision}")
    assert dispatch.BACKENDS["hopper"].plan(permitted).precision == ("tf32" if batch > 1 or not by_flags else "fp32")


@pytest.mark.parametrize("case", NETWORK_SHAPES, ids=str)
def test_a_cuda_problem_goes_to_a_kernel(case, kernels_run):
    name, declined = dispatch.choose(cuda_problem(case))
    assert name in ("hopper", "tiled", "composite")
    assert all(reason for reason in declined.values())


@pytest.mark.parametrize("by_flags", [True, False])
@pytest.mark.parametrize(
    ("case", "name"),
    [
        (Case((16, 256, 32, 32), 128, 4, 2, 1), "composite"),
        (Case((8, 256, 56, 56), 256, 3, 1, 1), "composite"),
        (Case((32, 1024, 14, 14), 256, 1), "composite"),
        (Case((16, 128, 64, 64), 64, 2, 2), "tiled"),
        (Case((32, 64, 64, 64), 3, 4, 2, 1), "tiled"),
        (Case((64, 100, 1, 1), 512, 4), "tiled"),
        (Case((1, 60, 8, 8), 64, 3, 2, 1, 1), "tiled"),
    ],
    ids=str,
)
def test_tf32_is_used_where_it_saves_time(case, name, by_flags, kernels_run):
    """What is faster on an H200: cuDNN in TF32 with the pointwise kernel, or the tiled kernel in fp32."""
    permitted = cuda_problem(case, permitted="tf32", by_flags=by_flags)
    chosen, declined = dispatch.choose(permitted)
    assert chosen == name
    assert name == "tiled" or "cycles" in declined["tiled"]
    assert dispatch.plan(permitted).precision == ("fp32" if name == "tiled" else "tf32")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (dict(dtype=torch.float8_e5m2), "float8"),
        (dict(dtype=torch.float64), "float64"),
        (dict(torch_only=TRANSFORMED), "forward mode"),
        (dict(torch_only=UNCAST), "autocast"),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_no_kernel_serves_goes_to_the_reference(changes, why, device, kernels_run):
    name, declined = dispatch.choose(problem(SMALL, device, **changes))
    assert name == "reference"
    assert list(declined) == [backend for backend in dispatch.BACKENDS if backend != "reference"]
    ours = ["cpu"] if device == "cpu" else ["hopper", "tiled", "composite"]
    assert all(why in declined[backend] for backend in ours)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_devices(device):
    name, declined = dispatch.choose(problem(SMALL, device))
    assert name == ("cpu" if device == "cpu" else "reference")
    assert all(device in declined[backend] for backend in ("hopper", "tiled", "composite"))


def test_old_gpus_are_served_by_torch(monkeypatch):
    monkeypatch.setattr(gpu, "of", lambda device: replace(GPUS[9, 0], capability=(7, 5)))
    name, declined = dispatch.choose(cuda_problem())
    assert name == "reference"
    assert "(7, 5)" in declined["tiled"] and "(8, 0)" in declined["tiled"]


@pytest.mark.parametrize("name", ["tiled", "composite"])
def test_a_forced_backend_serves_or_raises(name, kernels_run):
    assert dispatch.choose(cuda_problem(SMALL), name) == (name, {})
    with pytest.raises(ValueError, match=f"backend '{name}' cannot serve this call: .*autocast"):
        dispatch.choose(cuda_problem(torch_only=UNCAST), name)


@pytest.mark.parametrize("case", [*NETWORK_SHAPES, Case((1, 64, 8, 8), 64, 3, 2, 1, 1)], ids=str)
def test_the_tiled_kernel_serves_where_it_was_measured_to_be_faster(case, kernels_run):
    name, declined = dispatch.choose(cuda_problem(case))
    assert name == ("hopper" if case == NETWORK_SHAPES[2] else "tiled")
    assert "cycles" in declined["composite"] and "cycles" in declined["reference"]


@pytest.mark.parametrize("case", [Case((1, 512, 4, 4), 256, 4, 2, 1), Case((1, 512, 7, 7), 512, 3, 1, 1)], ids=str)
def test_few_long_sums_go_to_the_composite(case, kernels_run):
    name, declined = dispatch.choose(cuda_problem(case))
    assert name == "composite" and "cycles" in declined["tiled"]
    assert dispatch.choose(cuda_problem(case), "tiled") == ("tiled", {})


@pytest.mark.parametrize(("name", "following"), [("hopper", "tiled"), ("tiled", "composite")])
def test_a_forced_backend_need_not_pay(name, following, kernels_run, monkeypatch):
    for backend in ("hopper", name):
        monkeypatch.setitem(dispatch.BACKENDS, backend, replace(dispatch.BACKENDS[backend], cycles=lambda problem: 1e12))
    chosen, declined = dispatch.choose(cuda_problem())
    assert chosen == following and declined[name].startswith("it would take some 1000000000 thousand cycles, " + following)
    assert dispatch.choose(cuda_problem(), name) == (name, {})


def test_explain():
    with torch.no_grad():
        lines = ModelNumba(4, 3, 3, 2, 1, 1, 0.5, 2).explain(torch.randn(2, 4, 5, 6)).splitlines()
    assert lines[0] == "cpu: serves 2x4x5x6 -> 2x3x10x12 on cpu in fp32"
    declined = [line.split(":")[0] for line in lines[1:]]
    assert declined == ["hopper", "tiled", "composite", "reference"]
    assert all("declined" in line and "cpu" in line for line in lines[1:])


def test_explain_names_what_is_in_the_way():
    layer = ModelNumba(4, 3, 3, 2, 1, 1, 0.5, 2).double()
    text = layer.explain(torch.randn(4, 5, 6).double())
    assert text.startswith("reference: serves") and "cpu: declined, x is torch.float64" in text


def test_explain_obeys_a_forced_backend():
    model = ModelNumba(4, 3, 3, 2, 1, 1, 0.5, 2, backend="reference")
    assert model.explain(torch.randn(2, 4, 5, 6)).startswith("reference: serves")
    model.backend = "tiled"
    with pytest.raises(ValueError, match="backend 'tiled' cannot serve"):
        model.explain(torch.randn(2, 4, 5, 6))


@pytest.fixture
def without_libraries(monkeypatch):
    """A capable GPU under a CUDA build of torch, but the compiler libraries cannot be imported."""
    monkeypatch.setattr(gpu, "of", lambda device: GPUS[9, 0])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    gpu.missing_libraries.cache_clear()
    yield
    gpu.missing_libraries.cache_clear()


def test_missing_libraries_are_named_once_and_torch_serves(without_libraries):
    with pytest.warns(RuntimeWarning, match=r"pip install .*cu13") as caught:
        name, declined = dispatch.choose(cuda_problem())
    assert len(caught) == 1
    assert name == "reference"
    assert all("cu13" in declined[backend] for backend in ("hopper", "tiled", "composite"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch.choose(cuda_problem())
