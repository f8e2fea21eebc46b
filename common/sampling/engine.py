"""Sampling through vLLM, to which a policy's weights are sent before it samples.

Prompts and completions go there and back as token ids. Each completion has a seed of its own, a
function of (seed, step, prompt, sample): the same engine draws it again, up to the rounding of
products in batches that depend on when requests arrive.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common import distributed, noise
from common.data import Example, row_numbers
from common.errors import EngineError
from common.sampling.decode import Settings
from common.sampling.engine_config import EngineConfig
from common.sampling.sampler import Rollouts, Sampler
from common.sampling.server import OwnServer, Server
from common.sampling.weights import Weights, sender

SEEDS = 2**62 - 1  # a mask: vLLM adds the number of the sample


def new_sampler(
    policy: nn.Module, tokenizer: Any, stop_ids: Sequence[int], config: EngineConfig
) -> Sampler:
    """The sampler that `--rollout_engine` names. Collective."""
    kind = Sampler if config.rollout_engine == "own" else EngineSampler
    return kind(policy, tokenizer, stop_ids, config)


class EngineSampler(Sampler):
    """Samples from a policy through a vLLM server.

    Own servers sleep while the policy trains: on a GPU without weights and cache. The weights of a
    policy that does not train are sent once.
    """

    config: EngineConfig

    def __init__(
        self, policy: nn.Module, tokenizer: Any, stop_ids: Sequence[int], config: EngineConfig
    ) -> None:
        """Find or start the server; `policy.lm` is the Hugging Face model. Collective.

        Raises:
            EngineError: vLLM is missing or too old, or the server is not there, or of another kind.
        """
        self.policy = policy
        self.tokenizer = tokenizer
        self.stop_ids = list(stop_ids)
        self.config = config
        self.trains = any(p.requires_grad for p in policy.parameters())
        self.was_sent = False
        self.weights = Weights(policy, torch.bfloat16 if config.bf16 else torch.float32)
        self.server, self.leads = connect(policy, config)
        with together():
            self.server.check(config)
            self.send = sender(self.server, self.weights, config, leads=self.leads)
            self.manage("/sleep?level=2")

    @torch.no_grad()
    def draw(
        self,
        examples: Sequence[Example],
        num_samples: int,
        settings: Settings,
        seed: int,
        report: Callable[[str], object],
    ) -> Rollouts:
        """What `sample` returns. Collective at its start and its end.

        Raises:
            EngineError: the server is gone, or answers what are no completions; on every rank.
        """
        if self.trains or not self.was_sent:
            torch.cuda.empty_cache()  # for the servers, also those that other ranks lead
            distributed.barrier()
            with together():
                self.manage("/wake_up?tags=weights")
            with together():
                self.update_weights()
        with together():
            found = self.answers(examples, num_samples, settings, seed, report)
        if self.trains:
            with together():
                self.manage("/sleep?level=2")
        ids, logps = map(list, zip(*found, strict=True)) if found else ([], [])
        stops = [own[-1] in self.stop_ids for own in ids]
        # One more, which only sets the width: (B, C) for every rank and step.
        blank = Rollouts.blank(1, self.config.max_completion_length).ids.tolist()
        drawn = Rollouts.of(ids + blank, logps + blank, [*stops, False])
        return drawn[torch.arange(len(ids))]

    def update_weights(self) -> None:
        """Give the server the policy's weights. Collective."""
        self.weights.start()
        try:
            self.send()
        finally:
            self.weights.finish()
        self.manage("/wake_up?tags=kv_cache")
        if self.leads and self.server.call("/reset_prefix_cache") != {"success": True}:
            raise self.server.error("does not forget what it computed with other weights")
        self.was_sent = True

    def manage(self, call: str) -> None:
        """Tell an own server what to do with the memory of a GPU."""
        if self.leads and not self.config.rollout_server:
            self.server.call(call)

    def answers(
        self,
        examples: Sequence[Example],
        num_samples: int,
        settings: Settings,
        seed: int,
        report: Callable[[str], object],
    ) -> list[tuple[list[int], list[float]]]:
        """Ids and log-probabilities of B completions, prompt-major."""
        number = num_samples if settings.temperature > 0 else 1  # else all of a prompt are the same
        at_once = self.config.generation_batch_size
        most = min(number, at_once, self.server.most_at_once)  # completions in one answer
        seeds = noise.hash_counters(seed, row_numbers(examples)).bitwise_and(SEEDS).tolist()  # (N,)
        wishes = {
            "temperature": settings.temperature,
            "top_k": settings.top_k,
            "top_p": settings.top_p,
            "max_tokens": self.config.max_completion_length,
            "stop_token_ids": self.stop_ids,
            "ignore_eos": True,
            "logprobs": 0,  # of no tokens but those that are drawn
            "detokenize": False,
        }

        def ask(request: tuple[int, int]) -> list[tuple[list[int], list[float]]]:
            n, first = request
            count = min(most, number - first)
            wish = wishes | {"n": count, "seed": seeds[n] + first}
            asked = {"token_ids": examples[n].prompt_ids, "sampling_params": wish}
            return self.completions(self.server.call("/inference/v1/generate", asked), count)

        requests: list[tuple[int, int]] = list(
            product(range(len(examples)), range(0, number, most))
        )
        found: list[tuple[list[int], list[float]]] = []
        pool = ThreadPoolExecutor(max(1, at_once // most))
        try:
            for done, completions in enumerate(pool.map(ask, requests), start=1):
                found += completions * (num_samples // number)
                report(f"{done} of {len(requests)} requests to vLLM")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return found

    def completions(self, answer: Any, number: int) -> list[tuple[list[int], list[float]]]:
        """The completions in an answer; an EngineError if there are not so many, or others."""
        try:
            found = [
                (choice["token_ids"], [token["logprob"] for token in choice["logprobs"]["content"]])
                for choice in sorted(answer["choices"], key=lambda choice: choice["index"])
            ]
            faults = [self.fault(ids, logps) for ids, logps in found]
        except (KeyError, TypeError):
            raise self.server.error("answers a prompt with what are no completions") from None
        if len(found) != number:
            raise self.server.error(f"answers with {len(found)} completions, not {number}")
        for fault in filter(None, faults):
            raise self.server.error(f"answers with a completion {fault}")
        return found

    def fault(self, ids: list[int], logps: list[float]) -> str:
        """Why this is no completion; empty if it is one."""
        longest, vocabulary = self.config.max_completion_length, self.weights.vocabulary
        if not 0 < len(ids) <= longest or len(logps) != len(ids):
            return f"of {len(ids)} tokens and {len(logps)} log-probabilities"
        if not all(0 <= token < vocabulary for token in ids):
            return f"with tokens beyond the vocabulary of {vocabulary}"
        if not all(math.isfinite(logp) and logp < 1e-3 for logp in logps):
            return "with log-probabilities that are none"
        is_stop = [token in self.stop_ids for token in ids]
        if any(is_stop[:-1]) or not (is_stop[-1] or len(ids) == longest):
            return "that does not end with its first stop token, nor by its length"
        return ""

    def close(self) -> None:
        """End an own server."""
        self.server.close()


@contextmanager
def together() -> Iterator[None]:
    """An EngineError of one rank inside is raised on every one, the first's. Collective."""
    told = ""
    try:
        yield
    except EngineError as error:
        told = str(error)
    for sentence in filter(None, distributed.from_all_ranks([told])):
        raise EngineError(sentence)


def connect(policy: Any, config: EngineConfig) -> tuple[Server, bool]:
    """The server of this rank, and whether the rank sends it the weights. Collective."""
    rank, size = distributed.rank(), config.rollout_tensor_parallel
    if config.rollout_server:
        return Server(config.rollout_server, config.ddp_timeout), rank == 0
    distributed.refuse_uneven_host("rollout_tensor_parallel", size)
    first = rank - rank % size
    own = tempfile.mkdtemp(prefix="vllm-") if rank == first else ""
    folder = Path(distributed.from_all_ranks([own])[first])
    server = Server(str(folder / "socket"), config.ddp_timeout)
    with together():
        if rank == first:
            server = OwnServer(policy.lm, config, folder)
    return server, rank == first
