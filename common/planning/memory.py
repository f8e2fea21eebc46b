"""What a rank holds in memory at each moment of a step, by arithmetic.

Bytes of a number: parameters, gradients and both moments of AdamW 4 (float32), what computes 2 with
bf16, else 4. Where a formula stands for code, its docstring says what that code holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from common.grpo.config import GRPOConfig
from common.pairs.config import DPOConfig
from common.planning.activations import (
    backward_activations,
    forward_bytes,
    kept_activations,
    logits_bytes,
)
from common.planning.footprint import Footprint
from common.planning.host_memory import copied_bytes, export_bytes, written_bytes
from common.planning.work import FLOAT32, MOMENTS_OF_ADAM, MicroBatch, Run, micro_batch

COLUMNS = (
    "parameters",
    "optimiser",
    "gradients",
    "gathered",
    "activations",
    "logits",
    "copy",
    "cache",
    "checkpoint",
    "process",
)


@dataclass
class Moment:
    """What is in memory at once, in bytes by column."""

    name: str
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.parts.values())


NUM_UPDATE_MOMENTS = 3  # of `update_moments`


# ---- columns -------------------------------------------------------------------------------------


def resident(
    run: Run, ranks: int, models: Sequence[Footprint], *, trains: bool = True
) -> dict[str, float]:
    """Shards that stay: float32 parameters of these models, two moments of what is trained."""
    shards = run.num_shards(ranks)
    parameters = FLOAT32 * sum(model.numbers(shards) for model in models)
    optimiser = MOMENTS_OF_ADAM * FLOAT32 * run.policy.numbers(shards, trained=True)
    if run.is_offloaded:
        parameters = optimiser = 0
    parts = {"parameters": float(parameters), "process": run.process_bytes}
    return parts | {"optimiser": float(optimiser)} if trains else parts


def models_of(run: Run) -> list[Footprint]:
    """What stays in memory while the policy trains.

    DPO frees a reference that scored ahead, and reward models that judged its rollouts.
    """
    if not isinstance(run.config, DPOConfig):
        return [run.policy, *([run.reference] if run.reference else []), *run.reward_models]
    if run.reference is None or run.config.precompute_ref_log_probs:
        return [run.policy]
    return [run.policy, run.reference]


def gathered(run: Run, model: Footprint, ranks: int, *, has_backward: bool) -> float:
    """Whole parameters of FSDP units in the compute dtype.

    The root's stay from forward to backward. Of the blocks there is the one that computes and the
    one that is being gathered (into a buffer that is then copied out), and those that are gathered
    ahead on request; all, if they are not freed in between.
    """
    if run.is_plain(ranks):
        return 0.0
    whole = sum(block.numbers() for block in model.blocks)
    at_once = (2 + run.config.prefetch_blocks) * model.largest_block
    if has_backward and not run.config.reshard_after_forward:
        at_once = whole
    return float(run.number_bytes * (model.root.numbers() + min(whole, at_once)))


# ---- moments -------------------------------------------------------------------------------------


def update_moments(run: Run, ranks: int) -> list[Moment]:
    """The loss of a micro-batch, the backward of its last block, and the end of its backward.

    Gradients of several micro-batches are added up whole, and become shards in the last backward
    only: that saves traffic, and costs the memory of all gradients.
    """
    policy, batch = run.policy, micro_batch(run, ranks)
    base = resident(run, ranks, models_of(run))
    trained = policy.numbers(trained=True)
    added_up = FLOAT32 * trained if batch.number > 1 else 0
    head = FLOAT32 * policy.head_numbers * policy.trains_head
    whole = gathered(run, policy, ranks, has_backward=True)
    at_loss = base | {
        "gathered": whole,
        "activations": kept_activations(run, policy, batch),
        "logits": logits_bytes(run, policy, batch, trains=True),
        "gradients": float(added_up + head * run.is_shared),
    }
    if isinstance(run.config, DPOConfig) and run.reference in models_of(run)[1:]:
        at_loss = beside_reference(run, ranks, batch, at_loss)
    block = largest_trained(policy)
    waiting = head * run.number_bytes / FLOAT32  # until the embedding gets its gradient
    in_backward = base | {
        "gathered": whole,
        "activations": backward_activations(run, policy, batch),
        "gradients": added_up + waiting + unit_gradients(run, ranks, block),
    }
    at_end = base | {"gradients": last_gradients(run, ranks, batch.number)}
    if not run.is_plain(ranks):
        at_end["gathered"] = float(run.number_bytes * policy.root.numbers())
    return [Moment("loss", at_loss), Moment("backward", in_backward), Moment("gradients", at_end)]


def beside_reference(
    run: Run, ranks: int, batch: MicroBatch, at_loss: dict[str, float]
) -> dict[str, float]:
    """DPO's reference scores a micro-batch while the policy's graph of it is there."""
    assert run.reference is not None
    temporary = logits_bytes(run, run.reference, batch, trains=False)
    temporary += forward_bytes(run, run.reference, batch.tokens)
    return at_loss | {
        "gathered": at_loss["gathered"] + gathered(run, run.reference, ranks, has_backward=False),
        "logits": max(at_loss["logits"], temporary),
    }


def largest_trained(model: Footprint) -> int:
    """Trained numbers of the block that has most."""
    return max(block.numbers(trained=True) for block in model.blocks)


def unit_gradients(run: Run, ranks: int, numbers: int) -> float:
    """A unit's whole gradients in the compute dtype, and what they are reduced from, in float32.

    On a GPU the reduction of one unit runs beside the next one's backward.
    """
    if run.is_plain(ranks):
        return 0.0
    return float(numbers * (run.number_bytes + FLOAT32 * (2 if run.on_gpu else 1)))


def last_gradients(run: Run, ranks: int, num_micro_batches: int) -> float:
    """Gradients when the embedding gets its own: all others are there.

    Autograd makes the embedding's gradient whole, and adds it to that of the head if they are tied
    and to the sum of earlier micro-batches if there are any: each is a temporary of its size.
    """
    policy, shards = run.policy, run.num_shards(ranks)
    is_added = num_micro_batches > 1
    temporaries = policy.trains_embedding * is_added + policy.trains_head * policy.is_tied
    embedding = policy.vocabulary * policy.width * temporaries
    if run.is_plain(ranks):
        return float(FLOAT32 * (policy.numbers(trained=True) + embedding))
    if is_added:  # not the last micro-batch: nothing is reduced yet
        whole = FLOAT32 * policy.numbers(trained=True) + run.number_bytes * embedding
        return float(whole)
    reduced = 0 if run.is_offloaded else FLOAT32 * policy.numbers(shards, trained=True)
    root = policy.root.numbers(trained=True)
    return float(reduced + run.number_bytes * embedding + unit_gradients(run, ranks, root))


def scoring_moment(
    run: Run, ranks: int, name: str, model: Footprint, base: dict[str, float]
) -> Moment:
    """A frozen model scores a micro-batch; nothing is kept for backward."""
    batch = micro_batch(run, ranks)
    parts = {
        "gathered": gathered(run, model, ranks, has_backward=False),
        "activations": forward_bytes(run, model, batch.tokens),
        "logits": logits_bytes(run, model, batch, trains=False),
    }
    return Moment(name, base | parts)


def kept_for_kl(run: Run, ranks: int) -> float:
    """What an exact KL keeps of the reference until the next step's takes its place.

    The last hidden states of the rank's completions, of all updates, and the head, whole and in
    float32, which in one plain process is the reference's own.
    """
    if not run.has_exact_kl:
        return 0.0
    reference = run.reference or run.policy
    rows = run.config.batch_size // ranks * run.num_completions * run.config.max_completion_length
    head = 0 if run.is_plain(ranks) else FLOAT32 * reference.head_numbers
    return float(rows * reference.width * run.number_bytes + head)


def copy_bytes(run: Run, ranks: int) -> float:
    """The plain copy that samples (`replica.RolloutCopy`), whole on every rank.

    In one plain process its weights are the policy's own. On a CPU the linear layers are packed
    anew (`replica.packed`), which gives up a gathered weight but not one that the policy holds; the
    head is packed, or cast to float32 once, beside the embedding.
    """
    policy, size = run.policy, run.number_bytes
    is_packed = not run.on_gpu and torch.backends.mkldnn.is_available()
    head = FLOAT32 * policy.head_numbers * (is_packed or run.config.bf16)
    if not run.is_plain(ranks):
        return float(size * policy.numbers() + head)
    is_merged = policy.numbers(trained=True) < policy.numbers()  # adapters, into new weights
    return float(head + FLOAT32 * policy.linear_numbers * (is_packed or is_merged))


def decoded_at_once(run: Run, num_prompts: int, num_samples: int) -> tuple[int, int]:
    """Prompts, and samples of each, that `generation.Sampler.parts` decodes together."""
    config = run.config
    room, own = config.generation_cache_tokens, config.max_completion_length
    group = config.max_prompt_length + num_samples * own
    at_once = min(config.generation_batch_size // num_samples, room // group, num_prompts)
    if at_once > 0:
        return at_once, num_samples
    left = (room - config.max_prompt_length) // own
    return 1, max(1, min(config.generation_batch_size, left))


def cache_bytes(run: Run, num_prompts: int, num_samples: int) -> float:
    """Keys and values while sampling, or what the prefill holds of them.

    Shared: the prompts' once, room for each sample's own. The prefill's keys and values are copied
    out of the storages they are in (of GPT-2: with the queries); a CPU has no memory yet for the
    samples' room, which is zero and untouched. Padded: a copy of the prompt for each sample, and of
    one layer a second, as it grows by a token.
    """
    policy, config = run.policy, run.config
    layers, own = len(policy.blocks), config.max_completion_length
    tokens = num_prompts * config.max_prompt_length
    per_token = 2 * layers * policy.key_width * run.number_bytes
    samples = num_prompts * num_samples
    if not run.is_shared:
        whole = samples * (config.max_prompt_length + own) * per_token
        return whole * (1 + 1 / layers)
    kept = layers * policy.kept_keys_bytes * tokens
    rooms = samples * own * per_token
    both = kept + rooms if run.on_gpu else max(kept, rooms)
    return max(tokens * per_token + both, kept + forward_bytes(run, policy, tokens))


def rollout_moment(
    run: Run, ranks: int, base: dict[str, float], num_prompts: int, num_samples: int
) -> Moment:
    """Sampling: the copy, the cache, and a token's logits.

    Of the logits there are the model's, their logarithms, and of these a filled-up copy, a
    temporary, and what is drawn from.
    """
    prompts, samples = decoded_at_once(run, num_prompts, num_samples)
    parts = {
        "copy": copy_bytes(run, ranks),
        "cache": cache_bytes(run, prompts, samples),
        "logits": 5.0 * FLOAT32 * prompts * samples * run.policy.vocabulary,
    }
    return Moment("rollout", base | parts)


def sampling_moments(run: Run, ranks: int, base: dict[str, float]) -> list[Moment]:
    """Rollouts and their rewards; of DPO before the policy trains; else the printed samples."""
    config = run.config
    if not isinstance(config, GRPOConfig | DPOConfig) or not run.has_rollouts:
        if run.stage == "reward model" or not config.num_sample_prompts:
            return []
        return [rollout_moment(run, ranks, base, config.num_sample_prompts, 1)]
    if isinstance(config, DPOConfig):
        base = resident(run, ranks, [run.policy, *run.reward_models], trains=False)
    rows = config.batch_size // ranks
    return [
        rollout_moment(run, ranks, base, rows, config.num_candidates),
        *(scoring_moment(run, ranks, "rewards", model, base) for model in run.reward_models),
    ]


def moments(run: Run, ranks: int) -> list[Moment]:
    """What a rank holds at each moment at which that may be most, from the second step on."""
    base = resident(run, ranks, models_of(run))
    found = update_moments(run, ranks) + sampling_moments(run, ranks, base)
    if run.reference:
        if isinstance(run.config, DPOConfig):  # ahead of the policy
            alone = resident(run, ranks, [run.reference], trains=False)
        else:
            alone = base
        found.append(scoring_moment(run, ranks, "reference", run.reference, alone))
    for moment in found:
        of_kl = kept_for_kl(run, ranks)
        moment.parts["activations"] = moment.parts.get("activations", 0.0) + of_kl
    if run.on_gpu:
        return found
    if run.config.save_steps:
        found.append(save_moment(run, ranks, found))
    found.append(Moment("export", base | {"copy": export_bytes(run, ranks)}))
    return found


def save_moment(run: Run, ranks: int, found: Sequence[Moment]) -> Moment:
    """A checkpoint is written, on a CPU: beside the most that a step takes, if training goes on.

    Args:
        run: with `save_steps`.
        ranks: of it.
        found: the other moments, of which DPO's but for the updates are ahead of training.
    """
    in_step = found[:NUM_UPDATE_MOMENTS] if isinstance(run.config, DPOConfig) else found
    beside = max(in_step, key=lambda moment: moment.total).parts
    if not run.config.async_save:
        beside = resident(run, ranks, models_of(run)) | {"activations": kept_for_kl(run, ranks)}
    return Moment(
        "save", beside | {"checkpoint": copied_bytes(run, ranks) + written_bytes(run, ranks)}
    )


def peak(run: Run, ranks: int) -> Moment:
    """The moment at which a rank holds most."""
    return max(moments(run, ranks), key=lambda moment: moment.total)
