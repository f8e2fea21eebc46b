"""Reward models as reward functions, and all reward functions of a run applied to rollouts."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import TrainerState

from common import data, distributed, self_checks
from common.config import CommonConfig, UserError
from common.data import Example
from common.model import checks, fsdp
from common.model import load as models
from common.rewards.call import (
    CHOICE_COLUMN,
    Rewards,
    RewardSet,
    equal_for_equal,
    load_reward_functions,
)
from common.rewards.encoders import EncoderFunction
from common.rewards.functions import RewardFunction, is_built_in
from common.sampling.sampler import Rollouts
from common.scoring import RewardModel
from common.text.chat import as_answers, render, turn_end
from common.text.rows import OWN_COLUMNS
from common.text.truncate import encode, leading_ids, without_leading


class RewardModelFunction:
    """A reward-model folder as a reward function. Collective."""

    is_collective = True

    def __init__(self, path: str, policy_tokenizer: Any, config: CommonConfig) -> None:
        """Check the folder; `load` reads the weights.

        Raises:
            UserError: it holds no reward model.
        """
        self.path, self.config = path, config
        self.tokenizer = models.load_tokenizer(path, config)
        models.add_own_pad_token(self.tokenizer)
        self.leading = leading_ids(self.tokenizer)
        self.model_config = models.read_model_config(path, "reward_model", self.tokenizer, config)
        vocabulary = policy_tokenizer.get_vocab()
        own = self.tokenizer.get_vocab()
        self.same_ids = all(own.get(token) == i for token, i in vocabulary.items())
        self.policy_tokenizer = policy_tokenizer
        templates = (None, policy_tokenizer.chat_template)
        self.same_template = self.tokenizer.chat_template in templates
        self.model: nn.Module | None = None

    def load(self, mesh: DeviceMesh) -> None:
        """Load the frozen, sharded model. Collective."""
        lm = models.load_reward_model(self.path, self.model_config, self.tokenizer, self.config)
        frozen = RewardModel(lm).requires_grad_(False)
        self.model = fsdp.shard(frozen, self.config, mesh, float32_modules=[lm.score])
        self_checks.loaded_model(self.model, self.config)

    @torch.no_grad()
    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        **columns: Any,
    ) -> list[float]:
        """Rewards of B completions: of the policy's ids if the vocabulary is the same.

        Otherwise, and for messages that this model's chat template writes differently, the texts
        are tokenised anew. Of messages the reward is read at the end of the template's turn; a text
        that stopped gets this model's eos.
        """
        assert self.model is not None, "load() comes first"
        chat = next((prompt for prompt in prompts if not isinstance(prompt, str)), None)
        if self.reads_ids(is_chat=chat is not None):
            prompt_ids = [list(row) for row in columns["prompt_ids"]]
            ids = [list(row) for row in completion_ids]
            if chat is not None:
                end = turn_end(chat, self.policy_tokenizer)
                ids = [
                    row if isinstance(prompt, str) else end.closed(row, stop)
                    for prompt, row, stop in zip(prompts, ids, columns["has_stop"], strict=True)
                ]
        else:
            prompt_ids, ids = self.own_ids(prompts, completions, columns["has_stop"])
        if chat is not None or not self.same_ids:
            self.refuse_beyond_positions(prompt_ids, ids)
        rewards, pieces = torch.zeros(len(ids)), []
        for prompt, group in groupby(range(len(ids)), key=lambda i: prompt_ids[i]):
            places = list(group)  # neighbours with the same prompt
            pieces += data.cut_group(prompt, [ids[i] for i in places], places, self.config)
        for part in data.pack(pieces, self.config):
            batch = data.collate(part, self.config.layout, self.tokenizer.pad_token_id)
            values = self.model(batch.to(distributed.device())).cpu()  # (B,)
            rewards[batch.places[batch.is_real]] = values[batch.is_real]
        texts = [(*prompt, -1, *own) for prompt, own in zip(prompt_ids, ids, strict=True)]
        return equal_for_equal(texts, rewards)

    def check_conversation(self, messages: Sequence[dict[str, Any]]) -> None:
        """Raise a UserError if this model cannot read such messages with an answer to its end."""
        if not self.reads_ids(is_chat=True):
            render({"prompt": messages}, [], self.tokenizer)
            return
        end = len(turn_end(messages, self.policy_tokenizer).ids)
        prompt, answer = self.config.max_prompt_length, self.config.max_completion_length
        limit = checks.max_positions(self.model_config)
        if limit is not None and prompt + answer + end > limit:
            raise UserError(
                f"--max_prompt_length {prompt} plus --max_completion_length {answer} plus the "
                f"{end} tokens that end a turn is more than the {limit} positions of the reward "
                f"model {self.path!r}."
            )

    def reads_ids(self, *, is_chat: bool) -> bool:
        """Whether the policy's ids of a row, which is a conversation or a text, are its own too."""
        return self.same_ids and (not is_chat or self.same_template)

    def own_ids(
        self, prompts: Sequence[Any], completions: Sequence[Any], has_stop: Sequence[bool]
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Prompts and completions, texts or messages, in this model's own tokens."""
        eos_id = self.tokenizer.eos_token_id
        rows = [{"prompt": p, "completion": c} for p, c in zip(prompts, completions, strict=True)]
        # The template ends the turn, whether or not the policy did.
        has_eos = [stop and isinstance(p, str) for p, stop in zip(prompts, has_stop, strict=True)]
        rows = [render(row, ["completion"], self.tokenizer) for row in rows]
        encoded = encode([row["prompt"] for row in rows], self.tokenizer)
        prompt_ids = [self.leading + without_leading(row, self.leading) for row in encoded]
        ids = encode([row["completion"] for row in rows], self.tokenizer)
        return prompt_ids, [
            [*row, eos_id] if stop else list(row) for row, stop in zip(ids, has_eos, strict=True)
        ]

    def refuse_beyond_positions(
        self, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]]
    ) -> None:
        """Raise a UserError for texts that are too long in this model's own tokens."""
        pairs = zip(prompt_ids, completion_ids, strict=True)
        longest = max((len(prompt) + len(ids) for prompt, ids in pairs), default=0)
        limit = checks.max_positions(self.model_config)
        if limit is not None and longest > limit:
            raise UserError(
                f"a prompt with its completion is {longest} tokens of the reward model "
                f"{self.path!r}, which has {limit} positions; lower --max_prompt_length."
            )


def model_function(path: str, policy_tokenizer: Any, config: CommonConfig) -> RewardFunction:
    """A model's folder as a reward function, by what kind of model it holds.

    Raises:
        UserError: it holds no reward model.
    """
    if checks.is_encoder(models.find_config(path, policy_tokenizer, config)):
        return EncoderFunction(path, config)
    return RewardModelFunction(path, policy_tokenizer, config)


class RewardScorer:
    """The reward functions of a run, applied to rollouts."""

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[float],
        tokenizer: Any,
        config: CommonConfig,
        beside: Sequence[str] = (),
    ) -> None:
        """Find and check every function; `load` reads the reward models' weights.

        Args:
            names: Built-ins with what stands behind their colon, file.py:function, reward models.
            weights: One per name; empty for 1 each.
            tokenizer: The policy's.
            config: Of the run.
            beside: Further paths in the same tables, which short names tell apart too.

        Raises:
            UserError: a name is no function, or a folder holds no reward model.
        """
        self.short = short_names([*names, *beside])  # by name
        self.tokenizer = tokenizer
        self.functions = RewardSet({}, [])
        if names:
            self.functions = load_reward_functions(
                names,
                weights or None,
                load_reward_model=lambda path: model_function(path, tokenizer, config),
            )

    def check_rows(self, examples: Sequence[Example]) -> None:
        """Refuse rows that the functions cannot judge, before any model is loaded.

        Raises:
            UserError: a column that a function needs is missing or holds what it cannot use, rows
                differ in their columns, a row names a function that is not there, or a reward model
                cannot read messages.
        """
        names = self.functions.functions
        for example in examples:
            if example.columns.keys() != examples[0].columns.keys():
                raise UserError(
                    f"row {example.row + 1} of the prompts has the columns "
                    f"{sorted(example.columns)} and row {examples[0].row + 1} has "
                    f"{sorted(examples[0].columns)}; give all rows the same, null where empty."
                )
            check_choice(example, names)
        if not examples:
            return
        self.functions.check_columns(examples[0].columns)
        for example in examples:
            self.functions.check_row(example.row + 1, example.columns)
        self.check_messages(examples)

    def check_messages(self, examples: Sequence[Example]) -> None:
        """Raise a UserError for rows of messages if a reward model cannot read such."""
        messages = examples[0].messages
        for function in self.reward_models.values() if messages else ():
            if isinstance(function, EncoderFunction):
                raise UserError(
                    f"{function.path!r} is an encoder, which reads texts, and the rows are "
                    "messages."
                )
            function.check_conversation(messages)

    def load(self, mesh: DeviceMesh) -> None:
        """Load the reward models. Collective."""
        for function in self.reward_models.values():
            function.load(mesh)

    @property
    def reward_models(self) -> dict[str, RewardModelFunction | EncoderFunction]:
        """The functions that are reward models, by folder."""
        functions = self.functions.functions.items()
        return {
            name: function
            for name, function in functions
            if isinstance(function, RewardModelFunction | EncoderFunction)
        }

    @property
    def models(self) -> dict[str, nn.Module]:
        """The loaded reward models by folder."""
        functions = self.functions.functions.items()
        return {
            name: function.model
            for name, function in functions
            if isinstance(function, RewardModelFunction) and function.model is not None
        }

    def __call__(
        self, examples: Sequence[Example], rollouts: Rollouts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`total` and `by_function` of `score`, whose collectives these are."""
        rewards = self.score(examples, rollouts)
        return rewards.total, rewards.by_function

    def score(
        self, examples: Sequence[Example], rollouts: Rollouts, step: int = 0, total_steps: int = 0
    ) -> Rewards:
        """Rewards of K completions of each of N prompts. Collective if a reward model takes part.

        Args:
            examples: N prompts; one of messages gets its completions as messages too.
            rollouts: N*K completions.
            step: Optimiser steps done so far, for functions that read `trainer_state`.
            total_steps: Of the run, for the same.

        Returns:
            As the functions' own, with `total` and `by_function` (N, K), the latter by short name;
            float32 on the host. `steps` has N*K entries.
        """
        num_samples = len(rollouts.has_stop) // len(examples)
        repeated = [example for example in examples for _ in range(num_samples)]  # (N*K,)
        columns = {name: [e.columns[name] for e in repeated] for name in examples[0].columns}
        own = ([e.prompt_ids for e in repeated], rollouts.has_stop.tolist())
        columns |= dict(zip(OWN_COLUMNS, own, strict=True))
        texts, messages = rollouts.texts(self.tokenizer), [e.messages for e in repeated]
        rewards = self.functions(
            [e.messages or e.prompt for e in repeated],
            as_answers(texts, messages, self.tokenizer),
            rollouts.completion_ids,
            columns,
            TrainerState(global_step=step, max_steps=total_steps),
        )
        shape = (len(examples), num_samples)
        by_function = {
            self.short[n]: values.view(shape) for n, values in rewards.by_function.items()
        }
        return replace(rewards, total=rewards.total.view(shape), by_function=by_function)


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """What a table calls each function or folder: as many of its last folders as tell all apart."""
    paths = list(dict.fromkeys(paths))
    for depth in range(1, 1 + max((len(Path(path).parts) for path in paths), default=0)):
        names = {path: short_name(path, depth) for path in paths}
        if len(set(names.values())) == len(paths):
            return names
    return {path: path for path in paths}


def short_name(path: str, depth: int = 1) -> str:
    """The last `depth` parts of the path of a function or model; `run` for `run/model`."""
    if is_built_in(path):
        return path
    if ".py:" in path:
        return path.rpartition(":")[2] if depth == 1 else path
    parts = Path(path).parts
    parts = parts[:-1] if len(parts) > 1 and parts[-1] == "model" else parts
    return "/".join(parts[-depth:])


def check_choice(example: Example, names: Collection[str]) -> None:
    """Raise a UserError if a row names functions that are not there."""
    chosen = example.columns.get(CHOICE_COLUMN) or []
    names_it = isinstance(chosen, list) and all(isinstance(name, str) for name in chosen)
    if not isinstance(chosen, str) and not names_it:
        raise UserError(
            f"row {example.row + 1} of the prompts has {chosen!r} in its column {CHOICE_COLUMN!r}; "
            "it must be a name or a list of names."
        )
    for name in [chosen] if isinstance(chosen, str) else chosen:
        if name not in names:
            raise UserError(
                f"row {example.row + 1} of the prompts names {name!r} in its column "
                f"{CHOICE_COLUMN!r}, and --reward_funcs has: {', '.join(names)}."
            )
