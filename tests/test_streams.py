"""Inference and training on side streams, in CUDA graphs, and compiled: nothing stale, nothing missed."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from model_numba import ModelNumba
from tests.cases import assert_same, eager
from tests.test_autograd import compiling

pytestmark = pytest.mark.gpu

SHAPE, OUTPUT = (2, 16, 20, 36), (2, 8, 40, 72)
WHILE = 2_000_000  # clock cycles: a millisecond, longer than any launch


@pytest.fixture(params=["hopper", "tiled", "composite"])
def model(request):
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for compute capability (9, 0) alone")
    return ModelNumba(16, 8, 3, 2, 1, 1, -0.5, 2, precision="fp32", backend=request.param).cuda()


def step(model, x, gy):
    """The result and every gradient."""
    x = x.detach().requires_grad_()
    y = model(x)
    return y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], gy)


def assert_steps_close(got, want):
    """Gradients of weights are sums of thousands of values, by cuDNN in an order of its own."""
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


def test_fifty_rounds_on_a_side_stream(model):
    """Each round's data arrive late: a launch on another stream would read the zeros before them."""
    rounds = [(torch.randn(SHAPE, device="cuda"), torch.randn(OUTPUT, device="cuda")) for _ in range(50)]
    want = [step(model, *data) for data in rounds]
    torch.cuda.synchronize()
    got = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for data in rounds:
            late = [torch.zeros_like(tensor) for tensor in data]
            torch.cuda._sleep(WHILE)
            for tensor, values in zip(late, data):
                tensor.copy_(values)
            got.append(step(model, *late))
    torch.cuda.synchronize()
    for pair in zip(got, want, strict=True):
        assert_steps_close(*pair)


def test_a_thread_that_has_not_touched_cuda(model):
    """Its memory is there already, so that no call of torch's makes a context first."""
    x = torch.randn(SHAPE, device="cuda")
    with torch.no_grad():
        want = model(x)
        model(x)
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(torch.no_grad()(model), x).result()
    assert_same(got, want)


def test_an_input_freed_before_a_side_stream_has_read_it(model):
    data, side = torch.randn(SHAPE, device="cuda"), torch.cuda.Stream()
    with torch.no_grad():
        want = model(data)
        x = data.clone()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20 * WHILE)
            y = model(x)
        del x
        others = [torch.full_like(data, float("nan")) for _ in range(20)]
        torch.cuda.synchronize()
    assert all(other.isnan().all() for other in others)
    assert_same(y, want)


def test_a_training_step_in_a_cuda_graph(model):
    x, gy = torch.randn(SHAPE, device="cuda"), torch.randn(OUTPUT, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(model, x, gy)  # compiles, and cuDNN chooses
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(model, x, gy)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        gy.copy_(torch.randn_like(gy))
        graph.replay()
        assert_steps_close(results, step(model, x, gy))


@compiling
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode, model):
    """The layer between others that torch compiles; with reduce-overhead it is captured, and its inputs are the graph's."""
    torch._dynamo.reset()
    before = nn.Conv2d(3, 16, 3, padding=1).cuda()

    def network(x):
        return model(torch.relu(before(x))) + 1

    def plain(x):
        return eager(torch.relu(before(x)), model.conv_transpose) + 1

    compiled = torch.compile(network, mode=mode, fullgraph=True)
    parameters = [*before.parameters(), *model.parameters()]
    for _ in range(4):
        x = torch.randn(2, 3, 20, 36, device="cuda")
        y = compiled(x)
        got = y.detach().clone(), *(g.clone() for g in torch.autograd.grad(y.square().sum(), parameters))
        y = plain(x)
        want = y.detach(), *torch.autograd.grad(y.square().sum(), parameters)
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * theirs.abs().max().item())
