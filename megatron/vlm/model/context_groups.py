"""Process groups of the blocks of data-parallel ranks that share packs."""

import torch
import torch.distributed as dist

from megatron.vlm.backend import COLLECTIVE_TIMEOUT, current_device
from omnibal.parallel import Parallel
from omnibal.plan import Plan

ContextGroups = dict[int, dist.ProcessGroup]
"""This rank's block of every context size above 1 that its plan has."""


def create_context_groups(plan: Plan) -> ContextGroups:
    """Make the groups of all context sizes; collective over all ranks, in one order on all.

    Each is used once, as NCCL connects a group's ranks in its first collective, for which training
    has no one order on ranks that have other packs.
    """
    groups: ContextGroups = {}
    for context in sorted({level.context for level in plan.levels} - {1}):
        blocks = context_blocks(plan.parallel, context)
        own, _ = dist.new_subgroups_by_enumeration(blocks, timeout=COLLECTIVE_TIMEOUT)
        assert own is not None, "every rank is in a block of every size"
        dist.all_reduce(torch.zeros(1, device=current_device()), group=own)
        groups[context] = own
    return groups


def context_blocks(parallel: Parallel, context: int) -> list[list[int]]:
    """Global ranks of every aligned block of so many data-parallel ranks.

    A block is of one pipeline stage and one tensor-parallel rank; Megatron numbers tensor-parallel
    ranks first, then data-parallel ones, then stages.
    """
    tensor, data = parallel.tensor, parallel.data
    firsts = range(0, parallel.world_size, tensor * data)
    return [
        [first + (start + place) * tensor + shard for place in range(context)]
        for first in firsts
        for shard in range(tensor)
        for start in range(0, data, context)
    ]
