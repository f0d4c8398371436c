"""The outer table of a vision-language model, and the model that its two inner ones make."""

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
    """Outer table: those of the language model and the tower, and whether the head is tied."""

    without_effect: ClassVar[frozenset[str]] = frozenset(
        # The language model's table says how many words there are.
        {"vocab_size", "language_model_only"}
    )

    text_config: dict[str, Any] | None = None
    vision_config: dict[str, Any] | None = None
    tie_word_embeddings: bool | None = None


def read_whole(
    kind: type[Whole],
    vision: type[Vision],
    text: type[Text],
    given: dict[str, Any],
    path: Path,
) -> tuple[Whole, Vision, Text]:
    """Read the outer table of a file, and the tables of the tower and the language model in it."""
    whole = as_table(kind, given, str(path))
    tower = as_table(vision, whole.vision_config, f"{path}: vision_config")
    return whole, tower, as_table(text, whole.text_config, f"{path}: text_config")


def vision_language(
    name: str, whole: WholeTable, text: TextTable, encoder: Encoder, output_size: int
) -> ModelConfig:
    """Put a model of one tower and a language model together.

    Args:
        output_size: width that the projector makes, by the tower's table.
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
