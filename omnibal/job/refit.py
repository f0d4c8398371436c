"""Costs refitted on a run's measured passes.

A pass is predicted as a sum over units and features:

    log(measured) ~ log(sum over terms of ms * kind_factor * feature_factor) + log(stage_factor)

All factors have a prior at 1, so unmeasured terms keep their cost and confounded terms change
together. The fit is the maximum a posteriori with Huber weights, by Gauss-Newton steps.

Shapes: n passes, c terms (a kind of unit, forward or backward, and a feature), g kinds of units and
passes, s stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnibal.base.errors import UserError
from omnibal.cost.model import CostModel
from omnibal.cost.refitted import Refit, UnitFactors
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan, plan_sha256
from omnibal.job.runlog import RunInfo, StepRecord
from omnibal.model.units import ENCODER_WAITS_MS
from omnibal.pipeline.stage_cost import per_step_costs, workload_times
from omnibal.pipeline.unit_runs import unit_counts
from omnibal.pipeline.workload import Workload

MIN_MEASURED_STEPS = 5  # min measured steps, so that one slow step decides nothing
_WARM_UP_STEPS = 2  # first steps after a start, with kernel selection and allocator growth
# Prior standard deviations of log factors: counted rates are off by up to a half, mostly alike for
# a kind's features (`docs/results.md`); equal devices differ little.
_SPREAD_OF_KINDS, _SPREAD_OF_FEATURES, _SPREAD_OF_STAGES = 0.5, 0.2, 0.2
_MIN_NOISE = 0.01  # min relative error assumed for a time
_HUBER_LIMIT = 1.5  # max residual in standard deviations with full weight (Huber)
_MAX_ROUNDS, _CONVERGED = 30, 1e-4
# Candidates for the next slow stage. Next to a slow stage, stages with the same kinds seem fast.
_TRIED_STAGES = 4
# Min log-likelihood gain per slow stage: up to 1 by chance in simulated runs, otherwise 5 and more.
_MIN_EVIDENCE = 3.0
MIN_SLOWNESS = 1.1  # slowness that counts as slow; equal devices differ by a few percent


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Terms:
    """Measured passes with their predicted times `ms` by term."""

    ms: np.ndarray  # [n, c]
    measured_ms: np.ndarray  # [n]
    stage: np.ndarray  # [n]
    dp_rank: np.ndarray  # [n]
    names: tuple[tuple[str, str, str], ...]  # [c]: kind of unit, forward or backward, feature


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KindFit:
    """Predicted and fitted time of a kind of unit in the measured passes of a step."""

    name: str
    predicted_ms: float  # forward plus backward, mean over steps
    fitted_ms: float

    @property
    def factor(self) -> float:
        """Fitted over predicted time, 1 without prediction."""
        return self.fitted_ms / self.predicted_ms if self.predicted_ms else 1.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageFit:
    """Predicted and measured time of a stage in the measured passes of a step."""

    predicted_ms: float
    measured_ms: float
    slowness: float  # slowest rank's slowness relative to the fastest stage; 1 if none is slow
    slow_ranks: dict[int, float]  # slowness of data-parallel ranks, if at least `MIN_SLOWNESS`


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunFit:
    """Costs fitted on a run, with prediction errors."""

    refit: Refit
    kinds: tuple[KindFit, ...]
    stages: tuple[StageFit, ...]
    step_ms: float  # median of measured steps
    noise: float  # robust standard deviation of a pass's relative error


def earlier_refit(plan: Plan, job: JobSpec, step: int) -> Refit:
    """Return the plan's refit or, for the run's first plan, one that changes no cost; at `step`."""
    refit = job.cost_source.refit
    if refit is None:
        return Refit(root_sha256=plan_sha256(plan), step=step)
    return refit.model_copy(update={"step": step})


def select_records(plan: Plan, info: RunInfo, records: Sequence[StepRecord]) -> list[StepRecord]:
    """Return a run's records with times of passes. UserError if few, or of another plan."""
    if info.plan_sha256 != plan_sha256(plan):
        raise UserError(
            "the run was trained by another plan, or its log is of an earlier version: give its "
            "latest plan, the newest in its folder `plans` or else that of its start"
        )
    first = info.since_step + _WARM_UP_STEPS
    timed = [record for record in records if record.passes is not None and record.step >= first]
    if len(timed) < MIN_MEASURED_STEPS:
        raise UserError(
            f"the run has logged the passes of {len(timed)} steps of the plan after the first "
            f"{_WARM_UP_STEPS}, and at least {MIN_MEASURED_STEPS} are needed: let it train on"
        )
    return timed


def fit_run(
    plan: Plan, job: JobSpec, workload: Workload, records: Sequence[StepRecord], step: int
) -> RunFit:
    """Return a job's costs fitted to measured passes, with slow stages and ranks.

    Args:
        workload: of all the plan's packs.
        records: `select_records` of the run.
        step: number of trained steps.
    """
    workload = workload.of_steps([record.step for record in records])
    known = job.cost_of_all(plan.pack_levels)
    # Slow devices may have changed since the last fit.
    cost = replace(known, slowness=(), slow_ranks=())
    terms = list_terms(plan, cost, workload, records)
    slow = _rank_slowness(plan, cost, workload, records)
    # Slow ranks are known from all ranks' times, so they need not be fitted.
    equal_ranks = replace(terms, measured_ms=terms.measured_ms / slow[terms.dp_rank, terms.stage])
    kinds = list(dict.fromkeys(name[:2] for name in terms.names))
    groups = np.array([kinds.index(name[:2]) for name in terms.names])  # kind of every term, [c]
    fitted_terms = _fit_slow_stages(equal_ranks, groups, plan.parallel.pipeline)
    factors, (slowness, common) = fitted_terms.factors, _split_slowness(fitted_terms.slowness)
    # Weight update and data-parallel exchange: measured over predicted, mean over the stages.
    once = per_step_costs(cost, plan.stages, plan.schedule)
    predicted_ms = float((once.update_ms + once.exchange_ms).mean())
    measured_ms = [np.mean([stage.optimizer_ms for stage in record.stages]) for record in records]
    ratio = float(np.median(measured_ms)) / predicted_ms if predicted_ms else 1.0
    units: dict[str, dict[str, dict[str, float]]] = {}
    for (kind, which, feature), factor in zip(
        terms.names, (factors * common).tolist(), strict=True
    ):
        units.setdefault(kind, {}).setdefault(which, {})[feature] = factor
    refit = Refit(
        root_sha256=earlier_refit(plan, job, step).root_sha256,
        step=step,
        measured_steps=len(records),
        units={kind: UnitFactors(**given) for kind, given in units.items()},
        update=float(np.clip(ratio, 1e-3, 1e3)) if ratio else 1.0,
        pipeline=plan.parallel.pipeline,
        slowness=_spread_over_parts(plan, slowness),
    )
    earlier = job.cost_source.refit
    total = refit if earlier is None else refit.after(earlier)
    fitted = with_refit(job, total).cost_of_all(plan.pack_levels)
    # Again, now with fitted costs, as ranks' packs differ in the features that were mispredicted.
    slow = _rank_slowness(plan, fitted, workload, records)
    of_ranks = [_spread_over_parts(plan, rank_slowness) for rank_slowness in slow]
    not_slow = (1.0,) * len(plan.stages)
    slow_ranks = tuple(parts or not_slow for parts in of_ranks) if any(of_ranks) else ()
    fitted_ms, kind_names = terms.ms * factors * common, np.array([name[0] for name in terms.names])
    return RunFit(
        refit=total.model_copy(update={"slow_ranks": slow_ranks}),
        kinds=tuple(
            KindFit(
                name=kind,
                predicted_ms=float(terms.ms[:, kind_names == kind].sum()) / len(records),
                fitted_ms=float(fitted_ms[:, kind_names == kind].sum()) / len(records),
            )
            for kind in dict.fromkeys(kind_names.tolist())
        ),
        stages=_stage_fits(plan, terms, known, slowness, slow, len(records)),
        step_ms=float(np.median([record.step_ms for record in records])),
        noise=fitted_terms.noise,
    )


def with_refit(job: JobSpec, refit: Refit) -> JobSpec:
    return replace(job, cost_source=replace(job.cost_source, refit=refit))


def _split_slowness(slowness: np.ndarray) -> tuple[np.ndarray, float]:
    """Return slowness relative to the fastest stage (1 if none is slow) and the common factor."""
    fastest = float(slowness.min())
    if slowness.max() < MIN_SLOWNESS * fastest:
        return np.ones_like(slowness), float(np.exp(np.log(slowness).mean()))
    return slowness / fastest, fastest


def _spread_over_parts(plan: Plan, slowness: np.ndarray) -> tuple[float, ...]:
    """Return the slowness of every part of the model, empty if no stage is slow."""
    if slowness.max() == 1:
        return ()
    return tuple(slowness[list(plan.stage_of_parts)].tolist())


def list_terms(
    plan: Plan, cost: CostModel, workload: Workload, records: Sequence[StepRecord]
) -> Terms:
    """Return the terms of recorded passes. UserError if they are not the plan's passes."""
    rank_of_step = {record.step: record.passes.dp_rank for record in records if record.passes}
    ranks = np.array([rank_of_step[step] for step in workload.step.tolist()])
    workload = workload.rows(np.flatnonzero(workload.dp_rank == ranks))
    of_row, names = _terms_of_rows(plan, cost, workload)
    stage_of_parts, columns = np.array(plan.stage_of_parts), []
    for record in records:
        passes = record.passes
        assert passes is not None, "records are of measured steps"
        rows = np.flatnonzero(workload.step == record.step)  # sorted by slot
        times = passes.forward_ms, passes.backward_ms
        if any(list(map(len, parts)) != [len(rows)] * len(plan.stages) for parts in times):
            raise UserError(f"step {record.step} had other micro-batches or parts: give its plan")
        passes_ms = np.array(times)  # [2 (forward, backward), parts, rows]
        stages = np.broadcast_to(stage_of_parts[:, None], passes_ms.shape)
        ranks = np.full(passes_ms.size, passes.dp_rank)
        terms = of_row[:, :, rows].reshape(-1, len(names))
        columns.append((terms, passes_ms.ravel(), stages.ravel(), ranks))
    ms, measured_ms, stage, dp_rank = map(np.concatenate, zip(*columns, strict=True))
    nonzero = (ms.sum(axis=1) > 0) & (measured_ms > 0)  # their logarithms are fitted
    used = ms.any(axis=0)
    return Terms(
        ms=ms[nonzero][:, used],
        measured_ms=measured_ms[nonzero],
        stage=stage[nonzero],
        dp_rank=dp_rank[nonzero],
        names=tuple(names[index] for index in np.flatnonzero(used)),
    )


def _terms_of_rows(
    plan: Plan, cost: CostModel, workload: Workload
) -> tuple[np.ndarray, list[tuple[str, str, str]]]:
    """Return times of all terms, [2 (forward, backward), parts, rows, c], and their names."""
    levels, slowness = cost.levels, cost.slowness_of(len(plan.stages))
    base = cost.features[: len(cost.features) // levels]
    features = workload.features_of(cost).reshape(len(workload), levels, -1)
    # Logged passes exclude the wait for encoders.
    features = np.where(np.isin(base, ENCODER_WAITS_MS), 0.0, features)
    held = np.stack([unit_counts(cost.kinds, stage.units) for stage in plan.stages])
    recomputed = np.stack(
        [
            [unit_counts(cost.kinds, stage.recompute) for stage in stages]
            for stages in plan.stages_at_levels
        ]
    )  # [levels, parts, kinds]

    def term_ms(coefficients: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return times, [parts, rows, kinds, features]."""
        by_level = coefficients.reshape(len(coefficients), levels, -1)
        return np.einsum("rlf,klf,lpk,p->prkf", features, by_level, counts, slowness)

    at_all_levels = np.broadcast_to(held, (levels, *held.shape))
    forward = term_ms(cost.of_units("forward_ms"), at_all_levels)
    backward = term_ms(cost.of_units("backward_ms"), at_all_levels)
    recompute = term_ms(cost.of_units("recompute_ms"), recomputed)
    # A backward pass consists of recomputed forward terms and backward terms.
    terms = np.stack(
        [
            np.stack([forward, np.zeros_like(forward)], axis=3),
            np.stack([recompute, backward], axis=3),
        ]
    )  # [2, parts, rows, kinds, forward or backward, features]
    names = [
        (kind, which, feature)
        for kind in cost.units
        for which in ("forward", "backward")
        for feature in base
    ]
    return terms.reshape(*terms.shape[:3], -1), names


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _MapFit:
    """MAP factors, with a given set of stages that may differ."""

    factors: np.ndarray  # by term, [c]
    slowness: np.ndarray  # stage factors, [s], or 1 if fixed
    error: np.ndarray  # log of measured over fitted time, [n]
    prior: float  # half the sum of squared standardised logarithms: the negative log prior

    @property
    def noise(self) -> float:
        """Robust standard deviation of the relative error."""
        # 1.4826 times the median absolute deviation is a normal distribution's sigma.
        return max(1.4826 * float(np.median(np.abs(self.error))), _MIN_NOISE)

    def unlikeliness(self, noise: float) -> float:
        """Return the negative log posterior at a noise level, with Huber loss, up to a constant."""
        error = np.abs(self.error) / noise
        inside = np.minimum(error, _HUBER_LIMIT)
        return float((inside * (error - inside / 2)).sum()) + self.prior


def _fit_slow_stages(terms: Terms, groups: np.ndarray, stages: int) -> _MapFit:
    """Return a fit with few differing stages, chosen greedily by likelihood gain."""
    # A stage is confounded with a kind of unit that no other stage has, so none is free at first.
    log_ratio = np.log(terms.measured_ms / terms.ms.sum(axis=1))
    by_costs = np.array([np.median(log_ratio[terms.stage == stage]) for stage in range(stages)])
    free: list[int] = []
    best = _fit_with_stages(terms, groups, stages, free)
    while len(free) + 1 < stages:
        residual = [np.median(best.error[terms.stage == stage]) for stage in range(stages)]
        # Worst by the fit so far, and by unfitted costs, since a fit may hide a slow stage.
        outliers = {
            stage
            for error in (np.abs(residual), np.abs(by_costs - np.median(by_costs)))
            for stage in np.argsort(-error, kind="stable")[:_TRIED_STAGES].tolist()
            if error[stage] > _MIN_NOISE and stage not in free
        }
        tried = {
            stage: _fit_with_stages(terms, groups, stages, [*free, stage]) for stage in outliers
        }
        if not tried:
            break
        chosen = min(sorted(tried), key=lambda stage: tried[stage].unlikeliness(best.noise))
        gain = best.unlikeliness(best.noise) - tried[chosen].unlikeliness(best.noise)
        if gain < _MIN_EVIDENCE:
            break
        free, best = [*free, chosen], tried[chosen]
    return best


def _fit_with_stages(terms: Terms, groups: np.ndarray, stages: int, free: Sequence[int]) -> _MapFit:
    """Return a fit with only the stages in `free` differing."""
    of_groups = np.eye(int(groups.max()) + 1)[groups]  # [c, g]
    of_stages = np.eye(stages)[terms.stage][:, list(free)]  # [n, free]
    kinds, features = of_groups.shape[1], len(groups)
    spread = np.repeat(
        [_SPREAD_OF_KINDS, _SPREAD_OF_FEATURES, _SPREAD_OF_STAGES], [kinds, features, len(free)]
    )
    logs = np.zeros(len(spread))

    def fit() -> tuple[_MapFit, np.ndarray]:
        factors = np.exp(of_groups @ logs[:kinds] + logs[kinds : kinds + features])
        slowness = np.ones(stages)
        slowness[list(free)] = np.exp(logs[kinds + features :])
        ms = terms.ms * factors
        error = np.log(terms.measured_ms / ms.sum(axis=1) / slowness[terms.stage])
        prior = float(((logs / spread) ** 2).sum()) / 2
        return _MapFit(factors=factors, slowness=slowness, error=error, prior=prior), ms

    for _ in range(_MAX_ROUNDS):
        current, ms = fit()
        noise, error = current.noise, current.error
        weight = np.minimum(1, _HUBER_LIMIT * noise / np.maximum(np.abs(error), 1e-12)) / noise**2
        # Slope of a pass's log time by a term's log factor: the term's share of the pass.
        shares = ms / ms.sum(axis=1)[:, None]
        slopes = np.concatenate([shares @ of_groups, shares, of_stages], axis=1)
        normal = (slopes * weight[:, None]).T @ slopes + np.diag(spread**-2.0)
        change = np.linalg.solve(normal, slopes.T @ (weight * error) - logs / spread**2)
        logs = logs + np.clip(change, -1, 1)  # at most a factor e per step, for convergence
        if np.abs(change).max() < _CONVERGED:
            break
    return fit()[0]


def _rank_slowness(
    plan: Plan, cost: CostModel, workload: Workload, records: Sequence[StepRecord]
) -> np.ndarray:
    """Return slowness of ranks in their stage, [ranks, stages]. 1 if not slow, or in lockstep."""
    parts_of, ranks = plan.schedule.parts_of(len(plan.stages)), plan.parallel.data
    if workload.runs_together or not all(stage.ranks_ms for r in records for stage in r.stages):
        return np.ones((ranks, len(parts_of)))
    times = workload_times(cost, plan.stages_at_levels, workload)
    row_ms = times.forward_ms + times.backward_ms  # [rows, parts]
    ratios = np.empty((len(records), ranks, len(parts_of)))
    for index, record in enumerate(records):
        rows = workload.step == record.step
        for stage, parts in enumerate(parts_of):
            stage_ms = row_ms[rows][:, parts].sum(axis=1)
            fitted_ms = np.bincount(workload.dp_rank[rows], stage_ms, ranks)
            measured_ms = np.array(record.stages[stage].ranks_ms)
            ratios[index, :, stage] = measured_ms / np.maximum(fitted_ms, 1e-9)
    ratio = np.median(ratios, axis=0)
    # The lower median: of two ranks, the faster is the reference.
    ratio = ratio / np.quantile(ratio, 0.5, axis=0, method="lower")
    return np.where(ratio >= MIN_SLOWNESS, ratio, 1.0)


def _stage_fits(
    plan: Plan, terms: Terms, known: CostModel, slowness: np.ndarray, slow: np.ndarray, steps: int
) -> tuple[StageFit, ...]:
    """Return predicted (by `known` costs) and measured times of every stage, and slow devices."""
    first_parts = [parts[0] for parts in plan.schedule.parts_of(len(plan.stages))]
    of_stages = known.slowness_of(len(plan.stages))[first_parts]
    of_ranks = known.slowness_of_ranks(plan.parallel.data, len(plan.stages))
    factor = of_stages[terms.stage]
    if of_ranks is not None:
        factor = factor * of_ranks[:, first_parts][terms.dp_rank, terms.stage]
    # A step waits for the pipeline with the slow device.
    slowest, _ = _split_slowness(slowness * slow.max(axis=0) / (slowness * slow.max(axis=0)).min())
    predicted_ms = terms.ms.sum(axis=1) * factor

    def of_stage(ms: np.ndarray, stage: int) -> float:
        return float(ms[terms.stage == stage].sum()) / steps

    return tuple(
        StageFit(
            predicted_ms=of_stage(predicted_ms, stage),
            measured_ms=of_stage(terms.measured_ms, stage),
            slowness=float(slowest[stage]),
            slow_ranks={
                rank: float(slow[rank, stage])
                for rank in np.flatnonzero(slow[:, stage] > 1).tolist()
            },
        )
        for stage in range(len(first_parts))
    )
