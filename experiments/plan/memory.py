"""What a rank holds in memory at each moment of a step, by arithmetic.

Bytes of a number: parameters, gradients and both moments of AdamW 4 (float32), what computes and
what is frozen 2 with bf16, else 4. Where a formula stands for code, its docstring says what that
code holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.config.dpo import DPOConfig
from common.config.grpo import GRPOConfig
from common.config.stages import SamplingConfig
from common.sampling.graphs import MAX_KEPT_BYTES
from common.sampling.sampler import decoded_at_once
from experiments.plan.activations import activations, forward_bytes, logits_bytes
from experiments.plan.footprint import Footprint, numbers
from experiments.plan.work import FLOAT32, MOMENTS_OF_ADAM, Run, micro_batch

COLUMNS = (
    *("parameters", "optimiser", "gradients", "gathered", "activations", "logits"),
    *("copy", "cache", "checkpoint", "process"),
)
HOST_COLUMNS = ("offloaded", "checkpoint's copy", "export on rank 0", "most")
Columns = dict[str, float]  # bytes by column


@dataclass
class Moment:
    """Bytes that are in memory at once."""

    name: str
    columns: Columns

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.columns.values())


def moments(run: Run) -> list[Moment]:
    """Bytes of a rank at each moment at which they may be most, from the second step on.

    On a CPU a checkpoint is written too, during the most that a step takes, and the model at the
    end.
    """
    is_dpo = isinstance(run.config, DPOConfig)
    base = resident(run, models_of(run)) | kept_by_graphs(run)
    in_step = update_moments(run, base)
    every = in_step + sampling_moments(run, base)
    if run.reference:  # DPO's scores ahead of the policy
        base_now = resident(run, [run.reference], trains=False) if is_dpo else base
        every.append(scoring_moment(run, "reference", run.reference, base_now))
    of_kl = kept_for_kl(run)
    for moment in every:
        moment.columns["activations"] = moment.columns.get("activations", 0.0) + of_kl
    if run.on_gpu:
        return every
    if saved := saved_bytes(run):
        at_once = in_step if is_dpo else every  # DPO's others are ahead of training
        most = max(at_once, key=lambda moment: moment.total).columns
        every.append(Moment("save", most | {"checkpoint": saved}))
    return [*every, Moment("export", base | {"copy": export_bytes(run)})]


def peak(run: Run) -> Moment:
    """The largest of a rank's moments."""
    return max(moments(run), key=lambda moment: moment.total)


def gigabytes(number: float) -> str:
    """Bytes for people, three digits behind the point below ten."""
    value = number / 1e9
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


# ---- what stays ----------------------------------------------------------------------------------


def resident(run: Run, models: Sequence[Footprint], *, trains: bool = True) -> Columns:
    """Shards that stay: parameters of these models, two moments of what is trained."""
    is_here, shards = not run.is_offloaded, run.num_shards
    parameters = sum(parameter_bytes(run, model, shards, trains=trains) for model in models)
    columns = {"parameters": parameters * is_here, "process": run.process_bytes}
    if trains:
        optimiser = FLOAT32 * MOMENTS_OF_ADAM * run.policy.numbers(shards, trained=True)
        columns["optimiser"] = float(optimiser * is_here)
    return columns


def parameter_bytes(run: Run, model: Footprint, shards: int, *, trains: bool = True) -> float:
    """A shard of a model: of what is frozen as `fsdp.hold_in_bfloat16` leaves it, else float32.

    In one process what is float32 has a bfloat16 copy.
    """
    float32 = FLOAT32 + run.number_bytes * run.has_copies
    trained = model.numbers(shards, trained=True) if trains else 0
    frozen = model.numbers(shards) - trained
    moves = model is run.reference and run.config.ref_update_steps > 0
    stays_float32 = moves or (trained > 0 and not model.is_bfloat16)
    return float(float32 * trained + (float32 if stays_float32 else run.number_bytes) * frozen)


def models_of(run: Run) -> list[Footprint]:
    """Models that stay in memory while the policy trains; DPO's reference scored ahead."""
    if isinstance(run.config, DPOConfig):
        return [run.policy]
    return [run.policy, *([run.reference] if run.reference else []), *run.reward_models]


def gathered(run: Run, model: Footprint, *, has_backward: bool) -> float:
    """Whole parameters of FSDP units in the compute dtype.

    The root's stay from forward to backward. Of the blocks there is the one that computes and the
    one that is being gathered (into a buffer that is then copied out); all, if they are not freed
    in between.
    """
    if run.is_plain:
        return 0.0
    sizes = [numbers(block) for block in model.blocks]
    at_once = 2 * max(sizes)
    if has_backward and not run.config.reshard_after_forward:
        at_once = sum(sizes)
    return float(run.number_bytes * (numbers(model.root) + min(sum(sizes), at_once)))


# ---- an update -----------------------------------------------------------------------------------


def update_moments(run: Run, base: Columns) -> list[Moment]:
    """The loss of a micro-batch, the backward of its last block, and the end of its backward."""
    policy, batch = run.policy, micro_batch(run)
    # Whole until the last backward, which saves traffic; or shards all the time.
    is_sharded = run.config.shard_gradients
    shards = run.num_shards if is_sharded else 1
    are_here = batch.number > 1 and not (is_sharded and run.is_offloaded)
    added_up = float(FLOAT32 * policy.numbers(shards, trained=True) * are_here)
    head = 0 if policy.has_adapters else FLOAT32 * policy.head_weights
    whole = {"gathered": gathered(run, policy, has_backward=True)}
    kept, most = activations(run, policy, batch)
    at_loss = base | whole | {"activations": kept, "gradients": added_up + head}
    at_loss["logits"] = logits_bytes(run, policy, batch)
    block = max(numbers(block, trained=True) for block in policy.blocks)
    waiting = head * run.number_bytes / FLOAT32  # until the embedding gets its gradient
    gradients = added_up + waiting + unit_gradients(run, block)
    in_backward = base | whole | {"activations": most, "gradients": gradients}
    at_end = base | {"gradients": last_gradients(run, batch.number)}
    if not run.is_plain:
        at_end["gathered"] = float(run.number_bytes * numbers(policy.root))
    return [Moment("loss", at_loss), Moment("backward", in_backward), Moment("gradients", at_end)]


def unit_gradients(run: Run, num_trained: int) -> float:
    """One FSDP unit's whole gradients in the compute dtype, and what they are reduced from."""
    return 0.0 if run.is_plain else float(num_trained * (run.number_bytes + FLOAT32))


def last_gradients(run: Run, num_micro_batches: int) -> float:
    """Gradients when the embedding gets its own: all others are there.

    Autograd makes the embedding's gradient whole, and adds it to that of the head if they are tied
    and to the sum of earlier micro-batches if there are any: each is a temporary of its size. Then
    the root's are reduced, to a shard that is added to what the rank holds of earlier ones.
    """
    policy, is_plain = run.policy, run.is_plain
    is_added = (
        num_micro_batches > 1
        and not run.has_copies
        and (is_plain or not run.config.shard_gradients)
    )
    temporaries = 0 if policy.has_adapters else is_added + policy.is_tied
    embedding = run.number_bytes * policy.vocabulary * policy.width * temporaries
    if run.has_copies:  # all gradients are added in float32 at the end
        both = (FLOAT32 + run.number_bytes) * policy.numbers(trained=True)
        return float(both + embedding * (num_micro_batches > 1))
    if is_plain or is_added:  # before the last micro-batch nothing is reduced
        return float(FLOAT32 * policy.numbers(trained=True) + embedding)
    shards = run.num_shards
    held = 0 if run.is_offloaded else FLOAT32 * policy.numbers(shards, trained=True)
    root = numbers(policy.root, trained=True)
    reducing = unit_gradients(run, root)
    if num_micro_batches > 1:
        reducing += FLOAT32 * numbers(policy.root, shards, trained=True)
    return held + max(run.number_bytes * root + embedding, reducing)


# ---- scoring and sampling ------------------------------------------------------------------------


def scoring_moment(run: Run, name: str, model: Footprint, base: Columns) -> Moment:
    """A frozen model scores a micro-batch; nothing is kept for backward."""
    batch = micro_batch(run)
    columns = {
        "gathered": gathered(run, model, has_backward=False),
        "activations": forward_bytes(run, model, batch.tokens),
        "logits": logits_bytes(run, model, batch),
    }
    return Moment(name, base | columns)


def sampling_moments(run: Run, base: Columns) -> list[Moment]:
    """GRPO's rollouts, unless a server samples, and their rewards; else the printed samples."""
    config = run.config
    if not isinstance(config, GRPOConfig):
        if not (isinstance(config, SamplingConfig) and config.num_sample_prompts):
            return []
        return [rollout_moment(run, base, config.num_sample_prompts, 1)]
    rows, is_here = config.batch_size // run.ranks, not config.rollout_server
    return [
        *([rollout_moment(run, base, rows, config.candidates_per_prompt)] * is_here),
        *(scoring_moment(run, "rewards", model, base) for model in run.reward_models),
    ]


def rollout_moment(run: Run, base: Columns, num_prompts: int, num_samples: int) -> Moment:
    """Sampling: the copy, the cache, and a token's logits.

    Of the logits there are the model's, their logarithms, and of these a filled-up copy, a
    temporary, and what is drawn from.
    """
    assert isinstance(run.config, SamplingConfig)
    prompts, samples = decoded_at_once(num_samples, run.config)
    prompts = min(prompts, num_prompts)
    columns = {
        "copy": copy_bytes(run),
        "cache": cache_bytes(run, prompts, samples),
        "logits": 5.0 * FLOAT32 * prompts * samples * run.policy.vocabulary,
    }
    return Moment("rollout", base | columns)


def kept_for_kl(run: Run) -> float:
    """Bytes that an exact KL keeps of the reference until the next step.

    The last hidden states of the rank's completions, of all updates, and the head, whole and in
    float32, which in one process of float32 is the reference's own.
    """
    config, reference = run.config, run.reference or run.policy
    if not config.has_exact_kl:
        return 0.0
    rows = config.batch_size // run.ranks * run.num_completions * config.max_completion_length
    is_shared = run.is_plain and not run.has_copies
    head = 0 if is_shared else FLOAT32 * reference.head_weights
    return float(rows * reference.width * run.number_bytes + head)


def copy_bytes(run: Run) -> float:
    """The plain copy that samples (`rollout_copy.RolloutCopy`), whole on every rank.

    In one process of float32 its weights are the policy's. On a CPU the linear layers are packed
    (`rollout_copy.packed`), which releases a gathered weight but not one that the policy holds; the
    head is packed, or cast to float32 once, in addition to the embedding.
    """
    policy = run.policy
    is_packed = not run.on_gpu and torch.backends.mkldnn.is_available()
    head = FLOAT32 * policy.head_weights * (is_packed or run.config.bf16)
    if not run.is_plain or run.has_copies:
        return float(run.number_bytes * policy.numbers() + head)
    linear = policy.num_layers * policy.block_weights
    is_new = is_packed or policy.has_adapters  # which are merged into new weights
    return float(head + FLOAT32 * linear * is_new)


def cache_bytes(run: Run, num_prompts: int, num_samples: int) -> float:
    """Keys and values while sampling, or what the prefill holds of them.

    The prompts' once, and room for each sample. The prefill's keys and values are copied out of the
    storages they are in (of GPT-2: with the queries); a CPU holds float32, and has no memory yet
    for the samples' room, which is zero and untouched.
    """
    policy, config = run.policy, run.config
    layers, completion = policy.num_layers, config.max_completion_length
    tokens, samples = num_prompts * config.max_prompt_length, num_prompts * num_samples
    per_token = 2 * layers * policy.key_width * (run.number_bytes if run.on_gpu else FLOAT32)
    kept = layers * policy.kept_keys_bytes * tokens
    rooms = samples * completion * per_token
    both = kept + rooms if run.on_gpu else max(kept, rooms)
    return max(tokens * per_token + both, kept + forward_bytes(run, policy, tokens))


def kept_by_graphs(run: Run) -> Columns:
    """Weights and cache that stay for sampling's CUDA graphs (`Sampler.keeps_graphs`)."""
    config = run.config
    if not (isinstance(config, GRPOConfig) and run.on_gpu):
        return {}
    if config.rollout_server or not config.cuda_graphs:
        return {}
    completion, longest = config.max_completion_length, config.max_prompt_length
    prompts, samples = decoded_at_once(config.candidates_per_prompt, config)
    prompts = min(prompts, config.batch_size // run.ranks)
    per_token = 2 * run.policy.num_layers * run.policy.key_width * run.number_bytes
    kept = {
        "copy": copy_bytes(run),
        "cache": float(prompts * (longest + samples * completion) * per_token),
    }
    return kept if sum(kept.values()) <= MAX_KEPT_BYTES else {}


# ---- saving --------------------------------------------------------------------------------------
# Of a GPU run that is on its host, of a CPU run in the memory that computes as well. Counted are
# the checkpoints of `save_steps`; a long run, or one that is asked to stop, writes one without it.


def saved_bytes(run: Run) -> float:
    """The copy of its state that a rank writes from, while training goes on.

    The state (`sharded_state.trained_state`) is float32 shards of what is trained, of both its
    moments, and of a reference that is updated. Without `async_save` there is no copy, but a
    tensor at a time, which is not counted.
    """
    if not (run.config.save_steps and run.config.async_save):
        return 0.0
    shards = run.num_shards
    trained = run.policy.numbers(shards, trained=True)
    kept = (1 + MOMENTS_OF_ADAM) * trained
    if run.config.ref_update_steps > 0 and run.reference:
        kept += run.reference.numbers(shards)
    return float(FLOAT32 * kept)


def export_bytes(run: Run) -> float:
    """On rank 0 the whole model that is written, and a copy of its bytes by safetensors."""
    is_there = run.is_plain and not run.on_gpu  # as the model that was trained
    return float(FLOAT32 * run.policy.numbers() * (1 if is_there else 2))


def host_bytes(run: Run) -> list[float]:
    """Bytes of a GPU's process on its host, in the order of `HOST_COLUMNS`.

    At once there is what is offloaded (shards of all models, of moments and of gradients), and a
    save or, once that has ended, the export.
    """
    held, shards = 0.0, run.num_shards
    if run.is_offloaded:
        held = sum(parameter_bytes(run, model, shards) for model in models_of(run))
        held += FLOAT32 * (MOMENTS_OF_ADAM + 1) * run.policy.numbers(shards, trained=True)
    saved, export = saved_bytes(run), export_bytes(run)
    return [held, saved, export, held + max(saved, export)]
