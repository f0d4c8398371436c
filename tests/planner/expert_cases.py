"""Small models with mixture of experts, for tests of expert parallelism."""

from cost_cases import small_model
from plan_cases import MODEL

from omnibal.model.config import ModelConfig
from omnibal.model.layer_kinds import ExpertsConfig, LayerRun

EXPERTS = ExpertsConfig(experts=8, experts_per_token=2, ffn_hidden_size=5)


def expert_model(vision_layers: int = 2, dense_layers: int = 1, layers: int = 3) -> ModelConfig:
    """Return a small model with dense language layers, then layers with 8 experts."""
    model = small_model(vision_layers, dense_layers + layers)
    dense = (LayerRun(layers=dense_layers),) if dense_layers else ()
    return model.with_tower("language", runs=(*dense, LayerRun(layers=layers, experts=EXPERTS)))


FOUR = ExpertsConfig(experts=4, experts_per_token=2, ffn_hidden_size=64)
DIGITS = MODEL.model_copy(update={"name": "digits of experts"}).with_tower(
    "language", runs=(LayerRun(layers=1, experts=FOUR),)
)
"""The quickstart's model with 4 experts per language layer, of 3 x 96 x 64 parameters each."""
