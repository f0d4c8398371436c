"""A small planning request, for tests of plans and of plan checks."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from unittest.mock import Mock

import numpy as np
import pytest

from omnibal.cost.profile import Profile, UnitMeasurement
from omnibal.cost.source import ANALYTIC
from omnibal.data.lengths import Lengths, LengthsOrigin
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import MockData, SampleData
from omnibal.job.planner import PlanRequest, make_plan
from omnibal.model.config import ModelConfig, load_cluster, load_model
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.units import unit_names
from omnibal.packing.pack_settings import PackSettings
from omnibal.packing.packing import PackingMethod
from omnibal.search.strategy import StrategyRequest

MODEL = load_model("internvl-digits")


def origin_of(model: ModelConfig, **changes) -> LengthsOrigin:
    return LengthsOrigin(
        **{
            "data_sha256": "d",
            "tokenizer_sha256": "t",
            "image_size": model.vision.image_size,
            "tokens_per_tile": model.vision.tokens_per_item,
            "tiling": model.vision.tiling,
            "chat_template": model.chat_template,
            "system_message": model.system_message,
        }
        | changes
    )


def example_lengths(origin: LengthsOrigin | None = None, count: int = 300) -> Lengths:
    rng = np.random.default_rng(0)
    tiles = rng.integers(0, 5, count).astype(np.int32)
    tokens = (tiles * MODEL.vision.tokens_per_item + rng.integers(10, 90, count)).astype(np.int32)
    return Lengths(
        items={"tiles": tiles},
        tokens=tokens,
        loss_tokens=(tokens // 4).astype(np.int32),
        source=(np.arange(count) % 2).astype(np.int32),
        source_names=("pages", "strips"),
        origin=origin,
    )


JOB = {
    "model": MODEL,
    "cluster": load_cluster("laptop-cpu"),
    "parallel": Parallel(pipeline=2, data=2),
    "precision": "fp32",
    "frozen": (),
    "adapters": None,
    "cost_source": ANALYTIC,
    "placement": EncoderPlacement.PIPELINE,
}
DATA = {
    "lengths": example_lengths(),
    "caps": Caps.of(tiles=8, tokens=512),
    "packing": PackingMethod.ISF,
    "packs_per_step": 8,
    "epochs": 2,
    "seed": 0,
    "steps": None,
}
ISF = PackSettings(packing=PackingMethod.ISF)


def job_spec(**changes) -> JobSpec:
    return JobSpec(**(JOB | changes))


def request(**changes) -> PlanRequest:
    """Return a request with changed fields of job, data or request; mock data without lengths."""
    job = job_spec(**{name: changes.pop(name) for name in JOB if name in changes})
    fields = DATA | {name: changes.pop(name) for name in DATA if name in changes}
    data: SampleData | MockData
    if fields["lengths"] is None:
        micro_batches = -(-fields["packs_per_step"] // job.parallel.data)
        data = MockData(caps=fields["caps"], micro_batches_per_step=micro_batches)
    else:
        data = SampleData(
            lengths=fields["lengths"],
            settings=settings_of(fields),
            levels=(Level(caps=fields["caps"]),),
            packs_per_step=fields["packs_per_step"],
            steps=fields["steps"],
        )
    return PlanRequest(job=job, data=data, **changes)


def alter(planned: PlanRequest, **changes) -> PlanRequest:
    """Return the request with changed fields of its job or data."""
    job = replace(planned.job, **{name: changes.pop(name) for name in JOB if name in changes})
    data = planned.data
    if "caps" in changes:
        data = data.with_caps(changes.pop("caps"))
    if isinstance(data, SampleData):
        changes["settings"] = settings_of(changes, data.settings)
    return replace(planned, job=job, data=replace(data, **changes))


def settings_of(fields: dict, settings: PackSettings = ISF) -> PackSettings:
    """Pop pack settings from `fields`, and return `settings` with them."""
    names = [each.name for each in dataclasses.fields(PackSettings) if each.name in fields]
    return replace(settings, **{name: fields.pop(name) for name in names})


def example_profile(activation_bytes: int | None = None) -> Profile:
    shapes = [(0, 40), (2, 100), (4, 300), (8, 512)]
    return Profile(
        device="test",
        precision="fp32",
        model="internvl-digits",
        model_sha256="m",
        tensor=1,
        processes=2,
        measurements=tuple(
            UnitMeasurement(
                unit=unit,
                tiles=tiles,
                tokens=tokens,
                squared_tokens=tokens**2,
                loss_tokens=tokens // 3,
                forward_ms=1.0 + tiles + tokens,
                backward_ms=2.0 + tiles + tokens,
                activation_bytes=activation_bytes,
            )
            for unit in dict.fromkeys(unit_names(MODEL))
            for tiles, tokens in shapes
        ),
    )


def search_request(defaults: dict, changes: dict) -> StrategyRequest:
    """Return a search with changed fields of search, job or pack settings."""
    given = defaults | changes
    job = job_spec(**{name: given.pop(name) for name in JOB if name in given})
    samples = {"samples_per_step": given.pop("samples_per_step")}
    return StrategyRequest(job=job, settings=settings_of(given), **samples, **given)


def planned_ms_per_sample(searched: StrategyRequest, caps: Caps, parallel: Parallel) -> float:
    """Return the planner's prediction, for steps of the requested samples."""
    job = searched.job.with_sizes(parallel)
    data = SampleData(
        lengths=searched.lengths,
        settings=replace(searched.settings, samples_per_step=searched.samples_per_step),
        levels=(Level(caps=caps),),
        packs_per_step=parallel.data,
    )
    plan = make_plan(PlanRequest(job=job, data=data)).plan
    return plan.known_prediction.step_ms * plan.data.steps / len(searched.lengths)


def counting(monkeypatch: pytest.MonkeyPatch, module: ModuleType, function: Callable) -> Mock:
    """Replace a module's function by a mock that records calls."""
    counted = Mock(wraps=function)
    monkeypatch.setattr(module, function.__name__, counted)
    return counted
