"""Time of kernels on one device of a cluster: a constant plus a rate per feature.

Rates are data-sheet peaks times an efficiency, or measured (`omnibal.cost.shaped_rates`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np

from omnibal.cost.kernels import (
    ELEMENT_BYTES,
    GATHERED,
    Kernel,
    KernelPass,
    Kernels,
    MovingKind,
    unit_vectors,
)
from omnibal.cost.link_rates import all_to_all_line, pass_line
from omnibal.cost.setting import CostSetting
from omnibal.cost.shaped_rates import TILE, AttentionPass, AttentionTimes, LinearTime, ProductTimes
from omnibal.model.config import ClusterConfig, Precision
from omnibal.model.fp8 import Fp8
from omnibal.model.parallel import Group
from omnibal.model.rate_tables import CopyKind, CopyTime, ProductPass, Rates
from omnibal.model.runtime import OWN_RUNTIME, RuntimeOptions
from omnibal.model.units import feature_names

_BACKWARD_OF_ATTENTION = 2.5  # backward has five products to forward's two: scores are recomputed
# Exposed share of an expert-parallel exchange that overlaps with another micro-batch (assumed).
_EXPOSED_EXPERTS = 0.1
# Launches the host is late by, after it waited for a result (fitted together with `host_us`).
_LAUNCHES_BEHIND = 10
# Tile rows of a grouped product (CUTLASS's largest, 16 bit); on average half a tile is padding.
_TILE_ROWS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Rates of one device and its parallel sizes. Times are linear in features; feature 0 is 1."""

    features: Mapping[str, np.ndarray]  # unit vector of every feature, [features] each
    flops_per_ms: Mapping[str | None, float]  # by dtype; None: the job's, or bf16 under FP8
    fp8: Fp8 | None = None  # FP8 options, or None if no product is in FP8
    product_times: ProductTimes | None  # measured matrix product times by shape, if available
    grouped_times: ProductTimes | None = None  # grouped products, if available
    attention_times: AttentionTimes | None = None  # measured attention times, if available
    bytes_per_ms: Mapping[MovingKind, float]  # of memory-bound kernels by kind
    ring: LinearTime  # latency of a ring pass, and time per byte that a rank sends
    all_to_all: LinearTime  # exposed expert-parallel latency and time per routed byte
    kernel_ms: float  # fixed time of a kernel on the device
    tensor: int  # tensor-parallel size
    sequence_parallel: bool  # whether the language model uses Megatron's sequence parallelism
    pads: bool = True  # whether heads and vocabulary are padded to multiples of the tensor size
    element_bytes: int
    runtime: RuntimeOptions = OWN_RUNTIME
    expert: int = 1  # expert-parallel size
    host_ms: float = 0.0  # time of the host to launch a kernel, or 0 if not counted
    ring_host_ms: float = 0.0  # additional time of the host per ring pass

    @classmethod
    def from_setting(cls, setting: CostSetting) -> Self:
        """Return a device of the cluster, with measured rates if available."""
        model, cluster, parallel = setting.model, setting.cluster, setting.parallel
        precision, runtime = setting.precision, setting.runtime
        rates, element_bytes = cluster.measured_rates(precision), ELEMENT_BYTES[precision]
        fp8, flops_per_ms = None, dict[str | None, float]()
        if precision == "fp8":
            share = cluster.fp8_efficiency or cluster.matmul_efficiency
            flops_per_ms["fp8"], fp8 = cluster.tflops("fp8") * 1e9 * share, runtime.fp8
        streamed = streamed_bytes_per_ms(cluster, precision)
        precision = "bf16" if precision == "fp8" else precision  # of operations left in bf16
        plain, kernel_us = _fastest_copy(rates, "plain"), cluster.kernel_us
        bytes_per_ms = cluster.memory_gb_per_s * 1e6 * cluster.memory_efficiency
        # Without a separate latency, the measured rate includes it: use the data sheet's rate.
        if plain is not None and plain.latency_us is not None:
            bytes_per_ms, kernel_us = plain.bytes_per_ms, plain.latency_us
        bytes_per_ms /= runtime.elementwise_slowdown

        def copied_per_ms(kind: CopyKind) -> float:
            copy = _fastest_copy(rates, kind)
            return bytes_per_ms if copy is None else copy.bytes_per_ms

        # fp32 products regardless of the precision; without an fp32 peak, the precision's peak.
        fp32: Precision = "fp32" if "fp32" in cluster.peak_tflops else precision
        for dtype, name in ((None, precision), ("fp32", fp32)):
            flops_per_ms[dtype] = cluster.tflops(name) * 1e9 * cluster.matmul_efficiency
        mixtures = (kind.experts for kind in model.language.kinds)
        copies = max((moe.experts_per_token for moe in mixtures if moe is not None), default=1)
        experts = all_to_all_line(
            cluster, Group(parallel.expert), precision, copies=copies, dispatcher=runtime.dispatcher
        )
        to_others = (parallel.expert - 1) / parallel.expert
        waited = _EXPOSED_EXPERTS if runtime.overlap_experts else 1.0
        across = parallel.pipeline > 1 and parallel.world_size > cluster.gpus_per_node
        products, grouped, attention = _fit_times(rates)
        return cls(
            features=unit_vectors(feature_names(model)),
            flops_per_ms=flops_per_ms,
            fp8=fp8,
            product_times=products,
            grouped_times=grouped,
            attention_times=attention,
            bytes_per_ms={
                "element_wise": bytes_per_ms,
                "cast": bytes_per_ms,
                "permutation": copied_per_ms("permute"),
                "loss": copied_per_ms(
                    "fused_cross_entropy" if runtime.fused_loss else "cross_entropy"
                ),
                "accumulation": streamed,
            },
            ring=pass_line(cluster, Group(parallel.tensor), precision, blocking=True),
            all_to_all=LinearTime(
                fixed_ms=waited * experts.fixed_ms, each_ms=waited * experts.each_ms * to_others
            ),
            kernel_ms=kernel_us / 1e3,
            tensor=parallel.tensor,
            sequence_parallel=parallel.sequence_parallel,
            element_bytes=element_bytes,
            runtime=runtime,
            expert=parallel.expert,
            host_ms=cluster.host_us / 1e3 * runtime.host_slowdown,
            ring_host_ms=across * parallel.tensor * runtime.ring_host_us / 1e3,
        )

    @property
    def sequence_share(self) -> float:
        """Fraction of language activations on a rank between tensor-parallel blocks: 1/TP or 1."""
        return 1 / self.tensor if self.sequence_parallel else 1.0

    @property
    def accumulates(self) -> bool:
        """Whether measured weight gradients include their accumulation."""
        return self.product_times is not None and self.product_times.accumulates

    def ms(self, kernel: Kernel) -> np.ndarray:
        """Return the time of a kernel as coefficients, [features]; latency is in [0]."""
        match kernel.kind:
            case "product":
                time_ms = self._product_ms(kernel)
            case "attention" | "other_attention":
                time_ms = self._attention_ms(kernel)
            case "low_rank":
                bytes_ms = kernel.bytes / self.bytes_per_ms["element_wise"]
                time_ms = np.maximum(bytes_ms, kernel.flops / self.flops_per_ms[None])
            case "ring":
                # Transformer Engine's user buffers split a ring into one part per rank; the first
                # or last part is exposed, if products take longer.
                parts = self.tensor if self.runtime.overlap_tensor else 1
                return _line_ms(self.ring, kernel.bytes, kernel.passes) / parts
            case "all_to_all":
                return _line_ms(self.all_to_all, kernel.bytes, kernel.launches)
            case _:
                time_ms = kernel.bytes / self.bytes_per_ms[kernel.kind]
        time_ms[0] += kernel.launches * self.kernel_ms
        if not self.runtime.padded_experts:
            time_ms[0] += kernel.waits * _LAUNCHES_BEHIND * self.host_ms
        return time_ms

    def launch_ms(self, kernels: Iterable[Kernel]) -> float:
        """Return the host's time to launch these kernels, in ms."""
        # Casts and accumulation are launched as part of their products.
        counted = [kernel for kernel in kernels if kernel.kind not in ("cast", "accumulation")]
        passes = sum(kernel.passes for kernel in counted if kernel.kind == "ring")
        others = sum(kernel.launches for kernel in counted if kernel.kind != "ring")
        return (others + passes) * self.host_ms + passes * self.ring_host_ms

    def _product_ms(self, kernel: Kernel) -> np.ndarray:
        """Return the time of a product, grouped or not, without `kernel_ms`, [features]."""
        groups, sizes = kernel.groups, (kernel.inner, kernel.outer)
        phase: ProductPass = "forward"
        if kernel.phase in ("input_gradient", "weight_gradient"):
            phase = kernel.phase
        if groups > 1 and self.grouped_times is not None and kernel.dtype != "fp32":
            line = self.grouped_times.line(phase, *sizes, groups=groups)
            time_ms = _line_ms(line, kernel.rows)
        else:
            rows = kernel.rows + 0.0
            if groups > 1:  # every group is padded to full tiles
                rows[0] += groups * _TILE_ROWS / 2
            each_ms = 2 * kernel.inner * kernel.outer
            if kernel.dtype == "fp32":
                return rows * each_ms / self.flops_per_ms["fp32"]
            if self.product_times is not None:
                time_ms = _line_ms(self.product_times.line(phase, *sizes), rows)
            else:
                time_ms = rows * each_ms / self.flops_per_ms[None]
        # FP8 speeds up all shapes by the ratio of its rate to that of bf16.
        faster = self.flops_per_ms[kernel.dtype] / self.flops_per_ms[None]
        return time_ms * self.runtime.product_slowdown / faster

    def _attention_ms(self, kernel: Kernel) -> np.ndarray:
        phase: AttentionPass = "backward" if kernel.phase == "backward" else "forward"
        scale = _BACKWARD_OF_ATTENTION if phase == "backward" else 1.0
        scale *= self.runtime.attention_slowdown
        operations = scale * 2 * kernel.heads * kernel.elements
        times = self.attention_times
        if times is None or kernel.kind == "other_attention":
            return kernel.pairs * operations / self.flops_per_ms[None]
        tokens = self.runtime.sample_tokens if kernel.causal else None
        line = times.line(phase, kernel.elements, causal=kernel.causal, tokens=tokens)
        # Kernels compute full tiles of keys: half a tile per query is padding.
        return _line_ms(line, (kernel.pairs + TILE / 2 * kernel.rows) * operations)

    def rings(
        self,
        phase: KernelPass,
        all_bytes: np.ndarray,
        passes: int = 1,
        *,
        launches: int = 1,
        name: str = "",
    ) -> Kernels:
        """Return a collective, () if TP is 1. `all_bytes` are of full tensors, over all passes."""
        if self.tensor == 1:
            return ()
        sent = (self.tensor - 1) / self.tensor  # a rank sends all shares but one
        ring = Kernel(
            kind="ring",
            phase=phase,
            bytes=sent * all_bytes,
            launches=launches,
            passes=passes,
            name=name,
        )
        return (ring,)

    def all_reduces(
        self, forward_bytes: np.ndarray, backward_bytes: np.ndarray, times: int = 1
    ) -> Kernels:
        """Return `times` all-reduces, each of these bytes, in forward and in backward."""
        return (
            *self.rings("forward", 2 * times * forward_bytes, 2 * times, launches=times),
            *self.rings("backward", 2 * times * backward_bytes, 2 * times, launches=times),
        )

    def block_exchange(self, block_bytes: np.ndarray) -> Kernels:
        """Return a block's collectives, given the bytes of its unsharded input (or output)."""
        # Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2.
        if not self.sequence_parallel:
            return self.all_reduces(block_bytes, block_bytes)
        gathers: tuple[KernelPass, ...] = ("forward", "backward", "weight_gradient")
        return (
            *(ring for phase in gathers for ring in self.rings(phase, block_bytes, name=GATHERED)),
            *self.rings("forward", block_bytes),
            *self.rings("backward", block_bytes),
        )


def _line_ms(line: LinearTime, size: np.ndarray, times: float = 1) -> np.ndarray:
    """Return the time of `size` [features] in `times` calls, [features]; latency is in [0]."""
    time_ms = size * line.each_ms
    time_ms[0] += times * line.fixed_ms
    return time_ms


@lru_cache(maxsize=64)
def _fit_times(
    rates: Rates,
) -> tuple[ProductTimes | None, ProductTimes | None, AttentionTimes | None]:
    """Return times of products, grouped products and attention, or None if not measured."""
    products, grouped = (
        ProductTimes.fit(measured, rates.tflops) if measured else None
        for measured in (rates.products, rates.grouped)
    )
    attention = rates.attention
    return products, grouped, AttentionTimes.fit(attention, rates.tflops) if attention else None


def streamed_bytes_per_ms(cluster: ClusterConfig, precision: Precision) -> float:
    """Return bytes per ms of long contiguous copies: measured, else the data sheet's."""
    plain = _fastest_copy(cluster.measured_rates(precision), "plain")
    return plain.bytes_per_ms if plain is not None else cluster.memory_gb_per_s * 1e6


def _fastest_copy(rates: Rates, kind: CopyKind) -> CopyTime | None:
    """Return the fastest measured copy of a kind, or None if not measured."""
    copies = [copy for copy in rates.copies if copy.kind == kind]
    return max(copies, key=lambda copy: copy.bytes_per_ms, default=None)
