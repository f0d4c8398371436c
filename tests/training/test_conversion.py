"""Released checkpoints in and out again: the same bytes and weights, and nothing by halves."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conversion_cases import (
    OURS,
    as_released,
    assert_near,
    logits_of,
    micro_batches,
    model_of,
    put_together,
    train_and_save,
)
from conversion_file_cases import (
    INDEX,
    SHARD_BYTES,
    TYPES,
    assert_equal_tensors,
    content,
    edit_config,
    edit_json,
    edit_tensor,
    edit_tensors,
    exported_as,
    exported_like,
    tensors_of,
)
from ranks import run_ranks
from released import (
    CASES,
    HEADS,
    IMAGE_TOKEN,
    KINDS,
    LAYOUTS,
    PIECES,
    imported,
    released_tensors,
    save_released,
    transformers_model,
    write_tensors,
    write_tokenizer,
)
from safetensors.torch import load_file, save_file
from tensor_parallel_cases import by_name
from toy import OPTIONS, pack, stages_of, toy_plan
from transformers import (
    InternVLForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from megatron.vlm.checkpoint.identity import open_newest
from megatron.vlm.checkpoint.save_load import load_checkpoint, load_weights
from megatron.vlm.conversion.exporting import plan_export_as, write_export
from megatron.vlm.conversion.importing import ReleasedCheckpoint, import_checkpoint, open_released
from megatron.vlm.conversion.own_weights import StoredWeights, _ReadPlanner
from megatron.vlm.conversion.tensor_map import parameters
from megatron.vlm.step.train import build_trainer
from omnibal.base.errors import UserError
from omnibal.model.config import load_model
from omnibal.model.encoders import TilingConfig
from tools import convert


def complete(folder: Path) -> Path:
    """The folder, with what else a released checkpoint has."""
    write_tokenizer(folder)
    (folder / "README.md").write_text("# A model\n")
    (folder / "modeling_internvl_chat.py").write_text("raise ImportError\n")
    (folder / "preprocessor_config.json").write_text("{}")
    return folder


FILES = {"single": None, "sharded": SHARD_BYTES}


def in_every_form(cases):
    """Each case in one file and in several, one of them in fp32 and the other in bf16, by turns."""
    for number, case in enumerate(cases):
        types = ("fp32", "bf16")[:: 1 if number % 2 else -1]
        for (files, size), dtype in zip(FILES.items(), types, strict=True):
            yield pytest.param(*case, size, dtype, id="-".join((*case, files, dtype)))


@pytest.mark.parametrize(("name", "layout", "shard_bytes", "dtype"), list(in_every_form(CASES)))
def test_import_and_export_give_the_same_bytes(tmp_path, name, layout, shard_bytes, dtype):
    """Prevents: values, types, names, files, metadata or companions that a conversion loses."""
    model, copied = transformers_model(KINDS[name]), OURS[layout].is_original
    there = save_released(
        model, tmp_path / "there", layout, TYPES[dtype], shard_bytes, head_copy=copied
    )
    source = complete(there)
    run = imported(source, tmp_path / "run")
    assert content(exported_like(run, source, tmp_path / "back")) == content(source)


def test_types_that_differ_between_tensors_stay(tmp_path):
    """Prevents: norms that are stored in fp32 beside bf16 matrices, and come back rounded."""
    source = save_released(
        transformers_model(KINDS["6b-llama"]), tmp_path / "there", "internlm2", torch.bfloat16
    )
    tensors = tensors_of(source)
    exact = {name: value for name, value in tensors.items() if "norm" in name}
    exact = {name: torch.rand(value.shape) for name, value in exact.items()}
    assert len(exact) == 2 * 6 + 1
    (source / "model.safetensors").unlink()
    write_tensors(source, tensors | exact, SHARD_BYTES)
    run = imported(source, tmp_path / "run")
    assert content(exported_like(run, source, tmp_path / "back")) == content(source)
    assert_equal_tensors(
        tensors_of(exported_as(run, "internlm2", tmp_path / "out")), tensors | exact
    )


@pytest.mark.parametrize(
    ("name", "shard_size"), list(zip(KINDS, ["20KB", "1GB"] * (len(KINDS) // 2), strict=True))
)
def test_what_transformers_saves_comes_back(tmp_path, name, shard_size):
    """Prevents: files that only this project's tests write, or a tied head that is invented."""
    source = tmp_path / "there"
    transformers_model(KINDS[name]).save_pretrained(source, max_shard_size=shard_size)
    run = imported(complete(source), tmp_path / "run")
    assert (len(list(source.glob("*.safetensors"))) > 1) == (shard_size == "20KB")
    assert content(exported_like(run, source, tmp_path / "back")) == content(source)


@pytest.mark.parametrize(("name", "layout"), [case for case in CASES if case[0].endswith("tied")])
def test_copy_of_a_tied_head_stays(tmp_path, name, layout):
    """Prevents: a tied model that other tools do not load, as they look for the head's tensor."""
    model = transformers_model(KINDS[name])
    source = save_released(model, tmp_path / "there", layout, torch.bfloat16, SHARD_BYTES, True)
    assert len(tensors_of(source)) == 1 + len(released_tensors(model, layout))
    run = imported(source, tmp_path / "run")
    assert open_newest(run).model.language.tied_head
    assert content(exported_like(run, source, tmp_path / "back")) == content(source)


TIED_ORIGINAL = [
    (name, layout) for name, layout in CASES if KINDS[name].tied and OURS[layout].is_original
]


@pytest.mark.parametrize(
    ("name", "layout", "shard_bytes", "dtype"), list(in_every_form(TIED_ORIGINAL))
)
def test_tied_head_is_written_for_code_that_unties_it(tmp_path, name, layout, shard_bytes, dtype):
    """Prevents: a random head in InternVL's own code, which ties none, whatever config.json says:
    of a layout that is asked for, or beside a checkpoint that has no copy."""
    model = transformers_model(KINDS[name])
    expected = released_tensors(model, layout, head_copy=True)
    expected = {key: value.to(TYPES[dtype]) for key, value in expected.items()}
    size = sum(value.nbytes for value in expected.values())
    source = complete(save_released(model, tmp_path / "there", layout, shard_bytes=shard_bytes))
    assert HEADS[layout] not in tensors_of(source)
    run = imported(source, tmp_path / "run")
    wanted = None if dtype == "fp32" else TYPES[dtype]  # which it is stored in
    like = exported_like(run, source, tmp_path / "like", wanted)
    made = exported_as(run, layout, tmp_path / "made", wanted, size=shard_bytes or 10**9)
    for folder in (like, made):
        assert_equal_tensors(tensors_of(folder), expected)
        if shard_bytes is not None:
            index = json.loads((folder / INDEX).read_text())
            assert index["weight_map"].keys() == expected.keys()
            assert index["metadata"]["total_size"] == size
        assert_same_parameters(imported(folder, tmp_path / f"again-{folder.name}"), run, dtype)
    config = json.loads((made / "config.json").read_text())
    assert config["tie_word_embeddings"] is config["llm_config"]["tie_word_embeddings"] is True
    if wanted is None:
        names = {path for path in content(source) if not path.startswith("model")}
        assert names == {path for path in content(like) if not path.startswith("model")}
        assert all(content(like)[path] == content(source)[path] for path in names)


@pytest.mark.parametrize(("name", "layout"), [c for c in TIED_ORIGINAL if c[1] != "internlm2"])
def test_untying_class_computes_the_same(tmp_path, name, layout):
    """Prevents: a copy of the head that is of other words, or of the embedding before training."""
    model = transformers_model(KINDS[name])
    run = imported(save_released(model, tmp_path / "there", layout), tmp_path / "run")
    tensors = tensors_of(exported_as(run, layout, tmp_path / "out"))
    untied = model.config.text_config.to_dict() | {"tie_word_embeddings": False}
    classes = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }
    kind, head = classes[layout]
    language = head(kind(**untied)).eval()
    prefix = "language_model."
    own = {key.removeprefix(prefix): at for key, at in tensors.items() if key.startswith(prefix)}
    language.load_state_dict(own, strict=True)
    ids = torch.arange(1, 24)[None]
    with torch.no_grad():
        assert_near(language(ids).logits, model(input_ids=ids).logits, "logits")


def next_layout(name, layout):
    """Of those that hold the model, in a ring: every one is led to once, and leads to another."""
    others = LAYOUTS[KINDS[name].language]
    return others[(others.index(layout) + 1) % len(others)]


@pytest.mark.parametrize(
    ("name", "layout", "other"), [(*case, next_layout(*case)) for case in CASES]
)
def test_every_layout_leads_to_another(tmp_path, name, layout, other):
    """Prevents: exports that are wrong in the same way as imports, and so come back right."""
    model = transformers_model(KINDS[name])
    run = imported(complete(save_released(model, tmp_path / "there", layout)), tmp_path / "run")
    target = exported_as(run, other, tmp_path / "out")
    expected = released_tensors(model, other, head_copy=OURS[other].is_original)
    assert_equal_tensors(tensors_of(target), expected)
    again = imported(target, tmp_path / "again")
    assert_same_parameters(again, run)
    there, here = open_newest(again).model, open_newest(run).model
    # What prepares samples is not told by every layout.
    assert there.with_tower("vision", tiling=here.vision.tiling).vision == here.vision
    assert there.language == here.language
    files = content(run / "tokenizer")
    if not OURS[other].is_original:
        assert files.pop("preprocessor_config.json") == b"{}"  # this one is made of the model
    assert files.items() <= content(again / "tokenizer").items()


def assert_same_parameters(run: Path, other: Path, dtype: str | None = None) -> None:
    """Also of another type, where `run` was made in one."""
    identity = open_newest(run)
    assert identity.model.language == open_newest(other).model.language
    own, theirs = StoredWeights(identity.path), StoredWeights(open_newest(other).path)
    every = list(parameters(identity.model))
    for parameter, tensor, expected in zip(every, own.read(every), theirs.read(every), strict=True):
        expected = expected if dtype is None else expected.to(TYPES[dtype])
        assert tensor.dtype == expected.dtype, parameter.name
        assert torch.equal(tensor, expected), parameter.name


@pytest.mark.parametrize("layout", ["transformers", "internlm2"])
def test_original_layout_comes_back_with_its_settings(tmp_path, layout):
    """Prevents: tiles, thumbnails or conversations of another kind after a round trip."""
    source = save_released(
        transformers_model(KINDS["6b-llama"]), tmp_path / "there", "internlm2", torch.bfloat16
    )
    run = imported(complete(source), tmp_path / "run")
    model = load_model(str(run / "model.toml"))
    assert model.name == "there" and model == open_newest(run).model
    assert model.vision.tiling.max_dynamic_patch == 6 and model.vision.tiling.use_thumbnail
    assert model.chat_template == "internlm2-chat"
    again = imported(exported_as(run, layout, tmp_path / "there2"), tmp_path / "again")
    if layout == "internlm2":
        renamed = open_newest(again).model.model_copy(update={"name": "there"})
        assert renamed == model


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_export_in_another_type(tmp_path, dtype):
    """Prevents: types that are promised in config.json and not kept, or rounded twice."""
    model = transformers_model(KINDS["300m-qwen2"])
    source = save_released(model, tmp_path / "there", "transformers")
    run = imported(source, tmp_path / "run")
    expected = {
        name: tensor.to(TYPES[dtype])
        for name, tensor in released_tensors(model, "transformers").items()
    }
    like = exported_like(run, source, tmp_path / "like", TYPES[dtype])
    assert_equal_tensors(tensors_of(like), expected)
    made = exported_as(run, "transformers", tmp_path / "made", TYPES[dtype])
    assert_equal_tensors(tensors_of(made), expected)
    assert json.loads((made / "config.json").read_text())["dtype"] == f"{TYPES[dtype]}"[6:]
    index = json.loads((made / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in expected.values())


def loaded(links, plan, run):
    trainer = build_trainer(plan, links, OPTIONS, steps=1, seed=9)
    assert load_weights(run, plan, trainer.stages) == 0
    return by_name(trainer.stage, lambda parameter: parameter)


def resumed(links, plan, run):
    trainer = build_trainer(plan, links, OPTIONS, steps=1, seed=9)
    parts = (trainer.stages, trainer.optimizers, trainer.scheduler, asdict(OPTIONS))
    with pytest.raises(UserError, match="weights alone") as raised:
        load_checkpoint(run, plan, *parts)
    return str(raised.value)


def test_imported_weights_are_started_from_and_not_resumed(tmp_path):
    """Prevents: an import that is trained on without its optimizer's state, unsaid; and one whose
    weights are refused because a plan tiles or asks otherwise than the released model."""
    model = transformers_model(KINDS["300m-qwen2"])
    source = save_released(model, tmp_path / "there", "transformers")
    run, own = imported(source, tmp_path / "run"), model_of("300m-qwen2")
    other = own.with_tower("vision", tiling=TilingConfig(max_dynamic_patch=3)).model_copy(
        update={
            "chat_template": "Hermes-2",
            "system_message": "be short",
            "chat_system_message": "talk",
            "language": own.language.model_copy(update={"max_positions": 9999}),
        }
    )
    plan = toy_plan(other, stages_of(other))
    [line] = run_ranks(plan.parallel, resumed, plan, run)
    assert line.endswith("start from them with --finetune")
    assert run_ranks(plan.parallel, loaded, plan, run)


# Cut 2 divides the vision layers, cut 6 the language layers (and a tied matrix, into two copies).
@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("300m-qwen2", 6),
        ("6b-llama", 2),
        ("6b-llama", 6),
        ("6b-qwen2-tied", 6),
        ("300m-llama-tied", 2),
    ],
)
def test_every_split_loads_the_released_values(tmp_path, name, cut):
    """Prevents: weights that depend on the split, or that a load in another type changes: stored as
    bf16 and loaded as fp32, they are what was released, bit for bit."""
    model = transformers_model(KINDS[name])
    layout = LAYOUTS[KINDS[name].language][-1]
    run = imported(
        save_released(model, tmp_path / "there", layout, torch.bfloat16), tmp_path / "run"
    )
    expected = {
        key: value.bfloat16().float() for key, value in released_tensors(model, layout).items()
    }
    for cuts, tensor in (((), 1), ((cut,), 2)):
        plan = toy_plan(model_of(name), stages_of(model_of(name), *cuts), tensor=tensor)
        ranks = run_ranks(plan.parallel, loaded, plan, run)
        found = put_together(plan, ranks)
        assert_equal_tensors(as_released(found, model_of(name), OURS[layout]), expected)
        for parameter in parameters(model_of(name)):
            real = found[parameter.name][tuple(slice(size) for size in parameter.shape)]
            assert found[parameter.name].count_nonzero() == real.count_nonzero()


def test_bf16_plan_rounds_what_is_stored_once(tmp_path):
    """Prevents: training in bf16 that cannot begin with an fp32 checkpoint, or begins elsewhere."""
    model, ours = transformers_model(KINDS["6b-llama"]), model_of("6b-llama")
    run = imported(save_released(model, tmp_path / "there", "internlm2"), tmp_path / "run")
    plan = toy_plan(ours, stages_of(ours)).model_copy(update={"precision": "bf16"})
    [found] = run_ranks(plan.parallel, loaded, plan, run)
    released = released_tensors(model, "internlm2")
    expected = {key: value.bfloat16() for key, value in released.items()}
    assert_equal_tensors(as_released(found, ours, OURS["internlm2"]), expected)


def batches_of(model):
    return [pack(samples) for samples in micro_batches(model)]


@pytest.mark.parametrize(
    ("name", "layout", "cuts", "tensor"),
    [
        pytest.param("300m-qwen2", "qwen2", (), 1, id="one-process"),
        pytest.param("6b-llama", "internlm2", (4,), 1, id="pp2"),
        pytest.param("6b-llama", "transformers", (6,), 2, id="pp2-tp2"),
        pytest.param("6b-qwen2-tied", "transformers", (6,), 1, id="pp2-tied"),
        pytest.param("6b-qwen3", "qwen3", (), 2, id="norms-of-heads"),
        pytest.param("300m-qwen3-moe", "stacked", (), 1, id="experts"),
    ],
)
def test_trained_model_is_the_same_in_transformers(tmp_path, name, layout, cuts, tensor):
    """Prevents: an export of the weights before training, of optimizer state, of one stage alone,
    or with a config.json that makes another model of them."""
    before = transformers_model(KINDS[name])
    source = complete(save_released(before, tmp_path / "there", layout))
    run, trained = imported(source, tmp_path / "run"), tmp_path / "trained"
    model = model_of(name)
    plan = toy_plan(model, stages_of(model, *cuts), tensor=tensor)
    ranks = run_ranks(plan.parallel, train_and_save, plan, run, trained, batches_of(plan.model))
    shutil.copytree(run / "tokenizer", trained / "tokenizer")
    exported_as(trained, "transformers", tmp_path / "out")
    after, info = InternVLForConditionalGeneration.from_pretrained(
        tmp_path / "out", dtype="auto", local_files_only=True, output_loading_info=True
    )
    assert not any(info.values()), info
    # Under this project's stand-ins for CUDA, that load leaves RoPE's table, which is not stored,
    # undefined.
    values, after = after.state_dict(), InternVLForConditionalGeneration(after.config).eval()
    after.load_state_dict(values)
    assert after.dtype == torch.float32 and after.config.image_token_id == IMAGE_TOKEN
    assert after.config.tie_word_embeddings == KINDS[name].tied
    changed = dict(before.named_parameters())
    for key, parameter in after.named_parameters():
        # A bias of keys in a pre-norm encoder without q and k norms has no gradient.
        assert "k_proj.bias" in key or not torch.equal(parameter, changed[key]), key
    for place, samples in enumerate(micro_batches(model)):
        ours = torch.cat([rank[place] for rank in ranks[-tensor:]], -1)
        with torch.no_grad():
            theirs = torch.cat([logits_of(after, sample) for sample in samples])
        assert_near(ours[:, : model.language.vocab_size], theirs, "logits")


def test_training_export_is_like_the_released_checkpoint(tmp_path):
    """Prevents: a fine-tuned copy that lacks files of the checkpoint it began with."""
    name, layout = "6b-llama", "internlm2"
    source = complete(
        save_released(
            transformers_model(KINDS[name]), tmp_path / "there", layout, shard_bytes=SHARD_BYTES
        )
    )
    run, trained = imported(source, tmp_path / "run"), tmp_path / "trained"
    plan = toy_plan(model_of(name), stages_of(model_of(name), 4))
    run_ranks(plan.parallel, train_and_save, plan, run, trained, batches_of(plan.model))
    like = exported_like(trained, source, tmp_path / "like")
    assert content(like).keys() == content(source).keys()
    different = {file for file, data in content(source).items() if content(like)[file] != data}
    assert different == {path.name for path in source.glob("*.safetensors")}
    made = exported_as(trained, layout, tmp_path / "made")
    assert_equal_tensors(tensors_of(made), tensors_of(like))


def shard(folder: Path, number: int = 1) -> Path:
    return sorted(folder.glob("*.safetensors"))[number]


def cut_short(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def edit_index(change: Callable[[dict[str, str]], None]) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / INDEX, lambda index: change(index["weight_map"]))


def pickled(folder: Path) -> None:
    tensors = tensors_of(folder)
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    torch.save(tensors, folder / "pytorch_model.bin")


def in_two_files(folder: Path) -> None:
    tensors = load_file(shard(folder, 0)) | load_file(shard(folder, 1))
    save_file(tensors, shard(folder, 0))


NORM = "language_model.model.norm.weight"
WQKV = "language_model.model.layers.0.attention.wqkv.weight"
QUERY = "language_model.model.layers.0.self_attn.q_proj.weight"
BAD = {
    "truncated-data": ("internlm2", lambda at: cut_short(shard(at), -10), "truncated or broken"),
    "truncated-header": ("internlm2", lambda at: cut_short(shard(at), 100), "truncated or broken"),
    "empty-shard": ("internlm2", lambda at: cut_short(shard(at), 0), "truncated or broken"),
    "missing-shard": ("internlm2", lambda at: shard(at).unlink(), "no such file, but the index"),
    "not-in-index": (
        "internlm2", edit_index(lambda at: at.pop(NORM)), f"does not name {NORM}"
    ),
    "not-in-file": (
        "internlm2", edit_index(lambda at: at.update(extra=shard_name(at))), "extra is not in"
    ),
    "in-another-file": (
        "internlm2", edit_index(lambda at: at.update({NORM: min(at.values())})), f"{NORM} is not in"
    ),
    "in-two-files": ("internlm2", in_two_files, "is in both"),
    "outside": (
        "internlm2", edit_index(lambda at: at.update({NORM: "../there/" + at[NORM]})),
        f"has {NORM} in '../there/model-",
    ),
    "index-not-json": ("internlm2", lambda at: cut_short(at / INDEX, 50), "fetch it again"),
    "lacks-a-tensor": ("internlm2", edit_tensors(lambda at: at.pop(NORM)), f"lacks {NORM}"),
    "unknown-tensor": (
        "internlm2", edit_tensors(lambda at: at.update(extra=torch.ones(2))), "has extra, which"
    ),
    "unknown-layer": (
        "internlm2",
        edit_config(llm_config__num_hidden_layers=1),
        "has language_model.model.layers.1.attention.wo.weight, language_model",
    ),
    "transposed": (
        "internlm2", edit_tensor(WQKV, lambda at: at.T.contiguous()), "is [32, 64] and not [64, 32]"
    ),
    "other-width": (
        "internlm2", edit_config(vision_config__hidden_size=48), "config.json and the tensors"
    ),
    "other-image-size": (
        "internlm2", edit_config(force_image_size=32), "set it to 16 there to train on such tiles"
    ),
    "other-encoder-size": (
        "internlm2",
        edit_config(force_image_size=None, vision_config__image_size=32),
        "is [1, 17, 24] and not [1, 65, 24]",
    ),
    "padded-to-squares": ("internlm2", edit_config(pad2square=True), "pad2square true"),
    "mixed-types": (
        "transformers", edit_tensor(QUERY, torch.Tensor.bfloat16), "stored in several types"
    ),
    "quantized": ("internlm2", edit_tensor(WQKV, torch.Tensor.char), "is of type I8"),
    "quantized-to-8-bit-floats": (
        "internlm2", edit_tensor(WQKV, lambda at: at.to(torch.float8_e4m3fn)), "is of type F8_E4M3"
    ),
    "pickled": ("internlm2", pickled, "only safetensors"),
    "no-config": ("internlm2", lambda at: (at / "config.json").unlink(), "no such file"),
    "other-kind": ("transformers", edit_config(model_type="llava"), "of a model of type 'llava'"),
    "scaled-rope": (
        "internlm2",
        edit_config(llm_config__rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        "RoPE of type 'llama3'",
    ),
    "scaled-rope-of-transformers": (
        "transformers",
        edit_config(text_config__rope_parameters={"rope_type": "yarn", "rope_theta": 5000.0}),
        "RoPE of type 'yarn'",
    ),
    "earlier-layer": ("internlm2", edit_config(select_layer=-4), "select_layer -4"),
    "earlier-layer-of-transformers": (
        "transformers", edit_config(vision_feature_layer=-2), "vision_feature_layer"
    ),
    "first-pixel-shuffle": ("internlm2", edit_config(ps_version="v1"), "ps_version 'v1'"),
    "other-language-model": (
        "internlm2", edit_config(llm_config__architectures=["Phi3ForCausalLM"]), "Phi3ForCausalLM"
    ),
    "other-template": ("internlm2", edit_config(template="vicuna"), "template 'vicuna'"),
    "head-size": ("transformers", edit_config(text_config__head_dim=8), "k_proj.weight is"),
    "biases": ("internlm2", edit_config(llm_config__bias=True), "bias true must be false"),
    "no-heads": (
        "internlm2", edit_config(llm_config__num_attention_heads=0), "greater than 0 (given: 0)"
    ),
    "no-heads-of-vision": (
        "transformers", edit_config(vision_config__num_attention_heads=0), "greater than 0"
    ),
    "language-model-that-scales-otherwise": (
        "transformers", edit_config(text_config__model_type="granite"), "model is granite"
    ),
    "language-model-with-windows": (
        "transformers", edit_config(text_config__model_type="mistral"), "model is mistral"
    ),
    "language-model-with-norms-of-heads": (
        "transformers", edit_config(text_config__model_type="qwen3"), "q_norm.weight"
    ),
    "heads-do-not-divide": (
        "internlm2", edit_config(llm_config__num_attention_heads=5), "must be a multiple of heads 5"
    ),
    "no-tokenizer-pieces": (
        "internlm2", lambda at: write_tokenizer(at, PIECES[3:]), "lacks the piece(s) <img>"
    ),
    "tokenizer-not-json": (
        "internlm2", lambda at: cut_short(at / "tokenizer.json", 9), "not a Hugging Face tokenizer"
    ),
    "tied-with-another-head": (
        "internlm2", edit_config(llm_config__tie_word_embeddings=True), "ties the head"
    ),
}  # fmt: skip


def shard_name(weight_map: dict[str, str]) -> str:
    return min(weight_map.values())


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints of one model in two layouts, never changed."""
    folder = tmp_path_factory.mktemp("good")
    model = transformers_model(KINDS["6b-llama"])
    return {
        layout: complete(save_released(model, folder / layout, layout, shard_bytes=SHARD_BYTES))
        for layout in ("internlm2", "transformers")
    }


@pytest.fixture(scope="module")
def good_run(good, tmp_path_factory) -> Path:
    return imported(good["internlm2"], tmp_path_factory.mktemp("good-run") / "run")


@pytest.fixture
def refused(monkeypatch, capsys) -> Callable[..., str]:
    """The one line that a command ends with."""

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["convert.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            convert.main()
        assert ended.value.code == 2
        [line] = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error:")]
        return line

    return run


@pytest.mark.parametrize(("layout", "change", "message"), BAD.values(), ids=BAD)
def test_bad_checkpoint_is_refused(tmp_path, good, refused, layout, change, message):
    """Prevents: weights that are imported wrong, a traceback, or a run that is there by half."""
    source = tmp_path / "there"
    shutil.copytree(good[layout], source)
    change(source)
    before = content(tmp_path)
    line = refused("import", source, "-o", tmp_path / "new" / "run")
    assert message in line and str(source) in line
    assert content(tmp_path) == before
    assert list(tmp_path.iterdir()) == [source]


def test_head_copy_of_another_type_is_refused(tmp_path, refused):
    """Prevents: a traceback over a tied head that is stored in another type than the embedding."""
    model = transformers_model(KINDS["6b-qwen2-tied"])
    source = save_released(model, tmp_path / "there", "qwen2", shard_bytes=SHARD_BYTES,
                           head_copy=True)  # fmt: skip
    edit_tensor("language_model.lm_head.weight", torch.Tensor.bfloat16)(source)
    line = refused("import", source, "-o", tmp_path / "run")
    assert "language_model.lm_head.weight" in line
    assert list(tmp_path.iterdir()) == [source]


def test_source_that_is_not_there_is_refused(tmp_path, refused, good):
    """Prevents: a traceback over a mistyped path."""
    assert "no such folder" in refused("import", tmp_path / "none", "-o", tmp_path / "run")
    config = good["internlm2"] / "config.json"
    assert "no such folder" in refused("import", config, "-o", tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_what_exists_is_not_written_over(tmp_path, good, good_run, refused):
    """Prevents: a run or a checkpoint that is lost to a conversion."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").write_text("kept")
    (tmp_path / "file").write_text("kept")
    before = content(tmp_path)
    for target, why in (
        (tmp_path / "folder", "exists already"),
        (tmp_path / "file", "is a file or device, and must name a folder"),
    ):
        for arguments in (
            ("import", good["internlm2"]),
            ("export", good_run, "--like", good["internlm2"]),
            ("export", good_run, "--layout", "transformers"),
        ):
            assert f"{target}: {why}" in refused(*arguments, "-o", target)
    assert content(tmp_path) == before


def test_impossible_exports_are_refused(tmp_path, good, good_run, refused):
    """Prevents: an export of weights into files of another model, or of another arrangement."""
    like = good["internlm2"]
    target = ("-o", tmp_path / "out")
    assert "not both" in refused("export", good_run, *target)
    assert "not both" in refused(
        "export", good_run, "--like", like, "--layout", "transformers", *target
    )
    assert "--like brings its own tokenizer" in refused(
        "export", good_run, "--like", like, "--tokenizer-model", like, *target
    )
    assert "qkv_bias false" in refused("export", good_run, "--layout", "internvl-qwen2", *target)
    assert "--max-shard-size 5" in refused(
        "export", good_run, "--layout", "transformers", "--max-shard-size", "5", *target
    )
    assert "no such tokenizer" in refused(
        "export", good_run, "--layout", "transformers", "--tokenizer-model", "none", *target
    )
    write_tokenizer(tmp_path, [*PIECES, *map(str, range(99))])
    assert "embeds 51" in refused(
        "export", good_run, "--layout", "transformers", "--tokenizer-model", tmp_path, *target
    )
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty").mkdir()
    for absent in (tmp_path / "none", tmp_path / "empty"):
        line = refused("export", absent, "--like", like, *target)
        assert f"{absent}: holds no checkpoint" in line and "--load" not in line
    other = save_released(transformers_model(KINDS["300m-qwen2"]), tmp_path / "other", "qwen2")
    line = refused("export", good_run, "--like", other, *target)
    assert f"vision.normalization is RMSNorm there and LayerNorm in {other / 'config.json'}" in line
    run = imported(other, tmp_path / "run")
    for layout in ("internvl-internlm2", "internvl-llama"):
        assert "qkv_bias true" in refused("export", run, "--layout", layout, *target)
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "other", "run"}


@pytest.mark.parametrize("damage", ["cut", "removed", "metadata", "common"])
@pytest.mark.parametrize("way", ["like", "layout"])
def test_broken_run_is_not_exported(tmp_path, good, good_run, refused, damage, way):
    """Prevents: an export that is there by half, of a run whose files are damaged."""
    run = tmp_path / "run"
    shutil.copytree(good_run, run)
    checkpoint = open_newest(run).path
    [file] = checkpoint.glob("*.distcp")
    if damage == "cut":
        cut_short(file, file.stat().st_size // 2)
    elif damage == "removed":
        file.unlink()
    else:
        (checkpoint / {"metadata": ".metadata", "common": "common.pt"}[damage]).unlink()
    before = content(tmp_path)
    arguments = {"like": ("--like", good["internlm2"]), "layout": ("--layout", "transformers")}
    line = refused("export", run, *arguments[way], "-o", tmp_path / "out")
    assert str(checkpoint) in line and "put a whole copy back" in line
    assert content(tmp_path) == before and list(tmp_path.iterdir()) == [run]


def test_source_that_vanishes_leaves_nothing(tmp_path, good):
    """Prevents: a run that is there by half where a file cannot be read any more."""
    source = tmp_path / "there"
    shutil.copytree(good["internlm2"], source)
    opened = open_released(source)
    shard(source, -1).unlink()
    with pytest.raises(UserError, match="fetch it again") as caught:
        import_checkpoint(opened, tmp_path / "run", lambda size: None)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [source]


def stop(size: int) -> None:
    raise KeyboardInterrupt


def test_stopped_conversion_leaves_nothing(tmp_path, good, good_run):
    """Prevents: half a conversion after Ctrl-C, an error message instead of stopping, rests of a
    killed one that get into the next, and a folder of the user's that is taken for such rests."""
    with pytest.raises(KeyboardInterrupt):
        import_checkpoint(open_released(good["internlm2"]), tmp_path / "run", stop)
    planned = plan_export_as(open_newest(good_run), OURS["llama"], None, None, SHARD_BYTES)
    with pytest.raises(KeyboardInterrupt):
        write_export(planned, tmp_path / "out", stop)
    assert list(tmp_path.iterdir()) == []
    parts = {"run.part", "out.part"}
    for name in parts:
        (tmp_path / name / "iter_0000000").mkdir(parents=True)
        (tmp_path / name / "left").write_text("over")
    imported(good["internlm2"], tmp_path / "run")
    write_export(planned, tmp_path / "out", lambda size: None)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out", *parts}
    assert all((tmp_path / name / "left").read_text() == "over" for name in parts)
    assert content(tmp_path / "run").keys() == content(good_run).keys()
    assert not (tmp_path / "out" / "left").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, UserError])
def test_what_stops_a_read_is_told_as_it_is(tmp_path, good, good_run, monkeypatch, error):
    """Prevents: Ctrl-C in the middle of a read that ends as "cannot be read: put a copy back"."""

    def stopped(*arguments: object) -> None:
        raise error("as it is")

    planned = plan_export_as(open_newest(good_run), OURS["llama"], None, None, SHARD_BYTES)
    opened = open_released(good["internlm2"])
    monkeypatch.setattr(_ReadPlanner, "resolve_tensor", stopped)
    monkeypatch.setattr(ReleasedCheckpoint, "read", stopped)
    with pytest.raises(error, match=r"^as it is$"):
        write_export(planned, tmp_path / "out", lambda size: None)
    with pytest.raises(error, match=r"^as it is$"):
        import_checkpoint(opened, tmp_path / "run", lambda size: None)
    assert list(tmp_path.iterdir()) == []


def test_full_file_system_is_told_at_once(tmp_path, good, good_run, monkeypatch):
    """Prevents: an hour of writing before it turns out that there is no room."""
    opened = open_released(good["internlm2"])
    planned = plan_export_as(open_newest(good_run), OURS["llama"], None, None, SHARD_BYTES)
    free = opened.bytes - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": free}))
    with pytest.raises(UserError, match=f"{opened.bytes:,} bytes .* only {free:,} are free"):
        import_checkpoint(opened, tmp_path / "deep" / "run", stop)
    with pytest.raises(UserError, match=f"only {free:,} are free"):
        write_export(planned, tmp_path / "deep" / "out", stop)
    assert list(tmp_path.iterdir()) == []
