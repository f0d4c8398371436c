"""Length and pack files: what is written comes back, and a wrong file gets one clear error."""

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths, LengthsOrigin, read_lengths, write_lengths
from omnibal.model.encoders import TilingConfig
from omnibal.packing.packs import (
    Packs,
    ScheduledPacks,
    read_packs,
    sum_squared_tokens,
    write_packs,
)

pytestmark = pytest.mark.quick

COLUMNS = ("tiles", "tokens", "loss_tokens", "source")
RECORDS = [
    {"vit_num": 3, "token_num": 900, "image_flags": [1, 1, 1]},
    {"vit_num": 1, "token_num": 40, "image_flags": [0]},
]


def example_lengths(source_names: tuple[str, ...] = ("charts", "text")) -> Lengths:
    return Lengths(
        items={"tiles": np.array([3, 0, 1], np.int32)},
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
            chat_template="internlm2-chat",
            system_message=None,
        ),
    )


def example_packs() -> ScheduledPacks:
    return ScheduledPacks(
        packs=Packs.from_lists([[2, 0], [1]]),
        step=np.array([0, 1]),
        dp_rank=np.array([0, 1], np.int32),
        slot=np.array([0, 0], np.int32),
        epoch=np.array([0, 0], np.int32),
        items={"tiles": np.array([4, 0], np.int32)},
        tokens=np.array([1200, 40], np.int32),
        level=np.zeros(2, np.int32),
    )


def test_lengths_round_trip(tmp_path):
    """Prevents a column or the origin from being lost or reordered in the file."""
    lengths, path = example_lengths(), tmp_path / "lengths.parquet"
    write_lengths(lengths, path)
    again = read_lengths([path])
    for column in COLUMNS[:3]:
        assert again.column(column).tolist() == lengths.column(column).tolist()
        assert again.column(column).dtype == np.int32
    assert again.source.tolist() == lengths.source.tolist()
    assert again.source_names == lengths.source_names
    assert again.origin == lengths.origin
    assert again.sha256 == lengths.sha256
    assert [file.name for file in tmp_path.iterdir()] == ["lengths.parquet"]


@pytest.mark.parametrize("column", COLUMNS)
def test_lengths_hash_sees_every_column(column):
    """Prevents packs from being used with lengths that changed."""
    lengths = example_lengths()
    before = lengths.sha256
    changed = lengths.source if column == "source" else lengths.column(column)
    changed[1] ^= 1
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
        assert lengths.column("tiles").tolist() == [3, 0]
        assert lengths.tokens.tolist() == [900, 40]
        assert lengths.source_names == (source,)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("absent.parquet", None, "no such lengths file"),
        ("text.parquet", "hello", "not a Parquet file"),
        ("half.json", "[{", "half.json: Invalid JSON"),
        ("keys.json", '[{"vit_num": 1}]', "token_num"),
        ("nan.json", '[{"vit_num": NaN, "token_num": 1, "image_flags": 1}]', "nan.json"),
        ("negative.json", '[{"vit_num": -1, "token_num": 1, "image_flags": 1}]', "row 0 has tiles"),
        ("empty.json", "[]", "holds no sample"),
        ("number.json", "7", "list"),
        ("meta.json", '{"docs": {"root": "x"}}', "token_lengths"),
        ("typed.json", '{"docs": {"token_lengths": 5}}', "token_lengths"),
        ("none.json", "{}", "names no lengths file"),
        ("array.json", '{"docs": []}', "array.json: docs: "),
        ("flags.json", '[{"vit_num": 1, "token_num": 1, "image_flags": "x"}]', "image_flags"),
        ("mixed.json", '[{"vit_num": 1, "token_num": 1, "image_flags": [1, "x"]}]', "image_flags"),
        ("part.json", '[{"vit_num": 3.7, "token_num": 1, "image_flags": 1}]', "vit_num.*3.7"),
        ("text.json", '[{"vit_num": "3", "token_num": 1, "image_flags": 1}]', "vit_num"),
        ("null.json", '[{"vit_num": null, "token_num": 1, "image_flags": 1}]', "vit_num"),
        ("large.json", '[{"vit_num": 1, "token_num": 4294967301, "image_flags": 1}]', "token_num"),
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
    for column in ("step", "dp_rank", "slot", "epoch", "tokens"):
        assert getattr(again, column).tolist() == getattr(packs, column).tolist()
    assert again.column("tiles").tolist() == packs.column("tiles").tolist()
    assert again.sha256 == packs.sha256
    write_packs(again, path)
    assert path.read_bytes() == first_bytes


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        ("tiles", pa.array([3.7]), " holds double"),
        ("tiles", pa.array([float("nan")]), " holds double"),
        ("tiles", pa.array(["3"]), " holds string"),
        ("tiles", pa.array([True]), " holds bool"),
        ("tokens", pa.array([2**32 + 5], pa.int64()), ": .*4294967301 not in range"),
        ("tokens", pa.array([2**31], pa.uint32()), ": .*2147483648 not in range"),
        ("loss_tokens", pa.array([None], pa.int32()), " holds int32 with nulls"),
        ("source", pa.array([7]), " holds int64"),
        ("source", pa.nulls(1), " holds null with nulls"),
        ("source", pa.array([None], pa.string()), " holds string with nulls"),
        ("source", pa.array([None], pa.string()).dictionary_encode(), " holds .* with nulls"),
    ],
)
def test_columns_of_another_kind_are_refused(tmp_path, column, values, expected):
    """Prevents counts that were rounded, wrapped or read from nothing."""
    columns = {name: pa.array([1], pa.int32()) for name in COLUMNS} | {"source": pa.array(["a"])}
    pq.write_table(pa.table(columns | {column: values}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=rf"a\.parquet: column {column}{expected}"):
        read_lengths([tmp_path / "a.parquet"])


@pytest.mark.parametrize("kind", [pa.uint8(), pa.int16(), pa.int64(), pa.uint64()])
@pytest.mark.parametrize("text", [pa.string(), pa.large_string()])
def test_integers_of_any_width_are_read(tmp_path, kind, text):
    """Prevents refusing files whose counts fit, written by other tools."""
    columns = {name: pa.array([100, 7], kind) for name in COLUMNS}
    columns["source"] = pa.array(["b", "a"], text)
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    lengths = read_lengths([tmp_path / "a.parquet"])
    for column in COLUMNS[:3]:
        assert lengths.column(column).tolist() == [100, 7]
        assert lengths.column(column).dtype == np.int32
    assert [lengths.source_names[code] for code in lengths.source] == ["b", "a"]


def test_row_groups_with_dictionaries_of_their_own(tmp_path):
    """Prevents codes of one row group from being read with another's names."""
    names = ["b", "a", "c", "a"]
    columns = {name: pa.array([1, 2, 3, 4], pa.int32()) for name in COLUMNS}
    columns["source"] = pa.chunked_array([pa.array(names[:2]), pa.array(names[2:])])
    table = pa.table(columns | {"source": columns["source"].dictionary_encode()})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    lengths = read_lengths([tmp_path / "a.parquet"])
    assert [lengths.source_names[code] for code in lengths.source] == names


def skipping(sample: list[int]) -> Lengths:
    return dataclasses.replace(example_lengths(), sample=np.array(sample))


def test_lengths_of_all_samples_stay_as_they_were(tmp_path):
    """Prevents plans from being refused since their lengths have another hash than when planned."""
    lengths = example_lengths()
    assert lengths.sha256.startswith("9ad8ebf8cdf46e48d1bdc725f642a004")
    write_lengths(lengths, tmp_path / "a.parquet")
    assert pq.read_table(tmp_path / "a.parquet").column_names == list(COLUMNS)
    assert read_lengths([tmp_path / "a.parquet"]).sample is None
    assert lengths.annotation_indices(np.array([2, 0])).tolist() == [2, 0]


def test_lengths_with_skipped_samples(tmp_path):
    """Prevents a skipped sample from being trained on in place of the row's own."""
    lengths = skipping([1, 4, 5])
    write_lengths(lengths, tmp_path / "a.parquet")
    again = read_lengths([tmp_path / "a.parquet"])
    assert again.annotation_indices(np.array([2, 0, 0])).tolist() == [5, 1, 1]
    hashes = [example_lengths().sha256, lengths.sha256, skipping([0, 1, 2]).sha256]
    assert again.sha256 == lengths.sha256
    assert len(set(hashes)) == 3


def test_samples_without_origin_mean_nothing(tmp_path):
    """Prevents indices into annotations from being kept where nobody knows which."""
    write_lengths(skipping([1, 4, 5]), tmp_path / "a.parquet")
    joined = read_lengths([tmp_path / "a.parquet"] * 2)
    assert joined.sample is None
    table = pq.read_table(tmp_path / "a.parquet").replace_schema_metadata(None)
    pq.write_table(table, tmp_path / "a.parquet")
    assert read_lengths([tmp_path / "a.parquet"]).sample is None


@pytest.mark.parametrize("sample", [[1, 1, 2], [2, 1, 3], [-1, 0, 1]])
def test_samples_that_do_not_ascend_are_refused(tmp_path, sample):
    """Prevents a damaged file from training a sample twice, or the last one for index -1."""
    write_lengths(skipping(sample), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: column sample holds .* must ascend"):
        read_lengths([tmp_path / "a.parquet"])


@pytest.mark.parametrize("metadata", ["{", "{}", '{"data_sha256": "d", "cache": 1}', b"\xff"])
def test_an_origin_of_another_version_is_refused(tmp_path, metadata):
    """Prevents a traceback for lengths that another version scanned."""
    write_lengths(example_lengths(), tmp_path / "a.parquet")
    table = pq.read_table(tmp_path / "a.parquet").replace_schema_metadata({"omnibal": metadata})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: origin: .*omnibal lengths"):
        read_lengths([tmp_path / "a.parquet"])


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        ("step", pa.array([0.0, 1.0]), "column step holds double"),
        ("slot", pa.array([0, None], pa.int32()), "column slot holds int32 with nulls"),
        ("dp_rank", pa.array([0, 2**33]), "column dp_rank: .*not in range"),
        ("samples", pa.array([1, 2]), "column samples holds int64"),
        ("samples", pa.array([["a"], ["b"]]), "column samples holds list<.*string>"),
        ("samples", pa.array([[0.5], [1.0]]), "column samples holds list<.*double>"),
        ("samples", pa.array([[0], None]), "column samples .*with nulls"),
        ("samples", pa.array([[0, None], [1]]), "column samples .*with nulls"),
        ("samples", pa.array([[0, 1], []], pa.list_(pa.int64())), "row 1 has no samples"),
    ],
)
def test_packs_of_another_kind_are_refused(tmp_path, column, values, expected):
    """Prevents packs that were rounded, or shifted by a list that is not there."""
    path = tmp_path / "packs.parquet"
    write_packs(example_packs(), path)
    table = pq.read_table(path)
    table = table.set_column(table.column_names.index(column), column, values)
    pq.write_table(table, path)
    with pytest.raises(UserError, match=rf"packs\.parquet: {expected}.*omnibal plan"):
        read_packs(path)


def test_packs_of_other_writers(tmp_path):
    """Prevents small lists in several row groups, as other tools write them, from shifting."""
    path = tmp_path / "packs.parquet"
    names = ("step", "dp_rank", "slot", "epoch", "tiles", "tokens")
    table = pa.table(
        {name: pa.array(range(4)) for name in names}
        | {"samples": pa.array([[5], [1, 2], [3], [0, 4]], pa.list_(pa.int32()))}
    )
    pq.write_table(table, path, row_group_size=2)
    packs = read_packs(path).packs
    assert [packs[i].tolist() for i in range(4)] == [[5], [1, 2], [3], [0, 4]]


def test_sums_and_take_follow_the_members():
    """Prevents sums over neighbours' samples after packs were reordered."""
    lengths, packs = example_lengths(), example_packs().packs
    assert packs.sums(lengths.tokens).tolist() == [1200, 40]
    assert sum_squared_tokens(packs, lengths).tolist() == [900**2 + 300**2, 40**2]
    assert [p.tolist() for p in map(packs.take(np.array([1, 0])).__getitem__, (0, 1))] == [
        [1],
        [2, 0],
    ]
