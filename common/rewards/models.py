"""A reward model of any vocabulary as a reward function."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common import data, distributed, self_checks
from common.config.stages import CommonConfig
from common.data import PromptGroup
from common.errors import UserError, naming
from common.forward import RewardModel
from common.model import checks, fsdp, load
from common.text import differences
from common.text.chat import ANSWER, TEMPLATE_COLUMNS, TurnEnd, as_raw, one_of_each_form, render
from common.text.example import Example
from common.text.schemas import Row
from common.text.tokenise import encode, leading_ids, without_leading


class RewardModelFunction:
    """A reward model as a reward function. Collective.

    A prompt is computed once for all neighbouring completions of it.
    """

    is_collective = True

    def __init__(self, path: str, policy_tokenizer: Any, config: CommonConfig) -> None:
        """Check the folder; a UserError if it holds no reward model."""
        self.path, self.config = path, config
        self.model: nn.Module | None = None  # once it is loaded
        # Ahead of the tokenizer: that of an encoder may have no eos
        checks.check_kind(path, load.find_config(path, policy_tokenizer, config), "reward_model")
        self.tokenizer = load.load_tokenizer(path, config)
        load.add_own_pad_token(self.tokenizer)
        self.model_config = load.read_model_config(path, "reward_model", self.tokenizer, config)
        self.limit = checks.max_positions(self.model_config)  # None: no longest text
        self.policy_tokenizer = policy_tokenizer
        both = policy_tokenizer, self.tokenizer
        has_all = policy_tokenizer.get_vocab().keys() <= self.tokenizer.get_vocab().keys()
        of_text = (differences.of_tables, differences.of_words, differences.of_texts)
        is_same = has_all and not any(of(*both) for of in of_text)
        # Whether the policy's ids are read as they are: of a text, of a conversation
        self.same_ids = is_same and not differences.of_leading(*both)
        template = self.tokenizer.chat_template
        has_template = template in (None, policy_tokenizer.chat_template)
        self.same_chats = is_same and has_template and not differences.of_marks(*both)

    def check_conversations(self, examples: Iterable[Example]) -> None:
        """Raise a UserError for conversations that this model cannot read.

        Its chat template may refuse them, or they are too long with an answer and its end.
        """
        if self.same_chats:
            self._check_positions([example for example in examples if example.messages])
            return
        for example in one_of_each_form(examples):
            where = f"row {example.row + 1}, by the tokenizer of the reward model {self.path!r}"
            with naming("", where, is_ours=True):
                render(as_raw(example, completion=[ANSWER]), "sft", self.tokenizer)

    def _check_positions(self, chats: Sequence[Example]) -> None:
        """Raise a UserError if a conversation may be longer than the model's positions.

        Its answers, or else sampled ones of as many tokens as are allowed, are read to the end of
        the turn.
        """
        if not chats or self.limit is None:
            return
        end = TurnEnd(chats[0].messages, self.policy_tokenizer)
        sampled = self.config.most_sampled_tokens + len(end.ids)  # it may break off

        def length(chat: Example) -> int:
            # Whether the last token stops is not known here: the shorter reading counts
            ends = [
                [len(end.closed(ids, has_stop=x)) for x in (True, False)]
                for ids in chat.completions
            ]
            return len(chat.prompt_ids) + max(map(min, ends), default=sampled)

        longest = max(chats, key=length)
        if length(longest) > self.limit:
            raise UserError(
                f"row {longest.row + 1} is up to {length(longest)} tokens with an answer and the "
                f"end of its turn, and the reward model {self.path!r} has {self.limit} positions; "
                "lower --max_prompt_length or --max_completion_length."
            )

    def load(self, mesh: DeviceMesh) -> None:
        """Load the frozen, sharded model. Collective."""
        lm = load.load_reward_model(self.path, self.model_config, self.tokenizer, self.config)
        frozen = RewardModel(lm).requires_grad_(False)
        self.model = fsdp.shard(frozen, self.config, mesh, float32_modules=[lm.score])
        self_checks.only_tokens_matter(self.model, self.config)

    @torch.no_grad()
    def __call__(
        self,
        prompts: Sequence[Any],  # B texts, or lists of messages
        completions: Sequence[Any],  # B texts, or lists of one message
        completion_ids: Sequence[Sequence[int]],  # by the policy's tokenizer
        *,
        prompt_ids: Sequence[Sequence[int]],
        has_stop: Sequence[bool],  # whether a completion ends with a stop token of the policy
        **columns: Any,  # of the rows; those for the chat template are read
    ) -> list[float]:
        """Rewards of B completions, in their order.

        The policy's ids are scored if this model's tokenizer makes the same ones of a text, or of a
        conversation, which takes the same chat template. Otherwise prompts and completions are
        tokenised again. Behind an answer in messages the turn is ended as the template ends it, and
        the reward is read there.
        """
        chat = next((prompt for prompt in prompts if not isinstance(prompt, str)), None)
        if all(self.reads_ids(is_chat=not isinstance(prompt, str)) for prompt in prompts):
            ids = [list(row) for row in completion_ids]
            if chat is not None:
                end = TurnEnd(chat, self.policy_tokenizer)
                rows = zip(prompts, ids, has_stop, strict=True)
                ids = [r if isinstance(p, str) else end.closed(r, stop) for p, r, stop in rows]
        else:
            prompt_ids, ids = self.retokenised(prompts, completions, has_stop, **columns)
        groups: list[PromptGroup] = []
        for prompt, group in groupby(range(len(ids)), key=lambda i: prompt_ids[i]):
            slots = list(group)  # neighbours with the same prompt
            groups += data.cut_group(prompt, [ids[i] for i in slots], slots, self.config)
        return self.rewards(groups)

    def rewards(self, groups: Sequence[PromptGroup]) -> list[float]:
        """Rewards of B completions by their slots; the first one's for all that are equal.

        The rounding of a score depends on the other rows of its batch. Equal completions must not
        differ by it: GRPO would divide the difference by itself and train on it. A UserError if a
        text is longer than the model's positions.
        """
        assert self.model is not None, "load() comes first"
        texts = {
            slot: (*group.prompt_ids, -1, *ids)
            for group in groups
            for slot, ids in zip(group.slots, group.completions, strict=True)
        }
        longest = max(map(len, texts.values()), default=1) - 1
        with distributed.together():  # before the forward pass, which takes all ranks
            if self.limit is not None and longest > self.limit:
                raise UserError(
                    f"a prompt with its completion is {longest} tokens of the reward model "
                    f"{self.path!r}, which has {self.limit} positions; lower --max_prompt_length."
                )
        rewards, device = torch.zeros(len(texts)), distributed.device()
        pad_id = self.tokenizer.pad_token_id or 0
        packed = data.pack_micro_batches(groups, self.config)
        batches = [data.collate(batch, self.config, pad_id) for batch in packed]
        values = torch.cat([self.model(batch.to(device)) for batch in batches]).cpu()
        real = torch.cat([batch.is_real for batch in batches])
        rewards[torch.cat([batch.slots for batch in batches])[real]] = values[real]
        first: dict[tuple[int, ...], float] = {}
        return [first.setdefault(texts[i], reward) for i, reward in enumerate(rewards.tolist())]

    def reads_ids(self, *, is_chat: bool) -> bool:
        """Whether the policy's ids of a conversation, or of a text, are read as they are."""
        return self.same_chats if is_chat else self.same_ids

    def retokenised(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        has_stop: Sequence[bool],
        **columns: Any,
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Token ids of prompts and completions, texts or messages, by this model's tokenizer.

        A text that stopped ends with this model's eos.
        """
        leading, eos = leading_ids(self.tokenizer), [self.tokenizer.eos_token_id]
        texts = {"prompt": prompts, "completion": completions}
        texts |= {name: columns[name] for name in TEMPLATE_COLUMNS if name in columns}
        rows: list[Row] = []
        for cells in zip(*texts.values(), strict=True):
            raw = dict(zip(texts, cells, strict=True))
            is_text = isinstance(raw["prompt"], str)
            rows += [Row.of_text(raw, "sft")] if is_text else render(raw, "sft", self.tokenizer)
        prompt_ids = encode([row.prompt for row in rows], self.tokenizer)
        ids = encode([row.completions[0] for row in rows], self.tokenizer)
        for i, prompt in enumerate(prompts):
            if isinstance(prompt, str):  # the template has messages begin and end as it writes
                prompt_ids[i] = leading + without_leading(prompt_ids[i], leading)
                ids[i] += eos * has_stop[i]
        return prompt_ids, ids
