"""The cases of a sweep, around one of them, and which of them differ along one axis."""

from collections import defaultdict
from dataclasses import replace

from benchmarks.results import Case, Table

# Times the case's own. What a plot needs most comes first: a run that is cut keeps it.
BATCHES = (1 / 128, 1 / 4, 2, 1 / 16)
CHANNELS = (1 / 4, 1 / 2, 2)
SIDES = (1 / 4, 2, 1 / 2)  # at a quarter of the batch

AXES = {  # name: (what varies in a case, a description of what does not)
    "batch": (lambda case: case.shape[0], lambda case: f"{_channels(case)}, {_image(case)}"),
    "channels": (lambda case: case.shape[1], lambda case: f"batch {case.shape[0]}, {_image(case)}"),
    "image height": (lambda case: case.shape[2], lambda case: f"batch {case.shape[0]}, {_channels(case)}"),
}


def cases(case: Case) -> list[Case]:
    """``case``, others of its batch and of its channels scaled, and of its image at a smaller batch."""
    batch, channels, height, width = case.shape
    found = [case]
    for by in BATCHES:
        found.append(replace(case, shape=(_scaled(batch, by), channels, height, width)))
    for by in CHANNELS:
        shape = batch, _scaled(channels, by), height, width
        found.append(replace(case, shape=shape, out_channels=_scaled(case.out_channels, by)))
    for by in SIDES:
        found.append(replace(case, shape=(_scaled(batch, 1 / 4), channels, _scaled(height, by), _scaled(width, by))))
    return list(dict.fromkeys(found))


def _scaled(size, by) -> int:
    return max(1, int(size * by))


def _channels(case) -> str:
    return f"{case.shape[1]} → {case.out_channels} channels"


def _image(case) -> str:
    return f"{case.shape[2]} x {case.shape[3]} images"


def along(axis, tables: list[Table]) -> tuple[str, dict[int, Table]]:
    """The most tables whose cases differ along ``axis`` alone: (what does not vary, the tables by what does, in order)."""
    varies, fixed = AXES[axis]
    groups = defaultdict(dict)
    for table in tables:
        groups[fixed(table.case)][varies(table.case)] = table
    description, group = max(groups.items(), key=lambda item: len(item[1]))
    return description, dict(sorted(group.items()))
