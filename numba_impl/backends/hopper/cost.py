"""The predicted time of a call."""

from numba_impl.backends.hopper.layout import GEOMETRY, MAX_CHANNELS, Config, grid

# Cycles, measured on an H200: before the first unit; a wgmma; and of a unit's output channel, all that is not wgmma.
START, PRODUCT, CHANNEL = 15_000, 40, 140


def cycles(config: Config, batch, height, width, multiprocessors) -> float:
    """What a block starts with, the weights, split by a kernel before it; then its units one after another, two at a time."""
    strips, units, blocks = grid(batch, height, width, multiprocessors)
    products = GEOMETRY.taps * config.steps * config.terms
    unit = config.out_channels * (PRODUCT * products / MAX_CHANNELS + CHANNEL) / 2
    waves = -(-blocks // multiprocessors)
    return waves * (START + unit * -(-units * strips // blocks)) if blocks else 0
