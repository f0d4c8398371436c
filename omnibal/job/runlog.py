"""The run log: `run.jsonl` (a line per trained step), `run.json` and `evaluation.json`."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt

from omnibal.base.errors import UserError
from omnibal.base.files import (
    atomic,
    parse_json_model,
    read_json_model,
    read_text,
    write_json_model,
)
from omnibal.base.frozen import Frozen, written_unless
from omnibal.model.config import Provider

RUN_FILE = "run.jsonl"
RUN_INFO_FILE = "run.json"
VALIDATION_FILE = "validation.jsonl"
EVALUATION_FILE = "evaluation.json"
TRACKER_FILE = "latest_checkpointed_iteration.txt"  # steps of the newest complete checkpoint
# Options of pretrain_vlm.py that a run may change when it resumes.
RATES = (
    *("lr", "min_lr", "vision_lr", "lr_decay_style", "lr_warmup_fraction"),
    *("weight_decay", "clip_grad"),
)

_MaybeDiverged = Annotated[float, Field(allow_inf_nan=True)]  # infinite or NaN if diverged


class RunInfo(Frozen):
    """Identity of a run, to match it to its plan."""

    model: str
    packs_sha256: str  # SHA-256 of the packs: data, order and step boundaries
    provider: Provider | None = None  # of the layers since the last (re)start, None if unknown
    plan_sha256: str | None = None  # without the prediction, or None if not recorded
    since_step: NonNegativeInt = 0  # first step under this plan; earlier steps had another


class StageRecord(Frozen):
    """A pipeline stage in one step, mean over its data-parallel ranks."""

    forward_ms: NonNegativeFloat
    backward_ms: NonNegativeFloat  # includes recomputation
    wait_ms: NonNegativeFloat  # idle time: P2P waits, and waiting at the step's end
    data_ms: NonNegativeFloat  # wait for the data loader
    optimizer_ms: NonNegativeFloat  # gradient reduction, norm, clipping and weight update
    encoder_ms: NonNegativeFloat = written_unless(0.0)  # data-parallel encoders' passes
    exchange_ms: NonNegativeFloat = written_unless(0.0)  # encoders' exchange, with waits
    ranks_ms: tuple[NonNegativeFloat, ...] = written_unless(())
    """Forward plus backward of each data-parallel rank, in steps with `PassTimes`, if several."""
    peak_gib: NonNegativeFloat
    """Peak memory, max over ranks. CUDA: allocated since the last record; CPU: resident set."""
    reserved_gib: NonNegativeFloat = 0.0
    """CUDA memory reserved since then, max over ranks; far above `peak_gib` means fragmentation."""
    allocation_retries: NonNegativeInt = 0  # on CUDA since then, max over ranks; each stalls


class ExpertBalance(Frozen):
    """Expert load of a step relative to the mean (1 if even), mean over layers."""

    fullest_expert: NonNegativeFloat  # tokens of the fullest expert over the mean
    fullest_rank: NonNegativeFloat  # same for expert-parallel ranks; planned as `imbalance`


class PassTimes(Frozen):
    """Times of a data-parallel rank's passes in a step, for refitting. Ranks take turns."""

    dp_rank: NonNegativeInt
    forward_ms: tuple[tuple[NonNegativeFloat, ...], ...]  # [parts][slots], tensor-parallel mean
    backward_ms: tuple[tuple[NonNegativeFloat, ...], ...]  # includes recomputation


class StepRecord(Frozen):
    # pydantic writes NaN as null by default, and could not read it back.
    model_config = ConfigDict(ser_json_inf_nan="constants")

    step: NonNegativeInt
    epoch: NonNegativeInt
    loss: _MaybeDiverged
    loss_tokens: NonNegativeInt
    samples: NonNegativeInt
    tiles: NonNegativeInt = written_unless(0)
    clips: NonNegativeInt = written_unless(0)
    image_tokens: NonNegativeInt = written_unless(0)
    tokens: NonNegativeInt
    samples_sha256: str = written_unless("")
    """First 16 digits of the SHA-256 of ascending sample numbers. Empty in earlier logs."""
    step_ms: NonNegativeFloat
    between_ms: NonNegativeFloat = 0.0  # logging, checkpoints and validation since the last step
    mfu: NonNegativeFloat = 0.0  # model FLOPs utilization
    skipped: bool = False  # whether the update was skipped: non-finite loss or gradient
    spike: bool = False  # whether the loss is far above earlier steps'
    replaced_samples: NonNegativeInt = 0  # samples replaced because of unreadable images
    learning_rate: NonNegativeFloat
    grad_norm: _MaybeDiverged
    experts: ExpertBalance | None = written_unless(None)  # expert load, or None without experts
    # As `loss`, of the prediction layer (weight `prediction_loss` of the model); 0 without one.
    prediction_loss: _MaybeDiverged = written_unless(0.0)
    stages: tuple[StageRecord, ...]
    passes: PassTimes | None = written_unless(None)  # or None in most steps (`is_timed`)


class ValidationRecord(Frozen):
    """Loss on held-out data."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    step: NonNegativeInt  # steps trained so far
    loss: _MaybeDiverged
    loss_tokens: NonNegativeInt
    seconds: NonNegativeFloat


class KindAccuracy(Frozen):
    """Exact-match accuracy on one kind of questions."""

    kind: str
    questions: NonNegativeInt
    correct: NonNegativeInt
    chance: float  # accuracy of the best constant answer: the share of the most common reference

    @property
    def accuracy(self) -> float:
        """Share of correct answers, or 0 without questions."""
        return self.correct / self.questions if self.questions else 0.0


class EvaluatedAnswer(Frozen):
    sample: str
    question: str
    expected: str
    answered: str
    kind: str


class Evaluation(Frozen):
    """Greedy answers on held-out data."""

    step: NonNegativeInt
    kinds: tuple[KindAccuracy, ...]  # by falling number of questions
    examples: tuple[EvaluatedAnswer, ...]


# First steps timed pass by pass, and the interval afterwards. A pass takes 10 bytes of the log.
_TIMED_FIRST, _TIMED_EVERY = 100, 10


def is_timed(step: int, first_step: int) -> bool:
    """Whether a step's passes are logged; `first_step` is the first since start or resume."""
    return step - first_step < _TIMED_FIRST or step % _TIMED_EVERY == 0


def samples_digest(samples: np.ndarray) -> str:
    """Return `StepRecord.samples_sha256` of sample numbers in any order."""
    return hashlib.sha256(np.sort(samples).astype("<i8").tobytes()).hexdigest()[:16]


R = TypeVar("R", StepRecord, ValidationRecord)


def write_run_info(info: RunInfo, directory: Path) -> None:
    write_json_model(info, directory / RUN_INFO_FILE)


def read_run_info(directory: Path) -> RunInfo:
    remedy = "pretrain_vlm.py writes it into --save when it starts; give that directory"
    return read_json_model(RunInfo, directory / RUN_INFO_FILE, remedy)


def read_run(path: Path) -> list[StepRecord]:
    """Return the last record of each step, ascending; UserError if none or a line is bad."""
    records = _read_lines(StepRecord, path)
    if not records:
        raise UserError(f"{path}: holds no step yet; let the run finish one")
    return records


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLog:
    info: RunInfo
    records: tuple[StepRecord, ...]


def read_validations(directory: Path) -> list[ValidationRecord]:
    """Return the records of a run's `validation.jsonl`, ascending, [] if absent."""
    path = directory / VALIDATION_FILE
    return _read_lines(ValidationRecord, path) if path.exists() else []


def _read_lines(kind: type[R], path: Path) -> list[R]:
    """Return the last record of each step, ascending; skip an incomplete last line."""
    text = read_text(path, "pretrain_vlm.py writes it into --save")
    records = {}
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        record = parse_json_model(
            kind, line, f"{path}: line {number}", "remove the line, or train again"
        )
        records[record.step] = record
    return [records[step] for step in sorted(records)]


def append_record(record: StepRecord | ValidationRecord, path: Path) -> None:
    """Append a line to a log, after removing an incomplete last line of a killed process."""
    with path.open("a+b") as log:
        if log.tell():
            log.seek(-1, os.SEEK_END)
            if log.read(1) != b"\n":
                log.truncate(path.read_bytes().rfind(b"\n") + 1)
        log.write(record.model_dump_json().encode() + b"\n")


def drop_records(path: Path, first_step: int) -> None:
    """Remove incomplete lines, and records from `first_step` on, as a run resumes there."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            if json.loads(line)["step"] < first_step:
                kept.append(line + b"\n")
        except (ValueError, KeyError, TypeError):
            kept.append(line + b"\n")  # readers of the log report the bad line
    with atomic(path) as temporary:
        temporary.write_bytes(b"".join(kept))


def checkpoint_path(directory: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` steps."""
    return directory / f"iter_{step:07d}"


def latest_step(directory: Path) -> int | None:
    """Return the trained steps of the newest complete checkpoint, None without a tracker."""
    tracker = directory / TRACKER_FILE
    if not tracker.exists():
        return None
    remedy = (
        f"it must hold the step number of a checkpoint folder here "
        f"({checkpoint_path(directory, 100).name} is 100): correct it"
    )
    text = read_text(tracker, remedy).strip()
    if not (text.isascii() and text.isdecimal()):
        raise UserError(f"{tracker}: holds {text[:20]!r}, and {remedy}")
    return int(text)


def write_evaluation(evaluation: Evaluation, directory: Path) -> Path:
    path = directory / EVALUATION_FILE
    write_json_model(evaluation, path)
    return path


def read_evaluation(directory: Path) -> Evaluation | None:
    """Return a run's evaluation, or None if not evaluated."""
    path = directory / EVALUATION_FILE
    if not path.exists():
        return None
    return read_json_model(Evaluation, path, "run the evaluation again")
