"""What a run measured, as plain data that JSON keeps, and the figures that follow from it."""

import json
import statistics
from dataclasses import asdict, dataclass, field

from numba_impl.problem import Geometry


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
    """One way to compute the layer. A failed one has no timing, and says why. ``memory``: bytes at a call's peak, on a GPU."""

    name: str
    precision: str
    ours: bool
    errors: Errors | None = None
    timing: Timing | None = None
    failure: str = ""
    memory: int | None = None


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

    def best_peer(self, precision) -> Row | None:
        peers = [row for row in self.timed(precision) if not row.ours]
        return min(peers, key=lambda row: row.timing.median, default=None)


@dataclass(frozen=True)
class Run:
    """All tables of a run, and what it takes to repeat it."""

    command: str
    seed: int
    method: str
    machine: dict
    versions: dict
    tables: list[Table]

    def save(self, path):
        with open(path, "w") as file:
            json.dump(asdict(self), file, indent=1)
            file.write("\n")

    @classmethod
    def load(cls, path) -> "Run":
        with open(path) as file:
            data = json.load(file)
        return cls(**data | {"tables": [_table(table) for table in data["tables"]]})

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
    return Row(**data | {"errors": errors and Errors(**errors), "timing": timing and Timing(**timing)})
