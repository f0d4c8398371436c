"""Every trainer's export: the one place that a new one is added to."""

from collections.abc import Callable, Mapping

from omnibal.errors import UserError
from omnibal.export import ms_swift, xtuner
from omnibal.export.exported import Exported, Given
from omnibal.targets import TargetName

EXPORTS: Mapping[TargetName, Callable[[Given], Exported]] = {
    TargetName.MS_SWIFT: ms_swift.export,
    TargetName.MS_SWIFT_DEEPSPEED: ms_swift.export_deepspeed,
    TargetName.XTUNER: xtuner.export,
}


def export_of(name: TargetName) -> Callable[[Given], Exported]:
    """The function that makes a trainer's files.

    Raises:
        UserError: plans can be made for the trainer, and are not exported yet.
    """
    if name not in EXPORTS:
        raise UserError(
            f"plans for {name} are not exported yet; choose one of {', '.join(EXPORTS)}"
        )
    return EXPORTS[name]
