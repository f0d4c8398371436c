"""Run one rank of a plan on a single device, with simulated neighbours.

Megatron-core's groups have the job's sizes, over torch's fake backend, so model and optimizer
shards are the job's. The rank runs the trainer's schedule on the plan's packs; received tensors are
random. Shapes as in `megatron.vlm.model.stage`.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.vlm.backend import current_device, has_cuda, prepare_megatron_core
from megatron.vlm.inputs.batch import MicroBatch, MicroBatchStream
from megatron.vlm.inputs.data import PackDataset
from megatron.vlm.inputs.encoder_share import StepShares
from megatron.vlm.inputs.reader import SampleReader
from megatron.vlm.measure.profiler import (
    RepeatedUpdate,
    build_for_times,
    peak_activation_bytes,
)
from megatron.vlm.measure.random_batches import image_sizes, random_batch
from megatron.vlm.run.launch import make_groups, shut_down_distributed
from megatron.vlm.step.clock import (
    Phase,
    PhaseClock,
    each_ms,
    elapsed_ms,
    forward_and_backward_ms,
    in_place,
    moment,
)
from megatron.vlm.step.links import Inbox, MessageShapes, PipelineLinks, create_pipeline_links
from megatron.vlm.step.stage_messages import Channel, Message
from megatron.vlm.step.train import Trainer
from omnibal.base.errors import UserError
from omnibal.cost.model import CostModel, pack_features
from omnibal.data.lengths import Lengths
from omnibal.job.plan import Plan
from omnibal.job.replay import StageReplay
from omnibal.model.config import Provider
from omnibal.model.limits import memory_cap_gib
from omnibal.model.parallel import Parallel
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.schedules import Pass
from omnibal.pipeline.simulate import idle_before_passes, simulate_ranks
from omnibal.pipeline.stage_cost import workload_times
from omnibal.pipeline.workload import Workload

_UPDATES = 5


class _RandomInbox(Inbox):
    """Inbox of random tensors that arrive after their predicted waits, if any."""

    def __init__(self, waits_ms: Sequence[float], *of_inbox: Any) -> None:
        self._waits_ms = waits_ms
        super().__init__(*of_inbox)

    def take(self, cut: int, micro_batch: int, position: int) -> dict[str, torch.Tensor]:
        if self._waits_ms:
            time.sleep(self._waits_ms[position] / 1e3)
        return super().take(cut, micro_batch, position)

    def _begin(self, tensor: torch.Tensor) -> None:
        # Random: uninitialized memory may hold denormal numbers, which are slow on a CPU.
        tensor.normal_()


@dataclass(frozen=True, kw_only=True, slots=True)
class StandInLinks(PipelineLinks):
    """Pipeline links of a stage with simulated neighbours."""

    waits_ms: list[float] = field(default_factory=list)
    """Wait before every operation of the stage in a step, in ms. Empty for no waits."""

    def inbox(
        self,
        channel: Channel,
        messages: Sequence[Message],
        shapes: Sequence[MessageShapes],
        dtype: torch.dtype,
    ) -> Inbox:
        """Make an inbox that fills its tensors itself, each after its wait."""
        source, group = self.ranks[channel.source], self.group(channel)
        return _RandomInbox(self.waits_ms, messages, shapes, dtype, source, group)


@contextmanager
def standing_in(parallel: Parallel, stage: int) -> Iterator[StandInLinks]:
    """Act as the first rank of a stage in a job of these sizes, with simulated other ranks."""
    prepare_megatron_core()
    dist.init_process_group(
        "fake", store=FakeStore(), rank=parallel.first_rank(stage), world_size=parallel.world_size
    )
    try:
        make_groups(parallel, seed=0)
        yield cast(StandInLinks, create_pipeline_links(StandInLinks))
    finally:
        shut_down_distributed()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatchTimes:
    """Times of one rank's step. Arrays are [micro-batches * chunks], micro-batch by micro-batch."""

    forward_ms: np.ndarray
    backward_ms: np.ndarray
    """Backward time, with weight gradients and recomputation."""
    weight_ms: np.ndarray
    """Time of weight-gradient passes. 0 if backward is not split."""
    recompute_ms: np.ndarray

    @classmethod
    def combined(
        cls, times: Sequence["MicroBatchTimes"], how: Callable[[list[np.ndarray]], np.ndarray]
    ) -> "MicroBatchTimes":
        """Combine several times array by array."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: how([getattr(step, name) for step in times]) for name in names})


def predict_waits(plan: Plan, stage: int, cost: CostModel, own: Workload) -> tuple[float, ...]:
    """Predicted wait in ms before each operation of a stage, in a step of one rank."""
    times = workload_times(cost, plan.stages_at_levels, own)
    alone = replace(times, waits_ms=None)
    timeline = simulate_ranks(alone, own.each_rank_alone(), plan.schedule).of_step(0)
    waits_ms, schedule = idle_before_passes(timeline), timeline.schedule
    return tuple(
        float(
            waits_ms[operation.kind][operation.micro_batch, schedule.part(stage, operation.chunk)]
        )
        for operation in schedule.operations[stage]
    )


OnPhase = Callable[[Phase], None]
"""Called when a phase of a step begins."""


class _RecomputeClock(PhaseClock):
    """Phase clock that also times recomputation in every backward."""

    def __init__(self, trainer: Trainer, on_phase: OnPhase | None) -> None:
        super().__init__()
        self._links, self._on_phase = trainer.links, on_phase
        self._again: list[list[tuple[object, object]]] = []
        self._begun: object = None
        self._in_backward = False
        for block in (block for stage in trainer.chunks for block in stage.blocks.values()):
            for layer in block.layers:
                if any(layer.layer_number - 1 in again for again in block.recompute_layers):
                    layer.register_forward_pre_hook(self._begin)
                    layer.register_forward_hook(self._end)

    def switch(self, phase: Phase) -> None:
        super().switch(phase)
        self.announce(phase)
        self._in_backward = phase is Phase.BACKWARD
        if self._in_backward:
            self._again.append([])

    def announce(self, phase: Phase) -> None:
        if self._on_phase is not None:
            self._on_phase(phase)

    def _begin(self, *_: object) -> None:
        if self._in_backward:
            self._begun = moment()

    def _end(self, *_: object) -> None:
        if self._in_backward:
            self._again[-1].append((self._begun, moment()))

    def times(self) -> MicroBatchTimes:
        """Stop the clock; return the times of micro-batches since the last stop."""
        intervals, again = self.stop(), self._again
        self._again = []
        forward_ms, backward_ms = forward_and_backward_ms(self._links, intervals)
        late_ms = each_ms(intervals, Phase.BACKWARD_WEIGHT)
        placed = partial(in_place, self._links)
        weight_ms = placed(late_ms, Pass.BACKWARD_WEIGHT) if late_ms else 0 * backward_ms
        recompute_ms = [sum(elapsed_ms(*ends) for ends in layers) for layers in again]
        return MicroBatchTimes(
            forward_ms=forward_ms.ravel(),
            backward_ms=backward_ms.ravel(),
            weight_ms=weight_ms.ravel(),
            recompute_ms=placed(recompute_ms, Pass.BACKWARD, Pass.BACKWARD_INPUT).ravel(),
        )


EncodingWork = tuple[StepShares, list[MicroBatch]]
"""Data-parallel encoder shares of this rank in a step, and its passes in order."""


class StageReplayer:
    """A stage of a plan, built inside `standing_in`, that runs any number of steps.

    Micro-batches are copied to the device one by one; training prefetches up to two more.
    """

    def __init__(
        self,
        plan: Plan,
        links: StandInLinks,
        on_phase: OnPhase | None = None,
        provider: Provider = "local",
    ) -> None:
        before = torch.cuda.memory_allocated() if has_cuda() else 0
        self._links = links
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
        """Run forward and backward of one rank's micro-batches of a step, in the plan's order.

        `waits_ms` are before every operation, as an idle CPU computes more slowly at first. On CUDA
        ignored: there the stream waits, not the host.
        """
        links = self._links
        if not has_cuda():
            links.waits_ms[:] = waits_ms
        self.trainer.zero_gradients()
        self._run(batches)
        links.waits_ms.clear()
        self.trainer.discard_gradients()
        return self._clock.times()

    def _run(self, batches: Sequence[MicroBatch], encoding: EncodingWork | None = None) -> None:
        shares, passes = (None, []) if encoding is None else encoding
        coming = MicroBatchStream(
            batches=(batch.to(current_device()) for batch in (*passes, *batches)),
            shapes=[batch.shape for batch in batches],
            encoding=shares,
        )
        self._clock.switch(Phase.WAIT)
        self.trainer.run_step(coming, self._clock)

    def activation_bytes(
        self, batches: Sequence[MicroBatch], encoding: EncodingWork | None = None
    ) -> int:
        """Peak bytes of the step or of the update after it; see `peak_activation_bytes`."""
        self.trainer.zero_gradients()
        peak = peak_activation_bytes(self.trainer, partial(self._run, batches, encoding))
        self.trainer.discard_gradients()
        self._clock.times()
        if has_cuda():
            peak = max(peak, peak_activation_bytes(self.trainer, self.update_ms))
        return peak

    def update_ms(self) -> float:
        """Time of `RepeatedUpdate`."""
        self._clock.announce(Phase.OPTIMIZER)
        return self._update.timed_ms()


def state_bytes_of(trainer: Trainer) -> int:
    """Bytes of weights, gradients and optimizer state, each storage once."""
    tensors = [buffer for stage in trainer.stages for buffer in stage.buffers()]
    for held in trainer.held:
        tensors += [*held.weights(), *held.gradients(), *held.optimizer_state()]
    storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


LoadRows = Callable[[np.ndarray], list[MicroBatch]]
"""Load the micro-batches of rows of the packs for one stage, on the host."""


def random_rows(plan: Plan, stage: int, packs: ScheduledPacks, lengths: Lengths) -> LoadRows:
    """Make a loader of random content with the packs' sizes and context-parallel sizes."""
    # If lengths lack loss tokens, the plan assumes that all tokens reach the head.
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
    """Make a loader of the packs' own samples."""
    every_row = np.arange(len(packs))
    dataset = PackDataset(reader, packs, lengths, every_row, plan.units_of(stage))

    def read(row: int) -> MicroBatch:
        item = dataset[row]
        if isinstance(item, UserError):
            raise item
        return item

    return lambda rows: [read(int(row)) for row in rows]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageWork:
    """Work of a stage in a replay: rows of the packs."""

    steps: tuple[np.ndarray, ...]
    """Rows of one rank's micro-batches, per timed step."""
    heaviest: tuple[np.ndarray, ...]
    """Rows of the ranks and steps that may need most memory."""
    waits_ms: tuple[tuple[float, ...], ...]
    """Predicted waits before every operation of the stage, per step."""
    repetitions: int
    """Timed runs of every step, after one warm-up."""

    @property
    def runs(self) -> int:
        """Number of single-rank steps, including warm-up and memory measurement."""
        return len(self.steps) * self.repetitions + len(self.heaviest) + 1


def replay_stage(
    plan: Plan,
    stage: int,
    work: StageWork,
    load: LoadRows,
    on_run: Callable[[], None],
    provider: Provider = "local",
) -> StageReplay:
    """Build and run a stage of the plan alone on this device."""
    limit_memory(plan)
    failure = None
    try:
        with standing_in(plan.parallel, stage) as links:
            # No local variable: it would keep the stage alive while its memory is freed.
            built = partial(StageReplayer, plan, links, provider=provider)
            return _replay(built(), stage, work, load, on_run)
    except torch.OutOfMemoryError as error:
        failure = str(error).splitlines()[0]
    finally:
        # Core's buffers and hooks form cycles. The next stage needs the memory.
        gc.collect()
        if has_cuda():
            torch.cuda.empty_cache()
    # Raised outside the handler: the error's traceback would keep the stage alive.
    raise UserError(
        f"stage {stage} needs more than the {memory_cap_gib(plan.cluster):.2f} GiB that it may "
        f"fill of a device ({failure}); see that nothing else is on this one, or plan with a "
        "smaller --memory-gib than the cluster has"
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
        times.append(MicroBatchTimes.combined(repetitions, partial(np.median, axis=0)))
    measured = MicroBatchTimes.combined(times, np.concatenate)
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
    """Limit this process's CUDA memory to the plan's limit."""
    if not has_cuda():
        return
    cap_gib = memory_cap_gib(plan.cluster)
    total_gib = torch.cuda.get_device_properties(current_device()).total_memory / 2**30
    if total_gib < cap_gib:
        raise UserError(
            f"this device has {total_gib:.1f} GiB, and a stage may fill {cap_gib:.1f} GiB of a "
            f"{plan.cluster.device}; replay on one that has as much, or plan for this one with "
            f"--memory-gib {total_gib:.0f}"
        )
    torch.cuda.set_per_process_memory_fraction(cap_gib / total_gib)
