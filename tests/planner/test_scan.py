"""Lengths from headers and text: equal to what is trained on, strict about images, and the same
however many processes scan, and however often they are killed."""

import contextlib
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cli_cases import status
from PIL import Image

from omnibal.base.errors import UserError
from omnibal.base.worker_pool import LocalPool, map_unordered, usable_cores
from omnibal.data.annotations import Annotations
from omnibal.data.chat import encode_sample
from omnibal.data.lengths import Lengths, read_lengths, write_lengths
from omnibal.data.native_resolution import Segments, sizes_of
from omnibal.data.scan import Scan, scan_key, scan_lengths, write_skipped
from omnibal.data.scan_journal import COUNTED, Counted, ScanJournal
from omnibal.data.stored_files import ImageFile
from omnibal.data.tiling import tile_count
from omnibal.model.config import ModelConfig, load_model

MODEL = load_model("internvl-digits")
MESSAGES = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "7"}]
PICTURES = 30
SAMPLES_PER_TASK = 256
COLUMNS = ("tiles", "tokens", "loss_tokens", "source")


def scan_one(folder: Path, name: str, tokenizer):
    """Scan a dataset of one sample about the image of that name."""
    (folder / "a.jsonl").write_text(json.dumps({"image": name, "conversations": MESSAGES}))
    (folder / "meta.json").write_text('{"a": {"root": "", "annotation": "a.jsonl"}}')
    return scan(Annotations.open(folder / "meta.json"), tokenizer).lengths


def scan(annotations: Annotations, tokenizer, **options) -> Scan:
    return scan_lengths(annotations, MODEL, tokenizer, lambda _: None, **options)


def make_data(folder: Path, samples: int) -> Annotations:
    """Two sources of so many samples each, about pictures of many shapes; the second is doubled."""
    rng = np.random.default_rng(1)
    (folder / "pictures").mkdir()
    for number in range(PICTURES):
        size = rng.integers(8, 200, 2).tolist()
        Image.new("L", size).save(folder / "pictures" / f"{number}.png")
    for name in "ab":
        (folder / f"{name}.jsonl").write_text("".join(make_line(rng) for _ in range(samples)))
    meta = {
        name: {"root": "pictures", "annotation": f"{name}.jsonl", "repeat_time": repeat_time}
        for name, repeat_time in (("a", 1), ("b", 2))
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    return Annotations.open(folder / "meta.json")


def make_line(rng: np.random.Generator, *more: str) -> str:
    images = [f"{number}.png" for number in rng.integers(0, PICTURES, rng.integers(0, 3))]
    images += more
    text = "<image>" * len(images) + "What is that? " * rng.integers(1, 9)
    messages = [{"from": "human", "value": text}, {"from": "gpt", "value": "It is 7."}]
    return json.dumps({"image": images, "conversations": messages}) + "\n"


def written(lengths: Lengths, folder: Path) -> bytes:
    write_lengths(lengths, folder / "written.parquet")
    return (folder / "written.parquet").read_bytes()


def test_a_model_with_items_that_no_scan_counts_is_refused(tmp_path, tokenizer):
    """Prevents: a kind of encoder that is new ending a scan in a traceback after hours."""
    tower = next(iter(MODEL.encoders.values()))
    points = type("PointsEncoder", (type(tower),), {"feature": "points"})(**dict(tower))
    model = MODEL.model_copy(update={"encoders": MODEL.encoders | {"points": points}})
    with pytest.raises(UserError, match="takes points, which no scan counts"):
        scan_lengths(make_data(tmp_path, 2), model, tokenizer, lambda _: None)


def open_journal(annotations: Annotations, tokenizer, folder: Path) -> ScanJournal:
    return ScanJournal.open(folder / "journal", scan_key(MODEL, tokenizer), annotations)


def count_opened(monkeypatch) -> list[Path]:
    """The image files that are opened from now on."""
    opened, image_open = [], ImageFile.open

    def counting_open(image):
        opened.append(image.path)
        return image_open(image)

    monkeypatch.setattr(ImageFile, "open", counting_open)
    return opened


def save_noise(path: Path, width: int = 64, height: int = 32, **options) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return path.read_bytes()


def png_chunk(kind: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(kind + data).to_bytes(4)
    return len(data).to_bytes(4) + kind + data + checksum


def test_counts_equal_the_encoded_samples(digits, tokenizer):
    """Prevents packs that overflow their caps because the scan counted otherwise than training."""
    annotations = Annotations.open(digits / "train" / "meta.json")
    done = []
    lengths = scan_lengths(annotations, MODEL, tokenizer, done.append).lengths
    assert sum(done) == len(lengths) == len(annotations)
    for index, sample in enumerate(annotations):
        tiles = [
            tile_count(*Image.open(image.path).size, MODEL.vision.tiling, MODEL.vision.image_size)
            for image in sample.images
        ]
        encoded = encode_sample(sample, tiles, MODEL, tokenizer)
        assert lengths.column("tiles")[index] == sum(tiles)
        assert lengths.tokens[index] == len(encoded.token_ids)
        assert lengths.loss_tokens[index] == encoded.loss_mask.sum()
        assert lengths.source_names[lengths.source[index]] == sample.source


def test_origin_says_what_was_scanned(digits, tokenizer):
    """Prevents a plan from being trained with other data or another tokenizer unnoticed."""
    annotations = Annotations.open(digits / "heldout" / "meta.json")
    origin = scan(annotations, tokenizer).lengths.origin
    assert origin.data_sha256 == annotations.sha256
    assert origin.tokenizer_sha256 == tokenizer.sha256
    assert (origin.image_size, origin.tokens_per_tile) == (32, 16)
    assert origin.tiling == MODEL.vision.tiling


def test_samples_beyond_the_models_rope_are_named(tmp_path, tokenizer):
    """Prevents an hour of scanning before a plan says that samples are too long for the model, and
    a journal of good samples from outliving the limit."""
    annotations = make_data(tmp_path, 20)
    free = scan(annotations, tokenizer).lengths
    most = int(np.median(free.tokens))
    language = MODEL.language.model_copy(update={"max_positions": most})
    model = MODEL.model_copy(update={"language": language})
    with pytest.raises(
        UserError, match=rf"a\.jsonl: line \d+: the sample has \d+ tokens.* {most},"
    ):
        scan_lengths(annotations, model, tokenizer, lambda _: None)
    kept = scan_lengths(annotations, model, tokenizer, lambda _: None, on_error="skip").lengths
    assert kept.sample.tolist() == np.flatnonzero(free.tokens <= most).tolist()
    assert scan_key(model, tokenizer) != scan_key(MODEL, tokenizer)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x89PNG\r\n\x1a\n",
        b"no picture" * 20,
        # A text chunk that unpacks to more than Pillow allows, which is no OSError.
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", bytes([0, 0, 0, 1, 0, 0, 0, 1, 8, 0, 0, 0, 0]))
        + png_chunk(b"zTXt", b"k\x00\x00" + zlib.compress(bytes(2**21))),
    ],
)
def test_unreadable_image_is_named(tmp_path, tokenizer, content):
    """Prevents a traceback from the image library."""
    (tmp_path / "x.png").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.jsonl: line 1: image .*x\.png cannot be read"):
        scan_one(tmp_path, "x.png", tokenizer)


def test_a_folder_is_told_from_an_empty_video(tmp_path, tokenizer):
    """Prevents advice about frames where an image was named."""
    (tmp_path / "x").mkdir()
    with pytest.raises(UserError, match=r"a\.jsonl: line 1: folder .*x is no image; name one"):
        scan_one(tmp_path, "x", tokenizer)
    asked = [{**MESSAGES[0], "value": "Which?"}, MESSAGES[1]]
    (tmp_path / "a.jsonl").write_text(json.dumps({"video": "x", "conversations": asked}))
    with pytest.raises(UserError, match=r"a\.jsonl: line 1: folder .*x holds no frames; fill"):
        scan(Annotations.open(tmp_path / "meta.json"), tokenizer)


@pytest.mark.parametrize("suffix", ["png", "jpg"])
@pytest.mark.parametrize("lost_bytes", [1, 12, 500])
def test_truncated_image_is_named(tmp_path, tokenizer, suffix, lost_bytes):
    """Prevents a half-downloaded image from passing, since its header alone is whole."""
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(save_noise(path)[:-lost_bytes])
    with pytest.raises(UserError, match=rf"a\.jsonl: line 1: image .*x\.{suffix} is truncated"):
        scan_one(tmp_path, path.name, tokenizer)


def test_truncated_image_with_a_whole_preview(tmp_path, tokenizer):
    """Prevents an embedded preview's end marker from hiding that the image itself is cut."""
    preview = save_noise(tmp_path / "preview.jpg", 16, 16)
    path = tmp_path / "x.jpg"
    path.write_bytes(save_noise(path, 256, 256, comment=preview)[:-2000])
    with pytest.raises(UserError, match="is truncated"):
        scan_one(tmp_path, "x.jpg", tokenizer)


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp"])
def test_appended_bytes_are_no_truncation(tmp_path, tokenizer, suffix):
    """Prevents refusing a whole image to which a camera appended its own data, or of a format that
    has no end marker."""
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(save_noise(path) + b"trailer " * 1000)
    assert scan_one(tmp_path, path.name, tokenizer).column("tiles").tolist() == [3]


def test_bad_samples_are_named_together(tmp_path, tokenizer):
    """Prevents a run of the scan for each bad image; a repeated sample is no second mistake."""
    lines = [json.dumps({"image": f"gone{k}.png", "conversations": MESSAGES}) for k in range(9)]
    lines[1] = "{"
    meta = '{"a": {"root": "", "annotation": "a.jsonl", "repeat_time": 2}}'
    (tmp_path / "meta.json").write_text(meta)
    for count, beginning in ((3, "3 bad samples were found: "), (9, "the scan stopped at the fir")):
        (tmp_path / "a.jsonl").write_text("\n".join(lines[:count]))
        with pytest.raises(UserError) as error:
            scan(Annotations.open(tmp_path / "meta.json"), tokenizer)
        assert str(error.value).startswith(beginning)
        found = re.findall(r"\(\d\) \S+a\.jsonl: line (\d)", str(error.value))
        assert found == ["1", "2", "3", "4", "5"][:count]
        assert "gone2.png does not exist" in str(error.value)


def test_tokenizer_larger_than_the_vocabulary(digits, tokenizer):
    """Prevents token ids beyond the embedding table."""
    language = MODEL.language.model_copy(update={"vocab_size": tokenizer.vocab_size - 1})
    small = MODEL.model_copy(update={"language": language})
    with pytest.raises(UserError, match="but internvl-digits embeds"):
        scan_lengths(Annotations.open(digits / "train/meta.json"), small, tokenizer, lambda _: None)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Annotations:
    """3,000 whole samples in 12 tasks; not to be written to."""
    return make_data(tmp_path_factory.mktemp("scan"), 1000)


@pytest.fixture(scope="module")
def whole(data, tokenizer) -> Lengths:
    """Scanned at once, by one process."""
    return scan(data, tokenizer).lengths


def break_samples(folder: Path) -> set[int]:
    """Break some pictures and lines; the samples that are then bad, found from the lines."""
    pictures = folder / "pictures"
    (pictures / "3.png").unlink()
    (pictures / "4.png").write_bytes((pictures / "4.png").read_bytes()[:-9])
    (pictures / "5.png").write_bytes(b"")
    bad = set()
    for name, first, samples in (("a", 0, 400), ("b", 400, 800)):
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        lines[7], lines[300] = lines[7][:-1], lines[300].replace("7", "\\ud800")
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        broken = [re.search(r'"[345]\.png"|ud800|[^}]$', line) for line in lines]
        bad |= {first + k for k in range(samples) if broken[k % 400]}
    return bad


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> tuple[Annotations, set[int], list[str]]:
    """1,200 samples, which of them are bad, and the whole ones' text, before they were broken."""
    folder = tmp_path_factory.mktemp("broken")
    before = make_data(folder, 400)
    questions = [sample.turns[0].question for sample in before]
    bad = break_samples(folder)
    assert 50 < len(bad) < 600
    return Annotations.open(folder / "meta.json"), bad, questions


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_change_nothing(data, whole, tokenizer, tmp_path, processes):
    """Prevents lengths that depend on the machine, so that a plan cannot be made again."""
    done = []
    parallel = scan_lengths(data, MODEL, tokenizer, done.append, pool=LocalPool(processes))
    assert sum(done) == len(data) > processes * SAMPLES_PER_TASK
    assert parallel.skipped == ()
    assert written(parallel.lengths, tmp_path) == written(whole, tmp_path)


@pytest.mark.parametrize("processes", [1, 3])
def test_skip_leaves_out_the_broken_ones_alone(broken, tokenizer, tmp_path, processes):
    """Prevents a good sample from being lost, and a bad one, or its repeat, from being kept."""
    annotations, bad, _ = broken
    result = scan(annotations, tokenizer, pool=LocalPool(processes), on_error="skip")
    assert [sample.index for sample in result.skipped] == sorted(bad)
    assert result.lengths.sample.tolist() == sorted(set(range(1200)) - bad)
    write_skipped(result.skipped, tmp_path / "skipped.txt")
    lines = (tmp_path / "skipped.txt").read_text().splitlines()
    for line, index in zip(lines, sorted(bad), strict=True):
        number, where, reason = line.split("\t")
        assert int(number) == index
        assert where == annotations.where(index)
        assert re.search("does not exist|is truncated|cannot be read|is not JSON|Unicode", reason)
    write_skipped((), tmp_path / "skipped.txt")
    assert not (tmp_path / "skipped.txt").exists()


def test_training_never_touches_a_skipped_sample(broken, tokenizer, tmp_path):
    """Prevents every row behind a skipped sample from training its neighbour."""
    annotations, bad, questions = broken
    write_lengths(scan(annotations, tokenizer, on_error="skip").lengths, tmp_path / "l.parquet")
    lengths = read_lengths([tmp_path / "l.parquet"])
    places = lengths.annotation_indices(np.arange(len(lengths))).tolist()
    assert len(set(places)) == len(places) == 1200 - len(bad)
    assert not bad & set(places)
    for row, place in enumerate(places):
        sample = annotations[place]
        assert sample.turns[0].question == questions[place]
        assert lengths.source_names[lengths.source[row]] == sample.source
        tiles = int(lengths.column("tiles")[row])
        per_image = [tiles, *[0] * (len(sample.images) - 1)] if sample.images else []
        encoded = encode_sample(sample, per_image, MODEL, tokenizer)
        assert lengths.tokens[row] == len(encoded.token_ids)


def test_the_first_mistakes_are_named_whoever_finds_them(broken, tokenizer):
    """Prevents another message from each run, by which process was faster."""
    annotations, bad, _ = broken
    said = set()
    for processes in (1, 2, 3):
        with pytest.raises(UserError) as error:
            scan(annotations, tokenizer, pool=LocalPool(processes))
        said.add(str(error.value))
    (message,) = said
    named = [f"{annotations.where(index)}" for index in sorted(bad)[:5]]
    assert re.findall(r"\(\d\) (\S+: line \d+)", message) == named
    assert "--on-error skip" in message


def test_nothing_left_is_an_error(tmp_path, tokenizer):
    """Prevents an empty file of lengths."""
    (tmp_path / "a.jsonl").write_text("{\n{\n")
    (tmp_path / "meta.json").write_text('{"a": {"root": "", "annotation": "a.jsonl"}}')
    with pytest.raises(UserError, match=r"every sample is bad.*a\.jsonl: line 1 is not JSON"):
        scan(Annotations.open(tmp_path / "meta.json"), tokenizer, on_error="skip")


def test_images_are_opened_once(broken, tokenizer, monkeypatch):
    """Prevents a slow file system from being asked again for each repeat, good or bad."""
    opened = count_opened(monkeypatch)
    scan(broken[0], tokenizer, on_error="skip")
    assert len(opened) == len(set(opened)) == PICTURES


def kill_while_scanning(annotations: Annotations, tokenizer, folder: Path, delay_s: float) -> None:
    """Scan two tasks in another process, and kill that some time after it finished one."""
    journal = open_journal(annotations, tokenizer, folder)
    before = journal.path.stat().st_size if journal.path.exists() else 0
    child = os.fork()
    if child == 0:
        calls = itertools.count()  # the first is before any task
        scan_lengths(
            annotations, MODEL, tokenizer, lambda _: next(calls) < 2 or signal.pause(),
            journal=journal,
        )  # fmt: skip
        os._exit(0)
    while not journal.path.exists() or journal.path.stat().st_size == before:
        time.sleep(0.001)
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_killed_scan_goes_on(data, whole, tokenizer, tmp_path, monkeypatch):
    """Prevents hours of scanning from being lost, done again, or joined wrongly after a kill."""
    finished = [0]
    for delay_s in (0, 0.02, 0.05):
        kill_while_scanning(data, tokenizer, tmp_path, delay_s)
        finished.append(len(open_journal(data, tokenizer, tmp_path).finished))
    assert np.diff(finished).min() >= SAMPLES_PER_TASK
    journal = open_journal(data, tokenizer, tmp_path)
    left = set(range(len(data))) - set(journal.finished.rows["index"].tolist())
    assert 0 < len(left) == len(data) - finished[-1]
    read = []
    get_sample = Annotations.__getitem__
    monkeypatch.setattr(
        Annotations, "__getitem__", lambda self, k: read.append(k) or get_sample(self, k)
    )
    resumed = scan(data, tokenizer, journal=journal)
    assert len(read) == len(left)
    assert written(resumed.lengths, tmp_path) == written(whole, tmp_path)


def test_a_mended_file_needs_only_the_rest(tmp_path, tokenizer, monkeypatch):
    """Prevents a bad sample from being taken for finished, and the good ones from being redone."""
    (tmp_path / "data").mkdir()
    annotations = make_data(tmp_path / "data", 200)
    whole = scan(annotations, tokenizer).lengths
    picture = tmp_path / "data/pictures/3.png"
    content = picture.read_bytes()
    picture.unlink()
    for on_error in ("stop", "skip"):
        journal = open_journal(annotations, tokenizer, tmp_path)
        try:
            skipped = scan(annotations, tokenizer, journal=journal, on_error=on_error).skipped
        except UserError as error:
            assert on_error == "stop"
            assert "the scan stopped at the first 5" in str(error)
    picture.write_bytes(content)
    journal = open_journal(annotations, tokenizer, tmp_path)
    assert len(journal.finished) == len(annotations) - len(skipped)
    assert journal.notes(600) == [
        f"resumed: {600 - len(skipped)} of 600 samples were already scanned"
    ]
    opened = count_opened(monkeypatch)
    again = scan(annotations, tokenizer, journal=journal)
    affected = {
        image.path
        for k in range(600)
        for image in annotations[k].images
        if ImageFile(picture) in annotations[k].images
    }
    assert set(opened) == affected
    assert written(again.lengths, tmp_path) == written(whole, tmp_path)


def rows_of(*indices: int) -> Counted:
    """Samples of these indices, some with images."""
    rows = np.array([tuple(range(k, k + len(COUNTED))) for k in indices], COUNTED)
    shown = [[Segments(k, 3)] * (k % 3) for k in indices]
    return Counted(rows=rows, image_sizes=sizes_of(shown))


def recorded(count: int, key: bytes = bytes(32)) -> SimpleNamespace:
    """Data of one file with so many records."""
    return SimpleNamespace(keys=(key,), file=np.zeros(count, int), number=np.arange(count))


def listed(counted: Counted) -> tuple:
    sizes = counted.image_sizes
    return counted.rows.tolist(), sizes.counts.tolist(), sizes.images.tolist()


def test_a_torn_journal_holds_what_was_whole(tmp_path):
    """Prevents half a record, or what the disk holds behind it, from being read as counts."""
    path = tmp_path / "journal"
    journal = ScanJournal.open(path, "key", recorded(10))
    assert not path.exists()
    ends = []
    for rows in (rows_of(4, 5), rows_of(0, 1, 2), rows_of(9)):
        journal.append(rows)
        ends.append(path.stat().st_size)
    content = path.read_bytes()
    damaged = [content[:end] for end in range(len(content))]
    damaged += [content[:end] + bytes(40) for end in ends]
    damaged += [
        content[:k] + bytes([content[k] ^ 4]) + content[k + 1 :] for k in range(ends[0], ends[2])
    ]
    for damage in damaged:
        path.write_bytes(damage)
        pairs = zip(damage, content, strict=False)
        same = next((k for k, (one, other) in enumerate(pairs) if one != other), len(damage))
        kept = [end for end in ends if end <= same]
        journal = ScanJournal.open(path, "key", recorded(10))
        expected = [[], [4, 5], [0, 1, 2, 4, 5], [0, 1, 2, 4, 5, 9]][len(kept)]
        assert listed(journal.finished) == listed(rows_of(*expected))
        assert not journal.discarded
        journal.append(rows_of(7))
        again = ScanJournal.open(path, "key", recorded(10))
        assert listed(again.finished) == listed(rows_of(*sorted([*expected, 7])))
    again.remove()
    assert not path.exists()


def test_a_journal_of_other_settings_is_thrown_away(tmp_path):
    """Prevents counts of other data or another tiling from being mixed in."""
    path, before = tmp_path / "journal", recorded(9)
    for key, data in (("a" * 64, recorded(9, b"b" * 32)), ("b" * 64, before)):
        ScanJournal.open(path, "a" * 64, before).append(rows_of(1))
        journal = ScanJournal.open(path, key, data)
        assert len(journal.finished) == 0
        assert journal.notes(9) == [
            f"note: {path} is of other data or settings; the scan begins anew"
        ]
        journal.append(rows_of(2))
        assert ScanJournal.open(path, key, data).finished.rows["index"].tolist() == [2]


def test_a_journal_is_of_files_wherever_they_stand(tmp_path):
    """Prevents the counts of a thousand files from being lost with one that has changed, and of
    repeats from being made again; and one file's counts from being taken for another's."""
    path, keys = tmp_path / "journal", [bytes([k]) * 32 for k in range(4)]
    before = SimpleNamespace(
        keys=tuple(keys[:3]), file=np.repeat([0, 1, 2], 3), number=np.tile([0, 1, 2], 3)
    )
    journal = ScanJournal.open(path, "key", before)
    journal.append(rows_of(1, 4, 5))
    journal.append(rows_of(6, 8))
    # The third file is now first, and twice; the second is another one; one more has come.
    after = SimpleNamespace(
        keys=(keys[2], keys[3], keys[0]),
        file=np.array([0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 2]),
        number=np.array([0, 1, 2, 0, 1, 2, 4, 5, 0, 1, 2]),
    )
    again = ScanJournal.open(path, "key", after)
    assert again.finished.rows["index"].tolist() == [0, 2, 3, 5, 9]
    expected = rows_of(6, 8, 6, 8, 1)
    expected.rows["index"] = again.finished.rows["index"]
    assert listed(again.finished) == listed(expected)
    assert again.notes(11) == [
        f"note: 2 samples in {path} are of files that have changed or are not named any more",
        "resumed: 5 of 11 samples were already scanned",
    ]


def test_a_foreign_file_is_no_journal(tmp_path):
    """Prevents a file of the user's from being deleted for its name."""
    (tmp_path / "journal").write_text("my notes")
    with pytest.raises(UserError, match="is not a journal of `omnibal lengths`"):
        ScanJournal.open(tmp_path / "journal", "key", recorded(1))
    assert (tmp_path / "journal").read_text() == "my notes"


def test_the_key_follows_all_that_counts_depend_on(digits, tokenizer, tmp_path):
    """Prevents resuming with what was scanned of other images or for another model."""
    meta = json.loads((digits / "train/meta.json").read_text())

    def key(model: ModelConfig = MODEL, **changes) -> tuple[str, tuple[bytes, ...]]:
        entries = {
            name: entry | {"annotation": str(digits / "train" / entry["annotation"])} | changes
            for name, entry in meta.items()
        }
        (tmp_path / "meta.json").write_text(json.dumps(entries))
        return scan_key(model, tokenizer), Annotations.open(tmp_path / "meta.json").keys

    one_tile = MODEL.vision.tiling.model_copy(update={"max_dynamic_patch": 1})
    keys = [
        key(),
        key(root="elsewhere"),
        key(max_dynamic_patch=2),
        key(MODEL.with_tower("vision", tiling=one_tile)),
        key(MODEL.with_tower("vision", image_size=16)),
        key(MODEL.model_copy(update={"chat_template": "internlm2-chat"})),
        key(MODEL.model_copy(update={"system_message": "Read."})),
    ]
    assert len(set(keys)) == len(keys)
    assert key() == keys[0] == key(repeat_time=2)


@dataclass(frozen=True)
class Work:
    """What a worker may meet, by task."""

    def __call__(self, task: str) -> str:
        if task == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if task == "error":
            raise FileNotFoundError(2, "No such file", "x.jsonl")
        return task.upper()


def lowered() -> list[str]:
    return sorted(map_unordered(str.lower, ["A", "B", "C"], 3))


def test_a_worker_of_another_pool_works_alone() -> None:
    """Prevents: an assertion of the standard library where a user plans in a pool of their own."""
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        assert pool.apply(lowered) == ["a", "b", "c"]


def test_workers_that_end_badly(tmp_path):
    """Prevents a scan that waits for ever for a worker that the system killed, and tracebacks."""
    tasks = list("abcdefgh")
    assert sorted(map_unordered(Work(), tasks, 3)) == list("ABCDEFGH")
    with pytest.raises(UserError, match=r"ended from outside \(SIGKILL\).*--processes"):
        list(map_unordered(Work(), [*tasks, "killed", *tasks], 3))
    with pytest.raises(FileNotFoundError, match=r"x\.jsonl") as error:
        list(map_unordered(Work(), [*tasks, "error"], 3))
    assert "In a worker process:" in error.value.__notes__[0]
    results = map_unordered(Work(), tasks, 2)
    next(results)
    assert len(multiprocessing.active_children()) == 2
    results.close()
    assert multiprocessing.active_children() == []


def test_usable_cores_are_those_of_the_process():
    """Prevents a process for each core of a machine of which a job may use only some."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@dataclass(frozen=True)
class Gates:
    """Pictures of which each holds up the process that opens it, until they are released.

    So a scan cannot end before it is killed, however slow its killer is.
    """

    folder: Path
    names: list[str]

    @staticmethod
    def set(data: Path, samples: Iterable[int]) -> "Gates":
        """One in each of these samples of the first source of `make_data`, at its place alone."""
        annotation, names = data / "a.jsonl", []
        lines = annotation.read_text().splitlines(keepends=True)
        for sample in samples:
            names.append(f"gate{sample}.png")
            lines[sample] = make_line(np.random.default_rng(sample), names[-1])
            os.mkfifo(data / "pictures" / f"{names[-1]}.fifo")
            (data / "pictures" / names[-1]).symlink_to(f"{names[-1]}.fifo")
        annotation.write_text("".join(lines))
        return Gates(data / "pictures", names)

    def release(self) -> None:
        """Make them pictures as others are, and let go whom they hold, with an empty file."""
        for name in self.names:
            ready = self.folder / f"{name}.ready"
            shutil.copy(self.folder / "0.png", ready)
            ready.rename(self.folder / name)
            with contextlib.suppress(OSError):  # nobody has it open
                os.close(os.open(self.folder / f"{name}.fifo", os.O_WRONLY | os.O_NONBLOCK))


def start_command(folder: Path, digits: Path, output: Path) -> subprocess.Popen:
    options = "--model internvl-digits --processes 2 --json --tokenizer-model".split()
    arguments = [folder / "meta.json", *options, digits / "tokenizer.model", "-o", output]
    return subprocess.Popen(
        [sys.executable, "-m", "omnibal", "lengths", *map(str, arguments)],
        cwd=Path(__file__).parents[2], text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def running_members(group: int) -> list[int]:
    """Processes of a group that still run (a zombie does not)."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of_group = path.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(of_group) == group and state != "Z":
            members.append(int(path.parent.name))
    return members


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_killed_command_leaves_no_process_and_goes_on(tmp_path, digits, tokenizer):
    """Prevents workers that outlive the command, tracebacks of each after Ctrl-C, and a lost scan
    after either."""
    (tmp_path / "data").mkdir()
    make_data(tmp_path / "data", 2000)
    # Both workers of either scan are held up in the end, after two tasks and after two more.
    tasks = np.arange(8) * SAMPLES_PER_TASK + 100
    gates = [Gates.set(tmp_path / "data", tasks[[2, 3]]), Gates.set(tmp_path / "data", tasks[6:])]
    annotations = Annotations.open(tmp_path / "data/meta.json")
    output, partial = tmp_path / "L.parquet", tmp_path / "L.parquet.partial"
    for number, gate in zip((signal.SIGKILL, signal.SIGINT), gates, strict=True):
        before = partial.stat().st_size if partial.exists() else 0
        command = start_command(tmp_path / "data", digits, output)
        while not partial.exists() or partial.stat().st_size == before:
            time.sleep(0.005)
        if number == signal.SIGKILL:
            command.kill()
        else:
            os.killpg(command.pid, number)
        command.wait(600)
        deadline = time.monotonic() + 600
        while running_members(command.pid) and time.monotonic() < deadline:
            if number == signal.SIGKILL:  # a worker finds out when it has done its task
                gate.release()
            time.sleep(0.01)
        assert running_members(command.pid) == []
        _, errors = command.communicate()
        assert not output.exists()
        gate.release()
    assert command.returncode == 128 + signal.SIGINT
    assert errors.splitlines()[-1] == "interrupted: run the same command again to resume"
    assert "Traceback" not in errors
    finished = len(ScanJournal.open(partial, scan_key(MODEL, tokenizer), annotations).finished)
    assert 2 * SAMPLES_PER_TASK <= finished < len(annotations)
    command = start_command(tmp_path / "data", digits, output)
    printed, errors = command.communicate()
    assert command.returncode == 0
    assert f"resumed: {finished:,} of 6,000 samples were already scanned" in errors
    assert json.loads(printed)["samples"] == 6000
    assert output.read_bytes() == written(scan(annotations, tokenizer).lengths, tmp_path)
    assert not partial.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_interrupt_while_workers_start(tmp_path, digits):
    """Prevents a traceback of each worker that Ctrl-C meets in the middle of its imports."""
    (tmp_path / "data").mkdir()
    make_data(tmp_path / "data", 200)
    Gates.set(tmp_path / "data", [50, 150])
    command = start_command(tmp_path / "data", digits, tmp_path / "L.parquet")
    while len(running_members(command.pid)) < 3:  # resource tracker, and server of the forks
        time.sleep(0.002)
    time.sleep(0.05)
    os.killpg(command.pid, signal.SIGINT)
    _, errors = command.communicate()
    assert command.returncode == 128 + signal.SIGINT
    assert "Traceback" not in errors


def run_lengths(folder: Path, digits: Path, output: Path, *options: str) -> int:
    tokenizer = ("--tokenizer-model", digits / "tokenizer.model")
    files = (folder / "meta.json", *tokenizer, "-o", output)
    return status("lengths --model internvl-digits", *files, *options)


def test_command_stops_or_skips(broken, digits, tmp_path, capsys):
    """Prevents a result with holes that nobody asked for, and skipped samples that nobody sees."""
    annotations, bad, _ = broken
    folder = Path(annotations.where(0).rpartition("/")[0])
    output, listed = tmp_path / "L.parquet", tmp_path / "L.parquet.skipped.txt"
    assert run_lengths(folder, digits, output, "--json") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "error: the scan stopped at the first 5 bad samples" in printed.err
    assert [path.name for path in tmp_path.iterdir()] == ["L.parquet.partial"]
    assert run_lengths(folder, digits, output, "--json", "--on-error", "skip") == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert "resumed: " in printed.err
    assert f"skipped: {len(bad)} bad samples, listed in {listed}" in printed.err
    assert (result["samples"], result["skipped"]) == (1200 - len(bad), len(bad))
    assert result["skipped_list"] == str(listed)
    assert len(listed.read_text().splitlines()) == len(bad)
    assert sorted(path.name for path in tmp_path.iterdir()) == [output.name, listed.name]


def test_command_removes_a_list_that_is_out_of_date(digits, tmp_path, capsys):
    """Prevents whole lengths beside a list of samples that they lack."""
    output = tmp_path / "new/L.parquet"
    output.parent.mkdir()
    output.with_name("L.parquet.skipped.txt").write_text("0\tx\ty\n")
    assert run_lengths(digits / "train", digits, output, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["skipped"], result["skipped_list"]) == (0, None)
    assert [path.name for path in output.parent.iterdir()] == [output.name]
