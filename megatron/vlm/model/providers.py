"""Providers of linears and attention: this project with core, or Transformer Engine.

Names, shapes and checkpoints are equal. Norms, activations and residual adds are from `model.fused`
in both: Transformer Engine has no norm over all heads and no layer scale, and fuses its norms with
the next linear under other names.
"""

import importlib.util
from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.utils import get_te_version, is_te_min_version

from megatron.vlm.installed import TRANSFORMER_ENGINE_FAILURE
from megatron.vlm.model.attention import PackedCoreAttention
from omnibal.base.errors import UserError
from omnibal.job.plan import Plan
from omnibal.model.config import Provider

_CURRENT_SCALING = "2.2.0"  # first release with current scaling (megatron-core's `fp8_utils.py`)


class OwnParts(LocalSpecProvider):
    """Core's linears, with this project's attention."""

    def core_attention(self) -> type:
        return PackedCoreAttention


def check_provider(provider: Provider) -> None:
    """Raise UserError unless the provider is installed."""
    if provider != "te":
        return
    if TRANSFORMER_ENGINE_FAILURE is not None:
        raise UserError(
            "--provider te: Transformer Engine is installed, but cannot be imported "
            f"({TRANSFORMER_ENGINE_FAILURE}); repair it, or leave --provider out"
        )
    if importlib.util.find_spec("transformer_engine") is None:
        raise UserError(
            "--provider te needs Transformer Engine, which is not installed: pip install "
            "'omnibal[cuda]' on a machine with CUDA, or leave --provider out"
        )


def check_provider_of(plan: Plan, provider: Provider) -> None:
    """Raise UserError unless the provider's layers can train a plan."""
    if provider == "local":
        if plan.precision == "fp8":
            raise UserError(
                "precision fp8 needs Transformer Engine, and provider local was given: give "
                "--provider te, or plan with --precision bf16"
            )
        return
    if plan.precision == "fp8" and not is_te_min_version(_CURRENT_SCALING):
        raise UserError(
            f"precision fp8 needs Transformer Engine {_CURRENT_SCALING} or newer, and "
            f"{get_te_version()} is installed; install a newer one, or plan with --precision bf16"
        )
    obstacles = {
        "packs that ranks share, which Transformer Engine's attention does not support; plan with "
        "--packing-levels 1": plan.has_shared_packs,
        "data-parallel encoders, which only provider local supports; plan with --encoder "
        "pipeline": plan.data_parallel_encoders is not None,
        "gated delta layers, which only provider local supports": plan.model.language.is_hybrid,
        "adapters, which only provider local supports; plan without them": bool(plan.adapters),
        f"schedule {plan.schedule.name}, whose split backward only provider local supports; plan "
        "with --schedule 1f1b": plan.schedule.in_two,
    }
    for obstacle in (text for text, applies in obstacles.items() if applies):
        raise UserError(f"--provider te was given, but the plan has {obstacle}, or drop the option")


def without_bias(linear: type) -> type:
    """Return a subclass of column-parallel `linear` without bias, as InternViT-6B's q, k and v."""

    # Core's `add_bias_linear` gives every linear of the tower a bias.
    class UnbiasedLinear(linear):  # type: ignore[misc, valid-type]
        def __init__(self, *sizes: int, bias: bool, **arguments: Any) -> None:
            super().__init__(*sizes, bias=False, **arguments)

    return UnbiasedLinear
