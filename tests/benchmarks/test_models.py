"""``bench.py --models`` on the CPU: columns are what they say, wrong results are refused, and the map's figures follow."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks import compare, halves, maps, models, peers, report, tables
from benchmarks.measure import CONSTANTS, Work
from benchmarks.results import Row, Run, Table, Timing
from benchmarks.timer import Timer
from numba_impl import oracle
from numba_impl.case import Case
from tests.benchmarks.test_bench import run

CPU = torch.device("cpu")
TINY = ["--models", "--quick", "--device", "cpu"]
ONE_CELL = [*TINY, "--rows", "U-Net top", "--columns"]
SMALL = Case((2, 3, 4, 5), 4, 3, 2, 1, 1)
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture
def work():
    return Work.draw(SMALL, CPU, seed=1)


@pytest.fixture
def ours_is(monkeypatch):
    """Puts a change of the layer's result into ours."""

    def ours_is(change):
        right = tables.build_model

        class Changed(nn.Module):
            def __init__(self, layer):
                super().__init__()
                self.layer = layer

            def forward(self, x):
                return change(self.layer(x))

        monkeypatch.setattr(tables, "build_model", lambda *args: Changed(right(*args)) if args[-1] == CONSTANTS else right(*args))

    return ours_is


@pytest.mark.parametrize(
    ("name", "dtype", "channels_last", "result"),
    [
        ("fp32", torch.float32, False, torch.float32),
        ("TF32", torch.float32, False, torch.float32),
        ("bf16", BF16, False, BF16),
        ("bf16 channels_last", BF16, True, BF16),
        ("fp16 channels_last", FP16, True, FP16),
        ("AMP bf16", torch.float32, False, BF16),
        ("TF32 channels_last", torch.float32, True, torch.float32),
    ],
)
def test_a_column_lays_out_the_operands(name, dtype, channels_last, result, work):
    column = models.COLUMNS[name]
    laid_out = column.laid_out(work)
    for t in (laid_out.x, laid_out.conv.weight):
        assert t.dtype == dtype and t.is_contiguous(memory_format=torch.channels_last) == channels_last
    assert laid_out.conv.bias.dtype == dtype and column.computes == result
    assert column.precision == ("tf32" if "TF32" in name else "fp32")
    torch.testing.assert_close(laid_out.x, work.x.to(dtype))
    assert (work.x.dtype, work.conv.weight.dtype) == (torch.float32, torch.float32)
    seen = []
    column.called(lambda x: seen.append(torch.is_autocast_enabled("cpu")))(laid_out.x)
    assert seen == [name == "AMP bf16"]


def test_the_maps_rows_and_columns():
    assert len(models.rows(False, False)) == 12 and list(models.rows(True, False)) == [
        "benchmark", "pix2pix middle", "U-Net deep", "U-Net top", "CycleGAN 2", "pose head",
    ]  # fmt: skip
    gpu = torch.device("cuda")
    assert list(models.columns(False, gpu)) == list(models.COLUMNS) and len(models.COLUMNS) == 7
    assert list(models.columns(True, gpu)) == ["fp32", "TF32", "bf16 channels_last", "AMP bf16"]
    assert list(models.columns(False, CPU)) == ["fp32", "bf16", "bf16 channels_last", "AMP bf16"]
    assert list(models.columns(True, CPU)) == ["fp32", "bf16 channels_last", "AMP bf16"]
    for name, case in models.rows(False, True).items():
        assert case.geometry == models.ROWS[name].geometry and case.x[0] == 1 and max(*case.x, case.out_channels) <= 8
    assert models.ROWS["pose head"].output_shape == (32, 256, 64, 48) and models.ROWS["FCN-8s"].output_shape[2:] == (512, 512)


def test_autocast_is_over_before_the_backward(work):
    layer = models.COLUMNS["AMP bf16"].called(nn.Identity())
    seen = []
    x = work.x.clone().requires_grad_()
    y = layer(x)
    y.register_hook(lambda g: seen.append(torch.is_autocast_enabled("cpu")))
    torch.autograd.grad(y.sum(), x)
    assert seen == [False]


@pytest.mark.parametrize(("autotuned", "compilations"), [(False, 2), (True, 6)])
def test_columns_that_differ_in_flags_share_what_is_compiled(autotuned, compilations, hurried, monkeypatch):
    """But for a Triton template, which has its precision compiled in: fp32 and TF32 each have two kinds of their own then."""
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda layer, dynamic, options: compiled.append(layer) or layer)
    kinds = {"eager": None, "torch.compile": {}} | ({models.AUTOTUNED: {"max_autotune": True}} if autotuned else {})
    monkeypatch.setattr(models, "compilations", lambda *args: kinds)
    columns = [models.COLUMNS[name] for name in ("fp32", "TF32", "TF32 channels_last")]
    table = models.measure_row("a model", SMALL, columns, 1, True, False, Timer(CPU, 1))
    assert len(compiled) == compilations
    assert [row.kind for row in table.timed("TF32")] == [*kinds, "ModelNumba"]


def test_a_template_for_transposed_convolutions_is_a_peer_where_torch_has_one(monkeypatch):
    from torch._inductor.kernel import conv
    from torch._inductor.select_algorithm import TritonTemplate

    def lowering():
        return stand_in  # noqa: F821

    monkeypatch.setattr(conv, "convolution", lowering)
    gpu = torch.device("cuda")
    for name, serves in (("convolution2d", False), ("convolution2d_bwd_input", True), ("conv_transpose2d", True)):
        template = object.__new__(TritonTemplate)
        template.name = name
        monkeypatch.setattr(conv, "stand_in", template, raising=False)
        assert peers.autotunes_transposed() == serves == (models.AUTOTUNED in models.compilations(True, gpu))
    assert list(models.compilations(True, CPU)) == ["eager", "torch.compile"] and list(models.compilations(False, gpu)) == [
        "eager"
    ]


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_errors_in_16_bits_are_held_to_eagers(dtype):
    want = torch.randn(1000, dtype=torch.float64)
    once = want.to(dtype)
    twice = (once * 3).to(dtype) / 3  # rounded three times
    assert halves.require("y", once, twice, want, dtype) == halves.errors(once, want)
    assert halves.require("y", twice, twice, want, dtype) == halves.errors(twice, want)
    few, many = once.clone(), once * (1 + 4 * torch.finfo(dtype).eps)
    few[7] += 0.5
    for wrong, words in (
        (many, "relative L2 error of y"),
        (few, "error of y"),
        (once.where(want < 2, float("nan")), "nan, allowed"),
    ):
        with pytest.raises(oracle.Wrong, match=words):
            halves.require("y", wrong, once, want, dtype)


def test_gradients_in_16_bits_are_float64s(work):
    work = models.COLUMNS["bf16"].laid_out(work)
    work = replace(work, training=halves.draw(work, BF16))
    gy, z = work.training.gy, halves.pre_activation(work, BF16)
    assert gy.dtype == BF16 and 0 < (gy == 0).sum() < 0.2 * gy.numel()
    conv = nn.ConvTranspose2d(3, 4, 3, 2, 1, 1).double()
    conv.load_state_dict(work.conv.state_dict())
    x = work.x.double().requires_grad_()
    expected = torch.autograd.grad(peers.Plain(conv, CONSTANTS)(x), (x, conv.weight, conv.bias), gy.double())
    for got, want in zip(halves.gradients(work, z, BF16), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def spoilt(y):
    y = y.clone()
    y[0, 1, 2, 3] += 0.5
    return y


@pytest.mark.parametrize("column", ["fp32", "bf16", "AMP bf16"])
def test_a_wrong_result_is_not_timed(column, ours_is, hurried, monkeypatch, capsys):
    ours_is(spoilt)
    with pytest.raises(SystemExit, match="refusing to time a wrong kernel: ModelNumba .* is wrong in"):
        run(monkeypatch, *ONE_CELL, column)
    assert " ms" not in capsys.readouterr().out


@pytest.mark.parametrize("column", ["fp32", "bf16 channels_last", "AMP bf16"])
def test_a_wrong_gradient_is_not_timed(column, ours_is, hurried, monkeypatch, capsys):
    def half_the_gradient(y):
        if y.requires_grad:
            y.register_hook(lambda g: g / 2)
        return y

    ours_is(half_the_gradient)
    with pytest.raises(SystemExit, match="refusing to time a wrong kernel: ModelNumba .* of the gradient of x"):
        run(monkeypatch, *ONE_CELL, column, "--train")
    assert " ms" not in capsys.readouterr().out


def test_a_result_of_another_dtype_is_not_timed(ours_is, hurried, monkeypatch):
    ours_is(torch.Tensor.float)
    with pytest.raises(SystemExit, match="in bf16: it gives torch.float32, eager torch.bfloat16"):
        run(monkeypatch, *ONE_CELL, "bf16")


def test_other_strides_than_eagers_are_noted(ours_is, hurried, monkeypatch, capsys, tmp_path):
    ours_is(lambda y: y.to(memory_format=torch.channels_last))
    run(monkeypatch, *ONE_CELL, "fp32,bf16", "--json", str(tmp_path / "map.json"))
    assert "U-Net top, bf16: strides differ from eager's." in capsys.readouterr().out
    notes = Run.load(tmp_path / "map.json").tables[0].notes
    assert notes == ["fp32: strides differ from eager's", "bf16: strides differ from eager's"]


def test_a_failure_is_told_and_the_map_goes_on(hurried, monkeypatch, capsys, tmp_path):
    right = models.verify

    def verify(column, *args):
        if column.name == "bf16":
            raise RuntimeError("no memory")
        return right(column, *args)

    monkeypatch.setattr(models, "verify", verify)
    kept = tmp_path / "map.json"
    with pytest.raises(SystemExit, match="failed: ModelNumba .* in bf16"):
        run(monkeypatch, *ONE_CELL, "fp32,bf16", "--json", str(kept), "--plot", str(tmp_path / "map.svg"))
    shown = capsys.readouterr().out
    assert "1 cells" in shown and "failed: RuntimeError: no memory." in shown
    assert maps.ratios(Run.load(kept), "ms")[1] == ["U-Net top", "1.00", "-"]


@pytest.mark.parametrize("training", [(), ("--train",)])
def test_a_map_is_shown_kept_drawn_and_shown_again(training, monkeypatch, capsys, tmp_path):
    kept, drawn = tmp_path / "map.json", tmp_path / "map.svg"
    names = ["--rows", "U-Net top, benchmark", "--columns", "fp32,AMP bf16"]
    run(monkeypatch, *TINY, *training, *names, "--json", str(kept), "--plot", str(drawn))
    shown = capsys.readouterr().out
    assert all(words in shown for words in ("geometric mean", "cells below 1", "4 cells", "x best peer", "ModelNumba ("))
    assert ("Forward and backward" in shown) == bool(training)
    again = Run.load(kept)
    assert [table.model for table in again.tables] == ["benchmark", "U-Net top"]
    assert maps.columns(again) == ["fp32", "AMP bf16"] and maps.figures(again) == ["ms"]
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == kept.read_text()
    run(monkeypatch, "--load", str(kept))
    assert shown.endswith(capsys.readouterr().out.split("\n\n", 1)[1])  # all but the header
    run(monkeypatch, "--load", str(kept), "--markdown")
    assert "|  | fp32 | AMP bf16 |\n| --- | ---: | ---: |\n| benchmark |" in capsys.readouterr().out
    assert all(words in drawn.read_text() for words in ("U-Net top", "AMP", "times as fast"))


def row(name, column, launched, replayed=None, ours=False, spread=0.0):
    def timing(ms):
        return Timing(ms, ms * (1 - spread / 100), ms * (1 + spread / 100), ms, ms, 10)

    return Row(name, column, ours, None, timing(launched), further={"graph": timing(replayed)} if replayed else {})


def table(model, *rows, **settings):
    return Table(models.ROWS[model], "a GPU", None, list(rows), model=model, **settings)


@pytest.fixture
def known():
    """A run of two rows and two columns, with the ratios 4, 0.5 (the peer's launches), 1 and 2 by replays."""
    tables = [
        table(
            "U-Net top",
            row("eager", "fp32", 9, 8),
            row("torch.compile", "fp32", 5, 4),
            row("ModelNumba (tiled)", "fp32", 2, 1, ours=True),
            row("eager", "bf16", 1),
            row("torch.compile", "bf16", 5, 4),
            row("ModelNumba (reference)", "bf16", 3, 2, ours=True),
        ),
        table(
            "SAM decoder",
            row("eager", "fp32", 2, 1),
            row("ModelNumba (tiled)", "fp32", 4, 1, ours=True),
            row("eager", "bf16", 2, 1),
            row("ModelNumba (reference)", "bf16", 4, 0.5, ours=True),
        ),
    ]
    ceilings = {"memory": 4000.0}
    return Run("python bench.py --models", 1, "CUDA events", {"GPU": "a GPU"}, {}, tables, ceilings=ceilings)


def test_the_figures_of_a_map(known):
    assert maps.figures(known) == ["graph", "ms"]
    assert maps.ratios(known, "graph") == [
        ["", "fp32", "bf16"],
        ["U-Net top", "4.00", "0.50*"],
        ["SAM decoder", "1.00", "2.00"],
        ["geometric mean", "2.00", "1.00"],
        ["cells below 1", "0", "1"],
    ]
    assert maps.ratios(known, "ms")[1:3] == [["U-Net top", "2.50", "0.33"], ["SAM decoder", "0.50", "0.50"]]
    assert maps.total(known, "graph") == "4 cells, geometric mean 1.41, 1 below 1"
    heading, first, second, *_ = maps.times(known)
    assert heading[2:] == ["ours", "best peer", "ms", "peer's ms", "x best peer", "limit", "% of limit"]
    assert first[:7] == ["U-Net top", "fp32", "ModelNumba (tiled)", "torch.compile", "1.000", "4.000", "4.00"]
    assert second[2:7] == ["ModelNumba (reference)", "eager", "2.000", "1.000", "0.50*"]


@pytest.mark.parametrize(
    ("model", "column", "training", "expected"),
    [
        # Bytes: x, weight and bias, and y, at 4000 GB/s.
        ("U-Net top", "fp32", False, (4 * (16777216 + 32768 + 64) + 4 * 33554432) / 4e9),
        ("U-Net top", "bf16", False, (2 * (16777216 + 32768 + 64) + 2 * 33554432) / 4e9),
        ("U-Net top", "AMP bf16", False, (4 * (16777216 + 32768 + 64) + 2 * 33554432) / 4e9),
        ("U-Net top", "bf16", True, (3 * 2 * (16777216 + 32768 + 64) + 2 * 2 * 33554432) / 4e9),
        # Products: 2 of x's values times taps and output channels, at 200 and 600 TFLOP/s.
        ("pix2pix middle", "fp32", False, 2 * 4194304 * 128 * 16 / 200e9),
        ("pix2pix middle", "TF32", False, 2 * 4194304 * 128 * 16 / 600e9),
        ("pix2pix middle", "AMP bf16", True, 3 * 2 * 4194304 * 128 * 16 / 600e9),
    ],
)
def test_the_limit_of_a_cell(model, column, training, expected):
    found = maps.limit(table(model, training=training), models.COLUMNS[column], 4000)
    assert found == pytest.approx(expected)


def test_a_map_without_ceilings_has_no_limits(known):
    heading, *rows = maps.times(replace(known, ceilings={}))
    assert heading[-1] == "x best peer" and {len(row) for row in rows} == {7}


def test_the_text_and_the_plot_of_a_map_from_a_gpu(known, monkeypatch, tmp_path):
    known.save(tmp_path / "map.json")
    assert Run.load(tmp_path / "map.json") == known
    shown = report.text(known)
    assert shown.index("by replays of a CUDA graph") < shown.index("by launched calls") < shown.index("% of limit")
    whole = [replace(known.tables[0], case=case, model=name) for name, case in models.ROWS.items()]
    for each in whole:
        each.rows[:] = [
            row(kind, column, 2, 1, kind[0] == "M") for column in models.COLUMNS for kind in ("eager", "ModelNumba (a)")
        ]
    replace(known, tables=whole).save(tmp_path / "whole.json")
    run(monkeypatch, "--load", str(tmp_path / "whole.json"), "--plot", str(tmp_path / "whole.svg"))
    assert (tmp_path / "whole.svg").stat().st_size < 60_000


def test_cells_that_moved_by_more_than_3_per_cent(known):
    before = known.tables[0].rows
    slower, noisy = row("ModelNumba (tiled)", "fp32", 2, 1.05, ours=True), row("ModelNumba (tiled)", "fp32", 2, 1.05, True, 6)
    little = row("ModelNumba (tiled)", "fp32", 2, 1.02, ours=True)
    for changed, moved in ((slower, [["slower,", "back"]]), (noisy, []), (little, []), (before[2], [])):
        rows = [*before[:2], changed, *before[3:]]
        new = replace(known, tables=[replace(known.tables[0], rows=rows), known.tables[1]])
        lines = [line.split() for line in compare.report(known, new).splitlines()]
        cells = [line for line in lines if "fp32" in line or "bf16" in line]
        assert [cell[cell.index("fp32") + 1 : -6] for cell in cells] == moved
        words = "| slower, back | 4.00 | 3.81 | 0.952 | 1.000 | 1.050 | 1.050 |"
        assert (words in compare.report(known, new, markdown=True)) == bool(moved)


def test_cells_that_one_map_lacks(known):
    shown = compare.report(known, replace(known, tables=known.tables[:1]))
    assert "old: 4 cells, geometric mean 1.41" in shown and "new: 2 cells" in shown
    assert "only in the old run: SAM decoder: 1 x 256 x 64 x 64 -> 64 channels" in shown


def test_two_maps_are_compared(known, monkeypatch, capsys, tmp_path):
    known.save(tmp_path / "map.json")
    run(monkeypatch, "--load", str(tmp_path / "map.json"), "--compare", str(tmp_path / "map.json"))
    assert "Only cells that moved are shown" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rows", "U-Net top"], "are of --models"),
        (["--columns", "bf16"], "are of --models"),
        ([*TINY, "--rows", "U-Net"], "--rows: 'U-Net' is none of benchmark, pix2pix middle"),
        ([*TINY, "--columns", "bf16,fp8"], "--columns: 'fp8' is none of fp32, bf16, bf16 channels_last, AMP bf16"),
        ([*TINY, "--columns", "TF32"], "--columns: 'TF32' is none of fp32"),
        ([*TINY, "--train", "--rows", "FCN-8s"], "--rows: 'FCN-8s' is none of benchmark, pix2pix middle, U-Net deep"),
        ([*TINY, "--suite"], "cases of its own"),
        ([*TINY, "--backends", "cpu"], "dispatch chooses the backend"),
    ],
)
def test_bad_options(options, words, monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit_:
        run(monkeypatch, *options)
    assert exit_.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.gpu
def test_a_map_on_a_gpu(monkeypatch, capsys, tmp_path):
    kept = tmp_path / "map.json"
    run(monkeypatch, "--models", "--quick", "--rows", "benchmark,FSRCNN", "--json", str(kept))
    found = Run.load(kept)
    assert maps.columns(found) == list(models.COLUMNS) and maps.figures(found) == ["graph", "ms"]
    assert len(maps.cells(found, "graph")) == 14 and found.ceilings["memory"] > 0
    assert "*" not in "".join(cell.text for cell in maps.cells(found, "graph").values())


@pytest.mark.gpu
def test_a_map_of_training_on_a_gpu(monkeypatch, tmp_path):
    kept = tmp_path / "map.json"
    run(monkeypatch, "--models", "--train", "--quick", "--rows", "U-Net top", "--json", str(kept))
    assert len(maps.cells(Run.load(kept), "graph")) == 4
