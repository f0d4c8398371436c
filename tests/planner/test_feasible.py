"""What would fit: every change that is named makes a plan, and no smaller one of its kind does."""

from dataclasses import replace

import pytest
from plan_cases import example_lengths, request

from omnibal.config import load_cluster, load_model
from omnibal.data.packing import PackingMethod
from omnibal.data.steps import steps_of
from omnibal.errors import DoesNotFit, UserError
from omnibal.feasible import (
    changes_that_fit,
    does_not_fit_message,
    fitting_changes,
    smaller_caps,
)
from omnibal.pipeline.baselines import PartitionMethod, RecomputeRule
from omnibal.plan import Caps, Parallel, memory_cap_gib
from omnibal.planner import PlanRequest, make_plan

CLUSTER = load_cluster("laptop-cpu")


def fits(planned: PlanRequest) -> bool:
    try:
        make_plan(planned)
    except UserError:
        return False
    return True


def with_memory(planned: PlanRequest, gib: float) -> PlanRequest:
    return replace(planned, cluster=planned.cluster.model_copy(update={"memory_gib": gib}))


def least_memory(planned: PlanRequest) -> float:
    """GiB of a device, by trying: just enough for a plan."""
    low, high = 0.0, 4.0
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(with_memory(planned, middle)) else (middle, high)
    return high


def sized(planned: PlanRequest, **sizes: int) -> PlanRequest:
    parallel = planned.parallel.model_copy(update=sizes)
    return replace(planned, parallel=parallel, packs_per_step=planned.micro_batches * parallel.data)


def one_epoch(**changes) -> PlanRequest:
    return request(parallel=Parallel(pipeline=2), packs_per_step=4, epochs=1, **changes)


LARGER = {
    "tensor": [{"tensor": 2}],
    "pipeline": [{"pipeline": 4}, {"pipeline": 8}],
    "data": [{"data": 2}, {"data": 4}],
}


@pytest.mark.parametrize("share", [0.97, 0.85, 0.7, 0.55])
@pytest.mark.parametrize("lengths", [example_lengths(), None], ids=["data", "shapes"])
def test_changes_are_the_smallest_that_fit(lengths, share):
    """Prevents advice that does not help, and more devices than are needed."""
    roomy = one_epoch(lengths=lengths)
    planned = with_memory(roomy, share * least_memory(roomy))
    assert not fits(planned)
    found = fitting_changes(planned)
    for change in found:
        assert fits(change.request)
        assert change.need_gib <= memory_cap_gib(change.request.cluster)
        assert f"needs {change.need_gib:.1f} of" in change.text
    expected = []
    for kinds in LARGER.values():
        requests = [sized(planned, **sizes) for sizes in kinds]
        expected += [each for each in requests if fits(each)][:1]
    larger = {
        change.request.parallel
        for change in found
        if change.request.parallel != planned.parallel and len(change.text.split("--")) == 2
    }
    assert larger == {each.parallel for each in expected}
    sizes = [change.request.parallel.world_size for change in found]
    assert sizes[:-1] == sorted(sizes[:-1])


@pytest.mark.parametrize("share", [0.95, 0.8])
def test_next_larger_caps_do_not_fit(share):
    """Prevents caps smaller than needed, or ones that a sample does not fit."""
    roomy = one_epoch(packing=PackingMethod.BALANCED)
    planned = with_memory(roomy, share * least_memory(roomy))
    change = fitting_changes(planned)[0]
    tried = [planned.caps, *smaller_caps(planned.caps, planned.lengths)]
    chosen = tried.index(change.request.caps)
    assert fits(change.request)
    assert not fits(replace(planned, caps=tried[chosen - 1]))
    caps = change.request.caps
    text = f"--max-tokens {caps.max_tokens} --max-tiles {caps.max_tiles} instead of 512 and 8"
    assert change.text.startswith(text)


def test_smaller_caps_are_round_and_hold_every_sample():
    """Prevents caps that `omnibal plan` then refuses, and tiles that tokens cannot fill."""
    assert smaller_caps(Caps(max_tiles=9, max_tokens=4096), None)[:2] == [
        Caps(max_tiles=8, max_tokens=3840),
        Caps(max_tiles=8, max_tokens=3584),
    ]
    lengths = example_lengths()
    for caps in smaller_caps(Caps(max_tiles=8, max_tokens=512), lengths):
        assert caps.max_tokens >= lengths.tokens.max()
        assert caps.max_tiles >= lengths.tiles.max()
    least = Caps(max_tiles=int(lengths.tiles.max()), max_tokens=int(lengths.tokens.max()))
    assert smaller_caps(least, lengths) == []
    assert smaller_caps(Caps(max_tiles=1, max_tokens=1), None) == []


def test_two_larger_sizes_where_one_is_not_enough():
    """Prevents silence where more devices would do, though not in one direction."""
    alone = [{"tensor": 2}, {"data": 4}, {"pipeline": 8}]
    roomy = one_epoch(lengths=None)
    enough = 0.9 * min(least_memory(sized(roomy, **sizes)) for sizes in alone)
    found = fitting_changes(with_memory(roomy, enough))
    pairs = [change for change in found if " --pp " in change.text and "--tp 2" in change.text]
    assert [change.request.parallel.tensor for change in pairs] == [2]
    assert fits(pairs[0].request)
    smaller = pairs[0].request.parallel.pipeline // 2
    assert smaller == 2 or not fits(sized(pairs[0].request, pipeline=smaller))


def test_device_with_more_memory():
    """Prevents the smallest device that would do from being missed, or a profile's from leaving."""
    model = load_model("internvl-chat-1.5-6b-20b")
    planned = PlanRequest(
        model=model,
        cluster=load_cluster("a100-80g"),
        parallel=Parallel(tensor=2, pipeline=2, data=1, sequence_parallel=True),
        precision="bf16",
        caps=Caps(max_tiles=8, max_tokens=2560),
        lengths=None,
        packing=PackingMethod.BALANCED,
        packs_per_step=8,
        epochs=1,
        seed=0,
        profile=None,
    )
    found = changes_that_fit(planned)
    assert found[-1].startswith("--cluster h200-141g instead of a100-80g (needs ")
    assert found[-1].endswith("of 125.1 GiB)")
    assert any(text.startswith("--tp 4 instead of 2 (needs ") for text in found)


def test_named_methods_are_told_of_the_search():
    """Prevents changes that help the search but not the method that was asked for."""
    roomy = one_epoch()
    planned = replace(
        with_memory(roomy, 1.02 * least_memory(roomy)),
        method=PartitionMethod.LAYER,
        recompute=RecomputeRule.NONE,
    )
    assert not fits(planned)
    (change,) = fitting_changes(planned)
    assert "omnibal with recompute rule cheapest instead of layer with none" in change.text
    assert fits(change.request)


def test_steps_that_are_given_stay():
    """Prevents other caps for steps that are packed, and another number of packs in them."""
    roomy = one_epoch()
    scheduled, _ = make_plan(roomy).data
    given = replace(roomy, steps=steps_of(scheduled))
    planned = with_memory(given, 0.9 * least_memory(given))
    found = fitting_changes(planned)
    assert found
    assert all(change.request.caps == planned.caps for change in found)
    assert all(change.request.packs_per_step == planned.packs_per_step for change in found)
    assert all(fits(change.request) for change in found)


def test_message_holds_error_and_changes():
    """Prevents the cause from being lost behind the advice."""
    error = DoesNotFit("needs 93.0 GiB")
    assert does_not_fit_message(error, ["--tp 4", "--pp 8"]).startswith("needs 93.0 GiB; ")
    assert "--tp 4; or --pp 8" in does_not_fit_message(error, ["--tp 4", "--pp 8"])
    assert "no single larger" in does_not_fit_message(error, [])


def test_other_mistakes_are_said_as_they_are():
    """Prevents a mistake that has nothing to do with memory from being answered with advice."""
    with pytest.raises(UserError, match="exceed the caps"):
        fitting_changes(one_epoch(caps=Caps(max_tiles=1, max_tokens=64)))
