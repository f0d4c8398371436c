"""From a launched process to its place in the plan's parallel groups."""

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron.vlm.backend import communication_backend, has_cuda, prepare_megatron_core
from megatron.vlm.schedule import PipelineLinks, create_pipeline_links
from omnibal.errors import UserError
from omnibal.plan import Parallel


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What torchrun tells a process; a process started alone is a world of one."""

    rank: int
    world_size: int
    local_rank: int

    @staticmethod
    def from_environment() -> "Launch":
        return Launch(
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        )

    def check_against(self, parallel: Parallel) -> None:
        """Raises UserError unless this launch is the one that the plan was made for."""
        if self.world_size != parallel.world_size:
            raise UserError(
                f"launched with {self.world_size} process(es), but the plan is for tensor "
                f"{parallel.tensor} x pipeline {parallel.pipeline} x data {parallel.data} = "
                f"{parallel.world_size}; launch that many (torchrun --nproc-per-node), or plan "
                "anew with `omnibal plan --tp --pp --dp`"
            )
        if has_cuda() and self.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"process {self.local_rank} of this node has no device: the node has "
                f"{torch.cuda.device_count()}, and each process needs one; launch fewer processes "
                "a node, or hide the devices to train on the CPU (CUDA_VISIBLE_DEVICES=)"
            )


def initialize_distributed(
    launch: Launch, parallel: Parallel, seed: int, init_method: str = "env://"
) -> PipelineLinks:
    """Start communication and Megatron-core's parallel groups; collective over all ranks."""
    prepare_megatron_core()
    if has_cuda():
        torch.cuda.set_device(launch.local_rank)
    # A process alone has nobody to meet, and may have been started without a launcher.
    alone = launch.world_size == 1
    dist.init_process_group(
        communication_backend(),
        init_method=None if alone else init_method,
        store=dist.HashStore() if alone else None,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=datetime.timedelta(minutes=10),
    )
    parallel_state.initialize_model_parallel(parallel.tensor, parallel.pipeline)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return create_pipeline_links()


def shut_down_distributed() -> None:
    """End Megatron-core's groups and communication."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
