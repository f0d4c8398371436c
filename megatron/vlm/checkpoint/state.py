"""State of a rank for a checkpoint: of a stage that it holds whole, or of its parts of one.

Both describe the same tensors, so that a checkpoint does not tell which of them has written it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer

from megatron.vlm.checkpoint.identity import one_error
from megatron.vlm.checkpoint.stored_blocks import blocks_of, load_blocks
from megatron.vlm.model.sharded_weights import MainRange, ShardedWeights
from megatron.vlm.model.stage import VLMStage

# Optimizer state is stored per parameter, so that any split can load it, and is brought together
# on the host of one data-parallel rank, not on every device.
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
}
OPTIMIZER_OF = "optimizer of "
"""Start of the names of optimizers' gathered state."""
_KINDS = ("param", "exp_avg", "exp_avg_sq")
"""What is stored of every parameter in float32: the weights and Adam's moments."""
_STORED = "optimizer.state.{}.{}"
"""Name of a parameter's state in a checkpoint, by what it is and the parameter's name."""


class PartOptimizer(Protocol):
    """Optimizer of a rank's parts of weights."""

    inner: torch.optim.AdamW
    ranges: Sequence[MainRange]


class State(Protocol):
    """What a rank saves and loads of a run's tensors."""

    def described(self) -> dict[str, Any]:
        """What a rank saves, as core describes it, and under `optimizer` its settings, if any."""

    def changing(self) -> Iterator[torch.Tensor]:
        """Described tensors that training changes; others were made for the save."""

    def load_weights(self, path: Path) -> dict[str, Any]:
        """Restore the weights; returns what else a checkpoint has in common for all ranks."""

    def load_optimizer(self, path: Path, settings: dict[str, Any]) -> None:
        """Restore the optimizer's state, of which the checkpoint has these settings."""


def state_of(
    stages: Sequence[VLMStage], optimizer: ChainedOptimizer | PartOptimizer | None
) -> State:
    """State of a rank.

    Args:
        stages: everything that it holds of the model.
        optimizer: of all of that; None where weights alone are loaded.
    """
    [first, *_] = stages
    if first.sharded is not None:
        return PartState(first, first.sharded, optimizer)
    return WholeState(stages, optimizer)


class WholeState:
    """State of stages that a rank holds whole, and of core's distributed optimizer.

    Args:
        stages: whose optimizers are chained in this order: its stage, and data-parallel encoders.
    """

    def __init__(self, stages: Sequence[VLMStage], optimizer: ChainedOptimizer | None) -> None:
        self._stages, self._optimizer = stages, optimizer

    def described(self) -> dict[str, Any]:
        """Weights, and the optimizer's state on one of the data-parallel ranks."""
        state = self._weights()
        settings: list[dict[str, Any]] = []
        for each in self._trained():
            _fill_empty_state(each.optimizer.optimizer)
            described = each.optimizer.sharded_state_dict(state[each.part], metadata=_METADATA)
            # Every parameter's state has its name in the files.
            gathered = described.pop("param_state")
            settings.append(described)
            if gathered is not None:  # as it is on one rank of those that divide it
                state[OPTIMIZER_OF + each.name] = gathered
        if settings:
            state["optimizer"] = joined_settings(settings)
        return state

    def changing(self) -> Iterator[torch.Tensor]:
        """The model's own tensors: the optimizer's state was gathered for a save alone."""
        return (t for one in self._stages for t in (*one.parameters(), *one.buffers()))

    def load_weights(self, path: Path) -> dict[str, Any]:
        """Restore all weights of the stages."""
        with one_error(path):
            loaded = dist_checkpointing.load(self._weights(), str(path))
        for name, part in self._named().items():
            # Core puts the halves of gated layers together in tensors of their own, which go with
            # this.
            part.load_state_dict(loaded.pop(name))
        return loaded

    def load_optimizer(self, path: Path, settings: dict[str, Any]) -> None:
        """Restore this rank's share of the optimizers' state."""
        trained, state = self._trained(), self._weights()
        for each in trained:
            _fill_empty_state(each.optimizer.optimizer)
            each.optimizer.load_state_dict(settings)
        with one_error(path):
            load_blocks(
                (
                    block
                    for each in trained
                    for block in _share_blocks(each.optimizer, state[each.part])
                ),
                path,
            )

    def _named(self) -> dict[str, VLMStage]:
        """Names in the state, none of which is in the files."""
        return dict(zip(("model", "encoders"), self._stages, strict=False))

    def _weights(self) -> dict[str, Any]:
        named = self._named().items()
        return {name: stage.sharded_state_dict(metadata=_METADATA) for name, stage in named}

    def _trained(self) -> "list[_Trained]":
        """The optimizers of everything that is trained.

        Core makes one of a stage, though it be frozen whole, and another of its experts, whose
        state other ranks divide; of frozen experts none. Frozen data-parallel encoders have none.
        """
        assert self._optimizer is not None
        chain = iter(self._optimizer.chained_optimizers)
        found = []
        for part, stage in self._named().items():
            # Core's mark of parameters that only some data-parallel ranks hold.
            trained = [parameter for parameter in stage.parameters() if parameter.requires_grad]
            experts = [p for p in trained if not vars(p).get("allreduce", True)]
            if part == "model" or trained:
                one = next(chain)
                if len(experts) < len(trained):
                    found.append(_Trained(name=part, part=part, optimizer=one))
            if experts:
                found.append(_Trained(name=f"{part}'s experts", part=part, optimizer=next(chain)))
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trained:
    """An optimizer that has something to train."""

    name: str
    part: str
    """Name of what it trains parameters of."""
    optimizer: DistributedOptimizer


@torch.no_grad()
def _share_blocks(
    optimizer: DistributedOptimizer, model_state: Mapping[str, Any]
) -> Iterator[ShardedTensor]:
    """What core's optimizer has of every parameter's state, where it is in a checkpoint."""
    described = _by_parameter(model_state)
    for ranges in optimizer.gbuf_ranges:
        [buckets] = ranges.values()
        for parameter, own in (item for bucket in buckets for item in bucket["param_map"].items()):
            state = optimizer._get_main_param_and_optimizer_states(parameter)
            entry, place = described[parameter], own["param"]
            for kind in _KINDS:
                key = _STORED.format(kind, entry.key)
                yield from blocks_of(entry, key, place.start, place.end, state[kind])


class PartState:
    """State of a rank's parts of a stage, which other data-parallel ranks have the rest of."""

    def __init__(
        self, stage: VLMStage, weights: ShardedWeights, optimizer: PartOptimizer | None
    ) -> None:
        self._stage, self._weights, self._optimizer = stage, weights, optimizer

    def described(self) -> dict[str, Any]:
        """This rank's parts, each once over all copies, of weights and of the optimizer's state."""
        assert self._optimizer is not None
        _fill_empty_state(self._optimizer.inner)
        blocks = [*self._weight_blocks(), *self._optimizer_blocks()]
        return {
            "model": self._whole_entries(),
            "parts": blocks,
            "optimizer": _settings_of(self._optimizer.inner),
        }

    def changing(self) -> Iterator[torch.Tensor]:
        """All of this rank's parts: nothing is gathered."""
        assert self._optimizer is not None
        yield from self._stage.buffers()
        yield from (flat.own_Q for flat in self._weights.flats)
        for main, state in self._optimizer.inner.state.items():
            yield from (main, *(one for one in state.values() if torch.is_tensor(one)))

    def load_weights(self, path: Path) -> dict[str, Any]:
        """Restore this rank's parts of the weights."""
        with one_error(path):
            loaded: dict[str, Any] = dist_checkpointing.load(
                {"model": self._whole_entries()}, str(path)
            )
            load_blocks(self._weight_blocks(), path)
        self._stage.load_state_dict(loaded.pop("model", {}), strict=False)
        return loaded

    def load_optimizer(self, path: Path, settings: dict[str, Any]) -> None:
        """Restore this rank's parts of the optimizer's state."""
        assert self._optimizer is not None
        _fill_empty_state(self._optimizer.inner)
        [step] = {float(group["step"]) for group in settings["optimizer"]["param_groups"]}
        for state in self._optimizer.inner.state.values():
            state["step"].fill_(step)
        with one_error(path):
            load_blocks(self._optimizer_blocks(), path)

    def _entries(self) -> dict[str, Any]:
        state: dict[str, Any] = self._stage.sharded_state_dict(metadata=_METADATA)
        return state

    def _whole_entries(self) -> dict[str, Any]:
        """Entries of what is no parameter, and whole on every rank."""
        parameters = {parameter for flat in self._weights.flats for parameter in flat.parameters}
        entries = self._entries().items()
        return {
            name: entry
            for name, entry in entries
            if not torch.is_tensor(entry.data) or entry.data not in parameters
        }

    def _weight_blocks(self) -> Iterator[ShardedTensor]:
        described = _by_parameter(self._entries())
        for flat in self._weights.flats:
            copy = flat.groups.copies.rank()
            for own in flat.ranges():
                entry = described[own.parameter]
                values = flat.own_Q[own.place]
                yield from blocks_of(entry, entry.key, own.first, own.end, values, copy)

    def _optimizer_blocks(self) -> Iterator[ShardedTensor]:
        assert self._optimizer is not None
        described = _by_parameter(self._entries())
        for one in self._optimizer.ranges:
            entry, copy = described[one.own.parameter], one.flat.groups.copies.rank()
            state = self._optimizer.inner.state[one.main]
            for kind in _KINDS:
                values = one.main if kind == "param" else state[kind]
                key = _STORED.format(kind, entry.key)
                yield from blocks_of(entry, key, one.own.first, one.own.end, values, copy)


def _by_parameter(model_state: Mapping[str, Any]) -> dict[torch.Tensor, Any]:
    return {
        entry.data: entry
        for entry in model_state.values()
        if isinstance(entry, ShardedTensor | ShardedTensorFactory)
    }


def _settings_of(inner: torch.optim.AdamW) -> dict[str, Any]:
    """Settings of all groups and the steps taken, as core's distributed optimizer says them."""
    steps = {state["step"].item() for state in inner.state.values()} or {0.0}
    [step] = steps
    groups = [
        {name: value for name, value in group.items() if name != "params"} | {"step": step}
        for group in inner.param_groups
    ]
    return {"optimizer": {"param_groups": groups}}


def joined_settings(settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Settings of several optimizers as of one; what they share is the same in all."""
    joined: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for one in settings:
        inner = one["optimizer"]
        groups += [group for group in inner["param_groups"] if group not in groups]
        joined = one | {"optimizer": inner | {"param_groups": groups}}
    return joined


def _fill_empty_state(inner: torch.optim.Optimizer) -> None:
    """Create the optimizer's state, which is described and loaded into, before a first step."""
    # Transformer Engine's and Apex's optimizers count steps in their groups.
    counts_by_parameter = isinstance(inner, torch.optim.Adam | torch.optim.AdamW)
    for group in inner.param_groups:
        for parameter in group["params"]:
            state = inner.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
                if counts_by_parameter:
                    state["step"] = torch.tensor(0.0)
