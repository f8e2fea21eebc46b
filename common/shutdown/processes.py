"""A process under torchrun: it ends with torchrun, reports to it, and refuses some launches."""

import contextlib
import ctypes
import json
import os
import platform
import re
import signal
import sys
import time
from pathlib import Path

import torch

import common
from common import distributed
from common.errors import UserError

DRIVER, DEVICES = Path("/proc/driver/nvidia/version"), Path("/dev")  # of NVIDIA, on Linux


def die_with_launcher() -> None:
    """Have Linux end this process if torchrun is killed: else it would disturb the next run."""
    if sys.platform == "linux" and distributed.environment("TORCHELASTIC_RUN_ID"):
        set_signal_of_parents_death = 1  # PR_SET_PDEATHSIG, see prctl(2)
        ctypes.CDLL(None).prctl(set_signal_of_parents_death, signal.SIGKILL)
        if os.getppid() != common.PARENT:  # it was killed while this process imported
            print("torchrun has ended, and so does this process", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def report_to_torchrun(text: str) -> None:
    """Write what ended this process into torchrun's summary, in the form of its `record`."""
    if file := distributed.environment("TORCHELASTIC_ERROR_FILE"):
        message = {"message": text, "extraInfo": {"timestamp": int(time.time())}}
        with contextlib.suppress(OSError):  # of a full disk
            Path(file).write_text(json.dumps({"message": message}))


def refuse_stale_store() -> None:
    """Raise a UserError where restarted ranks would read the addresses of ended processes."""
    is_kept = distributed.environment("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_kept and distributed.number_in("TORCHELASTIC_MAX_RESTARTS"):
        raise UserError(
            "torchrun with --max-restarts keeps the addresses of ended processes; set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment, with --standalone or "
            "--rdzv_backend c10d."
        )


def check_bfloat16(layout: str) -> None:
    """Warn of a CPU without products of bfloat16; refuse a GPU without such attention.

    The shared layout has no other kernels than fused attention's, which need compute capability 8.
    """
    if distributed.device().type == "cpu":
        if not has_bfloat16_products():
            text = "this CPU has no bfloat16 products: --bf16 true is several times slower."
            distributed.print_rank0(f"warning: {text}")
    elif layout == "shared_prefix" and torch.cuda.get_device_capability() < (8, 0):
        raise UserError(
            "this GPU has no attention in bfloat16; use --bf16 false, or --layout padded."
        )


def has_bfloat16_products() -> bool:
    """Whether the CPU multiplies bfloat16. oneDNN takes AVX-512 without it too, and is slow then.

    There a linear layer took 2.3 times its time in float32, with AVX2 alone 4.5 times; with the
    products 0.4 times (one thread, 512 rows, 768 to 3072).
    """
    if platform.machine().lower() in ("x86_64", "amd64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def refuse_without_gpu() -> None:
    """Raise a UserError if the machine has a GPU that torch cannot use."""
    is_hidden = distributed.environment("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
    has_gpu = DRIVER.exists() and any(DEVICES.glob("nvidia[0-9]*"))
    if not has_gpu or is_hidden or torch.cuda.is_available():
        return
    driver = re.search(r"\d+\.[\d.]+", DRIVER.read_text())
    build, remedy = "built without CUDA", "install a torch for CUDA"
    if torch.version.cuda:
        build = f"built for CUDA {torch.version.cuda}"
        remedy = "update the driver, install a torch for an older CUDA"
    raise UserError(
        f"torch, {build}, cannot use this machine's GPU with its NVIDIA driver "
        f"{driver.group() if driver else 'of an unknown version'}; {remedy}, or train on the CPU, "
        "with CUDA_VISIBLE_DEVICES= before the command."
    )
