"""Comparison of encoder placements: which is faster, by how much, and why."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from omnibal.base.errors import UserError
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.pipeline.prediction import LostTime, Prediction
from omnibal.search.strategy import Strategy

_NAMED_CAUSES = 2  # longer sentences are not read
_LEAST_CAUSE = 0.002
"""Min share of the step for a cause to be named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedStep:
    """Predicted step for comparing placements."""

    step_ms: float
    samples_per_second_per_gpu: float | None
    lost: LostTime

    @classmethod
    def from_strategy(cls, strategy: Strategy, samples_per_step: int) -> Self:
        lost = {name: samples_per_step * ms for name, ms in strategy.lost}
        return cls(
            step_ms=samples_per_step * strategy.ms_per_sample,
            samples_per_second_per_gpu=strategy.samples_per_second / strategy.parallel.world_size,
            lost=LostTime(**lost),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlacementChoice:
    """Chosen placement of encoders and the alternatives."""

    chosen: EncoderPlacement
    predicted: Mapping[EncoderPlacement, Prediction | PredictedStep]
    refused: dict[EncoderPlacement, str]
    """Reasons against impossible placements."""

    def step_ms(self, placement: EncoderPlacement) -> float | None:
        """Predicted step time of a placement. None if not planned."""
        found = self.predicted.get(placement)
        return None if found is None else found.step_ms

    @property
    def reason(self) -> str:
        """Pros and cons of the chosen placement, in a sentence."""
        chosen = self.chosen
        for placement, prediction in self.predicted.items():
            if placement is not chosen:
                return _compare_steps(chosen, self.predicted[chosen], prediction)
        refused = [f"{_NAMES[each]} cannot be: {why}" for each, why in self.refused.items()]
        return "; ".join(refused) or "no other placement was planned"


def neither(refused: dict[EncoderPlacement, UserError]) -> UserError:
    """Error with reasons for all placements if none can be planned."""
    reasons = {placement: str(error) for placement, error in refused.items()}
    if len(set(reasons.values())) == 1:
        return next(iter(refused.values()))
    return UserError("; and ".join(f"{_NAMES[each]}: {why}" for each, why in reasons.items()))


def relative_ms(prediction: Prediction | PredictedStep) -> float:
    """Time for comparing placements: device time per sample, or the step time without samples."""
    per_second = prediction.samples_per_second_per_gpu
    return prediction.step_ms if per_second is None else 1e3 / per_second


def _compare_steps(
    placement: EncoderPlacement, own: Prediction | PredictedStep, other: Prediction | PredictedStep
) -> str:
    change = relative_ms(own) / relative_ms(other) - 1
    # Ideal times differ too, by work that tensor-parallel ranks divide.
    before, after = other.lost.causes(), own.lost.causes()
    changes = {name: after[name] - before.get(name, 0.0) for name in after}
    least_ms = _LEAST_CAUSE * own.step_ms
    falls = sorted((ms, name) for name, ms in changes.items() if ms < -least_ms)
    rises = sorted((-ms, name) for name, ms in changes.items() if ms > least_ms)
    parts = [f"{name} is {-ms:,.1f} ms less" for ms, name in falls[:_NAMED_CAUSES]]
    parts += [f"{name} {-ms:,.1f} ms more" for ms, name in rises[:_NAMED_CAUSES]]
    verdict = f"{abs(change):.1%} {'slower' if change > 0 else 'faster'}"
    if own.samples_per_second_per_gpu is not None:
        verdict += " per sample"  # steps may differ if caps are searched
    return f"{_NAMES[placement]} it is {verdict}: {', '.join(parts) or 'all parts alike'}"


_NAMES = {
    EncoderPlacement.PIPELINE: "in the pipeline",
    EncoderPlacement.DATA_PARALLEL: "data-parallel",
}
