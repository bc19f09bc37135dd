"""The house: which room imports from which, and how a backend and an epilogue are added."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import numba_impl
from numba_impl import arguments, conv_transpose2d_mish_add_hardtanh_scale, convolution, dispatch, functional
from numba_impl.arguments import PRECISIONS
from numba_impl.backends.base import Backend, Plan
from numba_impl.epilogue import Epilogue
from tests.cases import BACKENDS, Case

ROOT = Path(numba_impl.__file__).parent
LAYERS = re.findall(r"^    (\S+)  +\S", numba_impl.__doc__, re.MULTILINE)
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
    if path != ROOT / "__init__.py"
}


def layer(module):
    """The line of the package's docstring to which a module belongs: its own, or its folder's."""
    return max((name for name in LAYERS if f"{module}.".startswith(f"{name}.")), key=len, default=None)


def imported(path):
    """Names of the package's modules that a source imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    names = {name.removeprefix("numba_impl.") for name in found if name.startswith("numba_impl.")}
    return {name if name in MODULES else name.rpartition(".")[0] for name in names} - {""}


def test_every_module_has_a_layer():
    assert {layer(module) for module in MODULES if MODULES[module].stat().st_size} == set(LAYERS)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_flow_downwards(module):
    own = layer(module)
    for other in imported(MODULES[module]):
        below = LAYERS.index(layer(other)) > LAYERS.index(own)
        assert below or layer(other) == own, f"{module} imports {other}, which lies above it"
        backends = re.match(r"backends\.(?!base)", own or ""), re.match(r"backends\.(?!base)", layer(other))
        assert layer(other) == own or not all(backends), f"{module} imports another backend, {other}"


def test_llvmlite_stands_in_two_files():
    """What a move to another CUDA target of Numba touches."""
    importing = re.compile(r"^\s*(from|import) llvmlite", re.MULTILINE)
    using = {module for module, path in MODULES.items() if importing.search(path.read_text())}
    assert using <= {"cuda.device", "cuda.ptx.emit"}


def test_no_function_of_a_kernel_takes_any_number_of_arguments():
    """The successor of numba-cuda compiles none. Those written in Python around the compiler may."""
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.args.vararg:
                decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
                assert not decorators & {"device", "jit", "operations.jit"}, f"{module}.{node.name} takes *{node.args.vararg.arg}"


SMALL = Case((2, 8, 7, 9), 8, 3, 2, 1, 1)
SETTINGS = SMALL.stride, SMALL.padding, SMALL.output_padding


def test_a_backend_of_three_functions_serves(monkeypatch):
    """Without touching a file of the package: it says whether it can, how fast it is, and how it does it."""
    planned = []

    def plan(problem):
        planned.append(problem)
        return Plan(problem, lambda x, weight, bias, constants: torch.full(problem.output_shape, 7.0))

    mine = Backend(lambda problem: "" if problem.batch > 1 else "it is for batches", lambda problem: 1, plan)
    monkeypatch.setitem(dispatch.BACKENDS, "mine", mine)
    x, weight, bias = SMALL.draw()
    for _ in range(2):
        y = conv_transpose2d_mish_add_hardtanh_scale(x, weight, bias, *SETTINGS, add_value=0.5, scale=2)
        assert (y == 7).all() and y.shape == SMALL.output_shape
    assert len(planned) == 1
    text = dispatch.explain(functional.describe(x[:1], weight, bias, *SETTINGS, None))
    assert "mine: declined, it is for batches" in text and not text.startswith("mine")
    assert dispatch.explain(functional.describe(x, weight, bias, *SETTINGS, None)).startswith("mine: serves")


def relu():
    """An epilogue with no constant, as an entry of the table would be."""

    def build_forward(operations):
        maximum = operations.maximum

        @operations.jit
        def relu(z, constants):
            return maximum(z, ZERO)

        return relu

    def build_gradient(operations):
        @operations.jit
        def gradient(z, gy, constants):
            return gy if z > ZERO else ZERO

        return gradient

    ZERO = np.float32(0)
    forward = lambda z, constants: z.relu()  # noqa: E731
    gradient = lambda z, gy, constants: torch.where(z > 0, gy, 0)  # noqa: E731
    return Epilogue("test_relu", (), build_forward, build_gradient, forward, gradient, lambda: ())


RELU = relu()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("device", "backend"), [*BACKENDS, pytest.param("cuda", "hopper", id="cuda-hopper", marks=pytest.mark.gpu)]
)
def test_an_epilogue_is_an_entry_of_the_table(device, backend, precision, request):
    """Right forward and gradients from every backend, of an entry that the package has never seen."""
    if backend == "hopper":
        request.getfixturevalue("hopper")
    if precision == "tf32" and backend == "reference":
        pytest.skip("torch's convolution is not ours to check")
    tensors = [t.requires_grad_() for t in SMALL.draw(device)]
    exact = [t.detach().cpu().double().requires_grad_() for t in tensors]
    want = convolution.forward(*exact, SMALL.geometry).relu()
    gy = torch.randn(SMALL.output_shape, device=device)
    y = functional.fused(*tensors, *SETTINGS, RELU, (), precision, backend)
    with torch.no_grad():
        assert torch.equal(functional.fused(*tensors, *SETTINGS, RELU, (), precision, backend), y)
    tolerance = dict(rtol=1e-4, atol=1e-4) if precision == "fp32" else dict(rtol=1e-2, atol=2e-2)
    torch.testing.assert_close(y.cpu().double(), want, **tolerance)
    gy = gy * (want.detach().abs() > 0.02).to(device) + gy * (want.detach() == 0).to(
        device
    )  # not where rounding decides on the side
    got = torch.autograd.grad(y, tensors, gy)
    wanted = torch.autograd.grad(want, exact, gy.cpu().double())
    for name, g, w in zip(("x", "weight", "bias"), got, wanted, strict=True):
        scale = w.abs().max()
        torch.testing.assert_close(g.cpu().double() / scale, w / scale, **tolerance, msg=name)


def test_an_epilogues_alone():
    x = torch.randn(3, 5, 7)
    plan = dispatch.plan(arguments.activation("activate", RELU, arguments.kind("x", x), ""))
    assert plan.backend == "cpu" and torch.equal(plan(x, None), x.relu())
