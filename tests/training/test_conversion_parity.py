"""Imported models against transformers' own InternVL: outputs, loss and gradients."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from conversion_cases import (
    OURS,
    TOLERANCE,
    as_released,
    assert_near,
    keep,
    micro_batches,
    model_of,
    predicting_positions,
)
from ranks import run_ranks
from released import CASES, KINDS, imported, renamed, save_released, transformers_model
from tensor_parallel_cases import by_name, gather_gradients, whole
from toy import OPTIONS, ToySample, pack, stages_of, toy_plan
from transformers import InternVLVisionModel, LlamaForCausalLM, Qwen2ForCausalLM

from megatron.vlm.checkpoint.save_load import load_weights
from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.job.plan import Plan
from omnibal.model.parallel import Parallel


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What transformers makes of the samples, one by one."""

    vision_TVH: torch.Tensor
    projected_KE: torch.Tensor
    logits_LW: list[torch.Tensor]
    """Of each micro-batch."""
    loss: float
    gradients: dict[str, torch.Tensor]


@functools.cache
def reference(name: str) -> Reference:
    return run_ranks(Parallel(pipeline=1), computed_by_transformers, name)[0]


def computed_by_transformers(links, name: str) -> Reference:
    model = transformers_model(KINDS[name])
    ours = model_of(name)
    vision, projected, logits, losses = [], [], [], []
    for samples in micro_batches(ours):
        logits.append([])
        for sample in samples:
            ids = torch.tensor(sample.ids)
            pictures = sample.pixels_TCPP if len(sample.pixels_TCPP) else None
            out = model(
                input_ids=ids.unsqueeze(0),
                pixel_values=pictures,
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            )
            if pictures is not None:
                vision.append(model.model.vision_tower(pictures).last_hidden_state.detach())
                projected.append(out.image_hidden_states.flatten(0, 1).detach())
            asked = predicting_positions(sample)
            logits[-1].append(out.logits[0, asked])
            losses.append(F.cross_entropy(logits[-1][-1], ids[asked + 1], reduction="none"))
    loss = torch.cat(losses).mean()
    loss.backward()
    return Reference(
        vision_TVH=torch.cat(vision),
        projected_KE=torch.cat(projected),
        logits_LW=[torch.cat(each).detach() for each in logits],
        loss=loss.item(),
        gradients={key: value.grad for key, value in model.named_parameters()},
    )


def observed(links, plan: Plan, run, packs: Sequence[Sequence[ToySample]]):
    """Loss of a step from imported weights, outputs of the units in it, and gradients by name."""
    trainer = build_trainer(plan, links, replace(OPTIONS, clip_grad=0.0), steps=1, seed=9)
    load_weights(run, plan, trainer.stages)
    seen: dict[str, list[torch.Tensor]] = {"vision": [], "projector": [], "head": []}
    for part, module in trainer.stage.named_children():
        if part in seen:
            module.register_forward_hook(functools.partial(keep, seen[part]))
    batches = [pack(samples) for samples in packs]
    result = train_step(trainer, MicroBatchStream.of(batches))
    gather_gradients(trainer.model)
    gradients = by_name(trainer.stage, lambda parameter: parameter.main_grad)
    return result.loss, seen, gradients


@dataclass(frozen=True, kw_only=True)
class Found:
    """What all ranks saw, put together."""

    vision_TVH: torch.Tensor
    projected_KE: torch.Tensor
    logits_LW: list[torch.Tensor]
    losses: list[float]
    gradients: dict[str, torch.Tensor]


def put_together(plan: Plan, ranks: Sequence[tuple]) -> Found:
    tensor = plan.parallel.tensor
    groups = [ranks[first : first + tensor] for first in range(0, len(ranks), tensor)]
    [last_vision] = [
        group[0][1]["vision"]
        for group, stage in zip(groups, plan.stages, strict=True)
        if stage.layers("vision")
    ][-1:]
    [projected] = [group[0][1]["projector"] for group in groups if group[0][1]["projector"]]
    heads = [rank[1]["head"] for rank in groups[-1]]
    gradients = {
        name: whole(name, [rank[2][name] for rank in group])
        for group in groups
        for name in group[0][2]
    }
    return Found(
        vision_TVH=torch.cat(last_vision, dim=1).transpose(0, 1),
        projected_KE=torch.cat(projected),
        logits_LW=[
            torch.cat([each.squeeze(1) for each in parts], -1)[:, : plan.model.language.vocab_size]
            for parts in zip(*heads, strict=True)
        ],
        losses=[rank[0] for rank in ranks],
        gradients=gradients,
    )


def assert_same_as_transformers(name: str, layout: str, found: Found) -> None:
    expected = reference(name)
    assert_near(found.vision_TVH, expected.vision_TVH, "vision")
    assert_near(found.projected_KE, expected.projected_KE, "projector")
    for own, other in zip(found.logits_LW, expected.logits_LW, strict=True):
        assert_near(own, other, "logits")
    assert found.losses == pytest.approx([expected.loss] * len(found.losses), rel=TOLERANCE)
    config = transformers_model(KINDS[name]).config
    theirs = renamed(expected.gradients, config, layout)
    ours = as_released(found.gradients, model_of(name), OURS[layout])
    assert ours.keys() == theirs.keys()
    for key, gradient in theirs.items():
        # Without RoPE, keys that all move by the same change nothing but by rounding errors.
        is_none = key.endswith("attention.k_proj.bias")
        assert_near(ours[key], gradient, key, least=1.0 if is_none else 0.0)


def run_on(name, layout, folder, *cuts, **sizes) -> Found:
    model = model_of(name)
    source = save_released(transformers_model(KINDS[name]), folder / "released", layout)
    run = imported(source, folder / "run")
    plan = toy_plan(model, stages_of(model, *cuts), **sizes)
    return put_together(plan, run_ranks(plan.parallel, observed, plan, run, micro_batches(model)))


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_one_process_computes_what_transformers_does(tmp_path, name, layout):
    """Prevents: rows of q, k, v or of gate and up in another order, a norm, bias or scale in the
    place of another, another epsilon or RoPE base."""
    assert_same_as_transformers(name, layout, run_on(name, layout, tmp_path))


# Units of the model: 0 vision embed, 1-2 vision layers, 3 projector, 4 language embed,
# 5-6 language layers, 7 head. A cut is the position of the first unit after it.
@pytest.mark.parametrize(
    ("name", "layout", "cut", "sequence_parallel"),
    [
        pytest.param("300m-qwen2", "qwen2", 2, False, id="vision-on-both"),
        pytest.param("6b-llama", "internlm2", 2, True, id="vision-on-both-padded-heads"),
        pytest.param("6b-llama", "transformers", 6, False, id="language-on-both"),
        pytest.param("6b-qwen2-tied", "qwen2", 6, True, id="tied-copies"),
        pytest.param("300m-llama-tied", "prefixed", 3, False, id="tied-in-one-stage"),
        pytest.param("6b-qwen3", "qwen3", 6, False, id="norms-of-heads"),
        pytest.param("6b-qwen3", "transformers", 2, True, id="norms-of-heads-sequences"),
        pytest.param("300m-qwen3-moe", "qwen3_moe", 6, True, id="experts"),
    ],
)
def test_split_model_computes_what_transformers_does(
    tmp_path, name, layout, cut, sequence_parallel
):
    """Prevents: shards of imported tensors that only fit one process: heads and words that tensor
    parallelism pads, layers of the second stage, a tied matrix with two copies; and experts in
    another order than their ranks."""
    sizes = {"tensor": 2, "sequence_parallel": sequence_parallel}
    if KINDS[name].language == "qwen3_moe":
        sizes["expert"] = 2
    found = run_on(name, layout, tmp_path, cut, **sizes)
    assert_same_as_transformers(name, layout, found)


@pytest.mark.parametrize("name", ["300m-qwen2", "6b-llama"])
def test_towers_compute_what_their_own_classes_do(tmp_path, name):
    """Prevents: an error that transformers' InternVL has in common with this project's, in a tower
    that has a class of its own."""
    found = run_on(name, "transformers", tmp_path)
    whole_model = transformers_model(KINDS[name])
    vision = InternVLVisionModel(whole_model.config.vision_config).eval()
    vision.load_state_dict(whole_model.model.vision_tower.state_dict())
    kind = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM}[KINDS[name].language]
    language = kind(whole_model.config.text_config).eval()
    language.model.load_state_dict(whole_model.model.language_model.state_dict())
    language.lm_head.load_state_dict(whole_model.lm_head.state_dict())
    pictures, text = micro_batches(model_of(name))
    with torch.no_grad():
        tiles = torch.cat([sample.pixels_TCPP for sample in pictures])
        assert_near(found.vision_TVH, vision(tiles).last_hidden_state, "vision")
        logits = [
            language(torch.tensor([sample.ids])).logits[0, predicting_positions(sample)]
            for sample in text
        ]
    assert_near(found.logits_LW[1], torch.cat(logits), "language")
