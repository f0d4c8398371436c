"""The sample dataset: disjoint splits, every tile count, one token a digit, stable bytes."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from omnibal.data.annotations import Annotations
from omnibal.data.scan import scan_lengths
from omnibal.data.tokenizer import open_tokenizer
from omnibal.model.config import load_model
from tools import make_digits_dataset
from tools.make_digits_dataset import SHARES, main

MODEL = load_model("internvl-digits")
SPLITS = ("train", "heldout")
ARGUMENTS = ["--samples", "400", "--heldout-samples", "100", "--seed", "3"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "dataset"
    assert main(["--output", str(folder), *ARGUMENTS]) == 0
    return folder


def records(split: Path) -> Iterator[dict]:
    for path in split.glob("*.jsonl"):
        yield from map(json.loads, path.read_text().splitlines())


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_splits_share_no_scan(dataset):
    """Prevents held-out accuracy from being measured on digits seen in training."""
    used = [
        {scan for record in records(dataset / split) for scan in record["scans"]}
        for split in SPLITS
    ]
    assert min(map(len, used)) > 50
    assert not used[0] & used[1]


def test_answers_are_what_the_scans_show(dataset):
    """Prevents wrong labels: checked against scikit-learn's own targets."""
    target = load_digits().target
    asked = dict.fromkeys(("single", "read", "parity", "largest", "even"), 0)
    for record in records(dataset / "train"):
        digits = target[record["scans"]]
        answers = [message["value"] for message in record["conversations"][1::2]]
        for kind, answer in zip(record["kinds"], answers, strict=True):
            expected = {
                "single": lambda d: str(d[0]),
                "read": lambda d: " ".join(map(str, d)),
                "parity": lambda d: str(sum(digit % 2 == 0 for digit in d)),
                "largest": lambda d: str(max(d)),
                "even": lambda d: "no" if d[0] % 2 else "yes",
            }
            if kind in expected:
                assert answer == expected[kind](digits)
                asked[kind] += 1
    assert all(asked.values())


def test_tile_counts_run_from_none_to_seven(dataset):
    """Prevents a sample dataset on which balancing has nothing to do."""
    tokenizer = open_tokenizer(dataset / "tokenizer.model")
    for split in SPLITS:
        annotations = Annotations.open(dataset / split / "meta.json")
        lengths = scan_lengths(annotations, MODEL, tokenizer, lambda _: None).lengths
        assert np.bincount(lengths.column("tiles"), minlength=8).min() > 0
        assert lengths.tokens.max() > 6 * lengths.tokens.min()
        assert lengths.source_names == tuple(SHARES)


def test_recorded_sizes_are_the_images(dataset):
    """Prevents annotation lines that contradict their files."""
    for record in records(dataset / "heldout"):
        images = record.get("image", [])
        images = [images] if isinstance(images, str) else images
        sizes = [Image.open(dataset / "heldout" / image).size for image in images]
        widths, heights = record.get("width", []), record.get("height", [])
        assert [s[0] for s in sizes] == ([widths] if isinstance(widths, int) else widths)
        assert [s[1] for s in sizes] == ([heights] if isinstance(heights, int) else heights)


def cropped(pixels: np.ndarray) -> np.ndarray:
    """The inked rectangle as 64 values of mean 0 and norm 1, wherever and however large it was."""
    ink = pixels > pixels.min() + 0.4 * np.ptp(pixels)
    rows, columns = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
    box = pixels[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    small = np.asarray(Image.fromarray(box.astype(np.float32)).resize((8, 8))).ravel()
    return (small - small.mean()) / np.linalg.norm(small - small.mean())


def test_each_cell_shows_its_scan(dataset):
    """Prevents digits drawn in another order than the answers, or over a cell's border."""
    scans = load_digits().images
    found = []
    for record in records(dataset / "train"):
        if not record["id"].startswith(("digits_strip", "digits_page")):
            continue
        gray = np.asarray(Image.open(dataset / "train" / record["image"]).convert("L"))
        cell = round((gray.size / len(record["scans"])) ** 0.5)
        rows, columns = gray.shape[0] // cell, gray.shape[1] // cell
        cells = gray.reshape(rows, cell, columns, cell).swapaxes(1, 2).reshape(-1, cell, cell)
        likeness = np.array(
            [[cropped(scans[scan]) @ cropped(shown) for scan in record["scans"]] for shown in cells]
        )
        found += (likeness.argmax(axis=1) == np.arange(len(cells))).tolist()
    assert len(found) > 50
    assert np.mean(found) > 0.95


def test_digits_are_single_tokens_and_text_round_trips(dataset):
    """Prevents a digit from having several spellings, which the model would have to learn apart."""
    tokenizer = open_tokenizer(dataset / "tokenizer.model")
    assert tokenizer.vocab_size <= MODEL.language.vocab_size
    for digit in "0123456789":
        assert len(tokenizer.encode(digit)) == 1
        assert tokenizer.encode(f"3 {digit}")[-1:] == tokenizer.encode(digit)
        assert tokenizer.encode(f"1{digit}") == tokenizer.encode("1") + tokenizer.encode(digit)
    for split in SPLITS:
        for record in records(dataset / split):
            for message in record["conversations"]:
                for text in message["value"].split("<image>"):
                    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_same_arguments_give_the_same_files(dataset, tmp_path):
    """Prevents figures that change from one machine or run to the next."""
    again = tmp_path / "again"
    main(["--output", str(again), *ARGUMENTS])
    assert hashes(again) == hashes(dataset)
    main(["--output", str(tmp_path / "other"), *ARGUMENTS[:-1], "4"])
    assert hashes(tmp_path / "other") != hashes(dataset)


def test_finished_dataset_is_kept(dataset, capfd):
    """Prevents the second quickstart from making everything again, or with other arguments."""
    before = {path: path.stat().st_mtime_ns for path in dataset.rglob("*")}
    assert main(["--output", str(dataset), *ARGUMENTS]) == 0
    assert "already made" in capfd.readouterr().out
    with pytest.raises(SystemExit) as exit_info:
        main(["--output", str(dataset), "--seed", "9"])
    assert exit_info.value.code == 2
    assert {path: path.stat().st_mtime_ns for path in dataset.rglob("*")} == before


def test_a_folder_beside_the_dataset_is_left_alone(tmp_path, capfd):
    """Prevents the loss of a user's folder, or its content in the dataset."""
    folder = tmp_path / "dataset"
    leftover = tmp_path / "dataset.part" / "train"
    leftover.mkdir(parents=True)
    (leftover / "stale.jsonl").write_text("{}\n")
    assert main(["--output", str(folder), "--samples", "20", "--heldout-samples", "20"]) == 0
    assert not (folder / "train" / "stale.jsonl").exists()
    assert (leftover / "stale.jsonl").exists()
    assert capfd.readouterr().err == ""


def refuse(capfd, *arguments: object) -> str:
    """The one line of a usage error."""
    with pytest.raises(SystemExit) as exit_info:
        main([str(argument) for argument in arguments])
    assert exit_info.value.code == 2
    return capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "content", ["", '{"made_with": {', "[]", "{}", '{"made_with": {"format": 1}}', b"\xff"]
)
def test_a_folder_of_unknown_making_is_kept(tmp_path, capfd, content):
    """Prevents a traceback for, or the loss of, what is no dataset of these arguments."""
    description = tmp_path / "dataset.json"
    description.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = hashes(tmp_path)
    assert "was not made with" in refuse(capfd, "--output", tmp_path, *ARGUMENTS)
    assert hashes(tmp_path) == before


def test_datasets_of_an_earlier_version_are_made_anew(dataset, tmp_path, capfd, monkeypatch):
    """Prevents training on the former composition under the present one's name."""
    monkeypatch.setattr(make_digits_dataset, "FORMAT", make_digits_dataset.FORMAT + 1)
    assert "by this version" in refuse(capfd, "--output", dataset, *ARGUMENTS)


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    """Prevents half a dataset from filling the disk after an error."""

    def fail(texts: Iterator[str]) -> bytes:
        raise RuntimeError("no tokenizer")

    monkeypatch.setattr(make_digits_dataset, "train_tokenizer", fail)
    with pytest.raises(RuntimeError, match="no tokenizer"):
        make_digits_dataset.make_dataset(tmp_path / "dataset", 20, 20, seed=0)
    assert not list(tmp_path.iterdir())
