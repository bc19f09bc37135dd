"""What README.md and docs/*.md say: figures, links, commands, names, and the numbers that the code or a kept run has."""

import ast
import re
import runpy
from pathlib import Path

import pytest

import bench
from benchmarks import report
from benchmarks.results import Run
from numba_impl.backends.hopper import consume, cost, layout, produce, scaling, weights
from numba_impl.backends.hopper.schedule import schedule
from numba_impl.backends.tiled import cost as tiles
from numba_impl.cuda import kernel, tensor_map
from numba_impl.epilogue import SATURATED
from numba_impl.gpu import Gpu

ROOT = Path(__file__).parent.parent
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
SOURCES = {path.relative_to(ROOT): path.read_text() for path in sorted((ROOT / "numba_impl").rglob("*.py"))}
HOW = " ".join(PAGES["how-it-works.md"].split())
GEOMETRY, SIZE = bench.BENCHMARK.geometry, (128, 64, 64, 128, 128)
H200 = Gpu((9, 0), 132, 232_448, 233_472)


def path_of(page, link):
    return (ROOT if page == "README.md" else ROOT / "docs") / link


def links():
    return [(page, link) for page, text in PAGES.items() for link in sorted(set(re.findall(r"\]\(([^)]+)\)", text)))]


def test_figures_are_what_the_script_draws():
    drawn = runpy.run_path(str(ROOT / "docs" / "figures.py"))["draw"]()
    kept = {path.name: path.read_text() for path in (ROOT / "docs" / "figures").iterdir()}
    assert drawn.keys() == kept.keys() == {Path(link).name for _, link in links() if link.startswith("figures/")}
    for name in drawn:
        assert drawn[name] == kept[name], f"python docs/figures.py draws another {name}"


@pytest.mark.parametrize(("page", "link"), links())
def test_links_lead_somewhere(page, link):
    if link.startswith("https://"):
        return
    name, _, anchor = link.partition("#")
    path = path_of(page, name or page)
    assert path.exists()
    if anchor:
        headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_commands_exist():
    """Their files, modules and options; those of other programs, in checks.md, are not ours to know."""
    text = "\n".join(PAGES.values())
    for module in re.findall(r"python -m ([\w.]+)", text):
        path = ROOT / module.replace(".", "/")
        assert module == "pytest" or path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    files = re.findall(r"(?:python|pytest) (\w[\w/]*\.py)", text)
    assert "bench.py" in files and [file for file in files if not (ROOT / file).exists()] == []
    programs = [ROOT / "bench.py", ROOT / "numba_impl" / "__main__.py", *(ROOT / "tests" / "fuzz").glob("*.py")]
    code = "\n".join(path.read_text() for path in programs)
    options = set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", PAGES["README.md"] + PAGES["benchmarks.md"])) - {"help"}
    assert len(options) > 10
    assert [option for option in sorted(options) if f'"--{option}"' not in code and f'"{option}"' not in code] == []


def defined(source):
    """Every name that a source gives to something, at whatever depth."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def test_names_are_the_codes():
    """``module.name`` is defined in a file of that name; any other name stands in a source as it is written."""

    def exists(name):
        module, _, attribute = name.partition(".")
        files = [source for path, source in SOURCES.items() if module in (path.stem, path.parent.name)]
        everywhere = "\n".join(SOURCES.values())
        if files and attribute:
            return any(attribute in defined(source) for source in files)
        return all(part in everywhere for part in (name.split(".") if name[0].isupper() else [name]))

    names = {name for name in re.findall(r"`([^`]+)`", HOW) if not name.startswith("python")}
    assert len(names) > 30
    assert sorted(name for name in names if not exists(name)) == []


def numbers():
    """Phrases of how-it-works.md that state what the code has."""
    rows = GEOMETRY.rows
    yield f"parities of the three taps are {rows.parities} and their shifts {rows.shifts}"
    yield f"{GEOMETRY.taps} products for {GEOMETRY.parities} outputs"
    yield f"it meets {rows.reach} pixel more than its own"

    tile = tiles.choose(GEOMETRY, SIZE, H200)
    yield f"has {tile.threads} threads, for {tile.tile_channels} output channels"
    yield f"output channels of {tile.tile_rows} rows of {tile.tile_cols} cells"
    yield f"in *stages* of {tile.depth}: their pixels, {list(tile.pixel_stage(GEOMETRY))} in shared memory"
    yield f"lie in shared memory, {tile.shared(GEOMETRY).bytes:,} bytes, and {tile.blocks} blocks on a multiprocessor"
    yield f"has {tile.channels} output channels of {tile.rows} × {tile.cols} cells"
    yield f"every parity: {tiles._sums(GEOMETRY, tile)} sums"
    yield f"takes it {tiles._loads(GEOMETRY, tile)} loads from shared memory"
    yield f"for {tiles._body(GEOMETRY, tile)} FFMA"
    yield f"{tile.unroll} input channels are in straight line"

    top, target, highest = weights.TOP, scaling.TARGET, scaling.HIGHEST
    yield f"its largest |w| becomes 2^{top} ... 2^{top + 1}"
    yield f"brings the former to 2^{target} ... 2^{target + 1}"
    yield f"the former stays below 2^{highest + 1}, the latter at least 2^{scaling.LOWEST}"
    yield f"All scales are in 2^-{scaling.MAX_SHIFT} ... 2^{scaling.MAX_SHIFT}"

    fp32, tf32 = (layout.Config(64, 64, terms=terms, vector=4) for terms in (3, 1))
    at, steps = fp32.shared.places, schedule(fp32)
    yield f"channels in multiples of 8 up to {layout.MAX_CHANNELS}"
    yield f"A *unit* is a row of {layout.STRIP} cells"
    yield f"two rows of {2 * layout.STRIP} outputs"
    yield f"A block has {layout.THREADS} threads"
    yield f"{at.weights.step:,} bytes of hi and as many of lo"
    yield f"[C_in, {layout.BOX}] fp32, {at.stages.step:,} bytes each; fp32 has {fp32.stages} stage, TF32 {tf32.stages}"
    yield f"hi and lo, {at.ring.step:,} bytes each"
    yield f"fp32 has {fp32.slots} slots, TF32 {tf32.slots}"
    yield f"Together {fp32.shared.bytes:,} bytes in fp32 and {tf32.shared.bytes:,} in TF32 of the {H200.shared_per_block:,}"
    yield f"a box of {layout.BOX} pixels"
    yield f"*tensor map* of {8 * tensor_map.WORDS} bytes"
    yield f"{cost.PRODUCT} cycles a wgmma and {cost.CHANNEL} an output channel"
    yield f"the producer's {layout.GROUP} threads"
    yield f"by {2 * layout.GROUP} threads: only one consumer"
    yield f"D is {fp32.out_channels // 2} registers a thread"
    yield f"{len(steps)} steps have {sum(len(step.products) for step in steps)} wgmma"
    yield f"even pixels come first, {layout.pixel_offset(2)} bytes apart, then the odd ones, from {layout.pixel_offset(1):,} on"
    yield f"starts with {(produce.REGISTERS + 2 * consume.REGISTERS) // 3} registers a thread"
    yield f"leaves the producer {produce.REGISTERS} and gives the consumers {consume.REGISTERS}"
    yield f"v is capped at {SATURATED:g}"
    yield f"more than {kernel.FREE_SHARED_BYTES:,} bytes of shared memory"


def test_numbers_are_the_codes():
    assert [phrase for phrase in numbers() if phrase not in HOW] == []


def test_measured_figures_are_in_the_notes():
    found = set(re.findall(r"\d+(?:\.\d+)?(?:e-\d+| ms\b| GB\b| GFLOP\b| %)", HOW))
    assert len(found) >= 8
    assert sorted(figure for figure in found if figure not in PAGES["performance.md"]) == []


def test_tables_are_the_kept_runs():
    """Every row of a table of figures in benchmarks.md, and every time in README.md."""
    kept = "\n".join(report.markdown(Run.load(ROOT / "benchmarks" / name)) for name in ("h200.json", "h200-train.json"))
    rows = [line for line in PAGES["benchmarks.md"].splitlines() if re.match(r"\|.* (fp32|tf32) \|", line)]
    assert len(rows) > 30 and [row for row in rows if row not in kept.splitlines()] == []
    times = re.findall(r"\d+\.\d{3}(?= \|)", PAGES["README.md"])
    assert len(times) == 14 and [time for time in times if f"| {time} |" not in kept] == []


def test_the_readme_fits_two_screens():
    assert len(PAGES["README.md"].splitlines()) <= 120
