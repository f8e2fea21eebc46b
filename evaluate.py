"""Evaluate any mix of policies and reward models on the same held-out rows.

Preference accuracy, on the whole split in fixed order, with a 95% Wilson interval; a tie counts one
half. A reward model is judged by its reward; a policy by its implicit reward beta log(pi / ref)
(Rafailov et al. 2023, eq. 5; no beta > 0 changes the order); the reference itself, whose implicit
reward is 0 everywhere, by the log-probability of the completion.

Generations of every policy, one per prompt: reward of each reward function and reward model (mean
with a 95% bootstrap interval), KL(pi || ref) per completion, length in tokens, and the share that
stopped by itself.

    torchrun --standalone --nproc_per_node 2 evaluate.py --config assets/recipes/demo/evaluate.yaml
    python evaluate.py --output_dir output/eval --dataset_name my/pairs/validation.jsonl \
        --ref_model_name_or_path output/sft/model \
        --policies output/sft/model output/dpo/model --reward_models output/reward/model

Writes `results.json`, `report.md` and `plots/summary.png` to output_dir, and prints the table.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from common import data, distributed, evaluation, fsdp, models, report, self_checks, synthetic
from common.config import CommonConfig, UserError, knob, require_not_negative, save_run_files
from common.data import Example
from common.generation import Rollouts, Sampler
from common.paths import refuse_twice
from common.reward_scoring import RewardScorer
from common.scoring import Policy
from common.statistics import PreferenceAccuracy, mean_interval, preference_accuracy


@dataclass
class EvaluateConfig(CommonConfig):
    """Pairs have `prompt`, `chosen`, `rejected`; prompts to sample from have `prompt`."""

    policies: list[str] = knob([], "folders or hub ids of causal language models")
    reward_models: list[str] = knob([], "folders or hub ids of reward models")
    ref_model_name_or_path: str = knob("", "reference of implicit rewards (empty: first policy)")
    prompts_dataset_name: str = knob("", "rows to sample from (empty: dataset_name)")
    num_prompts: int = knob(256, "prompts to sample from (0: no generations)")
    temperature: float = knob(1.0, "of sampling; 0 takes the most likely token")
    max_new_tokens: int = knob(0, "tokens of a generation (0: max_completion_length)")
    reward_funcs: list[str] = knob(
        [], "further judges of generations: gold, file.py:function (your file is run as code)"
    )

    def __post_init__(self) -> None:
        """Refuse values that no evaluation may have."""
        super().__post_init__()
        if not self.policies and not self.reward_models:
            raise UserError("nothing to evaluate: give --policies, --reward_models or both.")
        refuse_twice("policies", self.policies)
        refuse_twice("reward_models", self.reward_models)
        if not self.dataset_test_split:
            raise UserError("--dataset_test_split is required: the split to evaluate on.")
        for name in ("num_prompts", "temperature", "max_new_tokens"):
            require_not_negative(self, name)
        if self.max_new_tokens > self.max_completion_length:
            raise UserError(
                f"--max_new_tokens is {self.max_new_tokens}; it must be at most "
                f"--max_completion_length, {self.max_completion_length}."
            )
        first = (self.policies or self.reward_models)[0]
        self.model_name_or_path = self.model_name_or_path or first
        self.ref_model_name_or_path = self.ref_model_name_or_path or first
        self.prompts_dataset_name = self.prompts_dataset_name or self.dataset_name


def main(config: EvaluateConfig) -> None:
    """Score pairs and generations with every system, write the results, print the table."""
    distributed.seed_everything(config.seed)
    output_dir = Path(config.output_dir)

    # Data; every folder is checked before the first model is loaded
    tokenizer = models.load_tokenizer(config.tokenizer_path, config)
    pad_id = tokenizer.pad_token_id
    stop_ids = models.stop_token_ids(tokenizer, config.stop_token)
    policies = [config.ref_model_name_or_path, *config.policies] if config.policies else []
    policy_configs = {
        path: models.read_model_config(path, "policy", tokenizer, config) for path in policies
    }
    judging = [*config.reward_models, *config.reward_funcs]
    judges = RewardScorer(judging, [], tokenizer, config, beside=policies)
    judges.refuse_other_vocabularies()
    pairs, prompts = load_data(config, tokenizer, stop_ids)
    judges.check_rows(prompts)
    if distributed.is_rank0():
        save_run_files(output_dir, config, distributed.world_size())

    # Reward models: accuracy on the pairs
    mesh = distributed.mesh(config.num_replicas)
    judges.load(mesh)
    names, systems = judges.short, []
    for path, model in judges.models.items():
        accuracy, scores = evaluation.preferences(model, pairs, config, pad_id)
        systems.append(describe(path, names[path], "reward_model", accuracy, scores, pairs))

    # Policies, the reference first: accuracy on the pairs, then what they generate
    max_new_tokens = config.max_new_tokens or config.max_completion_length
    sampling = replace(config, max_completion_length=max_new_tokens)
    reference, ref_logps = None, None
    completions: dict[str, list[str]] = {}
    for path, policy_config in policy_configs.items():
        lm = models.load_policy(path, policy_config, config)
        policy = fsdp.shard(Policy(lm).requires_grad_(False), config, mesh)
        self_checks.layouts_agree(policy, config)
        accuracy, logps = evaluation.preferences(policy, pairs, config, pad_id, ref_logps)
        if reference is None:
            reference, ref_logps = policy, logps
        system = describe(path, names[path], "policy", accuracy, logps, pairs)
        if prompts:
            sampler = Sampler(policy, tokenizer, stop_ids, sampling)
            rollouts = sampler.sample_shared(
                prompts, temperature=config.temperature, title=f"sampling from {names[path]}"
            )
            system |= generation_metrics(
                policy, reference, judges, prompts, rollouts, config, pad_id
            )
            completions[names[path]] = rollouts.texts(tokenizer)
        if path in config.policies:
            systems.append(system)

    # Results
    results = {
        "dataset": config.dataset_name,
        "split": config.dataset_test_split,
        "num_pairs": len(pairs),
        "num_prompts": len(prompts),
        "attainable_accuracy": attainable(pairs),
        "systems": systems,
        "samples": samples(prompts, completions, config),
    }
    if distributed.is_rank0():
        (output_dir / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    report.chain_report(results, run_dirs(systems), output_dir)
    distributed.print_rank0(f"\n{report.results_table(results)}\n")
    distributed.print_rank0(f"report: {output_dir / 'report.md'}")


def load_data(
    config: EvaluateConfig, tokenizer: Any, stop_ids: list[int]
) -> tuple[list[Example], list[Example]]:
    """The pairs to judge and the prompts to sample from, both of the test split."""
    split, rest = config.dataset_test_split, (tokenizer, stop_ids)
    pairs = data.load_examples(
        config, config.dataset_name, split, "preference", *rest, config.num_eval_rows
    )
    if not config.num_prompts or not config.policies:
        return pairs, []
    name = config.prompts_dataset_name
    return pairs, data.load_examples(config, name, split, "prompts", *rest, config.num_prompts)


def describe(
    path: str,
    name: str,
    kind: str,
    accuracy: PreferenceAccuracy,
    scores: Tensor,
    pairs: list[Example],
) -> dict[str, Any]:
    """A system's row: its name, accuracy on all pairs and by source, and what its run cost."""
    sources = [example.source for example in pairs]
    by_source = {}
    for source in dict.fromkeys(sources):
        chosen, rejected = scores[[s == source for s in sources]].unbind(-1)
        by_source[source] = asdict(preference_accuracy(chosen, rejected))
    row = {"name": name, "kind": kind, "path": path, "accuracy": asdict(accuracy)}
    cost = evaluation.run_cost(Path(path).parent)
    return row | {
        "accuracy_by_source": by_source,
        "minutes": cost.get("elapsed_minutes"),
        "peak_memory_gb": cost.get("peak_memory_gb"),
    }


def generation_metrics(
    policy: Policy,
    reference: Policy,
    judges: RewardScorer,
    prompts: list[Example],
    rollouts: Rollouts,
    config: EvaluateConfig,
    pad_id: int,
) -> dict[str, Any]:
    """Rewards, KL to the reference, length and stop rate of one completion per prompt. Collective.

    The KL is the mean of log pi - log ref over completions drawn from pi: unbiased at temperature
    1, and not measured at any other.
    """
    metrics: dict[str, Any] = {
        "length": sum(map(len, rollouts.completion_ids)) / len(prompts),
        "stop_rate": sum(rollouts.has_stop) / len(prompts),
        "kl": None,
    }
    if judges.functions.functions:
        _, by_judge = judges(prompts, rollouts)
        rewards = {name: interval(values[~values.isnan()]) for name, values in by_judge.items()}
        first = next((judges.short[path] for path in judges.models), "")
        metrics["rewards"] = rewards
        metrics |= {
            "gold_reward": rewards.get(judges.short.get("gold", "")),
            "reward": rewards.get(first),
        }
    if config.temperature == 1:
        sampled = [
            replace(example, completions=[ids])
            for example, ids in zip(prompts, rollouts.completion_ids, strict=True)
        ]
        logps = evaluation.score_examples(policy, sampled, config, pad_id, "scoring")  # (N, 1)
        ref_logps = evaluation.score_examples(reference, sampled, config, pad_id, "scoring")
        metrics["kl"] = interval((logps - ref_logps).flatten())
    return metrics


def interval(values: Tensor) -> dict[str, float] | None:
    """Mean with its bootstrap interval, ready for JSON; None if nothing was measured."""
    if not len(values):
        return None
    return dict(zip(("mean", "low", "high"), mean_interval(values), strict=True))


def attainable(pairs: list[Example]) -> float | None:
    """Best accuracy that labels drawn at random allow, where the rows say how they were drawn."""
    rows = [example.columns for example in pairs]
    known = all("label_probability" in row for row in rows)
    return synthetic.attainable_accuracy(rows) if known else None


def samples(
    prompts: list[Example], completions: dict[str, list[str]], config: EvaluateConfig
) -> list[dict[str, Any]]:
    """The first prompts with every policy's completion, for the report."""
    shown = []
    for i, example in enumerate(prompts[: config.num_sample_prompts]):
        reference = example.columns.get("completion")
        shown.append(
            {
                "prompt": example.prompt,
                "reference": reference if isinstance(reference, str) else None,
                "completions": {name: texts[i] for name, texts in completions.items()},
            }
        )
    return shown


def run_dirs(systems: list[dict[str, Any]]) -> dict[str, Path]:
    """The runs behind the evaluated folders, for their training curves."""
    folders = {system["name"]: Path(system["path"]).parent for system in systems}
    return {name: path for name, path in folders.items() if (path / "metrics.jsonl").is_file()}


if __name__ == "__main__":
    distributed.run(main, EvaluateConfig)
