"""A thread that is replaced when a call in it does not end."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from compile_and_serve.runtime.lora.errors import AdapterError
from compile_and_serve.runtime.lora.timed_thread import TimedThread


def make(seconds: float, name: str = "timed") -> TimedThread[str]:
    return TimedThread(name, seconds, lambda: None)


def test_calls_run_one_after_another_and_keep_their_errors() -> None:
    thread, seen = make(60), []

    def fail() -> str:
        raise RuntimeError("bad")

    futures = [thread.submit(lambda i=i: seen.append(i) or str(i)) for i in range(5)]  # type: ignore[misc]
    bad, last = thread.submit(fail), thread.submit(lambda: "last")
    assert [future.result(10) for future in futures] == ["0", "1", "2", "3", "4"]
    assert seen == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="bad"):
        bad.result(10)
    assert last.result(10) == "last"


def test_a_call_that_does_not_end_delays_the_others_by_its_time() -> None:
    release = threading.Event()
    thread = make(0.2)
    stuck, after = thread.submit(lambda: str(release.wait(60))), thread.submit(lambda: "after")
    assert after.result(10) == "after"
    with pytest.raises(AdapterError, match=r"could not be read within 0\.2 seconds"):
        stuck.result(0)
    release.set()
    assert thread.submit(lambda: "later").result(10) == "later"


def test_stuck_threads_are_bounded_and_forgotten_once_they_end() -> None:
    release = threading.Event()
    thread = make(0.02)
    for _ in range(8):
        with pytest.raises(AdapterError, match="within"):
            thread.submit(lambda: str(release.wait(60))).result(10)
    with pytest.raises(AdapterError, match="8 earlier adapters are still being read"):
        thread.submit(lambda: "one more").result(10)
    release.set()
    end = time.monotonic() + 10
    while True:
        try:
            assert thread.submit(lambda: "free again").result(10) == "free again"
            return
        except AdapterError:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_the_thread_ends_with_its_owner_and_holds_no_result() -> None:
    class Value:
        pass

    thread: TimedThread[Value] | None = TimedThread("short-lived", 60, lambda: None)
    assert thread is not None
    thread.submit(Value).result(10)
    thread.submit(lambda: None).result(10)  # type: ignore[arg-type, return-value]
    end = time.monotonic() + 10
    while gc.collect() >= 0 and any(type(one) is Value for one in gc.get_objects()):  # the cancelled timer's thread may hold it a moment
        assert time.monotonic() < end
        time.sleep(0.01)
    del thread
    gc.collect()
    while any(one.name == "short-lived" for one in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)
