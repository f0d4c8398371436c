"""All parts of a proof in order, under one time limit."""

import sys
import time
from argparse import Namespace
from pathlib import Path

from rich.console import Console

from omnibal.base.errors import UserError
from omnibal.base.files import write_json_model
from omnibal.base.outputs import check_folder
from omnibal.base.program import ArgumentParser, check_arguments, one_line_errors
from scripts.gpu_proof.page import tables_of, write_page
from scripts.gpu_proof.parts import PARTS
from scripts.gpu_proof.result import Proof, describe_machine
from scripts.gpu_proof.running import Context, run_part
from scripts.gpu_proof.settings import FAKE_DEVICE, REAL, TINY, Settings

_MOST_MINUTES = 600.0


def main(description: str) -> None:
    """Run the requested parts; exit status 1 if any failed."""
    with one_line_errors():
        check_arguments(sys.argv[1:])
        given = _parser(description).parse_args()
        proof = prove(given, _settings(given))
        console = Console()
        for table in tables_of(proof):
            console.print(table)
        console.print(f"proof: {given.output / 'proof.json'}, {given.output / 'proof.html'}")
    sys.exit(any(part.status in ("failed", "timed-out") for part in proof.parts))


def _parser(description: str) -> ArgumentParser:
    parser = ArgumentParser(prog="gpu_proof.sh", description=description.splitlines()[0])
    parser.add_argument("output", type=Path, metavar="OUT", help="folder to write into")
    parser.add_argument(
        *("--fake-device", "--pretend"),
        dest="fake_device",
        action="store_true",
        help="without a GPU, as far as it goes",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="with --fake-device: the smallest sizes"
    )
    parser.add_argument(
        "--minutes", type=float, help="for all parts together (9; with --fake-device no limit)"
    )
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="these parts alone")
    return parser


def _settings(given: Namespace) -> Settings:
    if given.tiny and not given.fake_device:
        raise UserError("--tiny was given without --fake-device; a GPU has real sizes: give both")
    if given.minutes is not None and not 0 < given.minutes <= _MOST_MINUTES:
        raise UserError(f"--minutes {given.minutes:g}: must be above 0, at most {_MOST_MINUTES:g}")
    return (TINY if given.tiny else FAKE_DEVICE) if given.fake_device else REAL


def prove(given: Namespace, settings: Settings) -> Proof:
    """Run the parts; write the result after each."""
    check_folder("OUT", given.output, [])
    minutes = given.minutes or (_MOST_MINUTES if given.fake_device else 9.0)
    last_s = time.monotonic() + 60 * minutes
    proof = Proof(
        machine=describe_machine(given.fake_device), pretended=given.fake_device, parts=()
    )
    if not given.fake_device and proof.machine.device is None:
        raise UserError(
            "torch of this Python finds no CUDA device, which the proof is of; run it on a machine "
            "with a GPU, or give --fake-device to try its parts without one"
        )
    given.output.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    for name in given.only or PARTS:
        context = Context(
            output=given.output.resolve(),
            settings=settings,
            pretended=given.fake_device,
            end_s=min(time.monotonic() + settings.limits_s[name], last_s),
        )
        result = run_part(name, PARTS[name], context)
        proof = proof.model_copy(update={"parts": (*proof.parts, result)})
        write_json_model(proof, given.output / "proof.json")
        write_page(proof, given.output / "proof.html")
        console.print(f"{name}: {result.status} in {result.seconds:.0f} s {result.reason}".strip())
    return proof
