"""docs/how-it-works.md against the code: its figures, its links, and the names and numbers in it."""

import ast
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
TEXT = (DOCS / "how-it-works.md").read_text()
PAGE = " ".join(TEXT.replace("```", "").split())
LINKS = re.findall(r"\]\(([^)]+)\)", PAGE)
PACKAGE = sorted((ROOT / "numba_impl").rglob("*.py"))
# What the page says that code gives: `expression` = number, or a tuple of them.
NUMBERS = re.findall(r"`([^`]+)` = (\([^)]*\)|[\d,]*\d)", PAGE)
MEASURED = r"\d+(?:\.\d+)?(?:e-\d+| ms\b| GB\b| GFLOP\b| %)"


def drawn_by(svg):
    return re.search(r"Matplotlib v[\d.]+", svg)[0]


def texts(svg):
    """All that is written in a drawing, in order."""
    return re.findall(r"<!-- (.*?) -->", svg)


def test_figures_are_what_the_script_draws(tmp_path):
    """To the byte, or, as another matplotlib may round otherwise, to the letter."""
    pytest.importorskip("matplotlib")
    runpy.run_path(str(DOCS / "figures.py"))["draw"](tmp_path)
    drawn, kept = ({path.name: path.read_text() for path in folder.iterdir()} for folder in (tmp_path, DOCS / "figures"))
    shown = {Path(link).name for link in LINKS if link.endswith(".svg")}
    assert set(drawn) == set(kept) == shown
    for name, svg in drawn.items():
        view = str if drawn_by(svg) == drawn_by(kept[name]) else texts
        assert view(svg) == view(kept[name]), f"python docs/figures.py draws another {name}"


@pytest.mark.parametrize("link", sorted(set(LINKS)))
def test_links_lead_somewhere(link):
    name, _, anchor = link.partition("#")
    path = DOCS / name
    assert path.exists()
    if anchor:
        headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def defined(path):
    """Every name that a file gives to something, at whatever depth."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def test_names_are_the_codes():
    """Each is a file, or a name of a module, or it stands in a source of the package as it is written, like an instruction."""
    modules = {path.stem: path for path in PACKAGE if path.parent.name in ("numba_impl", "kernels")}
    sources = "\n".join(path.read_text() for path in PACKAGE)

    def exists(name):
        module, *parts = name.split(".")
        if name.endswith(".py"):
            return (ROOT / "numba_impl" / name).exists()
        if module in modules and parts:
            return set(parts) <= defined(modules[module])
        return name in sources

    names = set(re.findall(r"`([^`]+)`", PAGE)) - {expression for expression, _ in NUMBERS}
    assert len(names) > 50
    assert sorted(name for name in names if not exists(name)) == []


def test_numbers_are_the_codes():
    """By the names that the page's own code makes."""
    code = {}
    exec(re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)[1], code)
    assert len(NUMBERS) > 40
    for expression, number in NUMBERS:
        stated = ast.literal_eval(re.sub(r"(?<=\d),(?=\d)", "", number))
        assert eval(expression, code) == stated, expression


def test_measured_figures_are_the_notes():
    notes = (DOCS / "performance.md").read_text()
    found = set(re.findall(MEASURED, PAGE))
    assert len(found) >= 8
    assert sorted(figure for figure in found if figure not in notes) == []
