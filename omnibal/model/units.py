"""The model as a list of units, and the features that unit costs are linear in.

    for every encoder: NAME_embed, NAME_layer * layers, its projector
    then: language_embed, language_layer * layers, head

A stage is a contiguous run of units; units of a kind cost the same. A single encoder's projector is
"projector", else "NAME_projector". Stages pass deepstack features on up to their language layer, so
a layer has a kind per number of carried features.
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
EXCHANGED = "exchanged_tokens"  # by attention of a shared pack: max over its ranks
# Features: waits for data-parallel encoders before the first forward, after the last backward.
ENCODER_WAITS_MS = ("encoders_forward_ms", "encoders_backward_ms")
# Features: exchange of sharded weights that forward and backward do not hide.
EXPOSED_MS = ("exposed_forward_ms", "exposed_backward_ms")


def host_features(layer: str) -> tuple[str, str]:
    """Return the features of a layer kind's waits for kernel launches, forward and backward."""
    return f"host_forward_ms:{layer}", f"host_backward_ms:{layer}"


def is_time(feature: str) -> bool:
    """Return whether a feature is a time, not a sum over samples."""
    return feature.partition(":")[0].endswith("_ms")


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitKind:
    """Kind of unit of a pipeline stage."""

    name: str  # such as "vision_layer"
    tower: str  # name of the encoder, or "language"
    part: str  # trained or frozen as a whole: a tower or a projector
    is_layer: bool  # a transformer layer, which can be recomputed
    layer: LayerKind | None = None  # of a language layer
    is_windowed: bool = False  # encoder layer with window attention
    has_deepstack: bool = False  # encoder layer with a deepstack projector
    carried: int = 0  # deepstack features that a cut after the unit sends on
    without_carried: str = ""  # name shared by kinds that differ only in `carried`; "": `name`
    period: int = 1  # of the tower's layer kinds
    places: tuple[int, ...] = (0,)  # layers of the first period with this kind

    def is_like(self, other: "UnitKind") -> bool:
        """Return whether two kinds differ at most in `carried`."""
        return self.tower == other.tower and self.measured_name == other.measured_name

    @property
    def measured_name(self) -> str:
        """Name in a profile, shared by kinds that differ only in `carried`."""
        return self.without_carried or self.name

    @property
    def is_embed(self) -> bool:
        return self.name == f"{self.tower}_embed"

    @property
    def is_projector(self) -> bool:
        return self.name == self.part

    @property
    def plan_name(self) -> str:
        """Name in plan.json, except of layers: "vision embed", "projector", "head"."""
        first, _, last = self.name.rpartition("_")
        return f"{first} {last}".strip()

    def has_layer(self, number: int) -> bool:
        """Return whether layer `number` of the tower is of this kind."""
        return self.is_layer and number % self.period in self.places


def unit_kinds(model: ModelConfig) -> tuple[UnitKind, ...]:
    """Return the model's unit kinds in order of first occurrence."""
    return _kinds_and_names(model)[0]


def unit_names(model: ModelConfig) -> tuple[str, ...]:
    """Return the kind name of every unit, in model order."""
    return _kinds_and_names(model)[1]


def _kinds_and_names(model: ModelConfig) -> tuple[tuple[UnitKind, ...], tuple[str, ...]]:
    """Return all kinds, and every unit's kind name."""
    units: list[UnitKind] = []
    carried = sum(tower.deepstack_features for tower in model.encoders_elsewhere.values())
    for name, tower in model.encoders.items():
        part = projector_name(model, name)
        embed, *layers = _encoder_kinds(name, tower, carried)
        carried = layers[-1].carried if layers else carried
        projector = UnitKind(name=part, tower=name, part=part, is_layer=False, carried=carried)
        units += (embed, *_with_places(layers), projector)
    embed, *layers, head = _language_units(model, carried)
    # Carried features make the first layers differ, so their kinds have no period.
    period = None if carried else sum(run.layers for run in model.language.runs) or 1
    units += (embed, *_with_places(layers, period), head)
    kinds = {unit.name: unit for unit in units}
    return tuple(kinds.values()), tuple(unit.name for unit in units)


def _encoder_kinds(name: str, tower: Encoder, carried: int) -> list[UnitKind]:
    """Return embed and layers of an encoder; its cuts send on `carried` features of others."""
    embed = UnitKind(name=f"{name}_embed", tower=name, part=name, is_layer=False, carried=carried)
    base = UnitKind(name=f"{name}_layer", tower=name, part=name, is_layer=True, carried=carried)
    if not isinstance(tower, ImagesEncoder):
        return [embed, *[base] * tower.layers]
    return [embed, *(_image_layer(base, tower, number) for number in range(tower.layers))]


def _image_layer(base: UnitKind, tower: ImagesEncoder, number: int) -> UnitKind:
    windowed = tower.is_windowed(number)
    deepstack = number in tower.deepstack_layers
    name = f"{base.name}{'_window' * windowed}{'_deepstack' * deepstack}"
    carried = base.carried + sum(layer <= number for layer in tower.deepstack_layers)
    return replace(
        base,
        name=f"{name}{_carried_suffix(carried)}",
        is_windowed=windowed,
        has_deepstack=deepstack,
        carried=carried,
        without_carried=name,
    )


def _language_units(model: ModelConfig, carried: int) -> list[UnitKind]:
    kinds = model.language.kinds
    # Layers of a kind share an object: models have up to 1,000 layers, and are listed often.
    plain = {id(layer): _language_kind(layer.name, layer=layer) for layer in kinds}
    # Layer i takes deepstack feature i; a cut behind it sends on the others.
    carrying = [
        _language_kind(layer.name, layer=layer, carried=carried - 1 - number)
        for number, layer in enumerate(kinds[: max(carried - 1, 0)])
    ]
    embed = _language_kind(LANGUAGE_EMBED, carried=carried)
    others = [plain[id(layer)] for layer in kinds[len(carrying) :]]
    return [embed, *carrying, *others, _language_kind(HEAD)]


def _language_kind(name: str, *, layer: LayerKind | None = None, carried: int = 0) -> UnitKind:
    return UnitKind(
        # The only embed needs no suffix.
        name=f"{name}{_carried_suffix(carried if layer else 0)}",
        tower=LANGUAGE,
        part=LANGUAGE,
        is_layer=layer is not None,
        layer=layer,
        carried=carried,
        without_carried=name,
    )


def _carried_suffix(features: int) -> str:
    return f"_carrying{features}" if features else ""


def _with_places(layers: Sequence[UnitKind], period: int | None = None) -> list[UnitKind]:
    """Return a tower's layers with their kinds' places in a period (default: all layers)."""
    kinds = {layer.name: layer for layer in layers}
    period = 1 if len(kinds) == 1 else period or len(layers) or 1
    places: dict[str, tuple[int, ...]] = dict.fromkeys(kinds, ())
    for number, layer in enumerate(layers[:period]):
        places[layer.name] += (number,)
    placed = {n: replace(kinds[n], period=period, places=places[n]) for n in kinds}
    return [placed[layer.name] for layer in layers]


@dataclass(frozen=True, kw_only=True, slots=True)
class Deepstack:
    """Output of an encoder layer's deepstack projector, added in an early language layer."""

    name: str  # of the features and the projector: "vision_deepstack.0"
    tower: str  # encoder that is trained or frozen with the projector
    layer: int  # of the encoder, from 0


def deepstack_of(model: ModelConfig) -> tuple[Deepstack, ...]:
    """Return the deepstack features by consuming language layer, of encoders elsewhere too."""
    return tuple(
        Deepstack(name=f"{name}_deepstack.{index}", tower=name, layer=layer)
        for name, tower in (model.encoders_elsewhere | model.encoders).items()
        if isinstance(tower, ImagesEncoder)
        for index, layer in enumerate(tower.deepstack_layers)
    )


def projector_name(model: ModelConfig, encoder: str) -> str:
    """Return the name of an encoder's projector, as unit kind and part."""
    return "projector" if len(model.encoders) == 1 else f"{encoder}_projector"


def projector_unit(model: ModelConfig, encoder: str) -> str:
    """Return the name of an encoder's projector in plan.json."""
    return projector_name(model, encoder).replace("_", " ")


def model_parts(model: ModelConfig) -> tuple[str, ...]:
    """Return the names of the parts that can be frozen, in model order."""
    return tuple(dict.fromkeys(kind.part for kind in unit_kinds(model)))


def frozen_mistake(model: ModelConfig, frozen: Collection[str]) -> str | None:
    """Return an error message for an invalid choice of frozen parts, else None."""
    parts = model_parts(model)
    unknown = sorted(set(frozen) - set(parts))
    if unknown:
        known = f"{model.name} has only the parts {', '.join(parts)}"
        return f"frozen names {', '.join(unknown)}, and {known}"
    if len(set(frozen)) == len(frozen) < len(parts):
        return None
    named = ", ".join(frozen)
    return f"frozen names {named}; name each part at most once and leave a part to train"


def feature_names(model: ModelConfig) -> tuple[str, ...]:
    """Return the micro-batch features that unit times and memory are linear in.

    In order: the constant 1; items of every encoder; squared items of encoders with `squares`;
    tokens; squared tokens of samples; attended pairs per window size; tokens with loss.
    """
    squares = dict.fromkeys(tower.squares for tower in model.encoders.values() if tower.squares)
    windows = sorted({kind.window for kind in model.language.kinds if kind.window is not None})
    windowed = (attended_feature(LayerKind(window=window)) for window in windows)
    return ("fixed", *model.item_features, *squares, "tokens", _SQUARED, *windowed, "loss_tokens")


def feature_names_at(features: Sequence[str], levels: Sequence[Level]) -> tuple[str, ...]:
    """Return feature names of ranks' shares: exchanged tokens too with context parallelism."""
    shared = any(level.context > 1 for level in levels)
    return (*features, EXCHANGED) if shared else tuple(features)


_SQUARED, _WINDOWED = "squared_tokens", "squared_tokens_window"


def attended_feature(layer: LayerKind) -> str:
    """Return a layer's attention feature: t^2 - max(t - window, 0)^2 per sample of t tokens."""
    return _SQUARED if layer.window is None else f"{_WINDOWED}{layer.window}"


def window_of_feature(name: str) -> int | None:
    """Return the window size of an attention feature, None for other features."""
    return int(name.removeprefix(_WINDOWED)) if name.startswith(_WINDOWED) else None
