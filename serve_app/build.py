"""The only place that binds deployments. `serve run serve_app.build:build_app model.id=x`, or `args:` in YAML.

Ray reads the raw annotation of a builder's argument, so this module must not use `from __future__ import annotations`.

What this module does not do: read models; configuration errors show before anything is deployed.
"""

from typing import Any, cast

import yaml
from ray import serve
from ray.serve import Application, Deployment

from serve_app import tracing
from serve_app.config import Config, load_config
from serve_app.errors import ConfigError
from serve_app.exporter import ExporterDirectory
from serve_app.ingress import Ingress
from serve_app.logs import serve_options
from serve_app.replica import ENGINE_FACTORY, Replica

# What an ingress needs beyond its replicas' own drain, to pass on their last frames.
INGRESS_DRAIN_MARGIN_S = 5


def build_app(args: dict[str, Any]) -> Application:
    """Application for builder arguments: nested mappings, or dotted keys as the command line gives them.

    Raises:
        ConfigError: names every wrong key by its path.
    """
    return bind(load_config(_nested(args)))


def app_from_env() -> Application:
    """Application from the environment and the file it names alone (`serve_app:app`)."""
    return bind(load_config())


def bind(config: Config, engine_factory: str = ENGINE_FACTORY) -> Application:
    """Directory ← replicas ← ingress. `engine_factory`: see `Replica`."""
    tracing.check(config.tracing)
    log = serve_options(config.logging)
    directory = _deployment(
        ExporterDirectory,
        name="exporters",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        # Every process calls every few seconds.
        logging_config=serve_options(config.logging, enable_access_log=False),
    ).bind(config.metrics.heartbeat_s)
    replica, ingress = config.replica, config.ingress
    replicas = _deployment(
        Replica,
        name="engine",
        logging_config=log,
        num_replicas=replica.num_replicas,
        max_ongoing_requests=replica.max_ongoing_requests,
        ray_actor_options={"num_cpus": replica.num_cpus, "num_gpus": replica.num_gpus},
        health_check_period_s=replica.health_check_period_s,
        health_check_timeout_s=replica.health_check_timeout_s,
        graceful_shutdown_timeout_s=replica.graceful_shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=replica.max_constructor_retry_count,
    ).bind(config, engine_factory, directory)
    return _deployment(
        Ingress,
        name="ingress",
        logging_config=log,
        num_replicas=ingress.num_replicas,
        max_ongoing_requests=ingress.max_ongoing_requests,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=replica.graceful_shutdown_timeout_s + INGRESS_DRAIN_MARGIN_S,
        graceful_shutdown_wait_loop_s=0.5,
    ).bind(config, replicas, directory)


def _deployment(cls: type, **options: Any) -> Deployment:
    # The decorator's overloads hide that with a class it returns a deployment.
    return cast(Deployment, serve.deployment(cls, **options))


def _nested(args: dict[str, Any]) -> dict[str, Any]:
    """{"model.id": "x"} → {"model": {"id": "x"}}; command-line values are strings, read as YAML scalars."""
    tree: dict[str, Any] = {}
    for path, value in args.items():
        *parents, last = path.split(".")
        node = tree
        for parent in parents:
            child = node.setdefault(parent, {})
            if not isinstance(child, dict):
                raise ConfigError(f"{path} and {parent} are both given", param=path)
            node = child
        if parents and isinstance(value, str):
            try:
                value = yaml.safe_load(value)
            except yaml.YAMLError:
                raise ConfigError(f"{path} is not a YAML value", param=path) from None
        if isinstance(value, dict) and isinstance(node.get(last), dict):
            node[last].update(value)
        else:
            node[last] = value
    return tree
