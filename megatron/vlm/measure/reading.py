"""Read samples while layers are timed, as loaders do in training, and measure the reading.

One low-priority loader process per rank reads all content of random samples. Times are its own CPU
time, so that other load on the machine does not count.
"""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch

from megatron.vlm.backend import has_cuda
from megatron.vlm.inputs.read_ahead import read_ahead
from megatron.vlm.inputs.reader import SampleReader
from megatron.vlm.measure.rates import sum_over_ranks
from omnibal.base.worker_pool import usable_cores
from omnibal.cost.profile import ReadingMeasurement

_READ_KINDS = ("tiles", "image_tokens", "clips", "tokens")


@dataclass(frozen=True, slots=True, eq=False)
class ReadSamples:
    """One item of the loader process: content of some samples, with counts and CPU times."""

    content: tuple[torch.Tensor, ...]  # pixels, patches, frames, token ids: sent like a micro-batch
    samples: int
    counts: np.ndarray  # tiles, image tokens, clips and tokens, float64 [4]
    ms: np.ndarray  # CPU time to read and transfer each kind, float64 [4]


class SampleDraws:
    """Endless passes over one random order; items are `samples` samples."""

    def __init__(self, reader: SampleReader, samples: int) -> None:
        self._reader, self._samples = reader, samples
        # One order on all ranks, which then meet the same errors.
        self._order = np.random.default_rng(0).permutation(len(reader.annotations))
        self._ended_s: float | None = None  # CPU time at the end of this process's last item

    def keys(self) -> Iterator[int]:
        return count()

    def __getitem__(self, item: int) -> ReadSamples:
        reader, model = self._reader, self._reader.model
        numbers = np.arange(self._samples) + item * self._samples
        drawn = self._order[numbers % len(self._order)]
        moments_s = [time.process_time()]
        samples = [reader.annotations[index] for index in drawn.tolist()]
        tiles = [
            reader.pixels(sample) if model.takes_images else torch.zeros(0) for sample in samples
        ]
        pixels = torch.cat(tiles)
        moments_s.append(time.process_time())
        shown, patches, cells = [reader.list_shown(sample) for sample in samples], torch.zeros(0), 0
        if model.images is not None:
            patches = torch.cat(list(map(reader.patches, samples, shown)))
            cells = len(patches) // model.images.positions_per_item
        moments_s.append(time.process_time())
        clips = [reader.clips(sample) if model.takes_audio else np.zeros(0) for sample in samples]
        frames = torch.from_numpy(np.concatenate(clips))
        moments_s.append(time.process_time())
        contents = zip(samples, map(len, tiles), map(len, clips), shown, strict=True)
        texts = [reader.encode(*sample_and_items).token_ids for sample_and_items in contents]
        tokens = torch.from_numpy(np.concatenate(texts))
        moments_s.append(time.process_time())
        # Also the CPU time since the last item, which transferred that item: spread over the kinds.
        before_s, self._ended_s = self._ended_s or moments_s[0], moments_s[-1]
        scale = 1e3 * (moments_s[-1] - before_s) / (moments_s[-1] - moments_s[0])
        counts = np.array([len(pixels), cells, len(frames), len(tokens)], np.float64)
        content = pixels, patches, frames, tokens
        return ReadSamples(content, len(samples), counts, scale * np.diff(moments_s))


class Reading:
    """Consumer of the loader's samples at the rate of the timed passes' tokens."""

    def __init__(self, items: Iterator[ReadSamples]) -> None:
        self._items = items
        self._due_tokens = 0.0
        self._samples = 0
        self._counts, self._ms = np.zeros((2, len(_READ_KINDS)))

    def take(self, tokens: int) -> None:
        """Take samples for `tokens` more tokens, less any surplus. UserError if unreadable."""
        self._due_tokens += tokens
        while self._due_tokens > 0:
            item = next(self._items)
            self._due_tokens -= item.counts[-1]
            self._samples += item.samples
            self._counts += item.counts
            self._ms += item.ms

    def result(self) -> ReadingMeasurement:
        """Return mean CPU times per item of each kind and per token, over all ranks; collective."""
        samples, *sums = sum_over_ranks([self._samples, *self._counts, *self._ms])
        by_kind = zip(_READ_KINDS, *np.split(np.array(sums), 2), strict=True)
        item_ms = {name: float(sum_ms / count) for name, count, sum_ms in by_kind if count}
        return ReadingMeasurement(
            samples=round(samples),
            token_ms=item_ms.pop("tokens"),
            item_ms=item_ms,
            cores=usable_cores(),
            is_shared=not has_cuda(),
        )


@contextmanager
def read_in_background(reader: SampleReader, samples: int) -> Iterator[Reading]:
    """Yield a Reading whose loader reads items of `samples` samples until the context ends."""
    draws = SampleDraws(reader, samples)
    with closing(read_ahead(draws, 1, lambda item: item)) as items:
        yield Reading(items)
