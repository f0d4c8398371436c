"""One micro-batch as tensors. A pipeline stage has only the fields that its units need.

Shapes: T tiles, C channels, P pixels per side; Y patches of X values; for frames C clips, B mel
bins, F frames; S packed tokens, M image tokens, N audio tokens, F image features, L loss positions,
A answers. Sizes of a shared pack are those of this rank's share.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.vlm.inputs.encoder_share import EncoderPass, StepShares
from megatron.vlm.inputs.pack_share import PackShare, Sharing
from omnibal.data.lengths import Lengths
from omnibal.data.native_resolution import Grid
from omnibal.model.config import ModelConfig
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.stage_units import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchShape:
    """Sizes of a micro-batch, or of one rank's share of a pack."""

    tiles: int
    tokens: int  # of all samples, without padding. A share may have 0.
    context: int = 1  # context-parallel ranks that share the pack
    clips: int = 0
    image_tokens: int = 0

    @classmethod
    def of_rows(cls, packs: ScheduledPacks, rows: np.ndarray) -> list["MicroBatchShape"]:
        """Return planned shapes of full packs, `rows` of the schedule."""
        names = ("tiles", "clips", "image_tokens", "tokens")
        columns = (packs.column(name)[rows].tolist() for name in names)
        return [cls(**dict(zip(names, sizes, strict=True))) for sizes in zip(*columns, strict=True)]

    @classmethod
    def of_shares(
        cls, packs: ScheduledPacks, lengths: Lengths, rows: np.ndarray, sharing: Sharing
    ) -> list["MicroBatchShape"]:
        """Return planned shapes of this rank's parts of packs, `rows` of the schedule."""
        shapes = cls.of_rows(packs, rows)
        for place, row in enumerate(rows.tolist()):
            share = sharing.share(packs, lengths, row)
            if share is not None:
                names = ("tiles", "clips", "image_tokens")
                items = {name: len(share.own_items(name)) for name in names}
                shapes[place] = cls(**items, tokens=share.tokens, context=share.context)
        return shapes

    def __str__(self) -> str:
        shared = f", shared by {self.context} ranks" if self.context > 1 else ""
        clips = f", {self.clips} clips" if self.clips else ""
        images = f", {self.image_tokens} image tokens" if self.image_tokens else ""
        return f"{self.tiles} tiles{clips}{images} and {self.tokens} tokens{shared}"

    def padded_tokens(self, multiple: int) -> int:
        """Return tokens padded to a multiple > 0, so that ranks without tokens join collectives."""
        return max(self.tokens + -self.tokens % multiple, multiple)


@dataclass(kw_only=True)
class Borders(PackedSeqParams):
    """Core's cumulative lengths on the device, with copies on the host, for loops."""

    host_q: torch.Tensor
    host_kv: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """A pack, or a rank's share of it: counts, on every stage, and tensors of the stage's units."""

    tiles: int
    clips: int = 0
    image_tokens: int = 0
    tokens: int
    segment_tokens: tuple[int, ...]  # tokens of each sample, or piece of a share, in order
    level: int = 0  # level of the pack, which selects recomputed layers
    loss_weight: float = 0.0  # planned sum of loss weights, times a share's fraction of the tokens
    share: PackShare | None = None  # this rank's share, or None if it has the full pack
    pixels_TCPP: torch.Tensor | None = None  # for the vision embed
    image_grids: tuple[Grid, ...] = ()  # of images and videos in order, for units of their encoder
    # Patch values, float32, in the processor's order (cell, channel, frame, row, column).
    patches_YX: torch.Tensor | None = None
    # Time, row and column of every token in its sample, int64, for layers with sectioned RoPE.
    rope_positions_3S: torch.Tensor | None = None
    token_ids_S: torch.Tensor | None = None  # for the language embed
    image_positions_M: torch.Tensor | None = None  # for the language embed and deepstack layers
    frames_CBF: torch.Tensor | None = None  # log-mel frames of clips, float32, for the audio embed
    audio_positions_N: torch.Tensor | None = None  # for the language embed
    # In shared packs: indices of own image features in sending order, int64, and counts by rank.
    sent_features_F: torch.Tensor | None = None
    feature_counts: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # sent, received
    labels_L: torch.Tensor | None = None  # next token at each loss position, for the head
    loss_positions_L: torch.Tensor | None = None  # positions with a loss on the next token (head)
    loss_weights_L: torch.Tensor | None = None  # float32, for the head
    drop_path_keys_T: torch.Tensor | None = None  # random number of each tile, int64, on the host
    unreadable: tuple[str, ...] = ()  # errors of unreadable samples: blank inputs, masked loss
    answer_positions_A: torch.Tensor | None = None  # positions whose next token is generated (head)

    @classmethod
    def empty(cls, model: ModelConfig, device: torch.device, *, answers: bool) -> "MicroBatch":
        """Return a pack without samples, with all stages' fields for either answers or a loss."""
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        fields: dict[str, Any] = {"answer_positions_A": nothing}
        if not answers:
            fields = {"loss_positions_L": nothing, "labels_L": nothing}
            fields["loss_weights_L"] = torch.zeros(0, device=device)
        for name, (feature, _, shape) in encoder_inputs(model).items():
            fields[name] = torch.zeros((0, *shape), device=device)
            places = "audio_positions_N" if feature == "clips" else "image_positions_M"
            fields[places] = nothing
        if model.language.rope_sections is not None:
            fields["rope_positions_3S"] = nothing.expand(3, 0)
        return cls(tiles=0, tokens=0, segment_tokens=(), token_ids_S=nothing, **fields)

    @property
    def shape(self) -> MicroBatchShape:
        """Return the sizes that determine the tensors sent between stages."""
        context = 1 if self.share is None else self.share.context
        return MicroBatchShape(
            tiles=self.tiles,
            clips=self.clips,
            image_tokens=self.image_tokens,
            tokens=self.tokens,
            context=context,
        )

    def to(self, device: torch.device) -> "MicroBatch":
        """Return a copy on `device`, but drop-path keys on the host. Asynchronous if pinned."""
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "MicroBatch":
        return self.map_tensors(torch.Tensor.pin_memory)

    def for_units(self, units: Stage) -> "MicroBatch":
        """Return a copy without encoder inputs (by far the largest) that `units` do not embed."""
        absent = [name for name, unit in EMBEDDING_UNITS.items() if not units.holds(unit)]
        nothing: dict[str, Any] = dict.fromkeys(absent)
        return replace(self, **nothing)

    def split_items(self, feature: str, max_items: int) -> "list[MicroBatch]":
        """Return one or more parts: each at most `max_items` of `feature`, or one larger image."""
        if feature == "image_tokens":
            return self._split_images(max_items)
        count, parts = vars(self)[feature], list[MicroBatch]()
        tensors = {name: vars(self)[name] for name in ITEM_FIELDS[feature]}
        for start in range(0, max(count, 1), max_items):
            own = slice(start, min(start + max_items, count))
            changed: dict[str, Any] = {feature: own.stop - own.start}
            changed |= {name: tensor[own] for name, tensor in tensors.items() if tensor is not None}
            parts.append(replace(self, **changed))
        return parts

    def _split_images(self, max_cells: int) -> "list[MicroBatch]":
        """Split between images or videos: attention needs a full image or frame group."""
        assert self.patches_YX is not None, "the stage embeds images"
        per_cell = len(self.patches_YX) // max(self.image_tokens, 1)
        groups: list[list[Grid]] = [[]]
        for grid in self.image_grids:
            patches = sum(earlier.patches for earlier in groups[-1])
            if groups[-1] and patches + grid.patches > max_cells * per_cell:
                groups.append([])
            groups[-1].append(grid)
        sizes = [sum(grid.patches for grid in grids) for grids in groups]
        parts = []
        for grids, size, own_YX in zip(groups, sizes, self.patches_YX.split(sizes), strict=True):
            cells = size // max(per_cell, 1)
            changed = replace(self, image_tokens=cells, image_grids=tuple(grids), patches_YX=own_YX)
            parts.append(changed)
        return parts

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Have the allocator keep the tensors' memory until `stream` has used them."""
        for tensor in self._device_tensors().values():
            tensor.record_stream(stream)

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "MicroBatch":
        """Return a copy with changed tensors; drop-path keys are kept, as they stay on the host."""
        changed = {name: change(tensor) for name, tensor in self._device_tensors().items()}
        return replace(self, **changed)

    def _device_tensors(self) -> dict[str, torch.Tensor]:
        return {
            name: value
            for name, value in vars(self).items()
            if torch.is_tensor(value) and name != "drop_path_keys_T"
        }

    def packed_seq_params(self, device: torch.device, padding: int = 0) -> Borders:
        """Return cumulative lengths of samples, then padding, for attention and RoPE by sample."""
        segments = [*self.segment_tokens, padding] if padding else self.segment_tokens
        return borders_of(segments, segments, device)


# Tensors with a row per item (or patch), by feature. The first is the encoder's input.
ITEM_FIELDS = {
    "tiles": ("pixels_TCPP", "drop_path_keys_T"),
    "clips": ("frames_CBF",),
    "image_tokens": ("patches_YX",),
}
EMBEDDING_UNITS = {
    "pixels_TCPP": "vision embed",
    "patches_YX": "vision embed",
    "frames_CBF": "audio embed",
}


def encoder_inputs(model: ModelConfig) -> dict[str, tuple[str, int, tuple[int, ...]]]:
    """Return feature, rows per item and shape of a row of each encoder's inputs, by field."""
    inputs: dict[str, tuple[str, int, tuple[int, ...]]] = {}
    if model.takes_images:
        inputs["pixels_TCPP"] = "tiles", 1, (3, model.vision.image_size, model.vision.image_size)
    if model.images is not None:
        patches = model.images.positions_per_item
        inputs["patches_YX"] = "image_tokens", patches, (model.images.values_per_patch,)
    if model.takes_audio:
        inputs["frames_CBF"] = "clips", 1, (model.audio.mel_bins, model.audio.frames)
    return inputs


def borders_of(
    query_tokens: Sequence[int], key_tokens: Sequence[int], device: torch.device
) -> Borders:
    """Return cumulative lengths of query ranges, and of the keys that each range attends to."""
    queries, host_queries = _borders(query_tokens, device)
    keys, host_keys = queries, host_queries
    if key_tokens is not query_tokens:
        keys, host_keys = _borders(key_tokens, device)
    return Borders(
        qkv_format="thd",
        cu_seqlens_q=queries,
        cu_seqlens_kv=keys,
        host_q=host_queries,
        host_kv=host_keys,
        max_seqlen_q=max(query_tokens),
        max_seqlen_kv=max(key_tokens),
    )


def _borders(tokens: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cumulative lengths, on the device and on the host, int32 [ranges + 1]."""
    host = torch.tensor([0, *tokens]).cumsum(0).to(torch.int32)  # flash attention takes int32
    return host.to(device, non_blocking=True), host  # a blocking copy would wait for the stream


def join_items(batches: Sequence[MicroBatch]) -> MicroBatch:
    """Return a micro-batch without tokens with the items of all the given micro-batches."""
    fields: dict[str, torch.Tensor] = {}
    for name in (name for names in ITEM_FIELDS.values() for name in names):
        parts = [vars(batch)[name] for batch in batches]
        if all(part is not None for part in parts):
            fields[name] = torch.cat(parts)
    return MicroBatch(
        tiles=sum(batch.tiles for batch in batches),
        clips=sum(batch.clips for batch in batches),
        image_tokens=sum(batch.image_tokens for batch in batches),
        image_grids=tuple(grid for batch in batches for grid in batch.image_grids),
        tokens=0,
        segment_tokens=(),
        unreadable=tuple(error for batch in batches for error in batch.unreadable),
        **fields,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchStream:
    """Micro-batches of one step, with their planned shapes."""

    batches: Iterator[MicroBatch]  # passes of data-parallel encoders, then micro-batches
    shapes: Sequence[MicroBatchShape]  # planned shapes of the step's micro-batches; may be empty
    rows_are_full: bool = True  # whether all data-parallel ranks have equally many micro-batches
    encoding: StepShares | None = None  # assignment of items to data-parallel encoders, if any
    empty: MicroBatch | None = None  # appended to join the experts' exchanges of other ranks

    @classmethod
    def of(cls, batches: Sequence[MicroBatch]) -> "MicroBatchStream":
        """Return a stream of these micro-batches, with their own shapes as planned shapes."""
        return cls(batches=iter(batches), shapes=[batch.shape for batch in batches])

    def __len__(self) -> int:
        return len(self.shapes)

    def append_empty(self, slots: int, empty: MicroBatch) -> "MicroBatchStream":
        """Return a stream with `empty` appended until the step has `slots` micro-batches."""
        missing = max(slots - len(self), 0)
        return replace(self, shapes=[*self.shapes, *[empty.shape] * missing], empty=empty)

    def take_pass(self, planned: EncoderPass) -> MicroBatch:
        """Return the next encoder pass, without tokens. Raise ValueError if it is not `planned`."""
        batch = next(self.batches, None)
        shape = MicroBatchShape(tokens=0, **{"tiles": 0, planned.feature: planned.items})
        if batch is None or batch.shape != shape:
            raise ValueError(
                f"{'nothing' if batch is None else batch.shape} was read for a pass of {shape} of "
                f"the encoder {planned.encoder}; read the step's passes in order, before its "
                "micro-batches"
            )
        return batch

    def take(self, micro_batch: int) -> MicroBatch:
        """Return this micro-batch, which must be next. Raise ValueError if not as planned."""
        planned = self.shapes[micro_batch]
        if self.empty is not None and planned == self.empty.shape:
            return self.empty
        batch = next(self.batches, None)
        if batch is None:
            raise ValueError(
                f"the data ended before micro-batch {micro_batch} of a step of {len(self)}; read "
                "all packs that the plan has for this rank"
            )
        if batch.shape != planned:
            raise ValueError(
                f"micro-batch {micro_batch} of the step has {batch.shape}, and the plan has "
                f"{planned} for it; read the packs of the plan's own rows, in their order"
            )
        return batch
