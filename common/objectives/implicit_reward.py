"""The reward that a preference loss gives a completion."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ImplicitReward:
    """The reward by which a run's preference loss judges a completion.

    beta (log pi - log ref) (Rafailov et al. 2023, eq. 5); or without log ref, or per token (SimPO,
    Meng et al. 2024, eq. 4), where the loss is. Of a sum of losses: with the reference if one of
    them has it, per token if all are.
    """

    beta: float = 1.0
    needs_reference: bool = True
    is_per_token: bool = False

    def __call__(self, logps: Tensor, ref_logps: Tensor | None, lengths: Tensor) -> Tensor:
        """Rewards (N, 2) by log-probabilities (N, 2) and lengths (N, 2) in tokens."""
        if self.needs_reference and ref_logps is not None:
            logps = logps - ref_logps
        return self.beta * (logps / lengths if self.is_per_token else logps)
