"""Memory around what kernels read and write: nothing there is written, nothing there matters; and every output is written."""

import pytest
import torch

from numba_impl import dispatch
from numba_impl.backends import cpu as backend_cpu
from numba_impl.backends.composite import channel_sum
from numba_impl.backends.composite import elementwise as pointwise
from numba_impl.backends.composite import elementwise_gradient as pointwise_backward
from numba_impl.backends.hopper import weights as split
from numba_impl.backends.tiled import kernel as tiled
from numba_impl.cuda import tensor_map
from tests.backends.composite.test_elementwise import FEW
from tests.backends.tiled.test_kernel import SMALL
from tests.cases import CLAMPED, GUARD_BITS, Case, Guarded, bits, problem

LAYER = Case((1, 3, 3, 5), 5, 3, 2, 1, 1)
# More than one tile or strip, the last of them a piece; rows that the bulk copy engine loads, and outputs stored by four.
STRIPS = Case((2, 16, 3, 68), 8, 3, 2, 1, 1)


def forward_of_pointwise(x):
    y = torch.empty(x.shape, device=x.device)
    pointwise.launch(x, y, *CLAMPED, FEW)
    return [y]


def gradient_of_pointwise(z, gy):
    g = torch.empty(z.shape, device=z.device)
    pointwise_backward.launch(z, gy, g, *CLAMPED, FEW)
    return [g]


def forward_of_tiled(x, weight, bias, gy=None):
    """With a tile that the simulator can compute."""
    out, weight = torch.empty(LAYER.output_shape, device=x.device), tiled.packer(LAYER.geometry, SMALL)(weight)
    tiled.launch(x, weight, bias, out, LAYER.geometry, SMALL, *CLAMPED, gy=gy)
    return [out]


def split_of_weights(weight):
    outputs = split.outputs(weight)
    split.launch(weight, *outputs, tuple(range(tensor_map.WORDS)))
    return outputs


def sums_of_channels(g):
    return [channel_sum.launch(g)]


# A kernel's launcher, and what it is given on a device.
LAUNCHERS = {
    "pointwise": (forward_of_pointwise, lambda device: [torch.randn(37, device=device)]),
    "pointwise_backward": (gradient_of_pointwise, lambda device: torch.randn(2, 37, device=device)),
    "tiled": (forward_of_tiled, LAYER.draw),
    "tiled, backward": (
        forward_of_tiled,
        lambda device: [*LAYER.draw(device), torch.randn(LAYER.output_shape, device=device)],
    ),
    "split": (split_of_weights, lambda device: [torch.randn(24, 8, 3, 3, device=device)]),
    "channel_sum": (sums_of_channels, lambda device: [torch.randn(1, 2, 5, 7, device=device)]),
}


def run(launch, tensors, offset, around, monkeypatch):
    """The results of ``launch(*tensors)``, where each tensor, misaligned by ``offset``, and what it allocates is guarded."""
    inputs, allocated = [Guarded.of(tensor, offset, around) for tensor in tensors], []

    def allocate(*size, dtype=torch.float32, device):
        *outer, last = size if isinstance(size[0], int) else size[0]
        allocated.append(Guarded((*outer, last * dtype.itemsize // 4), device, around=around))
        return allocated[-1].tensor.view(dtype)

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
    described = problem(STRIPS, x.device, precision=precision)

    def launch(x, weight, bias, gy=None):
        return [dispatch.prepare(described, name, gy is not None)(x, weight, bias, CLAMPED, gy)]

    check(launch, [x, weight, bias, *gy], offset, monkeypatch)


def test_what_is_allocated_is_poisoned():
    values = torch.ones(2, 3)
    for tensor in (torch.empty(2, 3), torch.empty_like(values), values.new_empty(2, 3)):
        assert tensor.isnan().all()
    packed, factors, _ = split.outputs(torch.ones(16, 8, 3, 3))
    assert packed.view(torch.float16).isnan().all() and factors.isnan().all()


@pytest.mark.parametrize(
    ("device", "name", "launcher"),
    [
        ("cpu", "cpu", "numba_impl.backends.cpu.activate"),
        pytest.param("cuda", "tiled", "numba_impl.cuda.kernel.Launch.__call__", marks=pytest.mark.gpu),
        pytest.param("cuda", "hopper", "numba_impl.cuda.kernel.Launch.__call__", marks=pytest.mark.gpu),
    ],
    ids=["cpu", "tiled", "hopper"],
)
def test_an_output_that_nothing_writes_is_nan(device, name, launcher, monkeypatch):
    monkeypatch.setattr(launcher, lambda *arguments, **options: None)
    monkeypatch.setattr(backend_cpu, "CHUNK", 1)  # so that it allocates the result itself
    x, weight, bias = STRIPS.draw(device)
    y = dispatch.prepare(problem(STRIPS, x.device), name)(x, weight, bias, CLAMPED)
    assert y.shape == STRIPS.output_shape and y.isnan().all()
