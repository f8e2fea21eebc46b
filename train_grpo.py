r"""GRPO: sample a group of completions per prompt, keep some, push up those above their group.

    A_i    = (r_i - mean r) / (std r + 1e-4), std unbiased      DeepSeekMath (2024), section 4.1.2
    rho_it = pi(y_it | x, y_i,<t) / old(y_it | x, y_i,<t)
    loss   = mean_i mean_t [-min(rho A, clip(rho, 1 - e_low, 1 + e_high) A) + beta KL(pi || ref)]
                                                                eq. 3; KL by k3, eq. 4

One step is one rollout: every prompt gets `num_candidates` completions, the rewards are computed,
statistical rejection sampling keeps `num_generations` of them, their advantages are optionally
normalised again over all that were kept on all ranks, and `num_iterations` updates are made on each
of `num_minibatches`. Policy objectives and advantages are files of `common/objectives`, or yours;
each other variant is one flag, defined in `common/config/grpo.py`. The objects of a step, in the
order of the loop, all of `common/grpo`:

    Groups              the N prompts of this rank, K candidates of each, rewards     rollouts
    SelectedCandidates  G of each K, and which of them the loss counts                rollouts
    Update              the completions of one minibatch, in batches by length        minibatches
    Columns             their log-probs and advantages, a row for each completion     minibatches

How this differs from the paper:
1. Rejection sampling of rollouts by raw reward (RSO, Liu et al. 2023, algorithm 1; or exact draws
   without replacement by Gumbel noise). The candidates are samples: RSO's are a set of texts, here
   only with `rso_distinct`. The baseline is the mean of all candidates or of the kept.
2. Global normalisation of the kept advantages over ranks (`normalize_globally`).
3. A completion that did not stop has the reward `missing_eos_penalty` (Huang et al. 2024).
4. Completions are cut at the first stop token before they are scored.
5. Sampling noise is a function of (seed, step, prompt, sample, position): the completions do not
   depend on the number of ranks.

Launch: as `train_sft.py`, with `--model_name_or_path` the SFT stage's `model` folder, for example
    torchrun --standalone --nproc_per_node 2 train_grpo.py --config assets/recipes/demo/grpo.yaml

On the demo (seed 0) two CPU processes take half a minute: the gold reward, which is not trained on,
goes from 0.685 (SFT) to 0.956 of 1 at a KL of 1.31 nats per completion to the SFT policy.

With one update per rollout the ratio is 1 and the policy loss is minus the mean advantage, whatever
is learned: watch `reward`, `kl`, `entropy` and the samples instead. With `eval_steps` they are also
measured on held-out prompts, where over-optimisation of the reward shows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from common import data, distributed, launch, self_checks
from common.batch import AnyBatch
from common.checkpoint.resume import find_checkpoint
from common.config.grpo import GRPOConfig
from common.errors import UserError
from common.forward import Policy
from common.grpo import minibatches, monitor, rollouts
from common.grpo.held_out import HeldOut
from common.grpo.minibatches import Columns, Update
from common.grpo.monitor import StepMonitor
from common.grpo.rollouts import Groups
from common.losses import aggregate, kl_estimate, probability_ratio
from common.model import fsdp, load
from common.model.lora import AdapterReference
from common.record import output_lock
from common.record.glossary import LOGGED_PREFIX
from common.rewards.score import RewardFunctions
from common.run import Run
from common.sampling.sampler import Sampler
from common.sampling.vllm.sampler import EngineSampler
from common.text import reading
from common.text.example import Example, Vocabulary


@output_lock.given_up_on_error()
def main(config: GRPOConfig) -> None:
    """Train, export, evaluate."""
    distributed.start(config.ddp_timeout)
    distributed.seed_everything(config.seed)

    # Objective, data and rewards
    # By default `objectives/policy/clip.py` and `objectives/advantages/group.py`
    objective, advantage_function = config.find_objective()
    objective.check()
    advantage_function.check(len(config.reward_funcs), config.num_generations)
    vocabulary = load.load_vocabulary(config)
    configs = load.read_policy_and_reference(config, vocabulary.tokenizer)
    scorer = RewardFunctions.find(config.reward_funcs, config.reward_weights, vocabulary, config)
    resume_from = find_checkpoint(config)
    train_set, eval_set = reading.load_splits(config, "prompts", vocabulary)
    pairs = reading.load_held_out_pairs(config, config.eval_pairs_dataset_name, vocabulary)
    load.compare_templates([config.reference_path], vocabulary.tokenizer, train_set, config)
    scorer.check_rows(train_set, eval_set)
    order = data.BatchOrder.of_training(config, train_set)

    # Policy, frozen reference and reward models, FSDP, optimiser
    mesh = distributed.mesh(config.num_replicas)
    lm = load.load_policy(config.model_name_or_path, configs[0], config, trains=True)
    policy = fsdp.shard(Policy(lm), config, mesh)  # before the next is read: one whole at a time
    reference = load_reference(policy, configs[1], config, mesh)
    scorer.load(mesh)
    sampler = sampler_of(policy, vocabulary, config)
    held_out = HeldOut(sampler, scorer, reference, eval_set, pairs, config)  # before that moves

    # Self-checks, resume
    self_checks.only_tokens_matter(policy, config, is_projected=config.has_exact_kl)
    # One that does not move is not saved: it is read again on resuming.
    moving_reference = reference if config.ref_update_steps > 0 else None
    run = Run(policy, order, config, resume_from, vocabulary, moving_reference)
    guarded = run.guarded(objective)  # yours may raise in a step: the run is then saved
    step_monitor = StepMonitor(run.metrics, config)

    def evaluate(step: int) -> None:
        if metrics := held_out.measure(step, run.total_steps):
            run.logger.log(step, metrics)

    shown = (eval_set or train_set)[: config.num_sample_prompts]

    def show_samples(step: int) -> None:
        monitor.show_samples(run.logger, sampler, scorer, shown, advantage_function, config, step)

    sample_groups = partial(sample_and_reward, run, sampler, scorer, config)

    # Loop
    if config.eval_steps and run.step == 0:
        evaluate(0)  # where curves start
    for step in run.steps(evaluate, show_samples):
        # 1. Sample K candidates for each of this rank's N prompts, and score every one
        examples, real = data.prompts(train_set, order.rows(step))
        groups = sample_groups(examples, real)
        if config.zero_variance == "resample":
            groups = rollouts.replace_flat(
                groups, train_set, sample_groups, advantage_function, config, step
            )
        # 2. Select G of the K by rejection sampling; plan which share an update and a forward
        selected = rollouts.select(groups, advantage_function, config, step)
        updates = minibatches.plan_updates(selected, config, vocabulary, step)
        # 3. Log-probs (N*G, C) under the reference, and under the policy before its updates
        columns = minibatches.logps_before_updates(
            policy, reference, updates, selected, config, run.metrics
        )
        # 4. Advantages (N, G), or of tokens (N, G, C), which may count the KL
        with run.saved_on_user_error(step):
            advantages = minibatches.compute_advantages(
                selected, columns.ref_logps, advantage_function, config, step
            )
        step_monitor.record(selected, advantages, step)
        columns = columns.with_advantages(advantages)
        # 5. One or several updates on every minibatch, in micro-batches
        check_first_rollout(policy, updates, columns, config, step)
        for update, all_rows, is_new in minibatches.repeated(updates, columns, config, run.metrics):
            for batch, rows in zip(run.micro_batches(update.batches), all_rows, strict=True):
                run.backward(grpo_loss(policy, batch, rows, update, guarded, step_monitor, is_new))
            run.update()
        if moving_reference is not None and (step + 1) % config.ref_update_steps == 0:
            fsdp.mix_into(moving_reference, policy, config.ref_mixup_alpha)
        run.end_step(evaluate, show_samples)

    # Export, final evaluation
    run.finish(hooks=[evaluate, show_samples])


def load_reference(
    policy: Policy, ref_config: Any, config: GRPOConfig, mesh: DeviceMesh
) -> Policy | AdapterReference | None:
    """The frozen reference: the policy's base under LoRA, None where no KL is taken. Collective."""
    if config.beta == 0:
        return None
    path = config.reference_path
    if config.is_reference_base:
        return AdapterReference(policy)
    sizes = [each.get_text_config().vocab_size for each in (ref_config, policy.lm.config)]
    if config.has_exact_kl and sizes[0] < sizes[1]:
        raise UserError(
            f"--ref_model_name_or_path {path!r} has {sizes[0]} embeddings and the policy has "
            f"{sizes[1]}; with --kl_estimator full it needs as many."
        )
    frozen = Policy(load.load_policy(path, ref_config, config)).requires_grad_(False)
    shapes = [[p.shape for p in each.parameters()] for each in (frozen, policy)]
    if config.ref_update_steps and shapes[0] != shapes[1]:
        raise config.refused("ref_update_steps", f"0: {path!r} has other layers than the policy")
    reference = fsdp.shard(frozen, config, mesh, moves=config.ref_update_steps > 0)
    self_checks.only_tokens_matter(reference, config, is_projected=config.has_exact_kl)
    return reference


def sampler_of(policy: Policy, vocabulary: Vocabulary, config: GRPOConfig) -> Sampler:
    """The sampler: a server, or this process, which keeps a GPU's graphs from step to step."""
    if config.rollout_server:
        return EngineSampler(policy, vocabulary, config)
    return Sampler(policy, vocabulary, config, keeps_graphs=True)


def sample_and_reward(
    run: Run,
    sampler: Sampler,
    scorer: RewardFunctions,
    config: GRPOConfig,
    examples: list[Example],
    real: Tensor,
) -> Groups:
    """K candidates for each of N prompts, with rewards; prompts not `real` are filler. Collective.

    Raises Stopped where the run was asked to stop.
    """
    run.checkpointer.stop_if_asked(run.step, at_once=True)
    bar = distributed.progress_bar(
        "rollouts", len(examples) * config.candidates_per_prompt, unit="completion"
    )
    with run.metrics.timed("sample_seconds"), run.saved_on_user_error(run.step), bar:
        candidates = sampler.sample(
            examples,
            num_samples=config.candidates_per_prompt,
            step=run.step,
            report=bar.update,
            **config.sampling,
        )
    with run.metrics.timed("score_seconds"), run.saved_on_user_error(run.step):
        scored = rollouts.reward(scorer, examples, candidates, config, run.step, run.total_steps)
    for name, values in scored.log.metrics.items():
        run.metrics.add(f"{LOGGED_PREFIX}{name}", sum(values), len(values))
    return Groups(examples, real, candidates, scored.total, scored.by_function, scored.steps)


def check_first_rollout(
    policy: Policy, updates: Sequence[Update], columns: Columns, config: GRPOConfig, step: int
) -> None:
    """At step 0 check that sampler, trainer and a reference of equal weights agree. Collective."""
    if config.self_check and step == 0 and updates:
        first = updates[0].batches[0]
        rows = columns.of(first)
        is_same = config.reference_path == config.model_name_or_path
        ref_logps = rows.ref_logps if is_same else None
        self_checks.sampler_equals_trainer(
            policy, first, rows.sampled_logps, ref_logps, config, config.temperature
        )


def grpo_loss(
    policy: Policy,
    batch: AnyBatch,  # B completions
    rows: Columns,  # of these
    update: Update,  # that the batch is a part of
    objective: Callable[..., tuple[Tensor, dict[str, Tensor]]],  # a `PolicyObjective`
    step_monitor: StepMonitor,
    is_new: bool,  # the policy was not trained on them before
) -> Tensor:
    """A micro-batch's share of the loss of an update, a scalar; its metrics go to the monitor."""
    metrics, config, mask = step_monitor.metrics, step_monitor.config, batch.completion_mask
    states = rows.ref_states[id(batch)] if config.has_exact_kl else None
    scores = policy(batch, temperature=config.temperature, with_entropy=True, reference=states)
    logps = scores.token_logps  # (B, C)
    old_logps = logps.detach() if rows.old_logps is None else rows.old_logps
    num_tokens, num_real = mask.sum(), batch.is_real.sum()
    per_token, measures = objective(
        logps, old_logps, rows.sampled_logps, rows.advantages, mask
    )  # (B, C)
    step_monitor.record_objective(measures, mask, num_tokens)
    if config.entropy_coef > 0:
        per_token = per_token - config.entropy_coef * scores.entropy
    if rows.ref_logps is not None:
        if config.has_exact_kl:
            kl = scores.kl  # (B, C)
        else:
            estimator, _, option = config.kl_estimator.partition("_")
            kl = kl_estimate(logps, rows.ref_logps, estimator=estimator)  # (B, C)
            if option == "ratio":
                kl = kl * probability_ratio(logps, old_logps, mask)
        metrics.add("kl", (kl * mask).sum(), num_real)
        if not config.has_kl_in_reward:
            per_token = per_token + config.beta * kl
    denominators = update.denominators_of(rows)
    loss = aggregate(
        per_token,
        mask,
        aggregation=config.aggregation,
        max_length=config.max_completion_length,
        **denominators._asdict(),
    )
    metrics.add("loss", loss * denominators.num_sequences, num_real)
    metrics.add("entropy", scores.entropy.sum(), num_tokens)
    if is_new:
        metrics.add("sampler_kl", ((rows.sampled_logps - old_logps) * mask).sum(), num_tokens)
    return loss


if __name__ == "__main__":
    launch.run(main, GRPOConfig)
