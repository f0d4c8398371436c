"""Checked reading of one sample's JSON record: its images, recordings and conversation."""

from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Protocol

from omnibal.data.audio_files import AudioFile
from omnibal.data.image_files import ImageFile
from omnibal.data.sample import AUDIO, IMAGE, VIDEO, VIDEO_LINE, Turn

_PATHS = "a path, a list of paths, or absent"
_VIDEO_SUFFIXES = frozenset((".avi", ".flv", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".webm"))


class InvalidRecordError(ValueError):
    """A record is malformed; the caller adds its file and number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Messages of a record; None where there is no such message."""

    system: str | None
    greeting: str | None
    """Message of the model before the first question."""
    turns: tuple[Turn, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    """Names by which a record gives its messages."""

    key: str
    speaker: str
    text: str
    user: str
    model: str


_FORMS = (
    # ShareGPT's, which LLaVA and InternVL took over, and that of chat templates.
    _Form(key="conversations", speaker="from", text="value", user="human", model="gpt"),
    _Form(key="messages", speaker="role", text="content", user="user", model="assistant"),
)


class Media(Protocol):
    """Images, frames and recordings that the names in a record refer to."""

    def image(self, name: str) -> ImageFile:
        """One image or frame."""

    def frames(self, name: str) -> tuple[ImageFile, ...]:
        """List all frames of the video of that name."""

    def unnamed(self) -> tuple[ImageFile, ...]:
        """List the images of a record that names none."""

    def recording(self, name: str) -> AudioFile:
        """One recording."""

    def unnamed_recordings(self) -> tuple[AudioFile, ...]:
        """List the recordings of a record that names none."""


def read_images(record: dict[str, Any], media: Media) -> tuple[tuple[ImageFile, ...], bool]:
    """The record's images or frames, and whether they are frames.

    Raises:
        InvalidRecordError: they are not named as they must be.
    """
    video = record.get("video") or []
    if not video and record.get("image") is None:
        return media.unnamed(), False
    images = _names(record.get("image") or [], "image", _PATHS)
    if not video:
        return tuple(map(media.image, images)), False
    if images:
        raise InvalidRecordError('has an "image" and a "video"; a sample may show one of them')
    named = _names(video, "video", "a folder of frames, or a list of their paths")
    for name in named:
        if is_video_file(name):
            raise video_file(name)
    if isinstance(video, str):
        return media.frames(video), True
    return tuple(map(media.image, named)), True


def read_recordings(record: dict[str, Any], media: Media) -> tuple[AudioFile, ...]:
    """The record's recordings.

    Raises:
        InvalidRecordError: they are not named as they must be.
    """
    named = record.get("audio")
    if named is None:
        return media.unnamed_recordings()
    return tuple(map(media.recording, _names(named or [], "audio", _PATHS)))


def is_video_file(name: str) -> bool:
    """Whether a file name is that of a video."""
    return PurePath(name).suffix.lower() in _VIDEO_SUFFIXES


def video_file(name: str) -> InvalidRecordError:
    """Error for a video given as one file, with how to extract its frames."""
    folder = PurePath(name).with_suffix("")
    return InvalidRecordError(
        f'has the video file {name} as its "video"; extract its frames first, as with '
        f"`mkdir -p {folder} && ffmpeg -i {name} -vf fps=2 {folder}/%05d.jpg` in the folder that "
        f"names start from, and name {folder} instead"
    )


def read_conversation(
    record: dict[str, Any], images: int, video: bool, recordings: int
) -> Conversation:
    """Read the messages of a record; a video's `<video>` line is left in place.

    Raises:
        InvalidRecordError: it is malformed, or does not place the images or the recordings.
    """
    system, greeting, values = _conversation_values(record)
    questions, answers = values[::2], values[1::2]
    # Without recordings <audio> is text, such as that of a page in HTML.
    for mark in (IMAGE, AUDIO) if recordings else (IMAGE,):
        if any(mark in text for text in [system or "", greeting or "", *answers]):
            raise InvalidRecordError(
                f"has {mark} in an answer or system message; it may stand only in a question"
            )
    if recordings:
        _place(questions, AUDIO, recordings, "recording")
    if video:
        _place_video(questions)
    else:
        _place(questions, IMAGE, images, "image")
    kinds = record.get("kinds", [None] * len(questions))
    named = isinstance(kinds, list) and all(isinstance(kind, str | None) for kind in kinds)
    if not named or len(kinds) != len(questions):
        raise InvalidRecordError(
            f'must have in "kinds" one name for each of its {len(questions)} turn(s)'
        )
    turns = tuple(Turn(*fields) for fields in zip(questions, answers, kinds, strict=True))
    return Conversation(system=system, greeting=greeting, turns=turns)


def _names(value: Any, key: str, remedy: str) -> list[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise InvalidRecordError(f'has an odd "{key}"; it must be {remedy}')
    return names


def _place(questions: list[str], mark: str, count: int, noun: str) -> None:
    """Put the only image or recording first where no question has its mark."""
    placed = sum(question.count(mark) for question in questions)
    if count == 1 and placed == 0:
        questions[0] = f"{mark}\n{questions[0]}"
        placed = 1
    if placed != count:
        raise InvalidRecordError(
            f"has {placed} {mark} for {count} {noun}(s); write one {mark} for each {noun}, "
            f"and none without {noun}s"
        )


def _place_video(questions: list[str]) -> None:
    """Put the video first where the first question does not show it."""
    questions[0] = questions[0].replace(f"{VIDEO}\r\n", VIDEO_LINE)
    if VIDEO not in questions[0]:
        questions[0] = VIDEO_LINE + questions[0]
    shown = sum(question.count(VIDEO) for question in questions)
    if shown != 1 or VIDEO_LINE not in questions[0] or any(IMAGE in text for text in questions):
        raise InvalidRecordError(
            f"is about a video; its first question must have {VIDEO} once, with a line break "
            f"behind it, and no other {VIDEO} or {IMAGE} may stand in a question"
        )


def _conversation_values(record: dict[str, Any]) -> tuple[str | None, str | None, list[str]]:
    """The system message, what the model says first, and then: question, answer, ..., answer."""
    form = _form_of(record)
    messages = record.get(form.key)
    well_formed = (
        isinstance(messages, list)
        and all(isinstance(message, dict) for message in messages)
        and all(isinstance(message.get(form.text), str) for message in messages)
    )
    if not messages or not well_formed:
        raise InvalidRecordError(
            f'must have "{form.key}": a list of {{"{form.speaker}", "{form.text}"}}'
        )
    values = [message[form.text] for message in messages]
    _check_texts(values)
    speakers = [message.get(form.speaker) for message in messages]
    begin = int(speakers[0] == "system")
    system = values[0] if begin else None
    greets = speakers[begin : begin + 1] == [form.model]
    greeting = values[begin] if greets else None
    begin += int(greets)
    talk = values[begin:]
    if not talk or speakers[begin:] != [form.user, form.model] * (len(talk) // 2):
        raise InvalidRecordError(
            f'has "{form.key}" from {", ".join(map(str, speakers))}; {form.user} and {form.model} '
            f"must alternate, {form.user} first and {form.model} last"
        )
    return system, greeting, talk


def _form_of(record: dict[str, Any]) -> "_Form":
    given = [form for form in _FORMS if record.get(form.key) is not None]
    if len(given) > 1:
        raise InvalidRecordError('has "conversations" and "messages"; leave one of them out')
    return given[0] if given else _FORMS[0]


def _check_texts(values: list[str]) -> None:
    try:
        "".join(values).encode()
    except UnicodeEncodeError as error:
        raise InvalidRecordError(
            f"has text that is not Unicode ({error.reason}); mend its \\u escapes"
        ) from error
