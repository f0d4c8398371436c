"""The trainer's command line as dataclasses: every option arrives with the value typed."""

import ast
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
from adapter_cases import EVERYWHERE
from pipeline_cases import pipeline_plan
from toy import OPTIONS

from megatron.vlm.inputs.data import LossWeighting, MicroBatchOptions, OnBadSample
from megatron.vlm.run import arguments as arguments_module
from megatron.vlm.run.arguments import (
    CheckpointArguments,
    EvaluationArguments,
    RunArguments,
    StorageArguments,
    parse_arguments,
)
from megatron.vlm.run.pretrain import fill_rates
from megatron.vlm.step.train import OptimizationOptions
from omnibal.base.errors import UserError

TRAIN = "--plan p --data d.json --tokenizer-model t --save s"
MODULES = Path(arguments_module.__file__).parents[1]


def parse_words(monkeypatch: pytest.MonkeyPatch, words: str) -> tuple[Path, RunArguments | None]:
    monkeypatch.setattr(sys, "argv", ["pretrain_vlm.py", *words.split()])
    return parse_arguments()


def test_defaults_are_megatrons_names(monkeypatch) -> None:
    """Prevents a default that changes when options move to another class."""
    assert parse_words(monkeypatch, TRAIN)[1] == RunArguments(
        tokenizer_model=Path("t"), save=Path("s"), load=None, data=Path("d.json"),
        skip_train=False, finetune=False, train_iters=None, seed=42, max_skipped_steps=5,
        num_workers=2, provider="local", samples=MicroBatchOptions(seed=42, augment=True),
        optimization=OptimizationOptions(
            lr=None, min_lr=0.0, lr_decay_style="cosine", lr_warmup_fraction=0.03,
            weight_decay=0.05, adam_beta1=0.9, adam_beta2=0.999, adam_eps=1e-8, clip_grad=1.0,
        ),
        checkpoints=CheckpointArguments(
            save_interval=1000, keep_checkpoints=None, async_save=True, exit_after_failed_saves=2,
            replan_at=(), elastic=False,
        ),
        storage=StorageArguments(data_cache_gib=32), profile_steps=range(0),
        tensorboard_dir=None, wandb_project=None, evaluation=None,
    )  # fmt: skip


def test_what_is_typed_arrives(monkeypatch) -> None:
    """Prevents an option that is parsed and has no effect."""
    words = (
        f"{TRAIN} --load l --finetune --train-iters 7 --seed 3 --no-async-save --save-interval 5 "
        "--replan-at 50,7 --elastic --vision-lr 1e-4 "
        "--keep-checkpoints 2 --exit-after-failed-saves 3 --max-skipped-steps 0 --num-workers 0 "
        "--on-bad-sample skip --loss-weighting sample --drop-path-rate 0.1 --lr 1e-3 "
        "--wandb-project w --tensorboard-dir b --profile-steps 2-4 --eval-data e.json "
        "--eval-samples 9 --eval-interval 6 --max-new-tokens 11"
    )
    run, plain = parse_words(monkeypatch, words)[1], parse_words(monkeypatch, TRAIN)[1]
    sizes = {"lr": 1e-3, "vision_lr": 1e-4, "drop_path_rate": 0.1}
    sizes |= {"loss_weighting": LossWeighting.SAMPLE}
    told = {"loss_weighting": LossWeighting.SAMPLE, "on_bad_sample": OnBadSample.SKIP}
    assert run == replace(
        plain, load=Path("l"), finetune=True, train_iters=7, seed=3, max_skipped_steps=0,
        num_workers=0, optimization=replace(plain.optimization, **sizes),
        samples=replace(plain.samples, seed=3, drop_path=True, **told),
        checkpoints=CheckpointArguments(
            save_interval=5, keep_checkpoints=2, async_save=False, exit_after_failed_saves=3,
            replan_at=(7, 50), elastic=True,
        ),
        tensorboard_dir=Path("b"), wandb_project="w", profile_steps=range(2, 5),
        evaluation=EvaluationArguments(
            eval_data=Path("e.json"), eval_samples=9, eval_interval=6, max_new_tokens=11
        ),
    )  # fmt: skip


def test_rates_are_those_of_recipes() -> None:
    """Prevents the full fine-tuning rate for adapters, the language model's rate for a trained
    vision tower, and a rate for a frozen tower."""
    plan, options = pipeline_plan(), replace(OPTIONS, lr=None, min_lr=0.0)
    with_adapters = {"adapters": EVERYWHERE, "frozen": ("vision",)}
    found = fill_rates(options, plan)
    assert (found.lr, found.vision_lr) == (1e-5, pytest.approx(2e-6))
    found = fill_rates(options, plan.model_copy(update=with_adapters))
    assert (found.lr, found.vision_lr) == (1e-4, None)
    with pytest.raises(UserError, match="at most --lr, 1e-05"):
        fill_rates(replace(options, min_lr=1.0), plan)
    with pytest.raises(UserError, match="trains no vision encoder"):
        fill_rates(replace(options, vision_lr=1.0), pipeline_plan(frozen=("vision",)))


def test_dry_run_needs_only_the_plan(monkeypatch) -> None:
    """Prevents a dry run that requires data."""
    assert parse_words(monkeypatch, "--plan p --dry-run") == (Path("p"), None)


@pytest.mark.parametrize(
    "words",
    [
        "--plan p --save s --tokenizer-model t",
        f"{TRAIN} --finetune",
        f"{TRAIN} --skip-train",
        f"{TRAIN} --eval-interval 3",
        f"{TRAIN} --lr -1",
        "--plan p --data d",
    ],
)
def test_options_that_do_not_go_together_are_refused(monkeypatch, words) -> None:
    """Prevents invalid option combinations from failing on every rank minutes after launch."""
    with pytest.raises(UserError, match=r"see pretrain_vlm\.py --help"):
        parse_words(monkeypatch, words)


def test_no_field_is_left_unread() -> None:
    """Prevents a flag without effect: the trainer must read every field."""
    read = {
        node.attr
        for path in MODULES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    kinds = (RunArguments, CheckpointArguments, EvaluationArguments)
    assert all(map(is_dataclass, kinds))
    assert {field.name for kind in kinds for field in fields(kind)} <= read
