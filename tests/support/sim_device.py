"""A device that is not the CPU, in Python alone: for what only a GPU would show, without one.

A `SimTensor` holds its data on the CPU and reports `sim:0`. It refuses to meet the CPU's tensors
where CUDA would. Counted are what would make a GPU's host wait, by the line that asks for it, and
what would launch a kernel, by operator; separately for each phase: a micro-batch, an update, a
step. Numbers are those of the CPU. Processes are one: FSDP's units gather the only shard.
"""

import contextlib
import functools
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import tiny
import torch
from ranks import local
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

import train_grpo
from common import distributed
from common.config.grpo import GRPOConfig
from common.evaluation import scoring
from common.forward import Policy
from common.model import fsdp, rollout_copy
from common.run import Run
from common.sampling import decode, graphs, sampler, shared

ROOT = Path(__file__).resolve().parents[2]
INDEXING = {"index", "index_put", "index_put_", "_unsafe_index"}
MOVES = {"_to_copy", "copy_"}
# The host needs the values, or a result's size.
WAITS = {"_local_scalar_dense", "_unique2", "equal", "masked_select", "nonzero", "unique_dim"}
# Make a tensor without a kernel, as every view does.
ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
ALLOCATES |= {"_unsafe_view", "lift_fresh"}
# What the CPU has no kernel for: products of bfloat16 in float32, which `_bmm_dtype_cuda` gives.
ELSEWHERE = {torch.ops.aten.bmm.dtype: lambda a, b, dtype: torch.bmm(a.to(dtype), b.to(dtype))}


@dataclass
class Counts:
    """Counts of a phase of a run."""

    waits: "Counter[str]" = field(default_factory=Counter)  # by the line that asks for them
    kernels: "Counter[str]" = field(default_factory=Counter)  # by operator; a replay is one
    captures: int = 0  # of graphs


phases: dict[str, list[Counts]] = {}  # that ended, by their kind
inside = [Counts()]  # phases that have begun, the innermost last
recording: "list[Graph]" = []  # the graph that is captured, if any


class SimTensor(Tensor):
    """CPU data that says it is elsewhere."""

    data_here: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> "SimTensor":
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=torch.device("sim", 0),
        )
        tensor.data_here = data
        return tensor

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

        mapped(look, (args, kwargs))
        goal = torch.device(kwargs["device"]).type if kwargs.get("device") else None
        if not there and (goal != "sim" or any(isinstance(x, DTensor) for x in leaves(args))):
            return function(*args, **kwargs)  # of shards it comes back with what they hold
        if goal:
            kwargs["device"] = "cpu"
        if there and here and name not in MOVES:
            refuse_to_meet(name, args, here)
        crosses = (bool(there) and goal == "cpu") or (bool(here) and (goal == "sim" or bool(there)))
        if host_waits(name, args, kwargs, crosses=crosses):
            if recording:
                raise RuntimeError(f"a wait for the device in a capture, at {line_of_ours()}")
            inside[-1].waits[line_of_ours()] += 1
        outputs = (recording[-1].record if recording else run_on_data)(function, args, kwargs)
        if name == "_to_copy" and goal == "cpu":
            return outputs
        tensors = {id(tensor.data_here): tensor for tensor in there} | {id(t): t for t in here}
        return mapped(lambda value: moved(value, tensors), outputs)


def run_on_data(function: Any, args: Any, kwargs: Any) -> Any:
    if launches(function):
        inside[-1].kernels[function.overloadpacket.__name__] += 1
    run = ELSEWHERE.get(function, function)
    return run(*mapped(data_of, args), **mapped(data_of, kwargs))


class Functions(TorchFunctionMode):
    """Calls that reach no operator, or other ones than on a GPU."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.tensor, torch.as_tensor) and kwargs.get("device"):
            device = kwargs.pop("device")
            return function(*args, **kwargs).to(device)
        if function is Tensor.pin_memory:
            return args[0]
        is_there = bool(args) and isinstance(args[0], SimTensor)
        if function is Tensor.tolist and is_there:
            inside[-1].waits[line_of_ours()] += 1
            return args[0].data_here.tolist()
        if function is Tensor.numpy and is_there:
            raise TypeError(f"a tensor of the device as an array, at {line_of_ours()}")
        if function is nn.functional.scaled_dot_product_attention and is_there:
            return fused_attention(*args, **kwargs)
        return function(*args, **kwargs)


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
) -> Any:
    """`scaled_dot_product_attention` there."""
    return FusedAttention.apply(query, key, value, attn_mask, options)


class FusedAttention(torch.autograd.Function):
    """One kernel forward and one backward, as on a GPU, with a mask or without."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Any
    ) -> Tensor:
        tensors = [query, key, value, *([] if mask is None else [mask])]
        if here := [tensor for tensor in tensors if not isinstance(tensor, SimTensor)]:
            refuse_to_meet("attention", tensors, here)
        ctx.kernel = "attention" if mask is None else "attention with a mask"
        inside[-1].kernels[ctx.kernel] += 1
        ctx.inputs = [data_of(x).detach().requires_grad_() for x in (query, key, value)]
        with torch.enable_grad():
            attend = nn.functional.scaled_dot_product_attention
            ctx.output = attend(*ctx.inputs, attn_mask=data_of(mask), **options)
        return SimTensor(ctx.output.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inside[-1].kernels[f"{ctx.kernel}, backward"] += 1
        grads = torch.autograd.grad(ctx.output, ctx.inputs, data_of(grad))
        return *map(SimTensor, grads), None, None


def data_of(value: Any) -> Any:
    """The data of a tensor there, anything else as it is."""
    return value.data_here if isinstance(value, SimTensor) else value


def moved(value: Any, tensors: dict[int, Tensor]) -> Any:
    """A result as a tensor there: what was changed in place is the argument itself."""
    if not isinstance(value, Tensor) or isinstance(value, SimTensor):
        return value
    return tensors[id(value)] if id(value) in tensors else SimTensor(value)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """A value with all that is in its lists, tuples and dictionaries mapped, as by a pytree."""
    if type(value) in (list, tuple):
        return type(value)([mapped(function, inner) for inner in value])
    if type(value) is dict:
        return {key: mapped(function, inner) for key, inner in value.items()}
    return function(value)


def leaves(value: Any) -> list[Any]:
    """What is in its lists and tuples; of anything else itself."""
    if type(value) in (list, tuple):
        return [leaf for inner in value for leaf in leaves(inner)]
    return [value]


@functools.cache
def launches(function: Any) -> bool:
    """Whether an operator computes something on the device, and is no view."""
    aliases = [value.alias_info for value in function._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    return not is_view and function.overloadpacket.__name__ not in ALLOCATES | WAITS


def host_waits(name: str, args: Any, kwargs: Any, *, crosses: bool) -> bool:
    """Whether an operator makes the host wait, as a copy that `crosses` and may block."""
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


# ---- graphs --------------------------------------------------------------------------------------


class Graph:
    """For `torch.cuda.CUDAGraph`: operators on addresses, which a replay runs again.

    Capturing changes no number. What the operators make is the graph's; what they read besides it
    does not keep alive, and a replay fails if that was freed.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, list[Tensor | None]]] = []
        self.allocated: dict[int, Tensor] = {}  # by storage
        self.overwritten: list[tuple[Tensor, Tensor]] = []  # and what it was

    def record(self, function: Any, args: Any, kwargs: Any) -> Any:
        aliases = [about.alias_info for about in function._schema.arguments]
        named = zip(aliases, args, strict=False)
        written = [value for alias, value in named if alias and alias.is_write]
        assert not any(isinstance(value, Tensor) for value in kwargs.values()), "no `out`"
        self.overwritten += [(data_of(value), data_of(value).clone()) for value in written]
        run = ELSEWHERE.get(function, function)
        outputs = run(*mapped(data_of, args), **kwargs)
        read = {storage_of(data_of(x)) for x in leaves(args) if isinstance(x, Tensor)}
        inputs = mapped(self.addressed, args)
        results: list[Tensor | None] = [None] * len(leaves(outputs))
        for i, value in enumerate(leaves(outputs)):
            if isinstance(value, Tensor) and storage_of(value) not in read:
                self.allocated[storage_of(value)] = results[i] = value
        self.calls.append((functools.partial(run, **kwargs), inputs, results))
        return outputs

    def addressed(self, value: Any) -> Any:
        """An operator's argument as the graph knows it."""
        if isinstance(value, SimTensor) and storage_of(value.data_here) not in self.allocated:
            return Address(value.data_here)
        return data_of(value)

    def end_capture(self) -> None:
        """Undo what the operators wrote, as none of them has run."""
        for tensor, before in reversed(self.overwritten):
            tensor.copy_(before)
        self.overwritten.clear()

    def replay(self) -> None:
        inside[-1].kernels["graph"] += 1
        for run, inputs, results in self.calls:
            outputs = run(*mapped(lambda x: x.read() if isinstance(x, Address) else x, inputs))
            for result, value in zip(results, leaves(outputs), strict=True):
                if result is not None:
                    result.copy_(value)


class Address:
    """A tensor in memory that may be freed."""

    def __init__(self, tensor: Tensor) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.dtype = tensor.dtype
        self.place = tensor.storage_offset(), tensor.size(), tensor.stride()

    def read(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise RuntimeError(f"a graph reads {self.dtype} {self.place} that was freed")
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.place)


def storage_of(tensor: Tensor) -> int:
    """Identity of the storage that a tensor is in."""
    return tensor.untyped_storage()._cdata


@contextmanager
def capture(graph: Graph, pool: Any, capture_error_mode: str) -> Iterator[None]:
    """For `torch.cuda.graph`."""
    assert (pool, capture_error_mode) == ("pool", "thread_local")
    inside[-1].captures += 1
    recording.append(graph)
    try:
        yield
    finally:
        recording.pop().end_capture()


# ---- phases of a run -----------------------------------------------------------------------------


@contextmanager
def phase(kind: str) -> Iterator[Counts]:
    """Count what happens inside, without the phases inside it."""
    inside.append(Counts())
    try:
        yield inside[-1]
    finally:
        phases.setdefault(kind, []).append(inside.pop())


def a_call(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, each of whose calls is a phase."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with phase(kind):
            return function(*args, **kwargs)

    return called


def a_round(kind: str, values: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """The iterator, of which a phase makes a value and uses it."""

    def iterated(*args: Any, **kwargs: Any) -> Iterator[Any]:
        iterator, end = values(*args, **kwargs), object()
        while True:
            with phase(kind):
                value = next(iterator, end)
                if value is end:
                    return
                yield value

    return iterated


@contextmanager
def on_sim() -> Iterator[None]:
    """Inside, the device of this process is the simulated one."""
    device = torch.device("sim", 0)
    with contextlib.ExitStack() as stack:
        for patch in (
            mock.patch.object(distributed, "device", return_value=device),
            mock.patch.object(Run, "steps", a_round("step", Run.steps)),
            mock.patch.object(Run, "micro_batches", a_round("micro-batch", Run.micro_batches)),
            mock.patch.object(Run, "update", a_call("update", Run.update)),
            mock.patch.object(scoring, "score_examples", a_call("scoring", scoring.score_examples)),
            mock.patch.object(sampler, "decode", a_call("decode", decode.decode)),
            mock.patch.object(_fsdp_init, "_move_states_to_device", move_early),
            mock.patch.object(_fsdp_param, "alloc_storage"),  # weights stay gathered, and are
            mock.patch.object(_fsdp_param, "free_storage"),  # written anew in each gathering
            mock.patch.object(fsdp, "set_model_state_dict", take_shards),
            mock.patch.object(graphs.StepGraphs, "DEVICES", ("sim",)),
            mock.patch.multiple(torch.cuda, CUDAGraph=Graph, graph=capture),
            mock.patch.object(torch.cuda, "graph_pool_handle", return_value="pool"),
            torch.autograd.set_multithreading_enabled(False),  # backward is seen by the modes
            Functions(),
            Operators(),
        ):
            stack.enter_context(patch)
        yield


def move_early(parameters: Sequence[Tensor], buffers: Sequence[Tensor], device: Any) -> None:
    """Move tensors as FSDP does before it shards, by exchanging objects: it refuses other data."""
    for tensor in (*parameters, *buffers):
        if tensor.device.type == "cpu":
            there = tensor.detach().to(device)
            if isinstance(tensor, nn.Parameter):
                there = nn.Parameter(there, tensor.requires_grad)
            torch.utils.swap_tensors(tensor, there)


@torch.no_grad()
def take_shards(module: nn.Module, state: dict[str, Tensor], **_: Any) -> None:
    """`set_model_state_dict` of one process, which has all shards."""
    for name, parameter in module.named_parameters():
        local(parameter).copy_(state[name])


def set_up() -> None:
    """Register the device in this process."""

    class Backend(backend_registration._DummyBackendModule):
        Event = Stream = current_stream = stream = mock.MagicMock()  # one after the other

        def get_rng_state(self, _: Any = None) -> Tensor:
            return torch.get_rng_state()

        def set_rng_state(self, state: Tensor, _: Any = None) -> None:
            torch.set_rng_state(state)

    backend_registration._setup_privateuseone_for_python_backend("sim", Backend())
    torch.__future__.set_swap_module_params_on_conversion(True)  # tied parameters stay tied


def decode_simulated(
    layout: str, depths: Sequence[int], lengths: Sequence[int], *, replays: bool = False
) -> list[dict[str, Any]]:
    """Counts of drawing completions of some lengths, none of which stops.

    Two prompts of different lengths get two samples each, from tiny GPT-2 of some depths; with
    `replays` for the second time, so that graphs are there.
    """
    set_up()
    records = []
    for depth in depths:
        lm = tiny.causal_lm("gpt2", n_layer=depth, is_plain=True)
        with on_sim(), torch.no_grad():
            fsdp.shard(lm, tiny.train_config(layout=layout), distributed.mesh())
            for length in lengths:
                kept = graphs.StepGraphs() if replays else None
                settings = decode.Settings([-1], pad_id=0, layout=layout, graphs=kept)
                uniforms = torch.rand(4, length, 2, dtype=torch.float64)
                for _ in range(1 + replays):
                    with phase("decode") as counts:
                        decode.decode(lm, [[5, 6, 7], [8, 9]], uniforms, settings)
                records.append(vars(counts))
    return records


def rollouts_simulated(
    variants: Sequence[dict[str, Any]], *, max_kept_bytes: int = 2**32, fills_copy: bool = True
) -> list[list[dict[str, Any]]]:
    """Three rollouts of a policy whose weights change in between, for families and flags of GRPO.

    20 tokens at most of 5 prompts with 3 samples each, decoded in two batches, with room for 16 at
    first; a sample stops at one of `stop_ids`. Without `fills_copy` the weights that sample get new
    memory each time.
    """
    set_up()
    fields = {"output_dir": "unused", "model_name_or_path": "unused", "reward_funcs": ["length"]}
    fields |= {"max_completion_length": 20, "generation_batch_size": 10}
    by_variant: list[list[dict[str, Any]]] = []
    for family, stop_ids, flags in variants:
        config = GRPOConfig(**fields, **flags)
        by_variant.append([])
        with contextlib.ExitStack() as stack:
            stack.enter_context(on_sim())
            stack.enter_context(mock.patch.object(sampler, "MAX_KEPT_BYTES", max_kept_bytes))
            stack.enter_context(mock.patch.object(shared, "FIRST_WIDTH", 16))
            if not fills_copy:
                new = mock.patch.object(rollout_copy, "filled", lambda _, values: values.clone())
                stack.enter_context(new)
            positions = "n_positions" if family == "gpt2" else "max_position_embeddings"
            policy = Policy(tiny.causal_lm(family, **{positions: 256}))
            fsdp.shard(policy, config, distributed.mesh())
            drawing = train_grpo.sampler_of(policy, tiny.vocabulary(stop_ids), config)
            examples = tiny.ragged_examples([(n,) for n in (9, 1, 14, 4, 9)])
            for step in range(3):
                phases.clear()
                rollouts = drawing.sample(examples, num_samples=3, step=step)
                with torch.no_grad():
                    for parameter in policy.parameters():
                        local(parameter).mul_(1.05)
                counts = phases["decode"]
                by_variant[-1].append(
                    {
                        "drawn": [rollouts.ids.tolist(), rollouts.token_logps.tolist()],
                        "captures": sum(count.captures for count in counts),
                        "replays": sum(count.kernels["graph"] for count in counts),
                        "graphs": len(drawing.graphs.captured) if drawing.graphs else 0,
                        "waits": sum(sum(count.waits.values()) for count in counts),
                    }
                )
    return by_variant
