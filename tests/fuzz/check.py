"""A call is run by its form and at its place; it must be right, be laid out as eager's, and leave its arguments as they were."""

from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from model_numba import ModelNumba
from numba_impl import convolution, dispatch, functional
from numba_impl.epilogue import Constants
from numba_impl.oracle import Gradients, Wrong, check_layer
from tests.cases import assert_same
from tests.fuzz.call import Call

# Who may serve on a device, and the oracle's ``reach`` of each. The eager chain's result is right by definition.
EAGER = "reference"
REACH = {
    "cpu": {"cpu": "edge", EAGER: None},
    "cuda": {"hopper": "pixel", "tiled": "edge", "composite": "image", EAGER: None},
}
NAMES = dict(x="x", w="weight", b="bias")
WHILE = 200_000  # clock cycles that a side stream is late


class Lost(BaseException):
    """The GPU's context is lost: nothing can be run any more, nor shrunk."""


def check(call: Call) -> str:
    """Run a call and compare it; the name of the backend that served, or "declined". Raises Wrong."""
    try:
        tensors = call.draw_operands()
        operands = [tensors.get(name) for name in NAMES.values()]
        precision, forced = call.options.values()
        with call.under_autocast:
            problem = functional.describe(*operands, call.stride, call.padding, call.output_padding, precision)
        if forced and (reason := dispatch.BACKENDS[forced].why_not(problem)):
            check_declined(call, tensors, reason)
            return "declined"
        name, _ = dispatch.choose(problem, forced)
        with deterministic(name == EAGER):  # so that eager twice is the same
            results, eager = run_untouched(call, tensors), step(call, tensors, partial(chain, problem))
        for got, want in zip(results, eager, strict=True):
            ours, theirs = laid_out(call, got), laid_out(call, want)
            assert ours == theirs, f"a result is {ours}, eager's {theirs}"
            if name == EAGER:
                assert_same(got, want, max([0.0, *want[want.isfinite()].abs().tolist()]))
        assert results[0].stride() == eager[0].stride(), f"strides are {results[0].stride()}, eager's {eager[0].stride()}"
        if name != EAGER:
            compare_with_float64(call, *operands, tensors.get("gy"), problem, name, *results)
    except Exception as error:
        if "CUDA error" in str(error) or "CUDA_ERROR" in str(error):
            raise Lost(f"{type(error).__name__}: {error}") from error
        raise Wrong(str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}") from error
    return name


@contextmanager
def deterministic(only):
    """``only`` those of cuDNN's algorithms that add up in the same order each time."""
    before, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, only
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


def check_declined(call, tensors, reason):
    try:
        step(call, tensors, fused)
    except ValueError as error:
        assert reason in str(error), f"the error does not say why {call.backend} declines: {error}"
    else:
        raise Wrong(f"{call.backend} served though it declines: {reason}")


def compare_with_float64(call, x, weight, bias, gy, problem, name, y, *gradients):
    x, weight, bias = convolution.cast(problem.dtype, x, weight, bias)
    reach, settings = REACH[call.device][name], (call.geometry, Constants(call.add_value, call.scale))
    plan = dispatch.BACKENDS[name].plan(problem)
    check_layer(y, x, weight, bias, *settings, plan.precision, reach, plan.between)
    if gradients:
        found = dict(zip(call.gradient, gradients))
        precision = problem.permitted if call.device == "cuda" else "fp32"  # of torch's convolutions, whoever served before
        Gradients.of(x, weight, bias, gy, *settings, precision, reach, plan.between).check(map(found.get, NAMES))


def laid_out(call, t):
    """Its dtype and strides, but for those in which torch's own gradients differ: of axes of one element, and without images."""
    return t.dtype, [stride for size, stride in zip(t.shape, t.stride()) if size != 1 and call.x[0]]


def chain(problem, call, x, weight, bias):
    """The layer in plain PyTorch."""
    with convolution.in_precision(problem.permitted, x.device):
        z = F.conv_transpose2d(x, weight, bias, call.stride, call.padding, call.output_padding)
    return F.hardtanh(F.mish(z) + call.add_value, -1, 1) * call.scale


def step(call, tensors, layer):
    """[the layer's result, batched, and each gradient asked for]."""
    leaves = {name: tensor.detach() for name, tensor in tensors.items()}
    wanted = [leaves[NAMES[letter]].requires_grad_() for letter in call.gradient]
    unbatched = call.form == "unbatched"
    with torch.set_grad_enabled(bool(wanted)), call.under_autocast:
        y = layer(call, leaves["x"][0] if unbatched else leaves["x"], leaves["weight"], leaves.get("bias"))
    gradients = torch.autograd.grad(y, wanted, tensors["gy"][0] if unbatched else tensors["gy"]) if wanted else ()
    return [y.detach().unsqueeze(0) if unbatched else y.detach(), *gradients]


def fused(call, x, weight, bias):
    """The layer by the form asked for."""
    numbers, options = (call.stride, call.padding, call.output_padding), dict(add_value=call.add_value, scale=call.scale)
    if call.form != "module":
        return functional.conv_transpose2d_mish_add_hardtanh_scale(x, weight, bias, *numbers, **options, **call.options)
    conv = nn.ConvTranspose2d(call.x[1], call.out_channels, call.kernel_size, *numbers, bias=call.bias, device="meta")
    for name, leaf in (("weight", weight), ("bias", bias))[: 1 + call.bias]:
        delattr(conv, name)
        setattr(conv, name, leaf)  # the leaf itself, so that its gradient can be asked for
    return ModelNumba.from_conv(conv, **options, **call.options)(x)


def run_untouched(call, tensors):
    """``run``'s results, which must share no memory with the tensors, of which nothing may change, nor between their values."""
    before = {name: memory(tensor).clone() for name, tensor in tensors.items()}
    results = run(call, tensors)
    for name, tensor in tensors.items():
        assert torch.equal(memory(tensor).view(torch.uint8), before[name].view(torch.uint8)), f"{name} was changed"
        shared = [y.numel() and y.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for y in results]
        assert not any(shared), f"a result shares memory with {name}"
    return results


def memory(tensor):
    """All that the tensor lies in, flat."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def run(call, tensors):
    """``step`` at its place. Elsewhere than there, the data arrive after a delay in memory of zeros."""
    if call.place == "plain" or call.x[0] == 0:
        return step(call, tensors, fused)
    late = {
        name: torch.zeros_like(memory(tensor)).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        for name, tensor in tensors.items()
    }
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()

    def arrive():
        torch.cuda._sleep(WHILE)
        for name, tensor in late.items():
            memory(tensor).copy_(memory(tensors[name]))

    side.wait_stream(current)
    with torch.cuda.stream(side):
        if call.place == "stream":
            arrive()
        results = step(call, late, fused)  # for a graph: compiles, and cuDNN chooses
    current.wait_stream(side)
    torch.cuda.synchronize()
    if call.place == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step(call, late, fused)
        arrive()
        graph.replay()
        results = [result.clone() for result in results]
        torch.cuda.synchronize()
    return results
