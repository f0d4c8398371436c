"""Trainers without Megatron's flags: their settings by Megatron's names, defaults and options.

Read from torchtitan (`config/job_config.py`), NeMo Automodel (recipes' YAML), llm-foundry
(`train.py` with Composer's `fsdp_config`) and nanotron (`config/config.py`).
"""

import re
from collections.abc import Mapping

from omnibal.model.parallel import WeightSharding
from omnibal.model.runtime import RuntimeOptions
from omnibal.model.targets import StageRules, TrainerConstraints
from omnibal.trainers.lint.launch import Launcher

PROGRAMS: Mapping[Launcher, re.Pattern[str]] = {
    Launcher.TORCHTITAN: re.compile(r"torchtitan"),
    Launcher.AUTOMODEL: re.compile(r"automodel", re.IGNORECASE),
    Launcher.LLM_FOUNDRY: re.compile(r"(?:^|/)composer\b|llm-?foundry"),
    Launcher.NANOTRON: re.compile(r"nanotron|run_train\.py"),
}
"""What a command of each trainer has."""
NAMES: Mapping[str, str] = {
    "parallelism.tensor_parallel_degree": "tensor-model-parallel-size",
    "parallelism.pipeline_parallel_degree": "pipeline-model-parallel-size",
    "parallelism.context_parallel_degree": "context-parallel-size",
    "parallelism.expert_parallel_degree": "expert-model-parallel-size",
    "parallelism.expert_tensor_parallel_degree": "expert-tensor-parallel-size",
    "training.local_batch_size": "micro-batch-size",
    "training.batch_size": "micro-batch-size",
    "training.global_batch_size": "global-batch-size",
    "training.seq_len": "seq-length",
    "activation_checkpoint.mode": "recompute-granularity",
    "distributed.tp_size": "tensor-model-parallel-size",
    "distributed.pp_size": "pipeline-model-parallel-size",
    "distributed.cp_size": "context-parallel-size",
    "distributed.ep_size": "expert-model-parallel-size",
    "distributed.activation_checkpointing": "recompute-all",
    "step_scheduler.local_batch_size": "micro-batch-size",
    "step_scheduler.global_batch_size": "global-batch-size",
    "dataset.seq_len": "seq-length",
    "packed_sequence.packed_sequence_size": "seq-length",
    "max_seq_len": "seq-length",
    "device_train_microbatch_size": "micro-batch-size",
    "global_train_batch_size": "global-batch-size",
    "fsdp_config.activation_checkpointing": "recompute-all",
    "parallelism.tp": "tensor-model-parallel-size",
    "parallelism.pp": "pipeline-model-parallel-size",
    "parallelism.context_parallel_size": "context-parallel-size",
    "parallelism.recompute_layer": "recompute-all",
    "tokens.micro_batch_size": "micro-batch-size",
    "tokens.sequence_length": "seq-length",
}
"""Megatron's name of a setting of these trainers."""
PLAIN = re.compile(r"max_seq_len|(?:device|global)_train_(?:microbatch|batch)_size")
"""Settings that are no flags and in no section."""
DEFAULTS: Mapping[Launcher, Mapping[str, str | None]] = {
    launcher: {"sequence-parallel": "true", "recompute-method": "uniform"} for launcher in PROGRAMS
}
_STAGES = StageRules(encoders_on_first=True, head_on_all_tokens=True)
_SHARDED = (WeightSharding.FULL, WeightSharding.HYBRID, WeightSharding.REPLICATED)
_TORCH = RuntimeOptions(
    fused_loss=False,
    scatters_weights_precision=True,
    elementwise_slowdown=1.5,
    plain=True,
    kept_logits=5,
    fragmentation=0.15,
)
_RUNTIMES = {
    Launcher.TORCHTITAN: _TORCH.model_copy(update={"product_slowdown": 1.2}),
    Launcher.AUTOMODEL: _TORCH.model_copy(
        update={"elementwise_slowdown": 1.0, "dispatcher": "flex", "fused_routing": True}
    ),
    # Attention by kernels older than FlashAttention-2.
    Launcher.LLM_FOUNDRY: _TORCH.model_copy(
        update={"attention_slowdown": 1.75, "elementwise_slowdown": 2.0, "product_slowdown": 1.02}
    ),
    Launcher.NANOTRON: _TORCH.model_copy(
        update={
            "keeps_gradients": True,
            "fragmentation": 0.3,
            "overlap_gradients": False,
            "overlap_weights": False,
            "elementwise_slowdown": 2.0,
            "product_slowdown": 1.12,
            "host_slowdown": 0.9,
            "ring_host_us": 220.0,
            "bucket_bytes": 25 * 2**20,
        }
    ),
}
"""Fitted on published steps; see docs/results.md."""
TRAINERS: Mapping[Launcher, TrainerConstraints] = {
    launcher: TrainerConstraints(
        title=title,
        version=version,
        stages=_STAGES,
        shardings=_SHARDED,
        has_adapters=True,
        runtime=_RUNTIMES[launcher],
    )
    for launcher, title, version in (
        (Launcher.TORCHTITAN, "torchtitan", "0.2"),
        (Launcher.AUTOMODEL, "NeMo Automodel", "0.3"),
        (Launcher.LLM_FOUNDRY, "llm-foundry", "0.22"),
        (Launcher.NANOTRON, "nanotron", "0.4"),
    )
}
"""Limits of these trainers and their options."""
