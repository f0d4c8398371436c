"""Rules of the router of experts, of flags that a line of Megatron-LM gives itself."""

from omnibal.lint.flags import words_of
from omnibal.lint.launch import Launcher
from omnibal.lint.line import Line
from omnibal.lint.rule import CORE, Broken, Rule

_CONFIG = "core/transformer/transformer_config.py"
_ONLY = frozenset((Launcher.MEGATRON_LM,))
_AUXILIARY = frozenset(("aux_loss", "seq_aux_loss", "global_aux_loss", "none"))


def _bias_of_experts(line: Line) -> Broken | None:
    has_bias = "num-experts" in line.flags and not line.on("disable-bias-linear")
    if not has_bias or line.expert_tensor == 1:
        return None
    return Broken(
        f"linears with a bias and ETP {line.expert_tensor}",
        "give --disable-bias-linear, or --expert-tensor-parallel-size 1",
    )


def _bias_of_router(line: Line) -> Broken | None:
    score = line.text("moe-router-score-function") or "softmax"
    if not line.on("moe-router-enable-expert-bias") or score == "sigmoid":
        return None
    return Broken(
        f"an expert bias with scores by {score}", "give --moe-router-score-function sigmoid"
    )


def _single(line: Line) -> Broken | None:
    score = line.text("moe-router-score-function") or "softmax"
    if line.number("moe-router-topk") != 1 or score != "softmax":
        return None
    kinds = words_of(line.text("moe-router-load-balancing-type"))
    if line.on("moe-router-pre-softmax") or kinds == ("sinkhorn",) or not line.sizes.experts:
        return None
    return Broken("one expert a token", "give --moe-router-pre-softmax")


def _groups(line: Line) -> Broken | None:
    chosen, groups = (line.number(f"moe-router-{name}") for name in ("group-topk", "num-groups"))
    experts = line.sizes.experts
    if not chosen or (groups and experts % groups == 0 and chosen <= groups):
        return None
    return Broken(
        f"{chosen} of {groups or 'no'} groups of {experts} experts",
        "give --moe-router-num-groups, a divisor of the experts, and choose no more groups",
    )


def _capacity(line: Line) -> Broken | None:
    kinds = set(words_of(line.text("moe-router-load-balancing-type"))) - _AUXILIARY
    if line.text("moe-expert-capacity-factor") is None or not kinds:
        return None
    return Broken(f"a capacity of experts with balancing {', '.join(kinds)}", "use aux_loss")


def _padded(line: Line) -> Broken | None:
    has_capacity = line.text("moe-expert-capacity-factor") is not None
    if not line.on("moe-pad-expert-input-to-capacity") or has_capacity:
        return None
    return Broken("--moe-pad-expert-input-to-capacity alone", "give --moe-expert-capacity-factor")


ROUTER_RULES = (
    Rule(
        name="bias-needs-whole-experts",
        holds="experts with a bias are not divided over tensor ranks",
        source=f"{_CONFIG}:1589, {CORE}",
        broken=_bias_of_experts,
        launchers=_ONLY,
    ),
    Rule(
        name="router-bias-needs-sigmoid",
        holds="an expert bias of the router needs sigmoid scores",
        source=f"{_CONFIG}:1593, {CORE}",
        broken=_bias_of_router,
        launchers=_ONLY,
    ),
    Rule(
        name="one-expert-needs-pre-softmax",
        holds="softmax over one chosen expert has no gradient",
        source=f"{_CONFIG}:1641, {CORE}",
        broken=_single,
        launchers=_ONLY,
    ),
    Rule(
        name="router-groups",
        holds="groups must divide the experts and be at least as many as are chosen",
        source=f"{_CONFIG}:1650-1660, {CORE}",
        broken=_groups,
        launchers=_ONLY,
    ),
    Rule(
        name="capacity-needs-auxiliary-loss",
        holds="a capacity of experts goes with auxiliary losses",
        source=f"{_CONFIG}:1105-1129, {CORE}",
        broken=_capacity,
        launchers=_ONLY,
    ),
    Rule(
        name="padding-needs-capacity",
        holds="experts' inputs are padded to a capacity",
        source=f"{_CONFIG}:1131, {CORE}",
        broken=_padded,
        launchers=_ONLY,
    ),
)
