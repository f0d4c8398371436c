"""Task of a stage search: a model's costs and micro-batches, and the limits of its stages."""

from dataclasses import dataclass

import numpy as np

from omnibal.base.errors import DoesNotFit, UserError
from omnibal.cost.model import CostModel
from omnibal.model.config import ModelConfig
from omnibal.model.limits import words
from omnibal.model.targets import FREE, StageRules
from omnibal.model.units import LANGUAGE_EMBED, unit_names
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.pipeline.stage_memory import GIB
from omnibal.pipeline.workload import Workload


@dataclass(frozen=True, slots=True, eq=False)
class SplitTask:
    """A model to split into pipeline stages."""

    cost: CostModel  # of all levels
    model: ModelConfig  # of the pipeline, without data-parallel encoders
    workload: Workload
    stages: int
    memory_cap_bytes: float = np.inf  # per device
    rules: StageRules = FREE  # of the trainer
    schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD


def allowed_runs(task: SplitTask, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return whether runs of units may be stages (the first, if `start` is 0), given the positions
    of their first unit and after their last unit, [runs]. bool [runs]"""
    names, rules = unit_names(task.model), task.rules
    units, embed = len(names), names.index(LANGUAGE_EMBED)
    allowed = np.ones(len(start), bool)
    if rules.encoders_on_first:
        allowed &= (end > embed) & ((start == 0) | (start > embed))
    if rules.language_everywhere:
        # Layers are between the language embed and the head, the last unit.
        allowed &= (end > embed + 1) & (start < units - 1)
    return allowed


def check_stage_rules(model: ModelConfig, stages: int, rules: StageRules) -> None:
    """Raise UserError if there are more stages than the rules allow."""
    language = model.language.layers
    if rules.language_everywhere:
        limit, why = language, "every stage must hold a layer of the language model"
    elif rules.encoders_on_first:
        limit = language + any(encoder.layers for encoder in model.encoders.values())
        why = "the first stage must hold all encoders, and every stage a layer"
    else:
        return
    if stages > limit:
        raise UserError(
            f"pipeline size {stages} was given for {model.name}, whose language model has "
            f"{language} layers; {why}: choose a pipeline size of at most {limit}"
        )


def memory_error(task: SplitTask, content: str, peak_bytes: float, remedy: str) -> DoesNotFit:
    """Return the error of a search whose best stages, which hold `content` too, need `peak_bytes`,
    more than the memory cap."""
    need, cap = peak_bytes / GIB, task.memory_cap_bytes / GIB
    return DoesNotFit(
        f"{task.model.name} on {task.stages} pipeline stages {content}needs {need:.2f} GiB per "
        f"device at best, with recomputation where it helps: {need - cap:.2f} GiB more than the "
        f"memory cap of {cap:.2f} GiB",
        remedy,
    )


def limits_in_words(task: SplitTask) -> str:
    """Return the stage limits in words for a memory error, such as "with all encoders on the first
    stage ", or "" if none apply. Limits of recomputation are left out."""
    limits, rules, model, stages = list[str](), task.rules, task.model, task.stages
    if rules.encoders_on_first and model.encoders and stages > 1:
        limits.append("all encoders on the first stage")
    if rules.encoders_whole and model.encoders:
        limits.append("encoders whole on every tensor-parallel rank")
    if rules.language_everywhere and stages > 1:
        limits.append("a layer of the language model on every stage")
    return f"with {words(limits)} " if limits else ""
