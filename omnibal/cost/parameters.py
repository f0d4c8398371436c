"""Parameters of a whole model: those that are stored, and those that a token passes."""

from dataclasses import dataclass

from omnibal.cost.analytic import analytic_cost
from omnibal.model.config import ModelConfig, load_cluster
from omnibal.model.layers import ExpertsConfig
from omnibal.model.parallel import Parallel
from omnibal.model.units import unit_names

_ANY_CLUSTER = "h100-80g"
"""Parameters are the same on all; the counts that have them want one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParameters:
    """Parameters of a model, encoders and layers of multi-token prediction among them."""

    stored: int
    """As in a checkpoint: without padding of the vocabulary, and a tied head once."""
    active: int
    """Stored ones but for the experts that a token is not sent to."""


def model_parameters(model: ModelConfig) -> ModelParameters:
    """Count the parameters of a model by its units."""
    units = analytic_cost(model, load_cluster(_ANY_CLUSTER), Parallel(pipeline=1), "bf16").units
    names, language = unit_names(model), model.language
    # Behind the last layer are those of predictions, which are of its kind.
    experts = [kind.experts for kind in (*language.kinds, language.kinds[-1])]
    with_experts = names[-len(experts) :]
    idle = sum(
        _idle(units[name].expert_parameters, some)
        for name, some in zip(with_experts, experts, strict=True)
    )
    # The last stage has a copy of the token embedding, as a tied head and for predictions.
    matrices = 3 if language.prediction_layers and not language.tied_head else 2
    padded = matrices * language.words_of_rank(1)
    words = (1 if language.tied_head else 2) * language.vocab_size
    stored = sum(units[name].parameters for name in names)
    stored -= (padded - words) * language.hidden_size
    return ModelParameters(stored=stored, active=stored - idle)


def _idle(parameters: int, experts: ExpertsConfig | None) -> int:
    """Parameters of a unit's experts that a token is not sent to."""
    if experts is None:
        return 0
    return parameters // experts.experts * (experts.experts - experts.experts_per_token)
