"""Checkpoint state of a rank: a replicated or a sharded stage, described as equal tensors."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer

from megatron.vlm.checkpoint.stored_blocks import StoredTensors, blocks_of
from megatron.vlm.model.adapters import ADAPTERS
from megatron.vlm.model.sharded_weights import MainRange
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
_StateRange: TypeAlias = tuple[torch.nn.Parameter, int, int, Mapping[str, torch.Tensor], int]
"""A parameter, a range of it when flat, the range's state by kind, and the replica's number."""


def state_of(stages: Sequence[VLMStage], optimizers: Sequence[Optimizer | None]) -> "State":
    """State of a rank."""
    return State(list(map(_StageState, stages, optimizers)))


class State:
    """A rank's saved and loaded tensors, of all its stages."""

    def __init__(self, stages: "Sequence[_StageState]") -> None:
        self._stages = stages

    def described(self) -> dict[str, Any]:
        """Sharded state dict of all stages; `optimizer` holds all optimizers' merged settings."""
        # The stages' keys are not stored in files.
        state = {str(number): stage.described() for number, stage in enumerate(self._stages)}
        settings = [each for stage in self._stages for each in stage.settings()]
        return state | ({"optimizer": join_settings(settings)} if settings else {})

    def changing(self) -> Iterator[torch.Tensor]:
        """Tensors that training updates, without temporaries made for the save."""
        return (tensor for stage in self._stages for tensor in stage.changing())

    def load_weights(self, stored: StoredTensors, *, adapters: bool = True) -> None:
        """Restore weights, with adapters if `adapters`."""
        blocks = (block for stage in self._stages for block in stage.weight_blocks())
        stored.read_blocks(block for block in blocks if adapters or ADAPTERS not in block.key)

    def load_optimizer(self, stored: StoredTensors, settings: dict[str, Any]) -> None:
        """Restore each optimizer's state and steps. Learning rates stay as given now."""
        groups = settings["optimizer"]["param_groups"]
        # Saved before the first step, no group has one.
        [step] = {group["step"] for group in groups if group.get("step") is not None} or {0}
        for stage in self._stages:
            stage.set_step(step)
        stored.read_blocks(block for stage in self._stages for block in stage.optimizer_blocks())


class _StageState:
    """State of a stage, and of its optimizer, which stages may share.

    Replicated weights have core's distributed optimizers, sharded weights their own optimizer over
    this rank's ranges of flat tensors.
    """

    def __init__(self, stage: VLMStage, optimizer: Optimizer | None) -> None:
        assert optimizer is None or isinstance(optimizer, ChainedOptimizer) == (
            stage.sharded is None
        )
        self._stage = stage
        self._flats = [] if stage.sharded is None else stage.sharded.flats
        self._distributed: list[DistributedOptimizer] = []
        self._sharded: PartOptimizer | None = None
        if isinstance(optimizer, ChainedOptimizer):
            self._distributed = _trained(stage, optimizer)
        else:
            self._sharded = optimizer

    @property
    def _inner(self) -> list[torch.optim.Optimizer]:
        """Torch's optimizers, without a frozen stage's."""
        sharded = [] if self._sharded is None else [self._sharded.inner]
        return [*(optimizer.optimizer for optimizer in self._distributed), *sharded]

    def described(self) -> dict[str, Any]:
        """Weights, and this rank's ranges of weights and optimizer state."""
        for inner in self._inner:
            _fill_empty_state(inner)
        blocks = [*self._flat_blocks(), *self.optimizer_blocks()]
        return {"model": self._entries(), "parts": blocks}

    def settings(self) -> list[dict[str, Any]]:
        """Settings of the optimizers with state, as core's distributed optimizer has them."""
        if self._sharded is not None and self._sharded.inner.state:
            return [_settings_of(self._sharded.inner)]
        return [optimizer.state_dict() for optimizer in self._distributed]

    def changing(self) -> Iterator[torch.Tensor]:
        """Tensors that training updates; nothing is gathered."""
        flats = [flat.own_Q for flat in self._flats]
        yield from (*self._stage.buffers(), *(flats or self._stage.parameters()))
        for inner in self._inner:
            for main, state in inner.state.items():
                yield main
                yield from (value for value in state.values() if torch.is_tensor(value))

    def set_step(self, step: float) -> None:
        """Set the steps that the optimizers count."""
        for inner in self._inner:
            _fill_empty_state(inner)
        for optimizer in self._distributed:
            settings = optimizer.state_dict()
            for group in settings["optimizer"]["param_groups"]:
                group["step"] = step
            optimizer.load_state_dict(settings)
        if self._sharded is not None:
            for state in self._sharded.inner.state.values():
                state["step"].fill_(step)

    def _entries(self) -> dict[str, Any]:
        """Entries of the sharded state dict, without parameters of flat tensors."""
        flat = {parameter for flat in self._flats for parameter in flat.parameters}
        entries = self._stage.sharded_state_dict().items()
        return {
            name: entry
            for name, entry in entries
            if not torch.is_tensor(entry.data) or entry.data not in flat
        }

    @torch.no_grad()
    def weight_blocks(self) -> Iterator[ShardedTensor]:
        """Blocks of all weights and buffers that this rank holds."""
        for values, entry in _by_tensor(self._entries()).items():
            yield from blocks_of(entry, entry.key, 0, values.numel(), values.view(-1))
        yield from self._flat_blocks()

    def _flat_blocks(self) -> Iterator[ShardedTensor]:
        """Blocks of this rank's ranges of sharded weights."""
        described = _by_tensor(self._stage.sharded_state_dict()) if self._flats else {}
        for flat in self._flats:
            copy = flat.groups.copies.rank()
            for own in flat.ranges():
                entry = described[own.parameter]
                values = flat.own_Q[own.place]
                yield from blocks_of(entry, entry.key, own.first, own.end, values, copy)

    @torch.no_grad()
    def optimizer_blocks(self) -> Iterator[ShardedTensor]:
        """This rank's blocks of its parameters' stored state."""
        described = _by_tensor(self._stage.sharded_state_dict())
        for parameter, first, end, state, copy in (*self._core_ranges(), *self._main_ranges()):
            if parameter in described:
                entry = described[parameter]
                for kind in _KINDS:
                    key = _STORED.format(kind, entry.key)
                    yield from blocks_of(entry, key, first, end, state[kind], copy)

    def _core_ranges(self) -> Iterator[_StateRange]:
        """Ranges that this rank updates in core's distributed optimizers."""
        for optimizer in self._distributed:
            for of_buffer in optimizer.gbuf_ranges:
                [buckets] = of_buffer.values()
                for parameter, own in (
                    item for bucket in buckets for item in bucket["param_map"].items()
                ):
                    state = optimizer._get_main_param_and_optimizer_states(parameter)
                    yield parameter, own["param"].start, own["param"].end, state, 0

    def _main_ranges(self) -> Iterator[_StateRange]:
        """Ranges that this rank updates of sharded weights."""
        for own_range in () if self._sharded is None else self._sharded.ranges:
            assert self._sharded is not None
            state = self._sharded.inner.state[own_range.main] | {"param": own_range.main}
            copy = own_range.flat.groups.copies.rank()
            yield own_range.own.parameter, own_range.own.first, own_range.own.end, state, copy


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


def join_settings(settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge settings of several optimizers; shared entries are equal."""
    joined: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for own in settings:
        inner = own["optimizer"]
        groups += [group for group in inner["param_groups"] if group not in groups]
        joined = own | {"optimizer": inner | {"param_groups": groups}}
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
