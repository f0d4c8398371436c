"""Quality metrics of packs and steps.

Pad and dist ratio are Eq. 1 and 2 of OmniBal (arXiv 2407.20761, section 3), the attention balance
ratio is HBP's (arXiv 2503.07680, section 3). All are 0 for perfect balance and approach 1 when one
member does everything.
"""

from dataclasses import asdict, dataclass

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.data.packs import ScheduledPacks, sum_squared_tokens
from omnibal.limits import Caps

_MODEL_PARTS = {"tiles": "vision", "tokens": "language"}
"""What the dist ratios of some features are called in JSON, after the parts that they load."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackMetrics:
    """Figures of a schedule."""

    samples: int
    packed: int
    packs: int
    packs_lower_bound: int
    """Lower bound on the packs of all epochs; no packing under these caps needs fewer."""
    gap: float
    """Packs above the lower bound, as a share of it."""
    samples_per_pack: float
    fill: dict[str, float]
    """Share of the cap that the mean pack holds, by limited feature."""
    pad_ratio: float
    dist_ratio: dict[str, float]
    """The dist ratio of every limited feature."""
    attention_balance_ratio: float
    """The dist ratio of the sum of squared sample tokens, which block-diagonal attention costs."""
    straggler_factor: float
    """Load of a step's busiest rank over the mean of its ranks; ranks wait for the busiest."""
    steps: int

    def as_dict(self) -> dict[str, float]:
        """All figures by the keys of `omnibal pack --json`."""
        figures: dict[str, float] = {}
        for name, value in asdict(self).items():
            match name:
                case "fill":
                    figures |= {f"fill_{feature}": share for feature, share in value.items()}
                case "dist_ratio":
                    figures |= {
                        f"dist_ratio_{_MODEL_PARTS.get(feature, feature)}": ratio
                        for feature, ratio in value.items()
                    }
                case _:
                    figures[name] = value
        return figures


def measure_packs(
    scheduled: ScheduledPacks,
    lengths: Lengths,
    caps: Caps,
    dp: int,
    load: np.ndarray,
    lower_bound: int,
) -> PackMetrics:
    """All figures of a schedule over `dp` data-parallel ranks.

    Args:
        load: of every pack, such as its predicted milliseconds.
        lower_bound: on the packs of one epoch.
    """
    packs = len(scheduled)
    epochs = int(scheduled.epoch[-1]) + 1
    sums = {name: scheduled.packs.sums(lengths.column(name)) for name in caps.names}
    return PackMetrics(
        samples=len(lengths) * epochs,
        packed=len(scheduled.packs.samples),
        packs=packs,
        packs_lower_bound=lower_bound * epochs,
        gap=packs / (lower_bound * epochs) - 1,
        samples_per_pack=len(scheduled.packs.samples) / packs,
        fill={name: float(sums[name].sum() / (packs * caps[name])) for name in caps.names},
        # A pack is one row of concatenated samples, so each mini-batch that could be padded has
        # one row.
        pad_ratio=pad_ratio(scheduled.tokens, np.arange(packs + 1)),
        dist_ratio={name: dist_ratio(rank_sums(scheduled, sums[name], dp)) for name in caps.names},
        attention_balance_ratio=dist_ratio(
            rank_sums(scheduled, sum_squared_tokens(scheduled.packs, lengths), dp)
        ),
        straggler_factor=straggler_factor(rank_sums(scheduled, load, dp)),
        steps=scheduled.steps,
    )


def pad_ratio(row_tokens: np.ndarray, offsets: np.ndarray) -> float:
    """Eq. 1: sum_i (t_max - t_i) / (t_max * B), mean over mini-batches of B rows each.

    Args:
        row_tokens: tokens of every row of every mini-batch, [rows].
        offsets: mini-batch i has the rows from offsets[i] to offsets[i + 1]; none is empty.
    """
    longest = np.maximum.reduceat(row_tokens, offsets[:-1])
    padded = longest * np.diff(offsets)
    return float(np.mean(1 - np.add.reduceat(row_tokens, offsets[:-1]) / padded))


def dist_ratio(loads: np.ndarray) -> float:
    """Eq. 2: sum_i (T_max - T_i) / (T_max * N), mean over steps; loads are [steps, N devices].

    This is the equation as printed. The ratios written into the paper's Figure 2 divide by N - 1
    instead of N (they equal 1 - min / max for its two devices), so they are not comparable with it.
    A step without any load is balanced.
    """
    busiest = loads.max(axis=1)
    share = np.divide(loads.mean(axis=1), busiest, out=np.ones(len(loads)), where=busiest > 0)
    return float(np.mean(1 - share))


def straggler_factor(loads: np.ndarray) -> float:
    """max_i(T_i) / mean_i(T_i), mean over steps; loads are [steps, N devices], no step is empty."""
    return float(np.mean(loads.max(axis=1) / loads.mean(axis=1)))


def rank_sums(scheduled: ScheduledPacks, per_pack: np.ndarray, dp: int) -> np.ndarray:
    """Sum of a per-pack quantity over each rank's micro-batches of each step, float64 [steps, dp].

    Ranks meet once a step, at the gradient reduction, so only the sums need to be equal.
    """
    rank = scheduled.step * dp + scheduled.dp_rank
    sums = np.bincount(rank, weights=per_pack, minlength=scheduled.steps * dp)
    return sums.reshape(scheduled.steps, dp)
