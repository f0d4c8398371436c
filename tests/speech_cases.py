"""A small model with image and audio encoders, its tokenizer, and image-audio samples."""

import json
import shutil
from pathlib import Path

import numpy as np
import soundfile
from jsonl_cases import DIGITS, open_jsonl, picture, said

from omnibal.data.tokenizer import AUDIO_CONTEXT, AUDIO_END, AUDIO_START, Tokenizer, open_tokenizer
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import ClipsEncoder

AUDIO = ClipsEncoder(
    layers=2,
    hidden_size=32,
    heads=2,
    ffn_hidden_size=64,
    normalization="LayerNorm",
    qkv_bias=True,
    qk_norm=False,
    frames=40,
    mel_bins=8,
    positions_per_token=4,
)
_DIGITS = DIGITS.with_tower("language", vocab_size=300)
OMNI: ModelConfig = _DIGITS.model_copy(update={"encoders": _DIGITS.encoders | {"audio": AUDIO}})
CLIP_S = AUDIO.frames / 100
SOUNDS = {
    "low.wav": (8_000, 1),
    "cd.flac": (44_100, 2),
    "dat.wav": (48_000, 3),
    "own.flac": (16_000, 1),
}
"""Sample rate in Hz and channels by file name."""


def hearing_tokenizer(digits: Path, folder: Path) -> Tokenizer:
    """Write the quickstart's tokenizer with audio tokens added to `folder`, and open it."""
    folder.mkdir()
    shutil.copy(digits / "tokenizer.model", folder)
    first = open_tokenizer(folder / "tokenizer.model").vocab_size
    added = {name: first + k for k, name in enumerate((AUDIO_START, AUDIO_CONTEXT, AUDIO_END))}
    (folder / "added_tokens.json").write_text(json.dumps(added))
    return open_tokenizer(folder)


def write_sound(path: Path, seconds: float, rate_hz: int, channels: int, seed: int = 0) -> int:
    """Write `seconds` of noise; return the samples per channel."""
    rng = np.random.default_rng(seed)
    samples = round(seconds * rate_hz)
    soundfile.write(path, rng.uniform(-0.5, 0.5, (samples, channels)), rate_hz)
    return samples


def make_speech(folder: Path) -> Path:
    """Write 12 samples with 0 to 2 images and 0 to 3 recordings of 0.1 to 2.9 clips."""
    files = folder / "files"
    files.mkdir()
    for k in range(3):
        (files / f"{k}.png").write_bytes(picture(30 + 50 * k, 40))
    for k, (name, (rate_hz, channels)) in enumerate(SOUNDS.items()):
        write_sound(files / name, CLIP_S * (0.1, 1.0, 2.5, 2.9)[k], rate_hz, channels, seed=k)
    records = []
    for number in range(12):
        images = [f"{k}.png" for k in range(number % 3)]
        sounds = [list(SOUNDS)[(number + k) % 4] for k in range(number % 4)]
        question = "<image>" * len(images) + "then " + "<audio>" * len(sounds) + "?" * number
        turns = said(question, "7" * (number + 1), "And?", "No.")
        records.append({"image": images, "audio": sounds, "conversations": turns})
    open_jsonl(folder, *records, root="files")
    return folder / "meta.json"
