"""The chaos command: its judge, its link, its list of faults, and a short run of the real thing."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from pathlib import Path

import pytest

from tests.running import zfabric
from zfabric.chaos import judge
from zfabric.chaos.judge import Seen, expected
from zfabric.chaos.proxy import HOST, Proxy
from zfabric.chaos.scenarios import BY_NAME, SCENARIOS
from zfabric.processes import Use

ROOT = Path(__file__).resolve().parent.parent
BALANCED = {"residual_items": 0, "residual_tokens": 0}
# The quick ones of each kind: a process, the broker, a link, a stranger, a wrong completion.
SHORT = ("worker_killed", "broker_killed", "link_bounced", "nonsense_workers", "wrong_completions",
         "producer_exits")  # fmt: skip


def whole() -> Seen:
    seen = Seen()
    for number in (1, 2, 3):
        payload = b"item %d" % number
        seen.payloads[number] = payload
        seen.results[number] = [("ok", expected(payload))]
    return seen


# -- the judge ------------------------------------------------------------------------------------


def test_judge_finds_nothing_in_a_run_without_faults() -> None:
    assert judge.broken(whole(), BALANCED) == []


def test_judge_finds_a_lost_item() -> None:
    seen = whole()
    del seen.results[2]
    assert judge.broken(seen, BALANCED) == ["no result for 1 item (the first is 2)"]


def test_judge_finds_a_result_that_is_visible_twice() -> None:
    seen = whole()
    seen.results[3] *= 2
    assert judge.broken(seen, BALANCED) == ["two results for 1 item (the first is 3)"]


@pytest.mark.parametrize("result", [("ok", b"sim:other"), ("failed", b"{}"), ("dead", b"")])
def test_judge_finds_a_wrong_result(result: tuple[str, bytes]) -> None:
    seen = whole()
    seen.results[1] = [result]
    assert len(judge.broken(seen, BALANCED)) == 1


def test_judge_takes_the_end_that_a_scenario_excuses_and_no_other() -> None:
    seen = whole()
    seen.results[1] = [("dead", b"{}")]
    seen.excused[1] = frozenset({"dead"})
    assert judge.broken(seen, BALANCED) == []
    seen.results[1] = [("failed", b"{}")]
    assert len(judge.broken(seen, BALANCED)) == 1


def test_judge_finds_a_result_that_nobody_asked_for() -> None:
    seen = whole()
    seen.results[9] = [("ok", b"")]
    assert judge.broken(seen, BALANCED) == ["a result for item 9, which nobody submitted"]


@pytest.mark.parametrize("unit", ["items", "tokens"])
def test_judge_finds_books_that_do_not_balance(unit: str) -> None:
    status = {**BALANCED, f"residual_{unit}": -4}
    assert judge.broken(whole(), status) == [f"residual of -4 {unit}"]


def test_judge_finds_descriptors_and_threads_that_stay() -> None:
    before = Use(0.0, 0, 30, 5)
    assert judge.leaks(before, Use(9.0, 9, 40, 6)) == []
    assert len(judge.leaks(before, Use(9.0, 9, 90, 5))) == 1
    assert len(judge.leaks(before, Use(9.0, 9, 30, 50))) == 1


def test_times_to_recover_are_a_median_and_the_worst() -> None:
    assert judge.summary([3.0, 1.0, 2.0]) == (2.0, 3.0)
    assert judge.summary([]) == (None, None)


# -- the link -------------------------------------------------------------------------------------


@pytest.fixture
def echo():
    """The port of a server that sends back what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        def answer(connection: socket.socket) -> None:
            with connection, contextlib.suppress(ConnectionError):
                while data := connection.recv(1_024):
                    connection.sendall(data)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def test_link_passes_on_what_it_is_given(echo: int) -> None:
    with Proxy((echo,), 1), socket.create_connection((HOST, echo), 5) as connection:
        connection.sendall(b"hello")
        assert connection.recv(16) == b"hello"


def test_link_that_is_broken_ends_its_connections_and_takes_new_ones(echo: int) -> None:
    with Proxy((echo,), 1) as proxy:
        with socket.create_connection((HOST, echo), 5) as connection:
            connection.sendall(b"a")
            assert connection.recv(16) == b"a"
            proxy.break_links(reset=True)
            with pytest.raises(ConnectionResetError):
                assert connection.recv(16) == b"never"
        with socket.create_connection((HOST, echo), 5) as connection:
            connection.sendall(b"b")
            assert connection.recv(16) == b"b"


def test_link_that_is_cut_takes_no_connection(echo: int) -> None:
    with Proxy((echo,), 1) as proxy:
        proxy.cut = True
        with socket.create_connection((HOST, echo), 5) as connection:
            connection.settimeout(5)
            try:
                connection.sendall(b"x")
                assert connection.recv(16) == b""
            except ConnectionError:
                pass


@pytest.mark.parametrize("way", ["silent_up", "silent_down"])
def test_link_that_went_one_way_says_nothing(echo: int, way: str) -> None:
    with Proxy((echo,), 1) as proxy:
        setattr(proxy, way, True)
        with socket.create_connection((HOST, echo), 5) as connection:
            connection.settimeout(0.3)
            connection.sendall(b"x")
            with pytest.raises(TimeoutError):
                connection.recv(16)


def test_link_can_repeat_bytes(echo: int) -> None:
    with Proxy((echo,), 1) as proxy, socket.create_connection((HOST, echo), 5) as connection:
        proxy.repeat_one_of = 1
        connection.sendall(b"ab")
        got = b""
        while len(got) < 8:
            got += connection.recv(16)
        assert got == b"ab" * 4


# -- the list -------------------------------------------------------------------------------------


def test_every_fault_has_a_scenario_or_a_test_that_is_there() -> None:
    rows = re.findall(r"^\| (\d+) \| .* \| (.*) \|$", (ROOT / "docs/chaos.md").read_text(), re.M)
    assert [int(number) for number, _ in rows] == list(range(1, 25))
    for number, how in rows:
        scenarios = re.findall(r"`(\w+)`", how)
        files = re.findall(r"tests/\w+\.py", how)
        assert scenarios or files, number
        for name in scenarios:
            assert int(number) in BY_NAME[name].faults, (number, name)
        for file in files:
            assert (ROOT / file).exists(), file
    told = {name for _, how in rows for name in re.findall(r"`(\w+)`", how)}
    assert told == set(BY_NAME)


def test_names_are_unique_and_each_says_what_it_does() -> None:
    assert len(BY_NAME) == len(SCENARIOS)
    assert all(s.summary and s.faults for s in SCENARIOS)


# -- the real thing -------------------------------------------------------------------------------


def test_unknown_scenario_is_refused_with_the_way_to_the_names(tmp_path: Path) -> None:
    done = zfabric("chaos", "worker_kissed", cwd=tmp_path)
    assert done.returncode == 2
    assert "zfabric chaos --list" in done.stderr


def test_harm_is_not_done_to_a_fabric_of_others(tmp_path: Path) -> None:
    done = zfabric("chaos", "broker_killed", "--against", "127.0.0.1:1", cwd=tmp_path)
    assert done.returncode == 2
    assert "would harm" in done.stderr


@pytest.mark.e2e
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", SHORT)
def test_fabric_holds_under(name: str, tmp_path: Path) -> None:
    done = zfabric("chaos", name, "--seed", 3, "--dir", tmp_path, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    assert " held" in done.stdout
    assert not list(tmp_path.iterdir())
