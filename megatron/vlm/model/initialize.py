"""Initial weights that depend only on the seed and each parameter's global name.

So any split, recomputation or parallel size starts from the same model.
"""

import hashlib
import math
import re
from collections.abc import Callable, Sequence

import torch

from megatron.vlm.model.stage import TIED_NAME, VLMStage
from megatron.vlm.model.tensor_parallel import own_shard, unpadded_size, whole_shape
from omnibal.model.config import ModelConfig
from omnibal.model.units import LANGUAGE

_LAYER_NAME = re.compile(r"^([a-z0-9]+)\.layers\.(\d+)\.(.*)$")
_EXPERTS_NAME = re.compile(r"^(.*\.mlp\.experts)\.(linear_fc[12]\.weight)$")
_RESIDUAL_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight")


def global_parameter_name(stage: VLMStage, name: str) -> str:
    """Return the parameter's name in the whole model, with global layer numbers from 0.

    A tied head has the token embedding's name.
    """
    if name == "head.weight" and stage.holds_tied_copy:
        return TIED_NAME
    match = _LAYER_NAME.match(name)
    if match is None:
        return name
    tower, index, rest = match.groups()
    layer = stage.get_submodule(f"{tower}.layers.{index}")
    return f"{tower}.layers.{layer.layer_number - 1}.{rest}"


@torch.no_grad()
def initialize_parameters(stage: VLMStage, seed: int) -> None:
    """Draw the stage's matrices. Each rank draws whole matrices and keeps its shard.

    Normal with variance 1 / inputs; embeddings and head with standard deviation 0.02; ends of
    residual branches divided by sqrt(2 * layers), as in GPT-2. Vectors keep their modules' values.
    Adapters as in PEFT: A uniform within 1 / sqrt(inputs), B zeros.
    """
    for name, parameter in stage.named_parameters():
        _initialize(stage, seed, name, parameter)


def first_values(stage: VLMStage, seed: int) -> Callable[[torch.nn.Parameter], None]:
    """Return `initialize_parameters` for one parameter at a time."""
    names = {parameter: name for name, parameter in stage.named_parameters()}
    return lambda parameter: _initialize(stage, seed, names[parameter], parameter)


def _initialize(stage: VLMStage, seed: int, name: str, parameter: torch.nn.Parameter) -> None:
    if parameter.dim() < 2:
        if name.endswith("bias"):
            parameter.zero_()
        return
    full_name = global_parameter_name(stage, name)
    match = _EXPERTS_NAME.match(full_name)
    if match is not None:
        experts = stage.get_submodule(name.rpartition(".linear")[0])
        for place, expert in enumerate(parameter):
            own_name = f"{match[1]}.{experts.first + place}.{match[2]}"
            expert.copy_(initial_values(stage.model_config, own_name, expert.shape, seed))
        return
    unpadded = unpadded_size(stage.model_config, full_name)
    shape = whole_shape(parameter, unpadded, stage.groups.tp)
    values = initial_values(stage.model_config, full_name, shape, seed)
    parameter.copy_(own_shard(values, parameter, stage.groups.tp))


def initial_values(model: ModelConfig, name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Draw a whole parameter by its global name, float32; vectors are zeros."""
    if len(shape) < 2:
        return torch.zeros(*shape)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if name.endswith(".lora_a"):
        return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[1])
    if name.endswith(".lora_b"):
        return torch.zeros(*shape)
    values = torch.randn(shape, generator=generator)
    return values * _standard_deviation(model, name, inputs=math.prod(shape[1:]))


def _standard_deviation(config: ModelConfig, name: str, inputs: int) -> float:
    if name.startswith(("embedding.", "head.", "vision_embedding.positions")):
        return 0.02
    deviation = 1 / math.sqrt(inputs)
    match = _LAYER_NAME.match(name)
    if match is not None and name.endswith(_RESIDUAL_OUTPUTS):
        tower = config.language if match[1] == LANGUAGE else config.encoders[match[1]]
        return deviation / math.sqrt(2 * tower.layers)
    return deviation
