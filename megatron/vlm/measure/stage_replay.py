"""Run one rank of a plan on a single device, without the other ranks.

Megatron-core's groups have the job's sizes, over torch's fake backend, so model and optimizer
shards are the job's. The rank runs the trainer's schedule on the plan's packs; received tensors are
random. Shapes as in `megatron.vlm.model.stage`. Arrays of times are [micro-batches * chunks],
micro-batch by micro-batch.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.vlm.backend import current_device, has_cuda, prepare_megatron_core
from megatron.vlm.inputs.batch import MicroBatch, MicroBatchStream
from megatron.vlm.inputs.data import PackDataset
from megatron.vlm.inputs.encoder_share import StepShares
from megatron.vlm.inputs.reader import SampleReader
from megatron.vlm.measure.profiler import RepeatedUpdate, build_for_times, peak_activation_bytes
from megatron.vlm.measure.random_batches import image_sizes, random_batch
from megatron.vlm.run.launch import make_groups, shut_down_distributed
from megatron.vlm.step.clock import (
    Phase,
    PhaseClock,
    by_micro_batch,
    elapsed_ms,
    forward_and_backward_ms,
    phase_times_ms,
    record_moment,
)
from megatron.vlm.step.links import Inbox, PipelineLinks, create_pipeline_links
from megatron.vlm.step.train import Trainer
from omnibal.base.errors import UserError
from omnibal.cost.model import CostModel
from omnibal.data.lengths import Lengths
from omnibal.job.plan import Plan
from omnibal.job.replay import StageReplay
from omnibal.model.config import Provider
from omnibal.model.limits import memory_cap_gib
from omnibal.model.parallel import Parallel
from omnibal.packing.features import pack_features
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.schedules import Pass
from omnibal.pipeline.simulate import idle_before_passes, simulate_ranks
from omnibal.pipeline.stage_cost import workload_times
from omnibal.pipeline.workload import Workload

_UPDATES = 5  # timed updates, after the first, which creates the optimizer's state


class _RandomInbox(Inbox):
    """Inbox of random tensors that arrive after their predicted waits, if any."""

    def __init__(self, waits_ms: Sequence[float], *inbox_arguments: Any) -> None:
        self._waits_ms = waits_ms
        super().__init__(*inbox_arguments)

    def take(self, cut: int, micro_batch: int, position: int) -> dict[str, torch.Tensor]:
        if self._waits_ms:
            time.sleep(self._waits_ms[position] / 1e3)
        return super().take(cut, micro_batch, position)

    def _begin(self, tensor: torch.Tensor) -> None:
        # Not uninitialized memory, which may hold denormal numbers: slow on a CPU.
        tensor.normal_()


@contextmanager
def act_as_stage(parallel: Parallel, stage: int) -> Iterator[PipelineLinks]:
    """Yield the links of a stage's first rank in a job of these sizes, without other ranks."""
    prepare_megatron_core()
    # The fake backend's collectives return at once and leave their outputs as they are.
    rank = stage * parallel.tensor * parallel.data
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parallel.world_size)
    try:
        make_groups(parallel, seed=0)
        yield create_pipeline_links()
    finally:
        shut_down_distributed()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatchTimes:
    forward_ms: np.ndarray  # all arrays are [micro-batches * chunks]
    backward_ms: np.ndarray  # including weight gradients and recomputation
    weight_ms: np.ndarray  # weight-gradient passes, 0 if backward is not split
    recompute_ms: np.ndarray

    @classmethod
    def combine(
        cls, times: Sequence["MicroBatchTimes"], how: Callable[[list[np.ndarray]], np.ndarray]
    ) -> "MicroBatchTimes":
        names = [field.name for field in fields(cls)]
        return cls(**{name: how([getattr(step, name) for step in times]) for name in names})


def predict_waits(plan: Plan, stage: int, cost: CostModel, own: Workload) -> tuple[float, ...]:
    """Return the predicted wait, in ms, before each operation of a stage in one rank's step."""
    times = workload_times(cost, plan.stages_at_levels, own)
    alone = replace(times, waits_ms=None)  # without waits for data-parallel encoders
    timeline = simulate_ranks(alone, own.each_rank_alone(), plan.schedule).of_step(0)
    waits_ms, schedule = idle_before_passes(timeline), timeline.schedule
    return tuple(
        float(
            waits_ms[operation.kind][operation.micro_batch, schedule.part(stage, operation.chunk)]
        )
        for operation in schedule.operations[stage]
    )


OnPhase = Callable[[Phase], None]  # called when a phase of a step begins


class _RecomputeClock(PhaseClock):
    """Phase clock that also times the recomputation of every backward."""

    def __init__(self, trainer: Trainer, announce: OnPhase) -> None:
        super().__init__()
        self._links, self.announce = trainer.links, announce
        # Per backward: alternating start and end of each recomputed layer's forward.
        self._recomputations: list[list[object]] = []
        self._in_backward = False
        for block in (block for stage in trainer.chunks for block in stage.blocks.values()):
            for layer in block.layers:
                if any(layer.layer_number - 1 in layers for layers in block.recompute_layers):
                    layer.register_forward_pre_hook(self._record)
                    layer.register_forward_hook(self._record)

    def switch(self, phase: Phase) -> None:
        super().switch(phase)
        self.announce(phase)
        self._in_backward = phase is Phase.BACKWARD
        if self._in_backward:
            self._recomputations.append([])

    def _record(self, *_: object) -> None:
        if self._in_backward:
            self._recomputations[-1].append(record_moment())

    def times(self) -> MicroBatchTimes:
        """Stop the clock; return the times of all micro-batches since the last stop."""
        intervals, recomputations = self.stop(), self._recomputations
        self._recomputations = []
        forward_ms, backward_ms = forward_and_backward_ms(self._links, intervals)
        late_ms = phase_times_ms(intervals, Phase.BACKWARD_WEIGHT)
        sort = partial(by_micro_batch, self._links)  # [micro-batches, chunks]
        weight_ms = sort(late_ms, Pass.BACKWARD_WEIGHT) if late_ms else 0 * backward_ms
        recompute_ms = [
            sum(map(elapsed_ms, moments[::2], moments[1::2])) for moments in recomputations
        ]
        return MicroBatchTimes(
            forward_ms=forward_ms.ravel(),
            backward_ms=backward_ms.ravel(),
            weight_ms=weight_ms.ravel(),
            recompute_ms=sort(recompute_ms, Pass.BACKWARD, Pass.BACKWARD_INPUT).ravel(),
        )


# This rank's share of data-parallel encoding in a step, and its encoder batches in order.
EncodingWork = tuple[StepShares, list[MicroBatch]]


class StageReplayer:
    """A stage of a plan, built inside `act_as_stage`, that runs any number of steps."""

    def __init__(
        self,
        plan: Plan,
        links: PipelineLinks,
        on_phase: OnPhase = lambda phase: None,
        provider: Provider = "local",
    ) -> None:
        before = torch.cuda.memory_allocated() if has_cuda() else 0
        # Waits before the step's operations, or empty. Changed in place, as inboxes hold the list.
        self._waits_ms = list[float]()
        links = replace(links, make_inbox=partial(_RandomInbox, self._waits_ms))
        self.trainer = build_for_times(plan, links, provider=provider)
        self._update = RepeatedUpdate(self.trainer)
        self._clock = _RecomputeClock(self.trainer, on_phase)
        self.update_ms()  # creates the optimizer's state
        if has_cuda():
            self.state_bytes = torch.cuda.memory_allocated() - before
        else:
            self.state_bytes = state_bytes_of(self.trainer)

    def step(
        self, batches: Sequence[MicroBatch], waits_ms: Sequence[float] = ()
    ) -> MicroBatchTimes:
        """Return times of a rank's step without update. On a CPU receives wait `waits_ms` first."""
        # An idle CPU is slower at first, so waits are real. On CUDA the stream waits, not the host.
        if not has_cuda():
            self._waits_ms[:] = waits_ms
        self.trainer.zero_gradients()
        self._run(batches)
        self._waits_ms.clear()
        self.trainer.discard_gradients()
        return self._clock.times()

    def _run(self, batches: Sequence[MicroBatch], encoding: EncodingWork | None = None) -> None:
        shares, passes = (None, []) if encoding is None else encoding
        stream = MicroBatchStream(
            # One batch on the device at a time. Training prefetches up to two more.
            batches=(batch.to(current_device()) for batch in (*passes, *batches)),
            shapes=[batch.shape for batch in batches],
            encoding=shares,
        )
        self._clock.switch(Phase.WAIT)
        self.trainer.run_step(stream, self._clock)

    def activation_bytes(
        self, batches: Sequence[MicroBatch], encoding: EncodingWork | None = None
    ) -> int:
        """Return `peak_activation_bytes` of a step, or on CUDA of its update if larger."""
        self.trainer.zero_gradients()
        peak = peak_activation_bytes(self.trainer, partial(self._run, batches, encoding))
        self.trainer.discard_gradients()
        self._clock.times()
        if has_cuda():
            peak = max(peak, peak_activation_bytes(self.trainer, self.update_ms))
        return peak

    def update_ms(self) -> float:
        self._clock.announce(Phase.OPTIMIZER)
        return self._update.timed_ms()


def state_bytes_of(trainer: Trainer) -> int:
    """Return the bytes of weights, buffers, gradients and optimizer state, each storage once."""
    tensors = [buffer for stage in trainer.stages for buffer in stage.buffers()]
    for wrapper in trainer.wrappers:
        tensors += [*wrapper.weights(), *wrapper.gradients(), *wrapper.optimizer_state()]
    storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


# Loads the micro-batches of these rows of packs, with one stage's fields, on the host.
LoadRows = Callable[[np.ndarray], list[MicroBatch]]


def random_rows(plan: Plan, stage: int, packs: ScheduledPacks, lengths: Lengths) -> LoadRows:
    """Return a loader of random content with the packs' sizes and levels."""
    # All tokens have loss if lengths do not say, as in the plan.
    loss_tokens = pack_features(packs.packs, lengths, ("fixed", "loss_tokens"))[:, 1]
    held = plan.units_of(stage)

    def make(row: int) -> MicroBatch:
        samples = packs.packs[row]
        tiles, clips = (int(packs.column(name)[row]) for name in ("tiles", "clips"))
        segments = tuple(lengths.tokens[samples].tolist())
        sizes = tiles, segments, max(int(loss_tokens[row]), 1)
        images = image_sizes(lengths, samples)
        batch = random_batch(plan.model, *sizes, held, clips=clips, images=images)
        return replace(batch, level=int(packs.level[row]))

    return lambda rows: [make(row) for row in rows]


def read_rows(
    plan: Plan, stage: int, packs: ScheduledPacks, lengths: Lengths, reader: SampleReader
) -> LoadRows:
    """Return a loader of the packs' samples; it raises UserError for unreadable data."""
    every_row = np.arange(len(packs))
    dataset = PackDataset(reader, packs, lengths, every_row, plan.units_of(stage))
    return lambda rows: [dataset[int(row)] for row in rows]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageWork:
    steps: tuple[np.ndarray, ...]  # pack rows of one rank in one step, by timed step
    heaviest: tuple[np.ndarray, ...]  # pack rows likewise, of steps that may have the peak memory
    waits_ms: tuple[tuple[float, ...], ...]  # predicted, by timed step and operation of the stage
    repetitions: int  # timed runs of every step; one warm-up precedes all

    @property
    def runs(self) -> int:
        return len(self.steps) * self.repetitions + len(self.heaviest) + 1  # the warm-up


def replay_stage(
    plan: Plan,
    stage: int,
    work: StageWork,
    load: LoadRows,
    on_run: Callable[[], None],
    provider: Provider = "local",
) -> StageReplay:
    """Return times and memory of a stage, built and run alone. UserError if memory is short."""
    limit_memory(plan)
    failure = None
    try:
        with act_as_stage(plan.parallel, stage) as links:
            # Built in the call: a local variable would keep the stage alive while memory is freed.
            built = partial(StageReplayer, plan, links, provider=provider)
            return _replay(built(), stage, work, load, on_run)
    except torch.OutOfMemoryError as error:
        failure = str(error).splitlines()[0]
    finally:
        # Core's buffers and hooks form cycles, and the next stage needs their memory.
        gc.collect()
        if has_cuda():
            torch.cuda.empty_cache()
    # Outside the handler: the caught error's traceback would keep the stage alive.
    raise UserError(
        f"stage {stage} needs more than {memory_cap_gib(plan.cluster):.2f} GiB ({failure}); free "
        "this device of other programs, or plan with a smaller --memory-gib"
    )


def _replay(
    replayer: StageReplayer, stage: int, work: StageWork, load: LoadRows, on_run: Callable[[], None]
) -> StageReplay:
    activation_bytes = 0
    for rows in work.heaviest:
        activation_bytes = max(activation_bytes, replayer.activation_bytes(load(rows)))
        on_run()
    replayer.step(load(work.steps[0]))
    on_run()
    times = []
    for rows, waits_ms in zip(work.steps, work.waits_ms, strict=True):
        batches, repetitions = load(rows), []
        for _ in range(work.repetitions):
            repetitions.append(replayer.step(batches, waits_ms))
            on_run()
        times.append(MicroBatchTimes.combine(repetitions, partial(np.median, axis=0)))
    measured = MicroBatchTimes.combine(times, np.concatenate)
    times_ms = {name: tuple(times.tolist()) for name, times in asdict(measured).items()}
    if not replayer.trainer.plan.schedule.in_two:
        times_ms["weight_ms"] = ()
    update_ms = [replayer.update_ms() for _ in range(_UPDATES)]
    return StageReplay(
        stage=stage,
        rows=tuple(np.concatenate(work.steps).tolist()),
        **times_ms,
        update_ms=float(np.median(update_ms)),
        state_gib=replayer.state_bytes / 2**30,
        activations_gib=activation_bytes / 2**30,
        with_working_memory=has_cuda(),
    )


def limit_memory(plan: Plan) -> None:
    """Limit CUDA memory of this process to the plan's. UserError if the device has less."""
    if not has_cuda():
        return
    cap_gib = memory_cap_gib(plan.cluster)
    total_gib = torch.cuda.get_device_properties(current_device()).total_memory / 2**30
    if total_gib < cap_gib:
        raise UserError(
            f"this device has {total_gib:.1f} GiB, and a stage may fill {cap_gib:.1f} GiB; replay "
            f"on a larger device, or plan with --memory-gib {total_gib:.0f}"
        )
    torch.cuda.set_per_process_memory_fraction(cap_gib / total_gib)
