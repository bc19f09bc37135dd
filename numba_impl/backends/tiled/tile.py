"""What a thread and a block of the tiled kernel compute, and what a stage of input channels takes in shared memory."""

from dataclasses import dataclass

import numpy as np

from numba_impl.cuda.shared import Field, Layout
from numba_impl.problem import Geometry


@dataclass(frozen=True)
class Tile:
    """What a thread and a block compute.

    A thread: ``channels`` output channels of ``rows`` x ``cols`` cells, every parity. A block:
    ``channel_groups`` x ``row_groups`` x ``col_groups`` threads. A stage: ``depth`` input channels,
    multiplied ``unroll`` at a time in straight-line code. A multiprocessor shall hold ``blocks``.
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

    def __post_init__(self):
        if self.depth % self.unroll:
            raise ValueError(f"depth must be a multiple of unroll, got {self.depth} and {self.unroll}")
        if self.tile_channels % 4:
            raise ValueError(f"channels * channel_groups must be a multiple of 4, got {self.tile_channels}")

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

    def packs(self, geometry: Geometry) -> bool:
        """Whether the kernel takes packed weights (``weights.pack``): where vectors of a thread's channels are to be loaded, or
        where the weights of neighbouring threads, an even number of taps apart, would lie in the same bank of shared memory."""
        return self.channels % 4 == 0 or geometry.taps % 2 == 0

    def pixel_stage(self, geometry: Geometry) -> tuple[int, int, int]:
        """Shape of a stage of x in shared memory: [depth, rows, columns rounded up to 16 bytes]."""
        height = self.tile_rows + geometry.rows.reach
        width = self.tile_cols + geometry.cols.reach
        return self.depth, height, -(-width // 4) * 4

    def weight_stage(self, geometry: Geometry) -> tuple[int, int, int]:
        """Shape of a stage of weights: [depth, taps, tile_channels] if they are packed, else [depth, tile_channels, taps]."""
        taps, channels = geometry.taps, self.tile_channels
        return (self.depth, taps, channels) if self.packs(geometry) else (self.depth, channels, taps)

    def shared(self, geometry: Geometry) -> Layout:
        """Shared memory: two stages of pixels and of weights."""
        return Layout(
            Field("pixels", (2, *self.pixel_stage(geometry)), np.float32, align=16),
            Field("weights", (2, *self.weight_stage(geometry)), np.float32, align=16),
        )

    def grid(self, geometry: Geometry, size) -> tuple[int, int, int, int]:
        """(channel tiles, row tiles, column tiles, blocks) for a ``Problem.size``."""
        batch, _, out_channels, height, width = size
        channel_tiles = -(-out_channels // self.tile_channels)
        row_tiles = -(-geometry.rows.cells(height) // self.tile_rows)
        col_tiles = -(-geometry.cols.cells(width) // self.tile_cols)
        return channel_tiles, row_tiles, col_tiles, batch * channel_tiles * row_tiles * col_tiles
