"""Small JSONL datasets, their scans, and image files."""

import io
import json
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from omnibal.data.annotations import Annotations
from omnibal.data.scan import Scan, scan_lengths
from omnibal.data.tokenizer import Tokenizer
from omnibal.model.config import ModelConfig, load_model

DIGITS = load_model("internvl-digits")


def said(*texts: str) -> list[dict[str, str]]:
    """Messages of a record, alternating user and assistant."""
    return [{"from": ("human", "gpt")[k % 2], "value": text} for k, text in enumerate(texts)]


def record_of(question: str = "Which?", answer: str = "7", **extra: object) -> dict:
    """Return a record of one question and answer."""
    return {"conversations": said(question, answer), **extra}


def write_jsonl(path: Path, *records: object) -> Path:
    """Write a line of JSON per record; strings are written verbatim."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return path


def open_meta(folder: Path, **sources: dict) -> Annotations:
    """Write and open a meta of these sources."""
    (folder / "meta.json").write_text(json.dumps(sources))
    return Annotations.open(folder / "meta.json")


def open_jsonl(folder: Path, *records: object, **entry: object) -> Annotations:
    """Write and open a dataset of one source; media paths are relative to the folder."""
    write_jsonl(folder / "a.jsonl", *records)
    return open_meta(folder, a={"root": "", "annotation": "a.jsonl", **entry})


def scan(
    annotations: Annotations, tokenizer: Tokenizer, model: ModelConfig = DIGITS, **options
) -> Scan:
    """Scan without progress output."""
    return scan_lengths(annotations, model, tokenizer, lambda _: None, **options)


def picture(width: int = 64, height: int = 32, kind: str = "png", **options: object) -> bytes:
    """Encoded image of noise."""
    pixels, stored = np.random.default_rng(0).integers(0, 256, (height, width, 3)), io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(stored, kind, **options)
    return stored.getvalue()


def png_chunk(name: bytes, content: bytes) -> bytes:
    """PNG chunk with length and checksum."""
    return len(content).to_bytes(4) + name + content + zlib.crc32(name + content).to_bytes(4)
