"""Greedy answers of a whole model in one process, for trying a checkpoint.

Shapes: S tokens so far.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from megatron.vlm.backend import current_device
from megatron.vlm.checkpoint.identity import CheckpointIdentity
from megatron.vlm.checkpoint.save_load import load_weights
from megatron.vlm.inputs.batch import MicroBatch
from megatron.vlm.inputs.data import SampleReader
from megatron.vlm.model.stage import VLMStage, build_stage
from omnibal.config import ModelConfig, Precision, load_cluster
from omnibal.data.sample import Sample
from omnibal.parallel import Parallel
from omnibal.pipeline.units import stages_from_cuts
from omnibal.plan import Plan


def load_whole_model(
    directory: Path, checkpoint: CheckpointIdentity, precision: Precision
) -> VLMStage:
    """Load the model of a run's newest checkpoint on this device, ready to answer.

    Megatron's parallel state must be initialized for one process.

    Raises:
        UserError: the checkpoint is broken.
    """
    plan = _whole_plan(checkpoint.model, precision)
    stage = build_stage(plan, 0)
    load_weights(directory, plan, [stage])
    return stage.eval()


def _whole_plan(model: ModelConfig, precision: Precision) -> Plan:
    """Plan with all units in one stage, without data; its cluster is not used."""
    return Plan(
        model=model,
        precision=precision,
        parallel=Parallel(pipeline=1),
        stages=stages_from_cuts(model, ()),
        cluster=load_cluster("laptop-cpu"),
        data=None,
    )


@torch.inference_mode()
def generate(
    stage: VLMStage, reader: SampleReader, sample: Sample, max_new_tokens: int
) -> Iterator[int]:
    """Yield the token ids of the answer to a sample's last question, without the end token.

    It is asked as InternVL's `chat` does: as it is written, with the model's message for that.

    The images, if any, are encoded once; the text is read anew for every token.

    Raises:
        UserError: an image cannot be read, or the model takes no text as long.
    """
    device = current_device()
    prompt = reader.prompt(sample, len(sample.turns) - 1, max_new_tokens, chatting=True)
    ids_S = torch.from_numpy(prompt.token_ids).to(device)
    pixels_TCPP = None
    if stage.model_config.takes_images:
        pixels_TCPP = reader.pixels([sample])[: prompt.tiles].to(device)
    # Found in the prompt alone: an answer may hold the word that stands for an image's tokens.
    positions_M = reader.image_positions(ids_S)
    features = stage.encode(_batch(ids_S, positions_M, pixels_TCPP))
    for _ in range(max_new_tokens):
        batch = _batch(ids_S, positions_M, pixels_TCPP)
        next_id = stage.head_output(batch, stage.read_text(batch, features))
        token = int(next_id.item())
        if token == reader.answer_end:
            return
        yield token
        ids_S = torch.cat([ids_S, next_id])


def _batch(
    ids_S: torch.Tensor, positions_M: torch.Tensor | None, pixels_TCPP: torch.Tensor | None
) -> MicroBatch:
    return MicroBatch(
        tiles=0 if pixels_TCPP is None else len(pixels_TCPP),
        tokens=len(ids_S),
        segment_tokens=(len(ids_S),),
        pixels_TCPP=pixels_TCPP,
        token_ids_S=ids_S,
        image_positions_M=positions_M,
        answer_positions_A=torch.tensor([len(ids_S) - 1], device=ids_S.device),
    )
