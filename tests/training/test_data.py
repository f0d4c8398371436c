"""From packs to tensors: loss weights, random numbers, unreadable samples, loader processes."""

import io
import itertools
import json
import math
import multiprocessing
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from data_cases import (
    CPU,
    FIRST,
    LAST,
    MIDDLE,
    MODEL,
    SKIP,
    TEXT,
    WHOLE,
    Data,
    assert_same,
    make_turns,
)
from PIL import Image
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from megatron.vlm.inputs.augment import Purpose, jpeg_qualities, tile_keys
from megatron.vlm.inputs.batch import MicroBatchShape
from megatron.vlm.inputs.data import LossWeighting, MicroBatchOptions, PackDataset, load_batches
from megatron.vlm.inputs.read_ahead import _begin_worker
from megatron.vlm.inputs.reader import SampleReader
from megatron.vlm.inputs.validation_packs import pack_validation
from omnibal.base.errors import UserError
from omnibal.data.annotations import Annotations
from omnibal.model.levels import Level
from omnibal.model.limits import Caps

ROOT = Path(__file__).parents[2]


def random_packs(samples: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return np.array_split(rng.permutation(samples), samples // 4)


@pytest.mark.parametrize(
    ("weighting", "weigh"),
    [
        (LossWeighting.TOKEN, lambda n, of_pack: 1.0),
        (LossWeighting.SAMPLE, lambda n, of_pack: 1 / n),
        (LossWeighting.SQRT, lambda n, of_pack: 1 / math.sqrt(n)),
        (LossWeighting.MICRO_BATCH, lambda n, of_pack: 1 / of_pack),
        (LossWeighting.SUM, lambda n, of_pack: 1.0),
    ],
)
def test_loss_fields_token_by_token(data, weighting, weigh):
    """Prevents a loss weight of another sample, or of one turn instead of the sample."""
    packs = random_packs(len(data.lengths), seed=1)
    dataset = data.dataset(packs, LAST, MicroBatchOptions(loss_weighting=weighting))
    turns = set()
    for pack, batch in zip(packs, dataset, strict=True):
        expected, place = [], 0
        of_pack = int(data.lengths.loss_tokens[pack].sum())
        for index in pack:
            sample = data.reader.annotations[int(index)]
            turns.add(len(sample.turns))
            one = data.reader.encode(sample, int(data.lengths.column("tiles")[index]))
            weight = np.float32(weigh(np.count_nonzero(one.loss_mask), of_pack))
            expected += [
                (place + at - 1, int(one.token_ids[at]), weight)
                for at in np.flatnonzero(one.loss_mask)
            ]
            place += len(one.token_ids)
        fields = (batch.loss_positions_L, batch.labels_L, batch.loss_weights_L)
        assert list(zip(*(field.tolist() for field in fields), strict=True)) == expected
        assert batch.loss_weights_L.dtype == torch.float32
    assert len(turns) > 1


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_load_the_same(pictures):
    """Prevents tensors or an order that depend on the number of workers."""
    options = MicroBatchOptions(seed=5, augment=True, drop_path=True)
    packs = random_packs(len(pictures.lengths), seed=3)
    dataset = pictures.dataset(packs, WHOLE, options)
    expected = [dataset[k] for k in dataset.keys()]
    for num_workers in (0, 1, 3):
        loaded = list(load_batches(dataset, num_workers, CPU))
        for batches in zip(loaded, expected, strict=True):
            assert_same(*batches)
    for changed in (
        pictures.dataset(packs, WHOLE, options, epoch=1),
        pictures.dataset(packs, WHOLE, replace(options, seed=6)),
    ):
        for name in ("pixels_TCPP", "drop_path_keys_T"):
            pairs = [(vars(a)[name], vars(b)[name]) for a, b in zip(changed, expected, strict=True)]
            assert not any(torch.equal(a, b) for a, b in pairs if len(a))


def pixels_of(tile: Image.Image) -> torch.Tensor:
    """Return normalized pixels, float32 [C, P, P], by definition."""
    values = torch.from_numpy(np.array(tile)).permute(2, 0, 1).double()
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (values / 255 - mean[:, None, None]) / std[:, None, None]


def test_augmented_tiles_are_jpegs(pictures):
    """Prevents another augmentation than InternVL's, a shared draw, or augmented plain data."""
    dataset = pictures.dataset([[3], [10]], FIRST, MicroBatchOptions(augment=True))
    augmented, plain = (batch.pixels_TCPP for batch in dataset)
    assert pictures.reader.annotations[10].images == pictures.reader.annotations[3].images
    assert plain.equal(pictures.reader.pixels(pictures.reader.annotations[3]))
    assert pictures.load([3], FIRST).pixels_TCPP.equal(plain)
    found = []
    for pixels_CPP, tile_PPC in zip(
        augmented, pictures.reader.tiles(pictures.reader.annotations[3]), strict=True
    ):
        errors = []
        for quality in range(75, 101):
            stored = io.BytesIO()
            Image.fromarray(tile_PPC).save(stored, "jpeg", quality=quality)
            errors.append((pixels_of(Image.open(stored)) - pixels_CPP).abs().max().item())
        assert min(errors) < 1e-5 < sorted(errors)[1]
        found.append(75 + int(np.argmin(errors)))
    assert len(set(found)) > 1
    assert found == jpeg_qualities(tile_keys(Purpose.JPEG_QUALITY, 0, 0, 3, len(found)))


def test_qualities_are_equally_likely():
    """Prevents a JPEG quality that is never drawn, or correlated draws."""
    keys = np.concatenate(
        [tile_keys(Purpose.JPEG_QUALITY, 3, 0, sample, 13) for sample in range(2000)]
    )
    counts = np.bincount(jpeg_qualities(keys), minlength=101)
    assert not counts[:75].any()
    # 26 bins of 1000: chance of a chi-squared above 60 is 1 in 10,000 seeds.
    assert ((counts[75:] - 1000) ** 2 / 1000).sum() < 60


def test_keys_of_every_tile_differ():
    """Prevents tiles, samples, epochs, seeds or purposes that share random numbers."""
    draws = itertools.product(Purpose, (0, 1, 2**32), (0, 1), (0, 1, 2**33))
    keys = [key for draw in draws for key in tile_keys(*draw, 4).tolist()]
    assert len(set(keys)) == len(keys) == 2 * 3 * 2 * 3 * 4


def test_drop_path_keys_follow_the_tiles(data):
    """Prevents stages that disagree on a tile's dropped layers, or that read annotations for it."""
    options = MicroBatchOptions(seed=9, drop_path=True)
    of_sample = {}
    for seed in (1, 2):
        packs = random_packs(len(data.lengths), seed)
        middle = data.dataset(packs, MIDDLE, options)
        middle.reader = None
        first = data.dataset(packs, FIRST, options)
        for pack, batch, other in zip(packs, middle, first, strict=True):
            assert batch.pixels_TCPP is None and batch.loss_weights_L is None
            assert batch.drop_path_keys_T.dtype == torch.int64
            assert batch.drop_path_keys_T.equal(other.drop_path_keys_T)
            assert len(batch.drop_path_keys_T) == batch.tiles == len(other.pixels_TCPP)
            tiles = data.lengths.column("tiles")[pack].tolist()
            for index, keys in zip(pack, batch.drop_path_keys_T.split(tiles), strict=True):
                assert of_sample.setdefault(int(index), keys).equal(keys)
    assert data.dataset(packs, MIDDLE)[0].drop_path_keys_T is None
    assert data.dataset(packs, TEXT, options)[0].drop_path_keys_T is None


def test_host_fields_stay_on_the_host(data):
    """Prevents reads of random numbers from the device, one by one."""
    batch = data.load([0], WHOLE, MicroBatchOptions(drop_path=True)).to(torch.device("meta"))
    assert batch.drop_path_keys_T.device == CPU
    assert {batch.pixels_TCPP.device.type, batch.loss_weights_L.device.type} == {"meta"}


DAMAGES = {
    "removed": Path.unlink,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-200]),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("Not Found"),
}
# Sample 5 shows pictures 0 and 1, sample 6 none.
PACK, BAD = [3, 5, 2, 0, 6], {5, 0}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_unreadable_samples_stop_or_are_replaced(pictures, damage):
    """Prevents unrequested training on blank pixels. With --on-bad-sample skip, prevents stages
    that disagree, shifted neighbours, loss on unseen images, or an error at an empty pack."""
    options = replace(SKIP, loss_weighting=LossWeighting.SQRT)
    before = pictures.load(PACK, WHOLE, options)
    assert before.unreadable == ()
    path = pictures.reader.annotations[0].images[0].path
    damage(path)
    with pytest.raises(UserError, match="cannot read this image") as error:
        list(load_batches(pictures.dataset([[1], [0]], FIRST), 1, CPU))
    assert str(error.value).startswith(f"{path}: ")
    # The head's stage needs no image; the first stage has raised.
    assert pictures.load([0], LAST).unreadable == ()
    alone = pictures.load([0], WHOLE, SKIP)
    assert alone.tiles == len(alone.pixels_TCPP) > 0
    assert len(alone.labels_L) == len(alone.loss_positions_L) == len(alone.loss_weights_L) == 0
    whole, first, text, last = (
        pictures.load(PACK, stage, options) for stage in (WHOLE, FIRST, TEXT, LAST)
    )
    for batch in (whole, first, last):
        assert len(batch.unreadable) == 2
        assert all("0.jpg: cannot read this image" in message for message in batch.unreadable)
    for batch in (whole, first, text, last):
        assert (batch.shape, batch.segment_tokens) == (before.shape, before.segment_tokens)
    assert whole.pixels_TCPP.equal(first.pixels_TCPP)
    tiles = pictures.lengths.column("tiles")[PACK].tolist()
    parts = zip(first.pixels_TCPP.split(tiles), before.pixels_TCPP.split(tiles), strict=True)
    for index, (pixels, good) in zip(PACK, parts, strict=True):
        assert pixels.equal(torch.zeros_like(good) if index in BAD else good)
    assert len(text.image_positions_M) == before.tiles * MODEL.vision.tokens_per_item
    sample_of_token = torch.tensor(PACK).repeat_interleave(torch.tensor(before.segment_tokens))
    kept = torch.tensor([int(k) not in BAD for k in sample_of_token[before.loss_positions_L]])
    assert 0 < kept.sum() < len(kept)
    for name in ("loss_positions_L", "labels_L", "loss_weights_L"):
        assert vars(last)[name].equal(vars(before)[name][kept])
        assert vars(whole)[name].equal(vars(last)[name])


def test_other_mistakes_are_not_forgiven(pictures):
    """Prevents changed data from being treated as unreadable files."""
    Image.new("RGB", (500, 20)).save(pictures.reader.annotations[0].images[0].path)
    with pytest.raises(UserError, match="where the plan counted"):
        pictures.load([0], FIRST, SKIP)
    annotation = pictures.reader.annotations[0].images[0].path.parent / "a.jsonl"
    annotation.write_text(annotation.read_text().replace("human", "robot"))
    for stage in (FIRST, TEXT, LAST):
        with pytest.raises(UserError, match='"robot"; it must be'):
            pictures.load([1], stage, SKIP)


LIMIT_S = 300
TORCH_S = 20.0
"""Seconds until torch's own check for dead workers."""


def many_packs(data: Data) -> PackDataset:
    return data.dataset([[k % len(data.lengths)] for k in range(60)])


def test_killed_worker_is_named_at_once(data, monkeypatch):
    """Prevents a run that hangs after the system kills a worker."""
    noticed_by_torch, look = [], _MultiProcessingDataLoaderIter._try_get_data

    def late_look(loader):
        try:
            return look(loader, TORCH_S)
        except RuntimeError as error:
            noticed_by_torch.append(error)
            raise

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_try_get_data", late_look)
    others = set(multiprocessing.active_children())  # of an earlier test, still ending
    batches = load_batches(many_packs(data), 2, CPU)
    next(batches)
    workers = [one for one in multiprocessing.active_children() if one not in others]
    assert len(workers) == 2
    workers[0].kill()
    with pytest.raises(UserError, match=f"{workers[0].pid} was ended from outside .SIGKILL"):
        list(batches)
    assert not noticed_by_torch


def test_workers_leave_signals_to_the_trainer(data):
    """Prevents a signal to the process group from ending workers before the trainer has saved."""
    dataset = many_packs(data)
    batches = load_batches(dataset, 2, CPU)
    loaded = [next(batches)]
    for worker in multiprocessing.active_children():
        os.kill(worker.pid, signal.SIGTERM)
        os.kill(worker.pid, signal.SIGINT)
    loaded += batches
    for batches in zip(loaded, dataset, strict=True):
        assert_same(*batches)


def test_closed_batches_leave_no_worker(data):
    """Prevents loader processes that accumulate with every validation."""
    others = set(multiprocessing.active_children())  # of an earlier test
    batches = load_batches(many_packs(data), 2, CPU)
    next(batches)
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 2
    batches.close()
    for worker in workers:
        worker.join(LIMIT_S)
    assert [worker.exitcode for worker in workers] == [0, 0]


def test_workers_end_with_a_killed_trainer(data):
    """Prevents orphaned workers that hold memory and files of a dead job."""
    context = multiprocessing.get_context("fork")
    started = context.Event()
    alive, held = os.pipe()

    def load_and_wait() -> None:
        batches = load_batches(many_packs(data), 2, CPU)
        next(batches)
        started.set()
        time.sleep(2 * LIMIT_S)

    trainer = context.Process(target=load_and_wait)
    trainer.start()
    os.close(held)
    has_started = started.wait(LIMIT_S)
    trainer.kill()
    trainer.join()
    assert has_started
    # Workers inherited the write end: it closes when the last worker ends.
    readable, _, _ = select.select([alive], [], [], LIMIT_S)
    os.close(alive)
    assert readable


def test_worker_without_its_trainer_ends():
    """Prevents a hanging worker if its trainer ended before the worker began."""

    def begin_orphaned() -> None:
        _begin_worker(os.getpid(), 0)  # any process but the parent
        time.sleep(2 * LIMIT_S)

    process = multiprocessing.get_context("fork").Process(target=begin_orphaned)
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == 1


FAILING_PROGRAM = """
from megatron.vlm.inputs.read_ahead import read_ahead
items = read_ahead(dict(enumerate(range(1000))), 2, lambda item: item)
print(next(items), next(items), flush=True)
raise RuntimeError("on purpose")
"""


def test_failing_program_ends(data):
    """Prevents a trainer's exception from hanging in the wait for its workers."""
    ended = subprocess.run(
        [sys.executable, "-c", FAILING_PROGRAM],
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout, ended.stderr.count("Traceback")) == (1, "0 1\n", 1)
    assert ended.stderr.endswith("RuntimeError: on purpose\n")


CAPS = Caps.of(tiles=6, tokens=160)
RANKS = 3


def test_validation_packs_hold_every_sample_once(data):
    """Prevents held-out samples lost, counted twice, or beyond the planned memory."""
    samples = 70
    packs = pack_validation(data.reader, samples, Level(caps=CAPS), RANKS)
    options = MicroBatchOptions(seed=1, augment=True, drop_path=True)
    seen, labels = Counter(), Counter()
    for rank in range(RANKS):
        dataset = packs.dataset(data.reader, WHOLE, rank, options)
        held = packs.scheduled, packs.lengths, dataset.rows
        shapes = MicroBatchShape.of_shares(*held, packs.sharing(rank))
        assert len(shapes) == len(dataset.keys()) > 1
        for batch, shape in zip(dataset, shapes, strict=True):
            assert shape.tiles <= CAPS["tiles"] and shape.tokens <= CAPS["tokens"]
            assert batch.shape == shape and batch.drop_path_keys_T is None
            assert (len(batch.pixels_TCPP), len(batch.token_ids_S)) == (shape.tiles, shape.tokens)
            labels.update(batch.labels_L.tolist())
        for row in dataset.rows:
            seen.update(packs.scheduled.packs[row].tolist())
    lengths = data.lengths
    fits = (lengths.column("tiles") <= CAPS["tiles"]) & (lengths.tokens <= CAPS["tokens"])
    expected = np.flatnonzero(fits[:samples])
    assert not fits[: expected[-1]].all(), "a sample behind one left out must be told from it"
    assert 0 < packs.left_out == samples - len(expected)
    assert len(packs.lengths) == len(expected)
    assert seen == Counter(range(len(expected)))
    expected_labels = Counter()
    for index in expected:
        sample = data.reader.annotations[int(index)]
        one = data.reader.encode(sample, int(lengths.column("tiles")[index]))
        expected_labels.update(one.token_ids[one.loss_mask].tolist())
    assert labels == expected_labels


def test_validation_is_as_strict_as_planning(digits, data, tokenizer, tmp_path):
    """Prevents a validation loss over fewer samples than requested without an error."""
    with pytest.raises(UserError, match="all 20 held-out samples exceed"):
        pack_validation(data.reader, 20, Level(caps=Caps.of(tiles=1, tokens=2)), RANKS)
    shutil.copytree(digits / "heldout", tmp_path / "heldout")
    annotations = Annotations.open(tmp_path / "heldout" / "meta.json")
    annotations[0].images[0].path.unlink()
    reader = SampleReader(annotations, tokenizer, MODEL)
    with pytest.raises(UserError, match=r"held-out data: .* does not exist"):
        pack_validation(reader, 20, Level(caps=CAPS), RANKS)


FRAMES = 5


@pytest.fixture
def video(tmp_path, tokenizer) -> Data:
    """Return data with a five-frame video between two texts, and its frames as images."""
    images = [f"clip/{number + 8}.png" for number in range(FRAMES)]
    (tmp_path / "clip").mkdir()
    rng = np.random.default_rng(3)
    for name in images:
        Image.fromarray(rng.integers(0, 256, (40, 100, 3), np.uint8)).save(tmp_path / name)
    named = "".join(f"Frame-{number}: <image>\n" for number in range(1, FRAMES + 1))
    shown = [("", {}), ("", {"video": "clip"}), ("", {}), (named, {"image": images})]
    records = [
        {"conversations": make_turns(f"{names}What?", "A clip."), **files} for names, files in shown
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "meta.json").write_text('{"a": {"root": "", "annotation": "a.jsonl"}}')
    return Data(tmp_path / "meta.json", tokenizer)


def test_a_frame_is_a_tile(video, tmp_path):
    """Prevents frames that are tiled, reordered, or lack their names."""
    batch = video.load([1], WHOLE)
    size = MODEL.vision.image_size
    frames = (Image.open(tmp_path / f"clip/{number + 8}.png") for number in range(FRAMES))
    expected = [pixels_of(frame.resize((size, size), Image.Resampling.BICUBIC)) for frame in frames]
    assert torch.allclose(batch.pixels_TCPP.double(), torch.stack(expected), atol=1e-5)
    # Spelled out as five images, each is one tile too.
    spelled_out = video.load([3], WHOLE)
    assert batch.token_ids_S.equal(spelled_out.token_ids_S)
    assert batch.pixels_TCPP.equal(spelled_out.pixels_TCPP)
    assert len(batch.image_positions_M) == FRAMES * MODEL.vision.tokens_per_item
    tiling = MODEL.vision.tiling.model_copy(update={"max_frames_per_video": 2})
    fewer = replace(video.reader, model=MODEL.with_tower("vision", tiling=tiling))
    sample = video.reader.annotations[1]
    assert fewer.pixels(sample).equal(batch.pixels_TCPP[[0, 3]])
    assert fewer.tiles_per_image(sample) == [1, 1]


VIDEO_DAMAGES = {
    "removed": lambda folder: (folder / "10.png").unlink(),
    "broken": lambda folder: (folder / "10.png").write_bytes(b"no picture"),
    "without-frames": shutil.rmtree,
}


@pytest.mark.parametrize("damage", VIDEO_DAMAGES.values(), ids=VIDEO_DAMAGES)
def test_unreadable_videos_are_replaced(video, damage, tmp_path):
    """Prevents a lost frame from ending the run, being trained on without it, or shifting text."""
    before = video.load([0, 1, 2], WHOLE, SKIP)
    damage(tmp_path / "clip")
    batches = {
        name: video.load([0, 1, 2], stage, SKIP)
        for name, stage in (("whole", WHOLE), ("first", FIRST), ("text", TEXT), ("last", LAST))
    }
    for name, batch in batches.items():
        assert len(batch.unreadable) == (name != "text") and batch.shape == before.shape
        if name in ("whole", "first"):
            assert not batch.pixels_TCPP.any()
        if name in ("whole", "text"):
            assert batch.token_ids_S.equal(before.token_ids_S)
    [_, tokens, _] = before.segment_tokens
    start = before.segment_tokens[0]
    kept = (before.loss_positions_L < start) | (before.loss_positions_L >= start + tokens)
    for name in ("whole", "last"):
        assert batches[name].labels_L.equal(before.labels_L[kept])
    with pytest.raises(UserError, match="--on-bad-sample skip"):
        video.load([1], WHOLE)
