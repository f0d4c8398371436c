"""Forty planning jobs and the figures of their plans, kept in `kept_jobs.json`.

    python tests/planner/kept_job_cases.py > tests/planner/kept_jobs.json

updates the figures after an intended change of plans.
"""

import hashlib
import json
import re
import shlex
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from omnibal import cli
from omnibal.data.image_sizes import IMAGE, ImageSizes
from omnibal.data.lengths import Lengths, write_lengths

KEPT = Path(__file__).with_name("kept_jobs.json")
H100 = "--cluster h100-80g --samples-per-step 128"
TILES = f"--lengths tiles {H100} --max-tiles 12 --max-tokens 4096"
CHAT = f"--model internvl-chat-1.5-6b-20b {TILES}"
STREAM = CHAT.replace("--samples-per-step 128 ", "") + " --tp 2 --pp 2 --dp 4 --window 64"
QWEN = "--model qwen3-vl-8b --lengths native --cluster h100-80g --samples-per-step 64"
CAPPED = f"{QWEN} --limit image_tokens=12288 --max-tokens 16384"
MOE = "--model qwen3-30b-a3b --lengths texts --cluster h100-80g --samples-per-step 128"
DIGITS = "--model internvl-digits --cluster laptop-cpu --max-tiles 8 --max-tokens 512"
JOBS = {
    "bf16": f"{CHAT} --tp 2 --pp 4 --dp 2",
    "bmp": f"{CHAT} --tp 2 --pp 4 --dp 2 --method bmp",
    "equal-layers": f"{CHAT} --tp 2 --pp 4 --dp 2 --method layer --recompute full",
    "parameters": f"{CHAT} --tp 2 --pp 4 --dp 2 --method parameter --recompute front",
    "isf": f"{CHAT} --tp 2 --pp 4 --dp 2 --packing isf",
    "epochs": f"{CHAT} --tp 2 --pp 4 --dp 2 --epochs 2 --seed 5",
    "64-gpus": f"{CHAT} --tp 2 --pp 4 --dp 8 --network-gb-per-s 25",
    "memory": f"{CHAT} --tp 4 --pp 4 --dp 1 --memory-gib 56",
    "frozen": f"{CHAT} --tp 2 --pp 2 --dp 2 --freeze vision",
    "lora": f"{CHAT} --tp 2 --pp 2 --dp 2 --lora-rank 16",
    "lora-trained-tower": f"{CHAT} --tp 2 --pp 2 --lora-rank 64 --lora-rslora --freeze projector",
    "sharded": f"{CHAT} --tp 2 --pp 1 --dp 8 --sharding full",
    "hybrid-sharded": f"{CHAT} --tp 1 --pp 2 --dp 16 --sharding hybrid",
    "data-parallel": f"{CHAT} --tp 4 --pp 2 --dp 4 --encoder data-parallel",
    "data-parallel-sharded": f"{CHAT} --tp 2 --pp 1 --dp 4 --encoder data-parallel --sharding auto",
    "interleaved": f"{CHAT} --tp 2 --pp 4 --dp 2 --schedule interleaved",
    "zb-h1": f"{CHAT} --tp 4 --pp 4 --dp 2 --schedule zb-h1",
    "zb-v": f"{CHAT} --tp 8 --pp 2 --dp 2 --schedule zb-v",
    "window": STREAM,
    "arrival": f"{STREAM} --dispatch off",
    "fp8": f"{CHAT} --tp 2 --pp 2 --dp 4 --precision fp8",
    "free-caps": "--model internvl-digits --cluster laptop-cpu --lengths small --pp 2 --dp 2"
    " --micro-batches 3",
    "free-8": f"--model internvl3-8b {TILES} --gpus 8",
    "free-64": f"--model internvl2.5-26b {TILES} --gpus 64 --pp 4 --encoder pipeline",
    "text": f"--model llama3.1-8b --lengths texts {H100} --tp 2 --pp 2 --dp 2 --max-tokens 8192",
    "text-levels": f"--model llama3.1-8b --lengths long {H100} --tp 1 --pp 1 --dp 8"
    " --packing-levels auto",
    "text-hbp": f"--model llama3.1-8b --lengths long {H100} --tp 1 --pp 2 --dp 8"
    " --packing-levels hbp",
    "experts": f"{MOE} --tp 1 --pp 2 --dp 8 --ep 8 --max-tokens 8192",
    "experts-tp": f"{MOE} --tp 2 --pp 2 --dp 4 --ep 4 --max-tokens 8192 --expert-imbalance 1.5",
    "experts-free": f"{MOE} --gpus 16 --max-tokens 8192",
    "native": f"{CAPPED} --tp 2 --pp 2 --dp 2",
    "native-data-parallel": f"{CAPPED} --tp 1 --pp 2 --dp 4 --encoder data-parallel",
    "native-adapters": f"{CAPPED} --tp 1 --pp 2 --dp 4 --lora-rank 8",
    "three-modalities": "--model internvl-digits-omni --cluster laptop-cpu --lengths spoken --pp 2"
    " --dp 2 --limit clips=8 --max-tiles 8 --max-tokens 512 --micro-batches 4",
    "digits": f"{DIGITS} --lengths small --pp 2 --dp 2 --micro-batches 3",
    "shapes-only": f"{DIGITS} --pp 2 --dp 2",
    "for-megatron-lm": f"{DIGITS} --lengths small --pp 2 --dp 2 --micro-batches 8"
    " --for megatron-lm",
    "for-megatron-bridge": f"{CAPPED} --tp 2 --pp 2 --dp 2 --for megatron-bridge --no-compare",
    "for-ms-swift": f"{QWEN} --tp 2 --pp 2 --dp 2 --for ms-swift --no-compare",
    "for-xtuner": f"{CAPPED} --dp 8 --for xtuner --no-compare",
}


def write_data(folder: Path) -> None:
    """Write the length files used by the jobs: tiles, texts, long, native, spoken, small."""
    rng = np.random.default_rng(47)
    text = np.clip(rng.lognormal(5.5, 1.0, 1300), 8, 3000).astype(int)
    tiles = rng.choice(np.array([0, 1, 2, 5, 7]), 1300)
    _write(folder, "tiles", tokens=np.minimum(tiles * 256 + text, 4096), tiles=tiles)
    _write(folder, "texts", tokens=np.clip(text * 4, 16, 8192))
    _write(folder, "long", tokens=np.append(text, rng.integers(20_000, 65_537, 9)))
    images = np.zeros(1100, IMAGE)
    images["times"] = rng.choice([1, 1, 1, 8], 1100)
    images["tokens"] = rng.integers(16, 1024, 1100)
    sizes = ImageSizes(images=images, counts=np.ones(1100, np.int64))
    shown = sizes.tokens
    _write(folder, "native", sizes, tokens=shown + text[:1100], image_tokens=shown)
    tiles, clips = rng.integers(0, 4, 1200), rng.integers(0, 3, 1200)
    _write(folder, "spoken", tokens=tiles * 16 + clips * 25 + 30, tiles=tiles, clips=clips)
    _write(folder, "small", tokens=tiles * 16 + 40 + clips, tiles=tiles)


def _write(folder: Path, name: str, images: ImageSizes | None = None, **columns: np.ndarray):
    tokens = columns.pop("tokens").astype(np.int32)
    lengths = Lengths(
        items={item: column.astype(np.int32) for item, column in columns.items()},
        tokens=tokens,
        loss_tokens=np.maximum(tokens // 3, 1).astype(np.int32),
        source=0 * tokens,
        source_names=("docs",),
        origin=None,
        squares={} if images is None else {"squared_image_tokens": images.squares},
        image_sizes=images,
    )
    write_lengths(lengths, folder / f"{name}.parquet")


def plan_job(job: str, data: Path, plan: Path) -> dict[str, Any]:
    """Plan a job with --lengths from `data`, and return the printed JSON."""
    words = re.sub(r"(?<=--lengths )(\w+)", rf"{shlex.quote(str(data))}/\1.parquet", job)
    printed = StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(StringIO()) as errors:
            cli.main(["plan", *shlex.split(words), "--json", "-o", str(plan)])
    except SystemExit as ended:
        assert not ended.code, errors.getvalue()
    return json.loads(printed.getvalue())


def plan_figures(result: dict[str, Any], plan: Path) -> dict[str, Any]:
    """Return a plan's visible figures, and the hash of its packs' columns, if any."""
    stages = [
        {name: stage[name] for name in ("recompute", "forward_ms", "backward_ms", "peak_gib")}
        | {name: count for name, count in stage.items() if name.endswith("_layers")}
        for stage in result["stages"]
    ]
    figures = {name: result.get(name) for name in ("step_ms", "packs", "steps", "levels")}
    written = json.loads((plan / "plan.json").read_text())
    figures |= {"stages": stages, "parallel": written["parallel"], "packs_sha256": None}
    if (plan / "packs.parquet").exists():
        digest, table = hashlib.sha256(), pq.read_table(plan / "packs.parquet")
        for name in table.column_names:
            digest.update(json.dumps([name, table[name].to_pylist()]).encode())
        figures["packs_sha256"] = digest.hexdigest()
    return figures


def main() -> None:
    """Print the figures of all jobs as JSON, one line per job."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_data(folder)
        figures = (
            f"{json.dumps(name)}: {json.dumps(plan_figures(plan_job(job, folder, plan), plan))}"
            for name, job in JOBS.items()
            for plan in [folder / name]
        )
        print("{", ",\n".join(figures), "}", sep="\n")


if __name__ == "__main__":
    main()
