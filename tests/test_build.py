"""The builder, without a cluster."""

import inspect
from typing import Any

import pytest
from pydantic import BaseModel
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from serve_app import build
from serve_app.config import load_config
from serve_app.errors import ConfigError
from tests import netns_cluster


@pytest.mark.parametrize("args", [{}, {"model": {"id": "x"}}, {"model.id": "x", "replica.num_replicas": "2"}])
def test_arguments_of_either_form_build_an_application(args: dict[str, Any]) -> None:
    assert isinstance(build.build_app(args), Application)


def test_the_arguments_of_the_scenarios_in_network_namespaces_are_valid() -> None:
    # They run only where there is root and time for them.
    assert isinstance(build.build_app(netns_cluster.arguments()), Application)


def test_a_router_may_be_given_instead_of_the_configured_one() -> None:
    router = RequestRouterConfig(request_router_class="benchmarks.ray_prefix_router.JobPrefixRouter")
    config = load_config({"routing": {"policy": "prefix"}}, use_env=False)
    ingress = build.bind(config, router=router)._bound_deployment
    replicas = ingress.init_args[1]._bound_deployment
    assert replicas._deployment_config.request_router_config.request_router_class == router.request_router_class


def test_serve_has_room_for_more_than_the_engine_takes() -> None:
    application = build.build_app({"engine": {"max_running": 64, "max_queued": 512}})
    replicas = application._bound_deployment.init_args[1]._bound_deployment
    assert replicas._deployment_config.max_ongoing_requests == 640


def test_dotted_keys_are_nested_and_read_as_yaml() -> None:
    args = {"model": {"id": "a"}, "model.source": "b", "engine.max_running": "3", "model.drafter": "null"}
    assert build._nested(args) == {"model": {"id": "a", "source": "b", "drafter": None}, "engine": {"max_running": 3}}


@pytest.mark.parametrize(
    ("args", "param"),
    [
        ({"model.sorce": "x"}, "model.sorce"),
        ({"model": "x"}, "model"),
        ({"model": "x", "model.id": "y"}, "model.id"),
        ({"nonsense": {}}, "nonsense"),
        ({"engine.max_running": "many"}, "engine.max_running"),
        ({"model.id": "[1"}, "model.id"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_deployed(args: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build.build_app(args)
    assert caught.value.param == param


def test_ray_sees_the_builders_annotation_as_a_type() -> None:
    (parameter,) = inspect.signature(build.build_app).parameters.values()
    assert not isinstance(parameter.annotation, str)
    assert not (inspect.isclass(parameter.annotation) and issubclass(parameter.annotation, BaseModel))


def test_the_package_offers_a_ready_application(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDTREE_MODEL__ID", "from-env")
    import serve_app

    assert isinstance(serve_app.app, Application)


def test_no_test_engine_is_reachable_from_configuration() -> None:
    with pytest.raises(ConfigError):
        build.build_app({"engine": {"kind": "tests.fake_engine:FakeEngine"}})


def options(**sections: dict[str, Any]) -> dict[str, Any]:
    return build.placement_options(load_config(sections, use_env=False))


def test_replicas_share_nodes_by_default() -> None:
    assert options() == {}


def test_a_whole_node_is_one_bundle() -> None:
    placement = {"whole_node": True, "accelerator_type": "B300", "node_labels": {"role": "gpu"}}
    assert options(replica={"num_gpus": 8, "num_cpus": 4}, placement=placement) == {
        "placement_group_bundles": [{"CPU": 4, "GPU": 8, "accelerator_type:B300": 0.001}],
        "placement_group_strategy": "STRICT_PACK",
        "placement_group_bundle_label_selector": [{"role": "gpu"}],
    }


def test_a_node_without_gpus_is_counted_instead() -> None:
    assert options(placement={"whole_node": True}) == {"max_replicas_per_node": 1}


def test_nodes_can_be_selected_only_for_a_bundle() -> None:
    with pytest.raises(ConfigError, match="need whole_node"):
        options(placement={"node_labels": {"role": "gpu"}})
