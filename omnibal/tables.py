"""Results of commands as tables; those that the page shows too are in `report/tables.py`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from omnibal.beside import EncoderPlacement
from omnibal.config import ClusterConfig, LanguageConfig, ModelConfig, Provider
from omnibal.data.metrics import PackMetrics
from omnibal.encoders import ClipsEncoder
from omnibal.pipeline.prediction import Prediction
from omnibal.plan import Plan
from omnibal.report.table import Column, Facts, Row, Table

if TYPE_CHECKING:  # they import scipy, which `omnibal --help` should not wait for
    from omnibal.cost.parameters import ModelParameters
    from omnibal.cost.profile import FitResidual
    from omnibal.replay import ReplaySummary, StageReplay
    from omnibal.report.summary import RunSummary
    from omnibal.search.caps import CapSearch
    from omnibal.search.encoder_placement import PlacementChoice
    from omnibal.search.parallel_sizes import StrategySearch

_SHOWN_CANDIDATES = 10


def models_table(models: Sequence[tuple[ModelConfig, "ModelParameters"]]) -> Table:
    """The model presets: parameters, and layers x hidden size of every tower.

    Args:
        models: each with its parameters.
    """
    rows = [
        (
            model.name,
            _billions(parameters.stored),
            _billions(parameters.active) if parameters.active < parameters.stored else "",
            "\n".join(f"{one.layers} x {one.hidden_size}" for one in model.encoders.values()),
            f"{model.language.layers} x {model.language.hidden_size}",
            _experts_words(model.language),
        )
        for model, parameters in models
    ]
    titles = ("name", "10^9", "active", "encoders", "language", "experts")
    return _table("Models, with billions of parameters", titles, rows)


def hub_ids_table(ids: Mapping[str, Sequence[str]]) -> Table:
    """Ids on a hub that name a model preset, by preset."""
    rows = [(name, "\n".join(ids[name])) for name in sorted(ids)]
    columns = [Column(title="name"), Column(title="id on Hugging Face's hub", style="left")]
    return Table(title="Models by their ids on a hub", columns=columns, sections=[rows])


def _billions(parameters: int) -> str:
    billions = parameters / 1e9
    if billions >= 1000:
        return f"{billions:.0f}"
    return f"{billions:.3g}" if billions >= 0.1 else f"{billions:.4f}"


def _experts_words(language: LanguageConfig) -> str:
    """Experts of a layer that has some, and how many of them a token is sent to."""
    given = {kind.experts for kind in language.kinds if kind.experts is not None}
    return ", ".join(f"{one.experts_per_token} of {one.experts}" for one in given)


def clusters_table(clusters: Sequence[ClusterConfig]) -> Table:
    """The cluster presets."""
    rows = [
        (
            cluster.name,
            cluster.device,
            f"{cluster.memory_gib:g}",
            "-" if "bf16" not in cluster.peak_tflops else f"{cluster.peak_tflops['bf16']:g}",
            f"{cluster.intra_node_gb_per_s:g}",
            f"{cluster.inter_node_gb_per_s:g}",
            cluster.basis or "assumed",
        )
        for cluster in clusters
    ]
    titles = ("name", "device", "GiB", "bf16 TFLOP/s", "GB/s in node", "between", "rates")
    return _table("Clusters", titles, rows)


def packing_facts(metrics: PackMetrics, load: str) -> Facts:
    """The figures of a packing; `load` says by what the straggler factor is measured."""
    entries = [
        ("samples packed", f"{metrics.packed:,} of {metrics.samples:,}"),
        ("packs", f"{metrics.packs:,}"),
        ("packs needed at least", f"{metrics.packs_lower_bound:,}"),
        ("above that", f"{metrics.gap:.2%}"),
        ("samples per pack", f"{metrics.samples_per_pack:.2f}"),
        *((f"fill of {name}", f"{share:.1%}") for name, share in metrics.fill.items()),
        ("pad ratio", f"{metrics.pad_ratio:.4f}"),
        *((f"dist ratio of {name}", f"{ratio:.4f}") for name, ratio in metrics.dist_ratio.items()),
        ("attention balance ratio", f"{metrics.attention_balance_ratio:.4f}"),
        ("it must be at least", f"{metrics.least_attention_balance_ratio:.4f}"),
        ("communication ratio", f"{metrics.communication_ratio:.4f}"),
        ("tokens of a rank in a step", f"{metrics.tokens_per_rank:,.0f}"),
        ("straggler factor", f"{metrics.straggler_factor:.4f}"),
        ("in predicted time of", load),
        ("steps", f"{metrics.steps:,}"),
    ]
    return Facts("Packs", entries)


def caps_table(search: "CapSearch", cap_gib: float) -> Table:
    """Table of the best caps that were tried, the chosen ones first."""
    packs = ("per pack", "per step", "per rank")
    predicted = ("recom- puted", f"GiB of {cap_gib:.2f}", "idle", "ms per sample", "over best")
    best = search.candidates[0]
    rows = []
    for candidate in search.candidates[:_SHOWN_CANDIDATES]:
        # Without the sign of a difference that rounds to nothing.
        over_best = round(candidate.ms_per_sample / best.ms_per_sample - 1, 3) + 0.0
        row = (
            *(f"{cap:,}" for cap in candidate.caps.values),
            f"{candidate.samples_per_pack:.2f}",
            f"{candidate.packs_per_step:,}",
            f"{candidate.micro_batches:,}",
            str(candidate.recomputed_layers),
            f"{candidate.peak_gib:.2f}",
            f"{candidate.bubble_fraction:.1%}",
            f"{candidate.ms_per_sample:,.2f}",
            "best" if candidate is best else f"{over_best:+.1%}",
        )
        rows.append(row)
    return Table(
        title="Caps: samples per pack, packs per step and per rank, and what that takes",
        columns=[Column(title=title) for title in (*best.caps.names, *packs, *predicted)],
        sections=[rows],
        tight=True,
    )


def strategy_table(search: "StrategySearch", cap_gib: float) -> Table:
    """Table of the fastest parallel sizes, then those that are clearly slower or do not fit."""
    plan = (*search.best.caps.names, "recom-\nputed", "GiB")
    planned = [each.parallel for each in search.ranking]
    tried = planned + [each.parallel for each in search.ruled_out]
    sizes = max((parallel.sizes for parallel in tried), key=len)
    titles = (*sizes, *plan, "samples\nper s")
    fastest = [
        (
            *(str(strategy.parallel.sizes.get(name, 1)) for name in sizes),
            *(f"{cap:,}" for cap in strategy.caps.values),
            str(strategy.recomputed_layers),
            f"{strategy.peak_gib:.1f}",
            f"{strategy.samples_per_second:,.2f}",
            strategy.why,
        )
        for strategy in search.ranking[:_SHOWN_CANDIDATES]
    ]
    others = []
    for ruled_out in search.ruled_out[:_SHOWN_CANDIDATES]:
        most, estimate = ruled_out.most_samples_per_second, ruled_out.estimated_samples_per_second
        per_second = "" if most is None else f"< {most:,.2f}"
        per_second = per_second if estimate is None else f"~ {estimate:,.2f}"
        others.append(
            (
                *(str(ruled_out.parallel.sizes.get(name, 1)) for name in sizes),
                *len(plan) * ("",),
                per_second,
                ruled_out.why,
            )
        )
    return Table(
        title=f"Strategies for {search.gpus:,} devices at {search.samples_per_step:,} samples per "
        f"step, memory of {cap_gib:.1f} GiB",
        columns=(
            *(Column(title=title) for title in titles),
            Column(title="over best", style="left", least_width=24),
        ),
        sections=[fastest, others],
        tight=True,
    )


def residuals_table(residuals: Sequence["FitResidual"], provider: Provider) -> Table:
    """Errors of the fitted costs against the measurements of a provider's layers."""
    rows = [
        (
            residual.unit,
            residual.quantity,
            str(residual.measurements),
            f"{residual.median_error:.1%}",
            f"{residual.max_error:.1%}",
        )
        for residual in residuals
    ]
    titles = ("unit", "quantity", "measurements", "median error", "largest error")
    return _table(f"Fit of the costs, provider {provider}", titles, rows)


def stages_table(plan: Plan, prediction: Prediction) -> Table:
    """Units of every stage, and its times per micro-batch."""
    towers = plan.pipeline_model.towers
    rows = [
        (
            str(index),
            *(str(len(stage.layers(tower))) for tower in towers),
            " / ".join(
                " + ".join(str(len(stages[index].recomputed(tower))) for tower in towers)
                for stages in plan.stages_at_levels
            ),
            f"{predicted.forward_ms:,.2f}",
            f"{predicted.backward_ms:,.2f}",
            f"{predicted.wait_fraction:.1%}",
            ", ".join(span.name for span in stage.units if span.layers is None),
        )
        for index, (stage, predicted) in enumerate(zip(plan.stages, prediction.stages, strict=True))
    ]
    recompute = "recompute\nby level" if plan.levels else "recompute"
    titles = ("stage", *towers, recompute, "forward\nms", "backward\nms", "waits")
    columns = [Column(title=title) for title in titles]
    # Words are not divided: the longest has as many characters.
    columns.append(Column(title="also holds", style="wrap", least_width=len("projector,")))
    return Table(title="Stages", columns=columns, sections=[rows], tight=True)


def encoder_facts(plan: Plan, choice: "PlacementChoice") -> list[Facts]:
    """Both placements of encoders, and how they run beside the pipeline where they do."""
    prediction, planned = plan.prediction, choice.predicted
    beside = None if prediction is None else prediction.beside
    if beside is None and len(planned) < 2:
        return []
    entries = [("placement", choice.chosen.value)]
    for name, placement in _PLACEMENTS.items():
        if placement in planned:
            step = f"{planned[placement].step_ms:,.1f} ms"
            per_second = planned[placement].samples_per_second_per_gpu
            if per_second is not None:
                step += f", {per_second * plan.parallel.world_size:,.2f} samples/s"
            entries.append((f"step, {name}", step))
    entries.append(("why", choice.reason))
    if plan.beside is not None and beside is not None:
        entries.append(("ranks that encode together", f"{_encoding_ranks(plan):,}"))
        for name in plan.model.encoders:
            items = plan.model.encoders[name].feature
            kept, a_pass = plan.beside.kept_items[name], plan.beside.items_per_pass[name]
            entries.append((f"{items} in a pass", f"{a_pass:,}"))
            entries.append((f"{items} kept", f"{kept:,}"))
        encoding = f"{beside.forward_ms:,.1f} + {beside.backward_ms:,.1f} ms"
        entries.append(("forward + backward", encoding))
        entries.append(("busiest rank over mean", f"{beside.busiest:.3f}"))
        entries.append(("exchange of features", f"{beside.exchange_ms:,.1f} ms"))
    return [Facts("Encoders", entries)]


_PLACEMENTS = {
    "in the pipeline": EncoderPlacement.PIPELINE,
    "beside it": EncoderPlacement.BESIDE,
}


def _encoding_ranks(plan: Plan) -> int:
    assert plan.beside is not None
    return plan.beside.pipelines * plan.parallel.pipeline * plan.parallel.tensor


def share_of_images(plan: Plan) -> float | None:
    """Share of the tokens of a pack of shapes that are images'; None where there are none."""
    assert plan.shapes is not None
    caps, towers = plan.shapes.caps, plan.model.encoders.values()
    images = [tower for tower in towers if not isinstance(tower, ClipsEncoder)]
    if not images:
        return None
    return sum(caps[tower.feature] * tower.tokens_per_item for tower in images) / caps["tokens"]


def _shapes_text(plan: Plan) -> str:
    assert plan.shapes is not None
    caps, share = plan.shapes.caps, share_of_images(plan)
    text = f"no samples: every pack has {caps}"
    if share is not None:
        text += f", {share:.0%} of the tokens are images'"
    if plan.shapes.image_tokens is not None:
        text += f", {plan.shapes.image_tokens:,} an image"
    return text


def plan_facts(plan: Plan, prediction: Prediction) -> Facts:
    """The prediction of the whole job."""
    parallel = plan.parallel
    entries = [("devices", f"{parallel.world_size} = {parallel.text}, {plan.cluster.device}")]
    if plan.data is not None:
        samples = f"{plan.data.samples:,} samples x {plan.data.epochs} epoch(s)"
        packs = f"{plan.data.packs:,} packs, {plan.data.steps:,} steps"
        entries.append(("data", f"{samples} in {packs}"))
    else:
        entries.append(("data", _shapes_text(plan)))
    entries.append(("step", f"{prediction.step_ms:,.1f} ms"))
    entries.append(("stages wait", f"{prediction.bubble_fraction:.1%} of it"))
    exchange = prediction.exchange
    if exchange.total_ms:
        exposed = f"{exchange.exposed_ms:,.1f} ms exposed"
        entries.append(("data-parallel exchange", f"{exchange.total_ms:,.1f} ms, {exposed}"))
    if prediction.samples_per_second_per_gpu is not None:
        per_second = prediction.samples_per_second_per_gpu * parallel.world_size
        entries.append(("samples per second", f"{per_second:,.2f}"))
    if prediction.gpu_days is not None:
        entries.append(("device days", f"{prediction.gpu_days:,.3g}"))
    entries.append(("costs from", prediction.cost_source))
    return Facts("Plan", entries)


def simulation_facts(result: dict[str, Any]) -> Facts:
    """The simulated steps of a plan."""
    entries = [("steps", f"{result['steps']:,}")]
    for name in ("mean", "median", "min", "max"):
        entries.append((f"step, {name}", f"{result[f'step_ms_{name}']:,.1f} ms"))
    entries.append(("slowest step", f"{result['slowest_step']:,}"))
    for stage, share in enumerate(result["busy_fraction"]):
        entries.append((f"stage {stage} is busy", f"{share:.1%}"))
    if result["trace"] is not None:
        entries.append((f"trace of step {result['trace_step']:,}", result["trace"]))
    return Facts("Simulated steps", entries)


def lost_time_table(prediction: Prediction) -> Table:
    """Breakdown of the time of a step, from the ideal up."""
    step_ms = prediction.step_ms
    causes = [(k, f"{ms:,.1f}", f"{ms / step_ms:.1%}") for k, ms in prediction.lost.named().items()]
    total = [("step", f"{step_ms:,.1f}", "100.0%")]
    return _table("Where the step's time goes", ("", "ms", "of the step"), causes, total)


def run_table(
    plan: Plan,
    run: "RunSummary | None",
    replay: "ReplaySummary | None",
) -> Table:
    """Times of a run and a replay beside the plan's prediction; at least one is given."""
    given = {"replayed": replay, "measured": run}
    columns = ["predicted", *(name for name, one in given.items() if one is not None)]
    title = " and ".join({"replayed": "replay", "measured": "run"}[name] for name in columns[1:])
    rows = []

    def add(name: str, **cells: str) -> None:
        rows.append((name, *(cells.get(column, "") for column in columns)))

    predicted = plan.prediction
    add(
        "provider of layers",
        replayed=replay.info.provider if replay else "",
        measured=(run.provider or "not recorded") if run else "",
    )
    if run is not None:
        add("loss, first step", measured=f"{run.first_loss:.4f}")
        add("loss, last step", measured=f"{run.last_loss:.4f}")
        step = _with_error(predicted.step_ms, run.step_ms) if predicted else ""
        add("step, median", predicted=step, measured=f"{run.step_ms:,.0f} ms")
    if replay is not None:
        step = _with_error(replay.predicted_step_ms, replay.step_ms)
        name = f"step, mean of {len(replay.info.steps):,}"
        add(name, predicted=step, replayed=f"{replay.step_ms:,.0f} ms")
    for stage in range(len(plan.stages)):
        add(
            f"stage {stage} waits",
            predicted=f"{predicted.stages[stage].wait_fraction:.1%}" if predicted else "",
            replayed=f"{replay.wait_fractions[stage]:.1%}" if replay else "",
            measured=f"{run.wait_fractions[stage]:.1%}" if run else "",
        )
    for stage, replayed in enumerate(replay.stages if replay else ()):
        peak = replayed.predicted_gib(predicted.stages[stage].memory) if predicted else None
        add(
            f"stage {stage} peak",
            predicted="" if peak is None else _size(peak),
            replayed=_size(replayed.peak_gib),
        )
    for name, count in run.incidents().items() if run else ():
        add(name, measured=f"{count:,}")
    return _table(title.capitalize(), ("", *columns), rows)


def replayed_stages_table(plan: Plan, replays: Sequence["StageReplay"]) -> Table:
    """Measurements of the replayed stages, times per micro-batch."""
    titles = ["stage", "packs", "forward ms", "backward ms", "recompute ms", "update ms", "peak"]
    rows = [
        [
            f"{replay.stage}",
            f"{len(replay.rows):,}",
            f"{np.mean(replay.forward_ms):,.2f}",
            f"{np.mean(replay.backward_ms):,.2f}",
            f"{np.mean(replay.recompute_ms):,.2f}",
            f"{replay.update_ms:,.2f}",
            _size(replay.peak_gib),
        ]
        for replay in replays
    ]
    if plan.prediction is not None:
        titles.append("predicted")
        for row, replay in zip(rows, replays, strict=True):
            memory = plan.prediction.stages[replay.stage].memory
            row.append(_size(replay.predicted_gib(memory)))
    return Table(
        title="Replayed stages, per micro-batch",
        columns=[Column(title=title) for title in titles],
        sections=[rows],
        tight=True,
    )


def _size(gib: float) -> str:
    """Format GiB with at least three digits."""
    mib = 1024 * gib
    return f"{gib:.2f} GiB" if gib >= 1 else f"{mib:.3g} MiB" if mib < 100 else f"{mib:.0f} MiB"


def _with_error(predicted_ms: float, taken_ms: float) -> str:
    return f"{predicted_ms:,.0f} ms ({predicted_ms / taken_ms - 1:+.1%})"


def _table(title: str, titles: Sequence[str], *sections: Sequence[Row]) -> Table:
    columns = [Column(title=name) for name in titles]
    return Table(title=title, columns=columns, sections=sections)
