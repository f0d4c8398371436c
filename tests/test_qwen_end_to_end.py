"""The commands of scripts/quickstart_qwen.sh on a small dataset, and the script's own order."""

import json
from pathlib import Path

import pytest
from commands import REPOSITORY
from end_to_end_cases import losses, pair_succeeds, ranks_succeed, succeed, training
from quickstart_cases import script_commands, unknown_options

from megatron.vlm.conversion.importing import open_released
from omnibal.model.config import load_model
from tools.make_native_digits import make_dataset

SCRIPT = REPOSITORY / "scripts" / "quickstart_qwen.sh"
MODEL = ("--model", "qwen3-vl-digits")
CAPS = ("--limit", "image_tokens=160", "--max-tokens", "320")


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native") / "dataset"
    make_dataset(folder, samples=60, heldout_samples=12, seed=0)
    return folder


def test_images_of_many_sizes_are_scanned_planned_trained_asked_about_and_exported(
    native, tmp_path
):
    """Prevents: commands of Qwen's quickstart that do not fit together."""
    tokenizer, plan, run = native / "tokenizer", tmp_path / "plan", tmp_path / "run"
    given, lengths = ("--tokenizer-model", tokenizer), tmp_path / "lengths.parquet"
    succeed(
        "-m", "omnibal", "lengths", native / "train" / "meta.json", *MODEL, *given, "-o", lengths
    )
    succeed(
        "-m", "omnibal", "plan", *MODEL, "--cluster", "laptop-cpu", "--pp", "2", "--precision",
        "fp32", *CAPS, "--lengths", lengths, "--micro-batches", "3", "--epochs", "1", "-o", plan,
    )  # fmt: skip
    assert "image_tokens" in succeed("-m", "omnibal", "check", plan)
    pair_succeeds(*training(plan, native, run, "--train-iters", "2", *given))
    assert len(losses(run)) == 2
    pair_succeeds(
        "pretrain_vlm.py", "--plan", plan, *given, "--skip-train", "--load", run, "--save", run,
        "--eval-data", native / "heldout" / "meta.json", "--max-new-tokens", "2",
    )  # fmt: skip
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert {"single", "position", "arithmetic"} <= {kind["kind"] for kind in evaluation["kinds"]}
    out = tmp_path / "exported"
    succeed("tools/convert.py", "export", run, "--layout", "qwen3-vl", *given, "-o", out)
    config = json.loads((out / "config.json").read_text())
    assert (config["image_token_id"], config["vision_start_token_id"]) == (5, 3)
    assert open_released(out).model.language.kinds == load_model(MODEL[1]).language.kinds
    assert {"chat_template.jinja", "preprocessor_config.json"} <= {p.name for p in out.iterdir()}


def test_encoders_train_and_answer_alike_beside_the_pipeline(native, tmp_path):
    """Prevents: a plan of data-parallel encoders that is read, trained or asked otherwise than one
    with them in its pipeline."""
    tokenizer, lengths = native / "tokenizer", tmp_path / "lengths.parquet"
    given, single = ("--tokenizer-model", tokenizer), tmp_path / "single"
    asked = ("--eval-data", native / "heldout" / "meta.json", "--max-new-tokens", "2")
    job = ("-m", "omnibal", "plan", *MODEL, "--cluster", "laptop-cpu", "--precision", "fp32")
    data = native / "train" / "meta.json"
    succeed("-m", "omnibal", "lengths", data, *MODEL, *given, "-o", lengths)
    levels = ("--packing-levels", "1", "--samples-per-step", "20", "--epochs", "1")
    succeed(*job, *CAPS, "--lengths", lengths, *levels, "-o", single)
    beside = tmp_path / "beside"
    sizes = ("--pp", "2", "--dp", "2", "--encoder", "data-parallel")
    succeed(*job, "--steps-of", single, *sizes, "-o", beside)
    plan = json.loads((beside / "plan.json").read_text())
    plan["beside"] |= {"sharded": 4, "items_per_pass": {"vision": 60}, "kept_items": {"vision": 90}}
    (beside / "plan.json").write_text(json.dumps(plan))
    found = {}
    for folder, ranks in ((single, 1), (beside, 4)):
        save = tmp_path / f"run-{folder.name}"
        ranks_succeed(ranks, *training(folder, native, save, "--train-iters", "2", *given, *asked))
        evaluation = json.loads((save / "evaluation.json").read_text())
        found[folder.name] = losses(save), evaluation["kinds"]
    assert found["beside"][0] == pytest.approx(found["single"][0], rel=1e-5)
    assert found["beside"][1] == found["single"][1]


def test_script_gives_options_that_exist(tmp_path):
    """Prevents: a quickstart that ends in a usage error after minutes."""
    status, commands, errors = script_commands(SCRIPT, tmp_path)
    assert status == 0, errors
    names = [command[1] if command[0] == "omnibal" else command[0] for command in commands]
    assert names == [
        "python", "lengths", "profile", "plan", "check", "torchrun", "torchrun", "python", "report",
        "python", "lengths", "plan", "torchrun", "torchrun", "python",
    ]  # fmt: skip
    assert unknown_options(commands) == set()
