"""The map of models: the layer at the shapes of real models, in the precisions and memory formats that people use.

A row is a model's layer, a column a way to call it. The peers are eager PyTorch and ``torch.compile``; ours is ``ModelNumba``
as a user calls it.
"""

import copy
import functools
import itertools
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from benchmarks import halves, machine, measure, peers, tables, training
from benchmarks.measure import CONSTANTS, Contender, Work
from benchmarks.results import Table, title
from benchmarks.tables import say
from benchmarks.timer import Timer
from numba_impl import convolution, dispatch, oracle
from numba_impl.case import Case

ROWS = {
    "benchmark": Case((128, 64, 128, 128), 64, 3, 2, 1, 1),
    "pix2pix middle": Case((16, 256, 32, 32), 128, 4, 2, 1),
    "pix2pix last": Case((16, 128, 128, 128), 3, 4, 2, 1),
    "DCGAN first": Case((64, 100, 1, 1), 512, 4, 1, 0),
    "U-Net deep": Case((8, 512, 32, 32), 256, 2, 2),
    "U-Net top": Case((8, 128, 128, 128), 64, 2, 2),
    "CycleGAN 1": Case((4, 256, 64, 64), 128, 3, 2, 1, 1),
    "CycleGAN 2": Case((4, 128, 128, 128), 64, 3, 2, 1, 1),
    "pose head": Case((32, 256, 32, 24), 256, 4, 2, 1),
    "SAM decoder": Case((1, 256, 64, 64), 64, 2, 2),
    "FSRCNN": Case((4, 56, 256, 256), 1, 9, 3, 4, 2),
    "FCN-8s": Case((4, 21, 64, 64), 21, 16, 8, 4),
}
TRAINED_ROWS = ("benchmark", "pix2pix middle", "U-Net top", "CycleGAN 2", "pose head", "U-Net deep")
QUICK = (1, 8, 6, 5)  # the most images, channels, rows and columns of --quick
MILLISECONDS, QUICK_MILLISECONDS = 150, 20  # of each timing: all 84 cells fit ten minutes of an H200
AUTOTUNED = "torch.compile max-autotune"


@dataclass(frozen=True)
class Column:
    """A way to call the layer.

    ``dtype``: of x and the parameters; ``precision``: that PyTorch's flags permit for products of fp32; ``channels_last``: the
    memory format of x and the weight, instead of NCHW; ``autocast``: the dtype of ``torch.autocast``, if it is on.
    """

    name: str
    dtype: torch.dtype = torch.float32
    precision: str = "fp32"
    channels_last: bool = False
    autocast: torch.dtype | None = None

    @property
    def computes(self) -> torch.dtype:
        """The dtype of products' operands, and of y."""
        return self.autocast or self.dtype

    @property
    def operands(self) -> tuple:
        """What the operands and the calls are alike in where two columns differ in flags alone."""
        return self.dtype, self.channels_last, self.autocast

    @property
    def memory_format(self):
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def laid_out(self, work: Work) -> Work:
        """``work`` with x and a copy of the convolution as the column has them."""
        how = {"dtype": self.dtype, "memory_format": self.memory_format}
        return replace(work, conv=copy.deepcopy(work.conv).to(**how), x=work.x.to(**how))

    def autocasts(self, device):
        """The context of a call."""
        return torch.autocast(device.type, self.autocast) if self.autocast else nullcontext()

    def called(self, layer):
        """A layer as the column calls it."""
        return Autocast(layer, self) if self.autocast else layer


COLUMNS = {
    column.name: column
    for column in (
        Column("fp32"),
        Column("TF32", precision="tf32"),
        Column("bf16", torch.bfloat16),
        Column("bf16 channels_last", torch.bfloat16, channels_last=True),
        Column("fp16 channels_last", torch.float16, channels_last=True),
        Column("AMP bf16", autocast=torch.bfloat16),
        Column("TF32 channels_last", precision="tf32", channels_last=True),
    )
}
TRAINED_COLUMNS = ("fp32", "TF32", "AMP bf16", "bf16 channels_last")
CPU_COLUMNS = ("fp32", "bf16", "bf16 channels_last", "AMP bf16")


class Autocast(nn.Module):
    """A layer under ``torch.autocast``, entered for each forward: as in a model, each casts the weight anew, and no backward runs
    in it."""

    def __init__(self, layer, column: Column):
        super().__init__()
        self.layer, self.column = layer, column

    def forward(self, x):
        with self.column.autocasts(x.device):
            return self.layer(x)


def rows(trained, quick) -> dict[str, Case]:
    """{name: case} of the map's rows. ``quick``: tiny ones of the same geometry."""
    return {name: small(case) if quick else case for name, case in ROWS.items() if not trained or name in TRAINED_ROWS}


def columns(trained, device) -> dict[str, Column]:
    """{name: column} of the map on a device."""
    lists = [TRAINED_COLUMNS] * trained + [CPU_COLUMNS] * (device.type == "cpu")
    return {name: column for name, column in COLUMNS.items() if all(name in names for names in lists)}


def small(case: Case) -> Case:
    """A tiny case of the same geometry."""
    return replace(case, x=tuple(map(min, case.x, QUICK)), out_channels=min(case.out_channels, QUICK[1]))


def measure_row(model, case: Case, columns: list[Column], seed, compiled, trained, timer: Timer) -> Table:
    """The table of a row of the map. Raises ``oracle.Wrong`` before a column is timed if a result of ours is wrong there."""
    say(f"\n{model}: {title(case)}")
    drawn = Work.draw(case, timer.device, seed)
    kinds = compilations(compiled, timer.device)
    # A Triton template takes fp32 or TF32 when it is compiled, cuDNN's convolution at each call.
    alike = (lambda column: column.name) if AUTOTUNED in kinds else (lambda column: column.operands)
    found, notes = [], []
    for _, group in itertools.groupby(columns, alike):
        group = list(group)
        work = prepared(drawn, group, trained)
        if compiled:
            torch._dynamo.reset()  # fresh compilations, not more general ones
        build = functools.cache(functools.partial(_build, work, group[0], kinds))
        for column in group:
            found += measure_cell(work, column, list(kinds), build, notes, timer)
    return Table(case, machine.name(timer.device), None, found, notes=notes, training=trained, model=model)


def compilations(compiled, device) -> dict[str, dict | None]:
    """{peer: options of ``torch.compile``, None for eager}."""
    kinds = {"eager": None} | ({"torch.compile": {}} if compiled else {})
    if compiled and device.type == "cuda" and peers.autotunes_transposed():
        # Without CUDA graphs of the compiler's own: the timer makes one. What the compiler keeps does not know cuDNN's flags.
        options = torch._inductor.list_mode_options("max-autotune-no-cudagraphs")
        kinds[AUTOTUNED] = options | {"max_autotune_conv_backends": "ATEN,TRITON", "fx_graph_cache": False}
    return kinds


def prepared(drawn: Work, group: list[Column], trained) -> Work:
    """``drawn`` as columns of the same operands have it, in training with y's gradient."""
    column = group[0]
    work = column.laid_out(drawn)
    if not trained:
        return work
    if column.computes == torch.float32:
        drawn_gradient = training.draw(work, {column.precision for column in group})
    else:
        drawn_gradient = halves.draw(work, column.computes)
    gy = drawn_gradient.gy.to(memory_format=column.memory_format)
    return replace(work, training=replace(drawn_gradient, gy=gy))


def measure_cell(work: Work, column: Column, kinds, build, notes, timer: Timer) -> list:
    """The rows of a column: the peers' and ours, which is checked first."""
    theirs = [Contender(kind, column.precision, False, functools.partial(build, kind), column=column.name) for kind in kinds]
    mine = ours(work, column)
    checked = tables.prepare(mine, work, functools.partial(verify, column, theirs[0], notes))

    def row(contender, prepared):
        return tables.measure_row(contender, work, timer, prepared, lambda call, _: timer.replays(call))

    found = [row(peer, tables.attempt(peer, work, functools.partial(_unchecked, peer, work))) for peer in theirs]
    return [*found, row(mine, checked)]


def ours(work: Work, column: Column) -> Contender:
    """``ModelNumba``, named with the backend that dispatch chooses."""
    device = work.x.device
    with convolution.in_precision(column.precision, device), column.autocasts(device):
        problem = tables.describe(work, None)
        name = f"ModelNumba ({dispatch.choose(problem)[0]})"

    def build(constants):
        return column.called(tables.build_model(work, problem, None, constants))

    return Contender(name, column.precision, True, build, column=column.name)


def verify(column: Column, eager: Contender, notes, contender: Contender, work: Work):
    """(the call to time, its ``Errors``) of ours. A result of other strides than eager's is a note.

    Raises ``oracle.Wrong`` for another dtype than eager's, and beyond the bounds: the oracle's in fp32 and TF32, those of
    ``halves`` in 16 bits.
    """
    y, theirs = (each.build(CONSTANTS)(work.x) for each in (contender, eager))
    if y.dtype != theirs.dtype:
        raise oracle.Wrong(f"{contender.name} is wrong in {column.name}: it gives {y.dtype}, eager {theirs.dtype}")
    if _strides(y) != _strides(theirs):
        notes.append(f"{column.name}: strides differ from eager's")
        say(f"  {contender.name}, {notes[-1]}")
    if column.computes != torch.float32:
        return halves.verify(contender, eager, work, column.computes)
    return (training.verify if work.training else measure.verify)(contender, work)


def _strides(t) -> list[int]:
    """Of the dimensions that have any."""
    return [stride for stride, size in zip(t.stride(), t.shape) if size > 1]


def _unchecked(peer: Contender, work: Work):
    """(the call to time, None) of a peer: eager is what ours is checked beside, and compiled code is taken for it."""
    if work.training:
        return training.build_step(peer, work), None
    layer = peer.build(CONSTANTS)
    return lambda: layer(work.x), None


def _build(work: Work, column: Column, kinds, kind, constants):
    """A peer's layer: one for all columns of the same operands."""
    layer, options = peers.Plain(work.conv, constants), kinds[kind]
    return column.called(layer if options is None else torch.compile(layer, dynamic=False, options=options))
