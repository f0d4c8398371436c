"""Split backward: input gradients now, weight-gradient products later.

Pipeline schedules run both parts separately (Qi et al. 2023, arXiv 2401.10241): the previous stage
waits for the first, and the second fills idle time. The first part is autograd's backward; trained
linears defer their weight products, and `take` returns a micro-batch's products. Biases, norms,
embeddings, attention, routers and adapters stay in the first part.

Deferred products are core's and add to the parameter's buffer in micro-batch order, so results are
bitwise equal, except of a matrix that is head and token embedding of one stage.

A linear keeps this rank's input and output gradient. In values, for S positions on T
tensor-parallel ranks, widths H of hidden states, A of q, K of k and v, F of the feed-forward:

| unit | inputs | gradients of outputs |
|---|---|---|
| language layer | (2 S H + S A + S F) / T | S (A + 2 K + 2 F + 2 H) / T |
| without sequence parallelism | 2 S H + S (A + F) / T | S (A + 2 K + 2 F) / T + 2 S H |
| experts of a layer, R rows | R (H + F) | R (2 F + H) |
| encoder layer | 2 S H + S (A + F) / T | S (3 A + F) / T + 2 S H |
| projector, H to F to E wide, S tokens | S (H + F / T) | S (F / T + E) |
| head, L loss positions, W words | L H | L W / T |

Layers with experts also keep attention's values. A gated feed-forward of an encoder has 2 F among
the gradients. Embeddings, frozen linears and linears with adapters keep nothing.

Shapes: R rows (tokens), I inputs and O outputs of a product. The weight of a linear is [O, I], of
experts [X, O, I]. Rows may have several leading axes, the sequence first.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel import layers as core_layers

OnGradient = Callable[[torch.nn.Parameter], None]  # called when a gradient is in its buffer


class Product(ABC):
    """A product of rows [R, I] with a weight, [R, O], and both products of its backward."""

    @abstractmethod
    def outputs(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def input_gradient(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def weight_gradient(self, rows: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor: ...

    def add_weight_gradient(
        self, rows: torch.Tensor, gradient: torch.Tensor, buffer: torch.Tensor
    ) -> None:
        """Add the weight's gradient to a buffer of its shape."""
        buffer.add_(self.weight_gradient(rows, gradient))

    def shard(
        self, rows: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the parts of rows and gradient that this rank keeps for the deferred product."""
        return rows, gradient

    def begin(self, late: "LateProduct") -> dist.Work | None:
        """Begin gathering the parts of `shard` into `late`; return None if this rank has all."""
        return None


@dataclass(slots=True, eq=False)
class LateProduct:
    product: Product
    weight: torch.nn.Parameter
    rows: torch.Tensor  # part kept by `Product.shard`, gathered by `begin`
    gradient: torch.Tensor  # as `rows`, of the outputs
    _gather: dist.Work | None = None

    def begin(self) -> "LateProduct":
        """Begin the exchange that `add` needs, if any; return self."""
        self._gather = self.product.begin(self)
        return self

    def add(self) -> None:
        """Add the weight gradient to core's buffer; waits for the exchange."""
        if self._gather is not None:
            self._gather.wait()
        buffer: torch.Tensor = vars(self.weight)["main_grad"]
        self.product.add_weight_gradient(self.rows, self.gradient, buffer)


class DeferredWeights:
    """Deferred weight-gradient products of a stage's linears and experts."""

    def __init__(self, parameters: Collection[torch.nn.Parameter]) -> None:
        self.parameters = frozenset(parameters)
        self.on_gradient: OnGradient | None = None  # called in a step's last `add` only
        self.late: list[LateProduct] = []
        # An input of every product, so that autograd calls backward if rows need no gradient.
        self.trained = torch.empty(0, requires_grad=True)

    def take(self) -> list[LateProduct]:
        """Return the products deferred since the last call."""
        taken, self.late = self.late, []
        return taken

    @torch.no_grad()
    def add(self, late: list[LateProduct], *, is_last: bool) -> None:
        """Run and drop products in order; collective over ranks that divide the sequence."""
        last = {product.weight: product for product in late}  # a head may be used twice
        late.reverse()  # popped from the end, so that a product's tensors are freed after it
        following = late.pop().begin() if late else None
        while following is not None:
            # The next product's exchange overlaps with this product.
            product, following = following, late.pop().begin() if late else None
            product.add()
            if is_last and self.on_gradient is not None and product is last[product.weight]:
                self.on_gradient(product.weight)


def multiply(
    product: Product,
    rows: torch.Tensor,
    weight: torch.nn.Parameter,
    bias_O: torch.Tensor | None = None,
    deferred: DeferredWeights | None = None,
) -> torch.Tensor:
    """Return rows times weight plus bias; with `deferred`, the weight gradient is added later."""
    if deferred is None:
        return _Multiply.apply(product, rows, weight, bias_O, None, None)
    # Hidden from autograd, which would compute the weight's gradient.
    return _Multiply.apply(product, rows, None, bias_O, deferred.trained, (weight, deferred))


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, product, rows, weight, bias_O, trained, later):
        ctx.product, ctx.later = product, later
        # Only weight gradients need the rows.
        keeps_rows = later is not None or ctx.needs_input_grad[2]
        ctx.save_for_backward(rows if keeps_rows else None, weight)
        outputs = product.outputs(rows, weight if later is None else later[0])
        return outputs if bias_O is None else outputs + bias_O

    @staticmethod
    def backward(ctx, *gradients):
        (rows, weight), product = ctx.saved_tensors, ctx.product
        of_rows = of_weight = of_bias = None
        gradient = gradients[0].contiguous()
        if ctx.later is not None:
            weight, deferred = ctx.later
        if ctx.needs_input_grad[1]:
            of_rows = product.input_gradient(gradient, weight)
        if ctx.needs_input_grad[2]:
            of_weight = product.weight_gradient(rows, gradient)
        if ctx.needs_input_grad[3]:
            of_bias = gradient.flatten(0, -2).sum(0)
        if ctx.later is not None:
            # Detached, as the input's graph must be freed with this part.
            parts = product.shard(rows.detach(), gradient)
            deferred.late.append(LateProduct(product, weight, *parts))
        return None, of_rows, of_weight, of_bias, None, None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ParallelProduct(Product):
    """Core's product of a linear that tensor-parallel ranks divide."""

    accumulates: bool  # a fused kernel adds products to the buffer, unrounded
    sums_inputs: bool  # the input gradient is all-reduced over `group`
    group: dist.ProcessGroup  # ranks that divide the sequence and the linear
    gathers_rows: bool  # inputs are divided along the sequence, and gathered for the product
    gathers_gradient: bool  # outputs are reduce-scattered, so a rank keeps a part of the gradient

    def outputs(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.gathers_rows:
            size = [len(rows) * self.group.size(), *rows.shape[1:]]
            # Core's shared buffer: backward keeps this rank's part only.
            whole = get_global_memory_buffer().get_tensor(size, rows.dtype, "mpu")
            dist.all_gather_into_tensor(whole, rows.contiguous(), group=self.group)
            rows = whole
        return rows @ weight.t()

    def input_gradient(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the gradient of this rank's rows."""
        of_rows = gradient @ weight
        if self.sums_inputs:
            dist.all_reduce(of_rows, group=self.group)
        if not self.gathers_rows:
            return of_rows
        own = of_rows.new_empty(len(of_rows) // self.group.size(), *of_rows.shape[1:])
        dist.reduce_scatter_tensor(own, of_rows, group=self.group)
        return own

    def shard(
        self, rows: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.gathers_gradient:
            gradient = gradient.chunk(self.group.size())[self.group.rank()].clone()
        return rows, gradient

    def begin(self, late: LateProduct) -> dist.Work | None:
        if not (self.gathers_rows or self.gathers_gradient):
            return None
        own = late.rows if self.gathers_rows else late.gradient
        whole = own.new_empty(len(own) * self.group.size(), *own.shape[1:])
        if self.gathers_rows:
            late.rows = whole
        else:
            late.gradient = whole
        return dist.all_gather_into_tensor(whole, own.contiguous(), group=self.group, async_op=True)

    def weight_gradient(self, rows: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.flatten(0, -2).t() @ rows.flatten(0, -2)

    def add_weight_gradient(
        self, rows: torch.Tensor, gradient: torch.Tensor, buffer: torch.Tensor
    ) -> None:
        if self.accumulates:
            core_layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(
                rows.flatten(0, -2), gradient.flatten(0, -2), buffer
            )
        else:
            buffer.add_(self.weight_gradient(rows, gradient))


PARALLEL_LINEARS = (ColumnParallelLinear, RowParallelLinear)  # of layers, projectors and the head


def defer_linear(linear: Any, deferred: DeferredWeights) -> None:
    """Defer the weight gradient of a trained linear in `PARALLEL_LINEARS`."""
    is_row = isinstance(linear, RowParallelLinear)

    def forward(
        input: torch.Tensor,
        weight: torch.nn.Parameter,
        bias: torch.Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        **unused: Any,
    ) -> torch.Tensor:
        assert weight in deferred.parameters
        product = ParallelProduct(
            accumulates=linear.gradient_accumulation_fusion,
            sums_inputs=allreduce_dgrad,
            group=linear.tp_group,
            gathers_rows=sequence_parallel,
            gathers_gradient=is_row and linear.sequence_parallel,
        )
        return multiply(product, input, weight, bias, deferred)

    linear._forward_impl = forward  # core calls it in place of its own product
