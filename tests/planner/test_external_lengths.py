"""Lengths that ms-swift has counted, beside images of known sizes."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from cli_cases import failure, printed
from PIL import Image

from omnibal.base.errors import UserError
from omnibal.data.external_lengths import counted_lengths, counted_tokens, is_counted
from omnibal.data.lengths import read_lengths
from omnibal.data.native_resolution import image_segments
from omnibal.model.config import load_model

pytestmark = pytest.mark.quick
NATIVE, TILED = load_model("qwen3-vl-8b"), load_model("internvl2-1b")
SIZES = [(640, 480), (64, 1_024), (1_000, 1_000)]


def picture(size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size).save(file, "PNG")
    return file.getvalue()


def cached_dataset(folder: Path, rows: list[dict], name: str = "lengths") -> Path:
    """Write what `datasets` saves: Arrow streams, and the list of them."""
    folder.mkdir(parents=True)
    halves = np.array_split(np.arange(len(rows)), 2)
    files = [f"data-{k:05}-of-00002.arrow" for k in range(2)]
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([
        ("images", pa.list_(image)),
        (name, pa.list_(pa.int64())),
        ("videos", pa.list_(pa.string())),
    ])  # fmt: skip
    for file, half in zip(files, halves, strict=True):
        table = pa.Table.from_pylist([rows[row] for row in half], schema)
        with pa.ipc.new_stream(str(folder / file), schema) as stream:
            stream.write_table(table)
    (folder / "dataset_info.json").write_text("{}")
    state = {"_data_files": [{"filename": file} for file in files]}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def read(path: Path, model=NATIVE):
    return counted_lengths(path, counted_tokens(path), model, lambda done: None)


@pytest.mark.parametrize("name", ["lengths", "length"])
def test_rows_of_a_cached_dataset_keep_their_tokens_and_images_are_counted(tmp_path, name):
    """Prevents tokens other than ms-swift packs by, and images left out or of another row."""
    (tmp_path / "a.png").write_bytes(picture(SIZES[0]))
    rows = [
        {"images": [{"bytes": None, "path": str(tmp_path / "a.png")}], name: [900]},
        {"images": None, name: [40, 7]},
        {"images": [{"bytes": picture(size), "path": None} for size in SIZES], name: [9_000]},
    ]
    cached_dataset(tmp_path / "made/train", rows, name)
    found = read(tmp_path / "made")
    assert found.tokens.tolist() == [900, 47, 9_000]
    tokens = [image_segments(*size, NATIVE.images.image_rule).all_tokens for size in SIZES]
    assert found.items["image_tokens"].tolist() == [tokens[0], 0, sum(tokens)]
    squares = [t**2 for t in tokens]
    assert found.squares["squared_image_tokens"].tolist() == [squares[0], 0, sum(squares)]


def test_tiles_are_counted_of_every_image_by_itself(tmp_path):
    """Prevents images' tiles shared among a sample's images, which ms-swift does not do."""
    images = [{"bytes": picture(SIZES[0]), "path": None}] * 2
    cached_dataset(tmp_path / "train", [{"images": images, "lengths": [9_000]}])
    assert read(tmp_path, TILED).items["tiles"].tolist() == [2 * 13]


def test_the_command_reads_it_without_a_tokenizer(tmp_path, capsys):
    """Prevents a command that asks for what it does not use, or ignores what it was given."""
    path = cached_dataset(tmp_path / "made/train", [{"lengths": [2_000 + n]} for n in range(3)])
    output = tmp_path / "lengths.parquet"
    counted = f"lengths {path} --model qwen3-vl-8b -o"
    printed(capsys, counted, output, "--json")
    assert read_lengths([output]).tokens.tolist() == [2_000, 2_001, 2_002]
    error = failure(capsys, counted, output, "--tokenizer-model", "t.json")
    assert "leave it out" in error
    (tmp_path / "a.jsonl").write_text("{}\n")
    error = failure(capsys, "lengths --model qwen3-vl-8b", tmp_path / "a.jsonl", "-o", output)
    assert "--tokenizer-model" in error
    state = path / "state.json"
    assert failure(capsys, counted, state) and state.stat().st_size


@pytest.mark.parametrize(
    ("rows", "model", "said"),
    [
        ([{"images": [{"bytes": b"no", "path": None}], "lengths": [90]}], NATIVE, "row 0: image"),
        ([{"images": [{"bytes": None, "path": None}], "lengths": [90]}], NATIVE, "without path"),
        ([{"videos": ["a.mp4"], "lengths": [90]}], NATIVE, "videos"),
        ([{"lengths": [0]}], NATIVE, "no whole number above 0"),
        ([], NATIVE, "has no rows"),
    ],
)
def test_what_cannot_be_counted_is_refused(tmp_path, rows, model, said):
    """Prevents lengths without the items of an image, or a traceback."""
    cached_dataset(tmp_path / "train", rows)
    with pytest.raises(UserError, match=said):
        read(tmp_path / "train", model)


def test_images_of_another_size_than_the_row_has_tokens_for_are_refused(tmp_path):
    """Prevents a plan for other pixel limits than the dataset was made with."""
    row = {"images": [{"bytes": picture((2_000, 2_000)), "path": None}], "lengths": [50]}
    cached_dataset(tmp_path / "train", [row])
    with pytest.raises(UserError, match="row 0 has 50 tokens, and its 1 image"):
        read(tmp_path / "train")


def test_other_folders_and_files_are_not_taken_for_counted(tmp_path):
    """Prevents annotation files read as a dataset that is counted."""
    (tmp_path / "a.jsonl").write_text("{}\n")
    assert not is_counted(tmp_path) and not is_counted(tmp_path / "a.jsonl")
