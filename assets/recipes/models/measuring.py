"""What a tiny model of a type does, in one or several processes with a time limit."""

import contextlib
import io
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

from torch.distributed.elastic.utils.distributed import get_free_port

from assets.recipes.models import shrink
from common import distributed
from experiments.models import cells, table

LIMIT = 400.0  # seconds of a type: most take 10 on a free core
PROCESSES = multiprocessing.get_context("forkserver")  # which imports torch and transformers once
PROCESSES.set_forkserver_preload([cells.__name__])


def measure(name: str, ranks: int) -> table.Row:
    """The row of a type, from one or several separate processes."""
    if reason := shrink.not_a_decoder(name):
        return {"type": name, "not a decoder": reason}
    start, port = time.monotonic(), get_free_port()
    with tempfile.NamedTemporaryFile("r") as file:
        processes = [
            PROCESSES.Process(target=run_type, args=(name, file.name, ranks, rank, port))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, start + LIMIT * ranks - time.monotonic()))
        is_late = any(process.is_alive() for process in processes)
        for process in processes:
            process.kill()
            process.join()
        results = [json.loads(line) for line in file]
    status = next((p.exitcode for p in processes if p.exitcode), 0)
    end = "no end in time" if is_late else f"ended with status {status}" * bool(status)
    seconds = time.monotonic() - start
    return {"type": name, "seconds": seconds, "end": end, "results": results}


def run_type(name: str, file: str, ranks: int = 1, rank: int = 0, port: int = 0) -> None:
    """Write the cells of a tiny model of a type, in both layouts, into a file."""
    if ranks > 1:  # as torchrun says it
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.update(address | {"RANK": str(rank), "WORLD_SIZE": str(ranks)})
    distributed.start(60.0)
    silent = contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory() as made, open(file, "a", buffering=1) as lines, silent:
        folder = distributed.from_rank0(made)
        if distributed.is_rank0():
            shrink.save(name, Path(folder))
        distributed.barrier()
        for layout in cells.LENGTHS:
            for result in cells.run(folder, layout):
                lines.write(f"{json.dumps(result)}\n" * distributed.is_rank0())
