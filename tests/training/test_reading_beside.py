"""Reading of data while layers are timed: its amount, its process priority and its times."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
from data_cases import Data
from ranks import run_ranks
from toy import PROFILE, stages_of, toy_model, toy_plan

from megatron.vlm.backend import has_cuda
from megatron.vlm.inputs.read_ahead import read_ahead
from megatron.vlm.measure.profiler import Profiler
from megatron.vlm.measure.random_batches import make_profiled_batches
from megatron.vlm.measure.reading import Reading, ReadSamples, SampleDraws
from omnibal.data.tokenizer import open_tokenizer
from omnibal.job.job import JobSpec
from omnibal.model.config import load_model
from omnibal.model.parallel import Parallel
from tools.make_native_digits import make_dataset

pytestmark = pytest.mark.quick


def test_draws_read_each_sample_once(data):
    """Prevents means over some samples only, or over wrong counts of tiles and tokens."""
    lengths = data.lengths
    assert len(lengths) % 5 == 0
    drawn = [SampleDraws(data.reader, 5)[item] for item in range(len(lengths) // 5)]
    expected = [lengths.column("tiles").sum(), 0, 0, lengths.tokens.sum()]
    assert sum(draw.counts for draw in drawn).tolist() == expected
    assert sum(draw.samples for draw in drawn) == len(lengths)
    pixels, patches, frames, tokens = drawn[0].content
    assert [len(pixels), len(patches), len(frames), len(tokens)] == drawn[0].counts.tolist()
    assert not any((draw.ms < 0).any() for draw in drawn)


def test_images_at_their_native_resolution_are_read(tmp_path):
    """Prevents profiles that fail for native resolution or count patches as tokens."""
    make_dataset(tmp_path / "made", samples=20, heldout_samples=10, seed=0)
    tokenizer = open_tokenizer(tmp_path / "made" / "tokenizer")
    data = Data(tmp_path / "made/train/meta.json", tokenizer, load_model("qwen3-vl-digits"))
    lengths, drawn = data.lengths, SampleDraws(data.reader, len(data.lengths))[0]
    expected = [0, lengths.column("image_tokens").sum(), 0, lengths.tokens.sum()]
    assert drawn.counts.tolist() == expected
    assert len(drawn.content[1]) == 4 * expected[1]


def items_of(rank: int):
    """Yield items of two samples and five tokens, with known times."""
    while True:
        counts, ms = np.array([1.0, 0, 0, 5]), np.array([3.0 + rank, 0, 0, 10])
        yield ReadSamples(content=(), samples=2, counts=counts, ms=ms)


def read_and_average(links):
    taken = Reading(items_of(links.rank))
    for tokens in (1, 3, 1, 6):  # 11 tokens, of three items
        taken.take(tokens)
    return taken.result()


def test_rates_are_means_over_samples_of_all_processes():
    """Prevents rates of one process, of equally weighted draws, or of absent item kinds."""
    for found in run_ranks(Parallel(pipeline=2), read_and_average):
        assert (found.samples, found.item_ms, found.token_ms) == (2 * 3 * 2, {"tiles": 3.5}, 2.0)
        assert found.is_shared == (not has_cuda())


def count_read_tokens(links, plan):
    """Return tokens read in a round, and the profile's reading if nothing is read."""
    taken = []
    reading = SimpleNamespace(take=taken.append, result=Reading(items_of(0)).result)
    profiler = Profiler(JobSpec.of_plan(plan), links, PROFILE, reading)
    taken.clear()
    profiler.round()
    alone = Profiler(JobSpec.of_plan(plan), links, PROFILE)
    return sum(taken), alone.result([alone.round()]).reading


def test_profile_reads_as_much_as_it_trains():
    """Prevents timing layers with less or more concurrent reading than in training, and rates of
    reading that were not measured."""
    model = toy_model()
    plan = toy_plan(model, stages_of(model))
    passes = 2  # the second with full recomputation
    expected = passes * sum(batch.tokens for batch in make_profiled_batches(model, PROFILE))
    found = run_ranks(Parallel(pipeline=1), count_read_tokens, plan)
    assert found == [(expected, None)]


class Niceness:
    """Items that return the niceness of the reading process."""

    def keys(self) -> range:
        return range(3)

    def __getitem__(self, item: int) -> int:
        return os.nice(0)


def test_loader_processes_yield_to_what_computes():
    """Prevents loader processes that compete with a stage for its core."""
    own = os.nice(0)
    [theirs] = set(read_ahead(Niceness(), 1, lambda item: item))
    assert theirs == min(own + 10, 19)
    assert set(read_ahead(Niceness(), 0, lambda item: item)) == {own}


def test_handing_over_is_part_of_reading(data, monkeypatch):
    """Prevents counting a loader's packing of read items as free."""
    # Two items, 4 s apart.
    clock = iter([0.0, 1.0, 1.0, 1.0, 3.0, 7.0, 8.0, 8.0, 8.0, 10.0])
    monkeypatch.setattr("megatron.vlm.measure.reading.time.process_time", lambda: next(clock))
    draws = SampleDraws(data.reader, 2)
    first, second = draws[0], draws[1]
    assert first.ms.tolist() == [1e3, 0, 0, 2e3]
    assert second.ms.tolist() == pytest.approx([7e3 / 3, 0, 0, 14e3 / 3])
