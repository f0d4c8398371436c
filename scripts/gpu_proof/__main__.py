"""What one GPU says of this project: every part under a time limit of its own.

    scripts/gpu_proof.sh OUT [--fake-device] [--minutes 9] [--only PART ...]

Runs the tests for devices, measures rates and layers, replays stages of a 26B plan, trains a small
model and compares the providers of layers. A failed part does not stop the next. OUT/proof.json and
OUT/proof.html, updated after each part, have status, time, and predicted and measured figures;
OUT/logs has the programs' output. With --fake-device, parts run on fake devices or the CPU.
"""

import importlib.util
import sys

_NEEDED = (
    *("torch", "megatron.core", "einops", "jinja2", "numpy", "PIL", "psutil", "pyarrow"),
    *("pydantic", "rich", "safetensors", "scipy", "sentencepiece", "tokenizers", "typer"),
)
_PACKAGES = {"megatron.core": "megatron-core", "PIL": "pillow"}
"""Names of packages that differ from their modules."""
_EXIT_USER_ERROR = 2


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def refuse(missing: list[str]) -> None:
    """Exit with one line on missing modules."""
    packages = ", ".join(_PACKAGES.get(name, name) for name in missing)
    print(
        f"error: {sys.executable} has no {packages}; put the wheels of that, and of what it needs "
        "but torch, into a folder (docs/gpu.md has the commands), and give it as WHEELS=FOLDER to "
        "scripts/gpu_proof.sh",
        file=sys.stderr,
    )
    sys.exit(_EXIT_USER_ERROR)


def main() -> None:
    """Run all parts, unless a required module is missing."""
    if missing := [name for name in _NEEDED if not _is_installed(name)]:
        refuse(missing)
    try:
        # Imported late: it needs the modules.
        from scripts.gpu_proof.prove import main as prove
    except ModuleNotFoundError as error:
        refuse([str(error.name)])
    else:
        prove(__doc__)


if __name__ == "__main__":
    main()
