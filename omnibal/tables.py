"""Results as tables for a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.table import Table

from omnibal.config import ClusterConfig, ModelConfig
from omnibal.data.lengths import Lengths
from omnibal.data.metrics import PackMetrics
from omnibal.limits import memory_cap_gib
from omnibal.pipeline.prediction import Prediction
from omnibal.pipeline.stage import Stage
from omnibal.plan import Plan
from omnibal.runlog import Evaluation

if TYPE_CHECKING:  # they import scipy, which `omnibal --help` should not wait for
    from omnibal.cost.profile import FitResidual
    from omnibal.replay import ReplaySummary, StageReplay
    from omnibal.report.summary import RunSummary
    from omnibal.search.caps import CapSearch
    from omnibal.search.parallel_sizes import StrategySearch

_SHOWN_CANDIDATES = 10


def length_statistics(lengths: Lengths, rows: np.ndarray) -> dict[str, float | None]:
    """Count, and mean and most tiles and tokens, of the samples in `rows` (None without any)."""
    statistics: dict[str, float | None] = {"samples": int(rows.sum())}
    for name, values in (("tiles", lengths.tiles[rows]), ("tokens", lengths.tokens[rows])):
        statistics[f"{name}_mean"] = float(values.mean()) if len(values) else None
        statistics[f"{name}_max"] = int(values.max()) if len(values) else None
    return statistics


def source_statistics(lengths: Lengths) -> list[dict[str, Any]]:
    """`length_statistics` of every source, with its name."""
    return [
        {"source": name, **length_statistics(lengths, lengths.source == code)}
        for code, name in enumerate(lengths.source_names)
    ]


def models_table(models: Sequence[ModelConfig]) -> Table:
    """The model presets: layers x hidden size, and pixels and tokens of a tile."""
    table = _table("Models", "name", "vision", "language", "pixels", "tokens")
    for model in models:
        vision, sizes = "-", ("-", "-")
        if model.encoders:
            vision = f"{model.vision.layers} x {model.vision.hidden_size}"
            sizes = str(model.vision.image_size), str(model.vision.tokens_per_item)
        language = f"{model.language.layers} x {model.language.hidden_size}"
        table.add_row(model.name, vision, language, *sizes)
    return table


def clusters_table(clusters: Sequence[ClusterConfig]) -> Table:
    """The cluster presets."""
    table = _table("Clusters", "name", "device", "GiB", "bf16 TFLOP/s", "GB/s in node", "between")
    for cluster in clusters:
        table.add_row(
            cluster.name,
            cluster.device,
            f"{cluster.memory_gib:g}",
            "-" if "bf16" not in cluster.peak_tflops else f"{cluster.peak_tflops['bf16']:g}",
            f"{cluster.intra_node_gb_per_s:g}",
            f"{cluster.inter_node_gb_per_s:g}",
        )
    return table


def lengths_table(lengths: Lengths) -> Table:
    """Samples, tiles and tokens of every source, and of all."""
    numbers = ("samples", "tiles mean", "tiles max", "tokens mean", "tokens max")
    table = _table("Sample lengths", "source", *numbers)
    for row in source_statistics(lengths):
        table.add_row(*_length_cells(row))
    table.add_section()
    everyone = np.ones(len(lengths), bool)
    table.add_row(*_length_cells({"source": "all", **length_statistics(lengths, everyone)}))
    return table


def _length_cells(row: dict[str, Any]) -> list[str]:
    digits = {"samples": 0, "tiles_mean": 2, "tiles_max": 0, "tokens_mean": 1, "tokens_max": 0}
    numbers = ["-" if row[k] is None else f"{row[k]:,.{n}f}" for k, n in digits.items()]
    return [row["source"], *numbers]


def packs_table(metrics: PackMetrics, load: str) -> Table:
    """The figures of a packing; `load` says by what the straggler factor is measured."""
    table = _facts_table("Packs")
    table.add_row("samples packed", f"{metrics.packed:,} of {metrics.samples:,}")
    table.add_row("packs", f"{metrics.packs:,}")
    table.add_row("packs needed at least", f"{metrics.packs_lower_bound:,}")
    table.add_row("above that", f"{metrics.gap:.2%}")
    table.add_row("samples per pack", f"{metrics.samples_per_pack:.2f}")
    table.add_row("fill of tiles", f"{metrics.fill_tiles:.1%}")
    table.add_row("fill of tokens", f"{metrics.fill_tokens:.1%}")
    table.add_row("pad ratio", f"{metrics.pad_ratio:.4f}")
    table.add_row("dist ratio, vision", f"{metrics.dist_ratio_vision:.4f}")
    table.add_row("dist ratio, language", f"{metrics.dist_ratio_language:.4f}")
    table.add_row("attention balance ratio", f"{metrics.attention_balance_ratio:.4f}")
    table.add_row("straggler factor", f"{metrics.straggler_factor:.4f}")
    table.add_row("in predicted time of", load)
    table.add_row("steps", f"{metrics.steps:,}")
    return table


def caps_table(search: "CapSearch", cap_gib: float) -> Table:
    """Table of the best caps that were tried, the chosen ones first."""
    title = "Caps: samples per pack, packs per step and per rank, and what that takes"
    packs = ("per pack", "per step", "per rank")
    predicted = ("recom- puted", f"GiB of {cap_gib:.2f}", "idle", "ms per sample", "over best")
    table = _table(title, "tiles", "tokens", *packs, *predicted)
    # Padded edges would make the table wider than 80 characters.
    table.pad_edge = False
    best = search.candidates[0]
    for candidate in search.candidates[:_SHOWN_CANDIDATES]:
        # Without the sign of a difference that rounds to nothing.
        over_best = round(candidate.ms_per_sample / best.ms_per_sample - 1, 3) + 0.0
        table.add_row(
            f"{candidate.max_tiles:,}",
            f"{candidate.max_tokens:,}",
            f"{candidate.samples_per_pack:.2f}",
            f"{candidate.packs_per_step:,}",
            f"{candidate.micro_batches:,}",
            str(candidate.recomputed_layers),
            f"{candidate.peak_gib:.2f}",
            f"{candidate.bubble_fraction:.1%}",
            f"{candidate.ms_per_sample:,.2f}",
            "best" if candidate is best else f"{over_best:+.1%}",
        )
    return table


def strategy_table(search: "StrategySearch", cap_gib: float) -> Table:
    """Table of the fastest parallel sizes, then those that are clearly slower or do not fit."""
    title = (
        f"Strategies for {search.gpus:,} devices at {search.samples_per_step:,} samples per step, "
        f"memory of {cap_gib:.1f} GiB"
    )
    plan = ("tiles", "tokens", "recom-\nputed", "GiB")
    table = _table(title, "TP", "PP", "DP", *plan, "samples\nper s")
    table.add_column("over best", min_width=24)
    # Padded edges would make the table wider than 80 characters.
    table.pad_edge = False
    for strategy in search.ranking[:_SHOWN_CANDIDATES]:
        parallel = strategy.parallel
        table.add_row(
            str(parallel.tensor),
            str(parallel.pipeline),
            str(parallel.data),
            f"{strategy.caps.max_tiles:,}",
            f"{strategy.caps.max_tokens:,}",
            str(strategy.recomputed_layers),
            f"{strategy.peak_gib:.1f}",
            f"{strategy.samples_per_second:,.2f}",
            strategy.why,
        )
    table.add_section()
    for ruled_out in search.ruled_out[:_SHOWN_CANDIDATES]:
        parallel, most = ruled_out.parallel, ruled_out.most_samples_per_second
        sizes = (str(parallel.tensor), str(parallel.pipeline), str(parallel.data))
        per_second = "" if most is None else f"< {most:,.2f}"
        table.add_row(*sizes, "", "", "", "", per_second, ruled_out.why)
    return table


def residuals_table(residuals: Sequence["FitResidual"]) -> Table:
    """Errors of the fitted costs against the measurements."""
    errors = ("median error", "largest error")
    table = _table("Fit of the costs", "unit", "quantity", "measurements", *errors)
    for residual in residuals:
        table.add_row(
            residual.unit,
            residual.quantity,
            str(residual.measurements),
            f"{residual.median_error:.1%}",
            f"{residual.max_error:.1%}",
        )
    return table


def stages_table(plan: Plan, prediction: Prediction) -> Table:
    """Units of every stage, and its times per micro-batch."""
    times = ("forward ms", "backward ms", "waits")
    table = _table("Stages", "stage", "vision", "language", "recompute", *times)
    table.add_column("also holds", overflow="fold")
    for index, (stage, predicted) in enumerate(zip(plan.stages, prediction.stages, strict=True)):
        table.add_row(
            str(index),
            str(len(stage.layers("vision"))),
            str(len(stage.layers("language"))),
            _recomputed(stage),
            f"{predicted.forward_ms:,.2f}",
            f"{predicted.backward_ms:,.2f}",
            f"{predicted.wait_fraction:.1%}",
            _single_units(stage),
        )
    return table


def memory_table(plan: Plan, prediction: Prediction) -> Table:
    """Memory of one device of every stage."""
    kinds = ("weights", "gradients", "optimizer", "activations", "working", "peak")
    cap_gib = memory_cap_gib(plan.cluster)
    table = _table(f"Memory, GiB of {cap_gib:.2f}", "stage", *kinds)
    for index, predicted in enumerate(prediction.stages):
        memory = predicted.memory
        table.add_row(
            str(index),
            f"{memory.weights_gib:.2f}",
            f"{memory.gradients_gib:.2f}",
            f"{memory.optimizer_gib:.2f}",
            f"{memory.activations_gib:.2f}",
            f"{memory.transient_gib:.2f}",
            f"{memory.peak_gib:.2f}",
        )
    return table


def plan_table(plan: Plan, prediction: Prediction) -> Table:
    """Table of the prediction of the whole job."""
    parallel = plan.parallel
    table = _facts_table("Plan")
    table.add_row(
        "devices",
        f"{parallel.world_size} = TP {parallel.tensor} x PP {parallel.pipeline} x DP "
        f"{parallel.data}, {plan.cluster.device}",
    )
    if plan.data is not None:
        table.add_row(
            "data",
            f"{plan.data.samples:,} samples x {plan.data.epochs} epoch(s) in {plan.data.packs:,} "
            f"packs, {plan.data.steps:,} steps",
        )
    table.add_row("step", f"{prediction.step_ms:,.1f} ms")
    table.add_row("stages wait", f"{prediction.bubble_fraction:.1%} of it")
    if prediction.samples_per_second_per_gpu is not None:
        per_second = prediction.samples_per_second_per_gpu * parallel.world_size
        table.add_row("samples per second", f"{per_second:,.2f}")
    if prediction.gpu_days is not None:
        table.add_row("device days", f"{prediction.gpu_days:,.3g}")
    table.add_row("costs from", prediction.cost_source)
    return table


def simulation_table(result: dict[str, Any]) -> Table:
    """Table of the simulated steps of a plan."""
    table = _facts_table("Simulated steps")
    table.add_row("steps", f"{result['steps']:,}")
    for name in ("mean", "median", "min", "max"):
        table.add_row(f"step, {name}", f"{result[f'step_ms_{name}']:,.1f} ms")
    table.add_row("slowest step", f"{result['slowest_step']:,}")
    for stage, share in enumerate(result["busy_fraction"]):
        table.add_row(f"stage {stage} is busy", f"{share:.1%}")
    if result["trace"] is not None:
        table.add_row(f"trace of step {result['trace_step']:,}", result["trace"])
    return table


def lost_time_table(prediction: Prediction) -> Table:
    """Breakdown of the time of a step, from the ideal up."""
    table = _table("Where the step's time goes", "", "ms", "of the step")
    for name, ms in prediction.lost.named().items():
        table.add_row(name, f"{ms:,.1f}", f"{ms / prediction.step_ms:.1%}")
    table.add_section()
    table.add_row("step", f"{prediction.step_ms:,.1f}", "100.0%")
    return table


def run_table(
    plan: Plan,
    run: "RunSummary | None",
    replay: "ReplaySummary | None",
    evaluation: Evaluation | None,
) -> Table:
    """Times of a run and a replay beside the plan's prediction; at least one is given."""
    given = {"replayed": replay, "measured": run}
    columns = ["predicted", *(name for name, one in given.items() if one is not None)]
    title = " and ".join({"replayed": "replay", "measured": "run"}[name] for name in columns[1:])
    table = _table(title.capitalize(), "", *columns)

    def add(name: str, **cells: str) -> None:
        table.add_row(name, *(cells.get(column, "") for column in columns))

    predicted = plan.prediction
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
    if evaluation is not None:
        table.add_section()
        add("held-out answers, exact", predicted="chance")
        for kind in evaluation.kinds:
            accuracy = f"{kind.accuracy:.1%} of {kind.questions:,}"
            add(kind.kind, predicted=f"{kind.chance:.1%}", measured=accuracy)
    return table


def replayed_stages_table(plan: Plan, replays: Sequence["StageReplay"]) -> Table:
    """Measurements of the replayed stages, times per micro-batch."""
    times = ("forward ms", "backward ms", "recompute ms", "update ms", "peak")
    table = _table("Replayed stages, per micro-batch", "stage", "packs", *times)
    # Padded edges would make the table wider than 80 characters.
    table.pad_edge = False
    if plan.prediction is not None:
        table.add_column("predicted", justify="right")
    for replay in replays:
        cells = [
            f"{replay.stage}",
            f"{len(replay.rows):,}",
            f"{np.mean(replay.forward_ms):,.2f}",
            f"{np.mean(replay.backward_ms):,.2f}",
            f"{np.mean(replay.recompute_ms):,.2f}",
            f"{replay.update_ms:,.2f}",
            _size(replay.peak_gib),
        ]
        if plan.prediction is not None:
            predicted_gib = replay.predicted_gib(plan.prediction.stages[replay.stage].memory)
            cells.append(_size(predicted_gib))
        table.add_row(*cells)
    return table


def _size(gib: float) -> str:
    """Format GiB with at least three digits."""
    mib = 1024 * gib
    return f"{gib:.2f} GiB" if gib >= 1 else f"{mib:.3g} MiB" if mib < 100 else f"{mib:.0f} MiB"


def _with_error(predicted_ms: float, taken_ms: float) -> str:
    return f"{predicted_ms:,.0f} ms ({predicted_ms / taken_ms - 1:+.1%})"


def _recomputed(stage: Stage) -> str:
    """Vision and language layers, as in "3 + 0"."""
    return f"{len(stage.recomputed('vision'))} + {len(stage.recomputed('language'))}"


def _single_units(stage: Stage) -> str:
    held = {
        "image embed": stage.holds("vision embed"),
        "projector": stage.holds("projector"),
        "text embed": stage.holds("language embed"),
        "head": stage.holds("head"),
    }
    return ", ".join(name for name, is_held in held.items() if is_held)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _facts_table(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=box.SIMPLE_HEAD)
    table.add_column()
    table.add_column(justify="right")
    return table
