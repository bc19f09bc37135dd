"""The figures of how-it-works.md, drawn from the code that they show: ``python docs/figures.py`` writes docs/figures/*.svg.

Positions are hundredths of an inch, from the upper left corner.
"""

import itertools
import math
from pathlib import Path

import numpy as np
from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from numba_impl.backends.hopper import kernel as hopper
from numba_impl.backends.hopper import scaling
from numba_impl.backends.hopper import weights as split
from numba_impl.cuda import fragments
from numba_impl.problem import Axis, Geometry

FOLDER = Path(__file__).parent / "figures"
STYLE = {"svg.hashsalt": "numba_impl", "font.size": 9}  # with the salt, the same drawing is the same file
WIDTH = 820
BLUE, GREEN, ORANGE, RED, GREY, PALE = "#9ecae8", "#a8ddb5", "#fdd49e", "#f4a6a0", "#c4c4c4", "#efefef"
PARITIES = BLUE, GREEN, ORANGE, RED
FP32, TF32 = hopper.Config(64, 64, terms=3, vector=4), hopper.Config(64, 64, terms=1, vector=4)
SHARED_LIMIT = 227 * 1024  # bytes that a block can have on an H200


def page(height):
    """A figure and its axes, which cover it."""
    figure = Figure((WIDTH / 100, height / 100))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    return figure, axes


def write(axes, x, y, text, **options):
    axes.text(x, y, text, **{"ha": "center", "va": "center"} | options)


def box(axes, x, y, width, height, fill, text="", **options):
    axes.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor="white"))
    write(axes, x + width / 2, y + height / 2, text, **options)


# The parity split: problem.Axis.


def parity():
    figure, axes = page(375)
    one_axis(axes, 20, 45, Axis(3, 2, 1, 1), cells=4)
    one_axis(axes, 20, 230, Axis(5, 3, 2, 1), cells=3)
    write(axes, 385, 20, "both axes, kernel 3, stride 2, padding 1: the sums of a cell", ha="left", weight="bold")
    geometry = Geometry.of(3, 2, 1, 1)
    for a, b in itertools.product(range(2), repeat=2):
        both_axes(axes, 385 + 220 * b, 45 + 165 * a, geometry, a, b)
    return figure


def one_axis(axes, left, top, axis, cells, side=26):
    """Pixels above outputs, and a line for each tap of each cell; below, the sums of the second cell."""
    title = f"kernel {axis.kernel_size}, stride {axis.stride}, padding {axis.padding}"
    write(axes, left, top - 25, title, ha="left", weight="bold")

    def pixel_x(i):
        return left + (i + 0.5) * axis.stride * side

    sums = [[] for _ in range(axis.stride)]
    for i in range(cells + axis.reach):
        box(axes, pixel_x(i) - side / 2, top, side, side, GREY, f"$x_{i}$")
    for cell in range(cells):
        for tap, (parity, shift) in enumerate(zip(axis.parities, axis.shifts)):
            output_x = left + (cell * axis.stride + parity + 0.5) * side
            ink = "black" if cell == 1 else GREY
            axes.plot([pixel_x(cell + shift), output_x], [top + side, top + 75], color=ink, linewidth=1)
            if cell == 1:
                sums[parity].append(f"w_{tap} x_{cell + shift}")
        for output in range(cell * axis.stride, (cell + 1) * axis.stride):
            box(axes, left + output * side, top + 75, side, side, PARITIES[output % axis.stride], f"$y_{{{output}}}$")
    equations = (f"$y_{axis.stride + parity} = {' + '.join(terms)}$" for parity, terms in enumerate(sums))
    write(axes, left, top + 118, "cell 1: " + ",  ".join(equations), ha="left")


def both_axes(axes, left, top, geometry, a, b, width=100, height=56):
    write(axes, left + width, top + 8, f"y(2i{plus(a)}, 2j{plus(b)})")
    taps = {}
    for kh, kw in itertools.product(range(3), repeat=2):
        if (geometry.rows.parities[kh], geometry.cols.parities[kw]) == (a, b):
            taps[geometry.rows.shifts[kh], geometry.cols.shifts[kw]] = f"W[{kh}, {kw}]"
    for row, col in itertools.product(range(geometry.rows.reach + 1), range(geometry.cols.reach + 1)):
        tap = taps.get((row, col))
        text = f"x(i{plus(row)}, j{plus(col)})" + (f"\n· {tap}" if tap else "")
        place = left + col * width, top + 22 + row * height, width, height
        box(axes, *place, PARITIES[2 * a + b] if tap else PALE, text, color="black" if tap else "#777777")


def plus(n):
    return f"+{n}" if n else ""


# The hi/lo split and the window of scales: ptx.split_half2, scaling, split.TOP.


def halves():
    figure, axes = page(430)
    bits_of(axes, 150, 20, np.float32(math.pi))
    below = figure.add_axes((0.09, 0.12, 0.88, 0.5))
    errors(below)
    return figure


def split_half(values):
    """(hi, lo) of fp32 values, as ``ptx.split_half2`` has them; in fp64."""
    hi = values.astype(np.float16).astype(np.float64)
    return hi, (values - hi).astype(np.float16).astype(np.float64)


def bits_of(axes, left, top, value, side=26):
    """The significands of x, hi and lo, one below the other by the bits' worth."""
    hi, lo = split_half(np.float64(value))
    first = math.frexp(value)[1]
    for row, (name, number, count, color) in enumerate((("x", value, 24, GREY), ("hi", hi, 11, BLUE), ("lo", lo, 11, GREEN))):
        exponent = math.frexp(number)[1]
        write(axes, left - 12, top + 36 * row + side / 2, f"{name} = {number:.7g}", ha="right")
        for n in range(count):
            bit = int(math.ldexp(abs(number), n + 1 - exponent)) & 1
            box(axes, left + (first - exponent + n) * side, top + 36 * row, side, side, color, str(bit))
    lost = float(value) - hi - lo
    text = f"x - hi - lo = {lost:.1e}, {abs(lost) / value:.1e} of x; fp32 itself rounds by up to {2.0**-24:.1e}"
    write(axes, left, top + 118, text, ha="left")


def errors(axes):
    """What rounding takes from values of each power of two, at worst, and where the kernel's scales put values."""
    exponents = np.arange(-20, 16)
    significands = 1 + np.arange(0, 2**23, 509) / 2**23
    values = np.minimum(np.ldexp(significands, exponents[:, None]), 65504)
    hi, lo = split_half(values)
    edges = np.append(exponents, 16)
    for kept, color, name, at in ((hi, "#1b6ca8", "hi alone", -5), (hi + lo, "#238b45", "hi + lo", 4)):
        worst = np.log2((abs(values - kept) / values).max(1))
        axes.stairs(worst, edges, baseline=None, color=color, linewidth=2)
        axes.text(at, worst[exponents == at][0] + 0.5, name, color=color, ha="center")
    axes.axhline(-24, color="black", linestyle=":")
    axes.text(-19.8, -23.8, "what fp32 rounds by", va="bottom")
    axes.axvspan(scaling.LOWEST, scaling.HIGHEST + 1, color=ORANGE, alpha=0.35, zorder=0)
    axes.axvspan(scaling.TARGET, scaling.TARGET + 1, color=ORANGE, zorder=0)
    axes.axvspan(split.TOP, split.TOP + 1, ymax=0.5, facecolor="none", edgecolor="#777777", hatch="///")
    axes.text(0.3, -5, "a scale is kept while\nthe largest |x| of every\npixel is in here", va="top")
    axes.text(scaling.TARGET + 1.2, -5, "a new scale puts\na row's largest |x|\ninto the dark strip", va="top")
    axes.text(split.TOP - 0.2, -17.5, "largest |w| of a channel", ha="right", va="top")
    axes.set_xlim(-20, 16.5)
    axes.set_ylim(-26, -4)
    axes.set_xticks(range(-20, 17, 4), [f"$2^{{{e}}}$" for e in range(-20, 17, 4)])
    axes.set_yticks(range(-24, -3, 4), [f"$2^{{{e}}}$" for e in range(-24, -3, 4)])
    axes.set_xlabel(r"$|x| \cdot 2^{shift}$ or $|w| \cdot 2^{shift}$")
    axes.set_ylabel("error relative to it, at worst")
    axes.spines[["top", "right"]].set_visible(False)


# Shared memory of a block: hopper.Config.


def shared():
    figure, axes = page(240)
    memory_of(axes, 50, FP32, "three terms (fp32)")
    memory_of(axes, 165, TF32, "one term (TF32)")
    return figure


def memory_of(axes, top, config, title):
    """The parts in their order, as wide as they are large."""
    left, width, height = 15, 790, 46
    scale, halves = width / SHARED_LIMIT, ("hi", "lo")[: config.halves]
    write(axes, left, top - 30, f"{title}: {config.shared_bytes:,} of {SHARED_LIMIT:,} bytes", ha="left", weight="bold")
    parts = [(config.half_bytes, BLUE, f"weights, {half}\n{config.half_bytes:,}") for half in halves]
    parts += [(config.stage_bytes, ORANGE, f"stage\n{config.stage_bytes:,}")] * config.stages
    before_ring = sum(size for size, *_ in parts)
    parts += [(hopper.PLANE, GREEN, f"{slot}\n{half}") for slot in range(config.slots) for half in halves]
    rest = config.shared_bytes - sum(size for size, *_ in parts)
    parts.append((rest, RED, ""))
    at = 0
    for size, color, text in parts:
        box(axes, left + at * scale, top, size * scale, height, color, text, fontsize=8)
        at += size
    ring = config.slots * config.row_bytes
    middle = left + (before_ring + ring / 2) * scale
    write(axes, middle, top - 9, f"ring: {config.slots} rows of {config.row_bytes:,}", fontsize=8)
    write(axes, left + at * scale, top + height + 10, f"barriers, scales, ...: {rest:,}", ha="right", fontsize=8)
    axes.plot([left, left + width, left + width, left], [top, top, top + height, top + height], color=GREY, linewidth=0.8)


# The products of a unit: hopper.schedule.


def products():
    figure, axes = page(255)
    left, step_width, side = 92, 30, 26
    steps, half = hopper.schedule(FP32), FP32.half_bytes // 16  # B is counted in 16 bytes
    term_steps = len(steps) // FP32.terms
    for number, (loads, multiplications) in enumerate(steps):
        x = left + number * step_width + number // term_steps * 4
        write(axes, x + side / 2, 42, str(len(loads)), fontsize=8)
        for row, (tile, _, _, at) in enumerate(multiplications):
            tap = at % half // (half // 9)
            box(axes, x, 58 + row * side, side - 2, side - 2, PARITIES[tile], f"{tap // 3}{tap % 3}", fontsize=8)
        if number % 2 == 0:
            write(axes, x + step_width - 2, 202, str(number % term_steps // 2 * 16), fontsize=8)
    for term in range(FP32.terms):
        ((_, of_x), *_), ((*_, of_w), *_) = steps[term * term_steps]
        name = f"{'lo' if of_x >= hopper.PLANE else 'hi'} of x · {'lo' if of_w >= half else 'hi'} of w"
        write(axes, left + (term + 0.5) * term_steps * step_width + 4 * term, 18, name, weight="bold")
    for y, text in ((42, "ldmatrix.x4"), (58 + side / 2, "wgmma"), (202, "from channel")):
        write(axes, left - 8, y, text, ha="right", fontsize=8)
    for tile, color in enumerate(PARITIES):
        box(axes, left + 150 * tile, 224, 16, 16, color)
        write(axes, left + 150 * tile + 22, 232, f"into y(2i{plus(tile // 2)}, 2j{plus(tile % 2)})", ha="left")
    return figure


# Who waits for whom: hopper.produce and hopper.consume.

WAITS = {
    "STAGED": ("#d9831f", "-", "row in its stage"),
    "FULL": ("#238b45", "-", "row in the ring"),
    "EMPTY": ("#b5483a", "--", "slot free"),
    "turn": ("#1b6ca8", ":", "products issued"),
}
COPY, READ, STORE = 1500, 700, 900  # cycles that look well; the products' and the epilogue's are hopper.cycles'


def pipeline():
    figure, axes = page(310)
    count, left, scale = 4, 95, 0.0196
    multiply = hopper.PRODUCT * sum(len(multiplications) for _, multiplications in hopper.schedule(FP32))
    finish = hopper.CHANNEL * FP32.out_channels
    copies, reads, stores, units = timeline(FP32, count, multiply, finish)
    lanes = {"copy engine": 35, "producer": 95, "consumer 0": 170, "consumer 1": 235}
    engine, producer, *consumers = lanes.values()

    def place(time):
        return left + scale * time

    def bar(lane, start, end, color, text=""):
        box(axes, place(start), lane, place(end) - place(start), 30, color, text, fontsize=8)

    def waits(kind, start, start_lane, end, end_lane):
        color, line, _ = WAITS[kind]
        down = end_lane > start_lane
        ends = (place(start), start_lane + 30 * down), (place(end), end_lane + 30 * (not down))
        properties = {"arrowstyle": "->", "color": color, "linestyle": line, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", ends[1], ends[0], arrowprops=properties, zorder=0.9)

    for name, y in lanes.items():
        write(axes, left - 8, y + 15, name, ha="right")
    for row in range(count + 1):
        bar(engine, *copies[row], ORANGE, str(row))
        bar(producer, *reads[row], GREY)
        bar(producer, *stores[row], GREEN, str(row))
        waits("STAGED", copies[row][1], engine, reads[row][0], producer)
        if row >= FP32.slots:
            unit = row - FP32.slots
            waits("EMPTY", units[unit][1], consumers[unit % 2], stores[row][0], producer)
    for unit, (start, end) in enumerate(units):
        lane, other = consumers[unit % 2], consumers[1 - unit % 2]
        bar(lane, start, end, BLUE, f"multiply {unit}")
        bar(lane, end, end + finish, RED, f"activate and store {unit}")
        waits("FULL", stores[unit + 1][1], producer, start, lane)
        if unit + 1 < count:
            waits("turn", end, lane, units[unit + 1][0], other)
    for number, (name, (color, line, meaning)) in enumerate(WAITS.items()):
        x = 20 + 200 * number
        axes.plot([x, x + 20], [292, 292], color=color, linestyle=line)
        write(axes, x + 25, 292, f"{name}: {meaning}", ha="left", fontsize=8)
    note = "rows of x, by number: in grey read and measured, in green split and stored in the ring"
    write(axes, left, 12, note, ha="left", fontsize=8)
    return figure


def timeline(config, units, multiply, finish):
    """Spans of a block's first rows and units: of copies, of reads, of stores into the ring, and of products."""
    copies, reads, stores, products = [], [], [], []
    for row in range(units + 1):
        asked = reads[row - config.stages][1] if row >= config.stages else 0
        copies.append((asked, asked + COPY))
        read = max(copies[row][1], stores[-1][1] if stores else 0)
        reads.append((read, read + READ))
        free = products[row - config.slots][1] if row >= config.slots else 0  # a row is last used as its unit's own
        store = max(read + READ, free)
        stores.append((store, store + STORE))
        if row > 0:  # then the unit before has both of its rows
            turn = products[-1][1] if row > 1 else 0
            idle = products[-2][1] + finish if row > 2 else 0
            start = max(stores[row][1], turn, idle)
            products.append((start, start + multiply))
    return copies, reads, stores, products


# Which lane has and stores what: fragments.


def lanes():
    figure, axes = page(285)
    grid_of(axes, 35, "the lane that has a sum after wgmma", lambda lane: lane)
    grid_of(axes, 455, "the lane that stores it", fragments.stored_lane)
    for number, color in enumerate(PARITIES):
        box(axes, 190 + 120 * number, 258, 16, 16, color)
        write(axes, 212 + 120 * number, 266, f"lanes {8 * number} ... {8 * number + 7}", ha="left")
    return figure


def grid_of(axes, left, title, source, side=22):
    """Whose sums of the first eight channels, of a warp's 16 pixels, ``source(lane)`` are: each lane's name where they are."""
    top = 64
    write(axes, left + 8 * side, 12, title, weight="bold")
    write(axes, left + 8 * side, 32, "pixel, two outputs or 8 bytes of a row each", fontsize=8)
    write(axes, left - 25, top + 4 * side, "channel", rotation=90, fontsize=8)
    for pixel in range(16):
        write(axes, left + (pixel + 0.5) * side, top - 10, str(pixel), fontsize=8)
    for channel in range(8):
        write(axes, left - 10, top + (channel + 0.5) * side, str(channel), fontsize=8)
    for lane in range(32):
        rows, channels = zip(*(fragments.accumulator(source(lane), register) for register in range(4)))
        pixels = [fragments.pixel(row) for row in rows]
        size = max(pixels) - min(pixels) + 1, max(channels) - min(channels) + 1
        place = left + min(pixels) * side, top + min(channels) * side, size[0] * side, size[1] * side
        box(axes, *place, PARITIES[lane // 8], str(lane))


# Why pixels lie as they do in shared memory: fragments.pixel_offset.


def banks():
    figure, axes = page(220)
    row, k = fragments.loaded_row(np.arange(8))
    read = fragments.pixel(row)
    panels = (
        ("128 bytes a pixel, in order:\neight rows of a matrix read", 128 * read + 2 * k),
        ("pixel_offset:\neight rows of a matrix read", fragments.pixel_offset(read) + 2 * k),
        ("pixel_offset: the same,\nshifted by a pixel", fragments.pixel_offset(read + 1) + 2 * k),
        ("pixel_offset:\neight neighbours written", fragments.pixel_offset(np.arange(8))),
    )
    for number, (title, offsets) in enumerate(panels):
        banks_of(axes, 45 + 203 * number, title, offsets // 16 % 8)
    return figure


def banks_of(axes, left, title, hit, side=18):
    top = 50
    write(axes, left + 4 * side, 20, title)
    box(axes, left, top, 8 * side, 8 * side, PALE)
    color = GREEN if len(set(hit)) == 8 else RED
    for thread, bank in enumerate(hit):
        box(axes, left + bank * side, top + thread * side, side, side, color)
    write(axes, left + 4 * side, top + 8 * side + 13, "bank of 16 bytes", fontsize=8)
    write(axes, left - 12, top + 4 * side, "thread", rotation=90, fontsize=8)


FIGURES = parity, halves, shared, products, pipeline, lanes, banks


def draw(folder):
    """Write every figure into a folder."""
    with style.context(["default", STYLE]):
        for figure in FIGURES:
            figure().savefig(Path(folder) / f"{figure.__name__}.svg", metadata={"Date": None})


if __name__ == "__main__":
    draw(FOLDER)
