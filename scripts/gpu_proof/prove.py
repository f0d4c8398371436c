"""Command line of the proof, which runs the parts in order."""

import sys
import time
from argparse import Namespace
from pathlib import Path

from omnibal.base.errors import UserError
from omnibal.base.outputs import check_folder
from omnibal.base.program import ArgumentParser, check_arguments, one_line_errors
from scripts.gpu_proof.card import Proof, card_name, describe_machine, write_card
from scripts.gpu_proof.parts import PARTS
from scripts.gpu_proof.running import FAKE_DEVICE, REAL, REPOSITORY, Context, run_part


def main(description: str) -> None:
    """Run the requested parts, and exit with 1 if any failed."""
    with one_line_errors():
        check_arguments(sys.argv[1:])
        given = _parser(description).parse_args()
        proof = prove(given)
        print((given.output / "card.md").read_text())
        # docs/cards has complete cards of real devices.
        if not given.fake_device and not given.only:
            write_card(proof, REPOSITORY / "docs" / "cards", card_name(proof))
        print(f"card: {given.output / 'card.md'}, {given.output / 'card.json'}")
    sys.exit(any(part.status in ("failed", "timed-out") for part in proof.parts))


def _parser(description: str) -> ArgumentParser:
    parser = ArgumentParser(prog="gpu_proof.sh", description=description.splitlines()[0])
    parser.add_argument("output", type=Path, metavar="OUT", help="folder to write into")
    parser.add_argument(
        "--fake-device", action="store_true", help="run on fake devices and the CPU"
    )
    parser.add_argument(
        "--digits",
        type=Path,
        help="folder of make_digits_dataset.py (default: made, by scikit-learn)",
    )
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="run only these parts")
    return parser


def prove(given: Namespace) -> Proof:
    """Run the parts, and write the card after each."""
    check_folder("OUT", given.output, [])
    settings = FAKE_DEVICE if given.fake_device else REAL
    proof = Proof(
        machine=describe_machine(given.fake_device), on_fake_device=given.fake_device, parts=()
    )
    if not given.fake_device and proof.machine.device is None:
        raise UserError(
            "torch of this Python finds no CUDA device; run the proof on a machine with a GPU, or "
            "give --fake-device"
        )
    if not given.only and given.output.exists() and any(given.output.iterdir()):
        raise UserError(f"{given.output}: must be a new folder, or empty; give another OUT")
    given.output.mkdir(parents=True, exist_ok=True)
    for name in given.only or PARTS:
        context = Context(
            output=given.output.resolve(),
            settings=settings,
            on_fake_device=given.fake_device,
            digits=given.digits.resolve() if given.digits else None,
            end_s=time.monotonic() + settings.limits_s[name],
        )
        result = run_part(name, PARTS[name], context)
        proof = proof.model_copy(update={"parts": (*proof.parts, result)})
        write_card(proof, given.output, "card")
        line = f"{name}: {result.status} in {result.seconds:.0f} s {result.reason}"
        print(line.strip(), file=sys.stderr)
    return proof
