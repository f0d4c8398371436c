"""The search for the parts of a schedule, beside all cuts and the simulator of one plan."""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from cost_cases import random_cost, random_features, small_model
from partition_cases import all_cuts, equal_steps

from omnibal.cost.model import CostModel
from omnibal.model.targets import RecomputeFreedom, StageRules
from omnibal.model.units import LANGUAGE, LANGUAGE_EMBED, unit_names
from omnibal.pipeline.chunk_search import PartProblem, least_work_ms, search_parts
from omnibal.pipeline.partition import search_stages
from omnibal.pipeline.schedule_memory import schedule_memories
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.pipeline.simulate import predict_steps
from omnibal.pipeline.stage import Span, Stage
from omnibal.pipeline.stage_cost import per_step_costs, workload_times
from omnibal.pipeline.stage_memory import GIB
from omnibal.pipeline.unit_runs import layer_kinds, stages_from_cuts, unit_counts
from omnibal.pipeline.workload import Workload

TWO_CHUNKS = PipelineSchedule(name="interleaved", chunks=2)


def ragged_steps(rng: np.random.Generator, micro_batches: int, ranks: int) -> Workload:
    """Two steps, in which the last rank may lack micro-batches."""
    packs = steps_of(rng, micro_batches, ranks)
    lacks = (packs.dp_rank == ranks - 1) & (packs.slot >= rng.integers(1, micro_batches + 1))
    return packs if ranks == 1 else packs.rows(np.flatnonzero(~lacks))


def steps_of(rng: np.random.Generator, micro_batches: int, ranks: int = 1) -> Workload:
    """Two steps of equally many micro-batches on every rank."""
    shape = 2, ranks, micro_batches
    return equal_steps(shape, random_features(rng, 2 * ranks * micro_batches))


def predicted_ms(
    cost: CostModel,
    parts: tuple[Stage, ...],
    packs: Workload,
    schedule: PipelineSchedule = TWO_CHUNKS,
) -> float:
    """Mean step, by the simulator of one plan."""
    times, once = workload_times(cost, (parts,), packs), per_step_costs(cost, parts, schedule)
    return float(predict_steps(times, packs, once, schedule).step_ms.mean())


@pytest.mark.parametrize(
    ("seed", "layers", "stages", "schedule"),
    [
        *product(range(2), [5], [2], [TWO_CHUNKS, PipelineSchedule(name="zb-v", chunks=2)]),
        *product(range(3), [6], [3], [PipelineSchedule(name="zb-h1")]),
    ],
)
def test_without_a_cap_the_best_of_all_cuts_is_found(
    seed: int, layers: int, stages: int, schedule: PipelineSchedule
) -> None:
    """Prevents: a search that misses the best cut, or that simulates another step than a plan's."""
    rng = np.random.default_rng(seed)
    model, cost = small_model(3, layers), random_cost(rng)
    packs = ragged_steps(rng, int(rng.integers(2, 7)), int(rng.integers(1, 3)))
    found = search_parts(cost, model, packs, stages, np.inf, schedule)
    assert found.step_ms == pytest.approx(predicted_ms(cost, found.stages, packs, schedule))
    cuts = all_cuts(model, stages * schedule.chunks)
    best_ms = min(predicted_ms(cost, parts, packs, schedule) for parts in cuts)
    assert found.step_ms == pytest.approx(best_ms)
    assert found.lower_bound_ms <= best_ms


def test_the_parts_of_one_chunk_are_the_stages_of_the_exact_search() -> None:
    """Prevents: bounds or moves that leave out the best stages, with ranks of unequal numbers."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        model, cost = small_model(4, 8), random_cost(rng)
        packs = ragged_steps(rng, 6, 2)
        exact = search_stages(cost, model, packs, 3, 1e12)
        found = search_parts(cost, model, packs, 3, 1e12, ONE_FORWARD_ONE_BACKWARD)
        assert found.step_ms == pytest.approx(exact.step_ms)


Options = list[tuple[Stage, ...]]


def peak_bytes(cost: CostModel, parts: tuple[Stage, ...], packs: Workload) -> float:
    """Peak of the fullest stage, as plans are checked by it."""
    memories = schedule_memories(cost, [parts], packs, TWO_CHUNKS)
    return max(memory.peak_gib for memory in memories) * GIB


def best_of(
    cost: CostModel, packs: Workload, options: Options, share: float
) -> tuple[float, Options, float]:
    """A cap that such a share of options fits, these, and the mean step of the fastest."""
    peaks = np.array([peak_bytes(cost, each, packs) for each in options])
    cap_bytes = float(np.quantile(peaks, share))
    fitting = [each for each, peak in zip(options, peaks, strict=True) if peak <= cap_bytes]
    return cap_bytes, fitting, min(predicted_ms(cost, each, packs) for each in fitting)


def with_all_recomputed(cost: CostModel, parts: tuple[Stage, ...]) -> Iterator[tuple[Stage, ...]]:
    """Parts with every choice of what they recompute, the earliest layers of each kind."""
    layers = layer_kinds(cost.kinds)
    every = []
    for part in parts:
        counts = unit_counts(cost.kinds, part)[layers].tolist()
        every.append([*product(*(range(count + 1) for count in counts))])
    cuts = np.cumsum([part.size for part in parts])[:-1].tolist()
    model = small_model(2, 3)
    return (stages_from_cuts(model, cuts, numbers) for numbers in product(*every))


@pytest.mark.parametrize("seed", range(3))
def test_a_cap_is_kept_by_nearly_the_best_of_all_recomputed_layers(seed: int) -> None:
    """Prevents: parts over the cap, and recomputation that costs more than it must."""
    rng = np.random.default_rng(seed)
    model, cost = small_model(2, 3), random_cost(rng)
    packs = steps_of(rng, 4)
    options = [each for cut in all_cuts(model, 4) for each in with_all_recomputed(cost, cut)]
    cap_bytes, _, best_ms = best_of(cost, packs, options, 0.2)
    found = search_parts(cost, model, packs, 2, cap_bytes, TWO_CHUNKS)
    assert peak_bytes(cost, found.stages, packs) <= cap_bytes * (1 + 1e-9)
    assert best_ms * (1 - 1e-9) <= found.step_ms <= best_ms * 1.03


def test_the_bound_is_below_every_cut() -> None:
    """Prevents: a proof of what is not so."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        model, cost = small_model(2, 4), random_cost(rng)
        packs = steps_of(rng, int(rng.integers(1, 6)))
        bound_ms = least_work_ms(PartProblem.of(cost, model, packs, 2, np.inf, TWO_CHUNKS))
        steps = [predicted_ms(cost, parts, packs) for parts in all_cuts(model, 4)]
        assert 0 < bound_ms <= min(steps)


def with_numbers(part: Stage, numbers: dict[str, int]) -> Stage:
    """The part with so many of the first layers recomputed that it holds of each tower."""
    again = [Span(tower, part.layers(tower)[:number]) for tower, number in numbers.items()]
    return part.model_copy(update={"recompute": tuple(span for span in again if span.layers)})


def told(parts: tuple[Stage, ...], freedom: RecomputeFreedom) -> Iterator[tuple[Stage, ...]]:
    """Two stages of these parts with all numbers that a trainer of such freedom takes."""
    most = max(part.layer_count for part in parts)
    if freedom is RecomputeFreedom.STAGES:
        for numbers in product(range(most + 1), repeat=2):
            of_parts = [dict.fromkeys(("vision", LANGUAGE), numbers[k % 2]) for k in range(4)]
            yield tuple(map(with_numbers, parts, of_parts))
        return
    for vision, language in product((0, 2), range(most + 1)):
        numbers = {"vision": vision, LANGUAGE: language}
        yield tuple(with_numbers(part, numbers) for part in parts)


@pytest.mark.parametrize("freedom", ["language", "stages"])
@pytest.mark.parametrize("on_first", [True, False])
def test_numbers_that_a_trainer_is_told_are_nearly_the_best(freedom: str, on_first: bool) -> None:
    """Prevents: chunks that recompute other layers than a trainer can be told, encoders behind the
    first part where it has them there, and numbers larger than they must be."""
    rules = StageRules(encoders_on_first=on_first, recompute=RecomputeFreedom(freedom))
    model, embed = small_model(2, 5), unit_names(small_model(2, 5)).index(LANGUAGE_EMBED)
    for seed in range(2):
        rng = np.random.default_rng(seed)
        cost, packs = random_cost(rng), steps_of(rng, 4)
        cuts = [cut for cut in all_cuts(model, 4) if not on_first or cut[0].size > embed]
        options = [each for cut in cuts for each in told(cut, rules.recompute)]
        cap_bytes, fitting, best_ms = best_of(cost, packs, options, 0.3)
        found = search_parts(cost, model, packs, 2, cap_bytes, TWO_CHUNKS, rules=rules)
        assert found.stages in fitting
        assert found.step_ms <= best_ms * 1.03
