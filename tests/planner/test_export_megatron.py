"""Flags and overrides for Megatron trainers, parsed as these programs do. The split is read by
Megatron-core in tests/training/test_layout_core.py."""

import shlex
from types import SimpleNamespace

import numpy as np
import pytest
from export_cases import MICRO_BATCHES, given_of, plan_files, random_packs, stages_of
from length_cases import lengths_of
from plan_cases import MODEL

from omnibal.base.errors import UserError
from omnibal.model.config import ModelConfig
from omnibal.model.layer_kinds import ExpertsConfig, LayerRun
from omnibal.model.parallel import Parallel
from omnibal.model.targets import TargetName
from omnibal.packing.packs import Packs
from omnibal.pipeline.stage_units import Stage
from omnibal.trainers.export import megatron_bridge, megatron_lm
from omnibal.trainers.export.directory import EXPORTS
from omnibal.trainers.export.exported import ExportInput
from omnibal.trainers.export.layout import parse_layout
from omnibal.trainers.lint.command_line import read_launch
from omnibal.trainers.lint.launch_settings import MEGATRON, Launcher
from omnibal.trainers.lint.line import layers_by_chunk, line_of
from omnibal.trainers.lint.rules import findings_of

pytestmark = pytest.mark.quick

LARGER = MODEL.with_layers(vision=6, language=12)
EXPERTS = ExpertsConfig(experts=4, experts_per_token=2, ffn_hidden_size=64)
MIXED = LARGER.with_tower("language", runs=(LayerRun(layers=1, experts=EXPERTS),))


def make_input(
    stages: tuple[Stage, ...],
    name: TargetName = TargetName.MEGATRON_LM,
    model: ModelConfig = LARGER,
    sizes: dict | None = None,
    *,
    alike: bool = False,
    **changes,
) -> ExportInput:
    """Return the export of a plan on two data-parallel ranks: random packs, or 3 x 100 tokens."""
    rng, parallel = np.random.default_rng(0), Parallel(pipeline=len(stages), data=2, **sizes or {})
    tokens, packs = rng.integers(10, 300, 72), random_packs(72, 3, rng)
    if alike:
        tokens, packs = np.full(72, 100), Packs.from_lists(np.arange(72).reshape(24, 3).tolist())
    given = {"model": model, "parallel": parallel, **changes}
    lengths = lengths_of(tokens=tokens, tiles=np.zeros(72))
    return given_of(plan_files(packs, lengths, stages, **given), name)


def flags_of(command: str) -> dict[str, str]:
    """Return a command's flags as argparse parses them."""
    words = shlex.split(command.replace("\\\n", " "))
    starts = [place for place, word in enumerate(words) if word.startswith("--")]
    ends = [*starts[1:], len(words)]
    return {words[a][2:]: " ".join(words[a + 1 : b]) for a, b in zip(starts, ends, strict=True)}


def overrides_of(command: str) -> dict[str, str]:
    words = shlex.split(command.replace("\\\n", " "))
    named = [word for word in words if word.startswith(("model.", "train.", "ddp."))]
    return dict(word.split("=", 1) for word in named)


def longest(given: ExportInput) -> int:
    tokens = given.order.packs.sums(given.files.steps[1].tokens)
    full = MICRO_BATCHES * given.files.plan.parallel.data
    return int(tokens[: len(tokens) // full * full].max())


def test_megatron_lm_is_told_split_recomputation_and_batch():
    """Prevents a launch with other sizes, layers or steps than planned."""
    again = {0: ("vision 0..5", "language 0..1"), 1: ("language 2..4",), 2: ("language 6..8",),
             3: ("language 9..11",)}  # fmt: skip
    stages = stages_of(LARGER, 2, 4, 3, 3, recompute=again)
    given = make_input(stages, sizes={"tensor": 2, "sequence_parallel": True})
    exported = megatron_lm.export(given)
    flags = flags_of(exported.command)
    assert exported.command.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun")
    assert parse_layout(flags["pipeline-model-parallel-layout"], 4).layers == (2, 4, 3, 3)
    assert any("--recompute-vision" in note for note in exported.notes)
    wanted = {
        # The first stage has only two layers.
        "recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": "3",
        "tensor-model-parallel-size": "2", "pipeline-model-parallel-size": "4", "bf16": None,
        "sequence-parallel": "", "micro-batch-size": "1", "overlap-grad-reduce": "",
        "global-batch-size": str(2 * MICRO_BATCHES), "use-distributed-optimizer": "",
        "train-iters": str(len(given.order) // (2 * MICRO_BATCHES)),
        "seq-length": str(longest(given) + longest(given) % 2), "expert-model-parallel-size": None,
    }  # fmt: skip
    assert {name: flags.get(name) for name in wanted} == wanted
    assert exported.settings.splitlines()[0] == "layout in full: Ett|tttt|ttt|tttL"


def test_a_model_without_gates_is_told_with_its_flags():
    """Prevents GPT-3 or Nemotron-4 built with the default SwiGLU and rotary positions."""
    nemotron = LARGER.with_tower("language", activation="squared_relu", norm_bias=True)
    notes = megatron_lm.export(make_input(stages_of(LARGER, 6, 6), model=nemotron)).notes
    said = "--squared-relu, no --swiglu, --normalization LayerNorm."
    assert any(note.endswith(said) for note in notes)
    usual = megatron_lm.export(make_input(stages_of(LARGER, 6, 6))).notes
    assert not any("is built with" in note for note in usual)


def test_experts_are_never_divided():
    """Prevents expert tensor parallelism by default: its size defaults to the tensor size."""
    given = make_input(stages_of(MIXED, 6, 6), model=MIXED, sizes={"expert": 2})
    flags = flags_of(megatron_lm.export(given).command)
    assert (flags["expert-model-parallel-size"], flags["expert-tensor-parallel-size"]) == ("2", "1")
    overrides = overrides_of(megatron_bridge.export(given).command)
    assert overrides["model.expert_model_parallel_size"] == "2"
    assert overrides["model.expert_tensor_parallel_size"] == "1"


def test_overrides_say_the_split_and_take_back_the_recipes():
    """Prevents a recipe's layout, or first and last layer counts, overriding the plan's."""
    split = (
        "virtual_pipeline_model_parallel_size", "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout",
        "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    )  # fmt: skip
    cases = {
        (3, 3, 3, 3): ("null", "null", "null", "null", "False", "False"),
        (2, 4, 3, 3): ("null", "null", "null", "Ett|t*4|t*3|t*3L", "False", "False"),
        (2, 3, 3, 4): ("null", "2", "4", "null", "False", "False"),
    }
    for layers, values in cases.items():
        exported = megatron_bridge.export(
            make_input(stages_of(LARGER, *layers), TargetName.MEGATRON_BRIDGE, frozen=("vision",))
        )
        read = overrides_of(exported.command)
        assert tuple(read[f"model.{name}"] for name in split) == values
        assert read["model.freeze_vision_model"] == "True"
        assert read["model.recompute_granularity"] == "null"
        tables = {name: SimpleNamespace() for name in ("model", "train", "dataset", "ddp")}
        names = {"cfg": SimpleNamespace(**tables)}
        exec(exported.settings, names)
        assert parse_layout(names["layout"], 4).layers == layers
        for name, value in read.items():
            table, _, field = name.partition(".")
            stated = vars(tables[table])[field]
            assert value == ("null" if stated is None else str(stated))


def test_padding_is_told_with_its_share():
    """Prevents a prediction without padding presented for a trainer that pads."""
    given = make_input(stages_of(LARGER, 6, 6))
    tokens = given.order.packs.sums(given.files.steps[1].tokens)
    full = 2 * MICRO_BATCHES
    mean = tokens[: len(tokens) // full * full].mean() / longest(given)
    told = [each for each in megatron_lm.export(given).deviations if "padded to the" in each]
    assert len(told) == 1 and f"fill {100 * mean:.1f} % of the {longest(given)} tokens" in told[0]
    alone = make_input(stages_of(LARGER, 12))
    assert not any("padded" in each for each in megatron_lm.export(alone).deviations)


def test_a_plan_without_a_full_step():
    """Prevents an export that trains nothing, or a traceback."""
    lengths = lengths_of(tokens=np.arange(10, 13), tiles=np.zeros(3))
    packs = random_packs(3, 1, np.random.default_rng(0))
    files = plan_files(packs, lengths, stages_of(MODEL, 4), parallel=Parallel(pipeline=1, data=4))
    told = "3 packs fill no step of 4 ranks"
    with pytest.raises(UserError, match=told):
        megatron_lm.export(given_of(files, TargetName.MEGATRON_LM))


LAUNCHED = {
    "one stage": (LARGER, (12,), {}),
    "even": (LARGER, (6, 6), {}),
    "ends": (LARGER, (2, 3, 3, 4), {"tensor": 2, "sequence_parallel": True}),
    "layout": (LARGER, (2, 4, 3, 3), {}),
    "experts": (MIXED, (5, 7), {"expert": 2}),
}


@pytest.mark.parametrize("launcher", sorted(MEGATRON - {Launcher.LOONGFORGE}))
@pytest.mark.parametrize("case", LAUNCHED)
def test_an_export_can_start_with_the_plans_stages(case, launcher):
    """Prevents exporting a command that the trainer refuses."""
    model, layers, sizes = LAUNCHED[case]
    target = TargetName(launcher.value)
    given = make_input(stages_of(model, *layers), target, model, sizes, alike=True)
    launch = read_launch(EXPORTS[target](given).command, {})
    assert launch.launcher is launcher
    assert launch.gpus == given.files.plan.parallel.world_size
    assert [one.message for one in findings_of(line_of(launch, model)) if one.is_refusal] == []
    line = line_of(launch, model)
    assert (line.data, line.launch.pipeline) == (2, len(layers))
    assert tuple(map(sum, layers_by_chunk(line))) == layers
    assert line.micro_batches == -(-line.launch.global_batch // 2)
