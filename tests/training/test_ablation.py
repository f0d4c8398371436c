"""Plans of the ablation: equal samples, costs of padding and recomputation, and the published table
against the measurement."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from length_cases import lengths_of
from pipeline_cases import pipeline_plan
from ranks import run_ranks
from toy import OPTIONS, toy_batch

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.clock import PhaseClock
from megatron.vlm.step.schedule import run_forward_backward
from megatron.vlm.step.train import build_trainer
from omnibal.base.files import read_json_model
from omnibal.job.check import check_plan
from omnibal.job.plan_files import save_plan
from omnibal.job.planner import PlanResult
from omnibal.model.config import load_cluster, load_model
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.features import pack_features
from omnibal.packing.shares import shares_of
from omnibal.pipeline.stage_cost import stage_times
from omnibal.pipeline.stage_memory import stage_memories
from omnibal.pipeline.workload import Workload

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from ablation import AblationResult, lost_entries, markdown_of, picture
from ablation_runs import padded_to_longest
from ablation_variants import AblationJob, Variant, make_variant, recomputing_cost

REPOSITORY = Path(__file__).parents[2]
SAMPLES_PER_STEP = 22
"""Not a multiple of the micro-batch size, 4."""


@pytest.fixture(scope="module")
def job() -> AblationJob:
    model, rng = load_model("internvl-digits"), np.random.default_rng(0)
    tiles, text = rng.integers(0, 5, 300), rng.integers(3, 60, 300)
    tokens = tiles * model.vision.tokens_per_item + text
    node = {"memory_gib": 4.0, "gpus_per_node": 8}
    return AblationJob(
        model=model, parallel=Parallel(pipeline=3, data=2),
        cluster=load_cluster("laptop-cpu").model_copy(update=node),
        caps=Caps.of(tiles=8, tokens=300), samples_per_step=SAMPLES_PER_STEP,
        lengths=lengths_of(tiles=tiles, tokens=tokens, loss_tokens=text // 3), seed=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def results(job: AblationJob) -> dict[Variant, PlanResult]:
    return {variant: make_variant(job, variant) for variant in Variant}


def test_every_plan_is_sound_and_trains_each_sample_once(results, tmp_path):
    """Prevents comparing plans that drop samples or that the trainer would refuse."""
    for variant, result in results.items():
        save_plan(result, tmp_path / variant.name)
        assert check_plan(tmp_path / variant.name)
        packs, lengths = result.data
        assert sorted(packs.packs.samples.tolist()) == list(range(len(lengths)))


def test_plain_variants_have_the_same_samples_in_every_step(job, results):
    """Prevents the careful baseline from winning by a different sample order or larger steps."""
    common, careful = (results[v].data[0] for v in (Variant.COMMON, Variant.CAREFUL))
    assert common.steps == careful.steps == -(-len(job.lengths) // SAMPLES_PER_STEP)
    for step in range(common.steps):
        own, others = (
            set(packs.packs.take(np.flatnonzero(packs.step == step)).samples.tolist())
            for packs in (common, careful)
        )
        assert own == others
        last = step == common.steps - 1
        assert len(own) == (len(job.lengths) % SAMPLES_PER_STEP if last else SAMPLES_PER_STEP)


def test_packs_are_balanced_at_about_the_same_step(job, results):
    """Prevents balancing from winning by a larger global batch or other packs per variant."""
    balanced = [results[v] for v in (Variant.DATA, Variant.MODEL, Variant.MEMORY)]
    assert len({result.plan.data.packs_sha256 for result in balanced}) == 1
    plan, (packs, lengths) = balanced[0].plan, balanced[0].data
    samples_per_pack = len(lengths) / len(packs)
    per_step = plan.data.packs_per_step
    assert per_step % job.parallel.data == 0
    half_a_round = job.parallel.data / 2 * samples_per_pack
    assert abs(per_step * samples_per_pack - SAMPLES_PER_STEP) <= half_a_round


def test_common_features_are_those_of_padded_micro_batches(job, results):
    """Prevents padding that costs nothing or is counted as tiles or loss tokens."""
    packs, padded = results[Variant.COMMON].data
    features = pack_features(packs.packs, padded, job.cost.features)
    lengths = job.lengths
    for row, samples in enumerate(packs.packs[row] for row in range(len(packs))):
        assert 1 <= len(samples) <= 4
        longest, number = lengths.tokens[samples].max(), len(samples)
        tiles, answers = (lengths.column(n)[samples].sum() for n in ("tiles", "loss_tokens"))
        by_hand = [1, tiles, number * longest, number * longest**2, answers]
        assert features[row].tolist() == by_hand
        assert packs.tokens[row] == number * longest


def test_recompute_of_each_variant(results):
    """Prevents a variant with another variant's recomputation."""
    for variant, result in results.items():
        for stage in result.plan.stages:
            layers = stage.number_of_layers()
            assert stage.recomputed_layers == (0 if variant is Variant.MEMORY else layers)


def test_recomputing_cost_is_that_of_recomputed_layers(job, results):
    """Prevents a partition search that assumes other times or memory than its final plan has."""
    packs, lengths = results[Variant.DATA].data
    features = pack_features(packs.packs, lengths, job.cost.features)
    again = results[Variant.DATA].plan.stages
    kept = [stage.model_copy(update={"recompute": ()}) for stage in again]
    assumed = recomputing_cost(job.cost)
    wanted, found = stage_times(job.cost, again, features), stage_times(assumed, kept, features)
    np.testing.assert_allclose(found.forward_ms, wanted.forward_ms)
    np.testing.assert_allclose(found.backward_ms, wanted.backward_ms)
    workload = Workload.build(shares_of(packs, results[Variant.DATA].plan.pack_levels), features, 2)
    wanted_gib, found_gib = (
        [memory.peak_gib for memory in stage_memories(cost, [stages], workload)]
        for cost, stages in ((job.cost, again), (assumed, kept))
    )
    assert found_gib == pytest.approx(wanted_gib)


def gradients(links, plan, batch):
    """Return the loss and all gradients of one micro-batch."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=0)
    trainer.models[0].zero_grad_buffer()
    batches = MicroBatchStream.of([batch])
    begin = trainer.data_parallel.begin_pass
    losses = run_forward_backward(plan, trainer.models, links, batches, PhaseClock(), begin)
    grads = {name: p.main_grad.clone() for name, p in trainer.stage.named_parameters()}
    return torch.stack(losses).sum().item(), grads


def test_padding_changes_neither_loss_nor_gradients():
    """Prevents padding that is attended to, learned, or that shifts images or answers."""
    plan = pipeline_plan()
    batch = toy_batch(plan.model, [(1, 9), (0, 6), (2, 20), (1, 4)], seed=5)
    padded = padded_to_longest(batch)
    longest = max(batch.segment_tokens)
    assert padded.segment_tokens == (longest,) * 4
    assert padded.tokens == len(padded.token_ids_S) == 4 * longest > batch.tokens
    (plain_loss, plain), (padded_loss, with_padding) = (
        run_ranks(plan.parallel, gradients, plan, one)[0] for one in (batch, padded)
    )
    assert padded_loss == pytest.approx(plain_loss, rel=1e-6)
    assert plain_loss > 0 and all(grad.any() for grad in plain.values())
    torch.testing.assert_close(with_padding, plain, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def result() -> AblationResult:
    return read_json_model(AblationResult, REPOSITORY / "docs" / "ablation.json", "measure it")


def test_readme_and_picture_show_what_was_measured(result):
    """Prevents published figures that differ from the recorded measurement."""
    assert markdown_of(result) in (REPOSITORY / "README.md").read_text()
    drawn = (REPOSITORY / "docs" / "ablation.svg").read_text()
    assert drawn == picture(result.layouts[-1])


def test_lost_time_adds_up(result):
    """Prevents a table of lost time that does not sum to the step time."""
    for layout in result.layouts:
        for one in layout.variants:
            total = sum(lost_entries(one).values())
            if one.trained:
                step = one.trained.usual_step_ms + one.trained.logging_ms
            else:
                step = sum(one.replayed.step_ms) / len(one.replayed.step_ms)
            assert total == pytest.approx(step)
            # Entries of all paired rounds.
            assert len(one.step_ms) == len(one.predicted_ms) == len(one.samples)
