"""Read a record's messages from any usual trainer's format.

    {"conversations": [{"from": "human", "value": "..."}, ...]}      ShareGPT, LLaVA, LLaMA-Factory
    {"messages": [{"role": "user", "content": "..."}, ...]}          ms-swift, chat templates
    {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.jpg"}, ...]}, ...]}

Media parts become marks in the text.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from omnibal.data.sample import AUDIO, IMAGE, VIDEO

Role = Literal["system", "user", "assistant", "tool"]
Medium = Literal["image", "video", "audio"]
MARK_OF: dict[Medium, str] = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}


class InvalidRecordError(ValueError):
    """Malformed record. The caller adds file and number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    role: Role
    text: str
    learned: bool = True
    """Whether an assistant message is trained on."""
    reasoning: str | None = None
    """The assistant's reasoning before its text."""
    calls: tuple[str, ...] = ()
    """Tool calls, as JSON objects with "name" and "arguments"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Messages:
    """Messages of a record and the media named in their parts."""

    messages: tuple[Message, ...]
    speakers: tuple[str, ...]
    """Roles as written in the record."""
    key: str
    """The record's key of these messages."""
    items: dict[Medium, list[Any]] = field(default_factory=dict)
    """Media named in parts, in order."""


@dataclass(frozen=True, slots=True)
class _Form:
    speaker: str
    text: str


LISTS = {"conversations": _Form("from", "value"), "messages": _Form("role", "content")}
"""Message list keys and their usual format."""
_ROLES: dict[str, Role] = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("observation", "tool", "tool_response"), "tool"),
}
_CALLING = ("function_call", "tool_call")
"""Assistant roles with text that is a tool call or a list of calls."""
_UNSPOKEN = ("id", "name", "tool_call_id")
"""Message keys that no template writes."""
_PARTS: dict[str, tuple[Medium, tuple[str, ...]]] = {
    "image": ("image", ("image", "path", "url")),
    "image_url": ("image", ("image_url",)),
    "video": ("video", ("video", "path", "url")),
    "video_url": ("video", ("video_url",)),
    "audio": ("audio", ("audio", "path", "url")),
    "audio_url": ("audio", ("audio_url",)),
}
"""Media part types and the keys that may name the file."""
_NAMED = re.compile(r"<img>(?P<image>[^<>\n]+)</img>|<audio>(?P<audio>[^<>\n]+\.\w{2,4})</audio>")
"""Files that Qwen-VL's and Qwen-Audio's texts name."""


def read_messages(record: dict[str, Any]) -> Messages:
    """Read the messages; raises InvalidRecordError, which names the key."""
    found = [key for key in LISTS if record.get(key) is not None]
    if len(found) > 1:
        raise InvalidRecordError('has "conversations" and "messages"; leave one of them out')
    key = found[0] if found else "conversations"
    given = record.get(key)
    form = _form_of(given, key)
    if not isinstance(given, list) or not given or not all(isinstance(m, dict) for m in given):
        raise InvalidRecordError(
            f'must have "{key}": a list of {{"{form.speaker}", "{form.text}"}}, each with a role '
            "and a text or a list of parts"
        )
    items: dict[Medium, list[Any]] = {}
    messages = []
    for number, message in enumerate(given, 1):
        try:
            messages.append(_read_message(message, form, items))
        except InvalidRecordError as error:
            raise InvalidRecordError(f'has in "{key}" as message {number} {error}') from None
    speakers = tuple(str(message.get(form.speaker)) for message in given)
    return Messages(messages=tuple(messages), speakers=speakers, key=key, items=items)


def _form_of(given: Any, key: str) -> _Form:
    """Format of the first message, by default the key's."""
    first = given[0] if isinstance(given, list) and given else None
    usual = LISTS[key]
    if not isinstance(first, dict) or usual.speaker in first:
        return usual
    return next((form for form in LISTS.values() if form.speaker in first), usual)


def _read_message(message: dict[str, Any], form: _Form, items: dict[Medium, list[Any]]) -> Message:
    """Read a message and add its media to `items`."""
    said = {key: value for key, value in message.items() if value is not None}
    speaker = said.pop(form.speaker, None)
    role = _ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise InvalidRecordError(
            f'"{form.speaker}" {json.dumps(speaker)}; it must be one of {", ".join(_ROLES)}'
        )
    content = said.pop(form.text, None)
    more: dict[str, Any] = {}
    for key, (name, reader) in _FIELDS.items():
        if key in said:
            given = said.pop(key)
            if role != "assistant" and given:
                raise InvalidRecordError(f'"{key}", which only an assistant\'s may have')
            more[name] = reader(given)
    unknown = [key for key in said if key not in _UNSPOKEN]
    if unknown:
        raise InvalidRecordError(f'"{unknown[0]}", which is not understood; remove it')
    if speaker in _CALLING:
        more["calls"] = (*more.get("calls", ()), *_read_calls(content))
        return Message(role=role, text="", **more)
    if content is None and more.get("calls"):
        return Message(role=role, text="", **more)
    return Message(role=role, text=_read_text(content, form, items), **more)


def _read_text(content: Any, form: _Form, items: dict[Medium, list[Any]]) -> str:
    if isinstance(content, str):
        return _NAMED.sub(lambda found: _read_named(found, items), content)
    if not isinstance(content, list) or not content:
        raise InvalidRecordError(
            f'an odd "{form.text}"; it must be a text, or a list of parts with a "type"'
        )
    return "".join(_read_part(part, items) for part in content)


def _read_named(found: re.Match[str], items: dict[Medium, list[Any]]) -> str:
    """Mark of a file that a text names; adds it to `items`."""
    medium: Medium = "image" if found["image"] else "audio"
    items.setdefault(medium, []).append(found[medium])
    return MARK_OF[medium]


def _read_part(part: Any, items: dict[Medium, list[Any]]) -> str:
    """Text or media mark of a part; adds its media to `items`."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    given = {} if kind is None else {k: v for k, v in part.items() if v is not None and k != "type"}
    if kind == "text" and isinstance(given.get("text"), str) and len(given) == 1:
        return given["text"]
    if not isinstance(kind, str) or kind not in _PARTS:
        raise InvalidRecordError(
            f'a part of "type" {json.dumps(kind)}; it must be {{"type": "text", "text"}}, or of '
            f"type {', '.join(_PARTS)}"
        )
    medium, names = _PARTS[kind]
    unknown = [key for key in given if key not in names]
    if unknown:
        raise InvalidRecordError(
            f'a part of type {kind} with "{unknown[0]}", which is not understood; remove it'
        )
    if len(given) > 1:
        raise InvalidRecordError(f"a part of type {kind} with {', '.join(given)}; give one of them")
    for value in given.values():
        items.setdefault(medium, []).append(
            value.get("url") if kind.endswith("_url") and isinstance(value, dict) else value
        )
    return MARK_OF[medium]


def _read_as(kind: type, problem: str) -> Callable[[Any], Any]:
    def read(given: Any) -> Any:
        if not isinstance(given, kind):
            raise InvalidRecordError(problem.format(json.dumps(given)))
        return given

    return read


def _read_calls(given: Any) -> tuple[str, ...]:
    """Parse tool calls from JSON or its text, a single call or a list."""
    calls, found = _parse_json(given), []
    for call in calls if isinstance(calls, list) else [calls]:
        inner = call.get("function", call) if isinstance(call, dict) else None
        inner = inner if isinstance(inner, dict) else {}
        name, arguments = inner.get("name"), _parse_json(inner.get("arguments", {}))
        if not (isinstance(name, str) and isinstance(arguments, dict)):
            raise InvalidRecordError(
                'an odd call of a tool; it must be {"name", "arguments"}, in "function" or alone, '
                "with arguments that are an object"
            )
        found.append(json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False))
    return tuple(found)


_FIELDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "loss": ("learned", _read_as(bool, 'a "loss" of {}; it must be true or false')),
    "reasoning_content": (
        "reasoning",
        _read_as(str, 'an odd "reasoning_content"; it must be a text'),
    ),
    "tool_calls": ("calls", _read_calls),
}
"""Optional assistant keys: message field and reader."""


def _parse_json(given: Any) -> Any:
    try:
        return json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return None
