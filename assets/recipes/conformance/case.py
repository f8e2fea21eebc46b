"""Golden cases, this project's functions on them, and how far a library is from a case."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from common import losses
from common.advantages import normalise_globally
from common.objectives.kinds import Advantages, PolicyObjective, PreferenceLoss

CASES = json.loads(Path(__file__).with_name("cases.json").read_text())
TOLERANCE = 1e-5


class Case(SimpleNamespace):
    """A micro-batch of a case as one library computes it: tensors, or None what it does not have.

    `step_mask` is the mask of all `num_micro_batches`, whose losses add up.
    """

    library: ClassVar[str]

    def __getattr__(self, name: str) -> Any:
        return None


class OurCase(Case):
    """A case as this project computes it."""

    library = "this project"

    def sft(self) -> Tensor:
        return losses.sft_loss(self.logps, self.mask, num_tokens=self.step_mask.sum())

    def bradley_terry(self, margin: float = 0.0, centering: float = 0.0) -> Tensor:
        pairs = losses.bradley_terry_loss(*self.rewards.chunk(2), margin=torch.tensor(margin))
        return (pairs + centering * losses.centering_penalty(*self.rewards.chunk(2))).mean()

    def preference(self, loss_type: str, beta: float = 0.1) -> Tensor:
        sums = [losses.masked_sum(logps, self.mask, 1) for logps in (self.logps, self.ref_logps)]
        logps, ref_logps, lengths = (rows.view(2, -1).T for rows in (*sums, self.mask.sum(1)))
        return PreferenceLoss.find(*loss_type.split())(logps, ref_logps, lengths, beta).mean()

    def kl(self, estimator: str) -> Tensor:
        per_token = losses.kl_estimate(self.logps, self.ref_logps, estimator=estimator)
        if self.old_logps is not None:
            per_token = per_token * losses.probability_ratio(self.logps, self.old_logps, self.mask)
        return losses.aggregate(per_token, self.mask, aggregation="token")

    def policy(self, aggregate: dict[str, Any], objective: str = "clip") -> Tensor:
        sampled = self.old_logps if self.sampled_logps is None else self.sampled_logps
        loss = PolicyObjective.find(*objective.split())
        per_token, _ = loss(self.logps, self.old_logps, sampled, self.advantages, self.mask)
        counts = {"num_tokens": self.step_mask.sum(), "num_sequences": self.step_mask.any(1).sum()}
        return losses.aggregate(per_token, self.mask, **counts, **aggregate)

    def group_advantages(self, advantages: str) -> Tensor:
        function = Advantages.find(advantages)
        rewards = self.rewards if function.takes_each_function else self.rewards[None]  # (F, N, G)
        result = function(rewards, [1.0] * len(rewards))
        if not function.normalizes_globally:
            return result
        return normalise_globally(result, torch.ones_like(result).bool(), lambda sums: sums)


def verdict(case: dict[str, Any], library: type[Case]) -> str:
    """Whether a library agrees, or its largest difference from the golden value, else gradient."""
    call = case["calls"].get(library.library, "absent")
    if isinstance(call, str):
        return call
    value, gradient = compute(case, library)
    differences = {"differs": value - tensor("value", case["value"])}
    if gradient is not None:
        differences["gradient differs"] = gradient - tensor("gradient", case["gradient"])
    for name, difference in differences.items():
        if not difference.abs().max() <= TOLERANCE:  # nor is NaN
            return f"{name} by {max(difference.flatten().tolist(), key=abs):.2g}"
    return "agrees"


def compute(case: dict[str, Any], library: type[Case]) -> tuple[Tensor, Tensor | None]:
    """Value by a library, and its gradient in the first input where the case has one."""
    inputs = {n.replace("probs", "logps"): tensor(n, given) for n, given in case["inputs"].items()}
    variable = next(iter(inputs.values())).requires_grad_()
    sizes = case.get("micro_batches", [len(variable)])
    step = {"num_micro_batches": len(sizes), "step_mask": inputs.get("mask")}
    value = torch.zeros(())
    for parts in zip(*(given.split(sizes) for given in inputs.values()), strict=True):
        micro_batch = library(**dict(zip(inputs, parts, strict=True)), **step)
        value = value + getattr(micro_batch, case["family"])(**case["calls"][library.library])
    return value, torch.autograd.grad(value, variable)[0] if "gradient" in case else None


def tensor(name: str, given: Any) -> Tensor:
    """What a case gives by a name: probabilities become log-probs."""
    values = torch.tensor(given, dtype=torch.bool if name == "mask" else torch.float64)
    return values.log() if name.endswith("probs") else values
