"""GPT-OSS, and GPT-2, MPT and Nemotron-4 by `plain.toml`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt

from omnibal.base.errors import UserError
from omnibal.base.files import read_toml_model
from omnibal.base.frozen import Frozen
from omnibal.families.hub_table import as_table
from omnibal.families.text import LayeredText, TextTable, runs_of
from omnibal.model.config import LanguageConfig, ModelConfig
from omnibal.model.layers import ExpertsConfig, LayerKind


class _Family(Frozen):
    names: dict[str, str]
    must: dict[str, list[Any]]
    ignored: list[str]
    parts: dict[str, Any]
    tied: bool = False


_FAMILIES = read_toml_model(
    dict[str, _Family], Path(__file__).with_name("plain.toml"), "install omnibal again"
)


class PlainText(TextTable):
    """Table of a dense model, in the names of newer ones."""

    intermediate_size: PositiveInt | None = None
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    rms_norm_eps: PositiveFloat = 1e-5

    def language(self, *, tied_head: bool, **parts: Any) -> LanguageConfig:
        """Return the language model of the table, with `parts` of its family."""
        usual = self.hidden_size / self.num_attention_heads
        sizes = {
            "kv_heads": self.num_key_value_heads or self.num_attention_heads,
            "head_size": None if self.head_dim in (None, usual) else self.head_dim,
            "ffn_hidden_size": self.intermediate_size or 4 * self.hidden_size,
        }
        return LanguageConfig(**self.common_fields, tied_head=tied_head, **sizes | parts)


def read_plain(given: dict[str, Any], name: str, path: Path) -> ModelConfig:
    """Read a file of a family of `plain.toml`."""
    family = _FAMILIES[given["model_type"]]
    attention = given.get("attn_config")  # a table of MPT
    given = given | attention if isinstance(attention, dict) else given
    for key, values in family.must.items():
        if given.get(key, values[0]) not in values:
            raise UserError(f"{path}: {key} {given[key]!r} must be one of {values}")
    unread = {*family.must, *family.ignored}
    read = {family.names.get(key, key): given[key] for key in given.keys() - unread}
    table = as_table(PlainText, read, str(path))
    tied = family.tied if table.tie_word_embeddings is None else table.tie_word_embeddings
    return ModelConfig(
        name=name,
        language=table.language(tied_head=tied, **family.parts),
        chat_template=table.chat_template,
    )


class GptOssText(PlainText, LayeredText):
    """Table of GPT-OSS: experts in all layers, windows in every other one."""

    older_names: ClassVar[Mapping[str, str]] = {"experts_per_token": "num_experts_per_tok"}
    without_effect: ClassVar[frozenset[str]] = TextTable.without_effect | {
        *("initial_context_length", "swiglu_alpha", "swiglu_limit", "router_aux_loss_coef")
    }

    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[True] = True
    intermediate_size: PositiveInt
    num_local_experts: PositiveInt
    num_experts_per_tok: PositiveInt
    output_router_logits: Literal[False] = False
    sliding_window: PositiveInt = 128
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] | None = None

    def language(self, *, tied_head: bool, **parts: Any) -> LanguageConfig:
        """Return the language model of the table."""
        experts = ExpertsConfig(
            experts=self.num_local_experts,
            experts_per_token=self.num_experts_per_tok,
            ffn_hidden_size=self.intermediate_size,
        )
        windows = (None if full else self.sliding_window for full in self.full_layers(2))
        runs = runs_of([LayerKind(window=window, experts=experts) for window in windows])
        return super().language(tied_head=tied_head, bias=True, sinks=True, runs=runs, **parts)
