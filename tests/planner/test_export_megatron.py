"""Flags and overrides of Megatron trainers, read back as their programs read them.

Megatron-core itself reads the split in tests/training/test_layout_core.py.
"""

import shlex
from types import SimpleNamespace

import numpy as np
import pytest
from length_cases import lengths_of
from plan_cases import MODEL
from trainer_cases import MICRO_BATCHES, given_of, plan_files, random_packs, stages_of

from omnibal.base.errors import UserError
from omnibal.export import megatron_bridge, megatron_lm
from omnibal.export.exported import ExportInput
from omnibal.export.layout import parse_layout
from omnibal.model.config import ModelConfig
from omnibal.model.layers import ExpertsConfig, LayerRun
from omnibal.model.parallel import Parallel
from omnibal.model.targets import TargetName
from omnibal.pipeline.stage import Stage

LARGER = MODEL.with_layers(vision=6, language=12)


def planned(
    stages: tuple[Stage, ...], name: TargetName, model: ModelConfig = LARGER, **changes
) -> ExportInput:
    """A plan of random packs on two data-parallel ranks."""
    rng = np.random.default_rng(0)
    lengths = lengths_of(tokens=rng.integers(10, 300, 60), tiles=np.zeros(60))
    sizes = {"pipeline": len(stages), "data": 2, **changes.pop("sizes", {})}
    files = plan_files(
        random_packs(60, 3, rng),
        lengths,
        stages,
        model=model,
        parallel=Parallel(**sizes),
        **changes,
    )
    return given_of(files, name)


def flags_of(command: str) -> dict[str, str]:
    """Flags of a command as argparse reads them."""
    words = shlex.split(command.replace("\\\n", " "))
    starts = [place for place, word in enumerate(words) if word.startswith("--")]
    ends = [*starts[1:], len(words)]
    return {words[a][2:]: " ".join(words[a + 1 : b]) for a, b in zip(starts, ends, strict=True)}


def overrides_of(command: str) -> dict[str, str]:
    words = shlex.split(command.replace("\\\n", " "))
    return dict(
        word.split("=", 1) for word in words if word.startswith(("model.", "train.", "ddp."))
    )


def longest(given: ExportInput) -> int:
    tokens = given.order.packs.sums(given.files.steps[1].tokens)
    full = MICRO_BATCHES * given.files.plan.parallel.data
    return int(tokens[: len(tokens) // full * full].max())


def test_megatron_lm_is_told_split_recomputation_and_batch():
    """Prevents a launch with other sizes, layers or steps than were planned."""
    again = {0: ("vision 0..5", "language 0..1"), 1: ("language 2..4",), 2: ("language 6..8",),
             3: ("language 9..11",)}  # fmt: skip
    stages = stages_of(LARGER, 2, 4, 3, 3, recompute=again)
    given = planned(stages, TargetName.MEGATRON_LM, sizes={"tensor": 2, "sequence_parallel": True})
    exported = megatron_lm.export(given)
    flags = flags_of(exported.command)
    assert exported.command.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun")
    assert parse_layout(flags["pipeline-model-parallel-layout"], 4).layers == (2, 4, 3, 3)
    # Two layers on the first stage are all that it holds.
    recompute = {
        name: flags[f"recompute-{name}"] for name in ("granularity", "method", "num-layers")
    }
    assert recompute == {"granularity": "full", "method": "block", "num-layers": "3"}
    assert any("--recompute-vision" in note for note in exported.notes)
    wanted = {
        "tensor-model-parallel-size": "2", "pipeline-model-parallel-size": "4", "bf16": None,
        "sequence-parallel": "", "micro-batch-size": "1", "overlap-grad-reduce": "",
        "global-batch-size": str(2 * MICRO_BATCHES), "use-distributed-optimizer": "",
        "train-iters": str(len(given.order) // (2 * MICRO_BATCHES)),
        "seq-length": str(longest(given) + longest(given) % 2), "expert-model-parallel-size": None,
    }  # fmt: skip
    assert {name: flags.get(name) for name in wanted} == wanted
    assert exported.settings.splitlines()[0] == "layout in full: Ett|tttt|ttt|tttL"


def test_experts_are_never_divided():
    """Prevents expert tensor parallelism, whose size is the tensor size where no flag says it."""
    experts = LayerRun(
        layers=1, experts=ExpertsConfig(experts=4, experts_per_token=2, ffn_hidden_size=64)
    )
    model = LARGER.with_tower("language", runs=(experts,))
    given = planned(stages_of(model, 6, 6), TargetName.MEGATRON_LM, model, sizes={"expert": 2})
    flags = flags_of(megatron_lm.export(given).command)
    assert (flags["expert-model-parallel-size"], flags["expert-tensor-parallel-size"]) == ("2", "1")
    overrides = overrides_of(megatron_bridge.export(given).command)
    assert overrides["model.expert_model_parallel_size"] == "2"
    assert overrides["model.expert_tensor_parallel_size"] == "1"


def test_overrides_say_the_split_and_take_back_the_recipes():
    """Prevents a recipe's own layout, or numbers of its ends, from standing beside the plan's."""
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
            planned(stages_of(LARGER, *layers), TargetName.MEGATRON_BRIDGE, frozen=("vision",))
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
    """Prevents a prediction without padding that is taken for the run of a trainer that pads."""
    given = planned(stages_of(LARGER, 6, 6), TargetName.MEGATRON_LM)
    tokens = given.order.packs.sums(given.files.steps[1].tokens)
    full = 2 * MICRO_BATCHES
    mean = tokens[: len(tokens) // full * full].mean() / longest(given)
    told = [each for each in megatron_lm.export(given).given_up if "padded to the longest" in each]
    assert len(told) == 1 and f"fill {100 * mean:.1f} % of the {longest(given)} tokens" in told[0]
    alone = planned(stages_of(LARGER, 12), TargetName.MEGATRON_LM)
    assert not any("padded" in each for each in megatron_lm.export(alone).given_up)


def test_a_plan_without_a_full_step():
    """Prevents an export that trains nothing, or ends in a traceback."""
    lengths = lengths_of(tokens=np.arange(10, 13), tiles=np.zeros(3))
    packs = random_packs(3, 1, np.random.default_rng(0))
    files = plan_files(packs, lengths, stages_of(MODEL, 4), parallel=Parallel(pipeline=1, data=4))
    with pytest.raises(
        UserError, match="3 packs for 4 data-parallel ranks, so that no step is full"
    ):
        megatron_lm.export(given_of(files, TargetName.MEGATRON_LM))
