"""Greedy answers of a model in one process, to try a checkpoint."""

from collections.abc import Iterator

import torch

from megatron.vlm.checkpoint.identity import CheckpointIdentity
from megatron.vlm.checkpoint.save_load import load_opened_weights
from megatron.vlm.inputs.reader import SampleReader
from megatron.vlm.model.stage import VLMStage, build_stage
from megatron.vlm.step.evaluate import Question, question_batch, read_media
from omnibal.data.sample import Sample
from omnibal.job.plan import Plan
from omnibal.model.config import PlainPrecision, load_cluster
from omnibal.model.parallel import Parallel
from omnibal.pipeline.unit_runs import stages_from_cuts


def load_whole_model(checkpoint: CheckpointIdentity, precision: PlainPrecision) -> VLMStage:
    """Return a checkpoint's full model in eval mode; needs parallel state of one process."""
    plan = Plan(
        model=checkpoint.model,
        adapters=checkpoint.adapters,
        precision=precision,
        parallel=Parallel(pipeline=1),
        stages=stages_from_cuts(checkpoint.model, ()),
        cluster=load_cluster("laptop-cpu"),  # required by Plan, and not used
        data=None,
    )
    stage = build_stage(plan, 0)
    load_opened_weights(checkpoint, plan, [stage])
    return stage.eval()


@torch.inference_mode()
def generate(
    stage: VLMStage, reader: SampleReader, sample: Sample, max_new_tokens: int
) -> Iterator[int]:
    """Yield the token ids of the answer to a sample's last question, without the end token.

    Images and recordings are encoded once. Without a KV cache, each token runs the full text.
    """
    turn = len(sample.turns) - 1
    prompt = reader.prompt(sample, turn, max_new_tokens, chatting=True)  # InternVL's `chat`
    question = Question(sample=sample, turn=turn, prompt=prompt)
    [units] = stages_from_cuts(stage.model_config, ())
    features = stage.encode(
        question_batch([question], {sample: read_media(reader, sample, units)}, reader)
    )
    for _ in range(max_new_tokens):
        batch = question_batch([question], {}, reader)
        token = int(stage.head_output(batch, stage.read_text(batch, dict(features))).item())
        if token == reader.answer_end:
            return
        yield token
        question.answer_ids.append(token)
