"""Lengths and pack files: round trips, errors for invalid files, and lengths counted by
ms-swift."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_cases import failure, printed
from length_cases import lengths_of
from PIL import Image
from plan_cases import MODEL, origin_of

from omnibal.base.errors import UserError
from omnibal.data.external_lengths import cached_folder, read_cached_lengths, read_cached_tokens
from omnibal.data.lengths import Lengths, read_lengths, write_lengths
from omnibal.data.native_resolution import image_segments
from omnibal.model.config import load_model
from omnibal.model.encoders import TilingConfig
from omnibal.packing.packs import Packs, ScheduledPacks, read_packs, write_packs

pytestmark = pytest.mark.quick

COLUMNS = ("tiles", "tokens", "loss_tokens", "source")
TILING = {"image_size": 448, "tokens_per_tile": 256, "tiling": TilingConfig(max_dynamic_patch=6)}
COUNTS = {"tiles": [3, 0, 1], "tokens": [900, 40, 300], "loss_tokens": [20, 30, 5]}


def example_lengths(names=("charts", "text"), sample: list[int] | None = None) -> Lengths:
    lengths = lengths_of(**COUNTS, source=[0, 1, 0], source_names=names)
    origin = origin_of(MODEL, **TILING, chat_template="internlm2-chat", system_message=None)
    return replace(lengths, origin=origin, sample=None if sample is None else np.array(sample))


def read_changed(path: Path, change: Callable[[pa.Table], pa.Table]) -> Lengths:
    """Return the lengths read from a file after changing its table."""
    pq.write_table(change(pq.read_table(path)), path)
    return read_lengths([path])


@pytest.fixture
def lengths_file(tmp_path) -> Path:
    """Return a file of the example's lengths."""
    write_lengths(example_lengths(), tmp_path / "a.parquet")
    return tmp_path / "a.parquet"


def example_packs() -> ScheduledPacks:
    return ScheduledPacks(
        packs=Packs.from_lists([[2, 0], [1]]),
        step=np.array([0, 1]),
        dp_rank=np.array([0, 1], np.int32),
        items={"tiles": np.array([4, 0], np.int32)},
        tokens=np.array([1200, 40], np.int32),
        **dict.fromkeys(("slot", "epoch", "level"), np.zeros(2, np.int32)),
    )


def test_lengths_round_trip(lengths_file):
    """Prevents a column or the origin lost or reordered in the file."""
    lengths, again = example_lengths(), read_lengths([lengths_file])
    for column in COLUMNS[:3]:
        assert again.column(column).tolist() == lengths.column(column).tolist()
        assert again.column(column).dtype == np.int32
    assert again.source.tolist() == lengths.source.tolist()
    for name in ("source_names", "origin", "sha256"):
        assert getattr(again, name) == getattr(lengths, name)
    assert list(lengths_file.parent.iterdir()) == [lengths_file]


@pytest.mark.parametrize("column", COLUMNS)
def test_lengths_hash_sees_every_column(column):
    """Prevents packs used with lengths that changed."""
    lengths = example_lengths()
    before = lengths.sha256
    changed = lengths.source if column == "source" else lengths.column(column)
    changed[1] ^= 1
    assert lengths.sha256 != before


def test_joined_files_share_their_sources(lengths_file, tmp_path):
    """Prevents source codes of the second file read with the first file's names."""
    write_lengths(example_lengths(("text", "pages")), tmp_path / "b.parquet")
    joined = read_lengths([lengths_file, tmp_path / "b.parquet"])
    names = [joined.source_names[code] for code in joined.source]
    assert names == ["charts", "text", "charts", "text", "pages", "text"]
    assert joined.origin is None


def test_public_json_and_its_meta(tmp_path):
    """Prevents a tile counted for text-only samples, which have one dummy tile in that format."""
    records = [
        {"vit_num": 3, "token_num": 900, "image_flags": [1, 1, 1]},
        {"vit_num": 1, "token_num": 40, "image_flags": [0]},
    ]
    (tmp_path / "docs.json").write_text(json.dumps(records))
    (tmp_path / "meta.json").write_text('{"papers": {"token_lengths": "docs.json"}}')
    for name, source in (("docs.json", "docs"), ("meta.json", "papers")):
        lengths = read_lengths([tmp_path / name])
        assert lengths.column("tiles").tolist() == [3, 0]
        assert lengths.tokens.tolist() == [900, 40]
        assert lengths.source_names == (source,)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("absent.parquet", None, "no such file; make one"),
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
    """Prevents a traceback or a wrong plan from an invalid or misnamed file."""
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=expected):
        read_lengths([tmp_path / name])


def test_missing_column_is_named(lengths_file):
    """Prevents a bare KeyError for another tool's Parquet file."""
    with pytest.raises(UserError, match=r"have the column\(s\) loss_tokens, source once"):
        read_changed(lengths_file, lambda table: table.select(["tiles", "tokens"]))


@pytest.mark.parametrize("sample", [[1, 1, 2], [2, 1, 3], [-1, 0, 1]])
def test_samples_that_do_not_ascend_are_refused(lengths_file, sample):
    """Prevents a damaged file from training a sample twice, or the last sample for -1."""
    with pytest.raises(UserError, match=r"a\.parquet: row . has sample .* must ascend"):
        read_changed(lengths_file, lambda table: table.append_column("sample", pa.array(sample)))


@pytest.mark.parametrize("origin", ["{", "{}", '{"data_sha256": "d", "cache": 1}', b"\xff"])
def test_an_origin_of_another_version_is_refused(lengths_file, origin):
    """Prevents a traceback for lengths that another version scanned."""
    with pytest.raises(UserError, match=r"a\.parquet: origin: .*omnibal lengths"):
        read_changed(lengths_file, lambda table: table.replace_schema_metadata({"omnibal": origin}))


def test_packs_round_trip(tmp_path):
    """Prevents sample lists shifted by one, and bytes that differ between writes."""
    packs, path = example_packs(), tmp_path / "packs.parquet"
    write_packs(packs, path)
    first_bytes, again = path.read_bytes(), read_packs(path)
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
def test_columns_of_another_kind_are_refused(lengths_file, column, values, expected):
    """Prevents counts that were rounded, wrapped around or null."""
    columns = {name: pa.array([1], pa.int32()) for name in COLUMNS} | {"source": pa.array(["a"])}
    with pytest.raises(UserError, match=rf"a\.parquet: column {column}{expected}"):
        read_changed(lengths_file, lambda _: pa.table(columns | {column: values}))


@pytest.mark.parametrize("kind", [pa.uint8(), pa.int16(), pa.int64(), pa.uint64()])
@pytest.mark.parametrize("text", [pa.string(), pa.large_string()])
def test_integers_of_any_width_are_read(lengths_file, kind, text):
    """Prevents refusing integer columns of other widths, written by other tools."""
    columns = {name: pa.array([100, 7], kind) for name in COLUMNS}
    columns["source"] = pa.array(["b", "a"], text)
    lengths = read_changed(lengths_file, lambda _: pa.table(columns))
    for column in COLUMNS[:3]:
        assert lengths.column(column).tolist() == [100, 7]
        assert lengths.column(column).dtype == np.int32
    assert [lengths.source_names[code] for code in lengths.source] == ["b", "a"]


def test_row_groups_with_dictionaries_of_their_own(tmp_path):
    """Prevents codes of one row group read with another group's names."""
    names = ["b", "a", "c", "a"]
    columns = {name: pa.array([1, 2, 3, 4], pa.int32()) for name in COLUMNS}
    chunks = pa.chunked_array([pa.array(names[:2]), pa.array(names[2:])])
    table = pa.table(columns | {"source": chunks.dictionary_encode()})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    lengths = read_lengths([tmp_path / "a.parquet"])
    assert [lengths.source_names[code] for code in lengths.source] == names


def test_lengths_of_all_samples_stay_as_they_were(lengths_file):
    """Prevents refusing existing plans because the hash of their lengths changed."""
    lengths = example_lengths()
    assert lengths.sha256.startswith("9ad8ebf8cdf46e48d1bdc725f642a004")
    assert pq.read_table(lengths_file).column_names == list(COLUMNS)
    assert read_lengths([lengths_file]).sample is None
    assert lengths.annotation_indices(np.array([2, 0])).tolist() == [2, 0]


def test_lengths_with_skipped_samples(lengths_file):
    """Prevents training a skipped sample for the row's own, and indices beyond annotations."""
    lengths = example_lengths(sample=[1, 4, 5])
    write_lengths(lengths, lengths_file)
    again = read_lengths([lengths_file])
    assert again.annotation_indices(np.array([2, 0, 0])).tolist() == [5, 1, 1]
    assert again.sha256 == lengths.sha256
    others = {example_lengths(sample=sample).sha256 for sample in (None, [0, 1, 2])}
    assert len({lengths.sha256, *others}) == 3
    assert read_lengths([lengths_file] * 2).sample is None
    without = read_changed(lengths_file, lambda table: table.replace_schema_metadata(None))
    assert without.sample is None


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
    """Prevents packs that were rounded, or shifted by a missing list."""
    path = tmp_path / "packs.parquet"
    write_packs(example_packs(), path)
    table = pq.read_table(path)
    table = table.set_column(table.column_names.index(column), column, values)
    pq.write_table(table, path)
    with pytest.raises(UserError, match=rf"packs\.parquet: {expected}.*omnibal plan"):
        read_packs(path)


def test_packs_of_other_writers(tmp_path):
    """Prevents shifted sample lists in files with several row groups."""
    path, samples = tmp_path / "packs.parquet", [[5], [1, 2], [3], [0, 4]]
    columns = dict.fromkeys(("step", "dp_rank", "slot", "epoch", "tiles", "tokens"), range(4))
    table = pa.table({**columns, "samples": pa.array(samples, pa.list_(pa.int32()))})
    pq.write_table(table, path, row_group_size=2)
    packs = read_packs(path).packs
    assert [packs[i].tolist() for i in range(4)] == samples


def test_sums_and_take_follow_the_members():
    """Prevents sums over another pack's samples after packs are reordered."""
    lengths, packs = example_lengths(), example_packs().packs
    assert packs.sums(lengths.tokens).tolist() == [1200, 40]
    taken = packs.take(np.array([1, 0]))
    assert [taken[0].tolist(), taken[1].tolist()] == [[1], [2, 0]]


NATIVE, TILED = load_model("qwen3-vl-8b"), load_model("internvl2-1b")
SIZES = [(640, 480), (64, 1_024), (1_000, 1_000)]


def picture(size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size).save(file, "PNG")
    return file.getvalue()


def store(size: tuple[int, int]) -> dict:
    """Return an image stored in a row."""
    return {"bytes": picture(size), "path": None}


def cached_dataset(folder: Path, rows: list[dict], name: str = "lengths") -> Path:
    """Write a dataset as `datasets` saves it: Arrow streams and a list of files."""
    folder.mkdir(parents=True)
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {"images": image, name: pa.int64(), "videos": pa.string()}
    schema = pa.schema([(column, pa.list_(kind)) for column, kind in columns.items()])
    files = [f"data-{k:05}-of-00002.arrow" for k in range(2)]
    for file, half in zip(files, np.array_split(np.arange(len(rows)), 2), strict=True):
        table = pa.Table.from_pylist([rows[row] for row in half], schema)
        with pa.ipc.new_stream(str(folder / file), schema) as stream:
            stream.write_table(table)
    (folder / "dataset_info.json").write_text("{}")
    state = {"_data_files": [{"filename": file} for file in files]}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def read_cached(path: Path, model=NATIVE):
    return read_cached_lengths(path, read_cached_tokens(path), model, lambda done: None)


@pytest.mark.parametrize("name", ["lengths", "length"])
def test_rows_of_a_cached_dataset_keep_their_tokens_and_images_are_counted(tmp_path, name):
    """Prevents other token counts than ms-swift packs by, and images omitted or of another row."""
    (tmp_path / "a.png").write_bytes(picture(SIZES[0]))
    rows = [
        {"images": [{"bytes": None, "path": str(tmp_path / "a.png")}], name: [900]},
        {"images": None, name: [40, 7]},
        {"images": list(map(store, SIZES)), name: [9_000]},
    ]
    cached_dataset(tmp_path / "made/train", rows, name)
    found = read_cached(tmp_path / "made")
    assert found.tokens.tolist() == [900, 47, 9_000]
    tokens = [image_segments(*size, NATIVE.images.image_rule).all_tokens for size in SIZES]
    assert found.items["image_tokens"].tolist() == [tokens[0], 0, sum(tokens)]
    squares = [tokens[0] ** 2, 0, sum(count**2 for count in tokens)]
    assert found.squares["squared_image_tokens"].tolist() == squares


def test_tiles_are_counted_of_every_image_by_itself(tmp_path):
    """Prevents a tile limit shared by a sample's images, which ms-swift does not apply."""
    cached_dataset(tmp_path / "train", [{"images": [store(SIZES[0])] * 2, "lengths": [9_000]}])
    assert read_cached(tmp_path, TILED).items["tiles"].tolist() == [2 * 13]


def test_the_command_reads_it_without_a_tokenizer(tmp_path, capsys):
    """Prevents asking for an unused tokenizer, or ignoring a given tokenizer."""
    path = cached_dataset(tmp_path / "made/train", [{"lengths": [2_000 + n]} for n in range(3)])
    output, state = tmp_path / "lengths.parquet", path / "state.json"
    counted = f"lengths {path} --model qwen3-vl-8b -o"
    printed(capsys, counted, output, "--json")
    assert read_lengths([output]).tokens.tolist() == [2_000, 2_001, 2_002]
    assert "leave it out" in failure(capsys, counted, output, "--tokenizer-model", "t.json")
    (tmp_path / "a.jsonl").write_text("{}\n")
    error = failure(capsys, f"lengths {tmp_path}/a.jsonl --model qwen3-vl-8b -o", output)
    assert "--tokenizer-model" in error
    assert failure(capsys, counted, state) and state.stat().st_size


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"images": [{"bytes": b"no", "path": None}], "lengths": [90]}], "row 0: image"),
        ([{"images": [{"bytes": None, "path": None}], "lengths": [90]}], "lacks an image"),
        ([{"videos": ["a.mp4"], "lengths": [90]}], "videos"),
        ([{"lengths": [0]}], "no whole number above 0"),
        ([], "has no rows"),
        # The dataset was made with other pixel limits.
        ([{"images": [store((2_000, 2_000))], "lengths": [50]}], "row 0 has 50 tokens, and its 1"),
    ],
    ids=["no image", "no path", "video", "no tokens", "no rows", "other limits"],
)
def test_what_cannot_be_counted_is_refused(tmp_path, rows, said):
    """Prevents a traceback, or lengths without an image or for other pixel limits."""
    cached_dataset(tmp_path / "train", rows)
    with pytest.raises(UserError, match=said):
        read_cached(tmp_path / "train")


def test_other_folders_and_files_are_not_taken_for_counted(tmp_path):
    """Prevents annotation files read as a dataset with counted tokens."""
    (tmp_path / "a.jsonl").write_text("{}\n")
    assert cached_folder(tmp_path) is None and cached_folder(tmp_path / "a.jsonl") is None
