"""What a run measured, as plain data that JSON keeps, and the figures that follow from it."""

import json
import math
import statistics
from dataclasses import asdict, dataclass, field

from numba_impl.case import Case

NOISY = 3.0  # per cent of spread, beyond which a figure is marked
KEPT_DIGITS = 5  # of a figure in a file: more than any spread leaves certain
MAIN = "ms"
FURTHER = ("warm", "graph", "graph warm")  # the timings that a row has besides


def milliseconds(value) -> str:
    """As a text, to the microsecond; a time below 0.1 ms to a tenth of it."""
    return f"{value:.3f}" if value >= 0.1 else f"{value:.4f}"


def title(case: Case) -> str:
    """A case as tables name it: x, then the layer."""
    settings = {"k": case.kernel_size, "s": case.stride, "p": case.padding, "op": case.output_padding}
    pairs = {name: v if isinstance(v, int) else "x".join(map(str, v)) for name, v in settings.items()}
    size = " x ".join(map(str, case.x))
    return f"{size} -> {case.out_channels} channels, " + " ".join(f"{name}{v}" for name, v in pairs.items())


def output_bytes(case: Case) -> int:
    return 4 * math.prod(case.output_shape)


def bytes_moved(case: Case) -> int:
    """Bytes of x, weight and bias, read once, and of y, written once."""
    return 4 * (math.prod(case.x) + math.prod(case.weight_shape) + case.out_channels) + output_bytes(case)


def flop(case: Case) -> int:
    """Two for each product of the parity split: every input value meets every tap and output channel."""
    return 2 * math.prod(case.x) * case.out_channels * case.geometry.taps


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a call: the median of ``samples``, percentiles, the least and the most."""

    median: float
    p20: float
    p80: float
    least: float
    most: float
    samples: int

    @classmethod
    def of(cls, times) -> "Timing":
        times = sorted(times)
        p20, p80 = (times[round(q * (len(times) - 1))] for q in (0.2, 0.8))
        return cls(statistics.median(times), p20, p80, times[0], times[-1], len(times))

    @property
    def spread(self) -> float:
        """Half the distance from p20 to p80, in per cent of the median."""
        return 50 * (self.p80 - self.p20) / self.median

    @property
    def digits(self) -> str:
        """The median as a text, after a "~" if the spread exceeds ``NOISY``."""
        return "~" * (self.spread > NOISY) + milliseconds(self.median)

    def __str__(self):
        return f"{self.digits} ms"


@dataclass(frozen=True)
class Errors:
    """Errors against float64.

    ``output``: the largest absolute error of y; ``unclamped``: the relative L2 error of mish(convolution); ``gradient``: in
    training, the largest relative L2 error of the three gradients.
    """

    output: float | None = None
    unclamped: float | None = None
    gradient: float | None = None

    def __str__(self):
        known = {"gradient": self.gradient, "max error": self.output, "unclamped": self.unclamped}
        return ", ".join(f"{name} {value:.1e}" for name, value in known.items() if value is not None)


@dataclass(frozen=True)
class Row:
    """One way to compute the layer. A row that failed says why, and has no timing, or no further ones.

    ``further``: {a name in FURTHER: timing}; ``memory``: bytes at a call's peak, on a GPU.
    """

    name: str
    precision: str
    ours: bool
    errors: Errors | None = None
    timing: Timing | None = None
    failure: str = ""
    memory: int | None = None
    further: dict[str, Timing] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The name without the backend that dispatch chose."""
        return self.name.split(" (")[0]

    @property
    def cut(self) -> bool:
        """Whether the row failed after it was timed."""
        return bool(self.timing and self.failure)

    def figure(self, name) -> Timing | None:
        """The timing that is called MAIN or a name in FURTHER."""
        return self.timing if name == MAIN else self.further.get(name)


@dataclass(frozen=True)
class Table:
    """The rows of one case, and what was timed on a tensor of its output's shape.

    ``copy``: ``copy_``; ``pointwise``: the pointwise kernel in place, where the forward alone is timed. ``model``: the name of
    a row of the map of models; such a table has no ``copy``, and the ``precision`` of its rows is a column of the map.
    """

    case: Case
    device: str
    copy: Timing | None
    rows: list[Row]
    pointwise: Row | None = None
    notes: list[str] = field(default_factory=list)
    training: bool = False
    model: str = ""

    @property
    def title(self) -> str:
        return f"{self.model}: " * bool(self.model) + title(self.case) + ", forward and backward" * self.training

    @property
    def bytes(self) -> int:
        """Training reads x, weight and bias twice and writes their gradients; it writes y and reads its gradient."""
        once = bytes_moved(self.case)
        return 3 * once - output_bytes(self.case) if self.training else once

    @property
    def flop(self) -> int:
        """Training has three convolutions: the layer's, and those of the gradients of x and of weight."""
        return 3 * flop(self.case) if self.training else flop(self.case)

    @property
    def floor(self) -> float:
        """Milliseconds that the table's bytes take at the rate of ``copy_``, which reads and writes the output."""
        return self.copy.median * self.bytes / (2 * output_bytes(self.case))

    def timed(self, precision) -> list[Row]:
        return [row for row in self.rows if row.timing and row.precision == precision]

    def eager(self, precision) -> float | None:
        """The milliseconds of eager PyTorch in a precision."""
        return next((row.timing.median for row in self.timed(precision) if row.name == "eager"), None)

    def best_peer(self, precision, figure=MAIN) -> Timing | None:
        """The shortest timing of a peer in a precision."""
        peers = [row.figure(figure) for row in self.timed(precision) if not row.ours]
        return min((timing for timing in peers if timing), key=lambda timing: timing.median, default=None)


@dataclass(frozen=True)
class Run:
    """All tables of a run, what it takes to repeat it, and the machine's state before and after.

    ``ceilings``: GB/s of "memory" and TFLOP/s of precisions, where they were measured. ``sweep``: whether the tables are of
    cases around the first.
    """

    command: str
    seed: int
    method: str
    machine: dict
    versions: dict
    tables: list[Table]
    before: dict = field(default_factory=dict)
    after: dict = field(default_factory=dict)
    ceilings: dict = field(default_factory=dict)
    sweep: bool = False

    def save(self, path):
        """Writes JSON, a row a line, so that a comparison of two files shows which rows differ."""
        text = json.dumps(_rounded(asdict(self)), separators=(",", ":"))
        path.write_text(text.replace('{"name"', '\n{"name"') + "\n")

    @classmethod
    def load(cls, path) -> "Run":
        """The run in a file. Raises ValueError for a file that ``save`` did not write."""
        try:
            data = json.loads(path.read_text())
            return cls(**data | {"tables": [_table(table) for table in data["tables"]]})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a run that --json kept: {error!r}") from error

    @property
    def is_map(self) -> bool:
        """Whether the tables are rows of the map of models."""
        return any(table.model for table in self.tables)

    @property
    def failed(self) -> list[Row]:
        """The rows of ours that failed."""
        rows = [row for table in self.tables for row in (*table.rows, table.pointwise)]
        return [row for row in rows if row and row.ours and row.failure]


def _rounded(data):
    """Plain data with every float rounded to ``KEPT_DIGITS``."""
    if isinstance(data, dict):
        return {name: _rounded(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_rounded(value) for value in data]
    return float(f"{data:.{KEPT_DIGITS}g}") if isinstance(data, float) else data


def _table(data) -> Table:
    copy = data["copy"] and Timing(**data["copy"])
    parts = {"case": _case(data["case"]), "copy": copy, "rows": [_row(row) for row in data["rows"]]}
    return Table(**data | parts | {"pointwise": _row(data["pointwise"]) if data["pointwise"] else None})


def _case(data) -> Case:
    """A case. Older files call x ``shape``, and also keep the constants, which all of them share."""
    sizes = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    renamed = {"x" if name == "shape" else name: value for name, value in sizes.items()}
    return Case(**{name: value for name, value in renamed.items() if name not in ("add_value", "scale")})


def _row(data) -> Row:
    errors, timing = data["errors"], data["timing"]
    further = {name: Timing(**figure) for name, figure in data.get("further", {}).items()}
    return Row(**data | {"errors": errors and Errors(**errors), "timing": timing and Timing(**timing), "further": further})
