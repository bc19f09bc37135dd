"""One call of a case, by its form and at its place, that must be right and leave its arguments as they were."""

import torch
from torch import nn

from numba_impl import dispatch, functional
from numba_impl.fuzz.bounds import Wrong, check, demand
from numba_impl.fuzz.case import Case, draw_operands, precision_of

WHILE = 200_000  # clock cycles that a side stream is late


class Lost(BaseException):
    """The GPU's context is lost, so that nothing can be shrunk."""


def run_case(case: Case) -> str:
    """Run a case and compare it; the name of the backend that served, or "declined". Raises Wrong."""
    try:
        operands = draw_operands(case)
        before = {name: operand.memory.clone() for name, operand in operands.items()}
        name, reason = served_by(case, operands)
        if name == "declined":
            check_declined(case, operands, reason)
            return name
        y, *gradients = run(case, operands)
        for operand, memory in zip(operands.values(), before.values()):
            demand(torch.equal(operand.memory.view(torch.uint8), memory.view(torch.uint8)), "an argument was changed")
            shares = y.numel() and y.untyped_storage().data_ptr() == operand.memory.untyped_storage().data_ptr()
            demand(not shares, "the result shares memory with an argument")
        check(case, name, {name: operand.tensor for name, operand in operands.items()}, y, gradients)
    except Exception as error:
        if "CUDA error" in str(error) or "CUDA_ERROR" in str(error):
            raise Lost(f"{type(error).__name__}: {error}") from error
        raise Wrong(str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}") from error
    return name


def _forced(case):
    return None if case.backend == "dispatch" else case.backend


def served_by(case, operands):
    """(backend, "") or ("declined", why)."""
    x, weight, bias = (operands[name].tensor if name in operands else None for name in ("x", "weight", "bias"))
    problem = functional.describe(x, weight, bias, case.stride, case.padding, case.extra, precision_of(case))
    if case.backend != "dispatch":
        ok, reason = dispatch.BACKENDS[case.backend].supports(problem)
        return (case.backend, "") if ok else ("declined", reason)
    return dispatch.choose(problem)[0], ""


def check_declined(case, operands, reason):
    try:
        step(case, {name: operand.tensor for name, operand in operands.items()})
    except ValueError as error:
        demand(reason in str(error), f"the error does not say why {case.backend} declines: {error}")
        return
    raise Wrong(f"{case.backend} served though it declines: {reason}")


def step(case, tensors):
    """[the layer's result, batched, and each gradient asked for], by the form asked for."""
    names = dict(zip("xwb", ("x", "weight", "bias")))
    leaves = {name: tensor.detach() for name, tensor in tensors.items()}
    wanted = [leaves[names[letter]].requires_grad_() for letter in case.gradient]
    x = leaves["x"][0] if case.form == "unbatched" else leaves["x"]
    with torch.set_grad_enabled(bool(case.gradient)):
        if case.form == "module":
            y = _module(case, leaves)(x)
        else:
            y = functional.conv_transpose2d_mish_add_hardtanh_scale(
                *(x, leaves["weight"], leaves.get("bias"), case.stride, case.padding, case.extra),
                **dict(add_value=case.add, scale=case.scale, precision=precision_of(case), backend=_forced(case)),
            )
    gradients = torch.autograd.grad(y, wanted, tensors["gy"].view_as(y) if y.dim() == 4 else tensors["gy"][0]) if wanted else ()
    return [y.detach().unsqueeze(0) if case.form == "unbatched" else y.detach(), *gradients]


def _module(case, leaves):
    from model_numba import ModelNumba

    settings = case.kernel, case.stride, case.padding, case.extra
    conv = nn.ConvTranspose2d(case.x[1], case.out, *settings, bias=case.bias, device="meta")
    for name in ("weight", "bias") if case.bias else ("weight",):
        delattr(conv, name)
        setattr(conv, name, leaves[name])  # the leaf itself, so that its gradient can be asked for
    return ModelNumba.from_conv(conv, case.add, case.scale, precision=precision_of(case), backend=_forced(case))


def run(case, operands):
    """``step`` at its place. Elsewhere than there, the data arrive after a delay in memory of zeros."""
    if case.device == "cpu" or case.place == "plain" or case.x[0] == 0:
        return step(case, {name: operand.tensor for name, operand in operands.items()})
    late = {name: operand.blank() for name, operand in operands.items()}
    tensors = {name: operand.tensor for name, operand in late.items()}
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()

    def arrive():
        torch.cuda._sleep(WHILE)
        for name, operand in late.items():
            operand.memory.copy_(operands[name].memory)

    side.wait_stream(current)
    with torch.cuda.stream(side):
        if case.place == "stream":
            arrive()
        results = step(case, tensors)  # for a graph: compiles, and cuDNN chooses
    current.wait_stream(side)
    torch.cuda.synchronize()
    if case.place == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step(case, tensors)
        arrive()
        graph.replay()
        results = [result.clone() for result in results]
        torch.cuda.synchronize()
    return results
