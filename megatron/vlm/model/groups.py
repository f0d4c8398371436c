"""Process groups of context parallelism, weight sharding and data-parallel encoders."""

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

ContextGroups = dict[int, dist.ProcessGroup]  # this rank's group by context-parallel size above 1


def create_context_groups(parallel: Parallel, contexts: Iterable[int]) -> ContextGroups:
    """Create groups for context-parallel sizes above 1; return this rank's; collective."""
    groups: ContextGroups = {}
    tensor, data = parallel.tensor, parallel.data
    for context in sorted({*contexts} - {1}):
        # Aligned blocks of data-parallel ranks with equal stage and tensor-parallel rank: Megatron
        # numbers tensor-parallel ranks first, then data-parallel ranks, then stages.
        blocks = [
            [first + (start + place) * tensor + shard for place in range(context)]
            for first in range(0, parallel.world_size, tensor * data)
            for shard in range(tensor)
            for start in range(0, data, context)
        ]
        groups[context] = own = create_own_group(blocks)
        # NCCL connects a group in its first collective. In training ranks would connect groups in
        # different orders, and could wait for each other.
        dist.all_reduce(torch.zeros(1, device=current_device()), group=own)
    return groups


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShardGroups:
    """A rank's groups for weight sharding."""

    shards: dist.ProcessGroup  # ranks that shard the weights
    copies: dist.ProcessGroup  # ranks with the same shard


def create_shard_groups(parallel: Parallel) -> tuple[ShardGroups, ShardGroups]:
    """Create and return groups of dense weights, then of experts; collective over all ranks."""
    ranks, block = parallel.tensor * parallel.data, parallel.tensor * parallel.sharded
    dense = _shard_groups(parallel, ranks, block, parallel.tensor)
    if parallel.expert == parallel.tensor:
        return dense, dense
    return dense, _shard_groups(parallel, ranks, block, parallel.expert)


def create_encoder_shard_groups(plan: Plan) -> ShardGroups:
    """Create the groups that shard data-parallel encoders; collective over all ranks."""
    encoders, ranks = plan.data_parallel_encoders, plan.parallel.world_size
    assert encoders is not None
    return _shard_groups(plan.parallel, ranks, encoders.sharded, apart=1)


def _shard_groups(parallel: Parallel, ranks: int, block: int, apart: int) -> ShardGroups:
    """Create groups that shard weights, of ranks with equal weights; collective.

    Args:
        ranks: number of a stage's ranks, or of all ranks for data-parallel encoders.
        block: number of consecutive ranks that contain a sharding group.
        apart: distance in ranks to the next rank with equal weights.
    """
    # Ranks by weights and sharding group; then by stage, weights and shard.
    places: dict[tuple[int, int], list[int]] = {}
    copies: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(parallel.world_size):
        places.setdefault((rank % apart, rank // block), []).append(rank)
    for (alike, _), group in places.items():
        for place, rank in enumerate(group):
            copies.setdefault((rank // ranks, alike, place), []).append(rank)
    return ShardGroups(
        shards=create_own_group(places.values()), copies=create_own_group(copies.values())
    )


def create_own_group(groups: Iterable[Sequence[int]]) -> dist.ProcessGroup:
    """Create groups of ranks and return this rank's; collective over all ranks."""
    own, _ = dist.new_subgroups_by_enumeration(
        [list(ranks) for ranks in groups], timeout=COLLECTIVE_TIMEOUT
    )
    assert own is not None, "every rank is in a group"
    return own


def create_encoding_group(plan: Plan) -> dist.ProcessGroup:
    """Create the group of ranks that encode together; collective over all ranks."""
    encoders = plan.data_parallel_encoders
    assert encoders is not None
    ranks = EncodingRanks(pipelines=encoders.pipelines, parallel=plan.parallel, rank=0)
    blocks = range(plan.parallel.data // ranks.pipelines)
    own = create_own_group(sorted(ranks.global_ranks(block)) for block in blocks)
    # NCCL connects the ranks in the first exchange of this kind.
    token = torch.zeros(own.size(), device=current_device())
    dist.all_to_all_single(torch.empty_like(token), token, group=own)
    return own


def create_replica_groups() -> ProcessGroupCollection:
    """Create core's groups for a module replicated on every rank of the job."""
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
