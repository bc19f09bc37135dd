"""The layer among the rest of a program: copies, files, processes, threads, other gradients, memory."""

import copy
import io
import os
import pickle
import subprocess
import sys
import time
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from model_numba import ModelNumba
from numba_impl import convolution
from tests.cases import IMPORTS, SIZES, assert_same, bits, eager, every_device

SECONDS = 60  # a process that takes longer hangs
SHAPE = (2, 6, 7, 9)


def layer(device="cpu", **settings):
    return ModelNumba(**SIZES, **dict(add_value=-0.25, scale=3, precision="fp32") | settings).to(device)


def settings(model):
    return model.add_value, model.scale, model.precision, model.backend


def infer(model, x):
    with torch.no_grad():
        return model(x)


def gradients(function, parameters, x):
    """(result, gradients of x and the parameters)."""
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    return y.detach(), *torch.autograd.grad(y.float().square().mean(), (leaf, *parameters))


def assert_all_same(got, want):
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == theirs.dtype and ours.device == theirs.device
        assert_same(ours, theirs)


# Copies and files


def through_a_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": through_a_file,
    "share_memory": lambda model: model.share_memory(),
}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
@every_device
def test_a_copy_computes_the_same(duplicate, device):
    """Also a copy of one that has already run, forwards and backwards."""
    for made in (layer(device), ModelNumba.from_conv(nn.ConvTranspose2d(**SIZES, device=device), -0.25, 3, precision="fp32")):
        x = torch.randn(SHAPE, device=device)
        fresh, want = duplicate(made), gradients(made, made.parameters(), x)
        for twin in (fresh, duplicate(made)):
            assert type(twin) is ModelNumba and settings(twin) == settings(made)
            assert_all_same(gradients(twin, twin.parameters(), x), want)
            assert_same(infer(twin, x), infer(made, x))


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("backend", ["tiled", "cpu", None])
@pytest.mark.parametrize("precision", ["tf32", None])
def test_a_copy_keeps_the_settings(duplicate, precision, backend):
    model = layer(add_value=0.5, scale=2.0, precision=precision, backend=backend)
    assert settings(duplicate(model)) == (0.5, 2.0, precision, backend)


def test_share_memory():
    model = layer().share_memory()
    assert all(parameter.is_shared() for parameter in model.parameters())


@every_device
def test_a_state_dict_from_a_file(device, tmp_path):
    model, x = layer(device), torch.randn(SHAPE, device=device)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    twin = layer(device)
    twin.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), strict=True)
    assert_same(infer(twin, x), infer(model, x))


@every_device
def test_calls_leave_the_state_as_it_was(device):
    model, x = layer(device), torch.randn(SHAPE, device=device, requires_grad=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    infer(model, x)
    for _ in range(2):
        model(x).sum().backward()
    after = model.state_dict()
    assert list(after) == list(before) == ["conv_transpose.weight", "conv_transpose.bias"]
    assert all(torch.equal(bits(after[name]), bits(before[name])) for name in before)


@every_device
def test_float64_and_back(device):
    model, x = layer(device), torch.randn(SHAPE, device=device)
    kept, want = settings(model), infer(model, x)
    y = infer(model.double(), x.double())
    assert y.dtype == torch.float64
    torch.testing.assert_close(y.float(), want, rtol=1e-5, atol=1e-5)
    assert_same(infer(model.float(), x), want)
    assert settings(model) == kept


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every_device
def test_a_narrow_dtype_and_back(dtype, device):
    model, x = layer(device), torch.randn(SHAPE, device=device)
    kept = settings(model)
    y = infer(model.half() if dtype == torch.float16 else model.to(dtype), x.to(dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y, eager(x.to(dtype), model.conv_transpose, -0.25, 3).detach(), rtol=5e-2, atol=5e-2)
    rounded = copy.deepcopy(model).double()
    y = infer(model.float(), x)
    torch.testing.assert_close(y.double(), infer(rounded, x.double()), rtol=1e-5, atol=1e-5)
    assert settings(model) == kept


@pytest.mark.gpu
def test_to_another_device_and_back():
    model, x = layer(), torch.randn(SHAPE)
    kept, want = settings(model), infer(model, x)
    torch.testing.assert_close(infer(model.cuda(), x.cuda()).cpu(), want, rtol=1e-5, atol=1e-5)
    assert_same(infer(model.cpu(), x), want)
    assert settings(model) == kept


@every_device
def test_training_and_evaluation_are_the_same(device):
    model, x = layer(device), torch.randn(SHAPE, device=device)
    trained = infer(model.train(), x), *gradients(model, model.parameters(), x)
    evaluated = infer(model.eval(), x), *gradients(model, model.parameters(), x)
    assert_all_same(evaluated, trained)


# Processes


def spawn(worker, processes, *arguments):
    """``worker(rank, *arguments)`` in each of as many new processes."""
    context = mp.spawn(worker, arguments, nprocs=processes, join=False)
    end = time.monotonic() + SECONDS
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < end, "a worker hangs"
    finally:
        for process in context.processes:
            process.kill()


def run_script(folder, text, *arguments, flags=(), seconds=SECONDS):
    """Run ``text`` as a Python script in a fresh process; it must end well, and in time."""
    script = folder / "script.py"
    script.write_text(text)
    command = [sys.executable, *flags, str(script), *arguments]
    environment = os.environ | IMPORTS
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr


def inference_worker(rank, model, x, folder):
    torch.save((settings(model), infer(model, x)), folder / f"{rank}.pt")


@every_device
def test_spawned_workers(device, tmp_path):
    model, x = layer(device), torch.randn(SHAPE, device=device)
    want = infer(model, x)
    spawn(inference_worker, 2, model, x, tmp_path)
    for rank in range(2):
        kept, y = torch.load(tmp_path / f"{rank}.pt")
        assert kept == settings(model)
        assert_same(y, want)


# One thread, as in a DataLoader's workers: neither torch's OpenMP threads nor their locks survive a fork.
FORK = """
import faulthandler, os, sys, torch
from model_numba import ModelNumba

model, x = ModelNumba(6, 5, 3, 2, 1, 1, -0.25, 3), torch.randn(2, 6, 7, 9)
torch.set_grad_enabled(False)
if sys.argv[1] == "after":
    model(x)
if os.fork() == 0:
    faulthandler.dump_traceback_later(20, exit=True)
    torch.set_num_threads(1)
    torch.save(model(x), "y.pt")
    os._exit(0)
_, status = os.wait()
assert status == 0, f"the child ended with status {status}"
torch.testing.assert_close(torch.load("y.pt"), model(x))  # torch's convolution sums differently in several threads
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_child_forked_before_the_first_call(tmp_path):
    run_script(tmp_path, FORK, "before")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_child_forked_after_a_call(tmp_path):
    """Which calls on one thread, as a DataLoader's worker does: GNU OpenMP ends one that asks for more."""
    run_script(tmp_path, FORK, "after")


def distributed_worker(rank, processes, backend, model, x, folder):
    """One process of DistributedDataParallel on its share of the batch; keeps the averaged gradients."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/start", rank=rank, world_size=processes)
    parallel = DistributedDataParallel(model.to(device), device_ids=[rank] if backend == "nccl" else None)
    parallel(x.chunk(processes)[rank].to(device)).square().mean().backward()
    torch.save([parameter.grad.cpu() for parameter in model.parameters()], folder / f"{rank}.pt")
    dist.destroy_process_group()


def check_distributed(processes, backend, folder):
    model, x = layer(), torch.randn(2 * processes, *SHAPE[1:])
    _, _, *want = gradients(model, model.parameters(), x)
    spawn(distributed_worker, processes, processes, backend, model, x, folder)
    for rank in range(processes):
        for ours, theirs in zip(torch.load(folder / f"{rank}.pt"), want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_distributed_data_parallel(tmp_path):
    check_distributed(2, "gloo", tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_distributed_data_parallel_on_every_gpu(tmp_path):
    check_distributed(torch.cuda.device_count(), "nccl", tmp_path)


# Threads

# Half of the threads begin without gradients, half with.
THREADS = """
import sys, threading, torch
from model_numba import ModelNumba

device = sys.argv[1]
model = ModelNumba(6, 5, 3, 2, 1, 1, -0.25, 3, precision="fp32").to(device)
x, results, barrier = torch.randn(2, 6, 7, 9, device=device), {}, threading.Barrier(8)

def infer():
    with torch.no_grad():
        return [model(x)]

def train():
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    return [y.detach(), *torch.autograd.grad(y.square().mean(), (leaf, *model.parameters()))]

def first(number):
    calls = (infer, train) if number % 2 else (train, infer)
    barrier.wait()
    results[number] = {call.__name__: call() for call in calls}

threads = [threading.Thread(target=first, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(results) == 8, "a thread failed"
want, tolerance = {"infer": infer(), "train": train()}, 0 if device == "cpu" else 1e-5
for result in results.values():
    torch.testing.assert_close(result, want, rtol=tolerance, atol=tolerance)
"""


@every_device
def test_first_calls_from_many_threads(device, tmp_path):
    run_script(tmp_path, THREADS, device, flags=("-W", "error"))


# Gradients of others


class Nested(torch.autograd.Function):
    """The identity, whose backward scales by the layer's mean, and adds the layer's gradient if asked to."""

    @staticmethod
    def forward(ctx, x, function, differentiated):
        ctx.save_for_backward(x)
        ctx.function, ctx.differentiated = function, differentiated
        return x.clone()

    @staticmethod
    def backward(ctx, gy):
        (x,) = ctx.saved_tensors
        if not ctx.differentiated:
            return gy * ctx.function(x).mean(), None, None
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            mean = ctx.function(leaf).mean()
            (inner,) = torch.autograd.grad(mean, leaf)
        return gy * mean.detach() + inner, None, None


@pytest.mark.parametrize("differentiated", [False, True])
@every_device
def test_a_call_inside_backward(differentiated, device):
    model, x = layer(device), torch.randn(SHAPE, device=device)
    found = []
    with convolution.in_precision("fp32", x.device):
        for function in (model, lambda x: eager(x, model.conv_transpose, -0.25, 3)):
            found.append(gradients(lambda leaf, function=function: Nested.apply(leaf, function, differentiated), (), x))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert found[0][1].count_nonzero() > 0


@pytest.mark.parametrize("reentrant", [False, True])
@every_device
def test_checkpointed(reentrant, device):
    model, x = layer(device), torch.randn(SHAPE, device=device)
    want = gradients(model, model.parameters(), x)
    leaf = x.clone().requires_grad_()
    y = checkpoint(model, leaf, use_reentrant=reentrant)
    y.square().mean().backward()
    assert_all_same((y.detach(), leaf.grad, *(parameter.grad for parameter in model.parameters())), want)


# Memory


def addresses(*tensors):
    return {t.untyped_storage().data_ptr() for t in tensors}


@pytest.mark.parametrize("sizes", [tuple(SIZES.values()), (6, 6, 1, 1, 0, 0)], ids=["usual", "1x1"])
@pytest.mark.parametrize("shape", [SHAPE, SHAPE[1:]], ids=["batch", "image"])
@pytest.mark.parametrize("grad", [False, True])
@every_device
def test_results_share_no_memory(grad, shape, sizes, device):
    model = ModelNumba(*sizes, 0.5, 1).to(device)
    x = torch.randn(shape, device=device)
    before = x.clone()
    with torch.set_grad_enabled(grad):
        first, second = model(x), model(x)
    assert len(addresses(x, *model.parameters(), first, second)) == 5
    kept = first.detach().clone()
    with torch.no_grad():
        second.zero_()
    assert torch.equal(x, before) and torch.equal(first.detach(), kept)


@every_device
def test_inference_keeps_no_input(device):
    model, x = layer(device), torch.randn(SHAPE, device=device)
    infer(model, x)
    alive = weakref.ref(x)
    y = infer(model, x)
    del x
    assert alive() is None and y.shape[0] == SHAPE[0]


@every_device
def test_the_graph_keeps_the_input_while_the_result_lives(device):
    model, x = layer(device), torch.randn(SHAPE, device=device)
    alive = weakref.ref(x)
    y = model(x)
    del x
    assert alive() is not None
    y.sum().backward()
    del y
    assert alive() is None
