"""``bench.py`` on the CPU: it runs, keeps what it measured, and refuses to time a wrong kernel."""

import pathlib
import sys
from dataclasses import replace

import pytest
import torch

import bench
from benchmarks import peers, training
from benchmarks.measure import Work
from benchmarks.results import Case, Run
from numba_impl import backend_cpu

SMALL = ["--device", "cpu", "--quick", "--shape", "2,3,8,8", "--out-channels", "4", "--backends", "cpu,model"]


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


def test_an_older_run_is_shown(monkeypatch, capsys):
    run(monkeypatch, "--load", str(pathlib.Path(bench.__file__).parent / "benchmarks" / "h200.json"))
    assert "eager, channels_last " in capsys.readouterr().out


@pytest.mark.parametrize("error", [1e-3, float("nan")])
def test_a_wrong_kernel_is_not_timed(error, monkeypatch, capsys):
    right = backend_cpu.run

    def wrong(*args):
        y = right(*args)
        y[1, 2, 3, 4] += error
        return y

    monkeypatch.setattr(backend_cpu, "run", wrong)
    with pytest.raises(SystemExit, match="refusing to time a wrong kernel: backend cpu"):
        run(monkeypatch, *SMALL)
    assert " ms" not in capsys.readouterr().out


@pytest.mark.parametrize("error", [0.1, float("nan")])
def test_a_wrong_gradient_is_not_timed(error, monkeypatch, capsys):
    right = backend_cpu.activate_backward

    def wrong(*args):
        g = right(*args)
        g[1, 2, 3, 4] += error
        return g

    monkeypatch.setattr(backend_cpu, "activate_backward", wrong)
    with pytest.raises(SystemExit, match="refusing to time a wrong kernel: backend cpu is wrong: .* of a gradient"):
        run(monkeypatch, *SMALL, "--train")
    assert " ms" not in capsys.readouterr().out


def test_a_step_gives_the_gradients_of_the_layer():
    work = Work.draw(Case((2, 3, 8, 8), 4), torch.device("cpu"), seed=1)
    work = replace(work, gradients=training.draw(work))
    for peer in peers.peers(work, "tf32", compiled=False):  # in both memory formats
        gradients = training.build_step(peer, work)()
        assert [g.shape for g in gradients] == [t.shape for t in (work.x, *work.conv.parameters())]
        assert training.error_of(gradients, work.gradients.exact) < 1e-5
    assert all(t.grad is None for t in (work.x, *work.conv.parameters()))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shape", "1,2,3"], "--shape"),
        (["--backends", "fastest"], "none of hopper"),
        (["--output-padding", "2"], "output_padding must be smaller than stride"),
        (["--device", "cpu", "--precision", "tf32"], "CPU has fp32 alone"),
        (["--device", "cpu", "--train", "--graphs"], "not for --train"),
        (["--device", "cpu", "--train", "--latency"], "not for --train"),
    ],
)
def test_bad_options(options, words, monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit_:
        run(monkeypatch, *options)
    assert exit_.value.code == 2 and words in capsys.readouterr().err
