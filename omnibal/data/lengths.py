"""Sample lengths, read from Parquet or OmniBal's JSON.

A row has `tokens`, `loss_tokens`, and a column per item kind: `tiles` (with thumbnail), `clips`, or
`image_tokens` with `squared_image_tokens` (sum of squared tokens per image and frame). Lists
`image_times` (1 for an image) and `tokens_per_time` have an entry per image or video. `sample` is
the annotation index, if samples were skipped, selected or repeated.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, Field, Strict

from omnibal.base.errors import UserError
from omnibal.base.files import atomic, parse_json_model, read_text
from omnibal.base.frozen import Frozen, written_unless
from omnibal.data.columns import Columns, no_items
from omnibal.data.image_sizes import IMAGE, ImageSizes
from omnibal.model.config import ChatTemplateName, ModelConfig
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
# Metadata key of "once" or "repeated": `sample` then indexes rows of a plan's data.
_ROWS_KEY = b"omnibal_rows"
_REPEATED = b"repeated"
_SAMPLE_COLUMN = "sample"
_TOKENS = ("tokens", "loss_tokens")
_IMAGE_FEATURE = ImagesEncoder.feature
# List columns by `ImageSizes` field.
_LIST_COLUMNS = {"times": "image_times", "tokens": "tokens_per_time"}
_Int32 = Annotated[int, Strict(), Field(ge=-(2**31), lt=2**31)]


class _Record(BaseModel):
    """Sample in OmniBal's public format; other fields are ignored."""

    vit_num: _Int32
    token_num: _Int32
    image_flags: _Int32 | list[_Int32]


class _MetaEntry(BaseModel):
    """Source in OmniBal's meta JSON; other fields are ignored."""

    token_lengths: str


class ClipSizes(Frozen):
    """Clip length in frames and tokens."""

    frames: int  # log-mel frames per clip, 10 ms apart
    tokens_per_clip: int

    def __str__(self) -> str:
        return f"clips of {self.frames} frames and {self.tokens_per_clip} tokens"


class LengthsOrigin(Frozen):
    """Identity of a scan's inputs. Training refuses other data or tokenizers."""

    data_sha256: str  # `Annotations.sha256`
    tokenizer_sha256: str
    image_size: int | None
    tokens_per_tile: int | None
    tiling: TilingConfig | None  # None, like the two fields above, without tiles
    clips: ClipSizes | None = written_unless(None)  # None without recordings
    images: ImageRule | None = written_unless(None)  # native-resolution rule
    chat_template: ChatTemplateName
    system_message: str | None

    @classmethod
    def of_model(
        cls, model: ModelConfig, data_sha256: str = "", tokenizer_sha256: str = ""
    ) -> "LengthsOrigin":
        """Return the identity of a scan for a model."""
        vision = model.vision if model.takes_images else None
        audio = model.audio if model.takes_audio else None
        return cls(
            data_sha256=data_sha256,
            tokenizer_sha256=tokenizer_sha256,
            image_size=vision and vision.image_size,
            tokens_per_tile=vision and vision.tokens_per_item,
            tiling=model.tiling,
            clips=audio and ClipSizes(frames=audio.frames, tokens_per_clip=audio.tokens_per_item),
            images=model.images and model.images.image_rule,
            chat_template=model.chat_template,
            system_message=model.system_message,
        )

    @property
    def tiles(self) -> str | None:
        """Text of a tile's sizes, None without tiles."""
        if self.image_size is None:
            return None
        return f"{self.image_size} pixels and {self.tokens_per_tile} tokens"


def check_same_data(name: str, given: str, planned: str) -> None:
    """Raise UserError unless the SHA-256 of `name`, data or tokenizer, is the planned one."""
    if planned != given:
        raise UserError(
            f"the plan was made for other data: {name} has sha256 {given[:12]}, the scanned one "
            f"{planned[:12]}; use that, or run `omnibal lengths` and `omnibal plan` on this"
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lengths:
    """Arrays of equal length with an entry per sample, in meta-file order; int32 by default."""

    items: dict[str, np.ndarray]  # by name, such as `tiles`
    tokens: np.ndarray
    loss_tokens: np.ndarray
    source: np.ndarray  # index in `source_names`
    source_names: tuple[str, ...]
    origin: LengthsOrigin | None = None  # None if not from one scan; data cannot then be checked
    # Sums of squared tokens per image or frame, int64, such as `squared_image_tokens`. If absent,
    # one image per sample is assumed.
    squares: dict[str, np.ndarray] = field(default_factory=dict)
    sample: np.ndarray | None = None  # annotation index, int64, ascending; None if it is the row
    repeats: bool = False  # whether `sample` may repeat an index, as in a mixture
    image_sizes: ImageSizes | None = None  # of every native-resolution image and video

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def item_names(self) -> tuple[str, ...]:
        return tuple(sorted(self.items))

    @property
    def sha256(self) -> str:
        """SHA-256 of the columns and source names, independent of the file format."""
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
            digest.update(_SAMPLE_COLUMN.encode())
            digest.update(np.ascontiguousarray(self.sample, dtype="<i8").tobytes())
        return digest.hexdigest()

    def column(self, name: str) -> np.ndarray:
        """Return a feature, int32 [samples], or 0; int64 squares, or one image's if not counted."""
        if name in self.squares:
            return self.squares[name]
        if name in SQUARED_FEATURES:  # not counted: as of one image, an upper bound
            return self.column(name.removeprefix("squared_")).astype(np.int64) ** 2
        columns = {**self.items, "tokens": self.tokens, "loss_tokens": self.loss_tokens}
        return columns[name] if name in columns else no_items(len(self))

    @property
    def without_squares(self) -> tuple[str, ...]:
        counted = [name for name in self.item_names if squares_of(name) in SQUARED_FEATURES]
        return tuple(name for name in counted if squares_of(name) not in self.squares)

    @property
    def is_without_image_sizes(self) -> bool:
        """Whether per-image tokens are needed but were not counted."""
        return _IMAGE_FEATURE in self.items and self.image_sizes is None

    def pieces_of_images(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens and squares per indivisible piece, and pieces per sample, all int64.

        A piece is an image, a time of a video, or a sample if its images were not counted.
        """
        if self.image_sizes is not None:
            tokens, counts = self.image_sizes.pieces(samples)
            return tokens, tokens**2, counts
        tokens = self.column(_IMAGE_FEATURE)[samples].astype(np.int64)
        squares = self.column(squares_of(_IMAGE_FEATURE))[samples]
        return tokens, squares, np.ones(len(samples), np.int64)

    def sizes(self, names: Sequence[str]) -> np.ndarray:
        """Return features of every sample, int64 [names, samples]."""
        return np.stack([self.column(name) for name in names]).astype(np.int64)

    def statistics_by_source(self, most: int | None = None) -> list[dict[str, Any]]:
        """Return count, mean and max lengths (None without samples) by source, and of all, last.

        Args:
            most: largest sources to list. The others are one entry.
        """
        codes = np.arange(len(self.source_names))
        if most is not None:
            codes = np.argsort(-np.bincount(self.source, minlength=len(codes)), kind="stable")
        groups = [(self.source_names[code], self.source == code) for code in codes[:most]]
        others = codes[len(groups) :]
        if len(others):
            groups.append((f"{len(others)} smaller sources", np.isin(self.source, others)))
        groups.append(("all", np.ones(len(self), bool)))
        return [{"source": name, **self._statistics(rows)} for name, rows in groups]

    def _statistics(self, rows: np.ndarray) -> dict[str, float | None]:
        statistics: dict[str, float | None] = {"samples": int(rows.sum())}
        for name in (*self.item_names, "tokens"):
            values = self.column(name)[rows]
            statistics[f"{name}_mean"] = float(values.mean()) if len(values) else None
            statistics[f"{name}_max"] = int(values.max()) if len(values) else None
        return statistics

    def take(self, rows: np.ndarray) -> "Lengths":
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
        """Return the annotation indices of rows, int64 [rows]."""
        return rows if self.sample is None else self.sample[rows]


_SHORTEN = "leave out longer samples, or max_positions and rope_factor of the model's TOML"


def draw_samples(lengths: Lengths, samples: int, seed: int) -> Lengths:
    if samples >= len(lengths):
        return lengths
    return lengths.take(np.sort(np.random.default_rng(seed).permutation(len(lengths))[:samples]))


def check_positions(tokens: int, model: ModelConfig, what: str, remedy: str = _SHORTEN) -> None:
    """Raise UserError if a sample exceeds the model's `max_positions`: RoPE is not scaled here."""
    # Positions restart at each sample of a pack, so that packs are not limited.
    limit = model.language.max_positions
    if limit is not None and tokens > limit:
        raise UserError(
            f"{what} has {tokens:,} tokens, above language.max_positions {limit:,}; {remedy}"
        )


def write_lengths(lengths: Lengths, path: Path) -> None:
    source = pa.DictionaryArray.from_arrays(
        pa.array(lengths.source, pa.int32()), pa.array(lengths.source_names, pa.string())
    )
    counts = {
        name: pa.array(lengths.column(name), pa.int32()) for name in (*lengths.item_names, *_TOKENS)
    }
    squares = {
        name: pa.array(column, pa.int64()) for name, column in sorted(lengths.squares.items())
    }
    lists: dict[str, pa.Array] = {}
    if lengths.image_sizes is not None:
        offsets = pa.array(np.append(0, np.cumsum(lengths.image_sizes.counts)), pa.int64())
        for name, column in _LIST_COLUMNS.items():
            entries = np.ascontiguousarray(lengths.image_sizes.images[name])
            values = pa.array(entries, pa.int32())
            lists[column] = pa.LargeListArray.from_arrays(offsets, values)
    table = pa.table({**counts, **squares, **lists, "source": source})
    metadata: dict[bytes, bytes] = {}
    if lengths.origin is not None:
        metadata[_METADATA_KEY] = lengths.origin.model_dump_json().encode()
    if lengths.sample is not None:
        table = table.append_column(_SAMPLE_COLUMN, pa.array(lengths.sample, pa.int64()))
        if lengths.repeats or lengths.origin is None:
            metadata[_ROWS_KEY] = _REPEATED if lengths.repeats else b"once"
    with atomic(path) as temporary:
        pq.write_table(table.replace_schema_metadata(metadata or None), temporary)


def read_lengths(paths: Sequence[Path]) -> Lengths:
    """Read and join length files: Parquet, OmniBal's list or its meta JSON. Raises UserError."""
    if not paths:
        raise UserError("no lengths file was given; pass at least one Parquet or JSON file")
    parts = [part for path in paths for part in _read_lengths_file(path)]
    lengths = parts[0] if len(parts) == 1 else join_lengths(parts)
    if not len(lengths):
        raise UserError(f"{', '.join(map(str, paths))}: holds no sample; give at least one")
    _check_item_counts(lengths, paths)
    return lengths


def join_lengths(parts: Sequence[Lengths]) -> Lengths:
    """Return the samples of all parts in turn, with rows as their indices."""
    names = tuple(dict.fromkeys(name for part in parts for name in part.source_names))
    codes = [
        np.array([names.index(name) for name in part.source_names], np.int32)[part.source]
        for part in parts
    ]
    item_names = sorted({name for part in parts for name in part.items})
    # Keep squares and image lists only if all parts with such items have them.
    lacking = {squares_of(name) for part in parts for name in part.without_squares}
    squares = sorted({name for part in parts for name in part.squares} - lacking)

    def join_column(name: str) -> np.ndarray:
        return np.concatenate([part.column(name) for part in parts])

    sizes = None
    counted = [part.image_sizes for part in parts]
    if any(s is not None for s in counted) and not any(
        part.is_without_image_sizes for part in parts
    ):
        pairs = zip(parts, counted, strict=True)
        sizes = ImageSizes.join([ImageSizes.none(len(p)) if s is None else s for p, s in pairs])

    return Lengths(
        items={name: join_column(name) for name in item_names},
        tokens=join_column("tokens"),
        loss_tokens=join_column("loss_tokens"),
        source=np.concatenate(codes),
        source_names=names,
        squares={name: join_column(name) for name in squares},
        image_sizes=sizes,
    )


def length_files(paths: Sequence[Path]) -> list[Path]:
    """List the files that `read_lengths` reads, including files named in a meta JSON."""
    lists = [path for path in paths if path.suffix == ".json" and path.is_file()]
    return [*paths, *(named for path in lists for named in _list_named_files(path).values())]


def _check_item_counts(lengths: Lengths, paths: Sequence[Path]) -> None:
    """Raise UserError if a row's counts are negative, without tokens or contradictory."""
    where = ", ".join(map(str, paths))
    for name in (*lengths.item_names, *_TOKENS):
        column, least = lengths.column(name), int(name == "tokens")
        rule = f"{name} {{}}, which must be at least {least}"
        _refuse_rows(where, column < least, rule, column)
    for name, squares in lengths.squares.items():
        items = lengths.column(name.removeprefix("squared_")).astype(np.int64)
        wrong = (squares < items) | (squares > items**2)
        rule = f"{name} {{}}, which must be {{}} to {{}} by {name.removeprefix('squared_')}"
        _refuse_rows(where, wrong, rule, squares, items, items**2)
    sizes = lengths.image_sizes
    if sizes is None:
        return
    is_odd = any((sizes.images[name] < 1).any() for name in _LIST_COLUMNS)
    lists = words(list(_LIST_COLUMNS.values()))
    for name, sums in ((_IMAGE_FEATURE, sizes.tokens), (squares_of(_IMAGE_FEATURE), sizes.squares)):
        column = lengths.column(name)
        rule = f"{name} {{}}, and {{}} by {lists}, whose entries must be at least 1 and sum to it"
        _refuse_rows(where, (column != sums) | is_odd, rule, column, sums)


def _refuse_rows(where: object, wrong: np.ndarray, rule: str, *columns: np.ndarray) -> None:
    """Raise UserError if any row is wrong: `rule` formats its values of `columns`."""
    if wrong.any():
        row = int(wrong.argmax())
        found = rule.format(*(column[row] for column in columns))
        raise UserError(f"{where}: row {row} has {found}; rebuild it with `omnibal lengths`")


def _read_lengths_file(path: Path) -> list[Lengths]:
    if not path.is_file():
        raise UserError(f"{path}: no such file; make one with `omnibal lengths META -o {path}`")
    if path.suffix == ".json":
        named = _list_named_files(path) or {path.stem: path}
        return [_parse_public(file, name) for name, file in named.items()]
    remedy = "a lengths file is .json, or Parquet as `omnibal lengths` makes it"
    columns = Columns.open(path, [*_TOKENS, "source"], remedy)
    names = columns.once(ITEM_FEATURES)
    source, source_names = columns.categories("source")
    metadata = columns.schema.metadata or {}
    origin = None
    if _METADATA_KEY in metadata:
        where, repair = f"{path}: origin", "rebuild it with `omnibal lengths`"
        origin = parse_json_model(LengthsOrigin, metadata[_METADATA_KEY], where, repair)
    kind = metadata.get(_ROWS_KEY)  # None if `sample` is absent or of annotations
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
            sample=_read_rows(columns, kind == _REPEATED) if origin is not None or kind else None,
            repeats=kind == _REPEATED,
            image_sizes=_read_image_sizes(columns),
        )
    ]


def _read_image_sizes(columns: Columns) -> ImageSizes | None:
    if not set(_LIST_COLUMNS.values()) & set(columns.schema.names):
        return None
    first, second = _LIST_COLUMNS.values()
    columns.require((first, second))
    (times, counts), (tokens, others) = columns.integer_lists(first), columns.integer_lists(second)
    rule = f"{{}} entries of {first} and {{}} of {second}: both need one for every image and video"
    _refuse_rows(columns.path, counts != others, rule, counts, others)
    images = np.empty(len(times), IMAGE)
    images["times"], images["tokens"] = times, tokens
    return ImageSizes(images=images, counts=counts)


def _read_rows(columns: Columns, repeats: bool) -> np.ndarray | None:
    if _SAMPLE_COLUMN not in columns.schema.names:
        return None
    sample = columns.integers(_SAMPLE_COLUMN, pa.int64())
    wrong = np.diff(sample, prepend=-1) < (0 if repeats else 1)
    wrong[:1] |= sample[:1] < 0
    rule = f"{_SAMPLE_COLUMN} {{}}, which must ascend from 0 or more, a row per sample"
    _refuse_rows(columns.path, wrong, rule, sample)
    return sample


def _list_named_files(path: Path) -> dict[str, Path]:
    """Return the files that a meta JSON names, by source, from its folder. Empty for a list."""
    text = _read_lengths_text(path)
    if not text.lstrip().startswith("{"):
        return {}
    entries = parse_json_model(
        dict[str, _MetaEntry],
        text,
        str(path),
        'a meta JSON of lengths maps each source name to {"token_lengths": "file.json"}',
    )
    if not entries:
        raise UserError(f"{path}: names no lengths file; at least one source must be given")
    # Absolute paths stay unchanged.
    return {name: path.parent / entry.token_lengths for name, entry in entries.items()}


def _read_lengths_text(path: Path) -> str:
    return read_text(path, "correct the path to the lengths, which are Parquet or .json")


def _parse_public(path: Path, source_name: str) -> Lengths:
    """Return lengths from OmniBal's public format. It has no loss tokens: all are 0."""
    records = parse_json_model(
        list[_Record],
        _read_lengths_text(path),
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
    )
