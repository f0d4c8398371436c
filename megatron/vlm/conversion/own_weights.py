"""Reading and writing of weights-only checkpoints a parameter at a time, for any split."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron.vlm.checkpoint.identity import CHECKPOINT_BACKEND, checkpoint_errors, identity_state
from megatron.vlm.checkpoint.run_folders import begin_checkpoint, publish_checkpoint
from megatron.vlm.checkpoint.stored_blocks import StoredTensors
from megatron.vlm.conversion.tensor_map import Parameter
from omnibal.model.adapter_settings import AdapterConfig
from omnibal.model.config import ModelConfig

WEIGHTS_STEP = 0
# Core stores the extra state of a head even if it is tied to the embedding.
_HEAD_STATE = "head._extra_state/shard_0_1"
_LINEARS = (
    *("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight"),
    *("in_proj.weight", "out_proj.weight", "eh_proj.weight"),
)


def write_weights(
    directory: Path,
    model: ModelConfig,
    dtypes: Mapping[str, torch.dtype],
    parameters: Sequence[Parameter],
    read: Callable[[Parameter], torch.Tensor],
    adapters: AdapterConfig | None = None,
) -> Path:
    """Write a weights-only checkpoint at step 0; return its folder.

    Args:
        dtypes: type of each tensor, by checkpoint key.
        read: function that returns a parameter's values.
    """
    path = begin_checkpoint(directory, WEIGHTS_STEP)
    # Copy nothing ahead, so that one parameter is in memory at a time.
    writer = dcp.FileSystemWriter(path, per_thread_copy_ahead=0)
    dcp.save(
        {}, storage_writer=writer, planner=_WritePlanner(dtypes, parameters, read), no_dist=True
    )
    common = {
        "step": WEIGHTS_STEP,
        "training_state": {},
        "omnibal": identity_state(model, data=None, options=None, adapters=adapters),
    }
    torch.save(common, path / COMMON_STATE_FNAME)
    save_config(CheckpointingConfig(*CHECKPOINT_BACKEND), str(path))
    return publish_checkpoint(directory, WEIGHTS_STEP)


class StoredWeights:
    """Reader of the parameters in a checkpoint's folder, in their stored types."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with checkpoint_errors(path):
            self._stored = StoredTensors(path)

    def dtype(self, parameter: Parameter) -> torch.dtype:
        with checkpoint_errors(self._path):
            return self._stored.dtype(parameter.key)

    def read_parameters(self, parameters: Sequence[Parameter]) -> list[torch.Tensor]:
        values = [
            torch.empty(parameter.shape, dtype=self.dtype(parameter)) for parameter in parameters
        ]
        with checkpoint_errors(self._path):
            self._stored.read_blocks(map(_make_block, parameters, values))
        return values


def _make_block(parameter: Parameter, values: torch.Tensor) -> ShardedTensor:
    # Layers are stacked along a first axis.
    layers = [] if parameter.layers is None else [(0, parameter.layer, parameter.layers)]
    return ShardedTensor.from_rank_offsets(
        parameter.key,
        values,
        *layers,
        prepend_axis_num=len(layers),
        allow_shape_mismatch=True,  # training pads words and heads
    )


class _WritePlanner(DefaultSavePlanner):
    """Save planner with one item per parameter, which is read when it is written."""

    def __init__(
        self,
        dtypes: Mapping[str, torch.dtype],
        parameters: Sequence[Parameter],
        read: Callable[[Parameter], torch.Tensor],
    ) -> None:
        super().__init__(flatten_state_dict=False)
        self._dtypes, self._parameters, self._read = dtypes, parameters, read
        self._by_place: dict[tuple[str, torch.Size], Parameter] = {}

    def create_local_plan(self) -> SavePlan:
        items = []
        for parameter in self._parameters:
            dtype = self._dtypes[parameter.key]
            block = _make_block(parameter, torch.empty(parameter.shape, dtype=dtype, device="meta"))
            offsets = torch.Size(block.global_offset)
            sizes = torch.Size((*(1,) * block.prepend_axis_num, *parameter.shape))
            self._by_place[parameter.key, offsets] = parameter
            items.append(
                WriteItem(
                    index=MetadataIndex(parameter.key, offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                        properties=TensorProperties(dtype=dtype),
                        size=torch.Size(block.global_shape),
                    ),
                )
            )
            # Core's linears store an extra state, empty here.
            if parameter.key.endswith(_LINEARS) and ".experts." not in parameter.key:
                shard = f"shard_{parameter.layer or 0}_{parameter.layers or 1}"
                module = parameter.key.removesuffix(".weight")
                index = MetadataIndex(f"{module}._extra_state/{shard}")
                items.append(WriteItem(index=index, type=WriteItemType.BYTE_IO))
        items.append(WriteItem(index=MetadataIndex(_HEAD_STATE), type=WriteItemType.BYTE_IO))
        return SavePlan(items)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            nothing = io.BytesIO()
            torch.save([None], nothing)
            return nothing
        parameter = self._by_place[write_item.index.fqn, write_item.index.offset]
        values = self._read(parameter)
        return values if parameter.layer is None else values.unsqueeze(0)
