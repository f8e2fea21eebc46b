"""Bytes of activations and logits of a micro-batch, by arithmetic on what one token takes.

What a block keeps for backward is counted in `footprint.py`; what is temporary is worked out
here. Where a formula stands for code, its docstring says what that code holds.
"""

from common.model.projection import CHUNK_NUMBERS, GPU_CHUNK_NUMBERS
from experiments.plan.footprint import Footprint
from experiments.plan.work import FLOAT32, MicroBatch, Run


def activations(run: Run, model: Footprint, batch: MicroBatch) -> tuple[float, float]:
    """Bytes kept of a forward pass when its backward begins, and the most while it runs.

    Kept is, with gradient checkpointing, of a block its input only. The last block computes more
    than keys and values only for the tail: the completions, and the last token of each prompt. So
    it keeps queries, keys and values of all tokens, what they are made of, and the rest of the
    tail.

    Most there is while the last block's backward runs, or, as it has few tokens, that of the one
    before, when what the last kept is free; with checkpointing what a block keeps is made again. A
    block makes most in its MLP: gradients of the residual stream and of the MLP's output, and of
    what the activation makes and is given; what that layer kept is free by then.
    """
    config, tokens, size = run.config, batch.tokens, run.number_bytes
    block = tokens * model.block_bytes
    tail = min(tokens, batch.prompts + batch.completions * config.max_completion_length)
    last = tokens * (model.keys_bytes + model.kept_keys_bytes) + tail * model.block_bytes
    temporary = (2 * model.width + model.num_gates * model.mlp_width) * size  # of a token
    layers, outer = model.num_layers, tokens * model.outer_bytes
    if config.gradient_checkpointing:
        kept = outer + layers * tokens * model.width * size
        return kept, kept + block + tokens * temporary
    kept = outer + (layers - 1) * block + last
    return kept, max(kept + tail * temporary, kept - last + tokens * temporary)


def forward_bytes(run: Run, model: Footprint, tokens: float) -> float:
    """The widest moment of a block without a graph, in its MLP.

    There are the residual stream, what the norm makes of it, and before and after the activation
    (of a gated MLP the gate's, the other factor, and the product).
    """
    numbers = 2 * model.width + (1 + model.num_gates) * model.mlp_width
    return tokens * numbers * run.number_bytes


def logits_bytes(run: Run, model: Footprint, batch: MicroBatch) -> float:
    """The projection onto the vocabulary and what is made of it, in float32.

    A chunk of logits (`model/projection.py`), with an exact KL one of the reference and their
    difference, on a GPU the probabilities for GRPO's entropy; and the states that are projected.
    """
    head = model.head_weights
    if not head:
        return 0.0
    cast = FLOAT32 * head if run.config.bf16 else 0  # the head in float32
    rows = batch.completions * run.config.max_completion_length
    at_once = GPU_CHUNK_NUMBERS if run.on_gpu else CHUNK_NUMBERS
    chunk = min(rows, max(1, at_once // model.vocabulary)) * model.vocabulary
    has_exact_kl = run.config.has_exact_kl
    copies = 1 + 2 * has_exact_kl + (run.config.stage == "GRPO" and run.on_gpu)
    return FLOAT32 * chunk * copies + rows * model.width * run.number_bytes + cast
