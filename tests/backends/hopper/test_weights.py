"""The weights as the Hopper kernel takes them: hi + lo give them back, every channel by its own scale (simulator and GPU)."""

import numpy as np
import pytest
import torch

from numba_impl.backends.hopper import weights as split
from numba_impl.cuda import fragments
from tests.backends.hopper.packed import unpack
from tests.cases import Guarded, bits

pytestmark = [
    pytest.mark.gpu,
    # The simulator computes with NumPy, which warns of what the IEEE rules make of infinities.
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]

# The simulator needs a second for eight output channels.
SIZES = [
    *(pytest.param(*size, marks=pytest.mark.simulator) for size in [(8, 8), (16, 16), (24, 8)]),
    *[(8, 16), (24, 16), (40, 24), (64, 64)],
]
NAN, INF = float("nan"), float("inf")
# (largest |w| of a channel, its factor): the ends of the scales' range, and one step beyond.
LARGEST = [
    *[(1.0, 2.0**-14), (2.0**-46, 2.0**-60), (2.0**74, 2.0**60), (2.0**75 - 2.0**51, 2.0**60)],
    *[(2.0**-46 - 2.0**-70, 0.0), (2.0**75, 0.0), (1e-45, 0.0), (3.4e38, 0.0)],
    *[(NAN, 0.0), (INF, 0.0), (0.0, 1.0)],
]


def run(weight):
    """(packed, factors) from the kernel, on the CPU: every element written, and nothing around them."""
    packed, factors = (Guarded(shape, weight.device) for shape in split.shapes(*weight.shape[:2])[:2])
    unwritten = bits(packed.tensor).flatten()[0].item()
    words, x_map = torch.randint(-(2**63), 2**63 - 1, (18,)), torch.zeros(18, dtype=torch.int64, device=weight.device)
    launch = split.prepare(*weight.shape[:2], weight.device)
    launch((weight, packed.tensor.view(torch.int32), factors.tensor, x_map[1:-1]), (tuple(words[1:-1].tolist()),))
    packed.check()
    factors.check()
    words[0] = words[-1] = 0
    assert torch.equal(x_map.cpu(), words)
    assert not (bits(packed.tensor) == unwritten).any() and not factors.tensor.isnan().any()
    return bits(packed.tensor).cpu(), factors.tensor.cpu()


def draw(in_channels, out_channels):
    """Channels of 1e-12 ... 1e12; in each, some values far below the others, and many halfway between two fp16."""
    shape = in_channels, out_channels, 3, 3
    scale = 10 ** torch.linspace(-12, 12, out_channels, dtype=torch.float64)[torch.randperm(out_channels), None, None]
    below = torch.randint(-40, 1, shape) * (torch.rand(shape) < 0.3)
    weight = (torch.randn(shape) * scale * 2.0**below).float()
    dropped = torch.randint(14, shape, dtype=torch.int32)
    return (bits(weight) >> dropped << dropped).view(torch.float32)


def expected(weight, factors):
    """``packed`` by NumPy, from exact fp64: both halves rounded to nearest even, zeros for the channels beyond the last."""
    scaled = weight.double().numpy().reshape(*weight.shape[:2], 9) / factors.numpy()[:, None]
    scaled = np.pad(scaled, ((0, -len(scaled) % 16), (0, 0), (0, 0)))
    hi = scaled.astype(np.float16)
    halves = np.stack([hi, (scaled - hi).astype(np.float16)])
    halves = halves.reshape(2, -1, 8, *scaled.shape[1:]).transpose(0, 4, 1, 3, 2)
    return torch.from_numpy(np.ascontiguousarray(halves).view(np.int32))


def check(weight, packed, factors):
    """Assert what holds for channels that fit and are not zero."""
    largest = weight.abs().amax((0, 2, 3)) / factors
    assert (torch.frexp(factors).mantissa == 0.5).all(), "a factor is no power of two"
    assert (largest >= 2**14).all() and (largest < 2**15).all()
    assert torch.equal(packed, expected(weight, factors))
    # Each half is rounded by 2^-11 at most, and lo besides by its 13th bit or by half of the smallest fp16, 2^-24.
    bound = torch.maximum(2.0**-23 * weight.abs().double(), 2.0**-25 * factors.double()[:, None, None])
    assert ((unpack(packed, factors, len(weight)) - weight.double()).abs() <= bound).all()


@pytest.mark.parametrize(("in_channels", "out_channels"), SIZES)
def test_hi_and_lo_give_the_weight_back(in_channels, out_channels, kernel_device):
    weight = draw(in_channels, out_channels)
    check(weight, *run(weight.to(kernel_device)))


@pytest.mark.simulator
def test_channels_that_no_scale_fits(kernel_device):
    """Factor 0 for them alone; a channel of zeros has 1."""
    values, want = torch.tensor(LARGEST, dtype=torch.float32).unbind(1)
    channels, flat = torch.arange(len(values)), torch.rand(8, len(values), 9)
    flat *= torch.where(values.isfinite(), values, 1.0)[:, None]
    flat[torch.randint(8, values.shape), channels, torch.randint(9, values.shape)] = values
    weight = (flat * torch.randn(flat.shape).sign()).reshape(8, -1, 3, 3)
    packed, factors = run(weight.to(kernel_device))
    assert torch.equal(factors, want)
    ordinary, zero = (want > 0) & (values > 0), values == 0
    check(weight[:, ordinary], packed[:, :, :, ordinary], factors[ordinary])
    assert (unpack(packed[:, :, :, zero], factors[zero], 8) == 0).all()


@pytest.mark.simulator
def test_where_a_weight_lands(kernel_device):
    """One weight a channel: its hi and its lo are where the products look for them, and all else is zero."""
    in_channels, padded, out_channels = 24, 32, 8
    weight, want = torch.zeros(in_channels, out_channels, 9), torch.zeros(2, 9, padded * out_channels)
    # The first and the last that threads meet in their first round and in their second, and any.
    elements = [0, split.THREADS - 1, split.THREADS, in_channels * 9 - 1, *torch.randint(in_channels * 9, (4,)).tolist()]
    for channel, element in enumerate(elements):
        c, tap = divmod(element, 9)
        weight[c, channel, tap] = 1 + 2.0**-12
        want[:, tap, fragments.matrix_element(c, channel, out_channels)] = torch.tensor([2.0**14, 4.0])
    packed, _ = run(weight.reshape(in_channels, out_channels, 3, 3).to(kernel_device))
    assert torch.equal(packed.view(torch.float16).reshape(want.shape).float(), want)
