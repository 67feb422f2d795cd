"""The nodes of a replica start together, end together, and notice each other's loss in bounded time."""

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from meshpar.launchers.agent import meeting
from meshpar.launchers.agent.meeting import NodeMeeting, Start
from tests.support import patience


class Replica:
    """The nodes of replica 1, each a meeting of this process."""

    def __init__(self, file: Path, nodes: int) -> None:
        self.file, self.nodes = file, nodes
        self.stack = ExitStack()
        self.meetings = [self.node(number) for number in range(nodes)]

    def node(self, number: int) -> NodeMeeting:
        return self.stack.enter_context(NodeMeeting(self.file, 1, number, self.nodes))

    def gather(self, *meetings: NodeMeeting, wait_s: float = 30.0) -> list[Start | None]:
        """Let nodes gather at the same time; by default all."""
        meetings = meetings or tuple(self.meetings)
        with ThreadPoolExecutor(len(meetings)) as pool:
            return list(pool.map(lambda member: member.gather(lambda: False, wait_s), meetings))

    def until(self, true: Callable[[], object]) -> None:
        def kept() -> object:
            for member in self.meetings:
                member.keep()
            return true()

        patience.until(kept, 20)


def leave(*meetings: NodeMeeting) -> None:
    """Let nodes end at the same time: each waits a while for the others."""
    with ThreadPoolExecutor(len(meetings)) as pool:
        list(pool.map(lambda member: member.__exit__(None, None, None), meetings))


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Replica]:
    made = Replica(tmp_path / "logs/replica-1.address", 3)
    yield made
    leave(*made.meetings)


def test_a_start_is_the_same_on_all_nodes_and_so_is_its_end(replica: Replica) -> None:
    first, *others = replica.gather()
    assert first is not None and others == [first, first]
    for node, code in ((2, -9), (0, 1)):
        replica.meetings[node].tell(code)
    assert replica.meetings[0].verdict() is None
    replica.until(lambda: all(len(member.codes) == 2 for member in replica.meetings))
    replica.meetings[1].tell(75)
    replica.until(lambda: all(member.verdict() == 75 for member in replica.meetings))
    second, *others = replica.gather()
    assert second is not None and others == [second, second]
    assert second.run_id != first.run_id and second.series != first.series  # 75 is not the fault of these ranks
    for member in replica.meetings:
        member.tell(1)
    replica.until(lambda: all(member.verdict() == 1 for member in replica.meetings))
    third = replica.gather()[0]
    assert third is not None and third.series == second.series and third.run_id != second.run_id


@pytest.mark.parametrize(
    ("codes", "verdict"),
    [((0, 0, 0), 0), ((0, 1, 0), 1), ((143, 1, -9), 143), ((78, 143, 1), 78), ((-9, -9, -9), 1), ((75, 1, 1), 75)],
)
def test_the_end_that_counts(replica: Replica, codes: tuple[int, ...], verdict: int) -> None:
    for member in replica.meetings:
        member.codes = dict(enumerate(codes))
    assert {member.verdict() for member in replica.meetings} == {verdict}


@pytest.mark.parametrize("lost", [0, 2])
def test_all_hear_of_a_lost_node_and_go_on_when_it_is_back(replica, lost, capfd) -> None:
    replica.gather()
    gone = replica.meetings.pop(lost)
    for link in gone._links.values():  # as the kernel does for a killed process
        link.close()
    gone._links = {}
    if gone._server is not None:
        gone._server.close()
    replica.until(lambda: all(member.lost == lost for member in replica.meetings))
    assert replica.gather(*replica.meetings, wait_s=0.2) == [None, None]
    assert f"{replica.meetings[0].names(lost)} at" in capfd.readouterr().err
    assert replica.meetings[0].names(lost) == f"node {3 + lost} of replica 1"
    replica.meetings.insert(lost, replica.node(lost))
    found = replica.gather()
    assert found[0] is not None and found == [found[0]] * 3
    assert [member.lost for member in replica.meetings] == [None] * 3


def test_a_silent_node_is_lost(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its link is cut: nothing closes."""
    replica.gather()
    monkeypatch.setattr(meeting, "SILENT_S", 2.5)
    silent, began = replica.meetings.pop(), time.monotonic()
    replica.until(lambda: all(member.lost == 2 for member in replica.meetings))
    assert time.monotonic() - began > 2 and silent.lost is None
    silent.keep()
    assert silent.lost == 0  # which has closed the connection
    replica.meetings.append(silent)
    assert None not in replica.gather()


def test_an_end_that_is_read_together_with_the_coming_counts(replica: Replica) -> None:
    first = replica.meetings[0]
    address, _, key = first._address.text.partition(" ")
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as node:
        node.sendall(f"come {key} 1\nend 1 143\n".encode())
        patience.until(lambda: first.keep() or first.codes, 20)
        assert first.codes == {1: 143}


def test_a_node_that_is_stopped_while_it_waits_ends_the_others(replica: Replica) -> None:
    first, second, _ = replica.meetings
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(first.gather, lambda: False, 30.0)
        assert (
            second.gather(lambda: bool(second._links) and not second._whom.endswith("1, 5 of replica 1"), 30.0) is None
        )
        second.tell(143)
        assert waiting.result() is None and first.codes == {1: 143}


def test_an_address_of_an_earlier_run_is_left_for_the_new_one(tmp_path: Path) -> None:
    """Something else may listen there now: it accepts, and says nothing."""
    file = tmp_path / "replica-0.address"
    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor() as pool:
        file.write_text(f"127.0.0.1:{other.getsockname()[1]} old\n")
        second = NodeMeeting(file, 0, 1, 2)
        waiting = pool.submit(second.gather, lambda: False, 30.0)
        other.accept()
        first = NodeMeeting(file, 0, 0, 2).__enter__()
        assert first.gather(lambda: False, 30.0) == waiting.result() is not None
    leave(first, second)


def test_a_second_process_with_the_number_of_a_node_takes_its_place(replica, capfd) -> None:
    replica.gather()
    twin = replica.node(2)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(twin.gather, lambda: bool(twin._links) and replica.meetings[0].lost is not None, 30.0)
        replica.until(lambda: replica.meetings[2]._taken)
        assert waiting.result() is None
    assert replica.meetings[2].gather(lambda: False, 30.0) is None
    assert "another process came as node 5 of replica 1" in capfd.readouterr().err
    leave(twin, *replica.meetings)
    again = Replica(replica.file.with_name("again"), 3)  # each node has its own number, and starts once
    assert None not in again.gather()
    leave(*again.meetings)


def test_one_node_needs_nobody(tmp_path: Path) -> None:
    with NodeMeeting(tmp_path / "file", 0, 0, 1) as alone:
        assert alone.gather(lambda: False, 0.0) is not None
        alone.tell(-9)
        assert alone.verdict() == -9 and not list(tmp_path.iterdir())


def test_the_key_of_a_meeting_is_for_its_user_alone_and_no_link_is_followed(tmp_path: Path) -> None:
    other, file = tmp_path / "other", tmp_path / "logs/replica-1.address"
    other.write_text("as it was")
    file.parent.mkdir()
    file.with_name(f"{file.name}.new").symlink_to(other)
    with NodeMeeting(file, 1, 0, 2):
        assert file.stat().st_mode & 0o777 == 0o600
    assert other.read_text() == "as it was"


def test_a_peer_that_sends_without_end_is_read_in_pieces_and_one_without_line_ends_is_left() -> None:
    for endless, kept in ((b"waits for nobody\n", True), (b"x" * 17, False)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.setblocking(False)
            sent = 0
            with suppress(BlockingIOError):
                while True:
                    sent += theirs.send(endless * 256)
            link = meeting._Link(ours)
            read = sum(len(" ".join(line)) + 1 for line in link.lines())
            assert sent > 1 << 17 and read <= 1 << 17, "a call returns while the peer still sends"
            assert link.closed is not kept and (read > 0) is kept
