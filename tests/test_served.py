"""The whole application through Serve, two ingresses and two replicas, as the official client sees it."""

import threading

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import Served, chat, eventually, metric, samples

CHAT = "/v1/chat/completions"


def user(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def test_a_stream_has_one_envelope_a_role_text_and_an_end(official: openai.OpenAI) -> None:
    chunks = list(official.chat.completions.create(model="fake", messages=user("a b c delay=0.01"), stream=True))
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "a b c"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_whole_answer_equals_the_streamed_one(official: openai.OpenAI) -> None:
    answer = official.chat.completions.create(model="fake", messages=user("a b c"), logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == "a b c"
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert [len(entry.top_logprobs) for entry in content or []] == [2, 2, 2]


def test_completions_stream_every_prompt(official: openai.OpenAI) -> None:
    texts = {0: "", 1: ""}
    for chunk in official.completions.create(model="fake", prompt=["a b", "c d"], stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "a b", 1: "c d"}


def test_models_are_listed(official: openai.OpenAI) -> None:
    assert [model.id for model in official.models.list()] == ["fake"]
    assert official.models.retrieve("fake").owned_by == "ddtree-serve"


@pytest.mark.parametrize("path", ["/health", "/ready", "/version"])
def test_it_is_up(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 200


def test_tokens_there_and_back(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"model": "fake", "prompt": "hé"}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "hé"}


@pytest.mark.parametrize("path", ["/health", "/none", CHAT])
def test_every_answer_carries_one_request_id(client: httpx.Client, path: str) -> None:
    own = client.get(path, headers={"x-request-id": "mine"})
    assert own.headers.get_list("x-request-id") == ["mine"]
    assert len(client.get(path).headers.get_list("x-request-id")) == 1


def test_counters_add_up_over_all_processes(served: Served, client: httpx.Client) -> None:
    labels = {"route": CHAT, "status": "200", "model": "fake"}

    def counted() -> tuple[float, float]:
        return metric(served, "gateway_requests_total", **labels), metric(served, "fake_submits_total")

    before = counted()
    threads = [threading.Thread(target=client.post, args=(CHAT,), kwargs={"json": chat("a")}) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A request is counted a moment after its answer has left.
    eventually(lambda: counted()[0] == before[0] + 20)
    assert counted() == (before[0] + 20, before[1] + 20)


def test_prometheus_is_told_of_every_process(client: httpx.Client) -> None:
    eventually(lambda: client.get("/-/prometheus/targets").status_code == 200)
    response = client.get("/-/prometheus/targets")
    assert response.headers["content-type"] == "application/json"
    labels = [entry["labels"] for entry in response.json()]
    assert sorted(label["deployment"] for label in labels) == ["engine", "engine", "ingress", "ingress"]
    assert {label["model"] for label in labels} == {"fake"} and all(label["node"] for label in labels)
    for entry in response.json():
        page = httpx.get(
            f"http://{entry['targets'][0]}{entry['labels']['__metrics_path__']}", timeout=60, trust_env=False
        )
        assert "ddtree_start_time_seconds" in page.text


def test_every_process_is_on_the_page_of_any(served: Served, client: httpx.Client) -> None:
    for _ in range(3):
        replicas = {sample.labels["replica"] for sample in samples(served)}
        assert sorted(name.split("#")[0] for name in replicas) == ["engine", "engine", "ingress", "ingress"]
        families = list(text_string_to_metric_families(client.get("/metrics").text))
        assert len({family.name for family in families}) == len(families)
