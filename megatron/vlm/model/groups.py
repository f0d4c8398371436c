"""Process groups: of data-parallel ranks that share packs, that divide weights, and of
data-parallel encoders."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.vlm.backend import COLLECTIVE_TIMEOUT, current_device
from megatron.vlm.inputs.encoder_share import EncodingRanks
from omnibal.job.plan import Plan
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
        groups[context] = own = _own_group(context_blocks(parallel, context))
        dist.all_reduce(torch.zeros(1, device=current_device()), group=own)
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShardGroups:
    """Groups of a rank by which weights are divided and copied."""

    shards: dist.ProcessGroup
    """Ranks that divide them."""
    copies: dist.ProcessGroup
    """Ranks that hold the same part of them, one of every group that divides them."""


def create_shard_groups(parallel: Parallel) -> tuple[ShardGroups, ShardGroups]:
    """Make the groups that divide the weights of a stage, of all but experts and of experts;
    collective over all ranks."""
    ranks, block = parallel.tensor * parallel.data, parallel.tensor * parallel.sharded
    dense = _shard_groups(parallel, ranks, block, parallel.tensor)
    if parallel.expert == parallel.tensor:
        return dense, dense
    return dense, _shard_groups(parallel, ranks, block, parallel.expert)


def create_encoder_shard_groups(plan: Plan) -> ShardGroups:
    """Make the groups that divide the weights of data-parallel encoders, which all ranks have in
    common; collective over them."""
    assert plan.beside is not None
    ranks = plan.parallel.world_size
    return _shard_groups(plan.parallel, ranks, plan.beside.sharded, apart=1)


def _shard_groups(parallel: Parallel, ranks: int, block: int, apart: int) -> ShardGroups:
    """Groups of ranks whose weights are the same.

    Args:
        ranks: neighbouring ranks that hold the same weights between them.
        block: neighbouring ranks, of which those with the same weights divide them.
        apart: distance of the next rank with the same weights.
    """
    places: dict[tuple[int, int], list[int]] = {}
    copies: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(parallel.world_size):
        places.setdefault((rank % apart, rank // block), []).append(rank)
    for (alike, _), group in places.items():
        for place, rank in enumerate(group):
            copies.setdefault((rank // ranks, alike, place), []).append(rank)
    return ShardGroups(shards=_own_group(places.values()), copies=_own_group(copies.values()))


def _own_group(groups: Iterable[Sequence[int]]) -> dist.ProcessGroup:
    own, _ = dist.new_subgroups_by_enumeration(
        [list(ranks) for ranks in groups], timeout=COLLECTIVE_TIMEOUT
    )
    assert own is not None, "every rank is in a group"
    return own


def create_encoding_group(plan: Plan) -> dist.ProcessGroup:
    """Make the group of ranks that encode together; collective over all ranks.

    All its connections are made now, in one exchange of what training exchanges.
    """
    assert plan.beside is not None
    ranks = EncodingRanks(pipelines=plan.beside.pipelines, parallel=plan.parallel, rank=0)
    blocks = range(plan.parallel.data // ranks.pipelines)
    own = _own_group(sorted(ranks.global_ranks(block)) for block in blocks)
    token = torch.zeros(own.size(), device=current_device())
    dist.all_to_all_single(torch.empty_like(token), token, group=own)
    return own


def replica_groups() -> ProcessGroupCollection:
    """Core's groups for a module of which every rank of the job has a whole copy.

    No rank divides it with others, and its gradients are those of all ranks together.
    """
    alone = dist.new_group(
        [dist.get_rank()], timeout=COLLECTIVE_TIMEOUT, use_local_synchronization=True
    )
    everyone = dist.group.WORLD
    return ProcessGroupCollection(
        **dict.fromkeys(
            ("tp", "pp", "mp", "cp", "ep", "expt_dp", "tp_ep_pp", "embd", "pos_embd"), alone
        ),
        dp=everyone,
        dp_cp=everyone,
        intra_dist_opt=parallel_state.get_intra_distributed_optimizer_instance_group(),
    )
