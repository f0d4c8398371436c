"""Files of a replay: its identity, and a file of results per stage."""

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import NonNegativeInt

from omnibal.base.errors import UserError
from omnibal.base.files import read_json_model, write_json_model
from omnibal.base.frozen import Frozen


class ReplayIdentity(Frozen):
    """Identity of a replay, written before the first stage."""

    plan_sha256: str


class FoundOfStage(Frozen):
    """Results of one stage."""

    stage: NonNegativeInt


Identity = TypeVar("Identity", bound=ReplayIdentity)
Found = TypeVar("Found", bound=FoundOfStage)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFiles(Generic[Identity, Found]):
    """Files of a replay, in the directory that all methods take."""

    what: str
    identity: type[Identity]
    found: type[Found]
    info_file: str
    prefix: str
    """Name of stages' files, before the stage's number."""
    remedy: str
    """End of the error message about a bad file."""

    def file_of(self, directory: Path, stage: int) -> Path:
        return directory / f"{self.prefix}_{stage}.json"

    def all_files(self, directory: Path) -> list[Path]:
        """List a replay's files, the first even if absent."""
        return [directory / self.info_file, *sorted(directory.glob(f"{self.prefix}_*.json"))]

    def open(self, directory: Path, identity: Identity) -> None:
        """Begin a replay, or continue an identical one."""
        if not (directory / self.info_file).exists():
            directory.mkdir(parents=True, exist_ok=True)
            write_json_model(identity, directory / self.info_file)
            return
        kept = self.identity_of(directory, identity.plan_sha256)
        if kept != identity:
            differs = [name for name, value in identity if value != dict(kept)[name]]
            raise UserError(
                f"{directory}: holds a {self.what} with another {differs[0]}; only the "
                f"same one can be gone on with: {self.remedy}"
            )

    def identity_of(self, directory: Path, plan_sha256: str) -> Identity:
        kept = read_json_model(self.identity, directory / self.info_file, self.remedy)
        if kept.plan_sha256 != plan_sha256:
            raise UserError(
                f"{directory}: is the {self.what} of another plan (sha256 "
                f"{kept.plan_sha256[:12]}, not {plan_sha256[:12]}); give the one of this plan, or "
                f"{self.remedy}"
            )
        return kept

    def write(self, found: Found, directory: Path) -> None:
        write_json_model(found, self.file_of(directory, found.stage))

    def read(self, directory: Path, stages: int) -> tuple[Found, ...]:
        """Read the existing stage files, in order."""
        kept = []
        for stage in range(stages):
            path = self.file_of(directory, stage)
            if not path.exists():
                continue
            kept.append(read_json_model(self.found, path, self.remedy))
            if kept[-1].stage != stage:
                raise UserError(
                    f"{path}: holds stage {kept[-1].stage}, and by its name stage {stage}; "
                    f"{self.remedy}"
                )
        return tuple(kept)
