"""Rows of Parquet: the same samples as lines of JSON about files, wherever their images are."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shard_cases import SAMPLES, TURNS, make_samples, write_lines

from omnibal.base.errors import UserError
from omnibal.base.worker_pool import LocalPool
from omnibal.data.annotations import Annotations
from omnibal.data.data_index import DataIndex
from omnibal.data.scan import scan_lengths
from omnibal.model.config import load_model

MODEL = load_model("internvl-digits")
COLUMNS = ("tiles", "tokens", "loss_tokens")


def scan(annotations: Annotations, tokenizer, **options):
    return scan_lengths(annotations, MODEL, tokenizer, lambda _: None, **options).lengths


def opened(folder: Path, **entry) -> Annotations:
    (folder / "meta.json").write_text(json.dumps({"a": entry}))
    return Annotations.open(folder / "meta.json")


def write_rows(path: Path, records: list[dict], pictures: Path | None) -> None:
    """Write records in small row groups, with images inside if their folder is given."""
    rows = [dict(record) for record in records]
    for row in rows:
        if pictures is not None and "image" in row:
            row["image"] = [
                {"bytes": (pictures / name).read_bytes(), "path": name} for name in row["image"]
            ]
    pq.write_table(pa.Table.from_pylist(rows, schema_of(rows)), path, row_group_size=5)


def schema_of(rows: list[dict]) -> pa.Schema:
    """All columns of all rows, not of the first alone."""
    columns = dict.fromkeys(name for row in rows for name in row)
    every = {n: pa.array([row.get(n) for row in rows]).type for n in columns}
    return pa.schema(every.items())


def files_of(annotations: Annotations, index: int) -> list[bytes]:
    found = []
    for file in annotations[index].files:
        with file.open() as content:
            found.append(content.read())
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, list[dict]]:
    """A folder with lines.json, rows of the same records with images named or inside, and the
    latter in two files; not to be written to but for meta.json."""
    folder = tmp_path_factory.mktemp("rows")
    records = make_samples(folder)
    write_lines(folder, records)
    pictures = folder / "pictures"
    write_rows(folder / "named.parquet", records, None)
    write_rows(folder / "inside.parquet", records, pictures)
    for number in range(2):
        write_rows(folder / f"train-{number}.parquet", records[number * 12 :][:12], pictures)
    return folder, records


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    "entry",
    [
        {"annotation": "named.parquet", "root": "pictures"},
        {"annotation": "inside.parquet", "root": "pictures"},
    ],
    ids=["named", "inside"],
)
def test_rows_are_the_samples_of_lines(written, tokenizer, entry, processes):
    """Prevents: rows of another group, images in another order, or keys that Arrow adds."""
    folder, _ = written
    lines, rows = Annotations.open(folder / "lines.json"), opened(folder, **entry)
    assert len(rows) == SAMPLES
    expected, found = scan(lines, tokenizer), scan(rows, tokenizer, pool=LocalPool(processes))
    for name in COLUMNS:
        assert (found.column(name) == expected.column(name)).all()
    for index in reversed(range(SAMPLES)):  # from one row group to another
        assert files_of(rows, index) == files_of(lines, index)
        assert rows[index].turns == lines[index].turns


def test_files_of_rows_are_one_source(written, tokenizer):
    """Prevents: rows of a second file taken for those of the first, or left out of the hash."""
    folder, records = written
    rows = opened(folder, shards="train-{0..1}.parquet")
    without_videos = [n for n, record in enumerate(records) if "video" not in record]
    lines = Annotations.open(folder / "lines.json")
    for index in without_videos:
        assert files_of(rows, index) == files_of(lines, index)
        assert rows[index].identity == lines[index].identity
    assert rows.sha256 != opened(folder, shards="train-{0..0}.parquet").sha256


def test_an_index_knows_rows(written, tmp_path):
    """Prevents: a training that reads whole files to open them, or finds other rows."""
    folder, _ = written
    (folder / "meta.json").write_text('{"a": {"annotation": "inside.parquet"}}')
    index = DataIndex.resumed(tmp_path / "data.index", LocalPool())
    first = Annotations.open(folder / "meta.json", index)
    again = Annotations.open(folder / "meta.json", DataIndex.read(tmp_path / "data.index"))
    assert again.sha256 == first.sha256
    assert files_of(again, 22) == files_of(first, 22)


def test_one_image_or_recording_of_a_row(tmp_path):
    """Prevents: a column of one file, as the hub's image datasets have, that is not understood."""
    row = {
        "image": {"bytes": b"png", "path": None},
        "audio": [b"wav"],
        "conversations": [{**TURNS[0], "value": "<image><audio>What?"}, TURNS[1]],
        "mask": b"\xff",
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    annotations = Annotations.open(tmp_path / "a.parquet")
    assert files_of(annotations, 0) == [b"png", b"wav"]
    assert "a.parquet: row 1, image 1" in str(annotations[0].images[0])


def test_columns_without_a_value_are_none(tmp_path):
    """Prevents: messages refused for the keys of others, which Arrow gives to each of them."""
    messages = [
        {"role": "user", "content": "Why?", "tool_calls": None},
        {"role": "assistant", "content": "So.", "tool_calls": None},
    ]
    schema = pa.schema({"messages": pa.list_(pa.struct([(n, pa.string()) for n in messages[0]]))})
    table = pa.Table.from_pylist([{"messages": messages}], schema)
    pq.write_table(table, tmp_path / "a.parquet")
    said = [{name: text for name, text in each.items() if text} for each in messages]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": said}))
    [rows, lines] = [Annotations.open(tmp_path / name) for name in ("a.parquet", "a.jsonl")]
    assert rows[0].turns == lines[0].turns
    assert json.loads(rows.stored(0).content) == json.loads(lines.stored(0).content)


def test_what_is_wrong_is_said_in_a_line(tmp_path):
    """Prevents: a traceback, or a broken file that costs its samples in silence."""
    path = tmp_path / "a.parquet"
    with pytest.raises(UserError, match="no such"):
        opened(tmp_path, annotation="a.parquet")
    path.write_bytes(b"PAR1 is not all")
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        Annotations.open(path)
    pq.write_table(pa.table({"conversations": pa.array([], pa.string())}), path)
    with pytest.raises(UserError, match="has no row"):
        Annotations.open(path)
    mixed = [{"bytes": b"png", "path": None}, {"bytes": None, "path": "b.png"}]
    pq.write_table(pa.Table.from_pylist([{"images": mixed, "conversations": TURNS}]), path)
    with pytest.raises(UserError, match="row 1 has some of its files inside"):
        Annotations.open(path)[0]


def test_rows_with_images_inside_are_not_exported(written):
    """Prevents: another trainer's files that name images nobody can find."""
    folder, records = written
    inside = opened(folder, annotation="inside.parquet", root="pictures")
    with pytest.raises(UserError, match="row 2 has images or recordings inside"):
        inside.stored(1)
    assert json.loads(inside.stored(0).content)["id"] == records[0]["id"]
    named = opened(folder, annotation="named.parquet", root="pictures")
    assert json.loads(named.stored(1).content)["image"] == records[1]["image"]
