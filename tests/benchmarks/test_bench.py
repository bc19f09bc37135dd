"""``bench.py`` on the CPU: it runs, keeps, draws and compares what it measured, and refuses to time a wrong kernel."""

import json
import pathlib
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import bench
from benchmarks import compare, machine, measure, peers, plots, report, sweep, tables, timer, training
from benchmarks.measure import Work
from benchmarks.results import Run, Timing
from numba_impl.backends import BACKENDS
from numba_impl.case import Case
from numba_impl.oracle import BARE

KEPT = sorted((pathlib.Path(bench.__file__).parent / "benchmarks").glob("*.json"))
SMALL = ["--device", "cpu", "--quick", "--shape", "2,3,8,8", "--out-channels", "4", "--backends", "cpu,model"]
SMALL_CASE = Case((2, 3, 8, 8), 4, 3, 2, 1, 1)
OLDER = (  # name, precision, ours, ms, ± %
    ("eager", "fp32", False, 18.5, 0.0),
    ("torch.compile", "fp32", False, 16.0, 0.0),
    ("backend tiled", "fp32", True, 4.0, 0.1),
    ("ModelNumba (hopper)", "fp32", True, 1.0, 2.6),
    ("eager", "tf32", False, 8.0, 0.3),
    ("ModelNumba (hopper)", "tf32", True, 0.8, 3.5),
)


def timing(ms, spread=0.0):
    low, high = ms * (1 - spread / 100), ms * (1 + spread / 100)
    return {"median": ms, "p20": low, "p80": high, "least": low, "most": high, "samples": 10}


@pytest.fixture
def older(tmp_path):
    """The path of a run as --json once kept it: the forward alone, eager launches alone, no state of the machine."""
    errors = {"output": 1e-6, "unclamped": 1e-7}
    rows = [
        {"name": name, "precision": precision, "ours": ours, "errors": errors, "timing": timing(ms, spread), "failure": ""}
        for name, precision, ours, ms, spread in OLDER
    ]
    layer = {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1, "add_value": 0.5, "scale": 2.0}
    table = {"case": {"shape": [128, 64, 128, 128], "out_channels": 64, **layer}, "device": "a GPU", "copy": timing(1.0)}
    run = {"command": "python bench.py", "seed": 1, "method": "CUDA events", "machine": {"GPU": "a GPU"}, "versions": {}}
    path = tmp_path / "older.json"
    path.write_text(json.dumps(run | {"tables": [table | {"rows": rows, "pointwise": None, "notes": []}]}))
    return path


def run(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["bench.py", *options])
    bench.main()


def test_a_run_is_shown_kept_and_shown_again(monkeypatch, capsys, tmp_path):
    kept = tmp_path / "run.json"
    run(monkeypatch, *SMALL, "--json", str(kept))
    shown = capsys.readouterr().out
    assert all(words in shown for words in ("eager", "backend cpu", "ModelNumba (cpu)", "times copy_", "byte floor"))
    run(monkeypatch, "--load", str(kept), "--markdown")
    assert "| **ModelNumba (cpu)** | fp32 |" in capsys.readouterr().out


def test_a_run_of_training_is_shown_kept_and_shown_again(monkeypatch, capsys, tmp_path):
    kept = tmp_path / "run.json"
    run(monkeypatch, *SMALL, "--train", "--json", str(kept))
    shown = capsys.readouterr().out
    assert all(words in shown for words in ("eager", "backend cpu", "ModelNumba (cpu)", "forward and backward", "byte floor"))
    run(monkeypatch, "--load", str(kept), "--markdown")
    shown = capsys.readouterr().out
    assert "| peak GiB | gradient relL2 |" in shown and "| **ModelNumba (cpu)** | fp32 |" in shown
    for row in Run.load(kept).tables[0].rows:
        assert 0 < row.errors.gradient < 1e-5 and row.timing.median > 0 and row.memory is None


def test_latency(monkeypatch, capsys):
    run(monkeypatch, "--latency", "--quick", "--device", "cpu")
    shown = capsys.readouterr().out
    assert all(words in shown for words in ("eager (±", "ModelNumba (±", "dispatch: ", "torch.library", "1 x 64 x 8 x 8"))
    assert "failed" not in shown


def test_an_older_run_is_shown(older, monkeypatch, capsys):
    run(monkeypatch, "--load", str(older))
    shown = capsys.readouterr().out
    assert "~0.800  3.5" in shown and "graph" not in shown


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.name)
def test_the_kept_runs_are_shown_and_drawn(kept, monkeypatch, capsys, tmp_path):
    run(monkeypatch, "--load", str(kept), "--plot", str(tmp_path / "plot.svg"))
    assert "eager, channels_last " in capsys.readouterr().out
    assert "byte floor" in (tmp_path / "plot.svg").read_text()


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.name)
def test_the_kept_runs_are_as_save_writes_them(kept, tmp_path):
    again = tmp_path / kept.name
    Run.load(kept).save(again)
    assert again.read_text() == kept.read_text()


def test_what_is_kept_is_rounded_and_small(older, tmp_path):
    table = Run.load(older).tables[0]
    rows = [replace(table.rows[0], timing=Timing.of([1.23456789])), replace(table.rows[1], memory=123456789)]
    kept = tmp_path / "run.json"
    replace(Run.load(older), tables=[replace(table, rows=rows)]).save(kept)
    again = Run.load(kept).tables[0]
    assert again.case == table.case and [row.name for row in again.rows] == ["eager", "torch.compile"]
    assert again.rows[0].timing.median == 1.2346 and again.rows[1].memory == 123456789
    assert len(kept.read_text().splitlines()) == 3  # a row a line


def test_a_roofline_needs_ceilings(older, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "--load", str(older), "--roofline", "roofline.svg")
    assert "the run has no ceilings" in capsys.readouterr().err


def test_a_file_that_is_no_run(monkeypatch, capsys, tmp_path):
    for option, content, words in (
        ("--load", "{}", "is not a run that --json kept"),
        ("--compare", "ms", "is not a run that --json kept"),
        ("--load", None, "No such file"),
    ):
        path = tmp_path / "run.json"
        path.unlink(missing_ok=True)
        if content:
            path.write_text(content)
        with pytest.raises(SystemExit):
            run(monkeypatch, option, str(path))
        error = capsys.readouterr().err
        assert words in error and str(path) in error


def test_a_sweep_is_kept_and_drawn(hurried, monkeypatch, tmp_path):
    kept, lines, roofline = (tmp_path / name for name in ("run.json", "lines.svg", "roofline.svg"))
    run(monkeypatch, *SMALL, "--sweep", "--json", str(kept), "--plot", str(lines), "--roofline", str(roofline))
    swept = Run.load(kept)
    assert [table.case for table in swept.tables] == sweep.cases(SMALL_CASE)
    assert swept.ceilings["memory"] > 0 and swept.ceilings["fp32"] > 0
    for path, texts in (
        (lines, ("ModelNumba", "eager", "byte floor", "batch", "channels", "image height")),
        (roofline, ("ModelNumba", "backend cpu", "copy_", "fp32 products", "FLOP a byte")),
    ):
        drawn = path.read_text()
        assert all(text in drawn for text in texts)


def test_every_row_has_a_look_of_its_own():
    kinds = {"eager", "torch.compile", "ModelNumba", *(f"backend {name}" for name in BACKENDS)}
    assert kinds <= plots.LOOKS.keys()


def test_a_sweep_that_is_cut_keeps_what_it_has(hurried, monkeypatch, tmp_path):
    kept, whole = tmp_path / "run.json", tables.measure

    def cut(case, *args):
        if case.x[0] == 4:  # the third
            raise KeyboardInterrupt
        return whole(case, *args)

    monkeypatch.setattr(tables, "measure", cut)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, *SMALL, "--sweep", "--json", str(kept))
    assert [table.case.x[0] for table in Run.load(kept).tables] == [2, 1]
    run(monkeypatch, "--load", str(kept), "--plot", str(tmp_path / "lines.svg"), "--roofline", str(tmp_path / "roofline.svg"))


def test_a_sweep_around_the_benchmark_shape(older):
    cases = sweep.cases(bench.BENCHMARK)
    assert cases[0] == bench.BENCHMARK
    found = {axis: [sweep.AXES[axis][0](case) for case in cases] for axis in sweep.AXES}
    assert found == {
        "batch": [128, 1, 32, 256, 8, 128, 128, 128, 32, 32, 32],
        "channels": [64, 64, 64, 64, 64, 16, 32, 128, 64, 64, 64],
        "image height": [128, 128, 128, 128, 128, 128, 128, 128, 32, 256, 64],
    }
    table = Run.load(older).tables[0]
    along = {axis: sweep.along(axis, [replace(table, case=case) for case in cases]) for axis in sweep.AXES}
    assert {axis: (description, list(group)) for axis, (description, group) in along.items()} == {
        "batch": ("64 → 64 channels, 128 x 128 images", [1, 8, 32, 128, 256]),
        "channels": ("batch 128, 128 x 128 images", [16, 32, 64, 128]),
        "image height": ("batch 32, 64 → 64 channels", [32, 64, 128, 256]),
    }


@pytest.fixture
def moved(older):
    """What compare says of a kept table and itself with some rows slower: {(kind, precision): (moved, ratios)}."""
    old = Run.load(older).tables[0]

    def found(by, kind, precision):
        rows = [
            replace(row, timing=Timing(**timing(by * row.timing.median, row.timing.spread)))
            if kind in (row.kind, "any") and precision in (row.precision, "any")
            else row
            for row in old.rows
        ]
        (_, *grid), rest = compare.compared(old, replace(old, rows=rows))
        assert rest == [] and len(grid) == len(old.rows)
        return {(cells[0].split(" (")[0], cells[1]): (cells[3], cells[6], cells[9]) for cells in grid if cells[3]}

    return found


def test_what_moved_is_marked(moved):
    assert moved(1.05, "backend tiled", "fp32") == {("backend tiled", "fp32"): ("slower, back", "1.050", "0.952")}
    assert moved(0.95, "backend tiled", "fp32") == {("backend tiled", "fp32"): ("faster, ahead", "0.950", "1.053")}
    assert moved(1.004, "backend tiled", "fp32") == {}  # its spread is 0.1 %, but less than 1 % is no movement
    assert moved(1.05, "ModelNumba", "fp32") == {}  # its spread is 2.6 %, in either run


def test_a_slower_machine_moves_times_alone(moved):
    found = moved(1.5, "any", "any")
    assert len(found) == len(OLDER) and set(found.values()) == {("slower", "1.500", "1.000")}


def test_a_better_peer_moves_the_ratios_to_it(moved):
    back = ("back", "1.000", "0.500")
    assert moved(0.5, "torch.compile", "fp32") == {
        ("eager", "fp32"): back,
        ("torch.compile", "fp32"): ("faster", "0.500", "1.000"),
        ("backend tiled", "fp32"): back,
        ("ModelNumba", "fp32"): back,
    }


def test_rows_and_cases_that_only_one_run_has(older):
    old = Run.load(older)
    table = old.tables[0]
    failed, other = replace(table.rows[0], timing=None, failure="no memory"), replace(table.rows[1], name="other")
    small = replace(table, case=bench.OTHERS[0])
    new = replace(old, tables=[replace(table, rows=[failed, *table.rows[2:], other]), small])
    shown = compare.report(old, new)
    assert "Only in the old run: torch.compile in fp32" in shown and "Only in the new run: other in fp32" in shown
    assert ["eager", "fp32", "ms", "fails"] in [line.split() for line in shown.splitlines()]
    assert f"Only in the new run: {small.title}" in shown and f"Only in the old run: {small.title}" in compare.report(new, old)


@pytest.mark.parametrize("markdown", [(), ("--markdown",)])
def test_two_runs_are_compared(markdown, older, monkeypatch, capsys):
    run(monkeypatch, "--load", str(older), "--compare", str(older), *markdown)
    shown = capsys.readouterr().out
    assert "Against: python bench.py, seed 1" in shown and "differs" not in shown
    assert ("| ModelNumba (hopper) | tf32 | ms |  | ~0.800 | ~0.800 | 1.000 | 10.00 | 10.00 | 1.000 |" in shown) == bool(markdown)


@pytest.mark.parametrize(("spread", "digits"), [(0.02, "2.000"), (0.029, "2.000"), (0.031, "~2.000")])
def test_a_figure_of_more_than_3_per_cent_spread_is_marked(spread, digits):
    low, high = 2 - 2 * spread, 2 + 2 * spread
    timing = Timing.of([low, low, low, 2, 2, 2, 2, high, high, high])
    assert timing.digits == digits and str(timing) == digits + " ms"


def test_graph_and_warm_figures_are_columns_where_there_are_any(older):
    old = Run.load(older)
    table = old.tables[0]
    eager, compiled, tiled = table.rows[:3]
    rows = [
        replace(eager, further={"graph": Timing.of([0.5])}),
        replace(tiled, further={name: Timing.of([0.2, 0.25, 0.3]) for name in ("warm", "graph", "graph warm")}),
        replace(compiled, failure="no graph"),
    ]
    heading, *cells = (row[2:10] for row in report.grid_of(replace(table, rows=rows)))
    assert heading == ["ms", "± %", "x eager", "x best peer", "warm", "graph", "graph warm", "x best graph"]
    assert [row[4:] for row in cells] == [["-", "0.500", "-", "1.00"], ["~0.250"] * 3 + ["2.00"], ["-"] * 4]
    shown = report.text(replace(old, tables=[replace(table, rows=rows)]))
    assert "graph warm: a graph" in shown and "torch.compile in fp32, further figures: failed: no graph" in shown


@pytest.mark.gpu
def test_graph_and_warm_figures(monkeypatch, tmp_path):
    kept = tmp_path / "run.json"
    run(monkeypatch, "--quick", "--backends", "tiled,composite,model", "--json", str(kept))
    for row in Run.load(kept).tables[0].rows:
        assert row.further.keys() == {"warm", "graph", "graph warm"} and not row.failure
        assert 0 < row.further["graph warm"].median < 2 * row.timing.median


@pytest.mark.gpu
def test_replays_have_no_host_time():
    x = torch.zeros(1, device="cuda")

    def many_launches():
        for _ in range(50):
            x.add_(1)

    launched = timer.launches_on_end(many_launches, timer.flushed(many_launches, 20))
    assert timer.Timer(x.device, 20, replayed=True)(many_launches).median < launched.median


@pytest.mark.gpu
def test_a_copy_at_its_best():
    source = torch.zeros(2**27, device="cuda")
    target = torch.empty_like(source)
    launched = timer.flushed(lambda: target.copy_(source), 50)
    assert timer.Timer(source.device, 20, replayed=True).copy(target, source).median < 1.1 * launched.median


@pytest.mark.gpu
def test_the_models_row_follows_the_flags_as_the_peers_do(hopper, monkeypatch, tmp_path):
    """For so little work cuDNN computes in fp32 where TF32 is permitted, and so does the module."""
    kept = tmp_path / "run.json"
    shape = "--shape", "1,64,8,8", "--out-channels", "64"
    run(monkeypatch, "--quick", *shape, "--backends", "hopper,model", "--json", str(kept))
    names = [row.name for row in Run.load(kept).tables[0].rows if row.ours]
    assert names == 2 * ["backend hopper", "ModelNumba (tiled)"]


class Nvml:
    """Stands for pynvml on a GPU that has no persistence mode and whose driver does not count the time slowed by heat."""

    NVML_SUCCESS, NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = range(4)
    NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP, NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN = 74, 269

    class NVMLError(Exception):
        pass

    def __getattr__(self, name):
        """Every other function fails, as one that the driver does not know."""

        def unknown(*args):
            raise self.NVMLError(name)

        return unknown

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return uuid

    def nvmlDeviceGetClockInfo(self, gpu, clock):
        assert gpu == "GPU-12"
        return {self.NVML_CLOCK_SM: 1980, self.NVML_CLOCK_MEM: 3201}[clock]

    def nvmlDeviceGetPowerUsage(self, gpu):
        return 650_200

    def nvmlDeviceGetTemperature(self, gpu, sensor):
        return 43

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu):
        return 0x24

    def nvmlDeviceGetFieldValues(self, gpu, fields):
        known = fields == [self.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP]
        return [SimpleNamespace(nvmlReturn=0 if known else 3, value=SimpleNamespace(ullVal=8_717_672_123))]


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12"))
    return torch.device("cuda")


def test_the_state_of_a_gpu(one_gpu, monkeypatch):
    """What NVML or the GPU does not know is left out."""
    monkeypatch.setattr(machine, "pynvml", Nvml())
    known = {
        "SM clock": "1980 MHz", "memory clock": "3201 MHz", "power": "650.20 W", "temperature": "43",
        "slowed by power": "8717672 us", "throttle reasons": "power cap + heat",
    }  # fmt: skip
    found = machine.state(one_gpu)
    assert found.pop("load", "0.0") and found == known
    assert machine.reasons(0) == "none" and machine.reasons(1 << 9) == "other"


def test_the_state_of_a_gpu_without_the_bindings(one_gpu, monkeypatch):
    monkeypatch.setattr(machine, "pynvml", None)
    assert machine.state(one_gpu).keys() <= {"load"}


@pytest.mark.gpu
def test_nvml_knows_the_gpu():
    pytest.importorskip("pynvml")
    device = torch.device("cuda", 0)
    assert machine.machine(device).keys() >= {"GPU", "driver", "maximum clock"}
    assert machine.state(device).keys() >= {"SM clock", "power", "temperature", "throttle reasons"}


def test_the_state_before_and_after_is_kept(hurried, monkeypatch, capsys, tmp_path):
    states = iter([{"SM clock": "345 MHz"}, {"SM clock": "1980 MHz"}])
    monkeypatch.setattr(machine, "state", lambda device: next(states))
    run(monkeypatch, *SMALL, "--json", str(tmp_path / "run.json"))
    shown = capsys.readouterr().out
    assert shown.index("before: SM clock 345 MHz") < shown.index("ModelNumba (cpu)") < shown.index("after: SM clock 1980 MHz")
    kept = Run.load(tmp_path / "run.json")
    assert (kept.before, kept.after) == ({"SM clock": "345 MHz"}, {"SM clock": "1980 MHz"})


def test_the_pixel_shuffle_rewrite_is_the_layer():
    work = Work.draw(replace(SMALL_CASE, x=(2, 3, 5, 7)), torch.device("cpu"), seed=1)
    conv, x = work.conv.double(), work.x.double()
    for constants in (measure.CONSTANTS, BARE):
        expected = peers.Plain(conv, constants)(x)
        torch.testing.assert_close(peers.PixelShuffle(conv, constants)(x), expected, rtol=0, atol=1e-12)


def test_a_peer_is_compiled_once_for_both_precisions(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda layer, dynamic: compiled.append(layer) or layer)
    work = Work.draw(SMALL_CASE, torch.device("cpu"), seed=1)
    for contenders in peers.peers(work, ("fp32", "tf32")).values():
        for contender in contenders:
            contender.build(measure.CONSTANTS)
    assert len(compiled) == 1


@pytest.fixture
def spoil(monkeypatch):
    """Adds an error to a value of the CPU backend's results of an operation."""

    def spoil(operation, error):
        right = BACKENDS["cpu"]

        def plan(problem):
            planned = right.plan(problem)

            def wrong(*args):
                result = planned.run(*args)
                result[1, 2, 3, 4] += error
                return result

            return replace(planned, run=wrong) if problem.operation == operation else planned

        monkeypatch.setitem(BACKENDS, "cpu", replace(right, plan=plan))

    return spoil


@pytest.mark.parametrize("error", [1e-3, float("nan")])
def test_a_wrong_kernel_is_not_timed(error, spoil, monkeypatch, capsys):
    spoil("forward", error)
    with pytest.raises(SystemExit, match="refusing to time a wrong kernel: backend cpu"):
        run(monkeypatch, *SMALL)
    assert " ms" not in capsys.readouterr().out


@pytest.mark.parametrize("error", [0.1, float("nan")])
def test_a_wrong_gradient_is_not_timed(error, spoil, monkeypatch, capsys):
    spoil("pre_gradient", error)
    with pytest.raises(SystemExit, match="refusing to time a wrong kernel: backend cpu is wrong .* of the gradient"):
        run(monkeypatch, *SMALL, "--train")
    assert " ms" not in capsys.readouterr().out


def test_a_step_gives_the_gradients_of_the_layer():
    work = Work.draw(SMALL_CASE, torch.device("cpu"), seed=1)
    work = replace(work, training=training.draw(work, ["tf32"]))
    for peer in peers.peers(work, ["tf32"], compiled=False)["tf32"]:  # in both memory formats
        gradients = training.build_step(peer, work)()
        assert [g.shape for g in gradients] == [t.shape for t in (work.x, *work.conv.parameters())]
        assert work.training.truth["tf32"].check(gradients).relative < 1e-5
    assert all(t.grad is None for t in (work.x, *work.conv.parameters()))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shape", "1,2,3"], "--shape"),
        (["--backends", "fastest"], "none of hopper"),
        (["--output-padding", "2"], "output_padding must be smaller than stride"),
        (["--device", "cpu", "--precision", "tf32"], "CPU has fp32 alone"),
        (["--sweep", "--train"], "for the forward alone"),
        (["--device", "cpu", "--train", "--latency"], "not for --train"),
    ],
)
def test_bad_options(options, words, monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit_:
        run(monkeypatch, *options)
    assert exit_.value.code == 2 and words in capsys.readouterr().err
