"""The only place that binds deployments. `serve run serve_app.build:build_app model.id=x`, or `args:` in YAML.

Ray reads the raw annotation of a builder's argument, so this module must not use `from __future__ import annotations`.

What this module does not do: read models; configuration errors show before anything is deployed.
"""

from typing import Any, cast

import yaml
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import RequestRouterConfig

from serve_app import tracing
from serve_app.config import Config, load_config
from serve_app.errors import ConfigError
from serve_app.exporter import ExporterDirectory
from serve_app.ingress import Ingress
from serve_app.logs import serve_options
from serve_app.replica import ENGINE_FACTORY, Replica
from serve_app.topology import READ_NODE

# What an ingress needs beyond its replicas' own drain, to pass on their last frames.
INGRESS_DRAIN_MARGIN_S = 5
# How soon routers learn that a replica's own watchdog found it ill.
ROUTING_STATS_PERIOD_S = 2
# Serve wants three failed checks in a row. They only read what the watchdog found, so they come as often as makes three
# of them fit into one of its periods.
CHECKS_PER_PERIOD = 3


def build_app(args: dict[str, Any]) -> Application:
    """Application for builder arguments: nested mappings, or dotted keys as the command line gives them.

    Raises:
        ConfigError: names every wrong key by its path.
    """
    return bind(load_config(_nested(args)))


def app_from_env() -> Application:
    """Application from the environment and the file it names alone (`serve_app:app`)."""
    return bind(load_config())


def bind(
    config: Config,
    engine_factory: str = ENGINE_FACTORY,
    read_node: str = READ_NODE,
    router: RequestRouterConfig | None = None,
) -> Application:
    """Directory ← replicas ← ingress. `engine_factory`, `read_node`: see `Replica`. `router`: instead of what
    `config.routing` says."""
    tracing.check(config.tracing)
    # Ingresses write a line about every generation themselves; the others are asked every few seconds.
    log = serve_options(config.logging, enable_access_log=False)
    directory = _deployment(
        ExporterDirectory,
        name="exporters",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        logging_config=log,
    ).bind(config.metrics.heartbeat_s)
    replica, ingress = config.replica, config.ingress
    replicas = _deployment(
        Replica,
        name="engine",
        logging_config=log,
        max_ongoing_requests=config.max_ongoing_requests,
        ray_actor_options={"num_cpus": replica.num_cpus, "num_gpus": replica.num_gpus},
        **placement_options(config),
        **({"request_router_config": router} if router is not None else routing_options(config)),
        **scaling_options(config),
        health_check_period_s=replica.health_check_period_s / CHECKS_PER_PERIOD,
        health_check_timeout_s=replica.health_check_timeout_s,
        graceful_shutdown_timeout_s=replica.graceful_shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=replica.max_constructor_retry_count,
    ).bind(config, engine_factory, directory, read_node)
    return _deployment(
        Ingress,
        name="ingress",
        logging_config=log,
        num_replicas=ingress.num_replicas,
        # It needs no node of its own: the new ones are there before the old ones go.
        max_surge_percent=100,
        max_ongoing_requests=ingress.max_ongoing_requests,
        ray_actor_options={"num_cpus": 0},
        # Whatever stands in front, requests that are in a process which hangs wait until it is ended.
        health_check_period_s=replica.health_check_period_s / CHECKS_PER_PERIOD,
        health_check_timeout_s=replica.health_check_timeout_s,
        graceful_shutdown_timeout_s=replica.graceful_shutdown_timeout_s + INGRESS_DRAIN_MARGIN_S,
        graceful_shutdown_wait_loop_s=0.5,
    ).bind(config, replicas, directory)


def placement_options(config: Config) -> dict[str, Any]:
    """Serve's options for one replica per node. One bundle with all of a node's GPUs is alone on the node, and never
    spans two; a node without GPUs is counted instead (Serve takes no count beside bundles)."""
    placement, replica = config.placement, config.replica
    if not placement.whole_node:
        return {}
    if not replica.num_gpus:
        return {"max_replicas_per_node": 1}
    bundle: dict[str, float] = {"CPU": replica.num_cpus, "GPU": replica.num_gpus}
    if placement.accelerator_type:
        bundle[f"accelerator_type:{placement.accelerator_type}"] = 0.001
    options: dict[str, Any] = {"placement_group_bundles": [bundle], "placement_group_strategy": "STRICT_PACK"}
    if placement.node_labels:
        options["placement_group_bundle_label_selector"] = [dict(placement.node_labels)]
    return options


def routing_options(config: Config) -> dict[str, Any]:
    """Which of our routers, with its settings."""
    routing = config.routing
    kind = {"prefix": "PrefixRouter", "power_of_two": "TwoChoicesRouter"}[routing.policy]
    options: dict[str, Any] = {
        "request_router_class": f"serve_app.router.serve_router.{kind}",
        "request_router_kwargs": routing.model_dump(exclude={"policy"}),
        "request_routing_stats_period_s": ROUTING_STATS_PERIOD_S,
    }
    return {"request_router_config": RequestRouterConfig(**options)}


def scaling_options(config: Config) -> dict[str, Any]:
    """A fixed number of replicas, or one that follows how busy they are."""
    scaling = config.autoscaling
    if scaling.max_replicas is None:
        return {"num_replicas": config.replica.num_replicas}
    policy = {
        "policy_function": "serve_app.scaling:BusyPolicy",
        "policy_kwargs": {
            "target": scaling.target_busy,
            "slots": config.engine.max_running,
            "target_ttft_s": scaling.target_ttft_s,
        },
    }
    return {
        "autoscaling_config": {
            "min_replicas": scaling.min_replicas,
            "max_replicas": scaling.max_replicas,
            "initial_replicas": config.replica.num_replicas,
            "look_back_period_s": scaling.look_back_s,
            "metrics_interval_s": min(2.0, scaling.look_back_s / 2),
            "upscale_delay_s": scaling.upscale_delay_s,
            "downscale_delay_s": scaling.downscale_delay_s,
            "policy": policy,
        }
    }


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
