"""Small random InternVL models of Transformers, and released checkpoints of them.

The original layout is written again here, row by row, independent of the converter.
"""

import copy
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import tokenizers
import torch
from safetensors.torch import save_file
from transformers import (
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLVisionConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megatron.vlm.conversion.importing import import_checkpoint, open_released

RELEASED_CONFIGS = Path(__file__).parent / "released_configs"
"""Model fields of config.json of OpenGVLab/InternVL-Chat-V1-5, meta-llama/Llama-3.1-8B-Instruct and
Qwen/Qwen2.5-32B-Instruct."""
Model = TypeVar("Model", bound=torch.nn.Module)

IMAGE_TOKEN = 0
VISION_HEADS = {"300m": 4, "6b": 3}
WORDS = 51
"""Odd, so that tensor parallelism pads it."""
PIECES = "<IMG_CONTEXT> <img> </img> <s> <|im_start|> <|im_end|> <unk> a b c".split()
ARCHITECTURES = {
    "internlm2": "InternLM2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
HEADS = dict.fromkeys(ARCHITECTURES, "language_model.lm_head.weight") | {
    "internlm2": "language_model.output.weight"
}
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
    "norm_topk_prob": True,
}  # fmt: skip
LANGUAGES = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 6}),
    "qwen3_moe": (Qwen3MoeConfig, {"head_dim": 6} | EXPERTS),
}
"""Configuration class, and its extra fields."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Differences between the tested models."""

    vision: str
    """"300m": LayerNorm, biases of q, k and v. "6b": RMSNorm, q and k norms, no such biases, and an
    odd number of heads."""
    language: str
    """"llama": no biases. "qwen2": q, k and v biases. "qwen3": q/k norms, head size other than
    hidden / heads. "qwen3_moe": experts too."""
    tied: bool = False


KINDS = {
    "300m-qwen2": Kind(vision="300m", language="qwen2"),
    "6b-llama": Kind(vision="6b", language="llama"),
    "6b-qwen2-tied": Kind(vision="6b", language="qwen2", tied=True),
    "300m-llama-tied": Kind(vision="300m", language="llama", tied=True),
    "6b-qwen3": Kind(vision="6b", language="qwen3"),
    "300m-qwen3-moe": Kind(vision="300m", language="qwen3_moe"),
}
# All layouts that can store the model.
LAYOUTS = {
    "qwen2": ("transformers", "prefixed", "qwen2"),
    "llama": ("transformers", "prefixed", "llama", "internlm2"),
    "qwen3": ("transformers", "qwen3"),
    "qwen3_moe": ("transformers", "stacked", "qwen3_moe"),
}
CASES = [(name, layout) for name, kind in KINDS.items() for layout in LAYOUTS[kind.language]]


def configuration(kind: Kind) -> InternVLConfig:
    """Return a configuration of two layers per tower, without class defaults."""
    is_6b = kind.vision == "6b"
    vision = InternVLVisionConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=VISION_HEADS[kind.vision],
        intermediate_size=40,
        image_size=[16, 16],
        patch_size=[4, 4],
        norm_type="rms_norm" if is_6b else "layer_norm",
        # q and k norms use 1e-6 in Transformers, independent of this value.
        layer_norm_eps=1e-6 if is_6b else 1e-3,
        attention_bias=not is_6b,
        use_qk_norm=is_6b,
        layer_scale_init_value=0.2,
    )
    make, more = LANGUAGES[kind.language]
    text = make(
        **more,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=44,
        vocab_size=WORDS,
        rms_norm_eps=1e-3,
        rope_theta=5000.0,
        tie_word_embeddings=kind.tied,
    )
    return InternVLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=IMAGE_TOKEN,
        image_seq_length=4,
        tie_word_embeddings=kind.tied,
    )


def transformers_model(kind: Kind, seed: int = 0) -> InternVLForConditionalGeneration:
    return randomize(InternVLForConditionalGeneration(configuration(kind)), seed)


def randomize(model: Model, seed: int = 0) -> Model:
    """Set every parameter to random values, to detect a lost norm, bias or layer scale."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.eval().named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                inner = parameter.shape[-1] if ".experts." in name else parameter[0].numel()
                parameter.copy_(values / inner**0.5)
            else:
                parameter.copy_(values / 4 + (0 if name.endswith("bias") else 1))
    return model


def released_tensors(
    model: InternVLForConditionalGeneration, layout: str, head_copy: bool = False
) -> dict[str, torch.Tensor]:
    """Return the model's tensors with the names of a layout.

    Args: `head_copy`: whether a tied head is stored, as a copy of the embedding.
    """
    tensors = {name: value.detach().clone() for name, value in model.named_parameters()}
    if model.config.tie_word_embeddings and head_copy:
        tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()
    return rename_tensors(tensors, model.config, layout)


def rename_tensors(
    tensors: Mapping[str, torch.Tensor], config: InternVLConfig, layout: str
) -> dict[str, torch.Tensor]:
    """Return Transformers' parameters or gradients in the names and arrangement of `layout`."""
    if layout in ("prefixed", "stacked"):
        return dict(tensors)
    tensors = dict(expand_experts(tensors))
    if layout == "transformers":
        return {_transformers_name(name): value for name, value in tensors.items()}
    return dict(_original(tensors, config, layout))


def expand_experts(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors with split experts as in released files; Transformers 5 joins them."""
    for name, value in tensors.items():
        stem, _, module = name.rpartition(".experts.")
        for number, matrix in enumerate(value if stem else ()):
            own = f"{stem}.experts.{number}"
            if module == "down_proj":
                yield f"{own}.down_proj.weight", matrix.clone()
            else:
                yield f"{own}.gate_proj.weight", matrix[: len(matrix) // 2].clone()
                yield f"{own}.up_proj.weight", matrix[len(matrix) // 2 :].clone()
        if not stem:
            yield name, value


def _transformers_name(name: str) -> str:
    """Return the name in Transformers 4.52, still written by `save_pretrained`."""
    if name.startswith("model.language_model."):
        return name.replace("model.language_model.", "language_model.model.", 1)
    return "language_model." + name if name.startswith("lm_head") else name.removeprefix("model.")


def _original(
    tensors: Mapping[str, torch.Tensor], config: InternVLConfig, language: str
) -> Iterator[tuple[str, torch.Tensor]]:
    yield from _original_vision(tensors, config.vision_config)
    projector = {"0": "layer_norm", "1": "linear_1", "3": "linear_2"}
    yield from _move_modules(tensors, "model.multi_modal_projector.", "mlp1.", projector)
    if language == "internlm2":
        yield from _internlm2(tensors, config.text_config)
    else:
        ours, theirs = "model.language_model.", "language_model.model."
        own = (name for name in tensors if name.startswith(ours))
        yield from ((name.replace(ours, theirs, 1), tensors[name]) for name in own)
    if "lm_head.weight" in tensors:
        yield HEADS[language], tensors["lm_head.weight"]


def _move_modules(
    tensors: Mapping[str, torch.Tensor], ours: str, theirs: str, modules: Mapping[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the existing weights and biases of modules under other names."""
    for there, here in modules.items():
        for part in ("weight", "bias"):
            if f"{ours}{here}.{part}" in tensors:
                yield f"{theirs}{there}.{part}", tensors[f"{ours}{here}.{part}"]


def _original_vision(
    tensors: Mapping[str, torch.Tensor], vision: InternVLVisionConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    ours, theirs = "model.vision_tower.embeddings.", "vision_model.embeddings."
    yield f"{theirs}class_embedding", tensors[f"{ours}cls_token"]
    yield f"{theirs}position_embedding", tensors[f"{ours}position_embeddings"]
    yield from _move_modules(
        tensors, ours, theirs, {"patch_embedding": "patch_embeddings.projection"}
    )
    modules = {
        "norm1": "layernorm_before", "norm2": "layernorm_after", "attn.q_norm": "attention.q_norm",
        "attn.k_norm": "attention.k_norm", "attn.proj": "attention.projection_layer",
        "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2",
    }  # fmt: skip
    for layer in range(vision.num_hidden_layers):
        ours = f"model.vision_tower.encoder.layer.{layer}."
        theirs = f"vision_model.encoder.layers.{layer}."
        yield from _move_modules(tensors, ours, theirs, modules)
        yield f"{theirs}ls1", tensors[f"{ours}lambda_1"]
        yield f"{theirs}ls2", tensors[f"{ours}lambda_2"]
        for part in ["weight", "bias"] if vision.attention_bias else ["weight"]:
            rows = []
            for one in ("q_proj", "k_proj", "v_proj"):
                rows += list(tensors[f"{ours}attention.{one}.{part}"])
            yield f"{theirs}attn.qkv.{part}", torch.stack(rows)


def _internlm2(
    tensors: Mapping[str, torch.Tensor], text: PretrainedConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    ours, theirs = "model.language_model.", "language_model.model."
    outer = {"tok_embeddings": "embed_tokens", "norm": "norm"}
    yield from _move_modules(tensors, ours, theirs, outer)
    modules = {
        "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj",
    }  # fmt: skip
    head_size = text.hidden_size // text.num_attention_heads
    queries_per_group = text.num_attention_heads // text.num_key_value_heads
    for layer in (f"layers.{number}." for number in range(text.num_hidden_layers)):
        yield from _move_modules(tensors, ours + layer, theirs + layer, modules)
        q, k, v = (tensors[f"{ours}{layer}self_attn.{one}_proj.weight"] for one in "qkv")
        rows = []
        for group in range(text.num_key_value_heads):
            for query in range(queries_per_group):
                first = (group * queries_per_group + query) * head_size
                rows += [q[first + row] for row in range(head_size)]
            rows += [k[group * head_size + row] for row in range(head_size)]
            rows += [v[group * head_size + row] for row in range(head_size)]
        yield f"{theirs}{layer}attention.wqkv.weight", torch.stack(rows)


SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
TEXT_SIZES = (*SIZES, "num_key_value_heads", "rms_norm_eps", "vocab_size")
VISION_SIZES = (*SIZES, "layer_norm_eps", "norm_type")
"""Keys in both kinds of config.json."""


def original_config(config: InternVLConfig, language: str, dtype: torch.dtype) -> dict:
    """Return the config written by InternVLChatConfig."""
    vision, text = config.vision_config, config.text_config
    return {
        "_commit_hash": None,
        "architectures": ["InternVLChatModel"],
        "auto_map": {"AutoModel": "modeling_internvl_chat.InternVLChatModel"},
        "model_type": "internvl_chat",
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "force_image_size": vision.image_size[0],
        "llm_config": {
            "architectures": [ARCHITECTURES[language]],
            "model_type": language,
            "bias": False,
            "hidden_act": "silu",
            "rope_scaling": {"factor": 2.0, "type": "dynamic"},
            "rope_theta": 5000,
            "tie_word_embeddings": config.tie_word_embeddings,
            "torch_dtype": str(dtype).removeprefix("torch."),
            **{name: getattr(text, name) for name in TEXT_SIZES},
            **LANGUAGES.get(language, (None, {}))[1],
        },
        "max_dynamic_patch": 6,
        "min_dynamic_patch": 1,
        "ps_version": "v2",
        "select_layer": -1,
        "template": "internlm2-chat",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_thumbnail": True,
        "vision_config": {
            "architectures": ["InternVisionModel"],
            "model_type": "intern_vit_6b",
            "drop_path_rate": 0.4,
            "hidden_act": "gelu",
            "image_size": vision.image_size[0],
            "initializer_factor": vision.layer_scale_init_value,
            "num_channels": 3,
            "patch_size": vision.patch_size[0],
            "qk_normalization": vision.use_qk_norm,
            "qkv_bias": vision.attention_bias,
            **{name: getattr(vision, name) for name in VISION_SIZES},
        },
    }


def save_released(
    model: InternVLForConditionalGeneration,
    folder: Path,
    layout: str,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int | None = None,
    head_copy: bool = False,
) -> Path:
    """Save a checkpoint folder without a tokenizer.

    Args: layout: "transformers", "prefixed", "stacked", or the original one's language model.
    shard_bytes: approximate file size; None: one file.
    """
    folder.mkdir(parents=True)
    model = copy.deepcopy(model).to(dtype)
    if layout in ("transformers", "prefixed", "stacked"):
        config = model.config.to_dict() | {
            "architectures": ["InternVLForConditionalGeneration"],
            "dtype": str(dtype).removeprefix("torch."),
        }
    else:
        config = original_config(model.config, layout, dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_tensors(folder, released_tensors(model, layout, head_copy), shard_bytes)
    return folder


def save_toy(name: str, folder: Path, layout: str, *options, **more) -> Path:
    """Save a checkpoint folder of a model of `KINDS`, without a tokenizer."""
    return save_released(transformers_model(KINDS[name]), folder, layout, *options, **more)


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], shard_bytes: int | None):
    """Write tensors as `save_pretrained` does."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in tensors.items():
        if shard_bytes is not None and sum(one.nbytes for one in shards[-1].values()) > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor.contiguous()
    if shard_bytes is None:
        save_file(shards[0], folder / "model.safetensors", {"format": "pt"})
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / "model.safetensors.index.json").write_text(text)


def write_holes(
    folder: Path, config: Mapping, shapes: Mapping[str, Sequence[int]], files: int
) -> None:
    """Write a bf16 checkpoint of any size with sparse files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weight_map: dict[str, str] = {}
    for number in range(files):
        file, header, size = f"model-{number + 1:05d}-of-{files:05d}.safetensors", {}, 0
        for name in sorted(shapes)[number::files]:
            end = size + 2 * math.prod(shapes[name])
            header[name] = {"dtype": "BF16", "shape": [*shapes[name]], "data_offsets": [size, end]}
            weight_map[name], size = file, end
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(8 + len(text) + size)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def word_tokenizer(pieces: Sequence[str]) -> tokenizers.Tokenizer:
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))


def write_tokenizer(folder: Path, pieces: Sequence[str] = PIECES) -> None:
    """Write a fast tokenizer with `<IMG_CONTEXT>` as `IMAGE_TOKEN`."""
    word_tokenizer(pieces).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": false}')


def imported(folder: Path, run: Path) -> Path:
    """Import a released checkpoint; return the run directory."""
    import_checkpoint(open_released(folder), run, lambda size: None)
    return run
