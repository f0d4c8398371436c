"""Folders of a run's checkpoints: begin, publish, list and remove.

    latest_checkpointed_iteration.txt   steps of the newest complete checkpoint; replaced last
    iter_0000100/                       a complete checkpoint, after 100 steps
    iter_0000100/checksums.json         CRC-32 of every other file in it
    iter_0000150.part/                  being written or removed, or left by a kill

A checkpoint is renamed when it is complete on disk, and renamed back before its removal. So a
folder without `.part` is complete whenever the job is killed.
"""

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path

from megatron.core.dist_checkpointing.core import CONFIG_FNAME

from omnibal.base.files import atomic
from omnibal.job.runlog import TRACKER_FILE, checkpoint_path, latest_step

CHECKSUMS_FILE = "checksums.json"
_PART_SUFFIX = ".part"
_CHECKSUM_READ_BYTES = 2**22
_FOLDER_NAME = re.compile(r"iter_(\d{7,})(\.part)?")


def begin_checkpoint(directory: Path, step: int) -> Path:
    """Make and return an empty `.part` folder. Removes the step's save, unless it is the newest."""
    directory.mkdir(parents=True, exist_ok=True)
    remove_checkpoint(directory, step)
    part = part_path(directory, step)
    part.mkdir()
    return part


def part_path(directory: Path, step: int) -> Path:
    """Return the `.part` folder of a checkpoint that is being written or removed."""
    path = checkpoint_path(directory, step)
    return path.with_name(path.name + _PART_SUFFIX)


def publish_checkpoint(
    directory: Path, step: int, checksums: Mapping[str, int] | None = None
) -> Path:
    """Add checksums to a synced `.part` folder, rename it, name it the newest; return its path.

    Args:
        checksums: CRC-32 by file name, from the writes. Other files are read again.
    """
    part, path = part_path(directory, step), checkpoint_path(directory, step)
    write_checksums(part, checksums or {})
    force_to_disk(part)
    part.rename(path)
    force_to_disk(directory)
    name_newest(directory, step)
    return path


def name_newest(directory: Path, step: int) -> None:
    """Write `step` to the tracker file, atomically and synced to disk."""
    with atomic(directory / TRACKER_FILE) as temporary:
        temporary.write_text(str(step))
        force_to_disk(temporary)
    force_to_disk(directory)


def list_complete_steps(directory: Path) -> list[int]:
    """Return checkpoints' steps, newest first: the tracker file's and older, or [] without it."""
    newest = latest_step(directory)
    if newest is None:
        return []
    matches = [_FOLDER_NAME.fullmatch(folder.name) for folder in directory.iterdir()]
    steps = [int(match[1]) for match in matches if match is not None and match[2] is None]
    return [newest, *sorted((step for step in steps if step < newest), reverse=True)]


def write_checksums(path: Path, known: Mapping[str, int]) -> None:
    """Write a folder's checksums file. CRC-32 of files not in `known` (by name) is computed."""
    others = [file for file in path.iterdir() if file.name not in {*known, CHECKSUMS_FILE}]
    checksums = {**known, **{file.name: file_checksum(file) for file in others}}
    (path / CHECKSUMS_FILE).write_text(json.dumps(checksums, sort_keys=True, separators=(",", ":")))
    force_to_disk(path / CHECKSUMS_FILE)


def file_checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb", buffering=0) as stream:
        while content := stream.read(_CHECKSUM_READ_BYTES):
            checksum = zlib.crc32(content, checksum)
    return checksum


def check_checksums(path: Path, rank: int = 0, ranks: int = 1) -> None:
    """Raise ValueError if a saved file is missing or changed. Reads only files `rank::ranks`."""
    saved = json.loads((path / CHECKSUMS_FILE).read_text())
    # List the folder: a hostile checksums file could name any path.
    files = [file for file in sorted(path.iterdir()) if file.name in saved]
    if len(files) < len(saved):
        missing = sorted(saved.keys() - {file.name for file in files})
        raise ValueError(f"has no file {', '.join(missing)}")
    for file in files[rank::ranks]:
        if file_checksum(file) != saved[file.name]:
            raise ValueError(f"{file.name} has other bytes than were saved")


def remove_checkpoint(directory: Path, step: int) -> None:
    """Remove a step's `.part` folder, and its checkpoint unless the tracker file names it."""
    part, path = part_path(directory, step), checkpoint_path(directory, step)
    if part.exists():
        shutil.rmtree(part)
    if path.exists() and latest_step(directory) != step:
        path.rename(part)
        force_to_disk(directory)
        shutil.rmtree(part)


def prune_checkpoints(directory: Path, keep_last: int) -> None:
    """Remove `.part` and incomplete folders, and checkpoints except the newest `keep_last`.

    Folders newer than the tracker file's step remain: the run may have gone back to that step.
    """
    steps = list_complete_steps(directory)
    for folder in directory.iterdir():
        match = _FOLDER_NAME.fullmatch(folder.name)
        if match is not None and match[2] is not None and int(match[1]) <= max(steps, default=-1):
            shutil.rmtree(folder)
    complete = [at for at in steps if (checkpoint_path(directory, at) / CONFIG_FNAME).is_file()]
    for step in sorted({*steps} - {*complete[:keep_last]}):
        remove_checkpoint(directory, step)


def force_to_disk(path: Path) -> None:
    """Sync a file's content, or a folder's names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems sync names themselves, and refuse fsync of a folder.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
