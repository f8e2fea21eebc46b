"""Position ids count padding: a left-padded GPT-2 without `position_ids`, as in TRL's GRPO.

TRL 1.16 passes ids and attention mask only, and GPT-2 then numbers all columns. Sampling counts
real tokens, as `generate` does. It acts in the padded layout: `--layout padded`.
"""

import torch

from common import batch


def every_column(mask: torch.Tensor) -> torch.Tensor:
    """0, 1, 2, ... whether or not a column is padding, (B, T)."""
    return torch.arange(mask.shape[-1], device=mask.device).expand(mask.shape).contiguous()


vars(batch)["position_ids"] = every_column  # the sampler has those of `common.padding`
