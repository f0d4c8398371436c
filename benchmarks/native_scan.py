"""How many images a second become tokens from their headers, beside reading them whole.

    python benchmarks/native_scan.py [--images 2000] [--decoded 30] [--samples 20000]

Writes JPEG, PNG and WebP files of photographs' sizes (0.3 to 12 megapixels, smooth noise, which
compresses as photographs do), and counts the tokens of each as Qwen3-VL has them: once from the
header and the file's end, as `omnibal lengths` reads an image, and once by decoding it first, as
the data loaders do that pack while they train. One process, in CPU seconds, so that other
programs' load does not count; files are in the page cache.

Then the whole command: `omnibal lengths` on a JSONL of `--samples` conversations about one JPEG
each, every one a file of its own, with a chat template and two processes, on the clock. The
tokenizer is byte-level with merges of these texts alone, so that texts are not shorter in tokens
than a released one would make them.
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

from omnibal.data.image_files import ImageFile
from omnibal.data.native_resolution import image_segments
from omnibal.data.scan import image_size
from omnibal.encoders import ImageRule

SIZES = ((640, 480), (1024, 768), (1280, 960), (1920, 1080), (2048, 1536), (4032, 3024))
FORMATS = ("jpg", "png", "webp")
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


def scanned_per_second(folder: Path, images: list[Path], count: int) -> float:
    """Images a second of `omnibal lengths` on two processes, from its start to its end."""
    write_tokenizer(folder / "tokenizer")
    write_conversations(folder, images, count)
    command = "-m omnibal lengths data.jsonl --model qwen3-vl-8b --tokenizer-model tokenizer"
    paths = os.pathsep.join(str(Path(path).resolve()) for path in ("", *sys.path))
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, *command.split(), "--processes", "2", "-o", "lengths.parquet"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return count / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--decoded", type=int, default=30)
    parser.add_argument("--samples", type=int, default=20_000)
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
        rate = scanned_per_second(Path(name), small, arguments.samples)
        print(f"omnibal lengths, two processes: {rate:,.0f} images/s on the clock")


if __name__ == "__main__":
    main()
