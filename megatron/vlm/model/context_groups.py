"""Process groups of the blocks of data-parallel ranks that share packs."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from megatron.vlm.backend import COLLECTIVE_TIMEOUT, current_device
from omnibal.model.parallel import Parallel

ContextGroups = dict[int, dist.ProcessGroup]
"""This rank's block of every context size above 1 that there is."""


def create_context_groups(parallel: Parallel, contexts: Iterable[int]) -> ContextGroups:
    """Make the groups of all context sizes above 1; collective over all ranks, which give the same.

    Each is used once, as NCCL connects a group's ranks in its first collective, for which training
    has no one order on ranks that have other packs.
    """
    groups: ContextGroups = {}
    for context in sorted({*contexts} - {1}):
        blocks = context_blocks(parallel, context)
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
