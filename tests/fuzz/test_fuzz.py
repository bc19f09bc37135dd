"""The fuzzer: finds nothing where nothing is wrong, finds what is, and names it so that it can be run again."""

import math
import re
import shlex
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

from numba_impl import dispatch, gpu
from numba_impl.backends.composite import channel_sum
from numba_impl.backends.tiled import backend as tiled
from numba_impl.backends.tiled.tile import Tile
from numba_impl.oracle import to_tf32
from tests.cuda.intrinsics import NUMPY_WARNS
from tests.fuzz import __main__ as program
from tests.fuzz import strategies
from tests.fuzz.__main__ import Soak, main
from tests.fuzz.call import CHOICES, Call
from tests.fuzz.check import NAMES, REACH
from tests.fuzz.strategies import ADD_VALUES, EXPONENTS, SCALES, calls

START = "python -m tests.fuzz --case "
ONE = "x=(2,5,4,6) out_channels=3 kernel_size=(3,3) stride=(2,2) padding=(1,1) output_padding=(1,1) gradient=xwb seed=7"
PLAIN = ONE.replace(" gradient=xwb", "")


def case_of(output):
    """Of the line that repeats a failure."""
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


def patch_plans(patch, name, change, **fields):
    """From now on a backend's plans run ``change(run)``, and have these fields."""
    backend = dispatch.BACKENDS[name]

    def plan(problem):
        made = backend.plan(problem)
        return replace(made, run=change(made.run), **fields)

    patch.setitem(dispatch.BACKENDS, name, replace(backend, plan=plan))
    dispatch.forget()


def test_a_short_run_finds_nothing(seed, capsys):
    status = main(["--minutes", "0.5", "--cases", "50", "--seed", str(seed), "--device", "cpu"])
    printed = capsys.readouterr()
    assert status == 0, printed
    cases, served, kinds = counts_of(printed.out, 0, seed)
    assert cases <= 50 and "cpu" in served and "module" in kinds


@st.composite
def small_layers(draw, kind, device):
    """Few taps and channels, so that the simulator soon computes it."""
    axes = [(draw(st.integers(1, 3)), draw(st.integers(1, 2))) for _ in range(2)]
    numbers = [(kernel, stride, draw(st.integers(0, kernel)), draw(st.integers(0, stride - 1))) for kernel, stride in axes]
    geometry = dict(zip(("kernel_size", "stride", "padding", "output_padding"), zip(*numbers)))
    return kind, geometry, (draw(st.integers(1, 3)), draw(st.integers(1, 5)))


@pytest.mark.simulator
@pytest.mark.filterwarnings(NUMPY_WARNS)
@pytest.mark.usefixtures("torch_rounds_once")
@pytest.mark.parametrize("backend", ["tiled", "composite"])
def test_a_short_run_in_the_simulator(backend, seed, monkeypatch, capsys):
    """The kernels behind the layer, forward and backward, as if the CPU were a GPU that runs them."""
    monkeypatch.setattr(gpu, "why_no_kernels", lambda device: "")
    monkeypatch.setattr(tiled, "tile_for", lambda problem: Tile(4, 2, 4, channel_groups=2, row_groups=1, col_groups=2, depth=2))
    for name, value in {"THREADS": 8, "PIECE": 128, "BLOCKS": 1, "build": channel_sum.build.__wrapped__}.items():
        monkeypatch.setattr(channel_sum, name, value)
    monkeypatch.setitem(REACH, "cpu", {name: REACH["cuda"][name] for name in ("tiled", "composite", "reference")})
    monkeypatch.setattr(strategies, "of_any_kind", lambda device, backend: small_layers("any", device))
    monkeypatch.setattr(strategies, "sizes", lambda *arguments, sizes=strategies.sizes: sizes(*arguments[:-1], "cuda"))
    status = main(["--minutes", "1", "--cases", "30", "--seed", str(seed), "--device", "cpu", "--backend", backend])
    printed = capsys.readouterr()
    assert status == 0, printed
    assert counts_of(printed.out, 0, seed)[1][backend] > 5


@pytest.mark.parametrize("device", REACH)
def test_everything_is_drawn(device, seed):
    places = CHOICES["place"] if device == "cuda" else ("plain",)
    options = CHOICES | {"backend": ("dispatch", *REACH[device]), "place": places, "device": (device,), "bias": (True, False)}
    options |= {"add_value": ADD_VALUES, "scale": SCALES, "x_exponent": EXPONENTS, "weight_exponent": EXPONENTS}
    wanted = {(name, value) for name, values in options.items() for value in values} | {("batch", 0), ("batch", 2)}
    soak, drawn = Soak(seed, device), []
    while wanted and len(drawn) < 10_000:
        soak.draw(calls(device), 500, drawn)
        seen = {(name, getattr(call, name)) for call in drawn[-500:] for name in options}
        wanted -= seen | {("batch", call.x[0]) for call in drawn}
    assert not wanted


def test_a_seed_draws_the_same_cases(seed, monkeypatch):
    drawn = []
    for _ in range(2):
        cases = []
        monkeypatch.setattr(program, "check", lambda call, cases=cases: cases.append(call) or "cpu")
        Soak(seed, "cpu").run(1, 30)
        drawn.append(cases)
    assert drawn[0] == drawn[1] and len(set(drawn[0])) > 10


def test_a_wrong_backend_is_found_and_the_line_repeats_it(seed, monkeypatch, capsys):
    with monkeypatch.context() as patched:
        patch_plans(patched, "cpu", after(lambda y, x: y.add_(1e-3)))
        assert main(["--minutes", "0.5", "--seed", str(seed), "--device", "cpu", "--backend", "cpu"]) == 1
        printed = capsys.readouterr()
        text = case_of(printed.out)
        counts_of(printed.out, 1, seed)
        assert "values wrong" in printed.err
        assert math.prod(Call.parse(text).x) <= 8 and len(text) < 200  # shrunk
        assert main(["--case", text]) == 1
        assert case_of(capsys.readouterr().out) == text
    dispatch.forget()
    assert main(["--case", text]) == 0
    assert capsys.readouterr().out.startswith("right: ")


def test_a_lost_context_ends_it(seed, monkeypatch, capsys):
    """Nothing is shrunk then."""
    ran = []

    def fail(*arguments):
        ran.append(arguments)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    patch_plans(monkeypatch, "cpu", lambda run: fail)
    assert main(["--minutes", "0.5", "--seed", str(seed), "--device", "cpu", "--backend", "cpu"]) == 1
    printed = capsys.readouterr()
    counts_of(printed.out, 1, seed)
    assert len(ran) == 1 and "illegal memory access" in printed.err and case_of(printed.out)


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


def after(fault):
    """Makes a run of one whose result and x are then changed in place."""

    def change(run):
        def changed(x, *others):
            y = run(x, *others)
            fault(y, x.detach())
            return y

        return changed

    return change


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.__name__)
def test_faults_are_found(fault, backend, monkeypatch):
    text = f"{ONE if backend == 'cpu' else PLAIN} backend={backend}"
    assert main(["--case", text]) == 0
    patch_plans(monkeypatch, backend, after(fault))
    assert main(["--case", text]) == 1


# Of 16 bits, and of fp32 that autocast casts.
NARROW = ["dtype=bfloat16", "dtype=float16", "autocast=bfloat16", "dtype=bfloat16 parameters=float32 autocast=float16"]


@pytest.mark.parametrize("narrow", NARROW)
def test_a_value_of_16_bits_that_is_wrong_is_found(narrow, monkeypatch, capsys):
    """By its last bits."""

    def one_value(y, x):
        y[1, 2, 7, 11] = y[1, 2, 7, 11] * (1 + 4 * torch.finfo(y.dtype).eps)

    assert main(["--case", f"{ONE} {narrow}"]) == 0
    patch_plans(monkeypatch, "cpu", after(one_value))
    assert main(["--case", f"{ONE} {narrow}"]) == 1
    assert "1 of 576 values wrong" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda y: y.float(), "a result is (torch.float32, [288, 96, 12, 1]), eager's (torch.bfloat16, [288, 96, 12, 1])"),
        (lambda y: y.to(memory_format=torch.channels_last), "a result is (torch.bfloat16, [288, 1, 36, 3])"),
    ],
    ids=["dtype", "strides"],
)
def test_a_result_that_is_laid_out_otherwise_than_eagers_is_found(change, words, monkeypatch, capsys):
    patch_plans(monkeypatch, "cpu", lambda run: lambda *arguments: change(run(*arguments)))
    assert main(["--case", f"{PLAIN} autocast=bfloat16"]) == 1
    assert words in capsys.readouterr().err


def test_an_argument_that_is_changed_is_named(monkeypatch, capsys):
    patch_plans(monkeypatch, "cpu", after(lambda y, x: x.mul_(2)))
    assert main(["--case", PLAIN]) == 1
    assert "x was changed" in capsys.readouterr().err


def test_a_result_that_shares_memory_is_found(monkeypatch, capsys):
    """Of zero weights, whose result any tensor of zeros is."""
    patch_plans(monkeypatch, "cpu", lambda run: lambda x, *others: x.detach())
    assert main(["--case", "x=(1,1,2,2) scale=0.0"]) == 1
    assert "shares memory with x" in capsys.readouterr().err


@pytest.mark.parametrize(("precision", "status"), [("tf32", 0), ("fp32", 1)])
def test_a_backend_is_held_to_the_precision_of_its_plan(precision, status, monkeypatch):
    """Whatever the call permits."""

    def in_tf32(run):
        return lambda x, weight, *others: run(to_tf32(x), to_tf32(weight), *others)

    patch_plans(monkeypatch, "cpu", in_tf32, precision=precision)
    assert main(["--case", f"{PLAIN} precision=tf32"]) == status


@pytest.mark.parametrize("gradient", ["x", "w", "b"])
def test_a_wrong_gradient_is_found(gradient, monkeypatch, capsys):
    if gradient == "b":
        patch_sums(monkeypatch)
    else:
        plain, place = torch.ops.aten.convolution_backward, "xw".index(gradient)

        def wrong(g, *others):
            found = list(plain(g, *others))
            if g.dtype == torch.float32:  # not the oracle's own
                found[place].view(-1)[1] *= 1 + 1e-3
            return found

        monkeypatch.setattr(torch.ops.aten, "convolution_backward", wrong)
    assert main(["--case", ONE]) == 1
    assert f"gradient of {NAMES[gradient]}" in capsys.readouterr().err
    assert main(["--case", PLAIN]) == 0


def patch_sums(patch):
    """The sums over channels, which are the gradient of a bias, are wrong in one value."""

    def wrong(run):
        def changed(g, *others):
            sums = run(g, *others)
            if g.dim() == 4 and sums.dim() == 1:
                sums[1] *= 1 + 1e-3
            return sums

        return changed

    patch_plans(patch, "reference", wrong)


def test_what_the_eager_chain_says_is_right(monkeypatch, capsys):
    """Also NaN where float64 has none, as torch's 16-bit convolutions give beside an infinite x on some CPUs."""
    plain = torch.nn.functional.conv_transpose2d

    def spreads(x, *others):
        z = plain(x, *others)
        return z if x.isfinite().all() else torch.full_like(z, math.nan)

    monkeypatch.setattr(torch.nn.functional, "conv_transpose2d", spreads)
    beside_infinity = "x=(1,1,2,2) stride=(2,1) dtype=float64 x_special=inf form=unbatched"
    assert main(["--case", beside_infinity]) == 0
    assert "reference" in capsys.readouterr().out
    patch_plans(monkeypatch, "reference", lambda run: lambda *arguments: run(*arguments).nan_to_num(0))
    assert main(["--case", beside_infinity]) == 1


def test_a_call_that_raises_is_a_failure(monkeypatch, capsys):
    def run(*arguments):
        raise IndexError("out of it")

    patch_plans(monkeypatch, "reference", lambda plain: run)
    assert main(["--case", f"{PLAIN} backend=reference"]) == 1
    assert "IndexError: out of it" in capsys.readouterr().err


def test_a_declined_call(capsys):
    assert main(["--case", "backend=tiled"]) == 0
    assert "declined" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "",
        ONE,
        "x=(0,2,3,4) dtype=bfloat16 add_value=-1e+38",
        "dtype=float16 parameters=float32 autocast=bfloat16 gradient=xwb",
        "layout=expanded x_mix=axis2 x_special=minus_inf backend=cpu form=unbatched",
    ],
)
def test_a_case_is_what_it_prints(text):
    case = Call.parse(text)
    assert Call.parse(str(case)) == case
    assert set(str(case).split()) == set(text.split())


def test_no_default_is_printed():
    assert str(Call()) == ""


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
        (["--case", "y=1"], "--case: Call.__init__() got an unexpected keyword argument 'y'"),
        (["--case", "bias"], "--case: bias must be like True, got ''"),
        (["--case", "out_channels=f(x)"], "--case: out_channels must be like 1, got 'f(x)'"),
        (["--case", "out_channels=0"], "--case: sizes must be positive"),
        (["--case", "out_channels=1.5"], "--case: out_channels must be like 1, got 1.5"),
        (["--case", "x=(1,2,3)"], "--case: x must be like (1, 1, 1, 1), got (1, 2, 3)"),
        (["--case", "x=(-1,2,3,3)"], "--case: sizes must be positive"),
        (["--case", "layout=odd"], "--case: layout must be one of"),
        (["--case", "output_padding=(1,1)"], "--case: output_padding must be smaller than stride"),
        (["--case", "kernel_size=(1,1) padding=(1,1)"], "--case: sizes must be positive"),
        (["--case", "x=(2,1,1,1) form=unbatched"], "--case: x must have a batch of 1"),
        (["--case", "bias=False gradient=b"], "--case: there is no bias"),
        (["--case", "device=tpu"], "--case: device must be one of"),
        (["--case", "autocast=float64"], "--case: autocast must be one of"),
        (["--case", "parameters=bfloat16"], "--case: the parameters must have the dtype of x"),
        (["--case", "dtype=float64 parameters=float32 autocast=bfloat16"], "--case: the parameters must have the dtype of x"),
    ],
    ids=str,
)
def test_bad_arguments(argv, words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


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
