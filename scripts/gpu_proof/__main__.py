"""Run checks and measurements of this project on one GPU, each within its own time limit.

    scripts/gpu_proof.sh OUT [--fake-device] [--digits FOLDER] [--only PART ...]

Checks the trainer on the device, trains a small model by the launcher, replays stages of a 26B
plan, saves and resumes 8 GiB, measures rates and layers, and compares providers of layers. A failed
part does not stop the next. OUT/card.md and OUT/card.json, written again after each part, have
status, time, and predicted and measured figures; OUT/logs has the programs' output. If all parts
ran on a device, its card is copied to docs/cards. --fake-device uses fake devices and the CPU.
"""

import importlib.util
import sys

_NEEDED = (
    "torch megatron.core einops jinja2 numpy PIL psutil pyarrow pydantic rich safetensors scipy "
    "sentencepiece soundfile tokenizers typer"
).split()
_EXIT_USER_ERROR = 2


def main() -> None:
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        print(
            f"error: {sys.executable} has no {', '.join(missing)}; run `make gpu-bundle` on a "
            "machine with a network, and give the folder as WHEELS=FOLDER to scripts/gpu_proof.sh",
            file=sys.stderr,
        )
        sys.exit(_EXIT_USER_ERROR)
    # Imported late: it needs these modules.
    from scripts.gpu_proof.prove import main as prove

    prove(__doc__)


if __name__ == "__main__":
    main()
