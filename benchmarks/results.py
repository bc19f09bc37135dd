"""What a run measured, as plain data that JSON keeps, and the figures that follow from it."""

import json
import statistics
from dataclasses import asdict, dataclass, field

from numba_impl.problem import Geometry

NOISY = 3.0  # per cent of spread, beyond which a figure is marked
MAIN = "ms"
FURTHER = ("warm", "graph", "graph warm")  # what a row has besides, where it can be told apart


def milliseconds(value) -> str:
    """To the microsecond, of short times to a tenth of it."""
    return f"{value:.3f}" if value >= 0.1 else f"{value:.4f}"


@dataclass(frozen=True)
class Case:
    """The layer and its input: x ``shape`` [N, C_in, H, W], fp32."""

    shape: tuple[int, int, int, int]
    out_channels: int
    kernel_size: int | tuple[int, int] = 3
    stride: int | tuple[int, int] = 2
    padding: int | tuple[int, int] = 1
    output_padding: int | tuple[int, int] = 1
    add_value: float = 0.5
    scale: float = 2.0

    @property
    def geometry(self) -> Geometry:
        return Geometry.of(self.kernel_size, self.stride, self.padding, self.output_padding)

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        batch, _, height, width = self.shape
        rows, cols = self.geometry.rows, self.geometry.cols
        return batch, self.out_channels, rows.output_size(height), cols.output_size(width)

    @property
    def output_bytes(self) -> int:
        batch, channels, height, width = self.output_shape
        return 4 * batch * channels * height * width

    @property
    def bytes(self) -> int:
        """x, weight and bias read once, y written once."""
        batch, channels, height, width = self.shape
        weights = self.out_channels * (channels * self.geometry.taps + 1)
        return 4 * (batch * channels * height * width + weights) + self.output_bytes

    @property
    def flop(self) -> int:
        """Two a product of the parity split: every input value meets every tap and output channel."""
        batch, channels, height, width = self.shape
        return 2 * batch * channels * height * width * self.out_channels * self.geometry.taps

    def __str__(self):
        settings = {"k": self.kernel_size, "s": self.stride, "p": self.padding, "op": self.output_padding}
        pairs = {name: v if isinstance(v, int) else "x".join(map(str, v)) for name, v in settings.items()}
        size = " x ".join(map(str, self.shape))
        return f"{size} -> {self.out_channels} channels, " + " ".join(f"{name}{v}" for name, v in pairs.items())


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call, over ``samples`` calls."""

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
        """The median's digits, marked by "~" where the spread says that they are not all certain."""
        return "~" * (self.spread > NOISY) + milliseconds(self.median)

    def __str__(self):
        return f"{self.digits} ms"


@dataclass(frozen=True)
class Errors:
    """Against float64. Forward: the output's largest absolute error, and the relative L2 error before add, clamp and scale.

    Training: the largest relative L2 error of any gradient.
    """

    output: float | None = None
    unclamped: float | None = None
    gradient: float | None = None

    def __str__(self):
        if self.gradient is not None:
            return f"gradient {self.gradient:.1e}"
        return f"max error {self.output:.1e}, unclamped {self.unclamped:.1e}"


@dataclass(frozen=True)
class Row:
    """One way to compute the layer. A failed one says why, and has no timing, or no further ones.

    ``further``: timings by the names in FURTHER; ``memory``: bytes at a call's peak, on a GPU.
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
        """The name, without the backend that dispatch chose."""
        return self.name.split(" (")[0]

    @property
    def cut(self) -> bool:
        """Whether it failed after it was timed."""
        return bool(self.timing and self.failure)

    def figure(self, name) -> Timing | None:
        """The timing of MAIN, or of a name in FURTHER."""
        return self.timing if name == MAIN else self.further.get(name)


@dataclass(frozen=True)
class Table:
    """One case: its rows, and the copies and, of the forward alone, the pointwise kernel timed on its output."""

    case: Case
    device: str
    copy: Timing
    rows: list[Row]
    pointwise: Row | None = None
    notes: list[str] = field(default_factory=list)
    training: bool = False

    @property
    def title(self) -> str:
        return f"{self.case}" + ", forward and backward" * self.training

    @property
    def bytes(self) -> int:
        """Training reads x, weight and bias twice and writes their gradients; it writes y and reads its gradient."""
        return 3 * self.case.bytes - self.case.output_bytes if self.training else self.case.bytes

    @property
    def flop(self) -> int:
        """Training has three convolutions: the layer's, and those of the gradients of x and of weight."""
        return 3 * self.case.flop if self.training else self.case.flop

    @property
    def floor(self) -> float:
        """Milliseconds that the table's bytes take at the rate of ``copy_``, which reads and writes the output."""
        return self.copy.median * self.bytes / (2 * self.case.output_bytes)

    def timed(self, precision) -> list[Row]:
        return [row for row in self.rows if row.timing and row.precision == precision]

    def eager(self, precision) -> float | None:
        """Milliseconds of eager PyTorch in a precision."""
        return next((row.timing.median for row in self.timed(precision) if row.name == "eager"), None)

    def best_peer(self, precision, figure=MAIN) -> Timing | None:
        """The shortest of the peers' timings in a precision."""
        peers = [row.figure(figure) for row in self.timed(precision) if not row.ours]
        return min((timing for timing in peers if timing), key=lambda timing: timing.median, default=None)


@dataclass(frozen=True)
class Run:
    """All tables of a run, what it takes to repeat it, and the machine's state before and after.

    ``ceilings``: GB/s of "memory" and TFLOP/s of precisions, where they were measured. ``sweep``: the tables are of
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
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path) -> "Run":
        """Raises ValueError for a file that ``save`` did not write."""
        try:
            data = json.loads(path.read_text())
            return cls(**data | {"tables": [_table(table) for table in data["tables"]]})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a run that --json kept: {error!r}") from error

    @property
    def failed(self) -> list[Row]:
        """Rows of ours that failed."""
        rows = [row for table in self.tables for row in (*table.rows, table.pointwise)]
        return [row for row in rows if row and row.ours and row.failure]


def _table(data) -> Table:
    case = Case(**{name: tuple(v) if isinstance(v, list) else v for name, v in data["case"].items()})
    parts = {"case": case, "copy": Timing(**data["copy"]), "rows": [_row(row) for row in data["rows"]]}
    return Table(**data | parts | {"pointwise": _row(data["pointwise"]) if data["pointwise"] else None})


def _row(data) -> Row:
    errors, timing = data["errors"], data["timing"]
    further = {name: Timing(**figure) for name, figure in data.get("further", {}).items()}
    return Row(**data | {"errors": errors and Errors(**errors), "timing": timing and Timing(**timing), "further": further})
