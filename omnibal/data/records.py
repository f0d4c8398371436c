"""Samples from JSON records, checked: images, videos, recordings and conversation."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import PurePath
from typing import Any, Protocol
from urllib.parse import unquote

from omnibal.data import stored_files
from omnibal.data.forms import with_messages
from omnibal.data.messages import (
    MARK_OF,
    ChatMessage,
    InvalidRecordError,
    Medium,
    RecordMessages,
    read_messages,
)
from omnibal.data.sample import AUDIO, IMAGE, VIDEO, VIDEO_LINE, Sample, Turn, Video

_PATHS_RULE = "a path, a list of paths, or absent"
_VIDEO_RULE = "a file, a folder of frames, or a list of their paths"
# Record keys for media: InternVL's, then ms-swift's and LLaMA-Factory's.
_ITEM_KEYS: dict[Medium, tuple[str, str]] = {medium: (medium, f"{medium}s") for medium in MARK_OF}
_KEYS = (
    *("conversations", "messages", "system", "tools", "kinds"),
    *(key for keys in _ITEM_KEYS.values() for key in keys),
    "id",
)
_FILE_SCHEME = "file://"
_NOT_FILES = ("data:", "http:", "https:", "oss:", "s3:")
_MAX_NAME = 1024
# Files in base64, by their first bytes or length.
_BASE64_FILE = re.compile(
    r"(?:/9j/|iVBORw0KGgo|R0lGOD|UklGR|Qk[0-9A-Za-z]{2}|SUkq|TU0A|GkXf|ZkxhQ|AAAA[A-Za-z0-9]{2}Z0eX)"
    r"[A-Za-z0-9+/\s]{24}|[A-Za-z0-9+/]{256}"
)
# Keys that name a medium.
_MEDIUM_KEY = re.compile(
    r"(?:(?:\w+_)?(?:(?P<image>image|img|pic|picture|photo|screenshot|frame)"
    r"|(?P<video>video|vid|movie)|(?P<audio>audio|wav|sound|recording))|file|path|media)s?"
    r"(?:_?(?:path|file|filename|folder|dir|name|url|uri|list|bytes|data|base64|b64|src)s?)?_?\d*"
)
# Suffixes that make a text the name of a file.
_SUFFIXES: dict[Medium, frozenset[str]] = {
    "image": stored_files.IMAGE_SUFFIXES | {".heic", ".svg"},
    "video": stored_files.VIDEO_SUFFIXES,
    "audio": stored_files.AUDIO_SUFFIXES | {".aac", ".m4a", ".mp3", ".ogg", ".opus"},
}


# System message, greeting and turns.
_Conversation = tuple[str | None, ChatMessage | None, tuple[Turn, ...]]


class RecordMedia(Protocol):
    """Images (also frames), videos and recordings of a record."""

    def find(self, medium: Medium, name: str) -> Any:
        """Return an ImageFile, Video (file or folder of frames) or AudioFile by name."""

    def list_unnamed(self, medium: Medium) -> tuple[Any, ...]:
        """Return the media of a record that names none of this kind: none but in shards, rows."""
        return ()


def read_record(record: dict[str, Any], media: RecordMedia, **known: Any) -> Sample:
    """Return the checked sample of a record, with `known` fields; raises InvalidRecordError."""
    record = with_messages(record)
    _check_keys(record)
    messages = read_messages(record)
    named_videos, names = _read_videos(record, messages), _read_items(record, messages, "image")
    images = tuple(media.find("image", name) for name in names or ())
    videos = tuple(_read_video(video, media) for video in named_videos)
    if not named_videos and names is None:
        images, videos = media.list_unnamed("image"), media.list_unnamed("video")
    names = _read_items(record, messages, "audio")
    recordings = tuple(media.find("audio", name) for name in names or ())
    if names is None:
        recordings = media.list_unnamed("audio")
    counts = len(images), len(videos), len(recordings)
    system, greeting, turns = _read_conversation(record, messages, *counts)
    return Sample(
        images=images,
        turns=turns,
        videos=videos,
        recordings=recordings,
        system=system,
        greeting=None if greeting is None else greeting.text,
        greeting_learned=greeting is None or greeting.learned,
        tools=_read_tools(record),
        **known,
    )


def _check_keys(record: dict[str, Any]) -> None:
    """Raise on misspelt keys, and on unknown keys that name or hold files."""
    for key in record:
        if record[key] is None or key in _KEYS:
            continue
        meant = _similar_key(key)
        if meant is None:
            # An unknown key's files or bytes would be ignored: guess the medium by their names,
            # then by the key. Source URLs of media under known keys are no files.
            names_files = any(record.get(known) for keys in _ITEM_KEYS.values() for known in keys)
            texts = [
                text
                for text in _iterate_texts(record[key])
                if not (names_files and text.startswith(("http:", "https:")))
            ]
            meant = next((medium for medium in map(_medium_of_file, texts) if medium), None)
            named = _MEDIUM_KEY.fullmatch(key.lower()) if any(texts) else None
            if named and not meant:
                meant = next((m for m in MARK_OF if named[m]), "image")
        if meant is not None:
            raise InvalidRecordError(f'has "{key}"; did it mean "{meant}"? rename or remove it')


@lru_cache(maxsize=1024)
def _similar_key(key: str) -> str | None:
    """Return the known key that this key may misspell."""
    return next(iter(get_close_matches(key.lower(), _KEYS[:-1], n=1, cutoff=0.85)), None)


def _iterate_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        yield from ["data:"] * (isinstance(value, dict) and value.get("bytes") is not None)
        for item in value.values() if isinstance(value, dict) else value:
            yield from _iterate_texts(item)


def _medium_of_file(name: str) -> Medium | None:
    """Return the medium of a file's name or encoded bytes, None for other texts."""
    if name.startswith("data:") or _BASE64_FILE.match(name):
        return next((medium for medium in MARK_OF if name.startswith(f"data:{medium}")), "image")
    suffix = PurePath(name.partition("?")[0][-_MAX_NAME:]).suffix.lower()
    return next((medium for medium, known in _SUFFIXES.items() if suffix in known), None)


def _read_video(video: Any, media: RecordMedia) -> Video:
    if isinstance(video, str):
        return media.find("video", video)
    frames = _read_names(video, "video", _VIDEO_RULE)
    if not frames:
        raise InvalidRecordError("has an empty list as a video; name its frames or remove it")
    of_video = next(filter(stored_files.is_video_file, frames), None)
    if of_video is not None:
        raise InvalidRecordError(f"has the video file {of_video} among frames; name it alone")
    return Video(frames=tuple(media.find("image", name) for name in frames))


def _read_videos(record: dict[str, Any], messages: RecordMessages) -> list[Any]:
    """Return a record's videos: each a file, a folder of frames, or a list of frame paths."""
    key, named = _find_items(record, messages, "video")
    if not named:
        return []
    are_files = isinstance(named, list) and all(
        isinstance(name, str) and stored_files.is_video_file(name) for name in named
    )
    if isinstance(named, str | dict) or (key == "video" and not are_files):
        named = [named]
    if not isinstance(named, list):
        raise _odd_value_error(key, f"a list of videos, each {_VIDEO_RULE}")
    return [_read_path(video, key) if isinstance(video, dict | str) else video for video in named]


def _read_items(
    record: dict[str, Any], messages: RecordMessages, medium: Medium
) -> list[str] | None:
    """Return the paths of images or recordings, None if absent."""
    key, named = _find_items(record, messages, medium)
    return None if named is None else _read_names(named or [], key, _PATHS_RULE)


def _find_items(
    record: dict[str, Any], messages: RecordMessages, medium: Medium
) -> tuple[str, Any]:
    """Return key and value of a record's media of one kind; the value is None if absent."""
    in_parts = messages.items.get(medium)
    given = {key: record[key] for key in _ITEM_KEYS[medium] if record.get(key) is not None}
    used = [key for key in given if given[key]]
    places = [f'"{key}"' for key in (*used, *[messages.key] * (in_parts is not None))]
    if len(places) > 1:
        raise InvalidRecordError(
            f"names what it shows or says in {' and in '.join(places)}; give each item in one place"
        )
    if in_parts is not None:
        return f"{medium}s", in_parts
    return next(((key, given[key]) for key in (*used, *given)), (medium, None))


def _read_names(value: Any, key: str, remedy: str) -> list[str]:
    names = [value] if isinstance(value, str | dict) else value
    paths = [_read_path(name, key) for name in names] if isinstance(names, list) else [""]
    if not all(isinstance(path, str) and path for path in paths):
        raise _odd_value_error(key, remedy)
    return paths


def _odd_value_error(key: str, remedy: str) -> InvalidRecordError:
    return InvalidRecordError(f'has an odd "{key}"; it must be {remedy}')


def _read_path(name: Any, key: str) -> Any:
    """Return an item's path, from {"path"} or a file URL too. Raise on bytes and remote URLs."""
    if isinstance(name, dict):
        fields = {field: value for field, value in name.items() if value is not None}
        if list(fields) != ["path"]:
            raise InvalidRecordError(
                f'has in "{key}" {", ".join(fields) or "nothing"} in place of a path; write a file'
            )
        name = fields["path"]
    if isinstance(name, str) and (
        name.startswith(_NOT_FILES) or _BASE64_FILE.match(name) or len(name) > _MAX_NAME
    ):
        raise InvalidRecordError(
            f'has in "{key}" {name[:40]!r}, which is no file; write it to a file and name that'
        )
    if isinstance(name, str) and name.startswith(_FILE_SCHEME):
        return unquote(name.removeprefix(_FILE_SCHEME))
    return name


def _read_tools(record: dict[str, Any]) -> str | None:
    tools = record.get("tools")
    with suppress(ValueError, RecursionError):
        tools = json.loads(tools) if isinstance(tools, str) and tools else tools
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRecordError('has an odd "tools"; it must be a list of objects, or its JSON')
    return json.dumps(tools, ensure_ascii=False)


def _read_conversation(
    record: dict[str, Any], messages: RecordMessages, images: int, videos: int, recordings: int
) -> _Conversation:
    """Return system message, greeting and turns, with a mark for every item in the questions."""
    system, greeting, asked = _assemble_turns(record, messages)
    others = [system or "", "" if greeting is None else greeting.text]
    for turn in asked:
        others += [turn.answer, *turn.results, turn.reasoning or "", *turn.calls]
    for mark in MARK_OF.values():
        if any(mark in text for text in others):
            raise InvalidRecordError(f"has {mark} in an answer or system message; move it")
    questions = [turn.question for turn in asked]
    _place_marks(questions, AUDIO, recordings, "recording")
    questions[0] = questions[0].replace(f"{VIDEO}\r\n", VIDEO_LINE)
    _place_marks(questions, VIDEO, videos, "video")
    _place_marks(questions, IMAGE, images, "image")
    kinds = record.get("kinds", [None] * len(questions))
    named = isinstance(kinds, list) and all(isinstance(kind, str | None) for kind in kinds)
    if not named or len(kinds) != len(questions):
        raise InvalidRecordError(f'needs in "kinds" a name for each of {len(questions)} turn(s)')
    turns = tuple(
        turn
        if question == turn.question and kind is None
        # `replace` takes half the time of this loop.
        else replace(turn, question=question, kind=kind)
        for turn, question, kind in zip(asked, questions, kinds, strict=True)
    )
    return system, greeting, turns


def _place_marks(questions: list[str], mark: str, count: int, noun: str) -> None:
    """Mark a single unmarked item in question 0, in place. Raise unless marks equal items."""
    placed = sum(question.count(mark) for question in questions)
    if count == 1 and placed == 0:
        questions[0] = f"{mark}\n{questions[0]}"
        placed = 1
    if placed != count:
        raise InvalidRecordError(f"has {placed} {mark} for {count} {noun}(s); write one for each")


def _assemble_turns(record: dict[str, Any], messages: RecordMessages) -> _Conversation:
    left = list(messages.messages)
    for message in left:
        _check_text(message)
    system = record.get("system") or None
    if system is not None and not isinstance(system, str):
        raise InvalidRecordError('has an odd "system"; it must be a text')
    if system is not None:
        _check_text(ChatMessage(role="system", text=system))
    if left[0].role == "system":
        if system is not None:
            raise InvalidRecordError(f'has "system" and a system message in "{messages.key}"')
        system = left.pop(0).text
    greeting = left.pop(0) if left and left[0].role == "assistant" else None
    if greeting is not None and (greeting.calls or greeting.reasoning):
        raise _alternation_error(messages)
    turns = []
    while left:
        turns.append(_pop_turn(left, messages))
    if not turns:
        raise _alternation_error(messages)
    return system, greeting, tuple(turns)


def _pop_turn(left: list[ChatMessage], messages: RecordMessages) -> Turn:
    """Pop a turn's messages: a question or tool results, then the answer and its calls."""
    question, results = "", []
    while left and left[0].role == "tool":
        results.append(left.pop(0).text)
    if not results:
        if not left or left[0].role != "user":
            raise _alternation_error(messages)
        question = left.pop(0).text
    if not left or left[0].role != "assistant":
        raise _alternation_error(messages)
    answer = left.pop(0)
    while left and left[0].role == "assistant" and left[0].calls and not left[0].text:
        more = left.pop(0)  # calls as separate messages
        if more.learned != answer.learned:
            raise InvalidRecordError(
                f'has in "{messages.key}" an answer and a call with unequal "loss"; equal them'
            )
        answer = replace(answer, calls=(*answer.calls, *more.calls))
    return Turn(
        question=question,
        answer=answer.text,
        kind=None,
        results=tuple(results),
        reasoning=answer.reasoning,
        calls=answer.calls,
        learned=answer.learned,
    )


def _alternation_error(messages: RecordMessages) -> InvalidRecordError:
    roles = ", ".join(message.role for message in messages.messages)
    return InvalidRecordError(
        f'has "{messages.key}" from {roles}; user (human) and assistant (gpt) must alternate, user '
        "first and assistant last; tools' results may replace user"
    )


def _check_text(message: ChatMessage) -> None:
    texts = (message.text, message.reasoning or "", *message.calls)
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise InvalidRecordError(
            f"has text that is not Unicode ({error.reason}); mend its \\u escapes"
        ) from error
