"""The chaos command: its judge, its link, its list of faults, and a short run of the real thing."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.running import PATIENCE_S, start_zfabric, until, zfabric
from zfabric.access import KEY_ROLES
from zfabric.chaos import judge, stage
from zfabric.chaos.judge import Seen, expected
from zfabric.chaos.peers import Rogue
from zfabric.chaos.proxy import HOST, Proxy
from zfabric.chaos.scenarios import BY_NAME, SCENARIOS
from zfabric.client import Client
from zfabric.keys import Keyring
from zfabric.processes import Processes, Use, children
from zfabric.protocol import Type
from zfabric.results import Item
from zfabric.shapes import Shape

ROOT = Path(__file__).resolve().parent.parent
BALANCED = {"residual_items": 0, "residual_tokens": 0}
# The quick ones of each kind: a process, the broker, a link, a stranger, a wrong completion.
SHORT = ("worker_killed", "broker_killed", "link_bounced", "nonsense_workers", "wrong_completions",
         "producer_exits")  # fmt: skip
# Of those that may be done to others: each kind of name that a run makes there.
TIDY = ("name_collision", "wrong_completions", "producer_exits", "come_and_go")


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


def test_engine_that_is_gone_already_is_as_good_as_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends between the look for a worker's processes and the look at each of them."""
    with Processes() as processes:
        fabric = stage.Stage(processes, tmp_path)
        worker = fabric.workers["gpu0"] = processes.start(["sleep", "60"])
        gone, engine = processes.start(["true"]), processes.start(["sleep", "60"])
        gone.wait()
        monkeypatch.setattr(
            stage, "children", lambda pid: [gone.pid, engine.pid] if pid == worker.pid else []
        )
        fabric.kill_engine("gpu0")
        assert engine.wait(PATIENCE_S) == -signal.SIGKILL


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


# -- a fabric of somebody else's ------------------------------------------------------------------


@contextlib.contextmanager
def fabric_of_others(place: Path, keys: Path | None = None, *flags: object) -> Iterator[str]:
    """A broker's process; its address."""
    with broker_of_others(place, keys, *flags) as (_, address):
        yield address


@contextlib.contextmanager
def broker_of_others(
    place: Path, keys: Path | None = None, *flags: object
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    words = ["broker", "--port", 0, "--memory", "--json", *(["--keys", keys] if keys else [])]
    with start_zfabric(*map(str, (*words, *flags)), cwd=place) as broker:
        try:
            yield broker, json.loads(broker.stdout.readline())["producers"]
        finally:
            broker.terminate()
            broker.communicate(timeout=PATIENCE_S)


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    """Keys of every role; each user is called like its role."""
    made = Keyring(tmp_path / "keys")
    for role in KEY_ROLES:
        made.make(role, role)
    return made


def names_in(address: str, key: Path | None = None) -> dict[str, list[str]]:
    """What the fabric lists: producers, workers, models."""
    client = Client(address, role="operator", key=key or "none")
    try:
        return {
            "producers": [row["name"] for row in client.request("producers.ls")],
            "workers": [row["name"] for row in client.request("workers")],
            "models": [row["model"] for row in client.stats()["models"]],
        }
    finally:
        client.close()


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_what_a_run_leaves_with_others_is_nothing_and_what_was_theirs_stays(tmp_path: Path) -> None:
    with fabric_of_others(tmp_path) as address:
        with Client(address, name="chaos-nightly", key="none") as theirs:
            theirs.submit(Item(Shape.of("chaos-model", "x"), b"kept", 7))
            # It leaves with an item that waits for a worker, and one that is gone.
            with Rogue(_workers_of(theirs)) as gone:
                gone.hello("chaos-gpu0", "m")
                gone.hear(Type.WELCOME)
                gone.tell(Type.BYE, {"reason": "done"})
            theirs.close()
        before = names_in(address)
        assert before == {
            "producers": ["chaos-nightly"], "workers": ["chaos-gpu0"],
            "models": ["chaos-model", "m"],
        }  # fmt: skip
        words = ("chaos", *TIDY, "--against", address, "--cycles", 60)
        done = zfabric(*words, "--json", "--dir", tmp_path, cwd=tmp_path, timeout=100)
        assert done.returncode == 0, done.stderr
        rows = json.loads(done.stdout)["rows"]
        assert [(row["items"] > 0, row["left"]) for row in rows] == [(True, [])] * len(TIDY)
        assert names_in(address) == before
        assert not list(tmp_path.iterdir())


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_run_against_a_fabric_with_keys_takes_one_of_each_role(
    tmp_path: Path, ring: Keyring
) -> None:
    with fabric_of_others(tmp_path, ring.directory) as address:
        flags = [word for role in ("producer", "operator") for word in ("--key", _file(ring, role))]
        words = ("chaos", *TIDY, "other_version", "port_scan", "--against", address)
        env = {"ZFABRIC_KEY": str(_file(ring, "worker"))}
        done = zfabric(*words, *flags, "--cycles", 40, cwd=tmp_path, timeout=100, env=env)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(" held") == len(TIDY) + 2
        empty = {"producers": [], "workers": [], "models": []}
        assert names_in(address, _file(ring, "operator")) == empty
        # The names that were claimed are anybody's again.
        with contextlib.closing(
            Client(address, role="operator", key=_file(ring, "operator"))
        ) as operator:
            forgotten = operator.stats()["events_total"]
            assert forgotten["worker_forgotten"] > 0 and forgotten["producer_forgotten"] > 0


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ((), "the broker asks for a key"),
        (("operator",), "no key of role producer or worker was given"),
        (("producer", "worker", "monitor"), "is a monitor's key"),
        (("producer", "worker", "worker"), "are both a worker's key"),
    ],
)
def test_key_whose_role_is_too_small_is_refused_with_the_three_that_are_needed(
    roles: tuple[str, ...], said: str, tmp_path: Path, ring: Keyring
) -> None:
    with fabric_of_others(tmp_path, ring.directory) as address:
        flags = [word for role in roles for word in ("--key", _file(ring, role))]
        done = zfabric("chaos", "port_scan", "--against", address, *flags, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr
        assert "one each of role producer, worker and operator" in done.stderr
        assert "zfabric keys make" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.e2e
@pytest.mark.parametrize("role", ["producer", "worker", "operator"])
def test_key_that_was_revoked_is_refused_before_anything_is_done(
    role: str, tmp_path: Path, ring: Keyring
) -> None:
    with fabric_of_others(tmp_path, ring.directory) as address:
        with contextlib.closing(
            Client(address, role="operator", key=_file(ring, "monitor"))
        ) as monitor:
            ring.revoke(role)
            until(lambda: monitor.stats()["events_total"].get("keys_reloaded"))
        flags = [
            word
            for each in ("producer", "worker", "operator")
            for word in ("--key", _file(ring, each))
        ]
        done = zfabric("chaos", "port_scan", "--against", address, *flags, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert f"refuses the key of {role} ({role})" in done.stderr
        nothing = {"producers": [], "workers": [], "models": []}
        assert names_in(address, _file(ring, "monitor")) == nothing


def test_key_without_a_fabric_of_others_is_refused(tmp_path: Path) -> None:
    done = zfabric("chaos", "port_scan", "--key", "x.key", cwd=tmp_path)
    assert done.returncode == 2
    assert "--key goes with --against" in done.stderr


def key_flags(ring: Keyring) -> list[str]:
    """A key of each role that a run plays."""
    roles = ("producer", "worker", "operator")
    return [word for role in roles for word in ("--key", str(_file(ring, role)))]


def _file(ring: Keyring, user: str) -> Path:
    return ring.directory / f"{user}.key"


def _workers_of(client: Client) -> str:
    return f"{client.address.rsplit(':', 1)[0]}:{client.welcome['worker_port']}"


# -- ended by a signal ----------------------------------------------------------------------------


def below(pid: int) -> list[int]:
    """Every process that a process has started, and what those have."""
    return [each for child in children(pid) for each in (child, *below(child))]


@pytest.mark.e2e
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "processes", "sign"),
    [
        # The broker is coming up; it and two workers with engines are there; a crowd at work.
        ("broker_killed", 1, signal.SIGTERM), ("worker_stopped", 5, signal.SIGTERM),
        ("worker_stopped", 5, signal.SIGINT), ("disk_limit", 5, signal.SIGINT),
        ("many_workers", 1, signal.SIGTERM),
    ],
)  # fmt: skip
def test_signal_ends_a_run_with_all_that_it_has_started(
    name: str, processes: int, sign: int, tmp_path: Path
) -> None:
    with start_zfabric("chaos", name, "--dir", str(tmp_path), cwd=tmp_path) as chaos:
        until(lambda: len(below(chaos.pid)) >= processes)
        started = below(chaos.pid)
        assert [each.is_dir() for each in tmp_path.iterdir()] == [True]
        chaos.send_signal(sign)
        # Once more, as somebody does who is in a hurry.
        chaos.send_signal(sign)
        out, err = chaos.communicate(timeout=PATIENCE_S)
    assert (chaos.returncode, out) == (128 + sign, ""), err
    assert "Traceback" not in err
    until(lambda: not [pid for pid in started if Path(f"/proc/{pid}").exists()])
    assert not list(tmp_path.iterdir())


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_signal_ends_a_run_against_others_and_takes_its_names_away(tmp_path: Path) -> None:
    with fabric_of_others(tmp_path) as address:
        words = ("chaos", "come_and_go", "--for", "60", "--against", address)
        with start_zfabric(*words, "--dir", str(tmp_path), cwd=tmp_path) as chaos:
            until(lambda: len(names_in(address)["workers"]) > 10)
            chaos.terminate()
            _, err = chaos.communicate(timeout=PATIENCE_S)
        assert chaos.returncode == 143, err
        assert names_in(address) == {"producers": [], "workers": [], "models": []}
        assert not list(tmp_path.iterdir())


NOTHING: dict[str, list[str]] = {"producers": [], "workers": [], "models": []}


@pytest.mark.e2e
@pytest.mark.timeout(120)
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_signal_in_the_midst_of_tidying_does_not_end_it(tmp_path: Path, sign: int) -> None:
    with fabric_of_others(tmp_path) as address:
        words = ("chaos", "many_workers", "--against", address, "--dir", str(tmp_path))
        with start_zfabric(*words, cwd=tmp_path) as chaos:
            with contextlib.closing(Client(address, role="operator", key="none")) as operator:
                # Producers go first: some 500 workers are on the lists yet.
                until(lambda: operator.stats()["events_total"].get("producer_forgotten"))
                chaos.send_signal(sign)
                left = len(operator.request("workers"))
            out, err = chaos.communicate(timeout=PATIENCE_S)
        assert left > 50
        assert (chaos.returncode, out) == (128 + sign, ""), err
        assert names_in(address) == NOTHING
        assert not list(tmp_path.iterdir())


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_second_signal_ends_a_run_that_tidies_at_once(tmp_path: Path) -> None:
    with broker_of_others(tmp_path) as (broker, address):
        words = ("chaos", "come_and_go", "--for", "60", "--against", address)
        with start_zfabric(*words, "--dir", str(tmp_path), cwd=tmp_path) as chaos:
            until(lambda: len(names_in(address)["workers"]) > 10)
            # Nobody answers who could forget a name.
            broker.send_signal(signal.SIGSTOP)
            try:
                chaos.terminate()
                with pytest.raises(subprocess.TimeoutExpired):
                    chaos.wait(2.0)
                chaos.terminate()
                _, err = chaos.communicate(timeout=5.0)
            finally:
                broker.send_signal(signal.SIGCONT)
                chaos.kill()
        assert chaos.returncode == 143, err
        assert "Traceback" not in err
        assert not list(tmp_path.iterdir())
