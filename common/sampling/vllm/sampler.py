"""Sampling through a vLLM server, to which a policy's weights are sent before it samples.

Prompts and completions are sent as token ids. Each completion has a separate seed, a function of
(seed, step, prompt, sample): the same engine draws it again, up to the rounding of products in
batches that depend on when requests arrive.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import torch
from torch import nn

from common import distributed, noise
from common.config.engine import EngineConfig
from common.data import row_numbers
from common.sampling.decode import Report, Settings
from common.sampling.sampler import Rollouts, Sampler
from common.sampling.vllm.server import Server
from common.sampling.vllm.weights import Weights, sender
from common.text.example import Example, Vocabulary

MOST_LOGP = 1e-3  # nats, above 0 for rounding
SEEDS = 2**62 - 1  # a mask: vLLM adds the number of the sample


class EngineSampler(Sampler):
    """Samples from a policy through a vLLM server.

    The weights of a policy that does not train are sent once.
    """

    graphs = None

    def __init__(self, policy: nn.Module, vocabulary: Vocabulary, config: EngineConfig) -> None:
        """Find the server; `policy.lm` is the Hugging Face model. Collective.

        An EngineError if it is not there, or was started with other settings.
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

    def draw(
        self,
        examples: Sequence[Example],
        num_samples: int,
        settings: Settings,
        seed: int,
        report: Report,
    ) -> Rollouts:
        """Requests for some samples of a prompt, several at a time. Collective at start and end.

        An EngineError on every rank if the server is gone, or its answers are no completions.
        """
        # At temperature 0 all samples of a prompt are the same: one is asked for, and repeated.
        num_distinct = num_samples if settings.temperature > 0 else 1
        at_once = self.config.generation_batch_size  # completions
        per_request = min(num_distinct, at_once)
        seeds = noise.hash_counters(seed, row_numbers(examples)).bitwise_and(SEEDS).tolist()  # (N,)
        params = {
            "temperature": settings.temperature,
            "top_k": settings.top_k,
            "top_p": settings.top_p,
            "max_tokens": self.config.max_completion_length,
            "stop_token_ids": list(self.vocabulary.stop_ids),
            "ignore_eos": True,
            "logprobs": 0,  # of no tokens but those that are drawn
            "detokenize": False,
        }

        def ask(request: tuple[int, int]) -> Any:
            n, first = request  # the prompt, and the number of the first sample
            of_request = {"n": min(per_request, num_distinct - first), "seed": seeds[n] + first}
            body = {"token_ids": examples[n].prompt_ids, "sampling_params": params | of_request}
            choices = self.server.call("/inference/v1/generate", body)["choices"]
            if len(choices) != of_request["n"]:
                number = f"{len(choices)} completions, not {of_request['n']}"
                raise self.server.error(f"answers a prompt with {number}")
            return sorted(choices, key=lambda choice: choice["index"])

        requests = list(product(range(len(examples)), range(0, num_distinct, per_request)))
        drawn: list[dict[str, Any]] = []
        pool = ThreadPoolExecutor(at_once // per_request)
        with distributed.together():
            self.update_weights()
        try:
            with distributed.together():
                for choices in pool.map(ask, requests):
                    drawn += choices * (num_samples // num_distinct)
                    report(len(choices) * (num_samples // num_distinct))
                ids = [choice["token_ids"] for choice in drawn]
                logps = [[one["logprob"] for one in c["logprobs"]["content"]] for c in drawn]
                stops = [completion[-1] in self.vocabulary.stop_ids for completion in ids]
                for completion, of_tokens in zip(ids, logps, strict=True):
                    if fault := self.fault(completion, of_tokens):
                        raise self.server.error(f"answers with a completion {fault}")
        except (LookupError, TypeError) as error:
            raise self.server.error(f"answers with what is no completion: {error!r}") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return Rollouts.of(ids, logps, stops, self.config.max_completion_length)

    def fault(self, ids: Sequence[int], logps: Sequence[float]) -> str:
        """Why this is no completion of at most the wished length; empty if it is one."""
        longest = self.config.max_completion_length
        if len(ids) > longest or len(logps) != len(ids):
            return f"of {len(ids)} tokens and {len(logps)} log-probabilities"
        if not all(math.isfinite(logp) and logp < MOST_LOGP for logp in logps):
            return "with log-probabilities that are none"
        is_stop = [token in self.vocabulary.stop_ids for token in ids]
        if any(is_stop[:-1]) or not (is_stop[-1] or len(ids) == longest):
            return "that does not end with its first stop token, nor by its length"
        return ""

    def update_weights(self) -> None:
        """Give the server the policy's weights, unless it has them. Collective."""
        if self.was_sent and not self.trains:
            return
        self.weights.start()
        try:
            if distributed.is_rank0():
                self.send()
        finally:
            self.weights.finish()
        if distributed.is_rank0() and self.server.call("/reset_prefix_cache") != {"success": True}:
            raise self.server.error("does not forget what it computed with other weights")
        self.was_sent = True
