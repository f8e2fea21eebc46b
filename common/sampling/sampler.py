"""Sampling: every prompt is computed once for all its samples, and the noise is reproducible.

The uniform numbers that decide a token are hashed from (seed, step, prompt, sample, position), so a
completion does not depend on the rank or batch that drew it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from common import distributed, noise
from common.config.stages import SamplingConfig
from common.data import row_numbers
from common.model import rollout_copy
from common.padding import right_pad
from common.sampling.decode import Report, Settings, decode
from common.sampling.graphs import MAX_KEPT_BYTES, StepGraphs
from common.text.example import Example, Vocabulary


@dataclass(frozen=True, eq=False)
class Rollouts:
    """Completions of N prompts, K each, prompt-major, on the host; B = N*K."""

    ids: Tensor  # (B, C) int64, padded on the right
    mask: Tensor  # (B, C) bool, True = a token, up to and including the first stop token
    token_logps: Tensor  # (B, C) float32, nats, at the sampling temperature; 0 at padding
    has_stop: Tensor  # (B,) bool, False = ended by the length limit

    @classmethod
    def of(
        cls,
        completion_ids: Sequence[Sequence[int]],
        token_logps: Sequence[Sequence[float]],
        has_stop: Sequence[bool],
        width: int = 0,
    ) -> "Rollouts":
        """Completions from lists, C at least `width`; 0 where no log-probabilities are given."""
        ids, mask = right_pad(completion_ids, 0, width)
        logps = torch.zeros(mask.shape)
        logps[mask] = torch.tensor([x for row in token_logps for x in row] or 0.0)
        return cls(ids, mask, logps, torch.tensor(has_stop, dtype=torch.bool))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four tensors, in the order of the fields."""
        return self.ids, self.mask, self.token_logps, self.has_stop

    def __getitem__(self, rows: Tensor) -> "Rollouts":
        """A copy of some of the completions (n,)."""
        return Rollouts(*(values[rows] for values in self.tensors))

    @property
    def lengths(self) -> Tensor:
        """(B,) int64, tokens of each completion."""
        return self.mask.sum(1)

    @cached_property
    def completion_ids(self) -> list[list[int]]:
        """(B, ragged) as lists."""
        return self.as_lists(self.ids)

    def as_lists(self, values: Tensor) -> list[list[Any]]:
        """Values (B, C) of the tokens as lists (B, ragged), without those of the padding."""
        return [row[:n] for row, n in zip(values.tolist(), self.lengths.tolist(), strict=True)]

    def completed(self, examples: Sequence[Example]) -> list[Example]:
        """The N prompts, each with its K completions."""
        k = len(self.ids) // max(1, len(examples))
        return [
            replace(example, completions=self.completion_ids[n * k : (n + 1) * k])
            for n, example in enumerate(examples)
        ]

    def numbered(self, num_prompts: int) -> Tensor:
        """(N, K) int64: a number for each completion, the same for the same tokens."""
        numbers: dict[tuple[int, ...], int] = {}
        numbered = [numbers.setdefault(tuple(ids), len(numbers)) for ids in self.completion_ids]
        return torch.tensor(numbered).view(num_prompts, -1)

    def texts(self, tokenizer: Any) -> list[str]:
        """The completions as text, without the stop token."""
        return [
            tokenizer.decode(ids[:-1] if stopped else ids)
            for ids, stopped in zip(self.completion_ids, self.has_stop.tolist(), strict=True)
        ]


def uniforms(seed: int, rows: Tensor, samples: range, max_length: int) -> Tensor:
    """Uniform numbers (N*K, C, 2) by which `decode` draws K samples of N prompts.

    Each is a hash of the seed, the prompt's row of the data set (N,), the number of the sample and
    the position of the token.
    """
    return noise.uniform(
        seed,
        rows.repeat_interleave(len(samples))[:, None, None],
        torch.tensor(samples).repeat(len(rows))[:, None, None],
        torch.arange(max_length)[:, None],
        torch.arange(2),  # the two numbers of `decode.draw_token`
    )


def decoded_at_once(num_samples: int, config: SamplingConfig) -> tuple[int, int]:
    """Number of prompts to decode together, and of samples of each.

    As many whole groups as `generation_batch_size` allows; of one that is too large, as many
    samples.
    """
    most = config.generation_batch_size
    return (most // num_samples, num_samples) if most >= num_samples else (1, most)


class Sampler:
    """Samples from a policy in training, through a plain copy that each `sample` fills anew."""

    def __init__(
        self,
        policy: nn.Module,
        vocabulary: Vocabulary,
        config: SamplingConfig,
        *,
        keeps_graphs: bool = False,  # a GPU's, with what they read, as where every step samples
    ) -> None:
        """Prepare the copy; `policy.lm` is the Hugging Face model."""
        self.keeps_graphs = keeps_graphs
        self.policy = policy
        self.vocabulary = vocabulary
        self.config = config
        self.copy = rollout_copy.RolloutCopy(policy.lm, config)
        has_graphs = config.cuda_graphs and distributed.device().type in StepGraphs.DEVICES
        self.graphs = StepGraphs() if has_graphs else None

    @torch.no_grad()
    def sample(
        self,
        examples: Sequence[Example],
        *,
        num_samples: int = 1,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        step: int = 0,
        report: Report = lambda num_completions: None,
    ) -> Rollouts:
        """K completions of each of this rank's N prompts. Collective at its start only.

        The noise depends on the prompts' row numbers and on the `step` of the run; for the other
        arguments see `Settings`.
        """
        settings = Settings(
            stop_ids=self.vocabulary.stop_ids,
            pad_id=self.vocabulary.pad_id,
            layout=self.config.layout,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            graphs=self.graphs,
        )
        seed = noise.derive_seed(self.config.seed, "sampling", step)
        return self.draw(examples, num_samples, settings, seed, report)

    def draw(
        self,
        examples: Sequence[Example],
        num_samples: int,
        settings: Settings,
        seed: int,
        report: Report,
    ) -> Rollouts:
        """`sample`, with the noise of a seed."""
        max_length = self.config.max_completion_length
        num_prompts, count = decoded_at_once(num_samples, self.config)
        batches = [Rollouts.of([], [], [], max_length).tensors]
        with self.copy.gathered(self.policy) as lm, rollout_copy.packed(lm):
            prompt_starts = range(0, len(examples), num_prompts)
            for start, first in product(prompt_starts, range(0, num_samples, count)):
                prompts = examples[start : start + num_prompts]
                samples = range(first, min(first + count, num_samples))
                drawn = decode(
                    lm,
                    [example.prompt_ids for example in prompts],
                    uniforms(seed, row_numbers(prompts), samples, max_length),
                    settings,
                    report,
                )
                batches.append(drawn)
            self.copy.is_kept = self.keep_or_free_graphs(lm)
        return Rollouts(*(torch.cat(tensors) for tensors in zip(*batches, strict=True)))

    def keep_or_free_graphs(self, lm: nn.Module) -> bool:
        """Free graphs and what they read unless they are kept, and say whether they are."""
        graphs = self.graphs
        if graphs is None:
            return False
        if graphs.captured and self.keeps_graphs and graphs.num_bytes(lm) <= MAX_KEPT_BYTES:
            return True
        graphs.forget()
        return False

    def sample_shared(
        self, examples: Sequence[Example], *, title: str, num_samples: int = 1, **settings: Any
    ) -> Rollouts:
        """K completions of every prompt, shared by the ranks; each gets all, in order. Collective.

        The settings are those of `sample`.
        """
        mine = range(distributed.rank(), len(examples), distributed.world_size())
        total = len(mine) * num_samples
        with distributed.progress_bar(title, total, unit="completion") as bar:
            local = self.sample(
                [examples[i] for i in mine],
                num_samples=num_samples,
                **settings,
                report=bar.update,
            )
        rows = [i * num_samples + k for i in mine for k in range(num_samples)]
        order = torch.tensor(distributed.from_all_ranks(rows)).argsort()
        of_ranks = zip(*distributed.from_all_ranks([local.tensors]), strict=True)  # by tensor
        return Rollouts(*map(torch.cat, of_ranks))[order]

    def table(
        self,
        examples: Sequence[Example],
        rollouts: Rollouts | None = None,
        **columns: Sequence[Any],
    ) -> list[dict[str, Any]]:
        """A table of K completions of each of N prompts. Collective without rollouts.

        Without them every prompt is completed with its most likely tokens. A row has the prompt,
        the completion, the further columns' value for it, and why it stopped.
        """
        if rollouts is None:
            if not examples:
                return []  # and no weights are gathered
            rollouts = self.sample(examples, temperature=0)
        texts = rollouts.texts(self.vocabulary.tokenizer)
        per_prompt = len(texts) // max(1, len(examples))
        return [
            {
                "prompt": examples[i // per_prompt].prompt,
                "completion": text,
                **{name: values[i] for name, values in columns.items()},
                "stopped by": "stop token" if rollouts.has_stop[i] else "length limit",
            }
            for i, text in enumerate(texts)
        ]
