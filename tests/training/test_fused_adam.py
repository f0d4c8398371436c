"""Resuming with an optimizer that keeps its state as Transformer Engine's FusedAdam does."""

import pytest
import torch
from checkpoint_cases import TOTAL_STEPS, train_range
from megatron.core import optimizer as core_optimizer
from megatron.core.optimizer import distrib_optimizer
from ranks import run_ranks
from toy import stages_of, toy_model, toy_plan

SAVED_STEP = 3


class FusedAdam(torch.optim.Optimizer):
    """AdamW whose moments are by parameter, under two names and no other, and whose step is the
    group's, which has none before the first one; groups without parameters are passed over."""

    steps_taken: tuple[int, ...] = ()

    def __init__(self, params, lr, weight_decay, betas, eps, adam_w_mode):
        assert adam_w_mode
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**settings, "bias_correction": True})

    def moment(self, parameter, name):
        dtype = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}[name]
        assert self.state[parameter][name].dtype == dtype
        return self.state[parameter][name]

    def parameters(self):
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_dict(self):
        state_dict = super().state_dict()
        numbered = dict(enumerate(self.parameters()))
        state_dict["state"] = {
            number: {name: self.moment(numbered[number], name) for name in state}
            for number, state in state_dict["state"].items()
        }
        return state_dict

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for number, parameter in enumerate(self.parameters()):
            state = state_dict["state"].get(number, {})
            self.state[parameter] = {name: value.float().clone() for name, value in state.items()}
            for name in state:
                self.moment(parameter, name)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            if not group["params"]:
                continue
            assert group["bias_correction"]
            group["step"] = group["step"] + 1 if "step" in group else 1
            assert isinstance(group["step"], int)  # as the kernel's argument is
            for parameter in group["params"]:
                self.update(parameter, group)
        FusedAdam.steps_taken += (group["step"],)

    def update(self, parameter, group):
        state, gradient = self.state[parameter], parameter.grad
        if not state:
            state.update(
                exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter)
            )
        first, second = (self.moment(parameter, name) for name in ("exp_avg", "exp_avg_sq"))
        beta1, beta2 = group["betas"]
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        corrected = first / (1 - beta1 ** group["step"])
        spread = (second / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(group["lr"] * corrected / spread)


def train_with(links, is_fused, *arguments):
    """As `train_range`, and the step counts that FusedAdam corrected its moments by."""
    if is_fused:
        core_optimizer.Adam = distrib_optimizer.Adam = FusedAdam
        core_optimizer.USING_PYTORCH_OPTIMIZER = False
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    return *train_range(links, *arguments), FusedAdam.steps_taken


def run_range(plan, *arguments):
    ranks = run_ranks(plan.parallel, train_with, *arguments[:1], plan, *arguments[1:])
    weights = {name: value for _, own, _ in ranks for name, value in own.items()}
    [steps_taken] = {steps for _, _, steps in ranks}
    return ranks[0][0], weights, steps_taken


def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path):
    """Prevents: a KeyError on "step" at every resume where Transformer Engine is installed, and a
    bias correction that begins again."""
    model = toy_model()
    plan = toy_plan(model, stages_of(model, 4), data=2)
    losses, weights, _ = run_range(plan, True, 0, TOTAL_STEPS, None, None)
    first, _, steps = run_range(plan, True, 0, SAVED_STEP, None, tmp_path)
    assert steps == (1, 2, 3)
    rest, resumed, steps = run_range(plan, True, SAVED_STEP, TOTAL_STEPS, tmp_path, None)
    assert steps == (4, 5, 6)
    assert first + rest == losses
    for name in weights:
        assert torch.equal(resumed[name], weights[name]), name


@pytest.mark.parametrize("fused_first", [True, False], ids=["fused-to-torch", "torch-to-fused"])
def test_resumes_with_the_other_optimizer(tmp_path, fused_first):
    """Prevents: checkpoints that are lost with the image of the cluster that wrote them."""
    model = toy_model()
    plan = toy_plan(model, stages_of(model, 4))
    losses, weights, _ = run_range(plan, fused_first, 0, TOTAL_STEPS, None, None)
    run_range(plan, fused_first, 0, SAVED_STEP, None, tmp_path)
    rest, resumed, _ = run_range(plan, not fused_first, SAVED_STEP, TOTAL_STEPS, tmp_path, None)
    assert rest == pytest.approx(losses[SAVED_STEP:], rel=1e-5)
    for name in weights:
        torch.testing.assert_close(resumed[name], weights[name], rtol=1e-4, atol=1e-5, msg=name)


def test_state_before_the_first_step_is_saved_and_resumed(tmp_path):
    """Prevents: a failed first save where every step so far was skipped."""
    model = toy_model()
    plan = toy_plan(model, stages_of(model, 4))
    losses, _, _ = run_range(plan, True, 0, TOTAL_STEPS, None, None)
    run_range(plan, True, 0, 0, None, tmp_path)
    resumed, _, steps = run_range(plan, True, 0, TOTAL_STEPS, tmp_path, None)
    assert steps == (1, 2, 3, 4, 5, 6)
    assert resumed == losses
