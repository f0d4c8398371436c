"""The model as one ordered list of units, and what is counted of a micro-batch for their costs.

    for every encoder: NAME_embed, NAME_layer * layers, its projector
    then: language_embed, language_layer * layers, head

A pipeline stage is a contiguous run of this list. Units of one kind cost the same. Where there is
one encoder, its projector is called "projector", else "NAME_projector".

Layers of a native-resolution encoder may attend in windows, and some have a deepstack projector,
whose features a language layer of their own takes: they cross every cut in between, so that layers
are of as many kinds as they carry features on.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from omnibal.model.config import ModelConfig
from omnibal.model.encoders import Encoder, ImagesEncoder
from omnibal.model.layers import LayerKind
from omnibal.model.levels import Level

LANGUAGE = "language"
LANGUAGE_EMBED = "language_embed"
HEAD = "head"
EXCHANGED = "exchanged_tokens"
"""Feature of a share: tokens that its attention exchanges with the other ranks of the pack. It is
the most that any of these has of samples that are divided over several, as all wait for that."""
ENCODER_WAITS_MS = ("beside_forward_ms", "beside_backward_ms")
"""Features of a micro-batch where encoders are data-parallel: what its pipeline waits for
them before the step's first forward, and after its last backward. Both are times already."""
EXPOSED_MS = ("exposed_forward_ms", "exposed_backward_ms")
"""Features of a micro-batch where data-parallel ranks divide weights and gradients: the exchange of
these that computation does not hide, in its forward and backward. Both are times already."""
TIMES = (*ENCODER_WAITS_MS, *EXPOSED_MS)
"""Features that are no sum over samples."""


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
    is_windowed: bool = False
    """Whether positions of an encoder's layer attend within windows."""
    has_deepstack: bool = False
    """Whether a projector of its own takes an encoder layer's output to a language layer."""
    carried: int = 0
    """Deepstack features that a cut right after the unit sends on."""
    without_carried: str = ""
    """Name that it shares with kinds which differ only in what they carry; empty: its own."""
    period: int = 1
    """Number of layers after which the kinds of layer of the tower repeat."""
    places: tuple[int, ...] = (0,)
    """Layers of the first period that are of this kind."""

    def is_like(self, other: "UnitKind") -> bool:
        """Whether two kinds differ in nothing but what they carry over cuts."""
        return self.tower == other.tower and self.measured_name == other.measured_name

    @property
    def measured_name(self) -> str:
        """Name under which it is measured, with kinds that differ only in what they carry."""
        return self.without_carried or self.name

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
    return _units(model)[0]


def unit_names(model: ModelConfig) -> tuple[str, ...]:
    """List the name of every unit's kind, in model order."""
    return _units(model)[1]


def layer_names(model: ModelConfig, tower: str) -> tuple[str, ...]:
    """List the names under which a tower's layers are measured, one a layer."""
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
    """Embed and layers of an encoder; `carried` features of earlier ones cross its cuts too."""

    embed = UnitKind(name=f"{name}_embed", tower=name, part=name, is_layer=False, carried=carried)
    base = UnitKind(name=f"{name}_layer", tower=name, part=name, is_layer=True, carried=carried)
    if not isinstance(tower, ImagesEncoder):
        return [embed, *[base] * tower.layers]
    return [embed, *(_image_layer(base, tower, number) for number in range(tower.layers))]


def _image_layer(base: UnitKind, tower: ImagesEncoder, number: int) -> UnitKind:
    windowed = tower.is_windowed(number)
    deepstack = number in tower.deepstack_layers
    alike = f"{base.name}{'_window' * windowed}{'_deepstack' * deepstack}"
    carried = base.carried + sum(each <= number for each in tower.deepstack_layers)
    return replace(
        base,
        name=f"{alike}{_carrying(carried)}",
        is_windowed=windowed,
        has_deepstack=deepstack,
        carried=carried,
        without_carried=alike,
    )


def _language_units(model: ModelConfig, carried: int) -> list[UnitKind]:
    """All units of the language model, to whose first layers `carried` features go, one each."""
    kinds = model.language.kinds
    # Most layers are one object, which is described once for as many as carry nothing.
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
        # The language embed is one of its kind.
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
    """The kinds of a tower's layers, each with its places in a period; by default all layers."""
    period = period or len(layers) or 1
    if len({kind.name for kind in layers}) == 1:
        period = 1
    return [
        replace(
            kind,
            period=period,
            places=tuple(n for n, each in enumerate(layers[:period]) if each.name == name),
        )
        for name, kind in {each.name: each for each in layers}.items()
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Deepstack:
    """Features that a projector of its own makes of an encoder layer's output, for one of the first
    language layers."""

    name: str
    """Name of the features, and of the projector in the whole model: "vision_deepstack.0"."""
    tower: str
    """Name of the encoder, with which the projector is trained or frozen."""
    layer: int
    """Number of the encoder's layer, from 0."""


def deepstack_of(model: ModelConfig) -> tuple[Deepstack, ...]:
    """List a model's deepstack features in the order of the language layers that take them; of a
    language model alone those of its encoders elsewhere."""
    return tuple(
        Deepstack(name=f"{name}_deepstack.{index}", tower=name, layer=layer)
        for name, tower in (model.encoders_elsewhere | model.encoders).items()
        if isinstance(tower, ImagesEncoder)
        for index, layer in enumerate(tower.deepstack_layers)
    )


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

    One; the items of every encoder, and of images the sum of their tokens squared; tokens, and the
    sum over samples of tokens squared; for every width of attention window, what of the square is
    within it; and tokens that carry loss.
    """
    squares = dict.fromkeys(tower.squares for tower in model.encoders.values() if tower.squares)
    windows = sorted({kind.window for kind in model.language.kinds if kind.window is not None})
    windowed = (attended_feature(LayerKind(window=window)) for window in windows)
    return ("fixed", *model.item_features, *squares, "tokens", _SQUARED, *windowed, "loss_tokens")


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
