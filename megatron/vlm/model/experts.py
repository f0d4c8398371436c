"""Mixture of experts: Megatron-core's layer, router and all-to-all dispatcher with own experts.

A rank's experts are two stacked tensors under every provider: two grouped products on CUDA, and two
checkpoint tensors for any expert-parallel size. Core has one linear per expert, or parameters that
depend on Transformer Engine.

Shapes: S tokens of this rank, R rows (copies of tokens) of this rank's experts, H hidden size, X
experts of this rank, E all experts, F feed-forward width of an expert, I inputs and O outputs, L
language layers of the model, P expert-parallel ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.utils.checkpoint import checkpoint

from megatron.vlm.backend import current_device
from megatron.vlm.model.deferred_weights import DeferredWeights, Product, multiply
from megatron.vlm.model.fused.activations import swiglu
from omnibal.job.runlog import ExpertBalance
from omnibal.model.parallel import Parallel


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Routing:
    """Routers' inputs from a micro-batch."""

    padding_S: torch.Tensor | None  # bool, true for tokens without auxiliary loss and balance
    loss_weight: float  # weight of the auxiliary loss, `MicroBatch.loss_weight`


class Router(TopKRouter):
    """Core's router, with an auxiliary loss that is independent of parallel sizes.

    Switch Transformer (arXiv 2101.03961, equation 4) over a micro-batch and all chosen experts:
    `E / k * sum_e share_of_tokens[e] * mean_score[e]`. Micro-batches are weighted by the sum of
    their loss weights, shares of a pack by their tokens: the result is a mean for any layout.
    """

    def __init__(
        self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None
    ) -> None:
        super().__init__(config, pg_collection)
        self.loss_weight = 0.0
        counts_E = torch.zeros(config.num_moe_experts, dtype=torch.float32)
        self.register_buffer("tokens_of_experts_E", counts_E, persistent=False)

    def _apply_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """Attach the auxiliary loss to the expert weights [S, E] (core's name)."""
        # Core 0.16.1 scales by one tensor-parallel rank's tokens, divides by loss tokens although
        # all tokens are routed, and returns NaN for padding only.
        counts_E = reduce_from_tensor_model_parallel_region(routing_map.sum(0), self.tp_cp_group)
        tokens = (counts_E.sum() / self.topk).clamp(min=1)
        # This rank's part of the mean score: the router's gradient is summed over ranks.
        balance = (scores_for_aux_loss.sum(0) * counts_E).sum()
        factor = self.config.num_moe_experts * self.config.moe_aux_loss_coeff / self.topk
        loss = balance * (factor * self.loss_weight) / tokens.square()
        weighted: torch.Tensor = WithLoss.apply(probs, loss)
        return weighted

    def _apply_expert_bias(
        self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> None:
        """Count the tokens of every expert in training, without padding (core's name)."""
        # Recomputed layers run twice, first without gradients.
        if torch.is_grad_enabled():
            counted = routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]
            self.tokens_of_experts_E += counted.sum(0)


class WithLoss(torch.autograd.Function):
    """Identity; backward also adds the auxiliary loss's gradient."""

    # Core's `MoEAuxLossAutoScaler` launches another kernel, for a scale of 1.
    @staticmethod
    def forward(ctx, tensor, loss):
        ctx.save_for_backward(loss)
        return tensor

    @staticmethod
    def backward(ctx, *gradients):
        (loss,) = ctx.saved_tensors
        return gradients[0], torch.ones_like(loss)


class StackedLinear(torch.nn.Module):
    """Weights of one product for all experts of a rank, [X, O, I]."""

    def __init__(self, experts: int, outputs: int, inputs: int, config: TransformerConfig) -> None:
        super().__init__()
        shape = (experts, outputs, inputs)
        weight: Any = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
        # Core's mark: reduce over the ranks with the same experts. Core's linears set it only with
        # expert parallelism, but without it tensor-parallel ranks also have undivided experts and
        # different tokens.
        weight.allreduce = False
        self.weight = weight


class StackedExperts(MegatronModule):
    """A rank's SwiGLU experts. A drop-in for core's `SequentialMLP` and `TEGroupedMLP`."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        assert pg_collection is not None
        self.ep_group, self.dp_group = pg_collection.ep, pg_collection.expt_dp
        self.first = self.ep_group.rank() * num_local_experts
        self.experts = config.num_moe_experts
        hidden, width = config.hidden_size, config.moe_ffn_hidden_size
        self.linear_fc1 = StackedLinear(num_local_experts, 2 * width, hidden, config)
        self.linear_fc2 = StackedLinear(num_local_experts, hidden, width, config)
        self.deferred: DeferredWeights | None = None  # None if backward computes weight gradients

    def forward(
        self, rows_RH: torch.Tensor, tokens_per_expert: torch.Tensor, weights_R: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Run every expert on its rows; return weighted outputs [R, H], and None for a bias.

        Args:
            rows_RH: rows sorted by expert.
            tokens_per_expert: int64 [X], on the host.
            weights_R: router weight of every row, float32.
        """
        product = GroupedProduct(tuple(tokens_per_expert.tolist()))
        first_XIH, second_XHF = self.linear_fc1.weight, self.linear_fc2.weight
        inner_RI = multiply(product, rows_RH, first_XIH, deferred=self.deferred)
        # As core: weighting after the second product would need H values per row, not F.
        active_RF = checkpoint(
            _weighted_swiglu, inner_RI, weights_R, use_reentrant=False, preserve_rng_state=False
        )  # keeps only its inputs for backward
        return multiply(product, active_RF, second_XHF, deferred=self.deferred), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return both stacks as shards of all experts' tensors (core's name)."""
        tensors = dict(self.named_parameters())
        return make_sharded_tensors_for_checkpoint(
            tensors,
            prefix,
            dict.fromkeys(tensors, 0),
            sharded_offsets,
            tp_group=self.ep_group,
            dp_cp_group=self.dp_group,
        )


class SharedExpert(SharedExpertMLP):
    """Core's shared expert with a fused activation."""

    def forward(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        inner, _ = self.linear_fc1(hidden_SBH)
        output_SBH, _ = self.linear_fc2(swiglu(inner, None))
        if self.gate_weight is None:
            return output_SBH
        return output_SBH * F.linear(hidden_SBH, self.gate_weight).sigmoid()


class MixtureOfExperts(MoELayer):
    """Core's layer of router, dispatcher and experts."""

    def __init__(self, config: TransformerConfig, layer_number: int | None = None) -> None:
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        shared = ModuleSpec(SharedExpert, submodules=linears)
        parts = MoESubmodules(experts=StackedExperts, router=Router, shared_experts=shared)
        super().__init__(config, parts, layer_number)

    def forward(  # type: ignore[override]
        self, hidden_SBH: torch.Tensor, routing: Routing | None = None
    ) -> tuple[torch.Tensor, None]:
        """Run the experts; return each token's sum of outputs, [S, B, H], and None for a bias.

        Collective over the expert-parallel ranks, in forward and backward.
        """
        mask_BS = None
        if routing is not None:
            self.router.loss_weight = routing.loss_weight
            if routing.padding_S is not None:
                mask_BS = routing.padding_S.unsqueeze(0)
        output: tuple[torch.Tensor, None] = super().forward(hidden_SBH, padding_mask=mask_BS)
        # Core's dispatcher would hold these until the next micro-batch.
        self.token_dispatcher.probs = self.token_dispatcher.routing_map = None
        return output


def take_expert_balance(
    chunks: Sequence[MegatronModule], parallel: Parallel
) -> ExpertBalance | None:
    """Return the balance of tokens since the last call, or None if dense; collective."""
    config = chunks[0].config
    if config.num_moe_experts is None:
        return None
    counts_LE = torch.zeros(config.num_layers, config.num_moe_experts, device=current_device())
    modules = (module for stage in chunks for module in stage.modules())
    for router in (module for module in modules if isinstance(module, Router)):
        assert router.layer_number is not None
        if router.layer_number <= config.num_layers:  # not of the prediction layer
            counts_LE[router.layer_number - 1] = router.tokens_of_experts_E
        router.tokens_of_experts_E.zero_()
    dist.all_reduce(counts_LE)
    # Neighbouring experts are on one rank.
    counts_LP = counts_LE.unflatten(1, (parallel.expert, -1)).sum(-1)
    return ExpertBalance(
        fullest_expert=_max_over_mean(counts_LE), fullest_rank=_max_over_mean(counts_LP)
    )


def _max_over_mean(counts: torch.Tensor) -> float:
    """Return the mean over rows of max / mean; a row of zeros counts as 1."""
    means = counts.mean(1)
    return float(torch.where(means > 0, counts.amax(1) / means.clamp(min=1), 1.0).mean())


def _weighted_swiglu(inner_RI: torch.Tensor, weights_R: torch.Tensor) -> torch.Tensor:
    return (swiglu(inner_RI) * weights_R.unsqueeze(-1)).to(inner_RI.dtype)


@dataclass(frozen=True, slots=True)
class GroupedProduct(Product):
    """Product of group i, the next `counts[i]` rows, with matrix i of a stack [X, O, I]."""

    counts: tuple[int, ...]

    def outputs(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _multiply_groups(rows, weight.transpose(1, 2), self.counts)

    def input_gradient(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _multiply_groups(gradient, weight, self.counts)

    def weight_gradient(self, rows: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        if _has_kernel(rows, gradient.shape[-1]):
            ends_X = _group_ends(self.counts, rows.device)
            sums_XOI = F.grouped_mm(gradient.t(), rows, offs=ends_X)
            # Some devices leave a group without rows unwritten (pytorch/pytorch#172439).
            for place in (place for place, count in enumerate(self.counts) if not count):
                sums_XOI[place].zero_()
            return sums_XOI
        groups = zip(gradient.split(self.counts), rows.split(self.counts), strict=True)
        return torch.stack([gradient_RO.t() @ rows_RI for gradient_RO, rows_RI in groups])


def _multiply_groups(
    rows_RI: torch.Tensor, matrices_XIO: torch.Tensor, counts: tuple[int, ...]
) -> torch.Tensor:
    if _has_kernel(rows_RI, matrices_XIO.shape[-1]):
        return F.grouped_mm(rows_RI, matrices_XIO, offs=_group_ends(counts, rows_RI.device))
    groups = zip(rows_RI.split(counts), matrices_XIO, strict=True)
    return torch.cat([rows @ matrix for rows, matrix in groups])


def _has_kernel(rows_RI: torch.Tensor, outputs: int) -> bool:
    """Return whether torch has one kernel for all groups: bf16 on CUDA, widths multiples of 8."""
    is_wide = rows_RI.shape[-1] % 8 == 0 and outputs % 8 == 0
    return rows_RI.is_cuda and rows_RI.dtype == torch.bfloat16 and len(rows_RI) > 0 and is_wide


def _group_ends(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the end row of every group, int32 [X]."""
    return torch.tensor(counts).cumsum(0).to(torch.int32).to(device, non_blocking=True)
