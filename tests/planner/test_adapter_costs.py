"""LoRA adapters in a plan: the linears that have them, their costs, and invalid options."""

from dataclasses import replace

import numpy as np
import pytest

from omnibal.base.errors import UserError
from omnibal.cli.options import JobOptions
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan
from omnibal.job.plan_data import MockData
from omnibal.job.planner import PlanRequest, make_plan
from omnibal.model.adapter_settings import AdapterConfig, adapter_mistake, adapters_of
from omnibal.model.config import load_cluster, load_model
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel

pytestmark = pytest.mark.quick

MODEL, CLUSTER = load_model("internvl3-8b"), load_cluster("h100-80g")
REST = ("vision", "projector")
LAYER = "language_layer"


def job(adapters: AdapterConfig | None = None, frozen: tuple[str, ...] = REST, **sizes: int):
    parallel = Parallel(**{"pipeline": 1} | sizes)
    given = {"model": MODEL, "cluster": CLUSTER, "precision": "bf16", "parallel": parallel}
    return JobSpec(**given, frozen=frozen, adapters=adapters)


ALL = AdapterConfig(rank=16, alpha=32)


def test_parameters_are_pefts():
    """Prevents adapter ranks, widths or layer counts that differ from PEFT: rank x (inputs +
    outputs) for every linear of the 28 layers of Qwen2.5-7B."""
    h, f, kv, layers = 3584, 18944, 512, 28
    linears = [(h, h), (h, kv), (h, kv), (h, h), (h, f), (h, f), (f, h)]
    expected = layers * 16 * sum(map(sum, linears))
    units = job(ALL).cost.units
    assert layers * units[LAYER].trained_parameters == expected == 40_370_176
    assert not any(unit.trained_parameters for name, unit in units.items() if name != LAYER)
    few = job(adapters_of(rank=16, targets="q_proj,v_proj")).cost.units[LAYER]
    assert few.trained_parameters == 16 * (h + h + h + kv)


def test_base_weights_have_no_gradients_and_what_is_before_no_backward():
    """Prevents weight gradients of frozen weights, or a backward below the first adapter."""
    plain, adapted = job(frozen=()).cost.units, job(ALL).cost.units
    layer, whole = adapted[LAYER], plain[LAYER]
    tokens = job(ALL).cost.features.index("tokens")
    share = (layer.forward_ms + layer.backward_ms)[tokens]
    share /= (whole.forward_ms + whole.backward_ms)[tokens]
    assert 2 / 3 < share < 0.85
    for name in ("vision_embed", "vision_layer", "projector", "language_embed"):
        assert not adapted[name].has_backward, name
    assert adapted["head"].has_backward
    # Adapter A's gradient keeps the product's input. Low-rank activations are small.
    more = layer.activation_bytes - whole.activation_bytes
    assert 0 < more[tokens] < 0.01 * whole.activation_bytes[tokens]
    few = job(adapters_of(rank=16, targets="q_proj")).cost.units[LAYER]
    assert few.activation_bytes[tokens] < 0.75 * whole.activation_bytes[tokens]


def test_a_part_can_be_trained_whole_beside_adapters():
    """Prevents a projector frozen along with the language model's base weights."""
    units = job(ALL, ("vision",)).cost.units
    assert units["projector"].trained_parameters == units["projector"].parameters
    assert units["language_embed"].has_backward
    everywhere = ALL.model_copy(update={"parts": ("vision", "projector", "language")})
    units = job(everywhere, ()).cost.units
    for name in ("vision_layer", "projector"):
        assert 0 < units[name].trained_parameters < units[name].parameters
    assert not units["vision_embed"].has_backward


def test_experts_have_none_here_and_have_in_other_trainers():
    """Prevents adapters on experts in this trainer, or none on experts in other trainers."""
    model = load_model("qwen3-30b-a3b")
    spec = replace(job(frozen=()), model=model, adapters=ALL)
    other = replace(spec, adapters=ALL.model_copy(update={"experts": True}))
    ours, theirs = (each.cost.units["language_layer_experts128"] for each in (spec, other))
    assert theirs.trained_parameters > 20 * ours.trained_parameters > 0
    assert ours.trained_expert_parameters == theirs.trained_expert_parameters == 0


@pytest.mark.parametrize(
    ("targets", "parts", "frozen", "words"),
    [
        ("query", ("language",), (), "match no linear of language"),
        ("query", ("language",), (), "has q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, "),
        ("q_proj,fc9", ("language",), (), "target fc9 matches nothing"),
        (r".*layers\.[0-9]\..*q_proj", ("language",), (), "q_proj of some layers"),
        ("q_proj", ("vision",), (), "has qkv, proj, fc1, fc2 or all-linear"),
        ("q_proj", ("audio",), (), "the parts of internvl3-8b are vision, projector, language"),
        ("q_proj", ("language",), ("language",), "language is frozen and has adapters"),
        ("lm_head", ("language",), (), "match no linear"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_a_line(targets, parts, frozen, words):
    """Prevents a typing error that trains nothing, or only the layers it does name."""
    given = adapters_of(rank=8, targets=targets, parts=parts)
    mistake = adapter_mistake(MODEL, frozen, given)
    assert mistake is not None and words in mistake and "\n" not in mistake
    with pytest.raises(UserError, match="adapters"):
        job(given, frozen)


@pytest.mark.parametrize("targets", ["all-linear,q_proj", "q_proj,.*v_proj", "(", ""])
def test_targets_that_do_not_go_together_are_refused(targets):
    """Prevents a regular expression cut at its commas, or accepting an invalid pattern."""
    with pytest.raises(UserError, match="adapters"):
        job(adapters_of(rank=8, targets=targets))


def test_regular_expressions_are_of_whole_names_in_either_layout():
    """Prevents PEFT's target patterns from matching nothing here."""
    named = job(adapters_of(rank=8, targets="q_proj,v_proj")).cost.units[LAYER]
    for pattern in (
        r".*language_model.*\.(q_proj|v_proj)",
        r"model\.language_model\.layers\.\d+\.self_attn\.(q|v)_proj",
        r"language_model\.model\.layers\.\d{1,2}\.self_attn\.[qv]_proj",
    ):
        same = job(adapters_of(rank=8, targets=pattern)).cost.units[LAYER]
        assert same.trained_parameters == named.trained_parameters
        np.testing.assert_array_equal(same.activation_bytes, named.activation_bytes)


def test_options_freeze_all_else_unless_they_say_what():
    """Prevents an encoder trained in full next to adapters, unasked, and ignored options."""
    given = {"model": "internvl3-8b", "cluster": "h100-80g"}
    alone = JobOptions(**given, lora_rank=16, lora_targets="q_proj, v_proj").job()
    assert alone.frozen == REST
    assert alone.adapters == AdapterConfig(rank=16, alpha=32, targets=("q_proj", "v_proj"))
    said = JobOptions(**given, lora_rank=16, lora_alpha=8, freeze=["vision"]).job()
    assert said.frozen == ("vision",) and said.adapters.scale == 0.5
    parts = {"lora_part": ["language", "vision"], "lora_rslora": True}
    both = JobOptions(**given, lora_rank=4, **parts).job()
    assert both.frozen == ("projector",) and both.adapters.scale == 4.0
    with pytest.raises(UserError, match="--lora-alpha needs --lora-rank"):
        JobOptions(**given, lora_alpha=8).job()


def test_a_plan_says_its_adapters_and_is_read_again(tmp_path):
    """Prevents a plan losing its adapters, and an extra field in plans without adapters."""
    data = MockData(caps=Caps.of(tiles=6, tokens=4096), micro_batches_per_step=8)
    plan = make_plan(PlanRequest(job=job(ALL, pipeline=2), data=data)).plan
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert JobSpec.of_plan(plan).adapters == ALL
    plain = plan.model_copy(update={"adapters": None, "frozen": ()})
    assert "adapters" not in plain.model_dump_json()
    # No gradient is sent back over a cut before the first adapter.
    assert plan.trained_towers(0) == (
        frozenset({"language"}) if plan.stages[0].layers("language") else frozenset()
    )
