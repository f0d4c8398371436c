"""Llama, Qwen2 and Qwen3 by transformers: imported, trained and exported without loss."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from conversion_cases import (
    as_released,
    assert_near,
    computed_by,
    logits_together,
    observed,
    predicting_positions,
    put_together,
)
from conversion_file_cases import (
    assert_equal_tensors,
    content,
    exported,
    exported_like,
    tensors_of,
)
from ranks import run_ranks
from released import imported, randomized, write_tokenizer
from toy import pack, stages_of, toy_plan, toy_sample
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megatron.vlm.checkpoint.identity import open_newest
from megatron.vlm.conversion.exporting import plan_export_as
from megatron.vlm.conversion.importing import import_checkpoint, open_released
from megatron.vlm.conversion.released_config import read_config
from megatron.vlm.conversion.tensor_map import Layout
from omnibal.base.errors import UserError
from omnibal.data.tokenizer import open_tokenizer
from omnibal.model.config import LanguageConfig, ModelConfig, RopeScaling, config_toml, load_model
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
# Of four frequencies, two stay, one is divided and one is in between.
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


@dataclass(frozen=True, kw_only=True)
class Kind:
    config: LlamaConfig | Qwen2Config | Qwen3Config
    layout: Layout
    model: ModelConfig
    """This project's description of it, written by hand."""
    pieces: list[str]


KINDS = {
    "llama": Kind(
        config=LlamaConfig(**SIZES, rope_parameters=SCALING, tie_word_embeddings=False),
        layout=Layout.LLAMA,
        model=ModelConfig(
            name="released",
            chat_template="llama3",
            language=LanguageConfig(
                **OURS,
                rope_base=30,
                rope_scaling=RopeScaling(
                    factor=8, high_frequency_factor=2.5, original_positions=50
                ),
            ),
        ),
        pieces=LLAMA_PIECES,
    ),
    "qwen2-tied": Kind(
        config=Qwen2Config(**SIZES, rope_theta=5000.0, tie_word_embeddings=True),
        layout=Layout.QWEN2,
        model=ModelConfig(
            name="released",
            chat_template="qwen2.5",
            language=LanguageConfig(**OURS, rope_base=5000, qkv_bias=True, tied_head=True),
        ),
        pieces=CHATML_PIECES,
    ),
    "qwen3": Kind(
        config=Qwen3Config(
            **SIZES, head_dim=10, rope_parameters={"rope_theta": 5000.0}, tie_word_embeddings=False
        ),
        layout=Layout.QWEN3,
        model=ModelConfig(
            name="released",
            chat_template="tokenizer",
            language=LanguageConfig(**OURS, rope_base=5000, qk_norm=True, head_size=10),
        ),
        pieces=CHATML_PIECES,
    ),
}


def transformers_model(name: str) -> torch.nn.Module:
    return randomized(AutoModelForCausalLM.from_config(KINDS[name].config))


def released(name: str, folder: Path) -> Path:
    """A folder as transformers writes it, in several files, with a tokenizer."""
    transformers_model(name).save_pretrained(folder, max_shard_size="20KB")
    write_tokenizer(folder, KINDS[name].pieces)
    if KINDS[name].model.chat_template == "tokenizer":
        (folder / "chat_template.jinja").write_text(CHATML)
        (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (folder / "LICENSE").write_text("Yours.\n")
    return folder


@pytest.mark.parametrize("name", KINDS)
def test_import_knows_the_model_and_export_gives_the_same_bytes(tmp_path, name):
    """Prevents: a scaling, a limit or a template that an import forgets, or a tensor, a name or a
    file that comes back otherwise."""
    source = released(name, tmp_path / "released")
    run = imported(source, tmp_path / "run")
    assert load_model(str(run / "model.toml")) == KINDS[name].model
    assert (run / "model.toml").read_text() == config_toml(KINDS[name].model)
    assert content(exported_like(run, source, tmp_path / "again")) == content(source)


@pytest.mark.parametrize("name", KINDS)
def test_export_of_the_layout_is_what_transformers_loads(tmp_path, name):
    """Prevents: a config.json of another RoPE, norm or head than the weights were trained with."""
    model, kind = transformers_model(name), KINDS[name]
    run = imported(released(name, tmp_path / "released"), tmp_path / "run")
    tokenizer = open_tokenizer(run / "tokenizer")
    exported(run, kind.layout, tmp_path / "out")
    assert_equal_tensors(tensors_of(tmp_path / "out"), dict(model.named_parameters()))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(again) is type(model)
    end = "<|eot_id|>" if name == "llama" else "<|im_end|>"
    assert again.generation_config.eos_token_id == tokenizer.id_of(end)
    assert again.config.bos_token_id == tokenizer.id_of(tokenizer.bos_piece)
    ids = torch.arange(1, 50)[None]  # beyond the scaling's original length
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert open_released(tmp_path / "out").model == replaced_name(kind.model, "out")


@pytest.mark.parametrize(
    ("is_stacked", "layout", "other"),
    [
        (False, Layout.QWEN3_MOE, Layout.QWEN3_MOE_STACKED),
        (True, Layout.QWEN3_MOE_STACKED, Layout.QWEN3_MOE),
    ],
)
def test_experts_are_read_apart_and_as_one_tensor(tmp_path, is_stacked, layout, other):
    """Prevents: experts in another order, or gate and up of one that change places, in files of
    Transformers 4 or of its own names in 5; and an auxiliary loss that comes back as another."""
    config = Qwen3MoeConfig(
        **SIZES, head_dim=10, num_experts=4, num_experts_per_tok=3, moe_intermediate_size=20,
        norm_topk_prob=True, rope_parameters={"rope_theta": 5000.0},
        output_router_logits=is_stacked, router_aux_loss_coef=0.003,
    )  # fmt: skip
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
    assert content(exported_like(run, source, tmp_path / "back")) == content(source)
    exported(run, other, tmp_path / "out")
    again = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert again.config.output_router_logits == is_stacked
    assert again.config.router_aux_loss_coef == (0.003 if is_stacked else 0)
    assert_equal_tensors(dict(again.named_parameters()), dict(model.named_parameters()))
    assert open_released(tmp_path / "out").model.language == checkpoint.model.language


def replaced_name(model: ModelConfig, name: str) -> ModelConfig:
    return model.model_copy(update={"name": name})


def packs_of(model: ModelConfig) -> list[list]:
    lengths = [[70, 9, 6], [33, 5]]
    return [
        [toy_sample(model, 0, tokens, seed=10 * row + place) for place, tokens in enumerate(row_of)]
        for row, row_of in enumerate(lengths)
    ]


def computed_by_transformers(links, name):
    def logits_of(model, sample):
        return model(torch.tensor([sample.ids])).logits[0, predicting_positions(sample)]

    return computed_by(transformers_model(name), packs_of(KINDS[name].model), logits_of)


# Units: 0 language embed, 1-2 language layers, 3 head.
@pytest.mark.parametrize("name", KINDS)
def test_imported_model_computes_what_transformers_does(tmp_path, name):
    """Prevents: rows of q, k, v or of gate and up in another order, and another RoPE, in a sample
    that is longer than the scaling's original length."""
    model = KINDS[name].model
    run = imported(released(name, tmp_path / "released"), tmp_path / "run")
    plan = toy_plan(model, stages_of(model, 2), tensor=2, sequence_parallel=True)
    batches = [pack(samples) for samples in packs_of(model)]
    ranks = run_ranks(plan.parallel, observed, plan, run, batches)
    [expected] = run_ranks(Parallel(pipeline=1), computed_by_transformers, name)
    logits = logits_together(plan, [seen["head"] for _, seen, _ in ranks])
    for found, other in zip(logits, expected.logits_LW, strict=True):
        assert_near(found, other, "logits")
    assert [rank[0] for rank in ranks] == pytest.approx([expected.loss] * len(ranks), rel=1e-4)
    found = put_together(plan, [gradients for *_, gradients in ranks])
    ours = as_released(found, model, KINDS[name].layout)
    assert ours.keys() == expected.gradients.keys()
    for key, gradient in expected.gradients.items():
        # Without RoPE, keys that all move by the same change nothing but by rounding errors.
        assert_near(ours[key], gradient, key, least=1.0 if key.endswith("k_proj.bias") else 0.0)


# Of meta-llama/Llama-3.1-8B-Instruct and Qwen/Qwen2.5-32B-Instruct, what describes the model.
PUBLISHED = {
    "llama3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "hidden_act": "silu",
        "eos_token_id": [128001, 128008, 128009], "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "vocab_size": 128256,
    },
    "qwen2.5-32b": {
        "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 5120,
        "intermediate_size": 27648, "max_position_embeddings": 32768, "max_window_layers": 70,
        "model_type": "qwen2", "num_attention_heads": 40, "num_hidden_layers": 64,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 131072, "tie_word_embeddings": False, "use_sliding_window": False,
        "vocab_size": 152064,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_are_what_the_published_configurations_say(tmp_path, name):
    """Prevents: a preset, or an import, that trains another RoPE, norm or bias than the release."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name]))
    model, _ = read_config(folder, {"lm_head.weight"})
    assert model == load_model(name)


def edited(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


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
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_parameters that differ"),
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
    """Prevents: an import that trains another function than the released model's."""
    with pytest.raises(UserError, match=message):
        open_released(edited(released("llama", tmp_path / "released"), **changes))


def test_layouts_are_of_models_with_or_without_an_encoder(tmp_path):
    """Prevents: an export that drops an encoder, or a traceback for the lack of one."""
    run = imported(released("llama", tmp_path / "released"), tmp_path / "run")
    for layout in (Layout.TRANSFORMERS, Layout.INTERNVL_LLAMA):
        with pytest.raises(UserError, match="has no encoder, which layout"):
            plan_export_as(open_newest(run), layout, None, None, 10**9)
    with pytest.raises(UserError, match="has qkv_bias false, which layout qwen2"):
        plan_export_as(open_newest(run), Layout.QWEN2, None, None, 10**9)
    whole_model = replace(open_newest(run), model=load_model("internvl-digits"))
    with pytest.raises(UserError, match="has an encoder, which layout llama"):
        plan_export_as(whole_model, Layout.LLAMA, None, None, 10**9)
