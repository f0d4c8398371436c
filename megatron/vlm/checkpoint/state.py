"""A rank's saved weights and optimizer state, in the same format whether replicated or sharded.

Shapes: Q values of a rank's shard of a flat tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer

from megatron.vlm.checkpoint.stored_blocks import StoredTensors, blocks_of
from megatron.vlm.model.adapters import ADAPTERS
from megatron.vlm.model.sharded_weights import ParameterRange
from megatron.vlm.model.stage import VLMStage

_STATE_KINDS = ("param", "exp_avg", "exp_avg_sq")  # stored in float32 for each parameter
_STATE_KEY = "optimizer.state.{}.{}"  # of kind and parameter


class PartOptimizer(Protocol):
    """AdamW over a rank's ranges of sharded weights."""

    inner: torch.optim.AdamW
    mains: Mapping[ParameterRange, torch.Tensor]  # flat main weights, which key the state


# Optimizer of a replicated or a sharded stage.
Optimizer: TypeAlias = ChainedOptimizer | PartOptimizer
# Parameter, first and end of a range of its flat values, state by kind, and the replica's index.
_StateRange: TypeAlias = tuple[torch.nn.Parameter, int, int, Mapping[str, torch.Tensor], int]


class State:
    """Tensors of all stages of a rank, to save and to load."""

    def __init__(self, stages: Sequence[VLMStage], optimizers: Sequence[Optimizer | None]) -> None:
        self._stages = list(map(_StageState, stages, optimizers))

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return core's sharded state dict by stage, and joined settings as `optimizer` if any."""
        # Stage numbers are keys of this dict only: files have the tensors' own keys.
        state = {str(n): stage.sharded_state_dict() for n, stage in enumerate(self._stages)}
        settings = [own for stage in self._stages for own in stage.list_settings()]
        return state | ({"optimizer": join_settings(settings)} if settings else {})

    def changing_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that training updates."""
        return (tensor for stage in self._stages for tensor in stage.changing_tensors())

    def load_weights(self, stored: StoredTensors, *, adapters: bool = True) -> None:
        """Read weights and buffers from `stored`; skip adapters if `adapters` is false."""
        blocks = (block for stage in self._stages for block in stage.weight_blocks())
        stored.read_blocks(block for block in blocks if adapters or ADAPTERS not in block.key)

    def load_optimizer(self, stored: StoredTensors, settings: dict[str, Any]) -> None:
        """Read main weights and moments; of saved `settings` use the step, not learning rates."""
        groups = settings["optimizer"]["param_groups"]
        # A checkpoint from before the first step has no step counts.
        [step] = {group["step"] for group in groups if group.get("step") is not None} or {0}
        for stage in self._stages:
            stage.set_step(step)
        stored.read_blocks(block for stage in self._stages for block in stage.optimizer_blocks())


class _StageState:
    """State of a stage and of its optimizer, which stages may share.

    Replicated weights have core's distributed optimizers; sharded weights have an optimizer over
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
            # Core has a separate optimizer for expert-parallel parameters (`allreduce` is False).
            # Keep only optimizers that train parameters of this stage.
            of_experts = [
                not vars(parameter).get("allreduce", True)
                for parameter in stage.parameters()
                if parameter.requires_grad
            ]
            [dense, *experts] = optimizer.chained_optimizers
            self._distributed = [] if all(of_experts) else [dense]
            self._distributed += experts if any(of_experts) else []
        else:
            self._sharded = optimizer

    @property
    def _torch_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return torch's optimizers, none for a frozen stage."""
        sharded = [] if self._sharded is None else [self._sharded.inner]
        return [*(optimizer.optimizer for optimizer in self._distributed), *sharded]

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return replicated weights (`model`); ranges of sharded weights and state (`parts`)."""
        for inner in self._torch_optimizers:
            _fill_empty_state(inner)
        blocks = [*self._flat_blocks(), *self.optimizer_blocks()]
        return {"model": self._replicated_entries(), "parts": blocks}

    def list_settings(self) -> list[dict[str, Any]]:
        """Return param groups with step counts of optimizers with state, in core's format."""
        if self._sharded is None or not self._sharded.inner.state:
            return [optimizer.state_dict() for optimizer in self._distributed]
        inner = self._sharded.inner
        [step] = {state["step"].item() for state in inner.state.values()}
        groups = [
            {name: value for name, value in group.items() if name != "params"} | {"step": step}
            for group in inner.param_groups
        ]
        return [{"optimizer": {"param_groups": groups}}]

    def changing_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that training updates, without gathering weights."""
        flats = [flat.own_Q for flat in self._flats]
        yield from (*self._stage.buffers(), *(flats or self._stage.parameters()))
        for inner in self._torch_optimizers:
            for main, state in inner.state.items():
                yield main
                yield from (value for value in state.values() if torch.is_tensor(value))

    def set_step(self, step: float) -> None:
        for inner in self._torch_optimizers:
            _fill_empty_state(inner)
            if _counts_by_parameter(inner):
                for state in inner.state.values():
                    state["step"].fill_(step)
            else:
                for group in inner.param_groups:
                    group["step"] = int(step)

    def _replicated_entries(self) -> dict[str, Any]:
        """Return core's sharded state dict without sharded parameters."""
        flat = {parameter for flat in self._flats for parameter in flat.parameters}
        entries = self._stage.sharded_state_dict().items()
        return {
            name: entry
            for name, entry in entries
            if not torch.is_tensor(entry.data) or entry.data not in flat
        }

    @torch.no_grad()
    def weight_blocks(self) -> Iterator[ShardedTensor]:
        """Yield blocks of this rank's weights and buffers."""
        for values, entry in _by_tensor(self._replicated_entries()).items():
            yield from blocks_of(entry, entry.key, 0, values.numel(), values.view(-1))
        yield from self._flat_blocks()

    def _flat_blocks(self) -> Iterator[ShardedTensor]:
        """Yield blocks of this rank's ranges of sharded weights."""
        entries = _by_tensor(self._stage.sharded_state_dict()) if self._flats else {}
        for flat in self._flats:
            copy = flat.groups.copies.rank()
            for own in flat.ranges():
                entry = entries[own.parameter]
                values = flat.own_Q[own.place]
                yield from blocks_of(entry, entry.key, own.first, own.end, values, copy)

    @torch.no_grad()
    def optimizer_blocks(self) -> Iterator[ShardedTensor]:
        """Yield blocks of this rank's ranges of optimizer state."""
        entries = _by_tensor(self._stage.sharded_state_dict())
        for parameter, first, end, state, copy in self._state_ranges():
            if parameter in entries:  # the optimizer may have parameters of other stages too
                entry = entries[parameter]
                for kind in _STATE_KINDS:
                    key = _STATE_KEY.format(kind, entry.key)
                    yield from blocks_of(entry, key, first, end, state[kind], copy)

    def _state_ranges(self) -> Iterator[_StateRange]:
        """Yield the parameter ranges that this rank updates, with their state."""
        for optimizer in self._distributed:
            for of_buffer in optimizer.gbuf_ranges:
                [buckets] = of_buffer.values()
                for parameter, own in (
                    item for bucket in buckets for item in bucket["param_map"].items()
                ):
                    state = optimizer._get_main_param_and_optimizer_states(parameter)
                    yield parameter, own["param"].start, own["param"].end, state, 0
        if self._sharded is not None:
            for own, main in self._sharded.mains.items():
                state = self._sharded.inner.state[main] | {"param": main}
                yield own.parameter, own.first, own.end, state, own.flat.groups.copies.rank()


def _by_tensor(model_state: Mapping[str, Any]) -> dict[torch.Tensor, Any]:
    return {
        entry.data: entry
        for entry in model_state.values()
        if isinstance(entry, ShardedTensor | ShardedTensorFactory)
    }


def join_settings(settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one state dict with all distinct param groups; other entries are from the last."""
    joined: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for own in settings:
        inner = own["optimizer"]
        groups += [group for group in inner["param_groups"] if group not in groups]
        joined = own | {"optimizer": inner | {"param_groups": groups}}
    return joined


def _fill_empty_state(inner: torch.optim.Optimizer) -> None:
    """Make zero moments and step counts if absent, to save them or load into them."""
    for group in inner.param_groups:
        for parameter in group["params"]:
            state = inner.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
                if _counts_by_parameter(inner):
                    # A fused AdamW needs it on the parameter's device.
                    device = parameter.device if group["fused"] else "cpu"
                    state["step"] = torch.zeros((), device=device)


def _counts_by_parameter(inner: torch.optim.Optimizer) -> bool:
    # Transformer Engine's and Apex's optimizers count steps per group.
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW)
