"""How many images a second become tokens from their headers, beside reading them whole.

    python benchmarks/native_scan.py [--images 2000] [--decoded 30] [--samples 40000]

Writes JPEG, PNG and WebP files of photographs' sizes (0.3 to 12 megapixels, smooth noise, which
compresses as photographs do), and counts the tokens of each as Qwen3-VL has them: once from the
header and the file's end, as `omnibal lengths` reads an image, and once by decoding it first, as
the data loaders do that pack while they train. One process, in CPU seconds, so that other
programs' load does not count; files are in the page cache.

Then a JSONL of `--samples` conversations about one JPEG each, every one a file of its own, with a
tokenizer's chat template: the scan of a part of them in this process, in CPU time, and all of them
by the whole command, `omnibal lengths` with two processes, on the clock, beside what it takes for a
handful, which is its start. The tokenizer is byte-level with merges of these texts alone, so that
texts are not shorter in tokens than a released one would make them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from omnibal.data.annotations import Annotations
from omnibal.data.image_headers import image_size
from omnibal.data.native_resolution import image_segments
from omnibal.data.scan import scan_lengths
from omnibal.data.stored_files import ImageFile
from omnibal.data.tokenizer import open_tokenizer
from omnibal.families.named import named_model
from omnibal.model.encoders import ImageRule

SIZES = ((640, 480), (1024, 768), (1280, 960), (1920, 1080), (2048, 1536), (4032, 3024))
FORMATS = ("jpg", "png", "webp")
MODEL = "qwen3-vl-8b"
FEW = 512
"""Samples of a scan that is all start."""
DIFFERENT = 6
"""Files of a format; each is read again and again."""
QUESTION = (
    "<image>\nDescribe this photograph in one sentence, and name what is in the middle of it."
)
ANSWER = (
    "A smooth field of colours without an edge, as a photograph of clouds in the evening would be, "
    "and there is nothing in the middle of it that has a name. "
)
ANSWER_REPEATS = (1, 2, 4)
TEMPLATE = """\
{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.content is string -%}{{- m.content -}}{%- else -%}{%- for part in m.content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_end|>",
]
RULE = ImageRule(patch_size=16, frames_per_patch=2, min_pixels=256 * 256, max_pixels=4096 * 4096)


def write_images(folder: Path) -> dict[str, list[Path]]:
    """Files of every format."""
    rng = np.random.default_rng(0)
    found: dict[str, list[Path]] = {name: [] for name in FORMATS}
    for number in range(DIFFERENT):
        size = SIZES[number % len(SIZES)]
        coarse = rng.integers(0, 256, (size[1] // 16, size[0] // 16, 3), np.uint8)
        image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
        for name, paths in found.items():
            path = folder / f"{number}.{name}"
            image.save(path)
            paths.append(path)
    return found


def decoded_size(image: ImageFile) -> tuple[int, int]:
    """Width and height of an image whose pixels are read."""
    with image.open() as file, Image.open(file) as opened:
        return opened.convert("RGB").size


def images_per_second(
    paths: list[Path], count: int, size_of: Callable[[ImageFile], tuple[int, int]]
) -> float:
    """Images that become tokens in a CPU second."""
    start = time.process_time()
    for number in range(count):
        image_segments(*size_of(ImageFile(paths[number % len(paths)])), RULE)
    return count / (time.process_time() - start)


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with the chat template above."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([QUESTION, ANSWER], trainer)
    bpe.add_special_tokens(SPECIAL)
    folder.mkdir()
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def write_conversations(folder: Path, images: list[Path], count: int) -> None:
    """data.jsonl, and a file for the image of every conversation."""
    contents = [path.read_bytes() for path in images]
    with (folder / "data.jsonl").open("w") as file:
        for number in range(count):
            (folder / f"{number}.jpg").write_bytes(contents[number % len(contents)])
            answer = ANSWER * ANSWER_REPEATS[number % len(ANSWER_REPEATS)]
            turns = [
                {"role": "user", "content": QUESTION},
                {"role": "assistant", "content": answer},
            ]
            line = {"messages": turns, "images": [f"{number}.jpg"]}
            file.write(json.dumps(line) + "\n")


def scan_cpu_ms(folder: Path, count: int) -> float:
    """CPU time of a sample that this process scans."""
    annotations = Annotations.open(folder / "data.jsonl").take(np.arange(count))
    model, tokenizer = named_model(MODEL), open_tokenizer(folder / "tokenizer")
    start = time.process_time()
    scan_lengths(annotations, model, tokenizer, lambda done: None)
    return (time.process_time() - start) / count * 1e3


def command_seconds(folder: Path, data: str) -> float:
    """Seconds of `omnibal lengths` on two processes, from its start to its end."""
    command = f"-m omnibal lengths {data} --model {MODEL} --tokenizer-model tokenizer"
    paths = os.pathsep.join(str(Path(path).resolve()) for path in ("", *sys.path))
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, *command.split(), "--processes", "2", "-o", "lengths.parquet"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - start


def print_scan(folder: Path, images: list[Path], count: int) -> None:
    """Measure and print the scan of so many conversations."""
    write_tokenizer(folder / "tokenizer")
    write_conversations(folder, images, count)
    lines = (folder / "data.jsonl").read_text().splitlines(keepends=True)
    (folder / "few.jsonl").write_text("".join(lines[:FEW]))
    print(f"scan of one sample: {scan_cpu_ms(folder, min(count, 8000)):.3f} ms of CPU time")
    few_s, all_s = command_seconds(folder, "few.jsonl"), command_seconds(folder, "data.jsonl")
    print(
        f"omnibal lengths, two processes: {count:,} images in {all_s:.1f} s on the clock, "
        f"{count / all_s:,.0f} images/s; {FEW} of them take {few_s:.1f} s, so that each further "
        f"second is {(count - FEW) / (all_s - few_s):,.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--decoded", type=int, default=30)
    parser.add_argument("--samples", type=int, default=40_000)
    arguments = parser.parse_args()
    print(f"{'format':8}{'headers/s':>12}{'decoded/s':>12}")
    with tempfile.TemporaryDirectory() as name:
        written = write_images(Path(name))
        for kind, paths in written.items():
            headers = images_per_second(paths, arguments.images, image_size)
            decoded = images_per_second(paths, arguments.decoded, decoded_size)
            print(f"{kind:8}{headers:12,.0f}{decoded:12,.1f}")
        # The smallest of the files, so that they fit the page cache.
        small = sorted(written["jpg"], key=lambda path: path.stat().st_size)[:2]
        print_scan(Path(name), small, arguments.samples)


if __name__ == "__main__":
    main()
