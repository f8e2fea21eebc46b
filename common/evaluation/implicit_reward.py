"""The reward that a preference loss trains without a reward model, in one formula."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from common.losses import PER_TOKEN_LOSSES, REFERENCE_FREE_LOSSES


@dataclass(frozen=True)
class ImplicitReward:
    """The reward by which a run's preference loss judges a completion; its flags decide.

    beta (log pi - log ref) (Rafailov et al. 2023, eq. 5); per token with `PER_TOKEN_LOSSES`, and
    without log ref with `REFERENCE_FREE_LOSSES` (SimPO, Meng et al. 2024, eq. 4). Of a sum of
    losses: with the reference if one of them has it, per token if all are.

    Attributes:
        loss_type: One or several of `PREFERENCE_LOSSES`.
        beta: Its scale.
        reference_free: Every completion is as likely in the reference.
        ld_alpha: What tokens beyond the shorter completion's length count in the log-probs.
    """

    loss_type: Sequence[str] = ("sigmoid",)
    beta: float = 1.0
    reference_free: bool = False
    ld_alpha: float = 1.0

    @property
    def needs_reference(self) -> bool:
        """Whether any loss compares with the reference."""
        return not self.reference_free and not set(self.loss_type) <= set(REFERENCE_FREE_LOSSES)

    def __call__(self, logps: Tensor, ref_logps: Tensor | None, lengths: Tensor) -> Tensor:
        """Rewards (N, 2) by `sequence_logps` (N, 2) and lengths (N, 2) in tokens."""
        if self.needs_reference and ref_logps is not None:
            logps = logps - ref_logps
        is_per_token = set(self.loss_type) <= set(PER_TOKEN_LOSSES)
        return self.beta * (logps / lengths if is_per_token else logps)
