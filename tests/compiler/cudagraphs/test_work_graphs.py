"""Captured work: which sizes are padded to, and when a graph may be replayed."""

from __future__ import annotations

from collections.abc import Iterator

from compile_and_serve.compiler.cudagraphs.stats import GraphStats
from compile_and_serve.compiler.cudagraphs.work_graphs import Work, WorkGraphs
from tests.support.fake_graphs import FakeDevice


def test_work_is_replayed_at_its_size_and_addresses() -> None:
    done: list[tuple[str, int]] = []

    def work_of(size: int) -> Iterator[Work]:
        yield Work(name="a", run=lambda: done.append(("a", size)))
        yield Work(name="b", run=lambda: done.append(("b", size)), addresses=(7,))

    graphs = WorkGraphs((1, 2, 4), FakeDevice(), stats := GraphStats(), "draft")
    assert not graphs.capture_next()
    graphs.bind(work_of)
    assert graphs.padded_size(1) is None
    assert not graphs.replay("a", 2)
    assert graphs.capture_next()  # the one that was missed
    assert graphs.padded_size(1) == graphs.padded_size(2) == 2
    assert graphs.padded_size(3) is None
    while graphs.capture_next():
        pass
    assert (graphs.padded_size(1), graphs.padded_size(3), graphs.padded_size(5)) == (1, 4, None)
    assert sorted(done) == [(name, size) for name in "ab" for size in (1, 2, 4)]
    done.clear()
    assert graphs.replay("a", 4)
    assert graphs.replay("b", 2, (7,))
    assert not graphs.replay("b", 2, (8,))
    assert not graphs.replay("b", 3, (7,))
    assert done == [("a", 4), ("b", 2)]
    assert graphs.num_waiting == 0
    assert (stats.captured["draft"], stats.replays["draft"]) == (6, 2)


def test_work_is_captured_again_once() -> None:
    done: list[int] = []
    graphs = WorkGraphs((1, 2), FakeDevice(), stats := GraphStats(), "draft")
    graphs.bind(lambda size: [Work(name="a", run=lambda: done.append(size))])
    while graphs.capture_next():
        pass
    done.clear()
    graphs.renew()
    assert graphs.num_waiting == 2
    assert graphs.replay("a", 2)  # until its turn comes
    while graphs.capture_next():
        pass
    assert sorted(done) == [1, 2, 2]
    assert stats.captured["draft"] == 2
    assert graphs.padded_size(2) == 2
    assert graphs.replay("a", 2)
