"""Every trainer's export: the one place that a new one is added to."""

from collections.abc import Callable, Mapping

from omnibal.export import (
    loongforge,
    megatron_bridge,
    megatron_lm,
    mindspeed_mm,
    ms_swift,
    xtuner,
)
from omnibal.export.exported import Exported, ExportInput
from omnibal.model.targets import TargetName

EXPORTS: Mapping[TargetName, Callable[[ExportInput], Exported]] = {
    TargetName.MS_SWIFT: ms_swift.export,
    TargetName.MS_SWIFT_DEEPSPEED: ms_swift.export_deepspeed,
    TargetName.XTUNER: xtuner.export,
    TargetName.LOONGFORGE: loongforge.export,
    TargetName.MEGATRON_LM: megatron_lm.export,
    TargetName.MEGATRON_BRIDGE: megatron_bridge.export,
    TargetName.MINDSPEED_MM: mindspeed_mm.export,
}
