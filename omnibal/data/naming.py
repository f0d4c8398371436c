"""Key names from a dataset's own description (LLaMA-Factory)."""

from typing import Any

from pydantic import Field

from omnibal.base.errors import UserError
from omnibal.base.frozen import Frozen
from omnibal.data.messages import InvalidRecordError

_ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "history": "history"}
_COLUMNS = ("system", "tools", "images", "videos", "audios")
_ROLES = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call", "tool_call"),
    "system_tag": ("system", "system"),
}
"""Role tags: default tag and role."""


class Naming(Frozen):
    """LLaMA-Factory's key and role names."""

    alpaca: bool = Field(default=False, exclude=True)
    """Whether columns have Alpaca's names."""
    columns: dict[str, str] = Field(default={})
    tags: dict[str, str] = Field(default={})

    def check(self, where: str) -> None:
        """Raise UserError on unknown names."""
        own = _ALPACA if self.alpaca else ("messages",)
        tables = (
            ("columns", self.columns, (*own, *_COLUMNS)),
            ("tags", self.tags, ("role_tag", "content_tag", *_ROLES)),
        )
        for table, given, names in tables:
            for name in given:
                if name not in names:
                    raise UserError(
                        f"{where}: {table}: has {name!r}; it must be one of {', '.join(names)}"
                    )

    def applied(self, record: dict[str, Any]) -> dict[str, Any]:
        """Record with standard names; raises InvalidRecordError if a named column is missing."""
        renamed = dict(record)
        for column, key in self.columns.items():
            if key not in record:
                raise InvalidRecordError(f'lacks "{key}", which is named as its {column}')
            del renamed[key]
        names = _ALPACA if self.alpaca else {}
        renamed |= {names.get(column, column): record[key] for column, key in self.columns.items()}
        key = "messages" if "messages" in self.columns else "conversations"
        if isinstance(renamed.get(key), list):
            said = renamed.pop(key)
            renamed["messages"] = [self._message(m) if isinstance(m, dict) else m for m in said]
        return renamed

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        speaker = self.tags.get("role_tag", "from")
        text = self.tags.get("content_tag", "value")
        if speaker not in message and not self.tags:
            return message  # another supported format
        roles = {self.tags.get(tag, usual): role for tag, (usual, role) in _ROLES.items()}
        rest = {key: value for key, value in message.items() if key not in (speaker, text)}
        role = message.get(speaker)
        role = roles.get(role, role) if isinstance(role, str) else role
        return rest | {"role": role, "content": message.get(text)}
