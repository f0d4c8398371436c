"""Types of counting: a device's rates, and what one unit's forward pass counts on it.

Vectors have one entry per feature of a micro-batch (`omnibal.model.units.feature_names`).
"""

import math
from dataclasses import dataclass

import numpy as np

from omnibal.cost.attention_rates import TILE, AttentionTimes
from omnibal.cost.shaped_rates import ProductTimes
from omnibal.model.config import Precision

ELEMENT_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp8": 2}
FP32_BYTES = 4  # of a number


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """Names of the features that counts are linear in."""

    names: tuple[str, ...]

    def one(self, name: str) -> np.ndarray:
        """Vector of one of a feature and none of the others, [features]."""
        vector = np.zeros(len(self.names))
        vector[self.names.index(name)] = 1.0
        return vector

    @property
    def none(self) -> np.ndarray:
        """Vector of zeros, [features]."""
        return np.zeros(len(self.names))


@dataclass(frozen=True, slots=True)
class Product:
    """Matrix product of forward, of inputs [rows, inner] and weights [inner, outer]."""

    rows: np.ndarray
    """Rows per feature of a micro-batch, [features]."""
    inner: float
    outer: float
    groups: int = 1
    """Products of these sizes that share the rows evenly, in one kernel, as experts do."""
    is_fp32: bool = False
    """Whether it is in fp32 whatever the precision, as routers are."""
    is_fp8: bool = False
    """Whether it is in FP8, with the casts of both operands."""
    name: str = ""
    """Linear of the unit, as `omnibal.model.adapters.linears` names those that have names."""
    given: str = ""
    """Line of what the unit keeps that is its input."""

    @property
    def flops(self) -> np.ndarray:
        """Operations, [features]."""
        return self.rows * 2 * (self.inner * self.outer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attended:
    """Softmax attention of forward, in one kernel; vectors are [features]."""

    pairs: np.ndarray
    """Pairs of a query and a key that it sees: of causal attention half of the square."""
    rows: np.ndarray
    """Queries."""
    heads: float
    elements: float
    """Elements of q and k of a head, and of v."""
    causal: bool

    @property
    def flops(self) -> np.ndarray:
        """Operations, [features]."""
        return self.pairs * 2 * (self.heads * self.elements)

    @property
    def tiled_flops(self) -> np.ndarray:
        """Operations of whole tiles of keys, of which a query leaves half of one empty."""
        return (self.pairs + TILE / 2 * self.rows) * 2 * (self.heads * self.elements)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Rates:
    """What products in FP8 cost on a device (`omnibal.model.fp8.Fp8`)."""

    flops_per_ms: float
    cast_bytes: int
    """Bytes read and written to quantise an element."""
    cast_kernels: int
    """Kernels that quantise a tensor."""
    weight_bytes: int
    """Bytes of a weight's FP8 copies, less those of bf16 where that is not kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Rates of one device, and how its tensor-parallel group divides a unit."""

    flops_per_ms: float
    """Rate of attention, and of matrix products where their times were not measured."""
    fp32_flops_per_ms: float
    """Rate of products in fp32."""
    fp8: Fp8Rates | None = None
    """Rates of products in FP8; None where no product is."""
    product_times: ProductTimes | None
    """Times of matrix products by shape, where they were measured."""
    grouped_times: ProductTimes | None = None
    """Times of grouped products by shape, where they were measured."""
    attention_times: AttentionTimes | None = None
    """Times of attention, where they were measured."""
    bytes_per_ms: float
    """Bytes that element-wise kernels read and write per millisecond."""
    streamed_bytes_per_ms: float
    """Bytes per millisecond of contiguous reads and writes of weights and gradients."""
    collective_bytes_per_ms: float
    """Bytes that a rank sends in tensor-parallel collectives per millisecond."""
    pass_ms: float
    """Time of a collective's pass round the ring besides that of its bytes, as measured; else 0."""
    kernel_ms: float
    expert_bytes_per_ms: float = math.inf
    """Bytes of routed tokens, of all ranks' experts, that an all-to-all of the expert-parallel
    group moves per millisecond for each of its ranks; those for the rank itself count as well."""
    expert_pass_ms: float = 0.0
    """Time of such an all-to-all besides that of its bytes."""
    tensor: int
    sequence_parallel: bool
    """Whether the language model runs under Megatron's sequence parallelism."""
    element_bytes: int
    gradient_bytes: int = 4
    """Bytes of a gradient as it is summed: Megatron does so in fp32 unless it is told otherwise."""
    overlaps_tensor: bool = False
    """Whether the exchange of tensor-parallel ranks runs beside products."""
    fused_loss: bool = True
    """Whether one kernel makes the loss and the gradient of the logits."""
    loss_slowdown: float = 1.0
    """Time of a byte in kernels of the loss over that in other element-wise ones."""
    fused_routing: bool = False
    """Whether tokens are routed and permuted by fused kernels."""
    sample_tokens: int | None = None
    """Tokens of every sample that the language model attends over in one kernel, where all are
    alike; None for samples of any length."""
    permute_slowdown: float = 1.0
    """Time of a byte in kernels that permute tokens over that in other element-wise ones."""
    expert: int = 1
    """Ranks that share out the experts of a layer."""

    @property
    def whole(self) -> float:
        """Share of the language model's tensors between parallel blocks that a rank holds."""
        return 1 / self.tensor if self.sequence_parallel else 1.0

    @property
    def sent(self) -> float:
        """Share of a tensor that a rank sends in an all-gather or a reduce-scatter (a ring)."""
        return (self.tensor - 1) / self.tensor


@dataclass(frozen=True, slots=True)
class Kept:
    """One line of the table of what a unit keeps from its forward to its backward."""

    what: str
    made_by: str
    """Module within the unit that makes it, by Megatron-core's names, or the fused operation
    between modules; empty where the unit is given it."""
    bytes: np.ndarray
    """Bytes on one device, [features]."""
    for_weights: bool = False
    """Whether only the weights' gradient needs it, so that a frozen unit lets it go."""


@dataclass(frozen=True, slots=True)
class Working:
    """Working memory at a moment of a unit's backward, besides all that the unit keeps."""

    bytes: np.ndarray
    """Bytes of the micro-batch's tensors, [features]."""
    weight: float = 0
    """Elements of the weight whose gradient is made then: core has room for one in the weight's
    own type, also where it is added to the fp32 buffer."""
    gone: tuple[str, ...] = ()
    """Lines of what the unit keeps that it has let go of by then."""
    after: int = 0
    """Products, from the unit's last one on, whose outputs' gradients it has let go of by then,
    unless those of their weights come later."""
    of_words: bool = False
    """Whether the weight is an embedding's, which is no product's."""
    beside_logits: bool = False
    """Whether the loss writes a gradient beside the logits, as only an unfused one does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collectives:
    """What a rank sends to those it shares a unit with; bytes are [features], 0.0 for none."""

    forward_bytes: np.ndarray | float = 0.0
    backward_bytes: np.ndarray | float = 0.0
    again_bytes: np.ndarray | float = 0.0
    """Bytes sent in backward besides, to gather inputs again where weights are trained."""
    passes: int = 0
    """All-gathers and reduce-scatters of forward; an all-reduce is one of each."""
    back_passes: int = 0
    passes_again: int = 0
    gathered_bytes: np.ndarray | float = 0.0
    """Widest input that is gathered, for which core has room once for all layers of a stage."""
    exchanged_bytes: np.ndarray | float = 0.0
    """Bytes of tensors that expert-parallel ranks exchange in forward, and as many in backward."""
    exchanges: int = 0
    """All-to-alls between expert-parallel ranks in forward."""
    back_exchanges: int = 0

    def __add__(self, other: "Collectives") -> "Collectives":
        return Collectives(
            forward_bytes=self.forward_bytes + other.forward_bytes,
            backward_bytes=self.backward_bytes + other.backward_bytes,
            again_bytes=self.again_bytes + other.again_bytes,
            passes=self.passes + other.passes,
            back_passes=self.back_passes + other.back_passes,
            passes_again=self.passes_again + other.passes_again,
            gathered_bytes=np.maximum(self.gathered_bytes, other.gathered_bytes),
            exchanged_bytes=self.exchanged_bytes + other.exchanged_bytes,
            exchanges=self.exchanges + other.exchanges,
            back_exchanges=self.back_exchanges + other.back_exchanges,
        )


def all_reduced(
    device: Device, forward_bytes: np.ndarray, backward_bytes: np.ndarray, times: int = 1
) -> Collectives:
    """All-reduces of tensors of these bytes, so many times each way.

    An all-reduce is a reduce-scatter and an all-gather.
    """
    return Collectives(
        forward_bytes=2 * times * device.sent * forward_bytes,
        backward_bytes=2 * times * device.sent * backward_bytes,
        passes=2 * times,
        back_passes=2 * times,
    )


FIRST_OUTPUT, SECOND_OUTPUT = "first norm's output", "second norm's output"
"""Lines of what a layer keeps: inputs of its two blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Operations and bytes of forward on one device; vectors are [features]."""

    products: tuple[Product, ...]
    attended: tuple[Attended, ...] = ()
    """Softmax attention."""
    other_attention_flops: np.ndarray | float = 0.0
    """Operations of attention that is not softmax's."""
    moved_bytes: np.ndarray
    """Bytes that element-wise kernels of forward read and write."""
    back_moved_bytes: np.ndarray
    """Bytes that element-wise kernels of backward read and write."""
    collectives: Collectives = Collectives()
    kernels: int
    kept: tuple[Kept, ...]
    """What is kept where the unit has a backward, a unit's input included."""
    working: tuple[Working, ...] = ()
    """Moments of backward at one of which working memory is largest; of a block with nothing of
    what earlier blocks keep gone."""
    expert_parameters: int = 0
    """Parameters of experts, on this device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block(Work):
    """Attention or feed-forward of a language layer, between the norm before it and the sum after
    it."""

    divided_parameters: int
    """Parameters that tensor-parallel ranks divide, before they do."""
    whole_parameters: int = 0
    """Parameters that every tensor-parallel rank has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts(Work):
    """Counts of one unit, whose parameters include those of experts."""

    boundary_bytes: np.ndarray
    output_bytes: np.ndarray
    late_working: tuple[Working, ...] = ()
    """More of them where gradients of weights come later, as what these need is there then."""
    forward_working: tuple[Working, ...] = ()
    """Moments of forward, where the unit has no backward and keeps nothing."""
    passing_bytes: np.ndarray | float = 0.0
    """What is there as long as the micro-batch runs forward, none of it kept."""
    parameters: int
    adapter_parameters: int = 0
    """Parameters of adapters, part of `parameters`: all that is trained of the unit."""
    begins_with_weights: bool = False
    """Whether the unit needs no input gradient unless an earlier unit is trained."""

    @property
    def attention_flops(self) -> np.ndarray:
        """Operations of all attention, [features]."""
        softmax = np.sum([0 * self.moved_bytes, *(one.flops for one in self.attended)], axis=0)
        return softmax + self.other_attention_flops

    @property
    def matmul_flops(self) -> np.ndarray:
        """Operations of all matrix products, [features]."""
        return np.sum([0 * self.moved_bytes, *(one.flops for one in self.products)], axis=0)

    def kept_lines(self, *, trained: bool) -> tuple[Kept, ...]:
        """What is kept; without what only weights need, where they are frozen."""
        return tuple(line for line in self.kept if trained or not line.for_weights)

    def working_bytes(self, each: Working, *, trained: bool) -> np.ndarray:
        """Bytes at a moment besides all that is kept, without the weight's gradient, [features]."""
        gone = [line.bytes for line in self.kept_lines(trained=trained) if line.what in each.gone]
        return each.bytes - np.sum([0 * each.bytes, *gone], axis=0)

    def kept_bytes(self, *, trained: bool) -> np.ndarray:
        """Bytes of those lines, [features]."""
        lines = self.kept_lines(trained=trained)
        return np.sum([0 * self.moved_bytes, *(line.bytes for line in lines)], axis=0)


def whole_inputs(device: Device, block_bytes: np.ndarray) -> Collectives:
    """Collectives of a block whose input and output are of so many bytes when whole.

    Both are gathered and scattered either way, or all-reduced (Korthikanti et al. 2022, arXiv
    2205.05198, section 4.2.2). What is gathered for products in FP8 is sent in FP8.
    """
    sequence, sent_bytes = device.sequence_parallel, device.sent * block_bytes
    gathered_bytes = sent_bytes / 2 if sequence and device.fp8 is not None else sent_bytes
    return Collectives(
        forward_bytes=sent_bytes + gathered_bytes,
        backward_bytes=sent_bytes + gathered_bytes,
        again_bytes=gathered_bytes if sequence else 0.0,
        passes=2,
        back_passes=2,
        passes_again=1 if sequence else 0,
        gathered_bytes=block_bytes if sequence else 0.0,
    )
