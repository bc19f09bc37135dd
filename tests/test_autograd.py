"""The layer as a torch operator: torch's own checks of it, compilation, export, gradients against float64."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from benchmarks.peers import Plain
from model_numba import ModelNumba
from numba_impl import autograd, conv_transpose2d_mish_add_hardtanh_scale, convolution, dispatch
from numba_impl.epilogue import MISH_ADD_HARDTANH_SCALE as CHAIN
from numba_impl.epilogue import Constants
from numba_impl.oracle import check_layer
from tests.cases import SIZES, USUAL, VIEWS, Case, apply, eager, every_backend, every_device

LAYER, LAYER_BACKWARD, _, _ = autograd.operators(CHAIN)

# torch's compilers also call what its public modules warn of; a warning that a call of ours causes is no less an error.
compiling = pytest.mark.filterwarnings(r"default:::(torch|triton)\b")

CASES = [
    USUAL,
    Case((1, 3, 5, 4), 4, 4, 2, 1, bias=False),
    Case((3, 8, 6, 5), 8, 3, 2, 1, (0, 1)),
    Case((2, 4, 6, 5), 3, (1, 3), 1),
]
HOPPERS = Case((2, 16, 5, 7), 8, 3, 2, 1, 1)  # sizes that the Hopper kernel serves

# A gradient in any memory layout, also a sum's, which is one value.
GRADIENT_VIEWS = VIEWS | {"of a sum": lambda gy: torch.ones_like(gy[0, 0, 0, 0]).expand_as(gy)}


def arguments(case, tensors, precision="fp32", backend=None):
    geometry = case.geometry
    return *tensors, geometry.stride, geometry.padding, geometry.output_padding, None, precision, backend, *Constants(-0.5, 2.0)


def leaves(case, device, dtype=torch.float32):
    return [None if t is None else t.requires_grad_() for t in case.draw(device, dtype)]


def float64_gradients(function, tensors, gy):
    """Of ``function`` at these tensors in float64."""
    copies = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    return torch.autograd.grad(function(*copies), [t for t in copies if t is not None], gy.double())


def chain(case):
    def function(x, weight, bias):
        return CHAIN.forward(convolution.forward(x, weight, bias, case.geometry), Constants(-0.5, 2.0))

    return function


def assert_close_to_float64(got, want, tolerance=2e-3):
    """Relative to the gradient's size; a value at the clamp's edge may fall on either side of it, which few do."""
    for ours, theirs in zip(got, want, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == torch.float32
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm() + 1e-6


def check_gradients(case, device, backend, precision="fp32", tolerance=2e-3):
    tensors = leaves(case, device)
    y = apply(*tensors, case, precision=precision, backend=backend)
    check_layer(y, *tensors, case.geometry, Constants(-0.5, 2.0), precision)
    gy = torch.randn_like(y)
    got = torch.autograd.grad(y, [t for t in tensors if t is not None], gy)
    assert_close_to_float64(got, float64_gradients(chain(case), tensors, gy), tolerance)


def check_layout(view, case, device, backend):
    """The gradients from a gradient at the output of which ``view`` makes another layout, or other values."""
    tensors = leaves(case, device)
    y = apply(*tensors, case, backend=backend)
    gy = view(torch.randn_like(y))
    assert gy.shape == y.shape
    assert_close_to_float64(torch.autograd.grad(y, tensors, gy), float64_gradients(chain(case), tensors, gy))


def watch_backend(name, monkeypatch):
    """A list to which each call of the backend adds its operation."""
    calls, backend = [], dispatch.BACKENDS[name]

    def plan(problem):
        found = backend.plan(problem)

        def watched(*args):
            calls.append(problem.operation)
            return found.run(*args)

        return replace(found, run=watched)

    monkeypatch.setitem(dispatch.BACKENDS, name, replace(backend, plan=plan))
    return calls


@pytest.mark.parametrize("case", CASES, ids=str)
@every_device
def test_torchs_own_checks(case, device):
    for tensors in (case.draw(device), leaves(case, device)):
        torch.library.opcheck(LAYER, arguments(case, tensors))
    x, weight, bias = case.draw(device)
    gy = torch.randn(case.output_shape, device=device)
    wanted = [True, True, bias is not None]
    torch.library.opcheck(LAYER_BACKWARD, (gy, wanted, *arguments(case, (x, weight, bias))))


@pytest.mark.parametrize("case", CASES, ids=str)
@every_backend
def test_gradients(case, device, backend):
    check_gradients(case, device, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [HOPPERS, Case((3, 8, 6, 67), 24, 3, 2, 1, (0, 1), bias=False)], ids=str)
def test_gradients_through_the_hopper_kernel(case, hopper):
    check_gradients(case, "cuda", "hopper")


@pytest.mark.gpu
def test_tf32_gradients_through_the_hopper_kernel(hopper):
    """Of some thousand values, a few fall on the other side of the clamp's edge."""
    check_gradients(HOPPERS, "cuda", "hopper", "tf32", tolerance=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize(("flag", "later"), [("tf32", "ieee"), ("ieee", "tf32")])
def test_the_flag_at_the_forward_holds_for_the_backward(flag, later, conv_precision):
    """Also where the forward is computed in strict fp32 in any case."""
    case = Case((8, 64, 128, 128), 64, 3, 2, 1, 1)  # large enough that cuDNN uses TF32 where it may
    x, weight, bias = leaves(case, "cuda")
    gy = torch.randn(case.output_shape, device="cuda")

    def gradient(precision, flag):
        conv_precision(flag)
        y = apply(x, weight, bias, case, precision=precision, backend="tiled")
        conv_precision(later)
        return torch.autograd.grad(y, x, gy)[0]

    got, strict, tf32 = gradient(None, flag), gradient("fp32", later), gradient("tf32", later)
    want, other = (tf32, strict) if flag == "tf32" else (strict, tf32)
    assert (got - want).norm() < 0.1 * (got - other).norm()


@every_device
def test_gradients_of_the_operator_on_the_reference(device):
    """As the compiler has it where no backend serves."""
    tensors = leaves(USUAL, device)
    y = LAYER(*arguments(USUAL, tensors, backend="reference"))
    gy = torch.randn_like(y)
    assert_close_to_float64(torch.autograd.grad(y, tensors, gy), float64_gradients(chain(USUAL), tensors, gy))


def check_backward_backend(case, device, backend, monkeypatch):
    calls = watch_backend(backend, monkeypatch)
    y = apply(*leaves(case, device), case, backend=backend)
    assert calls == ["forward"]
    y.sum().backward()
    assert calls[:2] == ["forward", "pre_gradient"] and set(calls[2:]) <= {"channel_sum"}


@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "cpu"), *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in ("tiled", "composite"))],
)
def test_the_backward_is_on_the_forwards_backend(device, backend, monkeypatch):
    check_backward_backend(USUAL, device, backend, monkeypatch)


@pytest.mark.gpu
def test_the_backward_is_on_the_hopper_kernel(hopper, monkeypatch):
    check_backward_backend(HOPPERS, "cuda", "hopper", monkeypatch)


@pytest.mark.parametrize("view", GRADIENT_VIEWS.values(), ids=GRADIENT_VIEWS)
@every_backend
def test_gradients_that_arrive_in_any_layout(view, device, backend):
    check_layout(view, USUAL, device, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("view", GRADIENT_VIEWS.values(), ids=GRADIENT_VIEWS)
def test_gradients_that_arrive_in_any_layout_at_the_hopper_kernel(view, hopper):
    check_layout(view, HOPPERS, "cuda", "hopper")


@every_backend
def test_an_empty_batchs_gradients(device, backend):
    """None by x, zeros by the parameters."""
    tensors = leaves(Case((0, *USUAL.x[1:]), 5, 3, 2, 1, 1), device)
    x, weight, bias = torch.autograd.grad(apply(*tensors, USUAL, backend=backend).sum(), tensors)
    assert x.shape == (0, *USUAL.x[1:]) and weight.shape == USUAL.weight_shape and bias.shape == (5,)
    assert (weight == 0).all() and (bias == 0).all()


@every_device
def test_an_input_in_any_layout(device):
    for view in VIEWS.values():
        x, weight, bias = USUAL.draw(device)
        tensors = view(x).detach().requires_grad_(), weight.requires_grad_(), bias.requires_grad_()
        y = apply(*tensors, USUAL)
        gy = torch.randn_like(y)
        assert_close_to_float64(torch.autograd.grad(y, tensors, gy), float64_gradients(chain(USUAL), tensors, gy))


@pytest.mark.parametrize("needy", ["x", "weight", "bias", "x weight", "x bias", "weight bias"])
@every_device
def test_only_what_is_asked_for_is_computed(needy, device, monkeypatch):
    """A frozen tensor costs nothing; the bias' gradient is a sum, in which torch's convolution has no part."""
    apply(*leaves(USUAL, device), USUAL).sum().backward()  # torch imports its compiler, which takes the operators as they are
    masks = []
    plain = torch.ops.aten.convolution_backward

    def watched(*args):
        masks.append(args[-1])
        return plain(*args)

    tensors = dict(zip(("x", "weight", "bias"), USUAL.draw(device), strict=True))
    gy = torch.randn(USUAL.output_shape, device=device)
    want = dict(zip(tensors, float64_gradients(chain(USUAL), tensors.values(), gy), strict=True))
    monkeypatch.setattr(torch.ops.aten, "convolution_backward", watched)
    for name in needy.split():
        tensors[name].requires_grad_()
    apply(**tensors, case=USUAL).backward(gy)
    mask = [name in needy.split() and name != "bias" for name in tensors]
    assert masks == ([mask] if any(mask) else [])
    assert [name for name, t in tensors.items() if t.grad is not None] == needy.split()
    assert_close_to_float64([tensors[name].grad for name in needy.split()], [want[name] for name in needy.split()])


@every_device
def test_the_gradient_is_zero_at_either_bound(device):
    x, weight, bias = USUAL.draw(device)
    for shift in (-50.0, 50.0):
        b = torch.full_like(bias, shift).requires_grad_()
        apply(x, weight, b, USUAL, add_value=-2.0).sum().backward()
        assert (b.grad == 0).all()


@every_device
def test_changing_an_input_before_backward_raises(device):
    for changed in range(2):
        tensors = USUAL.draw(device)
        tensors[1].requires_grad_()
        version = tensors[0]._version
        y = apply(*tensors, USUAL)
        assert tensors[0]._version == version
        with torch.no_grad():
            tensors[changed].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@every_device
def test_gradients_whatever_is_on_meanwhile(device):
    """The backward of a result from before runs as it would without autocast and forward-mode differentiation."""
    tensors = leaves(USUAL, device)
    want = torch.autograd.grad(apply(*tensors, USUAL).sum(), tensors)
    for meanwhile in (torch.autocast(device, torch.bfloat16), torch.autograd.forward_ad.dual_level()):
        y = apply(*tensors, USUAL).sum()
        with meanwhile:
            got = torch.autograd.grad(y, tensors)
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


@every_device
def test_double_backward_is_a_clear_error(device):
    x, weight, bias = USUAL.draw(device)
    (gradient,) = torch.autograd.grad(apply(x.requires_grad_(), weight, bias, USUAL).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="scale_backward"):
        gradient.sum().backward()


@every_device
def test_a_training_run_follows_the_float64_one(device):
    torch.manual_seed(1)
    model = ModelNumba(**SIZES, add_value=-0.5, scale=2, precision="fp32").to(device)
    exact = nn.ConvTranspose2d(**SIZES).to(device).double()
    exact.load_state_dict({name.split(".")[1]: value.double() for name, value in model.state_dict().items()})
    x, target = torch.randn(4, 6, 7, 9, device=device), torch.randn(4, 5, 14, 18, device=device).clamp(-2, 0)
    steps = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, exact)]
    losses = []
    for _ in range(200):
        pair = []
        for step, function, dtype in ((steps[0], model, torch.float32), (steps[1], lambda x: eager(x, exact), torch.float64)):
            step.zero_grad()
            loss = (function(x.to(dtype)) - target.to(dtype)).square().mean()
            loss.backward()
            step.step()
            pair.append(loss.item())
        losses.append(pair)
    ours, theirs = torch.tensor(losses, dtype=torch.float64).T
    assert theirs[-1] < 0.9 * theirs[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.Conv2d(3, 6, 3, padding=1)
        self.layer = ModelNumba(**SIZES, add_value=-0.5, scale=2, precision="fp32")

    def forward(self, x):
        return self.layer(torch.relu(self.before(x))) + 1


def plain(network, x):
    return eager(torch.relu(network.before(x)), network.layer.conv_transpose) + 1


@compiling
@every_device
def test_compiled_without_a_break(device):
    torch._dynamo.reset()
    network = Network().to(device)
    compiled = torch.compile(network, fullgraph=True, dynamic=True)
    for batch in (2, 5):
        x = torch.randn(batch, 3, 7, 9, device=device)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), plain(network, x), rtol=1e-4, atol=1e-4)
        network.zero_grad()
        compiled(x).square().sum().backward()
        got = [p.grad.clone() for p in network.parameters()]
        network.zero_grad()
        plain(network, x).square().sum().backward()
        for ours, theirs in zip(got, (p.grad for p in network.parameters()), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@compiling
@every_device
def test_export(device):
    network = Network().to(device)
    x = torch.randn(4, 3, 7, 9, device=device)
    batch = torch.export.Dim("batch", min=2)
    exported = torch.export.export(network, (x,), dynamic_shapes=({0: batch},))
    assert "numba_impl.conv_transpose2d_mish_add_hardtanh_scale" in exported.graph_module.code
    for size in (4, 7):
        x = torch.randn(size, 3, 7, 9, device=device)
        with torch.no_grad():
            torch.testing.assert_close(exported.module()(x), plain(network, x), rtol=1e-4, atol=1e-4)


WRONG = {
    "channels": ({"x": torch.randn(2, 7, 7, 9)}, "x must have 6 channels"),
    "dtype": ({"weight": torch.randn(USUAL.weight_shape, dtype=torch.float64)}, "weight must have x's dtype torch.float32"),
    "dimensions": ({"x": torch.randn(7, 9)}, "x must be 4-D"),
    "bias": ({"bias": torch.randn(4)}, r"bias must have shape \(5,\)"),
    "three": ({"stride": (1, 2, 3)}, "stride must be an int or a pair"),
    "zero": ({"stride": 0}, "stride must be at least 1"),
    "output padding": ({"output_padding": 2}, "output_padding must be smaller than stride"),
    "constant": ({"scale": "2"}, "scale"),
    "precision": ({"precision": "bf16"}, "precision must be None or one of"),
    "backend": ({"backend": "none"}, "backend must be None or one of"),
}


def compiled_function():
    """The compiled function, and arguments that it takes: ints where pairs are meant, too."""
    torch._dynamo.reset()
    named = dict(zip(("x", "weight", "bias"), USUAL.draw(), strict=True))
    numbers = {"stride": 2, "padding": 1, "output_padding": 1, "add_value": 1, "scale": 2}
    compiled = torch.compile(conv_transpose2d_mish_add_hardtanh_scale, fullgraph=True, backend="aot_eager")
    return compiled, named | numbers


@compiling
@pytest.mark.parametrize(("change", "words"), WRONG.values(), ids=WRONG)
def test_compiled_with_a_wrong_argument(change, words):
    compiled, arguments = compiled_function()
    with pytest.raises(Exception, match=words):
        compiled(**arguments | change)


@compiling
@pytest.mark.parametrize("name", ["stride", "padding", "output_padding", "add_value", "scale"])
def test_compiled_with_a_number_that_changes(name):
    """The compiler takes one that did to be a symbol."""
    compiled, arguments = compiled_function()
    for value in (2, 3, 4):
        changed = arguments | {"stride": 5} | {name: value}
        torch.testing.assert_close(compiled(**changed), conv_transpose2d_mish_add_hardtanh_scale(**changed))


@compiling
def test_compiled_code_guards_no_more_than_eagers():
    """Each call looks at all that tracing looked at, so that our own checks are the operator's."""
    guards = []
    for layer in (ModelNumba(**SIZES, add_value=-0.5, scale=2), Plain(nn.ConvTranspose2d(**SIZES), Constants(-0.5, 2.0))):
        torch._dynamo.reset()
        torch.compile(layer, backend="aot_eager")(torch.randn(USUAL.x))
        (entry,) = _debug_get_cache_entry_list(type(layer).forward.__code__)
        guards.append(str(entry.guard_manager).count("+- "))
    ours, eagers = guards
    assert ours <= eagers


@compiling
@every_device
def test_compiled_in_other_dtypes_and_under_autocast(device):
    torch._dynamo.reset()
    model = ModelNumba(**SIZES, add_value=-0.5, scale=2).to(device).double()
    x = torch.randn(2, 6, 7, 9, device=device, dtype=torch.float64)
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), eager(x, model.conv_transpose))
    model, x = model.float(), x.float()
    with torch.autocast(device, torch.bfloat16), torch.no_grad():
        assert torch.compile(model, fullgraph=True)(x).dtype == torch.bfloat16
