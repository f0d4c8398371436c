"""Balance of a step's tokens over experts.

Shapes: L language layers of the whole model, E experts of a layer, P expert-parallel ranks.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.vlm.backend import current_device
from megatron.vlm.model.experts import routers
from megatron.vlm.model.stage import VLMStage
from omnibal.job.runlog import ExpertBalance
from omnibal.model.parallel import Parallel


def take_expert_balance(chunks: Sequence[VLMStage], parallel: Parallel) -> ExpertBalance | None:
    """Return the balance since the last call, without padding, or None if dense; collective."""
    language = chunks[0].model_config.language
    experts = language.kinds[0].experts
    if experts is None:
        return None
    counts_LE = torch.zeros((language.layers, experts.experts), device=current_device())
    for router in (router for stage in chunks for router in routers(stage)):
        assert router.layer_number is not None
        counts_LE[router.layer_number - 1] = router.tokens_of_experts_E
        router.tokens_of_experts_E.zero_()
    dist.all_reduce(counts_LE)
    counts_LP = counts_LE.unflatten(1, (parallel.expert, -1)).sum(-1)
    return ExpertBalance(
        fullest_expert=_most_over_mean(counts_LE), fullest_rank=_most_over_mean(counts_LP)
    )


def _most_over_mean(counts: torch.Tensor) -> float:
    """Return the mean over rows of max / mean, or 1 for zeros."""
    means = counts.mean(1)
    return float(torch.where(means > 0, counts.amax(1) / means.clamp(min=1), 1.0).mean())
