"""Initial weights that depend only on the seed and each parameter's global name.

So any split, recomputation or parallel size starts from the same model. Large matrices are drawn in
tiles with a generator each, and a rank draws only the tiles of its part.

Shapes: R rows and C columns of a box of a matrix; all axes after the first count as columns.
"""

import hashlib
import math
import re
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch

from megatron.vlm.model.adapters import ADAPTERS
from megatron.vlm.model.sharded_weights import FirstValues
from megatron.vlm.model.stage import TIED_NAME, VLMStage
from megatron.vlm.model.tensor_parallel import own_runs, unpadded_size
from omnibal.model.config import ModelConfig
from omnibal.model.units import LANGUAGE

_LAYER_NAME = re.compile(r"^([a-z0-9]+)\.layers\.(\d+)\.(.*)$")
_EXPERTS_NAME = re.compile(r"^(.*\.mlp\.experts)\.(linear_fc[12]\.weight)$")
_RESIDUAL_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight", "out_proj.weight")
_MAX_SINGLE_TILE = 1 << 20  # max values of a matrix drawn as one tile
_TILE = (512, 256)  # rows and columns of a larger matrix's tiles

# Origin of matrices. `seeded`: as below. `loaded`: zeros, as a checkpoint follows, but adapters
# seeded. `measured`: quick random values for timing, drawn on the device.
FirstWeights: TypeAlias = Literal["seeded", "loaded", "measured"]


def global_parameter_name(stage: VLMStage, name: str) -> str:
    """Return the parameter's name in the full model, with global layer numbers from 0."""
    if name == stage.copy_name:
        return TIED_NAME
    match = _LAYER_NAME.match(name)
    if match is None:
        return name
    tower, index, rest = match.groups()
    layer = stage.get_submodule(f"{tower}.layers.{index}")
    return f"{tower}.layers.{layer.layer_number - 1}.{rest}"


@torch.no_grad()
def initialize_parameters(stage: VLMStage, write: FirstValues) -> None:
    """Write the initial values of all parameters that this rank holds."""
    for parameter in stage.parameters():
        write(parameter, range(parameter.numel()), parameter.view(-1))


def first_values(stage: VLMStage, seed: int, origin: FirstWeights = "seeded") -> FirstValues:
    """Return `write(parameter, own, values)`: fill `values` with flat range `own` of a parameter.

    Matrices are normal with variance 1 / inputs; embeddings and head with standard deviation 0.02;
    ends of residual branches divided by sqrt(2 * layers), as in GPT-2. Biases are 0; other vectors
    keep their modules' values. Adapters as in PEFT: A uniform within 1 / sqrt(inputs), B zeros.
    """
    model, group = stage.model_config, stage.groups.tp
    names = {parameter: name for name, parameter in stage.named_parameters()}

    def write(parameter: torch.nn.Parameter, own: range, values: torch.Tensor) -> None:
        name = global_parameter_name(stage, names[parameter])
        if parameter.dim() < 2 or (origin == "loaded" and ADAPTERS not in name):
            # Norms' weights, layer scales and delta layers' vectors keep their modules' values.
            keeps = parameter.dim() < 2 and not name.endswith(".bias")
            values.copy_(parameter[own.start : own.stop]) if keeps else values.zero_()
            return
        # Runs of this rank's rows: (matrix, own row, the matrix's row, length). Columns likewise.
        match = _EXPERTS_NAME.match(name)
        if match is None:
            unpadded, width = unpadded_size(model, name), math.prod(parameter.shape[1:])
            height, runs = own_runs(parameter, 0, unpadded, group)
            inputs, columns = own_runs(parameter, 1, unpadded, group)
            rows = [(name, *run) for run in runs]
        else:
            # An expert's matrix has its own name, to be equal at any expert-parallel size.
            first = stage.get_submodule(names[parameter].rpartition(".linear")[0]).first
            experts, height, width = parameter.shape
            matrices = (f"{match[1]}.{first + place}.{match[2]}" for place in range(experts))
            rows = [(matrix, place * height, 0, height) for place, matrix in enumerate(matrices)]
            inputs, columns = width, [(0, 0, width)]
        if origin == "measured":
            values.normal_(0, _standard_deviation(model, name, inputs))
            return
        # Rows that the flat range touches.
        box_rows = range(own.start // width, -(-own.stop // width))
        box_RC = torch.zeros(len(box_rows), width, dtype=values.dtype, device="cpu")
        for matrix, own_row, row, length in rows:
            low, high = max(box_rows.start, own_row), min(box_rows.stop, own_row + length)
            for own_column, column, breadth in columns if low < high else ():
                part_RC = box_RC[low - box_rows.start : high - box_rows.start]
                part_RC = part_RC[:, own_column : own_column + breadth]
                at = row + low - own_row, column
                _draw_box(model, matrix, (height, inputs), seed, part_RC, at)
        values.copy_(box_RC.view(-1)[own.start - box_rows.start * width :][: len(own)])

    return write


def initial_values(model: ModelConfig, name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Return initial values of a full parameter by its global name, float32; vectors are 0."""
    values = torch.zeros(*shape)
    if len(shape) > 1:
        box_RC = values.view(shape[0], -1)
        _draw_box(model, name, (shape[0], box_RC.shape[1]), seed, box_RC, (0, 0))
    return values


def _draw_box(
    model: ModelConfig, name: str, shape: tuple[int, int], seed: int, box_RC: torch.Tensor,
    at: tuple[int, int],
) -> None:  # fmt: skip
    """Write a matrix's values from row `at[0]` and column `at[1]` on into `box_RC`."""
    rows, columns = shape if math.prod(shape) <= _MAX_SINGLE_TILE else _TILE
    for top in range(at[0] - at[0] % rows, at[0] + box_RC.shape[0], rows):
        for left in range(at[1] - at[1] % columns, at[1] + box_RC.shape[1], columns):
            place = "" if (rows, columns) == shape else f":{top}:{left}"
            tile = _draw_tile(model, name, f"{seed}:{name}{place}", (rows, columns), shape[1])
            tile = tile[max(at[0] - top, 0) :, max(at[1] - left, 0) :]
            target = box_RC[max(top - at[0], 0) :, max(left - at[1], 0) :]
            height, width = map(min, target.shape, tile.shape)
            target[:height, :width] = tile[:height, :width]


def _draw_tile(
    model: ModelConfig, name: str, seed_text: str, shape: tuple[int, int], inputs: int
) -> torch.Tensor:
    """Return a tile of `shape`, float32, from a generator seeded by `seed_text`."""
    digest = hashlib.sha256(seed_text.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if name.endswith(".lora_a"):
        return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(inputs)
    if name.endswith(".lora_b"):
        return torch.zeros(shape)
    values = torch.randn(shape, generator=generator)
    return values * _standard_deviation(model, name, inputs)


def _standard_deviation(config: ModelConfig, name: str, inputs: int) -> float:
    if name.startswith(("embedding.", "head.", "vision_embedding.positions")):
        return 0.02
    deviation = 1 / math.sqrt(inputs)
    match = _LAYER_NAME.match(name)
    if match is not None and name.endswith(_RESIDUAL_OUTPUTS):
        tower = config.language if match[1] == LANGUAGE else config.encoders[match[1]]
        return deviation / math.sqrt(2 * tower.layers)
    return deviation
