"""Weights of a stage that data-parallel ranks divide among them, unit by unit (ZeRO-3).

The parameters of a unit lie in one tensor, of which every rank keeps a part. The whole is there
only while the unit computes: its memory comes and goes under the parameters, which stay the same
objects, so that what autograd keeps of them is valid again once they are.

Shapes: P values of a unit's parameters and of the padding between and after them, Q of a rank's
part of them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_module_registration_hook

from megatron.vlm.backend import current_device
from megatron.vlm.model.groups import ShardGroups
from megatron.vlm.model.tensor_parallel import padded_size

_ALIGNMENT = 64
"""Values at a multiple of which every parameter begins, as in core's buffers: kernels read whole
vectors of 16 bytes, and Transformer Engine's wider ones."""

FirstValues = Callable[[torch.nn.Parameter], None]
"""Function that draws a matrix, and leaves a vector what its module gave it."""


@contextmanager
def without_matrices() -> Iterator[None]:
    """Build modules on this device whose matrices have no memory, until `FlatWeights` gives it.

    So a rank that keeps a part of a stage never has more of it whole than one module. Vectors,
    which modules give values to, are small and stay.
    """
    built = register_module_module_registration_hook(_let_go_of_matrices)
    try:
        yield
    finally:
        built.remove()


def _let_go_of_matrices(_: torch.nn.Module, name: str, built: torch.nn.Module | None) -> None:
    """Let go of the matrices of a module that another one has just been given."""
    if built is None:
        return
    for parameter in built.to(current_device()).parameters():
        if parameter.dim() > 1:
            parameter.untyped_storage().resize_(0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ParameterRange:
    """Run of a parameter's values, flat, of which a rank keeps the state."""

    parameter: torch.nn.Parameter
    first: int
    end: int
    place: slice
    """Where the values are in the rank's part."""


class FlatWeights:
    """Parameters in one tensor, of which every rank of a group keeps a part of the same size.

    Args:
        parameters: of one type, all trained or all frozen, built in `without_matrices`; they have
            no values from then on, until they are gathered.
        first_values: the same on every rank.
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
        firsts, values = [], 0
        for parameter in parameters:
            firsts.append(values)
            values += padded_size(parameter.numel(), _ALIGNMENT)
        self.firsts = tuple(firsts)
        ranks = groups.shards.size()
        self.part_size = padded_size(-(-values // ranks), _ALIGNMENT)
        self._whole_P = parameters[0].new_zeros(self.part_size * ranks)
        for parameter, view in zip(parameters, self.views(self._whole_P), strict=True):
            if parameter.dim() < 2:
                view.copy_(parameter)
            parameter.data = view
            first_values(parameter)
        own = self._whole_P[self.first_value :][: self.part_size]
        self.own_Q = own.clone() if self.is_divided else own
        """This rank's part of the weights."""
        self.release()

    @property
    def is_divided(self) -> bool:
        """Whether there is more than one rank to divide the parameters."""
        return self.groups.shards.size() > 1

    @property
    def first_value(self) -> int:
        """Place of this rank's part in the whole."""
        return self.groups.shards.rank() * self.part_size

    def views(self, whole_P: torch.Tensor) -> Iterator[torch.Tensor]:
        """The parameters' parts of a tensor of this layout, in their shapes."""
        for parameter, first in zip(self.parameters, self.firsts, strict=True):
            yield whole_P[first : first + parameter.numel()].view(parameter.shape)

    def ranges(self) -> Iterator[ParameterRange]:
        """What of every parameter is in this rank's part; of some there may be nothing."""
        begin = self.first_value
        for parameter, first in zip(self.parameters, self.firsts, strict=True):
            low = max(begin, first)
            high = min(begin + self.part_size, first + parameter.numel())
            if low < high:
                yield ParameterRange(
                    parameter=parameter,
                    first=low - first,
                    end=high - first,
                    place=slice(low - begin, high - begin),
                )

    @torch.no_grad()
    def begin_gather(self) -> dist.Work | None:
        """Begin to make the parameters whole; collective over the ranks that divide them."""
        if not self.is_divided:
            return None
        self._whole_P.untyped_storage().resize_(self._whole_P.nbytes)
        return dist.all_gather_into_tensor(
            self._whole_P, self.own_Q, group=self.groups.shards, async_op=True
        )

    def release(self) -> None:
        """Let go of the parameters' values, but for this rank's part."""
        if self.is_divided:
            self._whole_P.untyped_storage().resize_(0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MainRange:
    """Values of a parameter that a rank updates."""

    own: ParameterRange
    main: torch.Tensor
    """The weights in float32, one axis, by which the optimizer has its state."""
    flat: FlatWeights
    """Weights that they are of."""

    @property
    def is_expert(self) -> bool:
        """Whether the parameter is of experts, which not all data-parallel ranks hold."""
        return not vars(self.own.parameter).get("allreduce", True)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShardedUnit:
    """A run of a stage's modules whose weights are gathered together."""

    tower: str
    """Encoder or language model that they are of."""
    modules: tuple[torch.nn.Module, ...]
    flats: tuple[FlatWeights, ...]
    """Weights that it computes with."""
    reduced: tuple[FlatWeights, ...]
    """Trained ones that are whole in gradient after its backward: not those that a unit before it
    computes with too, as where the head is tied to the token embedding."""
    gathers_again: bool
    """Whether its backward reads weights."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShardedWeights:
    """All weights of a stage, divided."""

    units: tuple[ShardedUnit, ...]
    """In the order in which they compute."""

    @property
    def flats(self) -> list[FlatWeights]:
        """Every tensor of weights once, in the order of the units."""
        return list(dict.fromkeys(flat for unit in self.units for flat in unit.flats))
