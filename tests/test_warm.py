"""``python -m numba_impl warm``, and the front of all commands."""

import re
from types import SimpleNamespace

import pytest
import torch

from numba_impl import __main__, warm
from tests.cases import BENCHMARK
from tests.cuda.test_cache import run


def test_the_front_asks_for_a_command(capsys):
    with pytest.raises(SystemExit) as end:
        __main__.main([])
    assert end.value.code == 2 and "COMMAND" in capsys.readouterr().err


def test_it_says_what_it_cannot_do(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert __main__.main(["warm"]) == 1
    assert capsys.readouterr().out == "error: there is no CUDA device, and only its kernels are kept\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/dev/null")
    assert __main__.main(["warm"]) == 1
    assert capsys.readouterr().out.startswith("error: [Errno 20] Not a directory")


def test_what_it_is_asked_for(monkeypatch):
    calls = []
    monkeypatch.setattr(warm, "main", lambda args: calls.append(args) or 0)
    assert __main__.main(["warm"]) == __main__.main(["warm", "2,6,7,9", "1,6,5,5", "--kernel", "3,1", "--train"]) == 0
    usual, given = calls
    assert (usual.shapes, usual.out_channels, usual.kernel, usual.stride) == ([BENCHMARK.x], BENCHMARK.out_channels, 3, 2)
    assert (usual.padding, usual.output_padding, usual.precision, usual.train) == (1, 1, "both", False)
    assert (given.shapes, given.kernel, given.train) == ([(2, 6, 7, 9), (1, 6, 5, 5)], (3, 1), True)


@pytest.mark.parametrize("arguments", [["1,2,3"], ["1,2,3,x"], ["--kernel", "1,2,3"], ["--precision", "fp16"]])
def test_it_refuses_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["warm", *arguments])
    assert "invalid" in capsys.readouterr().err


@pytest.mark.parametrize("train", [False, True])
def test_it_runs_the_layer(train, capsys):
    args = SimpleNamespace(out_channels=5, kernel=(3, 1), stride=(2, 1), padding=(1, 0), output_padding=(1, 0), train=train)
    warm.call((2, 6, 7, 9), "fp32", args, "cpu")
    assert capsys.readouterr().out == "cpu: serves 2x6x7x9 -> 2x5x14x9 on cpu in fp32\n"


@pytest.mark.gpu
def test_it_compiles_ahead(tmp_path):
    command = "import sys; from numba_impl import __main__; sys.exit(__main__.main(['warm', '2,16,9,12', '--train']))"
    for how in ("compiled", "from the cache"):
        place, *lines = run(command, folder=tmp_path).splitlines()
        assert place == f"kept in {tmp_path / 'numba_impl'}"
        calls = [line for line in lines if ": serves 2x16x9x12 -> " in line]
        assert len(calls) == 2, "one a precision"
        assert all(re.fullmatch(rf"\w+: {how} in \d+\.\d\d s", line) for line in lines if line not in calls)
        assert len(lines) > len(calls)
