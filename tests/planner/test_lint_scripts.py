"""Launch lines in shell scripts: words as bash splits them, and questions for unknown values."""

import json
import random
import re
import subprocess
from pathlib import Path

import pytest
from cli_cases import failure, result, status

from omnibal.base.errors import UserError
from omnibal.trainers.lint.command_line import read_launch
from omnibal.trainers.lint.launch_settings import Launch, Launcher
from omnibal.trainers.lint.script import read_script

pytestmark = pytest.mark.quick

SCRIPT = r"""#!/bin/bash
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8   # of one node's
NNODES=${WORLD_SIZE:-"2"}
TP=4
PP=2
MODEL_ARGS=(
    --num-layers 32          # a comment (in an array)
    --seq-length "4096" --name 'single $TP "quoted" # no'
)
EMPTY=()
MODEL_ARGS+=(--layout 'Et*3|(tt|)*4L' --empty "" "${EMPTY[@]}")
BATCH="--micro-batch-size 1 \
  --global-batch-size ${GBS:-64}"
show --nproc_per_node $GPUS_PER_NODE --nnodes=$NNODES run.py \
    a"b"'c'\ d "x\"y\$z" ${UNSET:-} "${UNSET:-}" "5 $" \
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size="$PP" \
    ${MODEL_ARGS[@]} "${MODEL_ARGS[@]}" "${EMPTY[@]}" "pre ${MODEL_ARGS[@]} post" $BATCH \
    --sum=${TP}x$PP --sequence-parallel $MODEL_ARGS "$@"
"""
"""Script that prints its words, one per line, at `show`."""


def test_words_are_those_that_bash_makes(tmp_path: Path):
    """Prevents flags read differently from the words that bash passes on."""
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.replace("set -euo", "show() { printf '%s\\n' \"$@\"; }\nset -eo"))
    printed = subprocess.run(["bash", script], capture_output=True, text=True, check=True).stdout
    words = next(one.words for one in read_script(SCRIPT, {}) if one.words[0] == "show")
    assert list(words[1:]) == printed.removesuffix("\n").split("\n")


def fields(launch: Launch, names: str) -> tuple:
    return tuple(getattr(launch, name) for name in names.split())


def test_a_script_is_read_to_its_launch():
    """Prevents losing sizes from variables and arrays, and a script that overrides given sizes."""
    launch = read_launch(SCRIPT, {})
    assert fields(launch, "gpus tensor pipeline micro_batch global_batch") == (16, 4, 2, 1, 64)
    assert (launch.sequence_length, launch.sequence_parallel) == (4096, True)
    assert launch.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert launch.launcher is Launcher.MEGATRON_LM
    assert launch.flags["name"] == 'single $TP "quoted" # no'
    # Sorted: the order of a set would differ from run to run.
    exports = "".join(f"export {name}=1\n" for name in "DBFACE")
    assert list(read_launch(f"{exports}run --micro-batch-size 1", {}).environment) == [*"ABCDEF"]
    given = read_launch(SCRIPT, {"TP": "2", "NNODES": "1", "GBS": "8"})
    assert fields(given, "gpus tensor pipeline global_batch") == (8, 2, 2, 8)


def test_sizes_that_are_not_known_are_asked_for():
    """Prevents guessing a size, and questions for paths and names that no rule reads."""
    script = "run.py --tensor-model-parallel-size $TP"
    with pytest.raises(UserError, match=r"does not set them.*--set TP=VALUE"):
        read_launch(script, {})
    assert read_launch(script, {"TP": "2"}).tensor == 2
    array = 'run "${A[@]}" --micro-batch-size 1'
    assert read_launch(array, {}).unknown == ("A",)
    assert read_launch(array, {"A": "--pipeline-model-parallel-size '4'"}).pipeline == 4
    line = "torchrun --nproc_per_node 8 a.py --data-path $DATA --bf16 $MORE --micro-batch-size 1 $@"
    launch = read_launch(line, {})
    assert (launch.micro_batch, launch.unknown) == (1, ("DATA", "MORE"))
    assert launch.flags["data-path"] == "$DATA"


def test_one_of_several_launch_lines_is_chosen():
    """Prevents a verdict on a line that the user did not choose."""
    script = "N=1\na.py --micro-batch-size $N\n\n  b.py --micro-batch-size 2"
    assert [read_launch(script, {}, line_number=line).micro_batch for line in (2, 4)] == [1, 2]
    with pytest.raises(UserError, match="launch lines 2 and 4, and line 3 was chosen"):
        read_launch(script, {}, line_number=3)


@pytest.mark.parametrize(
    "script",
    [
        'X=1\nif [ -n "$X" ]; then X=2; fi',
        "X=1\nif true",
        "X=1\n[ -z $X ] && X=8",
        "X=1\nfor X in 1 2; do",
        "X=1\nf() { X=4; }",
        "X=1\n((X*=2))",
        "X=1\nread X",
        "X=1\nunset X",
        "A=(2)\nA[0]=4",
        "N=2\nX=$((N * M))",
        "X=1\nX=`touch {mark}`",
        'X=1\nX="$(touch {mark})"',
        "X=1\necho x | tee log",
        "X=1\necho x > log",
        "X=1\necho ${#X}",
        "X=1\necho $1",
    ],
)
def test_other_shell_is_refused_by_its_line(script: str, tmp_path: Path):
    """Prevents a wrong size if a condition or a command changes a variable."""
    mark = tmp_path / "mark"
    text = script.replace("{mark}", str(mark)) + "\nrun --micro-batch-size $X"
    with pytest.raises(UserError, match=r"^line 2 of .* has .*`bash -x SCRIPT`") as refused:
        read_launch(text, {})
    assert "\n" not in str(refused.value) and not mark.exists()


@pytest.mark.parametrize(
    ("line", "launcher", "gpus"),
    [
        ("torchrun --nproc-per-node=4 --nnodes=2 a.py --tensor-model-parallel-size=2",
         "megatron-lm", 8),
        ("NPROC_PER_NODE=2 megatron sft --tensor-model-parallel-size 2", "ms-swift", 2),
        ("export NPROC_PER_NODE=4\nexport NNODES=3\nmegatron pt --tensor_model_parallel_size 2",
         "ms-swift", 12),
        ("--tensor_model_parallel_size 2", "ms-swift", None),
        ("torchrun --nproc_per_node gpu a.py --tensor-model-parallel-size 2", "megatron-lm", None),
        ("model.tensor_model_parallel_size=2", "megatron-bridge", None),
        ("setup.py -tp 2 -ng 64", "megatron-bridge", 64),
        ("torchrun a.py --tensor-model-parallel-size 2 --custom-pipeline-layers 3,4", "loongforge",
         None),
    ],
)  # fmt: skip
def test_trainer_and_gpus_are_told_by_the_line(line: str, launcher: str, gpus: int | None):
    """Prevents another trainer's defaults, and a world size other than the line's."""
    launch = read_launch(line, {})
    assert launch.tensor == 2
    assert (launch.launcher, launch.gpus) == (launcher, gpus)


def test_overrides_and_short_flags_are_one_language():
    """Prevents a recipe's override read as the value of the flag before it."""
    short = read_launch("run_recipe.py -tp 2 -pp 4 -cp 2 -vp None -ep 8 -et 1 -gb 64 -mb 2", {})
    sections = (
        "model.tensor_model_parallel_size=2 model.pipeline_model_parallel_size=4 "
        "model.context_parallel_size=2 model.virtual_pipeline_model_parallel_size=null "
        "model.expert_model_parallel_size=8 ++model.expert_tensor_parallel_size=1 "
        "train.global_batch_size=64 train.micro_batch_size=2"
    )
    same = [one.model_dump(exclude={"flags"}) for one in (short, read_launch(sections, {}))]
    assert same[0] == same[1] and (short.virtual, short.expert_tensor) == (None, 1)
    # Layouts of Bridge's recipes are lists.
    layout = "model.pipeline_model_parallel_layout=[['embedding','decoder'],[loss]]"
    assert read_launch(layout, {}).layout == (("embedding", "decoder"), ("loss",))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("echo hello", "no known flag of a Megatron trainer"),
        ("a --micro-btch-size 1", "trainer among --micro-btch-size"),
        ("a --micro-batch-size 1\nb --micro-batch-size 2", "launch lines 1 and 2"),
        ("a --micro-batch-size two", "must be a whole number"),
        ("a --tensor-model-parallel-size 0", "must be from 1"),
        ("a --x 'y", "an open quote"),
        ("a --x ${y", r"has \${"),
        ("NPROC_PER_NODE=8 swift sft --micro_batch_size 2", "starts DeepSpeed"),
        ("swift sft --model m", "starts DeepSpeed"),
        ("a --micro-batch-size 1 \\ \n --bf16", "line 2 begins with flag --bf16"),
        ("a --micro-batch-size 1 \\\n# x \\\n --bf16", "line 3 begins with flag --bf16"),
        ("a --pipeline-model-parallel-layout Et|tL", r"has \|.*quote it, or"),
        # A short script that would exhaust the memory.
        ("A=xx\n" + "A=$A$A\n" * 40 + "run --micro-batch-size 1", "give only the command"),
    ],
)
def test_lines_that_cannot_be_read(line: str, message: str):
    """Prevents a traceback, or a verdict on a line that was not understood."""
    with pytest.raises(UserError, match=message):
        read_launch(line, {})


def test_any_text_is_read_or_refused():
    """Prevents a traceback or an endless loop on text that is no shell."""
    dice = random.Random(3)
    parts = [*"'\"\\`$(){}<>|&;#=\n *@-", "$((", "))", "${", "A=", "A+=(", "A", "if ",
             "1", "+", "--micro-batch-size ", ":-", "${A:-", "${A[@]}"]  # fmt: skip
    read = 0
    for _ in range(3000):
        text = "".join(dice.choices(parts, k=dice.randint(1, 12))) + "\nrun --micro-batch-size 1"
        try:
            read += read_launch(text, {}).micro_batch is not None
        except UserError:
            continue
    assert 300 < read < 2700


LINT = "lint --model internvl2.5-8b"


def test_command_reads_a_line_and_a_script(capsys, tmp_path):
    """Prevents exit codes that job scripts cannot rely on, and a line read as an option."""
    script = tmp_path / "train.sh"
    script.write_text("PP=2\ntorchrun --nproc_per_node 8 --nnodes $N t.py "
                      "--pipeline-model-parallel-size $PP --micro-batch-size 1\n")  # fmt: skip
    told = result(capsys, LINT, script, "--set", "N=2")
    of_cost = ["prediction", "better", "least_recompute", "not_predicted"]
    assert list(told) == ["starts", "findings", "launch", "layers_by_chunk", *of_cost]
    assert told["starts"] and told["launch"]["gpus"] == 16
    assert told["layers_by_chunk"] == [[16], [16]]
    flags = "--pipeline-model-parallel-size 3 --micro-batch-size 1"
    assert status(LINT, flags, "--gpus", "6", "--json") == 2
    told = json.loads(capsys.readouterr().out)
    assert not told["starts"] and told["layers_by_chunk"] is None
    assert [one["rule"] for one in told["findings"]] == ["layers-divide-stages"]
    assert status(LINT, flags, "--gpus", "6") == 2
    assert "cannot start" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.sh"], "no such script"),
        (["--micro-batch-size 1", "--set", "N"], "must be a variable and its value"),
    ],
)
def test_command_refuses_what_it_cannot_read(capsys, arguments, message):
    """Prevents an empty verdict for a mistyped path."""
    assert message in failure(capsys, LINT, *arguments)


QWEN3 = {
    "model_type": "qwen3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}  # fmt: skip
SIZES = "--tensor_model_parallel_size 2 --micro_batch_size 1"


def test_a_misspelled_flag_comes_before_the_verdict(capfd):
    """Prevents reporting that a line starts although a size was not read."""
    line = "run --pipeline-model-parallel 2 --micro-batch-size 1"
    assert status(LINT, line, "--gpus", "8", "--no-cost") == 0
    shown = capfd.readouterr()
    first = "note: --pipeline-model-parallel is not read and not judged; if --pipeline-model-paral"
    assert shown.err.startswith(first)
    assert shown.out.startswith("not judged, for an unknown flag: megatron-lm, 8 GPUs, TP 1")
    assert result(capfd, LINT, line, "--gpus", "8", "--no-cost")["starts"] is None


@pytest.mark.parametrize(
    ("line", "model"),
    [
        (f"megatron sft --model Qwen/Qwen3-8B {SIZES}", "Qwen/Qwen3-8B"),
        (f"megatron sft --model {{folder}} {SIZES}", "{folder}"),
        ("run_recipe.py --recipe qwen3_vl_8b_finetune_config -tp 2 -mb 1", "qwen3-vl-8b"),
    ],
)
def test_the_lines_own_model_is_taken(capfd, tmp_path, line, model):
    """Prevents asking for a model that the line names, or taking it without a note."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    assert status("lint --no-cost --gpus 8", line.format(folder=tmp_path)) == 0
    named = f"note: the model is {model.format(folder=tmp_path)}, which the line names"
    assert named in capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"megatron sft --model $M {SIZES}", r"the line's model, \$M, is no preset"),
        ("run_recipe.py --recipe another_config -tp 2", "model, another_config, is no preset"),
        ("--micro-batch-size 1", "names no model; give --model"),
    ],
)
def test_a_line_without_a_known_model_asks_for_it(capfd, line, message):
    """Prevents a traceback, or a verdict on another model's sizes."""
    assert re.search(message, failure(capfd, "lint --no-cost --gpus 8", line))
