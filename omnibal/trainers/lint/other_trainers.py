"""Trainers without Megatron's flags: their settings by Megatron's names, defaults and options.

From torchtitan (`config/job_config.py`), NeMo Automodel (recipes' YAML), llm-foundry
(`train.py` with Composer's `fsdp_config`) and nanotron (`config/config.py`).
"""

import re
from collections.abc import Mapping
from typing import Any

from omnibal.model.parallel import WeightSharding
from omnibal.model.runtime import RuntimeOptions
from omnibal.model.targets import StageRules, TrainerConstraints
from omnibal.trainers.lint.launch_settings import Launcher

PROGRAMS: Mapping[Launcher, re.Pattern[str]] = {  # found in each trainer's commands
    Launcher.TORCHTITAN: re.compile(r"torchtitan"),
    Launcher.AUTOMODEL: re.compile(r"automodel", re.IGNORECASE),
    Launcher.LLM_FOUNDRY: re.compile(r"(?:^|/)composer\b|llm-?foundry"),
    Launcher.NANOTRON: re.compile(r"nanotron|run_train\.py"),
}
_SETTINGS = {
    "tensor-model-parallel-size": "parallelism.tensor_parallel_degree distributed.tp_size "
    "parallelism.tp",
    "pipeline-model-parallel-size": "parallelism.pipeline_parallel_degree distributed.pp_size "
    "parallelism.pp",
    "context-parallel-size": "parallelism.context_parallel_degree distributed.cp_size "
    "parallelism.context_parallel_size",
    "expert-model-parallel-size": "parallelism.expert_parallel_degree distributed.ep_size",
    "expert-tensor-parallel-size": "parallelism.expert_tensor_parallel_degree",
    "micro-batch-size": "training.local_batch_size training.batch_size "
    "step_scheduler.local_batch_size device_train_microbatch_size tokens.micro_batch_size",
    "global-batch-size": "training.global_batch_size step_scheduler.global_batch_size "
    "global_train_batch_size",
    "seq-length": "training.seq_len dataset.seq_len packed_sequence.packed_sequence_size "
    "max_seq_len tokens.sequence_length",
    "recompute-granularity": "activation_checkpoint.mode",
    "recompute-all": "distributed.activation_checkpointing fsdp_config.activation_checkpointing "
    "parallelism.recompute_layer",
}
# Megatron's name of each setting, by the trainers' names.
NAMES = {name: flag for flag, names in _SETTINGS.items() for name in names.split()}
# llm-foundry's settings without a section, which look like no flag and no override.
PLAIN = re.compile(r"max_seq_len|(?:device|global)_train_(?:microbatch|batch)_size")
_TORCH: dict[str, Any] = {
    "fused_loss": False,
    "scatters_weights_precision": True,
    "elementwise_slowdown": 1.5,
    "plain": True,
    "kept_logits": 5,
    "fragmentation": 0.15,
}
# Changed options were fitted on published steps; see docs/results.md.
TRAINERS: Mapping[Launcher, TrainerConstraints] = {
    launcher: TrainerConstraints(
        title=title,
        version=version,
        stages=StageRules(encoders_on_first=True, head_on_all_tokens=True),
        shardings=(WeightSharding.FULL, WeightSharding.HYBRID, WeightSharding.REPLICATED),
        has_adapters=True,
        runtime=RuntimeOptions(**_TORCH | changed),
    )
    for launcher, title, version, changed in (
        (Launcher.TORCHTITAN, "torchtitan", "0.2", {"product_slowdown": 1.2}),
        (
            Launcher.AUTOMODEL,
            "NeMo Automodel",
            "0.3",
            {"elementwise_slowdown": 1.0, "dispatcher": "flex", "fused_routing": True},
        ),
        (
            Launcher.LLM_FOUNDRY,
            "llm-foundry",
            "0.22",
            # Attention by kernels older than FlashAttention-2.
            {"attention_slowdown": 1.75, "elementwise_slowdown": 2.0, "product_slowdown": 1.02},
        ),
        (
            Launcher.NANOTRON,
            "nanotron",
            "0.4",
            {
                "keeps_gradients": True,
                "fragmentation": 0.3,
                "overlap_gradients": False,
                "overlap_weights": False,
                "elementwise_slowdown": 2.0,
                "product_slowdown": 1.12,
                "host_slowdown": 0.9,
                "ring_host_us": 220.0,
                "bucket_bytes": 25 * 2**20,
            },
        ),
    )
}
