"""Host synchronizations with the device while a stage runs its micro-batches."""

import traceback
from collections import Counter
from unittest.mock import patch

import data_parallel_encoder_cases as dp
import shared_training_cases as shared
import torch
from pipeline_cases import pipeline_plan
from ranks import run_ranks
from tensor_parallel_cases import MODELS, OPTIONS, PLAIN_FEED, STEPS, train_steps
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.vlm.step import clock
from megatron.vlm.step.train import build_trainer, train_step

# Operations with a result or a size that the host must wait for.
WAITING = {"_local_scalar_dense", "masked_select", "nonzero"}
RUNS_A_STAGE = ("megatron/vlm/step/schedule.py", "megatron/vlm/step/encoder_phase.py")
READS_DATA = "megatron/vlm/inputs/"


class WaitLog(TorchDispatchMode):
    """Counts waits while a stage runs, by operation and calling file."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in WAITING:
            files = [frame.filename for frame in traceback.extract_stack()]
            is_running = any(file.endswith(RUNS_A_STAGE) for file in files)
            if is_running and not any(READS_DATA in file for file in files):
                own = next(file for file in reversed(files) if "/megatron/" in file)
                self.seen[name, own.rpartition("/")[2]] += 1
        return func(*args, **(kwargs or {}))


def waits(links, plan, options):
    with WaitLog() as log:
        train_steps(links, plan, **options)
    return log.seen


def test_experts_wait_for_the_choice_of_rows_alone():
    """Prevents an unknown host wait in every layer of every micro-batch.

    Core's permutation selects rows and weights by a mask, twice per layer.
    """
    case = shared.CASES["dp4-experts"]
    plan = shared.plan_of(case)
    for seen in run_ranks(plan.parallel, waits, plan, shared.options_of(case)):
        assert set(seen) == {("masked_select", "moe_utils.py")}
        assert seen["masked_select", "moe_utils.py"] % (2 * plan.model.language.layers) == 0


def test_data_parallel_encoders_wait_for_nothing(tmp_path):
    """Prevents sizes of features or gradients being read from the device."""
    case = next(iter(dp.CASES.values()))
    plan, feed = dp.plan_of(case), dp.feed_of(case.drop_path)
    options = {"steps": dp.STEPS[:2], "save": tmp_path, "feed": feed}
    assert not any(run_ranks(plan.parallel, waits, plan, options))


def calls_of_two_steps(links, plan):
    """Return the clock's marks, host waits and weight gathers of two steps, in order."""
    calls = []

    class Event:
        def __init__(self, **_):
            pass

        def record(self):
            calls.append(("mark", self))

        def synchronize(self):
            calls.append(("wait for mark", self))

        def elapsed_time(self, _):
            return 0.0

    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    for bucket in trainer.data_parallel.overlap._buckets:
        begin, finish = bucket.start_param_sync, bucket.finish_param_sync

        def finish_and_log(bucket=bucket, finish=finish, **options):
            if bucket.param_gather_handle is not None:
                calls.append(("weights are waited for", None))
            finish(**options)

        bucket.start_param_sync = lambda begin=begin: (calls.append(("gather", None)), begin())
        bucket.finish_param_sync = finish_and_log
    waits = {"Event": Event, "synchronize": lambda: calls.append(("wait for device", None))}
    with patch.object(clock, "has_cuda", lambda: True), patch.multiple(torch.cuda, **waits):
        for number, packs in enumerate(STEPS[:2]):
            own = list(PLAIN_FEED.packed(plan.model, number, packs))
            train_step(trainer, PLAIN_FEED.dealt(plan, number, own))
    return [(what, calls.index(("mark", of)) if of else None) for what, of in calls]


def test_weights_are_gathered_while_the_next_step_begins():
    """Prevents a step that waits for its weight gathers, so that the next step cannot hide them."""
    plan = pipeline_plan(model=MODELS["300M-like"], data=2)
    for calls in run_ranks(plan.parallel, calls_of_two_steps, plan):
        names = [what for what, _ in calls]
        waited = names.index("weights are waited for")
        begun = names.index("gather")
        assert begun < waited and "wait for device" not in names
        ended = names.index("wait for mark")
        assert names[begun:ended] == ["gather"] * (ended - begun - 1) + ["mark"]
        assert calls[ended][1] == ended - 1  # the step's last mark
        assert "mark" in names[ended:waited]  # of the next step
