"""Length and pack files: what is written comes back, and a wrong file gets one clear error."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnibal.config import TilingConfig
from omnibal.data.lengths import Lengths, LengthsOrigin, read_lengths, write_lengths
from omnibal.data.packs import (
    Packs,
    ScheduledPacks,
    read_packs,
    sum_squared_tokens,
    write_packs,
)
from omnibal.errors import UserError

COLUMNS = ("tiles", "tokens", "loss_tokens", "source")
RECORDS = [
    {"vit_num": 3, "token_num": 900, "image_flags": [1, 1, 1]},
    {"vit_num": 1, "token_num": 40, "image_flags": [0]},
]


def example_lengths(source_names: tuple[str, ...] = ("charts", "text")) -> Lengths:
    return Lengths(
        tiles=np.array([3, 0, 1], np.int32),
        tokens=np.array([900, 40, 300], np.int32),
        loss_tokens=np.array([20, 30, 5], np.int32),
        source=np.array([0, 1, 0], np.int32),
        source_names=source_names,
        origin=LengthsOrigin(
            data_sha256="d",
            tokenizer_sha256="t",
            image_size=448,
            tokens_per_tile=256,
            tiling=TilingConfig(max_dynamic_patch=6),
        ),
    )


def example_packs() -> ScheduledPacks:
    return ScheduledPacks(
        packs=Packs.from_lists([[2, 0], [1]]),
        step=np.array([0, 1]),
        dp_rank=np.array([0, 1], np.int32),
        slot=np.array([0, 0], np.int32),
        epoch=np.array([0, 0], np.int32),
        tiles=np.array([4, 0], np.int32),
        tokens=np.array([1200, 40], np.int32),
    )


def test_lengths_round_trip(tmp_path):
    """Prevents a column or the origin from being lost or reordered in the file."""
    lengths, path = example_lengths(), tmp_path / "lengths.parquet"
    write_lengths(lengths, path)
    again = read_lengths([path])
    for column in COLUMNS:
        assert getattr(again, column).tolist() == getattr(lengths, column).tolist()
        assert getattr(again, column).dtype == np.int32
    assert again.source_names == lengths.source_names
    assert again.origin == lengths.origin
    assert again.sha256 == lengths.sha256
    assert [file.name for file in tmp_path.iterdir()] == ["lengths.parquet"]


@pytest.mark.parametrize("column", COLUMNS)
def test_lengths_hash_sees_every_column(column):
    """Prevents packs from being used with lengths that changed."""
    lengths = example_lengths()
    before = lengths.sha256
    getattr(lengths, column)[1] ^= 1
    assert lengths.sha256 != before


def test_joined_files_share_their_sources(tmp_path):
    """Prevents source codes of the second file from being read with the first file's names."""
    write_lengths(example_lengths(("charts", "text")), tmp_path / "a.parquet")
    write_lengths(example_lengths(("text", "pages")), tmp_path / "b.parquet")
    joined = read_lengths([tmp_path / "a.parquet", tmp_path / "b.parquet"])
    names = [joined.source_names[code] for code in joined.source]
    assert names == ["charts", "text", "charts", "text", "pages", "text"]
    assert joined.origin is None


def test_public_json_and_its_meta(tmp_path):
    """Prevents text-only samples, which that format writes as one dummy tile, from costing one."""
    (tmp_path / "docs.json").write_text(json.dumps(RECORDS))
    (tmp_path / "meta.json").write_text(json.dumps({"papers": {"token_lengths": "docs.json"}}))
    for name, source in (("docs.json", "docs"), ("meta.json", "papers")):
        lengths = read_lengths([tmp_path / name])
        assert lengths.tiles.tolist() == [3, 0]
        assert lengths.tokens.tolist() == [900, 40]
        assert lengths.source_names == (source,)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("absent.parquet", None, "no such lengths file"),
        ("text.parquet", "hello", "not a Parquet file"),
        ("half.json", "[{", "not a JSON file"),
        ("keys.json", '[{"vit_num": 1}]', "token_num"),
        ("nan.json", '[{"vit_num": NaN, "token_num": 1, "image_flags": 1}]', "nan.json"),
        ("negative.json", '[{"vit_num": -1, "token_num": 1, "image_flags": 1}]', "row 0 has tiles"),
        ("empty.json", "[]", "holds no sample"),
        ("number.json", "7", "list"),
        ("meta.json", '{"docs": {"root": "x"}}', "token_lengths"),
        ("typed.json", '{"docs": {"token_lengths": 5}}', "token_lengths"),
        ("lost.json", '{"docs": {"token_lengths": "gone.json"}}', "gone.json: no such"),
    ],
)
def test_wrong_lengths_files_are_named(tmp_path, name, content, expected):
    """Prevents a traceback, or a wrong plan, from a file that is not what its name says."""
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=expected):
        read_lengths([tmp_path / name])


def test_missing_column_is_named(tmp_path):
    """Prevents a bare KeyError for someone else's Parquet file."""
    pq.write_table(pa.table({"tiles": [1], "tokens": [2]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"lacks the column\(s\) loss_tokens, source"):
        read_lengths([tmp_path / "a.parquet"])


def test_packs_round_trip(tmp_path):
    """Prevents ragged sample lists from shifting by one, and bytes that differ between writes."""
    packs, path = example_packs(), tmp_path / "packs.parquet"
    write_packs(packs, path)
    first_bytes = path.read_bytes()
    again = read_packs(path)
    assert [again.packs[i].tolist() for i in range(2)] == [[2, 0], [1]]
    for column in ("step", "dp_rank", "slot", "epoch", "tiles", "tokens"):
        assert getattr(again, column).tolist() == getattr(packs, column).tolist()
    assert again.sha256 == packs.sha256
    write_packs(again, path)
    assert path.read_bytes() == first_bytes


@pytest.mark.parametrize("content", [None, "hello"])
def test_wrong_packs_file_is_named(tmp_path, content):
    """Prevents a traceback for a missing or foreign packs file."""
    path = Path(tmp_path / "packs.parquet")
    if content:
        path.write_text(content)
    with pytest.raises(UserError, match=r"packs\.parquet"):
        read_packs(path)


def test_sums_and_take_follow_the_members():
    """Prevents sums over neighbours' samples after packs were reordered."""
    lengths, packs = example_lengths(), example_packs().packs
    assert packs.sums(lengths.tokens).tolist() == [1200, 40]
    assert sum_squared_tokens(packs, lengths).tolist() == [900**2 + 300**2, 40**2]
    assert [p.tolist() for p in map(packs.take(np.array([1, 0])).__getitem__, (0, 1))] == [
        [1],
        [2, 0],
    ]
