"""What the host would wait for on a device while a stage runs its micro-batches."""

import traceback
from collections import Counter

import data_parallel_encoder_cases as beside
import shared_training_cases as shared
from ranks import run_ranks
from tensor_parallel_cases import train_steps
from torch.utils._python_dispatch import TorchDispatchMode

# Operations whose result the host needs, or the size of it, before it can go on.
WAITING = {"_local_scalar_dense", "masked_select", "nonzero"}
RUNS_A_STAGE = ("megatron/vlm/step/schedule.py", "megatron/vlm/step/encoder_phase.py")
READS_DATA = "megatron/vlm/inputs/"


class WaitLog(TorchDispatchMode):
    """Counts what waits while a stage runs, by the operation and the file that asks for it."""

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
    """Prevents: a wait that nobody knows of, in every layer of every micro-batch.

    Core's permutation takes the chosen rows and their weights by a mask, twice a layer.
    """
    case = shared.CASES["dp4-experts"]
    plan = shared.plan_of(case)
    for seen in run_ranks(plan.parallel, waits, plan, shared.options_of(case)):
        assert set(seen) == {("masked_select", "moe_utils.py")}
        assert seen["masked_select", "moe_utils.py"] % (2 * plan.model.language.layers) == 0


def test_data_parallel_encoders_wait_for_nothing(tmp_path):
    """Prevents: features or gradients whose sizes are read from the device."""
    case = next(iter(beside.CASES.values()))
    plan, feed = beside.plan_of(case), beside.feed_of(case.drop_path)
    options = {"steps": beside.STEPS[:2], "save": tmp_path, "feed": feed}
    assert not any(run_ranks(plan.parallel, waits, plan, options))
