"""Checkpoint state of a rank: a replicated or a sharded stage, described as equal tensors."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer

from megatron.vlm.checkpoint.stored_blocks import StoredTensors, blocks_of
from megatron.vlm.model.adapters import ADAPTERS
from megatron.vlm.model.sharded_weights import MainRange, ShardedWeights
from megatron.vlm.model.stage import VLMStage

_KINDS = ("param", "exp_avg", "exp_avg_sq")
"""Stored per parameter in float32: weights and Adam's moments."""
_STORED = "optimizer.state.{}.{}"
"""Name of a parameter's state in a checkpoint: kind, parameter."""


class PartOptimizer(Protocol):
    """Optimizer of a rank's weight shards."""

    inner: torch.optim.AdamW
    ranges: Sequence[MainRange]


Optimizer: TypeAlias = ChainedOptimizer | PartOptimizer
"""Optimizer of a replicated or a sharded stage."""


def state_of(stages: Sequence[VLMStage], optimizers: Sequence[Optimizer | None]) -> "State":
    """State of a rank."""
    pairs = zip(stages, optimizers, strict=True)
    # The keys are not stored in files.
    states: dict[str, _WholeState | _PartState] = {}
    for number, (stage, optimizer) in enumerate(pairs):
        if stage.sharded is None:
            assert optimizer is None or isinstance(optimizer, ChainedOptimizer)
            states[str(number)] = _WholeState(stage, optimizer)
        else:
            assert not isinstance(optimizer, ChainedOptimizer)
            states[str(number)] = _PartState(stage, stage.sharded, optimizer)
    return State(states)


class State:
    """A rank's saved and loaded tensors, of all its stages by name."""

    def __init__(self, states: "Mapping[str, _WholeState | _PartState]") -> None:
        self._states = states

    def described(self) -> dict[str, Any]:
        """Sharded state dict of all stages; `optimizer` holds all optimizers' merged settings."""
        state = {name: one.described() for name, one in self._states.items()}
        settings = [one.pop("optimizer") for one in state.values() if "optimizer" in one]
        return state | ({"optimizer": joined_settings(settings)} if settings else {})

    def changing(self) -> Iterator[torch.Tensor]:
        """Tensors that training updates, without temporaries made for the save."""
        return (tensor for one in self._states.values() for tensor in one.changing())

    def load_weights(self, stored: StoredTensors, *, adapters: bool = True) -> None:
        """Restore weights, with adapters if `adapters`."""
        blocks = (block for one in self._states.values() for block in one.weight_blocks())
        stored.read_blocks(block for block in blocks if adapters or ADAPTERS not in block.key)

    def load_optimizer(self, stored: StoredTensors, settings: dict[str, Any]) -> None:
        """Restore each optimizer's state and steps. Rates are those given now."""
        groups = settings["optimizer"]["param_groups"]
        # Saved before the first step, no group has one.
        [step] = {group["step"] for group in groups if group.get("step") is not None} or {0}
        for one in self._states.values():
            one.set_step(step)
        stored.read_blocks(
            block for one in self._states.values() for block in one.optimizer_blocks()
        )


class _WholeState:
    """State of a replicated stage and of core's distributed optimizer, which stages may share."""

    def __init__(self, stage: VLMStage, optimizer: ChainedOptimizer | None) -> None:
        self._stage = stage
        self._optimizers = [] if optimizer is None else _trained(stage, optimizer)

    def described(self) -> dict[str, Any]:
        """Weights, and this rank's shard of the optimizer's state."""
        weights = self._stage.sharded_state_dict()
        for one in self._optimizers:
            _fill_empty_state(one.optimizer)
        state = {"model": weights, "parts": [*self.optimizer_blocks()]}
        settings = [one.state_dict() for one in self._optimizers]
        return state | ({"optimizer": joined_settings(settings)} if settings else {})

    def changing(self) -> Iterator[torch.Tensor]:
        """The model's own tensors, and this rank's shard of the optimizer's state."""
        yield from (*self._stage.parameters(), *self._stage.buffers())
        for one in self._optimizers:
            yield from _optimizer_tensors(one.optimizer)

    @torch.no_grad()
    def weight_blocks(self) -> Iterator[ShardedTensor]:
        """Blocks of all weights and buffers."""
        for values, entry in _by_tensor(self._stage.sharded_state_dict()).items():
            yield from blocks_of(entry, entry.key, 0, values.numel(), values.view(-1))

    def set_step(self, step: float) -> None:
        """Set the steps that the optimizers count."""
        for one in self._optimizers:
            _fill_empty_state(one.optimizer)
            settings = one.state_dict()
            for group in settings["optimizer"]["param_groups"]:
                group["step"] = step
            one.load_state_dict(settings)

    @torch.no_grad()
    def optimizer_blocks(self) -> Iterator[ShardedTensor]:
        """This rank's blocks of every parameter's stored state."""
        described = _by_tensor(self._stage.sharded_state_dict())
        ranges = [ranges for one in self._optimizers for ranges in one.gbuf_ranges]
        optimizer_of = [one for one in self._optimizers for _ in one.gbuf_ranges]
        for optimizer, of_buffer in zip(optimizer_of, ranges, strict=True):
            [buckets] = of_buffer.values()
            of_parameters = (item for one in buckets for item in one["param_map"].items())
            of_stage = (item for item in of_parameters if item[0] in described)
            for parameter, own in of_stage:
                state = optimizer._get_main_param_and_optimizer_states(parameter)
                entry, place = described[parameter], own["param"]
                for kind in _KINDS:
                    key = _STORED.format(kind, entry.key)
                    yield from blocks_of(entry, key, place.start, place.end, state[kind])


def _trained(stage: VLMStage, optimizer: ChainedOptimizer) -> list[DistributedOptimizer]:
    """Optimizers with trained parameters. A frozen stage's is empty; experts have their own."""
    # Core's mark of expert-parallel parameters.
    of_experts = [
        not vars(parameter).get("allreduce", True)
        for parameter in stage.parameters()
        if parameter.requires_grad
    ]
    [dense, *experts] = optimizer.chained_optimizers
    return [*([] if all(of_experts) else [dense]), *(experts if any(of_experts) else [])]


class _PartState:
    """State of a rank's weight shards and of their optimizer, which stages may share."""

    def __init__(
        self, stage: VLMStage, weights: ShardedWeights, optimizer: PartOptimizer | None
    ) -> None:
        self._stage, self._weights, self._optimizer = stage, weights, optimizer

    def described(self) -> dict[str, Any]:
        """This rank's shards of weights and optimizer state, each saved by one replica."""
        assert self._optimizer is not None
        _fill_empty_state(self._optimizer.inner)
        blocks = [*self._shard_blocks(), *self.optimizer_blocks()]
        state = {"model": self._whole_entries(), "parts": blocks}
        # Absent if the stage is frozen.
        is_trained = bool(self._optimizer.inner.state)
        return state | ({"optimizer": _settings_of(self._optimizer.inner)} if is_trained else {})

    def changing(self) -> Iterator[torch.Tensor]:
        """All of this rank's shards. Nothing is gathered."""
        assert self._optimizer is not None
        yield from self._stage.buffers()
        yield from (flat.own_Q for flat in self._weights.flats)
        yield from _optimizer_tensors(self._optimizer.inner)

    def set_step(self, step: float) -> None:
        """Set the steps that the optimizer counts."""
        assert self._optimizer is not None
        _fill_empty_state(self._optimizer.inner)
        for state in self._optimizer.inner.state.values():
            state["step"].fill_(step)

    def _whole_entries(self) -> dict[str, Any]:
        """Entries that are not parameters, replicated on every rank."""
        parameters = {parameter for flat in self._weights.flats for parameter in flat.parameters}
        entries = self._stage.sharded_state_dict().items()
        return {
            name: entry
            for name, entry in entries
            if not torch.is_tensor(entry.data) or entry.data not in parameters
        }

    @torch.no_grad()
    def weight_blocks(self) -> Iterator[ShardedTensor]:
        """Blocks of this rank's shards, and of all buffers."""
        for values, entry in _by_tensor(self._whole_entries()).items():
            yield from blocks_of(entry, entry.key, 0, values.numel(), values.view(-1))
        yield from self._shard_blocks()

    def _shard_blocks(self) -> Iterator[ShardedTensor]:
        described = _by_tensor(self._stage.sharded_state_dict())
        for flat in self._weights.flats:
            copy = flat.groups.copies.rank()
            for own in flat.ranges():
                entry = described[own.parameter]
                values = flat.own_Q[own.place]
                yield from blocks_of(entry, entry.key, own.first, own.end, values, copy)

    def optimizer_blocks(self) -> Iterator[ShardedTensor]:
        """This rank's blocks of its parameters' stored state."""
        assert self._optimizer is not None
        described = _by_tensor(self._stage.sharded_state_dict())
        for one in (each for each in self._optimizer.ranges if each.own.parameter in described):
            entry, copy = described[one.own.parameter], one.flat.groups.copies.rank()
            state = self._optimizer.inner.state[one.main]
            for kind in _KINDS:
                values = one.main if kind == "param" else state[kind]
                key = _STORED.format(kind, entry.key)
                yield from blocks_of(entry, key, one.own.first, one.own.end, values, copy)


def _optimizer_tensors(inner: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Weights that an optimizer updates, and their state."""
    for main, state in inner.state.items():
        yield main
        yield from (one for one in state.values() if torch.is_tensor(one))


def _by_tensor(model_state: Mapping[str, Any]) -> dict[torch.Tensor, Any]:
    return {
        entry.data: entry
        for entry in model_state.values()
        if isinstance(entry, ShardedTensor | ShardedTensorFactory)
    }


def _settings_of(inner: torch.optim.AdamW) -> dict[str, Any]:
    """Settings of all groups and the step count, as core's distributed optimizer stores them."""
    [step] = {state["step"].item() for state in inner.state.values()}
    groups = [
        {name: value for name, value in group.items() if name != "params"} | {"step": step}
        for group in inner.param_groups
    ]
    return {"optimizer": {"param_groups": groups}}


def joined_settings(settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge settings of several optimizers; shared entries are equal."""
    joined: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for one in settings:
        inner = one["optimizer"]
        groups += [group for group in inner["param_groups"] if group not in groups]
        joined = one | {"optimizer": inner | {"param_groups": groups}}
    return joined


def _fill_empty_state(inner: torch.optim.Optimizer) -> None:
    """Create the optimizer's state before a first step, to describe it and load into it."""
    # Transformer Engine's and Apex's optimizers count steps per group.
    counts_by_parameter = isinstance(inner, torch.optim.Adam | torch.optim.AdamW)
    for group in inner.param_groups:
        for parameter in group["params"]:
            state = inner.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
                if counts_by_parameter:
                    state["step"] = torch.tensor(0.0)
