"""Sample lengths: items and tokens of every sample, read from Parquet or OmniBal's JSON.

A row counts `tokens` (language tokens, those of images and recordings included), `loss_tokens`
(tokens that carry loss) and, in a column each, the items that the model's encoders take: `tiles`
(of images, thumbnail included), `clips` (of recordings) and `image_tokens` (of images at their
native resolution), these with `squared_image_tokens`, the sum over images and frames of the square
of each one's tokens, and with two lists, of one entry an image or video in the order of their
tokens: `image_times`, 1 of an image, and `tokens_per_time`. Only where a scan skipped samples, or
a plan has some of them or some repeatedly, does it also say which `sample` of the annotations it is
of.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, Field, Strict

from omnibal.base.errors import UserError
from omnibal.base.files import atomic, parse_json_model, read_text
from omnibal.base.frozen import Frozen, written_unless
from omnibal.data.columns import Columns, no_items
from omnibal.data.image_sizes import IMAGE, ImageSizes
from omnibal.model.config import ChatTemplate, ModelConfig
from omnibal.model.encoders import (
    ITEM_FEATURES,
    SQUARED_FEATURES,
    ImageRule,
    ImagesEncoder,
    TilingConfig,
    squares_of,
)
from omnibal.model.limits import words

_METADATA_KEY = b"omnibal"
_ROWS_KEY = b"omnibal_rows"
"""Says that `sample` holds rows of a plan's data: each once, in a portion of it, or repeated."""
_REPEATED = b"repeated"
_SAMPLE = "sample"
_TOKENS = ("tokens", "loss_tokens")
_IMAGE_TOKENS = ImagesEncoder.feature
_SIZES = {"times": "image_times", "tokens": "tokens_per_time"}
"""Columns of lists that have the fields of every image."""
_Int32 = Annotated[int, Strict(), Field(ge=-(2**31), lt=2**31)]


class _Record(BaseModel):
    """One sample of OmniBal's public format; other fields are ignored."""

    vit_num: _Int32
    token_num: _Int32
    image_flags: _Int32 | list[_Int32]


class _MetaEntry(BaseModel):
    """One source of OmniBal's meta JSON; other fields are ignored."""

    token_lengths: str


class ClipSizes(Frozen):
    """What the number of a recording's clips and of their tokens depends on."""

    frames: int
    """Log-mel frames of a clip, one every 10 ms."""
    tokens_per_clip: int

    def __str__(self) -> str:
        return f"clips of {self.frames} frames and {self.tokens_per_clip} tokens"


class LengthsOrigin(Frozen):
    """Identity of a scan's inputs; training refuses data or a tokenizer that differ from it."""

    data_sha256: str
    """SHA-256 of source names, repeats and annotation bytes; neither image folders nor pixels."""
    tokenizer_sha256: str
    image_size: int | None
    tokens_per_tile: int | None
    tiling: TilingConfig | None
    """How images are cut into tiles; None, as the two before it, where the model takes none."""
    clips: ClipSizes | None = written_unless(None)
    """None where the model takes no recordings."""
    images: ImageRule | None = written_unless(None)
    """How images at their native resolution become tokens; None where the model takes none."""
    chat_template: ChatTemplate
    system_message: str | None


def check_same_data(name: str, given: str, planned: str) -> None:
    """Refuse data or a tokenizer that the plan was not made for."""
    if planned != given:
        raise UserError(
            f"the plan was made for other data: {name} has sha256 {given[:12]}, but the plan's "
            f"lengths were scanned from {planned[:12]}; use what was scanned, or run "
            "`omnibal lengths` and `omnibal plan` on this"
        )


def tile_sizes(model: ModelConfig) -> tuple[int | None, int | None]:
    """Pixels and tokens of a tile; None where the model takes no images."""
    if not model.takes_images:
        return None, None
    return model.vision.image_size, model.vision.tokens_per_item


def clip_sizes(model: ModelConfig) -> ClipSizes | None:
    """Frames and tokens of a clip; None where the model takes no recordings."""
    if not model.takes_audio:
        return None
    return ClipSizes(frames=model.audio.frames, tokens_per_clip=model.audio.tokens_per_item)


def image_rule(model: ModelConfig) -> ImageRule | None:
    """How images at their native resolution become tokens; None where the model takes none."""
    return model.images.image_rule if model.images is not None else None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lengths:
    """One entry per sample, in the order of the meta file; arrays are int32 of one length."""

    items: dict[str, np.ndarray]
    """Items of every sample that an encoder takes, by the items' name, such as `tiles`."""
    tokens: np.ndarray
    loss_tokens: np.ndarray
    source: np.ndarray
    """Index into `source_names`."""
    source_names: tuple[str, ...]
    origin: LengthsOrigin | None
    """None when the lengths did not come from a scan, so that no training data can be matched."""
    squares: dict[str, np.ndarray] = field(default_factory=dict)
    """Sums over images and frames of their items squared, int64, by the feature's name, such as
    `squared_image_tokens`; what is missing counts as if every sample had one image."""
    sample: np.ndarray | None = None
    """Index of every row's sample in the annotations, int64, ascending; None where nothing was
    skipped and a row's index is its sample's."""
    repeats: bool = False
    """Whether neighbours in `sample` may be equal, as a mixture repeats samples."""
    image_sizes: ImageSizes | None = None
    """Tokens of every image and video at its native resolution; None where these were not
    counted."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def item_names(self) -> tuple[str, ...]:
        """Names of the items, sorted."""
        return tuple(sorted(self.items))

    @property
    def sha256(self) -> str:
        """Hash of the columns; equal lengths give equal hashes whatever file they came from."""
        digest = hashlib.sha256("\0".join(self.source_names).encode())
        if self.item_names != ("tiles",):
            digest.update(repr(self.item_names).encode())
        for name in (*self.item_names, *_TOKENS):
            digest.update(np.ascontiguousarray(self.column(name), dtype="<i4").tobytes())
        for name, squares in sorted(self.squares.items()):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(squares, dtype="<i8").tobytes())
        if self.image_sizes is not None:
            digest.update(np.ascontiguousarray(self.image_sizes.counts, dtype="<i8").tobytes())
            digest.update(self.image_sizes.images.tobytes())
        digest.update(np.ascontiguousarray(self.source, dtype="<i4").tobytes())
        if self.sample is not None:
            digest.update(_SAMPLE.encode())
            digest.update(np.ascontiguousarray(self.sample, dtype="<i8").tobytes())
        return digest.hexdigest()

    def column(self, name: str) -> np.ndarray:
        """Count of one feature in every sample, int32 [samples], or int64 of squares.

        The feature is `tokens`, `loss_tokens`, the name of items, of which there are none where the
        lengths do not count them (texts have no tiles), or that of their squares.
        """
        if name in SQUARED_FEATURES:
            return self._squares(name)
        columns = {**self.items, "tokens": self.tokens, "loss_tokens": self.loss_tokens}
        return columns[name] if name in columns else no_items(len(self))

    def _squares(self, name: str) -> np.ndarray:
        """Sum of squares of every sample; the most that it can be where none were counted."""
        if name in self.squares:
            return self.squares[name]
        return self.column(name.removeprefix("squared_")).astype(np.int64) ** 2

    @property
    def without_squares(self) -> tuple[str, ...]:
        """Names of items whose squares should be there and were not counted."""
        counted = [name for name in self.item_names if squares_of(name) in SQUARED_FEATURES]
        return tuple(name for name in counted if squares_of(name) not in self.squares)

    @property
    def is_without_image_sizes(self) -> bool:
        """Whether tokens of images should be known one by one and were not counted so."""
        return _IMAGE_TOKENS in self.items and self.image_sizes is None

    def pieces_of_images(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What of the samples' images at their native resolution must stay together, in order.

        It is every image and every time of a video, or all of a sample where these are not counted.

        Returns:
            Tokens and their squares of every piece, and the pieces of every sample; all int64.
        """
        if self.image_sizes is not None:
            tokens, counts = self.image_sizes.pieces(samples)
            return tokens, tokens**2, counts
        tokens = self.column(_IMAGE_TOKENS)[samples].astype(np.int64)
        squares = self.column(squares_of(_IMAGE_TOKENS))[samples]
        return tokens, squares, np.ones(len(samples), np.int64)

    def sizes(self, names: Sequence[str]) -> np.ndarray:
        """Counts of these features in every sample, int64 [names, samples]."""
        return np.stack([self.column(name) for name in names]).astype(np.int64)

    def take(self, rows: np.ndarray) -> "Lengths":
        """Select the samples of these rows."""
        return replace(
            self,
            items={name: column[rows] for name, column in self.items.items()},
            tokens=self.tokens[rows],
            loss_tokens=self.loss_tokens[rows],
            source=self.source[rows],
            squares={name: column[rows] for name, column in self.squares.items()},
            sample=self.annotation_indices(rows),
            image_sizes=None if self.image_sizes is None else self.image_sizes.take(rows),
        )

    def annotation_indices(self, rows: np.ndarray) -> np.ndarray:
        """Indices of these rows' samples in the annotations, int64 [rows]."""
        return rows if self.sample is None else self.sample[rows]


_SHORTER = (
    "shorten or leave out longer samples, or take max_positions (and rope_factor, if there) out of "
    "the model's TOML to go on"
)


def draw_samples(lengths: Lengths, samples: int, seed: int) -> Lengths:
    """Draw `samples` samples at random, in their original order; all if there are no more."""
    if samples >= len(lengths):
        return lengths
    return lengths.take(np.sort(np.random.default_rng(seed).permutation(len(lengths))[:samples]))


def check_positions(tokens: int, model: ModelConfig, what: str, remedy: str = _SHORTER) -> None:
    """Refuse a sample that is longer than the model's RoPE serves as it is trained here.

    Released models may scale it from there on, by the length of the sample, which is not done here.
    Positions start anew with every sample of a pack, so it is samples that are limited.
    """
    most = model.language.max_positions
    if most is not None and tokens > most:
        raise UserError(
            f"{what} has {tokens:,} tokens, but language.max_positions of {model.name} is "
            f"{most:,}, as RoPE is not scaled beyond it here; {remedy}"
        )


def write_lengths(lengths: Lengths, path: Path) -> None:
    """Write Parquet: items, tokens, loss_tokens, squares of items and lists of images if any,
    source (dictionary of names), sample if any."""
    source = pa.DictionaryArray.from_arrays(
        pa.array(lengths.source, pa.int32()), pa.array(lengths.source_names, pa.string())
    )
    counts = {
        name: pa.array(lengths.column(name), pa.int32()) for name in (*lengths.item_names, *_TOKENS)
    }
    squares = {
        name: pa.array(column, pa.int64()) for name, column in sorted(lengths.squares.items())
    }
    lists = {} if lengths.image_sizes is None else _lists(lengths.image_sizes)
    table = pa.table({**counts, **squares, **lists, "source": source})
    metadata: dict[bytes, bytes] = {}
    if lengths.origin is not None:
        metadata[_METADATA_KEY] = lengths.origin.model_dump_json().encode()
    if lengths.sample is not None:
        table = table.append_column(_SAMPLE, pa.array(lengths.sample, pa.int64()))
        if lengths.repeats or lengths.origin is None:
            metadata[_ROWS_KEY] = _REPEATED if lengths.repeats else b"once"
    with atomic(path) as temporary:
        pq.write_table(table.replace_schema_metadata(metadata or None), temporary)


def _lists(sizes: ImageSizes) -> dict[str, pa.Array]:
    """Lists of every sample's images, by the column's name."""
    offsets = pa.array(np.append(0, np.cumsum(sizes.counts)), pa.int64())
    return {
        column: pa.LargeListArray.from_arrays(
            offsets, pa.array(np.ascontiguousarray(sizes.images[name]), pa.int32())
        )
        for name, column in _SIZES.items()
    }


def read_lengths(paths: Sequence[Path]) -> Lengths:
    """Read and join length files: Parquet, OmniBal's list of lengths, or its meta JSON of lists."""
    if not paths:
        raise UserError("no lengths file was given; pass at least one Parquet or JSON file")
    parts = [part for path in paths for part in _read_file(path)]
    lengths = parts[0] if len(parts) == 1 else _joined(parts)
    if not len(lengths):
        raise UserError(
            f"{', '.join(map(str, paths))}: holds no sample; planning needs at least one"
        )
    _check_counts(lengths, paths)
    return lengths


def _joined(parts: Sequence[Lengths]) -> Lengths:
    names = tuple(dict.fromkeys(name for part in parts for name in part.source_names))
    codes = [
        np.array([names.index(name) for name in part.source_names], np.int32)[part.source]
        for part in parts
    ]
    item_names = sorted({name for part in parts for name in part.items})
    # Squares that every part with such items has, and images one by one in the same way.
    lacking = {squares_of(name) for part in parts for name in part.without_squares}
    squares = sorted({name for part in parts for name in part.squares} - lacking)

    def join_column(name: str) -> np.ndarray:
        return np.concatenate([part.column(name) for part in parts])

    return Lengths(
        items={name: join_column(name) for name in item_names},
        tokens=join_column("tokens"),
        loss_tokens=join_column("loss_tokens"),
        source=np.concatenate(codes),
        source_names=names,
        squares={name: join_column(name) for name in squares},
        origin=None,
        image_sizes=_joined_image_sizes(parts),
    )


def _joined_image_sizes(parts: Sequence[Lengths]) -> ImageSizes | None:
    """Images of all parts, where every part with tokens of images has them one by one."""
    counted = [part.image_sizes for part in parts]
    if all(sizes is None for sizes in counted) or any(p.is_without_image_sizes for p in parts):
        return None
    pairs = zip(parts, counted, strict=True)
    return ImageSizes.joined([ImageSizes.none(len(p)) if s is None else s for p, s in pairs])


def length_files(paths: Sequence[Path]) -> list[Path]:
    """List the files that `read_lengths` reads for these, with those that a meta JSON names."""
    named = [
        named
        for path in paths
        if path.suffix == ".json" and path.is_file() and _is_meta(text := _read_text(path))
        for named in _named_files(text, path).values()
    ]
    return [*paths, *named]


def _check_counts(lengths: Lengths, paths: Sequence[Path]) -> None:
    counted = {name: lengths.column(name) for name in (*lengths.item_names, *_TOKENS)}
    bad = np.any([column < (name == "tokens") for name, column in counted.items()], axis=0)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise UserError(
            f"{', '.join(map(str, paths))}: row {row} has "
            f"{', '.join(f'{name} {column[row]}' for name, column in counted.items())}; "
            f"{words([*lengths.item_names, 'loss_tokens'])} must be at least 0 and tokens at least "
            "1; rebuild the file with `omnibal lengths`"
        )
    for name, squares in lengths.squares.items():
        items = lengths.column(name.removeprefix("squared_")).astype(np.int64)
        wrong = (squares < items) | (squares > items**2)
        if wrong.any():
            row = int(wrong.argmax())
            raise UserError(
                f"{', '.join(map(str, paths))}: row {row} has {name} {squares[row]}; of "
                f"{items[row]} {name.removeprefix('squared_')} it must be at least as much and at "
                "most the square; rebuild the file with `omnibal lengths`"
            )
    if lengths.image_sizes is not None:
        _check_image_sizes(lengths, lengths.image_sizes, paths)


def _check_image_sizes(lengths: Lengths, sizes: ImageSizes, paths: Sequence[Path]) -> None:
    """Refuse lists of images that are not what the samples' sums are of."""
    are_counts = all((sizes.images[name] > 0).all() for name in _SIZES)
    for name, found in ((_IMAGE_TOKENS, sizes.tokens), (squares_of(_IMAGE_TOKENS), sizes.squares)):
        wrong = lengths.column(name) != found
        if wrong.any() or not are_counts:
            row = int(wrong.argmax())
            raise UserError(
                f"{', '.join(map(str, paths))}: row {row} has {name} {lengths.column(name)[row]}, "
                f"and by {words(list(_SIZES.values()))} {found[row]}; entries must be at least 1 "
                "and their sums the same; rebuild the file with `omnibal lengths`"
            )


def _read_file(path: Path) -> list[Lengths]:
    if not path.is_file():
        raise UserError(
            f"{path}: no such lengths file; make one with `omnibal lengths META -o {path}`"
        )
    if path.suffix == ".json":
        return _read_json(path)
    remedy = "a lengths file is .json, or Parquet as `omnibal lengths` makes it"
    columns = Columns.read(path, [*_TOKENS, "source"], remedy)
    names = columns.once(ITEM_FEATURES)
    source, source_names = columns.categories("source")
    origin = _origin(columns)
    return [
        Lengths(
            items={name: columns.integers(name, pa.int32()) for name in names},
            tokens=columns.integers("tokens", pa.int32()),
            loss_tokens=columns.integers("loss_tokens", pa.int32()),
            source=source,
            source_names=source_names,
            squares={
                name: columns.integers(name, pa.int64()) for name in columns.once(SQUARED_FEATURES)
            },
            origin=origin,
            sample=_sample(columns) if origin is not None or _rows(columns) else None,
            repeats=_rows(columns) == _REPEATED,
            image_sizes=_image_sizes(columns),
        )
    ]


def _origin(columns: Columns) -> LengthsOrigin | None:
    metadata = (columns.schema.metadata or {}).get(_METADATA_KEY)
    if metadata is None:
        return None
    where = f"{columns.path}: origin"
    return parse_json_model(LengthsOrigin, metadata, where, "make it anew with `omnibal lengths`")


def _image_sizes(columns: Columns) -> ImageSizes | None:
    if not set(_SIZES.values()) & set(columns.schema.names):
        return None
    columns.require(_SIZES.values())
    (times, counts), (tokens, others) = (columns.integer_lists(name) for name in _SIZES.values())
    if (counts != others).any():
        row = int((counts != others).argmax())
        raise UserError(
            f"{columns.path}: row {row} has {counts[row]} entries of {_SIZES['times']} and "
            f"{others[row]} of {_SIZES['tokens']}; both must have one for every image and video; "
            "make it anew with `omnibal lengths`"
        )
    images = np.empty(len(times), IMAGE)
    images["times"], images["tokens"] = times, tokens
    return ImageSizes(images=images, counts=counts)


def _rows(columns: Columns) -> bytes | None:
    """What the column `sample` says of rows of a plan's data; None where it is of annotations."""
    return (columns.schema.metadata or {}).get(_ROWS_KEY)


def _sample(columns: Columns) -> np.ndarray | None:
    if _SAMPLE not in columns.schema.names:
        return None
    sample = columns.integers(_SAMPLE, pa.int64())
    wrong = np.diff(sample, prepend=-1) < (0 if _rows(columns) == _REPEATED else 1)
    wrong[:1] |= sample[:1] < 0
    if wrong.any():
        row = int(wrong.argmax())
        raise UserError(
            f"{columns.path}: column {_SAMPLE} holds {sample[row]} in row {row}; it must ascend "
            "from 0 or more, as each sample has one row; make it anew with `omnibal lengths`"
        )
    return sample


def _read_json(path: Path) -> list[Lengths]:
    text = _read_text(path)
    if not _is_meta(text):
        return [_from_records(text, path, path.stem)]
    named = _named_files(text, path).items()
    return [_from_records(_read_text(file), file, name) for name, file in named]


def _is_meta(text: str) -> bool:
    return text.lstrip().startswith("{")


def _named_files(text: str, path: Path) -> dict[str, Path]:
    """Length files that a meta JSON of lengths names, by source."""
    entries = parse_json_model(
        dict[str, _MetaEntry],
        text,
        str(path),
        'a meta JSON of lengths maps each source name to {"token_lengths": "file.json"}',
    )
    if not entries:
        raise UserError(f"{path}: names no lengths file; at least one source must be given")
    # An absolute path stays what it is.
    return {name: path.parent / entry.token_lengths for name, entry in entries.items()}


def _read_text(path: Path) -> str:
    return read_text(path, "correct the path to the lengths, which are Parquet or .json")


def _from_records(text: str, path: Path, source_name: str) -> Lengths:
    """OmniBal's public format; it has no loss counts, which are therefore read as 0."""
    records = parse_json_model(
        list[_Record],
        text,
        str(path),
        'a lengths JSON is a list of {"vit_num", "token_num", "image_flags"} in whole numbers',
    )
    has_image = np.array([np.sum(record.image_flags) > 0 for record in records], bool)
    tiles = np.array([record.vit_num for record in records], np.int32)
    return Lengths(
        items={"tiles": np.where(has_image, tiles, 0).astype(np.int32)},
        tokens=np.array([record.token_num for record in records], np.int32),
        loss_tokens=np.zeros(len(records), np.int32),
        source=np.zeros(len(records), np.int32),
        source_names=(source_name,),
        origin=None,
    )
