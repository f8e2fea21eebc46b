"""What this project adds to vLLM's workers: weights that come in the bodies of requests.

vLLM's own transports of weights need GPUs. A worker gets the class by the flag
`--worker-extension-cls`, and imports this file alone of the project.
"""

import base64
from collections.abc import Sequence
from typing import Any

import torch

PackedWeight = dict[str, Any]  # name, dtype, shape and data of a parameter


def packed(name: str, weight: torch.Tensor) -> PackedWeight:
    """A whole parameter, as JSON may hold it."""
    weight = weight.detach().cpu().contiguous()
    data = base64.b64encode(weight.view(-1).view(torch.uint8).numpy().tobytes()).decode()
    dtype = str(weight.dtype).removeprefix("torch.")
    return {"name": name, "dtype": dtype, "shape": list(weight.shape), "data": data}


def unpacked(weight: PackedWeight) -> tuple[str, torch.Tensor]:
    """Name and value of what `packed` has packed."""
    data = bytearray(base64.b64decode(weight["data"]))
    values = torch.frombuffer(data, dtype=getattr(torch, weight["dtype"]))
    return weight["name"], values.view(weight["shape"])


class WeightsInRequests:
    """Methods that a server calls by name, between `start_` and `finish_weight_update`."""

    weight_transfer_engine: Any  # vLLM's: of any kind, since only its model is asked for

    def load_packed(self, weights: Sequence[PackedWeight]) -> None:
        """Load some parameters; those of a layer count once all of them are there."""
        self.weight_transfer_engine.model.load_weights(map(unpacked, weights))

    def pack_heads(self) -> None:
        """Have a CPU compute with the new weights of a head that is tied to the embedding.

        vLLM (0.30) packs the head anew only where the head itself was loaded.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in self.weight_transfer_engine.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
