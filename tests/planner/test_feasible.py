"""What would fit: every change that is named makes a plan, and no smaller one of its kind does."""

import pickle
import re
from dataclasses import replace
from itertools import product

import pytest
from plan_cases import MODEL, changed, example_lengths, example_profile, request

from omnibal.base.errors import DoesNotFit, UserError
from omnibal.cost.profile import Measured, model_sha256
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import MockData, SampleData, least_caps
from omnibal.job.planner import PlanRequest, make_plan
from omnibal.model.config import load_cluster, load_model
from omnibal.model.levels import Level
from omnibal.model.limits import Caps, memory_cap_gib
from omnibal.model.parallel import Parallel
from omnibal.model.targets import RecomputeFreedom, StageRules, TrainerConstraints
from omnibal.packing.packing import PackingMethod
from omnibal.pipeline.baselines import PartitionMethod, RecomputeRule
from omnibal.search import feasible
from omnibal.search.feasible import (
    Advice,
    Change,
    find_changes,
    gib_text,
    smaller_caps,
)
from omnibal.steps.steps import steps_of

LIMITED = StageRules(
    encoders_on_first=True, language_everywhere=True, recompute=RecomputeFreedom.LANGUAGE
)
ANY = Caps.of(tiles=1, tokens=1)
"""Of which every sample is larger."""


def fits(planned: PlanRequest) -> bool:
    try:
        make_plan(planned)
    except UserError:
        return False
    return True


def with_memory(planned: PlanRequest, gib: float) -> PlanRequest:
    return changed(planned, cluster=planned.job.cluster.model_copy(update={"memory_gib": gib}))


def least_memory(planned: PlanRequest) -> float:
    """GiB of a device, by trying: just enough for a plan."""
    low, high = 0.0, 0.02
    while not fits(with_memory(planned, high)):
        low, high = high, 2 * high
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(with_memory(planned, middle)) else (middle, high)
    return high


def sized(planned: PlanRequest, **sizes: int) -> PlanRequest:
    """As many micro-batches per rank."""
    parallel = planned.job.parallel.model_copy(update=sizes)
    if isinstance(planned.data, MockData):
        return changed(planned, parallel=parallel)
    packs_per_step = planned.data.micro_batches(planned.job) * parallel.data
    return changed(planned, parallel=parallel, packs_per_step=packs_per_step)


def one_epoch(**changes) -> PlanRequest:
    given = {"parallel": Parallel(pipeline=2), "packs_per_step": 4, "epochs": 1}
    return request(**(given | changes))


def changes_of(planned: PlanRequest) -> tuple[Change, ...]:
    return find_changes(planned).changes


LARGER = {
    "tensor": [{"tensor": 2, "sequence_parallel": True}],
    "pipeline": [{"pipeline": size} for size in range(3, 9)],
    "data": [{"data": 2}, {"data": 3}, {"data": 4}],
}


@pytest.mark.parametrize(
    ("lengths", "share"),
    [
        *(
            pytest.param(example_lengths(), share, id=f"data-{share}")
            for share in (0.97, 0.7, 0.55)
        ),
        *(pytest.param(None, share, id=f"shapes-{share}") for share in (0.85, 0.55)),
    ],
)
def test_changes_are_the_smallest_that_fit(lengths, share):
    """Prevents advice that does not help, and more devices than are needed."""
    roomy = one_epoch(lengths=lengths)
    planned = with_memory(roomy, share * least_memory(roomy))
    assert not fits(planned)
    found = changes_of(planned)
    for change in found:
        assert fits(change.request)
        assert change.need_gib <= memory_cap_gib(change.request.job.cluster)
        figures = re.search(r"needs (\S+) of (\S+) GiB\)$", change.text)
        shown = [float(figure) for figure in figures.groups()]
        exact = [change.need_gib, memory_cap_gib(change.request.job.cluster)]
        assert shown == pytest.approx(exact, rel=0.005)
    expected = []
    for kinds in LARGER.values():
        requests = [sized(planned, **sizes) for sizes in kinds]
        expected += [each for each in requests if fits(each)][:1]
    larger = {
        change.request.job.parallel
        for change in found
        if change.request.job.parallel != planned.job.parallel and len(change.text.split("--")) == 2
    }
    assert larger == {each.job.parallel for each in expected}
    sizes = [change.request.job.parallel.world_size for change in found]
    assert sizes[:-1] == sorted(sizes[:-1])


def test_changes_keep_to_limits_of_stages():
    """Prevents advice by splits that a trainer cannot be told."""
    most = Parallel(pipeline=MODEL.language.layers)
    roomy = one_epoch(lengths=None, parallel=most, packs_per_step=8)
    limited = replace(roomy, job=replace(roomy.job, trainer=TrainerConstraints(stages=LIMITED)))
    planned = with_memory(limited, 0.8 * least_memory(limited))
    found = changes_of(planned)
    assert all(
        fits(change.request) and change.request.job.trainer.stages == LIMITED for change in found
    )
    sizes = [change.request.job.parallel for change in found]
    assert [each for each in sizes if each.pipeline != most.pipeline] == [
        Parallel(pipeline=2, data=2)
    ]


def test_no_size_between_is_left_out():
    """Prevents four times the ranks where three times would do."""
    roomy = one_epoch(lengths=None)
    planned = with_memory(roomy, 1.002 * least_memory(sized(roomy, data=3)))
    assert not fits(sized(planned, data=2))
    assert 3 in [change.request.job.parallel.data for change in changes_of(planned)]


@pytest.mark.parametrize("share", [0.95, 0.8])
def test_next_larger_caps_do_not_fit(share):
    """Prevents caps smaller than needed, or ones that a sample does not fit."""
    roomy = one_epoch(packing=PackingMethod.BALANCED)
    planned = with_memory(roomy, share * least_memory(roomy))
    change = changes_of(planned)[0]
    tried = [
        planned.data.caps,
        *smaller_caps(planned.data.caps, least_caps(planned.data.lengths, ("tiles", "tokens"))),
    ]
    chosen = tried.index(change.request.data.caps)
    assert fits(change.request)
    assert not fits(changed(planned, caps=tried[chosen - 1]))
    caps = change.request.data.caps
    text = f"--max-tokens {caps['tokens']} --max-tiles {caps['tiles']} instead of 512 and 8"
    assert change.text.startswith(text)


def test_smaller_caps_are_round_and_hold_every_sample():
    """Prevents caps that `omnibal plan` then refuses, and tiles that tokens cannot fill."""
    assert smaller_caps(Caps.of(tiles=9, tokens=4096), ANY)[:2] == [
        Caps.of(tiles=8, tokens=3840),
        Caps.of(tiles=8, tokens=3584),
    ]
    lengths = example_lengths()
    for caps in smaller_caps(
        Caps.of(tiles=8, tokens=512), least_caps(lengths, ("tiles", "tokens"))
    ):
        assert caps["tokens"] >= lengths.tokens.max()
        assert caps["tiles"] >= lengths.column("tiles").max()
    least = Caps.of(tiles=int(lengths.column("tiles").max()), tokens=int(lengths.tokens.max()))
    assert smaller_caps(least, least_caps(lengths, ("tiles", "tokens"))) == []
    assert smaller_caps(ANY, ANY) == []


def test_two_larger_sizes_where_one_is_not_enough():
    """Prevents silence where more devices would do, though not in one direction."""
    alone = [{"tensor": 2}, {"data": 4}, {"pipeline": 8}]
    roomy = one_epoch(lengths=None)
    enough = 0.9 * min(least_memory(sized(roomy, **sizes)) for sizes in alone)
    planned = with_memory(roomy, enough)
    found = changes_of(planned)
    (pair,) = (change for change in found if " --pp " in change.text and "--tp 2" in change.text)
    assert fits(pair.request)
    for tensor, pipeline in product([1, 2], range(2, 9)):
        if tensor * pipeline < pair.request.job.parallel.world_size:
            assert not fits(sized(planned, tensor=tensor, pipeline=pipeline))


def test_device_with_more_memory():
    """Prevents the smallest device that would do from being missed, or a profile's from leaving."""
    model = load_model("internvl-chat-1.5-6b-20b")
    planned = request(
        model=model,
        cluster=load_cluster("a100-80g"),
        parallel=Parallel(tensor=2, pipeline=2, data=1, sequence_parallel=True),
        precision="bf16",
        caps=Caps.of(tiles=8, tokens=2560),
        lengths=None,
        packs_per_step=8,
    )
    found = [change.text for change in changes_of(planned)]
    assert found[-1].startswith("--cluster h200-141g instead of a100-80g (needs ")
    assert found[-1].endswith("of 125 GiB)")
    assert any(text.startswith("--tp 4 instead of 2 (8 devices, needs ") for text in found)


def test_a_larger_device_needs_its_own_memory():
    """Prevents advice that does not help while --memory-gib stays on the command line."""
    small = load_cluster("a100-80g").model_copy(update={"memory_gib": 20.0})
    planned = PlanRequest(
        job=JobSpec(
            model=load_model("internvl2-8b"),
            cluster=small,
            parallel=Parallel(pipeline=2, data=2),
            precision="bf16",
        ),
        data=MockData(caps=Caps.of(tiles=4, tokens=2048), micro_batches_per_step=4),
    )
    told = [text for text, _ in feasible._roomier(planned)]
    assert told[-2:] == [
        f"--cluster {name} and no --memory-gib instead of a100-80g"
        for name in ("h200-141g", "b200-180g")
    ]
    whole = replace(planned, job=replace(planned.job, cluster=load_cluster("a100-80g")))
    assert [text for text, _ in feasible._roomier(whole)] == [
        f"--cluster {name} instead of a100-80g" for name in ("h200-141g", "b200-180g")
    ]


def test_steps_that_are_given_stay():
    """Prevents other caps for steps that are packed, and another number of packs in them."""
    roomy = one_epoch()
    scheduled, _ = make_plan(roomy).data
    given = changed(roomy, steps=steps_of(scheduled))
    planned = with_memory(given, 0.9 * least_memory(given))
    found = changes_of(planned)
    assert found
    assert all(change.request.data.caps == planned.data.caps for change in found)
    assert all(
        change.request.data.packs_per_step == planned.data.packs_per_step for change in found
    )
    assert all(fits(change.request) for change in found)


def test_jobs_of_levels_are_told_what_fits():
    """Prevents advice from the memory of another job than the one of levels."""
    levels = (
        Level(caps=Caps.of(tiles=4, tokens=192)),
        Level(caps=Caps.of(tiles=8, tokens=512), context=2),
    )
    roomy = one_epoch(parallel=Parallel(pipeline=2, data=2))
    roomy = changed(roomy, levels=levels, packs_per_step=8)
    planned = with_memory(roomy, 0.95 * least_memory(roomy))
    found = changes_of(planned)
    assert found
    for change in found:
        assert change.request.data.levels == levels
        assert fits(change.request)
        assert not fits(with_memory(change.request, 0.98 * change.need_gib))


def advice_of(planned: PlanRequest) -> str:
    with pytest.raises(DoesNotFit) as raised:
        make_plan(planned)
    return find_changes(planned).message(raised.value)


LAYER = {"method": PartitionMethod.LAYER, "recompute": RecomputeRule.NONE}


def test_named_methods_are_told_of_more_than_the_search():
    """Prevents "nothing is enough" though nothing but the search was tried."""
    roomy = one_epoch()
    tight = with_memory(roomy, 0.8 * least_memory(roomy))
    expected = [change.request.job.parallel for change in changes_of(tight)]
    found = changes_of(replace(tight, **LAYER))
    assert [change.request.job.parallel for change in found] == expected
    assert found
    for change in found:
        assert fits(change.request)
        assert "instead of layer with none, and --" in change.text


@pytest.mark.parametrize("method", [{}, LAYER], ids=["joint", "layer"])
def test_only_what_was_tried_is_called_not_enough(method):
    """Prevents caps or devices from being ruled out that were never looked at."""
    kinds = ("--max-tokens", "--tp", "--pp", "--dp", "preset device", "joint partition")
    model = {"model_sha256": model_sha256(one_epoch().job.model)}
    profile = example_profile(activation_bytes=2**20).model_copy(update=model)
    scheduled, _ = make_plan(one_epoch()).data
    for changes, absent in (
        ({}, set()),
        ({"steps": steps_of(scheduled)}, {"--max-tokens"}),
        ({"cost_source": Measured(profile)}, {"preset device", "--tp"}),
    ):
        tiny = with_memory(one_epoch(**changes, **method), 1e-6)
        if "cost_source" not in changes:
            # No preset is large enough for a model of so many parameters either.
            vast = tiny.job.model.language.model_copy(update={"vocab_size": 10**10})
            tiny = changed(tiny, model=tiny.job.model.model_copy(update={"language": vast}))
        message = advice_of(tiny)
        assert "what would fit" not in message
        named = message.rpartition("is enough: ")[2]
        wanted = set(kinds) - absent - (set() if method else {"joint partition"})
        assert {kind for kind in kinds if kind in named} == wanted


def test_a_cause_with_semicolons_stays_whole():
    """Prevents a cause cut at its last semicolon, or lost on the way from another process."""
    sent = DoesNotFit("needs 93.0 GiB; the cap is 80.0", "raise it; or use less")
    error = pickle.loads(pickle.dumps(sent))
    assert (error.need, error.advice) == (sent.need, sent.advice)
    assert str(error) == "needs 93.0 GiB; the cap is 80.0; raise it; or use less"
    found = Advice(changes=(), tried=("more stages",)).message(error)
    assert found.startswith("needs 93.0 GiB; the cap is 80.0; of these, no single one")
    assert Advice(changes=(), tried=()).message(error) == str(error)


@pytest.mark.parametrize("gib", [125.06, 72.0, 9.996, 0.5, 0.01234, 0.000321])
def test_small_devices_have_figures(gib):
    """Prevents "needs 0.0 of 0.0 GiB"."""
    assert float(gib_text(gib)) == pytest.approx(gib, rel=0.005)
    assert len(gib_text(gib).replace(".", "").lstrip("0")) in (3, 4)


def test_many_samples_are_drawn_from(monkeypatch):
    """Prevents minutes of packing millions of samples for every cap that is tried."""
    roomy = one_epoch(lengths=example_lengths(count=300))
    planned = with_memory(roomy, 0.9 * least_memory(roomy))
    monkeypatch.setattr(feasible, "SAMPLES", 200)
    seen: list[int] = []
    packed = SampleData.packed

    def counted(data: SampleData, job: JobSpec):
        seen.append(len(data.lengths))
        return packed(data, job)

    monkeypatch.setattr(SampleData, "packed", counted)
    found = changes_of(planned)
    assert found
    assert set(seen) == {200}
    assert all(len(change.request.data.lengths) == 300 for change in found)


def test_other_mistakes_are_said_as_they_are():
    """Prevents a mistake that has nothing to do with memory from being answered with advice."""
    with pytest.raises(UserError, match="exceed the caps"):
        find_changes(one_epoch(caps=Caps.of(tiles=1, tokens=64)))
