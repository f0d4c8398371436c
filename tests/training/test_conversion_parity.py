"""Imported models compared with Transformers' InternVL: outputs, loss and gradients."""

import functools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from conversion_cases import (
    OURS,
    Computed,
    assert_computes,
    assert_near,
    compute_samples,
    group_ranks,
    micro_batches,
    model_of,
    observe,
)
from ranks import run_ranks
from released import KINDS, LAYOUTS, imported, rename_tensors, save_toy, transformers_model
from toy import pack, stages_of, toy_plan

from omnibal.model.parallel import Parallel


class Reference(NamedTuple):
    """Transformers' outputs of the samples, run separately."""

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
    computed = compute_samples(model, micro_batches(model_of(name)))
    return Reference(torch.cat(vision), torch.cat(projected), computed)


# Units: 0 vision embed, 1-2 vision layers, 3 projector, 4 language embed, 5-6 language layers,
# 7 head. A cut is the position of the first unit after it.
@pytest.mark.parametrize(
    ("name", "layout", "cuts", "sequences"),
    [
        # All layouts of a kind import to equal weights (test_conversion.py).
        *(
            pytest.param(name, LAYOUTS[KINDS[name].language][0], (), None, id=name)
            for name in KINDS
        ),
        pytest.param("300m-qwen2", "qwen2", (2,), False, id="vision-on-both"),
        pytest.param("6b-llama", "internlm2", (2,), True, id="vision-on-both-padded-heads"),
        pytest.param("6b-llama", "transformers", (6,), False, id="language-on-both"),
        pytest.param("6b-qwen2-tied", "qwen2", (6,), True, id="tied-copies"),
        pytest.param("300m-llama-tied", "prefixed", (3,), False, id="tied-in-one-stage"),
        pytest.param("6b-qwen3", "qwen3", (6,), False, id="norms-of-heads"),
        pytest.param("6b-qwen3", "transformers", (2,), True, id="norms-of-heads-sequences"),
        pytest.param("300m-qwen3-moe", "qwen3_moe", (6,), True, id="experts"),
    ],
)
def test_imported_model_computes_what_transformers_does(tmp_path, name, layout, cuts, sequences):
    """Prevents reordered rows of q, k, v, gate or up, swapped norms, biases or scales, another
    epsilon or RoPE base, and sharding errors: padded heads and vocabulary under TP, two copies of a
    tied matrix, experts on other ranks."""
    expected = reference(name)
    model, parts, sizes = model_of(name), ("vision", "projector"), {}
    if cuts:
        sizes = {"tensor": 2, "sequence_parallel": sequences}
        sizes["expert"] = 2 if KINDS[name].language == "qwen3_moe" else 1
    run = imported(save_toy(name, tmp_path / "released", layout), tmp_path / "run")
    plan = toy_plan(model, stages_of(model, *cuts), **sizes)
    batches = [pack(samples) for samples in micro_batches(model)]
    ranks = run_ranks(plan.parallel, observe, plan, run, batches, *parts)
    first_of_groups = [group[0] for group in group_ranks(plan, [seen for _, seen, _ in ranks])]
    *_, last_vision = (
        own["vision"]
        for own, stage in zip(first_of_groups, plan.stages, strict=True)
        if stage.layers("vision")
    )
    [projected] = [own["projector"] for own in first_of_groups if own["projector"]]
    vision_TVH = torch.cat(last_vision, dim=1).transpose(0, 1)
    assert_near(vision_TVH, expected.vision_TVH, "vision")
    assert_near(torch.cat(projected), expected.projected_KE, "projector")
    config = transformers_model(KINDS[name]).config
    theirs = rename_tensors(expected.computed.gradients, config, layout)
    theirs = replace(expected.computed, gradients=theirs)
    assert_computes(plan, ranks, theirs, OURS[layout])
