"""Memory of a device as a monitor sees it: what torch allocates, and all that comes on top.

Torch's allocator keeps blocks that it cannot use again at the moment of the peak, which
`torch.cuda.memory_reserved` counts:

* the gradient of the word embedding comes when all else of a micro-batch is gone, in pieces that
  are too small for it: its block serves nothing else;
* rows that experts exchange are of another number in every layer and micro-batch, so that blocks
  of one layer serve the next one badly: those of the copies that a layer makes of its rows on their
  way there and back (Megatron-core's `token_dispatcher.py`: sorted to ranks, received, sorted to
  experts; their output, sorted back, returned), of which it keeps one;
* a tenth of what comes and goes in passes, and half a GiB: what is left of blocks that were
  divided. Both are set by eight-GPU jobs of Megatron-LM (SimuMax v1.2), which these rules meet
  within 1 % of what they reserve (docs/costs.md).

Beside torch are the CUDA context with its kernels, and NCCL's buffers: of every group of ranks that
exchanges (544 MiB for two ranks, 688 for more, NVIDIA/nccl#964), and of every peer of an
all-to-all (`ClusterConfig.peer_bytes`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from omnibal.base.frozen import Frozen
from omnibal.cost.analytic import kept_lines
from omnibal.cost.feed_forward_counts import ROUTED
from omnibal.job.job import JobSpec
from omnibal.model.levels import ContextExchange, Level
from omnibal.model.units import LANGUAGE_EMBED
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.stage_memory import GIB
from omnibal.pipeline.unit_runs import counts_of_runs, unit_runs
from omnibal.pipeline.workload import Workload

_LEFT_SHARE, _LEFT_GIB = 0.1, 0.5
_CONTEXT_GIB = 0.5
_PAIR_MIB, _GROUP_MIB = 544, 688
"""What these are set by is said above."""
_COPIES = 5
"""Copies of its rows that a layer with experts makes and does not keep."""


class DeviceMemory(Frozen):
    """Most memory of one device of a stage."""

    allocated_gib: float
    """Memory of tensors, as `torch.cuda.max_memory_allocated` counts it."""
    reserved_gib: float
    """Memory of tensors and blocks for them, as `torch.cuda.max_memory_reserved` counts it."""
    device_gib: float
    """All memory in use, as a monitor of the device counts it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceOverhead:
    """Memory of a device of a stage that holds no tensors."""

    peers_gib: float
    """Part of the predicted peak that is NCCL's, for ranks that share out experts."""
    idle_gib: float
    """Blocks of torch's allocator that are idle at the peak, besides a share of the passes'."""
    outside_gib: float
    """Memory outside of torch: CUDA's context and NCCL's buffers, those for peers included."""

    def memory(self, state_gib: float, passes_gib: float) -> DeviceMemory:
        """Memory of the device, given its model state and what passes take, peers included."""
        passes_gib -= self.peers_gib
        allocated_gib = state_gib + passes_gib
        reserved_gib = allocated_gib + self.idle_gib + _LEFT_SHARE * passes_gib
        return DeviceMemory(
            allocated_gib=allocated_gib,
            reserved_gib=reserved_gib,
            device_gib=reserved_gib + self.outside_gib,
        )


def device_overheads(
    job: JobSpec, levels: Sequence[Level], stages: Sequence[Stage], workload: Workload
) -> list[DeviceOverhead]:
    """Memory without tensors of a device of every stage; none where the cluster is of CPUs."""
    if "CPU" in job.cluster.device:
        return [DeviceOverhead(peers_gib=0.0, idle_gib=0.0, outside_gib=0.0) for _ in stages]
    cost = job.cost_of_all(levels)
    embed = cost.units[LANGUAGE_EMBED].trained_parameters * cost.rates.weight_bytes
    routed = _routed_bytes(job, workload)
    found = []
    for stage in stages:
        counts, _ = counts_of_runs(len(cost.kinds), unit_runs(cost.kinds, [stage]))
        held = {name for name, count in zip(cost.units, counts.tolist(), strict=True) if count}
        with_experts = bool(counts @ cost.of_experts)
        peers_gib = with_experts * cost.expert_peer_bytes / GIB
        rows = _COPIES * max((each for name, each in routed.items() if name in held), default=0)
        found.append(
            DeviceOverhead(
                peers_gib=peers_gib,
                idle_gib=_LEFT_GIB + (embed * (LANGUAGE_EMBED in held) + rows) / GIB,
                outside_gib=_CONTEXT_GIB + _groups_gib(job, levels, with_experts) + peers_gib,
            )
        )
    return found


def _routed_bytes(job: JobSpec, workload: Workload) -> dict[str, float]:
    """Bytes of the largest micro-batch's routed rows, by kind of layer; empty without EP."""
    if job.parallel.expert == 1:
        return {}
    largest = workload.features.max(axis=0)
    lines = kept_lines(job.pipeline_model, job.cluster, job.parallel, job.precision)
    return {
        name: float(line.bytes @ largest[: len(line.bytes)])
        for name, of_kind in lines.items()
        for line in of_kind
        if line.what == ROUTED
    }


def _groups_gib(job: JobSpec, levels: Sequence[Level], with_experts: bool) -> float:
    """NCCL's buffers for the groups of a rank, without those for peers of experts."""
    sizes, mib = job.parallel, 0.0
    ranks = [sizes.tensor, sizes.pipeline, sizes.data]
    if sizes.tensor > 1 or sizes.pipeline > 1:
        ranks.append(sizes.tensor * sizes.pipeline)  # for the gradients' norm
    if with_experts and sizes.expert > 1:
        ranks.append(sizes.expert_data)
    for level in levels:
        if level.exchange is ContextExchange.HEADS:
            mib += (level.context - 1) * job.cluster.peer_bytes / 2**20
        else:
            ranks.append(level.context)
    return (
        mib + sum((_PAIR_MIB if size == 2 else _GROUP_MIB) for size in ranks if size > 1)
    ) / 1024
