"""Arrays of other libraries, streams and devices: calls wait for the data and run where torch would."""

import threading
from functools import partial

import numpy as np
import pytest
import torch

from model_numba import ModelNumba
from numba_impl import mish_add_hardtanh_scale
from numba_impl.epilogue import Constants
from numba_impl.oracle import check_epilogue, check_layer
from tests.cases import OPEN, Case, apply, assert_same, captured

pytestmark = pytest.mark.gpu

CASE = Case((2, 9, 7, 10), 13, 3, 2, 1, 1)
CONSTANTS = Constants(-0.5, 2.0)
DELAY = 200_000_000  # clock cycles: 0.1 s, far longer than any launch


class Exposed:
    """An array of which nothing is known but ``__cuda_array_interface__``."""

    def __init__(self, tensor, stream=None):
        interface = dict(tensor.__cuda_array_interface__)
        self.__cuda_array_interface__ = interface if stream is None else interface | {"version": 3, "stream": stream}
        self.keep_alive = tensor


def epilogue_alone(wrap, inplace):
    x = 3 * torch.randn(1003, device="cuda")
    given = x.clone()
    y = mish_add_hardtanh_scale(wrap(given), *OPEN, inplace=inplace)
    assert type(y) is torch.Tensor and (y.data_ptr() == given.data_ptr()) == inplace
    check_epilogue(y, x, OPEN)


def layer(wrap):
    x, weight, bias = CASE.draw("cuda")
    y = apply(*map(wrap, (x, weight, bias)), CASE)
    assert type(y) is torch.Tensor
    check_layer(y, x, weight, bias, CASE.geometry, CONSTANTS)
    mixed = apply(wrap(x), weight, None, CASE)
    check_layer(mixed, x, weight, None, CASE.geometry, CONSTANTS)


def module(wrap):
    x, *_ = CASE.draw("cuda")
    model = ModelNumba(9, 13, 3, 2, 1, 1, -0.5, 2, precision="fp32").cuda()
    with torch.no_grad():
        y = model(wrap(x))
    check_layer(y, x, model.conv_transpose.weight, model.conv_transpose.bias, CASE.geometry, CONSTANTS)


USES = {
    "layer": layer,
    "module": module,
    "epilogue": partial(epilogue_alone, inplace=False),
    "epilogue in place": partial(epilogue_alone, inplace=True),
}
every_use = pytest.mark.parametrize("use", USES.values(), ids=USES)


@every_use
@pytest.mark.parametrize("stream", [None, 1, 2], ids=["no stream", "legacy default stream", "per-thread default stream"])
def test_cuda_array_interface(use, stream):
    torch.cuda.synchronize()
    use(lambda tensor: Exposed(tensor, stream))


@every_use
def test_numba_device_arrays(use):
    from numba import cuda

    use(cuda.as_cuda_array)


@every_use
def test_cupy_arrays(use):
    cupy = pytest.importorskip("cupy")
    use(cupy.asarray)


def test_numba_arrays_of_its_own():
    from numba import cuda

    x = np.random.default_rng().standard_normal(1003, dtype=np.float32)
    array = cuda.to_device(x)
    mish_add_hardtanh_scale(array, *OPEN, inplace=True)
    torch.cuda.synchronize()
    check_epilogue(torch.from_numpy(array.copy_to_host()), torch.from_numpy(x), OPEN)


def test_a_producers_stream_is_waited_for():
    """The data arrive late, on the stream that the interface names."""
    producer, data = torch.cuda.Stream(), 3 * torch.randn(1003, device="cuda")
    x = torch.zeros_like(data)
    torch.cuda.synchronize()
    with torch.cuda.stream(producer):
        torch.cuda._sleep(DELAY)
        x.copy_(data)
    y = mish_add_hardtanh_scale(Exposed(x, producer.cuda_stream), *OPEN)
    check_epilogue(y, data, OPEN)


def test_the_producer_waits_for_the_result():
    """What it writes after the call, on the stream that the interface names, comes too late to be read."""
    producer, x = torch.cuda.Stream(), 3 * torch.randn(1003, device="cuda")
    data = x.clone()
    mish_add_hardtanh_scale(data, *OPEN)  # compiled before the clock counts
    torch.cuda.synchronize()
    torch.cuda._sleep(DELAY)
    y = mish_add_hardtanh_scale(Exposed(x, producer.cuda_stream), *OPEN)
    with torch.cuda.stream(producer):
        x.zero_()
    check_epilogue(y, data, OPEN)


def late(data):
    """On the current stream: a tensor of zeros into which, after a while, ``data`` are copied."""
    x = torch.zeros_like(data)
    torch.cuda._sleep(DELAY)
    return x.copy_(data)


@pytest.mark.parametrize("backend", ["tiled", "composite", None])
def test_the_current_stream_is_used(backend):
    x, weight, bias = CASE.draw("cuda")
    model = ModelNumba(9, 13, 3, 2, 1, 1, -0.5, 2, precision="fp32", backend=backend).cuda()
    with torch.no_grad():
        want = model(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            got = model(late(x)).clone()
            torch.cuda.current_stream().synchronize()
    assert_same(got, want)


def test_the_legacy_default_stream_is_not_waited_for():
    """A launch on another stream does not queue behind the default stream's work."""
    x, side = torch.randn(1003, device="cuda"), torch.cuda.Stream()
    mish_add_hardtanh_scale(x, *OPEN, inplace=True)  # compiled before the clock counts
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * DELAY)
    with torch.cuda.stream(side):
        mish_add_hardtanh_scale(x, *OPEN, inplace=True)
        side.synchronize()
    assert not torch.cuda.default_stream().query(), "the launch waited for the default stream"


def test_first_launches_from_many_threads():
    """Of a geometry that no other test has, so that the kernel is compiled here."""
    case, failures = Case((2, 9, 7, 10), 13, (2, 5), (1, 3), (1, 2)), []

    def first():
        try:
            x, weight, bias = case.draw("cuda")
            check_layer(apply(x, weight, bias, case, backend="tiled"), x, weight, bias, case.geometry, CONSTANTS)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=first) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("backend", ["tiled", "composite"])
def test_cuda_graph_capture(backend):
    x, *_ = CASE.draw("cuda")
    model = ModelNumba(9, 13, 3, 2, 1, 1, -0.5, 2, precision="fp32", backend=backend).cuda()
    with torch.no_grad():
        graph, y = captured(model, x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert_same(y, model(x))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_first_call_inside_a_capture_is_a_clear_error():
    case, graph = Case((2, 9, 7, 10), 13, (5, 2), (3, 1), (2, 1)), torch.cuda.CUDAGraph()
    tensors = case.draw("cuda")
    with pytest.raises(RuntimeError, match="call it once before"), torch.cuda.graph(graph):
        apply(*tensors, case, backend="tiled")
    check_layer(apply(*tensors, case, backend="tiled"), *tensors, case.geometry, CONSTANTS)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("backend", ["tiled", "composite"])
def test_another_device_than_the_current(backend):
    x, *_ = CASE.draw("cuda:1")
    model = ModelNumba(9, 13, 3, 2, 1, 1, -0.5, 2, precision="fp32", backend=backend)
    with torch.no_grad():
        y = model.to("cuda:1")(x)
        assert y.device == x.device and torch.cuda.current_device() == 0
        check_layer(y, x, model.conv_transpose.weight, model.conv_transpose.bias, CASE.geometry, Constants(-0.5, 2.0))
