"""/server_info, as serving benchmarks read it."""

from serve_app.config import Config
from serve_app.engines.base import ModelInfo
from serve_app.ingress.server_info import server_info
from tests.direct import direct_client

INFO = ModelInfo(id="m", max_model_len=64, vocab_size=10, created=1)
PAGE = """# TYPE ddtree_acceptance_length histogram
ddtree_acceptance_length_bucket{model="m",le="1.0",replica="engine#a"} 1
ddtree_acceptance_length_bucket{model="m",le="+Inf",replica="engine#a"} 4
ddtree_acceptance_length_count{model="m",replica="engine#a"} 4
ddtree_acceptance_length_sum{model="m",replica="engine#a"} 10
ddtree_acceptance_length_count{model="m",replica="engine#b"} 0
ddtree_acceptance_length_sum{model="m",replica="engine#b"} 0
"""


def test_each_engine_tells_its_mean_acceptance() -> None:
    states = server_info(Config(), INFO, PAGE)["internal_states"]
    assert states == [
        {"replica": "engine#a", "verify_steps": 4, "avg_spec_accept_length": 2.5},
        {"replica": "engine#b", "verify_steps": 0, "avg_spec_accept_length": None},
    ]


async def test_it_names_model_and_configuration() -> None:
    async with direct_client() as client:
        about = (await client.get("/server_info")).json()
    assert about["served_model_name"] == "fake" and about["max_model_len"] == 4096
    assert about["speculation"]["method"] == "ddtree" and about["internal_states"] == []
