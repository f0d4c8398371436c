"""The model as one ordered list of units, and what is counted of a micro-batch for their costs.

    for every encoder: NAME_embed, NAME_layer * layers, its projector
    then: language_embed, language_layer * layers, head

A pipeline stage is a contiguous run of this list. Units of one kind cost the same. Where there is
one encoder, its projector is called "projector", else "NAME_projector".
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from omnibal.config import ModelConfig
from omnibal.layers import LayerKind
from omnibal.levels import Level

LANGUAGE = "language"
LANGUAGE_EMBED = "language_embed"
HEAD = "head"
EXCHANGED = "exchanged_tokens"
"""Feature of a share: tokens that its attention exchanges with the other ranks of the pack. It is
the most that any of these has of samples that are divided over several, as all wait for that."""
BESIDE_MS = ("beside_forward_ms", "beside_backward_ms")
"""Features of a micro-batch where encoders stand beside the pipeline: what its pipeline waits for
them before the step's first forward, and after its last backward. Both are times already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitKind:
    """Kind of unit that a pipeline stage may hold."""

    name: str
    """Name of the kind, such as "vision_layer"."""
    tower: str
    """Name of the encoder, or "language"."""
    part: str
    """Part of the model that is trained or frozen as a whole: a tower, or a projector."""
    is_layer: bool
    """Whether it is a transformer layer, which can be recomputed."""
    layer: LayerKind | None = None
    """Attention and feed-forward of a language layer; None for all other kinds."""
    period: int = 1
    """Number of layers after which the kinds of layer of the tower repeat."""
    places: tuple[int, ...] = (0,)
    """Layers of the first period that are of this kind."""

    @property
    def is_embed(self) -> bool:
        """Whether it is the first unit of its tower."""
        return self.name == f"{self.tower}_embed"

    @property
    def is_projector(self) -> bool:
        """Whether it is the last unit of an encoder, a part of its own."""
        return self.name == self.part

    @property
    def words(self) -> str:
        """Name of a unit that is not a layer, in words: "vision embed", "projector", "head"."""
        first, _, last = self.name.rpartition("_")
        return f"{first} {last}".strip()

    def has_layer(self, number: int) -> bool:
        """Whether the layer of this number within the tower is of this kind."""
        return self.is_layer and number % self.period in self.places


def unit_kinds(model: ModelConfig) -> tuple[UnitKind, ...]:
    """List the kinds of unit that the model has, in the order in which they first occur."""
    kinds = []
    for name in model.encoders:
        part = projector_name(model, name)
        kinds += [
            UnitKind(name=f"{name}_embed", tower=name, part=name, is_layer=False),
            UnitKind(name=f"{name}_layer", tower=name, part=name, is_layer=True),
            UnitKind(name=part, tower=name, part=part, is_layer=False),
        ]
    kinds.append(_language_kind(LANGUAGE_EMBED))
    layers = model.language.kinds
    period = sum(run.layers for run in model.language.runs) or 1
    for layer in dict.fromkeys(layers):
        places = tuple(n for n, kind in enumerate(layers[:period]) if kind == layer)
        kinds.append(_language_kind(layer.name, layer=layer, period=period, places=places))
    kinds.append(_language_kind(HEAD))
    return tuple(kinds)


def _language_kind(
    name: str,
    *,
    layer: LayerKind | None = None,
    period: int = 1,
    places: tuple[int, ...] = (0,),
) -> UnitKind:
    return UnitKind(
        name=name,
        tower=LANGUAGE,
        part=LANGUAGE,
        is_layer=layer is not None,
        layer=layer,
        period=period,
        places=places,
    )


def unit_names(model: ModelConfig) -> tuple[str, ...]:
    """List the name of every unit's kind, in model order."""
    names: list[str] = []
    for name, tower in model.encoders.items():
        names += [f"{name}_embed", *[f"{name}_layer"] * tower.layers, projector_name(model, name)]
    return (*names, LANGUAGE_EMBED, *(kind.name for kind in model.language.kinds), HEAD)


def projector_name(model: ModelConfig, encoder: str) -> str:
    """Name of an encoder's projector, which is also the part that is trained or frozen."""
    return "projector" if len(model.encoders) == 1 else f"{encoder}_projector"


def projector_unit(model: ModelConfig, encoder: str) -> str:
    """Name of an encoder's projector among the units of a stage, in words."""
    return projector_name(model, encoder).replace("_", " ")


def model_parts(model: ModelConfig) -> tuple[str, ...]:
    """List the parts that are trained or frozen as a whole, in model order."""
    return tuple(dict.fromkeys(kind.part for kind in unit_kinds(model)))


def frozen_mistake(model: ModelConfig, frozen: Collection[str]) -> str | None:
    """Error message for a choice of parts that are not trained; None if it is valid."""
    parts = model_parts(model)
    unknown = sorted(set(frozen) - set(parts))
    if unknown:
        return (
            f"frozen names {', '.join(unknown)}, which {model.name} does not have; it may name "
            f"{', '.join(parts)}: correct it or leave it out"
        )
    if len(set(frozen)) == len(frozen) < len(parts):
        return None
    return (
        f"frozen names {', '.join(frozen)}; it must name each part at most once and leave one to "
        "train: leave one out"
    )


def feature_names(model: ModelConfig) -> tuple[str, ...]:
    """List the features of a micro-batch that the times and memory of units are linear in.

    One; the items of every encoder; tokens, and the sum over samples of tokens squared; for every
    width of attention window, what of the square is within it; and tokens that carry loss.
    """
    windows = sorted({kind.window for kind in model.language.kinds if kind.window is not None})
    windowed = (attended_feature(LayerKind(window=window)) for window in windows)
    return ("fixed", *model.item_features, "tokens", _SQUARED, *windowed, "loss_tokens")


def feature_names_at(features: Sequence[str], levels: Sequence[Level]) -> tuple[str, ...]:
    """List the features of shares: a model's, and one more where any level's packs are shared."""
    shared = any(level.context > 1 for level in levels)
    return (*features, EXCHANGED) if shared else tuple(features)


_SQUARED, _WINDOWED = "squared_tokens", "squared_tokens_window"


def attended_feature(layer: LayerKind) -> str:
    """Name of the feature that attention of a language layer costs: twice what it sees.

    Of a sample of t tokens that is t^2, or t^2 - max(t - window, 0)^2 within a window.
    """
    return _SQUARED if layer.window is None else f"{_WINDOWED}{layer.window}"


def window_of_feature(name: str) -> int | None:
    """Width of the attention window that a feature is of; None for all other features."""
    return int(name.removeprefix(_WINDOWED)) if name.startswith(_WINDOWED) else None
