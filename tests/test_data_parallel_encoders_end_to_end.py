"""Plans with data-parallel encoders, through the commands as they are typed."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from end_to_end_cases import (
    assert_same_evaluation,
    losses,
    ranks_succeed,
    records,
    succeed,
    training,
)

from megatron.vlm.run.arguments import parse_arguments
from megatron.vlm.run.launch import Launch
from megatron.vlm.run.pretrain import load_run, open_trainable
from omnibal.base.errors import UserError


@pytest.fixture(scope="module")
def beside(single, tmp_path_factory) -> Path:
    """The same steps on two pipelines of two stages, with the encoder data-parallel."""
    folder = tmp_path_factory.mktemp("plans") / "beside"
    succeed(
        "-m", "omnibal", "plan", "--model", "internvl-digits", "--cluster", "laptop-cpu",
        "--precision", "fp32", "--steps-of", single, "--pp", "2", "--dp", "2",
        "--encoder", "data-parallel", "-o", folder,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def divided(beside, tmp_path_factory) -> Path:
    """The same plan, with the encoders' weights divided over all ranks."""
    folder = tmp_path_factory.mktemp("plans") / "divided"
    shutil.copytree(beside, folder)
    plan = json.loads((folder / "plan.json").read_text())
    plan["beside"]["sharded"] = 4
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def test_data_parallel_encoders_train_resume_and_answer_as_one_process(
    single, beside, divided, digits, tmp_path
):
    """Prevents: a plan that the trainer cannot follow."""
    alone, apart, parts = tmp_path / "alone", tmp_path / "apart", tmp_path / "parts"
    heldout = ("--eval-data", digits / "heldout" / "meta.json", "--eval-samples", "6")
    held = (*heldout, "--eval-interval", "3", "--max-new-tokens", "2")
    succeed(*training(single, digits, alone, "--train-iters", "3", *held))
    ranks_succeed(4, *training(beside, digits, apart, "--train-iters", "2"))
    resume = ("--load", apart, "--train-iters", "3")
    succeed(*training(single, digits, tmp_path / "back", *resume))
    ranks_succeed(4, *training(divided, digits, parts, *resume, *held))
    said = ranks_succeed(4, *training(beside, digits, apart, *resume, *held))
    assert f"resuming {apart} after step 2" in said
    assert losses(apart) == pytest.approx(losses(alone), rel=1e-4)
    for save in (tmp_path / "back", parts):
        assert losses(save) == pytest.approx(losses(alone)[2:], rel=1e-4)
    assert_same_evaluation([apart, parts, alone])
    for record in records(apart):
        assert all(stage["encoder_ms"] > 0 for stage in record["stages"])
    page = tmp_path / "report.html"
    succeed("-m", "omnibal", "report", beside, "--run", apart, "-o", page)
    headings = re.findall("<th[^>]*>([^<]*)</th>", page.read_text())
    assert {"encoders\nms", "exchange\nms"} <= set(headings)


def test_other_layers_are_refused(beside, digits, tmp_path, monkeypatch):
    """Prevents: Transformer Engine's layers where no test has seen them."""
    command = training(beside, digits, tmp_path / "run")
    monkeypatch.setattr("sys.argv", [str(word) for word in command])
    arguments = replace(parse_arguments().run, provider="te")
    with pytest.raises(UserError, match="--provider te was given, but the plan's encoders"):
        load_run(arguments, open_trainable(beside), Launch(rank=0, world_size=4, local_rank=0))
