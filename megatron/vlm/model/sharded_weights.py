"""Weights of a stage, sharded over data-parallel ranks unit by unit (ZeRO-3).

A unit's parameters are views of one tensor, gathered only while the unit computes. Its storage is
resized under the same parameter objects, so that tensors saved by autograd become valid again.

Shapes: P values of a unit's parameters with padding, Q values of a rank's shard.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_module_registration_hook

from megatron.vlm.backend import current_device
from megatron.vlm.model.groups import ShardGroups
from megatron.vlm.model.tensor_parallel import padded_size

_PARAMETER_ALIGNMENT = 64  # in values, as in core's buffers: kernels read aligned vectors

# Writes the initial values of a range of a flat parameter to a flat tensor.
FirstValues = Callable[[torch.nn.Parameter, range, torch.Tensor], None]


@contextmanager
def without_matrices() -> Iterator[None]:
    """Context in which modules are built on the device, and matrices freed at once.

    `FlatWeights` allocates them, so a rank never has more than one full module.
    """

    def free_matrices(_: torch.nn.Module, name: str, built: torch.nn.Module | None) -> None:
        for parameter in () if built is None else built.to(current_device()).parameters():
            if parameter.dim() > 1:  # vectors are small, and keep their modules' values
                parameter.untyped_storage().resize_(0)

    hook = register_module_module_registration_hook(free_matrices)
    try:
        yield
    finally:
        hook.remove()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ParameterRange:
    """Flat values `first` to `end` (exclusive) of a parameter, in a rank's shard."""

    parameter: torch.nn.Parameter
    first: int
    end: int
    flat: "FlatWeights"
    place: slice  # same values in the shard of `flat`


class FlatWeights:
    """Parameters in one tensor, sharded in equal parts over a group.

    Args:
        parameters: of one type, all trained or all frozen, built in `without_matrices`; without
            values until gathered.
        first_values: writes initial values, equal on every rank.
    """

    @torch.no_grad()
    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        groups: ShardGroups,
        first_values: FirstValues,
    ) -> None:
        self.parameters, self.groups = tuple(parameters), groups
        self.is_trained = parameters[0].requires_grad
        sizes = (padded_size(parameter.numel(), _PARAMETER_ALIGNMENT) for parameter in parameters)
        *self.firsts, values = accumulate(sizes, initial=0)
        ranks = groups.shards.size()
        self.part_size = padded_size(-(-values // ranks), _PARAMETER_ALIGNMENT)
        self.own_Q = parameters[0].new_zeros(self.part_size)  # this rank's shard
        for own in self.ranges():
            first_values(own.parameter, range(own.first, own.end), self.own_Q[own.place])
        # With one rank the shard holds all parameters.
        self._whole_P = self.own_Q.new_empty(self.part_size * ranks) if ranks > 1 else self.own_Q
        for parameter, view in zip(parameters, self.views(self._whole_P), strict=True):
            parameter.data = view
        self.release()

    @property
    def is_divided(self) -> bool:
        return self.groups.shards.size() > 1

    @property
    def is_tied(self) -> bool:
        """Return whether this is the tied matrix alone, which two stages may hold."""
        return vars(self.parameters[0]).get("shared_embedding", False)  # core's mark

    def views(self, whole_P: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield views of the parameters in a tensor of this layout."""
        for parameter, first in zip(self.parameters, self.firsts, strict=True):
            yield whole_P[first : first + parameter.numel()].view(parameter.shape)

    def ranges(self) -> Iterator[ParameterRange]:
        """Yield the range of every parameter that has values in this rank's shard."""
        begin = self.groups.shards.rank() * self.part_size
        for parameter, first in zip(self.parameters, self.firsts, strict=True):
            low = max(begin, first)
            high = min(begin + self.part_size, first + parameter.numel())
            if low < high:
                yield ParameterRange(
                    parameter=parameter,
                    first=low - first,
                    end=high - first,
                    flat=self,
                    place=slice(low - begin, high - begin),
                )

    @torch.no_grad()
    def begin_gather(self) -> dist.Work | None:
        """Begin and return the all-gather, None for one rank; collective over sharding ranks."""
        if not self.is_divided:
            return None
        # The same storage, so that parameters and tensors saved by autograd are views again.
        self._whole_P.untyped_storage().resize_(self._whole_P.nbytes)
        return dist.all_gather_into_tensor(
            self._whole_P, self.own_Q, group=self.groups.shards, async_op=True
        )

    def release(self) -> None:
        """Free the gathered weights, but not this rank's shard."""
        if self.is_divided:
            self._whole_P.untyped_storage().resize_(0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShardedUnit:
    """Modules of a stage with weights gathered together."""

    tower: str
    modules: tuple[torch.nn.Module, ...]
    flats: tuple[FlatWeights, ...]  # weights used by the unit
    # Trained weights with complete gradients after its backward: no earlier unit uses them.
    reduced: tuple[FlatWeights, ...]
    gathers_again: bool  # whether its backward reads weights, so that they are gathered for it


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShardedWeights:
    units: tuple[ShardedUnit, ...]  # units in order of computation

    @property
    def flats(self) -> list[FlatWeights]:
        """Return every weight tensor once, in unit order."""
        return list(dict.fromkeys(flat for unit in self.units for flat in unit.flats))
