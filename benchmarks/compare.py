"""What moved between two runs, in rows of the same case, precision and name."""

from dataclasses import dataclass

from benchmarks import maps
from benchmarks.grids import aligned, piped
from benchmarks.results import FURTHER, MAIN, Row, Run, Timing

LEAST = 1.0  # per cent: a smaller change is no movement, however small the spreads in either run
LEAST_OF_CELLS = 3.0  # the same of a map's cells, which are measured for a shorter time
HEADING = ["", "precision", "figure", "moved", "old ms", "new ms", "new / old", "old x best peer", "new x best peer", "new / old"]
LEGEND = f"""\
x best peer: the shortest time of a peer in the same run, precision and figure, divided by the row's time. It tells a slower GPU
from a slower kernel. moved: the time is faster or slower, or the row is ahead or back in that ratio, by more than {LEAST:g} %
and by more than the sum of the spreads of the times that go into it. A spread is half of p20 to p80."""

CELL_HEADING = ["", "column", "moved", "old x best peer", "new x best peer", "new / old", "old ms", "new ms", "new / old"]
CELL_LEGEND = f"""\
moved: ModelNumba's time is faster or slower, or the cell, the best peer's time over it, is ahead or back, by more than
{LEAST_OF_CELLS:g} % and by more than the sum of the spreads of the times that go into it. Only cells that moved are shown."""


@dataclass(frozen=True)
class Ratio:
    """A quantity in the new run over that in the old one, and by how many per cent the ratio may be off."""

    value: float
    spread: float

    def moved(self, least=LEAST) -> bool:
        """By more than ``least`` per cent."""
        return 100 * abs(self.value - 1) > max(least, self.spread)

    def __str__(self):
        return f"{self.value:.3f}"


def time_ratio(old: Timing, new: Timing) -> Ratio:
    return Ratio(new.median / old.median, old.spread + new.spread)


def over(a: Ratio, b: Ratio) -> Ratio:
    return Ratio(a.value / b.value, a.spread + b.spread)


def report(old: Run, new: Run, markdown=False) -> str:
    """What differs between the runs as a whole, a table for each case that both have, and what only one has."""
    lines = [f"Against: {old.command}, seed {old.seed}"]
    for what, of_old, of_new in (("timing", old.method, new.method), ("machine", _machine(old), _machine(new))):
        if of_old != of_new:
            lines.append(f"The {what} differs: {of_old}; now {of_new}")
    if old.is_map and new.is_map:
        return "\n\n".join(["\n".join([*lines, CELL_LEGEND]), *_maps(old, new, markdown)])
    parts, before = ["\n".join([*lines, LEGEND])], {table.title: table for table in old.tables}
    for table in new.tables:
        if table.title in before:
            grid, rest = compared(before.pop(table.title), table)
            drawn = _drawn(grid, 4, markdown)
            parts.append("\n".join([f"**{table.title}**\n" if markdown else table.title, drawn, *rest]))
        else:
            parts.append(f"Only in the new run: {table.title}")
    return "\n\n".join(parts + [f"Only in the old run: {title}" for title in before])


def _drawn(grid, texts, markdown) -> str:
    return piped(grid, texts) if markdown else "\n".join(aligned(grid, texts))


def _machine(run: Run) -> str:
    return run.machine.get("GPU", run.machine.get("CPU", "unknown"))


def compared(old, new):
    """Two tables of a case: (heading and rows, lines on rows that only one of them has)."""
    before = {(row.kind, row.precision): row for row in old.rows}
    grid, only_new = [HEADING], []
    for row in new.rows:
        match = before.pop((row.kind, row.precision), None)
        if match is None:
            only_new.append(row)
            continue
        if bool(match.timing) != bool(row.timing):
            grid.append([row.name, row.precision, MAIN, "fails" if match.timing else "works"])
        for figure in (MAIN, *FURTHER):
            if match.figure(figure) and row.figure(figure):
                grid.append([row.name, row.precision, figure, *_cells(old, match, new, row, figure)])
    return grid, _only("new", only_new) + _only("old", before.values())


def _only(which, rows) -> list[str]:
    names = [f"{row.name} in {row.precision}" for row in rows]
    return [f"Only in the {which} run: " + "; ".join(names)] if names else []


def _cells(old, match: Row, new, row: Row, figure) -> list[str]:
    """The cells of a row from "moved" on."""
    before, after = match.figure(figure), row.figure(figure)
    time = time_ratio(before, after)
    moved = ["faster" if time.value < 1 else "slower"] if time.moved() else []
    peers = old.best_peer(row.precision, figure), new.best_peer(row.precision, figure)
    against = ["-"] * 3
    if all(peers):
        ratio = over(time_ratio(*peers), time)
        moved += ["ahead" if ratio.value > 1 else "back"] if ratio.moved() else []
        against = [f"{peer.median / own.median:.2f}" for peer, own in zip(peers, (before, after))] + [str(ratio)]
    return [", ".join(moved), before.digits, after.digits, str(time), *against]


def _maps(old: Run, new: Run, markdown) -> list[str]:
    """The cells that moved, what all come to, and which cells only one run has."""
    figure = next(name for name in maps.FIGURES if all(name in maps.figures(run) for run in (old, new)))
    before, after = (maps.cells(run, figure) for run in (old, new))
    rows = [[*place, *_moved(before[place], after[place])] for place in after if place in before]
    grid = [CELL_HEADING, *(row for row in rows if row[2])]
    said = [f"by {maps.FIGURES[figure]}", *(f"{which}: {maps.total(run, figure)}" for which, run in (("old", old), ("new", new)))]
    for which, places in (("old", before.keys() - after.keys()), ("new", after.keys() - before.keys())):
        said += [f"only in the {which} run: " + "; ".join(sorted(map(", ".join, places)))] * bool(places)
    return [_drawn(grid, 3, markdown), "\n".join(said)]


def _moved(old: maps.Cell, new: maps.Cell) -> list[str]:
    """The texts of a cell from "moved" on."""
    (own_before, best_before), (own_after, best_after) = old.times, new.times
    time = time_ratio(own_before, own_after)
    ratio = over(time_ratio(best_before, best_after), time)
    moved = ["faster" if time.value < 1 else "slower"] if time.moved(LEAST_OF_CELLS) else []
    moved += ["ahead" if ratio.value > 1 else "back"] if ratio.moved(LEAST_OF_CELLS) else []
    return [", ".join(moved), old.text, new.text, str(ratio), own_before.digits, own_after.digits, str(time)]
