"""Sub-problems on executors: the same results as here, and clear ends when a worker dies."""

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
from concurrent.futures import (
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
)

import pytest
from solver_cases import tasks
from solver_cases.synthetic import gpt2

from remat_graph import simulate
from remat_solvers import InvalidProblem, Problem, SolverError, WorkerDied, solve, store_all
from remat_solvers.core.parallel import run_all
from remat_solvers.core.store_all import StoreAll

NUMBERS = [(f"number {n}", (n,)) for n in range(6)]


@pytest.fixture(scope="module")
def threads():
    with ThreadPoolExecutor(2) as pool:
        yield pool


def spawning(workers):
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


@pytest.fixture(
    params=[
        "serial",
        "threads",
        "processes",
        pytest.param("dask_executor", marks=pytest.mark.sweep),
    ]
)
def executor(request):
    return None if request.param == "serial" else request.getfixturevalue(request.param)


def test_results_are_in_the_order_of_the_tasks(executor):
    assert run_all(executor, tasks.square, NUMBERS) == [n * n for n in range(6)]
    assert run_all(executor, tasks.square, []) == []


def test_plans_are_the_same_as_serial(executor):
    work = []
    for layers in (1, 2):
        graph = gpt2(layers=layers)
        peak = simulate(graph, store_all(graph)).peak_bytes
        work += [(f"{layers} at {share}", (graph, int(peak * share))) for share in (0.9, 0.8)]
    serial = run_all(None, tasks.plan, work)
    assert run_all(executor, tasks.plan, work) == serial
    assert len({*serial}) == len(work)


def test_what_the_function_raises_comes_through(executor):
    first = r"1 is odd" if executor is None else r"[135] is odd"  # Dask starts in no set order
    with pytest.raises(LookupError, match=first) as caught:
        run_all(executor, tasks.fail, NUMBERS)
    if executor is not None:
        assert "tasks.py" in caught.value.__notes__[0]
    assert run_all(executor, tasks.square, NUMBERS[:2]) == [0, 1]


def test_an_error_that_cannot_travel_is_told(processes):
    with pytest.raises(RuntimeError, match="Untransportable: no solver is called 'x'"):
        run_all(processes, tasks.fail_untransportably, [("t", ("x",))])
    assert run_all(processes, tasks.square, NUMBERS[:2]) == [0, 1]


def test_a_process_that_dies_is_named(importable):
    with spawning(1) as pool:
        with pytest.raises(WorkerDied, match=r"'number 3'.*executor=None") as caught:
            run_all(pool, tasks.die, NUMBERS[2:])
        assert caught.value.tasks[0] == "number 3"
        assert isinstance(caught.value, SolverError)
        with pytest.raises(WorkerDied, match="'number 0'"):  # the pool is broken for good
            run_all(pool, tasks.square, NUMBERS)


@pytest.mark.sweep
def test_a_worker_of_dask_that_dies_is_named(dask_executor):
    with pytest.raises(WorkerDied, match=r"'number 3' was solved: KilledWorker") as caught:
        run_all(dask_executor, tasks.die, NUMBERS[3:4])
    assert caught.value.tasks == ("number 3",)
    assert run_all(dask_executor, tasks.square, NUMBERS) == [n * n for n in range(6)]


@pytest.mark.parametrize("kind", ["threads", "processes", "dask"])
def test_an_executor_that_is_shut_down_is_refused(kind, request):
    if kind == "dask":
        pool = request.getfixturevalue("cluster").get_executor(pure=False)
    else:
        pool = ThreadPoolExecutor(1) if kind == "threads" else spawning(1)
    pool.shutdown()
    with pytest.raises(InvalidProblem, match=r"did not take 'number 0'.*shut down"):
        run_all(pool, tasks.square, NUMBERS)


def test_what_is_no_plain_data_is_refused(processes):
    with pytest.raises(InvalidProblem, match=r"could not run 'lock'.*plain data"):
        run_all(processes, tasks.square, [("lock", (threading.Lock(),))])
    assert run_all(processes, tasks.square, NUMBERS[:2]) == [0, 1]


def test_after_an_error_nothing_more_starts_and_nothing_runs(tmp_path):
    names = ["slow", "bad", *(f"late{i}" for i in range(20))]
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ValueError, match="bad"):
            run_all(pool, tasks.leave_trace, [(n, (str(tmp_path), n)) for n in names])
        left = {path.name for path in tmp_path.iterdir()}
        assert {"slow", "slow-ended"} <= left
        assert left == {"slow", "slow-ended"}
        pool.submit(tasks.square, 1).result()
        assert {path.name for path in tmp_path.iterdir()} == left


class Interrupted(Executor):
    """Takes tasks, runs the first, and presses Ctrl-C at the third."""

    def __init__(self) -> None:
        self.futures: list[Future] = []

    def submit(self, function, /, *arguments):
        if len(self.futures) == 2:
            raise KeyboardInterrupt
        self.futures.append(Future())
        if len(self.futures) == 1:
            self.futures[0].set_result(function(*arguments))
        return self.futures[-1]


def test_an_interrupt_withdraws_what_has_not_started():
    pool = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        run_all(pool, tasks.square, NUMBERS)
    assert [future.cancelled() for future in pool.futures] == [False, True]


INTERRUPTED = """
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
from solver_cases import tasks
from remat_solvers.core.parallel import run_all

if __name__ == "__main__":
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            run_all(pool, tasks.linger, [(str(i), (sys.argv[1], i)) for i in range(9)])
        except KeyboardInterrupt:
            print("interrupted")
"""


def test_ctrl_c_leaves_no_process(importable, tmp_path):
    script, folder = tmp_path / "script.py", tmp_path / "workers"
    script.write_text(INTERRUPTED)
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, script, folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        while len(list(folder.iterdir())) < 2:
            assert run.poll() is None, run.stderr.read()
            select.select([], [], [], 0.05)
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does, to the workers too
        out, _ = run.communicate(timeout=600)
    assert out == "interrupted\n"
    workers = [int(path.name) for path in folder.iterdir()]
    assert len(workers) == 2
    for worker in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)


def test_cancelled_from_outside_is_a_loss():
    class Taking(Executor):
        def submit(self, function, /, *arguments):
            future = Future()
            future.cancel()
            future.set_running_or_notify_cancel()
            return future

    with pytest.raises(WorkerDied, match=r"'number 0' was solved .nor were 5 more"):
        run_all(Taking(), tasks.square, NUMBERS)


def test_a_pool_that_breaks_between_tasks_is_a_loss():
    class Breaking(Executor):
        _max_workers = 2
        taken = 0

        def submit(self, function, /, *arguments):
            self.taken += 1
            if self.taken > 3:
                raise BrokenExecutor("gone")
            future = Future()
            future.set_result(function(*arguments))
            return future

    with pytest.raises(WorkerDied) as caught:
        run_all(Breaking(), tasks.square, NUMBERS)
    assert caught.value.tasks == ("number 3", "number 4", "number 5")


def test_solvers_are_given_the_executor(threads, monkeypatch):
    seen = []
    plain = StoreAll.solve

    def spy(self, problem, limit, report):
        seen.append(problem.executor)
        return plain(self, problem, limit, report)

    monkeypatch.setattr(StoreAll, "solve", spy)
    graph = gpt2(layers=1)
    solve(graph, 10**9, executor=threads)
    solve(graph, 10**9)
    assert seen == [threads, None]


def test_problems_are_equal_whatever_runs_them(threads):
    graph = gpt2(layers=1)
    here, there = Problem(graph, 10), Problem(graph, 10, executor=threads)
    assert here == there
    assert "executor" not in repr(there)
