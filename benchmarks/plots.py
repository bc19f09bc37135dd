"""Plots of a run: bars of its times, the lines of a sweep, the heat map of models, and a roofline."""

import math
from contextlib import contextmanager

from benchmarks import maps, sweep
from benchmarks.results import Run, Table

COLOR = {(True, "fp32"): "#1b6ca8", (True, "tf32"): "#8cc1e8", (False, "fp32"): "#6b6b6b", (False, "tf32"): "#c4c4c4"}
PRECISION = {"fp32": "fp32", "tf32": "TF32"}
SVG = {
    "svg.fonttype": "none",  # letters as text, not as curves, which would be most of a file
    "svg.hashsalt": "benchmarks",  # the same plot is the same file
    "font.sans-serif": ["DejaVu Sans", "Arial"],  # each text repeats the list, which is ten names long without this
}
SLOWER, SAME, FASTER = "#c0392b", "white", "#1e8449"  # of a cell
FULL = 4  # times as fast or as slow: from here on a cell has the full colour
LOOKS = {  # {a row's kind: its look}: this project is blue and green, PyTorch grey, orange and red
    "ModelNumba": {"color": "#1b6ca8", "marker": "o", "linewidth": 2.5, "zorder": 3},
    "backend hopper": {"color": "#5aa9e6", "marker": "D"},
    "backend tiled": {"color": "#2a9d8f", "marker": "s"},
    "backend composite": {"color": "#8fbf6b", "marker": "^"},
    "backend cpu": {"color": "#5aa9e6", "marker": "D"},
    "backend reference": {"color": "#8fbf6b", "marker": "x"},
    "eager": {"color": "#6b6b6b", "marker": "v"},
    "eager, channels_last": {"color": "#6b6b6b", "marker": "<", "linestyle": "--"},
    "torch.compile": {"color": "#e08a1e", "marker": "P"},
    "pixel-shuffle compiled": {"color": "#b5483a", "marker": "X"},
    "pixel-shuffle compiled, channels_last": {"color": "#b5483a", "marker": ">", "linestyle": "--"},
}


@contextmanager
def _figure(path, rows=1, columns=1, **options):
    """(a figure, its axes [rows, columns]), saved to ``path`` at the end, in the format that its name says."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(SVG):
        figure, axes = pyplot.subplots(rows, columns, squeeze=False, layout="constrained", **options)
        for each in axes.flat:
            each.spines[["top", "right"]].set_visible(False)
        yield figure, axes
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


def times(run: Run, path):
    """Draws the map of models, the lines of a sweep, or the bars of any other run."""
    (_heat if run.is_map else _lines if run.sweep else _bars)(run, path)


def _bars(run: Run, path):
    """Draws a panel for each case: a bar of milliseconds for each row, with p20, p80 and the byte floor."""
    from matplotlib.patches import Patch

    heights = [len(table.rows) + 2 for table in run.tables]
    with _figure(path, len(heights), figsize=(10, 0.32 * sum(heights) + 0.6), height_ratios=heights) as (figure, panels):
        for table, axes in zip(run.tables, panels[:, 0], strict=True):
            _bars_of(axes, table)
        used = {(row.ours, row.precision) for table in run.tables for row in table.rows}
        whose = {True: "this project", False: "PyTorch"}
        handles = [
            Patch(color=color, label=f"{whose[ours]}, {PRECISION[precision]}")
            for (ours, precision), color in COLOR.items()
            if (ours, precision) in used
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)


def _bars_of(axes, table: Table):
    rows = [row for row in table.rows if row.timing]
    for y, row in enumerate(rows):
        timing = row.timing
        spread = [[timing.median - timing.p20], [timing.p80 - timing.median]]
        axes.barh(y, timing.median, xerr=spread, ecolor="black", capsize=2, color=COLOR[row.ours, row.precision])
        axes.annotate(f"{timing.median:.2f}", (timing.p80, y), (6, 0), textcoords="offset points", va="center", fontsize=8)
    axes.axvline(table.floor, color="black", linestyle=":", linewidth=1)
    axes.annotate("byte floor", (table.floor, len(rows) - 0.2), (3, 0), textcoords="offset points", fontsize=7, va="center")
    axes.set_yticks(range(len(rows)), [f"{row.name}, {row.precision}" for row in rows], fontsize=8)
    axes.set_ylim(len(rows) + 0.2, -0.6)
    axes.margins(x=0.1)
    axes.set_xlabel("ms")
    axes.set_title(f"{table.title} ({table.device})", fontsize=9, loc="left")


def _lines(run: Run, path):
    """Draws the time of every row and the byte floor: axes of the sweep from left to right, precisions one below the other."""
    precisions = list(dict.fromkeys(row.precision for table in run.tables for row in table.rows))
    size = {"figsize": (12, 4 * len(precisions) + 1), "sharex": "col", "sharey": "row"}
    with _figure(path, len(precisions), len(sweep.AXES), **size) as (figure, panels):
        for precision, row_of_panels in zip(precisions, panels, strict=True):
            for axis, axes in zip(sweep.AXES, row_of_panels, strict=True):
                _lines_of(axes, run, axis, precision)
            row_of_panels[0].set_ylabel(f"ms, {PRECISION[precision]}")
        for axis, axes in zip(sweep.AXES, panels[-1], strict=True):
            axes.set_xlabel(axis)
        figure.suptitle(f"{run.tables[0].device}; {run.method}", fontsize=9)
        _legend(figure, panels)


def _lines_of(axes, run: Run, axis, precision):
    description, tables = sweep.along(axis, run.tables)
    lines = {}
    for x, table in tables.items():
        for row in table.timed(precision):
            lines.setdefault(row.kind, []).append((x, row.timing.median))
    for kind, points in lines.items():
        axes.plot(*zip(*points), markersize=5, label=kind, **{"linewidth": 1} | LOOKS[kind])
    axes.plot(list(tables), [table.floor for table in tables.values()], color="black", linestyle=":", label="byte floor")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(list(tables), [str(x) for x in tables])
    axes.grid(alpha=0.3)
    axes.set_title(description, fontsize=9)


def roofline(run: Run, path):
    """Draws the FLOP/s of every row over its case's FLOP a byte, and the ceilings: memory and products of matrices.

    Only the cases of a sweep that differ in channels are drawn: the others do as much work a byte as one of them.
    """
    from matplotlib.ticker import LogLocator

    memory = run.ceilings["memory"] / 1e3  # TFLOP/s where each byte brings one FLOP
    products = {name: value for name, value in run.ceilings.items() if name != "memory"}
    description, tables = sweep.along("channels", run.tables)
    with _figure(path, figsize=(9, 6.5)) as (figure, panels):
        axes = panels[0, 0]
        for table in tables.values():
            _points(axes, table)
        left = min(table.flop / table.bytes for table in tables.values()) / 2
        right = 2 * max([value / memory for value in products.values()] + [4 * left])
        highest = max(products.values())
        axes.plot([left, highest / memory], [left * memory, highest], color="black", linewidth=1)
        _label(axes, f"copy_ {run.ceilings['memory']:.0f} GB/s", (left, left * memory), (14, 0))
        for name, value in products.items():
            axes.plot([value / memory, right], [value, value], color="black", linewidth=1)
            _label(axes, f"{PRECISION.get(name, name)} products {value:.3g} TFLOP/s", (right, value), (0, 3), ha="right")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.minorticks_off()
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.set_xlabel("FLOP a byte: of the parity split, x, weights and y once each")
        axes.set_ylabel("TFLOP/s; filled: fp32, hollow: TF32")
        axes.set_title(f"{run.tables[0].device}; {description}; {run.method}", fontsize=9)
        _legend(figure, panels)


def _points(axes, table: Table):
    """Draws the rows of one case, above its channels."""
    x = table.flop / table.bytes
    axes.axvline(x, color="black", linewidth=0.5, linestyle=":")
    channels = f"{table.case.x[1]} → {table.case.out_channels}"
    axes.annotate(channels, (x, 0), (3, 4), xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=7)
    for row in table.rows:
        if row.timing:
            look = {name: value for name, value in LOOKS[row.kind].items() if name in ("color", "marker", "zorder")}
            filled = {} if row.precision == "fp32" else {"markerfacecolor": "white"}
            axes.plot(x, table.flop / row.timing.median / 1e9, linestyle="", label=row.kind, **look | filled)


def _heat(run: Run, path):
    """Draws the map: a cell is green where ours is faster than the best peer and red where it is slower, by the ratio's log."""
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    figure_name, names = maps.figures(run)[0], maps.columns(run)
    places = {(table.title, name): (x + 0.5, y + 0.5) for y, table in enumerate(run.tables) for x, name in enumerate(names)}
    known = maps.cells(run, figure_name)
    values = [[known[t.title, name].ratio if (t.title, name) in known else math.nan for name in names] for t in run.tables]
    size = {"figsize": (1.2 * len(names) + 3.2, 0.42 * len(values) + 1.9)}
    with _figure(path, **size) as (figure, panels):
        axes, colors = panels[0, 0], LinearSegmentedColormap.from_list("map", [SLOWER, SAME, FASTER])
        drawn = axes.pcolormesh(values, cmap=colors, norm=LogNorm(1 / FULL, FULL), edgecolors="white", linewidth=1)
        for place, cell in known.items():
            color = "black" if FULL**-0.7 < cell.ratio < FULL**0.7 else "white"
            axes.text(*places[place], cell.text, ha="center", va="center", fontsize=9, color=color)
        axes.invert_yaxis()
        axes.set_xticks([i + 0.5 for i in range(len(names))], [name.replace(" ", "\n") for name in names], fontsize=9)
        axes.set_yticks([i + 0.5 for i in range(len(values))], [table.model for table in run.tables], fontsize=9)
        axes.tick_params(length=0, labeltop=True, labelbottom=False)
        axes.spines[:].set_visible(False)
        bar = figure.colorbar(drawn, ax=axes, extend="both", format="{x:g}", ticks=[1 / FULL, 1 / 2, 1, 2, FULL])
        bar.minorticks_off()
        bar.set_label("times as fast as the best peer")
        training = "forward and backward, " * run.tables[0].training
        titles = f"{run.tables[0].device}: {training}{maps.total(run, figure_name)}", f"by {maps.FIGURES[figure_name]}"
        figure.suptitle("\n".join(titles), fontsize=9)


def _label(axes, text, point, offset, **options):
    axes.annotate(text, point, offset, textcoords="offset points", fontsize=7, **options)


def _legend(figure, panels):
    """Draws one legend for all panels, with each label once."""
    handles = {}
    for axes in panels.flat:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
