"""Costs refitted on a run's measured passes.

A pass is predicted as a sum over units and features. Factors per kind of unit and pass, per feature
of each, and per stage's devices are fitted to logarithms of times: MAP with a prior at 1 and Huber
weights, by Gauss-Newton steps. So unmeasured terms keep their cost, and confounded terms change
together.

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
from omnibal.pipeline.level_costs import features_of
from omnibal.pipeline.stage_cost import per_step_costs, workload_times
from omnibal.pipeline.unit_runs import recomputed_counts, unit_counts
from omnibal.pipeline.workload import Workload

MIN_MEASURED_STEPS = 5  # min measured steps, so that one slow step decides nothing
_WARM_UP_STEPS = 2  # first steps after a start, with kernel selection and allocator growth
_SPREAD_OF_KINDS, _SPREAD_OF_FEATURES, _SPREAD_OF_STAGES = 0.5, 0.2, 0.2
"""Prior standard deviations of log factors: counted rates are off by up to a half, mostly alike for
a kind's features (`docs/results.md`); equal devices differ little."""
_MIN_NOISE = 0.01  # min relative error assumed for a time
_HUBER_LIMIT = 1.5  # max residual in standard deviations with full weight (Huber)
_MAX_ROUNDS, _CONVERGED = 30, 1e-4
_TRIED_STAGES = 4
"""Candidates for the next slow stage: next to a slow stage, stages with like units seem fast."""
_MIN_EVIDENCE = 3.0
"""Min log-likelihood gain per slow stage: up to 1 by chance in simulated runs, else 5 and more."""
MIN_SLOWNESS = 1.1  # slowness that counts as slow; equal devices differ by a few percent


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Terms:
    """Predicted costs of measured passes, term by term."""

    ms: np.ndarray  # [n, c]
    measured_ms: np.ndarray  # [n]
    stage: np.ndarray  # [n]
    dp_rank: np.ndarray  # [n]
    names: tuple[tuple[str, str, str], ...]
    """Kind of unit, "forward" or "backward", and feature, [c]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KindFit:
    """Predicted time of a kind of unit in the measured passes."""

    name: str
    predicted_ms: float  # forwards plus backwards; this and the next are means over steps
    fitted_ms: float

    @property
    def factor(self) -> float:
        """Fitted over predicted time, 1 without prediction."""
        return self.fitted_ms / self.predicted_ms if self.predicted_ms else 1.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageFit:
    """Predicted and measured time of a stage in the measured passes."""

    predicted_ms: float
    measured_ms: float
    slowness: float  # slowness of its slowest rank's devices relative to the fastest stage
    slow_ranks: dict[int, float]  # slowness of data-parallel ranks, if at least `MIN_SLOWNESS`


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunFit:
    """Costs fitted on a run, with prediction errors."""

    refit: Refit
    kinds: tuple[KindFit, ...]
    stages: tuple[StageFit, ...]
    step_ms: float  # median of measured steps
    noise: float  # robust standard deviation of a pass's relative error


def root_plan_sha256(plan: Plan, job: JobSpec) -> str:
    """Return the hash of the user's plan that this one descends from, or its own."""
    refit = job.cost_source.refit
    return plan_sha256(plan) if refit is None else refit.root_sha256


def select_records(plan: Plan, info: RunInfo, records: Sequence[StepRecord]) -> list[StepRecord]:
    """Return a run's records with per-pass times of this plan."""
    if info.plan_sha256 != plan_sha256(plan):
        raise UserError(
            "the run was trained by another plan, or its log is an earlier version's: give the "
            "plan that it was trained by last, which is the newest in its folder `plans` where it "
            "was planned anew, and else the one that it was started with"
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
    """Fit a job's costs to measured passes.

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
    alike = replace(terms, measured_ms=terms.measured_ms / slow[terms.dp_rank, terms.stage])
    kinds = list(dict.fromkeys(name[:2] for name in terms.names))
    groups = np.array([kinds.index(name[:2]) for name in terms.names])  # kind of every term, [c]
    fitted_terms = _fit_slow_stages(alike, groups, plan.parallel.pipeline)
    factors, (slowness, common) = fitted_terms.factors, _split_slowness(fitted_terms.slowness)
    # Measured over predicted time of the work of once a step, mean over the stages.
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
        root_sha256=root_plan_sha256(plan, job),
        step=step,
        measured_steps=len(records),
        units={kind: UnitFactors(**given) for kind, given in units.items()},
        update=float(np.clip(ratio, 1e-3, 1e3)) if ratio else 1.0,
        pipeline=plan.parallel.pipeline,
        slowness=_spread_over_parts(plan, slowness),
    )
    earlier = job.cost_source.refit
    whole = refit if earlier is None else refit.after(earlier)
    fitted = with_refit(job, whole).cost_of_all(plan.pack_levels)
    slow = _rank_slowness(plan, fitted, workload, records)
    of_ranks = [_spread_over_parts(plan, of_rank) for of_rank in slow]
    alike_all = (1.0,) * len(plan.stages)
    slow_ranks = tuple(parts or alike_all for parts in of_ranks) if any(of_ranks) else ()
    return RunFit(
        refit=whole.model_copy(update={"slow_ranks": slow_ranks}),
        kinds=_kind_fits(terms, terms.ms * factors * common, len(records)),
        stages=_stage_fits(plan, terms, known, slowness, slow, len(records)),
        step_ms=float(np.median([record.step_ms for record in records])),
        noise=fitted_terms.noise,
    )


def with_refit(job: JobSpec, refit: Refit) -> JobSpec:
    """Replace the job's refit."""
    return replace(job, cost_source=replace(job.cost_source, refit=refit))


def _split_slowness(slowness: np.ndarray) -> tuple[np.ndarray, float]:
    """Split slowness into stages relative to the fastest (1 if not slow) and the common factor."""
    least = float(slowness.min())
    if slowness.max() < MIN_SLOWNESS * least:
        return np.ones_like(slowness), float(np.exp(np.log(slowness).mean()))
    return slowness / least, least


def _spread_over_parts(plan: Plan, slowness: np.ndarray) -> tuple[float, ...]:
    """Map stage slowness to parts of the model, or empty if none is slow."""
    if slowness.max() == 1:
        return ()
    return tuple(slowness[list(plan.stage_of_parts)].tolist())


def list_terms(
    plan: Plan, cost: CostModel, workload: Workload, records: Sequence[StepRecord]
) -> Terms:
    """Return the terms of all recorded passes."""
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
        if any(list(map(len, of_kind)) != [len(rows)] * len(plan.stages) for of_kind in times):
            raise UserError(
                f"step {record.step} of the run had other micro-batches or parts of the model "
                "than the plan: give the plan that the run was trained by"
            )
        passes_ms = np.array(times)  # [2 (forward, backward), parts, rows]
        stages = np.broadcast_to(stage_of_parts[:, None], passes_ms.shape)
        ranks = np.full(passes_ms.size, passes.dp_rank)
        terms = of_row[:, :, rows].reshape(-1, len(names))
        columns.append((terms, passes_ms.ravel(), stages.ravel(), ranks))
    ms, measured_ms, stage, dp_rank = map(np.concatenate, zip(*columns, strict=True))
    real = (ms.sum(axis=1) > 0) & (measured_ms > 0)
    used = ms.any(axis=0)
    return Terms(
        ms=ms[real][:, used],
        measured_ms=measured_ms[real],
        stage=stage[real],
        dp_rank=dp_rank[real],
        names=tuple(names[index] for index in np.flatnonzero(used)),
    )


def _terms_of_rows(
    plan: Plan, cost: CostModel, workload: Workload
) -> tuple[np.ndarray, list[tuple[str, str, str]]]:
    """Return times of all terms, [2 (forward, backward), parts, rows, c], and their names."""
    levels, slowness = cost.levels, cost.slowness_of(len(plan.stages))
    base = cost.features[: len(cost.features) // levels]
    features = features_of(workload, cost).reshape(len(workload), levels, -1)
    features = np.where(np.isin(base, ENCODER_WAITS_MS), 0.0, features)
    held = np.stack([unit_counts(cost.kinds, stage) for stage in plan.stages])
    again = np.stack(
        [
            [recomputed_counts(cost.kinds, stage) for stage in stages]
            for stages in plan.stages_at_levels
        ]
    )  # [levels, parts, kinds]

    def of(coefficients: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return times, [parts, rows, kinds, features]."""
        by_level = coefficients.reshape(len(coefficients), levels, -1)
        return np.einsum("rlf,klf,lpk,p->prkf", features, by_level, counts, slowness)

    every = np.broadcast_to(held, (levels, *held.shape))
    units = list(cost.units.values())
    forward = of(np.stack([unit.forward_ms for unit in units]), every)
    backward = of(np.stack([unit.backward_ms for unit in units]), every)
    second = of(np.stack([unit.recompute_ms for unit in units]), again)
    terms = np.stack(
        [np.stack([forward, np.zeros_like(forward)], axis=3), np.stack([second, backward], axis=3)]
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
        return max(1.4826 * float(np.median(np.abs(self.error))), _MIN_NOISE)

    def unlikeliness(self, noise: float) -> float:
        """Negative log-likelihood plus prior, at a noise level."""
        error = np.abs(self.error) / noise
        inside = np.minimum(error, _HUBER_LIMIT)
        return float((inside * (error - inside / 2)).sum()) + self.prior


def _fit_slow_stages(terms: Terms, groups: np.ndarray, stages: int) -> _MapFit:
    """Fit with a minimal set of differing stages.

    A stage is confounded with a kind of unit that it alone holds. So start with none, and greedily
    free stages with the worst fit or error while the likelihood gain suffices.
    """
    taken = np.log(terms.measured_ms / terms.ms.sum(axis=1))
    by_costs = np.array([np.median(taken[terms.stage == stage]) for stage in range(stages)])
    free: list[int] = []
    best = _fit_with_stages(terms, groups, stages, free)
    while len(free) + 1 < stages:
        left = [np.median(best.error[terms.stage == stage]) for stage in range(stages)]
        unlike = {
            stage
            for far in (np.abs(left), np.abs(by_costs - np.median(by_costs)))
            for stage in np.argsort(-far, kind="stable")[:_TRIED_STAGES].tolist()
            if far[stage] > _MIN_NOISE and stage not in free
        }
        tried = {stage: _fit_with_stages(terms, groups, stages, [*free, stage]) for stage in unlike}
        if not tried:
            break
        chosen = min(sorted(tried), key=lambda stage: tried[stage].unlikeliness(best.noise))
        gain = best.unlikeliness(best.noise) - tried[chosen].unlikeliness(best.noise)
        if gain < _MIN_EVIDENCE:
            break
        free, best = [*free, chosen], tried[chosen]
    return best


def _fit_with_stages(terms: Terms, groups: np.ndarray, stages: int, free: Sequence[int]) -> _MapFit:
    """Fit with only the stages in `free` differing."""
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
        found, ms = fit()
        noise, error = found.noise, found.error
        weight = np.minimum(1, _HUBER_LIMIT * noise / np.maximum(np.abs(error), 1e-12)) / noise**2
        shares = ms / ms.sum(axis=1)[:, None]
        slopes = np.concatenate([shares @ of_groups, shares, of_stages], axis=1)
        normal = (slopes * weight[:, None]).T @ slopes + np.diag(spread**-2.0)
        change = np.linalg.solve(normal, slopes.T @ (weight * error) - logs / spread**2)
        logs = logs + np.clip(change, -1, 1)
        if np.abs(change).max() < _CONVERGED:
            break
    return fit()[0]


def _rank_slowness(
    plan: Plan, cost: CostModel, workload: Workload, records: Sequence[StepRecord]
) -> np.ndarray:
    """Return relative time of data-parallel ranks in their stage, 1 in lockstep. [ranks, stages]"""
    parts_of, ranks = plan.schedule.parts_of(len(plan.stages)), plan.parallel.data
    if workload.runs_together or not all(stage.ranks_ms for r in records for stage in r.stages):
        return np.ones((ranks, len(parts_of)))
    times = workload_times(cost, plan.stages_at_levels, workload)
    row_ms = times.forward_ms + times.backward_ms  # [rows, parts]
    ratios = np.empty((len(records), ranks, len(parts_of)))
    for index, record in enumerate(records):
        rows = workload.step == record.step
        for stage, parts in enumerate(parts_of):
            of_stage = row_ms[rows][:, parts].sum(axis=1)
            fitted_ms = np.bincount(workload.dp_rank[rows], of_stage, ranks)
            measured_ms = np.array(record.stages[stage].ranks_ms)
            ratios[index, :, stage] = measured_ms / np.maximum(fitted_ms, 1e-9)
    ratio = np.median(ratios, axis=0)
    # Of two ranks, the faster is as others are.
    ratio = ratio / np.quantile(ratio, 0.5, axis=0, method="lower")
    return np.where(ratio >= MIN_SLOWNESS, ratio, 1.0)


def _kind_fits(terms: Terms, fitted_ms: np.ndarray, steps: int) -> tuple[KindFit, ...]:
    kinds = dict.fromkeys(name[0] for name in terms.names)
    of_kind = {kind: [name[0] == kind for name in terms.names] for kind in kinds}
    return tuple(
        KindFit(
            name=kind,
            predicted_ms=float(terms.ms[:, chosen].sum()) / steps,
            fitted_ms=float(fitted_ms[:, chosen].sum()) / steps,
        )
        for kind, chosen in of_kind.items()
    )


def _stage_fits(
    plan: Plan, terms: Terms, known: CostModel, slowness: np.ndarray, slow: np.ndarray, steps: int
) -> tuple[StageFit, ...]:
    """Return measured stage times, by terms without slow devices, and the plan's costs."""
    held = [parts[0] for parts in plan.schedule.parts_of(len(plan.stages))]
    of_stages = known.slowness_of(len(plan.stages))[held]
    of_ranks = known.slowness_of_ranks(plan.parallel.data, len(plan.stages))
    factor = of_stages[terms.stage]
    if of_ranks is not None:
        factor = factor * of_ranks[:, held][terms.dp_rank, terms.stage]
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
        for stage in range(len(held))
    )
