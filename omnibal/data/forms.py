"""Records of other trainers as messages: `Naming` renames a dataset's keys, `FORMS` reads them."""

import ast
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from pydantic import Field

from omnibal.base.errors import UserError
from omnibal.base.frozen import Frozen
from omnibal.data.messages import LISTS, InvalidRecordError

_PREFERENCE = "which is preference data (DPO, KTO, rewards), and answers alone are learned here"
# Keys that raise an error unless the record's form reads them, and why.
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        "chosen rejected rejected_images rejected_messages rejected_response negative_messages "
        "positive_messages kto_tag".split(),
        _PREFERENCE,
    ),
    **dict.fromkeys(
        "history chat_template_kwargs documents".split(), "by which nothing is trained"
    ),
    "objects": 'whose places each model writes in its own way; write them into "messages"',
}


class Form(NamedTuple):
    """Keys of a record without a list of messages, and the reader of its messages."""

    asked: str  # key of the question
    answered: str  # key of the answer
    more: tuple[str, ...]  # optional keys
    read: Callable[[dict[str, Any], str, str], list[dict[str, Any]]]


def _read_texts(record: dict[str, Any], asked: str, answered: str) -> list[dict[str, Any]]:
    """Return the messages of "history", then of the question (and "input") and the answer."""
    pairs = record.get("history") or []
    if isinstance(pairs, str):  # a Python literal, as in CSV files
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            pairs = ast.literal_eval(pairs)
    if not isinstance(pairs, list) or not all(_are_texts(pair, 2) for pair in pairs):
        raise InvalidRecordError('has an odd "history"; it must be a list of [question, answer]')
    question = [record[asked], (asked == "instruction" and record.get("input")) or ""]
    if not _are_texts([*question, record[answered]], 3):
        raise InvalidRecordError(f'has in "{asked}", "input" or "{answered}" what is no text')
    pairs = [*pairs, ("\n".join(filter(None, question)), record[answered])]
    roles = ("user", "assistant") * len(pairs)
    texts = (text for pair in pairs for text in pair)
    return [{"role": r, "content": text} for r, text in zip(roles, texts, strict=True)]


def _are_texts(given: Any, count: int) -> bool:
    is_list = isinstance(given, list | tuple) and len(given) == count
    return is_list and all(isinstance(item, str) for item in given)


def _read_lists(record: dict[str, Any], asked: str, answered: str) -> list[dict[str, Any]]:
    """Return the prompt's messages without loss, then the completion's, which are learned."""
    for key in (asked, answered):
        if not isinstance(record[key], list) or not all(isinstance(m, dict) for m in record[key]):
            raise InvalidRecordError(f'has in "{key}" no list of messages; give its text roles')
    unlearned = [m | {"loss": False} if m.get("role") == "assistant" else m for m in record[asked]]
    return [*unlearned, *record[answered]]


# Forms by their keys, as in the table of `docs/data.md`.
FORMS = (
    Form("query", "response", ("history",), _read_texts),  # ms-swift
    Form("instruction", "output", ("input", "history"), _read_texts),  # Alpaca
    Form("prompt", "completion", (), _read_lists),  # TRL
)


def with_messages(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with "messages" for its form's keys, if any; raises InvalidRecordError."""
    keys = {key for key, value in record.items() if value is not None}
    forms = [form for form in FORMS if form.asked in keys and not keys & LISTS.keys()]
    used = {key for form in forms for key in (form.asked, form.answered, *form.more)}
    for key in record:
        # A boolean "label" marks preference data; other labels are names.
        is_preference = key == "label" and isinstance(record[key], bool)
        if key in keys - used and (key in REFUSED or is_preference):
            raise InvalidRecordError(f'has "{key}", {REFUSED.get(key, _PREFERENCE)}; remove it')
    if not forms:
        return record
    form = forms[0]
    if len(forms) > 1:
        raise InvalidRecordError(f'has "{form.asked}" and "{forms[1].asked}"; leave one out')
    if form.answered not in keys:
        raise InvalidRecordError(f'has "{form.asked}" without "{form.answered}"; add it')
    messages = form.read(record, form.asked, form.answered)
    return {key: record[key] for key in record if key not in used} | {"messages": messages}


_ALPACA_KEYS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
}
_NAMED_COLUMNS = ("system", "tools", "images", "videos", "audios")
# LLaMA-Factory's role tags: default name of the role in records, and role here.
_TAGS = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call", "tool_call"),
    "system_tag": ("system", "system"),
}


class Naming(Frozen):
    """Key and role names of a dataset, in the terms of LLaMA-Factory."""

    formatting: Literal["alpaca", "sharegpt", "openai"] | None = None  # None: alpaca
    columns: dict[str, str] = Field(default={})  # key in the records by column
    tags: dict[str, str] = Field(default={})  # key or role in the messages by tag

    @property
    def _text_keys(self) -> dict[str, str]:
        """Keys of a record's texts by column, empty for a list of messages."""
        return _ALPACA_KEYS if self.formatting in (None, "alpaca") else {}

    def check_names(self, where: str) -> None:
        """Raise UserError, at `where`, on unknown columns or tags."""
        texts = self._text_keys or ("messages",)
        tables = (
            ("columns", self.columns, (*texts, *_NAMED_COLUMNS)),
            ("tags", self.tags, ("role_tag", "content_tag", *_TAGS)),
        )
        for table, given, names in tables:
            for name in given:
                if name not in names:
                    raise UserError(f"{where}: {table}: {name!r} must be one of {', '.join(names)}")

    def rename_keys(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return a record with standard keys and roles. Raise InvalidRecordError on absent keys."""
        renamed = dict(record)
        for column, key in self.columns.items():
            if key not in record:
                raise InvalidRecordError(f'lacks "{key}", which is named as its {column}')
            del renamed[key]
        texts = self._text_keys
        renamed |= {texts.get(column, column): record[key] for column, key in self.columns.items()}
        key = "messages" if "messages" in self.columns else "conversations"
        if isinstance(renamed.get(key), list):
            messages = renamed.pop(key)
            renamed["messages"] = [self._rename(m) if isinstance(m, dict) else m for m in messages]
        return renamed

    def _rename(self, message: dict[str, Any]) -> dict[str, Any]:
        speaker = self.tags.get("role_tag", "from")
        text = self.tags.get("content_tag", "value")
        if speaker not in message and not self.tags:
            return message  # another supported format
        roles = {self.tags.get(tag, usual): role for tag, (usual, role) in _TAGS.items()}
        others = {key: value for key, value in message.items() if key not in (speaker, text)}
        role = message.get(speaker)
        role = roles.get(role, role) if isinstance(role, str) else role
        return others | {"role": role, "content": message.get(text)}
