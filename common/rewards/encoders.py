"""Encoders (BERT and its like) as reward functions: the logit that they give to a whole text.

They read in both directions, so a prompt cannot be computed once for its completions. Texts are
padded on the right, where such models expect it, and computed in float32.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForSequenceClassification

from common import data, distributed
from common.config import CommonConfig, UserError
from common.model import fsdp
from common.model import load as models
from common.padding import Batch
from common.rewards.call import equal_for_equal


class Encoder(nn.Module):
    """An encoder with one label whose forward is the logit of each text."""

    def __init__(self, lm: Any) -> None:
        """Wrap a Hugging Face sequence classifier."""
        super().__init__()
        self.lm = lm

    def forward(self, batch: Batch) -> Tensor:
        """Logits (B,) of texts padded on the right; the model counts the positions itself."""
        mask = batch.attention_mask.long()
        logits: Tensor = self.lm(input_ids=batch.input_ids, attention_mask=mask).logits  # (B, 1)
        return logits[:, 0]


class EncoderFunction:
    """An encoder's folder as a reward function of prompt and completion in one. Collective.

    The text is tokenised as the encoder's own tokenizer does it, with [CLS] and [SEP] around it.
    """

    is_collective = True

    def __init__(self, path: str, config: CommonConfig) -> None:
        """Check the folder; `load` reads the weights.

        Raises:
            UserError: it holds no classifier with one label, or no tokenizer.
        """
        self.path = path
        self.config = replace(config, layout="padded", bf16=False)
        self.tokenizer = models.read_tokenizer(path, config)
        self.model_config = models.read_model_config(path, "encoder", self.tokenizer, config)
        self.model: nn.Module | None = None

    def load(self, mesh: DeviceMesh) -> None:
        """Load the frozen, sharded model. Collective."""
        automatic = AutoModelForSequenceClassification
        lm = models.load(automatic, self.path, self.model_config, self.config)
        self.model = fsdp.shard(Encoder(lm).requires_grad_(False), self.config, mesh)

    @torch.no_grad()
    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Any
    ) -> list[float]:
        """Rewards of B completions."""
        assert self.model is not None, "load() comes first"
        texts = [
            prompt + completion for prompt, completion in zip(prompts, completions, strict=True)
        ]
        ids = self.tokenizer(texts)["input_ids"]
        self.refuse_beyond_positions(max(map(len, ids), default=0))
        # As completions of their first tokens, which need no padding on the left.
        pieces = [data.Piece(row[:1], [row[1:]], [i]) for i, row in enumerate(ids)]
        rewards = torch.zeros(len(texts))
        for part in data.pack(pieces, self.config):
            batch = data.collate(part, "padded", self.tokenizer.pad_token_id or 0)
            values = self.model(batch.to(distributed.device())).cpu()  # (B,)
            rewards[batch.places[batch.is_real]] = values[batch.is_real]
        return equal_for_equal(texts, rewards)

    def refuse_beyond_positions(self, longest: int) -> None:
        """Raise a UserError for texts that the encoder cannot read to the end."""
        limits = (self.tokenizer.model_max_length, self.model_config.max_position_embeddings)
        if longest > min(limits):
            raise UserError(
                f"a prompt with its completion is {longest} tokens of the encoder {self.path!r}, "
                f"which reads {min(limits)}; lower --max_prompt_length."
            )
