"""The worker pool: limits that hold, workers that die, shutdown, and no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import RewardError
from lockstep.rewards.child import GRACE_S
from lockstep.rewards.spec import RewardSpec
from lockstep.rewards.worker import Job, Outcome, WorkerPool

SOURCE = """
import os, signal, subprocess, sys, time

def act(prompts, completions, completion_ids, **columns):
    word = completions[0]
    if word == "sleep":
        time.sleep(60)
    if word == "multiply":
        9 ** 9 ** 9                        # one long C call: no Python signal handler can run
    if word == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    if word == "family":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open(columns["path"][0], "w").write(str(child.pid))
        time.sleep(60)
    if word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "die once" and not os.path.exists(columns["path"][0]):
        open(columns["path"][0], "w").close()
        os._exit(3)
    if word == "raise":
        raise KeyError("missing thing")
    if word == "nan":
        return [float("nan")]
    if word == "torch":
        return [float("torch" in sys.modules)]
    return [float(len(word)) if word else None]
"""


@pytest.fixture(scope="module")
def use(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "actor.py"
    path.write_text(SOURCE)
    return f"{path}:act"


@pytest.fixture(scope="module")
def pool(use: str) -> Any:
    with WorkerPool([RewardSpec(use)], workers=2) as pool:
        yield pool


def job(word: str, timeout_s: float = 20.0, **columns: Any) -> Job:
    return Job({"reward": 0, "prompt": "q", "completion": word, "ids": [1], "columns": columns}, timeout_s)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")


def gone(pid: int, within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def test_outcomes_come_in_the_order_of_the_jobs(pool: WorkerPool) -> None:
    words = ["x" * (i % 7) for i in range(50)]
    outcomes = pool.run([job(word) for word in words])
    assert [o.score for o in outcomes] == [len(word) or None for word in words]
    assert {o.kind for o in outcomes} == {"score"}
    assert pool.run([]) == []


@pytest.mark.parametrize("word", ["sleep", "multiply", "deaf"])
def test_a_late_worker_is_killed_and_the_others_go_on(pool: WorkerPool, word: str) -> None:
    pool.run([job("warm")])
    before = set(pool.processes())
    start = time.monotonic()
    outcomes = pool.run([job("ab"), job(word, 0.3), job("abc"), job("abcd")])
    assert [o.kind for o in outcomes] == ["score", "timeout", "score", "score"]
    assert [o.score for o in outcomes] == [2, None, 3, 4]
    assert time.monotonic() - start < 10
    lost = before - set(pool.processes())
    assert len(lost) == 1 and gone(lost.pop())


def test_what_a_late_function_has_started_dies_with_it(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    (outcome,) = pool.run([job("family", 3.0, path=str(path))])
    assert outcome.kind == "timeout"
    assert gone(int(path.read_text()))


def test_a_worker_that_dies_over_a_sample_twice_is_a_crash(pool: WorkerPool) -> None:
    outcomes = pool.run([job("a"), job("die"), job("ab")])
    assert outcomes[1] == Outcome("crash", detail="signal SIGKILL")
    assert [outcomes[0].score, outcomes[2].score] == [1, 2]


def test_a_sample_whose_worker_died_once_gets_another_chance(pool: WorkerPool, tmp_path: Path) -> None:
    (outcome,) = pool.run([job("die once", path=str(tmp_path / "been here"))])
    assert outcome == Outcome("score", score=len("die once"))


def test_workers_killed_while_idle_are_replaced(pool: WorkerPool) -> None:
    pool.run([job("a")] * 4)
    for pid in pool.processes():
        os.kill(pid, 9)
    time.sleep(0.1)
    assert [o.score for o in pool.run([job("abc")] * 6)] == [3.0] * 6


def test_what_the_function_raises_or_returns_comes_back_as_text(pool: WorkerPool) -> None:
    raised, refused = pool.run([job("raise"), job("nan")])
    assert raised == Outcome("raised", detail="KeyError: 'missing thing'")
    assert refused.kind == "refused" and "act, sample 0: nan" in refused.detail


def test_close_ends_every_process_and_is_idempotent(use: str) -> None:
    with pytest.raises(ZeroDivisionError), WorkerPool([RewardSpec(use)], workers=2) as pool:
        pids = pool.processes()
        assert all(alive(pid) for pid in pids)
        raise ZeroDivisionError
    assert not any(alive(pid) for pid in pids)
    pool.close()
    with pytest.raises(RewardError, match="have been closed"):
        pool.run([job("a")])


def test_close_from_another_thread_ends_a_running_call(use: str) -> None:
    pool = WorkerPool([RewardSpec(use)], workers=1)
    pool.run([job("a")])
    timer = threading.Timer(0.3, pool.close)
    timer.start()
    start = time.monotonic()
    with pytest.raises(RewardError, match="closed"):
        pool.run([job("sleep", 30.0)])
    timer.join()
    assert time.monotonic() - start < 10


def test_a_forgotten_pool_takes_its_processes_along(use: str) -> None:
    pool = WorkerPool([RewardSpec(use)], workers=1)
    (pid,) = pool.processes()
    del pool
    assert gone(pid)


def test_a_worker_that_cannot_load_says_why() -> None:
    with (
        WorkerPool([RewardSpec("no_such_file.py:f")], workers=1) as pool,
        pytest.raises(RewardError, match=r"no_such_file.py: the file doesn't exist"),
    ):
        pool.run([job("a")])


def test_workers_that_keep_dying_at_the_start_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os\nos._exit(7)\n")
    with (
        WorkerPool([RewardSpec(f"{tmp_path}/dies.py:f")], workers=1) as pool,
        pytest.raises(RewardError, match=r"die while starting \(exit code 7\)"),
    ):
        pool.run([job("a")])


def test_a_pool_needs_a_worker(use: str) -> None:
    with pytest.raises(ValueError, match="at least one worker"):
        WorkerPool([RewardSpec(use)], workers=0)


def test_a_worker_neither_imports_torch_nor_runs_the_main_script(use: str, tmp_path: Path) -> None:
    """Spawned processes import their parent's main script, and with it torch; these must not."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys, types
        sys.modules["torch"] = types.ModuleType("torch")  # as good as the real one here, and quick
        print("main runs")
        from lockstep.rewards.spec import RewardSpec
        from lockstep.rewards.worker import Job, WorkerPool
        with WorkerPool([RewardSpec({use!r})], workers=2) as pool:
            request = {{"reward": 0, "prompt": "q", "completion": "torch", "ids": [1], "columns": {{}}}}
            print([o.score for o in pool.run([Job(request, 20.0)] * 3)])
        """)
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "main runs\n[0.0, 0.0, 0.0]\n", done.stderr


def test_workers_end_when_their_parent_is_killed(use: str, tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        textwrap.dedent(f"""
        import os
        from lockstep.rewards.spec import RewardSpec
        from lockstep.rewards.worker import Job, WorkerPool
        pool = WorkerPool([RewardSpec({use!r})], workers=2)
        request = {{"reward": 0, "prompt": "q", "completion": "a", "ids": [1], "columns": {{}}}}
        pool.run([Job(request, 20.0)] * 4)
        print(*pool.processes(), flush=True)
        os.kill(os.getpid(), 9)
        """)
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=60)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2 and all(gone(pid) for pid in pids), done.stderr


@pytest.mark.slow
def test_a_busy_worker_ends_too_when_its_parent_is_killed(use: str, tmp_path: Path) -> None:
    """Stuck in C code it never reads its pipe again; the kernel's timer ends it."""
    script = tmp_path / "killed.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, threading
        from lockstep.rewards.spec import RewardSpec
        from lockstep.rewards.worker import Job, WorkerPool
        pool = WorkerPool([RewardSpec({use!r})], workers=1)
        request = {{"reward": 0, "prompt": "q", "completion": "a", "ids": [1], "columns": {{}}}}
        pool.run([Job(request, 20.0)])
        print(*pool.processes(), flush=True)
        threading.Timer(0.5, os.kill, (os.getpid(), 9)).start()
        pool.run([Job({{**request, "completion": "multiply"}}, 2.0)])
        """)
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, stdout=subprocess.PIPE, text=True, timeout=60
    )
    (pid,) = (int(pid) for pid in done.stdout.split())
    assert gone(pid, within_s=2.0 + GRACE_S + 3.0)
