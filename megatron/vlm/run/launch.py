"""Launch of a process: its ranks, device, rendezvous and parallel groups."""

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron.vlm.backend import COLLECTIVE_TIMEOUT, has_cuda, prepare_megatron_core
from megatron.vlm.step.links import PipelineLinks, create_pipeline_links
from omnibal.base.errors import UserError
from omnibal.model.parallel import Parallel

_JOIN_MINUTES = 10  # schedulers start ranks one after another


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLaunch:
    """Ranks of this process and number of processes, set by torchrun or Slurm."""

    rank: int
    world_size: int
    local_rank: int

    @property
    def node(self) -> int:
        """Return the first rank of this process's node, equal on all its ranks."""
        return self.rank - self.local_rank

    @staticmethod
    def from_environment() -> "RankLaunch":
        """Return the ranks in the environment; without them, rank 0 of 1."""
        return RankLaunch(
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        )

    def check_against(self, parallel: Parallel) -> None:
        """Raise UserError unless the plan's number of processes runs, and this has a device."""
        if self.world_size != parallel.world_size:
            raise UserError(
                f"launched with {self.world_size} process(es), and the plan is for {parallel} = "
                f"{parallel.world_size}; launch that many (torchrun --nproc-per-node), or plan "
                "again with `omnibal plan --tp --pp --dp`"
            )
        self.check_device()

    def check_device(self) -> None:
        """Raise UserError if there is no device for this process."""
        if has_cuda() and self.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"this node has {torch.cuda.device_count()} devices, and process {self.local_rank} "
                "needs one; launch fewer, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
            )


def open_store(launch: RankLaunch, init_method: str = "env://", start: str = "") -> dist.Store:
    """Return the store once all ranks have joined; UserError after `_JOIN_MINUTES`.

    Rank 0 (under torchrun, the first node's launcher) serves it while the returned object lives.

    Args:
        start: key prefix of this start, as a launcher's store may outlive a restart.
    """
    if launch.world_size == 1:
        return dist.HashStore()
    timeout = datetime.timedelta(minutes=_JOIN_MINUTES)
    try:
        store, _, _ = next(
            dist.rendezvous(init_method, launch.rank, launch.world_size, timeout=timeout)
        )
    except (dist.DistError, ValueError) as error:
        raise UserError(
            f"rank {launch.rank} did not meet all {launch.world_size} ranks within {_JOIN_MINUTES} "
            f"minutes ({str(error).strip().splitlines()[0]}); look for a rank that failed earlier, "
            "give all the same MASTER_ADDR and MASTER_PORT, or start them with torchrun or "
            "scripts/slurm"
        ) from error
    return dist.PrefixStore(start, store) if start else store


def initialize_distributed(
    launch: RankLaunch,
    parallel: Parallel,
    seed: int,
    store: dist.Store | None = None,
) -> PipelineLinks:
    """Make the process group and core's groups; return this stage's links; collective."""
    prepare_megatron_core()
    if has_cuda():
        torch.cuda.set_device(launch.local_rank)
    store = store or open_store(launch)
    store.set_timeout(COLLECTIVE_TIMEOUT)
    dist.init_process_group(
        "nccl" if has_cuda() else "gloo",
        store=dist.PrefixStore("groups", store),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    make_groups(parallel, seed)
    return create_pipeline_links()


def make_groups(parallel: Parallel, seed: int) -> None:
    """Make Megatron-core's parallel groups, and seed its random state; collective."""
    parallel_state.initialize_model_parallel(
        parallel.tensor,
        parallel.pipeline,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,  # experts are not tensor-parallel
        create_gloo_process_groups=False,
        distributed_timeout_minutes=COLLECTIVE_TIMEOUT // datetime.timedelta(minutes=1),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def shut_down_distributed() -> None:
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
