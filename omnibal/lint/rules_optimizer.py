"""Rules of precision, optimizer and checkpoints."""

import re

from omnibal.lint.launch import Launcher
from omnibal.lint.line import ARGPARSE, Line
from omnibal.lint.rule import SWIFT, Problems, RuleGroup, true_of

RULES = RuleGroup("Precision, optimizer and checkpoints")
rule, core_config, validate_args = RULES.rule, RULES.core_config, RULES.validate_args
_SWIFT = frozenset((Launcher.MS_SWIFT,))


def _form(line: Line) -> str:
    """Form of checkpoints."""
    return line.text("ckpt-format") or "torch_dist"


@core_config("one-precision", "915", holds="a run has one precision")
def _precision(line: Line) -> Problems:
    if line.on("fp16") and line.on("bf16"):
        yield "fp16 and bf16", "leave one of them out"


@validate_args("fp4-or-fp8", holds="a run has one low precision")
def _low_precision(line: Line) -> Problems:
    if line.text("fp4-format") is not None and line.text("fp8-format") is not None:
        yield "fp4 and fp8", "leave one of them out"


@core_config(
    "bf16-ends-of-fp8",
    "990-1017",
    holds="layers that stay in bf16 are of one stage, and not with delayed scaling",
    launchers=ARGPARSE | _SWIFT,
)
def _ends_in_bf16(line: Line) -> Problems:
    if line.text("fp8-format") is None or not line.on("first-last-layers-bf16"):
        return
    if line.has_delayed_scaling:
        yield "first and last layers in bf16 with fp8 recipe delayed", "use another recipe"
    most = line.sizes.layers // line.launch.pipeline
    ends = {end: line.number(f"num-layers-at-{end}-in-bf16") for end in ("start", "end")}
    wrong = [f"{count} at the {end}" for end, count in ends.items() if count and count > most]
    if wrong:
        given = f"{' and '.join(wrong)} in bf16, {most} layers a stage"
        yield given, f"keep at most {most} in bf16"


@validate_args(
    "weights-gathered-need-optimizer",
    holds="gathering of weights is overlapped with the distributed optimizer",
)
def _gather(line: Line) -> Problems:
    is_sharded = line.on("use-distributed-optimizer") or line.on("use-megatron-fsdp")
    if line.on("overlap-param-gather") and not is_sharded:
        yield "--overlap-param-gather without it", "give --use-distributed-optimizer"


@validate_args(
    "weights-gathered-need-reduction",
    holds="gathering of weights is overlapped only with reduction of gradients",
)
def _gather_and_reduce(line: Line) -> Problems:
    if line.on("overlap-param-gather") and not line.on("overlap-grad-reduce"):
        yield "--overlap-param-gather alone", "give --overlap-grad-reduce too"


@validate_args(
    "weights-gathered-in-step", holds="overlap with the optimizer's step needs all of these"
)
def _gather_in_step(line: Line) -> Problems:
    flag, form = "overlap-param-gather-with-optimizer-step", _form(line)
    missing = {
        "--use-distributed-optimizer": not line.on("use-distributed-optimizer"),
        "--overlap-param-gather": not line.on("overlap-param-gather"),
        "several chunks a stage": line.virtual is None,
        f"--ckpt-format torch (it is {form})": form != "torch",
    }
    if line.on(flag) and any(missing.values()):
        yield f"--{flag} without {', '.join(true_of(missing))}", "give them, or leave it out"


@validate_args(
    "weights-gathered-in-fp8",
    holds="weights are gathered in fp8 with the distributed optimizer or FSDP",
)
def _gather_in_fp8(line: Line) -> Problems:
    allowed = ("use-distributed-optimizer", "use-torch-fsdp2", "use-megatron-fsdp")
    if line.on("fp8-param-gather") and not any(map(line.on, allowed)):
        yield "--fp8-param-gather without it", "give --use-distributed-optimizer"


@validate_args("save-needs-interval", holds="saving needs an interval")
def _interval(line: Line) -> Problems:
    if line.text("save") is not None and line.text("save-interval") is None:
        yield "--save without --save-interval", "give it"


@validate_args(
    "offload-needs-precision-aware", holds="the optimizer is offloaded as a precision-aware one"
)
def _offload(line: Line) -> Problems:
    if line.on("optimizer-cpu-offload") and not line.on("use-precision-aware-optimizer"):
        yield "--optimizer-cpu-offload without it", "give --use-precision-aware-optimizer"


@validate_args(
    "muon-alone", holds="muon works without the distributed optimizer and with plain checkpoints"
)
def _muon(line: Line) -> Problems:
    form = _form(line)
    against = {
        "the distributed optimizer": line.on("use-distributed-optimizer"),
        f"checkpoints of form {form}": form != "torch",
    }
    if "muon" in (line.text("optimizer") or "") and any(against.values()):
        yield f"muon with {', '.join(true_of(against))}", "use adam, or leave them out"


@validate_args("checkpoint-form", holds="a form of checkpoints goes with its own way of sharding")
def _checkpoint_form(line: Line) -> Problems:
    needed = {"torch_dcp": "use-torch-fsdp2", "fsdp_dtensor": "use-megatron-fsdp"}
    form = _form(line)
    if form in needed and not line.on(needed[form]):
        yield f"--ckpt-format {form} without --{needed[form]}", "use torch_dist"
    if line.on("use-megatron-fsdp") and form != "fsdp_dtensor":
        yield "--use-megatron-fsdp alone", "give --ckpt-format fsdp_dtensor"


@validate_args("one-source-of-data", holds="data come from one source")
def _sources(line: Line) -> Problems:
    by_split = {f"{part}-data-path" for part in ("train", "valid", "test")}
    sources = {
        "--mock-data": line.on("mock-data"),
        "--data-path": "data-path" in line.flags,
        "paths by split": bool(by_split & line.flags.keys()),
    }
    if sum(sources.values()) > 1:
        yield " and ".join(true_of(sources)), "leave all but one out"


@rule(
    "frozen-share-needs-one-stage",
    holds="a share of the parameters is frozen only in one stage",
    source=f"megatron_args.py:493, {SWIFT}",
    launchers=_SWIFT,
)
def _frozen_share(line: Line) -> Problems:
    share, stages = line.text("freeze-parameters-ratio"), line.launch.pipeline
    if share is not None and stages > 1 and not re.fullmatch(r"[0.]*|1|1\.0*", share):
        given = f"--freeze_parameters_ratio {share} with PP {stages}"
        yield given, "freeze whole parts, or use PP 1"


@rule(
    "back-end-tunes-all",
    holds="that back end tunes whole models",
    source=f"megatron_args.py:801-819, {SWIFT}",
    launchers=_SWIFT,
)
def _back_end(line: Line) -> Problems:
    tuner = line.text("tuner-type") or "full"
    if line.text("bridge-backend") == "megatron-bridge" and tuner != "full":
        yield f"--bridge_backend megatron-bridge with {tuner}", "use mcore-bridge"


@rule(
    "kept-checkpoints",
    holds="two checkpoints or more are kept, and not with saving beside training",
    source=f"megatron_args.py, save_total_limit, {SWIFT}",
    launchers=_SWIFT,
)
def _kept(line: Line) -> Problems:
    kept, beside = line.number("save-total-limit"), line.on("async-save")
    if kept is not None and (kept < 2 or beside):
        given = f"--save_total_limit {kept}" + (" with --async_save" if beside else "")
        yield given, "keep at least 2, saved in step"
