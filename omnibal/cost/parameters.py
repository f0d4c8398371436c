"""Parameters of a model: stored, and active per token."""

from dataclasses import dataclass

from omnibal.cost.analytic import unit_on_one
from omnibal.model.config import ModelConfig
from omnibal.model.units import unit_kinds, unit_names


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParameters:
    """Parameters of a model, including encoders and multi-token prediction."""

    stored: int
    """As in a checkpoint: no vocabulary padding, a tied head counted once."""
    active: int
    """Stored parameters without inactive experts."""


def model_parameters(model: ModelConfig) -> ModelParameters:
    """Count a model's parameters by its units."""
    units = {kind.name: unit_on_one(model, kind) for kind in unit_kinds(model)}
    names, language = unit_names(model), model.language
    # Prediction layers follow the last layer and are of its kind.
    experts = [kind.experts for kind in (*language.kinds, language.kinds[-1])]
    with_experts = names[-len(experts) :]
    idle = sum(
        units[name].expert_parameters // some.experts * (some.experts - some.experts_per_token)
        for name, some in zip(with_experts, experts, strict=True)
        if some is not None
    )
    # The last stage has a copy of the embedding, as tied head and for predictions.
    matrices = 3 if language.prediction_layers and not language.tied_head else 2
    padded = matrices * language.words_of_rank(1)
    words = (1 if language.tied_head else 2) * language.vocab_size
    stored = sum(units[name].parameters for name in names)
    stored -= (padded - words) * language.hidden_size
    return ModelParameters(stored=stored, active=stored - idle)
