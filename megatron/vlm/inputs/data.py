"""Loading of the plan's packs as tensors; each stage loads only the fields its units need.

Shapes: T tiles, C channels, P pixels per side, S packed tokens, L loss positions.
"""

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from einops import rearrange
from PIL import Image

from megatron.vlm.inputs.augment import Purpose, degraded, jpeg_qualities, tile_keys
from megatron.vlm.inputs.batch import MicroBatch
from megatron.vlm.inputs.read_ahead import read_ahead
from omnibal.config import ModelConfig
from omnibal.data.annotations import Annotations
from omnibal.data.chat import EncodedSample, answer_end, encode_prompt, encode_sample
from omnibal.data.image_files import ImageFile, why_unreadable
from omnibal.data.lengths import Lengths, check_positions
from omnibal.data.packs import ScheduledPacks
from omnibal.data.sample import Sample
from omnibal.data.tiling import tile_count, tile_grid
from omnibal.data.tokenizer import Tokenizer
from omnibal.encoders import TilingConfig
from omnibal.errors import UserError
from omnibal.pipeline.stage import Stage

# ImageNet statistics, as InternVL normalizes with.
PIXEL_MEAN, PIXEL_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class LossWeighting(StrEnum):
    """Weight of a loss token, beside those of the global batch, and what the sum is divided by.

    All but `sum` divide by the sum of weights. HBP (arXiv 2503.07680, table 10) compares four,
    whose names are understood too: Ave-Token is `token`, Sample-Mean is `sample`,
    Token-Mean is `micro-batch`, Sum is `sum`.
    """

    TOKEN = "token"
    """All weigh the same: the mean over all loss tokens of the global batch."""
    SAMPLE = "sample"
    """1 / n for a sample with n of them: the mean over samples of each one's mean."""
    SQRT = "sqrt"
    """1 / sqrt(n), between these two."""
    MICRO_BATCH = "micro-batch"
    """1 / n for a micro-batch with n of them: the mean over micro-batches of each one's mean. It
    depends on how samples are packed."""
    SUM = "sum"
    """As `token`, but gradients are not divided: they grow with the global batch."""

    @classmethod
    def _missing_(cls, value: object) -> "LossWeighting | None":
        published = {"ave-token": cls.TOKEN, "sample-mean": cls.SAMPLE}
        published["token-mean"] = cls.MICRO_BATCH
        name = str(value).lower()
        return published.get(name) or next((one for one in cls if one.value == name), None)


class OnBadSample(StrEnum):
    """Treatment of a sample with an image that cannot be read."""

    STOP = "stop"
    SKIP = "skip"
    """Keep its place in the pack, since all stages know the plan's shapes, but learn nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions:
    """Options by which samples become micro-batches, beyond those in the plan."""

    seed: int = 0
    """Seed of all that is random about a sample; at least 0."""
    loss_weighting: LossWeighting = LossWeighting.TOKEN
    on_bad_sample: OnBadSample = OnBadSample.STOP
    augment: bool = False
    """Whether to augment the samples of sources that ask for it."""
    drop_path: bool = False
    """Whether vision layers need random numbers."""


_PLAIN = DataOptions()


class UnreadableImage(UserError):
    """An image is missing or broken."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prompt:
    """A question with everything before it."""

    token_ids: np.ndarray
    """Token ids, int64 [tokens]."""
    tiles: int
    """Tiles of the images shown so far: the first `tiles` of the sample's."""


@dataclass(frozen=True, slots=True)
class SampleReader:
    """Samples of one dataset as token ids and tiles of one model."""

    annotations: Annotations
    tokenizer: Tokenizer
    model: ModelConfig

    @property
    def answer_end(self) -> int:
        """The token that closes an answer."""
        return answer_end(self.model, self.tokenizer)

    def tiles_per_image(self, sample: Sample) -> list[int]:
        """Tile counts of the images that the model is shown, from their headers."""
        sample = sample.shown(self.model.tiling)
        if sample.video or not sample.images:
            return [1] * len(sample.images)
        tiling, size = sample.tiling(self.model.vision.tiling), self.model.vision.image_size
        return [tile_count(*_image_size(image, sample), tiling, size) for image in sample.images]

    def image_positions(self, token_ids_S: torch.Tensor) -> torch.Tensor | None:
        """Places of image tokens in a pack, int64 [M]; None where the model takes no images."""
        if not self.model.takes_images:
            return None
        return (token_ids_S == self.tokenizer.image_context).nonzero().squeeze(1)

    def encode(self, sample: Sample, tiles: int) -> EncodedSample:
        """Encode the whole conversation, whose images make `tiles` tiles, with its loss mask.

        Raises:
            UserError: it has an image, and the model takes none, or its text is refused.
        """
        sample.shown(self.model.tiling)
        if sample.video:
            # As many frames as planned, even where some are missing: reading them raises an error.
            sample = sample.with_frames(sample.images[:1] * tiles)
            per_image = [1] * tiles
        else:
            # Only where several images share the tiles must their files be looked at.
            several = len(sample.images) > 1
            per_image = self.tiles_per_image(sample) if several else [tiles] * len(sample.images)
        return encode_sample(sample, per_image, self.model, self.tokenizer)

    def prompt(self, sample: Sample, turn: int, room: int, chatting: bool = False) -> Prompt:
        """Encode everything before the answer of a turn; images are tiled as in the whole sample.

        Args:
            room: tokens that the answer may have.
            chatting: as `encode_prompt` has it.

        Raises:
            UnreadableImage: the header of an image cannot be read.
            UserError: it is longer, with its answer, than the model takes.
        """
        sample = sample.shown(self.model.tiling)
        tiles = self.tiles_per_image(sample)
        token_ids = encode_prompt(sample, turn, tiles, self.model, self.tokenizer, chatting)
        check_positions(
            len(token_ids) + room,
            self.model,
            f"{sample.where}: a question with {room:,} tokens for its answer",
            "shorten the question, or allow its answer fewer tokens",
        )
        return Prompt(token_ids=token_ids, tiles=sum(tiles[: sample.images_until(turn)]))

    def check_images(self, sample: Sample, tiles: int) -> None:
        """Decode the images that the model is shown.

        Raises:
            UnreadableImage: one of them is missing or broken, or a video does not have the frames
                that make `tiles` tiles.
        """
        sample = sample.shown(self.model.tiling)
        _check_frames(sample, tiles)
        for image in sample.images:
            _read_image(image, sample)

    def tiles(self, sample: Sample) -> list[np.ndarray]:
        """All tiles of the images that the model is shown in order, uint8 [P, P, C].

        Raises:
            UnreadableImage: one of them is missing or broken.
        """
        sample = sample.shown(self.model.vision.tiling)
        tiling, size = sample.tiling(self.model.vision.tiling), self.model.vision.image_size
        return [
            tile
            for image in sample.images
            for tile in _image_tiles(_read_image(image, sample), tiling, size)
        ]

    def pixels(self, samples: Sequence[Sample]) -> torch.Tensor:
        """All tiles of the samples in order, float32 [T, C, P, P]; T may be 0."""
        tiles = [tile for sample in samples for tile in self.tiles(sample)]
        return torch.from_numpy(_normalized(tiles, self.model.vision.image_size))


def _normalized(tiles: Sequence[np.ndarray | None], size: int) -> np.ndarray:
    """Tiles as the vision tower takes them, float32 [T, C, P, P]; None becomes zeros."""
    mean, std = np.array(PIXEL_MEAN, np.float32), np.array(PIXEL_STD, np.float32)
    pixels_TCPP = np.zeros((len(tiles), 3, size, size), np.float32)
    for pixels_CPP, tile in zip(pixels_TCPP, tiles, strict=True):
        if tile is not None:
            scaled = (tile.astype(np.float32) / 255 - mean) / std
            pixels_CPP[:] = rearrange(scaled, "row column c -> c row column")
    return pixels_TCPP


def _image_size(image: ImageFile, sample: Sample) -> tuple[int, int]:
    try:
        with image.open() as file, Image.open(file) as header:
            return header.size
    except Exception as error:  # what Pillow raises for a broken file has no common type
        raise _bad_image(image, sample, error) from error


def _read_image(image: ImageFile, sample: Sample) -> Image.Image:
    try:
        with image.open() as file, Image.open(file) as pixels:
            return pixels.convert("RGB")
    except Exception as error:
        raise _bad_image(image, sample, error) from error


def _bad_image(image: ImageFile, sample: Sample, error: Exception) -> UnreadableImage:
    return UnreadableImage(
        f"{image}: cannot read this image ({why_unreadable(error)}); it is an image of "
        f"{sample.where}; restore the file, or take the sample out and plan anew"
    )


def _check_frames(sample: Sample, planned: int) -> None:
    if sample.video and len(sample.images) != planned:
        raise UnreadableImage(
            f"{sample.images[0].path}: {len(sample.images)} frame(s) where the plan counted "
            f"{planned}; they are frames of {sample.where}; restore them, or take the sample out "
            "and plan anew"
        )


def _image_tiles(image: Image.Image, tiling: TilingConfig, size: int) -> list[np.ndarray]:
    """InternVL's dynamic tiling: uint8 [P, P, C] tiles row by row, then the thumbnail."""
    columns, rows = tile_grid(*image.size, tiling, size)
    resized = np.asarray(image.resize((columns * size, rows * size), Image.Resampling.BICUBIC))
    tiles = list(rearrange(resized, "(row p1) (col p2) c -> (row col) p1 p2 c", p1=size, p2=size))
    if tiling.use_thumbnail and len(tiles) > 1:
        tiles.append(np.asarray(image.resize((size, size), Image.Resampling.BICUBIC)))
    return tiles


@dataclass(frozen=True, kw_only=True, slots=True)
class _Draft:
    """A sample of a pack, as far as the stage reads it."""

    sample: Sample
    place: int
    """Index in the annotations."""
    tiles: int
    """Planned number of tiles, as `tokens` of tokens."""
    tokens: int
    found: list[np.ndarray]
    """Tiles, uint8 [P, P, C]; where the vision embed is and the images can be read."""
    unreadable: str | None
    """Error of an image, where the stage reads them; None if there is none."""


class PackDataset(torch.utils.data.Dataset):
    """The micro-batches of one data-parallel rank, as one pipeline stage needs them.

    Item i is the MicroBatch of row `rows[i]` of the packs, or the UserError met while loading it:
    loader processes would hide an exception's message in a traceback.
    """

    def __init__(
        self,
        reader: SampleReader,
        scheduled: ScheduledPacks,
        lengths: Lengths,
        rows: np.ndarray,
        stage: Stage,
        options: DataOptions = _PLAIN,
    ) -> None:
        self.reader = reader
        self.scheduled = scheduled
        self.lengths = lengths
        self.rows = rows
        self.stage = stage
        self.options = options

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> MicroBatch | UserError:
        try:
            return self._load(int(self.rows[item]))
        except UserError as error:
            return error

    def _load(self, row: int) -> MicroBatch:
        indices, epoch = self.scheduled.packs[row], int(self.scheduled.epoch[row])
        stage = self.stage
        fields: dict[str, torch.Tensor | None] = {}
        if stage.layers("vision") and self.options.drop_path:
            fields["drop_path_keys_T"] = self._drop_path_keys(indices, epoch)
        drafts = []
        if any(map(stage.holds, ("vision embed", "language embed", "head"))):
            drafts = [self._draft(int(index)) for index in indices]
        if stage.holds("vision embed"):
            fields["pixels_TCPP"] = self._pixels(drafts, epoch)
        if stage.holds("language embed") or stage.holds("head"):
            fields |= self._text_fields(drafts)
        return MicroBatch(
            tiles=int(self.scheduled.column("tiles")[row]),
            tokens=int(self.scheduled.tokens[row]),
            segment_tokens=tuple(self.lengths.tokens[indices].tolist()),
            unreadable=tuple(draft.unreadable for draft in drafts if draft.unreadable is not None),
            **fields,
        )

    def _drop_path_keys(self, indices: np.ndarray, epoch: int) -> torch.Tensor:
        seed = self.options.seed
        keys = [
            tile_keys(Purpose.DROP_PATH, seed, epoch, place, tiles)
            for place, tiles in zip(
                self.lengths.annotation_indices(indices).tolist(),
                self.lengths.column("tiles")[indices].tolist(),
                strict=True,
            )
        ]
        return torch.from_numpy(np.concatenate(keys).view(np.int64))

    def _draft(self, index: int) -> _Draft:
        """Read one sample of the annotations; its images too, where pixels or a verdict are due."""
        place = int(self.lengths.annotation_indices(np.array([index]))[0])
        sample = self.reader.annotations[place]
        tiles = int(self.lengths.column("tiles")[index])
        found: list[np.ndarray] = []
        unreadable = None
        try:
            if self.stage.holds("vision embed"):
                found = self.reader.tiles(sample)
                _check_frames(sample.shown(self.reader.model.tiling), tiles)
            elif self.stage.holds("head") and self._skips:
                # The head leaves out the loss of the samples that the vision embed blanks. Nothing
                # tells it which: it comes to the same verdict by decoding the same files.
                self.reader.check_images(sample, tiles)
        except UnreadableImage as error:
            if not self._skips:
                raise UserError(f"{error}, or go on without it: --on-bad-sample skip") from error
            unreadable = str(error)
        return _Draft(
            sample=sample,
            place=place,
            tiles=tiles,
            tokens=int(self.lengths.tokens[index]),
            found=found,
            unreadable=unreadable,
        )

    @property
    def _skips(self) -> bool:
        return self.options.on_bad_sample is OnBadSample.SKIP

    def _pixels(self, drafts: Sequence[_Draft], epoch: int) -> torch.Tensor:
        tiles: list[np.ndarray | None] = []
        for draft in drafts:
            if draft.unreadable is not None:
                tiles += [None] * draft.tiles
                continue
            _check_count(len(draft.found), draft.tiles, "tiles", draft.sample)
            tiles += self._augmented(draft, epoch)
        return torch.from_numpy(_normalized(tiles, self.reader.model.vision.image_size))

    def _augmented(self, draft: _Draft, epoch: int) -> list[np.ndarray]:
        if not (draft.sample.augment and self.options.augment):
            return draft.found
        seed = self.options.seed
        keys = tile_keys(Purpose.JPEG_QUALITY, seed, epoch, draft.place, len(draft.found))
        return list(map(degraded, draft.found, jpeg_qualities(keys)))

    def _text_fields(self, drafts: Sequence[_Draft]) -> dict[str, torch.Tensor | None]:
        encoded = list(map(self._encode, drafts))
        for one, draft in zip(encoded, drafts, strict=True):
            _check_count(len(one.token_ids), draft.tokens, "tokens", draft.sample)
        token_ids = np.concatenate([one.token_ids for one in encoded])
        fields: dict[str, torch.Tensor | None] = {}
        if self.stage.holds("language embed"):
            fields["token_ids_S"] = torch.from_numpy(token_ids)
            fields["image_positions_M"] = self.reader.image_positions(fields["token_ids_S"])
        if self.stage.holds("head"):
            masks = [
                one.loss_mask if draft.unreadable is None else np.zeros_like(one.loss_mask)
                for one, draft in zip(encoded, drafts, strict=True)
            ]
            # Position i predicts token i + 1; a sample's first token is never predicted, its mask
            # is False, so no prediction crosses from one sample into the next.
            predicted = np.flatnonzero(np.concatenate(masks))
            counts = np.array([mask.sum() for mask in masks])
            weights = sample_loss_weights(counts, self.options.loss_weighting)
            fields["loss_positions_L"] = torch.from_numpy(predicted - 1)
            fields["labels_L"] = torch.from_numpy(token_ids[predicted])
            fields["loss_weights_L"] = torch.from_numpy(np.repeat(weights, counts))
        return fields

    def _encode(self, draft: _Draft) -> EncodedSample:
        try:
            return self.reader.encode(draft.sample, draft.tiles)
        except UnreadableImage:
            if not self._skips:
                raise
        # The pixels are blank wherever they go, so the first image may have the tiles of all.
        return encode_sample(
            draft.sample,
            [draft.tiles] + [0] * (len(draft.sample.images) - 1),
            self.reader.model,
            self.reader.tokenizer,
        )


def _check_count(found: int, planned: int, what: str, sample: Sample) -> None:
    if found != planned:
        raise UserError(
            f"{sample.where}: {found} {what} where the plan counted {planned}; the data "
            "changed after it was planned: run `omnibal lengths` and `omnibal plan` again"
        )


def sample_loss_weights(loss_tokens: np.ndarray, weighting: LossWeighting) -> np.ndarray:
    """Weight of each loss token of every sample of a pack, float32 [samples].

    Args:
        loss_tokens: of all samples of the pack. [samples]
    """
    counts = np.maximum(loss_tokens, 1).astype(np.float64)  # 0 has no negative power
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


Batches = Generator[MicroBatch, None, None]
"""Generator of micro-batches in order; closing it ends the processes that load them."""


def check_same_data(name: str, given: str, planned: str) -> None:
    """Refuse data or a tokenizer that the plan was not made for.

    Args:
        name: of what is given.
        given, planned: their hashes.
    """
    if planned != given:
        raise UserError(
            f"the plan was made for other data: {name} has sha256 {given[:12]}, but the plan's "
            f"lengths were scanned from {planned[:12]}; use what was scanned, or run "
            "`omnibal lengths` and `omnibal plan` on this"
        )


def load_batches(dataset: PackDataset, num_workers: int, device: torch.device) -> Batches:
    """Load all micro-batches of the dataset in order, on `device`, ahead of use.

    Args:
        num_workers: processes that load; with 0 the thread that reads ahead does.

    Raises:
        UserError: a sample cannot be read, or is not what the plan counted, or a worker process was
            ended from outside.
    """
    copies = _DeviceCopies(device) if device.type == "cuda" else _NoCopies()
    with closing(read_ahead(dataset, num_workers, copies.begin)) as items:
        for item in items:
            if isinstance(item, UserError):
                raise item
            yield copies.end(item)


class _NoCopies:
    """No copies: on the CPU a micro-batch is used where it was loaded."""

    def begin(self, item: MicroBatch | UserError) -> MicroBatch | UserError:
        return item

    def end(self, item: MicroBatch) -> MicroBatch:
        return item


@dataclass(frozen=True, slots=True)
class _Coming:
    batch: MicroBatch
    arrived: torch.cuda.Event


class _DeviceCopies:
    """Copies to a CUDA device while it computes: on a stream of their own, from pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def begin(self, item: MicroBatch | UserError) -> _Coming | UserError:
        """Start the copy of a micro-batch, in the thread that reads ahead."""
        if isinstance(item, UserError):
            return item
        # This also makes the device current: pinning would open a context on the first one.
        with torch.cuda.stream(self._stream):
            batch = item.pinned().to(self._device)
            return _Coming(batch, self._stream.record_event())

    def end(self, coming: _Coming) -> MicroBatch:
        """Make the current stream wait for the copy, in the thread that uses the micro-batch."""
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(coming.arrived)
        coming.batch.record_stream(computing)
        return coming.batch
