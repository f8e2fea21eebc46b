"""The runs of one seed of the over-optimisation experiment, and what is measured of them."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from common import data
from common.checkpoint import files
from common.config import UserError
from common.data import Example
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
    policies: dict[Setting, Path] = {}
    policies |= chain.rejection() | chain.dpo() | chain.grpo()
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

    def make(self, script: str, name: str, recipe: str, **flags: Any) -> Path:
        """Make a run, unless it is there; returns the folder of its model."""
        output_dir = self.folder / name
        flags = {"seed": self.seed, **flags}
        stages.run(Stage(script, output_dir, Path(recipe), flags), self.config.num_processes)
        return output_dir / MODEL

    @cached_property
    def sft(self) -> Path:
        """The policy at distance 0."""
        if self.config.model_name_or_path:
            return Path(self.config.model_name_or_path)
        return self.make("train_sft.py", "sft", self.config.sft_recipe)

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
        recipe = self.config.reward_recipe
        return self.make("train_reward.py", "proxy", recipe, **self.starting_on(pairs))

    def starting_on(self, rows: Path) -> dict[str, Any]:
        """Flags of a stage that starts from the SFT policy and learns from a file of rows."""
        return {
            "model_name_or_path": self.sft,
            "dataset_name": rows,
            "dataset_test_split": "",
        }

    def rejection(self) -> dict[Setting, Path]:
        """Supervised fine-tuning on the completions that the proxy likes best of n."""
        models_of = {}
        for size in self.config.rejection_sizes:
            rows = self.optimised / f"best_of_{size}.jsonl"
            flags = self.starting_on(rows)
            recipe, name = self.config.rejection_recipe, f"rejection_{size}"
            models_of[Setting("rejection", size)] = self.make("train_sft.py", name, recipe, **flags)
        return models_of

    def dpo(self) -> dict[Setting, Path]:
        """DPO on pairs that the proxy labelled."""
        models_of = {}
        for beta in self.config.dpo_betas:
            flags = self.starting_on(self.optimised / "pairs.jsonl") | {"beta": beta}
            recipe, name = self.config.dpo_recipe, f"dpo_{beta:g}"
            models_of[Setting("dpo", beta)] = self.make("train_dpo.py", name, recipe, **flags)
        return models_of

    def grpo(self) -> dict[Setting, Path]:
        """GRPO against the proxy, at each of its checkpoints."""
        if not self.config.grpo_recipe:
            return {}
        run = self.make(
            "train_grpo.py",
            "grpo",
            self.config.grpo_recipe,
            model_name_or_path=self.sft,
            reward_funcs=[self.proxy],
            missing_eos_penalty=self.config.missing_eos_penalty,
            keep_last=0,
        ).parent
        return {
            Setting("grpo", files.step_of(path)): path for path in reversed(files.newest_first(run))
        }

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
            texts, sizes = rollouts.texts(self.tokenizer), self.config.rejection_sizes
            optimised_rows.write_optimised(
                folder, made_by, examples, rollouts, texts, rewards, sizes
            )
            self.release()
        return folder

    def train_prompts(self) -> list[Example]:
        """The training prompts that are sampled from, others for each seed."""
        examples = self.prompts(self.config.dataset_train_split, 0)
        number = self.config.num_train_prompts
        chosen = optimised_rows.choose(len(examples), number, self.seed, "num_train_prompts")
        return [examples[i] for i in chosen]

    def prompts(self, split: str, num_rows: int) -> list[Example]:
        """The first prompts of a split (0: all)."""
        return self.examples(self.config.prompts_name, split, "prompts", num_rows)

    def examples(self, name: str, split: str, kind: Kind, num_rows: int) -> list[Example]:
        """Rows of a split as token ids."""
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

    def release(self) -> None:
        """Give up the judges: the stages that come next need the memory."""
        self.__dict__.pop("measurer", None)
        gc.collect()

    @cached_property
    def held_out(self) -> list[Example]:
        """The prompts that policies are measured on, the same for every seed.

        Raises:
            UserError: there are too few, or a judge cannot read them.
        """
        number = self.config.num_prompts
        examples = self.prompts(self.config.dataset_test_split, number)
        if len(examples) < number:
            raise UserError(f"--num_prompts is {number}; {len(examples)} held-out ones are usable.")
        for scorer in (self.measurer.proxy, self.measurer.gold):
            scorer.check_rows(examples)
        return examples

    def pool(self) -> Measured:
        """Samples of the SFT policy, from which every best of n is estimated."""
        number = max(self.config.best_of)
        return self.kept(
            "pool", self.sft, number, lambda: self.measurer.pool(self.held_out, number)
        )

    def measure(self, setting: Setting, path: Path) -> Measured:
        """A policy's own completions."""
        number, name = self.config.num_samples, f"{setting.method}_{setting.value:g}"
        return self.kept(
            name, path, number, lambda: self.measurer.measure(str(path), self.held_out, number)
        )

    def proxy_accuracy(self) -> PreferenceAccuracy | None:
        """How often the proxy prefers the chosen one of held-out pairs."""
        name, split = self.config.dataset_name, self.config.dataset_test_split
        pairs = self.examples(name, split, "preference", self.config.num_eval_rows)
        return self.measurer.proxy_accuracy(pairs)

    def kept(
        self, name: str, path: Path, num_samples: int, measure: Callable[[], Measured]
    ) -> Measured:
        """What was measured before of the same policy by the same judges, else what is now."""
        file = self.folder / "measured" / f"{name}.json"
        made_by = self.made_by(path, prompts=self.config.num_prompts, samples=num_samples)
        found = measuring.read(file, made_by)
        if found is None:
            found = measure()
            measuring.write(file, made_by, found)
        gold, proxy = found.gold.mean(), found.proxy.mean()
        kl = found.log_ratio.mean()
        print(
            f"{file.parent.parent.name}, {name}: {kl=:.3f}, {gold=:.4f}, {proxy=:.3f}", flush=True
        )
        return found

    def made_by(self, path: Path, **settings: Any) -> dict[str, Any]:
        """What a measurement is a function of, ready for JSON: runs by what made them."""
        run = path.parent if path.name == MODEL else path.parent.parent
        named = [str(run / MODEL), str(self.sft), str(self.proxy), self.config.gold]
        limits = {name: getattr(self.config, name) for name in LIMITS}
        return {"path": path.name, "runs": stages.inputs(named), **limits, **settings}
