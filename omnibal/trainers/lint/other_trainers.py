"""Trainers without Megatron's flags: their settings by Megatron's names, defaults and options.

From torchtitan (`config/job_config.py`), NeMo Automodel (recipes' YAML), llm-foundry
(`train.py` with Composer's `fsdp_config`) and nanotron (`config/config.py`).
"""

import re
from collections.abc import Mapping

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
OTHER_DEFAULTS: Mapping[Launcher, Mapping[str, str | None]] = {
    launcher: {"sequence-parallel": "true", "recompute-method": "uniform"} for launcher in PROGRAMS
}
_STAGE_RULES = StageRules(encoders_on_first=True, head_on_all_tokens=True)
_SHARDED = (WeightSharding.FULL, WeightSharding.HYBRID, WeightSharding.REPLICATED)
_TORCH = RuntimeOptions(
    fused_loss=False,
    scatters_weights_precision=True,
    elementwise_slowdown=1.5,
    plain=True,
    kept_logits=5,
    fragmentation=0.15,
)
# Fitted on published steps; see docs/results.md.
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
TRAINERS: Mapping[Launcher, TrainerConstraints] = {
    launcher: TrainerConstraints(
        title=title,
        version=version,
        stages=_STAGE_RULES,
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
