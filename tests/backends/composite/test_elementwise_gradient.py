"""The gradient's kernel, through its launcher: sizes, alignments, special values, the clamp's bounds (simulator and GPU)."""

import pytest
import torch

from numba_impl.backends.composite import elementwise as pointwise
from numba_impl.backends.composite import elementwise_gradient as pointwise_backward
from numba_impl.backends.composite.elementwise import Config
from numba_impl.problem import Constants
from tests.accuracy import BARE, check_epilogue_gradient
from tests.backends.composite.test_elementwise import FEW, NUMPY_WARNS, SPECIAL, shifted
from tests.cases import CLAMPED, OPEN, Guarded, bits

pytestmark = pytest.mark.gpu

CONSTANTS = [
    *(BARE, OPEN, CLAMPED, Constants(0.5, 2.0), Constants(-2.0, 2.0), Constants(0.1, -0.7, -0.2, 0.9)),
    *(Constants(0.0, 0.0), Constants(0.25, 3.0, 0.0, 0.0), Constants(1e-30, 1e-8, -1e-30, 1e30)),
]
OUTPUT_GRADIENTS = [1.0, -0.75, 0.0, -0.0, 1e-40, float("inf"), float("-inf"), float("nan")]


def special_pairs(device):
    """Each special z of either sign with each special gradient at the output."""
    values = torch.tensor(SPECIAL, device=device)
    pairs = torch.cartesian_prod(torch.cat([values, -values]), torch.tensor(OUTPUT_GRADIENTS, device=device))
    return pairs[:, 0].contiguous(), pairs[:, 1].contiguous()


def around_the_bounds(constants, count):
    """At least ``count`` neighbouring fp32 z about each place where mish(z) + add_value meets a bound; ones if nowhere."""
    z = torch.linspace(-20, 20, 400_001, dtype=torch.float64)
    value = torch.nn.functional.mish(z) + constants.add_value
    steps = torch.arange(-(count // 2), count // 2 + 1, dtype=torch.int32)
    found = [torch.ones(count)]
    for bound in (constants.min_val, constants.max_val):
        for left, right in z.unfold(0, 2, 1)[(value < bound).diff()].tolist():
            below = torch.nn.functional.mish(torch.tensor(left, dtype=torch.float64)) + constants.add_value < bound
            for _ in range(50):
                middle = torch.tensor((left + right) / 2, dtype=torch.float64)
                same = (torch.nn.functional.mish(middle) + constants.add_value < bound) == below
                left, right = (middle.item(), right) if same else (left, middle.item())
            found.append((bits(torch.tensor([left], dtype=torch.float32)) + steps).view(torch.float32))
    return torch.cat(found)


def forward(z, constants, config=FEW):
    """The forward kernel's result with scale 1, which shows where the output stands at a bound."""
    y = torch.empty_like(z)
    pointwise.launch(z, y, *constants._replace(scale=1.0), config)
    return y


def check(z, gy, constants, config=FEW, offset=0):
    """Out of place, and nothing but ``g`` is written."""
    before, out = (z.clone(), gy.clone()), Guarded(z.shape, z.device, offset)
    pointwise_backward.launch(z, gy, out.tensor, *constants, config)
    out.check()
    assert torch.equal(bits(z), bits(before[0])) and torch.equal(bits(gy), bits(before[1])), "an input was written"
    check_epilogue_gradient(out.tensor, z, gy, forward(z, constants, config), constants)


def check_in_place_of(written):
    def check_inplace(z, gy, constants, config=FEW, offset=0):
        """In place of z or of gy, and nothing around is written."""
        memory = Guarded(z.shape, z.device, offset)
        arrays = {"z": z, "gy": gy}
        arrays[written] = memory.tensor.copy_(arrays[written])
        pointwise_backward.launch(*arrays.values(), memory.tensor, *constants, config)
        memory.check()
        check_epilogue_gradient(memory.tensor, z, gy, forward(z, constants, config), constants)

    return check_inplace


every_place = pytest.mark.parametrize(
    "checks", [check, check_in_place_of("z"), check_in_place_of("gy")], ids=["apart", "over z", "over gy"]
)


def draw(size, device):
    return 3 * torch.randn(size, device=device), torch.randn(size, device=device)


@pytest.mark.simulator
@every_place
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 7, 8, 1003])
def test_sizes(size, checks, kernel_device):
    checks(*draw(size, kernel_device), OPEN)


@pytest.mark.simulator
@pytest.mark.parametrize(
    "offsets", [(0, 0, 1), (0, 2, 0), (3, 0, 0), (1, 1, 1), (2, 2, 2), (3, 3, 3), (1, 1, 2), (1, 3, 1), (0, 2, 2), (3, 2, 1)]
)
@pytest.mark.parametrize("size", [1, 2, 37])
def test_alignments(size, offsets, kernel_device):
    z, gy = (shifted(x, offset) for x, offset in zip(draw(size, kernel_device), offsets))
    check(z, gy, OPEN, offset=offsets[2])


@pytest.mark.simulator
@pytest.mark.parametrize("written", ["z", "gy"])
@pytest.mark.parametrize("other", [0, 1])
@pytest.mark.parametrize("offset", [1, 2])
def test_alignments_inplace(offset, other, written, kernel_device):
    z, gy = (shifted(x, other) for x in draw(37, kernel_device))
    check_in_place_of(written)(z, gy, OPEN, offset=offset)


@pytest.mark.simulator
@pytest.mark.filterwarnings(NUMPY_WARNS)
@pytest.mark.parametrize("constants", CONSTANTS, ids=str)
def test_special_values(constants, kernel_device):
    check(*special_pairs(kernel_device), constants)


@pytest.mark.simulator
@every_place
def test_clamped(checks, kernel_device):
    checks(*draw(203, kernel_device), CLAMPED)


@pytest.mark.simulator
@pytest.mark.parametrize("constants", CONSTANTS, ids=str)
def test_at_the_clamps_bounds(constants, kernel_device):
    """Neighbouring z about a bound: no gradient exactly where the forward's output stands at it."""
    z = around_the_bounds(constants, 100 if kernel_device == "cpu" else 100_000).to(kernel_device)
    check(z, torch.ones_like(z), constants)


@pytest.mark.simulator
@pytest.mark.filterwarnings(NUMPY_WARNS)
def test_every_exponent(kernel_device):
    """All signs and exponents with drawn mantissas, through a clamp that hides nothing."""
    patterns = torch.arange(512, device=kernel_device) << 23 | torch.randint(2**23, (512,), device=kernel_device)
    z = patterns.to(torch.int32).view(torch.float32)
    check(z, torch.ones_like(z), BARE)


@pytest.mark.simulator
@pytest.mark.parametrize("name", ["z", "gy", "g"])
def test_errors(name, kernel_device):
    arrays = {other: torch.zeros(4, device=kernel_device) for other in ("z", "gy", "g")}
    with pytest.raises(TypeError, match=f"^{name} must be torch.float32, got torch.float64"):
        pointwise_backward.launch(*(arrays | {name: arrays[name].double()}).values(), *OPEN)
    if name != "z":
        with pytest.raises(ValueError, match=f"^{name} must have the 4 values of z, got 3"):
            pointwise_backward.launch(*(arrays | {name: arrays[name][:3]}).values(), *OPEN)


@every_place
@pytest.mark.parametrize("constants", [BARE, CLAMPED], ids=str)
def test_large_sizes(constants, checks):
    checks(*draw(2**22 + 3, "cuda"), constants, Config())


@pytest.mark.usefixtures("whole_gpu")
@pytest.mark.parametrize("offset", [0, 3])
def test_more_than_2_31_values(offset):
    """In place of z, 17.6 GB: a value's result depends on the value alone, so that every block comes out as the first."""
    size = 2_200_000_003
    memory, gy = Guarded((size,), "cuda", offset), torch.empty(size + offset, device="cuda")[offset:]
    block_z, block_gy = draw(1_000_003, "cuda")
    for block, whole in ((block_z, memory.tensor), (block_gy, gy)):
        for part in whole.split(len(block)):
            part.copy_(block[: len(part)])
    pointwise_backward.launch(memory.tensor, gy, memory.tensor, *OPEN)
    memory.check()
    first = memory.tensor[: len(block_z)].clone()
    check_epilogue_gradient(first, block_z, block_gy, forward(block_z, OPEN, Config()), OPEN)
    for part in memory.tensor.split(len(first)):
        assert torch.equal(part, first[: len(part)])
