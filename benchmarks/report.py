"""A run as aligned text, and as Markdown."""

from benchmarks import maps
from benchmarks.grids import aligned, piped
from benchmarks.results import FURTHER, MAIN, NOISY, Row, Run, Table, milliseconds, output_bytes, title

SPEED = (MAIN, "± %", "x eager", "x best peer")
REPLAYED = "x best graph"
NUMBERS = ("GB/s", "TFLOP/s", "% of floor", "max error", "unclamped relL2")
TRAINING = ("peak GiB", "gradient relL2")
SUMMARY = (*SPEED, "graph", REPLAYED, "graph warm")
SPREAD = f"its spread, half of p20 to p80; ~ marks a figure whose spread exceeds {NOISY:g} %"
LEGEND = f"""\
ms: the median time of a call, measured as the line "timing" says. ± %: {SPREAD}.
x eager, x best peer: how many times as fast the row is, in the same precision. GB/s: x, weights and y are counted once each.
TFLOP/s: the parity split's products are counted, no inserted zeros. % of floor: the time that those bytes take at the rate of
copy_ in this run, divided by the row's time. max error: the largest error of the output against float64. unclamped relL2: the
relative L2 error of mish(convolution), where no add, clamp or scale hides it; compiled peers are checked before compilation.
channels_last rows get x in that format; its conversion is not timed."""
FURTHER_LEGEND = f"""\
warm: launches on end, with L2 as they leave it: the GPU's time or the host's, whichever is longer. graph: a CUDA graph of one
call, without host time, with L2 flushed before each replay. {REPLAYED}: how many times as fast the graph is as the best
peer's. graph warm: a graph of many calls on end, with L2 as they leave it."""
TRAINING_LEGEND = f"""\
ms: the median time of one step, the forward and then the gradients of x, weight and bias.
± %: {SPREAD}.
x eager, x best peer: how many times as fast the row is, in the same precision. peak GiB: the most memory that is allocated
during a step, beside the inputs, the weights and y's gradient. gradient relL2: the relative L2 error against float64 of the
worst of the three gradients. channels_last rows get x and y's gradient in that format; the conversion is not timed."""

MAP_LEGEND = f"""\
A cell is the time of the best peer, eager PyTorch or torch.compile, over ModelNumba's: above 1 ours is faster. {maps.MARK} marks
a cell in which a peer or ours could not be captured in a CUDA graph: the time of its launches stands for it. ~ marks a time
whose spread exceeds {NOISY:g} %. limit: the time of x, weight and bias read once and y written once at the rate of copy_ in this
run, or of the products at {maps.STRICT} TFLOP/s in strict fp32 and {maps.TENSOR_CORES} in TF32 and 16 bits, whichever is longer.
Training has three times the products; it reads the operands twice and writes their gradients, and it reads y's gradient."""


def columns(table: Table) -> list[str]:
    """The headings of a table's numbers."""
    if table.training:
        return [*SPEED, *TRAINING]
    further = [name for name in FURTHER if any(row.further.get(name) for row in table.rows)]
    return [*SPEED, *further, *[REPLAYED] * ("graph" in further), *NUMBERS]


def cells(table: Table, row: Row) -> dict[str, str]:
    """{heading: number} of a row, without the headings that it has no number for."""
    ms = row.timing.median
    found = {
        MAIN: row.timing.digits,
        "± %": f"{row.timing.spread:.1f}",
        "GB/s": f"{table.bytes / ms / 1e6:.1f}",
        "TFLOP/s": f"{table.flop / ms / 1e9:.3g}",
        "% of floor": f"{100 * table.floor / ms:.1f}",
    }
    if eager := table.eager(row.precision):
        found["x eager"] = f"{eager / ms:.2f}"
    for heading, name in (("x best peer", MAIN), (REPLAYED, "graph")):
        peer, own = table.best_peer(row.precision, name), row.figure(name)
        if peer and own:
            found[heading] = f"{peer.median / own.median:.2f}"
    found |= {name: timing.digits for name, timing in row.further.items()}
    if row.memory is not None:
        found["peak GiB"] = f"{row.memory / 2**30:.3g}"
    if table.training:
        return found | {"gradient relL2": f"{row.errors.gradient:.1e}"}
    return found | {"max error": f"{row.errors.output:.1e}", "unclamped relL2": f"{row.errors.unclamped:.1e}"}


def numbers(table: Table, row: Row, headings) -> list[str]:
    """A row's cells under ``headings``, or why it failed."""
    if row.timing is None:
        return [f"failed: {row.failure}"]
    found = cells(table, row)
    return [found.get(heading, "-") for heading in headings]


def grid_of(table: Table) -> list[list[str]]:
    """The heading and the rows of a table."""
    headings = columns(table)
    rows = [[row.name, row.precision, *numbers(table, row, headings)] for row in table.rows]
    return [["", "precision", *headings], *rows]


def summary(run: Run) -> list[list[str]]:
    """A heading and the module's rows of all cases and precisions; empty for one case, or without the module."""
    known = {heading for table in run.tables for heading in columns(table)}
    headings = [heading for heading in SUMMARY if heading in known]
    rows = [
        [title(table.case), row.precision, row.name, *numbers(table, row, headings)]
        for table in run.tables
        for row in table.rows
        if row.kind == "ModelNumba"
    ]
    return [["case", "precision", "row", *headings], *rows] if len(run.tables) > 1 and rows else []


def map_grids(run: Run) -> list[tuple[str, list[list[str]], int]]:
    """(title, grid, how many of its first columns are text) of a map: the ratios by each figure, then the times."""
    what = "Forward and backward: x" if run.tables[0].training else "x"
    found = [
        (f"{what} best peer, by {maps.FIGURES[figure]}: {maps.total(run, figure)}", maps.ratios(run, figure), 1)
        for figure in maps.figures(run)
    ]
    return [*found, (f"Times by {maps.FIGURES[maps.figures(run)[0]]}", maps.times(run), 4)]


def sentences(table: Table) -> list[str]:
    """What a table says beside its rows: the byte floor, the pointwise kernel, what was left out."""
    copy = table.copy.median
    rate = 2 * output_bytes(table.case) / copy / 1e6
    lines = [
        f"{table.bytes / 1e6:.4g} MB and {table.flop / 1e9:.4g} GFLOP; "
        f"copy_ of the output takes {table.copy} ({rate:.1f} GB/s), so the byte floor is {milliseconds(table.floor)} ms."
    ]
    row = table.pointwise
    if row and row.failure:
        lines.append(f"Pointwise kernel: failed: {row.failure}")
    elif row:
        lines.append(
            f"Pointwise kernel in place on the output: {row.timing} ± {row.timing.spread:.1f} %, "
            f"{row.timing.median / copy:.3f} times copy_; max error {row.errors.output:.1e}."
        )
    lines += [f"{row.name} in {row.precision}, further figures: failed: {row.failure}." for row in table.rows if row.cut]
    return lines + ["Left out: " + "; ".join(table.notes) + "."] * bool(table.notes)


def header(run: Run) -> str:
    """The machine, the versions, and how the run was made."""
    lines = [_listed("machine", run.machine), _listed("versions", run.versions), *_lines("before", run.before)]
    return "\n".join([*lines, f"timing: {run.method}", f"seed: {run.seed}", f"command: {run.command}"])


def footer(run: Run) -> list[str]:
    """What is known once the run is over."""
    ceilings = {name: f"{value:.4g} {'GB/s' if name == 'memory' else 'TFLOP/s'}" for name, value in run.ceilings.items()}
    return [*_lines("ceilings", ceilings), *_lines("after", run.after)]


def _lines(what, facts) -> list[str]:
    return [_listed(what, facts)] if facts else []


def _listed(what, facts) -> str:
    return f"{what}: " + ", ".join(f"{name} {value}" for name, value in facts.items())


def legend(run: Run) -> str:
    if any(table.training for table in run.tables):
        return TRAINING_LEGEND
    further = any(row.further for table in run.tables for row in table.rows)
    return "\n".join([LEGEND, *[FURTHER_LEGEND] * further])


def text(run: Run) -> str:
    """Every table, for a terminal."""
    if run.is_map:
        grids = ["\n".join([heading, *aligned(grid, texts)]) for heading, grid, texts in map_grids(run)]
        return "\n\n".join([MAP_LEGEND, *grids, "\n".join([*maps.notes(run), *footer(run)])]).rstrip()
    parts = [legend(run)]
    for table in run.tables:
        parts.append("\n".join([f"{table.title}, on {table.device}", *aligned(grid_of(table), 2), *sentences(table)]))
    if lines := summary(run):
        parts.append("\n".join(["Summary", *aligned(lines, 3)]))
    return "\n\n".join([*parts, "\n".join(footer(run))]).rstrip()


def markdown(run: Run) -> str:
    """Every table, for the README."""
    facts = [f"{name} {value}" for name, value in (run.machine | run.versions).items()]
    parts = [f"{', '.join(facts)}. {run.method}. `{run.command}`, seed {run.seed}."]
    if run.is_map:
        parts += [part for heading, grid, texts in map_grids(run) for part in (f"**{heading}**", piped(grid, texts))]
        return "\n\n".join([*parts, *maps.notes(run), *_lines("before", run.before), *footer(run)])
    for table in run.tables:
        bold = {row.name for row in table.rows if row.ours}
        rows = [[f"**{row[0]}**" if row[0] in bold else row[0], *row[1:]] for row in grid_of(table)]
        parts += [f"**{table.title}**", piped(rows, 2), " ".join(sentences(table))]
    if lines := summary(run):
        parts += ["**Summary**", piped(lines, 3)]
    return "\n\n".join([*parts, *_lines("before", run.before), *footer(run)])
