"""The three kinds of objectives, and the check of each at start: a call on a tiny batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from common import distributed
from common.errors import UserError
from common.objectives.find import Function, Objective


def call(function: Function, values: Mapping[str, Any]) -> Any:
    """Call the function of an objective's file with its settings, and the values that it names."""
    inputs = {name: values[name] for name in function.inputs}
    return function.function(**inputs, **function.settings)


@contextmanager
def checking(objective: Objective) -> Iterator[None]:
    """Turn a ValueError of a function into a UserError."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise objective.refused(f"cannot be computed: {error}") from error


def warn(objective: Objective, failure: str) -> None:
    """Print on rank 0 where an objective goes against its purpose."""
    distributed.print_rank0(f"warning: --{objective.flag} {objective.names} {failure}.")


@dataclass(frozen=True)
class PolicyObjective(Objective):
    """The loss of GRPO's tokens: the first function's, changed by each further one in turn."""

    flag: ClassVar = "policy_objective"
    folder: ClassVar = "policy"
    flags: ClassVar = ("epsilon_low", "epsilon_high")
    inputs: ClassVar = ("logps", "old_logps", "sampled_logps", "advantages", "mask", "loss")

    def __call__(
        self,
        logps: Tensor,
        old_logps: Tensor,
        sampled_logps: Tensor,
        advantages: Tensor,
        mask: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of each token and metrics, (B, C) each; advantages (B, C), or (B,)."""
        advantages = advantages[:, None] if advantages.dim() == 1 else advantages
        before = (old_logps.detach(), sampled_logps.detach())
        values = (logps, *before, advantages.expand_as(logps), mask)
        tensors, all_metrics = dict(zip(self.inputs, values, strict=False)), dict[str, Tensor]()
        for function in self.functions:
            result = call(function, tensors)
            tensors["loss"], metrics = result if isinstance(result, tuple) else (result, {})
            for name, values in metrics.items():
                if name in all_metrics:  # weights of two functions multiply
                    values = values * all_metrics[name]
                all_metrics[name] = values
        return tensors["loss"], all_metrics

    @property
    def has_ratio_to_sampler(self) -> bool:
        """Whether the objective's ratio is that to the sampler."""
        inputs = self.functions[0].inputs
        return "sampled_logps" in inputs and "old_logps" not in inputs

    @property
    def weighs_samples(self) -> bool:
        """Whether a function corrects for the sampler by weights, as its file says."""
        return any(function.constants.get("WEIGHS_SAMPLES") for function in self.functions)

    def check(self) -> None:
        """Call it on a tiny batch; raise a UserError, or warn, if what it returns is no loss."""
        if [f.name for f in self.functions if "loss" not in f.inputs] != [self.functions[0].name]:
            raise self.refused("must be an objective, and behind it functions that take its loss")
        mask = torch.tensor([[True, True, False], [True, False, False]])
        logps = torch.full((2, 3), -1.0, requires_grad=True)
        advantages = torch.tensor([1.0, -1.0])[:, None].expand(2, 3)
        with checking(self):
            loss, metrics = self(logps, logps, logps, advantages, mask)
        if any(getattr(each, "shape", None) != mask.shape for each in (loss, *metrics.values())):
            raise self.refused("returns a loss or a metric that has not the shape (B, C) of logps")
        if not loss.isfinite().all():
            raise self.refused("returns a loss that is not finite")
        if loss[~mask].any():
            raise self.refused("returns a loss that is not 0 where the mask is False")
        if not loss.requires_grad:
            raise self.refused("returns a loss without a gradient")
        (slope,) = torch.autograd.grad(loss.sum(), logps)
        outside = ~mask * torch.tensor([-0.5, 0.3, 0.2, 1.0])[:, None, None]  # (4, 2, 3)
        pi, old, sampled = logps.detach() + outside[:3]
        moved, _ = self(pi, old, sampled, advantages + outside[3], mask)
        if slope[~mask].any() or not torch.equal(moved, loss):
            raise self.refused("depends on tokens where the mask is False")
        if not (slope[0, :2] < 0).all():
            warn(self, "does not raise the log-prob of a token with a positive advantage")


@dataclass(frozen=True)
class PreferenceLoss(Objective):
    """The loss of DPO's pairs, or of several the sum with weights."""

    flag: ClassVar = "loss_type"
    folder: ClassVar = "preference"
    inputs: ClassVar = (
        *("chosen_logps", "rejected_logps", "ref_chosen_logps", "ref_rejected_logps"),
        *("chosen_lengths", "rejected_lengths"),
    )
    flags: ClassVar = ("beta", "label_smoothing")
    optional: ClassVar = ("beta",)  # it also scales the implicit reward

    def __call__(
        self,
        logps: Tensor,  # (N, 2) nats under the policy, chosen first
        ref_logps: Tensor,  # (N, 2) the same under the reference
        lengths: Tensor,  # (N, 2) tokens
        weights: Sequence[float] = (),  # one per function; empty: 1 each
    ) -> Tensor:
        """Loss (N,) of pairs."""
        weights = weights or [1.0] * len(self.functions)
        losses = []
        for weight, function in zip(weights, self.functions, strict=True):
            tensors = [logps, ref_logps, lengths]
            if function.constants.get("PER_TOKEN"):
                tensors = [logps / lengths, ref_logps / lengths, lengths]
            columns = [column for tensor in tensors for column in tensor.unbind(-1)]  # (N,) each
            loss = call(function, dict(zip(self.inputs, columns, strict=True)))
            if getattr(loss, "shape", None) != logps.shape[:-1]:
                raise self.refused("returns no loss of the shape (N,) of chosen_logps")
            losses.append(weight * loss)
        return torch.stack(losses).sum(0)

    @property
    def needs_reference(self) -> bool:
        """Whether any loss compares with the reference."""
        return any(name.startswith("ref_") for f in self.functions for name in f.inputs)

    @property
    def is_per_token(self) -> bool:
        """Whether every loss takes log-probs per token, as its file says."""
        return all(function.constants.get("PER_TOKEN") for function in self.functions)

    def check(self) -> None:
        """Call each function on two pairs; raise a UserError, or warn, if it returns no loss."""
        logps = torch.full((2, 2), -4.0, requires_grad=True)
        ref_logps, lengths = torch.full((2, 2), -4.0), torch.tensor([[2, 3], [4, 2]])
        second = torch.tensor([[0], [1]])  # to change the second pair alone
        for function in self.functions:
            one = PreferenceLoss([function])
            with checking(one):
                loss = one(logps, ref_logps, lengths)
            if not loss.isfinite().all():
                raise one.refused("returns a loss that is not finite")
            if not loss.requires_grad:
                raise one.refused("returns a loss without a gradient")
            (slope,) = torch.autograd.grad(loss.sum(), logps)  # (2, 2)
            if one(logps - second, ref_logps - 2 * second, lengths + second)[0] != loss[0]:
                raise one.refused("makes the loss of a pair depend on other pairs")
            if not (slope[:, 0] < 0).all() or (slope[:, 1] < 0).any():
                warn(one, "does not raise the chosen log-prob against the rejected one")


@dataclass(frozen=True)
class Advantages(Objective):
    """The advantages of GRPO's completions."""

    flag: ClassVar = "advantages"
    folder: ClassVar = "advantages"
    flags: ClassVar = ("scale_rewards",)
    inputs: ClassVar = ("rewards", "rewards_by_function", "weights", "counted", "all_reduce")

    def __call__(
        self,
        rewards: Tensor,  # (F, N, G), or the weighted sum over functions, (1, N, G)
        weights: Sequence[float] = (1.0,),  # F
        counted: Tensor | None = None,  # (N,) bool, True = a group of the batch; None: all are
        all_reduce: Callable[[Tensor], Tensor] | None = None,  # None: there are no other ranks
    ) -> Tensor:
        """Advantages (N, G), float32; of all candidates (N, K), where rewards are those of all.

        Collective if the function sums over the ranks.
        """
        if counted is None:
            counted = torch.ones(rewards.shape[1], dtype=torch.bool, device=rewards.device)
        values = (rewards[0], rewards, weights, counted, all_reduce or (lambda sums: sums))
        advantages = call(self.functions[0], dict(zip(self.inputs, values, strict=True)))
        if getattr(advantages, "shape", None) != rewards.shape[1:]:
            raise self.refused("returns no advantages of the shape (N, G) of rewards")
        return advantages.float()  # type: ignore[no-any-return]

    @property
    def takes_each_function(self) -> bool:
        """Whether each reward function's rewards are taken, not their weighted sum."""
        return "rewards_by_function" in self.functions[0].inputs

    @property
    def normalizes_globally(self) -> bool:
        """Whether its results are then normalised over the batch, as its file says."""
        return bool(self.functions[0].constants.get("NORMALIZE_GLOBALLY"))

    @property
    def min_reward(self) -> float:
        """The smallest reward that it takes, as its file says."""
        return float(self.functions[0].constants.get("MIN_REWARD", -torch.inf))

    def check(self, num_functions: int = 1, num_generations: int = 3) -> None:
        """Call it on two groups; raise a UserError, or warn, if it returns no advantages."""
        if {"rewards", "rewards_by_function"} <= {*self.functions[0].inputs}:
            raise self.refused("takes both rewards, a weighted sum, and rewards_by_function")
        rising = torch.arange(num_generations) ** 2.0
        groups = torch.stack([rising, torch.ones_like(rising)])
        rewards = groups.expand(num_functions if self.takes_each_function else 1, -1, -1)
        with checking(self):
            advantages = self(rewards, [1.0] * len(rewards))
            of_first = self(rewards[:, :1], [1.0] * len(rewards))  # without the second group
        if not advantages.isfinite().all():
            raise self.refused("returns advantages that are not finite, as of equal rewards")
        is_global = "all_reduce" in self.functions[0].inputs
        if not is_global and not torch.equal(of_first, advantages[:1]):
            reason = "depends on other groups, of which each process has its share"
            raise self.refused(f"{reason}: sum over processes by all_reduce")
        if advantages[0].argmax() != num_generations - 1:
            warn(self, "does not give the best completion the highest advantage")
        if advantages[1].any():
            warn(self, "gives completions of equal rewards other advantages than 0")
