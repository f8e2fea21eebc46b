"""Bytes of activations and logits of a micro-batch, by arithmetic on what one token takes.

What a block keeps for backward is counted in `footprint.py`; what is temporary is worked out
here. Where a formula stands for code, its docstring says what that code holds.
"""

from common.model.projection import CHUNK_NUMBERS
from common.planning.footprint import Footprint
from common.planning.work import FLOAT32, MicroBatch, Run


def tail_tokens(run: Run, batch: MicroBatch) -> float:
    """Tokens for which the last block computes more than keys and values.

    In the shared layout these are the completions, and the last token of each prompt.
    """
    if not run.is_shared:
        return batch.tokens
    return min(batch.tokens, batch.prompts + batch.completions * run.config.max_completion_length)


def block_activations(run: Run, model: Footprint, batch: MicroBatch) -> tuple[float, float]:
    """What the graph of a micro-batch keeps of a block, and of the last one.

    Of the last one in the shared layout: queries, keys and values of all tokens, what they are made
    of, and the rest of the tail.
    """
    more = attention_bytes(run, model, batch)
    block = batch.tokens * model.block_bytes + more
    if not run.is_shared:
        return block, block
    keys = model.keys_bytes + 3 * model.attention_width * run.number_bytes
    return block, batch.tokens * keys + tail_tokens(run, batch) * model.block_bytes + more


def kept_activations(run: Run, model: Footprint, batch: MicroBatch) -> float:
    """What is kept of a forward pass when its backward begins.

    With gradient checkpointing, of a block its input only.
    """
    layers, outer = len(model.blocks), batch.tokens * model.outer_bytes
    if run.config.gradient_checkpointing:
        return outer + layers * batch.tokens * model.width * run.number_bytes
    block, last = block_activations(run, model, batch)
    return outer + (layers - 1) * block + last


def backward_activations(run: Run, model: Footprint, batch: MicroBatch) -> float:
    """The most that is kept and made of activations while a block's backward runs.

    That is the last block's, or, as it has few tokens, that of the one before, when what the last
    kept is free; with checkpointing what a block keeps is made again.

    A block makes most in its MLP: gradients of the residual stream and of the MLP's output, and of
    what the activation makes and is given; what that layer kept is free by then.
    """
    kept = kept_activations(run, model, batch)
    block, last = block_activations(run, model, batch)
    of_token = (2 * model.width + model.num_gates * model.mlp_width) * run.number_bytes
    whole, tail = batch.tokens * of_token, tail_tokens(run, batch) * of_token
    if run.config.gradient_checkpointing:
        return kept + block + whole
    return max(kept + tail, kept - last + whole)


def attention_bytes(run: Run, model: Footprint, batch: MicroBatch) -> float:
    """What attention keeps in one layer besides queries, keys, values and output of each token.

    Padded: the mask of each row, made a number of the compute dtype in each layer. Shared on a GPU
    (`branches.gathered_branches`): copies of queries, keys and values of the trunks and their
    output; per completion copies of the prompt's keys and values; and both masks.
    """
    prompt, own = run.config.max_prompt_length, run.config.max_completion_length
    size, width, seen = run.number_bytes, model.attention_width, prompt + own
    if not run.is_shared:
        return batch.completions * seen**2 * size
    if not run.on_gpu:
        return 0.0
    if run.num_completions == 1:  # no branches
        return batch.prompts * (4 * seen * width + seen**2) * size
    trunks = batch.prompts * (4 * prompt * width + prompt**2)
    return (trunks + batch.completions * (2 * own * width + 2 * seen * width + own * seen)) * size


def forward_bytes(run: Run, model: Footprint, tokens: float) -> float:
    """The widest moment of a block without a graph, in its MLP.

    There are the residual stream, what the norm makes of it, and before and after the activation
    (of a gated MLP the gate's, the other factor, and the product).
    """
    numbers = 2 * model.width + (1 + model.num_gates) * model.mlp_width
    return tokens * numbers * run.number_bytes


def logits_bytes(run: Run, model: Footprint, batch: MicroBatch, *, trains: bool) -> float:
    """The projection onto the vocabulary and what is made of it, in float32.

    Shared (`model/projection.py`): a chunk of logits, with an exact KL one of the reference and
    their difference, on a GPU the probabilities for the entropy; and the states that are projected.
    Padded: logits of every completion column and copies of them. Forward: the scaled ones and a
    temporary of logsumexp. Backward: those kept, the gradient of the chosen ones, and three
    temporaries of logsumexp's. The entropy (of GRPO) keeps its probabilities, and since the loss
    does not pass through it, a micro-batch's are freed only when the next one's scores take their
    name.
    """
    if not model.head_numbers:
        return 0.0
    vocabulary, own = model.vocabulary, run.config.max_completion_length
    has_entropy = run.stage == "GRPO"
    cast = FLOAT32 * model.head_numbers if run.config.bf16 else 0  # the head in float32
    if run.is_shared:
        rows = batch.completions * own
        chunk = min(rows, max(1, CHUNK_NUMBERS // vocabulary)) * vocabulary
        copies = 1 + 2 * run.has_exact_kl + (has_entropy and run.on_gpu)
        return FLOAT32 * chunk * copies + rows * model.width * run.number_bytes + cast
    copies = 3
    if trains:
        copies = 5 + 4 * run.has_exact_kl + has_entropy * (1 + 2 * (batch.number > 1))
    return FLOAT32 * batch.completions * (own + 1) * vocabulary * copies + cast
