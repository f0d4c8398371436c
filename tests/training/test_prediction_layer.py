"""The prediction layer of Qwen3.5 against a reference of Transformers' layers: Transformers has
none. Losses, logits and gradients of imported weights, and the weights' export."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conversion_cases import (
    Computed,
    assert_computes,
    observe,
    predicting_positions,
    train_and_save,
)
from conversion_file_cases import check_round_trip, export_to_match, tensors_of
from native_resolution_cases import (
    ImageSample,
    pack_of,
    parity_packs,
    pixel_arguments,
    qwen3_5,
    qwen3_5_moe,
    transformers_model,
)
from qwen_vl_cases import save_tensors
from ranks import run_ranks
from released import expand_experts, imported, randomize
from toy import stages_of, toy_plan
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from megatron.vlm.conversion.importing import open_released
from megatron.vlm.conversion.tensor_map import TensorLayout
from omnibal.model.parallel import Parallel

FACTOR = 0.1
MODELS = {"dense": qwen3_5(), "tied": qwen3_5(tied_head=True), "experts": qwen3_5_moe()}
LAYOUTS = {
    "dense": TensorLayout.QWEN3_5,
    "tied": TensorLayout.QWEN3_5,
    "experts": TensorLayout.QWEN3_5_MOE,
}


def reference_model(name: str) -> torch.nn.Module:
    """Return Transformers' model with a prediction layer of its modules under released names."""
    model = transformers_model(MODELS[name])
    config, size = model.config.text_config, MODELS[name].language.hidden_size
    classes = modeling_qwen3_5, "Qwen3_5"
    if name == "experts":
        classes = modeling_qwen3_5_moe, "Qwen3_5Moe"
    make_norm, make_layer = (
        vars(classes[0])[classes[1] + part] for part in ("RMSNorm", "DecoderLayer")
    )
    mtp = torch.nn.Module()
    mtp.fc = torch.nn.Linear(2 * size, size, bias=False)
    mtp.layers = torch.nn.ModuleList([make_layer(config, config.num_hidden_layers - 1)])
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        mtp.add_module(norm, make_norm(size, config.rms_norm_eps))
    model.mtp = mtp
    return randomize(model)


def with_separate_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with a tensor per expert of the prediction layer, as released."""
    own = {name: value for name, value in tensors.items() if name.startswith("mtp.")}
    others = {name: value for name, value in tensors.items() if name not in own}
    return others | dict(expand_experts(own))


def save_release(name: str, folder: Path) -> Path:
    reference_model(name).save_pretrained(folder, save_original_format=False)
    save_tensors(folder, with_separate_experts(tensors_of(folder)))
    set_prediction_layers(folder, 1)
    return folder


def set_prediction_layers(folder: Path, number: int) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = number
    (folder / "config.json").write_text(json.dumps(config))


def sample_losses(model: torch.nn.Module, sample: ImageSample):
    """Return the logits of the loss tokens, and losses of the head and of the prediction layer."""
    ids, asked = torch.tensor([sample.ids]), predicting_positions(sample)
    hidden = model.model(input_ids=ids, **pixel_arguments(sample)).last_hidden_state
    language, mtp = model.model.language_model, model.mtp
    following = language.embed_tokens(ids.roll(-1))
    parts = mtp.pre_fc_norm_embedding(following), mtp.pre_fc_norm_hidden(hidden)
    joined = mtp.fc(torch.cat(parts, -1))
    turns = language.rotary_emb(joined, sample.positions_3S.unsqueeze(1))
    predicted = mtp.norm(mtp.layers[0](joined, position_embeddings=turns))
    earlier, labels = asked[asked > 0], ids[0, asked + 1]
    logits = model.lm_head(hidden[0, asked])
    losses = F.cross_entropy(logits, labels, reduction="none")
    further = model.lm_head(predicted[0, earlier - 1])
    return logits, losses, F.cross_entropy(further, labels[asked > 0], reduction="none")


def compute_reference(links, name: str) -> Computed:
    model = reference_model(name)
    packs = [[sample_losses(model, one) for one in pack] for pack in parity_packs(MODELS[name])]
    losses = torch.cat([losses for pack in packs for _, losses, _ in pack])
    predicted = torch.cat([predicted for pack in packs for _, _, predicted in pack])
    ((losses.sum() + FACTOR * predicted.sum()) / len(losses)).backward()
    return Computed(
        logits_LW=[torch.cat([logits for logits, *_ in pack]).detach() for pack in packs],
        loss=losses.mean().item(),
        gradients=with_separate_experts(
            {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        ),
    )


@pytest.mark.parametrize(
    ("name", "cuts", "sizes"),
    [
        ("dense", (), {}),
        ("tied", (), {}),
        ("dense", (8,), {"tensor": 2}),
        ("tied", (9,), {"tensor": 2, "sequence_parallel": True}),
        ("experts", (9,), {"tensor": 2, "sequence_parallel": True, "expert": 2}),
    ],
)
def test_it_predicts_the_token_after_the_next(tmp_path, name, cuts, sizes):
    """Prevents labels of other samples, shifted positions, a stale copy of the embedding on the
    last stage, and gradients that miss the second use of embedding or head."""
    run = imported(save_release(name, tmp_path / "released"), tmp_path / "run")
    model = open_released(tmp_path / "released").model
    assert model.language.prediction_layers == 1 and model.language.prediction_loss == FACTOR
    plan = toy_plan(model, stages_of(model, *cuts), **sizes)
    batches = [*map(pack_of, parity_packs(MODELS[name]))]
    ranks = run_ranks(plan.parallel, observe, plan, run, batches)
    [expected] = run_ranks(Parallel(pipeline=1), compute_reference, name)
    # The head runs for the prediction layer, then for the model.
    ranks = [(result, {"head": seen["head"][1::2]}, own) for result, seen, own in ranks]
    assert_computes(plan, ranks, expected, LAYOUTS[name])


@pytest.mark.parametrize("name", MODELS)
def test_a_release_comes_back_byte_for_byte(tmp_path, name):
    """Prevents exports without the prediction layer, or with its rows in another order."""
    check_round_trip(save_release(name, tmp_path / "released"), tmp_path)


def test_it_can_be_left_out(tmp_path):
    """Prevents refused folders of Transformers, which saves `mtp_num_hidden_layers` and not the
    layer, and checkpoints that load with it and its first loss weight only."""
    folder = save_release("dense", tmp_path / "released")
    run, model = imported(folder, tmp_path / "run"), open_released(folder).model
    batches = [*map(pack_of, parity_packs(MODELS["dense"]))]
    for changes in ({"prediction_layers": 0}, {"prediction_loss": 0.5}):
        changed = model.with_tower("language", **changes)
        plan, trained = toy_plan(changed, stages_of(changed)), tmp_path / "-".join(changes)
        run_ranks(plan.parallel, train_and_save, plan, run, trained, batches)
    set_prediction_layers(folder, 0)
    names = {n for n in tensors_of(folder) if not n.startswith("mtp.")}
    out = export_to_match(tmp_path / "prediction_layers", folder, tmp_path / "out")
    assert tensors_of(out).keys() == names
    set_prediction_layers(out, 1)
    assert open_released(out).model == open_released(folder).model.model_copy(
        update={"name": "out"}
    )
    assert not open_released(out).model.language.prediction_layers
