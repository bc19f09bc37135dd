"""What a thread and a block of the tiled kernel compute, and what a stage of input channels takes in shared memory."""

from dataclasses import dataclass

import numpy as np

from numba_impl.cuda.shared import Field, Layout
from numba_impl.problem import Axis, Geometry


@dataclass(frozen=True)
class Tile:
    """What a thread and a block compute.

    A thread: ``channels`` output channels of ``rows`` x ``cols`` cells, every parity. A block:
    ``channel_groups`` x ``row_groups`` x ``col_groups`` threads. A stage: ``depth`` input channels,
    multiplied ``unroll`` at a time in straight-line code. A multiprocessor shall hold ``blocks``.
    With ``row_parity`` a block computes the rows of one parity alone, a cell row for each: large kernels' code stays short.
    """

    channels: int
    rows: int
    cols: int
    channel_groups: int
    row_groups: int
    col_groups: int
    depth: int = 8
    blocks: int = 2
    unroll: int = 1
    row_parity: bool = False

    def __post_init__(self):
        if self.depth % self.unroll:
            raise ValueError(f"depth must be a multiple of unroll, got {self.depth} and {self.unroll}")

    @property
    def threads(self) -> int:
        return self.channel_groups * self.row_groups * self.col_groups

    @property
    def tile_channels(self) -> int:
        return self.channels * self.channel_groups

    @property
    def tile_rows(self) -> int:
        return self.rows * self.row_groups

    @property
    def tile_cols(self) -> int:
        return self.cols * self.col_groups

    def row_parities(self, geometry: Geometry) -> int:
        """Parts of the grid along the parities of rows."""
        return geometry.rows.stride if self.row_parity else 1

    def part(self, geometry: Geometry) -> Geometry:
        """What a block computes: all of a geometry, or the rows of one parity, as if they were all: of stride 1.

        The taps of parity a are ``(a + padding) % stride`` and every ``stride`` further; where the last is beyond the kernel,
        its weights are zeros. They meet the pixels of ``part``, moved by ``Axis.shifts`` of the first of them.
        """
        rows = geometry.rows
        return Geometry(Axis(-(-rows.kernel_size // rows.stride), 1, 0, 0), geometry.cols) if self.row_parity else geometry

    def packs(self, geometry: Geometry) -> bool:
        """Whether the kernel needs packed weights: where vectors of a thread's channels are to be loaded, where the weights of
        neighbouring threads, an even number of taps apart, would lie in the same bank of shared memory, where an input channel's
        are no whole vectors, or where they are not all of the kernel's."""
        return self.channels % 4 == 0 or geometry.taps % 2 == 0 or self.tile_channels % 4 != 0 or self.row_parity

    def pixel_stage(self, geometry: Geometry) -> tuple[int, int, int]:
        """Shape of a stage of x in shared memory: [depth, rows, columns rounded up to 16 bytes]."""
        part = self.part(geometry)
        height = self.tile_rows + part.rows.reach
        width = self.tile_cols + part.cols.reach
        return self.depth, height, -(-width // 4) * 4

    def weight_stage(self, geometry: Geometry) -> tuple[int, int]:
        """Shape of a stage of weights: [depth, values]; those are [taps, tile_channels] if packed, else [tile_channels, taps].

        Raises ValueError where it is no multiple of 16 bytes.
        """
        values = self.part(geometry).taps * self.tile_channels
        if self.depth * values % 4:
            raise ValueError(f"a stage must have a multiple of 4 weights, got {self.depth} times {values}")
        return self.depth, values

    def shared(self, geometry: Geometry) -> Layout:
        """Shared memory: two stages of pixels and of weights, in fp32 whatever the operands are."""
        return Layout(
            Field("pixels", (2, *self.pixel_stage(geometry)), np.float32, align=16),
            Field("weights", (2, *self.weight_stage(geometry)), np.float32, align=16),
        )

    def grid(self, geometry: Geometry, size) -> tuple[int, int, int, int]:
        """(channel tiles, row tiles, column tiles, blocks) for a ``Problem.size``; the blocks of each row parity, too."""
        batch, _, out_channels, height, width = size
        channel_tiles = -(-out_channels // self.tile_channels)
        row_tiles = -(-geometry.rows.cells(height) // self.tile_rows)
        col_tiles = -(-geometry.cols.cells(width) // self.tile_cols)
        blocks = batch * channel_tiles * row_tiles * col_tiles * self.row_parities(geometry)
        return channel_tiles, row_tiles, col_tiles, blocks
