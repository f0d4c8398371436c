"""Names that a dataset's own description gives to the keys of its records (LLaMA-Factory's)."""

from typing import Any

from pydantic import Field

from omnibal.base.errors import UserError
from omnibal.base.frozen import Frozen
from omnibal.data.messages import InvalidRecordError

_COLUMNS = ("messages", "system", "tools", "images", "videos", "audios")
_ROLES = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call", "tool_call"),
    "system_tag": ("system", "system"),
}
"""Tags of roles, what they are by default, and the role that is read."""


class Naming(Frozen):
    """Keys and roles of records, by LLaMA-Factory's names for them."""

    columns: dict[str, str] = Field(default={})
    tags: dict[str, str] = Field(default={})

    def check(self, where: str) -> None:
        """Refuse names that are not known; raises UserError."""
        tables = (
            ("columns", self.columns, _COLUMNS),
            ("tags", self.tags, ("role_tag", "content_tag", *_ROLES)),
        )
        for table, given, names in tables:
            for name in given:
                if name not in names:
                    raise UserError(
                        f"{where}: {table}: has {name!r}; it must be one of {', '.join(names)}"
                    )

    def applied(self, record: dict[str, Any]) -> dict[str, Any]:
        """The record with the names that are read.

        Raises:
            InvalidRecordError: it lacks a column that is named.
        """
        renamed = dict(record)
        for column, key in self.columns.items():
            if key not in record:
                raise InvalidRecordError(f'lacks "{key}", which is named as its {column}')
            del renamed[key]
        renamed |= {column: record[key] for column, key in self.columns.items()}
        key = "messages" if "messages" in self.columns else "conversations"
        if isinstance(renamed.get(key), list):
            said = renamed.pop(key)
            renamed["messages"] = [self._message(m) if isinstance(m, dict) else m for m in said]
        return renamed

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        speaker = self.tags.get("role_tag", "from")
        text = self.tags.get("content_tag", "value")
        if speaker not in message and not self.tags:
            return message  # in another of the forms that are read
        roles = {self.tags.get(tag, usual): role for tag, (usual, role) in _ROLES.items()}
        rest = {key: value for key, value in message.items() if key not in (speaker, text)}
        role = message.get(speaker)
        role = roles.get(role, role) if isinstance(role, str) else role
        return rest | {"role": role, "content": message.get(text)}
