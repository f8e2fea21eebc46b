"""Direct preference optimisation: learn from pairs without a reward model or sampling.

    D    = (log pi(y_w|x) - log pi(y_l|x)) - (log ref(y_w|x) - log ref(y_l|x))
    loss = - (1 - e) log sigma(beta D) - e log sigma(-beta D)    (Rafailov et al. 2023, eq. 7)

with log-probabilities summed over the completion, stop token included, and label smoothing e
("conservative DPO"; by default 0, the paper's loss). The reference is the starting policy, frozen,
unless a flag names another or none. Further losses are chosen by `loss_type`, one or a weighted sum
of several: each is a file of `common/objectives/preference`, or yours.

Pairs that the policy itself samples, as RSO's (Liu et al. 2023), are made before by
`experiments.sample_pairs`; its folder is then the `dataset_name`.

How this differs from the papers:
1. AdamW, not RMSprop. 2. Dropout is off. 3. Both completions of a pair share one forward pass.

Launch: as `train_sft.py`, with `--model_name_or_path` the SFT stage's `model` folder, for example
    torchrun --standalone --nproc_per_node 2 train_dpo.py --config assets/recipes/demo/dpo.yaml
Expect the `sigmoid` loss to start at ln 2 = 0.693 exactly (a self-check, where the reference is the
starting policy) and `reward_margin` to grow. That both `chosen_logp` and `rejected_logp` fall is
usual: this loss trains only their difference.
"""

from common import data, distributed, launch, self_checks
from common.checkpoint.resume import find_checkpoint
from common.config.dpo import DPOConfig
from common.evaluation import pair_scores, scoring
from common.forward import Policy, sequence_scores
from common.model import fsdp, load
from common.model.lora import AdapterReference
from common.pairs.reference import PairSets, frozen_logps, no_reference, reference_logps
from common.record import output_lock
from common.run import Run
from common.sampling.sampler import Sampler
from common.text import reading


@output_lock.given_up_on_error()
def main(config: DPOConfig) -> None:
    """Train, export, evaluate."""
    distributed.start(config.ddp_timeout)
    distributed.seed_everything(config.seed)
    mesh = distributed.mesh(config.num_replicas)

    # Objective: `objectives/kinds.py` calls the files that `loss_type` names, with our beta. Data
    objective = config.find_objective()
    objective.check(config.beta)
    implicit_reward = objective.implicit_reward(config.beta, reference_free=config.reference_free)
    vocabulary = load.load_vocabulary(config)
    configs = load.read_policy_and_reference(config, vocabulary.tokenizer)
    resume_from = find_checkpoint(config)
    train_set, eval_set = reading.load_splits(config, "preference", vocabulary)
    load.compare_templates([config.reference_path], vocabulary.tokenizer, train_set, config)
    self_checks.stop_token_is_trained(train_set, vocabulary, config)
    order = data.BatchOrder.of_training(config, train_set)
    by_prompt = {pair.prompt: pair for pair in eval_set or train_set}  # tables show a prompt once
    shown = [*by_prompt.values()][: config.num_sample_prompts]

    # Frozen reference, which scores the pairs ahead of training and leaves the memory
    pairs = PairSets(train_set, eval_set, order)
    reference, is_resumed = no_reference(pairs), resume_from is not None
    if implicit_reward.needs_reference and not config.is_reference_base:
        reference = frozen_logps(configs[1], pairs, config, vocabulary, mesh, is_resumed=is_resumed)

    # Policy, FSDP, optimiser
    lm = load.load_policy(config.model_name_or_path, configs[0], config, trains=True)
    policy = fsdp.shard(Policy(lm), config, mesh)
    if implicit_reward.needs_reference and config.is_reference_base:
        base = AdapterReference(policy)
        reference = reference_logps(base, pairs, config, vocabulary, is_resumed=is_resumed)
    sampler = Sampler(policy, vocabulary, config)

    # Self-checks, resume
    self_checks.only_tokens_matter(policy, config)
    starts_at_reference = config.reference_path == config.model_name_or_path
    if config.self_check and reference.first is not None and starts_at_reference:
        first_logps = scoring.score_examples(policy, train_set[:1], config, vocabulary, "check")
        self_checks.dpo_starts_at_ln_2(first_logps, reference.first)  # (1, 2) each
    run = Run(policy, order, config, resume_from, vocabulary, implicit_reward=implicit_reward)
    guarded_objective = run.guarded(objective)  # yours may raise in a step: the run is then saved

    def evaluate(step: int) -> None:
        if eval_set:
            logps = scoring.score_examples(policy, eval_set, config, vocabulary, "scoring pairs")
            ref_logps, lengths = reference.held_out, data.completion_lengths(eval_set)
            losses = objective(logps, ref_logps, lengths, config.beta, config.loss_weights)
            rewards = implicit_reward(logps, ref_logps, lengths)  # (rows, 2), as each of them
            run.logger.log(step, pair_scores.held_out_metrics(rewards, losses))

    def show_samples(step: int) -> None:
        run.logger.samples(step, sampler.table(shown))

    # Loop
    for step in run.steps(evaluate, show_samples):
        batches = run.prefetched(
            step, lambda at: data.micro_batches(train_set, order.rows(at), config, vocabulary)
        )
        # Over all micro-batches and ranks: ranks sum their gradients (`fsdp.shard`)
        num_pairs = distributed.count_all(batch.pairs.is_real.sum() for batch in batches)
        for batch in run.micro_batches(batches):
            batch = batch.to(distributed.device())
            real, lengths = batch.pairs.is_real, batch.pairs.lengths  # (N,), (N, 2)
            logps = batch.pairs.of(sequence_scores(policy, batch))  # (N, 2)
            ref_logps = reference.of_batch(batch)  # (N, 2)
            losses = guarded_objective(
                logps, ref_logps, lengths, config.beta, config.loss_weights
            )  # (N,)
            total = (losses * real).sum()
            loss = total / num_pairs
            run.backward(loss)
            run.metrics.add("loss", total, real.sum())
            rewards = implicit_reward(logps, ref_logps, lengths)  # (N, 2)
            chosen, rejected = logps.unbind(-1)  # (N,) each
            pair_scores.add_pair_metrics(
                run.metrics, rewards, real, chosen_logp=chosen, rejected_logp=rejected
            )
        run.update()
        run.end_step(evaluate, show_samples)

    # Export, final evaluation
    run.finish(hooks=[evaluate, show_samples])


if __name__ == "__main__":
    launch.run(main, DPOConfig)
