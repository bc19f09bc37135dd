"""What a user may do to a module or a tensor in plain PyTorch works here as there: eager is the measure."""

import io
import itertools
import threading
import timeit

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.utils.flop_counter import FlopCounterMode

import numba_impl
from model_numba import ModelNumba
from numba_impl import autograd, convolution, dispatch, mish_add_hardtanh_scale
from numba_impl.epilogue import MISH_ADD_HARDTANH_SCALE as CHAIN
from tests.cases import every_device
from tests.test_autograd import compiling

pytestmark = compiling


CONSTANTS = 0.5, 2.0, -1.0, 1.0
OPERATORS = autograd.operators(CHAIN)


@pytest.fixture(params=["fp32", None], ids=["fp32", "flags"])
def precision(request, conv_precision):
    """Both ways to strict fp32, so that eager on a GPU computes in it, too."""
    conv_precision("ieee")
    return request.param


def layer(device, precision="fp32"):
    return ModelNumba(16, 8, 3, 2, 1, 1, 0.5, 2.0, precision=precision).to(device), torch.randn(2, 16, 9, 12, device=device)


def eager(model, x):
    return F.hardtanh(F.mish(model.conv_transpose(x)) + model.add_value, -1, 1) * model.scale


def same(got, want, tolerance=1e-4):
    """Type, dtype, shape, strides, device; and values, within roundings."""
    assert type(got) is type(want)
    facts = [(t.dtype, t.shape, t.stride(), t.device, t.requires_grad) for t in (got, want)]
    assert facts[0] == facts[1]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def same_with_and_without_gradients(model, x):
    with torch.no_grad():
        same(model(x), eager(model, x))
    inputs = [p for p in (x.detach().requires_grad_(), *model.parameters()) if p.requires_grad]
    got, want = (torch.autograd.grad(f(inputs[0]).square().sum(), inputs) for f in (model, lambda x: eager(model, x)))
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


# 1. Global defaults.


@every_device
def test_another_default_dtype(device, precision):
    model, x = layer(device, precision)
    torch.set_default_dtype(torch.float64)
    try:
        same_with_and_without_gradients(model, x)
        same(mish_add_hardtanh_scale(x, *CONSTANTS), CHAIN.forward(x, CONSTANTS))
    finally:
        torch.set_default_dtype(torch.float32)


@every_device
def test_another_default_dtype_compiled(device, precision):
    model, x = layer(device, precision)
    torch._dynamo.reset()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            same(torch.compile(lambda x: model(x) * 2 + 1)(x), eager(model, x) * 2 + 1)
    finally:
        torch.set_default_dtype(torch.float32)


@every_device
def test_another_default_device(device, precision):
    model, x = layer(device, precision)
    with torch.device("meta"):
        same_with_and_without_gradients(model, x)
    torch.set_default_device("meta")
    try:
        same_with_and_without_gradients(model, x)
        same(mish_add_hardtanh_scale(x, *CONSTANTS), CHAIN.forward(x, CONSTANTS))
    finally:
        torch.set_default_device(None)


# 2. The inner convolution.


class Doubled(nn.ConvTranspose2d):
    def forward(self, x):
        return 2 * super().forward(x)


def replaced(model):
    model.conv_transpose = nn.ConvTranspose2d(16, 8, 3, 2, 1, 1, groups=2, bias=False)


def of_another_class(model):
    model.conv_transpose = Doubled(16, 8, 3, 2, 1, 1)


CHANGES = {
    "spectral_norm": lambda model: spectral_norm(model.conv_transpose).eval(),
    "weight_norm": lambda model: weight_norm(model.conv_transpose),
    "parametrized": lambda model: parametrizations.weight_norm(model.conv_transpose),
    "prune": lambda model: prune.l1_unstructured(model.conv_transpose, "weight", 0.5),
    "forward hook": lambda model: model.conv_transpose.register_forward_hook(lambda module, inputs, output: 2 * output),
    "pre-hook": lambda model: model.conv_transpose.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],)),
    "groups": replaced,
    "dilation": lambda model: setattr(model.conv_transpose, "dilation", (2, 2)),
    "a class": of_another_class,
    "a forward": lambda model: setattr(model.conv_transpose, "forward", lambda x: F.interpolate(x[:, :8], scale_factor=2)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning", "ignore:.*spectral_norm.*:FutureWarning")
@every_device
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_done_to_the_convolution_takes_effect(change, device, precision):
    model, x = layer(device, precision)
    change(model)
    model.to(device).eval()
    if list(model.parameters()) and "forward" not in vars(model.conv_transpose):
        same_with_and_without_gradients(model, x)
    with torch.no_grad():
        same(model(x), eager(model, x))
    assert "called as a module" in model.explain(x)
    model.backend = "tiled"
    with pytest.raises(ValueError, match="backend 'tiled' cannot serve this call: "):
        model(x)


@every_device
def test_backward_hooks_and_hooks_of_all_modules(device):
    model, x = layer(device)
    seen = []
    model.conv_transpose.register_full_backward_hook(lambda module, into, out: seen.append(module))
    model(x.requires_grad_()).sum().backward()
    assert seen == [model.conv_transpose]
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: seen.append(module))
    try:
        ModelNumba(16, 8, 3, 2, 1, 1, 0.5, 2.0).to(device)(x)
    finally:
        handle.remove()
    assert [type(module) for module in seen[1:]] == [nn.ConvTranspose2d, ModelNumba]


def test_the_check_of_the_convolution_takes_less_than_a_microsecond():
    """As long as a parameter looked up twice, on whatever machine: 0.53 us where that takes 1.0."""
    from model_numba import why_called

    conv = nn.ConvTranspose2d(16, 8, 3, 2, 1, 1)
    check, look_up = (timeit.Timer(function) for function in (lambda: why_called(conv), lambda: (conv.weight, conv.weight)))
    assert min(check.repeat(50, 100)) < min(look_up.repeat(50, 100))


# 3. Tracers, modes and subclasses.


@every_device
def test_make_fx_records_the_operator(device, precision):
    model, x = layer(device, precision)
    with torch.no_grad():
        traced, other = make_fx(model)(x), torch.randn_like(x)
        same(traced(other), model(other))
    assert OPERATORS.layer._opoverload in [node.target for node in traced.graph.nodes]


@every_device
def test_fake_tensors(device):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    model, x = layer(device)
    for grad in (False, True):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.set_grad_enabled(grad):
            y = model(mode.from_tensor(x))
            assert isinstance(y, FakeTensor) and y.shape == (2, 8, 18, 24) and y.device.type == device
            assert isinstance(mish_add_hardtanh_scale(y.detach(), *CONSTANTS), FakeTensor)


class Named(torch.Tensor):
    """A subclass with torch's own protocol."""


class Wrapped(torch.Tensor):
    """A subclass that sees every operation of torch."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device, requires_grad=inner.requires_grad
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = torch.utils._pytree.tree_map(lambda a: a.inner if isinstance(a, Wrapped) else a, (args, kwargs or {}))
        return torch.utils._pytree.tree_map_only(torch.Tensor, Wrapped, function(*args, **kwargs))


@every_device
def test_subclasses(device, precision):
    model, x = layer(device, precision)
    named = x.as_subclass(Named)
    same_with_and_without_gradients(model, named)
    with torch.no_grad():
        same(mish_add_hardtanh_scale(named, *CONSTANTS), CHAIN.forward(named, CONSTANTS))
        y = model(Wrapped(x))
        assert type(y) is Wrapped
        same(y.inner, model(x))


@every_device
def test_operations_are_counted(device):
    model, x = layer(device)

    def count(function):
        with FlopCounterMode(display=False) as counter:
            function()
        return counter.get_total_flops()

    with torch.no_grad():
        assert count(lambda: model(x)) == count(lambda: eager(model, x)) > 0
    for needs in (True, False):
        x.requires_grad_(needs)
        assert count(lambda: model(x).sum().backward()) == count(lambda: eager(model, x).sum().backward()) > 0


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@every_device
def test_batches_of_calls_and_of_gradients(device, precision):
    model, x = layer(device, precision)
    several = torch.stack([x, x + 1, 2 * x])
    torch.testing.assert_close(torch.func.vmap(model)(several), torch.stack([*map(model, several)]), rtol=1e-4, atol=1e-4)
    inputs = [x.requires_grad_(), *model.parameters()]
    results = []
    gy = torch.randn(3, 2, 8, 18, 24, device=device)
    for function in (model, lambda x: eager(model, x)):
        results.append(torch.autograd.grad(function(x), inputs, gy, is_grads_batched=True))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    small = torch.randn(1, 16, 2, 2, device=device)
    got, want = (torch.autograd.functional.jacobian(f, small, vectorize=True) for f in (model, lambda x: eager(model, x)))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@every_device
def test_the_operators_batching_rules(device):
    x, gy = torch.randn(3, 4, 5, device=device), torch.randn(3, 4, 5, device=device)
    want = torch.stack([OPERATORS.activation(part, *CONSTANTS) for part in x])
    torch.testing.assert_close(torch.func.vmap(lambda x: OPERATORS.activation(x, *CONSTANTS))(x), want)
    got = torch.func.vmap(lambda gy, x: OPERATORS.activation_backward(gy, [True], x, *CONSTANTS), (0, None))(gy, x[0])
    torch.testing.assert_close(got, torch.stack([OPERATORS.activation_backward(g, [True], x[0], *CONSTANTS) for g in gy]))
    model, x = layer(device)
    conv, several = model.conv_transpose, torch.stack([x, 2 * x])
    settings = (2, 2), (1, 1), (1, 1), None, None, None, *CONSTANTS
    got = torch.func.vmap(lambda x: OPERATORS.layer(x, conv.weight.detach(), conv.bias.detach(), *settings))(several)
    with torch.no_grad():
        torch.testing.assert_close(got, torch.stack([*map(model, several)]))


# 4. Transforms inside compiled code.


@every_device
def test_transforms_inside_compiled_code(device, precision):
    model, x = layer(device, precision)
    v = torch.randn_like(x)
    transforms = {
        "jvp": lambda f: lambda x, v: torch.func.jvp(f, (x,), (v,))[1],
        "grad": lambda f: lambda x, v: torch.func.grad(lambda x: f(x).square().sum())(x),
        "vjp": lambda f: lambda x, v: torch.func.vjp(f, x)[1](f(v))[0],
        "vmap": lambda f: lambda x, v: torch.func.vmap(f)(torch.stack([x, v])),
    }
    for name, transform in transforms.items():
        torch._dynamo.reset()
        got, want = torch.compile(transform(model), backend="aot_eager")(x, v), transform(lambda x: eager(model, x))(x, v)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


# 5. The precision flag.

FLAGS = [("generic", "all"), ("cuda", "all"), ("cuda", "conv")]


@pytest.fixture
def flags():
    """Sets the flags, from the most general to that of convolutions; "none" inherits. They are as before afterwards."""
    before = [torch._C._get_fp32_precision_getter(*flag) for flag in FLAGS]

    def set_flags(*values):
        for flag, value in zip(FLAGS, values, strict=True):
            torch._C._set_fp32_precision_setter(*flag, value)

    yield set_flags
    set_flags(*before)


def read():
    return [torch._C._get_fp32_precision_getter(*flag) for flag in FLAGS]


@pytest.mark.parametrize("values", list(itertools.product(["none", "ieee", "tf32"], repeat=3)), ids="-".join)
def test_a_flag_that_is_inherited_stays_so(values, flags):
    """Each flag before and after, and what it would be if another were set, is what it would be without the call."""
    others = list(itertools.product([None, "ieee", "tf32"], repeat=2))

    def consequences():
        found = [read()]
        for generic, cuda in others:
            for flag, value in zip(FLAGS, (generic, cuda)):
                if value:
                    torch._C._set_fp32_precision_setter(*flag, value)
            found.append(read())
        return found

    flags(*values)
    want = consequences()
    flags(*values)
    for precision in ("fp32", "tf32"):
        with convolution.in_precision(precision, torch.device("cuda")):
            assert (read()[-1] == "tf32") == (precision == "tf32")
    assert consequences() == want


def test_threads_of_different_precisions(flags):
    """Each computes in its own, and the flag is afterwards what it was."""
    flags("none", "none", "tf32")
    wrong = []

    def work(precision):
        for _ in range(300):
            with convolution.in_precision(precision, torch.device("cuda")):
                if (read()[-1] == "tf32") != (precision == "tf32"):
                    wrong.append(precision)

    threads = [threading.Thread(target=work, args=(precision,)) for precision in ("fp32", "tf32", "fp32")]
    for thread in threads:
        thread.start()
    for _ in range(300):
        if not convolution.permits_tf32():
            wrong.append("what is read meanwhile")
    for thread in threads:
        thread.join()
    assert not wrong and read() == ["none", "none", "tf32"]


def test_without_cudnn_tf32_is_not_permitted(flags):
    flags("none", "none", "tf32")
    assert convolution.permits_tf32()
    with torch.backends.cudnn.flags(enabled=False, allow_tf32=True):
        assert not convolution.permits_tf32()


# 6. Threads of the CPU.


@pytest.mark.parametrize("torchs", [1, 2, 3])
@pytest.mark.parametrize("numbas", [1, 2])
def test_numbers_of_threads_are_left_alone(torchs, numbas):
    import numba

    before = torch.get_num_threads(), numba.get_num_threads()
    model, x = layer("cpu")
    try:
        torch.set_num_threads(torchs)
        numba.set_num_threads(min(numbas, numba.config.NUMBA_NUM_THREADS))
        counts = torch.get_num_threads(), numba.get_num_threads()
        with torch.no_grad():
            model(x)
            assert (torch.get_num_threads(), numba.get_num_threads()) == counts
        model(x).sum().backward()
        assert (torch.get_num_threads(), numba.get_num_threads()) == counts
        found = []

        def other():
            mine = torch.get_num_threads(), numba.get_num_threads()
            model(x).sum().backward()
            found.append((torch.get_num_threads(), numba.get_num_threads()) == mine)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert found == [True]
    finally:
        torch.set_num_threads(before[0])
        numba.set_num_threads(before[1])


# 7. Numba's own failures: tests/backends/test_cpu.py and tests/test_faults.py.
# 8. TorchScript and FX.


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@every_device
def test_torchscript_traces_the_eager_chain(device, precision):
    """And so a saved module needs nothing of this package."""
    model, x = layer(device, precision)
    traced, file = torch.jit.trace(model, (x,)), io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded, other = torch.jit.load(file), torch.randn(3, 16, 5, 4, device=device)
    assert "numba_impl::" not in str(traced.inlined_graph)
    for module in (traced, loaded):
        torch.testing.assert_close(module(other), eager(model, other), rtol=1e-4, atol=1e-4)


@every_device
def test_fx_traces_one_call(device, precision):
    model, x = layer(device, precision)
    for traced in (torch.fx.symbolic_trace(nn.Sequential(model)), torch.fx.symbolic_trace(model)):
        same(traced(x).detach(), eager(model, x).detach())


# 9. Constants and the activation.


@pytest.mark.parametrize("constants", [(np.float32(0.5), 2), (np.float64(-0.5), np.int64(2)), (np.int32(1), np.float16(2))])
def test_numpys_numbers(constants):
    torch._dynamo.reset()
    model, x = ModelNumba(16, 8, 3, 2, 1, 1, *constants), torch.randn(2, 16, 9, 12)
    with torch.no_grad():
        for function in (model, torch.compile(model, fullgraph=True)):
            same(function(x), eager(model, x))


@every_device
@pytest.mark.parametrize("inplace", [False, True])
def test_the_activation_compiled_and_exported(inplace, device):
    class Activation(nn.Module):
        def forward(self, x):
            return mish_add_hardtanh_scale(x * 1, *CONSTANTS, inplace=inplace)

    torch._dynamo.reset()
    x = torch.randn(3, 4, 5, device=device, requires_grad=True)
    gy = torch.randn_like(x)
    want = CHAIN.forward(x, CONSTANTS)
    (slope,) = torch.autograd.grad(want, x, gy)
    exported = torch.export.export(Activation(), (x.detach(),)).module()
    torch.testing.assert_close(exported(x.detach()), want.detach())
    for function in (Activation(), torch.compile(Activation(), fullgraph=True)):
        y = function(x)
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(torch.autograd.grad(y, x, gy)[0], slope, rtol=1e-4, atol=1e-5)


@every_device
def test_the_activation_in_place_in_training(device):
    x = torch.randn(3, 4, 5, device=device, requires_grad=True)
    z = x * 1
    y = mish_add_hardtanh_scale(z, *CONSTANTS, inplace=True)
    assert y is z
    got, want = (torch.autograd.grad(t.sum(), x)[0] for t in (y, CHAIN.forward(x * 1, CONSTANTS)))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        mish_add_hardtanh_scale(x, *CONSTANTS, inplace=True)


@every_device
def test_torchs_own_checks_of_the_activation(device):
    for x in (torch.randn(3, 4, 5, device=device), torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last)):
        torch.library.opcheck(OPERATORS.activation, (x, *CONSTANTS))
        torch.library.opcheck(OPERATORS.activation, (x.clone().requires_grad_(), *CONSTANTS))
        torch.library.opcheck(OPERATORS.activation_backward, (torch.randn_like(x), [True], x, *CONSTANTS))


# 10. Deployment.


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [False, True])
@every_device
def test_onnx(dynamo, device, tmp_path):
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, x = layer(device)
    path = str(tmp_path / "layer.onnx")
    torch.onnx.export(model.eval(), (x,), path, dynamo=dynamo)
    assert {node.domain for node in onnx.load(path).graph.node} <= {"", "ai.onnx"}
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: x.cpu().numpy()})
    torch.testing.assert_close(torch.from_numpy(y), eager(model, x).detach().cpu(), rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own, when it copies a program
@every_device
def test_an_exported_program_in_torchs_operators(device):
    model, x = layer(device)
    program = torch.export.export(model, (x,)).run_decompositions(numba_impl.decompositions())
    assert all(getattr(node.target, "namespace", "aten") == "aten" for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(x), eager(model, x), rtol=1e-4, atol=1e-4)


@every_device
def test_the_plain_layer(device, precision):
    model, x = layer(device, precision)
    plain = model.plain()
    same(plain(x), eager(model, x))
    assert plain.state_dict().keys() == model.state_dict().keys()
    assert plain.conv_transpose is model.conv_transpose
    assert not dispatch._out_of_service
