"""Outer table of a vision-language model."""

from pathlib import Path
from typing import Any, ClassVar, TypeVar

from omnibal.families.hub_table import HubTable, as_table
from omnibal.families.text import TextTable
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import Encoder

Vision = TypeVar("Vision", bound=HubTable)
Text = TypeVar("Text", bound=TextTable)
Whole = TypeVar("Whole", bound="WholeTable")


class WholeTable(HubTable):
    """Outer table with language model, tower and head tying."""

    without_effect: ClassVar[frozenset[str]] = frozenset(
        # The language model's table has the vocabulary size.
        {"vocab_size", "language_model_only"}
    )

    text_config: dict[str, Any] | None = None
    vision_config: dict[str, Any] | None = None
    tie_word_embeddings: bool | None = None


def read_whole(
    kind: type[Whole], vision: type[Vision], text: type[Text], given: dict[str, Any], path: Path
) -> tuple[Whole, Vision, Text]:
    """Read the outer table of a file, and its tower and language tables."""
    whole = as_table(kind, given, str(path))
    tower = as_table(vision, whole.vision_config, f"{path}: vision_config")
    return whole, tower, as_table(text, whole.text_config, f"{path}: text_config")


def vision_language(
    name: str, whole: WholeTable, text: TextTable, encoder: Encoder, output_size: int
) -> ModelConfig:
    """Combine a tower and a language model.

    Args:
        output_size: projector output width, by the tower's table.
    """
    if output_size != text.hidden_size:
        raise ValueError(
            f"the projector makes tokens of width {output_size}, and the language model takes "
            f"hidden_size {text.hidden_size}; both must be alike"
        )
    language = text.language(tied_head=text.is_tied(whole.tie_word_embeddings))
    return ModelConfig(
        name=name, encoders={"vision": encoder}, language=language, chat_template="tokenizer"
    )
