"""Health of a run: skipped steps and loss spikes."""

import logging
import math
from collections import deque

import numpy as np

from omnibal.base.errors import UserError

_SPIKE_WINDOW = 100  # max number of past losses in the mean, without skipped steps
_MIN_WINDOW = 20  # min number of past losses to detect a spike
_SPIKE_DEVIATIONS = 6.0  # standard deviations above the mean that make a spike
_MAX_UNREADABLE_FRACTION = 0.5  # a higher share in a step means a missing folder
_log = logging.getLogger(__name__)


class RunHealth:
    """Counts skipped steps and detects loss spikes, equally on all ranks, as losses are equal."""

    def __init__(self, max_skipped: int, skipped_steps: int = 0) -> None:
        self._max_skipped = max_skipped
        self._recent: deque[float] = deque(maxlen=_SPIKE_WINDOW)
        self._in_a_row = 0
        self.skipped_steps = skipped_steps  # of the run, with steps before a resume

    @property
    def is_skipping(self) -> bool:
        """Whether the last step was skipped: the weights may be bad, and are not worth saving."""
        return self._in_a_row > 0

    def judge(
        self, step: int, loss: float, skipped: bool = False, replaced_share: float = 0.0
    ) -> bool:
        """Record a step, log its problems, and return whether its loss is a spike.

        Raises UserError after more than `max_skipped` skipped steps in a row, or if
        `replaced_share`, the share of samples with unreadable images, is above 0.5.
        """
        if replaced_share > _MAX_UNREADABLE_FRACTION:
            raise UserError(
                f"step {step}: the images of {replaced_share:.0%} of its samples cannot be read; "
                "restore them, and resume from the last checkpoint"
            )
        if skipped:
            self._in_a_row += 1
            self.skipped_steps += 1
            cause = f"the loss is {loss}" if not math.isfinite(loss) else "a gradient is not finite"
            if self._in_a_row > self._max_skipped:
                raise UserError(
                    f"step {step}: {cause}: {self._in_a_row} skipped steps in a row, more than "
                    f"{self._max_skipped} (--max-skipped-steps); go on from the last checkpoint's "
                    "weights (--finetune) with a lower --lr"
                )
            _log.info(
                f"step {step}: {cause}: skipped, the weights are unchanged "
                f"({self._in_a_row} in a row, {self.skipped_steps} in all)"
            )
            return False
        self._in_a_row = 0
        typical, spread = math.inf, 0.0  # no loss is a spike while the window is short
        if len(self._recent) >= _MIN_WINDOW:
            typical, spread = float(np.mean(self._recent)), float(np.std(self._recent))
        spike = loss > typical + _SPIKE_DEVIATIONS * spread
        self._recent.append(loss)
        if spike:
            _log.info(f"step {step}: the loss jumped to {loss:.4f} from about {typical:.4f}")
        return spike
