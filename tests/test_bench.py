"""``bench.py`` on the CPU: it runs, keeps what it measured, and refuses to time a wrong kernel."""

import sys

import pytest

import bench
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shape", "1,2,3"], "--shape"),
        (["--backends", "fastest"], "none of hopper"),
        (["--output-padding", "2"], "output_padding must be smaller than stride"),
        (["--device", "cpu", "--precision", "tf32"], "CPU has fp32 alone"),
    ],
)
def test_bad_options(options, words, monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit_:
        run(monkeypatch, *options)
    assert exit_.value.code == 2 and words in capsys.readouterr().err
