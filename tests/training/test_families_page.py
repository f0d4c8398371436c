"""The table of families in docs/models.md agrees with the code, the importer and the trainer."""

import json
import re
from pathlib import Path

import pytest

from megatron.vlm.conversion.released_config import read_config
from omnibal.base.errors import UserError
from omnibal.families.hub import FAMILIES, TRAINED_TYPES
from omnibal.families.named import named_model
from omnibal.job.check import model_obstacle
from omnibal.model.adapter_settings import AdapterConfig, adapter_mistake
from omnibal.model.units import model_parts

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "tests" / "planner" / "hub_configs").glob("*/config.json"))
HEAD = "| family | `model_type` |"


def rows() -> list[list[str]]:
    """Return the cells of the families table's rows."""
    lines = (ROOT / "docs" / "models.md").read_text().splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith(HEAD)) + 2
    table = [line for line in lines[first:][: len(FAMILIES) + 1] if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_page_is_what_the_code_says():
    """Prevents documentation that promises a refused family or omits a trained family."""
    found = [(name, re.findall(r"`(\w+)`", types), yes) for name, types, _, _, yes in rows()]
    for (name, types, trained), family in zip(found, FAMILIES, strict=True):
        assert (name, trained) == (family.name, "yes" if family.is_trained else "no")
        # A language model without encoders has a type that ends in _text.
        assert [kind for kind in family.readers if not kind.endswith("_text")] == [
            kind for kind in types if not kind.endswith("_text")
        ]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.parent.name)
def test_importer_and_trainer_agree_with_the_table(config):
    """Prevents an importer or trainer that disagrees with the table, for every release among the
    presets."""
    is_trained = json.loads(config.read_text())["model_type"] in TRAINED_TYPES
    assert (model_obstacle(named_model(str(config.parent))) is None) == is_trained
    names = {"lm_head.weight", "language_model.lm_head.weight"}
    if is_trained:
        model, _ = read_config(config.parent, names)
        assert model == named_model(str(config.parent))
        adapters = AdapterConfig(rank=8, alpha=16, parts=model_parts(model))
        assert adapter_mistake(model, (), adapters) is None
    else:
        with pytest.raises(UserError, match=r"not converted|quantization_config"):
            read_config(config.parent, names)
