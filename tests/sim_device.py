"""A device that is not the CPU, in Python alone: for what only a GPU would show, without one.

A `SimTensor` holds its data on the CPU and reports `sim:0`. It refuses to meet the CPU's tensors
where CUDA would, and what would make a GPU's host wait is counted with the line that asks for it.
Numbers are those of the CPU. Processes are one: nothing is sharded.
"""

import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from ranks import run_stages
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from common import distributed

ROOT = Path(__file__).resolve().parents[1]
INDEXING = {"index", "index_put", "index_put_", "_unsafe_index"}
MOVES = {"_to_copy", "copy_"}
# The host needs the values, or a result's size.
WAITS = {"_local_scalar_dense", "_unique2", "equal", "masked_select", "nonzero", "unique_dim"}

waits: "Counter[str]" = Counter()  # by the line that asks for them


class SimTensor(Tensor):
    """CPU data that says it is elsewhere."""

    data_here: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> "SimTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=torch.device("sim", 0),
        )
        made.data_here = data
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        with Operators():
            return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Runs operators on the data, where a GPU would run them on its own."""

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), function.overloadpacket.__name__
        there: list[SimTensor] = []
        here: list[Tensor] = []

        def look(value: Any) -> None:
            if isinstance(value, SimTensor):
                there.append(value)
            elif isinstance(value, Tensor) and value.device.type == "cpu":
                here.append(value)

        tree_map(look, (args, kwargs))
        goal = torch.device(kwargs["device"]).type if kwargs.get("device") else None
        if not there and goal != "sim":
            return function(*args, **kwargs)
        if goal:
            kwargs["device"] = "cpu"
        if there and here and name not in MOVES:
            refuse_to_meet(name, args, here)
        crosses = (bool(there) and goal == "cpu") or (bool(here) and (goal == "sim" or bool(there)))
        if host_waits(name, args, kwargs, crosses=crosses):
            waits[line_of_ours()] += 1
        found = function(*tree_map(data_of, args), **tree_map(data_of, kwargs))
        if name == "_to_copy" and goal == "cpu":
            return found
        known = {id(tensor.data_here): tensor for tensor in there} | {id(t): t for t in here}
        return tree_map(lambda value: moved(value, known), found)


class Functions(TorchFunctionMode):
    """What reaches no operator: a tensor made of numbers, and numbers of a tensor."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.tensor, torch.as_tensor) and kwargs.get("device"):
            device = kwargs.pop("device")
            return function(*args, **kwargs).to(device)
        if function is Tensor.pin_memory:
            return args[0]
        if function is Tensor.tolist and isinstance(args[0], SimTensor):
            waits[line_of_ours()] += 1
            return args[0].data_here.tolist()
        if function is Tensor.numpy and isinstance(args[0], SimTensor):
            raise TypeError(f"a tensor of the device as an array, at {line_of_ours()}")
        return function(*args, **kwargs)


def data_of(value: Any) -> Any:
    """The data of a tensor there, anything else as it is."""
    return value.data_here if isinstance(value, SimTensor) else value


def moved(value: Any, known: dict[int, Tensor]) -> Any:
    """A result as a tensor there: what was changed in place is the argument itself."""
    if not isinstance(value, Tensor) or isinstance(value, SimTensor):
        return value
    return known[id(value)] if id(value) in known else SimTensor(value)


def host_waits(name: str, args: Any, kwargs: Any, *, crosses: bool) -> bool:
    """Whether an operator makes the host wait; a copy that `crosses` does unless told not to."""
    sized = name == "repeat_interleave" and kwargs.get("output_size") is None
    chosen = name in INDEXING and any(
        isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
    )
    copied = name in MOVES and crosses and not kwargs.get("non_blocking")
    return name in WAITS or sized or chosen or copied


def refuse_to_meet(name: str, args: Any, here: Sequence[Tensor]) -> None:
    """Raise where CUDA would: a number may come from the host, and what a tensor is indexed by."""
    indexed = name in INDEXING and isinstance(args[0], SimTensor)
    if not indexed and any(tensor.dim() for tensor in here):
        shapes = [tuple(tensor.shape) for tensor in here]
        raise RuntimeError(f"{name} of both devices, {shapes} of the host, at {line_of_ours()}")


def line_of_ours() -> str:
    """The file and the code of the innermost line of a script or of `common`."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and not {"tests", ".venv"} & {*path.relative_to(ROOT).parts}:
            return f"{path.relative_to(ROOT)}: {frame.line}"
    return "elsewhere"


def run_simulated(jobs: Sequence[dict[str, Any]]) -> list[dict[str, int]]:
    """`run_stages` there; returns each job's waits by line."""

    class Backend(backend_registration._DummyBackendModule):
        def get_rng_state(self, _: Any = None) -> Tensor:
            return torch.get_rng_state()

        def set_rng_state(self, state: Tensor, _: Any = None) -> None:
            torch.set_rng_state(state)

    backend_registration._setup_privateuseone_for_python_backend("sim", Backend())
    torch.__future__.set_swap_module_params_on_conversion(True)  # tied parameters stay tied
    found, device = [], torch.device("sim", 0)
    for job in jobs:
        waits.clear()
        with (
            mock.patch.object(distributed, "device", return_value=device),
            torch.autograd.set_multithreading_enabled(False),  # backward is seen by the modes
            Functions(),
            Operators(),
        ):
            run_stages([job])
        found.append(dict(waits))
    return found
