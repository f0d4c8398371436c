"""Greedy answers of a whole model in one process, to try a checkpoint. Shapes: S tokens so far."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from megatron.vlm.backend import current_device
from megatron.vlm.checkpoint.identity import CheckpointIdentity
from megatron.vlm.checkpoint.save_load import load_weights
from megatron.vlm.inputs.batch import MicroBatch
from megatron.vlm.inputs.native_images import asked_fields
from megatron.vlm.inputs.reader import SampleReader
from megatron.vlm.model.stage import VLMStage, build_stage
from omnibal.data.sample import Sample
from omnibal.job.plan import Plan
from omnibal.model.config import PlainPrecision, load_cluster
from omnibal.model.parallel import Parallel
from omnibal.pipeline.unit_runs import stages_from_cuts


def load_whole_model(
    directory: Path, checkpoint: CheckpointIdentity, precision: PlainPrecision
) -> VLMStage:
    """Load a run's newest checkpoint in eval mode; needs parallel state for one process."""
    plan = Plan(
        model=checkpoint.model,
        adapters=checkpoint.adapters,
        precision=precision,
        parallel=Parallel(pipeline=1),
        stages=stages_from_cuts(checkpoint.model, ()),
        cluster=load_cluster("laptop-cpu"),  # unused
        data=None,
    )
    stage = build_stage(plan, 0)
    load_weights(directory, plan, [stage])
    return stage.eval()


@torch.inference_mode()
def generate(
    stage: VLMStage, reader: SampleReader, sample: Sample, max_new_tokens: int
) -> Iterator[int]:
    """Yield the token ids of the answer to a sample's last question, without the end token.

    The prompt is InternVL's `chat` template with the model's system message. Images and recordings
    are encoded once. The text is recomputed for every token, without a KV cache.
    """
    device = current_device()
    prompt = reader.prompt(sample, len(sample.turns) - 1, max_new_tokens, chatting=True)
    ids_S = torch.from_numpy(prompt.token_ids)
    model = stage.model_config
    patches = [] if model.images is None else [reader.patches(sample, prompt.shown)]
    # Only the prompt has placeholders: an answer may contain the placeholder token by chance.
    asked = MicroBatch(
        tiles=prompt.tiles,
        clips=prompt.clips,
        tokens=len(ids_S),
        segment_tokens=(len(ids_S),),
        pixels_TCPP=reader.pixels([sample])[: prompt.tiles] if model.takes_images else None,
        frames_CBF=reader.frames([sample])[: prompt.clips] if model.takes_audio else None,
        token_ids_S=ids_S,
        image_positions_M=reader.image_positions(ids_S),
        audio_positions_N=reader.audio_positions(ids_S),
        **asked_fields(reader, [(prompt, 0)], patches),
    ).to(device)
    features = stage.encode(asked)
    ids_S = ids_S.to(device)
    for answered in range(max_new_tokens):
        batch = replace(
            asked,
            tokens=len(ids_S),
            segment_tokens=(len(ids_S),),
            token_ids_S=ids_S,
            answer_positions_A=torch.tensor([len(ids_S) - 1], device=device),
            **asked_fields(reader, [(prompt, answered)], []),
        ).to(device)
        next_id = stage.head_output(batch, stage.read_text(batch, dict(features)))
        token = int(next_id.item())
        if token == reader.answer_end:
            return
        yield token
        ids_S = torch.cat([ids_S, next_id])
