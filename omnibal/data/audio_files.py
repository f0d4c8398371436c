"""Recordings: which files are some, and where one is."""

from dataclasses import dataclass

from omnibal.data.stored_files import StoredFile

AUDIO_SUFFIXES = frozenset((".flac", ".wav"))
"""File suffixes that mark a recording where no record names it."""


@dataclass(frozen=True, slots=True)
class AudioFile(StoredFile):
    """A recording that is opened when it is needed."""
