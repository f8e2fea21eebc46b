"""The runs of one seed of the over-optimisation experiment, and what is measured of them."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from common import data
from common.checkpoint import files
from common.data import Example
from common.errors import UserError
from common.evaluation.intervals import PreferenceAccuracy
from common.experiments import stages
from common.experiments.overoptimization import measuring
from common.experiments.overoptimization import rows as optimised_rows
from common.experiments.overoptimization.config import OveroptimizationConfig
from common.experiments.overoptimization.frontier import SeedPoints, Setting
from common.experiments.overoptimization.measuring import Measured, Measurer
from common.experiments.stages import Stage
from common.model import load
from common.text.rows import Kind

MODEL = "model"  # the folder that every stage leaves
LIMITS = (  # what else a measurement depends on
    "gold",
    "dataset_name",
    "dataset_config",
    "dataset_train_split",
    "dataset_test_split",
    "prompts_dataset_name",
    "max_prompt_length",
    "max_completion_length",
    "prompt_truncation",
    "stop_token",
    "missing_eos_penalty",
)


def run_seed(config: OveroptimizationConfig, seed: int) -> SeedPoints:
    """Make the runs of a seed, unless they are there, and measure the policies they left."""
    chain = Chain(config, Path(config.output_dir) / f"seed_{seed}", seed)
    policies = chain.rejection() | chain.dpo() | chain.grpo()
    pool = chain.pool()
    measured = {setting: chain.measure(setting, path) for setting, path in policies.items()}
    return SeedPoints(seed, chain.proxy_accuracy(), pool, measured)


@dataclass
class Chain:
    """One seed's stages, each a child process, and this process's measurements."""

    config: OveroptimizationConfig
    folder: Path
    seed: int

    # ---- stages ----

    def make(
        self, stage: str, name: str, recipe: str, rows: Path | None = None, **flags: Any
    ) -> Path:
        """Make a run, unless it is there; returns the folder of its model.

        Args:
            stage: As `sft`, of whose script it is a run.
            name: Of its folder.
            recipe: Its file.
            rows: It starts from the SFT policy and learns from this file.
            flags: Over the recipe.
        """
        if rows:
            flags |= {
                "model_name_or_path": self.sft,
                "dataset_name": rows,
                "dataset_test_split": "",
            }
        run = Stage(
            f"train_{stage}.py", self.folder / name, Path(recipe), {"seed": self.seed, **flags}
        )
        stages.run(run, self.config.num_processes)
        return run.output_dir / MODEL

    @cached_property
    def sft(self) -> Path:
        """The policy at distance 0."""
        if self.config.model_name_or_path:
            return Path(self.config.model_name_or_path)
        return self.make("sft", "sft", self.config.sft_recipe)

    @cached_property
    def proxy(self) -> Path:
        """The reward model that is optimised."""
        pairs = self.folder / "proxy_pairs.jsonl"
        optimised_rows.write_proxy_pairs(
            pairs,
            self.config.dataset_name,
            self.config.dataset_train_split,
            self.config.num_proxy_pairs,
            self.seed,
            dataset_config=self.config.dataset_config or None,
        )
        return self.make("reward", "proxy", self.config.reward_recipe, pairs)

    def rejection(self) -> dict[Setting, Path]:
        """Supervised fine-tuning on the completions that the proxy likes best of n."""
        recipe, sizes = self.config.rejection_recipe, self.config.rejection_sizes
        return {
            Setting("rejection", n): self.make(
                "sft", f"rejection_{n}", recipe, self.optimised / f"best_of_{n}.jsonl"
            )
            for n in sizes
        }

    def dpo(self) -> dict[Setting, Path]:
        """DPO on pairs that the proxy labelled."""
        recipe, betas = self.config.dpo_recipe, self.config.dpo_betas
        return {
            Setting("dpo", beta): self.make(
                "dpo", f"dpo_{beta:g}", recipe, self.optimised / "pairs.jsonl", beta=beta
            )
            for beta in betas
        }

    def grpo(self) -> dict[Setting, Path]:
        """GRPO against the proxy, at each of its checkpoints."""
        if not self.config.grpo_recipe:
            return {}
        run = self.make(
            "grpo",
            "grpo",
            self.config.grpo_recipe,
            model_name_or_path=self.sft,
            reward_funcs=[self.proxy],
            missing_eos_penalty=self.config.missing_eos_penalty,
            keep_last=0,
        ).parent
        checkpoints = reversed(files.newest_first(run))
        return {Setting("grpo", files.step_of(path)): path for path in checkpoints}

    # ---- what rejection and DPO learn from ----

    @cached_property
    def optimised(self) -> Path:
        """The folder of the rows that the SFT policy wrote and the proxy judged."""
        folder, number = self.folder / "optimised", self.config.num_candidates
        made_by = self.made_by(
            self.sft,
            prompts=self.config.num_train_prompts,
            candidates=number,
            sizes=self.config.rejection_sizes,
        )
        if not optimised_rows.are_written(folder, made_by):
            examples = self.train_prompts()
            rollouts = self.measurer.draw(self.measurer.reference, examples, number)
            rewards = self.measurer.proxy_rewards(examples, rollouts)  # (N, K)
            written = (examples, rollouts, rollouts.texts(self.tokenizer), rewards)
            sizes = self.config.rejection_sizes
            optimised_rows.write_optimised(folder, made_by, *written, sizes)
            # The judges are given up: the stages that come next need the memory.
            del self.measurer, written
            gc.collect()
        return folder

    def train_prompts(self) -> list[Example]:
        """The training prompts that are sampled from, others for each seed."""
        examples = self.examples(self.config.dataset_train_split, "prompts", 0)
        number = self.config.num_train_prompts
        chosen = optimised_rows.choose(len(examples), number, self.seed, "num_train_prompts")
        return [examples[i] for i in chosen]

    def examples(self, split: str, kind: Kind, num_rows: int) -> Sequence[Example]:
        """The first rows of a split (0: all) as token ids."""
        name = self.config.prompts_name if kind == "prompts" else self.config.dataset_name
        rest = (self.tokenizer, self.stop_ids, num_rows)
        return data.load_examples(self.local, name, split, kind, *rest)

    # ---- measurements ----

    @cached_property
    def local(self) -> OveroptimizationConfig:
        """The config with this seed, for sampling."""
        name = self.config.tokenizer_name_or_path or str(self.sft)
        return replace(self.config, seed=self.seed, tokenizer_name_or_path=name)

    @cached_property
    def tokenizer(self) -> Any:
        """The policies' tokenizer."""
        return load.load_tokenizer(self.local.tokenizer_path, self.local)

    @cached_property
    def stop_ids(self) -> list[int]:
        """What ends a completion."""
        return load.stop_token_ids(self.tokenizer, self.config.stop_token)

    @cached_property
    def measurer(self) -> Measurer:
        """Judges and SFT policy, loaded when something is to be measured."""
        return Measurer(
            self.local,
            self.tokenizer,
            reference=str(self.sft),
            proxy=str(self.proxy),
            gold=self.config.gold,
            missing_eos_penalty=self.config.missing_eos_penalty,
        )

    @cached_property
    def held_out(self) -> Sequence[Example]:
        """The prompts that policies are measured on, the same for every seed.

        Raises:
            UserError: there are too few, or a judge cannot read them.
        """
        number = self.config.num_prompts
        examples = self.examples(self.config.dataset_test_split, "prompts", number)
        if len(examples) < number:
            raise UserError(f"--num_prompts is {number}; {len(examples)} held-out ones are usable.")
        for scorer in (self.measurer.proxy, self.measurer.gold):
            scorer.check_rows(examples)
        return examples

    def pool(self) -> Measured:
        """Samples of the SFT policy, from which every best of n is estimated."""
        number = max(self.config.best_of)
        return self.kept("pool", self.sft, number, lambda m: m.pool(self.held_out, number))

    def measure(self, setting: Setting, path: Path) -> Measured:
        """A policy's own completions."""
        number, name = self.config.num_samples, f"{setting.method}_{setting.value:g}"
        return self.kept(name, path, number, lambda m: m.measure(str(path), self.held_out, number))

    def proxy_accuracy(self) -> PreferenceAccuracy | None:
        """How often the proxy prefers the chosen one of held-out pairs."""
        split, number = self.config.dataset_test_split, self.config.num_eval_rows
        return self.measurer.proxy_accuracy(self.examples(split, "preference", number))

    def kept(
        self, name: str, path: Path, num_samples: int, measure: Callable[[Measurer], Measured]
    ) -> Measured:
        """What was measured before of the same policy by the same judges, else what is now."""
        file = self.folder / "measured" / f"{name}.json"
        made_by = self.made_by(path, prompts=self.config.num_prompts, samples=num_samples)
        found = measuring.read(file, made_by)
        if found is None:
            found = measure(self.measurer)
            measuring.write(file, made_by, found)
        gold, proxy, kl = (v.mean() for v in (found.gold, found.proxy, found.log_ratio))
        print(f"{self.folder.name}, {name}: {kl=:.3f}, {gold=:.4f}, {proxy=:.3f}", flush=True)
        return found

    def made_by(self, path: Path, **settings: Any) -> dict[str, Any]:
        """What a measurement is a function of, ready for JSON: runs by what made them."""
        run = path.parent if path.name == MODEL else path.parent.parent
        named = [str(run / MODEL), str(self.sft), str(self.proxy), self.config.gold]
        limits = {name: getattr(self.config, name) for name in LIMITS}
        return {"path": path.name, "runs": stages.inputs(named), **limits, **settings}
