"""Compose scanned digits and digits spoken by eSpeak NG into a small dataset of three modalities.

Samples have shown digits, spoken digits, or both with a question whether they are equal; some only
text. Held-out samples share neither scans nor voices with training. Files as in
tools/make_digits_dataset.py, with 16 kHz recordings:

    OUTPUT/dataset.json  OUTPUT/tokenizer.model
    OUTPUT/{train,heldout}/{meta.json,SOURCE.jsonl,images/*.png,audio/*.wav}

eSpeak NG is from the package `espeakng-loader`, without system installation. Text and tokenizer are
deterministic, and on a given machine sounds too.
"""

import ctypes
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path

import espeakng_loader
import numpy as np
from scipy.signal import resample_poly

from omnibal.data.tokenizer import AUDIO_CONTEXT, AUDIO_END, AUDIO_START

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.make_digits_dataset import (
    SAMPLE_RATE,
    SPECIAL_PIECES,
    Composer,
    Composition,
    Scans,
    Sources,
    Turn,
    dataset_folder,
    run_maker,
    splits,
    train_tokenizer,
    training_lines,
    write_split,
)

FORMAT = 1  # incremented when equal arguments give a different dataset
VOICES = tuple(
    f"{accent}+{voice}"
    for accent, voices in (
        ("en", "m1 m2 m3 m4 m5 f1 f4 Alex Andrea Denis Lee steph"),
        ("en-us", "m1 m3 m6 m7 f1 f4 Hugo Mario Reed adam anika belinda"),
    )
    for voice in voices.split()
)
# Other voices, such as f2, are not deterministic.
HELDOUT_VOICES = ("en+m8", "en+Annie", "en+Michael", "en-us+linda", "en-us+Andy", "en-us+max")
STYLES = 6  # speeds and pitches per voice
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True, slots=True)
class Utterance:
    """A digit spoken by a voice."""

    voice: str
    words_per_minute: int
    pitch: int  # from 0 to 99; 50 is the voice's own
    digit: int


def say_all(utterances: Sequence[Utterance]) -> list[np.ndarray]:
    """Return sounds at `SAMPLE_RATE`, float32 from -1 to 1."""
    # In a new process: eSpeak NG's output depends on its history.
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as process:
        return process.submit(_say_all, utterances).result()


def _say_all(utterances: Sequence[Utterance]) -> list[np.ndarray]:
    speaker = _Speaker()
    return [speaker.say(utterance) for utterance in utterances]


class _Speaker:
    """eSpeak NG through its C interface, `speak_lib.h`."""

    _SYNCHRONOUS, _AT_CHARACTER, _UTF8 = 2, 1, 1
    _RATE, _PITCH = 1, 3

    def __init__(self) -> None:
        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        self._library.espeak_Synth.argtypes = [
            ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_int, ctypes.c_uint,
            ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p,
        ]  # fmt: skip
        data = espeakng_loader.get_data_path().encode()
        self._rate = self._library.espeak_Initialize(self._SYNCHRONOUS, 0, data, 0)
        if self._rate <= 0:
            raise RuntimeError(f"eSpeak NG cannot start with its data in {data.decode()}")
        # eSpeak's breath noise uses the C library's generator, which it seeds with the process id.
        ctypes.CDLL(None).srand(1)
        self._parts: list[np.ndarray] = []
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
        )
        self._callback = kind(self._take)  # keeps a reference, as C does not
        self._library.espeak_SetSynthCallback(self._callback)

    def _take(self, samples: "ctypes._Pointer[ctypes.c_short]", count: int, _: int | None) -> int:
        if samples and count > 0:
            self._parts.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def say(self, utterance: Utterance) -> np.ndarray:
        """Return the sound of a digit at `SAMPLE_RATE`."""
        self._parts.clear()
        text = WORDS[utterance.digit].encode()
        calls = (
            self._library.espeak_SetVoiceByName(utterance.voice.encode()),
            self._library.espeak_SetParameter(self._RATE, utterance.words_per_minute, 0),
            self._library.espeak_SetParameter(self._PITCH, utterance.pitch, 0),
            self._library.espeak_Synth(
                text, len(text) + 1, 0, self._AT_CHARACTER, 0, self._UTF8, None, None
            ),
        )
        if any(calls) or not self._parts:
            raise RuntimeError(f"eSpeak NG cannot say {utterance}: {calls}")
        sound = np.concatenate(self._parts) / 2**15
        return resample_poly(sound, SAMPLE_RATE, self._rate).astype(np.float32)


class SpokenComposer(Composer):
    """Generator of random samples with shown and spoken digits."""

    def __init__(self, scans: Scans, voices: Sequence[str], rng: np.random.Generator) -> None:
        super().__init__(scans, rng)
        self.voices = voices
        utterances = [
            Utterance(voice, int(speed), int(pitch), digit)
            for voice in voices
            for speed, pitch in zip(
                rng.integers(110, 220, STYLES), rng.integers(35, 66, STYLES), strict=True
            )
            for digit in range(len(WORDS))
        ]
        self.sounds: dict[tuple[str, int], list[np.ndarray]] = {}  # by voice and digit, [styles]
        for utterance, sound in zip(utterances, say_all(utterances), strict=True):
            self.sounds.setdefault((utterance.voice, utterance.digit), []).append(sound)
        self._same = cycle((True, False))

    def shown_digit(self) -> Composition:
        chosen = self.choose(1)
        turn = Turn("Which digit is shown?", str(self.scans.digits[chosen[0]]), "shown")
        return self._composition([self.draw(chosen, columns=1)], chosen, [turn])

    def shown_line(self) -> Composition:
        """Return two to six digits shown in a row."""
        chosen = self.choose(int(self.rng.integers(2, 7)))
        turn = Turn("Read the line.", _join_digits(self.scans.digits[chosen]), "shown line")
        return self._composition([self.draw(chosen, columns=len(chosen))], chosen, [turn])

    def spoken_digit(self) -> Composition:
        digit = int(self.rng.integers(10))
        return self._spoken([digit], [Turn("Which digit is said?", str(digit), "said")])

    def spoken_line(self) -> Composition:
        """Return two to eight spoken digits."""
        digits = self.rng.integers(0, 10, size=int(self.rng.integers(2, 9)))
        turn = Turn("Write what you hear.", _join_digits(digits), "said line")
        return self._spoken(digits, [turn])

    def shown_and_spoken(self) -> Composition:
        """Return a shown and a spoken digit, equal in every other sample."""
        chosen = self.choose(1)
        shown = int(self.scans.digits[chosen[0]])
        spoken = shown if next(self._same) else (shown + int(self.rng.integers(1, 10))) % 10
        turns = [
            Turn("Which digit is shown?", str(shown), "shown"),
            Turn("Which digit is said?", str(spoken), "said"),
        ]
        same = Turn(
            "Is the digit that is said the one that is shown?",
            "yes" if spoken == shown else "no",
            "same",
        )
        sample = self._spoken([spoken], [*(turns[k] for k in self.rng.permutation(2)), same])
        images = [self.draw(chosen, columns=1)]
        return self._composition(images, chosen, sample.turns, sample.recordings, sample.voices)

    def _spoken(self, digits: Sequence[int] | np.ndarray, turns: list[Turn]) -> Composition:
        voice = str(self.rng.choice(self.voices))
        return Composition([], [], turns, [self._say(voice, digits)], [voice])

    def _say(self, voice: str, digits: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return digits by a voice in one style, with pauses and noise, at random volume."""
        style = int(self.rng.integers(STYLES))
        parts = [self._pause()]
        for digit in digits:
            parts += [self.sounds[voice, int(digit)][style], self._pause()]
        sound = np.concatenate(parts) * self.rng.uniform(0.3, 1.0)
        noise = self.rng.normal(0, 10 ** self.rng.uniform(-4, -2.3), len(sound))
        return np.clip(sound + noise, -1, 1).astype(np.float32)

    def _pause(self) -> np.ndarray:
        return np.zeros(int(SAMPLE_RATE * self.rng.uniform(0.02, 0.12)), np.float32)


def _join_digits(digits: np.ndarray) -> str:
    return " ".join(map(str, digits))


SOURCES: Sources = {
    "spoken_single": (0.36, SpokenComposer.spoken_digit),
    "shown_single": (0.32, SpokenComposer.shown_digit),
    "shown_and_said": (0.20, SpokenComposer.shown_and_spoken),
    "spoken_line": (0.03, SpokenComposer.spoken_line),
    "shown_line": (0.03, SpokenComposer.shown_line),
    "arithmetic": (0.06, SpokenComposer.arithmetic),
}


def make_dataset(output: Path, samples: int, heldout_samples: int, seed: int) -> None:
    """Write the dataset atomically."""
    with dataset_folder(output, FORMAT, samples, heldout_samples, seed) as part:
        for name, scans, count, rng in splits(samples, heldout_samples, seed):
            voices = VOICES if name == "train" else HELDOUT_VOICES
            write_split(part / name, SpokenComposer(scans, voices, rng), SOURCES, count)
        pieces = (*SPECIAL_PIECES, AUDIO_START, AUDIO_CONTEXT, AUDIO_END)
        tokenizer = train_tokenizer(training_lines(part / "train"), pieces)
        (part / "tokenizer.model").write_bytes(tokenizer)


def main(arguments: list[str] | None = None) -> int:
    return run_maker(arguments, __doc__, FORMAT, make_dataset)


if __name__ == "__main__":
    sys.exit(main())
