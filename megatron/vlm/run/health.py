"""Health of a run: skipped steps and loss spikes."""

import logging
import math
from collections import deque

import numpy as np

from omnibal.base.errors import UserError

_WINDOW = 100  # past steps that a loss is compared with
_ENOUGH = 20  # minimum of past steps to detect a spike
_DEVIATIONS = 6.0  # standard deviations above the mean that make a spike
_BORNE_SHARE = 0.5  # maximum share of replaced samples: more means a missing folder
_log = logging.getLogger(__name__)


class RunHealth:
    """Watches losses in step order; identical on all ranks, as losses are."""

    def __init__(self, max_skipped: int, skipped_steps: int = 0) -> None:
        self._max_skipped = max_skipped
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._in_a_row = 0
        self.skipped_steps = skipped_steps
        """Skipped steps of the whole run, including steps before a resume."""

    @property
    def is_skipping(self) -> bool:
        """Whether the last step was skipped, so that the weights may be bad."""
        return self._in_a_row > 0

    def judge(
        self, step: int, loss: float, skipped: bool = False, replaced_share: float = 0.0
    ) -> bool:
        """Record a step, log problems, and return whether its loss is a spike."""
        if replaced_share > _BORNE_SHARE:
            raise UserError(
                f"step {step}: the images of {replaced_share:.0%} of its samples cannot be read; "
                "that is no bad sample but a folder that is gone: bring it back, and resume from "
                "the last checkpoint"
            )
        if skipped:
            self._count_skipped(step, loss)
            return False
        self._in_a_row = 0
        typical, spread = math.inf, 0.0
        if len(self._recent) >= _ENOUGH:
            typical, spread = float(np.mean(self._recent)), float(np.std(self._recent))
        spike = loss > typical + _DEVIATIONS * spread
        self._recent.append(loss)
        if spike:
            _log.info(f"step {step}: the loss jumped to {loss:.4f} from about {typical:.4f}")
        return spike

    def _count_skipped(self, step: int, loss: float) -> None:
        self._in_a_row += 1
        self.skipped_steps += 1
        culprit = f"the loss is {loss}" if not math.isfinite(loss) else "a gradient is not finite"
        if self._in_a_row > self._max_skipped:
            raise UserError(
                f"step {step}: {culprit}, and that makes {self._in_a_row} skipped steps in a row, "
                f"of which there may be {self._max_skipped} (--max-skipped-steps); start from the "
                "weights of the last checkpoint with --finetune, another --save and a lower --lr"
            )
        _log.info(
            f"step {step}: {culprit}: skipped, the weights stay as they were "
            f"({self._in_a_row} in a row, {self.skipped_steps} in all)"
        )
