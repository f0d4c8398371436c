"""Published training jobs as launch lines for `omnibal lint`.

A row has a line, sizes in words, or sizes as columns: of a published step, or of a sweep of layouts
by nanotron on H100 or by Aleph Alpha's trainer on A100. `measured/lines.toml` has the trainers'
lines, `measured/words.toml` the rows' words. Raises UserError for a row without a job, or with a
job that its trainer's line cannot set.
"""

import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from omnibal.base.errors import UserError
from omnibal.families.named import named_model
from omnibal.model.config import ClusterConfig, ModelConfig, load_cluster, preset_names
from omnibal.model.limits import words
from omnibal.model.parallel import expert_counts
from omnibal.model.runtime import RecomputedModule
from omnibal.trainers.lint.launch_settings import Launcher

Row = Mapping[str, Any]
_SQUAD_TOKENS = 256  # mean length of a SQuAD sample with its prompt
TUNED = r"\b(?:lora|sft|packed)\b"  # in names of fine-tuning groups
_MEASURED = Path(__file__).with_name("measured")
_LINES = tomllib.loads((_MEASURED / "lines.toml").read_text())
_WORDS = tomllib.loads((_MEASURED / "words.toml").read_text())
_SELECTIVE = {"granularity": "selective"}
_FULL = {"granularity": "full", "method": "uniform", "num_layers": "1"}
_EXPERTS = (
    " --expert-model-parallel-size {ep} --expert-tensor-parallel-size {etp} --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-permute-fusion --moe-expert-capacity-factor 1 "
    "--moe-pad-expert-input-to-capacity"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A measured job with its launch line."""

    name: str
    line: str
    model: ModelConfig
    cluster: ClusterConfig
    group: str = ""  # rows of one group are layouts of one job
    gpus: int | None = None
    launcher: Launcher | None = None
    image_share: float = 0.0
    step_ms: float | None = None  # none if it ran out of memory or was not given
    rate: float | None = None  # tokens per second and GPU, if given instead
    allocated_gib: float | None = None
    # Allocated by the fullest rank, mean over ranks, or all of a device.
    memory: Literal["fullest", "mean", "device"] = "fullest"
    out_of_memory: bool = False
    sample_tokens: int | None = None  # of samples in a pack, if there are several
    is_tuned: bool = False  # whether the row names itself fine-tuning
    calibrates: str = ""

    @property
    def options(self) -> list[str]:
        """Options of `omnibal lint` for the line."""
        values = {
            "--model": self.model.name,
            "--cluster": self.cluster.name,
            "--gpus": self.gpus,
            "--launcher": self.launcher,
            "--image-share": self.image_share if self.model.encoders else None,
            "--sample-tokens": self.sample_tokens,
        }
        pairs = ((name, str(value)) for name, value in values.items() if value is not None)
        return [word for pair in pairs for word in pair]


def is_layout(row: object) -> bool:
    """Return whether the row is from a sweep of layouts of a job."""
    return isinstance(row, dict) and any(column in row for column in _WORDS["sweeps"])


def measured_row(row: Row) -> Measured:
    """Return the job of a row of any form."""
    if not isinstance(row, dict):
        raise UserError(f"{row!r} is no row: give an object with a job's fields")
    row = _rename(row)
    return _with_line(row) if "measured" in row else _with_sizes(row)


def _rename(row: Row) -> Row:
    return {_WORDS["columns"].get(name, name): value for name, value in row.items()}


def _positive(row: Row, name: str) -> float | None:
    """Return a positive number, or None if absent."""
    value = row.get(name)
    if value is None:
        return None
    try:
        number = 0.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < 1e15:
        raise UserError(f"{name} {value!r}: must be a positive number; correct it")
    return number


def _count(row: Row, name: str, default: int | None = None) -> int:
    """Return an integer >= 1, or the default if absent."""
    number = _positive(row, name)
    if number is None:
        if default is None:
            raise UserError(f"the row has no {name}: give it")
        return default
    if number % 1:
        raise UserError(f"{name} {number:g}: must be a whole number; correct it")
    return int(number)


def _text(row: Row, name: str) -> str:
    """Return text, empty if absent; words of a list are joined."""
    value = row.get(name)
    return " ".join(map(str, value)) if isinstance(value, list) else str(value or "")


def _job(row: Row) -> dict[str, int]:
    """Return parallel sizes, GPUs and batch; raise if they do not agree."""
    sizes = ("tp", "pp", "cp", "ep", "etp", "chunks")
    job = {name: _count(row, name, default=1) for name in sizes}
    gpus, ranks = _count(row, "gpus"), job["tp"] * job["pp"] * job["cp"]
    if ranks * _count(row, "dp", default=max(gpus // ranks, 1)) != gpus:
        raise UserError(f"TP x PP x CP x DP of the row are not its {gpus} GPUs; correct them")
    batch, dp, nodes = _count(row, "micro_batch"), gpus // ranks, max(gpus // 8, 1)
    is_counted = "micro_batches" in row
    gbs = _count(row, "micro_batches") * batch * dp if is_counted else _count(row, "global_batch")
    job |= {"gpus": gpus, "dp": dp, "nodes": nodes, "per_node": gpus // nodes}
    return job | {"batch": batch, "gbs": gbs, "length": _count(row, "sequence")}


def _model_of(row: Row) -> ModelConfig:
    name = _text(row, "model")
    if not name:
        raise UserError("the row has no model: give it")
    if "hidden" in row:
        return _sizes_model(row)
    model = named_model(_WORDS["models"].get(name, name))
    return model if row.get("layers") is None else model.with_layers(language=_count(row, "layers"))


def _sizes_model(row: Row) -> ModelConfig:
    """Return a model of Llama's shape, by its sizes."""
    names = {"hidden": "hidden_size", "ffn": "ffn_hidden_size", "vocab": "vocab_size"}
    names |= {"layers": "layers", "heads": "heads", "sequence": "max_positions"}
    language = {field: _count(row, name) for name, field in names.items()}
    if language["hidden_size"] % language["heads"]:
        raise UserError("hidden is not a multiple of heads in the row: correct them")
    language |= {"kv_heads": language["heads"], "tied_head": bool(row.get("tied"))}
    name = f"llama-{_text(row, 'model').lower()}"
    return ModelConfig.model_validate(
        {"name": name, "chat_template": "llama3", "language": language}
    )


def _cluster(device: str) -> ClusterConfig:
    if not device:
        raise UserError("the row names no device or cluster: give it")
    known = (
        preset for name, preset in _WORDS["devices"].items() if re.search(name, device.lower())
    )
    return load_cluster(device if device in preset_names("clusters") else next(known, device))


def _recomputation(row: Row) -> dict[str, str]:
    """Return Megatron's settings of recomputation for the row's words."""
    given = row.get("recompute")
    text = str(given or "none").strip().lower().replace("-", "_")
    number = re.search(r"\d+", text)
    if text in ("none", "false", "no", "off", "disabled", "null"):
        return {}
    if "block" in text:
        layers = number[0] if number else str(_count(row, "recompute_num_layers"))
        return {"granularity": "full", "method": "block", "num_layers": layers}
    if number is None and re.search(r"true|full|uniform|every|all", text):
        return _FULL
    modules = set(re.findall(r"[a-z_]+", text)) - {"selective"}
    if not modules <= {"core_attn", *get_args(RecomputedModule)}:
        raise UserError(f"recompute {given!r}: must be none, selective, modules, full, or block N")
    return _SELECTIVE | ({"modules": " ".join(sorted(modules))} if modules else {})


def _outcome(row: Row) -> dict[str, Any]:
    """Return measured time and memory, as fields of `Measured`."""
    memory = next((name for name in _WORDS["memory"] if row.get(name) is not None), "")
    step_s = _positive(row, "step_s")
    return {
        "step_ms": _positive(row, "step_ms") or (step_s and 1e3 * step_s),
        "rate": _positive(row, "tokens_per_s_gpu"),
        "allocated_gib": _positive(row, memory),
        "memory": _WORDS["memory"].get(memory, "fullest"),
        "out_of_memory": bool(row.get("oom")),
    }


def _with_sizes(row: Row) -> Measured:
    """Return the job of a row with sizes as columns; columns or the source name the trainer."""
    group, extra, device = _text(row, "group"), _text(row, "extra"), _text(row, "device").lower()
    source = f"{group} {_text(row, 'source')}".lower()
    name = next((trainer for trainer in _LINES if trainer in source), "megatron-lm")
    name = next((trainer for column, trainer in _WORDS["sweeps"].items() if column in row), name)
    trainer, model, job, outcome = _LINES[name], _model_of(row), _job(row), _outcome(row)
    if "lora" in group.lower() and "peft" not in extra:
        raise UserError("the row's group has LoRA, and its extra no --peft: give the adapters")
    if is_layout(row):
        outcome["out_of_memory"] = not (outcome["step_ms"] or outcome["rate"])
    names = {"model": "", **row, **job}
    return Measured(
        name=trainer.get("name", f"{group or device} {{model}}").format(**names),
        group=trainer.get("group", "").format(**names),
        line=f"{_line(row, name, job, model)} {extra}".strip(),
        model=model,
        cluster=_cluster(trainer.get("cluster", f"{device} 40gb" if "40gb" in group else device)),
        gpus=job["gpus"],
        sample_tokens=_SQUAD_TOKENS if "squad" in group.lower() else None,
        is_tuned=re.search(TUNED, group.lower()) is not None,
        calibrates=_text(row, "calibrates"),
        **outcome,
    )


def _line(row: Row, name: str, job: Mapping[str, int], model: ModelConfig) -> str:
    """Return the trainer's launch line; raise if it cannot set the job."""
    trainer, recomputation = _LINES[name], _recomputation(row)
    precision = _text(row, "precision").lower().replace("-", "_") or "bf16"
    if precision not in ("bf16", *_WORDS["fp8"]):
        raise UserError(
            f"precision must be bf16 or one of {words([*_WORDS['fp8']])}, got {precision}"
        )
    mode = recomputation.get("granularity", "none")
    strategy = re.search(r"SHARD_GRAD_OP|HYBRID_SHARD|NO_SHARD", _text(row, "note"))
    accumulated, remainder = divmod(job["gbs"], job["batch"] * job["dp"])
    ranks, shards = job["gpus"] // (job["tp"] * job["pp"]), _count(row, "sharded", default=1)
    if ranks % shards:
        raise UserError(f"sharded {shards} does not divide {ranks} data-parallel ranks; correct it")
    replicas = ranks // shards if shards > 1 else 1
    line = trainer["line"].format(
        **job,
        strategy=strategy[0] if strategy else "FULL_SHARD",
        copies=replicas,
        recompute=mode,
        recomputes=mode == "full",
        accumulated=accumulated,
        zero=row.get("zero"),
    )
    if "recompute" not in trainer:
        if replicas > 1:
            raise UserError("weights sharded over a part of the ranks cannot be set for Megatron")
        return line + _megatron_flags(row, name, job, model, precision)
    unsettable = [size for size in trainer["without"] if job[size] > 1]
    if mode not in trainer["recompute"] or recomputation not in ({}, _SELECTIVE, _FULL):
        unsettable.append(f"recompute {row['recompute']}")
    if precision != "bf16":
        unsettable.append(precision)
    if unsettable:
        raise UserError(f"{words(unsettable)} cannot be set in a line of {name}: leave it out")
    if "zero" in row and row["zero"] is None:
        raise UserError("the row has no zero: give it")
    if "zero" in row and remainder:
        raise UserError(f"gbs {job['gbs']} is no multiple of micro_batch x dp; correct it")
    return line


def _megatron_flags(
    row: Row, name: str, job: Mapping[str, int], model: ModelConfig, precision: str
) -> str:
    """Return flags of Megatron-LM, or overrides of a Bridge recipe."""
    flags, trainer, is_bridge = "", _LINES[name], name == "megatron-bridge"
    if "overlapped" in trainer:
        overlaps = row.get("ovl", _text(row, "device") != "b200")
        flags += " " + trainer["overlapped" if overlaps else "fused"]
        flags += _EXPERTS.format(**job) if expert_counts(model) else ""
        flags += " --tp-comm-overlap" if overlaps and job["tp"] > 1 else ""
    settings = {}
    if job["tp"] > 1 and row.get("sequence_parallel", True):
        settings["model.sequence_parallel"] = "true"
    layers, chunks = model.language.layers, job["pp"] * job["chunks"]
    if layers % chunks:
        counts = [layers // chunks + (chunk < layers % chunks) for chunk in range(chunks)]
        layout = "|".join(f"t*{count}" for count in counts)
        settings["model.pipeline_model_parallel_layout"] = f"E{layout}L"
    elif job["chunks"] > 1:
        option = "-vp" if is_bridge else "--num-virtual-stages-per-pipeline-rank"
        flags += f" {option} {job['chunks']}"
    settings |= {f"model.recompute_{key}": value for key, value in _recomputation(row).items()}
    if _count(row, "sharded", default=1) > 1:
        settings["ddp.use_megatron_fsdp"] = "true"
        settings["ddp.data_parallel_sharding_strategy"] = "optim_grads_params"
    if precision != "bf16" and is_bridge:
        flags += f" --compute_dtype {_WORDS['bridge_fp8'].get(precision, precision)}"
    elif precision != "bf16":
        flags += f" --fp8-format hybrid --fp8-recipe {_WORDS['fp8'][precision]}"
    for key, value in settings.items():
        if is_bridge:
            flags += f" {key}={shlex.quote(value)}"
        else:
            flags += f" --{key.partition('.')[2].replace('_', '-')}"
            flags += "" if value == "true" else f" {shlex.quote(value)}"
    return flags


_SIZES = re.compile(r"\b(TP|PP|CP|EP|ETP|VPP|DP|MBS|GBS)\s?[=:]?\s?(\d+)\b", re.IGNORECASE)
_LENGTH = re.compile(r"\b(\d{3,7}|\d+(?=k\b))(k?)\b", re.IGNORECASE)


def _with_line(row: Row) -> Measured:
    """Return the job of a row with a line, or with sizes in words."""
    measured, name = row["measured"], _text(row, "name")
    if not isinstance(measured, dict):
        raise UserError(f"measured {measured!r}: must be an object; correct it")
    options, line = _options(row), _text(row, "line")
    if line and "verl" in name:  # trains without the recipe's multi-token prediction
        line += " model.mtp_num_layers=0"
    tokens, memory_gib = _positive(options, "--sample-tokens"), _positive(options, "--memory-gib")
    cluster = _cluster(_text(row, "cluster") or _text(row, "device"))
    return Measured(
        name=name,
        line=line or _line_of_words(row, name),
        model=_model_of(row),
        cluster=cluster.model_copy(update={"memory_gib": memory_gib or cluster.memory_gib}),
        gpus=_count(row, "gpus"),
        launcher=Launcher(options["--launcher"]) if "--launcher" in options else None,
        image_share=float(options["--image-share"]),
        sample_tokens=None if tokens is None else int(tokens),
        calibrates=_text(row, "calibrates"),
        **_outcome(_rename(measured)),
    )


def _options(row: Row) -> dict[str, Any]:
    """Return a row's options of `omnibal lint`, by name."""
    parts = shlex.split(_text(row, "extra"))
    options: dict[str, Any] = dict(zip(parts[::2], parts[1::2], strict=False))
    known = ("--launcher", "--image-share", "--sample-tokens", "--memory-gib")
    share = float(options.setdefault("--image-share", "0.5"))
    if len(parts) % 2 or not set(options) <= set(known) or not 0 <= share <= 1:
        raise UserError(f"extra {' '.join(parts)}: must be pairs of {words(known)}; correct it")
    return options


def _line_of_words(row: Row, name: str) -> str:
    """Return Megatron-LM's line for sizes in words, such as `TP2 PP4 GBS 128, 4k`."""
    text, gpus = _text(row, "config"), _count(row, "gpus")
    sizes = {name.lower(): int(number) for name, number in _SIZES.findall(text)}
    lengths = [int(n) * (1024 if k else 1) for n, k in _LENGTH.findall(_SIZES.sub("", text))]
    if not lengths or "gbs" not in sizes:
        raise UserError(f"config {text!r} must have a length and GBS: give them, or a line")
    job = _job(_rename({"gpus": gpus, "mbs": 1, "seq": lengths[0], **sizes}))
    line = _LINES["megatron-lm"]["line"].format(**job) + (
        f" --expert-model-parallel-size {job['ep']} --expert-tensor-parallel-size {job['etp']}"
        f" --num-virtual-stages-per-pipeline-rank {job['chunks']}"
    )
    flags = [flag for phrase, flag in _WORDS["phrases"].items() if re.search(phrase, text.lower())]
    if "lora" in f"{name} {text}".lower():
        rank = re.search(r"\br(?:ank)?\s?(\d+)", text)
        flags.append(f"--peft lora --lora-dim {rank[1] if rank else 8}")
    return " ".join([line, *flags])
