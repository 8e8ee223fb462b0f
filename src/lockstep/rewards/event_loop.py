"""One event loop in a thread of its own, for async reward functions.

It lives as long as the rewards do, so that a client which a user's function keeps between calls stays on the loop it was
made on; and it is not the caller's thread, so that scoring also works where a loop is already running (a notebook).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any


class EventLoopThread:
    """Runs coroutines; `submit` returns at once."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Future[Any]:
        """The coroutine's future result; TimeoutError in it after `timeout_s`."""
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, timeout_s), self._loop)

    def close(self) -> None:
        """Cancel what is still running and end the thread. Closing twice is fine."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
