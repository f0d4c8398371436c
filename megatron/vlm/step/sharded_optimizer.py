"""AdamW over sharded weights: each rank updates its shard.

As core's distributed optimizer with the same settings: float32 weights and moments, no weight decay
of vectors, clipping by the norm of all gradients. Callers skip `step` if it is not finite.

Shapes: Q values of a rank's shard of one FlatWeights.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig
from torch.nn.utils import get_total_norm

from megatron.vlm.backend import current_device
from megatron.vlm.model.sharded_weights import FlatWeights, ParameterRange
from megatron.vlm.step.sharded import FlatGradients

_CLIP_MARGIN = 1e-6  # as core's


class ShardedAdam:
    """AdamW of this rank's shards of all trained weights.

    Args:
        gradients: float32 gradients of each trained FlatWeights.
        tensor_group: tensor-parallel ranks, with shards at the same offsets.
        settings: of all groups.
        groups: core's parameter groups, of full parameters; may be empty.
    """

    def __init__(
        self,
        gradients: Mapping[FlatWeights, FlatGradients],
        tensor_group: dist.ProcessGroup,
        settings: OptimizerConfig,
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        self._gradients, self._tensor_group = gradients, tensor_group
        # Float32 weights; `float` returns the shard itself if it is float32.
        self._main_of = {flat: flat.own_Q.float() for flat in gradients}
        # Flat float32 main weights, which key the optimizer's state.
        self.mains = dict[ParameterRange, torch.Tensor]()
        mains_of = defaultdict[torch.nn.Parameter, list[torch.Tensor]](list)
        for flat, main_Q in self._main_of.items():
            for own in flat.ranges():
                main = main_Q[own.place]
                main.grad = gradients[flat].own_Q[own.place]
                self.mains[own] = main
                mains_of[own.parameter].append(main)
        own_groups = [
            {**group, "params": [main for weight in group["params"] for main in mains_of[weight]]}
            for group in groups
        ]
        self.inner = torch.optim.AdamW(
            own_groups or [{"params": [], "default_config": False}],
            lr=settings.lr,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_eps,
            weight_decay=settings.weight_decay,
            fused=True,  # one kernel without temporary tensors
            foreach=False,
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    def scale_gradients(self, factor: float) -> None:
        for gradients in self._gradients.values():
            gradients.own_Q *= factor

    def sum_over_tensor_ranks(self) -> None:
        """Sum gradients of sequence-parallel parameters over tensor-parallel ranks; collective."""
        partial_sums = [
            main.grad
            for own, main in self.mains.items()
            # Core's mark of sequence-parallel parameters.
            if vars(own.parameter).get("sequence_parallel", False)
        ]
        if self._tensor_group.size() == 1 or not partial_sums:
            return
        joined = torch.cat(partial_sums)  # one all-reduce for all
        dist.all_reduce(joined, group=self._tensor_group)
        sizes = [len(gradient) for gradient in partial_sums]
        for gradient, summed in zip(partial_sums, joined.split(sizes), strict=True):
            gradient.copy_(summed)

    def step(self, clip_grad: float, norm: float) -> None:
        """Clip gradients with joint norm `norm` to `clip_grad` (0: off), and update all weights."""
        factor = clip_grad / (norm + _CLIP_MARGIN)
        if 0 < factor < 1:
            self.scale_gradients(factor)
        self.inner.step()
        for flat, main_Q in self._main_of.items():
            if main_Q is not flat.own_Q:
                flat.own_Q.copy_(main_Q)

    def reload_model_params(self) -> None:
        """Copy weights to the float32 main weights, after loading weights alone (core's name)."""
        for flat, main_Q in self._main_of.items():
            main_Q.copy_(flat.own_Q)

    def norm(self) -> float:
        """Return the norm of all ranks' gradients, each counted once; collective."""
        first = self._tensor_group.rank() == 0  # counts parameters that ranks replicate
        counted = [
            main.grad
            for own, main in self.mains.items()
            if own.flat.groups.copies.rank() == 0
            # Core's mark of a second copy on another stage.
            and not vars(own.parameter).get("shared", False)
            and (first or vars(own.parameter)["tensor_model_parallel"])
        ]
        squares = get_total_norm(counted).to(current_device()).square()
        dist.all_reduce(squares)
        return math.sqrt(squares.item())
