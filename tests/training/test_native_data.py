"""Micro-batches of native-resolution images and videos, compared with Transformers' processors."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from data_cases import SKIP
from native_data_cases import CUTS, NativeData, data_of, native_models, picture, talk, write_records
from PIL import Image
from toy import stages_of

from megatron.vlm.inputs.batch import MicroBatch
from megatron.vlm.step.evaluate import _list_questions, _shape, question_batch
from omnibal.base.errors import UserError
from omnibal.data.video_files import read_video_header

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["qwen3-vl", "qwen2.5-vl"])
def data(request, tmp_path, tokenizer) -> NativeData:
    """Six samples for each model family."""
    return data_of(request.param, tmp_path, tokenizer)


def test_all_is_as_transformers_processors_make_it():
    """Prevents token ids, patches, grids or RoPE positions unlike the released models'."""
    script = [sys.executable, str(ROOT / "benchmarks/native_parity.py")]
    sizes = ["--images", "30", "--clips", "6", "--seed", "3"]
    places = [ROOT, Path(__file__).parent / "fake_tv", *filter(None, [os.getenv("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))}
    ran = subprocess.run(
        [*script, *sizes], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("different: nothing") == 2


def assert_stage_tensors(batch: MicroBatch, whole: MicroBatch) -> None:
    """Assert that each tensor loaded for a stage equals the tensor of the full model's batch."""
    for name, value in vars(batch).items():
        if torch.is_tensor(value):
            assert torch.equal(value, vars(whole)[name]), name
    assert batch.shape == whole.shape and batch.image_grids in ((), whole.image_grids)


def test_positions_begin_anew_with_every_sample(data):
    """Prevents positions that depend on other samples of the pack."""
    together, *alone = (data.load(pack).rope_positions_3S for pack in ([3, 2, 0], [3], [2], [0]))
    assert torch.equal(together, torch.cat(alone, dim=1))
    assert torch.equal(alone[1], torch.arange(alone[1].shape[1]).expand(3, -1))


def test_another_image_than_planned_is_an_error(data, tmp_path):
    """Prevents exchanges between stages of sizes other than planned."""
    picture(90, 90).save(tmp_path / "0.png")
    stages = stages_of(data.reader.model, *CUTS)
    for stage in (stages[0], stages[1], stages[3]):
        with pytest.raises(UserError, match=r"line 1: .* image tokens where the plan counted"):
            data.load([0], stage)


DAMAGES = {
    "removed": Path.unlink,
    "cut": lambda path: os.truncate(path, 200),
    "spoilt": lambda path: path.write_bytes(b"no picture"),
    "stretched": lambda path: Image.new("RGB", (410, 2)).save(path),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["3.png", "clip/2.png"])
def test_stages_come_to_one_verdict_about_what_cannot_be_read(data, tmp_path, damage, name):
    """Prevents loss on an image that another stage has blanked, and packs of unplanned size."""
    pack = [2, 3, 0]
    before = data.load(pack)
    start, stop = np.cumsum(before.segment_tokens)[:2]
    DAMAGES[damage](tmp_path / name)
    with pytest.raises(UserError, match=r"line 4.*--on-bad-sample skip") as caught:
        data.load(pack)
    stopped = str(caught.value)
    assert "\n" not in stopped
    after = data.load(pack, options=SKIP)
    assert after.shape == before.shape and after.segment_tokens == before.segment_tokens
    assert len(after.unreadable) == 1
    # A removed frame has no known name. The message counts frames instead.
    assert name in after.unreadable[0] or (damage == "removed" and "restore frames" in stopped)
    assert not ((after.loss_positions_L >= start) & (after.loss_positions_L < stop)).any()
    outside = (before.loss_positions_L < start) | (before.loss_positions_L >= stop)
    assert torch.equal(after.loss_positions_L, before.loss_positions_L[outside])
    assert sum(grid.patches for grid in after.image_grids) == len(before.patches_YX)
    last = after.image_grids[-1].patches
    assert torch.equal(after.patches_YX[-last:], before.patches_YX[-last:])
    assert not after.patches_YX[:-last].any()
    assert len(after.image_positions_M) == after.image_tokens
    for stage in stages_of(data.reader.model, *CUTS):
        assert_stage_tensors(data.load(pack, stage, SKIP), after)


@pytest.mark.parametrize("damage", ["half of the pixels", "all"])
@pytest.mark.parametrize("name", ["qwen3-vl", "qwen2.5-vl"])
def test_broken_clips_keep_their_place(tmp_path, name, damage):
    """Prevents a broken clip from ending a run with --on-bad-sample skip, and stages that disagree
    on a clip with an intact header."""
    av = pytest.importorskip("av")
    clip = tmp_path / "a.mp4"
    with av.open(str(clip), "w") as container:
        stream = container.add_stream("mpeg4", rate=12)
        stream.width, stream.height, stream.pix_fmt = 40, 24, "yuv420p"
        for number in range(30):
            frame = av.VideoFrame.from_image(picture(40, 24, number))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    write_records(tmp_path, [talk("<video>q", "a", videos=["a.mp4"]), talk("t", "b")])
    data = NativeData(tmp_path, native_models()[name])
    before = data.load([0, 1])
    assert len(before.image_grids) == 1 and before.patches_YX.any()
    content = clip.read_bytes()
    start, moov, kept, rest = content.index(b"mdat") + 4, content.index(b"moov") - 4, 0, b""
    if damage == "half of the pixels":
        kept, rest = (start + moov) // 2, content[moov:]
    read_video_header.cache_clear()  # as in a new process
    clip.write_bytes(content[:kept] + bytes(len(content) - kept - len(rest)) + rest)
    with pytest.raises(UserError, match=r"^[^\n]*a\.mp4[^\n]*$"):
        data.load([0, 1])
    whole = data.load([0, 1], options=SKIP)
    assert len(whole.unreadable) == 1 and not whole.patches_YX.any()
    assert whole.shape == before.shape
    assert (whole.image_grids == before.image_grids) == (damage == "half of the pixels")
    assert len(whole.labels_L) == len(data.load([1]).labels_L)
    for stage in stages_of(data.reader.model, *CUTS):
        assert_stage_tensors(data.load([0, 1], stage, SKIP), whole)


def test_answers_go_on_from_the_largest_position(data):
    """Prevents answers at positions of image rows or columns, and questions that show images of
    later turns. Positions are by hand, as Transformers' `rope_deltas`."""
    reader = data.reader
    questions = list(_list_questions(reader, 6, 3))
    samples = [question.sample for question in questions]
    media = {s: {"patches_YX": reader.patches(s, reader.list_shown(s))} for s in samples}
    before = question_batch(questions, media, reader)
    lengths = [question.tokens for question in questions]
    for question in questions:
        # A model may generate the image token.
        question.answer_ids.extend([reader.tokenizer.require_id("<|image_pad|>"), 5])
    after = question_batch(questions, media, reader)
    assert after.shape == _shape(questions)
    assert torch.equal(after.patches_YX, before.patches_YX)
    assert len(after.image_positions_M) == after.image_tokens
    shown = [len(question.prompt.shown) for question in questions]
    assert shown == [1, 2, 3, 0, 2, 3, 1, 1] and sum(shown) == len(after.image_grids)
    assert len(after.patches_YX) == sum(grid.patches for grid in after.image_grids)
    prompts = before.rope_positions_3S.split(lengths, 1)
    both = after.rope_positions_3S.split([prompt_tokens + 2 for prompt_tokens in lengths], 1)
    for length, prompt, answered in zip(lengths, prompts, both, strict=True):
        assert torch.equal(answered[:, :length], prompt)
        largest = int(prompt.max())
        assert answered[:, length:].tolist() == [[largest + 1, largest + 2]] * 3
