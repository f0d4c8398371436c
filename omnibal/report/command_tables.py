"""Tables of commands' results; `report/plan_tables.py` has tables of plans and runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.job.plan import Plan
from omnibal.job.published_errors import PublishedErrors
from omnibal.model.config import ClusterConfig, LanguageConfig, ModelConfig, Provider
from omnibal.model.encoders import EncoderLayers
from omnibal.model.levels import are_plain
from omnibal.model.limits import memory_cap_gib
from omnibal.report.formatting import change, gib_or_mib, milliseconds, percent
from omnibal.report.table import Cell, Column, Facts, Marked, Table, TableRow

if TYPE_CHECKING:  # these import scipy, which would slow down `omnibal --help`
    from omnibal.cost.analytic import ModelParameters
    from omnibal.cost.profile import FitResidual
    from omnibal.job.fake_replay import FakeStage, Roofline
    from omnibal.job.replay import StageReplay
    from omnibal.runs.refit import RunFit
    from omnibal.runs.replanning import Replanned
    from omnibal.search.cap_search import CapSearch
    from omnibal.search.parallel_sizes import StrategySearch
    from omnibal.search.strategy import Sizing

_SHOWN_CANDIDATES = 10  # fits a terminal


def models_table(models: Sequence[tuple[ModelConfig, "ModelParameters"]]) -> Table:
    """Return model presets: parameters, experts, and layers x hidden size per tower."""
    return Table.of_records(
        "Models, with billions of parameters",
        models,
        {
            "name": lambda preset: preset[0].name,
            "10^9": lambda preset: _billions(preset[1].stored),
            "active": lambda preset: (
                _billions(preset[1].active) if preset[1].active < preset[1].stored else ""
            ),
            "encoders": lambda preset: "\n".join(map(_size, preset[0].encoders.values())),
            "language": lambda preset: _size(preset[0].language),
            "experts": lambda preset: ", ".join(
                f"{experts.experts_per_token} of {experts.experts}"
                for experts in {kind.experts for kind in preset[0].language.kinds}
                if experts is not None
            ),
        },
    )


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
    return Table.of_records(
        "Clusters",
        clusters,
        {
            "name": lambda cluster: cluster.name,
            "device": lambda cluster: cluster.device,
            "GiB": lambda cluster: f"{cluster.memory_gib:g}",
            "bf16 TFLOP/s": lambda cluster: (
                f"{cluster.peak_tflops['bf16']:g}" if "bf16" in cluster.peak_tflops else "-"
            ),
            "GB/s in node": lambda cluster: f"{cluster.intra_node_gb_per_s:g}",
            "between": lambda cluster: f"{cluster.inter_node_gb_per_s:g}",
            "rates": lambda cluster: cluster.basis or "assumed",
        },
    )


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
    has_placements = len({sizing.placement for sizing in tried}) > 1
    has_levels = not all(are_plain(strategy.levels) for strategy in search.ranking)
    levels = ["levels"] if has_levels else []
    has_shards = any(sizing.parallel.sharded > 1 for sizing in tried)
    plan = (*search.best.caps.names, *levels, "recom-\nputed", "GiB")

    def sizes(sizing: "Sizing") -> list[str]:
        cells = [str(sizing.parallel.sizes.get(name, 1)) for name in names]
        cells += [str(sizing.parallel.sharded)] * has_shards
        return [*cells, sizing.placement.value] if has_placements else cells

    fastest = [
        (
            *sizes(strategy.sizing),
            *(f"{cap:,}" for cap in strategy.caps.values),
            *(str(len(strategy.levels)) for _ in levels),
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
    over_best = Column(title="over best", style="left")
    return Table.of_rows(
        f"Strategies for {search.gpus:,} devices at {search.samples_per_step:,} samples per "
        f"step, memory of {cap_gib:.1f} GiB",
        (
            *names,
            *["weights\nover"] * has_shards,
            *["encoders"] * has_placements,
            *plan,
            "samples\nper s",
            over_best,
        ),
        fastest,
        others,
        keys=len(names) + has_shards + has_placements,
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
    next_best = others[0].parallel.text
    return (
        f"{best.parallel.text} is predicted {percent(behind)} faster than {next_best}, "
        f"and such predictions err by {percent(errors.median)} in the median: measure both"
    )


def residuals_table(residuals: Sequence["FitResidual"], provider: Provider) -> Table:
    """Return errors of fitted costs against a provider's measurements, by unit and quantity."""
    return Table.of_records(
        f"Fit of the costs, provider {provider}",
        residuals,
        {
            "unit": lambda residual: residual.unit,
            "quantity": lambda residual: residual.quantity,
            "measurements": lambda residual: str(residual.measurements),
            "median error": lambda residual: percent(residual.median_error),
            "largest error": lambda residual: percent(residual.max_error),
        },
    )


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


def replayed_stages_table(plan: Plan, replays: Sequence["StageReplay"]) -> Table:
    """Return replayed stages' ms per micro-batch and update, peak memory and predicted memory."""
    columns: dict[str | Column, Callable[[StageReplay], Cell]] = {
        "stage": lambda replay: f"{replay.stage}",
        "packs": lambda replay: f"{len(replay.rows):,}",
        "forward ms": lambda replay: f"{np.sum(replay.forward_ms) / len(replay.rows):,.2f}",
        "backward ms": lambda replay: f"{np.sum(replay.backward_ms) / len(replay.rows):,.2f}",
        "recompute ms": lambda replay: f"{np.sum(replay.recompute_ms) / len(replay.rows):,.2f}",
        "update ms": lambda replay: f"{replay.update_ms:,.2f}",
        "peak": lambda replay: gib_or_mib(replay.peak_gib),
    }
    if plan.prediction is not None:
        stages = plan.prediction.stages
        columns["predicted"] = lambda replay: gib_or_mib(
            replay.predicted_gib(stages[replay.stage].memory)
        )
    return Table.of_records("Replayed stages, per micro-batch", replays, columns)


def length_statistics(lengths: Lengths, rows: np.ndarray) -> dict[str, float | None]:
    """Return samples in mask `rows`: count, and mean and max lengths (None without samples)."""
    statistics: dict[str, float | None] = {"samples": int(rows.sum())}
    for name in (*lengths.item_names, "tokens"):
        values = lengths.column(name)[rows]
        statistics[f"{name}_mean"] = float(values.mean()) if len(values) else None
        statistics[f"{name}_max"] = int(values.max()) if len(values) else None
    return statistics


def source_statistics(lengths: Lengths) -> list[dict[str, Any]]:
    return [
        {"source": name, **length_statistics(lengths, lengths.source == code)}
        for code, name in enumerate(lengths.source_names)
    ]


def sources_table(lengths: Lengths, most: int | None = None) -> Table:
    """Return counts, mean and max lengths of samples by source (`most` largest, rest), and all."""
    features, codes = (*lengths.item_names, "tokens"), np.arange(len(lengths.source_names))
    if most is not None:
        codes = np.argsort(-np.bincount(lengths.source, minlength=len(codes)), kind="stable")
    groups = [(lengths.source_names[code], codes[i : i + 1]) for i, code in enumerate(codes[:most])]
    others = codes[len(groups) :]
    groups += [(f"{len(others)} smaller sources", others)] if len(others) else []

    def row(name: str, codes: np.ndarray) -> list[str]:
        statistics = length_statistics(lengths, np.isin(lengths.source, codes))
        cells = [name, f"{statistics['samples']:,.0f}"]
        for feature in features:
            for quantity, digits in (("mean", 1 if feature == "tokens" else 2), ("max", 0)):
                value = statistics[f"{feature}_{quantity}"]
                cells.append("-" if value is None else f"{value:,.{digits}f}")
        return cells

    rows = [row(*group) for group in groups]
    titles = [f"{feature} {quantity}" for feature in features for quantity in ("mean", "max")]
    source = Column(title="source", style="wrap")
    return Table.of_rows("Sample lengths", [source, "samples", *titles], rows, [row("all", codes)])


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
    entries = [("step, new plan", milliseconds(planned.step_ms))]
    if planned.before_ms is not None:
        entries.insert(0, ("step, earlier plan by the same costs", milliseconds(planned.before_ms)))
        entries.append(("gain", percent(planned.gain)))
    if planned.fit is not None:
        entries.insert(0, ("step, measured median", milliseconds(planned.fit.step_ms)))
    plan = planned.plan
    layers = [
        "+".join(str(stage.number_of_layers(tower)) for tower in plan.pipeline_model.towers)
        for stage in plan.merge_chunks(plan.stages)
    ]
    return Facts("New plan", [*entries, ("layers of each stage", ", ".join(layers))])


def replan_summary(planned: "Replanned") -> dict[str, Any]:
    fit = planned.fit
    summary: dict[str, Any] = {
        "step_ms": planned.step_ms,
        "before_ms": planned.before_ms,
        "gain": planned.gain,
        "parallel": planned.plan.parallel.model_dump(),
    }
    if fit is None:
        return summary
    return summary | {
        "measured_step_ms": fit.step_ms,
        "measured_steps": fit.refit.measured_steps,
        "noise": fit.noise,
        "update_factor": fit.refit.update,
        "kinds": {kind.name: kind.factor for kind in fit.kinds},
        "stages": [asdict(stage) for stage in fit.stages],
    }


_SHOWN_CONTENTS = 14  # all kinds of large tensors of a stage; smaller tensors are summed up


def fake_device_table(plan: Plan, stages: Sequence["FakeStage"]) -> Table:
    """Return predicted and allocated peak by stage, and their difference."""
    cap_gib = memory_cap_gib(plan.cluster)
    return Table.of_records(
        f"Allocated on fake devices, GiB of {cap_gib:.2f}",
        stages,
        {
            "stage": lambda stage: f"{stage.stage}",
            "predicted": lambda stage: (
                "" if stage.predicted_gib is None else f"{stage.predicted_gib:.2f}"
            ),
            "allocated": lambda stage: f"{stage.allocated_gib:.2f}",
            "difference": lambda stage: (
                "" if stage.deviation is None else f"{100 * stage.deviation:+.1f} %"
            ),
            "of usable": lambda stage: Marked.share(stage.allocated_gib / cap_gib),
            "state": lambda stage: f"{stage.state_gib:.2f}",
            "rest": lambda stage: f"{stage.activations_gib:.2f}",
            "in": lambda stage: stage.peak_phase,
        },
        "Memory that the code would allocate on one device of each stage, and the plan's "
        "prediction. A difference below zero: the plan predicts too little.",
    )


def fake_device_launches_table(stages: Sequence["FakeStage"], rates: "Roofline") -> Table:
    """Return kernels, FLOPs, bytes, roofline ms, host reads, unaligned products per micro-batch."""
    rows = []
    for stage in stages:
        times, count = stage.step_ms(rates), stage.micro_batches
        reads = sum(read.count for read in stage.host_reads if read.phase != "optimizer")
        rows.append(
            [
                f"{stage.stage}",
                f"{stage.kernels / count:,.0f}",
                f"{stage.tflop / count:,.1f}",
                f"{stage.gigabytes / count:,.1f}",
                *(f"{ms / count:,.1f}" for ms in times.values()),
                percent(stage.element_wise_share(rates)),
                f"{reads / count:.3g}",
                f"{sum(product.count for product in stage.unaligned) / count:.3g}",
            ]
        )
    titles = ("stage", "kernels", "TFLOP", "GB", "products", "attention", "rest", "its share")
    return Table.of_rows(
        f"Per micro-batch; ms are a roofline at {rates.matrix_tflop_per_s:,.0f} TFLOP/s "
        f"and {rates.memory_gb_per_s:,.0f} GB/s ({rates.name})",
        (*titles, "host reads", "unaligned"),
        rows,
    )


def contents_table(stage: "FakeStage") -> Table:
    """Return storages at a stage's peak by operation, largest first, the smallest in one row."""
    rows = [
        [f"{part.gib:.2f}", f"{part.tensors:,}", part.phase, part.where or "-", part.operation]
        for part in stage.contents[:_SHOWN_CONTENTS]
    ]
    others = stage.contents[_SHOWN_CONTENTS:]
    if others:
        gib, tensors = sum(part.gib for part in others), sum(part.tensors for part in others)
        rows.append([f"{gib:.2f}", f"{tensors:,}", "", "rest", ""])
    words = (Column(title=title, style="left") for title in ("made in", "by", "operation"))
    title = f"Stage {stage.stage} at its peak, {stage.allocated_gib:.2f} GiB, in {stage.peak_at}"
    return Table.of_rows(title, ("GiB", "tensors", *words), rows)
