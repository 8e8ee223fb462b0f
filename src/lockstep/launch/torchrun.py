"""Several processes, a GPU each, as `torchrun` starts them: this one's place among them, from its environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.errors import ConfigError, JobError
from lockstep.trainer.ranks import Ranks

PLACE = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What `torchrun` sets beside WORLD_SIZE."""
PATIENCE = timedelta(hours=2)
"""For the slowest rank. What it computes may take long: a rollout, rewards, a checkpoint."""


def speaks() -> bool:
    """Whether this process is the one of its job that tells how a run ended."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks of this process' job; itself alone where `torchrun` did not start it.

    Raises ConfigError without a GPU for it or when the environment has a part of a place only, and JobError where another
    process of the job has gone.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Ranks()
        return
    if missing := [name for name in PLACE if name not in os.environ]:
        raise ConfigError(
            f"WORLD_SIZE is {size}, but {', '.join(missing)} isn't set",
            where="environment",
            fix="start the processes with torchrun, or unset WORLD_SIZE for one alone",
        )
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        _take_gpu(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=PATIENCE)
    try:
        yield Ranks(dist.get_rank(), size)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise JobError(
            f"rank {os.environ['RANK']} lost the others of its job",
            why="one of them ended; its message says why",
        ) from error
    finally:
        dist.destroy_process_group()


def _take_gpu(number: int) -> None:
    count = torch.cuda.device_count()
    if number >= count:
        raise ConfigError(
            f"process {number} of this machine has no GPU: there are {count}",
            where="--nproc-per-node",
            fix=f"start {count} or fewer processes on each machine",
        )
    torch.cuda.set_device(number)
