"""Messages of a record, as any of the usual trainers' forms writes them, in one form.

    {"conversations": [{"from": "human", "value": "..."}, ...]}      ShareGPT, LLaVA, LLaMA-Factory
    {"messages": [{"role": "user", "content": "..."}, ...]}          ms-swift, chat templates
    {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.jpg"}, ...]}, ...]}

Parts of the last become text in which a mark stands for each item, as in the others.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from omnibal.data.sample import AUDIO, IMAGE, VIDEO

Role = Literal["system", "user", "assistant", "tool"]
Medium = Literal["image", "video", "audio"]
MARK_OF: dict[Medium, str] = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}


class InvalidRecordError(ValueError):
    """A record is malformed; the caller adds its file and number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """What one role says once."""

    role: Role
    text: str
    learned: bool = True
    """Whether it is trained on, if the assistant says it."""
    reasoning: str | None = None
    """What the assistant thinks before it says so."""
    calls: tuple[str, ...] = ()
    """Calls of tools that the assistant makes, each a JSON object of "name" and "arguments"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Messages:
    """All messages of a record, and the items that parts of them name."""

    messages: tuple[Message, ...]
    speakers: tuple[str, ...]
    """Roles as the record names them."""
    key: str
    """Key of the record that they are of."""
    items: dict[Medium, list[Any]] = field(default_factory=dict)
    """What parts name, in order; a part may also stand for the next item that the record names."""


@dataclass(frozen=True, slots=True)
class _Form:
    speaker: str
    text: str


_LISTS = {
    "conversations": _Form("from", "value"),
    "messages": _Form("role", "content"),
}
"""Lists that a record may have, and the form that their messages usually are of."""
_ROLES: dict[str, Role] = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("observation", "tool", "tool_response"), "tool"),
}
_CALLING = ("function_call", "tool_call")
"""Roles of an assistant whose text is a call, or a list of calls, of tools."""
_UNSPOKEN = ("id", "name", "tool_call_id")
"""Keys of a message that no template writes."""
_PARTS: dict[str, tuple[Medium, tuple[str, ...]]] = {
    "image": ("image", ("image", "path", "url")),
    "image_url": ("image", ("image_url",)),
    "video": ("video", ("video", "path", "url")),
    "video_url": ("video", ("video_url",)),
    "audio": ("audio", ("audio", "path", "url")),
    "audio_url": ("audio", ("audio_url",)),
}
"""Types of parts that show or say something, and the keys by which they may name it."""


def read_messages(record: dict[str, Any]) -> Messages:
    """The messages of a record.

    Raises:
        InvalidRecordError: they are not of one of the forms; names the key.
    """
    key = _key_of_messages(record)
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


def _key_of_messages(record: dict[str, Any]) -> str:
    found = [key for key in _LISTS if record.get(key) is not None]
    if len(found) > 1:
        raise InvalidRecordError('has "conversations" and "messages"; leave one of them out')
    if not found and "instruction" in record:
        raise InvalidRecordError(
            'must have "conversations" or "messages", and has "instruction"; Alpaca\'s form is not '
            "read: write it as messages"
        )
    return found[0] if found else "conversations"


def _form_of(given: Any, key: str) -> _Form:
    """The form of the first message; that of the key where it is of none."""
    first = given[0] if isinstance(given, list) and given else None
    usual = _LISTS[key]
    if not isinstance(first, dict) or usual.speaker in first:
        return usual
    return next((form for form in _LISTS.values() if form.speaker in first), usual)


def _read_message(message: dict[str, Any], form: _Form, items: dict[Medium, list[Any]]) -> Message:
    """One message; the items that its parts name are added to `items`."""
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
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRecordError(
            f'an odd "{form.text}"; it must be a text, or a list of parts with a "type"'
        )
    return "".join(_read_part(part, items) for part in content)


def _read_part(part: Any, items: dict[Medium, list[Any]]) -> str:
    """A part's text, or the mark of its item, whose name is added to `items` if it has one."""
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


def _read_loss(loss: Any) -> bool:
    if not isinstance(loss, bool):
        raise InvalidRecordError(f'a "loss" of {json.dumps(loss)}; it must be true or false')
    return loss


def _read_reasoning(reasoning: Any) -> str:
    if not isinstance(reasoning, str):
        raise InvalidRecordError('an odd "reasoning_content"; it must be a text')
    return reasoning


def _read_calls(given: Any) -> tuple[str, ...]:
    """Calls of tools, given as JSON or as the text of it, one or several."""
    calls = _parsed(given)
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list):
        raise _odd_calls()
    return tuple(map(_read_call, calls))


def _read_call(call: Any) -> str:
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise _odd_calls()
    arguments = _parsed(inner.get("arguments", {}))
    if not isinstance(arguments, dict):
        raise _odd_calls()
    return json.dumps({"name": inner["name"], "arguments": arguments}, ensure_ascii=False)


_FIELDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "loss": ("learned", _read_loss),
    "reasoning_content": ("reasoning", _read_reasoning),
    "tool_calls": ("calls", _read_calls),
}
"""What an assistant's message may have beside its text: field of the message, and its reader."""


def _parsed(given: Any) -> Any:
    try:
        return json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return None


def _odd_calls() -> InvalidRecordError:
    return InvalidRecordError(
        'an odd call of a tool; it must be {"name", "arguments"}, in "function" or alone, with '
        "arguments that are an object"
    )
