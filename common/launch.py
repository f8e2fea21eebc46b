"""Start and end of a script: its config, error messages, and the exit status."""

import atexit
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from common import distributed
from common.checkpoint import hf_folder
from common.config.flags import values_of
from common.config.parser import parse_given
from common.config.stages import CommonConfig, TrainConfig
from common.errors import FunctionError, UserError, of_full_disk
from common.model import sizes
from common.record import run_folder, terminal
from common.shutdown import failures, processes, signals

Config = TypeVar("Config", bound=CommonConfig)
PATIENCE = 5.0  # seconds; torchrun looks at its processes ten times a second


def run(main: Callable[[Config], Any], config_class: type[Config]) -> None:
    """Run a stage with the config that the command line gives.

    A user error exits with status 2 and one sentence, any other with 1 and the traceback, a stopped
    run with that of `Stopped`. Every rank ends: a collective waits for its peers for at most
    `ddp_timeout` seconds, and torchrun ends a rank within 30 s of a failure on its host. Files of a
    run are never writable for everybody, because a model may be loaded by others.
    """
    status, config = 0, None
    os.umask(os.umask(0o077) | 0o002)  # the mask can only be read by setting it
    terminal.keep_printing()
    try:
        config, given = parse_given(config_class)
        if isinstance(config, TrainConfig):
            signals.listen(speaks=distributed.is_rank0())
        processes.die_with_launcher()
        processes.refuse_stale_store()
        distributed.start(config.ddp_timeout)
        processes.refuse_without_gpu()
        if config.bf16:
            processes.check_bfloat16(config.layout)
        if distributed.is_rank0():  # the others may be on machines where nothing is written
            run_folder.refuse_unwritable(config.output_dir)
        config = hf_folder.with_folders(config)
        main(sizes.for_device(config, given))
        dist.barrier()
    except signals.Stopped as stopped:
        distributed.print_rank0(stopped)
        if status := stopped.status:
            processes.report_to_torchrun(str(stopped))
    except BaseException as error:  # also Ctrl-C, sys.exit, and what checkpoints raise
        if config and isinstance(error, UserError) and not isinstance(error, FunctionError):
            name_recipes_flag(error, config)
        fail(error)
    leave(status)


def name_recipes_flag(error: UserError, config: CommonConfig) -> None:
    """Add the flags of a path that the error quotes and nobody has typed: a recipe gave it."""
    text, words = str(error), sys.argv[1:]
    names = [
        f"--{f.name}"
        for f in fields(config)
        if f.metadata["is_path"] and f.name not in text
        for path in values_of(config, f)
        if path and repr(path) in text and not any(path in word for word in words)
    ]
    if names and any(word.startswith("--config") for word in words):
        error.add(f"; it is the recipe's {' and '.join(dict.fromkeys(names))}")


def leave(status: int = 0) -> None:
    """End the process groups; with several ranks or another status than 0 also the process."""
    num_ranks = distributed.world_size()
    dist.destroy_process_group()
    if num_ranks > 1 or status:
        # FSDP still holds groups, and so gloo's threads. One of them could crash this process if a
        # peer's connection closes while C++ objects are destroyed.
        atexit._run_exitfuncs()
        close_and_exit(status)


def fail(error: BaseException) -> NoReturn:
    """Report an error on stderr and in torchrun's summary, and exit.

    Torchrun ends the ranks of a host as soon as one has exited. So the first rank of a host reports
    at once, and the others, which may have the same error, only after `PATIENCE`. A rank that lost
    its peers also waits, because one of them is the cause.
    """
    if isinstance(error, SystemExit) and not dist.is_initialized():
        raise error  # --help
    if isinstance(error, KeyboardInterrupt):
        close_and_exit(130)  # as a shell reports SIGINT
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    is_lost = failures.lost_peers(error)
    if is_lost and signals.received():
        close_and_exit(1)  # torchrun has asked for it, and names the cause
    if is_lost or distributed.number_in("LOCAL_RANK") > 0:
        time.sleep(PATIENCE)
    error = of_full_disk(error) or error
    is_refusal = isinstance(error, UserError)
    text = f"error: {error}" if is_refusal else "".join(traceback.format_exception(error)).rstrip()
    print(f"{failures.place(distributed.rank())}{text}", file=sys.stderr, flush=True)
    processes.report_to_torchrun(text)
    close_and_exit(2 if is_refusal and not isinstance(error, FunctionError) else 1)


def close_and_exit(status: int) -> NoReturn:
    """Exit at once, without waiting for peers that may be inside a collective."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
