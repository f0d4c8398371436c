"""Results of commands as tables; those that the page shows too are in `report/page_tables.py`."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from omnibal.job.plan import Plan
from omnibal.model.config import ClusterConfig, LanguageConfig, ModelConfig, Provider
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.encoders import EncoderLayers
from omnibal.model.levels import are_plain
from omnibal.model.units import model_parts
from omnibal.pipeline.prediction import Prediction
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD
from omnibal.report.formatting import change, gib_or_mib, held_encoders, milliseconds, percent
from omnibal.report.table import Cell, Column, Facts, Table

if TYPE_CHECKING:  # they import scipy, which `omnibal --help` should not wait for
    from omnibal.cost.parameters import ModelParameters
    from omnibal.cost.profile import FitResidual
    from omnibal.job.replay import ReplaySummary, StageReplay
    from omnibal.report.summary import RunSummary
    from omnibal.search.caps import CapSearch
    from omnibal.search.encoder_placement import PlacementChoice
    from omnibal.search.parallel_sizes import StrategySearch
    from omnibal.search.schedule_choice import ScheduleChoice
    from omnibal.search.strategy import Sizing
    from omnibal.search.weight_sharding import ShardingChoice

_SHOWN_CANDIDATES = 10  # as many as a terminal shows beside the rest of what a command says


def models_table(models: Sequence[tuple[ModelConfig, "ModelParameters"]]) -> Table:
    """The model presets: parameters, and layers x hidden size of every tower.

    Args:
        models: each with its parameters.
    """
    return Table.of_records(
        "Models, with billions of parameters",
        models,
        {
            "name": lambda one: one[0].name,
            "10^9": lambda one: _billions(one[1].stored),
            "active": lambda one: _billions(one[1].active) if one[1].active < one[1].stored else "",
            "encoders": lambda one: "\n".join(map(_size, one[0].encoders.values())),
            "language": lambda one: _size(one[0].language),
            "experts": lambda one: _experts_words(one[0].language),
        },
    )


def _size(tower: EncoderLayers | LanguageConfig) -> str:
    return f"{tower.layers} x {tower.hidden_size}"


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
    """Table of the best caps that were tried, the chosen ones first."""
    best = search.candidates[0]
    titles = ("per pack", "per step", "per rank", "recom- puted", f"GiB of {cap_gib:.2f}")
    rows = [
        (
            *(f"{cap:,}" for cap in candidate.caps.values),
            f"{candidate.samples_per_pack:.2f}",
            f"{candidate.packs_per_step:,}",
            f"{candidate.micro_batches:,}",
            str(candidate.recomputed_layers),
            f"{candidate.peak_gib:.2f}",
            f"{100 * candidate.bubble_fraction:.1f}",
            f"{candidate.ms_per_sample:,.2f}",
            "best" if candidate is best else change(candidate.ms_per_sample, best.ms_per_sample),
        )
        for candidate in search.candidates[:_SHOWN_CANDIDATES]
    ]
    return Table.of_rows(
        "Caps: samples per pack, packs per step and per rank, and what that takes",
        (*best.caps.names, *titles, "idle %", "ms per sample", "over best"),
        rows,
    )


def strategy_table(search: "StrategySearch", cap_gib: float) -> Table:
    """Table of the fastest parallel sizes, then those that are clearly slower or do not fit."""
    tried = [strategy.sizing for strategy in search.ranking]
    tried += [one.sizing for one in search.ruled_out]
    names: list[str] = [*max((sizing.parallel.sizes for sizing in tried), key=len)]
    has_placements = len({sizing.placement for sizing in tried}) > 1
    has_levels = not all(are_plain(strategy.levels) for strategy in search.ranking)
    levels = ["levels"] if has_levels else []
    has_shards = any(sizing.parallel.sharded > 1 for sizing in tried)
    plan = (*search.best.caps.names, *levels, "recom-\nputed", "GiB")

    def sizes(sizing: "Sizing") -> list[str]:
        own = [str(sizing.parallel.sizes.get(name, 1)) for name in names]
        own += [str(sizing.parallel.sharded)] * has_shards
        return [*own, sizing.placement.option] if has_placements else own

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
    for one in search.ruled_out[:_SHOWN_CANDIDATES]:
        most, estimate = one.most_samples_per_second, one.estimated_samples_per_second
        rate = "" if most is None else f"< {most:,.2f}"
        rate = rate if estimate is None else f"~ {estimate:,.2f}"
        others.append((*sizes(one.sizing), *len(plan) * ("",), rate, one.why))
    over_best = Column(title="over best", style="left", least_width=24)
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
    )


def residuals_table(residuals: Sequence["FitResidual"], provider: Provider) -> Table:
    """Errors of the fitted costs against the measurements of a provider's layers."""
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


def stages_table(plan: Plan, prediction: Prediction) -> Table:
    """Units of every stage, and its times per micro-batch."""
    towers, held = plan.pipeline_model.towers, plan.held(plan.stages)
    held_at_levels = [plan.held(stages) for stages in plan.stages_at_levels]
    rows = [
        (
            str(index),
            *(str(stage.number_of_layers(tower)) for tower in towers),
            " / ".join(
                " + ".join(str(len(stages[index].recomputed(tower))) for tower in towers)
                for stages in held_at_levels
            ),
            f"{predicted.forward_ms:,.2f}",
            f"{predicted.backward_ms:,.2f}",
            f"{100 * predicted.wait_fraction:.1f}",
            ", ".join(span.name for span in stage.units if span.layers is None),
        )
        for index, (stage, predicted) in enumerate(zip(held, prediction.stages, strict=True))
    ]
    recompute = "recompute\nby level" if plan.levels else "recompute"
    # Words are not divided: the longest has as many characters.
    also = Column(title="also holds", style="wrap", least_width=len("projector,"))
    titles = ("stage", *towers, recompute, "forward\nms", "backward\nms", "waits\n%")
    return Table.of_rows("Stages", [*titles, also], rows)


def encoder_facts(plan: Plan, choice: "PlacementChoice") -> list[Facts]:
    """Both placements of encoders, and how data-parallel ones run."""
    planned, encoders = choice.predicted, plan.beside
    beside = None if plan.prediction is None else plan.prediction.beside
    if beside is None and len(planned) < 2:
        return []
    entries = [("placement", choice.chosen.option)]
    # Placements are compared before another schedule is taken.
    usual = ONE_FORWARD_ONE_BACKWARD
    in_usual = "" if plan.schedule == usual else f" in {usual.name}"
    for name, placement in (
        ("step, in the pipeline", EncoderPlacement.PIPELINE),
        ("step, beside it", EncoderPlacement.DATA_PARALLEL),
    ):
        if placement in planned:
            rate = planned[placement].samples_per_second_per_gpu
            per_second = "" if rate is None else f", {_of_all(rate, plan)} samples/s"
            step = milliseconds(planned[placement].step_ms, 4)
            entries.append((name, step + in_usual + per_second))
    entries.append(("why", choice.reason))
    if encoders is not None and beside is not None:
        ranks = encoders.pipelines * plan.parallel.pipeline * plan.parallel.tensor
        entries.append(("ranks that encode together", f"{ranks:,}"))
        entries.append(("weights of encoders", held_encoders(plan.parallel, encoders.sharded)))
        for name, encoder in plan.model.encoders.items():
            entries.append((f"{encoder.feature} in a pass", f"{encoders.items_per_pass[name]:,}"))
            entries.append((f"{encoder.feature} kept", f"{encoders.kept_items[name]:,}"))
        times = f"{milliseconds(beside.forward_ms)} + {milliseconds(beside.backward_ms)}"
        entries.append(("forward + backward", times))
        entries.append(("busiest rank over mean", f"{beside.busiest:.3f}"))
        entries.append(("exchange of features", milliseconds(beside.exchange_ms)))
    return [Facts("Encoders", entries)]


def _of_all(per_gpu: float, plan: Plan) -> str:
    return f"{per_gpu * plan.parallel.world_size:,.2f}"


def share_of_images(plan: Plan) -> float | None:
    """Share of the tokens of a pack of shapes that are images'; None where there are none."""
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
    plan: Plan,
    prediction: Prediction,
    sharding: "ShardingChoice | None" = None,
    schedule: "ScheduleChoice | None" = None,
) -> Facts:
    """The prediction of the whole job, and why its weights and its schedule are as they are."""
    parallel, exchange = plan.parallel, prediction.exchange
    entries = [
        ("devices", f"{parallel.world_size} = {parallel.text}, {plan.cluster.device}"),
        ("data", _data_text(plan)),
        ("step", milliseconds(prediction.step_ms, 4)),
        ("pipeline idle time", f"{percent(prediction.bubble_fraction)} of the step"),
    ]
    if schedule is not None and schedule.reason:
        entries.append(("schedule", schedule.reason))
    if exchange.total_ms:
        exposed = f"{milliseconds(exchange.exposed_ms)} exposed"
        entries.append(("data-parallel exchange", f"{milliseconds(exchange.total_ms)}, {exposed}"))
    if prediction.samples_per_second_per_gpu is not None:
        per_second = _of_all(prediction.samples_per_second_per_gpu, plan)
        entries.append(("samples per second", per_second))
    if prediction.gpu_days is not None:
        entries.append(("device days", f"{prediction.gpu_days:,.3g}"))
    if plan.adapters is not None:
        entries.append(("adapters", plan.adapters.words))
        known = {*plan.adapters.parts, *plan.frozen}
        whole = [part for part in model_parts(plan.model) if part not in known]
        entries.append(("trained whole", ", ".join(whole) or "nothing"))
    if parallel.sharded > 1:
        held = f"{parallel.sharding}, divided over {parallel.sharded} ranks"
        entries.append(("weights", held))
    if sharding is not None and sharding.others:
        entries.append(("other ways to hold weights", sharding.reason))
    return Facts("Plan", [*entries, ("costs from", prediction.cost_source)])


def simulation_facts(result: dict[str, Any]) -> Facts:
    """The simulated steps of a plan."""
    entries = [("steps", f"{result['steps']:,}")]
    for name in ("mean", "median", "min", "max"):
        entries.append((f"step, {name}", milliseconds(result[f"step_ms_{name}"], 4)))
    entries.append(("slowest step", f"{result['slowest_step']:,}"))
    for stage, share in enumerate(result["busy_fraction"]):
        entries.append((f"stage {stage} is busy", percent(share)))
    if result["trace"] is not None:
        entries.append((f"trace of step {result['trace_step']:,}", result["trace"]))
    return Facts("Simulated steps", entries)


def lost_time_table(prediction: Prediction) -> Table:
    """Breakdown of the time of a step, from the ideal up."""
    causes, step_ms = prediction.lost.named(), prediction.step_ms
    rows = [
        (k, f"{ms:z,.1f}", percent(ms / step_ms)) for k, ms in [*causes.items(), ("step", step_ms)]
    ]
    titles = ("", "ms", "of the step")
    return Table.of_rows("Where the step's time goes", titles, rows[:-1], rows[-1:])


def run_table(plan: Plan, run: "RunSummary | None", replay: "ReplaySummary | None") -> Table:
    """Times of a run and a replay beside the plan's prediction; at least one is given."""
    from omnibal.report.summary import figures_by_source, replayed_peaks_as_predicted

    sources, predicted = figures_by_source(plan, run, replay), plan.prediction
    columns: dict[str, dict[str, str]] = {name: {} for name in ("predicted", *sources)}
    if run is not None:
        if predicted is not None:
            columns["predicted"]["step, median"] = _with_error(predicted.step_ms, run.step_ms)
        columns["measured"] = {
            "provider of layers": run.provider or "not recorded",
            "loss, first step": f"{run.first_loss:.4f}",
            "loss, last step": f"{run.last_loss:.4f}",
            "step, median": milliseconds(run.step_ms),
            **{name: f"{count:,}" for name, count in run.incidents().items()},
            **{str(slow): f"{slow.factor:.2f} x median rank" for slow in run.slow_ranks},
        }
    if replay is not None:
        step = f"step, mean of {len(replay.info.steps):,}"
        columns["predicted"][step] = _with_error(replay.predicted_step_ms, replay.step_ms)
        for stage, gib in enumerate(replayed_peaks_as_predicted(plan, replay)):
            columns["predicted"][f"stage {stage} peak"] = gib_or_mib(gib)
        columns["replayed"] = {
            "provider of layers": replay.info.provider,
            step: milliseconds(replay.step_ms),
            **{f"stage {i} peak": gib_or_mib(one.peak_gib) for i, one in enumerate(replay.stages)},
        }
    for name, figures in sources.items():
        waits = enumerate(figures.wait_fractions)
        columns[name] |= {f"stage {stage} waits": percent(share) for stage, share in waits}
    names = dict.fromkeys(name for column in columns.values() for name in column)
    rows = [(name, *(column.get(name, "") for column in columns.values())) for name in names]
    title = "Replay and run" if run and replay else "Run" if run else "Replay"
    return Table.of_rows(title, ("", *columns), rows)


def _with_error(predicted_ms: float, taken_ms: float) -> str:
    return f"{milliseconds(predicted_ms)} ({change(predicted_ms, taken_ms)})"


def replayed_stages_table(plan: Plan, replays: Sequence["StageReplay"]) -> Table:
    """Measurements of the replayed stages, times per micro-batch."""
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
