"""Sources, their order, and that nothing unknown passes."""

import re
from pathlib import Path

import pytest

from serve_app.config import Config, load_config
from serve_app.errors import ConfigError


def test_later_sources_win_key_by_key(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {id: file, source: file}\nengine: {max_running: 3}\n")
    env = {"DDTREE_CONFIG": str(file), "DDTREE_MODEL__ID": "env", "DDTREE_REPLICA__NUM_REPLICAS": "4"}
    config = load_config({"model": {"source": "args"}}, env)
    assert (config.model.id, config.model.source) == ("env", "args")
    assert (config.engine.max_running, config.replica.num_replicas) == (3, 4)


def test_other_environment_variables_are_none_of_its_business() -> None:
    assert load_config({}, {"PATH": "/bin", "DDTREE_CACHE": "/x"}) == Config()


@pytest.mark.parametrize(
    ("args", "env", "param"),
    [
        ({"modle": {}}, {}, "modle"),
        ({"model": {"sorce": "x"}}, {}, "model.sorce"),
        ({"model": {"id": "a b"}}, {}, "model.id"),
        ({"engine": {"max_running": 0}}, {}, "engine.max_running"),
        ({"engine": {"threads": 0}}, {}, "engine.threads"),
        ({"engine": 5}, {}, "engine"),
        ({"speculation": {"budget": 513}}, {}, "speculation.budget"),
        ({}, {"DDTREE_MODEL__SORCE": "x"}, "model.sorce"),
        ({}, {"DDTREE_MODEL__ID": "[1"}, "DDTREE_MODEL__ID"),
        ({}, {"DDTREE_CONFIG": "/no/such/file"}, "DDTREE_CONFIG"),
    ],
)
def test_the_wrong_key_is_named(args: dict[str, object], env: dict[str, str], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(args, env)
    assert caught.value.param == param


def test_every_wrong_key_is_in_the_message() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"a": 1, "model": {"b": 2}}, {})
    assert "a:" in caught.value.message and "model.b:" in caught.value.message


def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("- 1\n")
    with pytest.raises(ConfigError):
        load_config({}, {"DDTREE_CONFIG": str(file)})


def test_a_configuration_of_serve_is_told_apart(tmp_path: Path) -> None:
    """Both are YAML, and deploy/serve has only those."""
    file = tmp_path / "laptop.yaml"
    file.write_text("applications:\n  - args: {model: {id: a}}\n")
    with pytest.raises(ConfigError, match=f"serve run {file}"):
        load_config({}, {"DDTREE_CONFIG": str(file)})


def test_each_wrong_key_says_where_it_was_set(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {sorce: x}\nengine: {threads: 0, max_running: 0}\nreplica: {num_replicas: 0}\n")
    env = {"DDTREE_CONFIG": str(file), "DDTREE_ENGINE__MAX_RUNNING": "-1"}
    with pytest.raises(ConfigError) as caught:
        load_config({"replica": {"num_replicas": -1}}, env)
    told = {
        problem.split(":")[0] for problem in caught.value.message.removeprefix("invalid configuration: ").split("; ")
    }
    assert told == {
        f"model.sorce (from {file})", f"engine.threads (from {file})",
        "engine.max_running (from DDTREE_ENGINE__MAX_RUNNING)", "replica.num_replicas",
    }  # fmt: skip


def test_the_tree_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().model.id = "x"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"DDTREE_HOME": "/x"}, "home (from DDTREE_HOME): unknown key"),
        ({"DDTREE_SPECULATION__BUGDET": "3"}, "speculation.bugdet (from DDTREE_SPECULATION__BUGDET): unknown key"),
        ({"DDTREE_SPECULATION__BUDGET": "9999"}, "(from DDTREE_SPECULATION__BUDGET): must be from 0 to 512, or auto"),
        (
            {"DDTREE_ADMISSION__KEYS": "[{name: a, hash: b, limit: 3}]"},
            "admission.keys[0].limit (from DDTREE_ADMISSION__KEYS): unknown key",
        ),
        ({"DDTREE_ENGINE__MAX_RUNNING": "0"}, "must be greater than or equal to 1"),
    ],
)
def test_what_is_wrong_is_said_plainly_and_where_it_came_from(env: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(env=env)
    assert says in caught.value.message and "Input" not in caught.value.message


@pytest.mark.parametrize("key", ["speculation.budget", "engine.threads", "replica.num_gpus", "model.context_length"])
@pytest.mark.parametrize("value", ["true", "off"])
def test_a_boolean_is_no_number(key: str, value: str) -> None:
    """YAML reads on, off, yes and no as booleans, and a budget of "true" was one node."""
    variable = "DDTREE_" + key.upper().replace(".", "__")
    said = re.escape(f"{key} (from {variable}): must be a number, not {str(value == 'true').lower()}")
    with pytest.raises(ConfigError, match=said) as caught:
        load_config(env={variable: value})
    assert caught.value.param == key


def test_a_full_engine_leaves_room_for_readiness_probes() -> None:
    assert load_config(use_env=False).max_ongoing_requests == 512
    assert load_config({"engine": {"max_running": 64, "max_queued": 512}}, use_env=False).max_ongoing_requests == 640
    assert load_config({"replica": {"max_ongoing_requests": 4}}, use_env=False).max_ongoing_requests == 4


def test_a_boolean_is_a_boolean() -> None:
    assert load_config({"speculation": {"spine_first": True}}, use_env=False).speculation.spine_first


@pytest.mark.parametrize("value", [".inf", "inf", "1e99"])
def test_a_time_that_never_ends_is_refused(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(env={"DDTREE_INGRESS__REQUEST_TIMEOUT_S": value})
    assert caught.value.param == "ingress.request_timeout_s"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("model: {id: a}\nmodel: {id: b}", "model"),
        ("model: {id: a, id: b}", "model.id"),
        ("a: [{b: 1}, {c: {d: 1, d: 2}}]", "a[1].c.d"),
        ("a: &x {b: *x, c: 1, c: 2}", "a.c"),
    ],
)
def test_a_key_that_is_there_twice_is_refused(tmp_path: Path, text: str, key: str) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="twice") as caught:
        load_config(env={"DDTREE_CONFIG": str(path)})
    assert caught.value.param == key and str(caught.value) == f"{key} is there twice in {path}"


def test_what_is_no_yaml_is_told_in_one_line(tmp_path: Path) -> None:
    """The launcher's last line says why."""
    path = tmp_path / "cut.yaml"
    path.write_text("model: [")
    with pytest.raises(ConfigError) as caught:
        load_config(env={"DDTREE_CONFIG": str(path)})
    assert str(path) in caught.value.message and "\n" not in caught.value.message
