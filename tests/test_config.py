"""Configuration: precedence, errors that name the fix, and one table behind every surface."""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from zfabric import config, config_text
from zfabric.config import KEYS, BrokerConfig, ClientConfig, WorkerConfig
from zfabric.errors import ConfigError


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    here, user = tmp_path / "here", tmp_path / "user"
    here.mkdir()
    user.mkdir()
    return here, user


def load(places: tuple[Path, Path], flags: Any = None, **environ: str) -> config.Config:
    here, user = places
    return config.load(flags, environ=environ, directory=here, user_directory=user)


def write(places: tuple[Path, Path], text: str) -> Path:
    path = places[0] / "zfabric.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_precedence_flag_env_file_user_default(places: tuple[Path, Path]) -> None:
    user = places[1] / "config.toml"
    expected = [(7410, "default")]
    assert load(places).broker.port == 7410
    user.write_text("[broker]\nport = 1001\n", encoding="utf-8")
    expected.append((1001, str(user)))
    assert (load(places).broker.port, load(places).origins["broker.port"]) == expected[-1]
    here = write(places, "[broker]\nport = 1002\n")
    assert (load(places).broker.port, load(places).origins["broker.port"]) == (1002, str(here))
    loaded = load(places, ZFABRIC_BROKER_PORT="1003")
    assert (loaded.broker.port, loaded.origins["broker.port"]) == (1003, "env ZFABRIC_BROKER_PORT")
    loaded = load(places, {"broker.port": "1004"}, ZFABRIC_BROKER_PORT="1003")
    assert (loaded.broker.port, loaded.origins["broker.port"]) == (1004, "flag --port")


def test_broker_address_variable_does_not_clash(places: tuple[Path, Path]) -> None:
    loaded = load(places, ZFABRIC_BROKER="tcp://10.0.0.7:9000", ZFABRIC_BROKER_PORT="8000")
    assert loaded.client.address == ("10.0.0.7", 9000)
    assert loaded.broker.ports == (8000, 8001, 8002)
    assert len({key.env_name for key in KEYS.values()}) == len(KEYS)
    assert "ZFABRIC_CLIENT_BROKER" not in {key.env_name for key in KEYS.values()}


def test_empty_variable_counts_as_not_set(places: tuple[Path, Path]) -> None:
    assert load(places, ZFABRIC_BROKER_PORT="").broker.port == 7410


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[broker]\nprot = 1\n", ["broker.prot", "did you mean broker.port", "zfabric.toml"]),
        ("[brokr]\nport = 1\n", ["brokr", "did you mean broker"]),
        ("port = 1\n", ["'port'", "zfabric.toml"]),
        ("[worker]\nmax-batch = 1\n", ["worker.max_batch"]),
        ("broker = 3\n", ["[broker]", "section"]),
        ("[broker]\nport = 'x'\n", ["broker.port", "zfabric.toml", "an integer from 0 to 65535"]),
        ("[broker]\nport = '7410'\n", ["broker.port", "an integer"]),
        ("[broker]\nport = true\n", ["broker.port", "an integer"]),
        ("[broker]\nport = 70000\n", ["broker.port", "65535"]),
        ("[broker]\nhz = nan\n", ["broker.hz", "a number"]),
        ("[broker]\nlinger_ms = -1\n", ["broker.linger_ms", "(ms)"]),
        ("[broker]\nmemory = 1\n", ["broker.memory", "true or false"]),
        ("[broker]\npacking = 'loose'\n", ["broker.packing", "strict, tight, group"]),
        ("[broker]\nbind = ''\n", ["broker.bind"]),
        ("[worker]\nmax_batch = 0\n", ["worker.max_batch"]),
        ("[client]\nbroker = 'http://x:1'\n", ["tcp://"]),
        ("not toml", ["cannot read", "zfabric.toml"]),
    ],
)
def test_wrong_file_names_key_origin_and_fix(
    places: tuple[Path, Path], text: str, words: list[str]
) -> None:
    write(places, text)
    with pytest.raises(ConfigError) as caught:
        load(places)
    for word in words:
        assert word in str(caught.value)


def test_unknown_variable_and_flag_name_the_nearest(places: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="ZFABRIC_BROKER_PORT"):
        load(places, ZFABRIC_BROKER_PROT="1")
    with pytest.raises(ConfigError, match=r"broker\.port"):
        load(places, {"broker.prot": "1"})


def test_file_that_cannot_be_decoded(places: tuple[Path, Path]) -> None:
    (places[0] / "zfabric.toml").write_bytes(b"\xff\xfe[broker]")
    with pytest.raises(ConfigError, match="cannot read"):
        load(places)


def test_file_with_bom_and_sizes_as_text(places: tuple[Path, Path]) -> None:
    write(places, "\ufeff[broker]\nmax_bytes = '8 GiB'\n")
    assert load(places).broker.max_bytes == 8 << 30
    assert load(places, ZFABRIC_BROKER_MAX_BYTES="512MiB").broker.max_bytes == 512 << 20


@pytest.mark.parametrize("bind", ["0.0.0.0", "192.168.1.4", "::", "*", "gpu-1.example"])
def test_bind_beyond_loopback_needs_insecure(bind: str) -> None:
    with pytest.raises(ConfigError, match=r"without keys.*zfabric keys.*--insecure"):
        BrokerConfig(bind=bind)
    assert BrokerConfig(bind=bind, insecure=True).bind == bind


@pytest.mark.parametrize("bind", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_bind_to_loopback(bind: str) -> None:
    assert BrokerConfig(bind=bind).bind == bind


def test_ports_follow_the_first() -> None:
    assert BrokerConfig().ports == (7410, 7411, 7412)
    assert BrokerConfig(port=0).ports == (0, 0, 0)
    assert BrokerConfig(port=0, stats_port=9).ports == (0, 0, 9)
    assert BrokerConfig(port=65_535, consumer_port=1, stats_port=2).ports == (65_535, 1, 2)
    with pytest.raises(ConfigError, match="65533"):
        BrokerConfig(port=65_534)
    with pytest.raises(ConfigError, match="must differ"):
        BrokerConfig(port=7410, consumer_port=7410)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"memory": True, "data": "d"}, "exclude"),
        ({"lease_s": 1.5}, "twice"),
        ({"max_bytes": 1 << 20}, "payload_bytes_max"),
        ({"port": "7410"}, r"broker\.port"),
        ({"max_bytes": "4 GiB"}, r"broker\.max_bytes"),
        ({"lanes": 4096}, r"broker\.lanes"),
    ],
)
def test_built_directly_it_is_checked_too(wrong: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        BrokerConfig(**wrong)


def test_store_named_by_a_higher_layer_replaces_the_lower(places: tuple[Path, Path]) -> None:
    write(places, "[broker]\ndata = 'store'\n")
    loaded = load(places, {"broker.memory": True})
    assert (loaded.broker.memory, loaded.broker.data) == (True, None)
    loaded = load(places, {"broker.data": "other"}, ZFABRIC_BROKER_MEMORY="yes")
    assert (loaded.broker.memory, loaded.broker.data) == (False, "other")
    with pytest.raises(ConfigError, match="exclude"):
        load(places, {"broker.data": "other", "broker.memory": True})


def test_worker_contract_names_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="--max-tokens, --max-input"):
        WorkerConfig(max_batch=8).contract()
    contract = WorkerConfig(max_batch=8, max_tokens=4096, max_input=512, ragged=True).contract()
    assert (contract.batch_items_max, contract.batch_tokens_max) == (8, 4096)
    assert (contract.input_tokens_max, contract.ragged) == (512, True)
    with pytest.raises(ConfigError, match=r"worker\.name"):
        WorkerConfig(name="n" * 256)


def test_config_is_frozen(places: tuple[Path, Path]) -> None:
    loaded = load(places)
    with pytest.raises(AttributeError):
        loaded.broker.port = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        loaded.origins["broker.port"] = "x"  # type: ignore[index]


def test_template_sets_nothing_until_a_comment_is_taken_away(places: tuple[Path, Path]) -> None:
    text = config_text.template()
    assert max(map(len, text.splitlines())) <= 100
    assert tomllib.loads(text) == {section: {} for section in config.SECTIONS}
    write(places, re.sub(r"^#(?=\w)", "", text, flags=re.MULTILINE))
    loaded, plain = load(places), load((places[1], places[1]))
    assert (loaded.broker, loaded.worker, loaded.client) == (
        plain.broker, plain.worker, plain.client,
    )  # fmt: skip
    from_file = {name for name, origin in loaded.origins.items() if origin != "default"}
    assert from_file == {name for name, key in KEYS.items() if key.default is not None}
    mentioned = {
        f"{section}.{line.lstrip('# ').split(' =')[0]}"
        for section, part in ((p.split("]")[0], p) for p in text.split("\n[")[1:])
        for line in part.splitlines()
        if " =" in line
    }
    assert mentioned == set(KEYS)


def test_show_has_every_key_and_its_origin(places: tuple[Path, Path]) -> None:
    rows = config_text.show(load(places, ZFABRIC_BROKER_HZ="2"))
    assert [row[0] for row in rows] == list(KEYS.values())
    assert (KEYS["broker.hz"], 2.0, "env ZFABRIC_BROKER_HZ") in rows
    assert (KEYS["broker.data"], None, "default") in rows


@pytest.mark.parametrize(
    ("name", "value", "text", "toml"),
    [
        ("broker.port", 65_535, "65535", "65535"),
        ("broker.hz", 0.5, "0.5", "0.5"),
        ("broker.hz", 2.0, "2", "2"),
        ("broker.hold_items", 20_000, "20_000", "20_000"),
        ("broker.max_bytes", 3 << 29, "1536 MiB", '"1536 MiB"'),
        ("broker.max_bytes", 67_108_865, "67108865", "67108865"),
        ("broker.insecure", True, "true", "true"),
        ("worker.model", "llama-3", "llama-3", '"llama-3"'),
    ],
)
def test_value_is_written_as_it_is_read(name: str, value: Any, text: str, toml: str) -> None:
    key = KEYS[name]
    assert (key.text(value), key.toml(value)) == (text, toml)
    read_back = tomllib.loads(f"x = {toml}")["x"]
    for raw, typed in ((text, False), (read_back, True)):
        again = key.value_of(raw, "here", typed=typed)
        assert (again, type(again)) == (value, type(value))


def test_flags_come_from_the_table(places: tuple[Path, Path]) -> None:
    parser = argparse.ArgumentParser()
    config.add_flags(parser, "broker")
    config.add_flags(parser, "client", ["broker"])
    line = "--port 0 --linger 50 --memory --no-insecure --policy fifo --broker [::1]:7410"
    loaded = load(places, config.flags_of(parser.parse_args(line.split())))
    assert (loaded.broker.port, loaded.broker.linger_ms, loaded.broker.policy) == (0, 50.0, "fifo")
    assert (loaded.broker.memory, loaded.broker.insecure) == (True, False)
    assert loaded.client.address == ("::1", 7410)
    assert loaded.origins["broker.insecure"] == "flag --insecure"
    assert config.flags_of(parser.parse_args([])) == {}
    parser.format_help()


def test_no_two_flags_of_a_section_are_the_same() -> None:
    for section in config.SECTIONS:
        flags = [key.flag for key in KEYS.values() if key.section == section]
        assert len(set(flags)) == len(flags)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tcp://127.0.0.1:7410", ("127.0.0.1", 7410)),
        ("gpu-1.example:1", ("gpu-1.example", 1)),
        ("tcp://[::1]:65535", ("::1", 65_535)),
        (" [fe80::1%eth0]:7 ", ("fe80::1%eth0", 7)),
    ],
)
def test_address(text: str, expected: tuple[str, int]) -> None:
    assert config.parse_address(text) == expected
    assert config.parse_address(config.format_address(*expected)) == expected


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "host:port"), ("127.0.0.1", "host:port"), ("tcp://:7410", "host:port"),
        ("tcp://h:7410/", "host:port"), ("h:0", "between 1 and"), ("h:65536", "between 1 and"),
        ("h:seven", "host:port"), ("http://h:1", "only tcp://"), ("ipc:///tmp/x", "only tcp://"),
        ("::1:7410", "brackets"), ("tcp://*:7410", "bind"), ("h h:1", "host:port"),
        ("$x:1", "host:port"), ("-:1", "host:port"), ("ä:1", "host:port"), ("a,b:1", "host:port"),
        ("eth0;h:1", "host:port"), ("[%]:1", "host:port"),
    ],
)  # fmt: skip
def test_address_that_is_wrong_says_why(text: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ClientConfig(broker=text or " ")
    assert word in str(caught.value) or not text
    with pytest.raises(ConfigError, match=word.replace("//", ".*")):
        config.parse_address(text)


@given(st.text() | st.text(max_size=5).map(lambda host: f"{host}:7410"))
def test_address_never_raises_anything_else_and_is_one_to_connect_to(text: str) -> None:
    try:
        host, port = config.parse_address(text)
    except ConfigError:
        return
    assert host
    assert 1 <= port <= 65_535
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(config.format_address(host, port))


@given(st.sampled_from(sorted(KEYS)), st.text(max_size=20))
def test_any_text_is_a_value_or_a_config_error(name: str, text: str) -> None:
    key = KEYS[name]
    try:
        value = key.value_of(text, "env X")
    except ConfigError as error:
        assert name in str(error)
        assert "env X" in str(error)
        return
    assert type(value) is key.kind
