"""Recordings from packs to tensors and to answers."""

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from data_cases import SKIP, Data
from ranks import run_ranks
from scipy.signal import resample_poly
from speech_cases import AUDIO, OMNI, hearing_tokenizer, make_speech, write_sound
from toy import OPTIONS, stages_of, toy_plan
from transformers import WhisperFeatureExtractor

from megatron.vlm.inputs.batch import MicroBatchShape, join_items
from megatron.vlm.inputs.data import MicroBatchOptions
from megatron.vlm.run.generate import generate
from megatron.vlm.step.evaluate import evaluate_answers
from megatron.vlm.step.train import build_trainer
from omnibal.base.errors import UserError
from omnibal.data.sample import Sample
from omnibal.model.limits import Caps
from omnibal.pipeline.stage_units import Stage

[WHOLE] = stages_of(OMNI)
_VISION, _ENCODERS = OMNI.vision.layers + 2, OMNI.vision.layers + AUDIO.layers + 4
SEES, HEARS, EMBEDS, HEAD = stages_of(OMNI, _VISION, _ENCODERS, _ENCODERS + 3)
PACK = [3, 1, 11, 0, 6, 4]
"""Samples with 3, 1, 3, 0, 2 and 0 recordings."""


class SpeechData(Data):
    """Speech samples, their lengths, and packs of them."""

    def load(self, stage: Stage, options=MicroBatchOptions(), pack: list[int] = PACK):  # noqa: B008
        """Return a pack as loaded for a stage."""
        return super().load(pack, stage, options)

    def path(self, sample: int) -> Path:
        return self.reader.annotations[sample].recordings[0].path


@pytest.fixture
def data(digits, tmp_path) -> SpeechData:
    tokenizer = hearing_tokenizer(digits, tmp_path / "tokenizer")
    return SpeechData(make_speech(tmp_path), tokenizer, OMNI)


def features_by_whisper(sample: Sample) -> list[np.ndarray]:
    """Return each clip's features, by Transformers from fully resampled files."""
    whisper = WhisperFeatureExtractor(feature_size=AUDIO.mel_bins)
    samples = AUDIO.frames * 160
    found = []
    for recording in sample.recordings:
        wave, rate_hz = soundfile.read(recording.path, dtype="float32", always_2d=True)
        common = math.gcd(rate_hz, 16_000)
        mono = resample_poly(wave.mean(axis=1), 16_000 // common, rate_hz // common)
        for start in range(0, len(mono), samples):
            clip = np.pad(mono[start : start + samples], (0, samples))[None, :samples]
            found.append(whisper._np_extract_fbank_features(clip, "cpu")[0])
    return found


def test_a_pack_has_the_features_of_its_clips(data):
    """Prevents clips in wrong order, of another sample, or at positions of other tokens."""
    batch = data.load(WHOLE)
    expected = [
        clip for index in PACK for clip in features_by_whisper(data.reader.annotations[index])
    ]
    assert batch.frames_CBF.shape == (len(expected), AUDIO.mel_bins, AUDIO.frames)
    assert batch.frames_CBF.dtype == torch.float32
    np.testing.assert_allclose(batch.frames_CBF, np.stack(expected), rtol=0, atol=1e-4)
    packs = data.dataset([PACK]).scheduled
    assert MicroBatchShape.of_rows(packs, np.array([0])) == [batch.shape]
    assert str(batch.shape).startswith(f"{batch.tiles} tiles, {len(expected)} clips and")
    # Each sample's audio tokens are within it. Their number follows from its clips.
    is_audio = batch.token_ids_S == data.reader.tokenizer.audio_context
    assert torch.equal(batch.audio_positions_N, is_audio.nonzero().squeeze(1))
    by_sample = [int(part.sum()) for part in is_audio.split(list(batch.segment_tokens))]
    clips = data.lengths.column("clips")[PACK] * AUDIO.tokens_per_item
    assert by_sample == clips.tolist()


def test_each_stage_reads_what_it_holds(data):
    """Prevents decoding recordings on stages without audio layers, and unequal shapes."""
    whole = data.load(WHOLE)
    sees, hears, embeds, head = map(data.load, (SEES, HEARS, EMBEDS, HEAD))
    assert torch.equal(sees.pixels_TCPP, whole.pixels_TCPP) and sees.frames_CBF is None
    assert torch.equal(hears.frames_CBF, whole.frames_CBF) and hears.pixels_TCPP is None
    assert torch.equal(embeds.audio_positions_N, whole.audio_positions_N)
    assert embeds.frames_CBF is None and head.audio_positions_N is None
    assert {one.shape for one in (sees, hears, embeds, head)} == {whole.shape}
    for name in ("pixels_TCPP", "frames_CBF"):
        assert len(vars(data.load(WHOLE, pack=[0]))[name]) == 0


def test_any_clips_of_a_pack_are_read_alone(data, monkeypatch):
    """Prevents partial loads that differ from the full pack or decode other files."""
    dataset = data.dataset([PACK], HEARS)
    whole = data.load(HEARS)
    for start in range(whole.clips):
        for stop in {start, start + 1, min(start + 4, whole.clips)}:
            part = dataset.load_items(0, {"clips": range(start, stop)})
            assert torch.equal(part.frames_CBF, whole.frames_CBF[start:stop])
            assert (part.clips, part.tiles, part.tokens) == (stop - start, 0, 0)
    parts = {"tiles": range(1, 3), "clips": range(2, 4)}
    both = data.dataset([PACK], WHOLE).load_items(0, parts)
    seen = data.load(SEES).pixels_TCPP
    assert torch.equal(both.pixels_TCPP, seen[1:3])
    assert torch.equal(both.frames_CBF, whole.frames_CBF[2:4])
    # As data-parallel encoders join them in a pass.
    runs = [dataset.load_items(0, {"clips": items}) for items in (range(5, 6), range(2))]
    joined = join_items(runs)
    assert torch.equal(joined.frames_CBF, whole.frames_CBF[[5, 0, 1]])
    assert joined.shape == MicroBatchShape(tiles=0, clips=3, tokens=0)
    reader, sample = data.reader, data.reader.annotations[3]
    counts = reader.clips_per_recording(sample)
    assert len(counts) == 3 and sum(counts) == len(reader.clips(sample))
    decoded = []  # seconds
    read = soundfile.SoundFile.read
    monkeypatch.setattr(
        soundfile.SoundFile,
        "read",
        lambda sound, frames, **how: (
            decoded.append(frames / sound.samplerate) or read(sound, frames, **how)
        ),
    )
    reader.clips(sample, range(1, 2))
    assert sum(decoded) < 1.2 * AUDIO.frames / 100


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_unreadable_recordings(data, damage):
    """Prevents stages that disagree on skipped samples, and unreported bad samples."""
    before = data.load(WHOLE)
    path = data.path(1)  # a sample of one image, and this recording
    users = {k for k in PACK if path in [r.path for r in data.reader.annotations[k].recordings]}
    assert 1 in users and users != set(PACK)
    if damage == "missing":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size // 2)
    wrong = {"missing": "does not exist", "truncated": "is truncated"}[damage]
    with pytest.raises(UserError, match=f"recording .* {wrong}.*--on-bad-sample skip"):
        data.load(HEARS)
    assert torch.equal(data.load(SEES).pixels_TCPP, before.pixels_TCPP)

    whole, sees, hears, head = (data.load(each, SKIP) for each in (WHOLE, SEES, HEARS, HEAD))
    assert {one.shape for one in (whole, sees, hears, head)} == {before.shape}
    assert whole.unreadable == sees.unreadable
    assert len(sees.unreadable) == len(users) and wrong in sees.unreadable[0]
    for items, name in (("tiles", "pixels_TCPP"), ("clips", "frames_CBF")):
        counts = data.lengths.column(items)[PACK].tolist()
        parts = zip(vars(whole)[name].split(counts), vars(before)[name].split(counts), strict=True)
        for index, (now, good) in zip(PACK, parts, strict=True):
            assert torch.equal(now, torch.zeros_like(good) if index in users else good)
    assert torch.equal(whole.frames_CBF, hears.frames_CBF)
    owner = torch.tensor(PACK).repeat_interleave(torch.tensor(before.segment_tokens))
    kept = torch.tensor([int(k) not in users for k in owner[before.loss_positions_L]])
    for batch in (whole, head):
        assert torch.equal(batch.labels_L, before.labels_L[kept])


def test_a_sample_that_only_speaks_is_told_of_by_the_first_stage(data):
    """Prevents uncounted bad recordings, as only the first stage reports unreadable samples."""
    samples = enumerate(data.reader.annotations)
    speaks = next(k for k, sample in samples if sample.recordings and not sample.images)
    data.path(speaks).unlink()
    assert len(data.load(SEES, SKIP, [speaks]).unreadable) == 1
    assert data.load(SEES, MicroBatchOptions(), [speaks]).unreadable == ()


def test_recordings_that_changed_after_the_plan(data):
    """Prevents tensor shapes that neighbouring stages do not expect."""
    write_sound(data.path(1), 5.0, 16_000, 1)
    with pytest.raises(UserError, match="clips where the plan counted"):
        data.load(HEARS)


def evaluate(links, plan, reader):
    trainer = build_trainer(plan, links, OPTIONS, steps=1, seed=1)
    parts = trainer, Caps.of(tiles=20, clips=20, tokens=900), reader, 0, lambda *done: None
    return evaluate_answers(*parts, samples=8, max_new_tokens=4)


def generate_texts(links, plan, reader, samples):
    stage = build_trainer(plan, links, OPTIONS, steps=1, seed=1).stage.eval()
    return [reader.tokenizer.decode(list(generate(stage, reader, one, 4))) for one in samples]


def test_answers_to_what_is_said(data):
    """Prevents answers to recordings of other samples or later turns, or without recordings."""
    plan = toy_plan(OMNI, stages_of(OMNI, _VISION + 2))
    evaluation, _ = run_ranks(plan.parallel, evaluate, plan, data.reader)
    whole = toy_plan(OMNI, stages_of(OMNI))
    shown = np.linspace(0, 11, 8).round().astype(int)
    # Each question with the conversation before it.
    asked = [
        replace(sample, turns=sample.turns[: turn + 1])
        for sample in (data.reader.annotations[int(index)] for index in shown)
        for turn in range(len(sample.turns))
    ]
    [expected] = run_ranks(whole.parallel, generate_texts, whole, data.reader, asked)
    assert [answer.answered for answer in evaluation.examples] == expected
    assert len(set(expected)) > 1
