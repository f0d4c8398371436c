"""Costs of encoders that are held whole, by ranks that would otherwise share them out.

A rank's copy costs what it costs at tensor size 1: all of the time, of the activations and of the
parameters, and no collective.
"""

from collections.abc import Collection
from dataclasses import replace

from omnibal.config import ClusterConfig, ModelConfig, Precision
from omnibal.cost.model import CostModel
from omnibal.cost.source import ANALYTIC, CostSource
from omnibal.parallel import Parallel
from omnibal.units import LANGUAGE


def with_whole_encoders(
    cost: CostModel,
    model: ModelConfig,
    cluster: ClusterConfig,
    parallel: Parallel,
    precision: Precision,
    frozen: Collection[str] = (),
    source: CostSource = ANALYTIC,
) -> CostModel:
    """Costs where tensor-parallel ranks each compute all of the encoders and projectors.

    They compute the same from the same inputs, so that gradients need no exchange among them. As
    all else, each rank's copy is reduced, gathered and updated with the data-parallel ranks alone,
    which divide its optimizer state.

    Args:
        cost: with encoders shared out.

    Raises:
        UserError: the source has costs of encoders that are shared out alone.
    """
    if parallel.tensor == 1 or not model.encoders:
        return cost
    whole = source.costs(model, cluster, Parallel(pipeline=1), precision, frozen)
    units = {
        kind.name: cost.units[kind.name] if kind.tower == LANGUAGE else whole.units[kind.name]
        for kind in cost.kinds
    }
    return replace(cost, units=units)
