"""Predicted cost of a launch line, and cheaper splits, for `omnibal lint`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnibal.base.errors import UserError
from omnibal.cli.options import ClusterOption, MemoryOption, changed_cluster, count_option
from omnibal.cli.plan_command import DEFAULT_IMAGE_SHARE
from omnibal.data.lengths import read_lengths
from omnibal.model.config import ModelConfig
from omnibal.report.table import Facts, Table
from omnibal.trainers.lint.launch_settings import MEGATRON, Launcher

if TYPE_CHECKING:  # they import scipy, which `omnibal --help` should not wait for
    from omnibal.job.published_errors import PublishedErrors
    from omnibal.trainers.lint.line import LaunchLine
    from omnibal.trainers.lint.predict_line import Costed, Verdict

DEFAULT_CLUSTER = "h100-80g"


@dataclass(frozen=True, kw_only=True, slots=True)
class CostOptions:
    cluster: ClusterOption = DEFAULT_CLUSTER
    memory_gib: MemoryOption = None
    lengths: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="lengths to pack (repeatable; default: full samples)"),
    ] = None
    image_share: Annotated[
        float, typer.Option(min=0, max=1, metavar="X", help="image tokens / tokens without data")
    ] = DEFAULT_IMAGE_SHARE
    sample_tokens: Annotated[
        int | None, count_option("tokens per sample without data (default: full)")
    ] = None
    cost: Annotated[bool, typer.Option("--cost/--no-cost", help="predict memory and step time")] = (
        True
    )

    def predict(
        self, line: "LaunchLine", model: ModelConfig
    ) -> tuple["Verdict | None", str | None]:
        """Return the prediction, and the reason if there is none. Both None under --no-cost."""
        from omnibal.trainers.lint.line_job import make_line_job
        from omnibal.trainers.lint.predict_line import Verdict

        if not self.cost:
            return None, None
        cluster = changed_cluster(self.cluster, self.memory_gib)
        samples = read_lengths(self.lengths) if self.lengths else None
        try:
            shapes = samples, self.image_share, self.sample_tokens
            return Verdict.predict(make_line_job(line, model, cluster, *shapes)), None
        except UserError as error:
            return None, f"the cost is not predicted: {error}"


def cost_result(verdict: "Verdict | None") -> dict[str, Any]:
    """Return prediction and improvements for JSON, each None if there is none."""
    if verdict is None:
        return dict.fromkeys(("prediction", "better", "least_recompute"))
    job, better, least = verdict.line_job.job, verdict.better, verdict.least
    prediction = {
        **_costed_result(verdict, verdict.line),
        "tokens_per_second_per_gpu": verdict.tokens_per_second_per_gpu,
        "cluster": job.cluster.name,
        "device_gib": job.cluster.memory_gib,
        "usable_gib": job.memory_cap_gib,
        "fits": verdict.finding is None,
        "cost_source": verdict.line.prediction.cost_source,
        "kind": verdict.line_job.kind,
        "published_errors": _published_errors(verdict),
        "notes": list(verdict.line_job.notes),
    }
    faster = better and _advised_result(verdict, better) | {"saved_fraction": verdict.saving}
    smaller = least and _advised_result(verdict, least)
    return {"prediction": prediction, "better": faster, "least_recompute": smaller}


def cost_tables(verdict: "Verdict") -> list[Table | Facts | str]:
    """Return the tables of stages and of the whole job, then sentences of advice."""
    return [_costed_stages_table(verdict), _prediction_facts(verdict), *_advice(verdict)]


def _costed_result(verdict: "Verdict", costed: "Costed") -> dict[str, Any]:
    towers = verdict.line_job.job.model.towers
    stages = [  # `peak_gib` is the key of `omnibal plan`; lint adds allocated, reserved, device
        {
            "peak_gib": memory.allocated_gib,
            **memory.model_dump(),
            **{f"{tower}_layers": stage.number_of_layers(tower) for tower in towers},
            "recompute": {tower: len(stage.recomputed_in(tower)) for tower in towers},
            "forward_ms": times.forward_ms,
            "backward_ms": times.backward_ms,
            "wait_fraction": times.wait_fraction,
        }
        for stage, times, memory in zip(
            costed.stages, costed.prediction.stages, costed.memory, strict=True
        )
    ]
    return {
        "schedule": {"name": costed.schedule.name, "chunks": costed.schedule.chunks},
        "step_ms": costed.step_ms,
        "bubble_fraction": costed.prediction.bubble_fraction,
        "samples_per_second_per_gpu": costed.prediction.samples_per_second_per_gpu,
        "stages": stages,
    }


def _advised_result(verdict: "Verdict", advised: "Costed") -> dict[str, Any]:
    return {
        **_costed_result(verdict, advised),
        "flags": list(advised.flags),
        "recompute_without_flag": _encoders_without_flag(verdict, advised),
    }


def _costed_stages_table(verdict: "Verdict") -> Table:
    """Return the table of layers, memory and times per micro-batch by stage."""
    towers = verdict.line_job.job.model.towers
    rows = [
        (
            str(index),
            *(str(stage[f"{tower}_layers"]) for tower in towers),
            " + ".join(map(str, stage["recompute"].values())),
            f"{stage['allocated_gib']:,.1f}",
            f"{stage['device_gib']:,.1f}",
            f"{stage['forward_ms']:,.2f}",
            f"{stage['backward_ms']:,.2f}",
            f"{stage['wait_fraction']:.1%}",
        )
        for index, stage in enumerate(_costed_result(verdict, verdict.line)["stages"])
    ]
    times = ("forward\nms", "backward\nms", "waits")
    titles = ("stage", *towers, "recompute", "tensors\nGiB", "device\nGiB", *times)
    return Table.of_rows("\nStages, simulated", titles, rows)


def _prediction_facts(verdict: "Verdict") -> Facts:
    line_job, prediction = verdict.line_job, verdict.line.prediction
    sizes, tokens = line_job.job.parallel, verdict.tokens_per_second_per_gpu
    memory = max(verdict.line.memory, key=lambda stage: stage.device_gib)  # the fullest stage
    torch = f"torch {memory.reserved_gib:,.1f}, its tensors {memory.allocated_gib:,.1f}"
    rate, none = prediction.samples_per_second_per_gpu, f"no published step of {line_job.kind}"
    entries = {
        "devices": f"{sizes.world_size:,} of {line_job.job.cluster.name}",
        "step": f"{verdict.line.step_ms:,.1f} ms",
        "memory": f"{memory.device_gib:,.1f} GiB at most; {torch}",
        "pipeline idle time": f"{prediction.bubble_fraction:.1%} of the step",
        "tokens per second": f"{tokens * sizes.world_size:,.0f}, {tokens:,.0f} a device",
        "samples per second": None if rate is None else f"{rate * sizes.world_size:,.2f}",
        "costs from": prediction.cost_source,
        "error of such predictions": str(_published_errors(verdict) or f"{none} was at hand"),
    }
    return Facts.of("Prediction", entries)


def _published_errors(verdict: "Verdict") -> "PublishedErrors | None":
    from omnibal.job.published_errors import published_errors

    line_job = verdict.line_job
    pack_tokens = line_job.packs.packs.sums(line_job.lengths.tokens)  # [packs]
    return published_errors(line_job.kind, line_job.job.cluster, float(pack_tokens.max(initial=0)))


def _advice(verdict: "Verdict") -> Iterator[str]:
    better, least = verdict.better, verdict.least
    if better is not None:
        how = f"another split takes {verdict.saving:.1%} less time"
        if verdict.saving < 0:
            how = f"a split that fits takes {-verdict.saving:.1%} longer"
        elif verdict.finding is not None:
            how += ", and fits"
        step = f"{better.step_ms:,.1f} ms a step"
        if len(better.stages) > 1:
            count = better.schedule.chunks
            chunks = "one chunk" if count == 1 else f"{count} chunks"
            step = f"by {better.schedule.name} with {chunks} a stage, {step}"
        yield f"{how}, {step}: {_flags(verdict, better)}"
    if least is not None and (better is None or least.flags != better.flags):
        step = f"{least.step_ms:,.1f} ms a step"
        chunks = "" if verdict.line_job.has_all_chunks else ", in one chunk each,"
        yield (
            f"the line's layers by stage{chunks} fit with the least recomputation, {step}: "
            f"{_flags(verdict, least)}"
        )
    if better is not None or least is not None:
        yield "(in place of the line's own flags of split, chunks and recomputation)"
    elif verdict.finding is not None and verdict.line_job.line.launch.launcher in MEGATRON:
        yield "no split of these sizes fits: raise PP, TP or EP, or shorten the sequence"


def _flags(verdict: "Verdict", advised: "Costed") -> str:
    flags = " ".join(advised.flags) or "no flags of the split or of recomputation"
    if encoders := _encoders_without_flag(verdict, advised):
        flags += f", with all layers of {', '.join(encoders)} recomputed by your model's own fields"
    return flags


def _encoders_without_flag(verdict: "Verdict", advised: "Costed") -> list[str]:
    """Return recomputed encoders if Megatron-Bridge, which has no field for them, else []."""
    if verdict.line_job.line.launch.launcher is not Launcher.MEGATRON_BRIDGE:
        return []
    encoders = verdict.line_job.job.model.encoders
    return [name for name in encoders if any(stage.recomputed_in(name) for stage in advised.stages)]
