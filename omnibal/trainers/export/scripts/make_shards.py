"""Write the samples of samples.jsonl as tar shards, in the order of first use by packs.

    python make_shards.py [--samples-per-shard 10000]
    energon prepare samples            # then index them

A line of samples.jsonl has a sample's key, its unchanged record, and its files by the name behind
the key. Needs only Python. Existing shards are kept: remove the folder `samples` to restart.
"""

import argparse
import io
import json
import sys
import tarfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--samples-per-shard", type=int, default=10_000)
    shard_size = parser.parse_args().samples_per_shard
    if shard_size < 1:
        sys.exit(f"--samples-per-shard must be at least 1, got {shard_size}")
    target = FOLDER / "samples"
    if target.exists():
        sys.exit(f"{target} exists already; remove it to write the shards again")
    # Renamed when complete, so that an ended run leaves no `samples`.
    part = FOLDER / "samples.part"
    part.mkdir(exist_ok=True)
    with (FOLDER / "samples.jsonl").open(encoding="utf-8") as lines:
        samples = map(json.loads, lines)
        for number, first in enumerate(samples):
            write_shard(part / f"shard-{number:06}.tar", first, islice(samples, shard_size - 1))
    part.rename(target)


def write_shard(path: Path, first: dict[str, Any], others: Iterator[dict[str, Any]]) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as shard:
        for sample in (first, *others):
            add_member(shard, f"{sample['key']}.json", sample["record"].encode())
            for part, file in sample["files"]:
                add_member(shard, f"{sample['key']}.{part}", Path(file).read_bytes())


def add_member(shard: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    shard.addfile(member, io.BytesIO(content))


if __name__ == "__main__":
    main()
