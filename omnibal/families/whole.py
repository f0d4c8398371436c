"""The outer table of a vision-language model, and the model that its two inner ones make."""

from pathlib import Path
from typing import Any, ClassVar, Protocol

from omnibal.config import LanguageConfig, ModelConfig
from omnibal.encoders import Encoder
from omnibal.families.hub_table import HubTable


class WholeTable(HubTable):
    """Outer table: those of the language model and the tower, and whether the head is tied."""

    tied_by_default: ClassVar[bool] = False
    inner_ties_too: ClassVar[bool] = False
    """Whether Transformers ties heads where only the inner table says so, despite the outer one."""

    text_config: dict[str, Any] | None = None
    vision_config: dict[str, Any] | None = None
    tie_word_embeddings: bool | None = None


class TextLike(Protocol):
    """Table of a language model."""

    @property
    def hidden_size(self) -> int:
        """Width of a token."""

    def is_tied(self, outer: bool | None = None, *, by_default: bool = False) -> bool:
        """Whether the head is the token embedding."""

    def language(self, *, tied_head: bool) -> LanguageConfig:
        """The language model that the table describes."""


def vision_language(
    name: str,
    whole: WholeTable,
    text: TextLike,
    encoder: Encoder,
    output_size: int,
) -> ModelConfig:
    """Put a model of one tower and a language model together.

    Args:
        output_size: width that the projector makes, by the tower's table.

    Raises:
        ValueError: the projector does not make what the language model takes.
    """
    if output_size != text.hidden_size:
        raise ValueError(
            f"the projector makes tokens of width {output_size}, and the language model takes "
            f"hidden_size {text.hidden_size}; both must be alike"
        )
    tied = text.is_tied(whole.tie_word_embeddings, by_default=whole.tied_by_default)
    tied = tied or (whole.inner_ties_too and text.is_tied())
    language = text.language(tied_head=tied)
    return family_model(name, language, {"vision": encoder})


def family_model(
    name: str, language: LanguageConfig, encoders: dict[str, Encoder] | None = None
) -> ModelConfig:
    """A model whose conversations are written by the template that comes with its tokenizer."""
    return ModelConfig(
        name=name, encoders=encoders or {}, language=language, chat_template="tokenizer"
    )


def inner(path: Path, table: str) -> str:
    """What begins a message about an inner table."""
    return f"{path}: {table}"
