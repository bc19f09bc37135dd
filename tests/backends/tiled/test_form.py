"""The tiled kernel in every dtype and format, and with a parity of rows a block (simulator and GPU); what it compiles to."""

import itertools
from dataclasses import replace

import pytest
import torch

from numba_impl import gpu
from numba_impl.backends.tiled import backend, kernel
from numba_impl.backends.tiled.form import form_of
from numba_impl.backends.tiled.tile import Tile
from numba_impl.epilogue import MISH_ADD_HARDTANH_SCALE as CHAIN
from numba_impl.oracle import check_layer, check_layer_gradient
from tests.backends.tiled.test_kernel import SMALL
from tests.cases import GPUS, OPEN, VIEWS, Case, problem
from tests.cuda.test_codegen import check_registers

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
FORMATS = {"nchw": VIEWS["contiguous"], "nhwc": VIEWS["channels_last"]}
APART = Tile(4, 1, 4, channel_groups=1, row_groups=2, col_groups=2, depth=2, row_parity=True)

PATHS = {
    "tails along every axis": (Case((2, 3, 3, 9), 5, 3, 2, 1, 1), SMALL),
    "vectors of columns": (Case((1, 2, 2, 8), 8, 3, 2, 1, 1), SMALL),
    "vectors of channels, several tiles": (Case((2, 4, 5, 5), 16, 4, 2, 1), SMALL),
    "one pixel, one channel": (Case((1, 1, 1, 1), 1, 3, 2, 1, 1), SMALL),
    "more stages than one, no bias": (Case((1, 5, 2, 3), 4, 2, 2, bias=False), SMALL),
    "1 channel a thread": (Case((1, 3, 3, 5), 6, 3, 2, 1, 1), Tile(1, 1, 4, 4, 1, 1, depth=2)),
    "1 output channel": (Case((1, 4, 3, 5), 1, 3, 3, 1), Tile(1, 1, 2, 1, 2, 2, depth=4)),
    "3 output channels": (Case((1, 4, 3, 5), 3, 4, 2, 1), Tile(3, 1, 2, 1, 2, 2, depth=4)),
    "a parity of rows a block": (Case((2, 3, 3, 5), 5, 6, 3, 2, 1), APART),
    "parities of unequal taps": (Case((1, 3, 4, 5), 4, (5, 4), (3, 2), (1, 1), (2, 0)), APART),
    "kernel smaller than stride, apart": (Case((1, 3, 3, 5), 4, 2, 3, 0, 2), APART),
    "padding beyond the kernel, apart": (Case((1, 3, 8, 9), 4, 2, 2, 3), APART),
}
# dtypes of x, of the parameters and of the result; formats of x and of the weight.
FORMS = {
    "fp32 nhwc": (FLOAT32, FLOAT32, FLOAT32, "nhwc", "nchw"),
    "fp32 nchw, weight nhwc": (FLOAT32, FLOAT32, FLOAT32, "nchw", "nhwc"),
    "bf16 nchw": (BFLOAT16, BFLOAT16, BFLOAT16, "nchw", "nchw"),
    "bf16 nhwc": (BFLOAT16, BFLOAT16, BFLOAT16, "nhwc", "nhwc"),
    "fp16 nhwc": (FLOAT16, FLOAT16, FLOAT16, "nhwc", "nchw"),
    "autocast to bf16": (FLOAT32, FLOAT32, BFLOAT16, "nchw", "nchw"),
    "autocast of bf16 to fp16, nhwc": (BFLOAT16, FLOAT32, FLOAT16, "nhwc", "nhwc"),
}
# Every path in two forms, every form on the first two.
COMBINED = [
    *itertools.product(list(PATHS)[:2], FORMS),
    *itertools.product(list(PATHS)[2:], ("bf16 nchw", "bf16 nhwc")),
    *itertools.product([path for path in PATHS if "apart" in path], ("fp32 nhwc",)),
]


def drawn(path, form, device):
    """(problem, operands as users have them, the same rounded as the kernel rounds them)."""
    case, _ = PATHS[path]
    of_x, of_parameters, out, x_format, weight_format = FORMS[form]
    x, weight, bias = case.draw(device)
    x, weight = FORMATS[x_format](x).to(of_x), FORMATS[weight_format](weight).to(of_parameters)
    bias = None if bias is None else bias.to(of_parameters)
    described = problem(case, device, dtype=of_x, autocast=None if out == of_x else out)
    of_bias = None if bias is None else described.bias._replace(dtype=of_parameters)
    described = replace(
        described,
        x=described.x._replace(format=x_format),
        weight=described.weight._replace(dtype=of_parameters, format=weight_format),
        bias=of_bias,
    )
    return described, (x, weight, bias), [t if t is None else t.to(out) for t in (x, weight, bias)]


@pytest.mark.gpu
@pytest.mark.simulator
@pytest.mark.filterwarnings("ignore:.*encountered in scalar:RuntimeWarning")
@pytest.mark.parametrize(("path", "form"), COMBINED)
def test_every_form(path, form, kernel_device, monkeypatch):
    case, tile = PATHS[path]
    monkeypatch.setattr(backend, "tile_for", lambda problem: tile)
    described, tensors, rounded = drawn(path, form, kernel_device)
    y = backend.plan(described).run(*tensors, OPEN)
    check_layer(y, *rounded, case.geometry, OPEN)
    gy = torch.randn_like(y)
    g = backend.plan(replace(described, operation="pre_gradient", gy=described.x)).run(*tensors, gy, OPEN)
    check_layer_gradient(g, *rounded, gy, case.geometry, OPEN)
    assert g.stride() == y.stride()
    assert y.is_contiguous(memory_format=torch.channels_last if described.format == "nhwc" else torch.contiguous_format)


@pytest.mark.parametrize(("form", "operation"), [*((form, "forward") for form in FORMS), ("bf16 nhwc", "pre_gradient")])
def test_registers_and_instructions(form, operation, compiler):
    """No spill, 16-bit accesses of the right kind of float, and no copy of what is widened on its way."""
    described, _, _ = drawn("vectors of channels, several tiles", form, "cpu")
    tile = Tile(4, 2, 4, 16, 1, 8)
    built = kernel.build(described.geometry, tile, operation, CHAIN, form_of(described, tile.packs(described.geometry)))
    ptx = check_registers(built, (9, 0))
    of_x, _, out, *_ = FORMS[form]
    assert ("cp.async.ca" in ptx) == (of_x == out == FLOAT32)
    for dtype, instruction in ((BFLOAT16, "cvt.rn.bf16"), (FLOAT16, "cvt.rn.f16")):
        assert (instruction in ptx) == (out == dtype)
    assert ("cvt.f32.f16" in ptx) == (FLOAT16 in (of_x, out) and (of_x != out or FLOAT16 == of_x))


REAL = {
    "few output channels": (Case((16, 128, 128, 128), 3, 4, 2, 1), "fp32 nchw", "bf16 nhwc"),
    "one output channel": (Case((4, 56, 256, 256), 1, 9, 3, 4, 2), "fp32 nchw", "bf16 nhwc"),
    "many parities": (Case((4, 21, 64, 64), 21, 16, 8, 4), "bf16 nchw", "bf16 nhwc"),
    "many channels": (Case((16, 256, 32, 32), 128, 4, 2, 1), "bf16 nchw", "bf16 nhwc"),
}


@pytest.mark.parametrize(("name", "form"), [(name, form) for name, (_, *forms) in REAL.items() for form in forms])
def test_the_tiles_of_real_shapes_do_not_spill(name, form, compiler, monkeypatch):
    monkeypatch.setattr(gpu, "of", lambda device: GPUS[9, 0])
    case, dtype, layout = REAL[name][0], BFLOAT16 if "bf16" in form else FLOAT32, form[-4:]
    described = problem(case, "cuda", dtype=dtype)
    described = replace(described, x=described.x._replace(format=layout), weight=described.weight._replace(format=layout))
    tile = backend.tile_for(described)
    built = kernel.build(case.geometry, tile, "forward", CHAIN, form_of(described, tile.packs(case.geometry)))
    check_registers(built, (9, 0))
