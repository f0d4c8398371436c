"""Baseline partition and recompute methods, to measure the gain of the joint search.

Splits are contiguous with at least one layer per stage and minimize the largest stage by parameters
(`parameter`), layers (`layer`) or forward time of the mean micro-batch (`profile`, as PipeDream,
Narayanan et al. 2019, SOSP). Ties: min sum of squares, then leftmost cuts, so the last stages take
remaining layers.

Balanced model partitioning (`bmp`; OmniBal, arXiv 2407.20761, section on model balance): cuts move
within 3 units of the profile split; splits are ranked by Eq. 4 + Eq. 5 (variance of forward time
plus communication), and the fastest of the first 15 runs is kept. Choices here:

* Eq. 4 is in ms^2 and Eq. 5 in elements. Here squares are divided by the mean stage's time and
  activations are priced by the link: both in ms.
* The mean stage is equal for all splits, so the best 15 of (2r + 1)^(p - 1) moves come from dynamic
  programming.
* Runs are simulated on the plan's micro-batches with the given recompute rule, and include the
  anchor. A split that does not fit is skipped, as its run would fail.

Recompute (section on adaptive re-computation): `front` recomputes from the stage's front, encoders
before language, until the stage fits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import nsmallest

import numpy as np

from omnibal.base.errors import DoesNotFit, UserError
from omnibal.cost.model import CostModel
from omnibal.model.config import ModelConfig
from omnibal.model.units import UnitKind, unit_kinds, unit_names
from omnibal.pipeline.simulate import simulate_levels
from omnibal.pipeline.split_task import SplitTask
from omnibal.pipeline.stage_memory import GIB, fits_cap, pareto_tables
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.unit_runs import layer_kinds, stage_units, stages_from_cuts, unit_counts

BMP_RADIUS = 3  # max units that a cut moves, enough in the paper
BMP_RUNS = 15  # splits that are run, as in the paper
BMP_STEPS = 200  # steps of each BMP run, spread evenly over the data (3 in the paper)
_TIE_TOLERANCE = 1e-9

Cuts = tuple[int, ...]  # positions between a split's stages, without both ends


class PartitionMethod(StrEnum):
    OMNIBAL = "omnibal"
    BMP = "bmp"
    PROFILE = "profile"
    LAYER = "layer"
    PARAMETER = "parameter"


class RecomputeRule(StrEnum):
    """Rule for the layers that a stage recomputes."""

    CHEAPEST = "cheapest"  # min time that fits, searched together with the split
    FRONT = "front"
    FULL = "full"
    NONE = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRule:
    """Split method and recompute rule."""

    method: PartitionMethod = PartitionMethod.OMNIBAL
    recompute: RecomputeRule = RecomputeRule.CHEAPEST

    @property
    def is_joint(self) -> bool:
        """Whether split and recomputation are searched jointly."""
        return self == JOINT


JOINT = SplitRule()


def baseline_stages(split: SplitRule, task: SplitTask) -> tuple[Stage, ...]:
    """Return the stages of a baseline method and rule. Raise DoesNotFit if no tried split fits."""
    method, rule, cost, model = split.method, split.recompute, task.cost, task.model
    workload, memory_cap_bytes = task.workload, task.memory_cap_bytes
    if method == PartitionMethod.OMNIBAL or rule == RecomputeRule.CHEAPEST:
        raise UserError(
            f"partition method {method} was given with recompute rule {rule}; cheapest belongs to "
            "omnibal, which searches both, and front, full and none to the other methods: change "
            "--method or --recompute"
        )
    tables = pareto_tables(cost, workload, task.stages)
    mean = workload.features.mean(axis=0)
    has_backward = np.array([unit.backward_ms.any() for unit in cost.units.values()])
    weights = unit_weights(method, cost, model, mean)
    every_cuts = [balanced_cuts(weights, layer_mask(model), task.stages)]
    if method == PartitionMethod.BMP:  # other candidates to run
        every_cuts += bmp_candidates(cost, model, mean, every_cuts[0])
    splits: list[_Split] = []
    for cuts in dict.fromkeys(every_cuts):
        # The fewest recomputed layers of the rule that fit.
        recomputed, peaks = [], []
        for stage, table in zip(stages_from_cuts(model, cuts), tables, strict=True):
            counts = unit_counts(table.kinds, stage.units)
            options = _recompute_options(rule, table.kinds, stage, has_backward)
            option_peaks = table.peak_bytes(counts, options)
            fits = fits_cap(option_peaks, memory_cap_bytes)
            chosen = int(fits.argmax() if fits.any() else option_peaks.argmin())
            recomputed.append(options[chosen, layer_kinds(table.kinds)].tolist())
            peaks.append(option_peaks[chosen])
        splits.append((stages_from_cuts(model, cuts, recomputed), np.array(peaks)))
    fitting = [stages for stages, held in splits if fits_cap(held.max(), memory_cap_bytes)]
    if not fitting:
        raise _does_not_fit(split, task, splits)
    if len(fitting) == 1:
        return fitting[0]
    sample = workload.some_steps(BMP_STEPS)
    return min(fitting, key=lambda stages: simulate_levels(cost, [stages], sample).step_ms.mean())


def unit_weights(
    method: PartitionMethod, cost: CostModel, model: ModelConfig, mean_features: np.ndarray
) -> np.ndarray:
    """Return the weight of every unit to balance: parameters, layers or forward ms. [units]

    A matrix tied between language embed and head counts in both.
    """
    units = [cost.units[unit] for unit in unit_names(model)]
    match method:
        case PartitionMethod.PARAMETER:
            return np.array([unit.parameters for unit in units], np.float64)
        case PartitionMethod.LAYER:
            return layer_mask(model).astype(np.float64)
        case _:
            return np.array([unit.forward_ms @ mean_features for unit in units])


def balanced_cuts(weights: np.ndarray, is_layer: np.ndarray, pipeline_size: int) -> Cuts:
    """Return the split with min largest stage, then min squares, then leftmost cuts, for `weights`
    [units] and at least one layer (`is_layer` [units]) per stage."""
    runs = _run_weights(weights, is_layer)  # [start, end]
    # Dynamic programming: min largest stage up to each position, then min squares from each to
    # the end among such splits.
    largest = np.full(len(runs), np.inf)
    largest[0] = 0.0
    for _ in range(pipeline_size):
        largest = np.maximum(largest[:, None], runs).min(axis=0)
    squares = np.where(runs <= largest[-1] * (1 + _TIE_TOLERANCE), runs**2, np.inf)
    to_end = [np.full(len(runs), np.inf)]
    to_end[0][-1] = 0.0
    for _ in range(pipeline_size):
        to_end.append((squares + to_end[-1]).min(axis=1))
    edges = [0]
    for remaining in reversed(to_end[:-1]):
        total = squares[edges[-1]] + remaining
        # The leftmost of equal cuts; sums in another order differ by rounding.
        edges.append(int(np.argmax(total <= total.min() * (1 + _TIE_TOLERANCE))))
    return tuple(edges[1:-1])


def bmp_candidates(
    cost: CostModel,
    model: ModelConfig,
    mean_features: np.ndarray,
    anchor: Cuts,
    radius: int = BMP_RADIUS,
    count: int = BMP_RUNS,
) -> list[Cuts]:
    """Return the best splits within `radius` of the anchor, by variance plus communication."""
    weights = unit_weights(PartitionMethod.PROFILE, cost, model, mean_features)
    runs = _run_weights(weights, layer_mask(model))
    mean_stage_ms = weights.sum() / (len(anchor) + 1)
    variance_ms = (runs - mean_stage_ms) ** 2 / mean_stage_ms
    units = len(weights)
    sent_ms = np.zeros(units + 1)
    sent_ms[1:-1] = cost.link_ms_per_byte * cut_bytes(cost, model, range(1, units), mean_features)
    windows = [range(max(cut - radius, 1), min(cut + radius, units - 1) + 1) for cut in anchor]
    # The best splits of the units before each position, as every prefix of a best split is one.
    best: dict[int, list[tuple[float, Cuts]]] = {0: [(0.0, ())]}
    for window in (*windows, [units]):
        best = {
            end: nsmallest(
                count,
                (
                    (score + float(variance_ms[start, end] + sent_ms[end]), (*edges, end))
                    for start, beginnings in best.items()
                    if np.isfinite(runs[start, end])
                    for score, edges in beginnings
                ),
            )
            for end in window
        }
    return [edges[:-1] for _, edges in best[units]]


def cut_bytes(
    cost: CostModel, model: ModelConfig, cuts: Iterable[int], features: np.ndarray
) -> np.ndarray:
    """Return bytes that a forward of `features` [features] sends over every cut; their sum is
    the communication volume of OmniBal, Eq. 5 and Table 4. [cuts]"""
    sequence = unit_names(model)
    return np.array([cost.units[sequence[cut - 1]].output_bytes @ features for cut in cuts])


_Split = tuple[tuple[Stage, ...], np.ndarray]
"""Stages of a recompute rule and peak bytes [stages], above the cap only if nothing fits."""


def layer_mask(model: ModelConfig) -> np.ndarray:
    """Return whether each unit of the model is a layer, bool [units]."""
    is_layer = {kind.name: kind.is_layer for kind in unit_kinds(model)}
    return np.array([is_layer[name] for name in unit_names(model)])


def _run_weights(weights: np.ndarray, is_layer: np.ndarray) -> np.ndarray:
    """Return the weight of every run of units, infinite if it cannot be a stage. [start, end]"""
    before = np.concatenate([[0.0], np.cumsum(weights)])
    layers_before = np.concatenate([[0], np.cumsum(is_layer)])
    has_layer = layers_before > layers_before[:, None]
    return np.where(has_layer, before - before[:, None], np.inf)


def _recompute_options(
    rule: RecomputeRule, kinds: Sequence[UnitKind], stage: Stage, has_backward: np.ndarray
) -> np.ndarray:
    """Return the rule's recompute options for a stage, fewest layers first. [options, kinds]"""
    can = {kind.name: kind.is_layer and has for kind, has in zip(kinds, has_backward, strict=True)}
    layers = [name for name in stage_units(kinds, stage.units) if can[name]]
    first = [[layers[:number].count(kind.name) for kind in kinds] for number in range(len(layers))]
    every = [layers.count(kind.name) for kind in kinds]
    options = {RecomputeRule.NONE: [[0] * len(kinds)], RecomputeRule.FULL: [every]}
    return np.array(options.get(rule, [*first, every]))


def _does_not_fit(rule: SplitRule, task: SplitTask, splits: Sequence[_Split]) -> DoesNotFit:
    """Return an error with the worst stage of the split nearest to fitting, and remedies."""
    stages, peaks = min(splits, key=lambda split: split[1].max())
    stage = int(peaks.argmax())
    need, cap = peaks[stage] / GIB, task.memory_cap_bytes / GIB
    remedy = "" if rule.recompute == RecomputeRule.FRONT else "recompute by the rule front, "
    return DoesNotFit(
        f"partition method {rule.method} with recompute rule {rule.recompute} puts {need:.2f} GiB "
        f"on stage {stage} of {len(stages)} of {task.model.name} at best, and the memory cap of a "
        f"device is {cap:.2f} GiB",
        f"{remedy}partition by the method omnibal, raise the memory cap, use more pipeline stages "
        "or tensor parallelism, or pack to smaller caps",
    )
