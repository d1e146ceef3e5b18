"""Every Serve configuration is what Ray and the application both accept."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.serve.schema import LoggingConfig, ServeDeploySchema

from serve_app.build import INGRESS_DRAIN_MARGIN_S, bind
from serve_app.launch import SERVE_SWITCHES
from tests.deploy.configs import ALL, BARE_METAL, DEPLOY, config_of, only_app, read

each = pytest.mark.parametrize("path", ALL.values(), ids=ALL.keys())


def environment_file(path: Path) -> dict[str, str]:
    lines = (line.strip() for line in path.read_text().splitlines())
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))  # type: ignore[misc]


@each
def test_rays_schema_accepts_it(path: Path) -> None:
    ServeDeploySchema.model_validate(read(path))


@each
def test_rays_schema_knows_every_key(path: Path) -> None:
    """It ignores unknown ones, so a misspelt key would do nothing."""
    tree = read(path)
    schema = ServeDeploySchema.model_fields
    assert set(tree) <= set(schema)
    assert set(tree["http_options"]) <= set(schema["http_options"].annotation.model_fields)  # type: ignore[union-attr]
    assert set(only_app(tree)) <= {"name", "route_prefix", "import_path", "args", "deployments"}
    assert set(tree.get("logging_config", {})) <= set(LoggingConfig.model_fields)


@each
def test_the_application_accepts_it(path: Path) -> None:
    """No unknown key, and it binds."""
    bind(config_of(read(path)))


@each
def test_overridden_deployments_exist(path: Path) -> None:
    names = {deployment["name"] for deployment in only_app(read(path)).get("deployments", ())}
    assert names <= {"ingress", "engine", "exporters"}


@each
def test_it_names_this_application(path: Path) -> None:
    app = only_app(read(path))
    assert (app["import_path"], app["route_prefix"]) == ("serve_app.build:build_app", "/")


@each
def test_a_whole_node_is_checked_before_its_model_is_loaded(path: Path) -> None:
    config = config_of(read(path))
    assert not config.placement.whole_node or config.placement.preflight


@each
def test_what_listens_on_all_addresses_keeps_its_ingress_off_the_head(path: Path) -> None:
    tree = read(path)
    if tree["http_options"]["host"] == "0.0.0.0":
        ingress = {d["name"]: d for d in only_app(tree)["deployments"]}["ingress"]
        assert ingress["ray_actor_options"]["num_cpus"] > 0


def test_the_bare_metal_environment_has_the_applications_switches() -> None:
    found = environment_file(DEPLOY / "bare-metal" / "ray.env")
    assert {name: found.get(name) for name in SERVE_SWITCHES} == SERVE_SWITCHES


def test_one_node_and_many_differ_in_numbers_only() -> None:
    one, many = (only_app(read(BARE_METAL[f"kimi-k2.6-b300{suffix}"]))["args"] for suffix in ("", "-nodes"))
    for tree in (one, many):
        del tree["replica"]["num_replicas"], tree["ingress"]["num_replicas"], tree["admission"]["max_concurrent"]
    assert one == many


def test_the_units_wait_longer_than_the_longest_drain() -> None:
    """systemd kills what has not stopped by then."""
    longest = max(config_of(read(path)).replica.graceful_shutdown_timeout_s for path in BARE_METAL.values())
    unit = (DEPLOY / "bare-metal" / "systemd" / "ddtree-ray-worker.service").read_text()
    (patience,) = (line.split("=")[1] for line in unit.splitlines() if line.startswith("TimeoutStopSec="))
    assert int(patience) > longest + INGRESS_DRAIN_MARGIN_S
