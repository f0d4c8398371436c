"""Lengths from ms-swift's cached datasets (4.6.0: swift/pipelines/export/cached_dataset.py).

Tokens are the dataset's, image items are counted from image headers, and loss tokens are 0.
"""

import io
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from omnibal.base.errors import UserError
from omnibal.base.remote_path import RemotePath
from omnibal.data.image_headers import image_size
from omnibal.data.lengths import Lengths, check_positions
from omnibal.data.native_resolution import Segments, image_segments, sizes_of
from omnibal.data.stored_files import BadFile, ImageFile
from omnibal.data.tiling import tile_count
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import SQUARED_FEATURES, squares_of

_STATE_FILE = "state.json"
_DATASET_REMEDY = "give the folder that `swift export --to_cached_dataset true` made"


def cached_folder(path: Path) -> Path | None:
    """Return a local `path` or its folder `train`, if one has a state.json."""
    folders = () if isinstance(path, RemotePath) else (path, path / "train")
    return next((at for at in folders if (at / _STATE_FILE).is_file()), None)


def cached_files(path: Path) -> list[Path]:
    """Return the paths of the dataset's own files: its state.json and Arrow files."""
    folder = cached_folder(path) or path
    return [folder / _STATE_FILE, *_list_arrow_files(folder)]


def read_cached_tokens(path: Path) -> np.ndarray:
    """Return the tokens of every row, int64 [rows]. Raise UserError unless all are above 0."""
    folder, counts = cached_folder(path) or path, list[int]()
    for batch in _iterate_batches(folder):
        names = [name for name in ("lengths", "length") if name in batch.schema.names]
        if not names:
            raise UserError(f"{folder}: has no column lengths; {_DATASET_REMEDY}")
        rows = batch.column(names[0]).to_pylist()  # a list for a row of several segments
        counts += [sum(row) if isinstance(row, list) else row for row in rows]
    if not counts or not all(isinstance(count, int) and count > 0 for count in counts):
        problem = "has no rows" if not counts else "has a length that is no whole number above 0"
        raise UserError(f"{folder}: {problem}; {_DATASET_REMEDY}")
    return np.array(counts, np.int64)


def read_cached_lengths(
    path: Path, tokens: np.ndarray, model: ModelConfig, on_progress: Callable[[int], None]
) -> Lengths:
    """Return the lengths of all rows, which have `tokens`. Call `on_progress(1)` after a row."""
    items, shown = np.zeros(len(tokens), np.int32), list[list[Segments]]()
    for number, images in enumerate(_iterate_images(cached_folder(path) or path)):
        where = f"{path}: row {number}"
        items[number], segments = _count_items(images, where, int(tokens[number]), model)
        shown.append(segments)
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


def _count_items(
    images: Sequence[ImageFile], where: str, tokens: int, model: ModelConfig
) -> tuple[int, list[Segments]]:
    """Return a row's image items and native-resolution segments; UserError if above `tokens`."""
    check_positions(tokens, model, f"{where}: the sample")
    if not images:
        return 0, []
    rule = model.images
    if not model.takes_images and rule is None:
        raise UserError(f"{where} has {len(images)} image(s), {model.name} none; give its --model")
    segments, items = list[Segments](), 0
    for image in images:
        try:
            size = image_size(image)
            if rule is None:
                items += tile_count(*size, model.vision.tiling, model.vision.image_size)
            else:
                segments.append(image_segments(*size, rule))
        except BadFile as error:
            raise UserError(f"{where}: image {image} {error}") from error
    items += sum(run.all_tokens for run in segments)
    needed = items * (model.vision.tokens_per_item if rule is None else 1)
    if needed > tokens:
        raise UserError(
            f"{where} has {tokens:,} tokens, and its {len(images)} image(s) {needed:,} in "
            f"{model.name}; give its --model, --min-pixels, --max-pixels or --max-dynamic-patch"
        )
    return items, segments


def _list_arrow_files(folder: Path) -> list[Path]:
    try:
        state = json.loads((folder / _STATE_FILE).read_text())
        return [folder / file["filename"] for file in state["_data_files"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{folder / _STATE_FILE}: lists no files; {_DATASET_REMEDY}") from error


def _iterate_batches(folder: Path) -> Iterator[pa.RecordBatch]:
    for path in _list_arrow_files(folder):
        try:
            with pa.memory_map(str(path)) as file:
                yield from pa.ipc.open_stream(file)
        except (OSError, pa.ArrowInvalid) as error:
            raise UserError(f"{path}: cannot be read ({error}); {_DATASET_REMEDY}") from error


def _iterate_images(folder: Path) -> Iterator[list[ImageFile]]:
    """Yield every row's images, by path or bytes. Raise UserError on videos and recordings."""
    number = 0
    for batch in _iterate_batches(folder):
        columns = {
            name: batch.column(name).to_pylist()
            for name in ("images", "videos", "audios")
            if name in batch.schema.names
        }
        for row in range(len(batch)):
            media = {name: column[row] or () for name, column in columns.items()}
            for name in ("videos", "audios"):
                if media.get(name):
                    raise UserError(f"{folder}: row {number} has uncounted {name}; scan the data")
            yield [_locate_image(image, folder, number) for image in media.get("images", ())]
            number += 1


def _locate_image(image: Any, folder: Path, row: int) -> ImageFile:
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, str):
        return ImageFile(Path(image))
    if not isinstance(image, bytes):
        raise UserError(f"{folder}: row {row} lacks an image's path or bytes; {_DATASET_REMEDY}")
    return ImageFile(folder, f"row {row}", opener=partial(io.BytesIO, image))
