"""A small planning request, for the tests of plans and of their checks."""

import numpy as np

from omnibal.config import ModelConfig, load_cluster, load_model
from omnibal.data.lengths import Lengths, LengthsOrigin
from omnibal.data.packing import PackingMethod
from omnibal.plan import Caps, Parallel
from omnibal.planner import PlanRequest

MODEL = load_model("internvl-digits")


def origin_of(model: ModelConfig, **changes) -> LengthsOrigin:
    return LengthsOrigin(
        **{
            "data_sha256": "d",
            "tokenizer_sha256": "t",
            "image_size": model.vision.image_size,
            "tokens_per_tile": model.tokens_per_tile,
            "tiling": model.tiling,
        }
        | changes
    )


def example_lengths(origin: LengthsOrigin | None = None, count: int = 300) -> Lengths:
    rng = np.random.default_rng(0)
    tiles = rng.integers(0, 5, count).astype(np.int32)
    tokens = (tiles * MODEL.tokens_per_tile + rng.integers(10, 90, count)).astype(np.int32)
    return Lengths(
        tiles=tiles,
        tokens=tokens,
        loss_tokens=(tokens // 4).astype(np.int32),
        source=(np.arange(count) % 2).astype(np.int32),
        source_names=("pages", "strips"),
        origin=origin,
    )


def request(**changes) -> PlanRequest:
    defaults = {
        "model": MODEL,
        "cluster": load_cluster("laptop-cpu"),
        "parallel": Parallel(pipeline=2, data=2),
        "precision": "fp32",
        "caps": Caps(max_tiles=8, max_tokens=512),
        "lengths": example_lengths(),
        "packing": PackingMethod.ISF,
        "micro_batches": 4,
        "epochs": 2,
        "seed": 0,
        "profile": None,
    }
    return PlanRequest(**(defaults | changes))
