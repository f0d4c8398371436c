"""LoRA adapters in PEFT's format: import, export, and merging into weights.

    adapter_model.safetensors   A and B of every adapted module of the released model, by name
    adapter_config.json         rank, scale and target modules

If a parameter here is several released modules, as q, k and v of image tiles in Transformers, each
module has a copy of A and its rows of B. Modules have the names of a model that Transformers has
loaded: `model.` precedes those of InternVL and Qwen-VL.

Shapes: r rank, R ranks of a linear's adapters together, I inputs, O outputs, P outputs of a piece.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from pydantic import BaseModel

from megatron.vlm.checkpoint.identity import CheckpointIdentity
from megatron.vlm.conversion.config_files import json_text
from megatron.vlm.conversion.importing import Addition, ReleasedCheckpoint
from megatron.vlm.conversion.own_weights import StoredWeights
from megatron.vlm.conversion.released_config import check_exportable
from megatron.vlm.conversion.released_files import ReleasedFiles, check_tensors, write_file, writing
from megatron.vlm.conversion.tensor_map import (
    Arrangement,
    GroupedRows,
    Parameter,
    Parts,
    Shape,
    Sources,
    TensorLayout,
    find_released,
    layer_parameter,
)
from megatron.vlm.model.adapters import OutputRows
from omnibal.base.errors import UserError
from omnibal.base.files import atomic_directory, check_room, read_json_model
from omnibal.model.adapter_settings import AdapterConfig, Linear, Piece, adapted_linears
from omnibal.model.config import ModelConfig
from omnibal.model.units import LANGUAGE, UnitKind, model_parts, unit_kinds

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
# Beginning of PEFT's names, and ends of the names of A and B.
_PEFT_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
# PEFT's initializations that leave the base's weights unchanged. Others, as pissa, change them.
_KNOWN_INITIALIZATIONS = (True, False, "gaussian", "eva", "orthogonal")
# Ignored entries: names of adapted modules, which tensors' names show, and training settings.
_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
    *("target_modules", "exclude_modules", "layers_pattern", "layers_to_transform", "task_type"),
    *("lora_dropout", "eva_config", "megatron_core", "qalora_group_size"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedPiece:
    """A pair of A and B, and the linear that they adapt."""

    part: str  # part of the model
    base: Parameter  # weight of the linear
    linear: Linear
    piece: Piece  # part of the linear that the pair adapts
    groups: int  # query groups (encoders: heads), if the linear has q, k and v
    lora_a: Parameter
    lora_b: Parameter


def list_adapted_pieces(model: ModelConfig, adapters: AdapterConfig) -> Iterator[AdaptedPiece]:
    """Yield every pair of a model's adapters, by unit kind, then linear, then layer."""
    for kind in unit_kinds(model):
        for linear in adapted_linears(model, kind, adapters):
            outputs = sum(part.outputs for part in linear.pieces)
            for make, piece in product(_list_constructors(model, kind), linear.adapted_pieces):
                name = f"adapters.{piece.name}"
                yield AdaptedPiece(
                    part=kind.part,
                    base=make(f"{linear.module}.weight", (outputs, piece.inputs)),
                    linear=linear,
                    piece=piece,
                    groups=_count_groups(model, kind),
                    lora_a=make(f"{name}.lora_a", (adapters.rank, piece.inputs)),
                    lora_b=make(f"{name}.lora_b", (piece.outputs, adapters.rank)),
                )


def _list_constructors(
    model: ModelConfig, kind: UnitKind
) -> list[Callable[[str, Shape], Parameter]]:
    """Return a constructor of parameters, from name and shape, for each unit of a kind."""
    if not kind.is_layer:
        owner = "projector" if kind.tower == "vision" else f"{kind.tower}_projector"
        return [lambda name, shape: Parameter(key=f"{owner}.{name}", shape=shape)]
    tower = model.language if kind.tower == LANGUAGE else model.encoders[kind.tower]
    numbers = filter(kind.has_layer, range(tower.layers))
    return [partial(layer_parameter, model, kind.tower, number) for number in numbers]


def _count_groups(model: ModelConfig, kind: UnitKind) -> int:
    """Return the query groups in q, k and v of a layer: key heads, or an encoder's heads."""
    if kind.tower != LANGUAGE:
        return model.encoders[kind.tower].heads
    linear = None if kind.layer is None else kind.layer.linear
    return model.language.kv_heads if linear is None else linear.key_heads


class MergedWeights:
    """Reader of a checkpoint's parameters, which merges its adapters, if any, into the weights."""

    def __init__(self, stored: CheckpointIdentity) -> None:
        self._weights, self._adapters = StoredWeights(stored.path), stored.adapters
        self._pieces: dict[tuple[str, int | None], list[AdaptedPiece]] = {}
        for piece in list_adapted_pieces(stored.model, stored.adapters) if stored.adapters else ():
            self._pieces.setdefault((piece.base.key, piece.base.layer), []).append(piece)

    def read_parameters(self, parameters: Sequence[Parameter]) -> list[torch.Tensor]:
        values = self._weights.read_parameters(parameters)
        return list(map(self._merge, parameters, values))

    def _merge(self, parameter: Parameter, values: torch.Tensor) -> torch.Tensor:
        pieces = self._pieces.get((parameter.key, parameter.layer))
        if pieces is None or self._adapters is None:
            return values
        pairs = [matrix for piece in pieces for matrix in (piece.lora_a, piece.lora_b)]
        matrices = [matrix.float() for matrix in self._weights.read_parameters(pairs)]
        rows = OutputRows.of_linear(pieces[0].linear, len(values), pieces[0].groups)
        b_OR = rows.join(matrices[1::2])
        a_RI = torch.cat(matrices[::2])
        # W + scale * B A in float32, rounded once.
        return (values.float() + self._adapters.scale * b_OR @ a_RI).to(values.dtype)


@dataclass(frozen=True, slots=True)
class _Copies:
    """A of a linear that is several released modules: equal tensors, one per module."""

    modules: tuple[str, ...]

    def join(self, pieces: Sequence[torch.Tensor], own: Shape) -> torch.Tensor:
        if any(not torch.equal(pieces[0], other) for other in pieces[1:]):
            raise UserError(
                f"{', '.join(self.modules)} have different A in {WEIGHTS_FILE}, but are one linear "
                "with one A here: such adapters cannot be imported; merge them with PEFT first"
            )
        return pieces[0]

    def divide(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (tensor,) * len(self.modules)


def _find_tensors(
    piece: AdaptedPiece, model: ModelConfig, layout: TensorLayout
) -> dict[Parameter, Sources]:
    """Return the released tensors of A and of B."""
    prefixed = [
        other for other in TensorLayout if other == f"{layout.removesuffix('-stacked')}-prefixed"
    ]
    made_of = find_released(piece.base, model, prefixed[0] if prefixed else layout)
    names = tuple(name.removesuffix(".weight") for name in made_of.names)
    pieces, rows = [part.name for part in piece.linear.pieces], made_of.arrangement
    # q, k and v of tiles are one piece, but released in another row order or as three modules.
    if len(pieces) > 1 or not isinstance(rows, GroupedRows):
        if len(names) != len(pieces):
            raise UserError(
                f"layout {layout} has {names[0]} in one module, but the adapters of "
                f"{', '.join(pieces)} are separate: choose another layout"
            )
        own = pieces.index(piece.piece.name)
        names = (names[own],)
        rows = rows.of_piece(own) if isinstance(rows, GroupedRows) else Parts(piece.lora_b.shape)

    def sources(matrix: str, parameter: Parameter, arrangement: Arrangement) -> Sources:
        tensors = tuple(f"{_PEFT_PREFIX}{name}{matrix}" for name in names)
        return Sources(names=tensors, own=parameter.shape, arrangement=arrangement)

    return {
        piece.lora_a: sources(_A, piece.lora_a, _Copies(names)),
        piece.lora_b: sources(_B, piece.lora_b, rows),
    }


def export_adapter(
    stored: CheckpointIdentity, layout: TensorLayout, target: Path, base: str | None
) -> int:
    """Write a checkpoint's adapters in PEFT's format; return the number of modules."""
    adapters = stored.adapters
    if adapters is None:
        raise UserError(
            f"{stored.path}: has no adapters; leave --adapter out to export the full model"
        )
    check_exportable(stored.model, layout)
    weights = StoredWeights(stored.path)
    tensors: dict[str, torch.Tensor] = {}
    for piece in list_adapted_pieces(stored.model, adapters):
        for parameter, sources in _find_tensors(piece, stored.model, layout).items():
            [values] = weights.read_parameters([parameter])
            tensors |= zip(sources.names, sources.arrangement.divide(values), strict=True)
    modules = [name.removesuffix(_A) for name in tensors if name.endswith(_A)]
    names = [name.removeprefix(_PEFT_PREFIX) for name in modules]
    check_room(target, sum(tensor.nbytes for tensor in tensors.values()))
    # All layers of a tower have equal adapters: any layer's number matches.
    patterns = sorted({re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", re.escape(name)) for name in names})
    config = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": adapters.rank,
        "target_modules": "|".join(patterns),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": adapters.rank_stabilized,
    }
    with atomic_directory(target) as folder, writing(target):
        write_file(folder / WEIGHTS_FILE, tensors, {"format": "pt"})
        (folder / CONFIG_FILE).write_text(json_text(config), encoding="utf-8")
    return len(names)


def list_fully_trained(stored: CheckpointIdentity) -> list[str]:
    """Return the parts trained in full in a run with adapters; empty without adapters."""
    if stored.adapters is None or stored.options is None:
        return []
    others = {*stored.adapters.parts, *stored.options.get("frozen", ())}
    return [part for part in model_parts(stored.model) if part not in others]


class _PeftConfig(BaseModel, extra="allow"):
    """Entries of adapter_config.json. Unknown entries are kept too, to refuse them."""

    peft_type: str
    r: int
    lora_alpha: float
    use_rslora: bool = False
    bias: str = "none"
    init_lora_weights: bool | str = True

    def obstacles(self) -> list[str]:
        """Return settings that plain LoRA lacks, and unknown settings that are not empty."""
        has = {
            f"peft_type {self.peft_type}": self.peft_type != "LORA",
            f"bias {self.bias}": self.bias != "none",
            f"init_lora_weights {self.init_lora_weights}": (
                self.init_lora_weights not in _KNOWN_INITIALIZATIONS
            ),
        }
        others = (self.model_extra or {}).items()
        has |= {key: bool(entry) for key, entry in others if key not in _WITHOUT_EFFECT}
        return [name for name, is_there in has.items() if is_there]


def add_adapter(source: ReleasedCheckpoint, folder: Path) -> ReleasedCheckpoint:
    """Return the checkpoint with a PEFT folder's adapters. Raise UserError unless plain LoRA."""
    given = read_json_model(_PeftConfig, folder / CONFIG_FILE, "give a folder that PEFT has saved")
    obstacles = given.obstacles()
    if obstacles:
        raise UserError(
            f"{folder / CONFIG_FILE}: sets {', '.join(obstacles)}, and only plain LoRA of the "
            "released weights is supported; merge it with PEFT, and import the model"
        )
    files = ReleasedFiles(folder, WEIGHTS_FILE)
    # Look for adapters of every linear, then keep the linears that have some.
    everywhere = AdapterConfig(
        rank=given.r,
        alpha=given.lora_alpha,
        rank_stabilized=given.use_rslora,
        parts=tuple({kind.part: None for kind in unit_kinds(source.model)}),
    )
    present = [
        piece
        for piece in list_adapted_pieces(source.model, everywhere)
        for own in _find_tensors(piece, source.model, source.layout).values()
        if files.tensors.keys() & {*own.names}
    ]
    adapters = _infer_adapters(source.model, everywhere, present, folder)
    base_and_sources = {
        parameter: (piece.base, sources)
        for piece in list_adapted_pieces(source.model, adapters)
        for parameter, sources in _find_tensors(piece, source.model, source.layout).items()
    }
    expected = [(own.key, sources) for own, (_, sources) in base_and_sources.items()]
    check_tensors(folder, expected, files.tensors, "equal adapters in all layers")

    def read_values(sources: Sources, dtype: torch.dtype) -> torch.Tensor:
        return files.read_parameter(sources).to(dtype)

    additions = {}
    for parameter, (base, sources) in base_and_sources.items():
        dtype = source.dtype(base)
        later = partial(read_values, sources, dtype)
        additions[parameter.name] = Addition(parameter=parameter, dtype=dtype, read=later)
    return replace(source, additions=additions, adapters=adapters)


def _infer_adapters(
    model: ModelConfig, everywhere: AdapterConfig, pieces: Sequence[AdaptedPiece], folder: Path
) -> AdapterConfig:
    """Return `everywhere` limited to the parts and linears of the adapted pieces."""
    if not pieces:
        raise UserError(
            f"{folder / WEIGHTS_FILE}: has no tensor of a linear of {model.name}; give adapters "
            "of that model"
        )
    targets = sorted({own.piece.name for own in pieces})
    parts = dict.fromkeys(own.part for own in pieces)
    return everywhere.model_copy(update={"targets": tuple(targets), "parts": tuple(parts)})
