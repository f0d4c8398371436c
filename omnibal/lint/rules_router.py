"""Rules of the router of experts, of flags that a line of Megatron-LM gives itself."""

from omnibal.lint.launch import Launcher
from omnibal.lint.line import Line
from omnibal.lint.rule import Problems, RuleGroup

RULES = RuleGroup("Routers of experts", launchers=frozenset((Launcher.MEGATRON_LM,)))
core_config = RULES.core_config
_AUXILIARY = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


@core_config("1589")
def bias_needs_whole_experts(line: Line) -> Problems:
    """Experts with a bias are not divided over tensor ranks."""
    has_bias = "num-experts" in line.flags and not line.on("disable-bias-linear")
    if has_bias and line.expert_tensor > 1:
        change = "give --disable-bias-linear, or --expert-tensor-parallel-size 1"
        yield f"linears with a bias and ETP {line.expert_tensor}", change


def _score(line: Line) -> str:
    return line.text("moe-router-score-function") or "softmax"


def _balancing(line: Line) -> tuple[str, ...]:
    return line.words("moe-router-load-balancing-type")


@core_config("1593")
def router_bias_needs_sigmoid(line: Line) -> Problems:
    """An expert bias of the router needs sigmoid scores."""
    score = _score(line)
    if line.on("moe-router-enable-expert-bias") and score != "sigmoid":
        yield f"an expert bias with scores by {score}", "give --moe-router-score-function sigmoid"


@core_config("1641")
def one_expert_needs_pre_softmax(line: Line) -> Problems:
    """Softmax over one chosen expert has no gradient."""
    is_single = line.number("moe-router-topk") == 1 and _score(line) == "softmax"
    has_gradient = line.on("moe-router-pre-softmax") or _balancing(line) == ("sinkhorn",)
    if is_single and not has_gradient and line.sizes.experts:
        yield "one expert a token", "give --moe-router-pre-softmax"


@core_config("1650-1660")
def router_groups(line: Line) -> Problems:
    """Groups must divide the experts and be at least as many as are chosen."""
    chosen, groups = (line.number(f"moe-router-{name}") for name in ("group-topk", "num-groups"))
    experts = line.sizes.experts
    if chosen and not (groups and experts % groups == 0 and chosen <= groups):
        change = "give --moe-router-num-groups, a divisor of the experts, and choose no more groups"
        yield f"{chosen} of {groups or 'no'} groups of {experts} experts", change


@core_config("1105-1129")
def capacity_needs_auxiliary_loss(line: Line) -> Problems:
    """A capacity of experts goes with auxiliary losses."""
    kinds = [kind for kind in _balancing(line) if kind not in _AUXILIARY]
    if line.text("moe-expert-capacity-factor") is not None and kinds:
        yield f"a capacity of experts with balancing {', '.join(kinds)}", "use aux_loss"


@core_config("1131")
def padding_needs_capacity(line: Line) -> Problems:
    """Experts' inputs are padded to a capacity."""
    has_capacity = line.text("moe-expert-capacity-factor") is not None
    if line.on("moe-pad-expert-input-to-capacity") and not has_capacity:
        yield "--moe-pad-expert-input-to-capacity alone", "give --moe-expert-capacity-factor"
