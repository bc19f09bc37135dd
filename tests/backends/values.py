"""What the tests of several backends' epilogues are given: special values, constants, neighbours of the clamp's bounds."""

import torch

from numba_impl.epilogue import Constants
from numba_impl.oracle import BARE
from tests.cases import CLAMPED, OPEN, bits

SPECIAL = [
    *(0.0, 1e-45, 1e-40, 2.0**-126, 1e-30, 1e-8, 1.0, 19.999998, 20.0, 20.000002, 44.0, 87.0, 88.0, 88.8, 89.0),
    *(103.9, 104.0, 127.0, 150.0, 1e4, 1e30, 3.4e38, float("inf"), float("nan")),
]
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


def every_exponent(device):
    """All signs and exponents with drawn mantissas."""
    patterns = torch.arange(512, device=device) << 23 | torch.randint(2**23, (512,), device=device)
    return patterns.to(torch.int32).view(torch.float32)


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
