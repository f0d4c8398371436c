"""Settings of a plan by names of Megatron-LM's flags, and torchrun commands."""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from omnibal.job.plan import Plan
from omnibal.model.fp8 import FP8_FORMAT, TRAINED_FP8
from omnibal.model.parallel import expert_counts
from omnibal.model.units import LANGUAGE
from omnibal.trainers.export.energon import whole_steps
from omnibal.trainers.export.exported import ExportInput, shell_word
from omnibal.trainers.export.layout import PPLayout, all_or_none, layout_of, one_number


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Padded length and mean fullness of micro-batches of one pack each."""

    sequence_length: int  # of the longest pack, rounded up for sequence parallelism and FP8
    fullness: float  # mean tokens of packs over the sequence length, 1 for a plan of shapes only

    @classmethod
    def measure(cls, given: ExportInput) -> Self:
        """Return the length and mean fullness of packs in full steps. Raise if no step is full."""
        order, multiple = whole_steps(given), given.plan.token_multiple
        longest = given.longest_pack if order is None else int(order.tokens.max())
        length = -(-longest // multiple) * multiple
        fullness = 1.0 if order is None else float(order.tokens.mean()) / length
        return cls(sequence_length=length, fullness=fullness)

    def padding_notes(self, reason: str) -> Iterator[str]:
        """Yield a sentence on padding packs to the longest, after `reason`, if any is padded."""
        if self.fullness < 1:
            filled = f"{100 * self.fullness:.1f} % of the {self.sequence_length:,}"
            yield f"{reason}: the plan's packs fill {filled} tokens on average."


def plan_layout(plan: Plan) -> PPLayout:
    """Return the layout of a plan's stages and chunks."""
    return layout_of(plan.stages, plan.model.language.prediction_layers, plan.schedule.chunks)


def parallel_fields(plan: Plan) -> dict[str, Any]:
    """Return parallel sizes and multi-token prediction layers by Megatron's names."""
    sizes, predicted = plan.parallel, plan.model.language.prediction_layers
    fields = {
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "context_parallel_size": 1,  # levels are refused by `obstacles`
        "sequence_parallel": sizes.sequence_parallel,
    }
    if predicted:
        fields["mtp_num_layers"] = predicted
    if expert_counts(plan.model):
        # Megatron's default is the tensor size; plans divide experts, never one expert.
        fields |= {"expert_model_parallel_size": sizes.expert, "expert_tensor_parallel_size": 1}
    return fields


def recompute_fields(plan: Plan) -> dict[str, str | int | None]:
    """Return recomputation of chunks' first layers by Megatron's names, values None if none."""
    number = one_number(plan.stages_at(0), LANGUAGE)
    assert number is not None  # checked by `obstacles`
    return {
        "recompute_granularity": "full" if number else None,
        "recompute_method": "block" if number else None,
        "recompute_num_layers": number or None,
    }


def recomputed_encoders(plan: Plan) -> str:
    """Return the names of encoders with all layers recomputed, separated by commas."""
    return ", ".join(name for name in plan.model.encoders if all_or_none(plan.stages_at(0), name))


def fp8_fields(plan: Plan) -> dict[str, str]:
    """Return FP8 settings as predicted, or nothing without FP8."""
    fields = {"fp8_format": FP8_FORMAT, "fp8_recipe": TRAINED_FP8.recipe}
    return fields if plan.precision == "fp8" else {}


def flag_lines(fields: Mapping[str, Any]) -> list[str]:
    """Return a line per field, with shell quoting: True as a switch, False and None left out."""
    flags = {name.replace("_", "-"): value for name, value in fields.items()}
    return [
        f"--{name}" if value is True else f"--{name} {shell_word(str(value))}"
        for name, value in flags.items()
        if value is not None and value is not False
    ]


def devices_and_nodes(plan: Plan) -> tuple[int, int]:
    """Return devices per node, and nodes."""
    per_node = min(plan.cluster.gpus_per_node, plan.parallel.world_size)
    return per_node, -(-plan.parallel.world_size // per_node)


def launch_variables(given: ExportInput, **own: str) -> Mapping[str, str]:
    """Return shell variables for names, the learning rate and nodes, which a plan does not set."""
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
    """Return a torchrun command of a program, without the program's flags."""
    per_node, nodes = devices_and_nodes(plan)
    line = f"torchrun --nproc_per_node {per_node}"
    if nodes > 1:
        line += (
            f" --nnodes {nodes} --node_rank $NODE_RANK --master_addr $MASTER_ADDR "
            "--master_port $MASTER_PORT"
        )
    # Megatron requires it for tensor parallelism before Blackwell.
    before = "CUDA_DEVICE_MAX_CONNECTIONS=1 " if plan.parallel.tensor > 1 else ""
    return f"{before}{line} {program}"


def join_command(lines: Iterable[str]) -> str:
    """Return one shell command of lines, joined by backslashes."""
    return " \\\n  ".join(lines)
