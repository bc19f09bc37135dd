"""Memory around what kernels read and write: nothing there is written, nothing there matters; and every output is written."""

import pytest
import torch

from numba_impl import dispatch
from numba_impl.backends import cpu
from numba_impl.backends.base import DTYPES
from numba_impl.backends.composite import channel_sum, elementwise
from numba_impl.backends.hopper import weights
from numba_impl.backends.tiled import backend as tiled
from numba_impl.cuda.tensor_map import WORDS
from numba_impl.epilogue import MISH_ADD_HARDTANH_SCALE as CHAIN
from tests.backends.tiled.test_kernel import SMALL
from tests.cases import CLAMPED, GUARD_BITS, Case, Guarded, bits, problem

LAYER = Case((1, 3, 3, 5), 5, 3, 2, 1, 1)
# More than one tile or strip, the last of them a piece; rows that the bulk copy engine loads, and outputs stored by four.
STRIPS = Case((2, 16, 3, 68), 8, 3, 2, 1, 1)


def activation(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return [elementwise.prepare("activate", CHAIN, x.device, x.shape, x.dtype)(x, y, CLAMPED)]


def pre_gradient_in_place(z, gy):
    g = z.clone()
    return [elementwise.prepare("pre_gradient", CHAIN, z.device, z.shape, z.dtype)(gy, g, CLAMPED)]


def layer_of_tiled(x, weight, bias, *gy):
    """With a tile that the simulator can compute."""
    operation = "pre_gradient" if gy else "forward"
    described = problem(LAYER, x.device, operation=operation, dtype=x.dtype)
    out = torch.empty(LAYER.output_shape, dtype=x.dtype, device=x.device)
    tiled.filler(described, SMALL)(x, weight, bias, gy, out, CLAMPED)
    return [out]


def split_of_weights(weight):
    outputs = weights.empty(24, 8, weight.device)
    weights.prepare(24, 8, weight.device)((weight, *outputs), (tuple(range(WORDS)),))
    return outputs


def sums_of_channels(g):
    return [channel_sum.prepare(g.device, g.shape, g.dtype)(g)]


# What launches a kernel, and what it is given on a device.
LAUNCHERS = {
    "activation": (activation, lambda device: [torch.randn(37, device=device)]),
    "activation, bf16": (activation, lambda device: [torch.randn(37, device=device).bfloat16()]),
    "pre-gradient in place": (pre_gradient_in_place, lambda device: torch.randn(2, 37, device=device)),
    "pre-gradient in place, fp16": (pre_gradient_in_place, lambda device: torch.randn(2, 37, device=device).half()),
    "tiled": (layer_of_tiled, LAYER.draw),
    "tiled, pre-gradient": (
        layer_of_tiled,
        lambda device: [*LAYER.draw(device), torch.randn(LAYER.output_shape, device=device)],
    ),
    "tiled, bf16": (layer_of_tiled, lambda device: LAYER.draw(device, torch.bfloat16)),
    "split": (split_of_weights, lambda device: [torch.randn(24, 8, 3, 3, device=device)]),
    "channel_sum": (sums_of_channels, lambda device: [torch.randn(1, 2, 5, 7, device=device)]),
    "channel_sum, bf16": (sums_of_channels, lambda device: [torch.randn(1, 1, 4, 6, device=device).bfloat16()]),
}


def run(launch, tensors, offset, around, monkeypatch):
    """The results of ``launch(*tensors)``, where each tensor, misaligned by ``offset``, and what it allocates is guarded."""
    inputs, allocated = [Guarded.of(tensor, offset, around) for tensor in tensors], []

    def allocate(*size, dtype=torch.float32, device):
        shape = size if isinstance(size[0], int) else size[0]
        allocated.append(Guarded(shape, device, around=around, dtype=dtype))
        return allocated[-1].tensor

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", allocate)
        results = launch(*(guarded.tensor for guarded in inputs))
    for guarded in inputs + allocated:
        guarded.check()
    for guarded, tensor in zip(inputs, tensors, strict=True):
        assert torch.equal(bits(guarded.tensor), bits(tensor)), "an input was written"
    return results


def check(launch, tensors, offset, monkeypatch):
    """Between NaNs it computes what it does between zeros."""
    between_nans, between_zeros = (run(launch, tensors, offset, around, monkeypatch) for around in (GUARD_BITS, 0))
    for got, want in zip(between_nans, between_zeros, strict=True):
        assert not got.isnan().any(), "a value was not written, or comes from outside the inputs"
        assert torch.equal(bits(got), bits(want)), "what lies outside the inputs matters"


@pytest.mark.gpu
@pytest.mark.simulator
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(("launch", "draw"), LAUNCHERS.values(), ids=LAUNCHERS)
def test_launchers(launch, draw, offset, kernel_device, monkeypatch):
    check(launch, draw(kernel_device), offset, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("name", "precision"), [("tiled", "fp32"), ("hopper", "fp32"), ("hopper", "tf32")])
def test_backends(name, precision, backward, offset, monkeypatch, request):
    """One row of x holds values too far apart for the tensor cores."""
    if name == "hopper":
        request.getfixturevalue("hopper")
    x, weight, bias = STRIPS.draw("cuda")
    x[0, :, 0, 5] = 3e30
    gy = [torch.randn(STRIPS.output_shape, device="cuda")] if backward else []
    described = problem(STRIPS, x.device, operation="pre_gradient" if backward else "forward", permitted=precision)

    def launch(*tensors):
        return [dispatch.plan(described, name)(*tensors, constants=CLAMPED)]

    check(launch, [x, weight, bias, *gy], offset, monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_allocated_is_poisoned(dtype):
    """Integers too: kernels take 16-bit floats as such."""
    values = torch.ones(2, 4, dtype=dtype)
    for tensor in (torch.empty(2, 4, dtype=dtype), torch.empty_like(values), values.new_empty(2, 4)):
        assert tensor.isnan().all()
    for integers in (torch.int16, torch.int32):
        assert torch.empty(2, 4, dtype=integers).view(dtype).isnan().all()
    packed, factors, _ = weights.empty(16, 8, "cpu")
    assert packed.view(torch.float16).isnan().all() and factors.isnan().all()


@pytest.mark.parametrize(
    ("device", "name", "dtype", "launcher"),
    [
        ("cpu", "cpu", torch.float32, "numba_impl.backends.cpu._run"),
        ("cpu", "cpu", torch.bfloat16, "numba_impl.backends.cpu._run"),
        pytest.param("cuda", "tiled", torch.float32, "numba_impl.cuda.kernel.Launch.__call__", marks=pytest.mark.gpu),
        pytest.param("cuda", "hopper", torch.float32, "numba_impl.cuda.kernel.Launch.__call__", marks=pytest.mark.gpu),
    ],
    ids=["cpu", "cpu, bf16", "tiled", "hopper"],
)
def test_an_output_that_nothing_writes_is_nan(device, name, dtype, launcher, monkeypatch):
    monkeypatch.setattr(launcher, lambda *arguments, **options: None)
    monkeypatch.setattr(cpu, "CHUNK", 1)  # so that it allocates the result itself
    x, weight, bias = STRIPS.draw(device, dtype)
    y = dispatch.plan(problem(STRIPS, x.device, dtype=dtype), name)(x, weight, bias, constants=CLAMPED)
    assert y.shape == STRIPS.output_shape and y.isnan().all()
