"""The run log: `run.jsonl`, one line per trained step, and `evaluation.json` beside it.

Training writes these types and the report reads them.
"""

import json
from pathlib import Path

from pydantic import NonNegativeFloat, NonNegativeInt, ValidationError

from omnibal.config import Frozen
from omnibal.errors import UserError

RUN_FILE = "run.jsonl"
RUN_INFO_FILE = "run.json"
EVALUATION_FILE = "evaluation.json"


class RunInfo(Frozen):
    """What a run trains, written when it starts, so that a report can tell whose run it is."""

    model: str
    packs_sha256: str
    """Of the plan's packs: the data, its order and the step boundaries."""


class StageRecord(Frozen):
    """What one pipeline stage did in one step, mean over its data-parallel ranks."""

    forward_ms: NonNegativeFloat
    backward_ms: NonNegativeFloat
    """Includes recomputation."""
    wait_ms: NonNegativeFloat
    """For the neighbours' tensors, and for the other stages at the end of the step."""
    data_ms: NonNegativeFloat
    """Waiting for the next micro-batch to be loaded."""
    optimizer_ms: NonNegativeFloat
    """Gradient reduction, norm, clipping and weight update."""
    peak_gib: NonNegativeFloat
    """Peak memory of the process (CPU: resident set) or device (CUDA: allocator) so far."""


class StepRecord(Frozen):
    """One trained step."""

    step: NonNegativeInt
    epoch: NonNegativeInt
    loss: float
    loss_tokens: NonNegativeInt
    samples: NonNegativeInt
    tiles: NonNegativeInt
    tokens: NonNegativeInt
    step_ms: NonNegativeFloat
    learning_rate: NonNegativeFloat
    grad_norm: float
    stages: tuple[StageRecord, ...]


class KindAccuracy(Frozen):
    """Exact-match accuracy over the questions of one kind."""

    kind: str
    questions: NonNegativeInt
    correct: NonNegativeInt
    chance: float
    """Accuracy of the best constant answer: the share of the most common reference."""

    @property
    def accuracy(self) -> float:
        """Share of correct answers, 0 where nothing was asked."""
        return self.correct / self.questions if self.questions else 0.0


class EvaluatedAnswer(Frozen):
    """One held-out question and what the model said."""

    sample: str
    question: str
    expected: str
    answered: str
    kind: str


class Evaluation(Frozen):
    """Greedy answers on held-out data."""

    step: NonNegativeInt
    kinds: tuple[KindAccuracy, ...]
    """The kind with the most questions first."""
    examples: tuple[EvaluatedAnswer, ...]


def read_run(path: Path) -> list[StepRecord]:
    """Read `run.jsonl`; where a resumed run wrote a step again, the last line counts.

    Raises:
        UserError: the file is missing, empty, or a line does not follow the schema.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such run log; pretrain_vlm.py writes it into --save")
    records = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            record = StepRecord.model_validate_json(line)
        except ValidationError as error:
            raise UserError(
                f"{path}: line {number} is not a step record ({error.errors()[0]['msg']})"
            ) from error
        records[record.step] = record
    if not records:
        raise UserError(f"{path}: holds no step yet; let the run finish at least one")
    return [records[step] for step in sorted(records)]


def write_evaluation(evaluation: Evaluation, directory: Path) -> Path:
    """Write `evaluation.json` into the run's directory and return its path."""
    path = directory / EVALUATION_FILE
    path.write_text(json.dumps(evaluation.model_dump(mode="json"), indent=2, sort_keys=True) + "\n")
    return path


def read_evaluation(directory: Path) -> Evaluation | None:
    """The evaluation in a run's directory; None where the run was not evaluated.

    Raises:
        UserError: the file does not follow the schema.
    """
    path = directory / EVALUATION_FILE
    if not path.is_file():
        return None
    try:
        return Evaluation.model_validate_json(path.read_text())
    except ValidationError as error:
        raise UserError(
            f"{path}: not an evaluation ({error.errors()[0]['msg']}); run the evaluation again"
        ) from error
