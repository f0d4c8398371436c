"""One stage of a plan at its real size, on a fake device."""

import gc
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from megatron.vlm.inputs.batch import MicroBatch
from megatron.vlm.measure.fake_device.encoding import HeaviestEncoding
from megatron.vlm.measure.fake_device.memory import Label
from megatron.vlm.measure.fake_device.mode import FakeCuda, FakeDevice, fake_cuda
from megatron.vlm.measure.replay import LoadRows, StageReplayer, standing_in
from megatron.vlm.step.clock import Phase
from megatron.vlm.step.train import Trainer
from omnibal.job.fake_replay import COMPUTING, FakeStage, PeakContent, Window, predicted_peak_gib
from omnibal.job.plan import Plan

_GIB = 2**30
_MOST_SPREAD = 0.05
"""Tolerated error of one window's prediction relative to another's."""
_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def run_fake_stage(
    plan: Plan,
    stage: int,
    heaviest: Sequence[Window],
    load: LoadRows,
    on_run: Callable[[], None],
    encoding: HeaviestEncoding | None = None,
) -> FakeStage:
    """Build a stage of the plan on a fake device and run its heaviest windows.

    Args:
        heaviest: windows by falling prediction. The largest allocation counts; windows predicted
            `_MOST_SPREAD` below it are skipped.
        load: loads their micro-batches, on the host.
        on_run: called after building the stage, and per window.
        encoding: of data-parallel encoders, if any.

    Raises:
        UserError: there is no compiler.
        RefusedByDeviceError: a real device would refuse an operation.
    """
    with fake_cuda() as fake_device, standing_in(plan.parallel, stage) as links:

        def follow(phase: Phase) -> None:
            fake_device.device.phase = phase.value

        replayer = StageReplayer(plan, links, on_phase=follow)
        _describe_state(fake_device.device, replayer.trainer)
        on_run()
        worst: FakeStage | None = None
        worst_predicted_gib = 0.0
        for window in heaviest:
            expected = window.predicted_gib / max(worst_predicted_gib, 1e-12)
            if worst is None or expected * (1 + _MOST_SPREAD) >= 1:
                batches = [_without_data(batch, fake_device) for batch in load(window.rows)]
                of_encoders = None
                if encoding is not None:
                    shares, passes = encoding.of_stage(stage, window.rows)
                    of_encoders = shares, [_without_data(one, fake_device) for one in passes]
                memory = partial(replayer.activation_bytes, batches, of_encoders)
                run = _run(fake_device.device, replayer, window.rows, memory, plan, stage)
                if worst is None or run.allocated_gib > worst.allocated_gib:
                    worst, worst_predicted_gib = run, window.predicted_gib
            on_run()
        del replayer
        gc.collect()
    assert worst is not None, "a stage has micro-batches"
    return worst


def _without_data(batch: MicroBatch, fake_device: FakeCuda) -> MicroBatch:
    """Replace the micro-batch's tensors by fake ones, host tensors too."""
    tensors = {name: value for name, value in vars(batch).items() if torch.is_tensor(value)}
    return replace(batch, **{name: fake_device.fake(value) for name, value in tensors.items()})


def _describe_state(device: FakeDevice, trainer: Trainer) -> None:
    """Label allocations after building, and name the modules."""
    device.places.name(*trainer.stages)
    device.memory.relabel_rest(Label("", "optimizer state", "state"))
    for held in trainer.held:
        device.memory.relabel(held.weights(), Label("", "weights", "state"))
        device.memory.relabel(held.gradients(), Label("", "gradients", "state"))


def _run(
    device: FakeDevice,
    replayer: StageReplayer,
    rows: np.ndarray,
    step: Callable[[], int],
    plan: Plan,
    stage: int,
) -> FakeStage:
    """Run one rank's step and the update after it; return the counts."""
    memory, counts = device.memory, device.counts
    counts.clear()
    memory.watch()
    step()
    label = memory.highest_label
    assert label is not None, "nothing ran"
    operations = counts.operations()
    computing = [
        one for one in operations if one.phase in COMPUTING and one.kind != "communication"
    ]
    return FakeStage(
        stage=stage,
        predicted_gib=predicted_peak_gib(plan, stage),
        allocated_gib=memory.highest_bytes / _GIB,
        state_gib=replayer.state_bytes / _GIB,
        activations_gib=(memory.highest_bytes - replayer.state_bytes) / _GIB,
        peak_phase=label.phase,
        peak_at=f"{label.where} {label.operation}".strip(),
        rows=tuple(rows.tolist()),
        micro_batches=len(rows),
        kernels=sum(one.kernels for one in computing),
        tflop=sum(one.tflop for one in computing),
        gigabytes=sum(one.gigabytes for one in computing),
        contents=_contents(memory.contents()),
        operations=operations,
        host_reads=counts.host_reads(),
        unaligned=counts.unaligned(),
    )


def _contents(by_label: dict[Label, tuple[int, int]]) -> tuple[PeakContent, ...]:
    """Contents of the peak, layers of a tower merged, largest first."""
    tensors: Counter[Label] = Counter()
    sizes: Counter[Label] = Counter()
    for label, (count, size) in by_label.items():
        whole = replace(label, where=_LAYER_NUMBER.sub(".*", label.where))
        tensors[whole] += count
        sizes[whole] += size
    return tuple(
        PeakContent(
            where=label.where,
            operation=label.operation,
            phase=label.phase,
            tensors=tensors[label],
            gib=size / _GIB,
        )
        for label, size in sizes.most_common()
    )
