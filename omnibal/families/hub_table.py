"""Tables of a hub's `config.json`: every key is used, known to have no effect, or refused by name.

A table's class has a field for each key that it uses, with the default of the class that wrote such
files, which leave defaults out. Keys whose value must be one are fields of that value alone.
"""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import ConfigDict, Field, ValidationError, model_validator

from omnibal.errors import UserError
from omnibal.files import complaint
from omnibal.frozen import Numbered

T = TypeVar("T", bound="HubTable")
NoDropout = Annotated[float, Field(ge=0, le=0)]
"""Dropout of 0: what it keeps and draws is not planned for."""
_TEXT_MAKERS = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "Model")
_NAMED_WITHOUT_EFFECT = re.compile(
    # Ids of tokens, and notes of a tool that tunes models and uploads them again.
    r".*_token_(id|ids|index)|suppress_tokens|begin_suppress_tokens|unsloth_.*"
)
_WITHOUT_EFFECT = frozenset(
    # Names, versions and code.
    "architectures _name_or_path transformers_version auto_map model_type tokenizer_class "
    "_commit_hash "
    # Types of stored weights (a job's are --precision), and how they are drawn.
    "torch_dtype dtype use_bfloat16 quantization_config initializer_range "
    # Kernels and what a forward returns.
    "attn_implementation _attn_implementation _attn_implementation_autoset use_cache return_dict "
    "output_attentions output_hidden_states torchscript cache_implementation pretraining_tp "
    "chunk_size_feed_forward pruned_heads gradient_checkpointing "
    # Generation of text.
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty "
    "temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores prefix "
    "return_dict_in_generate remove_invalid_values exponential_decay_length_penalty "
    # Other tasks, and kinds of model that these classes are not.
    "id2label label2id num_labels problem_type finetuning_task task_specific_params is_decoder "
    "is_encoder_decoder add_cross_attention cross_attention_hidden_size tie_encoder_decoder "
    "tf_legacy_loss ignore_index".split()
)
"""Keys that any class of Transformers may write and that change nothing of a training step."""


def is_without_effect(key: str) -> bool:
    """Whether any class of Transformers may write a key, which changes nothing of a step."""
    return key in _WITHOUT_EFFECT or _NAMED_WITHOUT_EFFECT.fullmatch(key) is not None


class HubTable(Numbered):
    """A table of `config.json`; a key that it does not know is an error."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)
    older_names: ClassVar[Mapping[str, str]] = {}
    """Names of fields in files of other versions or of a family's own code."""
    without_effect: ClassVar[frozenset[str]] = frozenset()
    """Keys of this family that change nothing of a training step."""

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            raise ValueError("must be a table of keys and values")
        _refuse_variants(given)
        used: dict[str, Any] = {}
        for key, value in given.items():
            name = cls.older_names.get(key, key)
            if name in cls.model_fields:
                if name in used and used[name] != value:
                    raise ValueError(f"{key} and another spelling of it differ; give one of them")
                used[name] = value
            elif not cls._is_without_effect(key):
                near = get_close_matches(key, cls.model_fields, n=1, cutoff=0.8)
                hint = f" (did you mean {near[0]}?)" if near else ""
                raise ValueError(
                    f"{key} is not understood{hint}; the model must be one that its class in "
                    "Transformers describes without this key"
                )
        return used

    @classmethod
    def _is_without_effect(cls, key: str) -> bool:
        return key in cls.without_effect or is_without_effect(key)


def _refuse_variants(given: Mapping[str, Any]) -> None:
    architectures = given.get("architectures") or []
    if isinstance(architectures, list):
        for name in architectures:
            if not str(name).endswith(_TEXT_MAKERS):
                raise ValueError(
                    f"architectures has {name}, which does not generate text; it must be a "
                    "...ForCausalLM or ...ForConditionalGeneration"
                )


def as_table(kind: type[T], given: Any, where: str) -> T:
    """Check a table of a file.

    Args:
        kind: the family's table.
        given: the JSON value.
        where: file, and table in it, which begin an error's message.

    Raises:
        UserError: a key is unknown, or has a value that the family cannot have.
    """
    try:
        return kind.model_validate({} if given is None else given)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f": {part}" for part in first["loc"])
        said = complaint(first)
        shown = "" if first["type"] == "value_error" else f" (given: {first['input']!r:.80})"
        raise UserError(
            f"{where}{place}: {said}{shown}; docs/models.md says which models can be planned"
        ) from error
