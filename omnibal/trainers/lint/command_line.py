"""Settings of the launch that a command starts, as its trainer parses the flags.

Only full names match, as in Megatron-LM (`allow_abbrev=False`). Unknown flags are ignored.
"""

import re
from collections.abc import Mapping, Sequence

from omnibal.base.errors import UserError
from omnibal.model.limits import words as joined_words
from omnibal.model.parallel import MAX_DEVICES
from omnibal.trainers.lint import flags as known
from omnibal.trainers.lint.launch_settings import Launch, Launcher
from omnibal.trainers.lint.other_trainers import PROGRAMS
from omnibal.trainers.lint.script import UNKNOWN, ScriptCommand, read_script, show_unknown

_BRIDGE_PROGRAM = re.compile(r"megatron[._-]bridge|run_recipe|setup_experiment", re.IGNORECASE)
_DEEPSPEED = re.compile(r"(?:^|[\s/])swift (?:sft|pt|rlhf)\b")
# ms-swift's programs, with defaults for all sizes: their lines may have no known flag.
_SWIFT = re.compile(r"swift[./]cli[./]_megatron|(?:^|[\s/])(?:megatron|swift) (?:sft|pt|rlhf)\b")
_LOONGFORGE_FLAGS = {name for name in known.FIELDS if name.startswith("custom-")}
# Flags whose values must be known.
_NEEDED_FLAGS = (*known.FIELDS, *known.LENGTHS, *known.FROZEN)


def read_launch(
    text: str,
    given: Mapping[str, str],
    launcher: Launcher | None = None,
    gpus: int | None = None,
    line_number: int | None = None,
) -> Launch:
    """Return the launch of a command, bare flags or overrides, or a script with a launch line.

    Values of shell variables in `given`, `launcher` and `gpus` override the text's. `line_number`
    selects a launch line of a script. Raises UserError if none is found, or a size is unknown.
    """
    command = _find_launch(read_script(text, given), line_number)
    flags, environment = known.read_flags(command.words), command.environment
    by_name = {known.canonical(name): value for name, value in flags.items()}
    _check_values_known(by_name)
    launcher = launcher or _infer_launcher(command.words, flags, by_name)
    settings = {**known.DEFAULTS.get(launcher, {}), **by_name}
    # Processes per node, if given, times nodes (default 1).
    a_node = _read_device_count(by_name.get("nproc-per-node") or environment.get("NPROC_PER_NODE"))
    nodes = _read_device_count(by_name.get("nnodes") or environment.get("NNODES") or "1")
    launched_gpus = None if a_node is None or nodes is None else a_node * nodes
    if "num-gpus" in by_name:  # of Bridge's recipe runner
        launched_gpus = _read_device_count(by_name["num-gpus"])
    return Launch.model_validate(
        {
            **_read_fields(settings),
            "launcher": launcher,
            "flags": {name: value and show_unknown(value) for name, value in flags.items()},
            "gpus": gpus or launched_gpus,
            "environment": {name: show_unknown(value) for name, value in environment.items()},
            "unknown": tuple(dict.fromkeys(UNKNOWN.findall(" ".join(command.words)))),
        }
    )


def _find_launch(commands: Sequence[ScriptCommand], line_number: int | None) -> ScriptCommand:
    """Return the script's only launch line, or that of `line_number`."""
    for command in commands[1:]:
        if re.match(r"--?[A-Za-z]", command.words[0]):
            raise UserError(
                f"line {command.line} begins with flag {show_unknown(command.words[0])} and does "
                "not continue the line above; end that with a backslash and nothing behind it"
            )
    launches = [command for command in commands if _is_launch(command)]
    chosen = [command for command in launches if line_number in (None, command.line)]
    if len(chosen) == 1:
        return chosen[0]
    if not launches:
        flags = [word for command in commands for word in command.words if word.startswith("--")]
        given = f" among {show_unknown(joined_words(flags[:3]))}" if flags else ""
        raise UserError(f"the launch line has no known flag of a Megatron trainer{given}")
    lines = joined_words([str(command.line) for command in launches])
    if len(launches) == 1:
        raise UserError(f"--line-number {line_number}: the launch line is {lines}; leave it out")
    choice = "none was" if line_number is None else f"line {line_number} was"
    raise UserError(f"the script has launch lines {lines}, and {choice} chosen; give --line-number")


def _is_launch(command: ScriptCommand) -> bool:
    if command.words[0] in ("echo", "printf"):
        return False
    names = set(map(known.canonical, known.read_flags(command.words)))
    return not names.isdisjoint(known.FIELDS) or _SWIFT.search(" ".join(command.words)) is not None


def _check_values_known(by_name: Mapping[str, str | None]) -> None:
    """Raise if the value of a size or a switch has a variable that the script does not set."""
    uses: dict[str, str] = {}  # first flag that needs a variable
    for name, text in by_name.items():
        # A variable behind a switch is not its value, but further flags: `--sequence-parallel $X`.
        is_followed = name in known.SWITCHES and UNKNOWN.fullmatch(text or "")
        if name in _NEEDED_FLAGS and not is_followed:
            for variable in UNKNOWN.findall(text or ""):
                uses.setdefault(variable, f"--{name} {show_unknown(text or '')}")
    if uses:
        raise UserError(
            f"values are not known ({'; '.join(list(uses.values())[:3])}: the script does not set "
            f"them): give {' '.join(f'--set {name}=VALUE' for name in uses)}"
        )


def _infer_launcher(
    words: Sequence[str], flags: Mapping[str, str | None], by_name: Mapping[str, str | None]
) -> Launcher:
    """Return the trainer by the program, else by the style of flags. Raise for DeepSpeed."""
    program = " ".join(word for word in words if not word.startswith("-"))
    if _DEEPSPEED.search(program):
        raise UserError("`swift sft` starts DeepSpeed; give a launch line of `megatron sft`")
    for launcher, pattern in PROGRAMS.items():
        if pattern.search(program):
            return launcher
    if _SWIFT.search(program):
        return Launcher.MS_SWIFT
    if _LOONGFORGE_FLAGS & by_name.keys() or "loongforge" in program.lower():
        return Launcher.LOONGFORGE
    is_bridge = _BRIDGE_PROGRAM.search(program) or any(map(known.is_override, flags))
    if is_bridge or any(name in known.SHORT and f"-{name}" in words for name in flags):
        return Launcher.MEGATRON_BRIDGE
    underscored = [name for name in flags if "_" in name and known.canonical(name) in known.FIELDS]
    has_program = any(word.endswith(".py") for word in words)
    return Launcher.MS_SWIFT if underscored and not has_program else Launcher.MEGATRON_LM


def _read_device_count(text: str | None) -> int | None:
    """Return the number of devices or nodes in a value. None if it is no number, as `auto`."""
    # The program follows the last flag of torchrun: only the first word is its value.
    first = (text or "").split()[:1]
    count = known.whole_number(first[0]) if first else None
    return count if count is not None and 1 <= count <= MAX_DEVICES else None


def _read_fields(settings: Mapping[str, str | None]) -> dict[str, object]:
    """Return the values of `Launch`'s fields that flags or the launcher's defaults set."""
    given = {name: text for name, text in settings.items() if not known.is_nothing(text)}
    fields: dict[str, object] = {}
    # The split by chunk is read last, so that it replaces a split by stage.
    for name, text in sorted(given.items(), key=lambda flag: flag[0] == known.SPLIT_BY_CHUNK):
        if name in known.FIELDS:
            field, read = known.FIELDS[name]
            fields[field] = read(f"--{name}", text)
    fields["is_by_chunk"] = known.SPLIT_BY_CHUNK in given
    if known.is_on(given.get("recompute-activations", "false")):
        fields["recompute"] = "selective"
    if known.is_on(given.get("recompute-all", "false")):
        fields |= {"recompute": "full", "recompute_method": "uniform"}
    frozen = [part for name, part in known.FROZEN.items() if known.is_on(given.get(name, "false"))]
    length = next((name for name in known.LENGTHS if name in settings), None)
    if length in given:
        fields["sequence_length"] = known.read_positive(f"--{length}", given[length])
    return fields | {"frozen": tuple(dict.fromkeys(frozen))}
