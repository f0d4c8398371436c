"""What every sample costs, from image headers and text alone: annotations in, lengths out.

No pixel is decoded, except of a file whose end looks wrong.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from omnibal.config import ModelConfig
from omnibal.data.annotations import Annotations, Sample
from omnibal.data.chat import encode_sample
from omnibal.data.lengths import Lengths, LengthsOrigin
from omnibal.data.tiling import tile_count
from omnibal.data.tokenizer import Tokenizer
from omnibal.errors import UserError

_END_MARKERS = {"PNG": b"IEND\xaeB`\x82", "JPEG": b"\xff\xd9", "MPO": b"\xff\xd9"}
_TAIL_BYTES = 1024
_SAMPLES_PER_REPORT = 64
_MAX_MISTAKES = 5


def scan_lengths(
    annotations: Annotations,
    model: ModelConfig,
    tokenizer: Tokenizer,
    on_progress: Callable[[int], None],
) -> Lengths:
    """Tiles, tokens and loss tokens of every sample; image tokens are counted, not built.

    Args:
        on_progress: called now and then with the number of samples done since the last call.

    Raises:
        UserError: malformed lines or missing, unreadable or truncated images, of which the first
            five are named, or a tokenizer that is larger than the model's vocabulary.
    """
    if tokenizer.vocab_size > model.language.vocab_size:
        raise UserError(
            f"{tokenizer.path} has {tokenizer.vocab_size} pieces, but {model.name} embeds "
            f"{model.language.vocab_size}; pass the model's own tokenizer or raise vocab_size"
        )
    tiles_of: dict[Path, int] = {}
    counts = np.zeros((len(annotations), 3), np.int32)
    mistakes: dict[str, None] = {}  # a repeated sample makes its mistake again
    for index in range(len(annotations)):
        try:
            sample = annotations[index]
            tiles = _sample_tiles(sample, model, tiles_of)
        except UserError as error:
            mistakes[str(error)] = None
            if len(mistakes) == _MAX_MISTAKES:
                break
        else:
            text = encode_sample(sample, [0] * len(sample.images), model.tokens_per_tile, tokenizer)
            tokens = len(text.token_ids) + tiles * model.tokens_per_tile
            counts[index] = tiles, tokens, text.loss_mask.sum()
        if (index + 1) % _SAMPLES_PER_REPORT == 0:
            on_progress(_SAMPLES_PER_REPORT)
    if mistakes:
        raise _all_of(list(mistakes))
    on_progress(len(annotations) % _SAMPLES_PER_REPORT)
    tiles_column, tokens_column, loss_column = np.ascontiguousarray(counts.T)
    return Lengths(
        tiles=tiles_column,
        tokens=tokens_column,
        loss_tokens=loss_column,
        source=np.array([annotations.source_of(i) for i in range(len(annotations))], np.int32),
        source_names=annotations.sources,
        origin=LengthsOrigin(
            data_sha256=annotations.sha256,
            tokenizer_sha256=tokenizer.sha256,
            image_size=model.vision.image_size,
            tokens_per_tile=model.tokens_per_tile,
            tiling=model.tiling,
        ),
    )


def _sample_tiles(sample: Sample, model: ModelConfig, tiles_of: dict[Path, int]) -> int:
    """Tiles of all images of a sample; `tiles_of` remembers the files that were looked at."""
    for image in sample.images:
        if image not in tiles_of:
            size = _image_size(image, sample.where)
            tiles_of[image] = tile_count(*size, model.tiling, model.vision.image_size)
    return sum(tiles_of[image] for image in sample.images)


def _all_of(mistakes: list[str]) -> UserError:
    if len(mistakes) == 1:
        return UserError(mistakes[0])
    found = f"{len(mistakes)} bad samples were found"
    if len(mistakes) == _MAX_MISTAKES:
        found = f"the scan stopped at the first {_MAX_MISTAKES} bad samples"
    listed = " ".join(f"({number}) {text}" for number, text in enumerate(mistakes, start=1))
    return UserError(f"{found}: {listed}")


def _image_size(path: Path, where: str) -> tuple[int, int]:
    """Width and height in pixels, of a file that is whole."""
    try:
        with Image.open(path) as image:
            size, image_format = image.size, image.format
    except FileNotFoundError as error:
        raise UserError(
            f"{where}: image {path} does not exist; correct the path, or root in the meta"
        ) from error
    except (OSError, Image.DecompressionBombError) as error:
        raise UserError(
            f"{where}: image {path} cannot be read ({error}); replace the file or remove the line"
        ) from error
    if _is_truncated(path, _END_MARKERS.get(image_format or "", b"")):
        raise UserError(
            f"{where}: image {path} is truncated; fetch the file again or remove the line"
        )
    return size


def _is_truncated(path: Path, end_marker: bytes) -> bool:
    """Whether a file ends before its format's end marker (formats without one: never).

    Some writers append bytes of their own; where the marker is only found further in, it may also
    belong to an embedded preview, so that file is decoded.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        if end_marker in file.read():
            return False
        file.seek(0)
        if end_marker not in file.read():
            return True
    try:
        with Image.open(path) as image:
            image.load()
    except OSError:
        return True
    return False
