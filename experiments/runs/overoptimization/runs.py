"""The runs of one seed of the over-optimisation experiment, and their measured policies."""

import gc
import json
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from common import distributed
from common.checkpoint import layout
from common.data import Example
from common.errors import UserError
from common.launch import leave
from common.noise import derive_seed, permutation
from common.record.jsonl import json_line, write_atomically
from common.record.run_folder import input_digests
from common.text.reading import load_rows
from experiments.runs import stages
from experiments.runs.engine import run_stages
from experiments.runs.executors import Task
from experiments.runs.overoptimization.config import OveroptimizationConfig
from experiments.runs.overoptimization.measuring import Measured, Measurer
from experiments.runs.overoptimization.summary import SeedPoints
from experiments.runs.stages import Stage
from experiments.sample_pairs import as_pairs, higher_first, informative_pairs, write_rows

Item = TypeVar("Item")

MODEL = "model"  # the folder that every stage leaves
MARK = "made_by.json"
LIMITS = (  # flags that a measurement depends on
    *("gold", "missing_eos_penalty", "max_prompt_length", "max_completion_length"),
    *("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split"),
    *("column_map", "prompts_dataset_name", "prompt_truncation", "stop_token"),
)


def run_seed(config: OveroptimizationConfig, seed: int) -> SeedPoints:
    """Make the runs of a seed, unless they are there, and measure their policies."""
    chain, number = Chain(config, seed), config.num_samples
    policies = chain.policies()
    pool = chain.measured("pool", chain.sft, max(config.best_of))
    measured = {
        method: {
            n: chain.measured(f"{method.replace(' ', '_')}_{n:g}", path, number)
            for n, path in by_setting.items()
        }
        for method, by_setting in policies.items()
    }
    return SeedPoints(seed, pool, measured)


def seed_task(config: OveroptimizationConfig, seed: int) -> Task:
    """The runs of a seed and their measurements, as one run."""
    folder = Path(config.output_dir) / f"seed_{seed}"
    return Task(
        folder=folder,
        kind="seed",
        make=partial(run_apart, config, seed),
        made_by=partial(seed_made_by, config, seed),
        num_processes=config.num_processes,
    )


def seed_made_by(config: OveroptimizationConfig, seed: int) -> dict[str, Any]:
    """The inputs of a seed's measurements, ready for JSON."""
    changing = {f.name for f in fields(config) if not f.metadata["may_change"]}
    settings = {name: value for name, value in asdict(config).items() if name in changing}
    settings |= {"seeds": [seed]}
    return {"settings": settings, "inputs": input_digests(map(str, settings.values()))}


def run_apart(config: OveroptimizationConfig, seed: int) -> None:
    """Run a seed in another process, with its runs in turn."""
    distributed.start(config.ddp_timeout)
    run_seed(replace(config, parallel=0, executor="local"), seed)
    stages.write_mark(Path(config.output_dir) / f"seed_{seed}", seed_made_by(config, seed))
    leave()


class Chain:
    """One seed's stages, each a child process or a job, and this process's measurements."""

    def __init__(self, config: OveroptimizationConfig, seed: int) -> None:
        """Make the SFT policy and the proxy reward model, unless they are given."""
        self.config = config = replace(config, seed=seed)
        self.folder = Path(config.output_dir) / f"seed_{seed}"
        self.sft = Path(config.model_name_or_path or self.make("sft", "sft", config.sft_recipe))
        self.config = config = replace(config, model_name_or_path=str(self.sft))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.proxy = Path(config.proxy) if config.proxy else self.train_proxy()

    def train_proxy(self) -> Path:
        """Train the proxy reward model on some of the pairs; returns its folder."""
        config, name = self.config, self.config.dataset_name
        pairs = load_rows(config, name, config.dataset_train_split, "preference")
        chosen = map(json_line, choose(pairs, config, "num_proxy_pairs"))
        write_atomically(self.folder / "proxy_pairs.jsonl", chosen)
        return self.make("reward", "proxy", config.reward_recipe, "proxy_pairs.jsonl")

    def make(self, stage: str, name: str, recipe: str, rows: str = "", **flags: Any) -> Path:
        """Make a run of a stage, unless it is there; returns the folder of its model."""
        run = self.stage(stage, name, recipe, rows, **flags)
        stages.run(run)
        return run.output_dir / MODEL

    def stage(self, stage: str, name: str, recipe: str, rows: str = "", **flags: Any) -> Stage:
        """A run of a stage; with `rows`, a file in the seed's folder, of the SFT policy on them."""
        flags["seed"] = self.config.seed
        if self.config.bf16:
            flags["bf16"] = True
        if rows:
            flags |= {"dataset_name": self.folder / rows, "dataset_test_split": ""}
            flags |= {"eval_steps": 0, "num_eval_rows": 0, "model_name_or_path": self.sft}
        script, processes = f"train_{stage}.py", self.config.num_processes
        output_dir = self.folder / name
        return Stage(script, output_dir, Path(recipe), flags, num_processes=processes)

    def policies(self) -> dict[str, dict[float, Path]]:
        """The policies of each method, by n, beta or step."""
        config = self.config
        runs: dict[str, dict[float, Stage]] = {"rejection": {}, "dpo": {}}
        if config.rejection_recipe or config.dpo_recipe:
            self.write_rows(self.folder / "optimised")
        if recipe := config.rejection_recipe:
            for n in config.rejection_sizes:
                rows = f"optimised/best_of_{n}.jsonl"
                runs["rejection"][n] = self.stage("sft", f"rejection_{n}", recipe, rows)
        if recipe := config.dpo_recipe:
            for beta in config.dpo_betas:
                name, rows = f"dpo_{beta:g}", "optimised/pairs.jsonl"
                runs["dpo"][beta] = self.stage("dpo", name, recipe, rows, beta=beta)
        grpo = {}
        for variant in config.grpo_variants or [""] if config.grpo_recipe else ():
            name = "_".join(["grpo", *variant.split()])
            fixed: dict[str, Any] = {"model_name_or_path": self.sft, "reward_funcs": [self.proxy]}
            fixed |= {"missing_eos_penalty": config.missing_eos_penalty, "keep_last": 0}
            flags = dict(text.split("=", 1) for text in variant.split())
            method = f"grpo {variant}".strip()
            grpo[method] = self.stage("grpo", name, config.grpo_recipe, **fixed, **flags)
        every = [run for by_setting in runs.values() for run in by_setting.values()]
        if every := [*every, *grpo.values()]:
            run_stages(every, config, self.folder)
        policies: dict[str, dict[float, Path]] = {
            method: {setting: run.output_dir / MODEL for setting, run in by_setting.items()}
            for method, by_setting in runs.items()
        }
        for method, run in grpo.items():
            checkpoints = reversed(layout.newest_first(run.output_dir))
            policies[method] = {layout.step_of(path): path for path in checkpoints}
        return policies

    def write_rows(self, folder: Path) -> None:
        """Write the rows of rejection and DPO, unless they are there: their mark comes last."""
        config, sizes = self.config, self.config.rejection_sizes
        num_prompts, number = config.num_train_prompts, config.num_candidates
        made_by = self.made_by(self.sft, prompts=num_prompts, candidates=number, sizes=sizes)
        if stages.read_mark(folder, MARK) == made_by:
            return
        (folder / MARK).unlink(missing_ok=True)
        measurer = self.measurer
        prompts = measurer.prompts(config.dataset_train_split)
        examples = choose(prompts, config, "num_train_prompts")
        rollouts = measurer.draw(measurer.reference, examples, number)
        rewards = measurer.proxy_rewards(examples, rollouts)  # (N, K)
        texts = rollouts.texts(measurer.vocabulary.tokenizer)
        write_optimised(folder, examples, texts, rewards, sizes)
        stages.write_mark(folder, made_by, MARK)
        del self.measurer, measurer  # the next stages need the memory
        gc.collect()

    @cached_property
    def measurer(self) -> Measurer:
        """Judges and SFT policy, loaded when something is to be measured."""
        return Measurer(self.config, str(self.proxy))

    def measured(self, name: str, path: Path, num_samples: int) -> Measured:
        """An earlier measurement of the same policy by the same judges, else a new one."""
        file = self.folder / "measured" / f"{name}.json"
        settings = {"prompts": self.config.num_prompts, "samples": num_samples}
        made_by = self.made_by(path, **settings, fluency_model=self.config.fluency_model)
        record = stages.read_mark(file.parent, file.name) or {}
        if record.pop("made_by", None) == made_by:
            policy = Measured(**record)
        else:
            policy = self.measurer.measure(str(path), num_samples)
            file.parent.mkdir(exist_ok=True)
            text = json.dumps({"made_by": made_by, **vars(policy)}, default=np.ndarray.tolist)
            write_atomically(file, [text + "\n"])
        gold, proxy, kl = (v.mean() for v in (policy.gold, policy.proxy, policy.log_ratio))
        print(f"{self.folder.name}, {name}: {kl=:.3f}, {gold=:.4f}, {proxy=:.3f}", flush=True)
        return policy

    def made_by(self, path: Path, **settings: Any) -> dict[str, Any]:
        """The inputs of a measurement, ready for JSON: runs by what made them."""
        run = path.parent if path.name == MODEL else path.parent.parent
        named = [str(run / MODEL), str(self.sft), str(self.proxy), self.config.gold]
        limits = {name: getattr(self.config, name) for name in LIMITS}
        return {"path": path.name, "runs": input_digests(named), **limits, **settings}


def choose(rows: Sequence[Item], config: OveroptimizationConfig, field: str) -> list[Item]:
    """As many rows as the field `what` has, drawn by the seed.

    Raises:
        UserError: there are not as many.
    """
    wanted = getattr(config, field)
    if wanted > len(rows):
        raise UserError(f"--{field} is {wanted}; the data set has {len(rows)} rows to take from.")
    return [rows[i] for i in permutation(len(rows), derive_seed(config.seed, field), 0)[:wanted]]


def write_optimised(
    folder: Path,
    examples: Sequence[Example],  # N prompts
    texts: Sequence[str],  # N*K, K completions of each, K even
    rewards: Tensor,  # (N, K) of the proxy
    sizes: Sequence[int],
) -> None:
    """Write for each size n the best of the first n completions of every prompt, and pairs.

    A pair is two neighbours, independent draws of the policy, labelled by the proxy.
    """
    num_candidates = rewards.shape[1]
    neighbours = torch.arange(num_candidates).view(-1, 2).expand(len(examples), -1, -1)
    every = torch.ones_like(rewards, dtype=torch.bool)
    labelled = higher_first(rewards, neighbours, every)  # (N, K / 2, 2)
    pairs = as_pairs(examples, every[:, 0], texts, rewards, labelled)
    pairs = informative_pairs(pairs, rewards.flatten().tolist(), len(examples))
    write_rows(folder, "pairs", pairs)
    for size in sizes:
        best = rewards[:, :size].argmax(1) + torch.arange(len(examples)) * num_candidates  # (N,)
        rows = [
            {"prompt": example.prompt, "completion": texts[slot]}
            for example, slot in zip(examples, best.tolist(), strict=True)
            if texts[slot].strip()
        ]
        write_atomically(folder / f"best_of_{size}.jsonl", map(json_line, rows))
