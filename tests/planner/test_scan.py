"""Lengths from headers and text: equal to training's counts, strict about images, independent of
the number of processes or nodes, and resumable after kills."""

import contextlib
import io
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
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from cli_cases import failure, run
from jsonl_cases import (
    DIGITS,
    open_jsonl,
    open_meta,
    picture,
    png_chunk,
    record_of,
    scan,
    write_jsonl,
)
from PIL import Image, ImageOps

from omnibal.base.errors import UserError
from omnibal.base.worker_pool import LocalPool, map_unordered, usable_cores
from omnibal.data.annotations import Annotations
from omnibal.data.chat import encode_sample
from omnibal.data.image_headers import as_rgb, ends_as_whole, image_size, upright_size
from omnibal.data.lengths import Lengths, write_lengths
from omnibal.data.native_resolution import Segments, sizes_of
from omnibal.data.scan import scan_key, scan_lengths, write_skipped
from omnibal.data.scan_journal import COUNTED, Counted, ScanJournal
from omnibal.data.stored_files import BadFile, ImageFile
from omnibal.data.tiling import tile_count
from omnibal.model.config import ModelConfig

PICTURES = 30
SAMPLES_PER_TASK = 256


MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I", "F", "I;16")


def held_image(content: bytes) -> ImageFile:
    return ImageFile(Path("held"), opener=lambda: io.BytesIO(content))


def decode_image(held: ImageFile) -> Image.Image:
    """Return the image as training reads it."""
    with held.open() as file, Image.open(file) as image:
        ends_as_whole(image, file)
        return as_rgb(image)


def make_data(folder: Path, samples: int) -> Annotations:
    """Return two sources of `samples` samples with varied pictures. The second repeats twice."""
    rng = np.random.default_rng(1)
    (folder / "pictures").mkdir()
    for number in range(PICTURES):
        size = rng.integers(8, 200, 2).tolist()
        Image.new("L", size).save(folder / "pictures" / f"{number}.png")
    sources = {}
    for name, repeat_time in (("a", 1), ("b", 2)):
        write_jsonl(folder / f"{name}.jsonl", *(random_record(rng) for _ in range(samples)))
        sources[name] = {"annotation": f"{name}.jsonl", "repeat_time": repeat_time}
    return open_meta(folder, **{name: {"root": "pictures", **sources[name]} for name in sources})


def random_record(rng: np.random.Generator, *more: str) -> dict:
    images = [f"{number}.png" for number in rng.integers(0, PICTURES, rng.integers(0, 3))]
    images += more
    text = "<image>" * len(images) + "What is that? " * rng.integers(1, 9)
    return {"image": images, **record_of(text, "It is 7.")}


def to_bytes(lengths: Lengths, folder: Path) -> bytes:
    write_lengths(lengths, folder / "written.parquet")
    return (folder / "written.parquet").read_bytes()


def test_a_model_of_fewer_tokens_than_the_tokenizer_is_refused(digits, tokenizer):
    """Prevents token ids beyond the embedding table."""
    small = DIGITS.with_tower("language", vocab_size=tokenizer.vocab_size - 1)
    with pytest.raises(UserError, match="digits embeds"):
        scan(Annotations.open(digits / "train/meta.json"), tokenizer, small)


def open_journal(annotations: Annotations, tokenizer, folder: Path) -> ScanJournal:
    return ScanJournal.open(folder / "journal", scan_key(DIGITS, tokenizer), annotations)


def record_opens() -> contextlib.AbstractContextManager[mock.Mock]:
    """Record which image files are opened."""
    return mock.patch.object(ImageFile, "open", autospec=True, side_effect=ImageFile.open)


def opened_paths(noted: mock.Mock) -> list[Path]:
    return [call.args[0].path for call in noted.call_args_list]


def test_counts_equal_the_encoded_samples(digits, tokenizer):
    """Prevents packs that overflow in training through another token count, and wrong hashes."""
    annotations = Annotations.open(digits / "train" / "meta.json")
    done = []
    lengths = scan_lengths(annotations, DIGITS, tokenizer, done.append).lengths
    assert sum(done) == len(lengths) == len(annotations)
    vision, origin = DIGITS.vision, lengths.origin
    for index, sample in enumerate(annotations):
        sizes = [Image.open(image.path).size for image in sample.images]
        tiles = [tile_count(*size, vision.tiling, vision.image_size) for size in sizes]
        encoded = encode_sample(sample, tiles, DIGITS, tokenizer)
        assert lengths.column("tiles")[index] == sum(tiles)
        assert lengths.tokens[index] == len(encoded.token_ids)
        assert lengths.loss_tokens[index] == encoded.loss_mask.sum()
        assert lengths.source_names[lengths.source[index]] == sample.source
    assert (origin.data_sha256, origin.tokenizer_sha256) == (annotations.sha256, tokenizer.sha256)
    assert (origin.image_size, origin.tokens_per_tile, origin.tiling) == (32, 16, vision.tiling)


def test_samples_beyond_the_models_rope_are_named(tmp_path, tokenizer):
    """Prevents samples longer than max_positions, also from a journal with another limit."""
    annotations = make_data(tmp_path, 20)
    free = scan(annotations, tokenizer).lengths
    most = int(np.median(free.tokens))
    model = DIGITS.with_tower("language", max_positions=most)
    said = rf"a\.jsonl: line \d+: the sample has \d+ tokens.* {most};"
    with pytest.raises(UserError, match=said):
        scan(annotations, tokenizer, model)
    kept = scan(annotations, tokenizer, model, on_error="skip").lengths
    assert kept.sample.tolist() == np.flatnonzero(free.tokens <= most).tolist()
    assert scan_key(model, tokenizer) != scan_key(DIGITS, tokenizer)


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("png", lambda whole: b"", "cannot be read"),
        ("png", lambda whole: whole[:8], "cannot be read"),
        ("png", lambda whole: b"no picture" * 20, "cannot be read"),
        # A text chunk that unpacks to more than Pillow allows: not an OSError.
        (
            "png",
            lambda whole: whole[:33] + png_chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(2**21))),
            "cannot be read",
        ),
        *[
            (suffix, lambda whole, lost=lost: whole[:-lost], r"cannot be read \(is truncated\)")
            for suffix in ("png", "jpg")
            for lost in (1, 12, 500)
        ],
        # An embedded preview has its own end marker.
        ("jpg", lambda whole: picture(256, 256, "jpeg", comment=whole)[:-2000], "cannot be read"),
        # Cameras append data after the image, and BMP has no end marker.
        *[(each, lambda whole: whole + b"trailer " * 1000, None) for each in ("png", "jpg", "bmp")],
    ],
)
def test_images_that_end_early_or_are_none_are_named(tmp_path, tokenizer, suffix, change, message):
    """Prevents the image library's traceback, and truncated images accepted as complete."""
    whole = picture(kind="jpeg" if suffix == "jpg" else suffix)
    (tmp_path / f"x.{suffix}").write_bytes(change(whole))
    annotations = open_jsonl(tmp_path, record_of("<image>", image=f"x.{suffix}"))
    if message is None:
        assert scan(annotations, tokenizer).lengths.column("tiles").tolist() == [3]
        return
    with pytest.raises(UserError, match=rf"a\.jsonl: line 1: image .*x\.{suffix} {message}"):
        scan(annotations, tokenizer)


def test_images_are_read_by_the_scan_as_by_training():
    """Prevents images that scan and cannot train, and 16-bit grey read as white."""
    pixels, kinds = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8), 0
    for kind, mode in product(("BMP", "GIF", "ICO", "PNG", "PPM", "TIFF", "WEBP", "JPEG"), MODES):
        image, stored = Image.fromarray(pixels).convert(mode.partition(";")[0]), io.BytesIO()
        image = Image.fromarray(np.asarray(image, np.uint16)) if ";" in mode else image
        try:
            image.save(stored, kind)
        except (OSError, ValueError):  # a format without this mode
            continue
        whole = stored.getvalue()
        for share in (1, 0.99, 0.6, 0.2):
            held, found = held_image(whole[: int(len(whole) * share)]), []
            for read in (image_size, decode_image):
                with contextlib.suppress(Exception):
                    found.append(read(held))
            assert len(found) != 1, (kind, mode, share)
        kinds += 1
        if Image.open(io.BytesIO(whole)).mode in ("I", "F", "I;16"):
            with pytest.raises(BadFile, match=r"cannot be read \(grey above 8 bits \(mode"):
                image_size(held_image(whole))
    assert kinds > 30
    with pytest.raises(BadFile, match="PostScript is a program"):
        image_size(held_image(picture(kind="eps")))
    with (
        mock.patch.object(Image, "MAX_IMAGE_PIXELS", 100),
        pytest.raises(BadFile, match="exceeds"),
    ):
        image_size(held_image(picture(kind="webp")))


def test_a_folder_is_no_image_and_an_empty_folder_no_video(tmp_path, tokenizer):
    """Prevents a traceback, or advice that fits only one of them."""
    (tmp_path / "x").mkdir()
    for record in (record_of("<image>", image="x"), record_of(video="x")):
        with pytest.raises(UserError, match=r"a\.jsonl: line 1: image .*x is a folder; name a f"):
            scan(open_jsonl(tmp_path, record), tokenizer)


def test_data_that_teaches_nothing_is_refused(tmp_path, tokenizer):
    """Prevents days of training without a token that carries loss."""
    answer = {"role": "assistant", "content": "2", "loss": False}
    record = {"messages": [{"role": "user", "content": "1 + 1?"}, answer]}
    annotations = open_jsonl(tmp_path, record)
    with pytest.raises(UserError, match="no token of 1 samples is learned"):
        scan(annotations, tokenizer)


def test_bad_samples_are_named_together(tmp_path, tokenizer):
    """Prevents one scan per bad image, and a repeated sample reported twice."""
    lines = [record_of("<image>", image=f"gone{k}.png") for k in range(9)]
    lines[1] = "{"
    for count, beginning in ((3, "3 bad samples were found: "), (9, "the scan stopped at the fir")):
        with pytest.raises(UserError) as error:
            scan(open_jsonl(tmp_path, *lines[:count], repeat_time=2), tokenizer)
        assert str(error.value).startswith(beginning)
        found = re.findall(r"\(\d\) \S+a\.jsonl: line (\d)", str(error.value))
        assert found == ["1", "2", "3", "4", "5"][:count]
        assert "gone2.png does not exist" in str(error.value)
    with pytest.raises(UserError, match=r"every sample is bad.*a\.jsonl: line 1 is not JSON"):
        scan(open_jsonl(tmp_path, "{", "{"), tokenizer, on_error="skip")


@pytest.fixture(scope="module")
def broken(tmp_path_factory, tokenizer) -> SimpleNamespace:
    """Return 1,200 samples, the indices of bad samples, and a scan with --on-error skip."""
    folder, bad = tmp_path_factory.mktemp("broken"), []
    make_data(folder, 400)
    pictures = folder / "pictures"
    (pictures / "3.png").unlink()
    (pictures / "4.png").write_bytes((pictures / "4.png").read_bytes()[:-9])
    (pictures / "5.png").write_bytes(b"")
    for name, first, samples in (("a", 0, 400), ("b", 400, 800)):
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        lines[7], lines[300] = lines[7][:-1], lines[300].replace("7", "\\ud800")
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        is_bad = [re.search(r'"[345]\.png"|ud800|[^}]$', line) for line in lines]
        bad += [first + k for k in range(samples) if is_bad[k % 400]]
    assert 50 < len(bad) < 600
    annotations = Annotations.open(folder / "meta.json")
    with record_opens() as noted:
        scanned = scan(annotations, tokenizer, on_error="skip")
    opened = opened_paths(noted)
    return SimpleNamespace(annotations=annotations, bad=bad, scanned=scanned, opened=opened)


def test_skip_leaves_out_the_broken_ones_alone(broken, tokenizer, tmp_path):
    """Prevents good samples lost, bad samples kept, misaligned rows, and images opened twice."""
    assert len(broken.opened) == len(set(broken.opened)) == PICTURES
    lengths = broken.scanned.lengths
    assert lengths.sample.tolist() == sorted(set(range(1200)) - set(broken.bad))
    for row, place in enumerate(lengths.sample):
        images = len(broken.annotations[place].images)
        per_image = [lengths.column("tiles")[row], *[0] * (images - 1)][:images]
        encoded = encode_sample(broken.annotations[place], per_image, DIGITS, tokenizer)
        assert lengths.tokens[row] == len(encoded.token_ids)
    write_skipped(broken.scanned.skipped, tmp_path / "skipped.txt")
    lines = (tmp_path / "skipped.txt").read_text().splitlines()
    for line, index in zip(lines, broken.bad, strict=True):
        number, where, reason = line.split("\t")
        assert (int(number), where) == (index, broken.annotations.where(index))
        assert re.search("does not exist|is truncated|cannot be read|is not JSON|Unicode", reason)
    write_skipped((), tmp_path / "skipped.txt")
    assert not (tmp_path / "skipped.txt").exists()


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_change_nothing(broken, tokenizer, tmp_path, processes):
    """Prevents lengths that depend on the number of processes, so plans are not reproducible."""
    done, pool = [], LocalPool(processes)
    parallel = scan_lengths(
        broken.annotations, DIGITS, tokenizer, done.append, pool=pool, on_error="skip"
    )
    assert sum(done) == 1200 > processes * SAMPLES_PER_TASK
    assert parallel.skipped == broken.scanned.skipped
    assert to_bytes(parallel.lengths, tmp_path) == to_bytes(broken.scanned.lengths, tmp_path)


def test_the_first_mistakes_are_named_whoever_finds_them(broken, tokenizer):
    """Prevents error messages that depend on the order of processes."""
    said = set()
    for processes in (1, 2, 3):
        with pytest.raises(UserError) as error:
            scan(broken.annotations, tokenizer, pool=LocalPool(processes))
        said.add(str(error.value))
    (message,) = said
    named = [broken.annotations.where(index) for index in broken.bad[:5]]
    assert re.findall(r"\(\d\) (\S+: line \d+)", message) == named
    assert "--on-error skip" in message


def test_a_mended_file_needs_only_the_rest(tmp_path, tokenizer):
    """Prevents bad samples recorded as finished, and good samples that are scanned again."""
    (tmp_path / "data").mkdir()
    annotations = make_data(tmp_path / "data", 200)
    whole = scan(annotations, tokenizer).lengths
    broken = ImageFile(tmp_path / "data/pictures/3.png")
    content = broken.path.read_bytes()
    broken.path.unlink()
    with pytest.raises(UserError, match="the scan stopped at the first 5"):
        scan(annotations, tokenizer, journal=open_journal(annotations, tokenizer, tmp_path))
    journal = open_journal(annotations, tokenizer, tmp_path)
    skipped = scan(annotations, tokenizer, journal=journal, on_error="skip").skipped
    broken.path.write_bytes(content)
    journal, left = open_journal(annotations, tokenizer, tmp_path), 600 - len(skipped)
    assert len(journal.finished) == left
    assert journal.notes(600) == [f"resumed: {left} of 600 samples were already scanned"]
    with record_opens() as noted:
        again = scan(annotations, tokenizer, journal=journal)
    shown = [sample.images for sample in annotations if broken in sample.images]
    assert {*opened_paths(noted)} == {image.path for images in shown for image in images}
    assert to_bytes(again.lengths, tmp_path) == to_bytes(whole, tmp_path)


def rows_of(*indices: int) -> Counted:
    """Return counts of samples with these indices, some with images."""
    rows = np.array([tuple(range(k, k + len(COUNTED))) for k in indices], COUNTED)
    shown = [[Segments(k, 3)] * (k % 3) for k in indices]
    return Counted(rows=rows, image_sizes=sizes_of(shown))


def fake_annotations(*counts: int, keys: tuple[bytes, ...] = (bytes(32),)) -> SimpleNamespace:
    """Return a stand-in for annotations: files with these numbers of records."""
    number = np.concatenate([np.arange(count) for count in counts])
    return SimpleNamespace(keys=keys, file=np.repeat(np.arange(len(counts)), counts), number=number)


def listing(counted: Counted) -> tuple:
    sizes = counted.image_sizes
    return counted.rows.tolist(), sizes.counts.tolist(), sizes.images.tolist()


def test_a_torn_journal_holds_what_was_whole(tmp_path):
    """Prevents half a record, or garbage after the last record, from being read as counts."""
    path, ends = tmp_path / "journal", []
    journal = ScanJournal.open(path, "key", fake_annotations(10))
    assert not path.exists()
    for rows in (rows_of(4, 5), rows_of(0, 1, 2), rows_of(9)):
        journal.append(rows)
        ends.append(path.stat().st_size)
    content = path.read_bytes()
    damaged = [content[:end] for end in range(len(content))]
    damaged += [content[:end] + bytes(40) for end in ends]
    for k in range(ends[0], ends[2]):
        damaged.append(content[:k] + bytes([content[k] ^ 4]) + content[k + 1 :])
    for damage in damaged:
        path.write_bytes(damage)
        pairs = zip(damage, content, strict=False)
        same = next((k for k, (one, other) in enumerate(pairs) if one != other), len(damage))
        journal = ScanJournal.open(path, "key", fake_annotations(10))
        kept = sum(end <= same for end in ends)
        expected = [[], [4, 5], [0, 1, 2, 4, 5], [0, 1, 2, 4, 5, 9]][kept]
        assert listing(journal.finished) == listing(rows_of(*expected))
        assert not journal.discarded
        journal.append(rows_of(7))
        again = ScanJournal.open(path, "key", fake_annotations(10))
        assert listing(again.finished) == listing(rows_of(*sorted([*expected, 7])))
    again.remove()
    assert not path.exists()


def test_a_journal_of_other_settings_is_thrown_away(tmp_path):
    """Prevents counts of other data or another tiling from being mixed in."""
    path, before = tmp_path / "journal", fake_annotations(9)
    note = f"note: {path} is of other data or settings; the scan starts again"
    for key, data in (("a" * 64, fake_annotations(9, keys=(b"b" * 32,))), ("b" * 64, before)):
        ScanJournal.open(path, "a" * 64, before).append(rows_of(1))
        journal = ScanJournal.open(path, key, data)
        assert len(journal.finished) == 0
        assert journal.notes(9) == [note]
        journal.append(rows_of(2))
        assert ScanJournal.open(path, key, data).finished.rows["index"].tolist() == [2]


def test_a_journal_is_of_files_wherever_they_stand(tmp_path):
    """Prevents counts lost, repeated or assigned to another file after one file changed."""
    path, keys = tmp_path / "journal", [bytes([k]) * 32 for k in range(4)]
    journal = ScanJournal.open(path, "key", fake_annotations(3, 3, 3, keys=tuple(keys[:3])))
    journal.append(rows_of(1, 4, 5))
    journal.append(rows_of(6, 8))
    # The third file is now first and repeated, and the second is replaced.
    after = SimpleNamespace(
        keys=(keys[2], keys[3], keys[0]),
        file=np.repeat([0, 1, 2], [6, 2, 3]),
        number=np.array([0, 1, 2, 0, 1, 2, 4, 5, 0, 1, 2]),
    )
    again = ScanJournal.open(path, "key", after)
    expected = rows_of(6, 8, 6, 8, 1)
    expected.rows["index"] = [0, 2, 3, 5, 9]
    assert listing(again.finished) == listing(expected)
    assert again.notes(11) == [
        f"note: 2 samples in {path} are of changed or unnamed files",
        "resumed: 5 of 11 samples were already scanned",
    ]


def test_a_foreign_file_is_no_journal(tmp_path):
    """Prevents deletion of a user's file that has the journal's name."""
    (tmp_path / "journal").write_text("my notes")
    with pytest.raises(UserError, match="is not a journal of `omnibal lengths`"):
        ScanJournal.open(tmp_path / "journal", "key", fake_annotations(1))
    assert (tmp_path / "journal").read_text() == "my notes"


def test_the_key_follows_all_that_counts_depend_on(digits, tokenizer, tmp_path):
    """Prevents resuming from a scan of other images or for another model."""
    meta = json.loads((digits / "train/meta.json").read_text())

    def key(model: ModelConfig = DIGITS, **changes) -> tuple[str, tuple[bytes, ...]]:
        sources = {
            name: entry | {"annotation": str(digits / "train" / entry["annotation"])} | changes
            for name, entry in meta.items()
        }
        return scan_key(model, tokenizer), open_meta(tmp_path, **sources).keys

    one_tile = DIGITS.vision.tiling.model_copy(update={"max_dynamic_patch": 1})
    models = [DIGITS.with_tower("vision", tiling=one_tile)]
    models.append(DIGITS.with_tower("vision", image_size=16))
    for change in ({"chat_template": "internlm2-chat"}, {"system_message": "Read."}):
        models.append(DIGITS.model_copy(update=change))
    keys = [key(), key(root="elsewhere"), key(max_dynamic_patch=2), *map(key, models)]
    assert len(set(keys)) == len(keys)
    assert key() == keys[0] == key(repeat_time=2)


def work(task: str) -> str:
    """Fail as the task says, or return it in upper case."""
    if task == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "error":
        raise FileNotFoundError(2, "No such file", "x.jsonl")
    return task.upper()


def lower_letters() -> list[str]:
    return sorted(map_unordered(str.lower, ["A", "B", "C"], 3))


def test_a_worker_of_another_pool_works_alone() -> None:
    """Prevents an AssertionError of multiprocessing if a user plans inside their own pool."""
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        assert pool.apply(lower_letters) == ["a", "b", "c"]


def test_workers_that_end_badly(tmp_path):
    """Prevents a scan that hangs after the OS killed a worker, and tracebacks without context."""
    tasks = list("abcdefgh")
    assert sorted(map_unordered(work, tasks, 3)) == list("ABCDEFGH")
    with pytest.raises(UserError, match=r"ended \(SIGKILL\).*--processes"):
        list(map_unordered(work, [*tasks, "killed", *tasks], 3))
    with pytest.raises(FileNotFoundError, match=r"x\.jsonl") as error:
        list(map_unordered(work, [*tasks, "error"], 3))
    assert "In a worker process:" in error.value.__notes__[0]
    results = map_unordered(work, tasks, 2)
    next(results)
    assert len(multiprocessing.active_children()) == 2
    results.close()
    assert multiprocessing.active_children() == []


def test_usable_cores_are_those_of_the_process():
    """Prevents one process per machine core if the job may use only some cores."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@dataclass(frozen=True)
class Gates:
    """Named pipes in place of pictures: they block readers until the scan is killed."""

    folder: Path
    names: list[str]

    @staticmethod
    def set(data: Path, samples: Iterable[int]) -> "Gates":
        """Put a gate into each of these samples of the first source of `make_data`."""
        lines, names = (data / "a.jsonl").read_text().splitlines(), []
        for sample in samples:
            names.append(f"gate{sample}.png")
            lines[sample] = json.dumps(random_record(np.random.default_rng(sample), names[-1]))
            os.mkfifo(data / "pictures" / f"{names[-1]}.fifo")
            (data / "pictures" / names[-1]).symlink_to(f"{names[-1]}.fifo")
        write_jsonl(data / "a.jsonl", *lines)
        return Gates(data / "pictures", names)

    def release(self) -> None:
        """Replace the gates by pictures, and unblock waiting readers with an empty file."""
        for name in self.names:
            ready = self.folder / f"{name}.ready"
            shutil.copy(self.folder / "0.png", ready)
            ready.rename(self.folder / name)
            with contextlib.suppress(OSError):  # no reader
                os.close(os.open(self.folder / f"{name}.fifo", os.O_WRONLY | os.O_NONBLOCK))


def start_command(folder: Path, digits: Path, output: Path) -> subprocess.Popen:
    command = f"-m omnibal lengths {folder}/meta.json --model internvl-digits --processes 2 --json"
    arguments = f"--tokenizer-model {digits}/tokenizer.model -o {output}"
    return subprocess.Popen(
        [sys.executable, *f"{command} {arguments}".split()],
        cwd=Path(__file__).parents[2], text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def running_members(group: int) -> list[int]:
    """Return processes of a group that still run (not zombies)."""
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
    """Prevents workers that outlive the command, tracebacks per worker, and a lost scan."""
    (tmp_path / "data").mkdir()
    make_data(tmp_path / "data", 2000)
    # In each scan both workers block on a gate after finishing two tasks.
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
            if number == signal.SIGKILL:  # a worker notices the kill after its task
                gate.release()
            time.sleep(0.01)
        assert running_members(command.pid) == []
        _, errors = command.communicate()
        assert not output.exists()
        gate.release()
    assert command.returncode == 128 + signal.SIGINT
    assert errors.splitlines()[-1] == "interrupted: run the same command again to resume"
    assert "Traceback" not in errors
    finished = len(ScanJournal.open(partial, scan_key(DIGITS, tokenizer), annotations).finished)
    assert 2 * SAMPLES_PER_TASK <= finished < len(annotations)
    command = start_command(tmp_path / "data", digits, output)
    printed, errors = command.communicate()
    assert command.returncode == 0
    assert f"resumed: {finished:,} of 6,000 samples were already scanned" in errors
    assert json.loads(printed)["samples"] == 6000
    assert output.read_bytes() == to_bytes(scan(annotations, tokenizer).lengths, tmp_path)
    assert not partial.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_interrupt_while_workers_start(tmp_path, digits):
    """Prevents a traceback per worker if Ctrl-C arrives during their imports."""
    (tmp_path / "data").mkdir()
    make_data(tmp_path / "data", 200)
    Gates.set(tmp_path / "data", [50, 150])
    command = start_command(tmp_path / "data", digits, tmp_path / "L.parquet")
    while len(running_members(command.pid)) < 3:  # the resource tracker and the fork server
        time.sleep(0.002)
    time.sleep(0.05)
    os.killpg(command.pid, signal.SIGINT)
    _, errors = command.communicate()
    assert command.returncode == 128 + signal.SIGINT
    assert "Traceback" not in errors


def test_command_stops_or_skips(broken, digits, tmp_path, capsys):
    """Prevents samples skipped without request or report, and outdated lists of skipped samples."""
    output, listing = tmp_path / "L.parquet", tmp_path / "L.parquet.skipped.txt"
    tokenizer = ("--tokenizer-model", digits / "tokenizer.model")

    def lengths_of(folder: Path) -> tuple[object, ...]:
        command = f"lengths {folder / 'meta.json'} --model internvl-digits --json"
        return command, *tokenizer, "-o", output

    folder, bad = Path(broken.annotations.where(0).rpartition("/")[0]), len(broken.bad)
    said = failure(capsys, *lengths_of(folder))
    assert "error: the scan stopped at the first 5 bad samples" in said
    assert [path.name for path in tmp_path.iterdir()] == ["L.parquet.partial"]
    run(*lengths_of(folder), "--on-error", "skip")
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert "resumed: " in printed.err
    assert f"skipped: {bad} bad samples, listed in {listing}" in printed.err
    assert (result["samples"], result["skipped"]) == (1200 - bad, bad)
    assert result["skipped_list"] == str(listing)
    assert len(listing.read_text().splitlines()) == bad
    assert {path.name for path in tmp_path.iterdir()} == {output.name, listing.name}
    run(*lengths_of(digits / "train"))
    result = json.loads(capsys.readouterr().out)
    assert (result["skipped"], result["skipped_list"]) == (0, None)
    assert [path.name for path in tmp_path.iterdir()] == [output.name]


needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")

ROOT = Path(__file__).parents[2]


@needs_ray
def test_kills_lose_and_double_nothing():
    """Prevents a scan that ends with a killed node, or loses or repeats a sample after it."""
    command = [sys.executable, "benchmarks/scan_kills.py", "--kills", "3", "--samples", "3000"]
    finished = subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=300
    )
    result = json.loads(finished.stdout)
    assert result["killed"] == {"worker": 1, "node": 1, "command": 1}
    assert result["finished"] >= 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--engine ray --address 127.0.0.1:1", "--address 127.0.0.1:1: the Ray cluster cannot be"),
        (f"--engine ray --address {300 * chr(97)}:1", "the Ray cluster cannot be"),
        ("--engine ray --processes 2", "--processes does not go with --engine ray"),
        ("--address 127.0.0.1:6379", "--address needs --engine ray"),
    ],
)
def test_mistakes_about_the_cluster(digits, tmp_path, capsys, options, expected):
    """Prevents minutes of Ray's own retries, and options that are ignored."""
    files = f"{digits}/train/meta.json --tokenizer-model {digits}/tokenizer.model"
    command = f"lengths {files} --model internvl-digits -o {tmp_path}/L.parquet {options}"
    assert expected in failure(capsys, command)
    assert list(tmp_path.iterdir()) == []


SIZE = (30, 20)


def upright_by_decoding(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).size


def upright(path: Path) -> tuple[int, int]:
    with path.open("rb") as file:
        return upright_size(file)


def orientation_exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
def test_sizes_as_exif_says_that_an_image_stands(tmp_path, suffix):
    """Prevents swapped height and width of photos with EXIF orientation."""
    image, found = Image.new("RGB", SIZE, 7), set()
    for orientation in range(1, 9):
        path = tmp_path / f"{orientation}.{suffix}"
        image.save(path, exif=orientation_exif(orientation))
        assert upright(path) == upright_by_decoding(path)
        found.add(upright(path))
    assert found == {SIZE, SIZE[::-1]}
    plain = tmp_path / f"plain.{suffix}"
    image.save(plain)
    assert upright(plain) == image_size(ImageFile(plain)) == SIZE


def test_exif_behind_the_pixels_of_a_png_counts(tmp_path):
    """Prevents a wrong size if a PNG's orientation is stored after the pixels."""
    end = png_chunk(b"IEND", b"")
    body = picture(*SIZE).removesuffix(end)
    exif = orientation_exif(6).tobytes().removeprefix(b"Exif\0\0")
    xmp = b"XML:com.adobe.xmp\0\0\0\0\0<tiff:Orientation>8</tiff:Orientation>"
    for name, behind in (("exif", png_chunk(b"eXIf", exif)), ("xmp", png_chunk(b"iTXt", xmp))):
        path = tmp_path / f"{name}.png"
        path.write_bytes(body + behind + end)
        assert upright(path) == upright_by_decoding(path) == SIZE[::-1]
        assert image_size(ImageFile(path)) == SIZE
