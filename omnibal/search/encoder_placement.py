"""Both placements of a model's encoders compared: which is faster, by how much, and why."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from omnibal.base.errors import UserError
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.pipeline.prediction import LostTime, Prediction
from omnibal.search.strategy import Strategy

_NAMED_CAUSES = 2  # a sentence with more is not read
_LEAST_CAUSE = 0.002
"""Share of the step below which a cause is not named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedStep:
    """A predicted step, as far as placements are compared by it."""

    step_ms: float
    samples_per_second_per_gpu: float | None
    lost: LostTime

    @classmethod
    def of(cls, strategy: Strategy, samples_per_step: int) -> Self:
        """The step of so many samples by a strategy."""
        lost = {name: samples_per_step * ms for name, ms in strategy.lost}
        return cls(
            step_ms=samples_per_step * strategy.ms_per_sample,
            samples_per_second_per_gpu=strategy.samples_per_second / strategy.parallel.world_size,
            lost=LostTime(**lost),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlacementChoice:
    """A placement of encoders, and what is predicted of it and of the other one."""

    chosen: EncoderPlacement
    predicted: Mapping[EncoderPlacement, Prediction | PredictedStep]
    """What is predicted of the placements that were planned."""
    refused: dict[EncoderPlacement, str]
    """Why others cannot be."""

    def step_ms(self, placement: EncoderPlacement) -> float | None:
        """Predicted step of a placement; None where it was not planned."""
        found = self.predicted.get(placement)
        return None if found is None else found.step_ms

    @property
    def reason(self) -> str:
        """What speaks for and against the chosen placement, in a sentence."""
        chosen = self.chosen
        for placement, prediction in self.predicted.items():
            if placement is not chosen:
                return _compared(chosen, self.predicted[chosen], prediction)
        refused = [f"{_NAMES[each]} cannot be: {why}" for each, why in self.refused.items()]
        return "; ".join(refused) or "no other placement was planned"


def neither(refused: dict[EncoderPlacement, UserError]) -> UserError:
    """The error of a plan that cannot be made with either placement, with the reason of each."""
    reasons = {placement: str(error) for placement, error in refused.items()}
    if len(set(reasons.values())) == 1:
        return next(iter(refused.values()))
    return UserError("; and ".join(f"{_NAMES[each]}: {why}" for each, why in reasons.items()))


def relative_ms(prediction: Prediction | PredictedStep) -> float:
    """Time that placements are compared by: of a sample on one device, or of a step without
    samples."""
    per_second = prediction.samples_per_second_per_gpu
    return prediction.step_ms if per_second is None else 1e3 / per_second


def _compared(
    placement: EncoderPlacement,
    own: Prediction | PredictedStep,
    other: Prediction | PredictedStep,
) -> str:
    change = relative_ms(own) / relative_ms(other) - 1
    # Ideal times differ too: by what tensor-parallel ranks divide.
    before, after = other.lost.named(), own.lost.named()
    changes = {name: after[name] - before.get(name, 0.0) for name in after}
    least_ms = _LEAST_CAUSE * own.step_ms
    falls = sorted((ms, name) for name, ms in changes.items() if ms < -least_ms)
    rises = sorted((-ms, name) for name, ms in changes.items() if ms > least_ms)
    parts = [f"{name} is {-ms:,.1f} ms less" for ms, name in falls[:_NAMED_CAUSES]]
    parts += [f"{name} {-ms:,.1f} ms more" for ms, name in rises[:_NAMED_CAUSES]]
    verdict = f"{abs(change):.1%} {'slower' if change > 0 else 'faster'}"
    if own.samples_per_second_per_gpu is not None:
        verdict += " per sample"  # as steps may differ, where caps are searched for
    return f"{_NAMES[placement]} it is {verdict}: {', '.join(parts) or 'all parts alike'}"


_NAMES = {
    EncoderPlacement.PIPELINE: "in the pipeline",
    EncoderPlacement.DATA_PARALLEL: "data-parallel",
}
