"""What reaches CUDA: the arguments as cuda.core lays them out, and all that a call of the layer launches. CPU tensors stand for a
GPU's, so no GPU is needed."""

import contextlib
import ctypes
import gc
import struct
from dataclasses import replace

import pytest
import torch
from cuda.core._kernel_arg_handler import ParamHolder
from numba.cuda import types

from model_numba import ModelNumba
from numba_impl import dispatch, gpu
from numba_impl.backends.hopper import weights
from numba_impl.backends.hopper.layout import Config
from numba_impl.cuda import kernel as launch
from numba_impl.cuda import tensor_map
from numba_impl.cuda.kernel import Kernel
from numba_impl.errors import KernelError
from tests.cases import GPUS, VIEWS, Case, apply, problem

SMALL = Case((1, 64, 8, 8), 64, 3, 2, 1, 1)
WORDS = tuple(range(-8, 8))  # of a tensor map, which the driver would make
CONSTANTS = 0.5, -2.0, -1.0, 1e300  # the last beyond fp32


@pytest.fixture
def launches(monkeypatch):
    """The launches of a Hopper GPU that is not here: (kernel, blocks, threads, shared bytes, arguments)."""
    found = []

    def record(stream, config, kernel, *values):
        found.append((kernel, config.grid[0], config.block[0], config.shmem_size, values))

    patch = monkeypatch.setattr
    nowhere = replace(dispatch.BACKENDS["cpu"], why_not=lambda problem: "a GPU stands there")
    monkeypatch.setitem(dispatch.BACKENDS, "cpu", nowhere)
    patch(gpu, "why_no_kernels", lambda device: "")
    patch(gpu, "of", lambda device: GPUS[9, 0])
    patch(torch.cuda, "current_device", lambda: None)  # the index of the CPU
    patch(torch.cuda, "device", lambda index: contextlib.nullcontext())
    patch(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    patch(launch, "launch", record)
    patch(launch, "_bind", lambda index: None)
    patch(launch, "_allow_shared", lambda *args: None)
    patch(tensor_map, "encode", lambda *args: WORDS)
    patch(Kernel, "on", lambda kernel, index: kernel.function.__name__)
    return found


def as_fp32(value):
    """The number whose bits an argument has."""
    return struct.unpack("f", struct.pack("i", value))[0]


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_left_as_it_was(enabled):
    """Also by a compilation that fails."""
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KernelError), launch.no_garbage_collection():
            assert not gc.isenabled()
            raise KernelError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_an_int_is_an_argument_of_any_size():
    """Its low bytes are the argument."""
    values = [-1, 2**31 - 1, -(2**31), 2**47 - 16, True, *launch._bits((-0.5, float("inf")))]
    holder = ParamHolder(values)
    addresses = (ctypes.c_void_p * len(values)).from_address(holder.ptr)
    kinds = [ctypes.c_int32] * 3 + [ctypes.c_int64, ctypes.c_bool] + [ctypes.c_float] * 2
    found = [kind.from_address(address).value for kind, address in zip(kinds, addresses, strict=True)]
    assert found == [-1, 2**31 - 1, -(2**31), 2**47 - 16, True, -0.5, float("inf")]


def test_fp32_by_its_bits():
    assert [as_fp32(value) for value in launch._bits((0.1, -0.0, 1e300))] == [ctypes.c_float(0.1).value, 0, float("inf")]
    assert launch._bits((-0.0,)) == (-(2**31),)


def some_kernel(array, pair, number, flag, constants):
    pass


def test_arguments_before_or_at_the_launch(launches):
    pointer, i, f = types.CPointer(types.float32), types.int32, types.float32
    signature = types.void(pointer, types.UniTuple(i, 2), types.int64, types.boolean, types.UniTuple(f, 4))
    kernel, x = Kernel(some_kernel, signature, 64, 1, shared_bytes=100), torch.randn(3)
    kernel.prepare(x.device, 5, (7, -8))((x,), (9, True), CONSTANTS)
    kernel.prepare(x.device, 5, (7, -8), 9)((x,), (True,), CONSTANTS)
    kernel.prepare(x.device, 5)((x,), ((7, -8, 9, True),), CONSTANTS)
    want = x.data_ptr(), 7, -8, 9, 1, *map(ctypes.c_float, CONSTANTS)
    for name, blocks, threads, shared_bytes, values in launches:
        assert (name, blocks, threads, shared_bytes) == ("some_kernel", 5, 64, 100)
        assert values[:5] == want[:5]
        assert [as_fp32(value) for value in values[5:]] == [number.value for number in want[5:]]


def test_the_current_stream_and_the_tensors_device(launches, monkeypatch):
    """Both as they are at each launch; the device is current meanwhile, and no longer."""
    seen, current = [], ["another"]

    @contextlib.contextmanager
    def device(index):
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(launch, "launch", lambda stream, *args: seen.append((int(stream.handle), current[0])))
    kernel = Kernel(some_kernel, types.void(types.CPointer(types.float32)), 64, 1)
    prepared, x = kernel.prepare(torch.device("cpu"), 1), torch.randn(3)
    for stream in (0, 80, 0):
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index, stream=stream: stream)
        prepared((x,))
    assert seen == [(0, None), (80, None), (0, None)] and current == ["another"]


def test_other_constants_at_the_next_launch(launches):
    kernel = Kernel(some_kernel, types.void(types.CPointer(types.float32), types.UniTuple(types.float32, 2)), 64, 1)
    prepared, x = kernel.prepare(torch.device("cpu"), 1), torch.randn(3)
    for constants in ((1.0, 0.0), (1.0, -0.0), (1.0, 0.0)):
        prepared((x,), constants=constants)
    assert [launches[i][-1][1:] for i in range(3)] == [launch._bits(c) for c in ((1.0, 0.0), (1.0, -0.0), (1.0, 0.0))]


@pytest.mark.parametrize("precision", ["fp32", None])
def test_a_small_call_is_one_launch_on_the_arguments_own_memory(precision, launches, conv_precision):
    """By default too, where PyTorch permits TF32, which cuDNN does not use for so little."""
    conv_precision("tf32")
    model, x = ModelNumba(64, 64, 3, 2, 1, 1, 0.5, 2, precision=precision), torch.randn(SMALL.x)
    weight, bias = model.conv_transpose.weight, model.conv_transpose.bias
    with torch.no_grad():
        for _ in range(2):
            y = model(x)
            *_, (name, blocks, _, _, values) = launches
            assert (name, blocks, len(values)) == ("tiled", 32, 4 + 6 + 3 + 3 + 4)
            assert values[:4] == tuple(t.data_ptr() for t in (x, weight, bias, y))
            assert values[4:10] == (64, 8, 8, 64, 16, 16) and values[13:16] == (64, True, True)
            assert [as_fp32(value) for value in values[16:]] == [0.5, 2.0, -1.0, 1.0]
    assert len(launches) == 2 and y.shape == SMALL.output_shape


@pytest.mark.parametrize("backend", ["tiled", "hopper"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_what_is_not_contiguous_is_copied(view, backend, launches):
    """The tiled kernel reads channels_last as it is."""
    x, weight, bias = SMALL.draw()
    x = view(x)
    apply(x, weight, bias, SMALL, backend=backend)
    *_, values = launches[-1]
    as_it_is = x.is_contiguous() or backend == "tiled" and view is VIEWS["channels_last"]
    assert (values[0] == x.data_ptr()) == as_it_is


def test_an_unaligned_weight_or_no_bias(launches):
    x, weight, bias = SMALL.draw()
    shifted = torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view(weight.shape)
    for given, known, size, whole in ((weight, bias, 64, True), (shifted, bias, 64, False), (weight, None, 0, True)):
        apply(x, given, known, SMALL)
        *_, values = launches[-1]
        assert values[1] == given.data_ptr() and values[13:16] == (size, True, whole)


def test_hopper_packs_the_weights_in_every_call(launches):
    x, weight, bias = SMALL.draw()
    for _ in range(2):
        y = apply(x, weight, bias, SMALL, backend="hopper")
    assert [name for name, *_ in launches] == ["split", "hopper"] * 2
    (_, blocks, threads, _, packing_values), (*_, shared_bytes, values) = launches[2:]
    assert (blocks, threads) == (64, weights.THREADS) and shared_bytes == Config(64, 64, 3, 4).shared.bytes
    assert packing_values[0] == weight.data_ptr() and packing_values[4:] == (64, 64, *WORDS)
    assert values[:7] == (x.data_ptr(), *packing_values[1:4], weight.data_ptr(), bias.data_ptr(), y.data_ptr())
    assert values[7:13] == (8, 1, 8, 8, 16, 16)


@pytest.mark.parametrize(("offset", "backend"), [(0, "tiled"), (1, "tiled"), (0, "hopper"), (2, "hopper")])
def test_a_gradient_at_the_output_that_is_not_aligned(offset, backend, launches):
    case = Case((2, 16, 7, 10), 8, 3, 2, 1, 1)
    x, weight, bias = case.draw()
    size = torch.Size(case.output_shape).numel()
    gy = torch.randn(size + offset)[offset:].view(case.output_shape)
    g = dispatch.plan(problem(case, operation="pre_gradient"), backend)(x, weight, bias, gy, constants=CONSTANTS)
    name, *_, values = launches[-1]
    arrays = 5 if backend == "tiled" else 8
    assert name == backend and values[arrays - 2 : arrays] == (gy.data_ptr(), g.data_ptr())
    if backend == "tiled":
        assert values[-6] == (offset == 0), "stored by four"


@pytest.mark.parametrize("backend", ["tiled", "hopper"])
def test_an_empty_batch_does_not_launch_the_layer(backend, launches):
    case = Case((0, 16, 7, 10), 8, 3, 2, 1, 1)
    assert apply(*case.draw(), case, backend=backend).shape == case.output_shape
    assert backend not in [name for name, *_ in launches]


def test_weights_that_are_packed(launches):
    """For a tile whose threads have four channels: by a kernel before, so that the kernel gets another tensor."""
    case = Case((8, 64, 32, 32), 64, 4, 2, 1)
    x, weight, bias = case.draw()
    apply(x, weight, bias, case, backend="tiled")
    (first, *_, packing), (second, *_, values) = launches
    assert (first, second) == ("pack", "tiled") and packing[0] == weight.data_ptr() and packing[1] == values[1]
