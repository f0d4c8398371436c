"""Samples as JSONL with media files, or as tar shards written by webdataset."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from jsonl_cases import said, write_jsonl
from PIL import Image

TURNS = said("", "It is 7.")
SAMPLES = 24


def make_samples(folder: Path) -> list[dict]:
    """Write folder/pictures; return records with 0, 1, 2 or 12 images, or a video, and an id."""
    rng, records = np.random.default_rng(2), []
    pictures = folder / "pictures"
    pictures.mkdir()
    for number in range(SAMPLES):
        count = [0, 1, 2, 12][number % 4]
        names = [f"{number:04}.{k}.{'png' if k % 2 else 'jpg'}" for k in range(count)]
        for name in names:
            pixels = rng.integers(0, 256, (*rng.integers(8, 120, 2), 3), np.uint8)
            Image.fromarray(pixels).save(pictures / name)
        video = count == 12 and number % 8 == 3
        question = "<image>" * (0 if video else count) + f"Was? é「{number}」"
        shown = {"video" if video else "image": names} if names else {}
        records.append({"id": number, "conversations": said(question, "It is 7."), **shown})
    return records


def write_lines(folder: Path, records: Iterable[dict]) -> Path:
    """Write the records as JSONL about folder/pictures; return the meta file."""
    write_jsonl(folder / "a.jsonl", *records)
    (folder / "lines.json").write_text('{"a": {"root": "pictures", "annotation": "a.jsonl"}}')
    return folder / "lines.json"


def write_shards(folder: Path, records: list[dict], per_shard: int = 10) -> list[Path]:
    """Write tar shards with the records' media; JSON members omit the `image` field."""
    from webdataset import TarWriter

    paths = []
    for first in range(0, len(records), per_shard):
        paths.append(folder / f"train-{first // per_shard:03}.tar")
        with TarWriter(str(paths[-1])) as shard:
            for record in records[first : first + per_shard]:
                names = [*record.get("image", []), *record.get("video", [])]
                said = {name: value for name, value in record.items() if name != "image"}
                members = {"json": json.dumps(said).encode()}
                for name in names:
                    suffix = name.partition(".")[2]
                    members[suffix] = (folder / "pictures" / name).read_bytes()
                shard.write({"__key__": f"{record['id']:04}", **members})
    return paths
