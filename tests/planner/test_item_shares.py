"""Images of context-parallel packs divided among ranks, against every possible division."""

from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from encoder_cases import choice_of
from length_cases import lengths_of

from omnibal.cost.link_rates import all_to_all_line
from omnibal.data.lengths import Lengths
from omnibal.data.native_resolution import Segments, sizes_of
from omnibal.job.check import training_obstacles
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan, PlannedLevel
from omnibal.model.config import load_cluster, load_model
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Group, Parallel
from omnibal.packing.features import part_features
from omnibal.packing.item_shares import ImagePieces, bounds_of_items, squares_of_shares
from omnibal.packing.packs import Packs

CAPS = Caps.of(image_tokens=1, tokens=1)
QWEN3, TWO_RANKS = load_model("qwen3-vl-8b"), Parallel(data=2, pipeline=1)


def draw_images(rng: np.random.Generator, images: int) -> list[Segments]:
    """Return images of random sizes, with an occasional video."""
    sizes = np.exp(rng.normal(5, 1, images)).astype(int) + 1
    return [Segments(int(rng.integers(2, 5)) if rng.random() < 0.2 else 1, int(n)) for n in sizes]


def lengths_with(samples: list[list[Segments]], *, listed: bool = True) -> Lengths:
    sizes = sizes_of(samples)
    found = lengths_of(tokens=sizes.tokens + 7, image_tokens=sizes.tokens)
    found.squares["squared_image_tokens"] = sizes.squares
    if listed:
        object.__setattr__(found, "image_sizes", sizes)
    return found


def min_largest_run(costs: list[float], ranks: int) -> float:
    """Return the smallest possible maximum cost of contiguous runs, by trying all."""
    cuts = combinations_with_replacement(range(len(costs) + 1), ranks - 1)
    return min(
        max(sum(costs[first:stop]) for first, stop in pairwise((0, *each, len(costs))))
        for each in cuts
    )


@pytest.mark.parametrize("context", [2, 4])
@pytest.mark.parametrize("weight", [0.0, 0.01])
def test_images_go_whole_and_nearly_as_evenly_as_runs_can(context: int, weight: float) -> None:
    """Prevents splitting, dropping or duplicating an image, and a rank that encodes much more than
    necessary."""
    rng = np.random.default_rng(context)
    level = Level(caps=CAPS, context=context, image_weight=weight)
    for _ in range(40):
        samples = [draw_images(rng, int(rng.integers(0, 4))) for _ in range(6)]
        lengths, parts = lengths_with(samples), [samples[:4], samples[4:5], samples[5:]]
        packs = Packs.from_lists([[0, 1, 2, 3], [4], [5]])
        bounds = bounds_of_items(packs, lengths, level, "image_tokens")
        squares = squares_of_shares(packs, lengths, level)
        for pack, part in enumerate(parts):
            # Tokens of every image and every time step of a video, in order.
            pieces = [one.tokens for sample in part for one in sample for _ in range(one.number)]
            ends = np.cumsum([0, *pieces]).tolist()
            assert bounds[pack, 0] == 0 and bounds[pack, -1] == ends[-1]
            runs = [pieces[ends.index(a) : ends.index(b)] for a, b in pairwise(bounds[pack])]
            assert [n for run in runs for n in run] == pieces
            assert squares[pack].tolist() == [sum(n**2 for n in run) for run in runs]
            costs = [sum(n + weight * n**2 for n in run) for run in runs]
            each = [n + weight * n**2 for n in pieces]
            largest = max(each, default=0)
            # Rounding is 1/16 token per piece, and the limit within 1/128 of the largest piece.
            assert max(costs) <= min_largest_run(each, context) + largest / 128 + 1
            assert max(costs) <= sum(each) / context + largest + 1


def test_a_sample_of_many_images_is_divided() -> None:
    """Prevents encoding all images of a long sample on one rank."""
    lengths = lengths_with([[Segments(1, 50)] * 30, [Segments(64, 10)]])
    level, packs = Level(caps=CAPS, context=4), Packs.from_lists([[0], [1]])
    bounds = bounds_of_items(packs, lengths, level, "image_tokens")
    assert np.diff(bounds[0]).max() <= 400 and np.diff(bounds[1]).tolist() == [160] * 4


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_packs_without_images_have_empty_runs(samples: int) -> None:
    """Prevents an error in the search if a context-parallel pack has no images."""
    texts: list[list[Segments]] = [[] for _ in range(samples)]
    lengths = lengths_with([*texts, [Segments(1, 50)] * 9, *texts], listed=False)
    packs = Packs.from_lists([[*range(samples)], [samples], [*range(samples + 1, 2 * samples + 1)]])
    level = Level(caps=CAPS, context=2)
    bounds = ImagePieces.from_packs(packs, lengths).bounds(level)
    assert (np.diff(bounds) >= 0).all() and bounds[:, -1].tolist() == packs.offsets[1:].tolist()
    assert bounds_of_items(packs, lengths, level, "image_tokens")[::2].tolist() == [[0, 0, 0]] * 2


def test_samples_go_whole_where_images_are_not_listed() -> None:
    """Prevents splitting an image for lengths of an earlier version, without image sizes."""
    rng = np.random.default_rng(1)
    samples = [draw_images(rng, 3) for _ in range(8)]
    lengths, packs = lengths_with(samples, listed=False), Packs.from_lists([list(range(8))])
    level = Level(caps=CAPS, context=4, image_weight=0.01)
    [bounds] = bounds_of_items(packs, lengths, level, "image_tokens")
    ends = np.cumsum([0, *lengths.column("image_tokens")])
    assert set(bounds) <= set(ends.tolist())
    [squares] = squares_of_shares(packs, lengths, level)
    places = np.searchsorted(ends, bounds)
    of_samples = lengths.column("squared_image_tokens")
    assert squares.tolist() == [of_samples[a:b].sum() for a, b in pairwise(places)]


def test_features_of_parts_are_those_of_their_images() -> None:
    """Prevents time and memory of other image shares than the trainer uses."""
    rng = np.random.default_rng(2)
    samples = [draw_images(rng, int(rng.integers(0, 5))) for _ in range(12)]
    lengths = lengths_with(samples)
    packs = Packs.from_lists([list(range(5)), list(range(5, 12))])
    level = Level(caps=CAPS, context=2, image_weight=0.002)
    names = ["image_tokens", "squared_image_tokens", "tokens"]
    found = part_features(packs, lengths, level, names)
    bounds = bounds_of_items(packs, lengths, level, "image_tokens")
    assert found[..., 0].tolist() == np.diff(bounds).tolist()
    assert found[..., 1].tolist() == squares_of_shares(packs, lengths, level).tolist()
    assert found[..., 2].sum(axis=1).tolist() == packs.sums(lengths.tokens).tolist()


def test_deepstack_features_are_exchanged_too() -> None:
    """Prevents an exchange planned without deepstack features."""
    given = {"cluster": load_cluster("h100-80g"), "parallel": TWO_RANKS, "precision": "bf16"}
    job = JobSpec(model=QWEN3, **given)
    plain, shared = job.costs_at([Level(caps=CAPS), Level(caps=CAPS, context=2)])
    place = plain.features.index("image_tokens")
    added = [cost.units["language_embed"].context_ms[:, place] for cost in (plain, shared)]
    line = all_to_all_line(job.cluster, Group(2, 1), "bf16")
    sent_ms = line.each_ms * 4 * 4096 * 2 / 2
    assert not added[0].any()
    assert (added[1][:2] > sent_ms).all() and (added[1][:2] < 2 * sent_ms).all()


def test_only_data_parallel_encoders_of_images_refuse_shared_packs() -> None:
    """Prevents refusing a plan that can be trained, or accepting a plan that cannot."""
    none = dict.fromkeys(("data", "made_for", "adapters", "data_parallel_encoders"))
    level = PlannedLevel.model_construct(context=2)
    plan = Plan.model_construct(
        model=QWEN3, levels=(level,), precision="bf16", parallel=TWO_RANKS, **none
    )
    assert len(training_obstacles(plan)) == 1  # of shapes alone
    plan = plan.model_copy(update={"data_parallel_encoders": choice_of(1, 1, {})})
    assert "need features of data-parallel encoders of images" in training_obstacles(plan)[-1]
