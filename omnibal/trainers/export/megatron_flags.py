"""Settings of a plan by names of Megatron-LM's flags, and torchrun commands."""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from omnibal.job.plan import Plan
from omnibal.model.fp8 import FP8_FORMAT, TRAINED_FP8
from omnibal.model.parallel import expert_counts
from omnibal.model.units import LANGUAGE
from omnibal.trainers.export.energon import whole_steps
from omnibal.trainers.export.exported import ExportInput, shell_word
from omnibal.trainers.export.layout import Layout, all_or_none, layout_of, one_number

Flags = Mapping[str, str | None]
"""Values of flags by name without dashes, or None for a switch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Length of a micro-batch, which is a pack."""

    sequence_length: int
    """Tokens of the longest pack, rounded up to multiples for tensor parallelism and FP8."""
    fullness: float
    """Mean tokens of packs over the sequence length, 1 for a plan of shapes only."""

    @classmethod
    def of(cls, given: ExportInput) -> Self:
        """Measure packs of full steps."""
        order, multiple = whole_steps(given), given.plan.token_multiple
        tokens = np.array([given.longest_pack])
        if order is not None:
            tokens = order.packs.sums(given.lengths.tokens)
        length = -(-int(tokens.max()) // multiple) * multiple
        fullness = 1.0 if order is None else float(tokens.mean()) / length
        return cls(sequence_length=length, fullness=fullness)

    def padding_notes(self, reason: str) -> Iterator[str]:
        """Yield the cost of padding every pack to the longest, or nothing if all are equal."""
        if self.fullness < 1:
            filled = f"{100 * self.fullness:.1f} % of the {self.sequence_length:,}"
            yield f"{reason}: the plan's packs fill {filled} tokens on the mean."


def plan_layout(plan: Plan) -> Layout:
    """Return the language model layers of every stage."""
    return layout_of(plan.stages, plan.model.language.prediction_layers, plan.schedule.chunks)


def parallel_fields(plan: Plan) -> dict[str, Any]:
    """Return parallel group sizes, with expert tensor size 1, by Megatron's names."""
    sizes, predicted = plan.parallel, plan.model.language.prediction_layers
    fields = {
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "context_parallel_size": 1,
        "sequence_parallel": sizes.sequence_parallel,
    }
    if predicted:
        fields["mtp_num_layers"] = predicted
    if expert_counts(plan.model):
        fields |= {"expert_model_parallel_size": sizes.expert, "expert_tensor_parallel_size": 1}
    return fields


def recompute_fields(plan: Plan) -> dict[str, str | int | None]:
    """Return settings to recompute the first layers of every chunk, by Megatron's names.

    All are None if no layer of the language model is recomputed.
    """
    number = one_number(plan.stages_at(0), LANGUAGE)
    assert number is not None  # as the plan was found expressible
    return {
        "recompute_granularity": "full" if number else None,
        "recompute_method": "block" if number else None,
        "recompute_num_layers": number or None,
    }


def recomputed_encoders(plan: Plan) -> str:
    """Return the fully recomputed encoders, separated by commas."""
    return ", ".join(name for name in plan.model.encoders if all_or_none(plan.stages_at(0), name))


def as_flags(fields: Mapping[str, Any]) -> Flags:
    """Return fields as flags, without False and None. True is a switch."""
    return {
        name.replace("_", "-"): None if value is True else str(value)
        for name, value in fields.items()
        if value
    }


def fp8_flags(plan: Plan) -> Flags:
    """Return FP8 settings as predicted, or nothing without FP8."""
    if plan.precision != "fp8":
        return {}
    return {"fp8-format": FP8_FORMAT, "fp8-recipe": TRAINED_FP8.recipe}


def flag_lines(flags: Flags) -> list[str]:
    """Return a line per flag, with shell quoting."""
    return [
        f"--{name}" if value is None else f"--{name} {shell_word(value)}"
        for name, value in flags.items()
    ]


def devices_and_nodes(plan: Plan) -> tuple[int, int]:
    """Return devices per node, and nodes."""
    per_node = min(plan.cluster.gpus_per_node, plan.parallel.world_size)
    return per_node, -(-plan.parallel.world_size // per_node)


def launch_variables(given: ExportInput, **own: str) -> Mapping[str, str]:
    """Return variables for names, rates and nodes, which a plan does not decide."""
    variables = {
        "EXPORT": shlex.quote(str(given.folder)),
        **own,
        "MODEL": shlex.quote(given.checkpoint or given.plan.model.name),
        "OUTPUT": "$EXPORT/output",
        "LR": "1e-4" if given.plan.adapters else "1e-5",
    }
    if devices_and_nodes(given.plan)[1] > 1:
        variables["NODE_RANK"] = "${NODE_RANK:-${SLURM_NODEID:?number of this node, from 0}}"
        variables["MASTER_ADDR"] = "${MASTER_ADDR:?name of the first node}"
        variables["MASTER_PORT"] = "${MASTER_PORT:-29500}"
    return variables


def torchrun(plan: Plan, program: str) -> str:
    """Return a torchrun command without the program's flags."""
    per_node, nodes = devices_and_nodes(plan)
    line = f"torchrun --nproc_per_node {per_node}"
    if nodes > 1:
        line += (
            f" --nnodes {nodes} --node_rank $NODE_RANK --master_addr $MASTER_ADDR "
            "--master_port $MASTER_PORT"
        )
    # Megatron refuses tensor parallelism without it, before Blackwell.
    before = "CUDA_DEVICE_MAX_CONNECTIONS=1 " if plan.parallel.tensor > 1 else ""
    return f"{before}{line} {program}"


def join_command(lines: Iterable[str]) -> str:
    """Join lines of a shell command."""
    return " \\\n  ".join(lines)
