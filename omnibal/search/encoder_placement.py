"""Comparison of encoder placements: which is faster, by how much, and why."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from omnibal.base.errors import UserError
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.pipeline.prediction import PredictedStep, Prediction, relative_ms
from omnibal.search.parallel_sizes import possible_sizings
from omnibal.search.strategy import StrategyRequest
from omnibal.search.strategy_search import StrategySearch

_LISTED_CHANGES = 2  # causes named per direction; longer sentences are not read
_MIN_CHANGE = 0.002  # min share of the step for a cause to be named


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlacementChoice:
    """Chosen placement of encoders, the step of every feasible placement, and refusals."""

    chosen: EncoderPlacement
    predicted: Mapping[EncoderPlacement, Prediction | PredictedStep]
    refused: dict[EncoderPlacement, str]  # why no strategy has the placement, as a clause

    def step_ms(self, placement: EncoderPlacement) -> float | None:
        """Return the predicted step time of a placement in ms, None if no strategy has it."""
        prediction = self.predicted.get(placement)
        return None if prediction is None else prediction.step_ms

    @classmethod
    def of_strategies(
        cls,
        request: StrategyRequest,
        search: StrategySearch,
        predicted: Mapping[EncoderPlacement, Prediction],
    ) -> Self:
        """Return the best strategy's placement, and the fastest step of every placement.

        Args:
            predicted: predictions of plans on all data, used only if every placement that has a
                strategy has one. Else placements are compared on the sampled data.
        """
        steps: dict[EncoderPlacement, Prediction | PredictedStep] = {}
        for strategy in search.ranking:  # fastest first
            step = strategy.predicted_step(request.samples_per_step)
            steps.setdefault(strategy.placement, step)
        return cls(
            chosen=search.best.placement,
            predicted=predicted if predicted.keys() >= steps.keys() else steps,
            refused={
                placement: _explain_refusal(request, search, placement)
                for placement in request.placements
                if placement not in steps
            },
        )

    @property
    def reason(self) -> str:
        """Return how the chosen placement compares with another, or why no other is possible."""
        chosen = self.chosen
        for placement, prediction in self.predicted.items():
            if placement is not chosen:
                return _compare_steps(chosen, self.predicted[chosen], prediction)
        return "; ".join(self.refused.values()) or "no other placement was planned"


def _explain_refusal(
    request: StrategyRequest, search: StrategySearch, placement: EncoderPlacement
) -> str:
    """Return why no strategy has a placement of encoders, as a clause."""
    try:
        possible_sizings(replace(request, placements=(placement,)))
    except UserError as error:
        return f"{placement.phrase} they cannot be: {error}"
    for ruled_out in search.ruled_out if request.layouts else ():
        if ruled_out.sizing.placement is placement:
            slower = "would be slower, " if ruled_out.fastest else "do not fit: "
            return f"{placement.phrase} they {slower}{ruled_out.why}"
    return f"{placement.phrase} they fit no parallel sizes that are as fast"


def _compare_steps(
    placement: EncoderPlacement, own: Prediction | PredictedStep, other: Prediction | PredictedStep
) -> str:
    change = relative_ms(own) / relative_ms(other) - 1
    # Causes include the ideal time, which differs by work that tensor-parallel ranks divide.
    before, after = other.lost.causes(), own.lost.causes()
    changes = {name: after[name] - before.get(name, 0.0) for name in after}
    min_ms = _MIN_CHANGE * own.step_ms
    falls = sorted((ms, name) for name, ms in changes.items() if ms < -min_ms)
    rises = sorted((-ms, name) for name, ms in changes.items() if ms > min_ms)
    parts = [f"{name} is {-ms:,.1f} ms less" for ms, name in falls[:_LISTED_CHANGES]]
    parts += [f"{name} {-ms:,.1f} ms more" for ms, name in rises[:_LISTED_CHANGES]]
    verdict = f"{abs(change):.1%} {'slower' if change > 0 else 'faster'}"
    if own.samples_per_second_per_gpu is not None:
        verdict += " per sample"  # samples per step may differ if caps are searched
    return f"{placement.phrase} it is {verdict}: {', '.join(parts) or 'all parts alike'}"
