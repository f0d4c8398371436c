"""Lengths from ms-swift's cached datasets (4.6.0: swift/pipelines/export/cached_dataset.py).

Token counts are kept; image items are counted from headers. All tokens count as loss tokens.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from omnibal.base.errors import UserError
from omnibal.base.remote_path import RemotePath
from omnibal.data.image_headers import BadImage, image_size
from omnibal.data.lengths import Lengths, check_positions, image_rule
from omnibal.data.native_resolution import OddImage, Segments, image_segments, sizes_of
from omnibal.data.stored_files import HeldFile, ImageFile
from omnibal.data.tiling import tile_count
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import SQUARED_FEATURES, squares_of

Picture = ImageFile | HeldFile
_STATE = "state.json"
_REMEDY = "give the folder that `swift export --to_cached_dataset true` made"


def is_cached_dataset(path: Path) -> bool:
    """Whether a path is a local ms-swift cached dataset."""
    return not isinstance(path, RemotePath) and cached_folder(path) is not None


def cached_folder(path: Path) -> Path | None:
    """Folder of a saved dataset: `path` or its `train`, None if neither."""
    return next((at for at in (path, path / "train") if (at / _STATE).is_file()), None)


def cached_files(path: Path) -> list[Path]:
    """Files that `read_cached_lengths` reads, except images."""
    folder = cached_folder(path) or path
    return [folder / _STATE, *_arrow_files(folder)]


def read_cached_tokens(path: Path) -> np.ndarray:
    """Tokens of every row, int64 [rows]; rows with several segments have a list."""
    folder, found = cached_folder(path) or path, list[int]()
    for batch in _batches(folder):
        names = [name for name in ("lengths", "length") if name in batch.schema.names]
        if not names:
            raise UserError(f"{folder}: has no column lengths; {_REMEDY}")
        rows = batch.column(names[0]).to_pylist()
        found += [sum(row) if isinstance(row, list) else row for row in rows]
    if not found or not all(isinstance(count, int) and count > 0 for count in found):
        what = "has no rows" if not found else "has a length that is no whole number above 0"
        raise UserError(f"{folder}: {what}; {_REMEDY}")
    return np.array(found, np.int64)


def read_cached_lengths(
    path: Path, tokens: np.ndarray, model: ModelConfig, on_progress: Callable[[int], None]
) -> Lengths:
    """Lengths of a cached dataset, a row per sample, in order."""
    items, shown = np.zeros(len(tokens), np.int32), list[list[Segments]]()
    for number, images in enumerate(_cached_images(cached_folder(path) or path)):
        where = f"{path}: row {number}"
        items[number], found = _counts(images, where, int(tokens[number]), model)
        shown.append(found)
        on_progress(1)
    sizes = sizes_of(shown)
    names = [name for name in model.item_features if name != "clips"]
    squared = [squares_of(name) for name in names if squares_of(name) in SQUARED_FEATURES]
    return Lengths(
        items=dict.fromkeys(names, items),
        squares=dict.fromkeys(squared, sizes.squares),
        image_sizes=None if model.images is None else sizes,
        tokens=tokens.astype(np.int32),
        loss_tokens=np.zeros(len(tokens), np.int32),
        source=np.zeros(len(tokens), np.int32),
        source_names=(path.absolute().stem,),
    )


def _counts(
    images: Sequence[Picture], where: str, tokens: int, model: ModelConfig
) -> tuple[int, list[Segments]]:
    """Image items of a row and its native-resolution segments."""
    check_positions(tokens, model, f"{where}: the sample")
    if not images:
        return 0, []
    rule = image_rule(model)
    if not model.takes_images and rule is None:
        raise UserError(
            f"{where} has {len(images)} image(s), and {model.name} takes none; give --model the "
            "model that the dataset was made with"
        )
    try:
        sizes = list(map(image_size, images))
    except (BadImage, IsADirectoryError) as error:
        raise UserError(f"{where}: {error}") from error
    if rule is None:
        vision, found = model.vision, list[Segments]()
        items = sum(tile_count(*size, vision.tiling, vision.image_size) for size in sizes)
        needed = items * vision.tokens_per_item
    else:
        try:
            found = [image_segments(*size, rule) for size in sizes]
        except OddImage as error:
            raise UserError(f"{where}: one of its images {error}; remove the sample") from error
        items = needed = sum(segments.all_tokens for segments in found)
    if needed > tokens:
        raise UserError(
            f"{where} has {tokens:,} tokens, and its {len(images)} image(s) {needed:,} as "
            f"{model.name} takes them; give --model, --min-pixels, --max-pixels or "
            "--max-dynamic-patch as the dataset was made with"
        )
    return items, found


def _arrow_files(folder: Path) -> list[Path]:
    try:
        state = json.loads((folder / _STATE).read_text())
        return [folder / file["filename"] for file in state["_data_files"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{folder / _STATE}: does not list its files; {_REMEDY}") from error


def _batches(folder: Path) -> Iterator[pa.RecordBatch]:
    for path in _arrow_files(folder):
        try:
            with pa.memory_map(str(path)) as file:
                yield from pa.ipc.open_stream(file)
        except (OSError, pa.ArrowInvalid) as error:
            raise UserError(f"{path}: cannot be read ({error}); {_REMEDY}") from error


def _cached_images(folder: Path) -> Iterator[list[Picture]]:
    """Images of every row, by path or bytes."""
    number = 0
    for batch in _batches(folder):
        columns = {
            name: batch.column(name).to_pylist()
            for name in ("images", "videos", "audios")
            if name in batch.schema.names
        }
        for row in range(len(batch)):
            given = {name: column[row] or () for name, column in columns.items()}
            for name in ("videos", "audios"):
                if given.get(name):
                    raise UserError(
                        f"{folder}: row {number} has {name}, whose items its lengths do not tell; "
                        "scan the data itself with `omnibal lengths`"
                    )
            yield [_cached_image(image, folder, number) for image in given.get("images", ())]
            number += 1


def _cached_image(image: Any, folder: Path, row: int) -> Picture:
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, str):
        return ImageFile(Path(image))
    if not isinstance(image, bytes):
        raise UserError(f"{folder}: row {row} has an image without path or bytes; {_REMEDY}")
    return HeldFile(image)
