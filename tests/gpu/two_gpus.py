"""What scripts for several GPUs share: join the group, and end at once when something is wrong."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

# Multicast over NVLink needs rights that containers seldom have.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist


@contextmanager
def joined(cpu: bool) -> Iterator[torch.device]:
    """Join the group of torchrun's processes: NCCL, one GPU per rank, or gloo on the CPU.

    An error ends this process without leaving the group, which would wait for the other ranks;
    torchrun then ends those.
    """
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu") if cpu else torch.device("cuda", rank)
    if not cpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if cpu else "nccl",
        timeout=timedelta(seconds=60),
        device_id=None if cpu else device,
    )
    try:
        yield device
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    dist.barrier()
    dist.destroy_process_group()
