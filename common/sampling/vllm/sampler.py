"""Sampling through a vLLM server, to which a policy's weights are sent before it samples.

Prompts and completions are sent as token ids. Each completion has a separate seed, a function of
(seed, step, prompt, sample): the same engine draws it again, up to the rounding of products in
batches that depend on when requests arrive.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import torch
from torch import nn

from common import distributed, noise
from common.config.engine import EngineConfig
from common.data import Example, row_numbers
from common.sampling.sampler import Rollouts, Sampler
from common.sampling.vllm.server import Server
from common.sampling.vllm.weights import Weights, sender
from common.text.example import Vocabulary

SEEDS = 2**62 - 1  # a mask: vLLM adds the number of the sample
Completion = tuple[list[int], list[float]]  # token ids, and their log-probabilities in nats


class EngineSampler(Sampler):
    """Samples from a policy through a vLLM server.

    The weights of a policy that does not train are sent once.
    """

    def __init__(self, policy: nn.Module, vocabulary: Vocabulary, config: EngineConfig) -> None:
        """Find the server; `policy.lm` is the Hugging Face model. Collective.

        Raises:
            EngineError: the server is not there, or was started with other settings.
        """
        self.policy = policy
        self.vocabulary = vocabulary
        self.config = config
        self.trains = any(p.requires_grad for p in policy.parameters())
        self.was_sent = False
        self.weights = Weights(policy, torch.bfloat16 if config.bf16 else torch.float32)
        self.server = Server(config.rollout_server, config.ddp_timeout)
        with distributed.together():
            self.server.check(config)
            if distributed.is_rank0():
                self.send = sender(self.server, self.weights)

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
        report: Callable[[int], object] = lambda num_prompts: None,
    ) -> Rollouts:
        """As `Sampler.sample`. Collective at its start and its end.

        Raises:
            EngineError: the server is gone; on every rank.
        """
        if self.trains or not self.was_sent:
            with distributed.together():
                self.update_weights()
        with distributed.together():
            settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
            seed = noise.derive_seed(self.config.seed, "sampling", step)
            drawn = self.request_completions(examples, num_samples, settings, seed, report)
        ids, logps = [ids for ids, _ in drawn], [logps for _, logps in drawn]
        stops = [completion[-1] in self.vocabulary.stop_ids for completion in ids]
        return Rollouts.of(ids, logps, stops, self.config.max_completion_length)

    def update_weights(self) -> None:
        """Give the server the policy's weights. Collective."""
        self.weights.start()
        try:
            if distributed.is_rank0():
                self.send()
        finally:
            self.weights.finish()
        if distributed.is_rank0() and self.server.call("/reset_prefix_cache") != {"success": True}:
            raise self.server.error("does not forget what it computed with other weights")
        self.was_sent = True

    def request_completions(
        self,
        examples: Sequence[Example],
        num_samples: int,
        settings: Mapping[str, float],  # temperature, top_k, top_p
        seed: int,
        report: Callable[[int], object],
    ) -> list[Completion]:
        """B completions, prompt-major: requests for some samples of a prompt, several at a time."""
        # At temperature 0 all samples of a prompt are the same: one is asked for, and repeated.
        num_distinct = num_samples if settings["temperature"] > 0 else 1
        at_once = self.config.generation_batch_size  # completions
        per_request = min(num_distinct, at_once)
        seeds = noise.hash_counters(seed, row_numbers(examples)).bitwise_and(SEEDS).tolist()  # (N,)
        params = {
            **settings,
            "max_tokens": self.config.max_completion_length,
            "stop_token_ids": list(self.vocabulary.stop_ids),
            "ignore_eos": True,
            "logprobs": 0,  # of no tokens but those that are drawn
            "detokenize": False,
        }

        def ask(request: tuple[int, int]) -> list[Completion]:
            n, first = request  # the prompt, and the number of the first sample
            count = min(per_request, num_distinct - first)
            body = {
                "token_ids": examples[n].prompt_ids,
                "sampling_params": params | {"n": count, "seed": seeds[n] + first},
            }
            answer = self.server.call("/inference/v1/generate", body)
            return [
                (choice["token_ids"], [token["logprob"] for token in choice["logprobs"]["content"]])
                for choice in sorted(answer["choices"], key=lambda choice: choice["index"])
            ]

        requests = list(product(range(len(examples)), range(0, num_distinct, per_request)))
        drawn: list[Completion] = []
        pool = ThreadPoolExecutor(at_once // per_request)
        try:
            for (_, first), completions in zip(requests, pool.map(ask, requests), strict=True):
                drawn += completions * (num_samples // num_distinct)
                report(int(first == 0))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return drawn
