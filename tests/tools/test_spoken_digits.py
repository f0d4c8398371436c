"""The dataset of spoken and scanned digits: disjoint splits, true answers, stable bytes."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
from sklearn.datasets import load_digits

from omnibal.data.annotations import Annotations
from omnibal.data.scan import scan_lengths
from omnibal.data.tokenizer import AUDIO_CONTEXT, AUDIO_END, AUDIO_START, open_tokenizer
from omnibal.model.config import load_model
from tools.make_digits_dataset import SAMPLE_RATE
from tools.make_spoken_digits import (
    HELDOUT_VOICES,
    SHARES,
    VOICES,
    WORDS,
    Utterance,
    main,
    say_all,
)

MODEL = load_model("internvl-digits-omni")
SPLITS = ("train", "heldout")
ARGUMENTS = ["--samples", "200", "--heldout-samples", "60", "--seed", "3"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "dataset"
    assert main(["--output", str(folder), *ARGUMENTS]) == 0
    return folder


def records(split: Path) -> Iterator[dict]:
    for path in split.glob("*.jsonl"):
        yield from map(json.loads, path.read_text().splitlines())


def test_splits_share_no_voice_and_no_scan(dataset):
    """Prevents held-out accuracy from being measured on voices or digits heard and seen before."""
    for name, held_out in (("voices", set(HELDOUT_VOICES)), ("scans", None)):
        used = [
            {one for record in records(dataset / split) for one in record.get(name, ())}
            for split in SPLITS
        ]
        assert min(map(len, used)) > 4
        assert not used[0] & used[1]
        assert held_out is None or (used[1] <= held_out and used[0] <= set(VOICES))


def test_recordings_are_of_16_khz_and_differ_by_what_is_said(dataset):
    """Prevents silence, other rates, and lines that are no longer than a digit."""
    seconds: dict[str, list[float]] = {"spoken_single": [], "spoken_line": []}
    for record in records(dataset / "train"):
        if "audio" not in record:
            continue
        sound, rate = soundfile.read(dataset / "train" / record["audio"])
        assert rate == SAMPLE_RATE and sound.ndim == 1 and np.abs(sound).max() > 0.05
        for source, found in seconds.items():
            if record["id"].startswith(source):
                found.append(len(sound) / rate)
    assert 0.2 < min(seconds["spoken_single"]) and max(seconds["spoken_single"]) < 1.5
    assert max(seconds["spoken_line"]) > 2 and np.mean(seconds["spoken_line"]) > 1


def spectrum(sound: np.ndarray) -> np.ndarray:
    """How loud a sound is over 16 times and 40 frequencies, of mean 0 and norm 1."""
    loud = np.flatnonzero(np.abs(sound) > 0.02)
    sound = sound[loud[0] : loud[-1] + 1]
    frames = np.lib.stride_tricks.sliding_window_view(sound, 512)[
        :: max((len(sound) - 512) // 15, 1)
    ]
    power = np.abs(np.fft.rfft(frames[:16] * np.hanning(512), axis=1)[:, 4:164]) ** 2
    bands = np.log(power.reshape(16, 40, 4).sum(axis=2) + 1e-4)
    flat = (bands - bands.mean()).ravel()
    return flat / np.linalg.norm(flat)


def test_voices_say_the_words_of_their_digits(dataset):
    """Prevents labels of other digits than are said: each is nearest to the same word by the same
    voice in another style, and answers are those of the voices."""
    both = [
        say_all([Utterance("en+m1", speed, pitch, digit) for digit in range(10)])
        for speed, pitch in ((150, 45), (170, 55))
    ]
    likeness = np.array([[spectrum(a) @ spectrum(b) for b in both[1]] for a in both[0]])
    assert likeness.argmax(axis=1).tolist() == list(range(len(WORDS)))
    templates = {
        voice: [spectrum(s) for s in say_all([Utterance(voice, 165, 50, d) for d in range(10)])]
        for voice in VOICES
    }
    right = []
    for record in records(dataset / "train"):
        if record["id"].startswith("spoken_single"):
            sound, _ = soundfile.read(dataset / "train" / record["audio"])
            [voice] = record["voices"]
            near = np.argmax([spectrum(sound) @ other for other in templates[voice]])
            right.append(str(near) == record["conversations"][1]["value"])
    assert len(right) > 50 and np.mean(right) > 0.5  # by chance 0.1


def test_answers_follow_from_what_is_shown_and_said(dataset):
    """Prevents wrong labels: scans by scikit-learn's own targets, the same by both answers."""
    target, same = load_digits().target, []
    for record in records(dataset / "train"):
        turns = dict(
            zip(record["kinds"], (m["value"] for m in record["conversations"][1::2]), strict=True)
        )
        if "shown" in turns:
            assert turns["shown"] == str(target[record["scans"][0]])
        if "shown line" in turns:
            assert turns["shown line"] == " ".join(map(str, target[record["scans"]]))
        if "same" in turns:
            same.append(turns["same"])
            assert (turns["same"] == "yes") == (turns["shown"] == turns["said"])
    assert same.count("yes") == same.count("no") > 10


def test_samples_have_images_recordings_both_and_neither(dataset):
    """Prevents a mixture that one encoder could be balanced on alone."""
    tokenizer = open_tokenizer(dataset / "tokenizer.model")
    assert tokenizer.vocab_size <= MODEL.language.vocab_size
    for piece in (AUDIO_START, AUDIO_CONTEXT, AUDIO_END):
        assert len(tokenizer.encode(piece)) == 1
    for split in SPLITS:
        annotations = Annotations.open(dataset / split / "meta.json")
        lengths = scan_lengths(annotations, MODEL, tokenizer, lambda _: None).lengths
        tiles, clips = (lengths.column(name) > 0 for name in ("tiles", "clips"))
        assert {*zip(tiles.tolist(), clips.tolist(), strict=True)} == {
            (False, False), (True, False), (False, True), (True, True)
        }  # fmt: skip
        assert lengths.column("clips").max() > 2
        assert lengths.source_names == tuple(SHARES)


def test_same_arguments_give_the_same_files(dataset, tmp_path):
    """Prevents figures that change from one run to the next."""
    again = tmp_path / "again"
    main(["--output", str(again), *ARGUMENTS])
    names = [path.relative_to(dataset) for path in dataset.rglob("*") if path.is_file()]
    assert len(names) > 200
    for name in names:
        assert (again / name).read_bytes() == (dataset / name).read_bytes(), name
