"""The figures of how-it-works.md, drawn from the code that they show: ``python docs/figures.py`` writes docs/figures/*.svg.

They are written as SVG here, by rectangles, lines and texts: matplotlib's files are five times as large. Positions are pixels
from the upper left corner.
"""

import itertools
import math
from html import escape
from pathlib import Path

import numpy as np

from numba_impl.backends.hopper import cost, layout, scaling, weights
from numba_impl.backends.hopper.schedule import schedule
from numba_impl.cuda import fragments
from numba_impl.problem import Axis, Geometry

FOLDER = Path(__file__).parent / "figures"
WIDTH = 820
BLUE, GREEN, ORANGE, RED, GREY, PALE = "#9ecae8", "#a8ddb5", "#fdd49e", "#f4a6a0", "#c4c4c4", "#efefef"
PARITIES = BLUE, GREEN, ORANGE, RED
SMALL, NORMAL = 11, 12  # sizes of letters
BELOW, ABOVE = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"), str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
FP32, TF32 = layout.Config(64, 64, terms=3, vector=4), layout.Config(64, 64, terms=1, vector=4)
SHARED_LIMIT = 227 * 1024  # bytes that a block can have on an H200


class Page:
    """A drawing, ``WIDTH`` wide."""

    def __init__(self, height):
        self.height, self.parts = height, []

    def write(self, x, y, text, anchor="middle", size=NORMAL, ink="black", bold=False, turned=False):
        """Lines of text around (x, y); ``anchor``: "start" or "end" puts x there; ``turned``: upwards."""
        lines = text.split("\n")
        options = {"text-anchor": anchor, "font-size": size, "fill": ink, "font-weight": "bold" if bold else "normal"}
        defaults = {"text-anchor": "middle", "font-size": NORMAL, "fill": "black", "font-weight": "normal"}
        style = "".join(f' {name}="{value}"' for name, value in options.items() if value != defaults[name])
        turn = f' transform="rotate(-90 {x:g} {y:g})"' if turned else ""
        for number, line in enumerate(lines):
            below = (number - (len(lines) - 1) / 2) * 1.25 * size + 0.35 * size
            self.parts.append(f'<text x="{at(x)}" y="{at(y + below)}"{style}{turn}>{escape(line, quote=False)}</text>')

    def box(self, x, y, width, height, fill, text="", stroke="white", **options):
        place = f'x="{at(x)}" y="{at(y)}" width="{at(width)}" height="{at(height)}"'
        self.parts.append(f'<rect {place} fill="{fill}"' + (f' stroke="{stroke}"' if stroke else "") + "/>")
        if text:
            self.write(x + width / 2, y + height / 2, text, **options)

    def line(self, points, ink="black", width=1.0, dash="", arrow=False):
        path = " ".join(f"{at(x)},{at(y)}" for x, y in points)
        style = f' stroke-width="{width:g}"' * (width != 1) + f' stroke-dasharray="{dash}"' * bool(dash)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{ink}"{style}/>')
        if arrow:
            self._head(*points[-2], *points[-1], ink)

    def _head(self, x0, y0, x1, y1, ink, length=7, half=3):
        along = math.atan2(y1 - y0, x1 - x0)
        left, right = ((-length, side) for side in (-half, half))
        corners = [(x1, y1)] + [
            (x1 + a * math.cos(along) - b * math.sin(along), y1 + a * math.sin(along) + b * math.cos(along))
            for a, b in (left, right)
        ]
        path = " ".join(f"{at(x)},{at(y)}" for x, y in corners)
        self.parts.append(f'<polygon points="{path}" fill="{ink}"/>')

    def svg(self) -> str:
        size = f'width="{WIDTH}" height="{self.height}" viewBox="0 0 {WIDTH} {self.height}"'
        font = f'font-family="sans-serif" font-size="{NORMAL}" text-anchor="middle"'
        ground = f'<rect width="{WIDTH}" height="{self.height}" fill="white"/>'
        return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>', ground, *self.parts, "</svg>\n"])


def at(value) -> str:
    """A coordinate, to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


# The parity split: problem.Axis.


def parity():
    page = Page(375)
    one_axis(page, 20, 45, Axis(3, 2, 1, 1), cells=4)
    one_axis(page, 20, 230, Axis(5, 3, 2, 1), cells=3)
    page.write(385, 20, "both axes, kernel 3, stride 2, padding 1: the sums of a cell", "start", bold=True)
    geometry = Geometry.of(3, 2, 1, 1)
    for a, b in itertools.product(range(2), repeat=2):
        both_axes(page, 385 + 220 * b, 45 + 165 * a, geometry, a, b)
    return page


def one_axis(page, left, top, axis, cells, side=26):
    """Pixels above outputs, and a line for each tap of each cell; below, the sums of the second cell."""
    title = f"kernel {axis.kernel_size}, stride {axis.stride}, padding {axis.padding}"
    page.write(left, top - 25, title, "start", bold=True)

    def pixel_x(i):
        return left + (i + 0.5) * axis.stride * side

    sums = [[] for _ in range(axis.stride)]
    for i in range(cells + axis.reach):
        page.box(pixel_x(i) - side / 2, top, side, side, GREY, f"x{i}".translate(BELOW))
    for cell in range(cells):
        for tap, (parity, shift) in enumerate(zip(axis.parities, axis.shifts)):
            output_x = left + (cell * axis.stride + parity + 0.5) * side
            page.line([(pixel_x(cell + shift), top + side), (output_x, top + 75)], "black" if cell == 1 else GREY)
            if cell == 1:
                sums[parity].append(f"w{tap} x{cell + shift}")
        for output in range(cell * axis.stride, (cell + 1) * axis.stride):
            color = PARITIES[output % axis.stride]
            page.box(left + output * side, top + 75, side, side, color, f"y{output}".translate(BELOW))
    equations = (f"y{axis.stride + parity} = {' + '.join(terms)}".translate(BELOW) for parity, terms in enumerate(sums))
    page.write(left, top + 118, "cell 1:  " + ",   ".join(equations), "start")


def both_axes(page, left, top, geometry, a, b, width=100, height=56):
    page.write(left + width, top + 8, f"y(2i{plus(a)}, 2j{plus(b)})")
    taps = {}
    for kh, kw in itertools.product(range(3), repeat=2):
        if (geometry.rows.parities[kh], geometry.cols.parities[kw]) == (a, b):
            taps[geometry.rows.shifts[kh], geometry.cols.shifts[kw]] = f"W[{kh}, {kw}]"
    for row, col in itertools.product(range(geometry.rows.reach + 1), range(geometry.cols.reach + 1)):
        tap = taps.get((row, col))
        text = f"x(i{plus(row)}, j{plus(col)})" + (f"\n· {tap}" if tap else "")
        place = left + col * width, top + 22 + row * height, width, height
        page.box(*place, PARITIES[2 * a + b] if tap else PALE, text, ink="black" if tap else "#777777")


def plus(n):
    return f"+{n}" if n else ""


# hi, lo and the window of scales: maths.split_half2, scaling, weights.TOP.


def halves():
    page = Page(430)
    bits_of(page, 150, 20, np.float32(math.pi))
    errors(page, 75, 160)
    return page


def split_half(values):
    """(hi, lo) of fp32 values, as ``maths.split_half2`` has them; in fp64."""
    hi = values.astype(np.float16).astype(np.float64)
    return hi, (values - hi).astype(np.float16).astype(np.float64)


def bits_of(page, left, top, value, side=26):
    """The significands of x, hi and lo, one below the other by the bits' worth."""
    hi, lo = split_half(np.float64(value))
    first = math.frexp(value)[1]
    for row, (name, number, count, color) in enumerate((("x", value, 24, GREY), ("hi", hi, 11, BLUE), ("lo", lo, 11, GREEN))):
        exponent = math.frexp(number)[1]
        page.write(left - 12, top + 36 * row + side / 2, f"{name} = {number:.7g}", "end")
        for n in range(count):
            bit = int(math.ldexp(abs(number), n + 1 - exponent)) & 1
            page.box(left + (first - exponent + n) * side, top + 36 * row, side, side, color, str(bit))
    lost = float(value) - hi - lo
    text = f"x - hi - lo = {lost:.1e}, {abs(lost) / value:.1e} of x; fp32 itself rounds by up to {2.0**-24:.1e}"
    page.write(left, top + 118, text, "start")


def errors(page, left, top, step=20, bit=9.5):
    """What rounding takes from values of each power of two, at worst, and where the kernel's scales put values.

    A power of two of a value is ``step`` pixels wide, one of an error ``bit`` pixels high.
    """

    def x(exponent):
        return left + step * (exponent + 20)

    def y(exponent):
        return top + bit * (-4 - exponent)

    def band(first, last, fill, highest=-4):
        page.box(x(first), y(highest), step * (last - first), y(-26) - y(highest), fill, stroke="")

    band(scaling.LOWEST, scaling.HIGHEST + 1, "#feecd6")
    band(scaling.TARGET, scaling.TARGET + 1, ORANGE)
    band(weights.TOP, weights.TOP + 1, GREY, highest=-15)
    exponents = np.arange(-20, 16)
    significands = 1 + np.arange(0, 2**23, 509) / 2**23
    values = np.minimum(np.ldexp(significands, exponents[:, None]), 65504)
    hi, lo = split_half(values)
    for kept, color, name, place in ((hi, "#1b6ca8", "hi alone", -5), (hi + lo, "#238b45", "hi + lo", 4)):
        worst = np.log2((abs(values - kept) / values).max(1))
        corners = [(x(e + after), y(error)) for e, error in zip(exponents, worst) for after in (0, 1)]
        page.line(corners, color, width=2)
        page.write(x(place), y(worst[exponents == place][0]) - 10, name, ink=color)
    page.line([(x(-20), y(-24)), (x(16), y(-24))], dash="1 3")
    page.write(x(-20) + 6, y(-24) - 8, "what fp32 rounds by", "start")
    page.write(x(0) + 6, y(-7.5), "a scale is kept while\nthe largest |x| of every\npixel is in here", "start")
    page.write(x(scaling.TARGET + 1) + 6, y(-7.5), "a new scale puts a\nrow's largest |x| into\nthe dark strip", "start")
    page.write(x(weights.TOP) - 6, y(-18), "largest |w| of a channel", "end")
    page.line([(x(-20), y(-4)), (x(-20), y(-26)), (x(16), y(-26))])
    for exponent in range(-20, 17, 4):
        page.line([(x(exponent), y(-26)), (x(exponent), y(-26) + 4)])
        page.write(x(exponent), y(-26) + 14, f"2{str(exponent).translate(ABOVE)}")
    for exponent in range(-24, -3, 4):
        page.line([(x(-20), y(exponent)), (x(-20) - 4, y(exponent))])
        page.write(x(-20) - 7, y(exponent), f"2{str(exponent).translate(ABOVE)}", "end")
    page.write(x(-2), y(-26) + 36, "|x| or |w|, times its power of two")
    page.write(left - 52, y(-15), "error relative to it, at worst", turned=True)


# Shared memory of a block: layout.Config.shared.


def shared():
    page = Page(240)
    memory_of(page, 50, FP32, "three terms (fp32)")
    memory_of(page, 165, TF32, "one term (TF32)")
    return page


def memory_of(page, top, config, title):
    """The parts in their order, as wide as they are large."""
    left, width, height = 15, 790, 46
    scale, halves = width / SHARED_LIMIT, ("hi", "lo")[: config.halves]
    total, places = config.shared.bytes, config.shared.places
    page.write(left, top - 30, f"{title}: {total:,} of {SHARED_LIMIT:,} bytes", "start", bold=True)
    parts = [(places.weights.step, BLUE, f"weights, {half}\n{places.weights.step:,}") for half in halves]
    parts += [(places.stages.step, ORANGE, f"stage\n{places.stages.step:,}")] * config.stages
    parts += [(layout.PLANE, GREEN, f"{slot}\n{half}") for slot in range(config.slots) for half in halves]
    rest = total - sum(size for size, *_ in parts)
    parts.append((rest, RED, ""))
    start = 0
    for size, color, text in parts:
        page.box(left + start * scale, top, size * scale, height, color, text, size=SMALL)
        start += size
    middle = left + (places.ring.at + places.ring.size / 2) * scale
    page.write(middle, top - 9, f"ring: {config.slots} rows of {places.ring.step:,}", size=SMALL)
    page.write(left + total * scale, top + height + 10, f"barriers, scales, ...: {rest:,}", "end", size=SMALL)
    page.line([(left, top), (left + width, top), (left + width, top + height), (left, top + height)], GREY, width=0.8)


# The products of a unit: schedule.schedule.


def products():
    page = Page(255)
    left, step_width, side = 92, 30, 26
    steps, half = schedule(FP32), FP32.shared.places.weights.step // 16  # B is counted in 16 bytes
    term_steps = len(steps) // FP32.terms
    for number, step in enumerate(steps):
        x = left + number * step_width + number // term_steps * 4
        page.write(x + side / 2, 42, str(len(step.loads)), size=SMALL)
        for row, product in enumerate(step.products):
            tap = product.offset % half // (half // 9)
            place = x, 58 + row * side, side - 2, side - 2
            page.box(*place, PARITIES[product.parity], f"{tap // 3}{tap % 3}", size=SMALL)
        if number % 2 == 0:
            page.write(x + step_width - 2, 202, str(number % term_steps // 2 * 16), size=SMALL)
    for term in range(FP32.terms):
        first = steps[term * term_steps]
        of_x, of_w = first.loads[0].offset >= layout.PLANE, first.products[0].offset >= half
        name = f"{'lo' if of_x else 'hi'} of x · {'lo' if of_w else 'hi'} of w"
        page.write(left + (term + 0.5) * term_steps * step_width + 4 * term, 18, name, bold=True)
    for y, text in ((42, "ldmatrix.x4"), (58 + side / 2, "wgmma"), (202, "from channel")):
        page.write(left - 8, y, text, "end", size=SMALL)
    for parity, color in enumerate(PARITIES):
        page.box(left + 150 * parity, 224, 16, 16, color)
        page.write(left + 150 * parity + 22, 232, f"into y(2i{plus(parity // 2)}, 2j{plus(parity % 2)})", "start")
    return page


# Who waits for whom: produce.produce and consume.consume.

WAITS = {
    "staged": ("#d9831f", "", "row in its stage"),
    "full": ("#238b45", "", "row in the ring"),
    "empty": ("#b5483a", "4 2", "slot free"),
    "turn": ("#1b6ca8", "1 2", "products issued"),
}
COPY, READ, STORE = 1500, 700, 900  # cycles that look well; those of products and epilogues are cost.cycles'


def pipeline():
    page = Page(310)
    count, left, scale = 4, 95, 0.0196
    multiply = cost.PRODUCT * sum(len(step.products) for step in schedule(FP32))
    finish = cost.CHANNEL * FP32.out_channels
    copies, reads, stores, units = timeline(FP32, count, multiply, finish)
    lanes = {"copy engine": 35, "producer": 95, "consumer 0": 170, "consumer 1": 235}
    engine, producer, *consumers = lanes.values()

    def place(time):
        return left + scale * time

    def bar(lane, start, end, color, text=""):
        page.box(place(start), lane, place(end) - place(start), 30, color, text, size=SMALL)

    def waits(kind, start, start_lane, end, end_lane):
        color, dash, _ = WAITS[kind]
        down = end_lane > start_lane
        ends = (place(start), start_lane + 30 * down), (place(end), end_lane + 30 * (not down))
        page.line(ends, color, dash=dash, arrow=True)

    for name, y in lanes.items():
        page.write(left - 8, y + 15, name, "end")
    for row in range(count + 1):
        waits("staged", copies[row][1], engine, reads[row][0], producer)
        if row >= FP32.slots:
            unit = row - FP32.slots
            waits("empty", units[unit][1], consumers[unit % 2], stores[row][0], producer)
        bar(engine, *copies[row], ORANGE, str(row))
        bar(producer, *reads[row], GREY)
        bar(producer, *stores[row], GREEN, str(row))
    for unit, (start, end) in enumerate(units):
        lane, other = consumers[unit % 2], consumers[1 - unit % 2]
        waits("full", stores[unit + 1][1], producer, start, lane)
        if unit + 1 < count:
            waits("turn", end, lane, units[unit + 1][0], other)
        bar(lane, start, end, BLUE, f"multiply {unit}")
        bar(lane, end, end + finish, RED, f"activate and store {unit}")
    for number, (name, (color, dash, meaning)) in enumerate(WAITS.items()):
        x = 20 + 200 * number
        page.line([(x, 292), (x + 20, 292)], color, dash=dash)
        page.write(x + 25, 292, f"{name}: {meaning}", "start", size=SMALL)
    note = "rows of x, by number: in grey read and measured, in green split and stored in the ring"
    page.write(left, 12, note, "start", size=SMALL)
    return page


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


# Which lane has and stores what: fragments.accumulator, layout.pixel, layout.stored_lane.


def lanes():
    page = Page(285)
    grid_of(page, 35, "the lane that has a sum after wgmma", lambda lane: lane)
    grid_of(page, 455, "the lane that stores it", layout.stored_lane)
    for number, color in enumerate(PARITIES):
        page.box(190 + 120 * number, 258, 16, 16, color)
        page.write(212 + 120 * number, 266, f"lanes {8 * number} ... {8 * number + 7}", "start")
    return page


def grid_of(page, left, title, source, side=22):
    """Whose sums of the first eight channels, of a warp's 16 pixels, ``source(lane)`` are: each lane's name where they are."""
    top = 64
    page.write(left + 8 * side, 12, title, bold=True)
    page.write(left + 8 * side, 32, "pixel, two outputs or 8 bytes of a row each", size=SMALL)
    page.write(left - 25, top + 4 * side, "channel", turned=True, size=SMALL)
    for pixel in range(16):
        page.write(left + (pixel + 0.5) * side, top - 10, str(pixel), size=SMALL)
    for channel in range(8):
        page.write(left - 10, top + (channel + 0.5) * side, str(channel), size=SMALL)
    for lane in range(32):
        rows, channels = zip(*(fragments.accumulator(source(lane), register) for register in range(4)))
        pixels = [layout.pixel(row) for row in rows]
        size = max(pixels) - min(pixels) + 1, max(channels) - min(channels) + 1
        place = left + min(pixels) * side, top + min(channels) * side, size[0] * side, size[1] * side
        page.box(*place, PARITIES[lane // 8], str(lane))


# Why pixels lie as they do in shared memory: layout.pixel_offset.


def banks():
    page = Page(220)
    row, k = fragments.loaded_row(np.arange(8))
    read = layout.pixel(row)
    panels = (
        ("128 bytes a pixel, in order:\neight rows of a matrix read", 128 * read + 2 * k),
        ("pixel_offset:\neight rows of a matrix read", layout.pixel_offset(read) + 2 * k),
        ("pixel_offset: the same,\nshifted by a pixel", layout.pixel_offset(read + 1) + 2 * k),
        ("pixel_offset:\neight neighbours written", layout.pixel_offset(np.arange(8))),
    )
    for number, (title, offsets) in enumerate(panels):
        banks_of(page, 45 + 203 * number, title, offsets // 16 % 8)
    return page


def banks_of(page, left, title, hit, side=18):
    top = 50
    page.write(left + 4 * side, 20, title)
    page.box(left, top, 8 * side, 8 * side, PALE)
    color = GREEN if len(set(hit)) == 8 else RED
    for thread, bank in enumerate(hit):
        page.box(left + bank * side, top + thread * side, side, side, color)
    page.write(left + 4 * side, top + 8 * side + 13, "bank of 16 bytes", size=SMALL)
    page.write(left - 12, top + 4 * side, "thread", turned=True, size=SMALL)


FIGURES = parity, halves, shared, products, pipeline, lanes, banks


def draw() -> dict[str, str]:
    """{file's name: SVG} of every figure."""
    return {f"{figure.__name__}.svg": figure().svg() for figure in FIGURES}


if __name__ == "__main__":
    for name, svg in draw().items():
        (FOLDER / name).write_text(svg)
