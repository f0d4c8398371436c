"""The page of a proof, and its tables for the terminal."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined
from pydantic import JsonValue

from omnibal.base.files import atomic
from omnibal.report.table import Column, Facts, Table
from scripts.gpu_proof.result import Proof


def write_page(proof: Proof, path: Path) -> None:
    """Write the self-contained page."""
    folder = Path(__file__).parent
    loader = ChoiceLoader([FileSystemLoader(folder), PackageLoader("omnibal", "report")])
    pages = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=StrictUndefined,
    )  # fmt: skip
    page = pages.get_template("proof.html.jinja").render(
        proof=proof, machine=machine_facts(proof), tables=tables_of(proof)
    )
    with atomic(path) as written:
        written.write_bytes(page.encode("ascii", "xmlcharrefreplace"))


def machine_facts(proof: Proof) -> Facts:
    """The parts' hardware and software."""
    machine = proof.machine
    device = "fake device: no figure is of a GPU" if proof.pretended else str(machine.device)
    entries = [("Device", device), ("Python", machine.python), *machine.versions.items()]
    if machine.memory_gib is not None:
        entries.insert(1, ("Device memory", f"{machine.memory_gib:.1f} GiB"))
    if machine.cuda is not None:
        entries.append(("CUDA of torch", machine.cuda))
    return Facts("", entries)


def tables_of(proof: Proof) -> list[Table]:
    found = [
        Table.of_records(
            "Parts, on a fake device" if proof.pretended else "Parts",
            proof.parts,
            {
                Column(title="part", style="left"): lambda part: part.name,
                Column(title="status", style="left"): lambda part: part.status,
                "seconds": lambda part: f"{part.seconds:.0f}",
                Column(title="reason", style="wrap"): lambda part: part.reason,
            },
        )
    ]
    for part in {part.name: part for part in proof.parts}.values():
        of = part.figures.items()
        tables = [
            _figures_table(part.name, {k: v for k, v in of if not isinstance(v, list | dict)}),
            *(_list_table(f"{part.name}: {k}", v) for k, v in of if isinstance(v, list)),
            *(_figures_table(f"{part.name}: {k}", v) for k, v in of if isinstance(v, dict)),
        ]
        found += [table for table in tables if any(table.sections)]
    return found


def _figures_table(title: str, figures: dict[str, JsonValue]) -> Table:
    rows = [(_words(name), _shown(name, value)) for name, value in figures.items()]
    return Table.of_rows(title.capitalize(), [Column(title="figure", style="left"), "value"], rows)


def _list_table(title: str, entries: Sequence[JsonValue]) -> Table:
    """A table of entries with equal fields, with errors of predictions."""
    records = [entry for entry in entries if isinstance(entry, dict)]
    fields = list(dict.fromkeys(field for record in records for field in record))
    rows = [[_shown(field, record.get(field)) for field in fields] for record in records]
    return Table.of_rows(title.capitalize(), map(_words, fields), rows)


def _words(field: str) -> str:
    units = {"gib": "GiB", "ms": "ms", "mfu": "MFU", "tflops": "TFLOP/s"}
    # The terminal parses brackets as markup.
    text = field.replace("gb_per_s", "GB/s").replace("[", " (").replace("]", ")")
    return " ".join(units.get(word, word) for word in text.split("_"))


def _shown(field: str, value: JsonValue) -> str:
    if isinstance(value, bool) or not isinstance(value, float):
        return "" if value is None else str(value)
    if field == "mfu" or field.endswith(("share", "error", "difference")):
        return f"{value:.1%}"
    if 0 < abs(value) < 0.1:
        return f"{value:.2g}"
    return f"{value:.2f}" if abs(value) < 100 else f"{value:,.0f}"
