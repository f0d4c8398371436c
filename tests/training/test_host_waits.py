"""What the host would wait for on a device while a stage runs its micro-batches."""

import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import data_parallel_encoder_cases as beside
import shared_training_cases as shared
from ranks import run_ranks
from tensor_parallel_cases import train_steps
from torch.utils._python_dispatch import TorchDispatchMode

# Operations whose result the host needs, or the size of it, before it can go on.
_WAITING = {"_local_scalar_dense", "masked_select", "nonzero"}
_RUNS_A_STAGE = ("megatron/vlm/step/schedule.py", "megatron/vlm/step/encoder_phase.py")
_READS_DATA = "megatron/vlm/inputs/"


class _WaitLog(TorchDispatchMode):
    """Counts what waits while a stage runs, by the operation and the file that asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, which is counted if it waits."""
        name = func.overloadpacket.__name__
        if name in _WAITING:
            files = [frame.filename for frame in traceback.extract_stack()]
            is_running = any(file.endswith(_RUNS_A_STAGE) for file in files)
            if is_running and not any(_READS_DATA in file for file in files):
                own = next(file for file in reversed(files) if "/megatron/" in file)
                self.seen[name, own.rpartition("/")[2]] += 1
        return func(*args, **(kwargs or {}))


def _waits(links: Any, work: Callable[..., Any], *arguments: Any) -> Counter[tuple[str, str]]:
    with _WaitLog() as log:
        work(links, *arguments)
    return log.seen


def test_experts_wait_for_the_choice_of_rows_alone():
    """Prevents: a wait that nobody knows of, in every layer of every micro-batch.

    Core's permutation takes the chosen rows and their weights by a mask, twice a layer.
    """
    case = shared.CASES["dp4-experts"]
    plan = shared.plan_of(case)
    steps, feed = shared.options_of(case).values()
    work = partial(train_steps, feed=feed)
    for seen in run_ranks(plan.parallel, _waits, work, plan, steps):
        assert set(seen) == {("masked_select", "moe_utils.py")}
        assert seen["masked_select", "moe_utils.py"] % (2 * plan.model.language.layers) == 0


def test_data_parallel_encoders_wait_for_nothing(tmp_path):
    """Prevents: features or gradients whose sizes are read from the device."""
    case = next(iter(beside.CASES.values()))
    plan = beside.plan_of(case)
    work = partial(train_steps, save=tmp_path, feed=beside.feed_of(case.drop_path))
    assert not any(run_ranks(plan.parallel, _waits, work, plan, beside.STEPS[:2]))
