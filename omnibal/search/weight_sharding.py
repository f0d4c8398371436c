"""Comparison of weight shardings: the fastest, and why the rest lost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from omnibal.model.parallel import Parallel, WeightSharding
from omnibal.search.strategy_search import StrategySearch


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingChoice:
    """Weight sharding of a plan, and why every alternative is slower or impossible."""

    parallel: Parallel  # chosen sizes, with the sharding
    others: Mapping[WeightSharding, str]
    """Why each alternative is slower or impossible, with its best sizes."""

    @property
    def sharding(self) -> WeightSharding:
        return self.parallel.sharding

    @property
    def reason(self) -> str:
        """Alternatives with reasons, separated by semicolons. Empty without alternatives."""
        return "; ".join(f"{way}: {why}" for way, why in self.others.items())

    @classmethod
    def of_strategies(cls, found: StrategySearch) -> Self:
        """Return the best strategy's sharding, and why the best of every other sharding lost."""
        best, others = found.best, dict[WeightSharding, str]()
        for strategy in found.ranking:
            slower = strategy.ms_per_sample / best.ms_per_sample - 1
            why = f"{strategy.parallel} takes {slower:+.1%} per sample, {strategy.why}"
            others.setdefault(strategy.parallel.sharding, why)
        for out in found.ruled_out:
            others.setdefault(out.parallel.sharding, f"{out.parallel}, {out.why}")
        others.pop(best.parallel.sharding)  # the chosen one
        return cls(parallel=best.parallel, others=others)

    def as_dict(self) -> dict[str, object]:
        others = {way.value: why for way, why in self.others.items()}
        return {
            "sharding": self.sharding.value,
            "sharding_ranks": self.parallel.sharded,
            "other_shardings": others,
        }
