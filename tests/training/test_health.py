"""What the user is told about steps that went wrong."""

import math

import numpy as np
import pytest
from ranks import logged

from megatron.vlm.run.health import RunHealth
from omnibal.base.errors import UserError

pytestmark = pytest.mark.quick


def test_spike_is_reported_and_noise_is_not():
    """Prevents: a jump of the loss that nobody sees, and a report in every tenth step."""
    random = np.random.default_rng(0)
    health = RunHealth(max_skipped=0)
    losses = 2.0 - 0.001 * np.arange(300) + 0.05 * random.standard_normal(300)
    with logged() as lines:
        assert not any(health.judge(step, loss) for step, loss in enumerate(losses))
        assert lines == []
        assert health.judge(300, 3.0)
    assert "step 300: the loss jumped to 3.0000 from about 1.7" in lines[0]


def test_first_steps_are_no_spikes():
    """Prevents: alarms while there is nothing to compare with."""
    health = RunHealth(max_skipped=0)
    assert not any(health.judge(step, loss) for step, loss in enumerate([1.0, 9.0, 2.0, 8.0]))


def test_run_stops_after_too_many_skipped_steps_in_a_row():
    """Prevents: days of a diverged run; and a run that stops although it recovers each time."""
    health = RunHealth(max_skipped=2, skipped_steps=5)
    for step in range(0, 30, 3):
        with logged() as lines:
            health.judge(step, math.nan, skipped=True)
            health.judge(step + 1, 1.0, skipped=True)
            health.judge(step + 2, 1.0)
        assert len(lines) == 2
        assert "the loss is nan" in lines[0] and "a gradient is not finite" in lines[1]
    assert health.skipped_steps == 25
    health.judge(30, math.nan, skipped=True)
    health.judge(31, math.nan, skipped=True)
    with pytest.raises(UserError, match="3 skipped steps in a row, of which there may be 2"):
        health.judge(32, math.nan, skipped=True)


def test_run_stops_when_most_images_are_gone():
    """Prevents: a model trained on text alone since a disk was unmounted."""
    health = RunHealth(max_skipped=0)
    with logged() as lines:
        health.judge(0, 1.0, replaced_share=0.5)
    assert lines == []
    with pytest.raises(UserError, match="75% of its samples cannot be read"):
        health.judge(1, 1.0, replaced_share=0.75)
