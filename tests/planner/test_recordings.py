"""Recordings and videos in files: headers, counts and places in conversations."""

import json
import math
import struct
import sys
import tarfile
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from chat_cases import TEMPLATES, write_templated
from jsonl_cases import DIGITS, open_jsonl, open_meta, picture, record_of, said, scan
from PIL import Image
from scipy.signal import resample_poly
from speech_cases import AUDIO, CLIP_S, OMNI, SOUNDS, hearing_tokenizer, make_speech, write_sound
from transformers import WhisperFeatureExtractor

from omnibal.base.errors import UserError
from omnibal.data.annotations import Annotations
from omnibal.data.chat import check_tokenizer, encode_prompt, encode_sample
from omnibal.data.lengths import Lengths, read_lengths, write_lengths
from omnibal.data.native_resolution import sampled_frames, seen_videos, video_grid
from omnibal.data.recordings import Duration, log_mel, read_clips, read_duration
from omnibal.data.scan import scan_key
from omnibal.data.stored_files import AudioFile, BadFile, VideoFile
from omnibal.data.tokenizer import open_tokenizer
from omnibal.data.video_files import read_video_frames, read_video_header
from omnibal.families.named import named_model
from omnibal.job.plan_data import model_of_lengths


@pytest.fixture(scope="module")
def tokenizer(digits, tmp_path_factory):
    return hearing_tokenizer(digits, tmp_path_factory.mktemp("hearing") / "tokenizer")


@pytest.fixture(scope="module")
def meta(tmp_path_factory) -> Path:
    return make_speech(tmp_path_factory.mktemp("speech"))


@pytest.mark.parametrize("mel_bins", [80, 128])
@pytest.mark.parametrize("seconds", [1, 30])
def test_features_are_whispers(mel_bins, seconds):
    """Prevents features that a released encoder was not trained on."""
    reference = WhisperFeatureExtractor(feature_size=mel_bins, chunk_length=seconds)
    times = np.arange(int(0.7 * seconds * 16_000)) / 16_000
    waves = [
        np.random.default_rng(mel_bins).normal(0, 0.1, len(times)),
        np.sin(2 * np.pi * 300 * times * (1 + times)),
        np.sin(2 * np.pi * 1_000 * times) * np.exp(-30 * times),
        np.zeros(len(times)),
    ]
    for wave in waves:
        whole_S = np.pad(wave, (0, seconds * 16_000 - len(wave))).astype(np.float32)
        expected = reference(wave, sampling_rate=16_000, return_tensors="np").input_features[0]
        features_BF = log_mel(whole_S, mel_bins)
        assert features_BF.shape == (mel_bins, 100 * seconds) == expected.shape
        np.testing.assert_allclose(features_BF, expected, rtol=0, atol=1e-4)
        # Double precision as here, while torch above has single.
        exact = reference._np_extract_fbank_features(whole_S[None], "cpu")[0]
        np.testing.assert_allclose(features_BF, exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 16_000, 22_050, 44_100, 48_000, 96_000])
def test_clips_from_a_header_are_those_that_are_decoded(tmp_path, rate_hz):
    """Prevents miscounted clips, and clips that depend on the range that is read."""
    rng = np.random.default_rng(rate_hz)
    common, per_clip = math.gcd(16_000, rate_hz), AUDIO.frames * 160
    for number in range(6):
        subtype = ("PCM_16", "PCM_24", "FLOAT")[number % 3]
        form = "WAV" if subtype == "FLOAT" else ("FLAC", "WAV")[number // 3]
        # Just at the end of a clip, one sample more, or anywhere.
        samples = int(rng.integers(1, rate_hz))
        if number < 2:
            samples = 2 * round(CLIP_S * rate_hz) + number
        wave = rng.uniform(-0.9, 0.9, (samples, int(rng.integers(1, 4))))
        file = AudioFile(tmp_path / f"{number}.{form.lower()}")
        soundfile.write(file.path, wave, rate_hz, subtype=subtype, format=form)
        assert read_duration(file) == Duration(samples, rate_hz)

        decoded, _ = soundfile.read(file.path, dtype="float32", always_2d=True)
        mono = resample_poly(decoded.mean(axis=1), 16_000 // common, rate_hz // common)
        clips = Duration(samples, rate_hz).clips(AUDIO.frames)
        assert clips == max(1, -(-len(mono) // per_clip))
        read = read_clips(file, range(clips), AUDIO.frames)
        assert np.array_equal(read.ravel(), np.pad(mono, (0, clips * per_clip - len(mono))))
        for clip in range(clips):
            [alone] = read_clips(file, range(clip, clip + 1), AUDIO.frames)
            assert np.array_equal(alone, read[clip])


def test_a_byte_range_is_read_as_its_file(tmp_path):
    """Prevents reading a shard's member with bytes around it."""
    for name, (rate_hz, channels) in SOUNDS.items():
        file = AudioFile(tmp_path / name)
        write_sound(file.path, 1.0, rate_hz, channels)
        content = file.path.read_bytes()
        (tmp_path / "shard").write_bytes(b"x" * 999 + content + b"y" * 999)
        member = AudioFile(tmp_path / "shard", name, 999, len(content))
        assert read_duration(member) == read_duration(file)
        assert np.array_equal(*(read_clips(each, range(3), 30) for each in (member, file)))


def test_bad_recordings_are_told_apart(tmp_path):
    """Prevents counting a truncated file, or a file that is no recording."""

    def wrong(name: str, content: bytes | None = None) -> str:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(BadFile) as caught:
            read_duration(AudioFile(tmp_path / name))
        wrong, remedy = str(caught.value).split("; ", 1)
        assert remedy
        return wrong

    for name, (rate_hz, channels) in SOUNDS.items():
        write_sound(tmp_path / name, 1.0, rate_hz, channels)
        content = (tmp_path / name).read_bytes()
        for share in (0.3, 0.9, 0.999):
            cut = content[: int(share * len(content))]
            assert wrong("cut", cut) == "is truncated", (name, share)
        assert wrong("cut", content[:20]).startswith("cannot be read (")
    soundfile.write(tmp_path / "silent.wav", np.zeros(0), 16_000)
    soundfile.write(tmp_path / "a.ogg", np.zeros(999), 16_000)
    soundfile.write(tmp_path / "slow.wav", np.zeros(9), 10)
    soundfile.write(tmp_path / "nan.wav", np.full(9, np.nan), 16_000, subtype="FLOAT")
    assert wrong("text.wav", b"no sound at all, but text").startswith("cannot be read (Format not")
    assert wrong("none.wav") == "does not exist"
    assert wrong("") == "is a folder"
    assert wrong("silent.wav") == "has no samples"
    assert wrong("a.ogg") == "is OGG, and must be WAV or FLAC"
    assert wrong("slow.wav").startswith("has 10 samples per second in 1 channel(s)")
    with pytest.raises(BadFile, match="not finite"):
        read_clips(AudioFile(tmp_path / "nan.wav"), range(1), 2)


@pytest.mark.parametrize(
    ("of_file", "of_data"),
    [
        (2**32 - 1, 2**32 - 1),
        (0, 2**32 - 1),
        (0x7FFFF024, 0x7FFFF000),
        (0x7FFFFFFF, 0x7FFFFFFF),
        (0, 0),
        (36, 0),
    ],
)
def test_a_wav_that_was_piped_is_whole(tmp_path, of_file, of_data):
    """Prevents refusing recordings written to a pipe, or reading them in part."""
    whole, piped = AudioFile(tmp_path / "a.wav"), AudioFile(tmp_path / "b.wav")
    write_sound(whole.path, 0.5, 16_000, 1)
    content = bytearray(whole.path.read_bytes())
    behind = content.index(b"data") + 8
    for end, size in ((8, of_file), (behind, of_data)):
        content[end - 4 : end] = struct.pack("<I", size)
    piped.path.write_bytes(content)
    assert read_duration(piped) == read_duration(whole) == Duration(8_000, 16_000)
    assert np.array_equal(read_clips(piped, range(2), 30), read_clips(whole, range(2), 30))
    tagged = b"LIST" + struct.pack("<I", 4) + b"INFO"
    head = content[:behind]
    head[4:8], head[-4:] = struct.pack("<I", len(head) + len(tagged) - 8), bytes(4)
    piped.path.write_bytes(head + tagged)
    with pytest.raises(BadFile, match="has no samples"):
        read_duration(piped)


def test_a_flac_without_its_length_is_not_called_truncated(tmp_path):
    """Prevents fetching a complete file again: length 0 is unknown (RFC 9639, section 8.2)."""
    path = tmp_path / "a.flac"
    write_sound(path, 0.5, 16_000, 1)
    content = bytearray(path.read_bytes())
    stated = int.from_bytes(content[18:26], "big")  # the last 36 bits
    assert stated % 2**36 == 8_000
    content[18:26] = (stated - 8_000).to_bytes(8, "big")
    path.write_bytes(content)
    with pytest.raises(BadFile, match="does not state its length") as caught:
        read_duration(AudioFile(path))
    assert "encode it again" in str(caught.value)


@pytest.mark.parametrize("form", ["conversations", "messages"])
def test_recordings_of_a_record(tmp_path, form):
    """Prevents recordings lost, or placed elsewhere than written."""
    both = {"audio": ["b.flac", "a.wav"], "texts": ["A", "a", "B <audio><audio>", "b"]}
    video = {"audio": "a.wav", "video": ["1.png", "2.png"]}
    for record, names, asked in (
        ({"audio": "a.wav"}, ["a.wav"], ["<audio>\nWho?", "B"]),
        ({"audio": "a.wav", "image": "a.png"}, ["a.wav"], ["<image>\n<audio>\nWho?", "B"]),
        (both, ["b.flac", "a.wav"], ["A", "B <audio><audio>"]),
        ({"texts": ["Close <audio src='a'>?", "</audio>"]}, [], ["Close <audio src='a'>?"]),
        (video, ["a.wav"], ["<video>\n<audio>\nWho?", "B"]),
    ):
        turns = said(*record.get("texts", ("Who?", "I", "B", "b")))
        if form == "messages":
            roles = {"human": "user", "gpt": "assistant"}
            turns = [{"role": roles[one["from"]], "content": one["value"]} for one in turns]
        shown = {name: record[name] for name in record if name != "texts"}
        [sample] = open_jsonl(tmp_path, {form: turns, **shown})
        assert sample.recordings == tuple(AudioFile(tmp_path / name) for name in names)
        assert [turn.question for turn in sample.turns] == asked
        assert len(sample.videos) == ("video" in record)
        before = len(names) if "<audio>" in asked[0] else 0
        assert [sample.items_until("<audio>", turn) for turn in (0, 1)] == [before, len(names)]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (record_of(audio=["a.wav", "b.wav"]), r"has 0 <audio> for 2 recording\(s\); write one for"),
        (record_of("<audio><audio>", audio="a.wav"), "has 2 <audio> for 1"),
        (record_of("x", "<audio>", audio="a.wav"), "has <audio> in an answer"),
        (record_of("x <audio>"), r"has 1 <audio> for 0 recording\(s\)"),
        (record_of(audio=7), 'has an odd "audio"; it must be a path, a list of paths'),
        (record_of(audio=["a.wav", ""]), 'has an odd "audio"'),
    ],
)
def test_mistakes_about_recordings(tmp_path, record, message):
    """Prevents a sample with recordings that do not match its text."""
    with pytest.raises(UserError, match=f"a.jsonl: line 1 {message}"):
        open_jsonl(tmp_path, record)[0]


def test_recordings_in_a_conversation(tmp_path, tokenizer):
    """Prevents audio tokens in the wrong place or number, or loss on them."""
    check_tokenizer(OMNI, tokenizer)
    begin, heard, end = map(tokenizer.require_id, ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"))
    first, seen, last = map(tokenizer.require_id, ("<img>", "<IMG_CONTEXT>", "</img>"))
    per_clip, per_tile = AUDIO.tokens_per_item, OMNI.vision.tokens_per_item
    conversation = said("a <audio> b <image><audio>", "7", "<audio>", "8")
    record = {"audio": ["1", "2", "3"], "image": "i", "conversations": conversation}
    [sample] = open_jsonl(tmp_path, record)
    encoded = encode_sample(sample, [2], OMNI, tokenizer, [3, 1, 2])
    bare = encode_sample(sample, [0], OMNI, tokenizer, [0, 0, 0])
    runs = [[begin, *[heard] * clips * per_clip, end] for clips in (3, 1, 2)]
    expected: list[int] = []
    for number in bare.token_ids.tolist():
        if number == begin:
            expected += runs.pop(0)
        elif number == first:
            expected += [first, *[seen] * 2 * per_tile, last]
        elif number not in (end, last):
            expected.append(number)
    assert encoded.token_ids.tolist() == expected and not runs
    assert encoded.loss_mask.sum() == bare.loss_mask.sum()
    assert not encoded.loss_mask[np.isin(encoded.token_ids, [first, seen, last, heard])].any()
    for turn, clips in enumerate((4, 6)):
        prompt = encode_prompt(sample, turn, [2], OMNI, tokenizer, clips_per_recording=[3, 1, 2])
        assert prompt.tolist() == encoded.token_ids[: len(prompt)].tolist()
        assert np.count_nonzero(prompt == tokenizer.audio_context) == clips * per_clip
    with pytest.raises(ValueError, match=r"counts of \(1, 2\) .* for \(1, 3\)"):
        encode_sample(sample, [1], OMNI, tokenizer, [1, 1])


def test_recordings_need_a_model_and_a_tokenizer_that_know_them(tmp_path, digits, tokenizer):
    """Prevents ignoring a recording, or writing it as words."""
    [sample] = open_jsonl(tmp_path, record_of(audio="a.wav"))
    with pytest.raises(UserError, match=r"has 1 recording\(s\), .* has no audio encoder"):
        encode_sample(sample, [], DIGITS, tokenizer, [1])
    odd = replace(sample, turns=(replace(sample.turns[0], answer="<|audio_eos|>"),))
    with pytest.raises(UserError, match=r"audio_eos\|>' in its text.*, a recording with <audio>"):
        encode_sample(odd, [], OMNI, tokenizer, [1])
    with pytest.raises(UserError, match=r"lacks the piece\(s\) <\|audio_bos\|> <\|AUDIO\|> <\|aud"):
        check_tokenizer(OMNI, open_tokenizer(digits / "tokenizer.model"))


@pytest.fixture(scope="module")
def lengths(meta, tokenizer) -> Lengths:
    return scan(Annotations.open(meta), tokenizer, OMNI).lengths


def test_scanned_lengths_are_those_of_what_is_encoded(meta, tokenizer, lengths):
    """Prevents a plan for other clips or tokens than in training, with and without images."""
    assert lengths.item_names == ("clips", "tiles")
    for row, sample in enumerate(Annotations.open(meta)):
        clips = [
            len(read_clips(one, range(read_duration(one).clips(AUDIO.frames)), AUDIO.frames))
            for one in sample.recordings
        ]
        assert lengths.items["clips"][row] == sum(clips)
        given = [0] * len(sample.images)
        tokens = len(encode_sample(sample, given, OMNI, tokenizer, clips).token_ids)
        tokens += lengths.items["tiles"][row] * OMNI.vision.tokens_per_item
        assert lengths.tokens[row] == tokens
    assert lengths.items["clips"].max() > 3


def test_bad_recordings_of_a_scan(tmp_path, tokenizer):
    """Prevents a scan that does not name an unreadable file, or trains on it."""
    write_sound(tmp_path / "a.wav", 1, 16_000, 1)
    records = [record_of(audio=name) for name in ("a.wav", "b.wav", ".")]
    annotations = open_jsonl(tmp_path, *records)
    with pytest.raises(UserError, match=r"line 2: recording .*b.wav does not exist; correct the p"):
        scan(annotations, tokenizer, OMNI)
    found = scan(annotations, tokenizer, OMNI, on_error="skip")
    assert found.lengths.items["clips"].tolist() == [math.ceil(1 / CLIP_S)]
    assert [bad.index for bad in found.skipped] == [1, 2]
    with pytest.raises(UserError, match=r"has 1 recording\(s\), .* has no audio encoder"):
        scan(annotations, tokenizer)


def test_lengths_are_of_clips_of_one_size(lengths, tokenizer, tmp_path):
    """Prevents clips of other sizes than the model's, and changed files of models without audio."""
    write_lengths(lengths, tmp_path / "a.parquet")
    again = read_lengths([tmp_path / "a.parquet"])
    assert (again.sha256, again.origin) == (lengths.sha256, lengths.origin)
    assert model_of_lengths(OMNI, again) == OMNI
    for change in ({"frames": 80}, {"positions_per_token": 2}):
        changed = OMNI.with_tower("audio", **change)
        with pytest.raises(UserError, match=r"of 40 frames and 5 tokens, but .* has clips of"):
            model_of_lengths(changed, again)
        assert scan_key(changed, tokenizer) != scan_key(OMNI, tokenizer)
    deaf = lengths.origin.model_copy(update={"clips": None})
    assert "clips" not in deaf.model_dump_json()
    assert type(deaf).model_validate_json(deaf.model_dump_json()) == deaf


def test_shards_hold_recordings(tmp_path, meta, tokenizer, lengths):
    """Prevents a shard's recordings lost, or assigned to another sample."""
    from webdataset import TarWriter

    with TarWriter(str(tmp_path / "a.tar")) as shard:
        for number, line in enumerate((meta.parent / "a.jsonl").read_text().splitlines()):
            record = json.loads(line)
            members = {"json": json.dumps({"conversations": record["conversations"]}).encode()}
            for k, name in enumerate([*record["image"], *record["audio"]]):
                # Members in another order than their numbers.
                content = (meta.parent / "files" / name).read_bytes()
                members[f"{9 + k}.{name.partition('.')[2]}"] = content
            shard.write({"__key__": f"{number:04}", **members})
    sharded = open_meta(tmp_path, a={"shards": "a.tar"})
    for sample, packed in zip(Annotations.open(meta), sharded, strict=True):
        for one, other in zip(sample.recordings, packed.recordings, strict=True):
            assert one.path.read_bytes() == other.open().read()
    ours = scan(sharded, tokenizer, OMNI).lengths
    assert lengths.items["clips"].tolist() == ours.items["clips"].tolist()
    assert lengths.tokens.tolist() == ours.tokens.tolist()


def test_a_model_that_only_hears(meta, tokenizer, tmp_path):
    """Prevents audio models that require images."""
    annotations = Annotations.open(meta)
    heard = annotations.take(np.flatnonzero([not len(one.images) for one in annotations]))
    hears = OMNI.model_copy(update={"encoders": {"audio": AUDIO}})
    lengths = scan(heard, tokenizer, hears).lengths
    assert lengths.item_names == ("clips",) and lengths.origin.tiling is None
    assert model_of_lengths(hears, lengths) == hears


MODELS = {name: named_model(name) for name in ("qwen2.5-vl-3b", "qwen3-vl-2b")}
CODECS = {"mp4": "mpeg4", "avi": "mpeg4", "webm": "libvpx", "mkv": "mpeg4"}
SIZE = (96, 64)
ASKED = [{"role": "user", "content": "<video>"}, {"role": "assistant", "content": "a"}]


def write_clip(path: Path, frames: int, rate: int = 24) -> list[np.ndarray]:
    """Write a clip of smooth, distinct pictures; return its decoded frames."""
    av: Any = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream(CODECS[path.suffix[1:]], rate=rate)
        (stream.width, stream.height), stream.pix_fmt = SIZE, "yuv420p"
        for number in range(frames):
            coarse = np.random.default_rng(number).integers(0, 256, (3, 3, 3), np.uint8)
            image = Image.fromarray(coarse).resize(SIZE, Image.Resampling.BICUBIC)
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


@pytest.mark.parametrize("suffix", sorted(CODECS))
def test_headers_count_the_frames_that_are_decoded(tmp_path, suffix):
    """Prevents other tokens than counted, in containers with or without a number of frames."""
    for frames in (1, 7, 60):
        path = tmp_path / f"{frames}.{suffix}"
        decoded = write_clip(path, frames, rate=12)
        header = read_video_header(VideoFile(path))
        assert (header.frames, header.frames_per_second) == (len(decoded), 12) == (frames, 12)
        assert (header.width, header.height) == SIZE
        wanted = sorted({0, frames // 2, frames - 1})
        found = read_video_frames(VideoFile(path), wanted)
        assert np.array_equal(found, np.stack([decoded[number] for number in wanted]))


@pytest.fixture(scope="module")
def chatml(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return open_tokenizer(write_templated(folder, TEMPLATES["chatml"]))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_lengths_count_videos_in_every_form(tmp_path, chatml, name):
    """Prevents a data format with videos not counted, or counted differently."""
    write_clip(tmp_path / "v.mp4", 50)
    model, question = MODELS[name], "<video>\nWhat?"
    turns, answer = said(question, "a"), {"role": "assistant", "content": "a"}
    messages = [{"role": "user", "content": question}, answer]
    text = {"type": "text", "text": "\nWhat?"}
    url = {"type": "video_url", "video_url": {"url": f"file://{tmp_path}/v.mp4"}}
    in_parts, by_url = (
        {"messages": [{"role": "user", "content": [part, text]}, answer]}
        for part in ({"type": "video", "video": "v.mp4"}, url)
    )
    records = [
        {"video": "v.mp4", "conversations": turns},
        {"videos": ["v.mp4"], "conversations": turns},
        {"video": ["v.mp4"], "messages": messages},
        {"videos": [{"path": "v.mp4"}], "messages": messages},
        in_parts,
        by_url,
    ]
    (tmp_path / "0.json").write_text(json.dumps({"messages": messages}))
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "0.json", "0.json")
        tar.add(tmp_path / "v.mp4", "0.mp4")
    seen = sampled_frames(50, 24, model.images.video, model.images)
    grid = video_grid(len(seen), *SIZE, model.images)
    assert len(seen) == 4 and grid.times == 2
    counts = set()
    for annotations in (
        open_jsonl(tmp_path, *records),
        open_meta(tmp_path, a={"shards": "a.tar"}),
    ):
        lengths = scan(annotations, chatml, model).lengths
        assert set(lengths.column("image_tokens").tolist()) == {grid.patches // 4}
        counts |= set(zip(lengths.tokens.tolist(), lengths.loss_tokens.tolist(), strict=True))
    assert len(counts) == 1


def test_bad_videos_are_named_in_one_line(tmp_path, chatml):
    """Prevents a traceback or an aborted scan for one bad file among many."""
    av: Any = pytest.importorskip("av")
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=16_000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate, frame.time_base = 16_000, Fraction(1, 16_000)
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    for name, frames in (
        ("short.mp4", 1),
        ("whole.mp4", 30),
        ("half.avi", 30),
        ("half.mkv", 30),
        ("half.webm", 30),
    ):
        write_clip(tmp_path / name, frames)
    for name, source in (
        ("cut.mp4", "whole.mp4"),
        *[(f"half.{suffix}",) * 2 for suffix in ("avi", "mkv", "webm")],
    ):
        content = (tmp_path / source).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) * 3 // 5])
    (tmp_path / "text.mp4").write_text("no video" * 99)
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "one").mkdir()
    (tmp_path / "none").mkdir()
    (tmp_path / "one/0.png").write_bytes(picture(*SIZE))
    reasons = {
        "short.mp4": "has 1 frame(s), and 2 share a patch; name it as an image",
        "sound.mp4": "has no video stream; replace the file",
        "cut.mp4": "is cut off; replace the file",
        "text.mp4": "cannot be read (",
        "folder.mp4": "is a folder; name a file",
        "gone.mp4": "does not exist; correct the path",
        "half.avi": "is cut off; replace the file",
        "half.mkv": "is cut off; replace the file",
        "half.webm": "is cut off; replace the file",
        "none": "holds no frames; fill it or remove the sample",
        "one/0.png": "has 1 frame(s), and 2 share a patch; name it as an image",
    }
    names = [name.removesuffix("/0.png") for name in (*reasons, "whole.mp4")]
    records = [{"messages": ASKED, "videos": [name]} for name in names]
    annotations = open_jsonl(tmp_path, *records)
    for model in MODELS.values():
        found = scan(annotations, chatml, model, on_error="skip")
        assert found.lengths.sample.tolist() == [len(reasons)]
        for bad, (name, reason) in zip(found.skipped, reasons.items(), strict=True):
            assert bad.reason.startswith(f"video {tmp_path / name} {reason}")
            assert "\n" not in bad.message and bad.message.startswith(bad.where)


def test_a_file_that_ends_early_is_found_where_it_is_decoded(tmp_path):
    """Prevents an unexplained stop if a header promises missing frames."""
    frames = write_clip(tmp_path / "a.mp4", 20)
    with pytest.raises(BadFile, match="ends before frame 20, which its header counts"):
        read_video_frames(VideoFile(tmp_path / "a.mp4"), [0, len(frames)])


def test_without_pyav_a_line_says_what_to_install(tmp_path, monkeypatch):
    """Prevents a traceback if the extra is not installed."""
    monkeypatch.setitem(sys.modules, "av", None)
    [sample] = open_jsonl(tmp_path, {"messages": ASKED, "videos": ["a.mp4"]})
    with pytest.raises(UserError, match=r'read with PyAV: pip install "omnibal\[video'):
        seen_videos(sample, MODELS["qwen3-vl-2b"].images)


def test_frames_are_those_that_the_processors_choose():
    """Prevents choosing other frames than Transformers."""
    older, newer = (
        partial(sampled_frames, video=model.images.video, rule=model.images)
        for model in MODELS.values()
    )
    assert older(100, 25) == [0, 12, 25, 37, 50, 62, 75, 87]
    assert newer(100, 25) == [0, 14, 28, 42, 57, 71, 85, 99]
    # At least four if there are enough, and an even number for Qwen2.5-VL.
    assert older(30, 30) == [0, 7, 15, 22] and older(3, 30) == [0, 1]
    assert newer(30, 30) == [0, 10, 19, 29] and newer(3, 30) == [0, 1, 2]
    assert len(older(100_000, 10)) == len(newer(100_000, 10)) == 768
    assert older(7, 1) == [0, 1, 2, 3, 4, 5]
