"""Rules of precision, optimizer and checkpoints."""

import re

from omnibal.lint.launch import Launcher
from omnibal.lint.line import ARGPARSE, Line
from omnibal.lint.rule import SWIFT, Problems, RuleGroup, true_of

RULES = RuleGroup("Precision, optimizer and checkpoints")
rule, core_config, validate_args = RULES.rule, RULES.core_config, RULES.validate_args
_SWIFT = frozenset((Launcher.MS_SWIFT,))


def _form(line: Line) -> str:
    return line.text("ckpt-format") or "torch_dist"


@core_config("915")
def one_precision(line: Line) -> Problems:
    """A run has one precision."""
    if line.on("fp16") and line.on("bf16"):
        yield "fp16 and bf16", "leave one of them out"


@validate_args()
def fp4_or_fp8(line: Line) -> Problems:
    """A run has one low precision."""
    if line.text("fp4-format") is not None and line.text("fp8-format") is not None:
        yield "fp4 and fp8", "leave one of them out"


@core_config("990-1017", launchers=ARGPARSE | _SWIFT)
def bf16_ends_of_fp8(line: Line) -> Problems:
    """Layers that stay in bf16 are of one stage, and not with delayed scaling."""
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


@validate_args()
def weights_gathered_need_optimizer(line: Line) -> Problems:
    """Gathering of weights is overlapped with the distributed optimizer."""
    is_sharded = line.on("use-distributed-optimizer") or line.on("use-megatron-fsdp")
    if line.on("overlap-param-gather") and not is_sharded:
        yield "--overlap-param-gather without it", "give --use-distributed-optimizer"


@validate_args()
def weights_gathered_need_reduction(line: Line) -> Problems:
    """Gathering of weights is overlapped only with reduction of gradients."""
    if line.on("overlap-param-gather") and not line.on("overlap-grad-reduce"):
        yield "--overlap-param-gather alone", "give --overlap-grad-reduce too"


@validate_args()
def weights_gathered_in_step(line: Line) -> Problems:
    """Overlap with the optimizer's step needs all of these."""
    flag, form = "overlap-param-gather-with-optimizer-step", _form(line)
    missing = {
        "--use-distributed-optimizer": not line.on("use-distributed-optimizer"),
        "--overlap-param-gather": not line.on("overlap-param-gather"),
        "several chunks a stage": line.virtual is None,
        f"--ckpt-format torch (it is {form})": form != "torch",
    }
    if line.on(flag) and any(missing.values()):
        yield f"--{flag} without {', '.join(true_of(missing))}", "give them, or leave it out"


@validate_args()
def weights_gathered_in_fp8(line: Line) -> Problems:
    """Weights are gathered in fp8 with the distributed optimizer or FSDP."""
    allowed = ("use-distributed-optimizer", "use-torch-fsdp2", "use-megatron-fsdp")
    if line.on("fp8-param-gather") and not any(map(line.on, allowed)):
        yield "--fp8-param-gather without it", "give --use-distributed-optimizer"


@validate_args()
def save_needs_interval(line: Line) -> Problems:
    """Saving needs an interval."""
    if line.text("save") is not None and line.text("save-interval") is None:
        yield "--save without --save-interval", "give it"


@validate_args()
def offload_needs_precision_aware(line: Line) -> Problems:
    """The optimizer is offloaded as a precision-aware one."""
    if line.on("optimizer-cpu-offload") and not line.on("use-precision-aware-optimizer"):
        yield "--optimizer-cpu-offload without it", "give --use-precision-aware-optimizer"


@validate_args()
def muon_alone(line: Line) -> Problems:
    """Muon works without the distributed optimizer and with plain checkpoints."""
    form = _form(line)
    against = {
        "the distributed optimizer": line.on("use-distributed-optimizer"),
        f"checkpoints of form {form}": form != "torch",
    }
    if "muon" in (line.text("optimizer") or "") and any(against.values()):
        yield f"muon with {', '.join(true_of(against))}", "use adam, or leave them out"


@validate_args()
def checkpoint_form(line: Line) -> Problems:
    """A form of checkpoints goes with its own way of sharding."""
    needed = {"torch_dcp": "use-torch-fsdp2", "fsdp_dtensor": "use-megatron-fsdp"}
    form = _form(line)
    if form in needed and not line.on(needed[form]):
        yield f"--ckpt-format {form} without --{needed[form]}", "use torch_dist"
    if line.on("use-megatron-fsdp") and form != "fsdp_dtensor":
        yield "--use-megatron-fsdp alone", "give --ckpt-format fsdp_dtensor"


@validate_args()
def one_source_of_data(line: Line) -> Problems:
    """Data come from one source."""
    by_split = {f"{part}-data-path" for part in ("train", "valid", "test")}
    sources = {
        "--mock-data": line.on("mock-data"),
        "--data-path": "data-path" in line.flags,
        "paths by split": bool(by_split & line.flags.keys()),
    }
    if sum(sources.values()) > 1:
        yield " and ".join(true_of(sources)), "leave all but one out"


@rule(f"megatron_args.py:493, {SWIFT}", launchers=_SWIFT)
def frozen_share_needs_one_stage(line: Line) -> Problems:
    """A share of the parameters is frozen only in one stage."""
    share, stages = line.text("freeze-parameters-ratio"), line.launch.pipeline
    if share is not None and stages > 1 and not re.fullmatch(r"[0.]*|1|1\.0*", share):
        given = f"--freeze_parameters_ratio {share} with PP {stages}"
        yield given, "freeze whole parts, or use PP 1"


@rule(f"megatron_args.py:801-819, {SWIFT}", launchers=_SWIFT)
def back_end_tunes_all(line: Line) -> Problems:
    """The back end megatron-bridge tunes whole models."""
    tuner = line.text("tuner-type") or "full"
    if line.text("bridge-backend") == "megatron-bridge" and tuner != "full":
        yield f"--bridge_backend megatron-bridge with {tuner}", "use mcore-bridge"


@rule(f"megatron_args.py, save_total_limit, {SWIFT}", launchers=_SWIFT)
def kept_checkpoints(line: Line) -> Problems:
    """Two checkpoints or more are kept, and not with saving beside training."""
    kept, beside = line.number("save-total-limit"), line.on("async-save")
    if kept is not None and (kept < 2 or beside):
        given = f"--save_total_limit {kept}" + (" with --async_save" if beside else "")
        yield given, "keep at least 2, saved in step"
