"""Process groups of data-parallel encoders."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.vlm.backend import COLLECTIVE_TIMEOUT, current_device
from megatron.vlm.inputs.encoder_share import EncodingRanks
from omnibal.job.plan import Plan


def create_encoding_group(plan: Plan) -> dist.ProcessGroup:
    """Make the group of ranks that encode together; collective over all ranks.

    All its connections are made now, in one exchange of what training exchanges.
    """
    assert plan.beside is not None
    ranks = EncodingRanks(pipelines=plan.beside.pipelines, parallel=plan.parallel, rank=0)
    blocks = range(plan.parallel.data // ranks.pipelines)
    own, _ = dist.new_subgroups_by_enumeration(
        [sorted(ranks.global_ranks(block)) for block in blocks], timeout=COLLECTIVE_TIMEOUT
    )
    assert own is not None, "every rank is in a group"
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
        **dict.fromkeys(("tp", "pp", "mp", "cp", "ep", "expt_dp", "tp_ep_pp"), alone),
        dp=everyone,
        dp_cp=everyone,
        intra_dist_opt=parallel_state.get_intra_distributed_optimizer_instance_group(),
        embd=None,
        pos_embd=None,
    )
