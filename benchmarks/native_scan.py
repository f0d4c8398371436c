"""How many images a second become tokens from their headers, beside reading them whole.

    python benchmarks/native_scan.py [--images 2000] [--decoded 200]

Writes JPEG, PNG and WebP files of photographs' sizes (0.3 to 12 megapixels, smooth noise, which
compresses as photographs do), and counts the tokens of each as Qwen3-VL has them: once from the
header and the file's end, as `omnibal lengths` reads an image, and once by decoding it first, as
the data loaders do that pack while they train. One process, in CPU seconds, so that other
programs' load does not count; files are in the page cache.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from omnibal.data.image_files import ImageFile
from omnibal.data.native_resolution import image_segments
from omnibal.data.scan import image_size
from omnibal.encoders import ImageRule

SIZES = ((640, 480), (1024, 768), (1280, 960), (1920, 1080), (2048, 1536), (4032, 3024))
FORMATS = ("jpg", "png", "webp")
DIFFERENT = 6
"""Files of a format; each is read again and again."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--decoded", type=int, default=30)
    arguments = parser.parse_args()
    print(f"{'format':8}{'headers/s':>12}{'decoded/s':>12}")
    with tempfile.TemporaryDirectory() as name:
        for kind, paths in write_images(Path(name)).items():
            headers = images_per_second(paths, arguments.images, image_size)
            decoded = images_per_second(paths, arguments.decoded, decoded_size)
            print(f"{kind:8}{headers:12,.0f}{decoded:12,.1f}")


if __name__ == "__main__":
    main()
