"""Released checkpoints imported and exported: equal bytes and weights, no partial results."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_cases import refusals
from conversion_cases import (
    OURS,
    as_released,
    assert_near,
    load_in_transformers,
    logits_of,
    micro_batches,
    model_of,
    reassemble_shards,
    train_and_save,
)
from conversion_file_cases import (
    INDEX,
    SHARD_BYTES,
    TYPES,
    assert_equal_tensors,
    assert_same_parameters,
    check_round_trip,
    content,
    edit_config,
    edit_json,
    edit_tensor,
    edit_tensors,
    export_to_layout,
    export_to_match,
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
    save_toy,
    transformers_model,
    write_tokenizer,
)
from safetensors.torch import load_file, save_file
from tensor_parallel_cases import by_name
from toy import OPTIONS, pack, stages_of, toy_plan

from megatron.vlm.checkpoint.identity import open_newest
from megatron.vlm.checkpoint.save_load import load_weights
from megatron.vlm.checkpoint.stored_blocks import StoredTensors
from megatron.vlm.conversion.exporting import CheckpointExport, plan_export_as, write_export
from megatron.vlm.conversion.importing import ReleasedCheckpoint, import_checkpoint, open_released
from megatron.vlm.conversion.tensor_map import parameters
from megatron.vlm.step.train import build_trainer
from omnibal.base.errors import UserError
from omnibal.model.config import load_model
from omnibal.model.encoders import TilingConfig
from tools import convert


def complete(folder: Path) -> Path:
    """Add tokenizer, code and other companion files to a released checkpoint's folder."""
    write_tokenizer(folder)
    (folder / "README.md").write_text("# A model\n")
    (folder / "modeling_internvl_chat.py").write_text("raise ImportError\n")
    (folder / "preprocessor_config.json").write_text("{}")
    return folder


FILES = {"single": None, "sharded": SHARD_BYTES}


def in_every_form(cases):
    """Yield each case as a single file and as shards, alternating fp32 and bf16."""
    for number, case in enumerate(cases):
        types = ("fp32", "bf16")[:: 1 if number % 2 else -1]
        for (files, size), dtype in zip(FILES.items(), types, strict=True):
            yield pytest.param(*case, size, dtype, id="-".join((*case, files, dtype)))


@pytest.mark.parametrize(("name", "layout", "shard_bytes", "dtype"), list(in_every_form(CASES)))
def test_import_and_export_give_the_same_bytes(tmp_path, name, layout, shard_bytes, dtype):
    """Prevents a conversion that loses values, types, names, files or metadata."""
    copied = OURS[layout].is_original
    source = save_toy(name, tmp_path / "there", layout, TYPES[dtype], shard_bytes, copied)
    check_round_trip(complete(source), tmp_path)


def test_types_that_differ_between_tensors_stay(tmp_path):
    """Prevents fp32 norms next to bf16 matrices from being rounded."""
    source = save_toy("6b-llama", tmp_path / "there", "internlm2", torch.bfloat16, SHARD_BYTES)
    tensors = tensors_of(source)
    exact = {name: torch.rand(value.shape) for name, value in tensors.items() if "norm" in name}
    assert len(exact) == 2 * 6 + 1
    edit_tensors(lambda at: at.update(exact))(source)
    out = export_to_layout(check_round_trip(source, tmp_path), "internlm2", tmp_path / "out")
    assert_equal_tensors(tensors_of(out), tensors | exact)


@pytest.mark.parametrize(
    ("name", "shard_size"), list(zip(KINDS, ["20KB", "1GB"] * (len(KINDS) // 2), strict=True))
)
def test_what_transformers_saves_comes_back(tmp_path, name, shard_size):
    """Prevents failure on files saved by Transformers, and an invented tied head."""
    source = tmp_path / "there"
    transformers_model(KINDS[name]).save_pretrained(source, max_shard_size=shard_size)
    assert (len(list(source.glob("*.safetensors"))) > 1) == (shard_size == "20KB")
    check_round_trip(complete(source), tmp_path)


TIED_ORIGINAL = [
    (name, layout) for name, layout in CASES if KINDS[name].tied and OURS[layout].is_original
]


@pytest.mark.parametrize(
    ("name", "layout", "shard_bytes", "dtype"), list(in_every_form(TIED_ORIGINAL))
)
def test_tied_head_is_written_for_code_that_unties_it(tmp_path, name, layout, shard_bytes, dtype):
    """Prevents a random head in InternVL's own code, which never ties it: exports with a tied head
    must hold a copy, with --layout and with --like."""
    model = transformers_model(KINDS[name])
    expected = released_tensors(model, layout, head_copy=True)
    expected = {key: value.to(TYPES[dtype]) for key, value in expected.items()}
    size = sum(value.nbytes for value in expected.values())
    source = complete(save_toy(name, tmp_path / "there", layout, shard_bytes=shard_bytes))
    assert HEADS[layout] not in tensors_of(source)
    run = imported(source, tmp_path / "run")
    wanted = None if dtype == "fp32" else TYPES[dtype]  # None: as stored
    like = export_to_match(run, source, tmp_path / "like", wanted)
    made = export_to_layout(run, layout, tmp_path / "made", wanted, size=shard_bytes or 10**9)
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
        others, expected = (
            {path: text for path, text in content(folder).items() if not path.startswith("model")}
            for folder in (like, source)
        )
        assert others == expected


# A ring: every layout converts once to the next and once from the previous.
RINGS = {kind: dict(zip(ring, ring[1:] + ring[:1], strict=True)) for kind, ring in LAYOUTS.items()}


@pytest.mark.parametrize(
    ("name", "layout", "other"),
    [(name, *pair) for name, kind in KINDS.items() for pair in RINGS[kind.language].items()],
)
def test_every_layout_leads_to_another(tmp_path, name, layout, other):
    """Prevents export errors that mirror import errors and so cancel in a round trip."""
    run = imported(complete(save_toy(name, tmp_path / "there", layout)), tmp_path / "run")
    target = export_to_layout(run, other, tmp_path / "out")
    model, copied = transformers_model(KINDS[name]), OURS[other].is_original
    assert_equal_tensors(tensors_of(target), released_tensors(model, other, head_copy=copied))
    again = imported(target, tmp_path / "again")
    assert_same_parameters(again, run)
    there, here = open_newest(again).model, open_newest(run).model
    # Not every layout records the tiling settings.
    assert there.with_tower("vision", tiling=here.vision.tiling).vision == here.vision
    assert there.language == here.language
    files = content(run / "tokenizer")
    if not OURS[other].is_original:
        # Generated from the model.
        assert files.pop("preprocessor_config.json") == b"{}"
        own = json.loads(files.pop("tokenizer_config.json"))
        assert own.items() <= json.loads((target / "tokenizer_config.json").read_text()).items()
    assert files.items() <= content(again / "tokenizer").items()


def test_original_layout_comes_back_with_its_settings(tmp_path):
    """Prevents other tiles, thumbnails or chat template after a round trip."""
    source = save_toy("6b-llama", tmp_path / "there", "internlm2", torch.bfloat16)
    run = imported(complete(source), tmp_path / "run")
    model = load_model(str(run / "model.toml"))
    assert model.name == "there" and model == open_newest(run).model
    assert model.vision.tiling.max_dynamic_patch == 6 and model.vision.tiling.use_thumbnail
    assert model.chat_template == "internlm2-chat"
    again = imported(
        export_to_layout(run, "internlm2", tmp_path / "a" / "there"), tmp_path / "again"
    )
    assert open_newest(again).model == model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_export_in_another_type(tmp_path, dtype):
    """Prevents tensors of another type than config.json states, or rounded twice."""
    source = save_toy("300m-qwen2", tmp_path / "there", "transformers")
    run = imported(source, tmp_path / "run")
    expected = {name: tensor.to(dtype) for name, tensor in tensors_of(source).items()}
    like = export_to_match(run, source, tmp_path / "like", dtype)
    made = export_to_layout(run, "transformers", tmp_path / "made", dtype)
    for folder in (like, made):
        assert_equal_tensors(tensors_of(folder), expected)
    assert json.loads((made / "config.json").read_text())["dtype"] == f"{dtype}"[6:]
    index = json.loads((made / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in expected.values())


def load_run(links, plan, run):
    trainer = build_trainer(plan, links, OPTIONS, steps=1, seed=9)
    assert load_weights(run, plan, trainer.stages) == 0
    return by_name(trainer.stage, lambda parameter: parameter)


def test_imported_weights_are_started_from_and_not_resumed(tmp_path):
    """Prevents resuming from an import, which has no optimizer state, and refusing imported weights
    because a plan changes tiling or prompts."""
    source = save_toy("300m-qwen2", tmp_path / "there", "transformers")
    run, own = imported(source, tmp_path / "run"), model_of("300m-qwen2")
    said = {"chat_template": "Hermes-2", "system_message": "short", "chat_system_message": "talk"}
    other = own.model_copy(update=said).with_tower("language", max_positions=9999)
    other = other.with_tower("vision", tiling=TilingConfig(max_dynamic_patch=3))
    plan = toy_plan(other, stages_of(other))
    [told] = run_ranks(plan.parallel, refusals, plan, [run])
    assert told[0] is None and told[1].endswith("start from them with --finetune")
    assert run_ranks(plan.parallel, load_run, plan, run)


# Cut 2 divides the vision layers, cut 6 the language layers (and a tied matrix, into two copies).
@pytest.mark.parametrize(
    ("name", "splits", "stored", "precision"),
    [
        *(
            pytest.param(name, {(): 1, (cut,): 2}, torch.bfloat16, "fp32", id=f"{name}-{cut}")
            for name, cut in (
                ("300m-qwen2", 6),
                ("6b-llama", 2),
                ("6b-llama", 6),
                ("6b-qwen2-tied", 6),
                ("300m-llama-tied", 2),
            )
        ),
        pytest.param("6b-llama", {(): 1}, torch.float32, "bf16", id="bf16"),
    ],
)
def test_every_split_loads_the_released_values(tmp_path, name, splits, stored, precision):
    """Prevents loaded weights that depend on pipeline cuts or tensor-parallel size, or that are
    rounded twice: bf16 values loaded into fp32 stay exact."""
    layout, model = LAYOUTS[KINDS[name].language][-1], model_of(name)
    run = imported(save_toy(name, tmp_path / "there", layout, stored), tmp_path / "run")
    expected = {
        key: value.bfloat16().to(TYPES[precision])
        for key, value in released_tensors(transformers_model(KINDS[name]), layout).items()
    }
    for cuts, tensor in splits.items():
        plan = toy_plan(model, stages_of(model, *cuts), tensor=tensor)
        plan = plan.model_copy(update={"precision": precision})
        found = reassemble_shards(plan, run_ranks(plan.parallel, load_run, plan, run))
        assert_equal_tensors(as_released(found, model, OURS[layout]), expected)
        for parameter in parameters(model):
            real = found[parameter.name][tuple(slice(size) for size in parameter.shape)]
            assert found[parameter.name].count_nonzero() == real.count_nonzero()


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
    """Prevents exporting untrained weights, optimizer state or a single stage, a config.json of
    another model, and an export that lacks files of the original checkpoint."""
    before = transformers_model(KINDS[name])
    source = complete(save_toy(name, tmp_path / "there", layout, shard_bytes=SHARD_BYTES))
    run, trained = imported(source, tmp_path / "run"), tmp_path / "trained"
    model = model_of(name)
    plan = toy_plan(model, stages_of(model, *cuts), tensor=tensor)
    batches = [pack(samples) for samples in micro_batches(model)]
    ranks = run_ranks(plan.parallel, train_and_save, plan, run, trained, batches)
    like = export_to_match(trained, source, tmp_path / "like")
    own, theirs = content(like), content(source)
    assert own.keys() == theirs.keys()
    different = {file for file in own if own[file] != theirs[file]}
    assert different == {path.name for path in source.glob("*.safetensors")}
    made = export_to_layout(trained, layout, tmp_path / "made")
    assert_equal_tensors(tensors_of(made), tensors_of(like))
    shutil.copytree(run / "tokenizer", trained / "tokenizer")
    export_to_layout(trained, "transformers", tmp_path / "out")
    after = load_in_transformers(tmp_path / "out")
    assert after.dtype == torch.float32 and after.config.image_token_id == IMAGE_TOKEN
    assert after.config.tie_word_embeddings == KINDS[name].tied
    changed = dict(before.named_parameters())
    for key, parameter in after.named_parameters():
        # In a pre-norm encoder without q and k norms, a bias of keys has no gradient.
        assert "k_proj.bias" in key or not torch.equal(parameter, changed[key]), key
    for place, samples in enumerate(micro_batches(model)):
        ours = torch.cat([rank[place] for rank in ranks[-tensor:]], -1)
        with torch.no_grad():
            theirs = torch.cat([logits_of(after, sample) for sample in samples])
        assert_near(ours[:, : model.language.vocab_size], theirs, "logits")


def shard(folder: Path, number: int = 1) -> Path:
    return sorted(folder.glob("*.safetensors"))[number]


def cut_short(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def edit_index(change: Callable[[dict[str, str]], None]) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / INDEX, lambda index: change(index["weight_map"]))


def write_pickle(folder: Path) -> None:
    tensors = tensors_of(folder)
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    torch.save(tensors, folder / "pytorch_model.bin")


def duplicate_tensors(folder: Path) -> None:
    tensors = load_file(shard(folder, 0)) | load_file(shard(folder, 1))
    save_file(tensors, shard(folder, 0))


NORM = "language_model.model.norm.weight"
WQKV = "language_model.model.layers.0.attention.wqkv.weight"
QUERY = "language_model.model.layers.0.self_attn.q_proj.weight"
BAD = {
    "internlm2": {
        "truncated-data": (lambda at: cut_short(shard(at), -10), "truncated or broken"),
        "truncated-header": (lambda at: cut_short(shard(at), 100), "truncated or broken"),
        "empty-shard": (lambda at: cut_short(shard(at), 0), "truncated or broken"),
        "missing-shard": (lambda at: shard(at).unlink(), "no such file, but the index"),
        "not-in-index": (edit_index(lambda at: at.pop(NORM)), f"{NORM} are in other files"),
        "not-in-file": (
            edit_index(lambda at: at.update(extra=min(at.values()))),
            "extra are in other files",
        ),
        "in-another-file": (
            edit_index(lambda at: at.update({NORM: min(at.values())})),
            f"{NORM} are in other files",
        ),
        "in-two-files": (duplicate_tensors, "is in both"),
        "outside": (
            edit_index(lambda at: at.update({NORM: "../there/" + at[NORM]})),
            "names '../there/model-",
        ),
        "index-not-json": (lambda at: cut_short(at / INDEX, 50), "fetch it again"),
        "lacks-a-tensor": (edit_tensors(lambda at: at.pop(NORM)), f"lacks {NORM}"),
        "unknown-tensor": (
            edit_tensors(lambda at: at.update(extra=torch.ones(2))),
            "has extra, which",
        ),
        "unknown-layer": (
            edit_config(llm_config__num_hidden_layers=1),
            "has language_model.model.layers.1.attention.wo.weight, language_model",
        ),
        "transposed": (
            edit_tensor(WQKV, lambda at: at.T.contiguous()),
            "is [32, 64] and not [64, 32]",
        ),
        "other-width": (edit_config(vision_config__hidden_size=48), "config.json and the tensors"),
        "other-image-size": (
            edit_config(force_image_size=32),
            "set it to 16, or resize them",
        ),
        "other-encoder-size": (
            edit_config(force_image_size=None, vision_config__image_size=32),
            "is [1, 17, 24] and not [1, 65, 24]",
        ),
        "padded-to-squares": (edit_config(pad2square=True), "pad2square true"),
        "quantized": (edit_tensor(WQKV, torch.Tensor.char), "is of type I8"),
        "quantized-to-8-bit-floats": (
            edit_tensor(WQKV, lambda at: at.to(torch.float8_e4m3fn)),
            "is of type F8_E4M3",
        ),
        "pickled": (write_pickle, "only safetensors"),
        "no-config": (lambda at: (at / "config.json").unlink(), "no such file"),
        "scaled-rope": (
            edit_config(llm_config__rope_scaling={"rope_type": "llama3", "factor": 8.0}),
            "RoPE of type 'llama3'",
        ),
        "earlier-layer": (edit_config(select_layer=-4), "select_layer -4"),
        "first-pixel-shuffle": (edit_config(ps_version="v1"), "ps_version 'v1'"),
        "other-language-model": (
            edit_config(llm_config__architectures=["Phi3ForCausalLM"]),
            "Phi3ForCausalLM",
        ),
        "other-template": (edit_config(template="vicuna"), "template 'vicuna'"),
        "biases": (edit_config(llm_config__bias=True), "bias true must be false"),
        "no-heads": (edit_config(llm_config__num_attention_heads=0), "greater than 0 (given: 0)"),
        "heads-do-not-divide": (
            edit_config(llm_config__num_attention_heads=5),
            "must be a multiple of heads 5",
        ),
        "no-tokenizer-pieces": (
            lambda at: write_tokenizer(at, PIECES[3:]),
            "lacks the piece(s) <img>",
        ),
        "tokenizer-not-json": (
            lambda at: cut_short(at / "tokenizer.json", 9),
            "not a tokenizer",
        ),
        "tied-with-another-head": (
            edit_config(llm_config__tie_word_embeddings=True),
            "ties the head",
        ),
    },
    "transformers": {
        "mixed-types": (edit_tensor(QUERY, torch.Tensor.bfloat16), "stored in several types"),
        "other-kind": (edit_config(model_type="llava"), "of a model of type 'llava'"),
        "scaled-rope": (
            edit_config(text_config__rope_parameters={"rope_type": "yarn", "rope_theta": 5000.0}),
            "RoPE of type 'yarn'",
        ),
        "earlier-layer": (edit_config(vision_feature_layer=-2), "vision_feature_layer"),
        "head-size": (edit_config(text_config__head_dim=8), "k_proj.weight is"),
        "no-heads": (edit_config(vision_config__num_attention_heads=0), "greater than 0"),
        "scales-otherwise": (edit_config(text_config__model_type="granite"), "model is granite"),
        "windows": (edit_config(text_config__model_type="mistral"), "model is mistral"),
        "norms-of-heads": (edit_config(text_config__model_type="qwen3"), "q_norm.weight"),
    },
    "qwen2": {
        "head-of-another-type": (edit_tensor(HEADS["qwen2"], torch.Tensor.bfloat16), HEADS["qwen2"])
    },
}
"""(damage, message) by layout."""


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> dict[str, Path]:
    """Return read-only checkpoints of one model in two layouts, and of a tied model."""
    folder = tmp_path_factory.mktemp("good")
    return {
        layout: complete(save_toy(name, folder / layout, layout, torch.float32, SHARD_BYTES, True))
        for name, layout in (
            ("6b-llama", "internlm2"),
            ("6b-llama", "transformers"),
            ("6b-qwen2-tied", "qwen2"),
        )
    }


@pytest.fixture(scope="module")
def good_run(good, tmp_path_factory) -> Path:
    return imported(good["internlm2"], tmp_path_factory.mktemp("good-run") / "run")


@pytest.fixture
def error_line(monkeypatch, capsys) -> Callable[..., str]:
    """Return a function that runs a failing command and returns its error line."""

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["convert.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            convert.main()
        assert ended.value.code == 2
        [line] = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error:")]
        return line

    return run


@pytest.mark.parametrize(
    ("layout", "name"), [(layout, name) for layout, cases in BAD.items() for name in cases]
)
def test_bad_checkpoint_is_refused(tmp_path, good, error_line, layout, name):
    """Prevents wrongly imported weights, a traceback, and a partial run directory."""
    source, (change, message) = tmp_path / "there", BAD[layout][name]
    shutil.copytree(good[layout], source)
    change(source)
    before = content(tmp_path)
    line = error_line("import", source, "-o", tmp_path / "new" / "run")
    assert message in line and str(source) in line
    assert content(tmp_path) == before
    assert list(tmp_path.iterdir()) == [source]


def test_what_exists_is_not_written_over(tmp_path, good, good_run, error_line):
    """Prevents a conversion that overwrites an existing run or checkpoint."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").write_text("kept")
    (tmp_path / "file").write_text("kept")
    before = content(tmp_path)
    for target, why in (
        (tmp_path / "folder", "exists already"),
        (tmp_path / "file", "is a file or device, and must be a folder"),
    ):
        for arguments in (
            ("import", good["internlm2"]),
            ("export", good_run, "--like", good["internlm2"]),
            ("export", good_run, "--layout", "transformers"),
        ):
            assert f"{target}: {why}" in error_line(*arguments, "-o", target)
    assert content(tmp_path) == before


@pytest.fixture(scope="module")
def places(good, good_run, tmp_path_factory) -> dict[str, Path]:
    """Return folders by their placeholders in commands."""
    folder = tmp_path_factory.mktemp("places")
    for name in ("empty", "words"):
        (folder / name).mkdir()
    write_tokenizer(folder / "words", [*PIECES, *map(str, range(99))])
    save_toy("300m-qwen2", folder / "other", "qwen2")
    imported(folder / "other", folder / "biased")
    own = {name: folder / name for name in ("none", "empty", "words", "other", "biased")}
    return own | {"run": good_run, "like": good["internlm2"]}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("import {none}", "no such folder"),
        ("import {like}/config.json", "no such folder"),
        ("export {run}", "not both"),
        ("export {run} --like {like} --layout transformers", "not both"),
        ("export {run} --like {like} --tokenizer-model {like}", "--like brings its own tokenizer"),
        ("export {run} --layout transformers --max-shard-size 5", "--max-shard-size must be"),
        ("export {run} --layout transformers --tokenizer-model none", "no such tokenizer"),
        ("export {run} --layout transformers --tokenizer-model {words}", "embeds 51"),
        ("export {none} --like {like}", "{none}: holds no checkpoint"),
        ("export {empty} --like {like}", "{empty}: holds no checkpoint"),
        (
            "export {run} --like {other}",
            "vision.normalization is RMSNorm there and LayerNorm in {other}/config.json",
        ),
        ("export {run} --layout internvl-qwen2", "qkv_bias is False there"),
        ("export {biased} --layout internvl-internlm2", "qkv_bias is True there"),
        ("export {biased} --layout internvl-llama", "qkv_bias is True there"),
    ],
)
def test_impossible_conversions_are_refused(tmp_path, places, error_line, command, message):
    """Prevents a traceback for a mistyped path, and exporting weights into another model's files or
    layout."""
    line = error_line(*command.format(**places).split(), "-o", tmp_path / "out")
    assert message.format(**places) in line and "--load" not in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["cut", "removed", "metadata", "common"])
@pytest.mark.parametrize("way", ["like", "layout"])
def test_broken_run_is_not_exported(tmp_path, good, good_run, error_line, damage, way):
    """Prevents a partial export of a damaged run."""
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
    line = error_line("export", run, *arguments[way], "-o", tmp_path / "out")
    assert str(checkpoint) in line and "restore a copy" in line
    assert content(tmp_path) == before and list(tmp_path.iterdir()) == [run]


def test_source_that_vanishes_leaves_nothing(tmp_path, good):
    """Prevents a partial run if a source file becomes unreadable during the import."""
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


@pytest.fixture
def planned_export(good_run) -> CheckpointExport:
    """Return a planned export, not yet written."""
    return plan_export_as(open_newest(good_run), OURS["llama"], None, None, SHARD_BYTES)


def test_stopped_conversion_leaves_nothing(tmp_path, good, good_run, planned_export):
    """Prevents a partial conversion or an error message after Ctrl-C, leftovers of a killed
    conversion in the next, and removal of a user's folder with a leftover's name."""
    with pytest.raises(KeyboardInterrupt):
        import_checkpoint(open_released(good["internlm2"]), tmp_path / "run", stop)
    with pytest.raises(KeyboardInterrupt):
        write_export(planned_export, tmp_path / "out", stop)
    assert list(tmp_path.iterdir()) == []
    parts = {"run.part", "out.part"}
    for name in parts:
        (tmp_path / name / "iter_0000000").mkdir(parents=True)
        (tmp_path / name / "left").write_text("over")
    imported(good["internlm2"], tmp_path / "run")
    write_export(planned_export, tmp_path / "out", lambda size: None)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out", *parts}
    assert all((tmp_path / name / "left").read_text() == "over" for name in parts)
    assert content(tmp_path / "run").keys() == content(good_run).keys()
    assert not (tmp_path / "out" / "left").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, UserError])
def test_what_stops_a_read_is_told_as_it_is(tmp_path, good, planned_export, monkeypatch, error):
    """Prevents Ctrl-C during a read from being reported as "cannot be read: put a copy back"."""

    def raise_error(*arguments: object) -> None:
        raise error("as it is")

    opened = open_released(good["internlm2"])
    monkeypatch.setattr(StoredTensors, "_read_item", raise_error)
    monkeypatch.setattr(ReleasedCheckpoint, "read_parameter", raise_error)
    with pytest.raises(error, match=r"^as it is$"):
        write_export(planned_export, tmp_path / "out", lambda size: None)
    with pytest.raises(error, match=r"^as it is$"):
        import_checkpoint(opened, tmp_path / "run", lambda size: None)
    assert list(tmp_path.iterdir()) == []


def test_full_file_system_is_told_at_once(tmp_path, good, planned_export, monkeypatch):
    """Prevents writing for an hour before the disk turns out to be full."""
    opened = open_released(good["internlm2"])
    free = opened.bytes - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": free}))
    with pytest.raises(UserError, match=f"{opened.bytes:,} bytes.* {free:,} are free"):
        import_checkpoint(opened, tmp_path / "deep" / "run", stop)
    with pytest.raises(UserError, match=f"{free:,} are free"):
        write_export(planned_export, tmp_path / "deep" / "out", stop)
    assert list(tmp_path.iterdir()) == []
