"""Sample datasets: digit scans, native-resolution images with Qwen's tokenizer, spoken digits."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image
from sklearn.datasets import load_digits
from transformers import AutoTokenizer

from omnibal.data.annotations import Annotations
from omnibal.data.chat import check_tokenizer
from omnibal.data.lengths import Lengths
from omnibal.data.scan import scan_lengths
from omnibal.data.tokenizer import AUDIO_CONTEXT, AUDIO_END, AUDIO_START, open_tokenizer
from omnibal.model.config import load_model
from tools import make_digits_dataset, make_native_digits, make_spoken_digits
from tools.make_digits_dataset import SAMPLE_RATE, main
from tools.make_native_digits import PIECES
from tools.make_spoken_digits import HELDOUT_VOICES, VOICES, WORDS, Utterance, say_all

TOOLS = {
    "scans": (make_digits_dataset, "internvl-digits", "400", "100"),
    "native": (make_native_digits, "qwen3-vl-digits", "200", "60"),
    "spoken": (make_spoken_digits, "internvl-digits-omni", "200", "60"),
}
"""Tool, model, training samples, held-out samples."""
MODELS = {name: load_model(model) for name, (_, model, *_) in TOOLS.items()}
SPLITS = ("train", "heldout")


def arguments(name: str, seed: int = 3) -> list[str]:
    samples, heldout = TOOLS[name][2:]
    return ["--samples", samples, "--heldout-samples", heldout, "--seed", str(seed)]


def make(name: str, folder: Path, seed: int = 3) -> Path:
    assert TOOLS[name][0].main(["--output", str(folder), *arguments(name, seed)]) == 0
    return folder


@pytest.fixture(scope="module")
def scans(tmp_path_factory) -> Path:
    return make("scans", tmp_path_factory.mktemp("scans") / "dataset")


@pytest.fixture(scope="module")
def native(tmp_path_factory) -> Path:
    return make("native", tmp_path_factory.mktemp("native") / "dataset")


@pytest.fixture(scope="module")
def spoken(tmp_path_factory) -> Path:
    return make("spoken", tmp_path_factory.mktemp("spoken") / "dataset")


def records(split: Path) -> Iterator[dict]:
    for path in split.glob("*.jsonl"):
        yield from map(json.loads, path.read_text().splitlines())


def answers(record: dict) -> list[tuple[str, str]]:
    """Question kind and answer of each turn."""
    said = [message["value"] for message in record["conversations"][1::2]]
    return list(zip(record["kinds"], said, strict=True))


def scan_split(name: str, split: Path) -> Lengths:
    """Scan a split; check that its sources are the tool's."""
    tokenizer = split.parent / ("tokenizer" if name == "native" else "tokenizer.model")
    annotations, opened = Annotations.open(split / "meta.json"), open_tokenizer(tokenizer)
    lengths = scan_lengths(annotations, MODELS[name], opened, lambda _: None).lengths
    assert lengths.source_names == tuple(TOOLS[name][0].SOURCES)
    return lengths


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("name", TOOLS)
def test_same_arguments_give_the_same_files(request, tmp_path, name):
    """Prevents datasets that differ between machines or runs."""
    first = hashes(request.getfixturevalue(name))
    assert len(first) > 200 and hashes(make(name, tmp_path / "again")) == first
    if name == "scans":
        assert hashes(make(name, tmp_path / "other", seed=4)) != first


@pytest.mark.parametrize(
    ("name", "key", "fewest"),
    [("scans", "scans", 50), ("spoken", "scans", 4), ("spoken", "voices", 4)],
)
def test_splits_share_no_scan_and_no_voice(request, name, key, fewest):
    """Prevents held-out samples with scans or voices of the training split."""
    dataset = request.getfixturevalue(name)
    trained, held_out = (
        {entry for record in records(dataset / split) for entry in record.get(key, ())}
        for split in SPLITS
    )
    assert min(len(trained), len(held_out)) > fewest and not trained & held_out
    if key == "voices":
        assert held_out <= set(HELDOUT_VOICES) and trained <= set(VOICES)


def test_answers_are_what_the_scans_show(scans):
    """Prevents answers that contradict scikit-learn's targets."""
    target = load_digits().target
    expected = {
        "single": lambda d: str(d[0]),
        "read": lambda d: " ".join(map(str, d)),
        "parity": lambda d: str(sum(digit % 2 == 0 for digit in d)),
        "largest": lambda d: str(max(d)),
        "even": lambda d: "no" if d[0] % 2 else "yes",
    }
    asked = dict.fromkeys(expected, 0)
    for record in records(scans / "train"):
        for kind, answer in answers(record):
            if kind in expected:
                assert answer == expected[kind](target[record["scans"]])
                asked[kind] += 1
    assert all(asked.values())


def test_tile_counts_run_from_none_to_seven(scans):
    """Prevents a dataset with uniform tile counts or tokens, which needs no balancing."""
    for split in SPLITS:
        lengths = scan_split("scans", scans / split)
        assert np.bincount(lengths.column("tiles"), minlength=8).min() > 0
        assert lengths.tokens.max() > 6 * lengths.tokens.min()


def test_recorded_sizes_are_the_images(scans):
    """Prevents annotated widths and heights that differ from the image files."""
    for record in records(scans / "heldout"):
        images, *stated = (
            entry if isinstance(entry := record.get(name, []), list) else [entry]
            for name in ("image", "width", "height")
        )
        sizes = [Image.open(scans / "heldout" / image).size for image in images]
        assert sizes == list(zip(*stated, strict=True))


def crop_ink(pixels: np.ndarray) -> np.ndarray:
    """Ink's bounding box resized to 8 x 8, with mean 0 and norm 1."""
    ink = pixels > pixels.min() + 0.4 * np.ptp(pixels)
    rows, columns = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
    box = pixels[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    small = np.asarray(Image.fromarray(box.astype(np.float32)).resize((8, 8))).ravel()
    return (small - small.mean()) / np.linalg.norm(small - small.mean())


def test_each_cell_shows_its_scan(scans):
    """Prevents digits drawn in another order than the answers, or across a cell's border."""
    images, found = load_digits().images, []
    for record in records(scans / "train"):
        if not record["id"].startswith(("digits_strip", "digits_page")):
            continue
        gray = np.asarray(Image.open(scans / "train" / record["image"]).convert("L"))
        cell = round((gray.size / len(record["scans"])) ** 0.5)
        rows, columns = gray.shape[0] // cell, gray.shape[1] // cell
        cells = gray.reshape(rows, cell, columns, cell).swapaxes(1, 2).reshape(-1, cell, cell)
        shown, drawn = map(crop_ink, cells), [crop_ink(images[scan]) for scan in record["scans"]]
        likeness = np.array([*shown]) @ np.array(drawn).T
        found += (likeness.argmax(axis=1) == np.arange(len(cells))).tolist()
    assert len(found) > 50 and np.mean(found) > 0.95


def test_digits_are_single_tokens_and_text_round_trips(scans):
    """Prevents digits with several token ids, and text that does not round-trip."""
    tokenizer = open_tokenizer(scans / "tokenizer.model")
    assert tokenizer.vocab_size <= MODELS["scans"].language.vocab_size
    for digit in "0123456789":
        assert len(tokenizer.encode(digit)) == 1
        assert tokenizer.encode(f"3 {digit}")[-1:] == tokenizer.encode(digit)
        assert tokenizer.encode(f"1{digit}") == tokenizer.encode("1") + tokenizer.encode(digit)
    for split in SPLITS:
        for record in records(scans / split):
            for message in record["conversations"]:
                for text in message["value"].split("<image>"):
                    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_finished_dataset_is_kept(scans, capfd, monkeypatch):
    """Prevents rebuilding a finished dataset, and reuse with other arguments or versions."""
    before = {path: path.stat().st_mtime_ns for path in scans.rglob("*")}
    assert main(["--output", str(scans), *arguments("scans")]) == 0
    assert "already made" in capfd.readouterr().out
    refuse(capfd, "--output", scans, "--seed", "9")
    monkeypatch.setattr(make_digits_dataset, "FORMAT", make_digits_dataset.FORMAT + 1)
    assert "by this version" in refuse(capfd, "--output", scans, *arguments("scans"))
    assert {path: path.stat().st_mtime_ns for path in scans.rglob("*")} == before


def refuse(capfd, *arguments: object) -> str:
    """Run the tool with a usage error; return its last error line."""
    with pytest.raises(SystemExit) as exit_info:
        main([str(argument) for argument in arguments])
    assert exit_info.value.code == 2
    return capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "content", ["", '{"made_with": {', "[]", "{}", '{"made_with": {"format": 1}}', b"\xff"]
)
def test_a_folder_of_unknown_making_is_kept(tmp_path, capfd, content):
    """Prevents a traceback, or overwriting a folder, for an unknown dataset.json."""
    description = tmp_path / "dataset.json"
    description.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = hashes(tmp_path)
    assert "was not made with" in refuse(capfd, "--output", tmp_path, *arguments("scans"))
    assert hashes(tmp_path) == before


def test_sizes_and_tokens_vary(native):
    """Prevents images of uniform size, which need no balancing."""
    sides = {Image.open(path).size for path in native.glob("train/images/*single*")}
    assert {min(side) for side in sides} >= set(range(26, 37))
    check_tokenizer(MODELS["native"], open_tokenizer(native / "tokenizer"))
    tokens = scan_split("native", native / "train").column("image_tokens")
    assert (tokens.min(), len(set(tokens.tolist())) > 12) == (0, True)
    assert tokens.max() > 80


def test_the_other_task_has_other_answers(native):
    """Prevents an adapter task that the base model already answers."""
    seen = Annotations.open(native / "next" / "train" / "meta.json")
    answers = [seen[number].turns[0].answer for number in range(len(seen))]
    assert len(answers) == 200 // 4 and set(answers) == set("0123456789")


def test_tokenizer_is_the_one_that_transformers_opens(native):
    """Prevents token ids or a chat template that differ from Transformers'."""
    folder = native / "tokenizer"
    theirs, ours = AutoTokenizer.from_pretrained(folder), open_tokenizer(folder)
    words = make_native_digits.VOCABULARY
    assert ours.vocab_size == len(theirs) <= words == MODELS["native"].language.vocab_size
    for text in ("Which digit is 40?", "<|im_start|>user\nÄ <|image_pad|>", "漢 字\n\n"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert theirs.decode(theirs.encode(text)) == text
    assert len(ours.encode("4096")) == 4
    assert [ours.id_of(piece) for piece in PIECES] == list(range(len(PIECES)))
    record = json.loads((native / "train" / "digits_single.jsonl").read_text().split("\n")[0])
    asked = record["conversations"][0]["value"].removeprefix("<image>\n")
    content = [{"type": "image"}, {"type": "text", "text": asked}]
    text = theirs.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
        f"{asked}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_recordings_are_of_16_khz_and_differ_by_what_is_said(spoken):
    """Prevents silence, other sample rates, and spoken lines as short as a digit."""
    seconds: dict[str, list[float]] = {"spoken_single": [], "spoken_line": []}
    for record in records(spoken / "train"):
        if "audio" not in record:
            continue
        sound, rate = soundfile.read(spoken / "train" / record["audio"])
        assert rate == SAMPLE_RATE and sound.ndim == 1 and np.abs(sound).max() > 0.05
        for source, found in seconds.items():
            if record["id"].startswith(source):
                found.append(len(sound) / rate)
    assert 0.2 < min(seconds["spoken_single"]) and max(seconds["spoken_single"]) < 1.5
    assert max(seconds["spoken_line"]) > 2 and np.mean(seconds["spoken_line"]) > 1


def spectrum(sound: np.ndarray) -> np.ndarray:
    """Log power at 16 times and 40 frequencies, with mean 0 and norm 1."""
    loud = np.flatnonzero(np.abs(sound) > 0.02)
    sound = sound[loud[0] : loud[-1] + 1]
    frames = np.lib.stride_tricks.sliding_window_view(sound, 512)[
        :: max((len(sound) - 512) // 15, 1)
    ]
    power = np.abs(np.fft.rfft(frames[:16] * np.hanning(512), axis=1)[:, 4:164]) ** 2
    bands = np.log(power.reshape(16, 40, 4).sum(axis=2) + 1e-4)
    flat = (bands - bands.mean()).ravel()
    return flat / np.linalg.norm(flat)


def test_voices_say_the_words_of_their_digits(spoken):
    """Prevents spoken words that differ from labels, by nearest spectrum of the voice."""
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
    for record in records(spoken / "train"):
        if record["id"].startswith("spoken_single"):
            sound, _ = soundfile.read(spoken / "train" / record["audio"])
            [voice] = record["voices"]
            near = np.argmax([spectrum(sound) @ other for other in templates[voice]])
            right.append(str(near) == record["conversations"][1]["value"])
    assert len(right) > 50 and np.mean(right) > 0.5  # chance level is 0.1


def test_answers_follow_from_what_is_shown_and_said(spoken):
    """Prevents answers that contradict scikit-learn's targets or the spoken digit."""
    target, same = load_digits().target, []
    for record in records(spoken / "train"):
        turns = dict(answers(record))
        if "shown" in turns:
            assert turns["shown"] == str(target[record["scans"][0]])
        if "shown line" in turns:
            assert turns["shown line"] == " ".join(map(str, target[record["scans"]]))
        if "same" in turns:
            same.append(turns["same"])
            assert (turns["same"] == "yes") == (turns["shown"] == turns["said"])
    assert same.count("yes") == same.count("no") > 10


def test_samples_have_images_recordings_both_and_neither(spoken):
    """Prevents a mixture without all four combinations of tiles and clips."""
    tokenizer = open_tokenizer(spoken / "tokenizer.model")
    assert tokenizer.vocab_size <= MODELS["spoken"].language.vocab_size
    for piece in (AUDIO_START, AUDIO_CONTEXT, AUDIO_END):
        assert len(tokenizer.encode(piece)) == 1
    for split in SPLITS:
        lengths = scan_split("spoken", spoken / split)
        has = [(lengths.column(name) > 0).tolist() for name in ("tiles", "clips")]
        assert len({*zip(*has, strict=True)}) == 4
        assert lengths.column("clips").max() > 2
