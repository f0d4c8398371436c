"""Rules of precision, optimizer and checkpoints."""

import re

from omnibal.lint.launch import Launcher
from omnibal.lint.line import ARGPARSE, Line
from omnibal.lint.rule import CORE, MEGATRON_LM, SWIFT, Broken, Rule

_VALIDATE = f"training/arguments.py, validate_args, {MEGATRON_LM}"
_SWIFT = frozenset((Launcher.MS_SWIFT,))


def _precision(line: Line) -> Broken | None:
    if not (line.on("fp16") and line.on("bf16")):
        return None
    return Broken("fp16 and bf16", "leave one of them out")


def _low_precision(line: Line) -> Broken | None:
    if line.text("fp4-format") is None or line.text("fp8-format") is None:
        return None
    return Broken("fp4 and fp8", "leave one of them out")


def _ends_in_bf16(line: Line) -> Broken | None:
    if line.text("fp8-format") is None or not line.on("first-last-layers-bf16"):
        return None
    if (line.text("fp8-recipe") or "delayed") == "delayed":
        return Broken("first and last layers in bf16 with fp8 recipe delayed", "use another recipe")
    most = line.sizes.layers // line.launch.pipeline
    ends = {end: line.number(f"num-layers-at-{end}-in-bf16") for end in ("start", "end")}
    wrong = [f"{count} at the {end}" for end, count in ends.items() if count and count > most]
    if not wrong:
        return None
    return Broken(
        f"{' and '.join(wrong)} in bf16, {most} layers a stage", f"keep at most {most} in bf16"
    )


def _gather(line: Line) -> Broken | None:
    is_sharded = line.on("use-distributed-optimizer") or line.on("use-megatron-fsdp")
    if not line.on("overlap-param-gather") or is_sharded:
        return None
    return Broken("--overlap-param-gather without it", "give --use-distributed-optimizer")


def _gather_and_reduce(line: Line) -> Broken | None:
    if not line.on("overlap-param-gather") or line.on("overlap-grad-reduce"):
        return None
    return Broken("--overlap-param-gather alone", "give --overlap-grad-reduce too")


def _gather_in_step(line: Line) -> Broken | None:
    if not line.on("overlap-param-gather-with-optimizer-step"):
        return None
    format_ = line.text("ckpt-format") or "torch_dist"
    missing = {
        "--use-distributed-optimizer": not line.on("use-distributed-optimizer"),
        "--overlap-param-gather": not line.on("overlap-param-gather"),
        "several chunks a stage": line.virtual is None,
        f"--ckpt-format torch (it is {format_})": format_ != "torch",
    }
    given = [words for words, is_missing in missing.items() if is_missing]
    if not given:
        return None
    return Broken(
        f"--overlap-param-gather-with-optimizer-step without {', '.join(given)}",
        "give them, or leave it out",
    )


def _gather_in_fp8(line: Line) -> Broken | None:
    allowed = ("use-distributed-optimizer", "use-torch-fsdp2", "use-megatron-fsdp")
    if not line.on("fp8-param-gather") or any(map(line.on, allowed)):
        return None
    return Broken("--fp8-param-gather without it", "give --use-distributed-optimizer")


def _interval(line: Line) -> Broken | None:
    if line.text("save") is None or line.text("save-interval") is not None:
        return None
    return Broken("--save without --save-interval", "give it")


def _offload(line: Line) -> Broken | None:
    if not line.on("optimizer-cpu-offload") or line.on("use-precision-aware-optimizer"):
        return None
    return Broken("--optimizer-cpu-offload without it", "give --use-precision-aware-optimizer")


def _muon(line: Line) -> Broken | None:
    if "muon" not in (line.text("optimizer") or ""):
        return None
    format_ = line.text("ckpt-format") or "torch_dist"
    against = {
        "the distributed optimizer": line.on("use-distributed-optimizer"),
        f"checkpoints of form {format_}": format_ != "torch",
    }
    given = [words for words, holds in against.items() if holds]
    if not given:
        return None
    return Broken(f"muon with {', '.join(given)}", "use adam, or leave them out")


def _checkpoint_form(line: Line) -> Broken | None:
    needed = {"torch_dcp": "use-torch-fsdp2", "fsdp_dtensor": "use-megatron-fsdp"}
    form = line.text("ckpt-format")
    flag = needed.get(form or "")
    if flag is not None and not line.on(flag):
        return Broken(f"--ckpt-format {form} without --{flag}", "use torch_dist")
    if line.on("use-megatron-fsdp") and form != "fsdp_dtensor":
        return Broken("--use-megatron-fsdp alone", "give --ckpt-format fsdp_dtensor")
    return None


def _sources(line: Line) -> Broken | None:
    by_split = [f"{part}-data-path" for part in ("train", "valid", "test")]
    given = {
        "--mock-data": line.on("mock-data"),
        "--data-path": "data-path" in line.flags,
        "paths by split": any(name in line.flags for name in by_split),
    }
    both = [words for words, holds in given.items() if holds]
    if len(both) < 2:
        return None
    return Broken(" and ".join(both), "leave all but one out")


def _frozen_share(line: Line) -> Broken | None:
    share = line.text("freeze-parameters-ratio")
    if share is None or re.fullmatch(r"[0.]*|1|1\.0*", share) or line.launch.pipeline == 1:
        return None
    return Broken(
        f"--freeze_parameters_ratio {share} with PP {line.launch.pipeline}",
        "freeze whole parts, or use PP 1",
    )


def _back_end(line: Line) -> Broken | None:
    tuner = line.text("tuner-type") or "full"
    if line.text("bridge-backend") != "megatron-bridge" or tuner == "full":
        return None
    return Broken(f"--bridge_backend megatron-bridge with {tuner}", "use mcore-bridge")


def _kept(line: Line) -> Broken | None:
    kept = line.number("save-total-limit")
    if kept is None or (kept >= 2 and not line.on("async-save")):
        return None
    return Broken(
        f"--save_total_limit {kept}" + (" with --async_save" if line.on("async-save") else ""),
        "keep at least 2, saved in step",
    )


OPTIMIZER_RULES = (
    Rule(
        name="one-precision",
        holds="a run has one precision",
        source=f"core/transformer/transformer_config.py:915, {CORE}",
        broken=_precision,
    ),
    Rule(
        name="fp4-or-fp8",
        holds="a run has one low precision",
        source=_VALIDATE,
        broken=_low_precision,
        launchers=ARGPARSE,
    ),
    Rule(
        name="bf16-ends-of-fp8",
        holds="layers that stay in bf16 are of one stage, and not with delayed scaling",
        source=f"core/transformer/transformer_config.py:990-1017, {CORE}",
        broken=_ends_in_bf16,
        launchers=ARGPARSE | _SWIFT,
    ),
    Rule(
        name="weights-gathered-need-optimizer",
        holds="gathering of weights is overlapped with the distributed optimizer",
        source=_VALIDATE,
        broken=_gather,
        launchers=ARGPARSE,
    ),
    Rule(
        name="weights-gathered-need-reduction",
        holds="gathering of weights is overlapped only with reduction of gradients",
        source=_VALIDATE,
        broken=_gather_and_reduce,
        launchers=ARGPARSE,
    ),
    Rule(
        name="weights-gathered-in-step",
        holds="overlap with the optimizer's step needs all of these",
        source=_VALIDATE,
        broken=_gather_in_step,
        launchers=ARGPARSE,
    ),
    Rule(
        name="weights-gathered-in-fp8",
        holds="weights are gathered in fp8 with the distributed optimizer or FSDP",
        source=_VALIDATE,
        broken=_gather_in_fp8,
        launchers=ARGPARSE,
    ),
    Rule(
        name="save-needs-interval",
        holds="saving needs an interval",
        source=_VALIDATE,
        broken=_interval,
        launchers=ARGPARSE,
    ),
    Rule(
        name="offload-needs-precision-aware",
        holds="the optimizer is offloaded as a precision-aware one",
        source=_VALIDATE,
        broken=_offload,
        launchers=ARGPARSE,
    ),
    Rule(
        name="muon-alone",
        holds="muon works without the distributed optimizer and with plain checkpoints",
        source=_VALIDATE,
        broken=_muon,
        launchers=ARGPARSE,
    ),
    Rule(
        name="checkpoint-form",
        holds="a form of checkpoints goes with its own way of sharding",
        source=_VALIDATE,
        broken=_checkpoint_form,
        launchers=ARGPARSE,
    ),
    Rule(
        name="one-source-of-data",
        holds="data come from one source",
        source=_VALIDATE,
        broken=_sources,
        launchers=ARGPARSE,
    ),
    Rule(
        name="frozen-share-needs-one-stage",
        holds="a share of the parameters is frozen only in one stage",
        source=f"megatron_args.py:493, {SWIFT}",
        broken=_frozen_share,
        launchers=_SWIFT,
    ),
    Rule(
        name="back-end-tunes-all",
        holds="that back end tunes whole models",
        source=f"megatron_args.py:801-819, {SWIFT}",
        broken=_back_end,
        launchers=_SWIFT,
    ),
    Rule(
        name="kept-checkpoints",
        holds="two checkpoints or more are kept, and not with saving beside training",
        source=f"megatron_args.py, save_total_limit, {SWIFT}",
        broken=_kept,
        launchers=_SWIFT,
    ),
)
