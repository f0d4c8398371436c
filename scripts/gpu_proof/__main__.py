"""What one GPU says of this project: every part under a time limit of its own.

    scripts/gpu_proof.sh OUT [--fake-device] [--minutes 9] [--only PART ...]

Runs the tests for devices, measures rates and layers, replays stages of a 26B plan, trains a small
model and compares the providers of layers. A part that fails or takes too long ends, and the next
begins. OUT/proof.json and OUT/proof.html have each part's status, time and figures, predicted ones
beside measured ones, and are written anew after each part; OUT/logs has what the programs printed.

With --fake-device nothing needs a GPU: stages run on fake devices and the rest on the CPU, with
the same commands. No figure of that is of a GPU.
"""

import importlib.util
import sys

_NEEDED = (
    *("torch", "megatron.core", "einops", "jinja2", "numpy", "PIL", "psutil", "pyarrow"),
    *("pydantic", "rich", "safetensors", "scipy", "sentencepiece", "tokenizers", "typer"),
)
_PACKAGES = {"megatron.core": "megatron-core", "PIL": "pillow"}
"""Names under which modules are installed, where they differ."""
_EXIT_USER_ERROR = 2


def missing_modules() -> list[str]:
    """Those of the needed modules that this Python does not have."""
    return [name for name in _NEEDED if not _is_installed(name)]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the parent package
        return False


def refuse(missing: list[str]) -> None:
    """End with one line that says what this Python lacks."""
    packages = ", ".join(_PACKAGES.get(name, name) for name in missing)
    print(
        f"error: {sys.executable} has no {packages}; put the wheels of that, and of what it needs "
        "but torch, into a folder (docs/gpu.md has the commands), and give it as WHEELS=FOLDER to "
        "scripts/gpu_proof.sh",
        file=sys.stderr,
    )
    sys.exit(_EXIT_USER_ERROR)


def main() -> None:
    """Run all parts, unless a module that they need is missing."""
    missing = missing_modules()
    if missing:
        refuse(missing)
    try:
        # Not before: it imports them.
        from scripts.gpu_proof.prove import main as prove
    except ModuleNotFoundError as error:
        refuse([str(error.name)])
    else:
        prove(__doc__)


if __name__ == "__main__":
    main()
