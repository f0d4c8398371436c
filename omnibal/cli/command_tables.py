"""Tables of commands' results; `report/plan_tables.py` has tables that the page has too."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omnibal.job.plan import Plan
from omnibal.job.published_errors import PublishedErrors, errors_of_plan
from omnibal.model.config import ClusterConfig, LanguageConfig, ModelConfig, Provider
from omnibal.model.encoders import EncoderLayers
from omnibal.model.levels import are_plain
from omnibal.model.units import model_parts
from omnibal.pipeline.prediction import Prediction
from omnibal.report.formatting import change, describe_sharding, milliseconds, percent
from omnibal.report.table import Column, Facts, Table, TableRow

if TYPE_CHECKING:  # these import scipy, which would slow down `omnibal --help`
    from omnibal.cost.analytic import ModelParameters
    from omnibal.cost.profile import FitResidual
    from omnibal.job.refit import RunFit
    from omnibal.search.cap_search import CapSearch
    from omnibal.search.encoder_placement import PlacementChoice
    from omnibal.search.replanning import Replanned
    from omnibal.search.schedule_choice import ScheduleChoice
    from omnibal.search.step_size import StepRate, StepSamples
    from omnibal.search.strategy import Sizing
    from omnibal.search.strategy_search import StrategySearch
    from omnibal.search.weight_sharding import ShardingChoice

_SHOWN_CANDIDATES = 10  # fits a terminal


def models_table(models: Sequence[tuple[ModelConfig, "ModelParameters"]]) -> Table:
    """Return model presets: parameters, experts, and layers x hidden size per tower."""
    rows = []
    for model, parameters in models:
        experts = {kind.experts for kind in model.language.kinds if kind.experts is not None}
        has_idle = parameters.active < parameters.stored
        rows.append(
            (
                model.name,
                _billions(parameters.stored),
                _billions(parameters.active) if has_idle else "",
                "\n".join(map(_size, model.encoders.values())),
                _size(model.language),
                ", ".join(
                    f"{mixture.experts_per_token} of {mixture.experts}" for mixture in experts
                ),
            )
        )
    titles = ("name", "10^9", "active", "encoders", "language", "experts")
    return Table.of_rows("Models, with billions of parameters", titles, rows)


def _size(tower: EncoderLayers | LanguageConfig) -> str:
    return f"{tower.layers} x {tower.hidden_size}"


def hub_ids_table(ids: Mapping[str, Sequence[str]]) -> Table:
    """Return hub ids by model preset."""
    rows = [(name, "\n".join(ids[name])) for name in sorted(ids)]
    hub = Column(title="id on Hugging Face's hub", style="left")
    return Table.of_rows("Models by their ids on a hub", ("name", hub), rows)


def _billions(parameters: int) -> str:
    billions = parameters / 1e9
    if billions >= 1000:
        return f"{billions:.0f}"
    return f"{billions:.3g}" if billions >= 0.1 else f"{billions:.4f}"


def clusters_table(clusters: Sequence[ClusterConfig]) -> Table:
    rows = [
        (
            cluster.name,
            cluster.device,
            f"{cluster.memory_gib:g}",
            f"{cluster.peak_tflops['bf16']:g}" if "bf16" in cluster.peak_tflops else "-",
            f"{cluster.intra_node_gb_per_s:g}",
            f"{cluster.inter_node_gb_per_s:g}",
            cluster.basis or "assumed",
        )
        for cluster in clusters
    ]
    titles = ("name", "device", "GiB", "bf16 TFLOP/s", "GB/s in node", "between", "rates")
    return Table.of_rows("Clusters", titles, rows)


def caps_table(search: "CapSearch", cap_gib: float) -> Table:
    """Return the best caps that were tried, the chosen caps first."""
    best, best_ms = search.candidates[0], search.candidates[0].strategy.ms_per_sample
    titles = ("per pack", "per step", "per rank", "recom-\nputed", f"GiB of {cap_gib:.2f}")
    rows = [
        (
            *(f"{cap:,}" for cap in candidate.caps.values),
            f"{candidate.samples_per_pack:.2f}",
            f"{candidate.packs_per_step:,}",
            f"{strategy.micro_batches:,}",
            str(strategy.recomputed_layers),
            f"{strategy.peak_gib:.2f}",
            f"{100 * strategy.bubble_fraction:.1f}",
            f"{strategy.ms_per_sample:,.2f}",
            "best" if candidate is best else change(strategy.ms_per_sample, best_ms),
        )
        for candidate in search.candidates[:_SHOWN_CANDIDATES]
        for strategy in [candidate.strategy]
    ]
    return Table.of_rows(
        "Caps: samples per pack, packs per step and per rank, memory and time",
        (*best.caps.names, *titles, "idle %", "ms per sample", "over best"),
        rows,
    )


def strategy_table(search: "StrategySearch", cap_gib: float) -> Table:
    """Return the fastest planned strategies, then ruled-out sizes with their bound or estimate."""
    tried = [strategy.sizing for strategy in search.ranking]
    tried += [candidate.sizing for candidate in search.ruled_out]
    names: list[str] = [*max((sizing.parallel.sizes for sizing in tried), key=len)]
    caps = search.best.caps.names
    has_shards = any(sizing.parallel.sharded > 1 for sizing in tried)
    has_placements = len({sizing.placement for sizing in tried}) > 1
    has_levels = not all(are_plain(strategy.levels) for strategy in search.ranking)
    keys = [*names, *["weights\nover"] * has_shards, *["encoders"] * has_placements]
    plan = [*caps, *["levels"] * has_levels, "recom-\nputed", "GiB"]

    def sizes(sizing: "Sizing") -> list[str]:
        cells = [str(sizing.parallel.sizes.get(name, 1)) for name in names]
        cells += [str(sizing.parallel.sharded)] * has_shards
        return cells + [sizing.placement.value] * has_placements

    fastest = [
        (
            *sizes(strategy.sizing),
            *(f"{cap:,}" for cap in strategy.caps.values),
            *[str(len(strategy.levels))] * has_levels,
            str(strategy.recomputed_layers),
            f"{strategy.peak_gib:.1f}",
            f"{strategy.samples_per_second:,.2f}",
            strategy.why,
        )
        for strategy in search.ranking[:_SHOWN_CANDIDATES]
    ]
    others = []
    for candidate in search.ruled_out[:_SHOWN_CANDIDATES]:
        bound, estimate = candidate.most_samples_per_second, candidate.estimated_samples_per_second
        rate = "" if bound is None else f"< {bound:,.2f}"
        rate = rate if estimate is None else f"~ {estimate:,.2f}"
        others.append((*sizes(candidate.sizing), *len(plan) * ("",), rate, candidate.why))
    return Table.of_rows(
        f"Strategies for {search.gpus:,} devices at {search.samples_per_step:,} samples per "
        f"step, memory of {cap_gib:.1f} GiB",
        (*keys, *plan, "samples\nper s", Column(title="over best", style="left")),
        fastest,
        others,
        keys=len(keys),
    )


def close_call(search: "StrategySearch", errors: PublishedErrors | str) -> str | None:
    """Return a warning if the next parallel sizes are slower by less than the median error."""
    best = search.ranking[0]
    others = [strategy for strategy in search.ranking if strategy.parallel != best.parallel]
    if isinstance(errors, str) or not others:
        return None
    behind = best.samples_per_second / others[0].samples_per_second - 1
    if behind >= errors.median:
        return None
    next_best = others[0].parallel
    return (
        f"{best.parallel} is predicted {percent(behind)} faster than {next_best}, "
        f"and such predictions err by {percent(errors.median)} in the median: measure both"
    )


def residuals_table(residuals: Sequence["FitResidual"], provider: Provider) -> Table:
    """Return errors of fitted costs against a provider's measurements, by unit and quantity."""
    rows = [
        (
            fit.unit,
            fit.quantity,
            str(fit.measurements),
            *map(percent, (fit.median_error, fit.max_error)),
        )
        for fit in residuals
    ]
    titles = ("unit", "quantity", "measurements", "median error", "largest error")
    return Table.of_rows(f"Fit of the costs, provider {provider}", titles, rows)


def simulation_facts(result: dict[str, Any]) -> Facts:
    entries = [("steps", f"{result['steps']:,}")]
    for name in ("mean", "median", "min", "max"):
        entries.append((f"step, {name}", milliseconds(result[f"step_ms_{name}"], 4)))
    entries.append(("slowest step", f"{result['slowest_step']:,}"))
    for stage, share in enumerate(result["busy_fraction"]):
        entries.append((f"stage {stage} is busy", percent(share)))
    if result["trace"] is not None:
        entries.append((f"trace of step {result['trace_step']:,}", result["trace"]))
    return Facts("Simulated steps", entries)


def misprediction_table(fit: "RunFit") -> Table:
    """Return predicted against fitted ms by unit kind, against measured by stage; slow devices."""
    kinds = [_factor_row(kind.name, kind.predicted_ms, kind.fitted_ms) for kind in fit.kinds]
    stages, slow, ranks = [], [], []
    for number, stage in enumerate(fit.stages):
        stages.append(_factor_row(f"stage {number}", stage.predicted_ms, stage.measured_ms))
        if stage.slowness > 1 and not stage.slow_ranks:
            slow.append((f"stage {number}, all ranks", "", "", f"{stage.slowness:.2f}"))
        for rank, factor in stage.slow_ranks.items():
            ranks.append((f"stage {number}, data-parallel rank {rank}", "", "", f"{factor:.2f}"))
    sections: list[Sequence[TableRow]] = [kinds, stages]
    sections += [[("slow devices", "", "", ""), *slow, *ranks]] if slow or ranks else []
    return Table.of_rows(
        "Mispredicted: passes of a step of the measured ranks, in ms",
        (Column(title="", style="left"), "predicted", "measured", "factor"),
        *sections,
    )


def _factor_row(name: str, predicted_ms: float, measured_ms: float) -> TableRow:
    factor = measured_ms / predicted_ms if predicted_ms else 1.0
    return name, f"{predicted_ms:,.2f}", f"{measured_ms:,.2f}", f"{factor:.2f}"


def replan_facts(planned: "Replanned") -> Facts:
    fit, before_ms, plan = planned.fit, planned.before_ms, planned.plan
    layers = [
        "+".join(str(stage.number_of_layers(tower)) for tower in plan.pipeline_model.towers)
        for stage in plan.merge_chunks(plan.stages)
    ]
    entries = {
        "step, measured median": milliseconds(fit.step_ms) if fit else None,
        "step, earlier plan by the same costs": milliseconds(before_ms) if before_ms else None,
        "step, new plan": milliseconds(planned.step_ms),
        "gain": percent(planned.gain) if before_ms else None,
        "layers of each stage": ", ".join(layers),
    }
    return Facts.of("New plan", entries)


def replan_summary(planned: "Replanned") -> dict[str, Any]:
    fit = planned.fit
    summary: dict[str, Any] = {
        "step_ms": planned.step_ms,
        "before_ms": planned.before_ms,
        "gain": planned.gain,
        "parallel": planned.plan.parallel,
    }
    if fit is None:
        return summary
    return summary | {
        "measured_step_ms": fit.step_ms,
        "measured_steps": fit.refit.measured_steps,
        "noise": fit.noise,
        "update_factor": fit.refit.update,
        "kinds": {kind.name: kind.factor for kind in fit.kinds},
        "stages": fit.stages,
    }


def lost_time_table(prediction: Prediction) -> Table:
    """Return the predicted step time by cause: the ideal, losses, and the step, their sum."""
    step_ms = prediction.step_ms
    rows = [
        (cause, f"{ms:z,.1f}", percent(ms / step_ms))
        for cause, ms in {**prediction.lost.causes(), "step": step_ms}.items()
    ]
    columns = [Column(title=title) for title in ("", "ms", "of the step")]
    return Table.of_rows("Where the step's time goes", columns, rows[:-1], rows[-1:])


def step_text(size: "StepSamples", source: str) -> str:
    """Return a sentence on samples and tokens per step. `source` is the origin of their number."""
    spread = f"{size.low:,} to {size.high:,} in nine of ten, " * (size.low != size.high)
    asked = f", {source}" if source else ""
    return f"A step has {size.samples:,.0f} samples{asked} ({spread}{size.tokens:,.0f} tokens)."


def rates_text(rates: Sequence["StepRate"]) -> str:
    """Return a sentence on predicted samples per second by samples per step."""
    texts = [f"{rate.samples_per_step:,}: {rate.samples_per_second:,.2f}" for rate in rates]
    return f"Samples per second by --samples-per-step, simulated: {' | '.join(texts)}"


def encoder_facts(plan: Plan, choice: "PlacementChoice") -> Facts | None:
    """Return facts on encoder placement and data-parallel encoders. None if nothing to choose."""
    encoders = plan.data_parallel_encoders
    predicted = None if plan.prediction is None else plan.prediction.data_parallel_encoders
    if predicted is None and len(choice.predicted) < 2:
        return None
    entries = [("placement", choice.chosen.value), ("why", choice.reason)]
    if encoders is not None and predicted is not None:
        ranks = encoders.pipelines * plan.parallel.pipeline * plan.parallel.tensor
        entries.append(("ranks that encode together", f"{ranks:,}"))
        entries.append(("weights of encoders", describe_sharding(plan.parallel, encoders.sharded)))
        for name, encoder in plan.model.encoders.items():
            entries.append((f"{encoder.feature} in a pass", f"{encoders.items_per_pass[name]:,}"))
            entries.append((f"{encoder.feature} kept", f"{encoders.kept_items[name]:,}"))
        times = f"{milliseconds(predicted.forward_ms)} + {milliseconds(predicted.backward_ms)}"
        entries.append(("forward + backward", times))
        entries.append(("busiest rank over mean", f"{predicted.busiest:.3f}"))
        entries.append(("exchange of features", milliseconds(predicted.exchange_ms)))
    return Facts("Encoders", entries)


def share_of_images(plan: Plan) -> float | None:
    """Return image tokens over the tokens of a pack of shapes, or None without image encoders."""
    assert plan.shapes is not None
    caps, towers = plan.shapes.caps, plan.model.encoders.values()
    images = [tower for tower in towers if tower.of_images]
    if not images:
        return None
    return sum(caps[tower.feature] * tower.tokens_per_item for tower in images) / caps["tokens"]


def _data_text(plan: Plan) -> str:
    if plan.data is not None:
        samples = f"{plan.data.samples:,} samples x {plan.data.epochs} epoch(s)"
        return f"{samples} in {plan.data.packs:,} packs, {plan.data.steps:,} steps"
    assert plan.shapes is not None
    text, share = f"no samples: every pack has {plan.shapes.caps}", share_of_images(plan)
    if share is not None:
        text += f", {100 * share:.0f} % of the tokens are images'"
    if plan.shapes.image_tokens is not None:
        text += f", {plan.shapes.image_tokens:,} an image"
    return text


def plan_facts(
    plan: Plan, prediction: Prediction, sharding: "ShardingChoice", schedule: "ScheduleChoice"
) -> Facts:
    """Return facts on the job, its prediction, and the choices of sharding and schedule."""
    parallel, exchange, days = plan.parallel, prediction.exchange, prediction.gpu_days
    rate, exposed = prediction.samples_per_second_per_gpu, milliseconds(exchange.exposed_ms)
    known = {*(plan.adapters.parts if plan.adapters else ()), *plan.frozen}
    fully = [part for part in model_parts(plan.model) if part not in known]
    sharded = f"{parallel.sharding}, sharded over {parallel.sharded} ranks"
    entries = {
        "devices": f"{parallel.world_size} = {parallel}, {plan.cluster.device}",
        "data": _data_text(plan),
        "step": milliseconds(prediction.step_ms, 4),
        "pipeline idle time": f"{percent(prediction.bubble_fraction)} of the step",
        "schedule": schedule.reason,
        "data-parallel exchange": (
            f"{milliseconds(exchange.total_ms)}, {exposed} exposed" if exchange.total_ms else None
        ),
        "samples per second": None if rate is None else f"{rate * parallel.world_size:,.2f}",
        "device days": None if days is None else f"{days:,.3g}",
        "adapters": plan.adapters.summary if plan.adapters else None,
        "fully trained": (", ".join(fully) or "nothing") if plan.adapters else None,
        "weights": sharded if parallel.sharded > 1 else None,
        "other shardings": sharding.reason,
        "costs from": prediction.cost_source,
        "error of such predictions": str(errors_of_plan(plan)),
    }
    return Facts.of("Plan", entries)
