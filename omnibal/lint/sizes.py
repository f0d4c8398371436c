"""Sizes of the language model that a launch line trains, as rules compare them."""

from collections.abc import Mapping
from dataclasses import dataclass

from omnibal.model.config import ModelConfig
from omnibal.model.layers import LinearAttention

SIZE_FLAGS: Mapping[str, str] = {
    "num-layers": "layers",
    "hidden-size": "hidden",
    "num-attention-heads": "heads",
    "num-query-groups": "query_groups",
    "num-experts": "experts",
    "num-moe-experts": "experts",
}
"""Size that a flag gives, which stands above the model's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of a language model in Megatron's words."""

    layers: int
    hidden: int
    heads: int
    query_groups: int
    """Heads of k and v; as many as heads with latent attention."""
    experts: int
    """Routed experts of a layer; 0 where there are none."""
    is_latent: bool
    linear: LinearAttention | None
    """Gated delta net of layers that have one."""
    prediction_layers: int
    """Layers of multi-token prediction that the released model has."""


def sizes_of(model: ModelConfig) -> Sizes:
    """Read the sizes that rules need of a model."""
    language = model.language
    mixtures = [kind.experts for kind in language.kinds if kind.experts is not None]
    linear = [kind.linear for kind in language.kinds if kind.linear is not None]
    is_latent = any(kind.latent is not None for kind in language.kinds)
    return Sizes(
        layers=language.layers,
        hidden=language.hidden_size,
        heads=language.heads,
        query_groups=language.heads if is_latent else language.kv_heads,
        experts=max((mixture.experts for mixture in mixtures), default=0),
        is_latent=is_latent,
        linear=linear[0] if linear else None,
        prediction_layers=language.prediction_layers,
    )
