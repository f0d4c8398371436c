"""Imported models against transformers' own InternVL: outputs, loss and gradients."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from conversion_cases import (
    OURS,
    TOLERANCE,
    Computed,
    as_released,
    assert_near,
    computed_by,
    groups_of,
    logits_together,
    micro_batches,
    model_of,
    observed,
    predicting_positions,
    put_together,
)
from ranks import run_ranks
from released import CASES, KINDS, imported, renamed, save_released, transformers_model
from toy import pack, stages_of, toy_plan
from transformers import InternVLVisionModel, LlamaForCausalLM, Qwen2ForCausalLM

from omnibal.job.plan import Plan
from omnibal.model.parallel import Parallel


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What transformers makes of the samples, one by one."""

    vision_TVH: torch.Tensor
    projected_KE: torch.Tensor
    computed: Computed


@functools.cache
def reference(name: str) -> Reference:
    return run_ranks(Parallel(pipeline=1), computed_by_transformers, name)[0]


def computed_by_transformers(links, name: str) -> Reference:
    model, vision, projected = transformers_model(KINDS[name]), [], []
    model.model.vision_tower.register_forward_hook(
        lambda *call: vision.append(call[-1].last_hidden_state.detach())
    )
    model.model.multi_modal_projector.register_forward_hook(
        lambda *call: projected.append(call[-1].flatten(0, 1).detach())
    )
    computed = computed_by(model, micro_batches(model_of(name)))
    return Reference(
        vision_TVH=torch.cat(vision), projected_KE=torch.cat(projected), computed=computed
    )


@dataclass(frozen=True, kw_only=True)
class Found:
    """What all ranks saw, put together."""

    vision_TVH: torch.Tensor
    projected_KE: torch.Tensor
    logits_LW: list[torch.Tensor]
    losses: list[float]
    gradients: dict[str, torch.Tensor]


def found_by(plan: Plan, ranks: Sequence[tuple]) -> Found:
    losses, seen, gradients = zip(*ranks, strict=True)
    first_of_groups = [group[0] for group in groups_of(plan, seen)]
    last_vision = [
        own["vision"]
        for own, stage in zip(first_of_groups, plan.stages, strict=True)
        if stage.layers("vision")
    ][-1]
    [projected] = [own["projector"] for own in first_of_groups if own["projector"]]
    return Found(
        vision_TVH=torch.cat(last_vision, dim=1).transpose(0, 1),
        projected_KE=torch.cat(projected),
        logits_LW=logits_together(plan, [own["head"] for own in seen]),
        losses=list(losses),
        gradients=put_together(plan, gradients),
    )


def assert_same_as_transformers(name: str, layout: str, found: Found) -> None:
    expected = reference(name)
    assert_near(found.vision_TVH, expected.vision_TVH, "vision")
    assert_near(found.projected_KE, expected.projected_KE, "projector")
    for own, other in zip(found.logits_LW, expected.computed.logits_LW, strict=True):
        assert_near(own, other, "logits")
    assert found.losses == pytest.approx(
        [expected.computed.loss] * len(found.losses), rel=TOLERANCE
    )
    config = transformers_model(KINDS[name]).config
    theirs = renamed(expected.computed.gradients, config, layout)
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
    batches = [pack(samples) for samples in micro_batches(model)]
    parts = ("vision", "projector")
    return found_by(plan, run_ranks(plan.parallel, observed, plan, run, batches, *parts))


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
