"""Compose scikit-learn's 1,797 scanned digits into a small vision-language dataset.

Writes InternVL meta JSON and JSONL with PNG images, for training and held out (no shared scans),
and a SentencePiece tokenizer. Text and tokenizer are deterministic.

    OUTPUT/dataset.json  OUTPUT/tokenizer.model
    OUTPUT/{train,heldout}/{meta.json,SOURCE.jsonl,images/*.png}

With 32 px tiles, at most 6 and a thumbnail, a digit's cell is one tile; samples have 0 to 7 tiles.
"""

import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from PIL import Image
from sentencepiece import SentencePieceTrainer, SetMinLogLevel
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from omnibal.base.errors import UserError
from omnibal.base.files import atomic_directory
from omnibal.base.outputs import check_folder
from omnibal.base.program import ArgumentParser, check_arguments, one_line_errors

FORMAT = 2  # incremented when equal arguments give a different dataset
DESCRIPTION_FILE = "dataset.json"
LIMITS = {  # of samples: fewer would leave sources out, and images are files of one folder
    "samples": (10, 1_000_000),
    "heldout_samples": (10, 1_000_000),
    "seed": (0, 2**32 - 1),
}
SAMPLE_RATE = 16_000
HELDOUT_SCANS = 360
VOCABULARY = 256
SPECIAL_PIECES = ("<img>", "<IMG_CONTEXT>", "</img>", "<|im_start|>", "<|im_end|>", "\n")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")


@dataclass(frozen=True, slots=True)
class Scans:
    """Scans of digits."""

    ink: np.ndarray  # [scans, 8, 8], from 0 to 1
    digits: np.ndarray  # [scans]
    identities: np.ndarray  # index in `load_digits`, [scans]


@dataclass(frozen=True, slots=True)
class Turn:
    question: str
    answer: str
    kind: str


@dataclass(frozen=True, slots=True)
class Composition:
    """A sample: images with their scans, recordings, conversation."""

    images: list[Image.Image]
    scans: list[int]
    turns: list[Turn]
    recordings: Sequence[np.ndarray] = ()  # sounds at `SAMPLE_RATE`, float32 from -1 to 1
    voices: Sequence[str] = ()


class Composer:
    """Generator of random samples of every source, from a set of scans."""

    cell_pixels = (30, 35)  # side of a digit's cell, end exclusive

    def __init__(self, scans: Scans, rng: np.random.Generator) -> None:
        self.scans = scans
        self.rng = rng
        self.by_digit = [np.flatnonzero(scans.digits == digit) for digit in range(10)]

    def single(self) -> Composition:
        """Return a digit, with one or two turns."""
        chosen = self.choose(1)
        digit = int(self.scans.digits[chosen[0]])
        question = ("Which digit is this?", "Read the digit.")[self.rng.integers(2)]
        turns = [Turn(question, str(digit), "single")]
        if self.rng.random() < 0.25:
            turns.append(Turn("Is it even?", "no" if digit % 2 else "yes", "even"))
        return self._composition([self.draw(chosen, columns=1)], chosen, turns)

    def pair(self) -> Composition:
        """Return two images of a digit each."""
        chosen = self.choose(2)
        digits = self.scans.digits[chosen]
        turns = [
            Turn(f"Which digit is in the {ORDINALS[k]} image?", str(digits[k]), "position")
            for k in self.rng.permutation(2)
        ]
        larger = "same" if digits[0] == digits[1] else ORDINALS[int(digits.argmax())]
        turns.append(Turn("Which image has the larger digit?", larger, "compare"))
        images = [self.draw(chosen[k : k + 1], columns=1) for k in range(2)]
        return self._composition(images, chosen, turns)

    def strip(self) -> Composition:
        """Return two to six digits in a row."""
        chosen = self.choose(int(self.rng.integers(2, 7)))
        digits = self.scans.digits[chosen]
        ordinals = enumerate(digits)
        turns = [Turn(f"Which digit is {ORDINALS[k]}?", str(d), "position") for k, d in ordinals]
        return self._about_many(chosen, len(chosen), "Read the line.", turns)

    def page(self) -> Composition:
        """Return digits in two or three rows of two or three."""
        columns, rows = ((2, 2), (3, 2), (2, 3))[self.rng.integers(3)]
        chosen = self.choose(columns * rows)
        turns = [
            Turn(
                f"Which digit is in row {k // columns + 1}, column {k % columns + 1}?",
                str(d),
                "position",
            )
            for k, d in enumerate(self.scans.digits[chosen])
        ]
        return self._about_many(chosen, columns, "Read the page.", turns)

    def arithmetic(self) -> Composition:
        """Return one to three sums without images."""
        turns = []
        for _ in range(self.rng.integers(1, 4)):
            a, b = self.rng.integers(0, 6, size=2)
            turns.append(Turn(f"What is {a} + {b}?", str(a + b), "arithmetic"))
        return self._composition([], np.zeros(0, int), turns)

    def _about_many(
        self, chosen: np.ndarray, columns: int, read: str, positions: list[Turn]
    ) -> Composition:
        """Return one to three questions about several digits, in random order."""
        digits = self.scans.digits[chosen]
        turns = [
            *positions,
            Turn(read, " ".join(map(str, digits)), "read"),
            Turn("How many digits are even?", str((digits % 2 == 0).sum()), "parity"),
            Turn("Which digit is the largest?", str(digits.max()), "largest"),
        ]
        order = self.rng.permutation(len(turns))[: self.rng.integers(1, 4)]
        image = self.draw(chosen, columns)
        return self._composition([image], chosen, [turns[k] for k in order])

    def _composition(
        self, images: list[Image.Image], chosen: np.ndarray, turns: list[Turn], *spoken: Sequence
    ) -> Composition:
        return Composition(images, self.scans.identities[chosen].tolist(), turns, *spoken)

    def choose(self, count: int) -> np.ndarray:
        """Return positions of `count` scans, uniform over digits."""
        digits = self.rng.integers(0, 10, size=count)
        return np.array([self.rng.choice(self.by_digit[digit]) for digit in digits])

    def draw(self, chosen: np.ndarray, columns: int) -> Image.Image:
        """Return the scans on a grid of square cells, white on black, with noise."""
        cell = int(self.rng.integers(*self.cell_pixels))
        rows = len(chosen) // columns
        canvas = np.zeros((rows * cell, columns * cell), np.float32)
        for k, scan in enumerate(chosen):
            side = int(cell * self.rng.uniform(0.86, 0.96))
            x, y = self.rng.integers(0, cell - side + 1, size=2)
            x, y = x + k % columns * cell, y + k // columns * cell
            ink = Image.fromarray(self.scans.ink[scan]).resize(
                (side, side), Image.Resampling.BICUBIC
            )
            canvas[y : y + side, x : x + side] = np.asarray(ink)
        contrast, brightness = self.rng.uniform(0.7, 1.0), self.rng.uniform(0.0, 0.15)
        noise = self.rng.normal(0, 0.02, canvas.shape)
        pixels = 255 * np.clip(canvas * contrast + brightness + noise, 0, 1)
        return Image.fromarray(pixels.astype(np.uint8)).convert("RGB")


# Share of the samples and method of the composer, by source.
Sources = Mapping[str, tuple[float, Callable[[Any], Composition]]]
SOURCES: Sources = {
    "digits_single": (0.64, Composer.single),  # the cheapest to learn: one tile, one digit
    "digits_pair": (0.08, Composer.pair),
    "digits_strip": (0.14, Composer.strip),
    "digits_page": (0.06, Composer.page),
    "arithmetic": (0.08, Composer.arithmetic),
}


def write_split(directory: Path, composer: Composer, sources: Sources, samples: int) -> None:
    """Write a JSONL file per source, media, and the meta JSON."""
    (directory / "images").mkdir(parents=True)
    meta = {}
    # Every source has a sample; the first source absorbs rounding.
    counts = {source: max(1, int(share * samples)) for source, (share, _) in sources.items()}
    counts[next(iter(sources))] += samples - sum(counts.values())
    for source, (_, compose) in sources.items():
        count = counts[source]
        with (directory / f"{source}.jsonl").open("w", encoding="utf-8") as file:
            for k in range(count):
                record = write_sample(directory, f"{source}-{k:05d}", compose(composer))
                file.write(json.dumps(record) + "\n")
        meta[source] = {
            "root": ".",
            "annotation": f"{source}.jsonl",
            "data_augment": False,
            "repeat_time": 1,
            "length": count,
        }
    (directory / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def write_sample(directory: Path, identity: str, composed: Composition) -> dict:
    """Write images and recordings, and return the record, with scans and voices."""
    images, recordings = [], []
    for k, image in enumerate(composed.images):
        images.append(f"images/{identity}-{k}.png")
        image.save(directory / images[-1])
    if composed.recordings:
        (directory / "audio").mkdir(exist_ok=True)
    for k, sound in enumerate(composed.recordings):
        recordings.append(f"audio/{identity}-{k}.wav")
        soundfile.write(directory / recordings[-1], sound, SAMPLE_RATE, subtype="PCM_16")
    messages = []
    for k, turn in enumerate(composed.turns):
        placeholders = "<image>\n" * len(images) + "<audio>\n" * len(recordings)
        question = turn.question if k else placeholders + turn.question
        messages.append({"from": "human", "value": question})
        messages.append({"from": "gpt", "value": turn.answer})
    media: dict[str, list] = {
        "image": images,
        "width": [image.width for image in composed.images],
        "height": [image.height for image in composed.images],
        "audio": recordings,
    }
    record: dict = {"id": identity}
    record |= {name: v[0] if len(v) == 1 else v for name, v in media.items() if v}
    record["conversations"] = messages
    record["kinds"] = [turn.kind for turn in composed.turns]
    record["scans"] = composed.scans
    if recordings:
        record["voices"] = list(composed.voices)
    return record


def train_tokenizer(texts: Iterator[str], pieces: Sequence[str] = SPECIAL_PIECES) -> bytes:
    """Return a SentencePiece model in which text round-trips and each digit is a token."""
    SetMinLogLevel(2)
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=texts,
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCABULARY,
        hard_vocab_limit=False,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        split_digits=True,
        user_defined_symbols=list(pieces),
        num_threads=1,  # deterministic
    )
    return model.getvalue()


def training_lines(train: Path) -> Iterator[str]:
    """Yield all text of the training conversations, and the template's speakers."""
    for path in sorted(train.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            for message in json.loads(line)["conversations"]:
                yield "user" if message["from"] == "human" else "assistant"
                yield re.sub(r"^(<(image|audio)>\n)+", "", message["value"])


def make_dataset(output: Path, samples: int, heldout_samples: int, seed: int) -> None:
    """Write the dataset atomically."""
    with dataset_folder(output, FORMAT, samples, heldout_samples, seed) as part:
        for name, scans, count, rng in splits(samples, heldout_samples, seed):
            write_split(part / name, Composer(scans, rng), SOURCES, count)
        (part / "tokenizer.model").write_bytes(train_tokenizer(training_lines(part / "train")))


def splits(
    samples: int, heldout_samples: int, seed: int
) -> Iterator[tuple[str, Scans, int, np.random.Generator]]:
    """Yield name, scans, number of samples and random generator of each split."""
    bunch = load_digits()
    identities = np.arange(len(bunch.target))
    # Disjoint, with equal distributions of digits.
    parts = train_test_split(
        identities, test_size=HELDOUT_SCANS, stratify=bunch.target, random_state=seed
    )
    ink = (bunch.images / 16).astype(np.float32)
    train, heldout = (Scans(ink[part], bunch.target[part], part) for part in parts)
    yield "train", train, samples, np.random.default_rng([seed, 0])
    yield "heldout", heldout, heldout_samples, np.random.default_rng([seed, 1])


@contextmanager
def dataset_folder(output: Path, version: int, *sizes: int) -> Iterator[Path]:
    """Yield a folder to fill; with its description it becomes `output`."""
    with atomic_directory(output) as part:
        yield part
        (part / DESCRIPTION_FILE).write_text(_describe(version, *sizes))


def _describe(version: int, *sizes: int) -> str:
    """Return the text of a dataset's description file: the arguments that determine it."""
    made_with = {"format": version, **dict(zip(LIMITS, sizes, strict=True))}
    return json.dumps({"made_with": made_with}, indent=2) + "\n"


def run_maker(
    arguments: list[str] | None,
    description: str | None,
    version: int,
    make: Callable[[Path, int, int, int], None],
) -> int:
    """Make the dataset of a command line unless it exists, and return the exit status."""
    with one_line_errors():
        given = sys.argv[1:] if arguments is None else arguments
        check_arguments(given)
        parser = ArgumentParser(description=(description or "").split("\n\n")[0])
        parser.add_argument("--output", type=Path, required=True, help="folder to make")
        parser.add_argument("--samples", type=int, default=4000, help="for training (%(default)s)")
        parser.add_argument("--heldout-samples", type=int, default=300, help="(%(default)s)")
        parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
        options = vars(parser.parse_args(given))
        output, sizes = options["output"], [options[name] for name in LIMITS]
        for (name, (low, high)), number in zip(LIMITS.items(), sizes, strict=True):
            if not low <= number <= high:
                option = name.replace("_", "-")
                raise UserError(f"--{option} must be from {low} to {high}, got {number}")
        described, made_with = output / DESCRIPTION_FILE, _describe(version, *sizes)
        if described.is_file() and described.read_bytes() == made_with.encode():
            print(f"{output}: already made with these arguments")
            return 0
        if output.exists():
            raise UserError(
                f"{output} was not made with these arguments by this version; give another --output"
            )
        check_folder("--output", output, [])
        make(output, *sizes)
        print(f"{output}: {sizes[0]} training samples, {sizes[1]} held out")
    return 0


def main(arguments: list[str] | None = None) -> int:
    return run_maker(arguments, __doc__, FORMAT, make_dataset)


if __name__ == "__main__":
    sys.exit(main())
