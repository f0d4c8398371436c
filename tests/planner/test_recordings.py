"""Recordings in the data: read from their headers, counted, written into conversations, packed."""

import json
import math
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
from cli_cases import printed
from scipy.signal import resample_poly
from speech_cases import (
    AUDIO,
    CLIP_S,
    HEARS,
    OMNI,
    SOUNDS,
    hearing_tokenizer,
    make_speech,
    said,
    write_sound,
)
from transformers import WhisperFeatureExtractor

from omnibal.base.errors import UserError
from omnibal.data.annotations import Annotations
from omnibal.data.chat import check_tokenizer, encode_prompt, encode_sample
from omnibal.data.lengths import Lengths, read_lengths, write_lengths
from omnibal.data.log_mel import log_mel
from omnibal.data.recordings import BadRecording, Duration, read_clips, read_duration
from omnibal.data.scan import scan_key, scan_lengths
from omnibal.data.stored_files import AudioFile
from omnibal.data.tokenizer import open_tokenizer
from omnibal.job.plan_data import model_of_lengths
from omnibal.model.config import config_toml, load_model
from omnibal.packing.packs import read_packs

RATES = (8_000, 11_025, 16_000, 22_050, 44_100, 48_000, 96_000)


@pytest.fixture(scope="module")
def tokenizer(digits, tmp_path_factory):
    return hearing_tokenizer(digits, tmp_path_factory.mktemp("hearing") / "tokenizer")


@pytest.fixture(scope="module")
def meta(tmp_path_factory) -> Path:
    return make_speech(tmp_path_factory.mktemp("speech"))


def open_record(folder: Path, **record) -> Annotations:
    """Annotations of one sample."""
    record = {"conversations": said("What?", "7"), **record}
    (folder / "a.jsonl").write_text(json.dumps(record))
    (folder / "meta.json").write_text('{"a": {"root": "", "annotation": "a.jsonl"}}')
    return Annotations.open(folder / "meta.json")


def scan(annotations: Annotations, tokenizer, model=OMNI, **options):
    return scan_lengths(annotations, model, tokenizer, lambda _: None, **options)


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
        whole_S = np.zeros(seconds * 16_000, np.float32)
        whole_S[: len(wave)] = wave
        expected = reference(wave, sampling_rate=16_000, return_tensors="np").input_features[0]
        features_BF = log_mel(whole_S, mel_bins)
        assert features_BF.shape == (mel_bins, 100 * seconds) == expected.shape
        np.testing.assert_allclose(features_BF, expected, rtol=0, atol=1e-4)
        # In double precision, as here; torch's, above, is in single.
        exact = reference._np_extract_fbank_features(whole_S[None], "cpu")[0]
        np.testing.assert_allclose(features_BF, exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rate_hz", RATES)
def test_clips_from_a_header_are_those_that_are_decoded(tmp_path, rate_hz):
    """Prevents a clip too many or too few, and clips that depend on which others are read."""
    rng = np.random.default_rng(rate_hz)
    common = math.gcd(16_000, rate_hz)
    for number in range(6):
        subtype = ("PCM_16", "PCM_24", "FLOAT")[number % 3]
        form = "WAV" if subtype == "FLOAT" else ("FLAC", "WAV")[number // 3]
        # Just at the end of a clip, one sample more, or anywhere.
        samples = int(rng.integers(1, rate_hz))
        if number < 2:
            samples = 2 * round(CLIP_S * rate_hz) + number
        wave = rng.uniform(-0.9, 0.9, (samples, int(rng.integers(1, 4))))
        path = tmp_path / f"{number}.{form.lower()}"
        soundfile.write(path, wave, rate_hz, subtype=subtype, format=form)
        assert read_duration(AudioFile(path)) == Duration(samples, rate_hz)

        decoded, _ = soundfile.read(path, dtype="float32", always_2d=True)
        mono = resample_poly(decoded.mean(axis=1), 16_000 // common, rate_hz // common)
        clips = Duration(samples, rate_hz).clips(AUDIO.frames)
        assert clips == max(1, -(-len(mono) // (AUDIO.frames * 160)))
        padded = np.zeros(clips * AUDIO.frames * 160, np.float32)
        padded[: len(mono)] = mono
        read = read_clips(AudioFile(path), range(clips), AUDIO.frames)
        assert np.array_equal(read.ravel(), padded)
        for clip in range(clips):
            [alone] = read_clips(AudioFile(path), range(clip, clip + 1), AUDIO.frames)
            assert np.array_equal(alone, read[clip])


def test_a_byte_range_is_read_as_its_file(tmp_path):
    """Prevents a member of a shard from being read with what stands around it."""
    for name, (rate_hz, channels) in SOUNDS.items():
        write_sound(tmp_path / name, 1.0, rate_hz, channels)
        content = (tmp_path / name).read_bytes()
        (tmp_path / "shard").write_bytes(b"x" * 999 + content + b"y" * 999)
        member = AudioFile(tmp_path / "shard", name, 999, len(content))
        assert read_duration(member) == read_duration(AudioFile(tmp_path / name))
        both = [read_clips(one, range(3), 30) for one in (member, AudioFile(tmp_path / name))]
        assert np.array_equal(*both)


def test_bad_recordings_are_told_apart(tmp_path):
    """Prevents a file that ends early, or is no recording, from being counted as one."""

    def wrong(name: str) -> str:
        with pytest.raises(BadRecording) as caught:
            read_duration(AudioFile(tmp_path / name))
        assert caught.value.remedy
        return caught.value.wrong

    for name, (rate_hz, channels) in SOUNDS.items():
        write_sound(tmp_path / name, 1.0, rate_hz, channels)
        content = (tmp_path / name).read_bytes()
        for share in (0.3, 0.9, 0.999):
            (tmp_path / "cut").write_bytes(content[: int(share * len(content))])
            assert wrong("cut") == "is truncated", (name, share)
        (tmp_path / "cut").write_bytes(content[:20])
        assert wrong("cut").startswith("cannot be read (")
    (tmp_path / "text.wav").write_text("no sound at all, but text")
    assert wrong("text.wav").startswith("cannot be read (Format not")
    assert wrong("none.wav") == "does not exist"
    assert wrong("") == "is a folder"
    soundfile.write(tmp_path / "silent.wav", np.zeros(0), 16_000)
    assert wrong("silent.wav") == "has no samples"
    soundfile.write(tmp_path / "a.ogg", np.zeros(999), 16_000)
    assert wrong("a.ogg") == "is OGG, and must be WAV or FLAC"
    soundfile.write(tmp_path / "slow.wav", np.zeros(9), 10)
    assert wrong("slow.wav").startswith("has 10 samples per second in 1 channel(s)")
    soundfile.write(tmp_path / "nan.wav", np.full(9, np.nan), 16_000, subtype="FLOAT")
    with pytest.raises(BadRecording, match="not finite"):
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
    """Prevents recordings that a program wrote to a pipe from being refused, or read in part."""
    whole, piped = AudioFile(tmp_path / "a.wav"), AudioFile(tmp_path / "b.wav")
    write_sound(whole.path, 0.5, 16_000, 1)
    content = bytearray(whole.path.read_bytes())
    for place, size in ((4, of_file), (content.index(b"data") + 4, of_data)):
        content[place : place + 4] = struct.pack("<I", size)
    piped.path.write_bytes(content)
    assert read_duration(piped) == read_duration(whole) == Duration(8_000, 16_000)
    assert np.array_equal(read_clips(piped, range(2), 30), read_clips(whole, range(2), 30))
    tagged = b"LIST" + struct.pack("<I", 4) + b"INFO"
    head = bytearray(content[: content.index(b"data") + 8])
    head[4:8], head[-4:] = struct.pack("<I", len(head) + len(tagged) - 8), bytes(4)
    piped.path.write_bytes(head + tagged)
    with pytest.raises(BadRecording, match="has no samples"):
        read_duration(piped)


def test_a_flac_without_its_length_is_not_called_truncated(tmp_path):
    """Prevents a user from fetching again what is whole; 0 stands for an unknown number of samples
    (RFC 9639, section 8.2)."""
    path = tmp_path / "a.flac"
    write_sound(path, 0.5, 16_000, 1)
    content = bytearray(path.read_bytes())
    stated = int.from_bytes(content[18:26], "big")  # the last 36 bits
    assert stated % 2**36 == 8_000
    content[18:26] = (stated - 8_000).to_bytes(8, "big")
    path.write_bytes(content)
    with pytest.raises(BadRecording, match="does not state its length") as caught:
        read_duration(AudioFile(path))
    assert "encode it again" in caught.value.remedy


@pytest.mark.parametrize("form", ["conversations", "messages"])
def test_recordings_of_a_record(tmp_path, form):
    """Prevents recordings from being lost, or placed where they were not written."""

    def questions(*texts, **record):
        turns = said(*texts)
        if form == "messages":
            roles = {"human": "user", "gpt": "assistant"}
            turns = [{"role": roles[one["from"]], "content": one["value"]} for one in turns]
        [sample] = open_record(tmp_path, **{"conversations": None, form: turns}, **record)
        return sample, [turn.question for turn in sample.turns]

    sample, asked = questions("Who?", "I", audio="a.wav")
    assert sample.recordings == (AudioFile(tmp_path / "a.wav"),)
    assert asked == ["<audio>\nWho?"]
    _, asked = questions("Who?", "I", audio="a.wav", image="a.png")
    assert asked == ["<image>\n<audio>\nWho?"]
    sample, asked = questions("A", "a", "B <audio><audio>", "b", audio=["b.flac", "a.wav"])
    assert [one.path.name for one in sample.recordings] == ["b.flac", "a.wav"]
    assert asked == ["A", "B <audio><audio>"]
    assert (sample.items_until("<audio>", 0), sample.items_until("<audio>", 1)) == (0, 2)
    sample, asked = questions("Close <audio>?", "</audio>")
    assert (sample.recordings, asked) == ((), ["Close <audio>?"])
    sample, asked = questions("What?", "x", audio="a.wav", video=["1.png", "2.png"])
    assert asked == ["<video>\n<audio>\nWhat?"] and len(sample.videos) == 1


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"audio": ["a.wav", "b.wav"]}, r"has 0 <audio> for 2 recording\(s\); write one <audio>"),
        ({"audio": "a.wav", "conversations": said("<audio><audio>", "7")}, "has 2 <audio> for 1"),
        ({"audio": "a.wav", "conversations": said("x", "<audio>")}, "has <audio> in an answer"),
        ({"audio": 7}, 'has an odd "audio"; it must be a path, a list of paths'),
        ({"audio": ["a.wav", ""]}, 'has an odd "audio"'),
    ],
)
def test_mistakes_about_recordings(tmp_path, record, message):
    """Prevents a sample whose recordings are not where its text has them."""
    with pytest.raises(UserError, match=f"a.jsonl: line 1 {message}"):
        open_record(tmp_path, **record)[0]


def test_recordings_in_a_conversation(tmp_path, tokenizer):
    """Prevents audio tokens in the wrong place or number, or any loss on them."""
    piece, per_clip, per_tile = (
        tokenizer.required,
        AUDIO.tokens_per_item,
        OMNI.vision.tokens_per_item,
    )
    check_tokenizer(OMNI, tokenizer)
    conversation = said("a <audio> b <image><audio>", "7", "<audio>", "8")
    [sample] = open_record(tmp_path, audio=["1", "2", "3"], image="i", conversations=conversation)
    encoded = encode_sample(sample, [2], OMNI, tokenizer, [3, 1, 2])
    bare = encode_sample(sample, [0], OMNI, tokenizer, [0, 0, 0])
    image = [piece("<img>"), *[piece("<IMG_CONTEXT>")] * 2 * per_tile, piece("</img>")]
    runs = [
        [piece("<|audio_bos|>"), *[piece("<|AUDIO|>")] * clips * per_clip, piece("<|audio_eos|>")]
        for clips in (3, 1, 2)
    ]
    expected: list[int] = []
    for number in bare.token_ids.tolist():
        if number == piece("<|audio_bos|>"):
            expected += runs.pop(0)
        elif number == piece("<img>"):
            expected += image
        elif number not in (piece("<|audio_eos|>"), piece("</img>")):
            expected.append(number)
    assert encoded.token_ids.tolist() == expected and not runs
    assert encoded.loss_mask.sum() == bare.loss_mask.sum()
    assert not encoded.loss_mask[np.isin(encoded.token_ids, [*image, piece("<|AUDIO|>")])].any()
    for turn, clips in enumerate(([3, 1], [3, 1, 2])):
        prompt = encode_prompt(sample, turn, [2], OMNI, tokenizer, clips_per_recording=[3, 1, 2])
        assert prompt.tolist() == encoded.token_ids[: len(prompt)].tolist()
        assert np.count_nonzero(prompt == tokenizer.audio_context) == sum(clips) * per_clip
    with pytest.raises(ValueError, match=r"clips of 2 recording\(s\) were given for 1 and 3"):
        encode_sample(sample, [1], OMNI, tokenizer, [1, 1])


def test_recordings_need_a_model_and_a_tokenizer_that_know_them(tmp_path, digits, tokenizer):
    """Prevents a recording from being passed over, or written as words."""
    [sample] = open_record(tmp_path, audio="a.wav")
    deaf = load_model("internvl-digits")
    with pytest.raises(UserError, match=r"has 1 recording\(s\), but the model has no encoder"):
        encode_sample(sample, [], deaf, tokenizer, [1])
    silent = replace(sample, recordings=())
    with pytest.raises(UserError, match='has <audio> in its text and no recording; name it as "au'):
        encode_sample(silent, [], OMNI, tokenizer)
    assert len(encode_sample(silent, [], deaf, tokenizer).token_ids)
    odd = replace(sample, turns=(replace(sample.turns[0], answer="<|audio_eos|>"),))
    with pytest.raises(UserError, match=r"audio_eos\|>' in its text.*, a recording with <audio>"):
        encode_sample(odd, [], OMNI, tokenizer, [1])
    with pytest.raises(UserError, match=r"lacks the piece\(s\) <\|audio_bos\|> <\|AUDIO\|> <\|aud"):
        check_tokenizer(OMNI, open_tokenizer(digits / "tokenizer.model"))


def test_scanned_lengths_are_those_of_what_is_encoded(meta, tokenizer):
    """Prevents a plan for other clips or tokens than training meets, with and without images."""
    annotations = Annotations.open(meta)
    lengths = scan(annotations, tokenizer).lengths
    assert lengths.item_names == ("clips", "tiles")
    for row, sample in enumerate(annotations):
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
    """Prevents a scan that does not name the file, or trains on what it cannot read."""
    write_sound(tmp_path / "a.wav", 1, 16_000, 1)
    lines = [
        {"audio": name, "conversations": said("What?", "7")} for name in ("a.wav", "b.wav", ".")
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    (tmp_path / "meta.json").write_text('{"a": {"root": "", "annotation": "a.jsonl"}}')
    annotations = Annotations.open(tmp_path / "meta.json")
    with pytest.raises(UserError, match=r"line 2: recording .*b.wav does not exist; correct the p"):
        scan(annotations, tokenizer)
    found = scan(annotations, tokenizer, on_error="skip")
    assert found.lengths.items["clips"].tolist() == [math.ceil(1 / CLIP_S)]
    assert [bad.index for bad in found.skipped] == [1, 2]
    with pytest.raises(UserError, match=r"has 1 recording\(s\), but the model has no encoder"):
        scan(annotations, tokenizer, load_model("internvl-digits"))


def test_lengths_are_of_clips_of_one_size(meta, tokenizer, tmp_path):
    """Prevents clips of other sizes than the model's, and other files for models without audio."""
    annotations = Annotations.open(meta)
    lengths = scan(annotations, tokenizer).lengths
    write_lengths(lengths, tmp_path / "a.parquet")
    again = read_lengths([tmp_path / "a.parquet"])
    assert again.sha256 == lengths.sha256
    assert again.origin == lengths.origin
    assert model_of_lengths(OMNI, again) == OMNI
    for change in ({"frames": 80}, {"positions_per_token": 2}):
        with pytest.raises(UserError, match=r"of 40 frames and 5 tokens, but .* has clips of"):
            model_of_lengths(OMNI.with_tower("audio", **change), again)
        other = scan_key(OMNI.with_tower("audio", **change), tokenizer)
        assert other != scan_key(OMNI, tokenizer)
    assert lengths.origin is not None
    deaf = lengths.origin.model_copy(update={"clips": None})
    assert "clips" not in deaf.model_dump_json()
    assert type(deaf).model_validate_json(deaf.model_dump_json()) == deaf


def test_shards_hold_recordings(tmp_path, meta, tokenizer):
    """Prevents recordings of a shard from being lost, or taken for another sample's."""
    from webdataset import TarWriter

    annotations = Annotations.open(meta)
    records = [json.loads(text) for text in (meta.parent / "a.jsonl").read_text().splitlines()]
    with TarWriter(str(tmp_path / "a.tar")) as shard:
        for number, record in enumerate(records):
            members = {"json": json.dumps({"conversations": record["conversations"]}).encode()}
            for k, name in enumerate([*record["image"], *record["audio"]]):
                # Members in another order than their numbers.
                members[f"{9 + k}.{name.partition('.')[2]}"] = (
                    meta.parent / "files" / name
                ).read_bytes()
            shard.write({"__key__": f"{number:04}", **members})
    (tmp_path / "meta.json").write_text('{"a": {"shards": "a.tar"}}')
    sharded = Annotations.open(tmp_path / "meta.json")
    for sample, packed in zip(annotations, sharded, strict=True):
        for one, other in zip(sample.recordings, packed.recordings, strict=True):
            assert one.path.read_bytes() == other.open().read()
    theirs, ours = (scan(each, tokenizer).lengths for each in (annotations, sharded))
    assert theirs.items["clips"].tolist() == ours.items["clips"].tolist()
    assert theirs.tokens.tolist() == ours.tokens.tolist()


def test_packs_and_a_plan_under_three_limits(meta, tokenizer, tmp_path, capsys):
    """Prevents packs over the limit of any of three loads, by the commands as a user gives them."""
    model, lengths, packs = (tmp_path / name for name in ("m.toml", "l.parquet", "p.parquet"))
    model.write_text(config_toml(OMNI))
    scanned = f"lengths {meta} --model {model} --tokenizer-model {tokenizer.path.parent}"
    assert "clips" in printed(capsys, f"{scanned} -o {lengths}")
    found = read_lengths([lengths])
    caps = {name: int(found.column(name).max() * 1.5) for name in ("tiles", "clips", "tokens")}
    limits = f"--max-tiles {caps['tiles']} --max-tokens {caps['tokens']}"
    limits += f" --limit clips={caps['clips']}"
    printed(capsys, f"pack {lengths} {limits} --dp 2 --micro-batches 1 -o {packs}")
    sizes = "--tp 1 --pp 2 --dp 2 --micro-batches 1"
    planned = f"plan --lengths {lengths} {limits} --model {model} --cluster laptop-cpu {sizes}"
    printed(capsys, f"{planned} -o {tmp_path / 'plan'}")
    for file in (packs, tmp_path / "plan" / "packs.parquet"):
        scheduled = read_packs(file)
        for name, cap in caps.items():
            sums = scheduled.packs.sums(found.column(name))
            assert sums.max() <= cap
            assert np.array_equal(scheduled.column(name), sums)


def test_a_model_that_only_hears(meta, tokenizer, tmp_path):
    """Prevents audio from needing images beside it."""
    annotations = Annotations.open(meta)
    heard = annotations.take(np.flatnonzero([not len(one.images) for one in annotations]))
    lengths: Lengths = scan(heard, tokenizer, HEARS).lengths
    assert lengths.item_names == ("clips",)
    assert lengths.origin is not None and lengths.origin.tiling is None
    assert model_of_lengths(HEARS, lengths) == HEARS
