"""Configuration: one parse of every source; whatever is wrong is one line that names the key (P63)."""

import json

import msgspec
import pytest

from rfork.config import KEYS, Config, describe_keys, load_config
from rfork.errors import ConfigError
from rfork.identity import Content


def refusal(argument: str | None = None, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(argument, environ)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_nothing_given_means_defaults():
    assert load_config(None, {}) == Config()


def test_flag_beats_variable_beats_file_beats_default(tmp_path):
    file = tmp_path / "rfork.json"
    file.write_text('{"capacity": 2, "verify": "off", "weights": "live", "fallback": "never"}')
    environ = {"RFORK_CONFIG": str(file), "RFORK_VERIFY": "sample", "RFORK_WEIGHTS": "checkpoint"}
    config = load_config('{"weights": "live"}', environ)
    assert (config.weights, config.verify, config.capacity, config.seed) == ("live", "sample", 2, "on")


def test_every_key_can_be_written_as_a_variable_and_as_json():
    written = {
        "planner_url": ("https://planner:7400/", "https://planner:7400"),
        "seeds": ("a:1,dns+https://b.svc:2,[::1]:3", ("a:1", "dns+https://b.svc:2", "[::1]:3")),
        "fallback": ("safetensors", "safetensors"),
        "weights": ("live", "live"),
        "verify": ("sample", "sample"),
        "seed": ("off", "off"),
        "backend": ("nccl", "nccl"),
        "protocol": ("tcp", "tcp"),
        "stock_nccl_clients": ("on", "on"),
        "group_clients": ("192.0.2.7, 2001:db8::/64", ("192.0.2.7/32", "2001:db8::/64")),
        "ib_device": ('{"0": "mlx5_0"}', {"0": "mlx5_0"}),
        "advertise_host": ("192.0.2.7", "192.0.2.7"),
        "listen": ("[::1]:7401", ("::1", 7401)),
        "port_range": ("20000-20010", (20000, 20010)),
        "content": ("checkpoint:abc", Content("checkpoint", "abc")),
        "capacity": ("3", 3),
        "lease_ttl_s": ("5", 5.0),
        "read_gbps_limit": ("1.5", 1.5),
        "labels": ("zone=a,fabric=b", {"zone": "a", "fabric": "b"}),
        "key": ("0123456789abcdef", "0123456789abcdef"),
        "key_file": ("/run/key", "/run/key"),
        "storage_jitter_s": ("5", 5.0),
        "ca_file": ("/run/ca", "/run/ca"),
        "tls_server_name": ("seed.fleet", "seed.fleet"),
        "tls_cert_file": ("/run/cert", "/run/cert"),
        "tls_key_file": ("/run/cert.key", "/run/cert.key"),
    }
    timeouts = {k.name: ("7", 7.0) for k in KEYS if k.name.endswith("_timeout_s")}
    assert {k.name for k in KEYS} == set(Config.__struct_fields__) == written.keys() | timeouts.keys()
    for name, (text, value) in {**written, **timeouts}.items():
        assert getattr(load_config(None, {f"RFORK_{name.upper()}": text}), name) == value
        assert getattr(load_config(None, {"RFORK_CONFIG": json.dumps({name: text})}), name) == value


def test_unknown_key_is_refused_with_the_one_that_was_meant():
    assert "unknown key 'capcity'; did you mean 'capacity'?" in refusal('{"capcity": 3}')
    assert "unknown key 'planer_url'; did you mean 'planner_url'?" in refusal(RFORK_PLANER_URL="http://a:1")
    assert "known keys: planner_url" in refusal('{"zzz": 3}')


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("capacity", True, "an integer from 1 to 100000, got true"),
        ("capacity", 0, "an integer from 1 to 100000, got 0"),
        ("read_timeout_s", -1, "a number of seconds from 0.1 to 86400, got -1"),
        ("read_timeout_s", "soon", 'a number of seconds from 0.1 to 86400, got "soon"'),
        ("read_timeout_s", False, "a number of seconds from 0.1 to 86400, got false"),
        ("verify", ["full"], 'full, sample or off, got ["full"]'),
        ("seed", True, "on or off, got true"),
        ("seeds", {"a": 1}, "a list of host:port"),
        ("seeds", ["192.0.2.7"], "a list of host:port"),
        ("seeds", ["::1:30000"], "a list of host:port"),
        ("listen", "::1:30000", "host:port, :port or a port"),
        ("listen", 70000, "host:port, :port or a port"),
        ("port_range", "60000-70000", "two ports from 1 to 65535, low-high"),
        ("port_range", [9, 3], "two ports from 1 to 65535, low-high"),
        ("group_clients", ["192.0.2.7/24"], "addresses or networks such as"),
        ("group_clients", ["::ffff:192.0.2.0/120"], "without host bits, zones and mapped IPv4"),
        ("group_clients", ["fe80::1%eth0"], "without host bits, zones and mapped IPv4"),
        ("group_clients", "seed.fleet", "addresses or networks such as"),
        ("group_clients", [], "addresses or networks such as"),
        ("content", "live:abc", "checkpoint:<id>"),
        ("fallback", "remote_instance", "auto, never or a load format"),
        ("planner_url", "planner:7400", "a URL such as http://planner:7700"),
        ("labels", ["zone"], "names with texts"),
        ("ib_device", {"gpu0": "mlx5_0"}, "one for each device index"),
        ("key", "short", "a key of at least 16 characters, got (hidden)"),
    ],
)
def test_bad_value_is_refused_naming_key_expected_and_got(name, value, expected, tmp_path):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({name: value}))
    text = refusal(str(file))
    assert f": {name}: expected " in text
    assert expected in text


@pytest.mark.parametrize("text", ["[1]", '"x"', "{", "{}}", "[" * 100_000, "/no/such/file"])
def test_what_is_no_json_object_is_refused(text):
    assert refusal(text).startswith("--rfork-config")


def test_secrets_are_refused_in_argv_and_hidden_in_repr():
    assert "RFORK_KEY" in refusal('{"key": "0123456789abcdef"}')
    assert "0123456789abcdef" not in refusal('{"key": "0123456789abcdef"}')
    assert "process list" in refusal('{"planner_url": "http://me:pass@planner"}')
    assert "process list" in refusal('{"planner_url": ["http://a:1", "http://me:pass@planner"]}')
    assert "process list" in refusal('{"planner_url": "http://a:1,http://me:pass@planner"}')
    assert "0123456789abcdef" not in repr(load_config(None, {"RFORK_KEY": "0123456789abcdef"}))


@pytest.mark.parametrize("url", ["http://me:hush@a:1", "http://b:2,http://me:hush@a:1", '["http://me:hush@a:1"]'])
def test_a_password_in_an_address_is_never_shown(url):
    config = load_config(None, {"RFORK_PLANNER_URL": url})
    assert "hush" in str(config.planner_url)
    assert "http://***@a:1" in repr(config)
    assert "hush" not in repr(config)


@pytest.mark.parametrize("name", ["PLANNER_URL", "SEEDS"])
@pytest.mark.parametrize(
    "value", ["http://me:hu/sh@a:1", "me:hush@a:1", "https://me:hush@a:99999", '["x","me:hush@a"]']
)
def test_a_refused_address_is_shown_without_its_password(name, value):
    with pytest.raises(ConfigError) as caught:
        load_config(None, {f"RFORK_{name}": value})
    assert "sh@" not in str(caught.value)


def test_several_planners_are_written_with_commas_or_as_a_list():
    for text in ("http://a:1/, https://b", '["http://a:1", "https://b/"]'):
        assert load_config(None, {"RFORK_PLANNER_URL": text}).planner_url == "http://a:1,https://b"
    assert load_config(None, {"RFORK_PLANNER_URL": "http://a:1,"}).planner_url == "http://a:1"
    assert "got" in refusal('{"planner_url": ["http://a,b:1"]}')
    assert load_config('{"planner_url": ["http://a:1", "https://b"]}', {}).planner_url == "http://a:1,https://b"
    assert "several" in refusal('{"planner_url": "http://a:1,b:1"}')
    assert "several" in refusal('{"planner_url": ["http://a:1", 3]}')


def test_kubernetes_service_variables_are_not_settings():
    environ = {
        "RFORK_PLANNER_SERVICE_HOST": "192.0.2.1",
        "RFORK_PLANNER_SERVICE_PORT_HTTP": "7400",
        "RFORK_PLANNER_PORT": "tcp://192.0.2.1:7400",
        "RFORK_PLANNER_PORT_7400_TCP_ADDR": "192.0.2.1",
    }
    assert load_config(None, environ) == Config()


def test_alias_and_empty_variable():
    assert load_config(None, {"RFORK_SCHEDULER_URL": "http://a:1", "RFORK_VERIFY": ""}).planner_url == "http://a:1"
    assert load_config('{"rfork_scheduler_url": "http://a:1"}', {}).planner_url == "http://a:1"
    assert "given twice" in refusal('{"rfork_scheduler_url": "http://a:1", "planner_url": "http://a:1"}')


def test_settings_that_contradict_are_refused():
    assert "got 9000" in refusal('{"listen": ":9000", "port_range": "20000-20010"}')
    assert "got both" in refusal(RFORK_KEY="0123456789abcdef", RFORK_KEY_FILE="/k")


def test_config_travels_to_a_child_process():
    config = load_config('{"content": "checkpoint:abc", "port_range": "1-2"}', {})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=Config) == config


def test_every_key_is_documented():
    rows = {row[0]: row for row in describe_keys()}
    assert rows["capacity"] == ("capacity", "integer from 1", "8", "clients that may read at a time")
    assert all(all(row) for row in rows.values())
