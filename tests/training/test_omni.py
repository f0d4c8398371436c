"""A model that sees and hears, cut anywhere: same losses, gradients and weights as in one process."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_pipeline import assert_same_results, assert_same_training, assert_same_weights
from test_pipeline import single_process, train_steps
from toy import OPTIONS, stages_of, toy_batch, toy_omni_model, toy_plan

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.model.initialize import global_parameter_name
from megatron.vlm.step import schedule
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.config import load_cluster
from omnibal.cost.analytic import analytic_cost
from omnibal.cost.model import pack_features
from omnibal.parallel import Parallel
from omnibal.pipeline.stage_cost import stage_times
from omnibal.units import feature_names

MODEL = toy_omni_model()
# Samples of (tiles, text tokens, clips): packs of both, of one, and of neither.
STEPS = [
    [[(2, 9, 1), (1, 14, 0)], [(0, 12, 0), (0, 7, 0)], [(3, 5, 0)], [(0, 8, 3), (0, 6, 1)]],
    [[(0, 20, 2)], [(1, 6, 2), (4, 10, 0)], [(2, 8, 1)]],
]

# Units of the model: 0 vision embed, 1-4 vision layers, 5 vision projector, 6 audio embed,
# 7-10 audio layers, 11 audio projector, 12 language embed, 13-15 language layers, 16 head.
CUTS = [
    pytest.param((9,), id="inside-the-audio-encoder"),
    pytest.param((6,), id="between-the-encoders"),
    pytest.param((3, 11), id="inside-vision-and-before-the-audio-projector"),
    pytest.param((12,), id="before-the-language-embed"),
    pytest.param((4, 8, 10, 14), id="five-stages-one-of-audio-layers-alone"),
]


@pytest.fixture(scope="module")
def reference():
    """Of one process."""
    return single_process(MODEL, STEPS)


@pytest.mark.parametrize("cuts", CUTS)
def test_split_pipeline_equals_one_process(cuts, reference):
    """Prevents: features or gradients of one encoder that are lost, or taken for the other's, where
    they pass stages that do not hold it."""
    recompute = {"vision": (1,), "audio": (0, 2), "language": (1,)}
    plan = toy_plan(MODEL, stages_of(MODEL, *cuts, **recompute))
    assert_same_training(run_ranks(plan.parallel, train_steps, plan, STEPS), reference)
