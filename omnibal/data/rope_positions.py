"""Time, row and column of every token, by which RoPE of Qwen2-VL and later models turns.

The rules are those of Transformers 5.23 (`get_rope_index`; Qwen2-VL, arXiv 2409.12191, section 2.1,
Qwen2.5-VL, arXiv 2502.13923, section 2.1.2; Qwen3-VL, arXiv 2511.21631). Text counts on alike in
all three. Tokens of an image or a video have the place where it begins, plus their own time, row
and column; what follows it counts on from there by its longer side.

Shapes: S tokens.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from omnibal.data.native_resolution import Grid, Shown
from omnibal.model.encoders import ImageRule


def rope_positions(
    item_S: np.ndarray, shown: Sequence[Shown], rule: ImageRule, answered: int = 0
) -> np.ndarray:
    """Time, row and column of every token of one sample, int64 [3, S].

    Args:
        item_S: of every token 0, or the number of its kind where it stands for an image or a video,
            such as the id that is repeated.
        shown: images and videos in the order of their tokens.
        answered: tokens at the end that were generated: they count on from the largest position, as
            in Transformers' `generate`.

    Raises:
        ValueError: the tokens are not those of what is shown.
    """
    asked_S = item_S[: len(item_S) - answered]
    starts = np.flatnonzero(np.diff(asked_S, prepend=-1))
    stops = np.append(starts[1:], len(asked_S))
    grids = _runs(shown, rule)
    parts, place = [np.zeros((3, 0), np.int64)], 0
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=False):
        if not asked_S[start]:
            parts.append(_counted(place, stop - start))
            place += stop - start
            continue
        grid, interval = next(grids, (Grid(0, 0, 0), 1.0))
        cells = _cells(grid, interval, rule.merge_size)
        if cells.shape[1] != stop - start:
            raise ValueError(f"{stop - start} tokens stand for {cells.shape[1]} cells of {grid}")
        parts.append(cells + place)
        place += max(grid.rows, grid.columns) // rule.merge_size
    if next(grids, None) is not None:
        raise ValueError(f"{len(shown)} images and videos have no tokens for all of their cells")
    found = np.concatenate(parts, axis=1)
    return np.concatenate([found, _counted(int(found.max(initial=-1)) + 1, answered)], axis=1)


def _runs(shown: Sequence[Shown], rule: ImageRule) -> Iterator[tuple[Grid, float]]:
    """Patches of every run of tokens, and how far apart its times count."""
    video = rule.video
    for grid, seconds in shown:
        if seconds is not None and video is not None and video.times != "none":
            # A text with its time stands before every one, so each is an image of its own.
            yield from [(grid._replace(times=1), 1.0)] * grid.times
        elif seconds is not None and video is not None and video.positions_per_second is not None:
            yield grid, video.positions_per_second * seconds
        else:
            yield grid, 1.0


def _cells(grid: Grid, interval: float, merge: int) -> np.ndarray:
    """Time, row and column of every cell, int64 [3, cells]; 32-bit products are cut off, as torch
    computes them."""
    times = (np.arange(grid.times, dtype=np.float32) * np.float32(interval)).astype(np.int64)
    rows, columns = np.arange(grid.rows // merge), np.arange(grid.columns // merge)
    return np.stack(np.meshgrid(times, rows, columns, indexing="ij")).reshape(3, -1)


def _counted(first: int, tokens: int) -> np.ndarray:
    """Positions of text, int64 [3, tokens]."""
    return np.broadcast_to(np.arange(first, first + tokens), (3, tokens))
