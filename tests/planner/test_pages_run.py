"""Commands of README and docs, run on a user's data, tokenizer and cluster."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from chat_cases import TEMPLATES, write_templated
from cli_cases import result, run
from PIL import Image

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
SIZES = ("--tp", 1, "--pp", 1, "--dp", 8, "--no-compare")
"""Sizes that replace a search of minutes."""
SWIFT = (
    {"messages": [
        {"role": "user", "content": "<image>What is shown?"},
        {"role": "assistant", "content": "A red square."}], "images": ["images/0.png"]},
    {"messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Name a prime."},
        {"role": "assistant", "content": "Seven."}]},
    {"messages": [
        {"role": "user", "content": "<image><image>Which is taller?"},
        {"role": "assistant", "content": "The second."}],
     "images": ["images/1.png", "images/2.png"]},
)  # fmt: skip
LLAVA = (
    {"id": "a", "image": "images/0.png", "conversations": [
        {"from": "human", "value": "<image>\nWhat is shown?"},
        {"from": "gpt", "value": "A red square."}]},
    {"id": "b", "conversations": [
        {"from": "human", "value": "Name a prime."}, {"from": "gpt", "value": "Seven."}]},
)  # fmt: skip


def commands(page: str) -> list[str]:
    """Return lines of a page's code blocks that begin with `omnibal`."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("omnibal ")]


@pytest.fixture
def users_folder(tmp_path, monkeypatch) -> Path:
    """Return a folder of ms-swift and LLaVA data, images and a checkpoint's tokenizer."""
    monkeypatch.chdir(tmp_path)
    Path("images").mkdir()
    for number, size in enumerate([(640, 480), (64, 64), (90, 300)]):
        Image.new("RGB", size, "red").save(f"images/{number}.png")
    Path("data.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in SWIFT * 20))
    Path("llava.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in LLAVA * 20))
    Path("Qwen3-VL-8B").mkdir()
    write_templated(Path("Qwen3-VL-8B"), TEMPLATES["chatml"])
    return tmp_path


def test_readme_runs_on_a_users_data(users_folder):
    """Prevents first commands that fail on data or a tokenizer not made by our scripts."""
    scan, *others = commands("README.md")[:4]
    run("", *shlex.split(scan.replace("data.jsonl", "llava.jsonl"))[1:])
    for line in (scan, *others):
        command, *words = shlex.split(line)[1:]
        run(command, *words, *(SIZES if command in ("plan", "run") else ()))
    for folder in ("export", "job/export"):
        assert "megatron sft" in (users_folder / folder / "RUN.md").read_text()


def test_planning_page_runs_on_its_trial_lengths(tmp_path, monkeypatch):
    """Prevents a page with commands that fail when pasted."""
    monkeypatch.chdir(tmp_path)
    script = [sys.executable, str(ROOT / "tools/make_lengths.py"), "-o", "lengths.parquet"]
    subprocess.run([*script, "--samples", "2000"], check=True)
    lines = [line for line in commands("docs/planning.md") if "lengths.parquet" in line]
    assert len(lines) == 3
    for line in lines:
        command, *words = shlex.split(line)[1:]
        sizes = ("--tp", 2, "--pp", 4, "--dp", 4)
        run(command, *words, *(sizes if command == "plan" else ()))
    assert Path("load.svg").exists()


def test_samples_on_the_data_page_are_read(users_folder):
    """Prevents a sample format on the page that the scan refuses."""
    page = (ROOT / "docs/data.md").read_text()
    blocks = re.findall(r"^```\w*\n(\{.*?)^```", page, re.M | re.S)
    samples = [json.loads(block) for block in blocks if '"conv' in block or '"messages' in block]
    assert samples
    Image.new("RGB", (64, 64), "red").save("a.png")
    scan = "--model Qwen/Qwen3-VL-8B-Instruct --tokenizer-model Qwen3-VL-8B"
    for number, sample in enumerate(samples):
        text = json.dumps(sample).replace("file:///data/a.png", f"file://{users_folder}/a.png")
        Path(f"form{number}.jsonl").write_text(text)
        if "tools" in sample:
            write_templated(Path("Qwen3-VL-8B"), TEMPLATES["thinking"])
        run(f"lengths form{number}.jsonl -o {number}.parquet {scan}")


def test_a_cluster_of_ones_own_is_planned_with(tmp_path, capsys):
    """Prevents a cluster file on the page that is refused or lacks a field."""
    [block] = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs/costs.md").read_text(), re.M | re.S)
    file = tmp_path / "ours.toml"
    file.write_text(block)
    job = f"--model qwen3-8b --max-tokens 4096 --tp 2 --dp 4 -o {tmp_path / 'plan'}"
    plan = result(capsys, f"plan {job}", "--cluster", file)
    assert "ours" in plan["cost_source"] and plan["step_ms"] > 0


def test_lint_page_has_what_its_lines_cost(tmp_path, monkeypatch, capsys):
    """Prevents an example without a cost, and a figure that is no longer printed."""
    monkeypatch.chdir(tmp_path)
    flags = "--sequence-parallel --seq-length 4096 --micro-batch-size 1 --global-batch-size 64"
    script = f"torchrun pretrain_gpt.py --tensor-model-parallel-size $TP {flags} --bf16\n"
    Path("my_run.sh").write_text(script)
    page = (ROOT / "docs/lint.md").read_text()
    refused, *others = commands("docs/lint.md")
    assert "cannot start" in page and "-vp 4" in refused
    for line in others:
        found = result(capsys, "", *shlex.split(line)[1:])
        assert found["prediction"] is not None, found["not_predicted"]
        best = found["better"] or found["prediction"]
        figures = {f"{each['step_ms']:,.1f} ms" for each in (found["prediction"], best)}
        assert "my_run.sh" in line or figures & set(re.findall(r"[\d,.]+ ms", page)), line
