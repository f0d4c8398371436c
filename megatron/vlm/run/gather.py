"""Gathering of all ranks' measurements of a step, for the run's log.

Shapes: p stages, d data-parallel ranks, t tensor-parallel ranks, c chunks of a stage, P chunks of
the model, m micro-batches of a data-parallel rank; an axis of size 2 is forward, backward.
"""

import resource
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.vlm.backend import current_device, has_cuda
from megatron.vlm.step.clock import Interval, Phase, forward_and_backward_ms
from megatron.vlm.step.links import PipelineLinks
from omnibal.job.runlog import PassTimes, StageRecord
from omnibal.pipeline.stage_memory import GIB

_PASS_DECIMALS = 3  # decimals of logged ms, finer than the clock's noise


def gather_stage_records(
    links: PipelineLinks, phases_ms: dict[Phase, float]
) -> tuple[StageRecord, ...]:
    """Return every stage's mean phase times and maximum memory over its ranks; collective."""
    own = [*(phases_ms[phase] for phase in Phase), *_read_and_reset_memory()]
    everyone = torch.empty(dist.get_world_size() * len(own), device=current_device())
    dist.all_gather_into_tensor(everyone, torch.tensor(own, device=current_device()))
    records = []
    # Megatron numbers ranks stage by stage: [p, ranks of a stage, values].
    for ranks in everyone.view(links.size, -1, len(own)).cpu():
        times = dict(zip(Phase, ranks[:, : len(Phase)].mean(0).tolist(), strict=True))
        times[Phase.BACKWARD] += times.pop(Phase.BACKWARD_WEIGHT)  # the log has one backward
        peak_gib, reserved_gib, retries = ranks[:, len(Phase) :].amax(0).tolist()
        record = StageRecord(
            **{f"{phase}_ms": ms for phase, ms in times.items()},
            peak_gib=peak_gib,
            reserved_gib=reserved_gib,
            allocation_retries=round(retries),
        )
        records.append(record)
    return tuple(records)


def _read_and_reset_memory() -> tuple[float, float, int]:
    """Return peak GiB, reserved GiB and allocation retries since the last call; CPU: peak RSS."""
    if not has_cuda():
        unit = 1 if sys.platform == "darwin" else 1024  # unit of ru_maxrss in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB, 0.0, 0
    cuda = torch.cuda
    peak, reserved = cuda.max_memory_allocated(), cuda.max_memory_reserved()
    retries = cuda.memory_stats()["num_alloc_retries"]
    cuda.reset_peak_memory_stats()
    cuda.reset_accumulated_memory_stats()
    return peak / GIB, reserved / GIB, retries


def gather_pass_times(
    links: PipelineLinks,
    intervals: Sequence[Interval],
    stages: Sequence[StageRecord],
    turn: int,
    slots: int,
) -> tuple[tuple[StageRecord, ...], PassTimes]:
    """Return stages with times by data-parallel rank, and one rank's pass times; collective.

    Args:
        turn: data-parallel rank whose pass times are returned.
        slots: number of micro-batches of rank `turn`.
    """
    own_2mc = torch.from_numpy(forward_and_backward_ms(links, intervals))
    wanted_2mc = torch.zeros(2, slots, links.schedule.chunks, dtype=torch.float64)
    if parallel_state.get_data_parallel_rank() == turn:
        wanted_2mc = own_2mc
    own = torch.cat([own_2mc.sum()[None], wanted_2mc.flatten()]).to(current_device())
    everyone = own.new_empty(dist.get_world_size() * len(own))
    dist.all_gather_into_tensor(everyone, own)
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    # Ranks are numbered [p, d, t]: mean over tensor-parallel ranks.
    by_rank_pd = everyone.view(links.size, -1, tensor, len(own)).mean(2).cpu()
    ranks_ms = by_rank_pd[:, :, 0].tolist()
    if len(ranks_ms[0]) > 1:
        stages = [
            stage.model_copy(update={"ranks_ms": _round_times(times_ms)})
            for stage, times_ms in zip(stages, ranks_ms, strict=True)
        ]
    times_p2mc = by_rank_pd[:, turn, 1:].view(links.size, *wanted_2mc.shape)
    parts = range(links.last_part + 1)  # in model order
    chunks_2mP = torch.stack(
        [times_p2mc[links.stage_of(part), ..., part // links.size] for part in parts], -1
    )
    forward_ms, backward_ms = (tuple(map(_round_times, ms_mP.T.tolist())) for ms_mP in chunks_2mP)
    return tuple(stages), PassTimes(dp_rank=turn, forward_ms=forward_ms, backward_ms=backward_ms)


def _round_times(times_ms: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(ms, _PASS_DECIMALS) for ms in times_ms)
