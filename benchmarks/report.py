"""A run as aligned text, as Markdown, and as a plot."""

from benchmarks.results import Row, Run, Table

SPEED = ("ms", "± %", "x eager", "x best peer")
NUMBERS = (*SPEED, "GB/s", "TFLOP/s", "% of floor", "max error", "unclamped relL2")
TRAINING = (*SPEED, "peak GiB", "gradient relL2")
LEGEND = """\
ms: median; ± %: half of p20 to p80. x eager, x best peer: times as fast, in the same precision. GB/s: x, weights and y
once each. TFLOP/s: of the parity split, no inserted zeros. % of floor: the time those bytes take at copy_'s rate in this
run, over the row's. max error: of the output against float64. unclamped relL2: relative L2 error of mish(convolution),
with no add, clamp or scale to hide it, of compiled peers before compilation. channels_last rows get x in that format,
converted beforehand."""
TRAINING_LEGEND = """\
ms: median of one step, the forward and then the gradients of x, weight and bias; ± %: half of p20 to p80. x eager, x best
peer: times as fast, in the same precision. peak GiB: allocated at the most during a step, over the inputs, the weights and
y's gradient. gradient relL2: relative L2 error against float64, the largest of the three gradients. channels_last rows get
x and y's gradient in that format, converted beforehand."""


def columns(table: Table) -> tuple[str, ...]:
    """The headings of ``numbers``."""
    return TRAINING if table.training else NUMBERS


def numbers(table: Table, row: Row) -> list[str]:
    """A row's cells under ``columns``, or why it failed."""
    if row.timing is None:
        return [f"failed: {row.failure}"]
    ms, case = row.timing.median, table.case
    eager, peer = table.eager(row.precision), table.best_peer(row.precision)
    speed = [
        f"{ms:.3f}",
        f"{row.timing.spread:.1f}",
        f"{eager / ms:.2f}" if eager else "-",
        f"{peer.timing.median / ms:.2f}" if peer else "-",
    ]
    if table.training:
        return [*speed, "-" if row.memory is None else f"{row.memory / 2**30:.3g}", f"{row.errors.gradient:.1e}"]
    return [
        *speed,
        f"{case.bytes / ms / 1e6:.1f}",
        f"{case.flop / ms / 1e9:.3g}",
        f"{100 * table.floor / ms:.1f}",
        f"{row.errors.output:.1e}",
        f"{row.errors.unclamped:.1e}",
    ]


def grid_of(table: Table) -> list[list[str]]:
    """Heading and rows."""
    return [["", "precision", *columns(table)], *([row.name, row.precision, *numbers(table, row)] for row in table.rows)]


def summary(run: Run) -> list[list[str]]:
    """The module in every case and precision, below a heading; empty for one case, or without the module."""
    grid = [["case", "precision", "row", "ms", "x eager", "x best peer"]]
    for table in run.tables:
        for row in table.rows:
            if row.name.startswith("ModelNumba"):
                cells = dict(zip(columns(table), numbers(table, row), strict=False))
                grid.append([str(table.case), row.precision, row.name, *(cells.get(name, "-") for name in grid[0][3:])])
    return grid if len(run.tables) > 1 and len(grid) > 1 else []


def sentences(table: Table) -> list[str]:
    """What a table's rows do not say: its floor, the pointwise kernel, what was left out."""
    case, copy = table.case, table.copy.median
    rate = 2 * case.output_bytes / copy / 1e6
    lines = [
        f"{table.bytes / 1e6:.4g} MB and {table.flop / 1e9:.4g} GFLOP; "
        f"copy_ of the output takes {copy:.3f} ms ({rate:.1f} GB/s), so the byte floor is {table.floor:.3f} ms."
    ]
    row = table.pointwise
    if row and row.failure:
        lines.append(f"Pointwise kernel: failed: {row.failure}")
    elif row:
        lines.append(
            f"Pointwise kernel in place on the output: {row.timing.median:.3f} ms ± {row.timing.spread:.1f} %, "
            f"{row.timing.median / copy:.3f} times copy_; max error {row.errors.output:.1e}."
        )
    return lines + ["Left out: " + "; ".join(table.notes) + "."] * bool(table.notes)


def header(run: Run) -> str:
    """Machine, versions, and how the run was made."""
    facts = {"machine": run.machine, "versions": run.versions}
    lines = [f"{what}: " + ", ".join(f"{name} {value}" for name, value in known.items()) for what, known in facts.items()]
    return "\n".join([*lines, f"timing: {run.method}", f"seed: {run.seed}", f"command: {run.command}"])


def text(run: Run) -> str:
    """Every table, for a terminal."""
    parts = [TRAINING_LEGEND if any(table.training for table in run.tables) else LEGEND]
    for table in run.tables:
        parts.append("\n".join([f"{table.title}, on {table.device}", *aligned(grid_of(table)), *sentences(table)]))
    if lines := summary(run):
        parts.append("\n".join(["Summary", *aligned(lines)]))
    return "\n\n".join(parts)


def aligned(grid) -> list[str]:
    """Numbers to the right, text to the left; the reason in a failed row runs on."""
    full, left = [row for row in grid if len(row) == len(grid[0])], left_columns(grid)
    widths = [max(len(row[i]) for row in (grid if i in left else full)) for i in range(len(grid[0]))]

    def line(row):
        cells = enumerate(zip(row, widths, strict=False))
        return "  ".join(cell.ljust(width) if i in left else cell.rjust(width) for i, (cell, width) in cells).rstrip()

    return [line(row) for row in grid]


def left_columns(grid) -> range:
    """The columns of text, which come before "ms"."""
    return range(grid[0].index("ms"))


def markdown(run: Run) -> str:
    """Every table, for the README."""
    facts = [f"{name} {value}" for name, value in (run.machine | run.versions).items()]
    parts = [f"{', '.join(facts)}. {run.method}. `{run.command}`, seed {run.seed}."]
    for table in run.tables:
        bold = {row.name for row in table.rows if row.ours}
        rows = [[f"**{row[0]}**" if row[0] in bold else row[0], *row[1:]] for row in grid_of(table)]
        parts += [f"**{table.title}**", piped(rows), " ".join(sentences(table))]
    if lines := summary(run):
        parts += ["**Summary**", piped(lines)]
    return "\n\n".join(parts)


def piped(grid) -> str:
    columns = len(grid[0])
    rule = ["---" if i in left_columns(grid) else "---:" for i in range(columns)]
    rows = [grid[0], rule, *grid[1:]]
    return "\n".join("| " + " | ".join(row + [""] * (columns - len(row))) + " |" for row in rows)


def plot(run: Run, path):
    """A panel a case: a bar of milliseconds for each row, with the 20th and 80th percentiles and the byte floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    heights = [len(table.rows) + 2 for table in run.tables]
    figure, panels = pyplot.subplots(
        len(heights), figsize=(10, 0.32 * sum(heights) + 0.6), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for table, axes in zip(run.tables, panels[:, 0], strict=True):
        _panel(axes, table)
    looks = [Patch(**_look(ours, precision)) for ours in (True, False) for precision in ("fp32", "tf32")]
    labels = ["this project, fp32", "this project, TF32", "PyTorch, fp32", "PyTorch, TF32"]
    used = {(row.ours, row.precision) for table in run.tables for row in table.rows}
    keep = [i for i, key in enumerate((o, p) for o in (True, False) for p in ("fp32", "tf32")) if key in used]
    figure.legend([looks[i] for i in keep], [labels[i] for i in keep], loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _panel(axes, table: Table):
    rows = [row for row in table.rows if row.timing]
    for y, row in enumerate(rows):
        timing = row.timing
        spread = [[timing.median - timing.p20], [timing.p80 - timing.median]]
        axes.barh(y, timing.median, xerr=spread, ecolor="black", capsize=2, **_look(row.ours, row.precision))
        axes.annotate(f"{timing.median:.2f}", (timing.p80, y), (6, 0), textcoords="offset points", va="center", fontsize=8)
    axes.axvline(table.floor, color="black", linestyle=":", linewidth=1)
    axes.annotate("byte floor", (table.floor, len(rows) - 0.2), (3, 0), textcoords="offset points", fontsize=7, va="center")
    axes.set_yticks(range(len(rows)), [f"{row.name}, {row.precision}" for row in rows], fontsize=8)
    axes.set_ylim(len(rows) + 0.2, -0.6)
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("ms")
    axes.set_title(f"{table.title} ({table.device})", fontsize=9, loc="left")


def _look(ours, precision) -> dict:
    color = {(True, "fp32"): "#1b6ca8", (True, "tf32"): "#8cc1e8", (False, "fp32"): "#6b6b6b", (False, "tf32"): "#c4c4c4"}
    return {"color": color[ours, precision]}
