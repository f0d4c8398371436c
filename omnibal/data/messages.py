"""Messages of a record, in any usual trainer's format.

    {"conversations": [{"from": "human", "value": "..."}, ...]}      ShareGPT, LLaVA, LLaMA-Factory
    {"messages": [{"role": "user", "content": "..."}, ...]}          ms-swift, chat templates
    {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.jpg"}, ...]}, ...]}

Media parts become marks in the text.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from omnibal.data.sample import AUDIO, IMAGE, VIDEO

Role = Literal["system", "user", "assistant", "tool"]
Medium = Literal["image", "video", "audio"]
MARK_OF: dict[Medium, str] = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}


class InvalidRecordError(ValueError):
    """Malformed record. The caller adds file and number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatMessage:
    role: Role
    text: str
    learned: bool = True  # whether an assistant message is trained on
    reasoning: str | None = None  # the assistant's reasoning before its text
    calls: tuple[str, ...] = ()  # tool calls, as JSON objects with "name" and "arguments"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordMessages:
    """Messages of a record, and the media named in their parts."""

    messages: tuple[ChatMessage, ...]
    key: str  # the record's key of these messages
    items: dict[Medium, list[Any]] = field(default_factory=dict)  # media named in parts, in order


# Keys of message lists, and the usual keys of a message's speaker and text.
LISTS = {"conversations": ("from", "value"), "messages": ("role", "content")}
_ROLE_OF: dict[str, Role] = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("observation", "tool", "tool_response"), "tool"),
}
# Assistant roles whose text is a tool call or a list of calls.
_CALL_ROLES = ("function_call", "tool_call")
# Optional assistant keys: message field, type and what it must be.
_ASSISTANT_KEYS: dict[str, tuple[str, type, str]] = {
    "loss": ("learned", bool, "true or false"),
    "reasoning_content": ("reasoning", str, "a text"),
    "tool_calls": ("calls", object, "calls"),  # read by `_read_calls`
}
_IGNORED_KEYS = ("id", "name", "tool_call_id")  # message keys that no template writes
# Media part types and the keys that may name the file.
_MEDIA_PARTS: dict[str, tuple[Medium, tuple[str, ...]]] = {
    "image": ("image", ("image", "path", "url")),
    "image_url": ("image", ("image_url",)),
    "video": ("video", ("video", "path", "url")),
    "video_url": ("video", ("video_url",)),
    "audio": ("audio", ("audio", "path", "url")),
    "audio_url": ("audio", ("audio_url",)),
}
# Files that Qwen-VL's and Qwen-Audio's texts name.
_FILE_TAGS = re.compile(
    r"<img>(?P<image>[^<>\n]+)</img>|<audio>(?P<audio>[^<>\n]+\.\w{2,4})</audio>"
)


def read_messages(record: dict[str, Any]) -> RecordMessages:
    """Return a record's messages and media; raises InvalidRecordError, which names the key."""
    keys = [key for key in LISTS if record.get(key) is not None]
    if len(keys) > 1:
        raise InvalidRecordError('has "conversations" and "messages"; leave one of them out')
    key = keys[0] if keys else "conversations"
    given, form = record.get(key), LISTS[key]
    if not isinstance(given, list) or not given or not all(isinstance(m, dict) for m in given):
        raise InvalidRecordError(
            f'must have "{key}": a list of {{"{form[0]}", "{form[1]}"}} with a text or parts'
        )
    # Either key may hold either format.
    form = next((other for other in (form, *LISTS.values()) if other[0] in given[0]), form)
    items: dict[Medium, list[Any]] = {}
    messages = []
    for number, message in enumerate(given, 1):
        try:
            messages.append(_read_message(message, *form, items))
        except InvalidRecordError as error:
            raise InvalidRecordError(f'has in "{key}" as message {number} {error}') from None
    return RecordMessages(messages=tuple(messages), key=key, items=items)


def _read_message(
    message: dict[str, Any], speaker_key: str, text_key: str, items: dict[Medium, list[Any]]
) -> ChatMessage:
    """Return a message, its media appended to `items`."""
    fields = {key: value for key, value in message.items() if value is not None}
    speaker = fields.pop(speaker_key, None)
    role = _ROLE_OF.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise InvalidRecordError(
            f'"{speaker_key}" {json.dumps(speaker)}; it must be one of {", ".join(_ROLE_OF)}'
        )
    content = fields.pop(text_key, None)
    more: dict[str, Any] = {}
    for key, (name, kind, rule) in _ASSISTANT_KEYS.items():
        if key in fields:
            value = fields.pop(key)
            if role != "assistant" and value:
                raise InvalidRecordError(f'"{key}", which only an assistant\'s may have')
            if not isinstance(value, kind):
                raise InvalidRecordError(f'an odd "{key}"; it must be {rule}')
            more[name] = _read_calls(value) if key == "tool_calls" else value
    unknown = [key for key in fields if key not in _IGNORED_KEYS]
    if unknown:
        raise InvalidRecordError(f'"{unknown[0]}", which is not understood; remove it')
    if speaker in _CALL_ROLES:
        more["calls"] = (*more.get("calls", ()), *_read_calls(content))
        content = ""
    elif content is None and more.get("calls"):
        content = ""
    return ChatMessage(role=role, text=_read_content(content, text_key, items), **more)


def _read_content(content: Any, key: str, items: dict[Medium, list[Any]]) -> str:
    if isinstance(content, str):
        return _FILE_TAGS.sub(lambda found: _read_file_tag(found, items), content)
    if not isinstance(content, list) or not content:
        raise InvalidRecordError(f'an odd "{key}"; it must be a text or parts with a "type"')
    return "".join(_read_part(part, items) for part in content)


def _read_file_tag(found: re.Match[str], items: dict[Medium, list[Any]]) -> str:
    """Return the mark of a file named in a text, the file appended to `items`."""
    medium: Medium = "image" if found["image"] else "audio"
    items.setdefault(medium, []).append(found[medium])
    return MARK_OF[medium]


def _read_part(part: Any, items: dict[Medium, list[Any]]) -> str:
    """Return the text or mark of a part, its file appended to `items`."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    given = {} if kind is None else {k: v for k, v in part.items() if v is not None and k != "type"}
    if kind == "text" and isinstance(given.get("text"), str) and len(given) == 1:
        return given["text"]
    if not isinstance(kind, str) or kind not in _MEDIA_PARTS:
        raise InvalidRecordError(
            f'a part of "type" {json.dumps(kind)}; it must be text, {", ".join(_MEDIA_PARTS)}'
        )
    medium, names = _MEDIA_PARTS[kind]
    if len(given) > 1 or not given.keys() <= {*names}:
        raise InvalidRecordError(
            f"a part of type {kind} with {', '.join(given)}; it may have one of {', '.join(names)}"
        )
    for value in given.values():
        is_url = kind.endswith("_url") and isinstance(value, dict)
        items.setdefault(medium, []).append(value.get("url") if is_url else value)
    return MARK_OF[medium]


def _read_calls(given: Any) -> tuple[str, ...]:
    """Return tool calls as JSON texts, from a call or a list, parsed or as text."""
    calls, texts = _parse_json(given), []
    for call in calls if isinstance(calls, list) else [calls]:
        inner = call.get("function", call) if isinstance(call, dict) else None
        inner = inner if isinstance(inner, dict) else {}
        name, arguments = inner.get("name"), _parse_json(inner.get("arguments", {}))
        if not (isinstance(name, str) and isinstance(arguments, dict)):
            raise InvalidRecordError(
                'an odd tool call; it must be {"name", "arguments": {...}}, alone or in "function"'
            )
        texts.append(json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False))
    return tuple(texts)


def _parse_json(given: Any) -> Any:
    try:
        return json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return None
