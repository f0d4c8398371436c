"""Training jobs that others measured, as launch lines that `omnibal lint` reads.

Five forms of rows are read: dense steps, steps of many trainers, vision-language steps with their
own lines, and sweeps of layouts by nanotron on H100 and by Aleph Alpha's trainer on A100. A row
that does not say a job, or says one of which lines have no setting, raises UserError.
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
from omnibal.trainers.lint.launch import Launcher

Row = Mapping[str, Any]
_CLUSTERS = {
    "a100.*40": "a100-40g",
    "a100": "a100-80g",
    "a800": "a800-80g",
    "h100": "h100-80g",
    "h200": "h200-141g",
    "h800": "h800-80g",
    "gb200": "gb200-186g",
    "b200": "b200-180g",
    "gb300": "gb300-288g",
    "b300": "b300-288g",
}
"""Preset of a device by what its name has, first match."""
_MODELS = {"llama3-8b": "llama3.1-8b", "llama3-70b": "llama3.1-70b", "deepseekv2": "deepseek-v2"}
_OVERLAPS = (
    "--ddp-average-in-collective --overlap-grad-reduce --overlap-param-gather "
    "--cross-entropy-loss-fusion --moe-permute-fusion"
)
_SQUAD_TOKENS = 256
"""Mean of a SQuAD sample with its prompt."""
_FUSED_LOSS = "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te"
TUNED = r"\b(?:lora|sft|packed)\b"
"""Words of groups of fine-tuning."""
_LINES = tomllib.loads(Path(__file__).with_name("measured").joinpath("lines.toml").read_text())
_FP8 = {
    "fp8": "delayed",
    "fp8_ds": "delayed",
    "fp8_cs": "tensorwise",
    "fp8_mx": "mxfp8",
    "mxfp8": "mxfp8",
    "fp8_sc": "blockwise",
}
"""Recipe of FP8 by a row's precision, of Megatron-LM."""
_BRIDGE_FP8 = {"fp8": "fp8_cs", "mxfp8": "fp8_mx"}
_FULL = {"granularity": "full", "method": "uniform", "num_layers": "1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A measured job and the line that starts it."""

    name: str
    line: str
    model: ModelConfig
    cluster: ClusterConfig
    group: str = ""
    """Rows of one group are layouts of one job."""
    gpus: int | None = None
    launcher: Launcher | None = None
    image_share: float = 0.0
    step_ms: float | None = None
    """None if it ran out of memory or was not given."""
    rate: float | None = None
    """Tokens per second and GPU, if given instead."""
    allocated_gib: float | None = None
    memory: Literal["fullest", "mean", "device"] = "fullest"
    """Whose memory is given: allocated by the fullest rank, by ranks on average, or all of a
    device."""
    out_of_memory: bool = False
    sample_tokens: int | None = None
    """Of samples in a pack, if there are several."""
    is_tuned: bool = False
    """Whether the row names itself fine-tuning."""
    calibrates: str = ""

    @property
    def options(self) -> list[str]:
        """Options of `omnibal lint` beside the line."""
        given = {
            "--model": self.model.name,
            "--cluster": self.cluster.name,
            "--gpus": self.gpus,
            "--launcher": self.launcher,
            "--image-share": self.image_share if self.model.encoders else None,
            "--sample-tokens": self.sample_tokens,
        }
        pairs = ((name, str(value)) for name, value in given.items() if value is not None)
        return [word for pair in pairs for word in pair]


def measured_row(row: Row) -> Measured:
    """The job of a row of any form."""
    if not isinstance(row, dict):
        raise UserError(f"{row!r} is no row: give an object with a job's fields")
    if "zero" in row:
        return _nanotron(row)
    if "kernel" in row:
        return _aleph_alpha(row)
    if "measured" in row:
        return _with_line(row)
    return _published(row)


def _positive(row: Row, *names: str) -> float | None:
    """The first of these fields that is given, a positive number, or None."""
    for name in names:
        value = row.get(name)
        if value is None:
            continue
        try:
            number = 0.0 if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = 0.0
        if not 0 < number < 1e15:
            raise UserError(f"{name} {value!r}: must be a positive number; correct it")
        return number
    return None


def _count(row: Row, *names: str, usual: int | None = None) -> int:
    """The first of these fields that is given, a whole number from 1 on, or the usual."""
    number = _positive(row, *names)
    if number is None:
        if usual is None:
            raise UserError(f"the row has no {words(names, 'or')}: give it")
        return usual
    if number % 1:
        raise UserError(f"{names[0]} {number:g}: must be a whole number; correct it")
    return int(number)


def _text(row: Row, name: str) -> str:
    """A field of text, empty if absent; words of a list are joined."""
    value = row.get(name)
    return " ".join(map(str, value)) if isinstance(value, list) else str(value or "")


def _sizes(row: Row, *names: str) -> dict[str, int]:
    """Parallel sizes and GPUs by name, which must agree with the row's data-parallel ranks."""
    sizes, gpus = {name: _count(row, name, usual=1) for name in names}, _count(row, "gpus")
    ranks = sizes["tp"] * sizes["pp"] * sizes.get("cp", 1)
    if ranks * _count(row, "dp", usual=max(gpus // ranks, 1)) != gpus:
        raise UserError(f"TP x PP x CP x DP of the row are not its {gpus} GPUs; correct one")
    nodes = max(gpus // 8, 1)
    return sizes | {"gpus": gpus, "dp": gpus // ranks, "nodes": nodes, "per_node": gpus // nodes}


def _model_of(row: Row) -> ModelConfig:
    name = _text(row, "model")
    if not name:
        raise UserError("the row has no model: give it")
    model = named_model(_MODELS.get(name, name))
    layers = row.get("layers")
    return model if layers is None else model.with_layers(language=_count(row, "layers"))


def _sizes_model(row: Row, *, tied: bool) -> ModelConfig:
    """A model of Llama's shape, by its sizes."""
    names = {"hidden": "hidden_size", "ffn": "ffn_hidden_size", "vocab": "vocab_size"}
    names |= {"layers": "layers", "heads": "heads", "sequence": "max_positions"}
    language = {field: _count(row, name) for name, field in names.items()}
    if language["hidden_size"] % language["heads"]:
        raise UserError("hidden is not a multiple of heads in the row: correct one")
    return ModelConfig.model_validate(
        {
            "name": f"llama-{_text(row, 'model').lower()}",
            "chat_template": "llama3",
            "language": {**language, "kv_heads": language["heads"], "tied_head": tied},
        }
    )


def _cluster(device: str) -> ClusterConfig:
    if not device:
        raise UserError("the row names no device or cluster: give it")
    found = (preset for name, preset in _CLUSTERS.items() if re.search(name, device.lower()))
    return load_cluster(device if device in preset_names("clusters") else next(found, device))


def _layout(layers: int, chunks: int) -> str:
    """Layout of chunks of which the first hold a layer more."""
    counts = [layers // chunks + (chunk < layers % chunks) for chunk in range(chunks)]
    return f"E{'|'.join(f't*{count}' for count in counts)}L"


def _recomputation(row: Row) -> dict[str, str]:
    """Megatron's settings of recomputation that the row's words mean."""
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
        raise UserError(
            f"recompute {given!r}: must be none, selective, modules, full, or block with a number "
            "of layers; correct it"
        )
    settings = {"granularity": "selective"}
    return settings | {"modules": " ".join(sorted(modules))} if modules else settings


_EXPERTS = (
    "--expert-model-parallel-size {ep} --expert-tensor-parallel-size {etp} --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-permute-fusion --moe-expert-capacity-factor 1 "
    "--moe-pad-expert-input-to-capacity"
)


def _published(row: Row) -> Measured:
    """A step with sizes as columns, in the trainer that its source names."""
    model, batch, group = _model_of(row), _count(row, "mbs", "micro_batch"), _text(row, "group")
    gbs = None if "micro_batches" in row else _count(row, "gbs", "global_batch")
    job: dict[str, Any] = _sizes(row, "tp", "pp", "cp", "ep", "etp") | {
        "chunks": _count(row, "vp", "chunks", usual=1),
        "batch": batch,
        "gbs": gbs or _count(row, "micro_batches") * batch * _count(row, "dp"),
        "length": _count(row, "seq", "sequence"),
    }
    precision = _text(row, "precision").lower().replace("-", "_") or "bf16"
    if precision not in ("bf16", *_FP8):
        raise UserError(f"precision {precision}: must be bf16 or one of {', '.join(_FP8)}")
    extra, device = _text(row, "extra"), _text(row, "device").lower()
    if "lora" in group.lower() and "peft" not in extra:
        raise UserError("the row's group has LoRA, and its extra no --peft: give the adapters")
    source = f"{group} {_text(row, 'source')}".lower()
    name = next((name for name in _LINES if name in source), "megatron-lm")
    if "recompute" in _LINES[name]:
        line = _of_torch(row, name, job, precision)
    else:
        line = _of_megatron(row, name == "megatron-bridge", job, precision, model)
    return Measured(
        name=f"{group or device} {_text(row, 'model')}",
        line=f"{line} {extra}".strip(),
        model=model,
        cluster=_cluster(f"{device} 40gb" if "40gb" in group else device),
        gpus=job["gpus"],
        step_ms=_positive(row, "step_ms") or 1e3 * (_positive(row, "step_s") or 0) or None,
        rate=_positive(row, "tokens_s_gpu", "tokens_per_s_gpu"),
        allocated_gib=_positive(row, "mem_gib", "peak_allocated_gib", "allocated_gib"),
        out_of_memory=bool(row.get("oom")),
        sample_tokens=_SQUAD_TOKENS if "squad" in group.lower() else None,
        is_tuned=re.search(TUNED, group.lower()) is not None,
        calibrates=_text(row, "calibrates"),
    )


def _of_torch(row: Row, name: str, job: Mapping[str, Any], precision: str) -> str:
    """Line of a trainer with FSDP; raises for what it cannot set."""
    trainer, again = _LINES[name], _recomputation(row)
    given = [size for size in trainer["without"] if job[size] > 1]
    mode = again.get("granularity", "none")
    if mode not in trainer["recompute"] or again.get("method") == "block" or "modules" in again:
        given.append(f"recompute {row['recompute']}")
    if given := given + ([] if precision == "bf16" else [precision]):
        raise UserError(f"{words(given)} cannot be set in a line of {name}: leave it out")
    strategy = re.search(r"SHARD_GRAD_OP|HYBRID_SHARD|NO_SHARD", _text(row, "note"))
    return trainer["line"].format(
        **job,
        strategy=strategy[0] if strategy else "FULL_SHARD",
        copies=_copies(row, job),
        recompute=mode,
        recomputes=mode == "full",
    )


def _copies(row: Row, job: Mapping[str, int]) -> int:
    """Replicas of sharded weights."""
    ranks, shards = job["gpus"] // (job["tp"] * job["pp"]), _count(row, "sharded", usual=1)
    if ranks % shards:
        raise UserError(f"sharded {shards} does not divide {ranks} data-parallel ranks; correct it")
    return ranks // shards if shards > 1 else 1


def _of_megatron(
    row: Row, is_bridge: bool, job: Mapping[str, Any], precision: str, model: ModelConfig
) -> str:
    """Line of Megatron-LM or a Bridge recipe; NeMo's overlap and fuse the most, SimuMax nothing."""
    line = _LINES["megatron-bridge" if is_bridge else "megatron-lm"]["line"].format(**job)
    overlaps = row.get("ovl", _text(row, "device") != "b200")
    if not is_bridge:
        line += " " + (_OVERLAPS if overlaps else _FUSED_LOSS)
        line += f" {_EXPERTS.format(**job)}" if expert_counts(model) else ""
        line += " --tp-comm-overlap" if overlaps and job["tp"] > 1 else ""
    settings = {"model.sequence_parallel": "true"} if job["tp"] > 1 else {}
    chunks, layers = job["chunks"], model.language.layers
    if layers % (job["pp"] * chunks):
        settings["model.pipeline_model_parallel_layout"] = _layout(layers, job["pp"] * chunks)
    elif chunks > 1:
        line += f" {'-vp' if is_bridge else '--num-virtual-stages-per-pipeline-rank'} {chunks}"
    settings |= {f"model.recompute_{name}": of for name, of in _recomputation(row).items()}
    if _copies(row, job) > 1:
        raise UserError("weights sharded over a part of the ranks cannot be set for Megatron")
    if _count(row, "sharded", usual=1) > 1:
        settings["ddp.use_megatron_fsdp"] = "true"
        settings["ddp.data_parallel_sharding_strategy"] = "optim_grads_params"
    if precision != "bf16" and is_bridge:
        line += f" --compute_dtype {_BRIDGE_FP8.get(precision, precision)}"
    elif precision != "bf16":
        line += f" --fp8-format hybrid --fp8-recipe {_FP8[precision]}"
    return line + "".join(_setting(name, value, is_bridge) for name, value in settings.items())


def _setting(name: str, value: str, is_bridge: bool) -> str:
    """An override, or a flag of Megatron-LM."""
    if is_bridge:
        return f" {name}={shlex.quote(value)}"
    flag = name.partition(".")[2].replace("_", "-")
    return f" --{flag}" + ("" if value == "true" else f" {shlex.quote(value)}")


_WORDS = re.compile(r"\b(TP|PP|CP|EP|ETP|VPP|DP|MBS|GBS)\s?[=:]?\s?(\d+)\b", re.IGNORECASE)
_LENGTH = re.compile(r"\b(\d{3,7}|\d+(?=k\b))(k?)\b", re.IGNORECASE)


_MEMORIES = ("max_alloc_avg_gib", "max_alloc_gib", "peak_gb", "device_gib")


def _with_line(row: Row) -> Measured:
    """A row with its own line, or with its sizes in words."""
    measured, name = row["measured"], _text(row, "name")
    if not isinstance(measured, dict):
        raise UserError(f"measured {measured!r}: must be an object; correct it")
    given, line = _options(row), _text(row, "line")
    if line and "verl" in name:  # trains without the recipe's multi-token prediction
        line += " model.mtp_num_layers=0"
    step_ms = _positive(measured, "step_ms") or 1e3 * (_positive(measured, "step_s") or 0)
    tokens, memory_gib = _positive(given, "--sample-tokens"), _positive(given, "--memory-gib")
    cluster = _cluster(_text(row, "cluster") or _text(row, "device"))
    on_device = "device_gib" in measured
    return Measured(
        name=name,
        line=line or _in_words(row, name),
        model=_model_of(row),
        cluster=cluster.model_copy(update={"memory_gib": memory_gib or cluster.memory_gib}),
        gpus=_count(row, "gpus"),
        launcher=Launcher(given["--launcher"]) if "--launcher" in given else None,
        image_share=float(given["--image-share"]),
        step_ms=step_ms or None,
        rate=_positive(measured, "tokens_s_gpu", "tokens_per_s_gpu"),
        sample_tokens=None if tokens is None else int(tokens),
        allocated_gib=_positive(
            measured, "max_alloc_avg_gib", "max_alloc_gib", "peak_gb", "device_gib"
        ),
        memory="mean" if "max_alloc_avg_gib" in measured else "device" if on_device else "fullest",
        out_of_memory=bool(measured.get("oom")),
        calibrates=_text(row, "calibrates"),
    )


def _options(row: Row) -> dict[str, Any]:
    """Options of `omnibal lint` in a row, by name."""
    given = shlex.split(_text(row, "extra"))
    options: dict[str, Any] = dict(zip(given[::2], given[1::2], strict=False))
    known = ("--launcher", "--image-share", "--sample-tokens", "--memory-gib")
    share = float(options.setdefault("--image-share", "0.5"))
    if len(given) % 2 or not set(options) <= set(known) or not 0 <= share <= 1:
        raise UserError(f"extra {' '.join(given)}: must be pairs of {words(known)}; correct it")
    return options


_PHRASES = {
    "full rec": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "fsdp|zero-?3": "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
    "zero-?2": "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
    "fp8": "--fp8-format hybrid",
    "vit frozen": "--freeze-vit",
    r"\btp\s?[=:]?\s?(?!1\b)\d": "--sequence-parallel",
    r"\bep\s?[=:]?\s?(?!1\b)\d": "--moe-grouped-gemm --moe-token-dispatcher-type alltoall",
}
"""Flags of a phrase in a row's words."""


def _in_words(row: Row, name: str) -> str:
    """Line of Megatron-LM with the sizes that words have."""
    text, gpus = _text(row, "config"), _count(row, "gpus")
    sizes = {name.lower(): int(number) for name, number in _WORDS.findall(text)}
    lengths = [int(n) * (1024 if k else 1) for n, k in _LENGTH.findall(_WORDS.sub("", text))]
    if not lengths or "gbs" not in sizes:
        raise UserError(f"config {text!r} must have a length and GBS: give these, or a line")
    job = _sizes({"gpus": gpus, **sizes}, "tp", "pp", "cp", "ep", "etp")
    job |= {"batch": sizes.get("mbs", 1), "gbs": sizes["gbs"], "length": lengths[0]}
    line = _LINES["megatron-lm"]["line"].format(**job) + (
        f" --expert-model-parallel-size {job['ep']} --expert-tensor-parallel-size {job['etp']}"
        f" --num-virtual-stages-per-pipeline-rank {sizes.get('vpp', 1)}"
    )
    found = [flags for phrase, flags in _PHRASES.items() if re.search(phrase, text.lower())]
    if "lora" in f"{name} {text}".lower():
        rank = re.search(r"\br(?:ank)?\s?(\d+)", text)
        found.append(f"--peft lora --lora-dim {rank[1] if rank else 8}")
    return " ".join([line, *found])


def _nanotron(row: Row) -> Measured:
    job, batch, gbs = (
        _sizes(row, "tp", "pp"),
        _count(row, "micro_batch"),
        _count(row, "global_batch"),
    )
    if row["zero"] is None:
        raise UserError("the row has no zero: give it")
    if gbs % (batch * job["dp"]):
        raise UserError(f"global_batch {gbs} is no multiple of micro_batch x dp; correct one")
    rate = _positive(row, "tokens_per_s_gpu")
    return Measured(
        name=f"nanotron {_text(row, 'model')}",
        group=f"nanotron {_text(row, 'model')} on {job['gpus']}",
        line=_LINES["nanotron"]["line"].format(
            **job,
            batch=batch,
            length=_count(row, "sequence"),
            accumulated=gbs // (batch * job["dp"]),
            zero=row["zero"],
        ),
        model=_sizes_model(row, tied=bool(row.get("tied"))),
        cluster=load_cluster("h100-80g-efa"),
        gpus=job["gpus"],
        rate=rate,
        calibrates=_text(row, "calibrates"),
        out_of_memory=rate is None,
    )


def _aleph_alpha(row: Row) -> Measured:
    job, layers = _sizes(row, "tp", "pp", "cp"), _count(row, "layers")
    job |= {"batch": _count(row, "micro_batch"), "gbs": _count(row, "global_batch")}
    line = _LINES["megatron-lm"]["line"].format(**job, length=_count(row, "sequence"))
    line += " --transformer-impl local --no-bias-swiglu-fusion --grad-reduce-in-bf16"
    if row.get("sequence_parallel") and job["tp"] > 1:
        line += " --sequence-parallel"
    if layers % job["pp"]:
        line += f" --pipeline-model-parallel-layout '{_layout(layers, job['pp'])}'"
    for name, value in _recomputation(row).items():
        line += _setting(f"model.recompute_{name}", value, is_bridge=False)
    step_ms = _positive(row, "step_ms")
    return Measured(
        name=f"{_text(row, 'model')} {_text(row, 'table')}",
        group=_text(row, "table"),
        line=line,
        model=_sizes_model(row, tied=False),
        cluster=_cluster("a100"),
        gpus=job["gpus"],
        step_ms=step_ms,
        out_of_memory=step_ms is None,
    )
