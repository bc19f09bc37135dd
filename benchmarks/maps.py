"""The figures of a map of models: how many times as fast the layer is as its best peer, row by row and column by column."""

import math
import statistics
from dataclasses import dataclass

from benchmarks.models import COLUMNS, Column
from benchmarks.results import MAIN, Row, Run, Table, Timing, flop, milliseconds

REPLAYS = "graph"
FIGURES = {REPLAYS: "replays of a CUDA graph, L2 flushed before each", MAIN: "launched calls"}  # the first that a run has counts
STRICT, TENSOR_CORES = 200, 600  # TFLOP/s of products in fp32, and in TF32 and 16 bits, that an H200's kernels may come near
MARK = "*"  # a cell in which a row has no replays, so that its launches stand for them


@dataclass(frozen=True)
class Cell:
    """ModelNumba's row and the best peer's in a column of a table, by the timing called ``figure`` of either."""

    ours: Row
    peer: Row
    figure: str

    @property
    def times(self) -> tuple[Timing, Timing]:
        """(ours, the best peer's)."""
        return time(self.ours, self.figure), time(self.peer, self.figure)

    @property
    def ratio(self) -> float:
        """The best peer's time over ours."""
        own, best = self.times
        return best.median / own.median

    @property
    def text(self) -> str:
        marked = any(row.figure(self.figure) is None for row in (self.ours, self.peer))
        return f"{self.ratio:.2f}" + MARK * marked


def time(row: Row, figure) -> Timing:
    """The timing called ``figure``, or that of launches."""
    return row.figure(figure) or row.timing


def figures(run: Run) -> list[str]:
    """The names in FIGURES that the run has."""
    rows = [row for table in run.tables for row in table.rows]
    return [name for name in FIGURES if name == MAIN or any(row.figure(name) for row in rows)]


def columns(run: Run) -> list[str]:
    """The names of the run's columns."""
    return list(dict.fromkeys(row.precision for table in run.tables for row in table.rows))


def cell(table: Table, column, figure) -> Cell | None:
    """None where ours or every peer failed."""
    rows = table.timed(column)
    ours, peers = ([row for row in rows if row.ours == whose] for whose in (True, False))
    return Cell(ours[0], min(peers, key=lambda row: time(row, figure).median), figure) if ours and peers else None


def cells(run: Run, figure) -> dict[tuple[str, str], Cell]:
    """{(a table's title, a column's name): cell} of those that have both times."""
    found = {(table.title, column): cell(table, column, figure) for table in run.tables for column in columns(run)}
    return {place: each for place, each in found.items() if each}


def mean(cells) -> float:
    """The geometric mean of the ratios; at least one."""
    return statistics.geometric_mean(each.ratio for each in cells)


def below(cells) -> int:
    """How many ratios are below 1."""
    return sum(each.ratio < 1 for each in cells)


def ratios(run: Run, figure) -> list[list[str]]:
    """A heading, a row of ratios for each of the map's, and what they come to in each column."""
    names, known = columns(run), cells(run, figure)
    by_column = [[each for (_, column), each in known.items() if column == name] for name in names]
    rows = [[table.model, *(_text(known.get((table.title, name))) for name in names)] for table in run.tables]
    means = [f"{mean(column):.2f}" if column else "-" for column in by_column]
    return [["", *names], *rows, ["geometric mean", *means], ["cells below 1", *(str(below(column)) for column in by_column)]]


def _text(cell: Cell | None) -> str:
    return cell.text if cell else "-"


def total(run: Run, figure) -> str:
    """What all cells come to."""
    known = cells(run, figure).values()
    return f"{len(known)} cells, geometric mean {mean(known):.2f}, {below(known)} below 1" if known else "no cells"


def times(run: Run) -> list[list[str]]:
    """A heading and a row for each cell: our time, the best peer's, and ours beside its limit."""
    figure, memory = figures(run)[0], run.ceilings.get("memory")
    heading = ["", "column", "ours", "best peer", "ms", "peer's ms", "x best peer", *["limit", "% of limit"] * bool(memory)]
    return [heading, *(_times(table, name, figure, memory) for table in run.tables for name in columns(run))]


def _times(table: Table, column, figure, memory) -> list[str]:
    found = cell(table, column, figure)
    if not found:
        return [table.model, column, "", "", "failed"]
    own, best = found.times
    row = [table.model, column, found.ours.name, found.peer.name, own.digits, best.digits, found.text]
    if memory:
        least = limit(table, COLUMNS[column], memory)
        row += [milliseconds(least), f"{100 * least / own.median:.1f}"]
    return row


def limit(table: Table, column: Column, memory) -> float:
    """Milliseconds that a kernel can hardly beat: of the bytes at ``memory`` GB/s, or of the products, whichever is longer.

    x, weight and bias are read once, y is written once. Training reads the former twice and writes their gradients; it reads
    y's gradient. It has three convolutions instead of one.
    """
    case, times, passes = table.case, 3 if table.training else 1, 2 if table.training else 1
    operands = math.prod(case.x) + math.prod(case.weight_shape) + case.out_channels * case.bias
    size = times * operands * column.dtype.itemsize + passes * math.prod(case.output_shape) * column.computes.itemsize
    strict = column.computes.itemsize == 4 and column.precision == "fp32"
    return max(size / memory / 1e6, times * flop(case) / (STRICT if strict else TENSOR_CORES) / 1e9)


def notes(run: Run) -> list[str]:
    """What is to be said of single cells, and why a row of theirs failed."""
    said = []
    for table in run.tables:
        failed = [f"{row.precision}: {row.name} failed: {row.failure}" for row in table.rows if row.failure]
        said += [f"{table.model}, {note}." for note in (*table.notes, *failed)]
    return said
