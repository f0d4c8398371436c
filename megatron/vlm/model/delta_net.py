"""Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464) over packed samples, as in Qwen3.5.

    S_t = exp(decay_t) S_(t-1) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T        o_t = S_t q_t

States and convolutions restart at every sample of a pack. On CUDA the rule is the kernel of
flash-linear-attention if installed, else the chunked form (section 3.3) in plain torch.

Shapes: T packed tokens, G key heads and N value heads of this rank, D key and E value head size,
W convolution width, C = G (2 D) + N E convolved channels, K chunks of B tokens.
"""

import functools
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.vlm.inputs.batch import Borders
from megatron.vlm.model.fused.gated_delta import (
    GatedNorm,
    convolve,
    decay_and_rate,
    normalize_heads,
    normalize_heads_backward,
)
from megatron.vlm.model.fused.rotary import locate_tokens
from megatron.vlm.model.tensor_parallel import DividedModule, divide
from omnibal.model.layer_kinds import LinearAttention

CHUNK = 64  # tokens, as in flash-linear-attention
# Max of initial rates exp(A_log), and range of initial steps softplus(dt_bias), as in Mamba-2
# (arXiv 2405.21060).
_MAX_DECAY_RATE, _STEPS = 16, (1e-3, 1e-1)
_GOLDEN_RATIO = 0.618034


class GatedDeltaNet(MegatronModule, DividedModule):
    """Linear attention of a language layer, with core's names of submodules.

    Rows of `in_proj` are by key head, so that tensor-parallel ranks have consecutive rows. A head
    has q, k, v of its value heads, their gates, a row per value head for beta and one for decay.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        *,
        linear: LinearAttention,
        pg_collection: ProcessGroupCollection,
        **unused: Any,
    ) -> None:
        super().__init__(config)
        self.tp_group, self.linear = pg_collection.tp, linear
        ranks, hidden, dtype = self.tp_group.size(), config.hidden_size, config.params_dtype
        keys = linear.key_heads * linear.key_head_size
        values = linear.value_heads * linear.value_head_size
        self.num_query_groups_per_partition = linear.key_heads // ranks  # core's name
        heads = linear.value_heads // ranks
        common: dict[str, Any] = {"config": config, "bias": False, "is_expert": False}
        common |= {"init_method": config.init_method, "tp_group": self.tp_group}
        self.in_proj = build_module(
            submodules.in_proj,
            hidden,
            2 * (keys + values + linear.value_heads),
            gather_output=False,
            skip_bias_add=False,
            **common,
        )
        channels = (2 * keys + values) // ranks
        weight = torch.empty(channels, 1, linear.convolution_width, dtype=dtype)
        self.conv_weight = torch.nn.Parameter(weight)
        # Decays exp(-rate * softplus(dt_bias)): rates evenly spaced over the heads of all ranks.
        # Steps of `_STEPS`, log-spaced, in an order independent of the rates (golden ratio).
        numbers_N = torch.arange(heads) + self.tp_group.rank() * heads
        rates_N = _MAX_DECAY_RATE * (numbers_N + 0.5) / linear.value_heads
        self.A_log = torch.nn.Parameter(rates_N.log().to(dtype))
        steps_N = _STEPS[0] * (_STEPS[1] / _STEPS[0]) ** (numbers_N * _GOLDEN_RATIO % 1)
        self.dt_bias = torch.nn.Parameter(steps_N.expm1().log().to(dtype))  # inverse softplus
        for parameter in (self.conv_weight, self.dt_bias, self.A_log):
            divide(parameter, dim=0)
        norm_E: Any = torch.nn.Parameter(torch.ones(linear.value_head_size, dtype=dtype))
        norm_E.sequence_parallel = ranks > 1  # core sums the ranks' gradients
        self.norm_weight = norm_E
        self.out_proj = build_module(
            submodules.out_proj,
            values,
            hidden,
            input_is_parallel=True,
            skip_bias_add=True,
            **common,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: Borders,
        **unused: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return output [T, 1, hidden] (this rank's T if sequence-parallel), and None as bias."""
        linear, groups = self.linear, self.num_query_groups_per_partition
        size, value_size = linear.key_head_size, linear.value_head_size
        per_group = linear.value_heads // linear.key_heads
        rows_T1X, _ = self.in_proj(hidden_states)
        rows_TGX = rows_T1X.squeeze(1).unflatten(-1, (groups, -1))
        values = per_group * value_size
        widths = [2 * size + values, values, per_group, per_group]
        # Copies: a view saved for backward would keep all rows in memory.
        mixed_TC, gate_TX, logit_TN, decay_TN = (
            rows.flatten(1).contiguous() for rows in rows_TGX.split(widths, -1)
        )
        del rows_T1X, rows_TGX
        borders = packed_seq_params.cu_seqlens_q
        mixed_TC = convolve(mixed_TC, self.conv_weight, borders)
        heads_TGX = mixed_TC.unflatten(-1, (groups, -1)).split([size, size, values], -1)
        query_TGD, key_TGD, value_TGX = (heads.contiguous() for heads in heads_TGX)
        del mixed_TC, heads_TGX
        decay_TN, beta_TN = decay_and_rate(decay_TN, logit_TN, self.A_log, self.dt_bias)
        value_TNE = value_TGX.flatten(1).unflatten(-1, (-1, value_size))
        output_TNE = delta_rule(query_TGD, key_TGD, value_TNE, decay_TN, beta_TN, packed_seq_params)
        gate_TNE = gate_TX.unflatten(-1, (-1, value_size))
        eps = self.config.layernorm_epsilon
        gated_TNE = GatedNorm.apply(output_TNE, gate_TNE, self.norm_weight, eps)
        return self.out_proj(gated_TNE.flatten(1).unsqueeze(1))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the checkpoint's tensors, divided over tensor-parallel ranks but for the norm."""
        of_linears = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own = DividedModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
        return of_linears | own


def delta_rule(
    query_TGD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TNE: torch.Tensor,
    decay_TN: torch.Tensor,
    beta_TN: torch.Tensor,
    packed: Borders,
) -> torch.Tensor:
    """Return the rule's outputs [T, N, E], with q and k scaled to length 1, then q by D^-0.5.

    Args:
        decay_TN: logarithms of decays, float32, at most 0.
    """
    inputs = (query_TGD, key_TGD, value_TNE, decay_TN, beta_TN)
    if value_TNE.is_cuda and has_kernel():
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        output_1TNE, _ = chunk_gated_delta_rule(
            *(x.unsqueeze(0) for x in inputs),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=packed.cu_seqlens_q.long(),
            cu_seqlens_cpu=packed.host_q.long(),  # else the host waits for a copy
        )
        return output_1TNE.squeeze(0)
    return DeltaRule.apply(*inputs, packed.cu_seqlens_q)


@functools.cache
def has_kernel() -> bool:
    """Return whether flash-linear-attention is installed."""
    return importlib.util.find_spec("fla") is not None


class DeltaRule(torch.autograd.Function):
    """The rule in plain torch. Saves the tensors that fla saves; backward runs the rule again."""

    @staticmethod
    def forward(ctx, query_TGD, key_TGD, value_TNE, decay_TN, beta_TN, borders):
        query_TGD, query_scale_TG = normalize_heads(query_TGD)
        key_TGD, key_scale_TG = normalize_heads(key_TGD)
        inputs = (query_TGD, key_TGD, value_TNE, decay_TN, beta_TN)
        output_TNE, inverse_TNB = run_rule(*inputs, borders)
        ctx.save_for_backward(*inputs, inverse_TNB, borders, query_scale_TG, key_scale_TG)
        return output_TNE

    @staticmethod
    def backward(ctx, *gradients):
        *inputs, inverse_TNB, borders, query_scale_TG, key_scale_TG = ctx.saved_tensors
        of_query, of_key, *others = run_rule_backward(gradients[0], inputs, inverse_TNB, borders)
        of_query = normalize_heads_backward(of_query, inputs[0], query_scale_TG)
        of_key = normalize_heads_backward(of_key, inputs[1], key_scale_TG)
        return of_query, of_key, *others, None


class _KnownInverse(torch.autograd.Function):
    """Return `inverse`, known from forward, of I + `matrix`, with the gradient of inverting it."""

    @staticmethod
    def forward(ctx, matrix, inverse):
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, *gradients):
        transposed = ctx.saved_tensors[0].mT
        return -transposed @ gradients[0] @ transposed, None


def run_rule_backward(
    gradient_TNE: torch.Tensor,
    inputs: list[torch.Tensor],
    inverse_TNB: torch.Tensor,
    borders: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of `inputs`, the first five of `run_rule`."""
    again = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        query_TGD, key_TGD, value_TNE, decay_TN, beta_TN = again
        output_TNE, _ = run_rule(
            query_TGD, key_TGD, value_TNE, decay_TN, beta_TN, borders, inverse_TNB
        )
    return torch.autograd.grad(output_TNE, again, gradient_TNE)


def run_rule(
    query_TGD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TNE: torch.Tensor,
    decay_TN: torch.Tensor,
    beta_TN: torch.Tensor,
    borders: torch.Tensor,
    inverse_TNB: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [T, N, E], and the rows [T, N, B] of chunks' inverted triangles.

    Heads of q and k have length 1. Chunks divide the pack; other samples' tokens are masked.

    Args:
        inverse_TNB: rows of an earlier run, if any.
    """
    tokens, heads, _ = value_TNE.shape
    size, dtype = query_TGD.shape[-1], value_TNE.dtype
    padding = -tokens % CHUNK
    repeats = heads // query_TGD.shape[1]

    def cut(rows: torch.Tensor) -> torch.Tensor:
        """Return rows [T, N, ...] as chunks, float32 [N, K, B, ...]."""
        padded = F.pad(rows.float(), (0, 0) * (rows.dim() - 1) + (0, padding))
        return padded.unflatten(0, (-1, CHUNK)).movedim(2, 0)

    query, key = (cut(x.repeat_interleave(repeats, 1)) for x in (query_TGD, key_TGD))
    value, decay, beta = cut(value_TNE), cut(decay_TN), cut(beta_TN).unsqueeze(-1)
    query = query * size**-0.5
    samples_KB = locate_tokens(borders, tokens + padding)[1].unflatten(0, (-1, CHUNK))
    last_K = samples_KB[:, -1]
    # The state that enters a chunk is of the sample that the previous chunk ends with.
    entering_K = F.pad(last_K[:-1], (1, 0), value=-1)
    reads_KB = samples_KB == entering_K.unsqueeze(1)
    writes_KB, keeps_K = samples_KB == last_K.unsqueeze(1), entering_K == last_K
    is_seen_KBB = (samples_KB.unsqueeze(2) == samples_KB.unsqueeze(1)).tril()
    total = decay.cumsum(-1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~is_seen_KBB, -torch.inf)
    between = between.exp()
    triangle = (beta * key) @ key.mT * between
    if inverse_TNB is None:
        identity = torch.eye(CHUNK, device=triangle.device)
        inverse = torch.linalg.solve_triangular(triangle, identity, upper=False, unitriangular=True)
    else:
        inverse = _KnownInverse.apply(triangle.tril(-1), cut(inverse_TNB))
    new_value = inverse @ (beta * value)
    read_scale = (total.exp() * reads_KB).unsqueeze(-1)
    old_key = inverse @ (beta * key * read_scale)
    query_of_state, within = query * read_scale, query @ key.mT * between
    key_to_state = key * ((total[..., -1:] - total).exp() * writes_KB).unsqueeze(-1)
    kept = (total[..., -1].exp() * keeps_K)[..., None, None]
    state, outputs = value.new_zeros(heads, size, value.shape[-1]), list[torch.Tensor]()
    for chunk in range(len(samples_KB)):
        written = new_value[:, chunk] - old_key[:, chunk] @ state
        outputs.append(query_of_state[:, chunk] @ state + within[:, chunk] @ written)
        state = state * kept[:, chunk] + key_to_state[:, chunk].mT @ written
    output_TNE = torch.cat(outputs, 1).movedim(0, 1)[:tokens]
    inverse_TNB = inverse.detach().flatten(1, 2).movedim(0, 1)[:tokens]
    return output_TNE.to(dtype).contiguous(), inverse_TNB.to(dtype).contiguous()
