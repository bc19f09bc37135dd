"""Strict fp32 or TF32: as asked, else as PyTorch's flags permit at each call; the flags stay as they were."""

import pytest
import torch

from numba_impl import convolution
from numba_impl.epilogue import Constants
from numba_impl.oracle import check_layer
from tests.cases import Case, apply


@pytest.fixture(scope="module")
def large():
    """Large enough that cuDNN does use TF32 where it may."""
    case = Case((8, 64, 128, 128), 64, 3, 2, 1, 1)
    return case, *case.draw("cuda")


def is_strict(y, case, x, weight, bias):
    try:
        check_layer(y, x, weight, bias, case.geometry, Constants(-0.5, 2.0))
    except AssertionError:
        return False
    return True


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "tiled", "composite", "reference", None])
@pytest.mark.parametrize("flag", ["tf32", "ieee"])
def test_fp32_is_strict_whatever_the_flag(flag, backend, large, conv_precision, request):
    conv_precision(flag)
    case, *tensors = large
    if backend == "hopper":
        request.getfixturevalue("hopper")  # skips on other GPUs
    assert is_strict(apply(*tensors, case, precision="fp32", backend=backend), case, *tensors)
    assert torch.backends.cudnn.conv.fp32_precision == flag


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "composite", "reference"])
@pytest.mark.parametrize(("precision", "flag"), [("tf32", "ieee"), ("tf32", "tf32"), (None, "tf32")])
def test_tf32_where_asked_or_permitted(precision, flag, backend, large, conv_precision, request):
    conv_precision(flag)
    case, *tensors = large
    if backend == "hopper":
        request.getfixturevalue("hopper")
    y = apply(*tensors, case, precision=precision, backend=backend)
    assert not is_strict(y, case, *tensors), "TF32 was permitted and not used"
    check_layer(y, *tensors, case.geometry, Constants(-0.5, 2.0), precision="tf32")
    assert torch.backends.cudnn.conv.fp32_precision == flag


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "flag"), [("tf32", "ieee"), (None, "tf32")])
def test_the_tiled_kernel_is_strict_where_tf32_is_permitted(precision, flag, large, conv_precision):
    conv_precision(flag)
    case, *tensors = large
    assert is_strict(apply(*tensors, case, precision=precision, backend="tiled"), case, *tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("allowed", [True, False])
def test_the_old_flag_counts_and_stays(allowed, large, conv_precision):
    case, *tensors = large
    torch.backends.cudnn.allow_tf32 = allowed
    assert is_strict(apply(*tensors, case, precision=None, backend="composite"), case, *tensors) is not allowed
    for precision in ("fp32", "tf32"):
        apply(*tensors, case, precision=precision, backend="composite")
        assert torch.backends.cudnn.allow_tf32 is allowed


@pytest.mark.gpu
def test_the_flag_is_restored_after_an_error(conv_precision):
    conv_precision("tf32")
    with pytest.raises(RuntimeError):
        with convolution.in_precision("fp32", torch.device("cuda")):
            assert torch.backends.cudnn.conv.fp32_precision == "ieee"
            raise RuntimeError
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"
