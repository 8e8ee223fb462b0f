"""The worker process: reads one sample as JSON, calls one reward function, writes one result as JSON.

Started by `worker.py` as a fresh interpreter rather than through multiprocessing's spawn, because spawn imports the parent's
main module into every worker: a training script, and with it torch. Nothing pickled crosses the pipe. The process also
sets a timer whose default action ends it in the kernel, so that a worker stuck in one long multiplication does not outlive
a trainer that was killed.
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from lockstep.errors import UserError
from lockstep.rewards import graders
from lockstep.rewards.contract import check_scores
from lockstep.rewards.load import LoadedReward, load_reward
from lockstep.rewards.spec import RewardSpec

GRACE_S = 5.0
"""The parent kills a late worker at its limit; the worker's own timer, for when the parent is gone, comes this much later."""


def main(descriptor: int) -> None:
    """Serve the pipe with this file descriptor until it closes."""
    connection: Connection[Any, Any] = Connection(descriptor)
    setup = json.loads(connection.recv_bytes())
    if setup["memory_bytes"]:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = setup["memory_bytes"] if hard == resource.RLIM_INFINITY else min(hard, setup["memory_bytes"])
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        rewards = [load_reward(RewardSpec(**spec), in_worker=True) for spec in setup["specs"]]
        graders.warm_up({reward.spec.use for reward in rewards})
    except UserError as error:
        _send(connection, {"fatal": error.line()})
        return
    _send(connection, {"ready": True})
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"] + GRACE_S)
        answer = evaluate(rewards[request["reward"]], request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(connection, answer)


def evaluate(reward: LoadedReward, request: dict[str, Any]) -> dict[str, Any]:
    """The sample's score, or what went wrong, as the pool expects it."""
    try:
        scores = reward.function(
            prompts=[request["prompt"]],
            completions=[request["completion"]],
            completion_ids=[request["ids"]],
            **{name: [value] for name, value in request["columns"].items()},
            **reward.options,
        )
        if reward.is_async:
            scores = asyncio.run(scores)
        return {"score": check_scores(reward.name, scores, 1)[0]}
    except UserError as error:
        return {"refused": error.line()}
    except Exception as error:  # whatever the function does; the pool's user decides what it means
        return {"raised": f"{type(error).__name__}: {error}"}


def _send(connection: Connection[Any, Any], message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
