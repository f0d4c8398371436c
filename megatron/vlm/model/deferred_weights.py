"""Backwards in two parts: gradients of what comes in now, products for weight gradients later.

A schedule may run the two apart (Qi et al. 2023, arXiv 2401.10241): the stage before waits for the
first, and the second fills time in which a stage would stand idle. The first part is autograd's
backward, in which trained linears leave their weights' products for the second: `take` gives those
of one micro-batch. All else is of the first: biases, norms, embeddings, attention, routers, and the
thin matrices of adapters, whose products cost less than it would to keep what they need.

Products are core's own, in the order in which a whole backward has them, and each adds to the
buffer of its parameter: parts that come in micro-batch order give the same bits as whole backwards.
Only a matrix that is both head and token embedding in one stage sums in another order.

What a linear keeps between the parts is its input and the gradient of its output, as they are on
this rank: where ranks divide the sequence between linears, this rank's part. In values, of S
positions on T tensor-parallel ranks, with q, k and v of A, K and K and a feed-forward of F:

| unit | inputs | gradients of outputs |
|---|---|---|
| language layer | (2 S H + S A + S F) / T | S (A + 2 K + 2 F + 2 H) / T |
| without sequence parallelism | 2 S H + S (A + F) / T | S (A + 2 K + 2 F) / T + 2 S H |
| experts of a layer, R rows | R (H + F) | R (2 F + H) |
| encoder layer | 2 S H + S (A + F) / T | S (3 A + F) / T + 2 S H |
| projector, H to F to E wide, S tokens | S (H + F / T) | S (F / T + E) |
| head, L loss positions | L H | L W / T |

Beside experts a layer keeps what it has of attention. A feed-forward of an encoder with a gate has
2 F among the gradients. An embedding, a frozen linear and one with an adapter keep nothing.

Shapes: R rows (tokens), I inputs and O outputs of a product; the weight of a linear is [O, I], of
experts [X, O, I]. Rows may have several leading axes, of which the first is the sequence.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel import layers as core_layers

from omnibal.base.errors import UserError
from omnibal.job.plan import Plan
from omnibal.model.config import Provider

OnGradient = Callable[[torch.nn.Parameter], None]
"""Function that is told of a parameter whose gradient of a micro-batch is in its buffer."""


def check_two_parts(plan: Plan, provider: Provider) -> None:
    """Refuse backwards in two parts where weight gradients cannot come later."""
    given = f"the plan's schedule {plan.schedule.name} runs backwards in two parts"
    if plan.precision == "fp8":
        raise UserError(
            f"{given}, and its precision is fp8: plan with --precision bf16 or --schedule 1f1b"
        )
    if plan.parallel.sharded > 1:
        raise UserError(
            f"{given}, and {plan.parallel.sharded} ranks divide its weights, whose gradients are "
            "summed with every whole backward: plan with whole weights or --schedule 1f1b"
        )
    if provider == "te":
        raise UserError(
            f"{given}, which this project's linears alone do, and --provider te was given: leave "
            "--provider out, or plan with --schedule 1f1b"
        )


class Product:
    """A product of rows with a weight, and the two products of its backward."""

    def outputs(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Product of [R, I] with a weight: [R, O]."""
        raise NotImplementedError

    def input_gradient(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Gradient of the rows, from that of the outputs."""
        raise NotImplementedError

    def add_weight_gradient(
        self, rows: torch.Tensor, gradient: torch.Tensor, buffer: torch.Tensor
    ) -> None:
        """Add the weight's gradient to a buffer of its shape."""
        raise NotImplementedError

    def kept(self, rows: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What to keep of rows and gradient until their product."""
        return rows, gradient

    def begin(self, late: "LateProduct") -> dist.Work | None:
        """Begin to make what is kept whole again; collective where ranks keep parts."""
        return None


@dataclass(slots=True, eq=False)
class LateProduct:
    """One product for the gradient of a weight, not yet run."""

    product: Product
    weight: torch.nn.Parameter
    rows: torch.Tensor
    gradient: torch.Tensor
    """Gradient of the outputs."""
    _coming: dist.Work | None = None

    def begin(self) -> "LateProduct":
        """Begin what must be over before `add`."""
        self._coming = self.product.begin(self)
        return self

    def add(self) -> None:
        """Add the gradient to core's buffer."""
        if self._coming is not None:
            self._coming.wait()
        buffer: torch.Tensor = vars(self.weight)["main_grad"]
        self.product.add_weight_gradient(self.rows, self.gradient, buffer)


class DeferredWeights:
    """Weight gradients of a stage whose products run apart from the backwards that they are of."""

    def __init__(self, parameters: Collection[torch.nn.Parameter]) -> None:
        self.parameters = frozenset(parameters)
        self.on_gradient: OnGradient | None = None
        """Told of every parameter in the last part of a step, where set."""
        self._late: list[LateProduct] = []
        # Autograd goes back through a product for what it is given; that may want no gradient.
        self._wanted = torch.empty(0, requires_grad=True)

    def multiply(
        self,
        product: Product,
        rows: torch.Tensor,
        weight: torch.nn.Parameter,
        bias_O: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply rows with a weight whose gradient is to come later, and add a bias."""
        use = _Use(product, weight, self._late)
        outputs: torch.Tensor = _InTwoParts.apply(rows, bias_O, self._wanted, use)
        return outputs

    def take(self) -> list[LateProduct]:
        """Take the products that backwards have left since the last time."""
        taken = list(self._late)
        self._late.clear()
        return taken

    @torch.no_grad()
    def add(self, late: list[LateProduct], *, is_last: bool) -> None:
        """Run products, which are gone after, in their order, the last of a step or not; collective
        over tensor-parallel ranks where these divide the sequence."""
        late.reverse()  # as each goes from the end
        ahead = late.pop().begin() if late else None
        while ahead is not None:
            # Ranks exchange what the next one needs while this one runs.
            now, ahead = ahead, late.pop().begin() if late else None
            now.add()
            if is_last and self.on_gradient is not None:
                self.on_gradient(now.weight)


@dataclass(frozen=True, slots=True, eq=False)
class _Use:
    """Use of a weight, unknown to autograd, which else would have a gradient for it."""

    product: Product
    weight: torch.nn.Parameter
    late: list[LateProduct]


class _InTwoParts(torch.autograd.Function):
    """A product with a weight and a bias, which leaves the weight's gradient to be made later."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        bias_O: torch.Tensor | None,
        wanted: torch.Tensor,
        use: _Use,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.use = use
        outputs = use.product.outputs(rows, use.weight)
        return outputs if bias_O is None else outputs + bias_O

    @staticmethod
    def backward(ctx, *gradients):
        [rows], use = ctx.saved_tensors, ctx.use
        of_rows = of_bias = None
        if ctx.needs_input_grad[0]:
            of_rows = use.product.input_gradient(gradients[0], use.weight)
        gradient = gradients[0].contiguous()
        if ctx.needs_input_grad[1]:
            of_bias = gradient.flatten(0, -2).sum(0)
        # Detached: the input's own graph is to go with this part.
        kept = use.product.kept(rows.detach(), gradient)
        use.late.append(LateProduct(use.product, use.weight, *kept))
        return of_rows, of_bias, None, None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ParallelProduct(Product):
    """The product of a linear that tensor-parallel ranks divide, as core has it.

    Args:
        adds_up: whether each product adds to the buffer itself, unrounded.
        sums_inputs: whether the input's gradient is summed over ranks.
        group: over which the sequence is divided, and the linear's outputs or inputs.
        gathers_rows: whether each rank has a part of the sequence of the input.
        gathers_gradient: whether, of the output, which ranks sum, each then has a part of the
            sequence.
    """

    adds_up: bool
    sums_inputs: bool
    group: dist.ProcessGroup
    gathers_rows: bool
    gathers_gradient: bool

    def outputs(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.gathers_rows:
            size = [len(rows) * self.group.size(), *rows.shape[1:]]
            whole = get_global_memory_buffer().get_tensor(size, rows.dtype, "mpu")
            dist.all_gather_into_tensor(whole, rows.contiguous(), group=self.group)
            rows = whole
        return rows @ weight.t()

    def input_gradient(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Gradient of the input; of this rank's part of the sequence, where it has one."""
        of_rows = gradient @ weight
        if self.sums_inputs:
            dist.all_reduce(of_rows, group=self.group)
        if not self.gathers_rows:
            return of_rows
        own = of_rows.new_empty(len(of_rows) // self.group.size(), *of_rows.shape[1:])
        dist.reduce_scatter_tensor(own, of_rows, group=self.group)
        return own

    def kept(self, rows: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.gathers_gradient:
            gradient = gradient.chunk(self.group.size())[self.group.rank()].clone()
        return rows, gradient

    def begin(self, late: LateProduct) -> dist.Work | None:
        if self.gathers_rows:
            late.rows, coming = self._gathered(late.rows)
        elif self.gathers_gradient:
            late.gradient, coming = self._gathered(late.gradient)
        else:
            coming = None
        return coming

    def _gathered(self, own: torch.Tensor) -> tuple[torch.Tensor, dist.Work | None]:
        whole = own.new_empty(len(own) * self.group.size(), *own.shape[1:])
        return whole, dist.all_gather_into_tensor(
            whole, own.contiguous(), group=self.group, async_op=True
        )

    def add_weight_gradient(
        self, rows: torch.Tensor, gradient: torch.Tensor, buffer: torch.Tensor
    ) -> None:
        rows_RI, gradient_RO = rows.flatten(0, -2), gradient.flatten(0, -2)
        if self.adds_up:
            core_layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(
                rows_RI, gradient_RO, buffer
            )
        else:
            buffer.add_(gradient_RO.t() @ rows_RI)


PARALLEL_LINEARS = (ColumnParallelLinear, RowParallelLinear)
"""Linears of layers and projectors, and the head."""


def defer_linear(linear: Any, deferred: DeferredWeights) -> None:
    """Have a trained linear, one of `PARALLEL_LINEARS`, leave its weight's gradient for later."""
    is_row = isinstance(linear, RowParallelLinear)

    def forward(
        input: torch.Tensor,
        weight: torch.nn.Parameter,
        bias: torch.Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        **of_core: Any,
    ) -> torch.Tensor:
        assert weight in deferred.parameters
        product = ParallelProduct(
            adds_up=linear.gradient_accumulation_fusion,
            sums_inputs=allreduce_dgrad,
            group=linear.tp_group,
            gathers_rows=sequence_parallel,
            gathers_gradient=is_row and linear.sequence_parallel,
        )
        return deferred.multiply(product, input, weight, bias)

    linear._forward_impl = forward
