"""Launch lines that this project writes itself are read back, and refused by no rule."""

import numpy as np
import pytest
from length_cases import lengths_of
from plan_cases import MODEL
from trainer_cases import given_of, plan_files, stages_of

from omnibal.export.trainers import EXPORTS
from omnibal.lint.all_rules import findings_of
from omnibal.lint.command_line import read_launch
from omnibal.lint.launch import Launcher
from omnibal.lint.line import line_of
from omnibal.lint.split import layers_by_chunk
from omnibal.model.layers import ExpertsConfig, LayerRun
from omnibal.model.parallel import Parallel
from omnibal.model.targets import TargetName
from omnibal.packing.packs import Packs

pytestmark = pytest.mark.quick

EXPERTS = ExpertsConfig(experts=4, experts_per_token=2, ffn_hidden_size=64)
DENSE = MODEL.with_layers(vision=6, language=12)
MIXED = DENSE.with_tower("language", runs=(LayerRun(layers=1, experts=EXPERTS),))
CASES = {
    "one stage": (DENSE, (12,), {}),
    "even": (DENSE, (6, 6), {}),
    "ends": (DENSE, (2, 3, 3, 4), {"tensor": 2, "sequence_parallel": True}),
    "layout": (DENSE, (2, 4, 3, 3), {}),
    "experts": (MIXED, (5, 7), {"expert": 2}),
}


@pytest.mark.parametrize("launcher", [each for each in Launcher if each is not Launcher.LOONGFORGE])
@pytest.mark.parametrize("case", CASES)
def test_an_export_can_start_with_the_plans_stages(case: str, launcher: Launcher):
    """Prevents: an export whose command its trainer refuses."""
    model, layers, sizes = CASES[case]
    given = given_of(
        plan_files(
            Packs.from_lists([[first, first + 1, first + 2] for first in range(0, 72, 3)]),
            lengths_of(tokens=np.full(72, 100), tiles=np.zeros(72)),
            stages_of(model, *layers),
            model=model,
            parallel=Parallel(pipeline=len(layers), data=2, **sizes),
        ),
        TargetName(launcher.value),
    )
    launch = read_launch(EXPORTS[TargetName(launcher.value)](given).command, {})
    assert launch.launcher is launcher
    assert launch.gpus == given.files.plan.parallel.world_size
    assert [one.message for one in findings_of(launch, model) if one.is_refusal] == []
    line = line_of(launch, model)
    assert (line.data, line.launch.pipeline) == (2, len(layers))
    assert tuple(map(sum, layers_by_chunk(line))) == layers
    assert line.micro_batches == -(-line.launch.global_batch // 2)
