"""The joint search against brute force, and stages against the model they are cut from."""

import math
import re
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from cost_cases import LinksInTime, model_of, random_cost, random_features, small_model
from partition_cases import frozen, planners_figures, random_packs
from scipy.optimize import nnls

from omnibal.base.errors import UserError
from omnibal.cost.analytic import analytic_cost
from omnibal.cost.model import CostModel, UnitCost
from omnibal.model.config import ModelConfig, load_cluster, load_model
from omnibal.model.parallel import Parallel
from omnibal.model.units import unit_names
from omnibal.pipeline import partition, split_search
from omnibal.pipeline.bounds import least_step_ms
from omnibal.pipeline.critical_path import SampledSteps
from omnibal.pipeline.least_peak import least_peak_of_splits, peak_vs_budget
from omnibal.pipeline.partition import sampled_steps, search_stages
from omnibal.pipeline.predict import MAX_SIMULATED_STEPS
from omnibal.pipeline.schedules import Pass, one_forward_one_backward
from omnibal.pipeline.simulate import simulate_run
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.stage_memory import GIB
from omnibal.pipeline.stage_options import StageOptions, on_paths, stage_choices
from omnibal.pipeline.unit_runs import check_stages, recomputed_counts, stages_from_cuts
from omnibal.pipeline.workload import Workload

LAYERS = ("vision_layer", "language_layer")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunOptions:
    """A run of units with all numbers of recomputed layers. [options, packs] where not said."""

    forward_ms: np.ndarray
    backward_ms: np.ndarray
    kept: np.ndarray
    """Bytes that each micro-batch keeps between its forward and its backward."""
    running: np.ndarray
    """Most bytes of each micro-batch while one of the run's units works on it, [2, options, packs]:
    forward and backward."""
    link_bytes: np.ndarray
    """Of the largest micro-batch: its input, the input's gradient, its output, the output's
    gradient, [4]."""
    state: float
    trained: int
    exchange_ms: float
    """Of the gradient of a tied matrix, with the stage that has the other copy."""


def run_options(cost: CostModel, held: tuple[str, ...], features: np.ndarray) -> RunOptions:
    forward = sum(features @ cost.units[unit].forward_ms for unit in held)
    plain = sum(features @ cost.units[unit].backward_ms for unit in held)
    state = sum(
        cost.units[unit].parameters * 2 + cost.units[unit].trained_parameters * 16 for unit in held
    )
    ends = {"language_embed", "head"} & set(held)
    once = cost.tied_parameters if len(ends) == 2 else 0
    state -= once * 18
    both_ways_ms = 2 * (cost.link_latency_ms + cost.link_ms_per_byte * 2 * cost.tied_parameters)
    backward_ms, kept_bytes, running_bytes = [], [], []
    layers = [kind.name for kind in cost.kinds if kind.is_layer]
    for numbers in product(*(range(held.count(kind) + 1) for kind in layers)):
        left = dict(zip(layers, numbers, strict=True))
        backward, again = plain.copy(), []
        for unit in held:
            again.append(left.get(unit, 0) > 0)
            if again[-1]:
                left[unit] -= 1
                backward += features @ cost.units[unit].recompute_ms
        kept, running = memory_of_run(cost, held, again, features)
        backward_ms.append(backward)
        kept_bytes.append(kept)
        running_bytes.append(running)
    return RunOptions(
        forward_ms=np.repeat(forward[None], len(kept_bytes), axis=0),
        backward_ms=np.array(backward_ms),
        kept=np.array(kept_bytes),
        running=np.stack(running_bytes, axis=1),
        link_bytes=link_bytes(cost, held, features),
        state=state,
        trained=sum(cost.units[unit].trained_parameters for unit in held) - once,
        exchange_ms=both_ways_ms if cost.tied_parameters and len(ends) == 1 else 0.0,
    )


def memory_of_run(
    cost: CostModel, held: tuple[str, ...], again: list[bool], features: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What micro-batches keep between forward and backward, [packs], and need while a unit runs,
    [2, packs], forward and backward."""
    first, last = held[0], max(held, key=list(cost.units).index)
    gradient = features @ cost.units[last].output_gradient_bytes
    layers = {kind.name: kind.tower for kind in cost.kinds if kind.is_layer}
    kept, running = np.zeros(len(features)), np.zeros((2, len(features)))
    if first.endswith(("projector", "embed")):
        kept = kept + unkept_input(cost, first, features)
    for place, unit in enumerate(held):
        costs = cost.units[unit]
        back = features @ (costs.activation_bytes - costs.boundary_bytes)
        kept = kept + features @ costs.boundary_bytes + (0 if again[place] else back)
        tower = layers.get(unit)
        own = [i for i, name in enumerate(held) if tower and layers.get(name) == tower]
        before = kept
        if len({held[i] for i in own}) > 1:
            # Layers of several kinds take turns, and all of them count as if they came before.
            of_kind = [again[i] for i in own if held[i] == unit]
            back = back if all(of_kind) else 0 * back
            for i in own:
                if i > place:
                    later = cost.units[held[i]]
                    bytes_ = later.boundary_bytes if again[i] else later.activation_bytes
                    before = before + features @ bytes_
        # Units after this one keep nothing yet, forward, and nothing any more, backward.
        brought = back if again[place] else 0
        working = (features @ costs.transient_bytes.T).max(axis=1)
        if cost.tied_trained_parameters and {"language_embed", "head"} <= set(held):
            # The head's gradient of the tied matrix waits for the embed's, then comes their sum.
            waiting = 2 * (unit == "language_embed") + unit.startswith("language_layer")
            working = working + 2 * waiting * cost.tied_parameters
        given = np.zeros_like(gradient) if unit == last or not costs.has_backward else gradient
        running = np.maximum(running, before + brought + working + np.stack([0 * given, given]))
    shared = max(features.max(axis=0) @ cost.units[unit].shared_bytes for unit in held)
    return kept, running + shared


def before_unit(cost: CostModel, unit: str) -> UnitCost | None:
    """The unit before a stage that begins with this one; None at the model's start."""
    place = list(cost.units).index(unit)
    return list(cost.units.values())[place - 1] if place else None


def unkept_input(cost: CostModel, first: str, features: np.ndarray) -> np.ndarray:
    """Input of a stage, kept for its gradient by no unit. [packs]"""
    before = before_unit(cost, first)
    has_gradient = before is not None and before.output_gradient_bytes.any()
    return features @ before.output_bytes if has_gradient else np.zeros(len(features))


def link_bytes(cost: CostModel, held: tuple[str, ...], features: np.ndarray) -> np.ndarray:
    """Of the largest micro-batch: input, its gradient, output, its gradient. [4]"""
    last = cost.units[max(held, key=list(cost.units).index)]
    ends = [before_unit(cost, held[0]), last]
    sizes = [
        features.max(axis=0) @ getattr(end, name) if end else 0.0
        for end in ends
        for name in ("output_bytes", "output_gradient_bytes")
    ]
    return np.array(sizes)


def peaks(
    options: RunOptions, ranks: list[np.ndarray], stage: int, stages: int, micro_batches: int
) -> np.ndarray:
    """Most bytes while a rank's step runs, one operation of the schedule after another. [options]

    `ranks` are the packs of every rank of every step.
    """
    most = np.zeros(len(options.kept))
    operations = one_forward_one_backward(stages, 1, micro_batches).operations[stage]
    for rank in ranks:
        links, held = LinksInTime(len(rank)), []
        for operation in operations:
            if operation.micro_batch < len(rank):
                one, backward = rank[operation.micro_batch], operation.kind is Pass.BACKWARD
                held += [] if backward else [one]
                others = options.kept[:, held].sum(axis=1) - options.kept[:, one]
                there = np.array(links.before(operation.kind)) @ options.link_bytes
                most = np.maximum(most, others + options.running[int(backward), :, one] + there)
                links.run(operation.kind)
                held = held[backward:]
    return most + options.state


def finish_times(
    forward: list[np.ndarray],
    backward: list[np.ndarray],
    send: np.ndarray,
    receive: np.ndarray,
    gathers: list[np.ndarray],
) -> list[np.ndarray]:
    """When each stage's last backward ends, by letting stages act whenever they can.

    A stage runs a forward while fewer than p - s micro-batches are in flight on it and some are
    left, else a backward. Each part of its first forward waits for a bucket of weights. `forward`
    and `backward` are [..., m] of each stage and broadcast against each other; `send` and `receive`
    are [p - 1, m]; `gathers` are the times at which every bucket of a stage has come.
    """
    p, m = len(forward), forward[0].shape[-1]
    free: list[np.ndarray] = [np.zeros(1)] * p
    done: list[dict[str, list[np.ndarray]]] = [{"f": [], "b": []} for _ in range(p)]
    while any(len(stage["b"]) < m for stage in done):
        for s in range(p):
            forwards, backwards = len(done[s]["f"]), len(done[s]["b"])
            if forwards < m and forwards - backwards < p - s:
                if s > 0 and len(done[s - 1]["f"]) <= forwards:
                    continue
                ready = done[s - 1]["f"][forwards] + send[s - 1, forwards] if s > 0 else 0.0
                free[s] = np.maximum(free[s], ready)
                parts = gathers[s] if not forwards else np.zeros(1)
                for come in parts:
                    free[s] = np.maximum(free[s], come) + forward[s][..., forwards] / len(parts)
                done[s]["f"].append(free[s])
            elif backwards < m:
                if s < p - 1 and len(done[s + 1]["b"]) <= backwards:
                    continue
                ready = done[s + 1]["b"][backwards] + receive[s, backwards] if s < p - 1 else 0.0
                free[s] = np.maximum(free[s], ready) + backward[s][..., backwards]
                done[s]["b"].append(free[s])
    return free


def along(values: np.ndarray, stage: int, stages: int) -> np.ndarray:
    """[options, ...] with the options as axis `stage` of `stages`."""
    shape = [1] * stages
    shape[stage] = len(values)
    return values.reshape(*shape, *values.shape[1:])


def split_times(
    cost: CostModel, choices: list[RunOptions], lasts: list[str], packs: Workload
) -> np.ndarray:
    """Mean step time of all recomputed sets of one split. [options of stage 0, of stage 1, ...]"""
    p = len(choices)
    forward = [along(choice.forward_ms, s, p) for s, choice in enumerate(choices)]
    backward = [along(choice.backward_ms, s, p) for s, choice in enumerate(choices)]
    units = [cost.units[unit] for unit in lasts]
    send = np.array([packs.features @ unit.output_bytes for unit in units])
    receive = np.array([packs.features @ unit.output_gradient_bytes for unit in units])
    returns = np.array([unit.output_gradient_bytes.any() for unit in units]).reshape(-1, 1)
    send_ms = cost.link_latency_ms + cost.link_ms_per_byte * send
    receive_ms = cost.link_latency_ms * returns + cost.link_ms_per_byte * receive
    trained = np.array([choice.trained for choice in choices])
    update_ms = cost.optimizer_ms_fixed + (cost.rates.optimizer_ms * trained).max()
    total_ms = 0.0
    buckets = [max(math.ceil(trained[0] / cost.bucket_parameters), 1)] + [1] * (p - 1)
    gathers = [
        cost.rates.weight_gather_ms * number * np.arange(1, n + 1) / n
        for number, n in zip(trained, buckets, strict=True)
    ]
    for step in np.unique(packs.step):
        # When every bucket of a stage's gradients is ready on all ranks.
        ready: list[list[np.ndarray]] = [[np.zeros(1)] * n for n in buckets]
        for rank in range(packs.data_parallel_size):
            mine = np.flatnonzero((packs.step == step) & (packs.dp_rank == rank))
            finish = finish_times(
                [f[..., mine] for f in forward],
                [b[..., mine] for b in backward],
                send_ms[:, mine] if p > 1 else send_ms,
                receive_ms[:, mine] if p > 1 else receive_ms,
                gathers,
            )
            for s, (end, n) in enumerate(zip(finish, buckets, strict=True)):
                for k in range(n):
                    left = backward[s][..., mine[-1]] * (n - 1 - k) / n if len(mine) else 0.0
                    ready[s][k] = np.maximum(ready[s][k], end - left)
        reduced = []
        for number, n, choice, moments in zip(trained, buckets, choices, ready, strict=True):
            end = np.zeros(1)
            for moment in moments:
                one_ms = cost.rates.gradient_reduction_ms * number / n
                end = np.maximum(end, moment) + one_ms
            reduced.append(end + choice.exchange_ms)
        total_ms = total_ms + reduce(np.maximum, reduced) + update_ms
    shape = [len(choice.kept) for choice in choices]
    return np.broadcast_to(total_ms / len(np.unique(packs.step)), shape)


def brute_force(
    cost: CostModel, model: ModelConfig, packs: Workload, p: int
) -> tuple[np.ndarray, np.ndarray]:
    """Step time in ms and largest peak in bytes of all splits and recomputed sets."""
    sequence = unit_names(model)
    layers = {kind.name for kind in cost.kinds if kind.is_layer}
    options = {
        (a, b): run_options(cost, sequence[a:b], packs.features)
        for a, b in combinations(range(len(sequence) + 1), 2)
        if layers & set(sequence[a:b])
    }
    place = packs.step * packs.data_parallel_size + packs.dp_rank
    ranks = [np.flatnonzero(place == number) for number in np.unique(place)]
    peaks_of = {
        (stage, run): peaks(choices, ranks, stage, p, int(packs.slot.max()) + 1)
        for run, choices in options.items()
        for stage in range(p)
    }
    times, bytes_ = [], []
    for cuts in combinations(range(1, len(sequence)), p - 1):
        runs = list(pairwise((0, *cuts, len(sequence))))
        if not all(run in options for run in runs):
            continue
        lasts = [sequence[cut - 1] for cut in cuts]
        times.append(split_times(cost, [options[run] for run in runs], lasts, packs).ravel())
        split_peaks = [peaks_of[stage, run] for stage, run in enumerate(runs)]
        bytes_.append(reduce(np.maximum.outer, split_peaks).ravel())
    return np.concatenate(times), np.concatenate(bytes_)


def random_case(rng: np.random.Generator, most_layers: int) -> tuple[CostModel, ModelConfig, int]:
    """Costs, model, packs and pipeline size."""
    vision, language = rng.integers(1, most_layers, 2)
    model = small_model(int(vision), int(language))
    p = int(rng.integers(1, min(4, vision + language) + 1))
    cost = random_cost(rng)
    rates = replace(cost.rates, gradient_reduction_ms=10 ** rng.uniform(-7, -4.5))
    cost = replace(cost, rates=rates)
    if rng.random() < 0.15:
        frozen_units = ("vision_embed", "vision_layer")
        units = {**cost.units, **{unit: frozen(cost.units[unit]) for unit in frozen_units}}
        cost = replace(cost, units=units)
    packs = random_packs(rng, int(rng.integers(1, 7)))
    # Drawn apart, so that cases which are known by their seed stay what they are.
    apart = rng.spawn(1)[0]
    cost = tied(cost) if apart.random() < 0.3 else cost
    return overlapped(cost, apart), model, packs, p


def overlapped(cost: CostModel, rng: np.random.Generator) -> CostModel:
    """The costs with a gather of weights, and in most cases with buckets that are hidden."""
    whole = sum(unit.trained_parameters for unit in cost.units.values())
    return replace(
        cost,
        rates=replace(cost.rates, weight_gather_ms=10 ** rng.uniform(-7, -4.5)),
        bucket_parameters=math.inf if rng.random() < 0.2 else whole / rng.uniform(0.5, 8),
    )


def random_case_of(
    rng: np.random.Generator, towers: str, most: int
) -> tuple[CostModel, ModelConfig, Workload, int]:
    """As `random_case`, for a model of these towers with at most so many layers in all."""
    number = len(towers.split())
    layers = 1 + rng.multinomial(rng.integers(0, most - number + 1), [1 / number] * number)
    model = model_of(towers, *layers.tolist())
    cost = random_cost(rng, model)
    # Layers of unlike ratios between features, so that which are worth recomputing depends on more.
    units = {
        name: replace(unit, recompute_ms=unit.recompute_ms ** rng.integers(1, 4))
        for name, unit in cost.units.items()
    }
    cost = replace(cost, units=units)
    packs = random_packs(rng, int(rng.integers(1, 5)), len(cost.features))
    cost = tied(cost) if rng.random() < 0.3 else cost
    return cost, model, packs, int(rng.integers(1, min(3, model.layers) + 1))


def tied(cost: CostModel) -> CostModel:
    """With language embed and head that are one matrix, which is most of what there is."""
    sizes = {"parameters": 3_000_000, "trained_parameters": 3_000_000}
    ends = ("language_embed", "head")
    units = {**cost.units, **{end: replace(cost.units[end], **sizes) for end in ends}}
    return replace(cost, units=units, tied_parameters=3_000_000)


def large_case(layers: tuple[int, int], p: int) -> tuple[CostModel, ModelConfig, Workload]:
    """InternVL with so many vision and language layers, on packs that all differ."""
    base = load_model("internvl-chat-1.5-6b-20b")
    model = base.with_layers(vision=layers[0], language=layers[1])
    rng = np.random.default_rng(1)
    shape = steps, ranks, micro_batches = 4, 2, 16
    packs = steps * ranks * micro_batches
    tiles = rng.integers(5, 10, packs)
    tokens = 4096 - rng.integers(0, 400, packs)
    features = np.stack([np.ones(packs), tiles, tokens, tokens**2 / 3, tokens / 4], axis=1)
    step, dp_rank, slot = (axis.ravel() for axis in np.indices(shape))
    cost = analytic_cost(
        model, load_cluster("a100-80g"), Parallel(tensor=4, pipeline=p, data=ranks), "bf16"
    )
    return (
        cost,
        model,
        Workload(
            features=features, step=step, dp_rank=dp_rank, slot=slot, data_parallel_size=ranks
        ),
    )


def test_the_search_equals_brute_force():
    """Prevents a split or recomputed set that is not the best, and caps wrongly held or passed."""
    rng = np.random.default_rng(0)
    outcomes = {"infeasible": 0, "recomputed": 0, "kept": 0}
    for number in range(55):
        cost, model, packs, p = random_case(rng, 6 if number % 20 == 0 else 4)
        times, peaks_of_all = brute_force(cost, model, packs, p)
        low, high = peaks_of_all.min(), peaks_of_all.max()
        cap = rng.uniform(low - 0.1 * (high - low), low + 0.8 * (high - low))
        assert least_peak_of_splits(cost, model, packs, p) == pytest.approx(low, rel=1e-9)
        if cap < low:
            outcomes["infeasible"] += 1
            with pytest.raises(UserError, match="more than the memory cap") as raised:
                search_stages(cost, model, packs, p, cap)
            stated = float(re.search(r"needs ([\d.]+) GiB", str(raised.value))[1])
            assert stated == pytest.approx(low / GIB, abs=0.005)
            cap = low * (1 + 1e-9)
        result = search_stages(cost, model, packs, p, cap)
        check_stages(model, result.stages)
        best_ms = times[peaks_of_all <= cap].min()
        assert result.step_ms == pytest.approx(best_ms, rel=2e-9)
        assert result.lower_bound_ms == result.step_ms
        step_ms, peak = planners_figures(cost, result.stages, packs)
        assert result.step_ms == pytest.approx(step_ms, rel=1e-12)
        assert peak <= cap * (1 + 1e-9)
        recomputed = any(stage.recomputed_layers for stage in result.stages)
        outcomes["recomputed" if recomputed else "kept"] += 1
    assert min(outcomes.values()) >= 4, outcomes


@pytest.mark.parametrize(
    ("towers", "most"),
    [("language", 6), ("runs", 7), ("vision runs", 7), ("vision audio language", 7)],
)
def test_the_search_equals_brute_force_for_any_towers(towers: str, most: int):
    """Prevents towers or kinds of layer that are counted, recomputed or numbered as another's."""
    rng = np.random.default_rng(0)
    recomputed = several = 0
    for _ in range(20):
        cost, model, packs, p = random_case_of(rng, towers, most)
        times, peaks_of_all = brute_force(cost, model, packs, p)
        low, high = peaks_of_all.min(), peaks_of_all.max()
        cap = low * (1 + 1e-9) + rng.uniform(0, 0.8) * (high - low)
        assert least_peak_of_splits(cost, model, packs, p) == pytest.approx(low, rel=1e-9)
        result = search_stages(cost, model, packs, p, cap)
        check_stages(model, result.stages)
        best_ms = times[peaks_of_all <= cap].min()
        assert result.step_ms == result.lower_bound_ms == pytest.approx(best_ms, rel=2e-9)
        step_ms, peak = planners_figures(cost, result.stages, packs)
        assert result.step_ms == pytest.approx(step_ms, rel=1e-12)
        assert peak <= cap * (1 + 1e-9)
        again = [np.count_nonzero(recomputed_counts(cost.kinds, s)) for s in result.stages]
        recomputed += max(again) > 0
        several += max(again) > 1
    assert recomputed >= 5 and (several >= 1 or towers == "language"), (recomputed, several)


@pytest.mark.parametrize(
    "towers", ["language", "vision language", "vision runs", "vision audio language"]
)
def test_every_micro_batch_is_within_the_extremes(towers: str):
    """Prevents dropping a set that is the best on a micro-batch unlike those looked at."""
    rng = np.random.default_rng(1)
    for _ in range(40):
        cost, model, packs, p = random_case_of(rng, towers, 8)
        problem = partition._problem(cost, model, packs, p, 1e15)
        times_ms = packs.features @ problem.structure.recompute_ms.T
        for time_ms in times_ms:
            _, left_ms = nnls(problem.extreme_ms.T, time_ms)
            assert left_ms < 1e-9 * times_ms.max()


def test_micro_batches_that_cost_nothing_decide_nothing():
    """Prevents that all recomputed sets count as equal since a micro-batch takes no time in either
    tower: sets that are slower for the others would be kept in place of the best, and `proven`."""
    rng = np.random.default_rng(0)
    model, several = small_model(2, 2), 0
    step, dp_rank, slot = (axis.ravel() for axis in np.indices((1, 1, 4)))
    for _ in range(40):
        cost = random_cost(rng)
        units = dict(cost.units)
        for layer, feature in zip(LAYERS, (1, 2), strict=True):
            forward_ms = rng.uniform(0.5, 1) * np.eye(5)[feature]
            units[layer] = replace(
                units[layer],
                forward_ms=forward_ms,
                backward_ms=2 * forward_ms,
                recompute_ms=0.8 * forward_ms,
            )
        cost = replace(cost, units=units)
        features = random_features(rng, 4)
        features[0, 1:3] = 0
        packs = Workload(
            features=features, step=step, dp_rank=dp_rank, slot=slot, data_parallel_size=1
        )
        times, peaks_of_all = brute_force(cost, model, packs, 1)
        cap = peaks_of_all.min() + rng.uniform(0.2, 0.6) * np.ptp(peaks_of_all)
        fitting = times[peaks_of_all <= cap]
        assert search_stages(cost, model, packs, 1, cap).step_ms == pytest.approx(fitting.min())
        several += fitting.max() > 1.01 * fitting.min()
    assert several >= 20


def test_steps_that_take_no_time_are_searched():
    """Prevents a search without end: no limit is below nothing, and none grows from it."""
    rng = np.random.default_rng(0)
    cost, nothing = random_cost(rng), np.zeros(5)
    units = {
        unit: replace(unit_cost, forward_ms=nothing, backward_ms=nothing, recompute_ms=nothing)
        for unit, unit_cost in cost.units.items()
    }
    model, packs = small_model(2, 2), random_packs(rng, 3)
    cost = replace(cost, units=units)
    result = search_stages(cost, model, packs, 2, 1e15)
    times, _ = brute_force(cost, model, packs, 2)
    assert result.step_ms == pytest.approx(times.min())


def test_the_smallest_cap_that_anything_fits_is_searched():
    """Prevents a cap that is refused, searched without end or given slower stages, since the same
    bytes were added up in another order."""
    for seed in (44, 67, 111, 246, 303, 329):
        cost, model, packs, p = random_case(np.random.default_rng(seed), 3)
        least = least_peak_of_splits(cost, model, packs, p)
        for share in (0.3, 0.99, 1, 1.01, 1.5, 4):
            cap, found = share * least, peak_vs_budget(cost, model, packs, p, share * least)
            assert least * (1 - 1e-12) <= found <= cap if share >= 1 else cap < found <= least
        exact, roomy = (
            search_stages(cost, model, packs, p, cap) for cap in (least, least * (1 + 1e-9))
        )
        assert exact.step_ms == pytest.approx(roomy.step_ms, rel=2e-9)


def test_rows_with_another_number_of_micro_batches_are_told_apart():
    """Prevents that a micro-batch of zeros, which still costs links, is dropped or added."""
    features = np.zeros((5, 5))
    features[[0, 3]] = 1
    packs = Workload(
        features=features,
        step=np.array([0, 0, 0, 1, 1]),
        dp_rank=np.zeros(5, np.int64),
        slot=np.array([0, 1, 2, 0, 1]),
        data_parallel_size=1,
    )
    steps = SampledSteps.of(packs, random_cost(np.random.default_rng(0)))
    assert sorted(steps.counts[steps.rows].ravel()) == [2, 3]


def test_every_path_is_a_lower_bound():
    """Prevents a bound above what is possible, which would rule out the best split unnoticed."""
    rng = np.random.default_rng(4)
    compared = tight = 0
    for _ in range(60):
        cost, model, packs, p = random_case(rng, 6)
        cap = rng.uniform(1, 1.5) * least_peak_of_splits(cost, model, packs, p)
        problem = partition._problem(cost, model, packs, p, cap)
        options = [
            stage_choices(problem, stage, np.arange(len(problem.structure.runs.start))).fitting
            for stage in range(p)
        ]
        kept = on_paths([(o.start, o.end) for o in options], problem.units)
        options = [option.take(k) for option, k in zip(options, kept, strict=True)]
        splits = every_split(options, problem.units)[:300]
        terms = np.stack([o.terms[splits[:, s]] for s, o in enumerate(options)], axis=1)
        step_ms = problem.simulator.step_ms(terms)
        allowed_ms = step_ms * (1 + 1e-12)
        for stage, option in enumerate(options):
            assert (option.bound_ms[splits[:, stage]] <= allowed_ms).all()
            lengths = np.tensordot(terms, problem.structure.weights[stage], axes=((1, 2), (1, 2)))
            assert (lengths <= allowed_ms[:, None]).all()
            tight += np.isclose(lengths.max(axis=1), step_ms).sum()
        paths = problem.simulator.critical_paths(terms)
        lengths = np.tensordot(terms, paths, axes=((1, 2), (1, 2)))
        assert (lengths <= allowed_ms[:, None]).all()
        np.testing.assert_allclose(np.diag(lengths), step_ms, rtol=1e-12)
        compared += len(splits)
    assert compared > 250
    assert tight > 0.1 * compared


def every_split(options: list[StageOptions], units: int) -> np.ndarray:
    """All ways through the stages' options. [n, p]"""
    partial = [((), 0)]
    for option in options:
        partial = [
            ((*chosen, i), int(option.end[i]))
            for chosen, position in partial
            for i in np.flatnonzero(option.start == position)
        ]
    return np.array([chosen for chosen, position in partial if position == units])


def test_a_spent_budget_is_admitted(monkeypatch: pytest.MonkeyPatch):
    """Prevents an inexact result that claims to be proven, and a bound above what is possible."""
    cost, model, packs = large_case((30, 50), 8)
    cap = 1.3 * least_peak_of_splits(cost, model, packs, 8)
    best = search_stages(cost, model, packs, 8, cap)
    assert best.lower_bound_ms == best.step_ms
    monkeypatch.setattr(split_search, "_FIRST_WIDTH", 1)
    monkeypatch.setattr(split_search, "_MAX_WIDTH", 1)
    monkeypatch.setattr(split_search, "_MAX_ROUNDS", 1)
    cut_short = search_stages(cost, model, packs, 8, cap)
    assert cut_short.lower_bound_ms < cut_short.step_ms
    assert cut_short.lower_bound_ms <= best.step_ms * (1 + 1e-9)
    assert cut_short.step_ms >= best.step_ms * (1 - 1e-9)
    assert cut_short.simulated < best.simulated


def test_little_effort_ends_with_what_it_has():
    """Prevents an effort that is not limited, or a bound that was never proven."""
    cost, model, packs = large_case((30, 50), 8)
    cap = 1.3 * least_peak_of_splits(cost, model, packs, 8)
    full, little = (search_stages(cost, model, packs, 8, cap, effort=e) for e in (1.0, 1e-6))
    assert little.simulated < full.simulated
    assert little.lower_bound_ms <= full.step_ms <= little.step_ms


def test_a_gap_that_stays_open_is_given_up(monkeypatch: pytest.MonkeyPatch):
    """Prevents a search of minutes where the bounds do not meet, and a result that depends on how
    fast the machine is."""
    cost, model, packs = large_case((30, 50), 20)
    cap = 1.2 * least_peak_of_splits(cost, model, packs, 20)
    monkeypatch.setattr(partition, "MAX_WORK", 1e6)
    first, again = (search_stages(cost, model, packs, 20, cap) for _ in range(2))
    assert first.lower_bound_ms < first.step_ms
    assert (first.stages, first.lower_bound_ms) == (again.stages, again.lower_bound_ms)
    monkeypatch.setattr(partition, "MAX_WORK", 1e8)
    longer = search_stages(cost, model, packs, 20, cap)
    assert longer.lower_bound_ms > first.lower_bound_ms
    assert first.lower_bound_ms <= longer.step_ms <= first.step_ms


@pytest.mark.parametrize("share_of_least", [10.0, 1.3, 1.2])
def test_a_narrow_search_is_proven_by_what_it_learns(
    monkeypatch: pytest.MonkeyPatch, share_of_least: float
):
    """Prevents a search that stops, or goes on in vain, once all splits that had room are known."""
    cost, model, packs = large_case((45, 80), 8)
    monkeypatch.setattr(split_search, "_FIRST_WIDTH", 40)
    monkeypatch.setattr(split_search, "_MAX_WIDTH", 40)
    cap = share_of_least * least_peak_of_splits(cost, model, packs, 8)
    result = search_stages(cost, model, packs, 8, cap)
    assert result.step_ms < result.lower_bound_ms * 1.004


def test_what_has_no_room_is_learned_from():
    """Prevents a bound that stays where it is, as no path is known of the splits that decide it."""
    cost, model, packs = large_case((60, 100), 12)
    cap = 1.2 * least_peak_of_splits(cost, model, packs, 12)
    problem = partition._problem(cost, model, packs, 12, cap)
    search = partition._descend(problem, 1.0, lambda enough: enough)
    bounds_ms = []
    for _ in range(4):
        search._rule_out()
        _, _, dropped, dropped_ms = search._grow(1)
        positions = [o.end[dropped[:, s]] for s, o in enumerate(search.options)]
        starts = [o.start[dropped[:, s]] for s, o in enumerate(search.options)]
        np.testing.assert_array_equal(positions[:-1], starts[1:])
        assert (search.problem.simulator.step_ms(search._terms(dropped)) >= dropped_ms).all()
        search._learn(dropped)
        bounds_ms.append(dropped_ms)
    assert bounds_ms == sorted(bounds_ms)
    assert bounds_ms[-1] > bounds_ms[0]


def test_the_bound_of_a_long_run_is_below_its_prediction():
    """Prevents comparing a bound on all steps with a prediction on 2,000 of them: here the heavy
    steps are those that are not simulated."""
    rng = np.random.default_rng(2)
    cost, model = random_cost(rng), small_model(2, 2)
    features = np.ones((6_001, 5))
    packs = Workload(
        features=features,
        step=np.arange(6_001),
        dp_rank=np.zeros(6_001, np.int64),
        slot=np.zeros(6_001, np.int64),
        data_parallel_size=1,
    )
    simulated = packs.some_steps(MAX_SIMULATED_STEPS)
    features[np.setdiff1d(packs.step, simulated.step), 1:] = 100
    predicted_ms = [
        simulate_run(cost, stages_from_cuts(model, (cut,)), simulated).step_ms.mean()
        for cut in (3, 4, 5)
    ]
    assert 0 < least_step_ms(cost, model, packs, 2) <= min(predicted_ms) * (1 + 1e-9)


@pytest.mark.parametrize("share_of_least", [10.0, 1.3])
def test_a_large_model_is_searched_with_few_simulations(share_of_least: float):
    """Prevents bounds so weak that the search is not over in seconds, and a changing result."""
    cost, model, packs = large_case((45, 80), 8)
    cap = share_of_least * least_peak_of_splits(cost, model, packs, 8)
    result = search_stages(cost, model, packs, 8, cap)
    check_stages(model, result.stages)
    assert result.lower_bound_ms == result.step_ms
    assert result.simulated < 2_000
    assert search_stages(cost, model, packs, 8, cap).stages == result.stages


def test_only_sampled_steps_are_simulated_but_all_packs_fit():
    """Prevents a search as long as the run, and a plan that runs out of memory in a step that was
    not sampled."""
    rng = np.random.default_rng(3)
    cost, model = random_cost(rng), small_model(3, 3)
    step, slot = (axis.ravel() for axis in np.indices((200, 2)))
    features = random_features(rng, len(step))
    packs = Workload(
        features=features, step=step, dp_rank=0 * step, slot=slot, data_parallel_size=1
    )
    sampled = sampled_steps(packs)
    assert len(np.unique(sampled.step)) == partition.MAX_SAMPLED_STEPS
    heaviest = 37
    assert not (sampled.features == features[step == heaviest][0]).all(axis=1).any()
    light = least_peak_of_splits(cost, model, packs, 2)
    features[step == heaviest] = 8
    assert least_peak_of_splits(cost, model, packs, 2) > light
    with pytest.raises(UserError, match="more than the memory cap"):
        search_stages(cost, model, packs, 2, light)


def test_recomputed_layers_are_the_earliest_of_their_stage():
    """Prevents layer numbers of another stage when counts become layers."""
    stages = stages_from_cuts(small_model(4, 5), (3, 8), [(1, 0), (2, 0), (0, 2)])
    assert [stage.recomputed("vision") for stage in stages] == [(0,), (2, 3), ()]
    assert [stage.recomputed("language") for stage in stages] == [(), (), (1, 2)]


def test_cuts_and_stages_are_each_others_inverse():
    """Prevents an off-by-one between the unit list and stages, for every possible split."""
    model = small_model(2, 3)
    for cuts in combinations(range(1, len(unit_names(model))), 3):
        stages = stages_from_cuts(model, cuts)
        check_stages(model, stages)
        sizes = [stage.size for stage in stages]
        assert tuple(np.cumsum(sizes)[:-1]) == cuts


@pytest.mark.parametrize(
    ("index", "units", "recompute", "message"),
    [
        (0, ["vision embed", "vision 0"], [], r"stage 1 holds vision 2.* has vision 1\.\.2"),
        (0, ["vision embed", "vision 0..1", "projector"], [], "stage 0 holds .*, projector, but"),
        (1, ["vision 2", "projector", "language embed", "language 0..1"], [], "stage 2 holds"),
        (2, ["language 1", "head"], [], "end before head|stage 2 holds"),
        (2, ["language 1..2"], [], "end before head"),
        (1, None, ["vision 1"], r"stage 1 recomputes vision 1 but holds vision 2"),
        (1, None, ["language 0", "language 0"], "each once"),
        (1, None, ["projector"], "recomputes projector but"),
        (0, None, ["language 0"], r"recomputes language 0 but holds vision 0\.\.1;"),
    ],
)
def test_stages_that_are_not_the_model_are_refused(
    index: int, units: list[str] | None, recompute: list[str], message: str
):
    """Prevents training from a hand-edited plan that loses, repeats or misplaces layers."""
    model = small_model(3, 3)
    stages = list(stages_from_cuts(model, (3, 7)))
    units = units or list(map(str, stages[index].units))
    stages[index] = Stage.of(*units, recompute=recompute)
    with pytest.raises(UserError, match=message):
        check_stages(model, stages)


def test_an_empty_stage_is_refused():
    """Prevents a stage that only passes tensors on."""
    empty = Stage.of()
    with pytest.raises(UserError, match="stage 1 of 2 is empty"):
        check_stages(small_model(3, 3), [*stages_from_cuts(small_model(3, 3), ()), empty])
