"""From the plan's packs to tensors: each stage loads only what its units need.

Shapes: T tiles, C channels, P pixels per side, S packed tokens, L loss positions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from PIL import Image

from megatron.vlm.batch import MicroBatch
from omnibal.config import ModelConfig
from omnibal.data.annotations import Annotations, Sample
from omnibal.data.chat import EncodedSample, encode_sample
from omnibal.data.lengths import Lengths
from omnibal.data.packs import ScheduledPacks
from omnibal.data.tiling import tile_count, tile_grid
from omnibal.data.tokenizer import Tokenizer
from omnibal.errors import UserError
from omnibal.plan import Stage

# ImageNet statistics, as InternVL normalizes with.
_PIXEL_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
_PIXEL_STD = np.array([0.229, 0.224, 0.225], np.float32)


@dataclass(frozen=True, slots=True)
class SampleReader:
    """Samples of one dataset as token ids and tiles of one model."""

    annotations: Annotations
    tokenizer: Tokenizer
    model: ModelConfig

    def tiles_per_image(self, sample: Sample) -> list[int]:
        """Tile counts of the sample's images, from their headers."""
        return [
            tile_count(*_image_size(path, sample), self.model.tiling, self.model.vision.image_size)
            for path in sample.images
        ]

    def encode(self, sample: Sample, tiles: int) -> EncodedSample:
        """Token ids and loss mask of the whole conversation, whose images make so many tiles."""
        # Only where several images share the tiles must their files be looked at.
        several = len(sample.images) > 1
        per_image = self.tiles_per_image(sample) if several else [tiles] * len(sample.images)
        return encode_sample(sample, per_image, self.model.tokens_per_tile, self.tokenizer)

    def pixels(self, samples: Sequence[Sample]) -> torch.Tensor:
        """All tiles of the samples in order, float32 [T, C, P, P]; T may be 0."""
        size = self.model.vision.image_size
        tiles = [
            tile
            for sample in samples
            for path in sample.images
            for tile in _image_tiles(_read_image(path, sample), self.model)
        ]
        if not tiles:
            return torch.zeros(0, 3, size, size)
        stacked = (np.stack(tiles).astype(np.float32) / 255 - _PIXEL_MEAN) / _PIXEL_STD
        return torch.from_numpy(rearrange(stacked, "t row column c -> t c row column").copy())


def _image_size(path: Path, sample: Sample) -> tuple[int, int]:
    try:
        with Image.open(path) as image:
            return image.size
    except Exception as error:  # what Pillow raises for a broken file has no common type
        raise _bad_image(path, sample, error) from error


def _read_image(path: Path, sample: Sample) -> Image.Image:
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except Exception as error:
        raise _bad_image(path, sample, error) from error


def _bad_image(path: Path, sample: Sample, error: Exception) -> UserError:
    return UserError(
        f"{path}: cannot read this image ({error}); it is an image of {sample.where}; "
        "restore the file, or take the sample out and plan anew"
    )


def _image_tiles(image: Image.Image, model: ModelConfig) -> list[np.ndarray]:
    """InternVL's dynamic tiling: uint8 [P, P, C] tiles row by row, then the thumbnail."""
    size = model.vision.image_size
    columns, rows = tile_grid(*image.size, model.tiling, size)
    resized = np.asarray(image.resize((columns * size, rows * size), Image.Resampling.BICUBIC))
    tiles = list(rearrange(resized, "(row p1) (col p2) c -> (row col) p1 p2 c", p1=size, p2=size))
    if model.tiling.use_thumbnail and len(tiles) > 1:
        tiles.append(np.asarray(image.resize((size, size), Image.Resampling.BICUBIC)))
    return tiles


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
    ) -> None:
        self.reader = reader
        self.scheduled = scheduled
        self.lengths = lengths
        self.rows = rows
        self.stage = stage

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> MicroBatch | UserError:
        row = int(self.rows[item])
        indices = self.scheduled.packs[row]
        try:
            return self._load(indices, int(self.scheduled.tiles[row]))
        except UserError as error:
            return error

    def _load(self, indices: np.ndarray, tiles: int) -> MicroBatch:
        segment_tokens = tuple(self.lengths.tokens[indices].tolist())
        fields: dict[str, torch.Tensor] = {}
        reads_text = self.stage.language_embed or self.stage.head
        samples = []
        if reads_text or self.stage.vision_embed:
            places = self.lengths.annotation_indices(indices)
            samples = [self.reader.annotations[int(place)] for place in places]
        if self.stage.vision_embed:
            fields["pixels_TCPP"] = self.reader.pixels(samples)
            _check_count(len(fields["pixels_TCPP"]), tiles, "tiles", samples)
        if reads_text:
            tiles_of = self.lengths.tiles[indices].tolist()
            encoded = list(map(self.reader.encode, samples, tiles_of))
            for one, sample, planned in zip(encoded, samples, segment_tokens, strict=True):
                _check_count(len(one.token_ids), planned, "tokens", [sample])
            fields |= _text_fields(encoded, self.reader.tokenizer, self.stage)
        return MicroBatch(
            tiles=tiles, tokens=sum(segment_tokens), segment_tokens=segment_tokens, **fields
        )


def _check_count(found: int, planned: int, what: str, samples: Sequence[Sample]) -> None:
    if found != planned:
        raise UserError(
            f"{samples[0].where}: {found} {what} where the plan counted {planned}; the data "
            "changed after it was planned: run `omnibal lengths` and `omnibal plan` again"
        )


def _text_fields(
    encoded: Sequence[EncodedSample], tokenizer: Tokenizer, stage: Stage
) -> dict[str, torch.Tensor]:
    token_ids = np.concatenate([one.token_ids for one in encoded])
    fields = {}
    if stage.language_embed:
        fields["token_ids_S"] = torch.from_numpy(token_ids)
        image_positions = np.flatnonzero(token_ids == tokenizer.image_context)
        fields["image_positions_M"] = torch.from_numpy(image_positions)
    if stage.head:
        # Position i predicts token i + 1; a sample's first token is never predicted, its mask is
        # False, so no prediction crosses from one sample into the next.
        predicted = np.flatnonzero(np.concatenate([one.loss_mask for one in encoded]))
        fields["loss_positions_L"] = torch.from_numpy(predicted - 1)
        fields["labels_L"] = torch.from_numpy(token_ids[predicted])
    return fields


def load_batches(
    dataset: PackDataset, num_workers: int, device: torch.device
) -> Iterator[MicroBatch]:
    """All micro-batches of the dataset in order, on `device`, read ahead by worker processes.

    Raises:
        UserError: a sample cannot be read, or is not what the plan counted.
    """
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=num_workers, collate_fn=_unchanged
    )
    for item in loader:
        if isinstance(item, UserError):
            raise item
        yield item.to(device)


def _unchanged(item: MicroBatch | UserError) -> MicroBatch | UserError:
    return item
