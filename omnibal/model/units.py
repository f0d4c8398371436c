"""The model as an ordered list of units, and the features that their costs depend on.

    for every encoder: NAME_embed, NAME_layer * layers, its projector
    then: language_embed, language_layer * layers, head

A stage is a contiguous run of units; units of one kind cost the same. A single encoder's projector
is "projector", else "NAME_projector". Deepstack features cross every cut up to their language
layer, so layers have one kind per number of carried features.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from omnibal.model.config import ModelConfig
from omnibal.model.encoders import Encoder, ImagesEncoder
from omnibal.model.layer_kinds import LayerKind
from omnibal.model.levels import Level

LANGUAGE = "language"
LANGUAGE_EMBED = "language_embed"
HEAD = "head"
EXCHANGED = "exchanged_tokens"
"""Feature of a share: tokens exchanged by attention, the maximum over the pack's ranks."""
ENCODER_WAITS_MS = ("beside_forward_ms", "beside_backward_ms")
"""Waits for data-parallel encoders before the first forward and after the last backward."""
EXPOSED_MS = ("exposed_forward_ms", "exposed_backward_ms")
"""Features with sharded weights: exposed exchange in forward and backward, as times."""


def host_features(layer: str) -> tuple[str, str]:
    """Features of a kind of layer: waits for the host in forward and backward, as times."""
    return f"host_forward_ms:{layer}", f"host_backward_ms:{layer}"


def is_time(feature: str) -> bool:
    """Whether a feature is a time, and no sum over samples."""
    return feature.partition(":")[0].endswith("_ms")


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitKind:
    """Kind of unit that a pipeline stage may hold."""

    name: str  # name of the kind, such as "vision_layer"
    tower: str  # name of the encoder, or "language"
    part: str  # part trained or frozen as a unit: a tower or a projector
    is_layer: bool  # whether it is a transformer layer, which can be recomputed
    layer: LayerKind | None = None  # attention and feed-forward of a language layer, else None
    is_windowed: bool = False  # whether an encoder layer attends within windows
    has_deepstack: bool = False  # whether a deepstack projector takes an encoder layer's output
    carried: int = 0  # deepstack features sent over a cut after the unit
    without_carried: str = ""  # name shared by kinds that differ only in `carried`, empty: its own
    period: int = 1  # period of the tower's layer kinds
    places: tuple[int, ...] = (0,)  # layers of the first period with this kind

    def is_like(self, other: "UnitKind") -> bool:
        """Whether two kinds differ only in `carried`."""
        return self.tower == other.tower and self.measured_name == other.measured_name

    @property
    def measured_name(self) -> str:
        """Name for measurements, shared by kinds that differ only in `carried`."""
        return self.without_carried or self.name

    @property
    def is_embed(self) -> bool:
        """Whether it is the first unit of its tower."""
        return self.name == f"{self.tower}_embed"

    @property
    def is_projector(self) -> bool:
        """Whether it is an encoder's projector."""
        return self.name == self.part

    @property
    def words(self) -> str:
        """Name of a non-layer unit in words: "vision embed", "projector", "head"."""
        first, _, last = self.name.rpartition("_")
        return f"{first} {last}".strip()

    def has_layer(self, number: int) -> bool:
        """Whether layer `number` of the tower is of this kind."""
        return self.is_layer and number % self.period in self.places


def unit_kinds(model: ModelConfig) -> tuple[UnitKind, ...]:
    """List the model's unit kinds in order of first occurrence."""
    return _units(model)[0]


def unit_names(model: ModelConfig) -> tuple[str, ...]:
    """List every unit's kind name, in model order."""
    return _units(model)[1]


def layer_names(model: ModelConfig, tower: str) -> tuple[str, ...]:
    """List the measured name of every layer of a tower."""
    kinds = {kind.name: kind for kind in unit_kinds(model)}
    units = (kinds[name] for name in unit_names(model))
    return tuple(unit.measured_name for unit in units if unit.tower == tower and unit.is_layer)


def _units(model: ModelConfig) -> tuple[tuple[UnitKind, ...], tuple[str, ...]]:
    kinds: dict[str, UnitKind] = {}
    names: list[str] = []
    carried = sum(each.deepstack_features for each in model.encoders_elsewhere.values())
    for name, tower in model.encoders.items():
        part = projector_name(model, name)
        embed, *layers = _encoder_units(name, tower, carried)
        carried = layers[-1].carried if layers else carried
        projector = UnitKind(name=part, tower=name, part=part, is_layer=False, carried=carried)
        each = [embed, *layers, projector]
        kinds |= {kind.name: kind for kind in (embed, *_with_places(layers), projector)}
        names += [kind.name for kind in each]
    embed, *layers, head = _language_units(model, carried)
    period = None if carried else sum(run.layers for run in model.language.runs) or 1
    kinds |= {kind.name: kind for kind in (embed, *_with_places(layers, period), head)}
    names += [kind.name for kind in (embed, *layers, head)]
    return tuple(kinds.values()), tuple(names)


def _encoder_units(name: str, tower: Encoder, carried: int) -> list[UnitKind]:
    """Embed and layers of an encoder; `carried` features of earlier encoders cross its cuts."""

    embed = UnitKind(name=f"{name}_embed", tower=name, part=name, is_layer=False, carried=carried)
    base = UnitKind(name=f"{name}_layer", tower=name, part=name, is_layer=True, carried=carried)
    if not isinstance(tower, ImagesEncoder):
        return [embed, *[base] * tower.layers]
    return [embed, *(_image_layer(base, tower, number) for number in range(tower.layers))]


def _image_layer(base: UnitKind, tower: ImagesEncoder, number: int) -> UnitKind:
    windowed = tower.is_windowed(number)
    deepstack = number in tower.deepstack_layers
    alike = f"{base.name}{'_window' * windowed}{'_deepstack' * deepstack}"
    carried = base.carried + sum(layer <= number for layer in tower.deepstack_layers)
    return replace(
        base,
        name=f"{alike}{_carrying(carried)}",
        is_windowed=windowed,
        has_deepstack=deepstack,
        carried=carried,
        without_carried=alike,
    )


def _language_units(model: ModelConfig, carried: int) -> list[UnitKind]:
    """Units of the language model. The first `carried` layers take a deepstack feature each."""
    kinds = model.language.kinds
    # Layers without carried features share one object.
    alike = {id(layer): _language_kind(layer.name, layer=layer) for layer in kinds}
    carrying = [
        _language_kind(layer.name, layer=layer, carried=carried - 1 - number)
        for number, layer in enumerate(kinds[: max(carried - 1, 0)])
    ]
    embed = _language_kind(LANGUAGE_EMBED, carried=carried)
    others = [alike[id(layer)] for layer in kinds[len(carrying) :]]
    return [embed, *carrying, *others, _language_kind(HEAD)]


def _language_kind(name: str, *, layer: LayerKind | None = None, carried: int = 0) -> UnitKind:
    return UnitKind(
        # There is one language embed.
        name=f"{name}{_carrying(carried if layer else 0)}",
        tower=LANGUAGE,
        part=LANGUAGE,
        is_layer=layer is not None,
        layer=layer,
        carried=carried,
        without_carried=name,
    )


def _carrying(features: int) -> str:
    return f"_carrying{features}" if features else ""


def _with_places(layers: Sequence[UnitKind], period: int | None = None) -> list[UnitKind]:
    """Kinds of a tower's layers with their places in a period (default: all layers)."""
    period = period or len(layers) or 1
    if len({kind.name for kind in layers}) == 1:
        period = 1
    return [
        replace(
            kind,
            period=period,
            places=tuple(n for n, layer in enumerate(layers[:period]) if layer.name == name),
        )
        for name, kind in {layer.name: layer for layer in layers}.items()
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Deepstack:
    """Output of a deepstack projector, from an encoder layer to an early language layer."""

    name: str  # name of the features and of the projector: "vision_deepstack.0"
    tower: str  # name of the encoder, which is trained or frozen with the projector
    layer: int  # encoder layer number, from 0


def deepstack_of(model: ModelConfig) -> tuple[Deepstack, ...]:
    """List a model's (or separate language model's) deepstack features by consuming layer."""
    return tuple(
        Deepstack(name=f"{name}_deepstack.{index}", tower=name, layer=layer)
        for name, tower in (model.encoders_elsewhere | model.encoders).items()
        if isinstance(tower, ImagesEncoder)
        for index, layer in enumerate(tower.deepstack_layers)
    )


def projector_name(model: ModelConfig, encoder: str) -> str:
    """Name of an encoder's projector, also as a trained or frozen part."""
    return "projector" if len(model.encoders) == 1 else f"{encoder}_projector"


def projector_unit(model: ModelConfig, encoder: str) -> str:
    """Name of an encoder's projector among a stage's units, in words."""
    return projector_name(model, encoder).replace("_", " ")


def model_parts(model: ModelConfig) -> tuple[str, ...]:
    """List the parts that can be frozen, in model order."""
    return tuple(dict.fromkeys(kind.part for kind in unit_kinds(model)))


def frozen_mistake(model: ModelConfig, frozen: Collection[str]) -> str | None:
    """Error message for an invalid choice of frozen parts, else None."""
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
    """List the micro-batch features that unit times and memory are linear in.

    One; items of every encoder, for images also squared tokens; tokens and squared sample tokens;
    attended pairs per attention window; tokens with loss.
    """
    squares = dict.fromkeys(tower.squares for tower in model.encoders.values() if tower.squares)
    windows = sorted({kind.window for kind in model.language.kinds if kind.window is not None})
    windowed = (attended_feature(LayerKind(window=window)) for window in windows)
    return ("fixed", *model.item_features, *squares, "tokens", _SQUARED, *windowed, "loss_tokens")


def feature_names_at(features: Sequence[str], levels: Sequence[Level]) -> tuple[str, ...]:
    """List the features of shares: the model's, plus exchanged tokens if any level shares packs."""
    shared = any(level.context > 1 for level in levels)
    return (*features, EXCHANGED) if shared else tuple(features)


_SQUARED, _WINDOWED = "squared_tokens", "squared_tokens_window"


def attended_feature(layer: LayerKind) -> str:
    """Name of a layer's attention feature: t^2 - max(t - window, 0)^2 per sample."""
    return _SQUARED if layer.window is None else f"{_WINDOWED}{layer.window}"


def window_of_feature(name: str) -> int | None:
    """Attention window width of a feature, None for other features."""
    return int(name.removeprefix(_WINDOWED)) if name.startswith(_WINDOWED) else None
