"""AdamW over weights that data-parallel ranks divide: each updates its part.

It is what core's distributed optimizer does with its part of core's buffers, under the same
settings: float32 weights and moments of a part, no weight decay of vectors, one norm of all
gradients, a step that is left out where any is not finite.

Shapes: Q of a rank's part of the weights of a unit.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm

from megatron.vlm.backend import current_device
from megatron.vlm.model.sharded_weights import FlatWeights, MainRange
from megatron.vlm.step.sharded import FlatGradients

_CLIP_MARGIN = 1e-6  # core's, so that it clips alike


class ShardedAdam:
    """AdamW of this rank's part of all trained weights.

    Args:
        gradients: of all trained weights.
        tensor_group: tensor-parallel ranks, which have parts of the same places.
        settings: of every group, of torch's AdamW and those that core's schedule reads.
    """

    def __init__(
        self,
        gradients: Mapping[FlatWeights, FlatGradients],
        tensor_group: dist.ProcessGroup,
        settings: Mapping[str, Any],
    ) -> None:
        self._gradients, self._tensor_group = gradients, tensor_group
        # A rank's part of the weights in float32: itself, where it is.
        self._main_of = {flat: flat.own_Q.float() for flat in gradients}
        self.ranges = list[MainRange]()
        """What this rank updates."""
        for flat, main_Q in self._main_of.items():
            for own in flat.ranges():
                main = main_Q[own.place]
                main.grad = gradients[flat].own_Q[own.place]
                self.ranges.append(MainRange(own=own, main=main, flat=flat))
        self.inner = torch.optim.AdamW(_groups(self.ranges, settings), fused=True, foreach=False)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of settings (torch's name)."""
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients."""
        for gradients in self._gradients.values():
            gradients.own_Q *= factor

    def sum_over_tensor_ranks(self) -> None:
        """Sum gradients of which tensor-parallel ranks each have what their part of the sequence,
        or of the heads, gives; collective over them."""
        partial = [
            one.main.grad
            for one in self.ranges
            # Core's mark of them.
            if vars(one.own.parameter).get("sequence_parallel", False)
        ]
        if self._tensor_group.size() == 1 or not partial:
            return
        together = torch.cat(partial)
        dist.all_reduce(together, group=self._tensor_group)
        sizes = [len(gradient) for gradient in partial]
        for gradient, summed in zip(partial, together.split(sizes), strict=True):
            gradient.copy_(summed)

    def step(self, clip_grad: float, norm: float) -> None:
        """Clip gradients to a norm of `clip_grad` together, if it is not 0, and step."""
        factor = clip_grad / (norm + _CLIP_MARGIN)
        if 0 < factor < 1:
            self.scale_gradients(factor)
        self.inner.step()
        for flat, main_Q in self._main_of.items():
            if main_Q is not flat.own_Q:
                flat.own_Q.copy_(main_Q)

    def reload_model_params(self) -> None:
        """Take the weights as they are (core's name); for after they were loaded alone."""
        for flat, main_Q in self._main_of.items():
            main_Q.copy_(flat.own_Q)

    def norm(self) -> float:
        """Norm of the gradients of all ranks together, each counted once; collective over them."""
        first = self._tensor_group.rank() == 0
        counted = [
            one.main.grad
            for one in self.ranges
            if one.flat.groups.copies.rank() == 0
            # Core's mark of a second copy, on another stage.
            and not vars(one.own.parameter).get("shared", False)
            and (first or vars(one.own.parameter)["tensor_model_parallel"])
        ]
        squares = get_total_norm(counted).to(current_device()).square()
        dist.all_reduce(squares)
        return math.sqrt(squares.item())


def _groups(ranges: Sequence[MainRange], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Groups as core makes them: vectors do not decay, and experts are by themselves."""
    groups: dict[tuple[bool, bool], list[torch.Tensor]] = {}
    for is_expert in sorted({one.is_expert for one in ranges} | {False}):
        groups |= {(is_expert, False): [], (is_expert, True): []}
    for one in ranges:
        groups[one.is_expert, one.own.parameter.dim() == 1].append(one.main)
    return [
        {
            **settings,
            "params": parameters,
            "is_expert_parallel": is_expert,
            "wd_mult": 0.0 if is_vector else 1.0,
        }
        for (is_expert, is_vector), parameters in groups.items()
    ]
