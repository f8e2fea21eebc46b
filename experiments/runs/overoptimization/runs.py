"""The runs of one seed of the over-optimisation experiment, and what they measured."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import numpy as np

from common.checkpoint import layout
from common.config.stages import SamplingConfig
from common.errors import UserError
from common.evaluation.records import Generation, read_completions
from common.noise import derive_seed, permutation
from common.record.jsonl import json_line, write_atomically
from common.text.reading import load_rows
from experiments.runs.overoptimization.config import OveroptimizationConfig
from experiments.runs.overoptimization.summary import Measured, SeedPoints
from experiments.runs.stages import Stage

MODEL = "model"  # the folder that every stage leaves


class Chain:
    """The runs of a seed, each of a stage script; `evaluate.py` measures."""

    def __init__(self, config: OveroptimizationConfig, seed: int) -> None:
        """Take the flags; the SFT policy and the proxy are trained unless they are given."""
        self.config, self.seed = config, seed
        self.folder = Path(config.output_dir) / f"seed_{seed}"
        self.sft = Path(config.model_name_or_path or self.folder / "sft" / MODEL)
        self.proxy = Path(config.proxy or self.folder / "proxy" / MODEL)
        # By method, then by its n, beta or step: a model's folder, or a checkpoint
        self.policies: dict[str, dict[float, Path]] = {}

    def phases(self) -> Iterator[list[Stage]]:
        """The runs, in lists: each list is asked for when those before it are finished."""
        config = self.config
        if not config.proxy:
            self.choose("proxy_pairs", config.dataset_name, "preference")
        if self.needs_candidates:
            self.choose("train_prompts", config.prompts_name, "prompts")
        yield self.starts()
        if self.needs_candidates:
            self.write_rows()
        runs = self.optimised()
        yield [run for by_setting in runs.values() for run in by_setting.values()]
        for method, by_setting in runs.items():
            paths = {setting: run.output_dir / MODEL for setting, run in by_setting.items()}
            if method.startswith("grpo"):
                checkpoints = layout.newest_first(by_setting[0].output_dir)
                paths = {layout.step_of(path): path for path in reversed(checkpoints)}
            self.policies[method] = paths
        every = [path for paths in self.policies.values() for path in paths.values()]
        yield [self.evaluation("policies", every, self.config.num_samples)] if every else []

    def planned(self) -> list[Stage]:
        """The runs that are known before the first is made: all but the last evaluation."""
        return [*self.starts(), *(r for runs in self.optimised().values() for r in runs.values())]

    @property
    def needs_candidates(self) -> bool:
        """Whether a method learns from completions of the SFT policy."""
        return bool(self.config.rejection_recipe or self.config.dpo_recipe)

    # ---- the SFT policy, the proxy, and what SFT samples -----------------------------------------

    def starts(self) -> list[Stage]:
        """The SFT policy, the proxy, and completions of held-out and of training prompts."""
        config, runs = self.config, []
        if not config.model_name_or_path:
            runs.append(self.stage("sft", "sft", config.sft_recipe))
        if not config.proxy:
            pairs = self.rows("proxy_pairs")
            runs.append(self.stage("reward", "proxy", config.reward_recipe, pairs))
        runs.append(self.evaluation("pool", [self.sft], max(config.best_of)))
        if self.needs_candidates:
            rows: dict[str, Any] = {"prompts_dataset_name": self.rows("train_prompts")}
            rows |= {"num_prompts": config.num_train_prompts}
            rows |= {"dataset_test_split": "auto", "dataset_config": "", "column_map": []}
            runs.append(self.evaluation("candidates", [self.sft], config.num_candidates, **rows))
        return runs

    def rows(self, name: str) -> Path:
        """A file of rows that this driver writes."""
        return self.folder / f"{name}.jsonl"

    def choose(self, name: str, dataset_name: str, kind: str) -> None:
        """Write as many training rows as `num_<name>` has, drawn by the seed."""
        config, wanted = self.config, getattr(self.config, f"num_{name}")
        rows = load_rows(config, dataset_name, config.dataset_train_split, kind)
        if wanted > len(rows):
            raise UserError(f"--num_{name} is {wanted}; {dataset_name} has {len(rows)} rows.")
        order = permutation(len(rows), derive_seed(self.seed, f"num_{name}"), 0)
        write_atomically(self.rows(name), (json_line(rows[i]) for i in order[:wanted]))

    # ---- policies --------------------------------------------------------------------------------

    def optimised(self) -> dict[str, dict[float, Stage]]:
        """The runs of each method by n or beta; GRPO's only run leaves a policy at each step."""
        config = self.config
        runs: dict[str, dict[float, Stage]] = {"rejection": {}, "dpo": {}}
        if recipe := config.rejection_recipe:
            for n in config.rejection_sizes:
                rows = self.rows(f"best_of_{n}")
                runs["rejection"][n] = self.stage("sft", f"rejection_{n}", recipe, rows)
        if recipe := config.dpo_recipe:
            rows = self.rows("pairs")
            for beta in config.dpo_betas:
                name = f"dpo_{beta:g}" if float(f"{beta:g}") == beta else f"dpo_{beta}"
                runs["dpo"][beta] = self.stage("dpo", name, recipe, rows, beta=beta)
        for variant in config.grpo_variants or [""] if config.grpo_recipe else ():
            flags: dict[str, Any] = {"model_name_or_path": self.sft, "reward_funcs": [self.proxy]}
            flags |= {"missing_eos_penalty": config.missing_eos_penalty, "keep_last": 0}
            flags |= dict(text.split("=", 1) for text in variant.split())
            name = "_".join(["grpo", *variant.split()])
            run = self.stage("grpo", name, config.grpo_recipe, **flags)
            runs[f"grpo {variant}".strip()] = {0: run}
        return runs

    def write_rows(self) -> None:
        """Write for each size n the best of the first n candidates of every prompt, and pairs.

        A pair is two neighbours, independent draws of the policy, labelled by the proxy.
        """
        best: dict[int, list[str]] = {n: [] for n in self.config.rejection_sizes}
        pairs, penalty = [], self.config.missing_eos_penalty
        for line in read_completions(self.folder / "candidates"):
            (name,) = line.systems
            drawn = [(rewards(each, penalty)[1], each.completion) for each in line.all_of(name)]
            for n, rows in best.items():
                _, text = max(drawn[:n], key=lambda candidate: candidate[0])
                if text.strip():
                    rows.append(json_line({"prompt": line.prompt, "completion": text}))
            for pair in zip(drawn[::2], drawn[1::2], strict=False):
                (low, rejected), (high, chosen) = sorted(pair)
                if low < high and rejected.strip() and chosen.strip():
                    texts = {"chosen": chosen, "rejected": rejected}
                    pairs.append(json_line({"prompt": line.prompt, **texts}))
        for n, rows in best.items():
            write_atomically(self.rows(f"best_of_{n}"), rows)
        write_atomically(self.rows("pairs"), pairs)

    def stage(
        self, stage: str, name: str, recipe: str, rows: Path | None = None, **flags: Any
    ) -> Stage:
        """A run of a training stage; with a file of rows it trains the SFT policy on them."""
        flags["seed"] = self.seed
        if self.config.bf16:
            flags["bf16"] = True
        if rows:
            flags |= {"dataset_name": rows, "dataset_test_split": "", "eval_steps": 0}
            flags |= {"num_eval_rows": 0, "model_name_or_path": self.sft}
        script, processes = f"train_{stage}.py", self.config.num_processes
        output_dir = self.folder / name
        return Stage(script, output_dir, Path(recipe), flags, num_processes=processes)

    # ---- measuring -------------------------------------------------------------------------------

    def evaluation(
        self, name: str, policies: Sequence[Path], num_samples: int, **changes: Any
    ) -> Stage:
        """Completions of the held-out prompts by policies, judged by the proxy and by gold."""
        config = self.config
        flags = {
            f.name: value
            for f in fields(SamplingConfig)
            if (value := getattr(config, f.name)) != f.metadata["default"]
        }
        flags |= {"policies": policies, "model_name_or_path": self.sft, "seed": self.seed}
        flags |= {"ref_model_name_or_path": self.sft, "score_pairs": False}
        flags |= {"reward_models": [self.proxy], "reward_funcs": [config.gold]}
        flags |= {"prompts_dataset_name": config.prompts_name, "num_prompts": config.num_prompts}
        flags |= {"num_generations": num_samples, **changes}
        processes = config.num_processes
        return Stage("evaluate.py", self.folder / name, flags=flags, num_processes=processes)

    def points(self) -> SeedPoints:
        """The measured policies, when all runs are finished."""
        penalty = self.config.missing_eos_penalty
        (pool,) = read_measured(self.folder / "pool", penalty).values()
        policies: dict[str, dict[float, Measured]] = {}
        if any(self.policies.values()):
            _, *every = read_measured(self.folder / "policies", penalty).values()  # SFT first
            in_order = iter(every)
            for method, paths in self.policies.items():
                policies[method] = {setting: next(in_order) for setting in paths}
        return SeedPoints(self.seed, pool, policies)


def read_measured(evaluation: Path, penalty: float) -> dict[str, Measured]:
    """The policies of an evaluation, by their names there."""
    prompts = read_completions(evaluation)
    policies = {}
    for name in prompts[0].systems:
        values = [
            [(*rewards(each, penalty), each.kl or 0.0) for each in prompt.all_of(name)]
            for prompt in prompts
        ]
        policies[name] = Measured(*np.moveaxis(np.array(values), -1, 0))
    return policies


def rewards(drawn: Generation, penalty: float) -> tuple[float, float]:
    """The rewards by gold and by the proxy, which punishes a text that did not stop."""
    proxy, gold = map(float, cast(Iterable[float], drawn.rewards.values()))
    return gold, proxy if drawn.stopped else penalty
