"""Evaluate any mix of policies and reward models on the same held-out rows.

Rows with `chosen` and `rejected` are pairs, which have an accuracy; any with `prompt` are sampled
from. A data set may have either, or two be given.

On pairs: preference accuracy on the whole split in fixed order, a tie counting one half. A reward
model is judged by its reward; a policy by each of `--policy_scores`: the implicit reward of its run
(beta log(pi / ref), Rafailov et al. 2023, eq. 5, or what its loss has in place of that) or the
log-probability per token; the reference, whose implicit reward is 0 everywhere, by its
log-probability. Of what every policy generates: rewards, KL(pi || ref), ROUGE, length, pass rates
of a reward that is a check, and win rates by every judge. Every number has its 95% interval over
prompts, and docs/evaluation.md says what it is.

    python evaluate.py --output_dir output/eval --policies gpt2 --dataset_name my/prompts.jsonl \
        --reward_funcs gsm8k
    torchrun --standalone --nproc_per_node 2 evaluate.py --config assets/recipes/demo/evaluate.yaml
    python evaluate.py --output_dir output/eval --dataset_name my/pairs/validation.jsonl \
        --ref_model_name_or_path output/sft/model \
        --policies output/sft/model output/dpo/model --reward_models output/reward/model

Writes `results.json`, `scores.jsonl` (what every system scores on every pair), `completions.jsonl`
(of which every number about generations is a function), `report.html`, `report.md` and
`plots/*.png` to output_dir, and prints the systems' table.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from common import distributed, launch, self_checks
from common.config.evaluate import EvaluateConfig
from common.errors import UserError
from common.evaluation import judges, measure, records, runs, scoring, summary
from common.evaluation.records import PairScores, PromptRecord
from common.evaluation.results import Results, score_name, write_results
from common.evaluation.win_rates import all_win_rates
from common.forward import Policy
from common.model import fsdp, load
from common.objectives.user_files import load_from_file
from common.record.environment import save_run_files
from common.report import evaluation_report
from common.rewards.score import RewardFunctions
from common.sampling.sampler import Sampler
from common.sampling.vllm.sampler import EngineSampler
from common.text.example import Example, Vocabulary
from common.text.reading import evaluated_split, has_pairs, load_examples, note_unused_template

WRITTEN = (records.RESULTS, "report.html", "report.md", records.SCORES, records.COMPLETIONS)


def main(config: EvaluateConfig) -> None:
    """Score pairs and generations with every system, write the results, print the table."""
    distributed.start(config.ddp_timeout)
    distributed.seed_everything(config.seed)

    # Load; every folder is checked before the first model is loaded
    policies = runs.policies_of(config)
    vocabulary = load.load_vocabulary(config, policies)  # the same for all of them
    policy_configs = read_policy_configs(policies, vocabulary, config)
    rewards, comparing = find_judges(policies, vocabulary, config)
    names, models = rewards.short_names, list(rewards.reward_models)
    dataset, split, pairs, prompts = load_data(config, vocabulary, rewards)
    load.compare_templates(
        policies, vocabulary.tokenizer, [*pairs, *prompts], config, own_text=config.policies
    )
    run_rewards = {path: runs.reward_of_run(path) for path in config.policies if pairs}
    table = PairScores(records.describe_pairs(pairs, dataset, split))
    output_dir = Path(config.output_dir)
    if distributed.is_rank0():
        first_config = next(iter(policy_configs.values()), None)
        commit = getattr(first_config, "_commit_hash", None)  # of a model of the hub
        save_run_files(output_dir, config, distributed.world_size(), model_commit=commit)
        remove_earlier(output_dir)
    mesh = distributed.mesh(config.num_replicas)
    rewards.load(mesh)

    # Score pairs with the reward models, and the rows' own completions
    first = [path for path in policies[:1] if path in config.policies]  # in the order of a chain
    # The score of a system in the report's first table, "" for a reward model's
    scores = dict.fromkeys([*first, *models, *config.policies], "")
    for path, function in rewards.reward_models.items() if pairs else ():
        rewards_of_pairs = measure.reward_scores(function, pairs, vocabulary, config)
        table.add({names[path]: rewards_of_pairs.numpy()})
    with records.kept(table, [], output_dir):
        references = measure.reference_completions(rewards, prompts, config.max_completion_length)
    prompt_records = [
        PromptRecord(prompt.row, prompt.prompt, references.get(i), prompt_ids=prompt.prompt_ids)
        for i, prompt in enumerate(prompts)
    ]

    # Score pairs with the policies, the reference first, and generate
    reference: Policy | None = None
    ref_logps: Tensor | None = None
    for path, policy_config in policy_configs.items():
        policy, logps = load_policy(path, policy_config, config, mesh), None
        if pairs:
            logps = scoring.score_examples(policy, pairs, config, vocabulary, "scoring pairs")
            if path in config.policies:
                by_kind = measure.policy_scores(logps, ref_logps, pairs, run_rewards[path], config)
                table.add({score_name(names[path], kind): v for kind, v in by_kind.items()})
                scores[path] = next(iter(by_kind))
        if reference is None and len(policy_configs) > 1:  # one alone is compared with nothing
            reference, ref_logps = policy, logps
        with records.kept(table, prompt_records, output_dir):
            if prompts:
                name = names[path]
                generate(prompt_records, name, policy, reference, rewards, prompts, config)

    # Judge: completions are compared with each other and with the rows' own
    with records.kept(table, prompt_records, output_dir):
        judges.add_verdicts(prompt_records, comparing, prompts, config.seed)
        if pairs:
            texts = measure.completion_texts(pairs, vocabulary)
            table.add(measure.baselines(pairs, texts, config.seed))

    # Summarise, write, show
    comparison = summary.compare(table) if pairs else None
    results = Results(
        dataset=dataset,
        split=split,
        num_pairs=len(pairs),
        num_prompts=len(prompts),
        num_generations=config.num_generations,
        attainable_accuracy=summary.attainable_accuracy(table.pairs),
        systems=[
            summary.describe_system(path, score, names, models, comparison, prompt_records)
            for path, score in scores.items()
        ],
        comparison=comparison,
        reference_completions=summary.summarise(prompt_records, records.REFERENCE),
        win_rates=all_win_rates(prompt_records),
    )
    write_results(results, output_dir)
    evaluation_report.write_report(results, output_dir)
    distributed.print_rank0(f"\n{evaluation_report.terminal_text(results)}\n")
    distributed.print_rank0(f"report: {output_dir / 'report.html'}")


def remove_earlier(output_dir: Path) -> None:
    """Remove what an earlier evaluation wrote: half of it would stand beside this one's."""
    if earlier := [path for path in map(output_dir.joinpath, WRITTEN) if path.exists()]:
        print(f"the earlier evaluation in {output_dir} is removed", flush=True)
    for path in earlier:
        path.unlink()


def read_policy_configs(
    policies: Sequence[str], vocabulary: Vocabulary, config: EvaluateConfig
) -> dict[str, Any]:
    """The model config of each policy; a UserError if one does not fit the tokenizer."""
    read = {}
    for path in dict.fromkeys([*config.policies, *policies]):  # the tokenizer is that of the first
        read[path] = load.read_model_config(path, "policy", vocabulary.tokenizer, config)
        if not config.tokenizer_name_or_path:  # else `load_vocabulary` has compared them
            load.refuse_other_tokenizer(path, vocabulary.tokenizer, config)
    policy_configs = {path: read[path] for path in policies}
    if len(policy_configs) > 1:
        distributed.print_rank0(f"reference of KL and implicit rewards: {policies[0]}")
    elif policies:
        reason = f"no reference of {policies[0]} is known (--ref_model_name_or_path names one)"
        if config.ref_model_name_or_path:
            reason = f"{policies[0]} is its own reference"
        distributed.print_rank0(f"{reason}: it is judged by log-probability, without KL")
    return policy_configs


def find_judges(
    policies: Sequence[str], vocabulary: Vocabulary, config: EvaluateConfig
) -> tuple[RewardFunctions, dict[str, Any]]:
    """The rewards, still without models, and by name the functions that compare completions."""
    comparing = {path: load_from_file(path, "--judge_funcs") for path in config.judge_funcs}
    judging = [*config.reward_models, *config.reward_funcs]
    rewards = RewardFunctions.find(judging, [], vocabulary, config, [*policies, *comparing])
    return rewards, {rewards.short_names[path]: judge for path, judge in comparing.items()}


def load_policy(path: str, policy_config: Any, config: EvaluateConfig, mesh: Any) -> Policy:
    """A frozen policy, sharded and checked. Collective."""
    lm = load.load_policy(path, policy_config, config)
    policy = fsdp.shard(Policy(lm).requires_grad_(False), config, mesh)
    self_checks.only_tokens_matter(policy, config)
    return policy


def generate(
    prompt_records: Sequence[PromptRecord],
    name: str,
    policy: Policy,
    reference: Policy | None,
    rewards: RewardFunctions,
    prompts: Sequence[Example],
    config: EvaluateConfig,
) -> None:
    """Add a policy's completions of N prompts, K each with their measurements. Collective."""
    sampler_config = replace(config, max_completion_length=config.most_sampled_tokens)
    sampler_class = EngineSampler if config.rollout_server else Sampler
    sampler = sampler_class(policy, rewards.vocabulary, sampler_config)
    rollouts = sampler.sample_shared(
        prompts,
        title=f"sampling from {name}",
        num_samples=config.num_generations,
        temperature=config.temperature,
    )
    scoring.check_sampler(sampler, prompts, rollouts, config.temperature)

    with distributed.together():  # a reward may be faulty on one rank only
        completions = measure.measure_completions(
            policy, reference, rewards, prompts, rollouts, config, config.temperature
        )
    records.add_system(prompt_records, name, completions)


def load_data(
    config: EvaluateConfig, vocabulary: Vocabulary, rewards: RewardFunctions
) -> tuple[str, str, Sequence[Example], Sequence[Example]]:
    """Data set and split, the pairs to judge and the prompts to sample from; either may be none.

    Without pairs data set and split are those of the prompts. A UserError without both.
    """
    pairs: Sequence[Example] = []
    prompts: Sequence[Example] = []
    dataset, split_name = config.dataset_name, ""
    if config.score_pairs:
        split_name = evaluated_split(config, dataset)
        if has_pairs(config, split_name):
            pairs = load_examples(
                config,
                dataset,
                split_name,
                "preference",
                vocabulary,
                config.num_eval_rows,
                with_texts=True,
            )
    if not pairs and not config.generates:
        raise UserError(
            f"nothing to evaluate on: no pairs of {dataset} are judged (columns chosen and "
            "rejected), and no policy generates; give --policies and --num_prompts."
        )
    if config.generates:
        name = config.prompts_dataset_name
        split_of_prompts = evaluated_split(config, name)
        prompts = load_examples(
            config, name, split_of_prompts, "prompts", vocabulary, config.num_prompts
        )
        if not pairs:
            dataset, split_name = name, split_of_prompts
    note_unused_template(pairs or prompts, vocabulary)
    rewards.check_rows(prompts)
    rewards.check_conversations(pairs)
    return dataset, split_name, pairs, prompts


if __name__ == "__main__":
    launch.run(main, EvaluateConfig)
