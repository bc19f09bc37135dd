"""Arrays of other libraries, streams and devices: the launchers wait for the data and run where torch would."""

import threading

import numpy as np
import pytest
import torch

from model_numba import ModelNumba
from numba_impl.backends.composite import elementwise as pointwise
from numba_impl.backends.tiled import kernel as tiled
from numba_impl.backends.tiled.kernel import Tile
from numba_impl.problem import Constants
from tests.accuracy import check_epilogue, check_layer
from tests.cases import OPEN, Case, assert_same, captured

pytestmark = pytest.mark.gpu

CASE = Case((2, 9, 7, 10), 13, 3, 2, 1, 1)
TILE = Tile(channels=4, rows=2, cols=4, channel_groups=4, row_groups=2, col_groups=4)
NUMBERS = (OPEN.add_value, OPEN.scale, OPEN.min_val, OPEN.max_val)
DELAY = 200_000_000  # clock cycles: 0.1 s, far longer than any launch


class Exposed:
    """An array of which nothing is known but ``__cuda_array_interface__``."""

    def __init__(self, tensor, stream=None):
        interface = dict(tensor.__cuda_array_interface__)
        self.__cuda_array_interface__ = interface if stream is None else interface | {"version": 3, "stream": stream}
        self.keep_alive = tensor


def run_pointwise(wrap):
    """Launch with every array wrapped."""
    x = 3 * torch.randn(1003, device="cuda")
    y = torch.full_like(x, float("nan"))
    pointwise.launch(wrap(x), wrap(y), *NUMBERS)
    check_epilogue(y, x, OPEN)


def run_tiled(wrap, tile=TILE):
    x, weight, bias = CASE.draw("cuda")
    y = torch.full(CASE.output_shape, float("nan"), device="cuda")
    packed = tiled.packer(CASE.geometry, tile)(weight)
    tiled.launch(*map(wrap, (x, packed, bias, y)), CASE.geometry, tile, *NUMBERS)
    check_layer(y, x, weight, bias, CASE.geometry, OPEN)


both_kernels = pytest.mark.parametrize("run", [run_pointwise, run_tiled])


@both_kernels
@pytest.mark.parametrize("stream", [None, 1, 2], ids=["no stream", "legacy default stream", "per-thread default stream"])
def test_cuda_array_interface(run, stream):
    torch.cuda.synchronize()
    run(lambda tensor: Exposed(tensor, stream))


@both_kernels
def test_numba_device_arrays(run):
    from numba import cuda

    run(cuda.as_cuda_array)


def test_numba_arrays_of_its_own():
    from numba import cuda

    x = np.random.default_rng().standard_normal(1003, dtype=np.float32)
    array = cuda.to_device(x)
    pointwise.launch(array, array, *NUMBERS)
    torch.cuda.synchronize()
    check_epilogue(torch.from_numpy(array.copy_to_host()), torch.from_numpy(x), OPEN)


def test_a_producers_stream_is_waited_for():
    """The data arrive late, on the stream that the interface names."""
    producer, data = torch.cuda.Stream(), 3 * torch.randn(1003, device="cuda")
    x, y = torch.zeros_like(data), torch.empty_like(data)
    torch.cuda.synchronize()
    with torch.cuda.stream(producer):
        torch.cuda._sleep(DELAY)
        x.copy_(data)
    pointwise.launch(Exposed(x, producer.cuda_stream), y, *NUMBERS)
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
    x = torch.randn(1003, device="cuda")
    y, side = torch.empty_like(x), torch.cuda.Stream()
    pointwise.launch(x, y, *NUMBERS)  # compiled before the clock counts
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * DELAY)
    with torch.cuda.stream(side):
        pointwise.launch(x, y, *NUMBERS)
        side.synchronize()
    assert not torch.cuda.default_stream().query(), "the launch waited for the default stream"


def test_first_launches_from_many_threads():
    tile, failures = Tile(channels=2, rows=1, cols=4, channel_groups=4, row_groups=1, col_groups=8), []

    def first():
        try:
            run_tiled(lambda tensor: tensor, tile)
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
    x = torch.randn(1003, device="cuda")
    config, graph = pointwise.Config(threads=96), torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="call it once before"), torch.cuda.graph(graph):
        pointwise.launch(x, x, *NUMBERS, config=config)
    pointwise.launch(x, x, *NUMBERS, config=config)
    torch.cuda.synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("backend", ["tiled", "composite"])
def test_another_device_than_the_current(backend):
    x, *_ = CASE.draw("cuda:1")
    model = ModelNumba(9, 13, 3, 2, 1, 1, -0.5, 2, precision="fp32", backend=backend)
    with torch.no_grad():
        y = model.to("cuda:1")(x)
        assert y.device == x.device and torch.cuda.current_device() == 0
        check_layer(y, x, model.conv_transpose.weight, model.conv_transpose.bias, CASE.geometry, Constants(-0.5, 2.0))
