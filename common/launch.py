"""How a script starts and ends: the config it is given, refusals, failures, and the exit status."""

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from common import distributed
from common.config import CommonConfig, TrainConfig
from common.errors import UserError

Config = TypeVar("Config", bound=CommonConfig)
REFUSED_ALONE_AFTER = 5.0  # seconds; torchrun looks at its processes ten times a second


def run(main: Callable[[Config], Any], config_class: type[Config]) -> None:
    """Run a stage with the config that the command line gives.

    Exits with status 2 and one sentence for what the user can put right; for a failure with 1, and
    with the first cause once for all ranks. Every rank ends: in a collective it waits for its peers
    for at most `ddp_timeout` seconds, and torchrun ends it within 30 s of a failure on its host.
    What a run writes is never writable for everybody: who changes a model changes what others run.
    """
    from common.checkpoint import best, plain, push
    from common.exits import signals
    from common.flags.parser import parse
    from common.planning.plan import fit_to_gpu
    from common.record import folder, terminal, tracking

    os.umask(os.umask(0o077) | 0o002)  # the mask can only be read by setting it
    terminal.keep_printing()
    try:
        config = parse(config_class)
        best.refuse_impossible(config)
        if isinstance(config, TrainConfig):
            if config.dry_run:
                plan(config)
                return
            signals.listen(speaks=distributed.is_rank0())
        distributed.start(config.ddp_timeout)
        distributed.refuse_without_gpu()
        if distributed.is_rank0():  # the others may be on machines where nothing is written
            folder.refuse_unwritable(config.output_dir)
            tracking.refuse_impossible(getattr(config, "report_to", ()))
            if isinstance(config, TrainConfig):
                push.prepare(config)
        plain.use_folders(config)
        main(fit_to_gpu(config))
        dist.barrier()
    except signals.Stopped as stopped:
        distributed.print_rank0(stopped)
    except UserError as error:
        refuse(error)
    except BaseException as error:  # also Ctrl-C, sys.exit, and what checkpoints raise
        fail(error)
    leave()


def plan(config: TrainConfig) -> None:
    """Print on rank 0 what a run takes, before any process group."""
    from common.checkpoint import plain
    from common.planning import plan as planner

    if distributed.is_rank0():
        distributed.quieten()
        plain.use_folders(config, has_weights=False)
        planner.dry_run(config)


def leave() -> None:
    """End the process groups; one of several processes leaves with status 0."""
    num_ranks = distributed.world_size()
    dist.destroy_process_group()
    if num_ranks > 1:
        # FSDP still refers to groups, which keeps gloo's threads. One that sees a peer's connection
        # close while C++ takes this process apart could crash it.
        atexit._run_exitfuncs()
        close_and_exit(0)


def refuse(error: UserError) -> NoReturn:
    """Print the sentence and leave with status 2: on every rank, or on the only one refused."""
    from common.exits import failures

    number = distributed.rank()
    cause = f"rank {number} was refused: {error}"
    first, _ = failures.claim(distributed.store(), number, distributed.host(), cause)
    if not first and number != 0:
        # Before there is a store rank 0 speaks for all, and torchrun then ends this process: unless
        # only this rank was refused, as by a file that is missing on one machine.
        time.sleep(REFUSED_ALONE_AFTER)
    if first in ("", cause):
        sentence = f"error: {error}{failures.aside(number)}"
        print(sentence, file=sys.stderr, flush=True)
        distributed.tell_torchrun(sentence)
    else:
        time.sleep(failures.LINGER)  # torchrun names whoever ends first as the root cause
    close_and_exit(2)


def fail(error: BaseException) -> NoReturn:
    """Leave after an exception that the user cannot put right, which one rank reports."""
    from common.exits import failures

    if isinstance(error, SystemExit) and not dist.is_initialized():
        raise error  # --help
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun passes on what the terminal sent us
    place = (distributed.rank(), distributed.world_size(), distributed.host())
    close_and_exit(failures.report(error, distributed.store(), *place))


def close_and_exit(status: int) -> NoReturn:
    """Leave at once, without waiting for peers that may be inside a collective."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
