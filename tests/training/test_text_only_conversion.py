"""Llama, Qwen2 and Qwen3 of Transformers: lossless import, training and export."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conversion_cases import assert_computes, compute_samples, observe, predicting_positions
from conversion_file_cases import (
    assert_equal_tensors,
    check_round_trip,
    content,
    edit_config,
    export_run,
    export_to_match,
    tensors_of,
)
from native_resolution_cases import DELTA
from ranks import run_ranks
from released import RELEASED_CONFIGS, imported, randomize, write_tokenizer
from toy import pack, stages_of, toy_plan, toy_sample
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megatron.vlm.conversion.importing import import_checkpoint, open_released
from megatron.vlm.conversion.released_config import check_exportable, read_config
from megatron.vlm.conversion.tensor_map import TensorLayout
from omnibal.base.errors import UserError
from omnibal.data.tokenizer import open_tokenizer
from omnibal.model.config import (
    LanguageConfig,
    ModelConfig,
    RopeScaling,
    RopeSections,
    config_toml,
    load_model,
)
from omnibal.model.layer_kinds import ExpertsConfig, LayerRun
from omnibal.model.parallel import Parallel

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 44, "vocab_size": 51, "rms_norm_eps": 1e-3,
    "max_position_embeddings": 640,
}  # fmt: skip
OURS = {
    "layers": 2, "hidden_size": 32, "heads": 4, "kv_heads": 2, "ffn_hidden_size": 44,
    "vocab_size": 51, "norm_eps": 1e-3, "max_positions": 640,
}  # fmt: skip
# Of four frequencies two are kept, one is divided and one is interpolated.
SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 2.5,
    "original_max_position_embeddings": 50, "rope_theta": 30.0,
}  # fmt: skip
LLAMA_PIECES = "<unk> <s> <|start_header_id|> <|end_header_id|> <|eot_id|> a b c".split()
CHATML = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "<|im_end|>\n{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)
CHATML_PIECES = "<unk> <|endoftext|> <|im_start|> <|im_end|> a b c".split()


class Kind(NamedTuple):
    config: LlamaConfig | Qwen2Config | Qwen3Config
    layout: TensorLayout
    pieces: list[str]
    model: ModelConfig
    """The hand-written model description."""


def describe(template: str, **language: Any) -> ModelConfig:
    language = LanguageConfig(**OURS, **language)
    return ModelConfig(name="released", chat_template=template, language=language)


OUR_SCALING = RopeScaling(factor=8, high_frequency_factor=2.5, original_positions=50)
PLAIN = {"rope_parameters": {"rope_theta": 5000.0}}
HYBRID = SIZES | {
    "head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": DELTA.convolution_width, "linear_key_head_dim": DELTA.key_head_size,
    "linear_value_head_dim": DELTA.value_head_size, "linear_num_key_heads": DELTA.key_heads,
    "linear_num_value_heads": DELTA.value_heads, "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1], "mrope_interleaved": True,
    },
}  # fmt: skip
"""Qwen3.5's language model; half of a head is rotated."""


def describe_hybrid(experts: ExpertsConfig | None = None, **language: Any) -> ModelConfig:
    runs = (
        LayerRun(layers=1, linear=DELTA, experts=experts), LayerRun(layers=1, experts=experts)
    )  # fmt: skip
    sections = RopeSections(time=2, rows=1, columns=1, interleaved=True)
    return describe(
        "tokenizer", rope_base=5000, qk_norm=True, head_size=16, output_gate=True,
        zero_centered_norms=True, rope_sections=sections, runs=runs, **language,
    )  # fmt: skip


KINDS = {
    "llama": Kind(
        LlamaConfig(**SIZES, rope_parameters=SCALING, tie_word_embeddings=False),
        TensorLayout.LLAMA,
        LLAMA_PIECES,
        describe("llama3", rope_base=30, rope_scaling=OUR_SCALING),
    ),
    "qwen2-tied": Kind(
        Qwen2Config(**SIZES, rope_theta=5000.0, tie_word_embeddings=True),
        TensorLayout.QWEN2,
        CHATML_PIECES,
        describe("qwen2.5", rope_base=5000, qkv_bias=True, tied_head=True),
    ),
    "qwen3": Kind(
        Qwen3Config(**SIZES, **PLAIN, head_dim=10, tie_word_embeddings=False),
        TensorLayout.QWEN3,
        CHATML_PIECES,
        describe("tokenizer", rope_base=5000, qk_norm=True, head_size=10),
    ),
    "qwen3.5": Kind(
        Qwen3_5TextConfig(**HYBRID), TensorLayout.QWEN3_5_TEXT, CHATML_PIECES, describe_hybrid()
    ),
    "qwen3.5-moe": Kind(
        Qwen3_5MoeTextConfig(
            **HYBRID, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20,
            shared_expert_intermediate_size=12, router_aux_loss_coef=0.0,
        ),
        TensorLayout.QWEN3_5_MOE_TEXT,  # with separate experts by default
        CHATML_PIECES,
        describe_hybrid(
            ExpertsConfig(
                experts=4, experts_per_token=2, ffn_hidden_size=20, shared_ffn_hidden_size=12,
                shared_gate=True,
            )
        ),
    ),
}  # fmt: skip


def transformers_model(name: str) -> torch.nn.Module:
    return randomize(AutoModelForCausalLM.from_config(KINDS[name].config))


def save_release(name: str, folder: Path) -> Path:
    """Save a sharded Transformers folder with a tokenizer."""
    transformers_model(name).save_pretrained(folder, max_shard_size="20KB")
    write_tokenizer(folder, KINDS[name].pieces)
    if KINDS[name].model.chat_template == "tokenizer":
        (folder / "chat_template.jinja").write_text(CHATML)
        (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (folder / "LICENSE").write_text("Yours.\n")
    return folder


@pytest.mark.parametrize("name", KINDS)
def test_model_comes_back_and_is_what_transformers_loads(tmp_path, name):
    """Prevents imports that lose RoPE scaling, limits, templates, tensors or files, and a
    config.json with a RoPE, norm or head other than trained."""
    model, kind = transformers_model(name), KINDS[name]
    run = check_round_trip(save_release(name, tmp_path / "released"), tmp_path)
    assert load_model(str(run / "model.toml")) == kind.model
    assert (run / "model.toml").read_text() == config_toml(kind.model)
    export_run(run, kind.layout, tmp_path / "out")
    assert_equal_tensors(tensors_of(tmp_path / "out"), dict(model.named_parameters()))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = open_tokenizer(run / "tokenizer")
    end = "<|eot_id|>" if name == "llama" else "<|im_end|>"
    assert type(again) is type(model)
    assert again.generation_config.eos_token_id == tokenizer.id_of(end)
    assert again.config.bos_token_id == tokenizer.id_of(tokenizer.bos_piece)
    ids = torch.arange(1, 50)[None]  # beyond the original length of RoPE scaling
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert open_released(tmp_path / "out").model == kind.model.model_copy(update={"name": "out"})


@pytest.mark.parametrize("is_stacked", [False, True])
def test_experts_are_read_apart_and_as_one_tensor(tmp_path, is_stacked):
    """Prevents reordered experts, swapped gate and up, and a changed auxiliary loss."""
    config = Qwen3MoeConfig(
        **SIZES, **PLAIN, head_dim=10, num_experts=4, num_experts_per_tok=3, norm_topk_prob=True,
        moe_intermediate_size=20, output_router_logits=is_stacked, router_aux_loss_coef=0.003,
    )  # fmt: skip
    layouts = (TensorLayout.QWEN3_MOE, TensorLayout.QWEN3_MOE_STACKED)
    layout, other = layouts[is_stacked], layouts[not is_stacked]
    model = Qwen3MoeForCausalLM(config).eval()
    source = tmp_path / "released"
    model.save_pretrained(source, save_original_format=not is_stacked)
    own = tensors_of(source)
    assert ("model.layers.0.mlp.experts.gate_up_proj" in own) == is_stacked
    checkpoint = open_released(source)
    assert checkpoint.layout == layout and len(set(checkpoint.model.language.kinds)) == 1
    run = tmp_path / "run"
    lines = import_checkpoint(checkpoint, run, lambda size: None)
    assert any("without an auxiliary loss" in line for line in lines) != is_stacked
    assert content(export_to_match(run, source, tmp_path / "back")) == content(source)
    export_run(run, other, tmp_path / "out")
    again = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert again.config.output_router_logits == is_stacked
    assert again.config.router_aux_loss_coef == (0.003 if is_stacked else 0)
    assert_equal_tensors(dict(again.named_parameters()), dict(model.named_parameters()))
    assert open_released(tmp_path / "out").model.language == checkpoint.model.language


def packs_of(model: ModelConfig) -> list[list]:
    return [
        [toy_sample(model, 0, tokens, seed=10 * row + place) for place, tokens in enumerate(row_of)]
        for row, row_of in enumerate([[70, 9, 6], [33, 5]])
    ]


def compute_reference(links, name):
    def logits_of(model, sample):
        return model(torch.tensor([sample.ids])).logits[0, predicting_positions(sample)]

    return compute_samples(transformers_model(name), packs_of(KINDS[name].model), logits_of)


# Units: 0 language embed, 1-2 language layers, 3 head.
@pytest.mark.parametrize("name", KINDS)
def test_imported_model_computes_what_transformers_does(tmp_path, name):
    """Prevents reordered q, k, v or gate and up rows, and wrong RoPE beyond the original length."""
    model = KINDS[name].model
    run = imported(save_release(name, tmp_path / "released"), tmp_path / "run")
    sizes = {"expert": 2} if name.endswith("moe") else {}
    plan = toy_plan(model, stages_of(model, 2), tensor=2, sequence_parallel=True, **sizes)
    batches = [pack(samples) for samples in packs_of(model)]
    ranks = run_ranks(plan.parallel, observe, plan, run, batches)
    [expected] = run_ranks(Parallel(pipeline=1), compute_reference, name)
    assert_computes(plan, ranks, expected, KINDS[name].layout)


@pytest.mark.parametrize("name", ["llama3.1-8b", "qwen2.5-32b"])
def test_presets_are_what_the_published_configurations_say(name):
    """Prevents presets or imports with a RoPE, norm or bias other than the release's."""
    model, _ = read_config(RELEASED_CONFIGS / name, {"lm_head.weight"})
    assert model == load_model(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "mistral"},
            "'mistral', which is not converted; it must be one of internvl_chat, .*or qwen3_moe",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "must be one of LlamaForCausalLM"),
        ({"rope_parameters": SCALING | {"rope_type": "yarn"}}, "RoPE of type 'yarn'"),
        ({"rope_parameters": SCALING | {"factor": None}}, "type 'llama3' lacks factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_parameters differ"),
        ({"rope_parameters": SCALING | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "type 'dynamic' lacks factor"),
        ({"rope_parameters": {"rope_type": "linear", "type": "default"}}, "RoPE of type 'linear'"),
        (
            {"layer_types": ["sliding_attention", "full_attention"]},
            "'sliding_attention' must be 'full_attention'",
        ),
        ({"quantization_config": {"bits": 4}}, "must be unquantized"),
        ({"rms_norm_eps": -1}, "norm_eps: Input should be greater than 0"),
        ({"attention_bias": True}, "attention_bias true must be false"),
        ({"tie_word_embeddings": True, "num_hidden_layers": 3}, "lacks"),
    ],
)
def test_other_models_are_refused(tmp_path, changes, message):
    """Prevents imports of architectures that train another function."""
    source = save_release("llama", tmp_path / "released")
    edit_config(**changes)(source)
    with pytest.raises(UserError, match=message):
        open_released(source)


@pytest.mark.parametrize(
    ("is_seeing", "layout", "message"),
    [
        (False, TensorLayout.TRANSFORMERS, "encoder is of none, and the layout's of tiles"),
        (False, TensorLayout.INTERNVL_LLAMA, "encoder is of none, and the layout's of tiles"),
        (False, TensorLayout.QWEN2, "qkv_bias is False there and True in layout qwen2"),
        (True, TensorLayout.LLAMA, "encoder is of tiles, and the layout's of none"),
    ],
)
def test_layouts_are_of_models_with_or_without_an_encoder(is_seeing, layout, message):
    """Prevents exports that drop an encoder, and a traceback if there is none."""
    model = load_model("internvl-digits") if is_seeing else KINDS["llama"].model
    with pytest.raises(UserError, match=message):
        check_exportable(model, layout)
