"""Time, row and column position of every token for the multimodal RoPE of Qwen2-VL and later.

Equal to Transformers 5.23 `get_rope_index` (Qwen2-VL, arXiv 2409.12191, 2.1; Qwen2.5-VL, arXiv
2502.13923, 2.1.2; Qwen3-VL, arXiv 2511.21631). Text advances all three equally, and after an image
it continues from the longer side. Shapes: S tokens.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from omnibal.data.native_resolution import Grid, Shown
from omnibal.model.encoders import ImageRule


def rope_positions(
    item_S: np.ndarray, shown: Sequence[Shown], rule: ImageRule, answered: int = 0
) -> np.ndarray:
    """Return RoPE positions (time, row, column) of a sample, int64 [3, S].

    Args:
        item_S: 0 for text, otherwise an id of the medium, image or video.
        shown: images and videos in token order.
        answered: number of generated tokens at the end. They continue from the largest position,
            as in Transformers' `generate`.
    """
    asked_S = item_S[: len(item_S) - answered]
    starts = np.flatnonzero(np.diff(asked_S, prepend=-1))
    stops = np.append(starts[1:], len(asked_S))
    grids = _split_runs(shown, rule)
    parts, place = [np.zeros((3, 0), np.int64)], 0
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=False):
        if not asked_S[start]:
            parts.append(_text_positions(place, stop - start))
            place += stop - start
            continue
        grid, interval = next(grids, (Grid(0, 0, 0), 1.0))
        # Multiplied in float32, then truncated, as in torch.
        times = (np.arange(grid.times, dtype=np.float32) * np.float32(interval)).astype(np.int64)
        sides = (np.arange(side // rule.merge_size) for side in (grid.rows, grid.columns))
        cells = np.stack(np.meshgrid(times, *sides, indexing="ij")).reshape(3, -1)
        if cells.shape[1] != stop - start:
            raise ValueError(f"{stop - start} tokens for {cells.shape[1]} cells of {grid}")
        parts.append(cells + place)
        place += max(grid.rows, grid.columns) // rule.merge_size
    if next(grids, None) is not None:
        raise ValueError(f"{len(shown)} images and videos have no tokens for all of their cells")
    asked = np.concatenate(parts, axis=1)
    generated = _text_positions(int(asked.max(initial=-1)) + 1, answered)
    return np.concatenate([asked, generated], axis=1)


def _split_runs(shown: Sequence[Shown], rule: ImageRule) -> Iterator[tuple[Grid, float]]:
    """Yield patches and positions per frame group (interval) of every run of tokens."""
    video = rule.video
    for grid, seconds in shown:
        if seconds is not None and video is not None and video.times != "none":
            # A timestamp text precedes each time, so each is a separate image.
            yield from [(grid._replace(times=1), 1.0)] * grid.times
        elif seconds is not None and video is not None and video.positions_per_second is not None:
            yield grid, video.positions_per_second * seconds
        else:
            yield grid, 1.0


def _text_positions(first: int, tokens: int) -> np.ndarray:
    """Return text positions from `first`, int64 [3, tokens]."""
    return np.broadcast_to(np.arange(first, first + tokens), (3, tokens))
