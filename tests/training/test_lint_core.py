"""Launch-line rules compared with Megatron-core on random flags, about half of them invalid: equal
verdicts, layers per stage and chunk order."""

import random
import warnings
from collections import Counter
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from omnibal.pipeline.schedules import Pass, interleaved_1f1b
from omnibal.trainers.lint.command_line import read_launch
from omnibal.trainers.lint.line import layers_by_chunk, line_of
from omnibal.trainers.lint.rules import findings_of
from tests.planner.launch_cases import sized_model

CASES = 600
_REFUSALS = (AssertionError, ValueError, RuntimeError, NotImplementedError)
Case = dict[str, Any]
Chunks = tuple[tuple[int, ...], ...]


def draw_case(dice: random.Random) -> Case:
    """Return a model's sizes and fields of core's configuration, any of them possibly invalid."""
    pipeline = dice.choice([1, 2, 2, 3, 4])
    layers = dice.choice([*[pipeline * dice.randint(1, 4) * 2] * 4, dice.randint(2, 24)])
    case: Case = {
        "layers": layers,
        "heads": dice.choice([4, 8, 12]),
        "experts": dice.choice([0, 6, 6, 12]),
        "latent": dice.random() < 0.2,
        "pipeline_model_parallel_size": pipeline,
        "tensor_model_parallel_size": dice.choice([1, 2, 2, 2, 2, 3, 4]),
        "expert_model_parallel_size": dice.choice([1] * 7 + [2, 2, 3, 4]),
        "sequence_parallel": dice.random() < 0.2,
    }
    case["kv_heads"] = case["heads"] // dice.choice([1, 2, 4])
    _draw_split(dice, case, layers, pipeline)
    _draw_recompute(dice, case)
    return case


def _draw_split(dice: random.Random, case: Case, layers: int, pipeline: int) -> None:
    kind = dice.choice(["plain", "plain", "ends", "ends", "counted", "layout", "layout", "all"])
    if kind != "layout" and dice.random() < (0.4 if pipeline > 1 else 0.1):
        case["virtual_pipeline_model_parallel_size"] = dice.choice([2, 2, 2, 3])
    if kind in ("ends", "all"):
        more = dice.choice([0, 1, 2, 2])
        for name, size in (
            ("first", layers // pipeline - more),
            ("last", layers // pipeline + more),
        ):
            if dice.random() < 0.85:
                wild = dice.random() < 0.15
                case[f"num_layers_in_{name}_pipeline_stage"] = dice.randint(-1, 9) if wild else size
    if kind in ("counted", "all"):
        case["account_for_embedding_in_pipeline_split"] = dice.random() < 0.6
        case["account_for_loss_in_pipeline_split"] = dice.random() < 0.6
        case["layers"] = max(1, layers + dice.choice([0, -1, -2, -2]))
    if kind == "layout" or (kind == "all" and dice.random() < 0.2):
        _draw_layout(dice, case, case["layers"], pipeline)


def _draw_layout(dice: random.Random, case: Case, layers: int, pipeline: int) -> None:
    """Draw a layout with random cuts, often with a letter added, lost or moved."""
    chunks = pipeline * (1 if pipeline == 1 else dice.choice([1, 1, 2])) + (dice.random() < 0.08)
    cuts = sorted(dice.randint(0, layers) for _ in range(chunks - 1))
    counts = [end - start for start, end in zip([0, *cuts], [*cuts, layers], strict=True)]
    held = ["t" * count for count in counts]
    prediction = dice.choice([0, 0, 1, 2])
    held[0], held[-1] = "E" + held[0], held[-1] + "m" * prediction + "L"
    text = "|".join(held)
    if prediction and dice.random() < 0.3:
        text = (
            text.replace("m", "") if chunks == 1 else text.replace("|", "m" * prediction + "|", 1)
        )
    if prediction and chunks > 2 and dice.random() < 0.3:
        text = "|".join([*held[:-2], held[-2] + "m" * prediction, "L"])
    for _ in range(dice.choice([0, 0, 0, 1])):
        place = dice.randrange(len(text))
        text = text[:place] + dice.choice(["t", "", "E", "|", "m", "x", "L", "t*2"]) + text[place:]
    case["pipeline_model_parallel_layout"] = text
    if prediction and dice.random() < 0.9:
        case["mtp_num_layers"] = prediction
    elif dice.random() < 0.1:
        case["mtp_num_layers"] = 1
    if dice.random() < 0.2:
        case["virtual_pipeline_model_parallel_size"] = dice.choice([1, chunks // pipeline, 2])


def _draw_recompute(dice: random.Random, case: Case) -> None:
    if dice.random() < 0.5:
        return
    case["recompute_granularity"] = dice.choice(["full"] * 5 + ["selective"] * 3 + ["some"])
    if dice.random() < 0.9:
        case["recompute_method"] = dice.choice(["block"] * 4 + ["uniform"] * 4 + ["other"])
    if dice.random() < 0.9:
        case["recompute_num_layers"] = dice.randint(1, 9)
    if case["recompute_granularity"] == "selective" and dice.random() < 0.9:
        case.pop("recompute_num_layers", None)
        modules = ["core_attn", "mlp", "layernorm", "mla_up_proj", "moe", "attention"]
        case["recompute_modules"] = dice.sample(modules, 2)


_OF_MODEL = ("layers", "heads", "kv_heads", "experts", "latent")


def rule_verdict(case: Case) -> tuple[tuple[str, ...], Chunks | None]:
    """Return the rules that a case breaks, and the layers of its chunks if it breaks none."""
    model = sized_model(*(case[name] for name in _OF_MODEL))
    fields = {name: value for name, value in case.items() if name not in _OF_MODEL}
    shown = (f"model.{name}='{value}'" for name, value in {**fields, "bf16": True}.items())
    launch = read_launch(" ".join(shown), {})
    line = line_of(launch, model)
    found = tuple(one.rule for one in findings_of(line) if one.severity == "refused")
    return found, None if found else layers_by_chunk(line)


def core_verdict(case: Case) -> Chunks | str:
    """Return the layers of every stage's chunks as core builds them, or its error."""
    fields = {name: value for name, value in case.items() if name not in _OF_MODEL}
    if case["experts"]:
        fields |= {"num_moe_experts": case["experts"], "moe_ffn_hidden_size": 64}
        if case["experts"] % case["expert_model_parallel_size"]:
            return "moe_layer.py: num_moe_experts % ep_size"  # asserted when a layer is built
    kind = MLATransformerConfig if case["latent"] else TransformerConfig
    try:
        config = kind(
            num_layers=case["layers"], hidden_size=64 * case["heads"],
            num_attention_heads=case["heads"],
            num_query_groups=None if case["latent"] else case["kv_heads"],
            pipeline_dtype=torch.bfloat16, bf16=True, gradient_accumulation_fusion=True,
            params_dtype=torch.bfloat16, add_bias_linear=False, **fields,
        )  # fmt: skip
        assert not case["latent"] or config.multi_latent_attention
        return _core_chunks(config)
    except _REFUSALS as error:
        return f"{type(error).__name__}: {error}"


def _core_chunks(config: TransformerConfig) -> Chunks:
    virtual = config.virtual_pipeline_model_parallel_size or 1
    stages = range(config.pipeline_model_parallel_size)
    if virtual > 1 and len(stages) == 1:
        raise RuntimeError("parallel_state.py: interleaved schedule of one stage")
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        rows = layout.layout
        return tuple(tuple(chunk.count(LayerType.decoder) for chunk in row) for row in rows)
    places = [[{"vp_stage": n, "pp_rank": stage} for n in range(virtual)] for stage in stages]
    built = tuple(tuple(get_num_layers_to_build(config, **one) for one in row) for row in places)
    if any(count < 0 for row in built for count in row):
        raise RuntimeError("no check of core's: it builds these as empty stages")
    return built


@pytest.mark.quick
def test_rules_agree_with_core_on_random_flags():
    """Prevents a rule that refuses flags core accepts, or the reverse, and different splits."""
    dice = random.Random(21)
    broken: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for _ in range(CASES):
        case = draw_case(dice)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = core_verdict(case)
        rules, layers = rule_verdict(case)
        assert bool(rules) == isinstance(expected, str), (case, rules, expected)
        assert layers is None or layers == expected, (case, layers, expected)
        broken.update(rules)
        accepted.update(() if rules else ("", *case))
    # Both verdicts are common, and every flag and rule is tried.
    assert 0.15 * CASES < accepted[""] < 0.75 * CASES
    assert len(broken) >= 20 and min(accepted.values()) >= 3, (broken, accepted)


@pytest.mark.parametrize("sizes", [(2, 2, 4), (4, 3, 8), (4, 2, 4), (8, 12, 16)])
def test_chunks_run_in_cores_order(sizes):
    """Prevents bubble and memory estimates of a schedule that differs from Megatron's."""
    stages, chunks, micro_batches = sizes
    table = schedules.get_schedule_table(micro_batches, chunks, stages)
    forwards = [(Pass.FORWARD, *place) for place in table]
    backwards = [(Pass.BACKWARD, number, chunks - 1 - chunk) for number, chunk in table]
    for stage, operations in enumerate(interleaved_1f1b(stages, chunks, micro_batches).operations):
        group = SimpleNamespace(size=lambda: stages, rank=lambda own=stage: own)
        link = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=chunks)
        _, _, warm_up, rest = schedules.get_pp_rank_microbatches(
            micro_batches, chunks, stages, p2p_communicator=link
        )
        steady = chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
        expected = [*forwards[:warm_up], *steady, *backwards[rest:]]
        assert [(one.kind, one.micro_batch, one.chunk) for one in operations] == expected
