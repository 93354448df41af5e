"""The records of a host on their way to another one: whole, also over streams that break, and after a take-over."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import pytest

from engine.core.history.step_files import entry
from engine.core.hosts.host_messages import StoredSizesHostMessage, TickHostMessage
from engine.core.hosts.host_options import RegisteredHost
from engine.runtime.agent.frames import frame, read_frame
from engine.runtime.agent.remote_workers import CoordinatorLines, RemoteSpawner, ServedLines
from engine.runtime.agent.wire import StreamEnd

pytestmark = pytest.mark.timeout(60)


class Stream:
    """A stream between host `name`, which serves, and the one that coordinates, in threads; it can break."""

    def __init__(self, name: str, served: ServedLines, chief: str) -> None:
        self.away = RemoteSpawner(RegisteredHost(name, "1f", "", 1, {}))
        self.away.peer.came()
        self.away.resent.set()
        self.end = StreamEnd()
        self.served, self.chief = served, chief
        self.num_bytes: list[int] = []

    def connect(self) -> None:
        """Begins a connection, and ends the one before, whose frames under way are lost."""
        near, far = self.end, self.away.peer.end
        near_number, far_number = near.connect(), far.connect()
        near.resume(near_number, far.received)
        far.resume(far_number, near.received)
        for source, of, number, take in (
            (near, near_number, far_number, self._to_chief),
            (far, far_number, near_number, self._to_host),
        ):
            threading.Thread(
                target=_carry, args=(chain.from_iterable(source.bundles(of)), number, take), daemon=True
            ).start()

    def _to_chief(self, number: int, data: bytes) -> bool:
        self.num_bytes.append(len(data))
        return self.away.peer.take(number, data)

    def _to_host(self, number: int, data: bytes) -> bool:
        def deliver() -> None:
            self.served.take(*read_frame(data))

        return self.end.take(number, deliver)

    def begin(self) -> None:
        self.connect()
        self.served.follow(self.chief, self.end)

    def close(self) -> None:
        self.end.close()
        self.away.peer.end.close()
        self.served.close()


def _carry(frames: Iterator[bytes], number: int, take: Callable[[int, bytes], bool]) -> None:
    for each in frames:
        if not take(number, each):
            return


class Records:
    """The records of a host, which grow."""

    def __init__(self, run: Path) -> None:
        self.run = run
        (run / "steps").mkdir(parents=True)

    def write(self, number: int) -> None:
        with (self.run / "events.jsonl").open("a") as events:
            events.write(f'{{"event":"mark","of":"{self.run.name}","number":{number}}}\n' * 20)
        with (self.run / "steps" / f"actions-0-{number // 5 * 5}.bin").open("ab") as actions:
            actions.write(entry(1, number, "0F1", number, number + 5) * 50)
        with (self.run / "steps" / f"hashes-{number // 5 * 5}.jsonl").open("a") as hashes:
            hashes.write('{"event":"audit"}\n')


def files(run: Path) -> dict[str, bytes]:
    paths = [run / "events.jsonl", *(run / "steps").glob("*")]
    return {str(path.relative_to(run)): path.read_bytes() for path in paths if path.exists()}


def until(is_so: Callable[[], bool], patience_s: float = 20.0) -> None:
    until_s = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.01)


@pytest.mark.parametrize("seed", range(3))
def test_copies_are_whole_after_breaks(tmp_path: Path, seed: int) -> None:
    draw, b = random.Random(seed), Records(tmp_path / "b")  # noqa: S311
    stream = Stream("b", ServedLines("b", b.run), "a")
    lines = CoordinatorLines("a", {"b": stream.away})
    stream.begin()
    kept = tmp_path / "a" / "hosts" / "b"
    for number in range(30):
        b.write(number)
        if number == 10:
            (tmp_path / "a").mkdir()
            lines.begin(tmp_path / "a")  # frames that came before wait for the folder
        if draw.random() < 0.5:
            stream.connect()
        time.sleep(draw.random() * 0.02)
        for name, data in files(kept).items():
            assert files(b.run)[name].startswith(data)
    with (b.run / "events.jsonl").open("a") as torn:
        torn.write('{"event":"to')
    whole = {**files(b.run), "events.jsonl": files(b.run)["events.jsonl"].removesuffix(b'{"event":"to')}
    stream.served.finish()
    assert files(kept) == whole
    lines.finish()
    assert stream.away.has_shipped
    assert sum(stream.num_bytes) < sum(map(len, whole.values()))  # compressed, and nothing much twice
    stream.close()


def test_the_records_of_the_host_that_coordinates_are_with_the_heir_also_by_a_third_host(tmp_path: Path) -> None:
    a, b, c = (Records(tmp_path / each) for each in "abc")
    served = {each.run.name: ServedLines(each.run.name, each.run) for each in (b, c)}
    streams = {name: Stream(name, each, "a") for name, each in served.items()}
    lines = CoordinatorLines("a", {name: each.away for name, each in streams.items()})
    lines.begin(a.run)
    for each in streams.values():
        each.begin()
    for number in range(12):
        for of in (a, b, c):
            of.write(number)
    lines.look()  # host b keeps those of host a
    until(lambda: files(b.run / "hosts" / "a") == files(a.run))
    until(lambda: all(files(a.run / "hosts" / each.run.name) == files(each.run) for each in (b, c)))
    assert not (c.run / "hosts").exists()
    for each in streams.values():
        each.end.close()
        each.away.peer.end.close()
    lines.close()

    # Host a is lost with its disk, and host c goes on.
    to_c = Stream("b", served["b"], "c")
    new = CoordinatorLines("c", {"b": to_c.away})
    new.begin(c.run)
    served["c"].follow("c", StreamEnd())
    to_c.begin()
    new.look()
    b.write(12)
    until(lambda: files(c.run / "hosts" / "b") == files(b.run))
    until(lambda: files(c.run / "hosts" / "a") == files(a.run))
    until(lambda: files(b.run / "hosts" / "c") == files(c.run))
    to_c.close()
    served["c"].close()
    new.close()


def test_another_host_keeps_the_records_when_the_one_that_did_is_lost(tmp_path: Path) -> None:
    a, b, c = (Records(tmp_path / each) for each in "abc")
    streams = {each.run.name: Stream(each.run.name, ServedLines(each.run.name, each.run), "a") for each in (b, c)}
    lines = CoordinatorLines("a", {name: each.away for name, each in streams.items()})
    lines.begin(a.run)
    for each in streams.values():
        each.begin()
    for of in (a, b, c):
        of.write(0)
    lines.look()
    until(lambda: files(b.run / "hosts" / "a") == files(a.run))
    until(lambda: files(a.run / "hosts" / "b") == files(b.run))
    streams["b"].away.lose("its power is off")
    lines.look()
    a.write(1)
    until(lambda: files(c.run / "hosts" / "a") == files(a.run))
    until(lambda: files(c.run / "hosts" / "b") == files(b.run))  # of a lost host there are two copies too
    for each in streams.values():
        each.close()
    lines.close()


def test_a_file_of_steps_that_a_host_leaves_out_goes_from_its_copy_too(tmp_path: Path) -> None:
    b = Records(tmp_path / "b")
    stream = Stream("b", ServedLines("b", b.run), "a")
    lines = CoordinatorLines("a", {"b": stream.away})
    lines.begin(tmp_path / "a")
    stream.begin()
    for number in (0, 5, 10):
        b.write(number)
    kept = tmp_path / "a" / "hosts" / "b"
    until(lambda: files(kept) == files(b.run))
    (b.run / "steps" / "actions-0-5.bin").unlink()
    (b.run / "steps" / "hashes-5.jsonl").unlink()
    until(lambda: files(kept) == files(b.run))
    b.write(11)
    until(lambda: files(kept) == files(b.run))
    assert len(files(kept)) == 5
    stream.close()
    lines.close()


def test_an_answer_that_comes_at_once_finds_the_shipper_that_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host that makes the shipper is held up when its thread has begun; the other end is quick."""

    class Slow(threading.Thread):
        def start(self) -> None:
            super().start()
            time.sleep(0.3)

    monkeypatch.setattr("threading.Thread", Slow)
    b = Records(tmp_path / "b")
    stream = Stream("b", ServedLines("b", b.run), "a")
    lines = CoordinatorLines("a", {"b": stream.away})
    lines.begin(tmp_path / "a")
    b.write(0)
    stream.begin()
    b.write(1)
    until(lambda: files(tmp_path / "a" / "hosts" / "b") == files(b.run), 5.0)
    a = Records(tmp_path / "a")
    a.write(0)
    lines.look()
    a.write(1)
    until(lambda: files(b.run / "hosts" / "a") == files(a.run), 5.0)
    stream.close()
    lines.close()


def test_an_answer_over_the_stream_before_counts_for_nothing(tmp_path: Path) -> None:
    """It is being taken when the host begins to follow another one, which has nothing of these records."""
    b, is_taken, goes_on = Records(tmp_path / "b"), threading.Event(), threading.Event()
    for number in range(0, 100, 5):
        for _ in range(10):
            b.write(number)
    served, before = ServedLines("b", b.run), StreamEnd()
    served.follow("a", before)
    sizes = tuple(("b", name, len(data)) for name, data in files(b.run).items())

    def deliver() -> None:
        is_taken.set()
        goes_on.wait(0.5)
        served.take(StoredSizesHostMessage(sizes, is_last=False), b"")

    connection = before.connect()
    taking = threading.Thread(target=before.take, args=(connection, deliver))
    taking.start()
    assert is_taken.wait(20.0)
    before.close()  # host a is lost
    stream = Stream("b", served, "c")
    lines = CoordinatorLines("c", {"b": stream.away})
    lines.begin(tmp_path / "c")
    stream.begin()
    goes_on.set()
    taking.join()
    until(lambda: files(tmp_path / "c" / "hosts" / "b") == files(b.run), 5.0)
    stream.close()
    lines.close()


def test_records_go_when_no_other_frame_waits() -> None:
    end = StreamEnd()
    order, records = frame(TickHostMessage(1, 1)), b"records"
    assert not end.send_last(records)  # there is no connection: nothing piles up
    connection = end.connect()
    end.resume(connection, 0)
    end.send(order)
    assert not end.send_last(records)
    frames = chain.from_iterable(end.bundles(connection))
    assert next(frames) == order
    assert end.send_last(records)
    assert next(frames) == records
    end.close()
    assert not end.send_last(records)
