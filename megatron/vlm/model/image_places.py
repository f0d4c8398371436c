"""Layout of native-resolution patches: their positions, and which attend together.

A pack's images and frames are one sequence of patches, cell after cell (the patches of a token).
With windows, cells are sorted by window for attention, and features return to the original order.

Shapes: P positions (patches) of all images, K their cells, D size of an encoder's head, N learned
positions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron.vlm.inputs.batch import Borders, borders_of
from megatron.vlm.model.fused.rotary import Rotation
from omnibal.data.native_resolution import Grid
from omnibal.model.encoders import ImagesEncoder

_ROPE_BASE = 10_000.0  # of all native-resolution encoders (Qwen2-VL, arXiv 2409.12191)


@dataclass(frozen=True, slots=True)
class ImageBorders:
    images: Borders  # borders of images, and of every time of a video
    windows: Borders | None  # borders of windows, if any layer has them


class ImagePlaces:
    """Positions of a pack's patches in layer order (sorted by window), computed on request."""

    def __init__(self, grids: Sequence[Grid], tower: ImagesEncoder, device: torch.device) -> None:
        self._grids, self._tower, self._device = grids, tower, device
        self._cells_K: np.ndarray | None = None
        self._window_cells: list[int] = []
        if tower.window_pixels is not None and grids:
            side = tower.window_pixels // tower.cell_pixels
            self._cells_K, self._window_cells = windows_of(grids, tower.merge_size, side)

    def rotation(self, head_size: int) -> Rotation:
        """Return the rotation by row and column of every patch; tables are [P, D / 2]."""
        # Half of the angles are by row, half by column: [D / 4] frequencies.
        axis = head_size // 2
        exponents = torch.arange(0, axis, 2, dtype=torch.float32, device=self._device) / axis
        frequencies = 1 / _ROPE_BASE**exponents
        rows_P, columns_P = self._patches()[:2].float()
        angles = torch.cat([rows_P.outer(frequencies), columns_P.outer(frequencies)], 1)
        return Rotation(angles.cos(), angles.sin())

    @property
    def borders(self) -> ImageBorders:
        """Return the ranges of patches that attend together; fails without images."""
        times = [grid.rows * grid.columns for grid in self._grids for _ in range(grid.times)]
        windows = [cells * self._tower.positions_per_item for cells in self._window_cells]
        return ImageBorders(
            images=borders_of(times, times, self._device),
            windows=borders_of(windows, windows, self._device) if windows else None,
        )

    def neighbours(self) -> tuple[torch.Tensor, ...]:
        """Return indices (int64) and weights (float32) of every patch's four learned positions.

        Both are [P, 4]. The square of N positions is interpolated over an image, corners aligned
        (Qwen3-VL's `fast_pos_embed_interpolate`).
        """
        side = math.isqrt(self._tower.learned_positions)
        places = self._patches().float()
        # Row and column of the patch in the square.
        stretched_2P = places[:2] * (side - 1) / (places[2:] - 1).clamp(min=1)
        before_2P = stretched_2P.floor()  # the neighbour above and to the left
        share_2P = stretched_2P - before_2P
        index_2P = before_2P.long()
        rows_2P, columns_2P = torch.stack([index_2P, (index_2P + 1).clamp(max=side - 1)], 1)
        down_2P, right_2P = torch.stack([1 - share_2P, share_2P], 1)
        indices_22P = rows_2P[:, None] * side + columns_2P
        weights_22P = down_2P[:, None] * right_2P
        by_place = (values.flatten(0, 1).t().contiguous() for values in (indices_22P, weights_22P))
        return tuple(by_place)

    def sort_patches(self, patches_PX: torch.Tensor) -> torch.Tensor:
        """Return patches [P, X], given in data order, in layer order."""
        if self._cells_K is None:
            return patches_PX
        return patches_PX.index_select(0, self._on_device(self._positions(self._cells_K)))

    def restore_order(self, features_KE: torch.Tensor) -> torch.Tensor:
        """Return features of cells [K, E], given in layer order, in data order."""
        if self._cells_K is None:
            return features_KE
        orders = (self._on_device(order_K) for order_K in (self._cells_K.argsort(), self._cells_K))
        return _InOrder.apply(features_KE, *orders)

    def _patches(self) -> torch.Tensor:
        """Return each patch's row and column, and its image's rows and columns, int32 [4, P]."""
        merge, parts = self._tower.merge_size, [np.zeros((4, 0), np.int32)]
        for times, rows, columns in self._grids:
            # [axis, cell row, row in cell, cell column, column in cell], then cell after cell.
            places = np.indices((rows, columns), np.int32)
            cells = places.reshape(2, rows // merge, merge, columns // merge, merge)
            own = np.tile(cells.swapaxes(2, 3).reshape(2, -1), times)
            sizes = np.array([[rows], [columns]], np.int32)
            parts.append(np.concatenate([own, np.broadcast_to(sizes, own.shape)]))
        patches_4P = np.concatenate(parts, 1)
        if self._cells_K is not None:
            patches_4P = patches_4P[:, self._positions(self._cells_K)]
        return self._on_device(patches_4P)

    def _positions(self, cells_K: np.ndarray) -> np.ndarray:
        """Return the numbers in data order of all patches of these cells, [P]."""
        size = self._tower.positions_per_item
        return (cells_K[:, None] * size + np.arange(size)).ravel()

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


class _InOrder(torch.autograd.Function):
    """Permuted rows; backward permutes gradients without summation."""

    # The backward of `index_select` would add rows to zeros.
    @staticmethod
    def forward(ctx, rows_KE, order_K, back_K):
        ctx.save_for_backward(back_K)
        return rows_KE.index_select(0, order_K)

    @staticmethod
    def backward(ctx, gradient_KE):
        return gradient_KE.index_select(0, *ctx.saved_tensors), None, None


def windows_of(grids: Sequence[Grid], merge: int, side: int) -> tuple[np.ndarray, list[int]]:
    """Return cells of all images sorted by window, int64 [K], and each window's number of cells.

    Windows are squares of `side` x `side` cells from the image's first cell on, smaller at its last
    edges (Qwen2.5-VL, arXiv 2502.13923, section 2.1.1).
    """
    orders, counts, first = [], [], 0
    for times, rows, columns in grids:
        time, row, column = np.indices((times, rows // merge, columns // merge)).reshape(3, -1)
        across, down = -(-columns // merge // side), -(-rows // merge // side)
        window = (time * down + row // side) * across + column // side
        orders.append(first + window.argsort(kind="stable"))
        counts += np.bincount(window).tolist()
        first += len(window)
    return np.concatenate(orders), counts
