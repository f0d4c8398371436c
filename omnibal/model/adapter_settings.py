"""LoRA: low-rank adapters of frozen linears (Hu et al. 2021, arXiv 2106.09685, section 4.1).

    y = x W + (alpha / rank) x A B    with A [inputs, rank], B [rank, outputs]

Released checkpoints split fused linears, e.g. into q, k and v: every piece has its own A and B.
"""

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from omnibal.base.errors import refuse_if
from omnibal.base.files import one_line_error
from omnibal.base.frozen import Count, Frozen, written_unless
from omnibal.model.config import LanguageConfig, ModelConfig
from omnibal.model.encoders import ClipsEncoder, Encoder, ImagesEncoder, TilesEncoder
from omnibal.model.layer_kinds import LayerKind
from omnibal.model.units import LANGUAGE, UnitKind, model_parts, unit_kinds

ALL_LINEAR = "all-linear"  # PEFT's target for every linear of layers and projectors
_MODULE_NAME = re.compile(r"[\w.-]+")  # other targets are regular expressions


class AdapterConfig(Frozen):
    """Adapters of a job: rank, scale and target linears."""

    rank: Annotated[Count, Field(le=2**16)]
    alpha: Annotated[float, Field(gt=0, le=1e9)]
    # PEFT's `target_modules`: (ends of) names, `all-linear`, or one regular expression.
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = (ALL_LINEAR,)
    # Parts of the model with adapters, otherwise frozen.
    parts: Annotated[tuple[str, ...], Field(min_length=1)] = (LANGUAGE,)
    rank_stabilized: bool = written_unless(False)  # rsLoRA, arXiv 2312.03732
    experts: bool = written_unless(False)  # whether `all-linear` has them; not trained here

    @model_validator(mode="after")
    def _patterns_are_alone(self) -> Self:
        is_crowded = len(self.targets) > 1 and (self.is_of_all or self.is_pattern)
        rule = f"a regular expression or {ALL_LINEAR} must be alone; join expressions with |"
        refuse_if(is_crowded, f"targets {', '.join(self.targets)}: {rule}")
        try:
            re.compile(self.targets[0])
        except re.error as error:
            message = f"target {self.targets[0]!r} is no regular expression ({error})"
            raise ValueError(message) from None
        return self

    @property
    def is_of_all(self) -> bool:
        return ALL_LINEAR in self.targets

    @property
    def is_pattern(self) -> bool:
        """Whether the target is a regular expression."""
        return not all(map(_MODULE_NAME.fullmatch, self.targets))

    @property
    def summary(self) -> str:
        """Rank, scale, targets and parts in one line."""
        targets = f"{', '.join(self.targets)} of {', '.join(self.parts)}"
        return f"rank {self.rank}, scale {self.scale:g}, on {targets}"

    @property
    def scale(self) -> float:
        """Factor of x A B: alpha / rank, or alpha / sqrt(rank) if rank-stabilized."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def is_target(self, path: str) -> bool:
        """Return whether a module name of a released checkpoint is a target, by PEFT's rules."""
        if self.is_of_all:
            return True
        if self.is_pattern:
            return re.fullmatch(self.targets[0], path) is not None
        return any(path == name or path.endswith(f".{name}") for name in self.targets)


def adapters_of(
    *,
    rank: int,
    alpha: float | None = None,
    targets: str = ALL_LINEAR,
    parts: tuple[str, ...] = (LANGUAGE,),
    rank_stabilized: bool = False,
) -> AdapterConfig:
    """Return the AdapterConfig of command-line values; raises UserError.

    Args:
        alpha: default: 2 x rank.
        targets: comma-separated names, `all-linear`, or one regular expression.
    """
    names = tuple(filter(None, (name.strip() for name in targets.split(","))))
    # A regular expression may hold commas, so it is not split.
    is_pattern = not names or not all(map(_MODULE_NAME.fullmatch, names))
    try:
        return AdapterConfig(
            rank=rank,
            alpha=2 * rank if alpha is None else alpha,
            targets=(targets,) if is_pattern else names,
            parts=parts,
            rank_stabilized=rank_stabilized,
        )
    except ValidationError as error:
        raise one_line_error(error, "adapters", "change it") from error


@dataclass(frozen=True, slots=True)
class Piece:
    """Linear as stored in released checkpoints."""

    name: str  # last part of the module's name, such as `q_proj`
    inputs: int
    outputs: int
    paths: tuple[str, ...]  # module names in released layouts, with `*` for the layer number
    is_adapted: bool = False


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear of Megatron-core, fused from one or more pieces."""

    module: str  # name within its layer or projector, such as `self_attention.linear_qkv`
    pieces: tuple[Piece, ...]
    divides_inputs: bool = False  # row-parallel

    @property
    def adapted_pieces(self) -> tuple[Piece, ...]:
        return tuple(piece for piece in self.pieces if piece.is_adapted)


def linears(model: ModelConfig, kind: UnitKind) -> tuple[Linear, ...]:
    """Return a unit's linears that targets can name.

    Latent and linear attention and experts have none; only `all-linear` adapts them.
    """
    if kind.layer is not None:
        return _language_linears(model.language, kind.layer)
    if kind.tower == LANGUAGE:
        return ()
    tower = model.encoders[kind.tower]
    if kind.is_layer:
        return _encoder_linears(tower)
    return _projector_linears(model, tower) if kind.is_projector else ()


def adapted_linears(
    model: ModelConfig, kind: UnitKind, adapters: AdapterConfig | None
) -> tuple[Linear, ...]:
    """Return a unit's linears with adapters, their adapted pieces marked `is_adapted`."""
    if adapters is None or kind.part not in adapters.parts:
        return ()
    marked = (
        replace(
            linear,
            pieces=tuple(
                # Layer 0 stands for all; `adapter_mistake` sees differences only within a kind.
                replace(piece, is_adapted=_is_target(adapters, piece, 0))
                for piece in linear.pieces
            ),
        )
        for linear in linears(model, kind)
    )
    return tuple(linear for linear in marked if linear.adapted_pieces)


def has_adapters(model: ModelConfig, kind: UnitKind, adapters: AdapterConfig | None) -> bool:
    if adapters is None or kind.part not in adapters.parts:
        return False
    # `all-linear` adapts latent and linear attention too, which `linears` leaves out.
    return (adapters.is_of_all and kind.is_layer) or bool(adapted_linears(model, kind, adapters))


def trained_kinds(
    model: ModelConfig, frozen: Collection[str], adapters: AdapterConfig | None
) -> frozenset[str]:
    """Return the names of unit kinds with trained weights or adapters."""
    adapted = () if adapters is None else adapters.parts
    return frozenset(
        kind.name
        for kind in unit_kinds(model)
        if kind.part not in (*frozen, *adapted) or has_adapters(model, kind, adapters)
    )


def adapter_mistake(
    model: ModelConfig, frozen: Collection[str], adapters: AdapterConfig | None
) -> str | None:
    """Return an error message if the model does not allow these adapters, else None."""
    if adapters is None:
        return None
    parts = model_parts(model)
    unknown = [part for part in adapters.parts if part not in parts]
    if unknown or len(set(adapters.parts)) < len(adapters.parts):
        named = f"adapters are of {', '.join(adapters.parts)}; name some, each once"
        return f"{named}: the parts of {model.name} are {', '.join(parts)}"
    if both := ", ".join(part for part in adapters.parts if part in frozen):
        return f"{both} is frozen and has adapters, which freeze it already: do not freeze it too"
    return _target_mistake(model, adapters)


def _target_mistake(model: ModelConfig, adapters: AdapterConfig) -> str | None:
    """Return an error message if targets match nothing, or only some layers of a kind."""
    kinds = [kind for kind in unit_kinds(model) if kind.part in adapters.parts]
    named = {piece.name: piece for kind in kinds for piece in _pieces(model, kind)}
    can = f"{', '.join(adapters.parts)} of {model.name} has {', '.join(named)} or {ALL_LINEAR}"
    for part in adapters.parts:
        if not any(has_adapters(model, kind, adapters) for kind in kinds if kind.part == part):
            targets = ", ".join(adapters.targets)
            return f"adapters' targets {targets} match no linear of {part}: {can}"
    for target in adapters.targets:
        alone = adapters.model_copy(update={"targets": (target,)})
        if not any(has_adapters(model, kind, alone) for kind in kinds):
            return f"adapters' target {target} matches nothing: {can}"
    for kind in kinds:
        numbers = [0]  # of layers
        if kind.is_layer:
            tower = model.language if kind.tower == LANGUAGE else model.encoders[kind.tower]
            numbers = [number for number in range(tower.layers) if kind.has_layer(number)]
        for piece in _pieces(model, kind):
            if 0 < sum(_is_target(adapters, piece, number) for number in numbers) < len(numbers):
                some = f"{adapters.targets[0]} takes {piece.name} of some layers and not of others"
                return f"adapters' target {some}: leave the layer's number open"
    return None


def _pieces(model: ModelConfig, kind: UnitKind) -> Iterator[Piece]:
    return (piece for linear in linears(model, kind) for piece in linear.pieces)


def _is_target(adapters: AdapterConfig, piece: Piece, number: int) -> bool:
    """Return whether a piece of layer `number` is a target."""
    return any(adapters.is_target(path.replace("*", str(number))) for path in piece.paths)


def _language_linears(language: LanguageConfig, kind: LayerKind) -> tuple[Linear, ...]:
    wide, inner = language.hidden_size, language.ffn_hidden_size
    query, key = (number * language.head_width for number in (language.heads, language.kv_heads))

    def piece(name: str, inputs: int, outputs: int, block: str = "mlp") -> Piece:
        prefixes = ("language_model.model", "model.language_model", "model")
        paths = (f"{prefix}.layers.*.{block}.{name}" for prefix in prefixes)
        return Piece(name, inputs, outputs, tuple(paths))

    # Qwen3.5's q_proj makes the output gate too.
    widths = {"q_proj": query * (2 if language.output_gate else 1), "k_proj": key, "v_proj": key}
    linears = _layer_linears(
        [piece(name, wide, size, block="self_attn") for name, size in widths.items()],
        piece("o_proj", query, wide, block="self_attn"),
        [piece(name, wide, inner) for name in ("gate_proj", "up_proj")[-language.gates :]],
        piece("down_proj", inner, wide),
    )
    attention = () if kind.latent else linears[:2]
    if kind.linear is not None:
        keys = kind.linear.key_heads * kind.linear.key_head_size
        values = kind.linear.value_heads * kind.linear.value_head_size
        heads = kind.linear.value_heads
        widths = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
        made = [piece(f"in_proj_{n}", wide, w, block="linear_attn") for n, w in widths.items()]
        out = piece("out_proj", values, wide, block="linear_attn")
        attention = (
            Linear("self_attention.in_proj", tuple(made)),
            Linear("self_attention.out_proj", (out,), divides_inputs=True),
        )
    return (*attention, *(linears[2:] if kind.experts is None else ()))


def _encoder_linears(tower: Encoder) -> tuple[Linear, ...]:
    wide, inner, heads = tower.hidden_size, tower.ffn_hidden_size, tower.heads * tower.head_width
    qkv, out, into, back = {"qkv": 3 * heads}, "proj", ["fc1"], "fc2"
    attention, mlp = ["vision_model.encoder.layers.*.attn"], ["vision_model.encoder.layers.*.mlp"]
    if isinstance(tower, TilesEncoder):
        mlp.append("model.vision_tower.encoder.layer.*.mlp")
    elif isinstance(tower, ClipsEncoder):
        qkv, out = dict.fromkeys(("q_proj", "k_proj", "v_proj"), heads), "out_proj"
        attention, mlp = ["audio_tower.layers.*.self_attn"], ["audio_tower.layers.*"]
    elif isinstance(tower, ImagesEncoder):
        into, back = ["linear_fc1"], "linear_fc2"
        if tower.gated:
            into, back = ["gate_proj", "up_proj"], "down_proj"
        places = ("model.visual.blocks.*", "visual.blocks.*")
        attention, mlp = ([f"{place}.{block}" for place in places] for block in ("attn", "mlp"))
    else:
        return ()  # no module names are known

    def piece(name: str, inputs: int, outputs: int, blocks: Sequence[str] = mlp) -> Piece:
        # Qwen2-VL's feed-forwards are fc1 and fc2.
        names = dict.fromkeys((name, name.replace("linear_fc", "fc")))
        paths = tuple(f"{at}.{word}" for at in blocks for word in names)
        return Piece(name, inputs, outputs, paths)

    proj = piece(out, heads, wide, attention)
    if isinstance(tower, TilesEncoder):
        projection = "model.vision_tower.encoder.layer.*.attention.projection_layer"
        proj = replace(proj, paths=(*proj.paths, projection))
    return _layer_linears(
        [piece(name, wide, size, attention) for name, size in qkv.items()],
        proj,
        [piece(name, wide, inner) for name in into],
        piece(back, inner, wide),
    )


def _layer_linears(
    qkv: Sequence[Piece], out: Piece, into: Sequence[Piece], back: Piece
) -> tuple[Linear, ...]:
    return (
        Linear("self_attention.linear_qkv", tuple(qkv)),
        Linear("self_attention.linear_proj", (out,), divides_inputs=True),
        Linear("mlp.linear_fc1", tuple(into)),
        Linear("mlp.linear_fc2", (back,), divides_inputs=True),
    )


def _projector_linears(model: ModelConfig, tower: Encoder) -> tuple[Linear, ...]:
    """Return a projector's linears, () unless it has two."""
    wide, width = tower.projector_input_size, model.language.hidden_size
    inner, stored = width, ("mlp1.1", "mlp1.3")
    at = "model.multi_modal_projector.linear_"
    if isinstance(tower, ImagesEncoder):
        if tower.projector != "mlp":
            return ()
        inner, at = tower.projector_hidden_size or wide, "model.visual.merger.linear_fc"
        stored = ("model.visual.merger.mlp.0", "model.visual.merger.mlp.2")
    # Indices of nn.Sequential are poor targets, so Transformers' names count for them too.
    first, second = (
        Piece(f"linear_{number}", *sizes, (path, f"{at}{number}", f"projector.linear_{number}"))
        for number, path, sizes in zip((1, 2), stored, ((wide, inner), (inner, width)), strict=True)
    )
    return Linear("linear_fc1", (first,)), Linear("linear_fc2", (second,), divides_inputs=True)
