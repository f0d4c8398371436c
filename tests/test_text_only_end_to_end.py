"""End-to-end runs of a text-only model, from texts to a report."""

import json
import random
from pathlib import Path

import pytest
from end_to_end_cases import PLANNER, losses, pair_succeeds, refuse, succeed, training

WORDS = "the sum of two numbers is seven what do you read in this line a tree and a house".split()
MODEL = """\
name = "tiny"
chat_template = "internvl2_5"

[language]
layers = 3
hidden_size = 32
heads = 4
kv_heads = 2
ffn_hidden_size = 64
vocab_size = 512

[language.rope_scaling]
factor = 8
original_positions = 64
"""


def write_texts(folder: Path, samples: int, seed: int) -> Path:
    """Write random conversations in words of the digits' tokenizer; return the meta.json."""
    draw = random.Random(seed)
    folder.mkdir(parents=True)
    lines = []
    for number in range(samples):
        said = []
        if number % 3 == 0:
            said.append(("system", " ".join(draw.choices(WORDS, k=5))))
        for _ in range(draw.randint(1, 3)):
            for role, most in (("user", 40), ("assistant", 20)):
                said.append((role, " ".join(draw.choices(WORDS, k=draw.randint(2, most)))))
        messages = [{"role": role, "content": text} for role, text in said]
        lines.append(json.dumps({"id": number, "messages": messages}) + "\n")
    (folder / "texts.jsonl").write_text("".join(lines))
    meta = {"texts": {"annotation": "texts.jsonl"}}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder / "meta.json"


@pytest.fixture(scope="module")
def texts(tmp_path_factory, digits) -> Path:
    """Text dataset with the digits dataset's layout."""
    folder = tmp_path_factory.mktemp("texts")
    write_texts(folder / "train", 60, seed=0)
    write_texts(folder / "heldout", 6, seed=1)
    (folder / "tokenizer.model").write_bytes((digits / "tokenizer.model").read_bytes())
    (folder / "model.toml").write_text(MODEL)
    scan = ("-m", "omnibal", "lengths", folder / "train" / "meta.json", "--tokenizer-model")
    model = ("--model", folder / "model.toml", "-o", folder / "lengths.parquet")
    succeed(*scan, folder / "tokenizer.model", *model)
    return folder


def plan_texts(texts: Path, name: str, *options: object) -> Path:
    """Plan with a token cap only."""
    data = ("--model", texts / "model.toml", "--lengths", texts / "lengths.parquet")
    caps = ("--max-tokens", "600", "--micro-batches", "4")
    succeed(*PLANNER, *data, *caps, *options, "-o", texts / name)
    return texts / name


def test_texts_are_planned_trained_resumed_and_reported(texts, tmp_path):
    """Prevents a command that fails or asks for tiles for a text-only model."""
    pair, alone = tmp_path / "pair", tmp_path / "alone"
    plan = plan_texts(texts, "plan", "--pp", "2")
    listed = succeed("pretrain_vlm.py", "--plan", plan, "--dry-run")
    assert "2 processes: TP 1 x PP 2 x DP 1" in listed
    assert "language embed" in listed and "head" in listed
    pair_succeeds(*training(plan, texts, pair, "--train-iters", "1"))
    heldout = ("--eval-data", texts / "heldout" / "meta.json", "--max-new-tokens", "2")
    validate = ("--eval-interval", "1", "--eval-samples", "5")
    resume = ("--load", pair, "--train-iters", "2", *heldout, *validate)
    said = pair_succeeds(*training(plan, texts, pair, *resume))
    assert f"resuming {pair} after step 1" in said
    assert "validation after step 2" in said
    single = plan_texts(texts, "single")
    succeed(*training(single, texts, alone, "--train-iters", "2"))
    assert losses(pair) == pytest.approx(losses(alone), rel=1e-4)
    assert json.loads((pair / "evaluation.json").read_text())["step"] == 2
    dropped = training(single, texts, tmp_path / "none", "--drop-path-rate", "0.1")
    assert "--drop-path-rate needs an encoder of tiles" in refuse(*dropped)
    page = tmp_path / "report.html"
    report = ("-m", "omnibal", "report", plan, "--run", pair, "-o", page, "--json")
    assert json.loads(succeed(*report))["run"]["last_loss"] == losses(pair)[-1]
    assert "</html>" in page.read_text()
    trace = tmp_path / "trace.json"
    succeed("-m", "omnibal", "simulate", plan, "--trace", trace)
    events = json.loads(trace.read_text())["traceEvents"]
    assert {tuple(event["args"]) for event in events if event["ph"] == "X"} == {("tokens",)}
    chat = ("tools/chat.py", "--load", pair, "--tokenizer-model", texts / "tokenizer.model")
    asked = ("--prompt", "what is the sum", "--max-new-tokens", "2", "--precision", "fp32")
    succeed(*chat, *asked)
    image = ("--image", texts / "model.toml")
    assert "no encoder for them" in refuse(*chat, *asked, *image)
    succeed("tools/convert.py", "export", pair, "--layout", "llama", "-o", tmp_path / "exported")
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_texts_are_profiled_and_replayed(texts, tmp_path):
    """Prevents a profile or replay that fails without tiles."""
    profile, data = tmp_path / "profile.json", texts / "train" / "meta.json"
    shape = ("--max-tokens", "300", "--lengths", texts / "lengths.parquet", "--layers", "1")
    measure = ("--model", texts / "model.toml", "--precision", "fp32", "--repetitions", "1")
    succeed("-m", "omnibal", "profile", *measure, *shape, "-o", profile)
    plan = plan_texts(texts, "measured", "--pp", "2", "--profile", profile)
    replay = ("tools/replay.py", plan, "--steps", "1", "--repetitions", "1", "--data", data)
    tokenizer = ("--tokenizer-model", texts / "tokenizer.model")
    replayed = succeed(*replay, *tokenizer, "-o", tmp_path / "replay")
    assert "idle" in replayed


def test_what_cannot_be_built_is_not_replayed(texts, tmp_path):
    """Prevents a traceback, or times of full attention for a windowed layer."""
    windowed = texts / "windowed.toml"
    runs = "[language]\nruns = [{layers = 1, window = 8}]"
    windowed.write_text(MODEL.replace("[language]", runs))
    plan = ("--model", windowed, "--max-tokens", "64", "-o", tmp_path / "plan")
    succeed(*PLANNER, *plan)
    refused = refuse("tools/replay.py", tmp_path / "plan", "-o", tmp_path / "replay")
    assert "layers of kind language_layer_window8 (" in refused and "be replayed" in refused
