"""Costs of encoders that are held whole, by ranks that would otherwise share them out.

A rank's copy costs what it costs at tensor size 1: all of the time, of the activations and of the
parameters, and no collective.
"""

from collections.abc import Collection
from dataclasses import replace

from omnibal.config import ClusterConfig, ModelConfig, Precision
from omnibal.cost.analytic import analytic_cost
from omnibal.cost.model import CostModel
from omnibal.cost.profile import Profile, fitted_cost
from omnibal.errors import UserError
from omnibal.parallel import Parallel
from omnibal.units import LANGUAGE


def cost_of_copies(
    model: ModelConfig,
    cluster: ClusterConfig,
    ranks: int,
    precision: Precision,
    frozen: Collection[str] = (),
    profile: Profile | None = None,
) -> CostModel:
    """Cost of a model of which each of so many ranks has a whole copy, counted or measured.

    Raises:
        UserError: the profile is of another model, precision or tensor-parallel size.
    """
    # Whole copies on all ranks are what tensor size 1 with so many data-parallel ranks is.
    sizes = model, cluster, Parallel(pipeline=1, data=ranks), precision, frozen
    return analytic_cost(*sizes) if profile is None else fitted_cost(profile, *sizes)


def with_whole_encoders(
    cost: CostModel,
    model: ModelConfig,
    cluster: ClusterConfig,
    parallel: Parallel,
    precision: Precision,
    frozen: Collection[str] = (),
    profile: Profile | None = None,
) -> CostModel:
    """Costs where tensor-parallel ranks each compute all of the encoders and projectors.

    They compute the same from the same inputs, so that gradients need no exchange among them. As
    all else, each rank's copy is reduced, gathered and updated with the data-parallel ranks alone,
    which divide its optimizer state.

    Args:
        cost: with encoders shared out.

    Raises:
        UserError: the profile measured encoders that are shared out.
    """
    if parallel.tensor == 1 or not model.encoders:
        return cost
    if profile is not None:
        raise UserError(
            f"the profile of {profile.model} was measured with tensor size {profile.tensor}, where "
            "ranks share encoders out, and the trainer's ranks each compute all of them: count "
            "without --profile, or profile with tensor size 1 and give --tp 1"
        )
    whole = cost_of_copies(model, cluster, 1, precision, frozen)
    units = {
        kind.name: cost.units[kind.name] if kind.tower == LANGUAGE else whole.units[kind.name]
        for kind in cost.kinds
    }
    return replace(cost, units=units)
