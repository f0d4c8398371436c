"""The training loop: steps over the plan's packs, checkpoints, `run.jsonl` and traces."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.vlm.checkpoint.save_load import CheckpointWriter
from megatron.vlm.inputs.batch import MicroBatch, MicroBatchShape, MicroBatchStream
from megatron.vlm.inputs.encoder_share import EncoderShares, EncodingRanks
from megatron.vlm.inputs.pack_share import Sharing
from megatron.vlm.run.arguments import RunArguments
from megatron.vlm.run.gather import gather_pass_times, gather_stage_records
from megatron.vlm.run.health import RunHealth
from megatron.vlm.run.metrics import MetricsSink, step_values
from megatron.vlm.step.evaluate import Validation, validate
from megatron.vlm.step.train import StepResult, Trainer, train_step
from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths
from omnibal.job.plan import Plan
from omnibal.job.runlog import (
    RUN_FILE,
    VALIDATION_FILE,
    StepRecord,
    ValidationRecord,
    append_record,
    is_timed,
    samples_digest,
)
from omnibal.packing.packs import ScheduledPacks

TRACE_FOLDER = "traces"
# Fields of a step's record: sums of its packs' features, and fields of its result.
_SUMMED = ("tiles", "clips", "image_tokens", "tokens")
_OF_RESULT = [field.name for field in fields(StepResult) if field.name in StepRecord.model_fields]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """Data that this rank trains on, up to step `stop`."""

    stop: int  # first step without packs
    scheduled: ScheduledPacks
    lengths: Lengths
    sharing: Sharing
    batches: Iterator[MicroBatch]  # of this data-parallel rank, each step's encoder passes first
    pack_flops: np.ndarray  # FLOPs of training each pack, for MFU, float64 [packs]
    peak_flops_per_s: float
    validation: Validation | None = None
    encoder_shares: EncoderShares | None = None  # shares of data-parallel encoders, if any

    def rows(self, step: int) -> np.ndarray:
        """Return indices in `scheduled`, sorted by step, of a step's packs of all ranks."""
        return np.arange(*np.searchsorted(self.scheduled.step, [step, step + 1]))


def encoder_shares(
    plan: Plan, packs: ScheduledPacks, lengths: Lengths, rank: int
) -> EncoderShares | None:
    """Return a rank's assignment of items to data-parallel encoders, or None without them."""
    if (encoders := plan.data_parallel_encoders) is None:
        return None
    return EncoderShares(
        model=plan.model,
        settings=encoders,
        ranks=EncodingRanks(pipelines=encoders.pipelines, parallel=plan.parallel, rank=rank),
        gpus_per_node=plan.cluster.gpus_per_node,
        packs=packs,
        levels=plan.pack_levels,
        lengths=lengths,
    )


@dataclass(frozen=True, slots=True)
class RunOutcome:
    steps: int  # steps trained, with steps before a resume
    skipped_steps: int
    stopped: bool  # whether a stop was requested, on any rank


class TrainingLoop:
    """Trains, logs, saves and validates step by step; collective.

    A portion of the data is opened at its first step. Only rank 0 has sinks; a failing sink is
    removed. `stop_requested` is polled on each rank before every step, and ends the run after it.

    Args:
        last_step: number of steps of the run, counted from the plan's start, not from a resume.
    """

    def __init__(
        self, trainer: Trainer, portions: Iterator[RunData], arguments: RunArguments,
        last_step: int, writer: CheckpointWriter, health: RunHealth, sinks: list[MetricsSink],
        stop_requested: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._trainer, self._portions = trainer, portions
        self._arguments, self._last_step = arguments, last_step
        self._writer, self._health, self._sinks = writer, health, sinks
        self._stop_requested = stop_requested
        self._is_writer = dist.get_rank() == 0
        shard = parallel_state.get_tensor_model_parallel_rank()
        is_first = parallel_state.get_data_parallel_rank() == shard == 0  # of its stage
        self._traced = arguments.profile_steps if is_first else range(0)
        self._data = next(portions)

    def run(self, first_step: int, end: int) -> RunOutcome:
        """Train from `first_step` to before `end` or a requested stop. The last step is saved."""
        step, stopped = first_step, False
        started = before = time.perf_counter()
        with ExitStack() as trace:
            while step < end and not stopped:
                if step == self._data.stop:
                    self._data = next(self._portions)
                if step in self._traced and step in (first_step, self._traced.start):
                    trace.enter_context(self._tracing())
                begun = time.perf_counter()
                result = self._train(step)
                ended = time.perf_counter()
                if step + 1 not in self._traced:
                    trace.close()
                timed = is_timed(step, first_step)
                between_ms = (begun - before) * 1e3
                record = self._record(step, result, (ended - begun) * 1e3, between_ms, timed)
                before = ended
                step += 1
                stopped = result.stop_requested
                if self._is_writer:
                    line = _progress_line(record, first_step, self._last_step, started)
                    self._write(record, RUN_FILE, step, step_values(record), line)
                self._save_and_validate(step, stopped, is_last=stopped or step == end)
        return RunOutcome(step, self._health.skipped_steps, stopped)

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        """Trace the steps inside with torch's profiler."""
        with torch.profiler.profile() as profiler:
            yield
        folder = self._arguments.save / TRACE_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"stage_{self._trainer.links.rank}.json"))

    def _train(self, step: int) -> StepResult:
        data, rows = self._data, self._data.rows(step)
        packs = data.scheduled.take(rows)
        own = data.sharing.rows(packs, step, step + 1)
        batches = MicroBatchStream(
            batches=data.batches,
            shapes=MicroBatchShape.of_shares(packs, data.lengths, own, data.sharing),
            rows_are_full=data.sharing.rows_are_full(packs, self._trainer.plan.parallel.data),
            encoding=None if data.encoder_shares is None else data.encoder_shares.step(step),
        )
        slots = data.sharing.slots(packs, self._trainer.plan.parallel)
        return train_step(self._trainer, batches, self._stop_requested(), slots=slots)

    def _record(
        self, step: int, result: StepResult, step_ms: float, between_ms: float, timed: bool
    ) -> StepRecord:
        links, sizes = self._trainer.links, self._trainer.plan.parallel
        stages, passes = gather_stage_records(links, result.phases_ms), None
        scheduled, rows = self._data.scheduled, self._data.rows(step)
        if timed:
            turn = step % sizes.data  # a step logs one data-parallel rank's passes, in turn
            slots = replace(self._data.sharing, dp_rank=turn).slots(scheduled.take(rows), sizes)
            stages, passes = gather_pass_times(links, result.intervals, stages, turn, slots)
        offsets = scheduled.packs.offsets
        samples = int(offsets[rows[-1] + 1] - offsets[rows[0]])
        replaced_share = result.replaced_samples / samples
        try:
            spike = self._health.judge(step, result.loss, result.skipped, replaced_share)
        except UserError:
            self._writer.finish()  # collective, as all ranks judge the same loss
            raise
        flops = float(self._data.pack_flops[rows].sum())
        return StepRecord(
            step=step,
            epoch=int(scheduled.epoch[rows[0]]),
            samples=samples,
            **{name: int(scheduled.column(name)[rows].sum()) for name in _SUMMED},
            **{name: getattr(result, name) for name in _OF_RESULT},
            samples_sha256=samples_digest(
                scheduled.packs.samples[offsets[rows[0]] : offsets[rows[-1] + 1]]
            ),
            step_ms=step_ms,
            between_ms=between_ms,
            mfu=flops / (step_ms / 1e3 * self._data.peak_flops_per_s),
            spike=spike,
            stages=stages,
            passes=passes,
        )

    def _save_and_validate(self, step: int, stopped: bool, is_last: bool) -> None:
        checkpoints, validation = self._arguments.checkpoints, self._data.validation
        # While steps are skipped the weights may be bad.
        if is_last or (step % checkpoints.save_interval == 0 and not self._health.is_skipping):
            self._trainer.wait_for_weights()
            self._writer.save(step, {"skipped_steps": self._health.skipped_steps})
        if validation is not None and step % validation.interval:
            validation = None
        # Complete a pending save first: validation may take long or fail.
        if is_last or validation is not None:
            self._writer.finish()
        else:
            self._writer.poll()
        failures, limit = self._writer.failures, checkpoints.exit_after_failed_saves
        if failures and (len(failures) >= limit or is_last):
            raise UserError(
                f"{failures[-1]}; {len(failures)} failed saves in a row, and {limit}, or that of "
                "the last step, end the run (--exit-after-failed-saves); make the folder of --save "
                "writable, and resume with --load"
            )
        if validation is not None and not stopped:
            record = validate(self._trainer, validation, step)
            if self._is_writer:
                line = (
                    f"validation after step {step}: loss {record.loss:.4f} over "
                    f"{record.loss_tokens:,} tokens, {record.seconds:.1f} s"
                )
                values = {"validation/loss": record.loss}
                self._write(record, VALIDATION_FILE, step, values, line)

    def _write(
        self,
        record: StepRecord | ValidationRecord,
        file_name: str,
        steps: int,
        values: Mapping[str, float],
        line: str,
    ) -> None:
        """Write a record to its file, the sinks and the log. A failed output ends no run."""
        path = self._arguments.save / file_name
        try:
            append_record(record, path)
        except OSError as error:
            _log.info(
                f"{path}: {error.strerror}; step {record.step} is not logged, training goes on"
            )
        for sink in list(self._sinks):
            try:
                sink.write(steps, values)
            except Exception as error:  # reporting libraries raise any type
                self._sinks.remove(sink)
                _log.info(f"{type(sink).__name__} gets nothing from step {steps} on: {error}")
        _log.info(line)


def _progress_line(record: StepRecord, first_step: int, last_step: int, started: float) -> str:
    done = record.step + 1
    elapsed_s = time.perf_counter() - started
    rate = elapsed_s / (done - first_step)
    end = time.strftime("%H:%M:%S", time.localtime(time.time() + rate * (last_step - done)))
    no_loss = "" if record.loss_tokens else "no token of this step is learned  "
    return (
        f"step {done:>5}/{last_step}  {no_loss}loss {record.loss:.4f}  "
        f"grad norm {record.grad_norm:.3f}  lr {record.learning_rate:.2e}  "
        f"{record.step_ms:.0f} ms  {record.samples * 1e3 / record.step_ms:.1f} samples/s  "
        f"mfu {record.mfu:.1%}  ends {end}"
    )
