"""LoRA adapters on the linears of layers and projectors: y = x W + scale * (x A) B.

A linear may join several checkpoint linears (pieces), as q, k and v. Each adapted piece has an A
and a B. They run as two products, with A's stacked and B's in the rows of their outputs.

Tensor-parallel ranks replicate A and divide B for column-parallel linears, and the reverse for
row-parallel linears. The thin activations between them are exchanged; with sequence parallelism
replicated matrices see this rank's part of the sequence, and their gradients are summed over ranks.

Shapes: S sequence, B batch, I inputs and O outputs of a linear on this rank, P outputs of a piece,
r rank of an adapter, R total rank of the linear's adapters, G groups of W output rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.vlm.model.tensor_parallel import DividedModule, divide
from omnibal.model.adapter_settings import AdapterConfig, Linear

ADAPTERS = ".adapters."  # in names of adapter parameters only
_Forward = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


class Adapter(DividedModule):
    """Adapter of one piece: A [r, I] and B [P, r], as in PEFT.

    Args:
        divides_inputs: whether tensor-parallel ranks divide A's inputs rather than B's outputs.
        sequence_parallel: whether core sums the replicated matrix's gradients over tensor ranks.
    """

    def __init__(
        self,
        rank: int,
        inputs: int,
        outputs: int,
        dtype: torch.dtype,
        *,
        divides_inputs: bool,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        self.lora_a = torch.nn.Parameter(torch.empty(rank, inputs, dtype=dtype))
        self.lora_b = torch.nn.Parameter(torch.zeros(outputs, rank, dtype=dtype))
        replicated: Any = self.lora_b if divides_inputs else self.lora_a
        replicated.sequence_parallel = sequence_parallel
        set_defaults_if_not_set_tensor_model_parallel_attributes(replicated)
        if divides_inputs:
            divide(self.lora_a, 1)
        else:
            divide(self.lora_b, 0)


class Adapters(MegatronModule):
    """Adapters of a layer or projector `owner`, by piece; they replace its linears' forward.

    Args:
        groups: query groups on this rank, by which core orders rows of q, k and v.
    """

    def __init__(
        self,
        owner: torch.nn.Module,
        config: TransformerConfig,
        linears: Sequence[Linear],
        adapters: AdapterConfig,
        groups: int,
    ) -> None:
        super().__init__(config)
        self.scale = adapters.scale
        for linear in linears:
            base: Any = owner.get_submodule(linear.module)
            self.tp_group = base.tp_group
            rows = OutputRows.of_linear(linear, len(base.weight), groups)
            widths = compress(rows.widths, rows.adapted)
            for piece, width in zip(linear.adapted_pieces, widths, strict=True):
                adapter = Adapter(
                    adapters.rank,
                    base.weight.shape[1],
                    rows.groups * width,
                    base.weight.dtype,
                    divides_inputs=linear.divides_inputs,
                    sequence_parallel=base.sequence_parallel,
                )
                self.add_module(piece.name, adapter)
            # Replaced in place: in a wrapper the base's weights would have other checkpoint names.
            base.forward = partial(self._run, base, base.forward, linear, rows)

    def _run(
        self,
        base: Any,
        forward: _Forward,
        linear: Linear,
        rows: "OutputRows",
        hidden_SBI: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a linear's output with its adapters', [S, B, O], and the bias."""
        own = [self.get_submodule(piece.name) for piece in linear.adapted_pieces]
        hidden_SBI, low_SBR = _Down.apply(hidden_SBI, *(adapter.lora_a for adapter in own))
        output_SBO, bias_O = forward(hidden_SBI)
        if base.tp_group.size() > 1:
            exchange = _EXCHANGES[linear.divides_inputs, base.sequence_parallel]
            low_SBR = exchange(low_SBR, group=base.tp_group)
        matrices = (adapter.lora_b for adapter in own)
        return _Up.apply(output_SBO, low_SBR, rows, self.scale, *matrices), bias_O


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputRows:
    """Rows of every piece's outputs in a linear on this rank.

    Every group has the same number of rows of a piece: core's query groups for q, k and v.
    """

    groups: int
    widths: tuple[int, ...]  # outputs of every piece in a group
    adapted: tuple[bool, ...]  # whether a piece has an adapter

    @classmethod
    def of_linear(cls, linear: Linear, outputs: int, groups_of_heads: int) -> "OutputRows":
        """Return the rows of a linear with this number of outputs and head groups on the rank."""
        groups = groups_of_heads if len(linear.pieces) > 2 else 1  # q, k and v
        # In proportion, as encoder heads may be padded.
        whole = sum(piece.outputs for piece in linear.pieces)
        widths = tuple(outputs * piece.outputs // whole // groups for piece in linear.pieces)
        return cls(
            groups=groups, widths=widths, adapted=tuple(piece.is_adapted for piece in linear.pieces)
        )

    def join(self, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return all B's in one matrix [O, R], with zeros outside each piece's rows."""
        if len(self.widths) == 1:
            return matrices[0]
        rank = matrices[0].shape[1]
        size = (self.groups, sum(self.widths), rank * len(matrices))
        joined_GWR = matrices[0].new_zeros(size)
        for own, matrix in zip(self._blocks(joined_GWR, rank), matrices, strict=True):
            own.copy_(matrix.view(own.shape))
        return joined_GWR.flatten(0, 1)

    def split_matrices(self, joined_OR: torch.Tensor, rank: int) -> tuple[torch.Tensor, ...]:
        """Return the matrices [P, r] of a joined B, by adapted piece."""
        if len(self.widths) == 1:
            return (joined_OR,)
        blocks = self._blocks(joined_OR.unflatten(0, (self.groups, -1)), rank)
        return tuple(block.flatten(0, 1) for block in blocks)

    def _blocks(self, joined_GWR: torch.Tensor, rank: int) -> Iterator[torch.Tensor]:
        """Yield every adapted piece's block of a joined B: its rows in all groups, r columns."""
        first = column = 0
        for width, is_adapted in zip(self.widths, self.adapted, strict=True):
            if is_adapted:
                yield joined_GWR[:, first : first + width, column : column + rank]
                column += rank
            first += width


# Exchanges of A's outputs over tensor-parallel ranks, by (`divides_inputs`, `sequence_parallel`).
_EXCHANGES = {
    (True, True): reduce_scatter_to_sequence_parallel_region,
    (True, False): reduce_from_tensor_model_parallel_region,
    (False, True): gather_from_sequence_parallel_region,
    (False, False): copy_to_tensor_model_parallel_region,
}


class _Down(torch.autograd.Function):
    """Return a linear's input, and its product with all A's: [S, B, I] and [S, B, R].

    Backward adds the product's gradient to the linear's, if any. Saves the input, not stacked A's.
    """

    @staticmethod
    def forward(ctx, hidden_SBI, *matrices):
        ctx.save_for_backward(hidden_SBI, *matrices)
        low_SBR = hidden_SBI @ _stack_matrices(matrices).t()
        same = hidden_SBI.view_as(hidden_SBI)
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(same)
        return same, low_SBR

    @staticmethod
    def backward(ctx, *gradients):
        hidden_SBI, *matrices = ctx.saved_tensors
        gradient_SBI, gradient_SBR = gradients
        low = gradient_SBR.reshape(-1, gradient_SBR.shape[-1])
        of_hidden = None
        if ctx.needs_input_grad[0]:
            # In place: nothing else reads the gradient that the linear has just made.
            gradient_SBI.view(-1, gradient_SBI.shape[-1]).addmm_(low, _stack_matrices(matrices))
            of_hidden = gradient_SBI
        of_matrices = low.t() @ hidden_SBI.reshape(-1, hidden_SBI.shape[-1])
        return of_hidden, *of_matrices.chunk(len(matrices))


def _stack_matrices(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    return matrices[0] if len(matrices) == 1 else torch.cat(list(matrices))


class _Up(torch.autograd.Function):
    """Return a linear's output plus the adapters', [S, B, O]."""

    @staticmethod
    def forward(ctx, output_SBO, low_SBR, rows, scale, *matrices):
        ctx.save_for_backward(low_SBR, *matrices)
        ctx.rows, ctx.scale = rows, scale
        added = torch.addmm(
            output_SBO.reshape(-1, output_SBO.shape[-1]),
            low_SBR.reshape(-1, low_SBR.shape[-1]),
            rows.join(matrices).t(),
            alpha=scale,
        )
        return added.view(output_SBO.shape)

    @staticmethod
    def backward(ctx, *gradients):
        low_SBR, *matrices = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, gradients[0].shape[-1])
        of_low = (gradient @ ctx.rows.join(matrices)) * ctx.scale
        joined_OR = gradient.t() @ (low_SBR.reshape(-1, low_SBR.shape[-1]) * ctx.scale)
        of_matrices = ctx.rows.split_matrices(joined_OR, matrices[0].shape[1])
        return gradients[0], of_low.view(low_SBR.shape), None, None, *of_matrices
