"""Encoder passes over whole samples.

A pass has consecutive samples within an item limit, or one larger sample. Activations of a rank's
first samples are kept within another limit, and no pass mixes kept and other samples.
"""

from dataclasses import dataclass

import numpy as np

from omnibal.steps.whole_samples import DealtSamples


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplePasses:
    """Passes of all ranks, by rank and in running order, [passes]."""

    rank: np.ndarray
    """Index of the rank as dealt, int64, like the next four."""
    first: np.ndarray
    """First dealt sample of the pass."""
    stop: np.ndarray
    """End (exclusive) of its samples."""
    items: np.ndarray
    squares: np.ndarray
    is_kept: np.ndarray
    """Whether activations are kept for the backward, bool."""

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def number(self) -> np.ndarray:
        """Index of every pass among its rank's kept or not kept passes."""
        begins = _begins(2 * self.rank + ~self.is_kept)
        return np.arange(len(self)) - _of_run(np.flatnonzero(begins), begins)


def passes_of_samples(dealt: DealtSamples, items_per_pass: int, kept_items: int) -> SamplePasses:
    """Passes of dealt samples. A rank keeps activations of at most `kept_items` items."""
    ends, items = np.cumsum(dealt.items), dealt.items
    begins = _begins(dealt.rank)
    before_rank = _of_run((ends - items)[begins], begins)
    is_kept = ends - before_rank <= kept_items
    begins_run = _begins(2 * dealt.rank + ~is_kept)
    run_firsts = np.flatnonzero(begins_run)
    run_stop = _of_run(np.append(run_firsts[1:], len(items)), begins_run)
    firsts, stops = [], []
    at = run_firsts
    # One more pass for every run with samples left.
    while len(at):
        stop = np.searchsorted(ends, (ends - items)[at] + items_per_pass, "right")
        stop = np.minimum(np.maximum(stop, at + 1), run_stop[at])
        firsts.append(at)
        stops.append(stop)
        at = stop[stop < run_stop[at]]
    first, stop = (np.sort(np.concatenate([run_firsts[:0], *each])) for each in (firsts, stops))
    sums = [np.append(0, np.cumsum(each)) for each in (items, dealt.squares)]
    return SamplePasses(
        rank=dealt.rank[first],
        first=first,
        stop=stop,
        items=sums[0][stop] - sums[0][first],
        squares=sums[1][stop] - sums[1][first],
        is_kept=is_kept[first],
    )


def _begins(key: np.ndarray) -> np.ndarray:
    """Whether a run of equal keys begins, bool."""
    return np.diff(key, prepend=-1) != 0


def _of_run(values: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Value of each element's run."""
    return values[np.cumsum(begins) - 1]
