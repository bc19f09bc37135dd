"""What the compiler makes of the kernels, for GPUs that need not be present; and what an import does not do."""

import functools
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from numba_impl import gpu
from numba_impl.backends.composite import channel_sum, elementwise
from numba_impl.backends.hopper import kernel as hopper
from numba_impl.backends.hopper import weights
from numba_impl.backends.hopper.layout import Config
from numba_impl.backends.tiled import backend
from numba_impl.backends.tiled import kernel as tiled
from numba_impl.backends.tiled.form import Form
from numba_impl.backends.tiled.tile import Tile
from numba_impl.epilogue import MISH_ADD_HARDTANH_SCALE as CHAIN
from numba_impl.problem import Geometry
from tests.cases import BENCHMARK, GPUS, NETWORK_SHAPES, problem

ROOT = Path(__file__).parent.parent.parent
LOAD16, STORE16 = r"ld\.(global|shared)(\.\w+)*\.v4\.[bfu]32", r"st\.global(\.\w+)*\.v4\.[bfu]32"
LOAD16_GLOBAL = LOAD16.replace("(global|shared)", "global")
# The instructions that widen and narrow a value.
CONVERSIONS = {
    torch.float32: (),
    torch.bfloat16: ("mov.b32 %, {z, %}", "cvt.rn.bf16.f32"),
    torch.float16: ("cvt.f32.f16", "cvt.rn.f16.f32"),
}

# Geometry, tile: other strides, kernels and tiles than those that real shapes choose.
TILED = {
    "stride 1": (Geometry.of(3, 1, 1), Tile(4, 2, 4, 8, 2, 8)),
    "stride 3x1": (Geometry.of((3, 1), (3, 1), (1, 0), (2, 0)), Tile(4, 1, 4, 8, 2, 8)),
    "narrow": (Geometry.of(2, 2), Tile(4, 1, 2, 4, 2, 16)),
    "weights as they are": (Geometry.of(3, 2, 1, 1), Tile(1, 1, 4, 16, 1, 8, blocks=4, unroll=4)),
}


every_dtype = pytest.mark.parametrize("dtype", CONVERSIONS, ids=str)


@pytest.fixture(params=GPUS, ids=lambda cc: "sm_" + "".join(map(str, cc)))
def capability(request, compile_for):
    """A compute capability, for which numba-cuda compiles."""
    compile_for(request.param)
    return request.param


def check(kernel, capability):
    """Assert what holds for the kernels of any GPU: registers alone, the instructions asked for."""
    ptx = check_registers(kernel, capability)
    assert "fma.rn.f32" in ptx and "max.NaN.f32" in ptx and "min.NaN.f32" in ptx
    assert re.search(LOAD16, ptx) and re.search(STORE16, ptx), "16-byte accesses are missing"
    return ptx


def check_registers(kernel, capability):
    """Assert what holds for every kernel: fp32 alone, and registers for all values; gives the PTX."""
    ptx = kernel.ptx(capability)
    assert ".f64" not in ptx, "computes in float64"
    assert "__local_depot" not in ptx, "keeps an array in local memory"
    report = assemble(ptx, capability)
    for used in ("stack frame", "spill stores", "spill loads"):
        assert re.findall(rf"(\d+) bytes {used}", report) == ["0"], f"{used}: {report}"
    assert "Potential Performance Loss" not in report, report
    return ptx


def assemble(ptx, capability):
    """What ptxas says of the PTX; skip where no ptxas reads it."""
    refusals = []
    for assembler in ptxas():
        command = [assembler, "-v", "-arch=sm_" + "".join(map(str, capability)), "-o", "/dev/null", "-"]
        done = subprocess.run(command, input=ptx, capture_output=True, text=True)
        if done.returncode == 0:
            return done.stderr
        refusals.append(done.stderr.strip())
        if "Unsupported .version" not in done.stderr and "not defined for option 'gpu-name'" not in done.stderr:
            pytest.fail(f"{assembler}: {done.stderr}")
    pytest.skip(f"no ptxas that reads this PTX: {refusals or 'none found'}")


@functools.lru_cache
def ptxas():
    """Every ptxas of this machine: on the PATH, of the pip packages, of triton."""
    site = Path(sysconfig.get_path("purelib"))
    places = [site / "nvidia" / part / "bin" / "ptxas" for part in ("cu13", "cuda_nvcc")]
    places.append(site / "triton" / "backends" / "nvidia" / "bin" / "ptxas")
    return [path for path in (shutil.which("ptxas"), *map(str, places)) if path and shutil.which(path)]


@every_dtype
def test_elementwise(dtype, capability):
    ptx = check(elementwise.build("activate", CHAIN, dtype), capability)
    check_conversions(ptx, dtype, values := ptx.count("ex2.approx"), values)


@every_dtype
def test_elementwise_gradient(dtype, capability):
    """Reads z and gy in 16-byte vectors, and decides on the clamp by the very instructions of the fp32 forward."""
    ptx = check_registers(elementwise.build("pre_gradient", CHAIN, dtype), capability)
    assert len(re.findall(LOAD16, ptx)) >= 2 and re.search(STORE16, ptx), "16-byte accesses are missing"
    check_conversions(ptx, dtype, 2 * (values := ptx.count("ex2.approx")), values)
    assert clamp_arithmetic(ptx) == clamp_arithmetic(elementwise.build("activate", CHAIN, torch.float32).ptx(capability))


def check_conversions(ptx, dtype, *counts):
    """Assert that so many values are widened, and so many narrowed, all of this dtype."""
    text = re.sub(r"%\w+", "%", ptx)
    found = {conversion: text.count(conversion) for conversions in CONVERSIONS.values() for conversion in conversions}
    assert found == dict.fromkeys(found, 0) | dict(zip(CONVERSIONS[dtype], counts))


def clamp_arithmetic(ptx):
    """The fp32 instructions from the first exponential to mish(z) + add_value, without their registers."""
    _, start, rest = ptx.partition("ex2.approx")
    return re.findall(r"^\t(\S+\.f32)\b", (start + rest).partition("fma.rn.f32")[0], re.MULTILINE)


def build_tiled(geometry, tile, operation):
    """In fp32 and NCHW."""
    form = Form(torch.float32, "nchw", torch.float32, torch.float32, "nchw", tile.packs(geometry))
    return tiled.build(geometry, tile, operation, CHAIN, form)


@pytest.mark.parametrize(("geometry", "tile"), TILED.values(), ids=TILED)
def test_tiled(geometry, tile, capability):
    ptx = check(build_tiled(geometry, tile, "forward"), capability)
    assert "cp.async.ca.shared.global" in ptx and "cp.async.cg.shared.global" in ptx
    check_pre_gradient(geometry, tile, capability, ptx)


def check_pre_gradient(geometry, tile, capability, forward):
    """It reads a vector of gy for each that it stores; copies, exponentials and the clamp's decision are the forward's."""
    ptx = check_registers(build_tiled(geometry, tile, "pre_gradient"), capability)
    assert len(re.findall(LOAD16_GLOBAL, ptx)) == len(re.findall(STORE16, ptx)) == len(re.findall(STORE16, forward)) > 0
    assert ptx.count("cp.async.") == forward.count("cp.async.") and ptx.count("ex2.approx") == forward.count("ex2.approx")
    assert clamp_arithmetic(ptx) == clamp_arithmetic(forward)


@pytest.mark.parametrize("case", [BENCHMARK, *NETWORK_SHAPES], ids=str)
def test_tiled_as_chosen(case, capability, monkeypatch):
    monkeypatch.setattr(gpu, "of", lambda device: GPUS[capability])
    tile = backend.tile_for(problem(case, "cuda"))
    if tile is None:
        assert case != BENCHMARK
        pytest.skip("the tiled kernel declines this shape")
    ptx = check(build_tiled(case.geometry, tile, "forward"), capability)
    if case == BENCHMARK:
        check_pre_gradient(case.geometry, tile, capability, ptx)


def test_weights(capability):
    check_registers(weights.build(), capability)


@every_dtype
def test_channel_sum(dtype, capability):
    ptx = check_registers(channel_sum.build(dtype), capability)
    vectors, alone = len(re.findall(LOAD16_GLOBAL, ptx)), len(re.findall(r"ld\.global\.\w+\s", ptx))
    assert vectors and alone, "16-byte accesses are missing"
    check_conversions(ptx, dtype, vectors * 16 // dtype.itemsize + alone, 0)


@pytest.mark.parametrize("capability", [(9, 0)], indirect=True)
@pytest.mark.parametrize(
    ("in_channels", "out_channels", "terms", "vector", "bulk", "operation"),
    [
        (64, 64, 3, 4, True, "forward"),
        (64, 64, 3, 1, False, "forward"),
        (64, 64, 1, 4, True, "forward"),
        (32, 64, 3, 1, True, "forward"),
        (64, 32, 3, 2, False, "forward"),
        (24, 40, 1, 1, False, "forward"),
        (8, 8, 3, 4, True, "forward"),
        (64, 64, 3, 4, True, "pre_gradient"),
        (64, 64, 1, 4, True, "pre_gradient"),
        (24, 40, 3, 1, False, "pre_gradient"),
        (64, 64, 3, 2, False, "pre_gradient"),
    ],
)
def test_hopper(in_channels, out_channels, terms, vector, bulk, operation, capability):
    config = Config(in_channels, out_channels, terms, vector, bulk, operation)
    ptx = check_registers(hopper.build(config, CHAIN), (*capability, "a"))
    assert ptx.count("wgmma.mma_async") == 9 * config.steps * terms, "a product is missing, or computed twice"
    assert ptx.count("ldmatrix") == 4 * config.steps * terms
    store = {4: "st.global.cs.v4.f32", 2: "st.global.cs.v2.f32", 1: "st.global.cs.f32"}[vector]
    assert ptx.count(store) == out_channels * 2 // vector, "outputs are stored in other pieces"
    gy_vectors, gy_values = (0, 0) if operation == "forward" else (out_channels // 2, 0) if vector == 4 else (0, out_channels * 2)
    assert ptx.count("ld.global.nc.v4.f32") == gy_vectors, "gy is read in other pieces"
    x_values = 0 if bulk else 8 * config.steps + 2
    assert ptx.count("ld.global.nc.f32") == x_values + gy_values, "x is read otherwise, or gy in other pieces"
    assert ("cp.async.bulk.tensor.4d.shared" in ptx) == ("fence.proxy.tensormap::generic.acquire.gpu" in ptx) == bulk
    assert config.shared.bytes <= GPUS[capability].shared_per_block


def test_import_is_quiet_and_light():
    """No warning, no CUDA context, and no Numba, which takes half a second, before a kernel is needed."""
    code = (
        "import sys, model_numba, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('numba', 'llvmlite')]\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout + done.stderr, done.stdout + done.stderr
