"""Dataset of the plan's packs. A stage loads only the fields that its units need.

Shapes: T tiles, C channels, P pixels per side; for frames C clips, B mel bins, F frames; S packed
tokens, M image tokens, N audio tokens, F image features, L loss positions; Y patches of X values.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import torch

from megatron.vlm.inputs.augment import Purpose, compress_as_jpeg, jpeg_qualities, tile_keys
from megatron.vlm.inputs.batch import EMBEDDING_UNITS, MicroBatch, encoder_inputs
from megatron.vlm.inputs.native_images import (
    ImageNeeds,
    NativeImages,
    blank_text,
    list_native_images,
)
from megatron.vlm.inputs.pack_share import PackShare, Sharing, feature_route, samples_of_items
from megatron.vlm.inputs.read_ahead import Dataset, read_ahead
from megatron.vlm.inputs.reader import (
    SampleReader,
    UnreadableFile,
    check_count,
    check_frame_count,
    normalize_tiles,
    shown_frames,
)
from omnibal.base.errors import UserError
from omnibal.data.chat import EncodedSample, encode_sample
from omnibal.data.lengths import Lengths
from omnibal.data.sample import Sample
from omnibal.packing.cut import Pieces, keep_samples_whole
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.stage_units import Stage


class LossWeighting(StrEnum):
    """Weight of a loss token in the global batch. All except `sum` divide by the sum of weights.

    Names of HBP (arXiv 2503.07680, table 10) are accepted: Ave-Token is `token`, Sample-Mean is
    `sample`, Token-Mean is `micro-batch`, Sum is `sum`.
    """

    TOKEN = "token"  # equal weights: the mean over loss tokens of the global batch
    SAMPLE = "sample"  # 1 / n for a sample with n loss tokens: the mean of sample means
    SQRT = "sqrt"  # 1 / sqrt(n), between `token` and `sample`
    MICRO_BATCH = "micro-batch"  # 1 / n for a micro-batch with n loss tokens: depends on packing
    SUM = "sum"  # as `token`, but undivided: gradients grow with the global batch

    @classmethod
    def _missing_(cls, value: object) -> "LossWeighting | None":
        names = {"ave-token": "token", "sample-mean": "sample", "token-mean": "micro-batch"}
        name = str(value).lower()
        name = names.get(name, name)
        return next((member for member in cls if member.value == name), None)


class OnBadSample(StrEnum):
    """Treatment of a sample with an unreadable image, video or recording."""

    STOP = "stop"
    SKIP = "skip"  # mask its loss, and keep its tokens: all stages expect the planned shape


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchOptions:
    """Options of micro-batches that are not in the plan."""

    seed: int = 0  # seed of all random draws; at least 0
    loss_weighting: LossWeighting = LossWeighting.TOKEN
    on_bad_sample: OnBadSample = OnBadSample.STOP
    augment: bool = False  # whether to augment samples of sources that ask for it
    drop_path: bool = False  # whether vision layers need random numbers


_DEFAULT_OPTIONS = MicroBatchOptions()
_ITEM_FEATURES = ("tiles", "clips", "image_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Draft:
    """A sample of a pack, as read by this rank and stage."""

    sample: Sample
    tiles: int  # planned number of tiles; `clips` and `tokens` are planned too
    clips: int
    tokens: int
    images: NativeImages  # images and videos at native resolution
    own: Mapping[str, range]  # items that this rank encodes, by feature
    values: Mapping[str, np.ndarray]  # own `encoder_inputs` by field; zeros if unreadable
    unreadable: str | None  # error of an unreadable file, if one was found


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _OwnPart:
    """This rank's pieces and items of a pack."""

    pieces: Pieces
    items: Mapping[str, range]  # by feature; image tokens of complete images or frame groups
    share: PackShare | None  # share of the pack, or None if this rank has the full pack


class PackDataset:
    """Micro-batches of one data-parallel rank for one pipeline stage.

    Item i is the MicroBatch of row `rows[i]`. UserError if it cannot be loaded.

    Args:
        sharing: the rank that reads shared packs, or None if no packs are shared.
    """

    def __init__(
        self,
        reader: SampleReader,
        scheduled: ScheduledPacks,
        lengths: Lengths,
        rows: np.ndarray,
        stage: Stage,
        options: MicroBatchOptions = _DEFAULT_OPTIONS,
        sharing: Sharing | None = None,
    ) -> None:
        self.reader = reader
        self.scheduled = scheduled
        self.lengths = lengths
        self.rows = rows
        self.stage = stage
        self.options = options
        self.sharing = sharing
        self._takes_tiles, self._native = reader.model.takes_images, reader.model.images
        self._needs = ImageNeeds.of_stage(reader.model, stage)
        self._embedded = {
            name: rows
            for name, rows in encoder_inputs(reader.model).items()
            if stage.holds(EMBEDDING_UNITS[name])
        }
        """`encoder_inputs` that the stage embeds."""

    def keys(self) -> range:
        return range(len(self.rows))

    def __getitem__(self, item: int) -> MicroBatch:
        row, sharing = int(self.rows[item]), self.sharing
        share = None if sharing is None else sharing.share(self.scheduled, self.lengths, row)
        if share is not None:
            items = {name: share.own_items(name) for name in _ITEM_FEATURES}
            return self._load(row, _OwnPart(pieces=share.own_pieces, items=items, share=share))
        items = {name: range(self.scheduled.column(name)[row]) for name in _ITEM_FEATURES}
        pieces = keep_samples_whole(self.lengths.tokens[self.scheduled.packs[row]])
        return self._load(row, _OwnPart(pieces=pieces, items=items, share=None))

    def load_items(self, row: int, items: Mapping[str, range]) -> MicroBatch:
        """Return items of a pack, by feature, as a micro-batch without tokens; raises UserError."""
        no_pieces = keep_samples_whole(np.zeros(0, np.int64))
        all_items = {**dict.fromkeys(_ITEM_FEATURES, range(0)), **items}
        return self._load(row, _OwnPart(pieces=no_pieces, share=None, items=all_items))

    def _load(self, row: int, own: _OwnPart) -> MicroBatch:
        indices, epoch = self.scheduled.packs[row], int(self.scheduled.epoch[row])
        lengths = self.lengths
        sample_items = {
            name: lengths.column(name)[indices].astype(np.int64) for name in _ITEM_FEATURES
        }
        fields: dict[str, Any] = {name: len(items) for name, items in own.items.items()}
        if self._takes_tiles and self.stage.layers("vision") and self.options.drop_path:
            # Keys of all tiles of the pack, then this rank's: any division draws equal numbers.
            places = lengths.annotation_indices(indices).tolist()
            keys_T = np.concatenate(
                [
                    tile_keys(Purpose.DROP_PATH, self.options.seed, epoch, place, tiles)
                    for place, tiles in zip(places, sample_items["tiles"].tolist(), strict=True)
                ]
            )[own.items["tiles"].start : own.items["tiles"].stop]
            fields["drop_path_keys_T"] = torch.from_numpy(keys_T.view(np.int64))
        drafts = {
            position: self._read_draft(int(indices[position]), items, epoch)
            for position, items in self._select_samples(own, sample_items).items()
        }
        for name, (_, _, shape) in self._embedded.items():
            values = [draft.values[name] for draft in drafts.values() if name in draft.values]
            empty = np.zeros((0, *shape), np.float32)  # np.concatenate takes no empty list
            fields[name] = torch.from_numpy(np.concatenate([empty, *values]))
        if self._needs.grids:
            grids = (grid for draft in drafts.values() for grid in draft.images.grids)
            fields["image_grids"] = tuple(grids)
        is_at_end = self.stage.holds("language embed") or self.stage.holds("head")
        if is_at_end or self._needs.places or self._needs.rope:
            image_items = sample_items["tiles" if self._native is None else "image_tokens"]
            fields |= self._text_fields(drafts, own, image_items)
        # A share counts by its tokens: stages without the text cannot count its loss tokens.
        loss_tokens = lengths.loss_tokens[indices]
        weights = sample_loss_weights(loss_tokens, self.options.loss_weighting)
        fraction = own.pieces.tokens.sum() / max(lengths.tokens[indices].sum(), 1)
        return MicroBatch(
            tokens=int(own.pieces.tokens.sum()),
            segment_tokens=tuple(own.pieces.tokens.tolist()),
            level=int(self.scheduled.level[row]),
            loss_weight=float((weights * loss_tokens).sum() * fraction),
            share=own.share,
            unreadable=tuple(_list_errors(drafts.values())),
            **fields,
        )

    def _select_samples(
        self, own: _OwnPart, sample_items: Mapping[str, np.ndarray]
    ) -> dict[int, dict[str, range]]:
        """Return the samples to read, by position in the pack, with this rank's items of each."""
        stage, selected = self.stage, set[int]()
        with_items = {
            name: samples_of_items(items, sample_items[name]) for name, items in own.items.items()
        }
        # When skipping bad samples, the first stage reports all unreadable files.
        reports = self._skips and (stage.holds("vision embed") or stage.holds("audio embed"))
        if reports or stage.holds("vision embed"):
            selected |= set(with_items["tiles"])
        if reports or stage.holds("audio embed"):
            selected |= set(with_items["clips"])
        # The route of an image's features depends on its sample's image token positions.
        if self._needs.grids or self._needs.places:
            selected |= set(with_items["image_tokens"])
        in_pieces = own.pieces.sample.tolist()
        if self._needs.places or self._needs.rope:
            selected |= {sample for sample in in_pieces if sample_items["image_tokens"][sample]}
        if stage.holds("language embed"):
            selected |= {*in_pieces, *with_items["tiles"]}
        if stage.holds("head"):
            # 1/n of a micro-batch needs the loss tokens of the full pack.
            by_pack = self.options.loss_weighting is LossWeighting.MICRO_BATCH
            selected |= set(range(len(sample_items["tiles"])) if by_pack else in_pieces)
        return {
            position: {
                name: _items_of_sample(items, sample_items[name], position)
                for name, items in own.items.items()
            }
            for position in sorted(selected)
        }

    def _read_draft(self, index: int, own: Mapping[str, range], epoch: int) -> _Draft:
        """Read one sample, with its images and recordings if the stage embeds or checks them."""
        place = int(self.lengths.annotation_indices(np.array([index]))[0])
        sample = self.reader.annotations[place]
        tiles, clips = (int(self.lengths.column(name)[index]) for name in ("tiles", "clips"))
        cells = self.lengths.pieces_of_images(np.array([index]))[0].tolist()
        images = list_native_images(self.reader, sample, cells, own["image_tokens"])
        values, unreadable = dict[str, np.ndarray](), images.unreadable
        try:
            if self._takes_tiles:
                pixels = self._read_tiles(sample, tiles, own["tiles"])
                if sample.augment and self.options.augment:
                    keys = tile_keys(Purpose.JPEG_QUALITY, self.options.seed, epoch, place, tiles)
                    keys = keys[own["tiles"].start : own["tiles"].stop]
                    pixels = list(map(compress_as_jpeg, pixels, jpeg_qualities(keys)))
                values["pixels_TCPP"] = normalize_tiles(pixels, self.reader.model.vision.image_size)
            if unreadable is None:
                values |= self._read_patches(sample, images)
            values |= self._read_clips(sample, clips, own["clips"])
        except UnreadableFile as error:
            unreadable = str(error)
        if unreadable is not None and not self._skips:
            raise UserError(f"{unreadable}, or go on without it: --on-bad-sample skip")
        # Blank even if only one file is unreadable: the loss is masked for the full sample.
        if unreadable is not None:
            values = {
                name: np.zeros((len(own[feature]) * rows, *shape), np.float32)
                for name, (feature, rows, shape) in self._embedded.items()
            }
        return _Draft(
            sample=sample,
            tiles=tiles,
            clips=clips,
            tokens=int(self.lengths.tokens[index]),
            images=images,
            own=own,
            values=values,
            unreadable=unreadable,
        )

    def _read_tiles(self, sample: Sample, tiles: int, own_tiles: range) -> list[np.ndarray]:
        """Return own tiles to embed. UnreadableFile for them, and for any image when skipping."""
        embeds = self.stage.holds("vision embed")
        if embeds and len(own_tiles) == tiles:
            pixels = self.reader.tiles(sample)
            check_frame_count(sample.shown(self.reader.model.tiling), tiles)
            check_count(len(pixels), tiles, "tiles", sample)
            return pixels
        if self._finds_unreadable:
            # The head masks the loss of samples blanked by encoders. No rank sends it the verdict:
            # all ranks decode the same files.
            self.reader.check_images(sample, tiles)
        if not (embeds and own_tiles):
            return []
        check_frame_count(sample.shown(self.reader.model.tiling), tiles)
        check_count(sum(self.reader.tiles_per_image(sample)), tiles, "tiles", sample)
        return self.reader.some_tiles(sample, own_tiles)

    def _read_patches(self, sample: Sample, images: NativeImages) -> dict[str, np.ndarray]:
        """Return own patches by field. UnreadableFile as in `_read_tiles`, for native images."""
        if self._native is None:
            return {}
        embeds = self.stage.holds("vision embed")
        if self._finds_unreadable and not (embeds and images.is_whole):
            # All ranks with parts of the sample decode all its files, and agree without messages.
            times = [range(item.grid.times) for item in images.shown]
            for _ in shown_frames(sample, self._native, times):
                pass
        patches = self.reader.patches(sample, images.shown, images.times) if embeds else None
        return {} if patches is None else {"patches_YX": patches.numpy()}

    def _read_clips(self, sample: Sample, clips: int, own_clips: range) -> dict[str, np.ndarray]:
        """Return own clips by field. UnreadableFile as in `_read_tiles`, for recordings."""
        if not sample.recordings:
            return {}
        embeds = self.stage.holds("audio embed")
        if embeds or self._finds_unreadable:
            check_count(sum(self.reader.clips_per_recording(sample)), clips, "clips", sample)
        if self._finds_unreadable and not (embeds and len(own_clips) == clips):
            self.reader.check_recordings(sample)
        return {"frames_CBF": self.reader.clips(sample, own_clips)} if embeds else {}

    @property
    def _skips(self) -> bool:
        return self.options.on_bad_sample is OnBadSample.SKIP

    @property
    def _finds_unreadable(self) -> bool:
        """Return whether this stage must find all unreadable files of its samples."""
        units = ("vision embed", "audio embed", "head")
        return self._skips and any(self.stage.holds(name) for name in units)

    def _text_fields(
        self, drafts: Mapping[int, _Draft], own: _OwnPart, image_items: np.ndarray
    ) -> dict[str, Any]:
        """Return the fields made of token ids. `image_items` is by sample, int64 [samples]."""
        texts = {}
        for position, draft in drafts.items():
            encoded = self._encode_text(draft)
            check_count(len(encoded.token_ids), draft.tokens, "tokens", draft.sample)
            if draft.unreadable is not None:
                encoded = replace(encoded, loss_mask=np.zeros_like(encoded.loss_mask))
            texts[position] = encoded
        fields: dict[str, Any] = {}
        # Samples that this stage does not read have no images: -1 is no token's id.
        ids = [
            texts[sample].token_ids[first:stop] if sample in texts else np.full(stop - first, -1)
            for sample, first, stop in _list_pieces(own.pieces)
        ]
        token_ids_S = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *ids]))
        embeds = self.stage.holds("language embed")
        if embeds or self._needs.places:
            fields["image_positions_M"] = self.reader.image_positions(token_ids_S)
        if embeds:
            fields["token_ids_S"] = token_ids_S
            fields["audio_positions_N"] = self.reader.audio_positions(token_ids_S)
        if self._needs.rope:
            fields["rope_positions_3S"] = self._rope_positions(drafts, texts, own.pieces)
        if "image_positions_M" in fields and own.share is not None and image_items.any():
            # Image features are sent to the ranks with their tokens.
            places = dict[int, np.ndarray]()
            for position, text in texts.items():
                image_positions = self.reader.image_positions(torch.from_numpy(text.token_ids))
                assert image_positions is not None, "the model takes images"
                places[position] = image_positions.numpy()
            tower = self._native or self.reader.model.vision
            per_item = tower.tokens_per_item
            order_F, by_rank = feature_route(
                own.share, tower.feature, image_items, places, per_item
            )
            fields |= {"sent_features_F": torch.from_numpy(order_F), "feature_counts": by_rank}
        if self.stage.holds("head"):
            # A divided sample has one weight, and a piece's last label is the next piece's token.
            counts = np.array([text.loss_mask.sum() for text in texts.values()], np.int64)
            sample_weights = sample_loss_weights(counts, self.options.loss_weighting)
            weight_of = dict(zip(texts, sample_weights, strict=True))
            positions, labels = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
            weights, start = [np.zeros(0, np.float32)], 0
            for sample, first, stop in _list_pieces(own.pieces):
                # Position i predicts token i + 1. The mask is False at a sample's first token, so
                # no prediction crosses samples.
                learned = np.flatnonzero(texts[sample].loss_mask[first + 1 : stop + 1])
                positions.append(start + learned)
                labels.append(texts[sample].token_ids[first + 1 : stop + 1][learned])
                weights.append(np.full(len(learned), weight_of[sample], np.float32))
                start += stop - first
            predicts = self.reader.model.language.prediction_layers > 0
            fields |= {"token_ids_S": token_ids_S} if predicts else {}
            fields["loss_positions_L"] = torch.from_numpy(np.concatenate(positions))
            fields["labels_L"] = torch.from_numpy(np.concatenate(labels))
            fields["loss_weights_L"] = torch.from_numpy(np.concatenate(weights))
        return fields

    def _rope_positions(
        self, drafts: Mapping[int, _Draft], texts: Mapping[int, EncodedSample], pieces: Pieces
    ) -> torch.Tensor:
        """Return RoPE positions, int64 [3, S]; text positions for samples that are not read."""
        parts_3S = [np.zeros((3, 0), np.int64)]
        for sample, first, stop in _list_pieces(pieces):
            sample_3S = np.broadcast_to(np.arange(stop), (3, stop))
            if sample in texts and self._native is not None:
                shown = drafts[sample].images.shown
                sample_3S = self.reader.rope_positions(texts[sample].token_ids, shown)
            parts_3S.append(sample_3S[:, first:stop])
        return torch.from_numpy(np.concatenate(parts_3S, axis=1))

    def _encode_text(self, draft: _Draft) -> EncodedSample:
        blank_cells, shown = draft.images.blank_cells, draft.images.shown
        if blank_cells is not None:
            return blank_text(blank_cells, draft.tokens, self.reader)
        try:
            return self.reader.encode(draft.sample, draft.tiles, draft.clips, shown)
        except UnreadableFile:
            if not self._skips:
                raise
        # Unreadable samples are blank in every field, so the first image may take all planned tiles
        # and the first recording all clips.
        return encode_sample(
            draft.sample,
            _all_of_first(draft.tiles, len(draft.sample.images)),
            self.reader.model,
            self.reader.tokenizer,
            _all_of_first(draft.clips, len(draft.sample.recordings)),
        )


def _all_of_first(items: int, files: int) -> list[int]:
    return [items, *[0] * (files - 1)] if files else []


def _items_of_sample(own: range, sample_items: np.ndarray, position: int) -> range:
    """Intersect a range of the pack's items with one sample; numbers count within the sample."""
    start, count = int(sample_items[:position].sum()), int(sample_items[position])
    first = min(max(own.start - start, 0), count)
    return range(first, max(min(own.stop - start, count), first))


def _list_errors(drafts: Iterable[_Draft]) -> Iterator[str]:
    """Yield errors of unreadable samples. A divided sample reports on its first item's rank."""
    for draft in drafts:
        items = draft.own["image_tokens" if draft.images.shown else "clips"]
        items = draft.own["tiles"] if draft.tiles else items
        if draft.unreadable is not None and items and items.start == 0:
            yield draft.unreadable


def _list_pieces(pieces: Pieces) -> Iterator[tuple[int, int, int]]:
    """Yield sample, first token and end token of every piece."""
    return zip(pieces.sample.tolist(), pieces.first.tolist(), pieces.stop.tolist(), strict=True)


def sample_loss_weights(loss_tokens: np.ndarray, weighting: LossWeighting) -> np.ndarray:
    """Return every sample's weight per loss token, float32 [samples], for samples of one pack."""
    counts = np.maximum(loss_tokens, 1).astype(np.float64)  # avoids division by 0
    match weighting:
        case LossWeighting.TOKEN | LossWeighting.SUM:
            weights = np.ones(len(counts))
        case LossWeighting.SAMPLE:
            weights = 1 / counts
        case LossWeighting.SQRT:
            weights = 1 / np.sqrt(counts)
        case LossWeighting.MICRO_BATCH:
            weights = np.full(len(counts), 1 / max(np.sum(loss_tokens), 1))
    return weights.astype(np.float32)


Batches = Generator[MicroBatch, None, None]  # closing it ends the loader processes


def load_batches(dataset: Dataset, num_workers: int, device: torch.device) -> Batches:
    """Yield all micro-batches in order on `device`, or raise UserError. 0 workers use a thread."""
    # Copies to CUDA are from pinned memory on a stream of their own.
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin_copy(item: MicroBatch) -> tuple[MicroBatch, Any]:
        """Start copying a micro-batch in the read-ahead thread; return it and its arrival."""
        if stream is None:
            return item, None
        # Make the device current: pinning would create a CUDA context on device 0.
        with torch.cuda.stream(stream):
            return item.pin_memory().to(device), stream.record_event()

    with closing(read_ahead(dataset, num_workers, begin_copy)) as items:
        for item, arrived in items:
            if arrived is not None:
                computing = torch.cuda.current_stream(device)
                computing.wait_event(arrived)
                # `stream` allocated the tensors: the allocator must not reuse them too early.
                item.record_stream(computing)
            yield item
