"""The fuzzer: finds nothing where nothing is wrong, finds what is, and names it so that it can be run again."""

import math
import random
import re
import shlex
import sys

import pytest
import torch

from numba_impl import dispatch
from numba_impl import gpu as cuda_support
from numba_impl.backends.tiled import backend as backend_tiled
from numba_impl.fuzz import draw, search
from numba_impl.fuzz.__main__ import main
from numba_impl.fuzz.bounds import Rules
from numba_impl.fuzz.case import CHOICES, Case, parse_case
from tests.backends.composite.test_channel_sum import small_pieces  # noqa: F401
from tests.backends.composite.test_elementwise_gradient import NUMPY_WARNS
from tests.backends.tiled.test_kernel import SMALL

START = "python -m numba_impl.fuzz --case "


def case_of(output):
    """Of the line that reproduces a failure."""
    [line] = [line for line in output.splitlines() if line.startswith(START)]
    [text] = shlex.split(line.removeprefix(START))
    return text


def counts_of(output, failures, seed, device="cpu"):
    """(cases, cases of each backend, cases of each kind) of the last line, which must have so many failures."""
    line = output.splitlines()[-1]
    pattern = rf"(\d+) cases, failures: {failures}, [\d.]+/s; (.+); (.*); seed {seed}, {device}"
    cases, served, kinds = re.fullmatch(pattern, line).groups()
    served, kinds = ({name: int(count) for name, count in re.findall(r"(\S+) (\d+)", text)} for text in (served, kinds))
    assert sum(served.values()) == int(cases) and served.get("wrong", 0) == failures
    return int(cases), served, kinds


def test_a_short_run_finds_nothing(seed, capsys):
    status = main(["--minutes", "0.5", "--cases", "50", "--seed", str(seed), "--device", "cpu"])
    printed = capsys.readouterr()
    assert status == 0, printed
    cases, served, kinds = counts_of(printed.out, 0, seed)
    assert cases <= 50 and "cpu" in served and "module" in kinds


def small_layer(source, kind, device):
    """Few taps and channels, so that the simulator soon computes it."""
    axes = [(source.integers(1, 3), source.integers(1, 2)) for _ in range(2)]
    numbers = [(kernel, stride, source.integers(0, kernel), source.integers(0, stride - 1)) for kernel, stride in axes]
    return dict(zip(("kernel", "stride", "padding", "extra"), zip(*numbers))), source.integers(1, 3), source.integers(1, 5)


@pytest.mark.simulator
@pytest.mark.filterwarnings(NUMPY_WARNS)
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("backend", ["tiled", "composite"])
def test_a_short_run_in_the_simulator(backend, seed, monkeypatch, capsys):
    """The kernels behind the layer, forward and backward, as if the CPU were a GPU that runs them."""
    monkeypatch.setattr(cuda_support, "runs_kernels", lambda device: (True, ""))
    monkeypatch.setattr(backend_tiled, "tile_for", lambda problem: SMALL)
    monkeypatch.setitem(draw.SERVING, "cpu", ("tiled", "composite", "reference"))
    monkeypatch.setattr(draw, "draw_layer", small_layer)
    monkeypatch.setattr(draw, "KINDS", ("any",))
    sizes = draw.draw_size
    monkeypatch.setattr(draw, "draw_size", lambda *arguments: sizes(*arguments[:-1], "cuda"))  # large ones are for the CPU
    status = main(["--minutes", "1", "--cases", "30", "--seed", str(seed), "--device", "cpu", "--backend", backend])
    printed = capsys.readouterr()
    assert status == 0, printed
    assert counts_of(printed.out, 0, seed)[1][backend] > 5


@pytest.mark.parametrize(("device", "backends"), draw.SERVING.items())
def test_everything_is_drawn(device, backends, seed):
    source = random.Random(seed)
    cases = [draw.draw_case(draw.Draw(source.randint), device, None) for _ in range(3000)]
    allowed = CHOICES | {"backend": ("dispatch", *backends), "place": CHOICES["place"] if device == "cuda" else ("plain",)}
    assert {name: {getattr(case, name) for case in cases} for name in allowed} == {name: set(allowed[name]) for name in allowed}
    for name in ("x_exponent", "weight_exponent"):
        exponents = [getattr(case, name) for case in cases]
        assert (min(exponents), max(exponents)) == (-30, 30)
    assert {case.add for case in cases} == set(draw.ADD_VALUES) and {case.scale for case in cases} == set(draw.SCALES)
    assert any(case.x[0] == 0 for case in cases) and any(not case.bias for case in cases)


def test_a_seed_draws_the_same_cases(seed, monkeypatch):
    drawn = []
    for _ in range(2):
        cases = []
        monkeypatch.setattr(search, "run_case", lambda case, cases=cases: cases.append(case) or "cpu")
        search.Search(1, seed, "cpu", None, most_cases=30).run()
        drawn.append(cases)
    assert drawn[0] == drawn[1] and len(set(drawn[0])) > 10


def test_a_wrong_backend_is_found_and_the_line_reproduces_it(seed, monkeypatch, capsys):
    with monkeypatch.context() as patched:
        plain = dispatch.BACKENDS["cpu"].run
        patched.setattr(dispatch.BACKENDS["cpu"], "run", lambda *arguments: plain(*arguments) + 1e-3)
        assert main(["--minutes", "0.5", "--seed", str(seed), "--device", "cpu", "--backend", "cpu"]) == 1
        printed = capsys.readouterr()
        text = case_of(printed.out)
        counts_of(printed.out, 1, seed)
        assert "values wrong" in printed.err
        assert math.prod(parse_case(text).x) <= 8 and len(text) < 200  # shrunk
        assert main(["--case", text]) == 1
        assert case_of(capsys.readouterr().out) == text
    assert main(["--case", text]) == 0
    assert capsys.readouterr().out.startswith("right: ")


ONE = "x=(2,5,4,6) out=3 kernel=(3,3) stride=(2,2) padding=(1,1) extra=(1,1) gradient=xwb seed=7"


def faults():
    """Changes of a backend's result, each of which must be found in ``ONE``, where y is [2, 3, 8, 12] and within [-2, 2]."""

    def one_value(y, x):
        y[1, 2, 7, 11] += 1e-5

    def all_of_them_a_little(y, x):
        y *= 1 + 3e-6

    def a_nan(y, x):
        y[0, 0, 0, 0] = float("nan")

    def an_argument(y, x):
        x[0, 0, 0, 0] += 1

    def a_negative_zero(y, x):
        x[0] = -x[0]
        x[0] = -x[0] * (1 + 2**-23)

    return [value for value in locals().values()]


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.__name__)
def test_faults_are_found(fault, monkeypatch, capsys):
    plain = dispatch.BACKENDS["cpu"].run

    def run(x, *others):
        y = plain(x, *others)
        fault(y, x.detach())
        return y

    assert main(["--case", ONE]) == 0
    monkeypatch.setattr(dispatch.BACKENDS["cpu"], "run", run)
    assert main(["--case", ONE]) == 1


@pytest.mark.parametrize(("precision", "permitted"), [("tf32", True), ("fp32", False)])
def test_where_tf32_is_permitted_the_tiled_kernel_is_held_to_fp32(precision, permitted):
    rules = {name: Rules.of(Case(device="cuda", precision=precision), name) for name in ("hopper", "tiled", "composite")}
    assert {name for name, rule in rules.items() if rule.tf32} == ({"hopper", "composite"} if permitted else set())
    assert all(bool(rule.gradients_tf32) == permitted for rule in rules.values())


@pytest.mark.parametrize("gradient", ["x", "w", "b"])
def test_a_wrong_gradient_is_found(gradient, monkeypatch, capsys):
    plain, place = torch.ops.aten.convolution_backward, "xwb".index(gradient)

    def wrong(g, *others):
        found = list(plain(g, *others))
        if g.dtype == torch.float32:  # not the fuzzer's own
            found[place].view(-1)[1] *= 1 + 1e-3
        return found

    monkeypatch.setattr(torch.ops.aten, "convolution_backward", wrong)
    assert main(["--case", ONE]) == 1
    assert f"gradient of {gradient}" in capsys.readouterr().err
    assert main(["--case", ONE.replace("gradient=xwb", "")]) == 0


def test_a_call_that_raises_is_a_failure(monkeypatch, capsys):
    def run(*arguments):
        raise IndexError("out of it")

    monkeypatch.setattr(dispatch.BACKENDS["reference"], "run", run)
    assert main(["--case", f"{ONE.replace('gradient=xwb', '')} backend=reference"]) == 1
    assert "IndexError: out of it" in capsys.readouterr().err


def test_a_declined_call(capsys):
    assert main(["--case", "backend=tiled"]) == 0
    assert "declined" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "",
        ONE,
        "x=(0,2,3,4) dtype=bfloat16 add=-1e+38",
        "layout=expanded x_mix=axis2 x_special=minus_inf backend=cpu form=unbatched",
    ],
)
def test_a_case_is_what_it_prints(text):
    case = parse_case(text)
    assert parse_case(str(case)) == case
    assert set(str(case).split()) == set(text.split())


def test_no_default_is_printed():
    assert str(Case()) == ""


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--minutes", "0"], "--minutes must be positive"),
        (["--minutes", "nan"], "--minutes must be positive"),
        (["--minutes", "soon"], "--minutes: invalid float value"),
        (["--cases", "0"], "--cases must be positive"),
        (["--device", "tpu"], "--device: invalid choice"),
        (["--backend", "fastest"], "--backend: invalid choice"),
        (["--device", "cpu", "--backend", "tiled"], "--backend tiled serves no call on cpu"),
        (["--case", "y=1"], "--case: 'y' is none of x, out"),
        (["--case", "out"], "--case: 'out' has no value that can be read"),
        (["--case", "out=f(x)"], "--case: 'out=f(x)' has no value that can be read"),
        (["--case", "out=0"], "--case: x and out must be positive"),
        (["--case", "out=1.5"], "--case: out must be of type int"),
        (["--case", "x=(1,2,3)"], "--case: x must be 4 ints"),
        (["--case", "layout=odd"], "--case: layout must be one of"),
        (["--case", "extra=(1,1)"], "--case: output_padding must be smaller than stride"),
        (["--case", "kernel=(1,1) padding=(1,1)"], "--case: the output must have at least one row"),
        (["--case", "x=(2,1,1,1) form=unbatched"], "--case: x must have a batch of 1"),
        (["--case", "dtype=float16 gradient=x"], "--case: gradients are checked in float32 and float64"),
        (["--case", "bias=False gradient=b"], "--case: there is no bias"),
        (["--case", "device=tpu"], "--case: device must be one of"),
    ],
    ids=str,
)
def test_bad_arguments(argv, words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_without_hypothesis(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(SystemExit):
        main(["--device", "cpu"])
    assert "hypothesis is missing, of the extra test" in capsys.readouterr().err


def test_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(["--device", "cuda"])
    assert "there is no CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_short_run_on_a_gpu_finds_nothing(seed, capsys):
    status = main(["--minutes", "0.5", "--seed", str(seed), "--device", "cuda"])
    printed = capsys.readouterr()
    assert status == 0, printed


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["plain", "stream", "graph"])
@pytest.mark.parametrize("backend", ["tiled", "composite", "reference"])
def test_every_place_on_a_gpu(backend, place, capsys):
    assert main(["--case", f"{ONE} device=cuda backend={backend} place={place}"]) == 0, capsys.readouterr().err
