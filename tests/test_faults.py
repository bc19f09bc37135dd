"""A kernel that does not compile or load: the next backend serves, one warning says why, and a forced backend raises."""

import warnings

import pytest
import torch

from model_numba import ModelNumba
from numba_impl import dispatch, mish_add_hardtanh_scale, reference
from numba_impl.errors import KernelError
from numba_impl.problem import Constants
from tests.accuracy import check_epilogue, check_layer
from tests.cases import OPEN, USUAL, apply, every_device

CONSTANTS = Constants(-0.5, 2.0)
FAULT = "the kernel cannot be compiled: unsupported PTX version"
FIRST = {"cpu": "cpu", "cuda": "tiled"}  # the backend that serves USUAL


def refuse(*args, **kwargs):
    raise KernelError(FAULT)


def broken(monkeypatch, *names, at_once=True):
    """Backends whose kernels do not compile: when a plan is made, or when it is first used."""
    plain, fails = dispatch.runner, refuse if at_once else lambda *args: refuse
    monkeypatch.setattr(dispatch, "runner", lambda name, *args: (fails if name in names else plain)(name, *args))
    dispatch.plan.cache_clear()
    for name in names:
        monkeypatch.setattr(dispatch.BACKENDS[name], "activate", refuse, raising=False)


@every_device
@pytest.mark.parametrize("at_once", [True, False])
def test_the_next_backend_serves_and_one_warning_says_why(at_once, device, monkeypatch):
    broken(monkeypatch, FIRST[device], at_once=at_once)
    tensors = USUAL.draw(device)
    with pytest.warns(RuntimeWarning, match=rf"'{FIRST[device]}' is out of service .*{FAULT}.*numba_impl doctor") as caught:
        check_layer(apply(*tensors, USUAL), *tensors, USUAL.geometry, CONSTANTS)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_layer(apply(*tensors, USUAL), *tensors, USUAL.geometry, CONSTANTS)


@every_device
def test_the_eager_chain_serves_where_no_kernel_does(device, monkeypatch):
    names = "hopper", "tiled", "composite", "cpu"
    broken(monkeypatch, *names)
    model = ModelNumba(6, 5, 3, 2, 1, 1, -0.5, 2, precision="fp32").to(device)
    x = torch.randn(2, 6, 7, 9, device=device)
    conv = model.conv_transpose
    with pytest.warns(RuntimeWarning, match="out of service"), torch.no_grad():
        check_layer(model(x), x, conv.weight, conv.bias, USUAL.geometry, CONSTANTS)
    served, *declined = model.explain(x).splitlines()
    assert served.startswith("reference") and any(FAULT in line for line in declined)


@every_device
@pytest.mark.parametrize("at_once", [True, False])
def test_a_forced_backend_raises(at_once, device, monkeypatch):
    broken(monkeypatch, FIRST[device], at_once=at_once)
    with pytest.raises(KernelError, match=FAULT):
        apply(*USUAL.draw(device), USUAL, backend=FIRST[device])


@every_device
def test_training_goes_on(device, monkeypatch):
    """A backward's kernel fails after the forward's compiled."""
    tensors = [t.requires_grad_() for t in USUAL.draw(device)]
    want = torch.autograd.grad(apply(*tensors, USUAL).sum(), tensors)
    y = apply(*tensors, USUAL)
    broken(monkeypatch, "hopper", "tiled", "composite", "cpu")
    with pytest.warns(RuntimeWarning, match="out of service"):
        got = torch.autograd.grad(y.sum(), tensors)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("inplace", [False, True])
@every_device
def test_the_epilogue_alone(inplace, device, monkeypatch):
    broken(monkeypatch, "composite", "cpu")
    x = torch.randn(37, device=device)
    given = x.clone()
    with pytest.warns(RuntimeWarning, match="out of service"):
        y = mish_add_hardtanh_scale(given, OPEN.add_value, OPEN.scale, OPEN.min_val, OPEN.max_val, inplace)
    assert (y is given) == inplace
    check_epilogue(y, x, OPEN)


@pytest.mark.parametrize(
    ("words", "kind"),
    [("CUDA_ERROR_UNSUPPORTED_PTX_VERSION", KernelError), ("CUDA_ERROR_OUT_OF_MEMORY", torch.OutOfMemoryError)],
)
def test_memory_that_lacks_is_torchs_error(words, kind, monkeypatch):
    """Its backend stays in service: there may be memory for the next call."""
    from numba_impl import launch

    def fail(**options):
        raise RuntimeError(words)

    monkeypatch.setattr(launch.cuda, "jit", fail)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kernel = launch.Kernel(lambda: None, None, threads=32, blocks=1)
    with pytest.raises(kind, match=f"cannot be compiled or loaded on cuda:0: {words}"):
        kernel._load(0)


@pytest.mark.gpu
def test_a_compiler_that_fails(monkeypatch):
    """As without NVVM, or with a driver older than the PTX: every kernel's first launch."""
    from numba_impl import launch
    from numba_impl.kernels import channel_sum, pointwise, pointwise_backward, tiled

    builders = [tiled.plan, tiled.build, pointwise.build, pointwise_backward.build, channel_sum.build]
    for builder in builders:
        builder.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(launch.cuda, "jit", refuse)
        tensors = [t.requires_grad_() for t in USUAL.draw("cuda")]
        with pytest.warns(RuntimeWarning, match="out of service"):
            y = apply(*tensors, USUAL)
            y.sum().backward()
    check_layer(y, *tensors, USUAL.geometry, CONSTANTS)
    assert all(t.grad is not None for t in tensors)


@pytest.mark.gpu
def test_too_little_shared_memory(monkeypatch):
    from numba_impl import launch

    x = torch.randn(1, 256, 8, 8, device="cuda")
    model = ModelNumba(256, 64, 4, 2, 1, 0, -0.5, 2, precision="fp32", backend="tiled").cuda()
    launch._remembered_launch.cache_clear()
    monkeypatch.setattr(launch, "FREE_SHARED_BYTES", -1)
    monkeypatch.setattr(launch, "_allow_shared", refuse)
    with pytest.raises(KernelError, match=FAULT), torch.no_grad():
        model(x)
    model.backend = None
    with pytest.warns(RuntimeWarning, match="out of service"), torch.no_grad():
        y = model(x)
    torch.testing.assert_close(y, reference.mish_add_hardtanh_scale(model.conv_transpose(x), CONSTANTS), rtol=1e-4, atol=1e-4)
