"""The three kinds of objectives, and the check of each at start: a call on a tiny batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from common import distributed
from common.errors import FunctionError, UserError, naming
from common.losses import precise
from common.objectives import probe
from common.objectives.find import Function, Objective
from common.objectives.implicit_reward import ImplicitReward


def call(function: Function, values: Mapping[str, Any]) -> Any:
    """Call the function of an objective's file with its settings, and the values that it names.

    A FunctionError if a user's raises; a UserError if it changes a tensor in place.
    """
    inputs = {name: values[name] for name in function.inputs}
    versions = {name: getattr(value, "_version", 0) for name, value in inputs.items()}
    title = f"--{function.flag} {function.name}"
    with naming(title, is_ours=function.is_built_in):
        result = function.function(**inputs, **function.settings)
    for name, value in inputs.items():
        if getattr(value, "_version", 0) != versions[name]:
            raise UserError(f"{title} changes {name} in place; change {name}.clone() instead.")
    return result


def described(value: Any) -> str:
    """The shape of a tensor, the type of anything else."""
    is_tensor = isinstance(value, Tensor)
    return f"shape {tuple(value.shape)}" if is_tensor else f"type {type(value).__name__}"


@contextmanager
def checking(objective: Objective, *batches: probe.Batch) -> Iterator[None]:
    """Turn a ValueError of a function into a UserError; refuse one that changes a batch."""
    tensors = [tensor for batch in batches for tensor in batch.values()]
    before = [tensor.clone() for tensor in tensors]
    try:
        yield
    except ValueError as error:
        cause = error.__cause__ if isinstance(error, FunctionError) else error
        if isinstance(cause, ValueError) and not isinstance(cause, UserError):
            raise objective.refused(f"cannot be computed: {cause}") from cause
        if isinstance(error, FunctionError):
            error.add(" (in the check at start)")
        raise
    if not all(map(torch.equal, tensors, before)):
        raise objective.refused("changes its inputs in place; change copies, x.clone()")


def refuse_infinite(objective: Objective, loss: Tensor) -> None:
    """Raise a UserError for losses that are not finite."""
    if not loss.isfinite().all():
        raise objective.refused("returns a loss that is not finite")


def refuse_no_loss(objective: Objective, *batches: probe.Batch) -> None:
    """Raise a UserError for losses that are not finite or have no gradient."""
    for seen in batches:
        refuse_infinite(objective, seen["loss"])
        if "slope" not in seen:
            raise objective.refused("returns a loss without a gradient")
        if not seen["slope"].isfinite().all():
            raise objective.refused("returns a loss whose gradient is not finite")


def warn(objective: Objective, failure: str) -> None:
    """Print on rank 0 where an objective goes against its purpose."""
    distributed.print_rank0(f"warning: --{objective.flag} {objective.names} {failure}.")


@dataclass(frozen=True)
class PolicyObjective(Objective):
    """The loss of GRPO's tokens: the first function's, changed by each further one in turn."""

    flag: ClassVar = "policy_objective"
    folder: ClassVar = "policy"
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
            is_pair = isinstance(result, tuple) and len(result) == 2
            loss, metrics = result if is_pair else (result, {})
            if not isinstance(metrics, dict):
                raise self.refused(f"returns metrics of {described(metrics)}, not in a dict")
            for value in (loss, *metrics.values()):
                if not isinstance(value, Tensor) or value.shape != mask.shape:
                    reason = "returns a loss or a metric that has not the shape (B, C) of logps"
                    raise self.refused(f"{reason}: it has the {described(value)}")
            tensors["loss"] = loss
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

    def refuse_order(self) -> None:
        """Raise a UserError unless the first function makes a loss, and all others change it."""
        takes_loss = ["loss" in function.inputs for function in self.functions]
        if takes_loss[:1] != [False] or not all(takes_loss[1:]):
            raise self.refused("must be an objective, and behind it functions that take its loss")

    def refuse_values(self) -> None:
        """Raise a UserError for settings of built-in functions: call these on a tiny batch."""
        if self.is_built_in:
            batch = probe.tokens()[0]
            is_real = batch["mask"].any(1)  # (B,)
            with checking(self, batch):
                loss, _ = self(**batch)
            refuse_infinite(self, loss[is_real])

    def check(self) -> None:
        """Call it on tiny batches; raise a UserError, or warn, if what it returns is no loss."""
        self.refuse_order()
        batch, *others = probe.tokens()
        mask, is_real = batch["mask"], batch["mask"].any(1)  # (B, C), (B,)
        with checking(self, batch, *others):
            of_row = self.seen(probe.row_of(batch), has_slope=False)
            seen, *among = map(self.seen, (batch, *others))
        refuse_no_loss(self, {name: values[is_real] for name, values in seen.items()}, among[0])
        if seen["loss"][~mask].nan_to_num().any():
            raise self.refused("returns a loss that is not 0 where the mask is False")
        if seen["slope"][~mask].nan_to_num().any():
            raise self.refused("depends on tokens where the mask is False")
        if not all(probe.is_by_row(seen, each, of_row) for each in among):
            reason = "makes the loss or a metric of a completion depend on other completions"
            if not probe.is_same(self.seen(probe.moved_outside(batch))["loss"], seen["loss"]):
                reason = "depends on tokens where the mask is False"
            raise self.refused(probe.unless_random(reason, seen, self.seen(batch)))
        if not (seen["slope"][1] < 0).all():
            warn(self, "does not raise the log-prob of a token with a positive advantage")
        if not (seen["loss"].isfinite().all() and seen["slope"].isfinite().all()):
            warn(self, "is not finite for a completion without tokens, which some batches have")

    def seen(self, batch: probe.Batch, *, has_slope: bool = True) -> dict[str, Tensor]:
        """The loss of a batch's tokens, its slope, and metrics where the mask is True."""
        logps, mask = batch["logps"], batch["mask"]
        logps = logps.clone().requires_grad_() if has_slope else logps
        loss, metrics = self(**{**batch, "logps": logps})
        seen = {f"metric {name}": each.where(mask, 0) for name, each in metrics.items()}
        return seen | probe.with_slopes(loss.where(mask, 0.0), logps) | {"loss": loss.detach()}


@dataclass(frozen=True)
class PreferenceLoss(Objective):
    """The loss of DPO's pairs, or of several the sum with weights."""

    flag: ClassVar = "loss_type"
    folder: ClassVar = "preference"
    inputs: ClassVar = (
        *("chosen_logps", "rejected_logps", "ref_chosen_logps", "ref_rejected_logps"),
        *("chosen_lengths", "rejected_lengths", "beta"),
    )

    beta: float = 0.1  # of calls that give none

    def __call__(
        self,
        logps: Tensor,  # (N, 2) nats under the policy, chosen first
        ref_logps: Tensor,  # (N, 2) the same under the reference
        lengths: Tensor,  # (N, 2) tokens
        beta: float | None = None,  # strength of the pull to the reference, per nat
        weights: Sequence[float] = (),  # one per function; empty: 1 each
    ) -> Tensor:
        """Loss (N,) of pairs, in float32 or better."""
        logps, ref_logps = precise(logps), precise(ref_logps)
        beta = self.beta if beta is None else beta
        weights = weights or [1.0] * len(self.functions)
        losses = []
        for weight, function in zip(weights, self.functions, strict=True):
            tensors = [logps, ref_logps, lengths]
            if function.constants.get("PER_TOKEN"):
                tensors = [logps / lengths, ref_logps / lengths, lengths]
            columns = [column for tensor in tensors for column in tensor.unbind(-1)]  # (N,) each
            loss = call(function, dict(zip(self.inputs, [*columns, beta], strict=True)))
            if not isinstance(loss, Tensor) or loss.shape != logps.shape[:-1]:
                reason = "returns no loss of the shape (N,) of chosen_logps"
                raise self.refused(f"{reason}: it has the {described(loss)}")
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

    def implicit_reward(self, beta: float, *, reference_free: bool = False) -> ImplicitReward:
        """The reward by which a run with this loss judges completions."""
        needs_reference = self.needs_reference and not reference_free
        return ImplicitReward(beta, needs_reference, self.is_per_token)

    def refuse_values(self, beta: float | None = None) -> None:
        """Raise a UserError for settings of built-in functions: call these on tiny pairs."""
        batch = probe.pairs()[0]
        for function in self.functions:
            if function.is_built_in:
                one = PreferenceLoss([function], self.beta)
                with checking(one, batch):
                    loss = one(batch["logps"], batch["ref_logps"], batch["lengths"], beta)
                refuse_infinite(one, loss)

    def check(self, beta: float | None = None) -> None:
        """Call each function on pairs; raise a UserError, or warn, if it returns no loss."""
        for function in self.functions:
            one = PreferenceLoss([function], self.beta)
            batch, *others = probe.pairs()
            with checking(one, batch, *others):
                of_row = one.seen(probe.row_of(batch), beta, has_slope=False)
                seen, *among = [one.seen(each, beta) for each in (batch, *others)]
            refuse_no_loss(one, seen, among[0])
            if not all(probe.is_by_row(seen, each, of_row) for each in among):
                reason = "makes the loss of a pair depend on other pairs"
                raise one.refused(probe.unless_random(reason, seen, one.seen(batch, beta)))
            slope = seen["slope"][1:4:2]  # of pairs that the policy does not prefer
            if not (slope[:, 0] < 0).all() or (slope[:, 1] < 0).any():
                warn(one, "does not raise the chosen log-prob against the rejected one")

    def seen(
        self, batch: probe.Batch, beta: float | None, *, has_slope: bool = True
    ) -> dict[str, Tensor]:
        """The loss of a batch's pairs, and its slope."""
        logps = batch["logps"]
        logps = logps.clone().requires_grad_() if has_slope else logps
        loss = self(logps, batch["ref_logps"], batch["lengths"], beta)
        return probe.with_slopes(loss, logps)


@dataclass(frozen=True)
class Advantages(Objective):
    """The advantages of GRPO's completions."""

    flag: ClassVar = "advantages"
    folder: ClassVar = "advantages"
    inputs: ClassVar = ("rewards", "rewards_by_function", "weights", "counted", "all_reduce")

    def __call__(
        self,
        rewards: Tensor,  # (F, N, G) by function, or (N, G) or (1, N, G), their weighted sum
        weights: Sequence[float] = (1.0,),  # F
        counted: Tensor | None = None,  # (N,) bool, True = a group of the batch; None: all are
        all_reduce: Callable[[Tensor], Tensor] | None = None,  # None: there are no other ranks
    ) -> Tensor:
        """Advantages (N, G), float32; of all candidates (N, K), where rewards are those of all.

        Collective if the function sums over the ranks. Raises ValueError for groups of one, and a
        UserError for rewards below `min_reward`.
        """
        rewards = rewards[None] if rewards.dim() == 2 else rewards
        if rewards.shape[-1] < 2:
            raise ValueError(f"num_generations is {rewards.shape[-1]}; a group needs at least 2")
        if (rewards < (least := self.min_reward)).any():
            raise self.refused(f"takes rewards of at least {least:g}; one is {rewards.min():g}")
        if counted is None:
            counted = torch.ones(rewards.shape[1], dtype=torch.bool, device=rewards.device)
        values = (rewards[0], rewards, weights, counted, all_reduce or (lambda sums: sums))
        advantages = call(self.functions[0], dict(zip(self.inputs, values, strict=True)))
        if not isinstance(advantages, Tensor) or advantages.shape != rewards.shape[1:]:
            reason = "returns no advantages of the shape (N, G) of rewards"
            raise self.refused(f"{reason}: they have the {described(advantages)}")
        return advantages.float()

    @property
    def takes_each_function(self) -> bool:
        """Whether each reward function's rewards are taken, not their weighted sum."""
        return "rewards_by_function" in self.functions[0].inputs

    def weights_of(self, reward_weights: Sequence[float], number: int) -> Sequence[float]:
        """Weights of what it takes: of the total, which has been weighted already, 1."""
        return (reward_weights if self.takes_each_function else ()) or [1.0] * number

    @property
    def normalizes_globally(self) -> bool:
        """Whether its results are then normalised over the batch, as its file says."""
        return bool(self.functions[0].constants.get("NORMALIZE_GLOBALLY"))

    @property
    def min_reward(self) -> float:
        """The smallest reward that it takes, as its file says."""
        return float(self.functions[0].constants.get("MIN_REWARD", -torch.inf))

    def refuse_values(self) -> None:
        """Raise a UserError for settings of a built-in function: call it on tiny groups."""
        if self.is_built_in:
            batch = probe.groups(3, 1, self.min_reward)[0]
            with checking(self, batch):
                self.seen(batch)

    def check(self, num_functions: int = 1, num_generations: int = 3) -> None:
        """Call it on tiny groups; raise a UserError, or warn, if it returns no advantages."""
        if len(self.functions) != 1:
            raise self.refused("must be one function")
        if {"rewards", "rewards_by_function"} <= {*self.functions[0].inputs}:
            raise self.refused("takes both rewards, a weighted sum, and rewards_by_function")
        number = num_functions if self.takes_each_function else 1
        batch, *others = probe.groups(num_generations, number, self.min_reward)
        with checking(self, batch, *others):
            of_row = self.seen(probe.row_of(batch))
            seen, *among = map(self.seen, (batch, *others))
        advantages = seen["advantages"]
        if (
            not advantages.isfinite().all()
            or not among[0]["advantages"][probe.OBSERVED].isfinite().all()
        ):
            raise self.refused("returns advantages that are not finite, as of equal rewards")
        if "all_reduce" in self.functions[0].inputs:
            is_apart = probe.is_same(
                probe.on_two_ranks(lambda *half: self.seen(*half)["advantages"], batch), advantages
            )
        else:
            is_apart = all(probe.is_by_row(seen, each, of_row) for each in among)
        if not is_apart:
            reason = (
                "depends on other groups, of which each process has its share: sum over processes"
            )
            raise self.refused(
                probe.unless_random(f"{reason} by all_reduce", seen, self.seen(batch))
            )
        if advantages[1].argmax() != num_generations - 1:
            warn(self, "does not give the best completion the highest advantage")
        if advantages[3].any():
            warn(self, "gives completions of equal rewards other advantages than 0")

    def seen(
        self, batch: probe.Batch, all_reduce: Callable[[Tensor], Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The advantages of a batch's groups."""
        rewards = batch["rewards"].transpose(0, 1).contiguous()  # (F, N, G)
        values = self(rewards, [1.0] * len(rewards), batch["counted"], all_reduce)
        return {"advantages": values}
