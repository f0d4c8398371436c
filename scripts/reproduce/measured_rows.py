"""Training jobs that others measured, as launch lines that `omnibal lint` reads.

Five forms of rows are read: dense steps, steps of many trainers, vision-language steps with their
own lines, and sweeps of layouts by nanotron on H100 and by Aleph Alpha's trainer on A100.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnibal.families.named import named_model
from omnibal.lint.launch import Launcher
from omnibal.model.config import ClusterConfig, ModelConfig, load_cluster

Row = Mapping[str, Any]
_CLUSTERS = {
    "a100": "a100-80g",
    "h100": "h100-80g",
    "h800": "h800-80g",
    "b200": "b200-180g",
    "gb200": "b200-180g",
}
_MODELS = {"llama3-8b": "llama3.1-8b", "llama3-70b": "llama3.1-70b", "deepseekv2": "deepseek-v2"}
_OVERLAPS = (
    "--ddp-average-in-collective --overlap-grad-reduce --overlap-param-gather "
    "--cross-entropy-loss-fusion --moe-permute-fusion"
)
_SQUAD_TOKENS = 256
"""Mean of a SQuAD sample with its prompt."""
_FUSED_LOSS = "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te"


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
    allocated_gib: float | None = None
    is_mean_memory: bool = False
    """Whether memory is a mean over ranks, and not the fullest's."""
    out_of_memory: bool = False
    sample_tokens: int | None = None
    """Of samples in a pack, if there are several."""
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


def measured_rows(path: Path) -> Iterator[Measured | str]:
    """Jobs of a file, or why a row is no job that can be said."""
    for row in json.loads(path.read_text())["rows"]:
        try:
            yield measured_row(row)
        except (KeyError, ValueError) as error:
            yield f"{row.get('name') or row.get('model')}: {error}"


def measured_row(row: Row) -> Measured:
    """The job of a row of any form."""
    if "zero" in row:
        return _nanotron(row)
    if "kernel" in row:
        return _aleph_alpha(row)
    if "measured" in row:
        return _with_line(row)
    return _published(row)


def _model_of(row: Row) -> ModelConfig:
    name = str(row["model"])
    model = named_model(_MODELS.get(name, name))
    return model.with_layers(language=row["layers"]) if row.get("layers") else model


def _sizes_model(row: Row, *, tied: bool) -> ModelConfig:
    """A model of Llama's shape, by its sizes."""
    return ModelConfig.model_validate(
        {
            "name": f"llama-{row['model'].lower()}",
            "chat_template": "llama3",
            "language": {
                "layers": row["layers"],
                "hidden_size": row["hidden"],
                "heads": row["heads"],
                "kv_heads": row["heads"],
                "ffn_hidden_size": row["ffn"],
                "vocab_size": row["vocab"],
                "max_positions": row["sequence"],
                "tied_head": tied,
            },
        }
    )


def _cluster(device: str) -> ClusterConfig:
    return load_cluster(_CLUSTERS.get(device, device))


def _torchrun(gpus: int, program: str) -> str:
    nodes = max(gpus // 8, 1)
    return f"torchrun --nnodes {nodes} --nproc-per-node {gpus // nodes} {program}"


def _published(row: Row) -> Measured:
    """A step with sizes as columns, in the trainer that its source names."""
    model = _model_of(row)
    batch = row.get("mbs") or row["micro_batch"]
    gbs = row.get("gbs") or row.get("global_batch") or row["micro_batches"] * batch * row["dp"]
    length = row.get("seq") or row["sequence"]
    group = row.get("group", "")
    source = f"{group} {row.get('source', '')}".lower()
    recompute, device = row.get("recompute") or "none", row["device"]
    gpus = row["gpus"]
    memory = row.get("mem_gib") or row.get("peak_allocated_gib") or row.get("allocated_gib")
    if "40gb" in group:
        device = "a100-40g"
    if "llm-foundry" in source:
        strategy = "SHARD_GRAD_OP" if "SHARD_GRAD_OP" in row["note"] else "FULL_SHARD"
        line = (
            f"composer train.py max_seq_len={length} device_train_microbatch_size={batch} "
            f"global_train_batch_size={gbs} fsdp_config.sharding_strategy={strategy} "
            f"fsdp_config.activation_checkpointing={recompute == 'full'}"
        )
    elif "torchtitan" in source:
        mode = "full" if recompute == "full" else "selective"
        line = (
            f"{_torchrun(gpus, '-m torchtitan.train')} --training.local_batch_size {batch} "
            f"--training.global_batch_size {gbs} --training.seq_len {length} "
            f"--parallelism.tensor_parallel_degree {row['tp']} "
            f"--parallelism.context_parallel_degree {row['cp']} --activation_checkpoint.mode {mode}"
        )
    elif "automodel" in source:
        line = (
            f"{_torchrun(gpus, 'automodel/train_ft.py')} --step_scheduler.local_batch_size {batch} "
            f"--step_scheduler.global_batch_size {gbs} --dataset.seq_len {length} "
            f"--distributed.tp_size {row['tp']} --distributed.cp_size {row['cp']} "
            f"--distributed.pp_size {row['pp']} --distributed.ep_size {row['ep']} "
            f"--distributed.activation_checkpointing {recompute == 'full'} {row['extra']}"
        )
    elif "megatron-bridge" in source:
        line = _bridge(row, batch, gbs, length)
    else:
        line = _megatron(row, batch, gbs, length, recompute)
    return Measured(
        name=f"{group or device} {row['model']}",
        line=line,
        model=model,
        cluster=_cluster(device),
        gpus=gpus,
        step_ms=row["step_ms"] if "step_ms" in row else 1e3 * row["step_s"],
        allocated_gib=memory,
        sample_tokens=_SQUAD_TOKENS if "SQuAD" in group else None,
        calibrates=row.get("calibrates", ""),
    )


def _megatron(row: Row, batch: int, gbs: int, length: int, recompute: str) -> str:
    """Line of Megatron-LM; NeMo's recipes overlap and fuse the most, SimuMax nothing."""
    line = (
        f"{_torchrun(row['gpus'], 'pretrain_gpt.py')} --use-distributed-optimizer --bf16 "
        f"--seq-length {length} --micro-batch-size {batch} --global-batch-size {gbs} "
        f"--tensor-model-parallel-size {row['tp']} --pipeline-model-parallel-size {row['pp']} "
        f"--context-parallel-size {row['cp']} "
    )
    overlaps = row.get("ovl", row["device"] != "b200")
    line += _OVERLAPS if overlaps else _FUSED_LOSS
    if row["tp"] > 1:
        line += " --sequence-parallel" + (" --tp-comm-overlap" if overlaps else "")
    if row["ep"] > 1:
        line += (
            f" --expert-model-parallel-size {row['ep']} --expert-tensor-parallel-size "
            f"{row.get('etp', 1)} --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
            "--moe-permute-fusion --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity"
        )
    chunks = row.get("vp") or row.get("chunks") or 1
    if chunks > 1:
        line += f" --num-virtual-stages-per-pipeline-rank {chunks}"
    if recompute == "full":
        line += " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    if (row.get("sharded") or 1) > 1:
        line += " --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
    if row["precision"] == "fp8":
        line += " --fp8-format hybrid"
    return f"{line} {row.get('extra', '')}"


def _bridge(row: Row, batch: int, gbs: int, length: int) -> str:
    """Line of a Megatron-Bridge performance recipe."""
    line = (
        f"run_recipe.py -tp {row['tp']} -pp {row['pp']} -cp {row['cp']} -ep {row['ep']} "
        f"-et {row.get('etp', 1)} -mb {batch} -gb {gbs} -sl {length} -ng {row['gpus']}"
    )
    if (row.get("vp") or 1) > 1:
        line += f" -vp {row['vp']}"
    if row["tp"] > 1:
        line += " model.sequence_parallel=true"
    return line + (" --compute_dtype fp8_cs" if row["precision"] == "fp8" else "")


_WORDS = re.compile(r"\b(TP|PP|CP|EP|MBS|GBS)\s?(\d+)", re.IGNORECASE)


def _with_line(row: Row) -> Measured:
    """A row with its own line, or with its sizes in words."""
    measured, extra = row["measured"], row.get("extra", [])
    given = dict(zip(extra[::2], extra[1::2], strict=True))
    line = row.get("line") or _in_words(row)
    if "verl" in row["name"]:  # trains without the recipe's multi-token prediction
        line += " model.mtp_num_layers=0"
    seconds, launcher = measured.get("step_s"), given.get("--launcher")
    return Measured(
        name=row["name"],
        line=line,
        model=_model_of(row),
        cluster=_cluster(row["cluster"]),
        gpus=row["gpus"],
        launcher=None if launcher is None else Launcher(launcher),
        image_share=float(given.get("--image-share", 0.5)),
        step_ms=None if seconds is None else 1e3 * seconds,
        allocated_gib=measured.get("max_alloc_avg_gib", measured.get("max_alloc_gib"))
        or measured.get("peak_gb"),
        is_mean_memory="max_alloc_avg_gib" in measured,
        out_of_memory=bool(measured.get("oom")),
        calibrates=row.get("calibrates", ""),
    )


def _in_words(row: Row) -> str:
    text = row["config"]
    sizes = {name.lower(): int(number) for name, number in _WORDS.findall(text)}
    length = next(int(each) for each in re.findall(r"\b\d{4,7}\b", text))
    line = (
        f"{_torchrun(row['gpus'], 'pretrain_gpt.py')} --use-distributed-optimizer --bf16 "
        f"--seq-length {length} --micro-batch-size {sizes.get('mbs', 1)} "
        f"--global-batch-size {sizes['gbs']}"
    )
    for name, flag in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
        line += f" --{flag}-model-parallel-size {sizes.get(name, 1)}"
    if sizes.get("ep", 1) > 1:
        line += " --expert-tensor-parallel-size 1 --moe-grouped-gemm"
        line += " --moe-token-dispatcher-type alltoall"
    if sizes.get("tp", 1) > 1:
        line += " --sequence-parallel"
    if "full recompute" in text:
        line += " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    if "LoRA" in row["name"] or "lora" in text.lower():
        rank = re.search(r"\br(\d+)", text)
        line += f" --peft lora --lora-dim {rank[1] if rank else 8}"
    if "vit frozen" in text:
        line += " --freeze-vit"
    return line


def _nanotron(row: Row) -> Measured:
    accumulated = row["global_batch"] // (row["micro_batch"] * row["dp"])
    line = (
        f"{_torchrun(row['gpus'], 'run_train.py')} --parallelism.dp {row['dp']} "
        f"--parallelism.tp {row['tp']} --parallelism.pp {row['pp']} "
        f"--parallelism.tp_mode REDUCE_SCATTER --tokens.sequence_length {row['sequence']} "
        f"--tokens.micro_batch_size {row['micro_batch']} "
        f"--tokens.batch_accumulation_per_replica {accumulated} "
        f"--optimizer.zero_stage {row['zero']}"
    )
    rate = row["tokens_per_s_gpu"]
    tokens = row["global_batch"] * row["sequence"]
    return Measured(
        name=f"nanotron {row['model']}",
        group=f"nanotron {row['model']} on {row['gpus']}",
        line=line,
        model=_sizes_model(row, tied=row["tied"]),
        cluster=load_cluster("h100-80g-efa"),
        gpus=row["gpus"],
        step_ms=None if rate is None else 1e3 * tokens / rate / row["gpus"],
        calibrates=row.get("calibrates", ""),
        out_of_memory=rate is None,
    )


def _aleph_alpha(row: Row) -> Measured:
    line = (
        f"{_torchrun(row['gpus'], 'pretrain_gpt.py')} --use-distributed-optimizer --bf16 "
        "--transformer-impl local --no-bias-swiglu-fusion --grad-reduce-in-bf16 "
        f"--seq-length {row['sequence']} --micro-batch-size {row['micro_batch']} "
        f"--global-batch-size {row['global_batch']} --tensor-model-parallel-size {row['tp']} "
        f"--pipeline-model-parallel-size {row['pp']}"
    )
    if row["sequence_parallel"] and row["tp"] > 1:
        line += " --sequence-parallel"
    if row["recompute"] not in ("none", None, False, "disabled"):
        line += " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    return Measured(
        name=f"{row['model']} {row['table']}",
        group=row["table"],
        line=line,
        model=_sizes_model(row, tied=False),
        cluster=_cluster("a100"),
        gpus=row["gpus"],
        step_ms=row["step_ms"],
        out_of_memory=row["step_ms"] is None,
    )
