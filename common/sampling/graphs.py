"""Decoding steps as CUDA graphs, which live as long as the sampler that replays them."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import UserError, gist

MAX_GRAPHS = 64  # with one more the oldest is dropped
MAX_KEPT_BYTES = 2**32  # of weights and buffers, between rollouts; where they take more, none
PROMPT_STEP = 64  # prompts are padded to a multiple of it, so that few shapes are captured


class StepGraphs:
    """Captured decoding steps by shape, and the memory they read.

    Launching the hundreds of small kernels of a step one by one takes most of it; a graph launches
    them at once. The first step of a shape runs as it is, and libraries choose their kernels in it;
    the second is captured. Later batches and rollouts replay it.
    """

    DEVICES = ("cuda",)

    def __init__(self) -> None:
        """Nothing is captured yet."""
        self.forget()

    def forget(self) -> None:
        """Free the graphs and the memory they read."""
        self.memory: dict[Hashable, Tensor] = {}
        self.warm: set[tuple[int, ...]] = set()
        self._drop()

    def _drop(self) -> None:
        """Drop the graphs."""
        self.captured: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.pool: Any = None  # of the memory that graphs compute in, shared by all

    def num_bytes(self, lm: nn.Module) -> int:
        """Bytes of what the graphs read, the model's weights among it, and of their logits."""
        logits = (logits for _, logits in self.captured.values())
        return sum(x.nbytes for x in (*self.memory.values(), *logits, *lm.parameters()))

    def hold(self, name: Hashable, values: Tensor) -> Tensor:
        """Copy values to the memory of this name: at the same address in every rollout.

        Tensors of all shapes share it. Where it has to grow, all graphs are dropped.
        """
        size = values.numel()
        if name in self.memory and len(self.memory[name]) < size:
            self._drop()
            del self.memory[name]
        if name not in self.memory:
            self.memory[name] = values.new_empty(size)
        return self.memory[name][:size].view(values.shape).copy_(values)

    def step(
        self, shape: tuple[int, ...], forward: Callable[[Tensor], Tensor], tokens: Tensor
    ) -> Tensor:
        """Logits (B', V) of `forward`, valid until the next call; it must not wait for the device.

        All that it reads and changes, but for the model's weights, is from `hold`. A UserError if
        the model cannot be captured.
        """
        if shape not in self.warm:
            self.warm.add(shape)
            return forward(tokens)
        tokens = self.hold(("tokens", len(tokens)), tokens)
        if shape not in self.captured:
            if len(self.captured) == MAX_GRAPHS:
                del self.captured[next(iter(self.captured))]
            self.captured[shape] = self._capture(forward, tokens)
        graph, logits = self.captured[shape]
        graph.replay()
        return logits

    def _capture(
        self, forward: Callable[[Tensor], Tensor], tokens: Tensor
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """A graph of `forward`, and the logits that it will write."""
        graph, self.pool = torch.cuda.CUDAGraph(), self.pool or torch.cuda.graph_pool_handle()
        try:
            # Other threads may use the device meanwhile, as one that writes a checkpoint does.
            with torch.cuda.graph(graph, self.pool, capture_error_mode="thread_local"):
                logits = forward(tokens)
        except RuntimeError as error:
            raise UserError(
                "the model's forward pass cannot be captured as a CUDA graph; use "
                f"--cuda_graphs false ({gist(error)})."
            ) from error
        return graph, logits


def has_fixed_shapes(device: torch.device) -> bool:
    """Whether every decoding step reads the same number of keys, as a graph must."""
    return device.type != "cpu"


def padded_length(longest: int, device: torch.device) -> int:
    """Columns of prompts of up to `longest` tokens: with fixed shapes in steps."""
    return -(-longest // PROMPT_STEP) * PROMPT_STEP if has_fixed_shapes(device) else longest
