"""Operations of forward passes and of a training step, by the sizes of a decoder.

A product of (m, k) and (k, n) costs 2 m k n operations; norms, softmax, activations, embeddings and
the optimiser are left out (under 2 % at the sizes of GPT-2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from common.config.grpo import GRPOConfig
from common.config.stages import TrainConfig


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder, from which the cost of a forward pass follows."""

    num_layers: int
    block_weights: float  # numbers in the matrices of a block, in the mean over the blocks
    key_value_weights: int  # of these, in what makes keys and values
    attention_width: int  # heads times the width of one
    head_weights: int  # numbers in the projection onto the vocabulary, 0 of a reward model

    def flops(self, num_tokens: float, num_pairs: float, num_read: float) -> float:
        """Linear layers of all tokens, attention of (query, key) pairs, the head of what is read.

        Each weight is multiplied and added once per token; scores and weighted values are 2
        products of 2 width each per pair and layer.
        """
        of_layer = 2.0 * self.block_weights * num_tokens + 4.0 * self.attention_width * num_pairs
        return self.num_layers * of_layer + 2.0 * self.head_weights * num_read


def linear_shapes(block: nn.Module) -> list[tuple[int, int]]:
    """Inputs and outputs of the linear layers of a block, without the matrices of adapters."""
    shapes = []
    for name, layer in block.named_modules():
        if isinstance(layer, nn.Linear | Conv1D) and ".lora_" not in name:
            rows, columns = layer.weight.shape
            shapes.append((rows, columns) if isinstance(layer, Conv1D) else (columns, rows))
    return shapes


def decoder_of(lm: Any, blocks: Sequence[nn.Module]) -> Decoder | None:
    """The sizes of a Hugging Face model of these blocks; None where its shape has other names.

    It may be sharded.
    """
    text, head = lm.config.get_text_config(), lm.get_output_embeddings()
    num_heads = getattr(text, "num_attention_heads", None)
    width = getattr(text, "hidden_size", None)
    has_experts = any(p.ndim > 2 for block in blocks for p in block.parameters())
    if not (num_heads and width) or has_experts:  # of experts a token meets a few
        return None
    head_width = getattr(text, "head_dim", None) or width // num_heads
    num_key_heads = getattr(text, "num_key_value_heads", None) or num_heads
    linear = [shape for block in blocks for shape in linear_shapes(block)]
    return Decoder(
        num_layers=len(blocks),
        block_weights=sum(inputs * outputs for inputs, outputs in linear) / len(blocks),
        key_value_weights=2 * width * head_width * num_key_heads,
        attention_width=num_heads * head_width,
        head_weights=0 if head is None else head.weight.numel(),
    )


def causal_pairs(num_queries: float, num_before: float = 0) -> float:
    """(query, key) pairs of a run of tokens.

    Each sees itself, those before it in the run, and `num_before` tokens before the run.
    """
    return num_queries * num_before + num_queries * (num_queries + 1) / 2


def group_flops(decoder: Decoder, prompt: float, completions: Sequence[float]) -> float:
    """One forward pass of a prompt, computed once, and its completions, given their tokens.

    The last block computes of a prompt's tokens but the last their keys and values only.
    """
    pairs = causal_pairs(prompt) + sum(causal_pairs(length, prompt) for length in completions)
    whole = decoder.flops(prompt + sum(completions), pairs, sum(completions))
    other_weights = decoder.block_weights - decoder.key_value_weights
    unread = 2.0 * other_weights * (prompt - 1)
    unread += 4.0 * decoder.attention_width * causal_pairs(prompt - 1)
    return whole - unread


def num_completions(config: TrainConfig) -> int:
    """Of a prompt, that are trained on."""
    if isinstance(config, GRPOConfig):
        return config.num_generations
    return 1 if config.stage == "SFT" else 2


def step_flops(
    config: TrainConfig,
    policy: Decoder,
    prompt: float,  # tokens of a prompt
    completion: float,  # tokens of each completion
    reference: Decoder | None = None,  # if one takes part, be it the policy without its adapters
    reward_models: Sequence[Decoder] = (),
) -> dict[str, float]:
    """Operations of a step on all ranks, by what they are for.

    The backward pass makes two products for each of the forward's, one of them for the weight: not
    if it is frozen. With gradient checkpointing it makes the forward's again.
    """

    def forward(model: Decoder, number: int) -> float:
        return config.batch_size * group_flops(model, prompt, [completion] * number)

    trained = num_completions(config)
    scored = forward(policy, trained)
    num_passes = config.num_iterations if isinstance(config, GRPOConfig) else 1
    backward = (1 if config.lora_r else 2) + config.gradient_checkpointing
    operations = {"forward": num_passes * scored, "backward": num_passes * backward * scored}
    if isinstance(config, GRPOConfig):
        operations["sampling"] = forward(policy, config.candidates_per_prompt)
        if config.num_iterations * config.num_minibatches > 1:
            operations["old log-probabilities"] = scored
    if reference is not None:
        operations["reference"] = forward(reference, trained)
    if reward_models:
        assert isinstance(config, GRPOConfig)
        operations["rewards"] = sum(forward(m, config.candidates_per_prompt) for m in reward_models)
    return operations
