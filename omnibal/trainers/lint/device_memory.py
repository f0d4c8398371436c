"""Memory of a device as in nvidia-smi: tensors, idle blocks of torch's allocator, CUDA, NCCL."""

from collections.abc import Sequence

from omnibal.base.frozen import Frozen
from omnibal.job.job import JobSpec
from omnibal.model.levels import ContextExchange, Level
from omnibal.model.units import LANGUAGE_EMBED
from omnibal.pipeline.prediction import StageMemory
from omnibal.pipeline.stage_memory import GIB
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.unit_runs import counts_of_runs, unit_runs
from omnibal.pipeline.workload import Workload

# Fitted to eight-GPU jobs of Megatron-LM (SimuMax v1.2), like the share of the passes' memory
# (`RuntimeOptions.fragmentation`): they meet reserved memory within 1 % (docs/costs.md).
_FRAGMENTED_GIB = 0.5
_CONTEXT_GIB = 0.5  # CUDA context with its kernels
_PAIR_MIB, _GROUP_MIB = 544, 688  # NCCL buffers per group of two and of more ranks, NVIDIA/nccl#964
# Copies in Megatron-core's `token_dispatcher.py`, without the kept one: sorted to ranks, received,
# sorted to experts; output, sorted back, returned.
_ROUTED_COPIES = 5


class DeviceMemory(Frozen):
    """Peak memory of one device of a stage."""

    allocated_gib: float  # tensors, as `torch.cuda.max_memory_allocated`
    reserved_gib: float  # with idle blocks, as `torch.cuda.max_memory_reserved`
    device_gib: float  # with CUDA's context and NCCL's buffers, as in nvidia-smi


def device_memories(
    job: JobSpec,
    levels: Sequence[Level],
    stages: Sequence[Stage],
    workload: Workload,
    tensors: Sequence[StageMemory],
) -> tuple[DeviceMemory, ...]:
    """Return the peak memory of a device, by stage. Buffers of libraries are 0 on a CPU.

    `tensors` are predicted peaks by stage. They include buffers of expert-parallel peers.
    """
    cost, on_cpu = job.cost_of_all(levels), "CPU" in job.cluster.device
    embed = cost.units[LANGUAGE_EMBED].trained_parameters * cost.rates.weight_bytes
    routed = job.routed_bytes(workload.features.max(axis=0))
    memories = []
    for stage, memory in zip(stages, tensors, strict=True):
        counts, _ = counts_of_runs(len(cost.kinds), unit_runs(cost.kinds, [stage]))
        held = {name for name, count in zip(cost.units, counts.tolist(), strict=True) if count}
        with_experts = bool(counts @ cost.of_experts)
        peers_gib = 0.0 if on_cpu else with_experts * cost.expert_peer_bytes / GIB
        passes_gib = memory.passes_gib - peers_gib
        allocated_gib = memory.state_gib + passes_gib
        reserved_gib = allocated_gib + job.trainer.runtime.fragmentation * passes_gib
        outside_gib = 0.0
        if not on_cpu:
            # Numbers of routed rows differ by layer and micro-batch, so their blocks are poorly
            # reused. The word embedding's gradient comes when all other memory is free, but in
            # pieces too small for it: its block has no other use.
            rows = _ROUTED_COPIES * max(
                (size for name, size in routed.items() if name in held), default=0
            )
            reserved_gib += _FRAGMENTED_GIB + (embed * (LANGUAGE_EMBED in held) + rows) / GIB
            outside_gib = _CONTEXT_GIB + _groups_gib(job, levels, with_experts) + peers_gib
        memories.append(
            DeviceMemory(
                allocated_gib=allocated_gib,
                reserved_gib=reserved_gib,
                device_gib=reserved_gib + outside_gib,
            )
        )
    return tuple(memories)


def _groups_gib(job: JobSpec, levels: Sequence[Level], with_experts: bool) -> float:
    sizes, peers_mib = job.parallel, 0.0
    ranks = [sizes.tensor, sizes.pipeline, sizes.data]
    if sizes.tensor > 1 or sizes.pipeline > 1:
        ranks.append(sizes.tensor * sizes.pipeline)  # for the gradients' norm
    if with_experts and sizes.expert > 1:
        ranks.append(sizes.expert_data)
    for level in levels:
        if level.exchange is ContextExchange.HEADS:  # all-to-all: buffers per peer
            peers_mib += (level.context - 1) * job.cluster.peer_bytes / 2**20
        else:
            ranks.append(level.context)
    groups_mib = sum(_PAIR_MIB if size == 2 else _GROUP_MIB for size in ranks if size > 1)
    return (peers_mib + groups_mib) / 1024
