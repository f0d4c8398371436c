"""Whisper's encoder imported next to InternVL, trained and exported, compared with Transformers."""

import shutil

import pytest
import torch
from commands import launcher
from conversion_cases import assert_near
from conversion_file_cases import content, edit_config
from ranks import run_ranks
from released import PIECES, save_toy, write_tokenizer
from tensor_parallel_cases import by_name, whole
from toy import OPTIONS, stages_of, toy_plan
from transformers import WhisperConfig, WhisperForConditionalGeneration
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from megatron.vlm.checkpoint.save_load import load_weights
from megatron.vlm.conversion.tensor_map import encoder_parameters, whisper_tensors
from megatron.vlm.inputs.batch import MicroBatch
from megatron.vlm.model.initialize import first_values, initialize_parameters
from megatron.vlm.step.train import build_trainer
from omnibal.data.tokenizer import AUDIO_CONTEXT, AUDIO_END, AUDIO_START, open_tokenizer
from omnibal.model.config import load_model
from omnibal.model.parallel import Parallel

CLIPS = 3
WORDS = [*PIECES, *(f"w{number}" for number in range(41))]
"""Fills the language model's vocabulary, so that the tokens for recordings get new ids."""
SIZES = {
    "vocab_size": 60, "d_model": 24, "encoder_layers": 3, "encoder_attention_heads": 3,
    "encoder_ffn_dim": 40, "decoder_layers": 1, "decoder_attention_heads": 3,
    "decoder_ffn_dim": 40, "num_mel_bins": 8, "max_source_positions": 12,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3,
    "suppress_tokens": [], "begin_suppress_tokens": [],
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a random released InternVL and Whisper, and the run imported from both."""
    there = tmp_path_factory.mktemp("released")
    seeing = save_toy("300m-qwen2", there / "internvl", "transformers")
    write_tokenizer(seeing, WORDS)
    torch.manual_seed(1)
    whisper = WhisperForConditionalGeneration(WhisperConfig(**SIZES))
    with torch.no_grad():
        for name, value in whisper.named_parameters():
            if "embed_positions" not in name:  # shows a misplaced bias or norm
                value += 0.2 * torch.randn_like(value)
    whisper.save_pretrained(there / "whisper")
    run = there / "run"
    said = run_convert("import", seeing, "--audio", there / "whisper", "-o", run)
    assert "with the encoder" in said
    return seeing, there / "whisper", run


def run_convert(*arguments: object) -> str:
    ended = launcher().run("tools/convert.py", *arguments)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


RANDOM = torch.Generator().manual_seed(2)
FRAMES_CBF = torch.randn(
    CLIPS, SIZES["num_mel_bins"], 2 * SIZES["max_source_positions"], generator=RANDOM
)
WANTED_VCH = torch.randn(SIZES["max_source_positions"], CLIPS, SIZES["d_model"], generator=RANDOM)
"""Gradient of the encoder's output."""


def run_tower(links, plan, run):
    """Return the output and gradients of this rank's part of the tower, as the pipeline runs it."""
    trainer = build_trainer(plan, links, OPTIONS, steps=1, seed=3)
    load_weights(run, plan, [trainer.stage])
    units = trainer.stage.encoders["audio"]
    normed = []
    units.projector.norm.register_forward_hook(lambda _, __, output: normed.append(output))
    batch = MicroBatch(tiles=0, clips=CLIPS, tokens=1, segment_tokens=(1,), frames_CBF=FRAMES_CBF)
    trainer.stage.encode(batch, only="audio")
    trainer.models[0].zero_grad_buffer()
    normed[0].backward(WANTED_VCH)
    return normed[0].detach(), by_name(trainer.stage, lambda parameter: parameter.main_grad)


def run_transformers(links, whisper):
    encoder = WhisperForConditionalGeneration.from_pretrained(whisper).model.encoder.eval()
    output = encoder(FRAMES_CBF).last_hidden_state.transpose(0, 1)
    output.backward(WANTED_VCH)
    return output.detach(), {name: value.grad for name, value in encoder.named_parameters()}


def whisper_parameters(model):
    """Return Whisper's parameters, each with the released tensors it is made of."""
    every = encoder_parameters(model, "audio")
    pairs = ((each, whisper_tensors(each, model.audio, "")) for each in every)
    return [(parameter, made_of) for parameter, made_of in pairs if made_of is not None]


@pytest.mark.parametrize("tensor", [1, 2])
def test_outputs_and_all_gradients_are_those_of_transformers(folders, tensor):
    """Prevents swapped tensors, a bias on keys, and wrong positions or norms."""
    _, whisper, run = folders
    [(output, gradients)] = run_ranks(Parallel(pipeline=1), run_transformers, whisper)
    model = load_model(str(run / "model.toml"))
    plan = toy_plan(model, stages_of(model), tensor=tensor)
    ranks = run_ranks(plan.parallel, run_tower, plan, run)
    for found, _ in ranks:
        torch.testing.assert_close(found, output, rtol=1e-4, atol=1e-4)
    compared = set()
    for parameter, made_of in whisper_parameters(model):
        value = whole(parameter.name, [own[parameter.name] for _, own in ranks])
        value = value[tuple(slice(size) for size in parameter.shape)]
        for name, piece in zip(made_of.names, made_of.arrangement.divide(value), strict=True):
            assert_near(piece.reshape(gradients[name].shape), gradients[name], name)
            compared.add(name)
    assert compared == gradients.keys() - {"embed_positions.weight"}


def test_export_gives_both_folders_back(folders, tmp_path):
    """Prevents a round trip that changes a value, loses Whisper's decoder, or leaves the audio
    encoder and its tokens in the exported InternVL."""
    for released, name in zip(folders[:2], ("internvl", "whisper"), strict=True):
        run_convert("export", folders[2], "--like", released, "-o", tmp_path / name)
        assert content(tmp_path / name) == content(released)


def initial_and_loaded(links, plan, run):
    trainer = build_trainer(plan, links, OPTIONS, steps=1, seed=9)
    stage = trainer.stage
    initialize_parameters(stage, first_values(stage, seed=0))
    first = {n: p.detach().clone() for n, p in stage.named_parameters()}
    load_weights(run, plan, [stage])
    trainer.wait_for_weights()
    return first, {n: p.detach().clone() for n, p in stage.named_parameters()}


def test_what_no_checkpoint_has_is_drawn_and_the_tokenizer_gets_its_words(folders):
    """Prevents an uninitialized audio projector or embeddings, and ids of other tokens."""
    seeing, _, run = folders
    model = load_model(str(run / "model.toml"))
    tokenizer, before = open_tokenizer(run / "tokenizer"), open_tokenizer(seeing)
    ids = [tokenizer.id_of(piece) for piece in (AUDIO_START, AUDIO_CONTEXT, AUDIO_END)]
    assert ids == list(range(before.vocab_size, before.vocab_size + 3))
    assert [tokenizer.id_of(piece) for piece in WORDS] == list(range(len(WORDS)))
    assert tokenizer.encode(f"{AUDIO_START}{AUDIO_CONTEXT}{AUDIO_END}") == ids
    assert model.language.vocab_size == tokenizer.vocab_size == len(WORDS) + 3
    plan = toy_plan(model, stages_of(model))
    [(first, loaded)] = run_ranks(Parallel(pipeline=1), initial_and_loaded, plan, run)
    for name in first:
        is_drawn = name.startswith("audio_projector.linear")
        assert torch.equal(first[name], loaded[name]) == is_drawn, name
    assert loaded["embedding.word_embeddings.weight"][: model.language.vocab_size].any(1).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "wav2vec2"}, "model_type must be 'whisper'"),
        ({"encoder_layers": 4}, "lacks model.encoder.layers.3"),
        ({"encoder_layers": 2}, "has model.encoder.layers.2"),
        ({"encoder_ffn_dim": 44}, "disagree: model.encoder.layers.0.fc1"),
        ({"max_source_positions": 10}, "are not Whisper's sinusoids"),
    ],
)
def test_other_encoders_are_refused(folders, tmp_path, change, message):
    """Prevents importing checkpoints that contradict their config.json or are not Whisper's."""
    seeing, whisper, _ = folders
    other, run = tmp_path / "whisper", tmp_path / "run"
    shutil.copytree(whisper, other)
    edit_config(**change)(other)
    ended = launcher().run("tools/convert.py", "import", seeing, "--audio", other, "-o", run)
    assert ended.returncode == 2 and message in " ".join(ended.stderr.split()), ended.stderr
    assert not run.exists()


def test_whisper_large_has_its_tensors():
    """Prevents tensor names that only fit a small model."""
    model = load_model("internvl3-8b-whisper")
    audio = model.audio
    config = WhisperConfig(
        d_model=audio.hidden_size, encoder_layers=audio.layers, num_mel_bins=audio.mel_bins,
        encoder_attention_heads=audio.heads, encoder_ffn_dim=audio.ffn_hidden_size,
        max_source_positions=audio.positions_per_item,
    )  # fmt: skip
    with torch.device("meta"):
        expected = {n: tuple(p.shape) for n, p in WhisperEncoder(config).named_parameters()}
    made_of = [one for _, one in whisper_parameters(model)]
    found = {n: s for one in made_of for n, s in zip(one.names, one.shapes, strict=True)}
    del expected["embed_positions.weight"]
    assert found == expected
