"""The cases of a sweep around one of them, and those that differ along one axis."""

from collections import defaultdict
from dataclasses import replace

from benchmarks.results import Table
from numba_impl.case import Case

# Multiples of the case's own sizes. What a plot needs most comes first: a run that is cut keeps it.
BATCHES = (1 / 128, 1 / 4, 2, 1 / 16)
CHANNELS = (1 / 4, 1 / 2, 2)
SIDES = (1 / 4, 2, 1 / 2)  # at a quarter of the batch

AXES = {  # name: (the size that varies, a description of the others)
    "batch": (lambda case: case.x[0], lambda case: f"{_channels(case)}, {_image(case)}"),
    "channels": (lambda case: case.x[1], lambda case: f"batch {case.x[0]}, {_image(case)}"),
    "image height": (lambda case: case.x[2], lambda case: f"batch {case.x[0]}, {_channels(case)}"),
}


def cases(case: Case) -> list[Case]:
    """``case``, then cases with other batches, other channels, and other image sizes at a quarter of the batch."""
    batch, channels, height, width = case.x
    found = [case]
    for by in BATCHES:
        found.append(replace(case, x=(_scaled(batch, by), channels, height, width)))
    for by in CHANNELS:
        x = batch, _scaled(channels, by), height, width
        found.append(replace(case, x=x, out_channels=_scaled(case.out_channels, by)))
    for by in SIDES:
        found.append(replace(case, x=(_scaled(batch, 1 / 4), channels, _scaled(height, by), _scaled(width, by))))
    return list(dict.fromkeys(found))


def _scaled(size, by) -> int:
    return max(1, int(size * by))


def _channels(case) -> str:
    return f"{case.x[1]} → {case.out_channels} channels"


def _image(case) -> str:
    return f"{case.x[2]} x {case.x[3]} images"


def along(axis, tables: list[Table]) -> tuple[str, dict[int, Table]]:
    """The largest group of tables whose cases differ along ``axis`` alone.

    Returns a description of what they share, and {size along the axis: table} in order of size.
    """
    varies, fixed = AXES[axis]
    groups = defaultdict(dict)
    for table in tables:
        groups[fixed(table.case)][varies(table.case)] = table
    description, group = max(groups.items(), key=lambda item: len(item[1]))
    return description, dict(sorted(group.items()))
