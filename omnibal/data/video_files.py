"""Read video headers and wanted frames with PyAV (extra `video`).

Shapes: F frames, H rows and W columns of pixels, C channels.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.stored_files import VideoFile

_REMEDY = "replace the file or remove the sample"
_RIFF, _UNKNOWN = struct.Struct("<4sI"), 0xFFFFFFFF
"""AVI's first chunk name, and the size in a non-seekable output."""
_HEADERS = 4_096  # cached: a pack's samples, and part of a scan


class BadVideo(ValueError):
    """Unusable video, with a remedy. The caller adds its name."""


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """Header of the first video stream."""

    frames: int
    frames_per_second: float
    width: int
    """Decoded size in pixels, like `height`."""
    height: int


@lru_cache(maxsize=_HEADERS)
def read_video_header(video: VideoFile) -> VideoHeader:
    """Frames (or packets), rate and size of a video, without decoding; raises BadVideo."""
    with _opened(video) as (container, stream):
        frames = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
        rate = stream.average_rate or stream.guessed_rate
        found = {"frames": frames, "rate": rate, "size": stream.width * stream.height}
        missing = [name for name, value in found.items() if not value]
        if missing:
            raise BadVideo(f"has no {' and no '.join(missing)}; {_REMEDY}")
        return VideoHeader(frames, float(rate), stream.width, stream.height)


def read_video_frames(video: VideoFile, wanted: Sequence[int]) -> np.ndarray:
    """Decode frames; raises BadVideo if undecodable or if sizes differ.

    Args:
        wanted: ascending frame indices.

    Returns:
        frames_FHWC: RGB, uint8.
    """
    found: list[np.ndarray] = []
    left = list(wanted)
    with _opened(video) as (container, stream):
        for number, frame in enumerate(container.decode(stream)):
            while left and left[0] == number:
                found.append(frame.to_ndarray(format="rgb24"))
                left.pop(0)
            if not left:
                break
    if left:
        raise BadVideo(f"ends before frame {left[0]}, which its header counts; {_REMEDY}")
    if len({frame.shape for frame in found}) > 1:
        raise BadVideo(f"has frames of different sizes; {_REMEDY}")
    return np.stack(found)


def _whole(file: IO[bytes]) -> IO[bytes]:
    """Return the file, and raise if an AVI is truncated, as its header counts all frames anyway."""
    head = file.read(_RIFF.size)
    if len(head) == _RIFF.size:
        name, size = _RIFF.unpack(head)
        if name == b"RIFF" and size != _UNKNOWN and file.seek(0, os.SEEK_END) < size + len(head):
            raise BadVideo(f"is cut off; {_REMEDY}")
    file.seek(0)
    return file


@contextmanager
def _opened(video: VideoFile) -> Iterator[tuple[Any, Any]]:
    """Container and first video stream."""
    try:
        import av
    except ImportError as error:
        raise UserError(
            f"{video}: videos in files are read with PyAV, which is not installed; install it: "
            'pip install "omnibal[video]", or name a folder of frames'
        ) from error
    try:
        with video.open() as file, av.open(_whole(file)) as container:
            streams = container.streams.video
            if not streams:
                raise BadVideo(f"has no video stream; {_REMEDY}")
            yield container, streams[0]
    except FileNotFoundError as error:
        raise BadVideo("does not exist; correct the path, or root in the meta") from error
    except IsADirectoryError as error:
        raise BadVideo("is a folder; name a file in it") from error
    except (av.FFmpegError, OSError) as error:
        raise BadVideo(f"cannot be read ({error.strerror}); {_REMEDY}") from error
