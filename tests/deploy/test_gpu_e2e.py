"""The GPU run's own arithmetic and judgements: percentiles, ratios, panels, the report, and that a cut run keeps what
it has. The run itself needs a GPU, or SGLang on a CPU (`--cpu`)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ray._raylet import GcsClient

from dashboards.expressions import Expression, expressions
from deploy.gpu_e2e import kill, panels, report, run
from deploy.gpu_e2e.__main__ import STAGES
from deploy.gpu_e2e.clients import Clients
from deploy.gpu_e2e.closed_loop import Timing, closed_loop, spread_ms, summary
from deploy.gpu_e2e.connections import Pool, http_stream
from deploy.gpu_e2e.phases import Phase, phases
from deploy.gpu_e2e.run import Options, OutOfTime, Run, pack
from deploy.gpu_e2e.settings import METHODS, Machine, tree
from deploy.gpu_e2e.stages import Work, worked
from deploy.gpu_e2e.template import template, with_tools
from load_tests import scrape
from serve_app.config import load_config
from serve_app.engines.sglang.arguments import server_arguments
from tests.conftest import ROOT

GPU = Machine(
    Path("/m"), Path("/d"), gpus=2, dtype="float16", budget=32, streams=64, sharded=(Path("/two"), Path("/two-d"))
)
CPU = replace(GPU, gpus=0, streams=4, sharded=(Path("/m"), Path("/d")), prefill_graphs="auto")


SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def timing(number: int, sent: float, *stamps: float, end: float, tokens: int, steps: int = 0) -> Timing:
    return Timing(number, sent, end, list(stamps), tokens, steps)


# -- the closed loop ---------------------------------------------------------------------------------------------------


async def test_a_closed_loop_runs_each_request_once_and_no_more_than_its_streams_at_once() -> None:
    running = most = 0

    async def one(number: int) -> Timing:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001 * (number % 3))
        running -= 1
        return Timing(number)

    made = await closed_loop(one, 4, range(20))
    assert [timing.number for timing in made] == list(range(20)) and most == 4


async def test_a_request_counts_from_when_its_stream_was_free_to_ask() -> None:
    async def one(number: int) -> Timing:
        # The loop comes to the second stream only after the first has made its request.
        timing = Timing(number, time.perf_counter())
        await asyncio.sleep(0)
        timing.end = time.perf_counter()
        return timing

    first, second, *later = await closed_loop(one, 2, range(4))
    assert first.sent == second.sent <= first.end
    assert {timing.sent for timing in later} <= {first.end, second.end, *(timing.end for timing in later)}


async def test_streams_can_begin_apart() -> None:
    async def one(number: int) -> Timing:
        await asyncio.sleep(0.1)  # so that the first stream does not take both
        return Timing(number)

    apart = await closed_loop(one, 2, range(2), stagger_s=0.01)
    assert apart[1].sent - apart[0].sent == pytest.approx(0.01)


def test_percentiles_are_in_milliseconds_with_linear_interpolation() -> None:
    assert spread_ms([0.001, 0.002, 0.003, 0.004]) == {"p50": 2.5, "p95": 3.85, "p99": 3.97, "mean": 2.5, "n": 4}
    assert spread_ms([]) is None


def test_a_summary_adds_up_rounds_without_the_time_between_them() -> None:
    first = [timing(0, 10, 10.1, 10.3, end=11, tokens=5), timing(1, 10.5, 10.7, end=12, tokens=3)]
    second = [timing(0, 100, 100.2, 100.3, end=102, tokens=8, steps=2)]
    found = summary([first, second])
    assert (found["requests"], found["tokens"], found["seconds"], found["tok_s"]) == (3, 16, 4.0, 4.0)
    assert found["tok_s_by_round"] == [4.0, 4.0]
    assert found["ttft_ms"]["p50"] == pytest.approx(200) and found["itl_ms"]["n"] == 2
    assert found["tpot_ms"]["n"] == 3 and found["acceptance_length"] == 6.5
    assert summary([[], []]) == {"requests": 0}


class _Frames(BaseHTTPRequestHandler):
    frames: tuple[str, ...] = ()
    delay_s = 0.0

    def do_POST(self) -> None:
        time.sleep(self.delay_s)
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        for frame in self.frames:
            self.wfile.write(f"data: {frame}\n\n".encode())

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


def _chunk(text: str | None, **more: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": {"content": text}}], **more})


USAGE = json.dumps({"choices": [], "usage": {"completion_tokens": 7}})


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ((_chunk(""), _chunk("a "), _chunk("b"), _chunk(None), USAGE, "[DONE]"), ("a b", 2, 7)),
        ((_chunk("a"), json.dumps({"error": {"code": "replica_lost"}}), "[DONE]"), "error frame"),
        ((_chunk("a"), USAGE), "cut"),
        ((USAGE, "[DONE]"), "cut"),
    ],
)
async def test_an_answer_over_http_is_whole_or_an_error(frames: tuple[str, ...], expected: Any) -> None:
    handler = type("Handler", (_Frames,), {"frames": frames})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        pool = Pool(f"http://127.0.0.1:{server.server_port}")
        one = http_stream(pool, "m", ["q"], 7)
        if isinstance(expected, str):
            with pytest.raises(RuntimeError, match=expected):
                await one(0)
        else:
            made = await one(0)
            assert (made.text, len(made.stamps), made.tokens) == expected
        pool.close()
        server.shutdown()


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_an_answer_in_chunks_is_read_whole_and_its_connection_serves_again(size: int) -> None:
    """Lines may begin in one chunk and end in another."""
    data = "".join(f"data: {frame}\n\n" for frame in (_chunk("a "), _chunk("é"), USAGE, "[DONE]")).encode()
    clients, ended = set(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clients.add(writer.get_extra_info("peername"))
        for _ in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))  # type: ignore[index]
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for at in range(0, len(data), size):
                part = data[at : at + size]
                writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        await reader.read()  # until the client has gone
        writer.close()
        await writer.wait_closed()
        ended.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        pool = Pool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        one = http_stream(pool, "m", ["q"], 7)
        made = [await one(number) for number in range(2)]
        assert [(timing.text, len(timing.stamps), timing.tokens) for timing in made] == [("a é", 2, 7)] * 2
        assert len(clients) == 1
        pool.close()
        await asyncio.wait_for(ended.wait(), 60)


async def test_what_is_no_200_is_told_with_its_body() -> None:
    ended = asyncio.Event()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 no\r\ncontent-length: 4\r\n\r\nnot\n")
        writer.close()
        await writer.wait_closed()
        ended.set()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        pool = Pool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(RuntimeError, match="status 503: not"):
            await http_stream(pool, "m", ["q"], 7)(0)
        pool.close()
        await asyncio.wait_for(ended.wait(), 60)


def test_the_clients_share_a_load(tmp_path: Path) -> None:
    # So slow that no stream takes the request of one that has not begun.
    handler = type("Handler", (_Frames,), {"frames": (_chunk("a"), USAGE, "[DONE]"), "delay_s": 0.2})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with Clients(f"http://127.0.0.1:{server.server_port}", tmp_path, 2) as clients:
            made = clients.load(3, 7, 7, 200, stagger_s=0.01)
            again = clients.load(1, 2, 7, 200)
        server.shutdown()
    assert [timing.number for timing in made] == list(range(7)) and {timing.tokens for timing in made} == {7}
    # A stream's first request counts from its turn, whichever client has it.
    first = min(timing.sent for timing in made)
    assert {0, 1, 2} <= {round((timing.sent - first) / 0.01, 6) for timing in made}
    assert [timing.number for timing in again] == [0, 1] and clients.busiest > 0


def test_a_client_that_meets_a_broken_answer_fails_the_load(tmp_path: Path) -> None:
    handler = type("Handler", (_Frames,), {"frames": (_chunk("a"),)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with (
            Clients(f"http://127.0.0.1:{server.server_port}", tmp_path, 2) as clients,
            pytest.raises(RuntimeError, match="the stream was cut"),
        ):
            clients.load(2, 2, 7, 200)
        server.shutdown()


# -- what the processes did --------------------------------------------------------------------------------------------

PASSES, SECONDS = "sglang:cuda_graph_passes_total", "ddtree_step_seconds_total"


def counted(prefills: tuple[int, int], steps: int, prefill_s: float, verify_s: float) -> scrape.Page:
    lines = [
        f'{PASSES}{{mode="prefill_cuda_graph"}} {prefills[0]}',
        f'{PASSES}{{mode="prefill_none"}} {prefills[1]}',
        f'{PASSES}{{mode="decode_cuda_graph"}} {steps}',
        f'{SECONDS}{{phase="prefill"}} {prefill_s}',
        f'{SECONDS}{{phase="verify"}} {verify_s}',
    ]
    return scrape.parse("\n".join(lines))


def test_a_batch_takes_the_host_what_its_own_kind_took() -> None:
    """Over all turns together, and what was counted before them is not of them."""
    turns = [
        Work(counted((1, 1), 10, 1.0, 1.0), counted((3, 2), 20, 1.04, 1.01), Counter(engine=0.5, idle=0.001), 1.0),
        Work(counted((3, 2), 20, 1.04, 1.01), counted((3, 3), 40, 1.05, 1.03), Counter(engine=1.0), 2.0),
    ]
    assert worked(turns) == {
        "batches": {"prompts": 4, "in_graphs": 2, "steps": 30},
        "host_ms": {"prefill": 12.5, "verify": 1.0},
        "cores": {"engine": 0.5},
    }


def test_without_ddtree_there_is_no_host_time() -> None:
    nothing = scrape.parse("")
    assert worked([Work(nothing, nothing, Counter(), 1.0)]) == {
        "batches": {"prompts": 0, "in_graphs": 0, "steps": 0},
        "host_ms": {},
        "cores": {},
    }


# -- configuration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", [GPU, CPU])
@pytest.mark.parametrize("mode", METHODS)
def test_each_mode_is_a_configuration_whose_arguments_the_engine_takes(machine: Machine, mode: str) -> None:
    config = load_config(tree(machine, mode), use_env=False)
    known = {*config.sglang.server_args, "model_path"}
    drafter = None if config.model.drafter is None else machine.drafter
    arguments = server_arguments(config, machine.model, drafter, known)
    algorithms = {"ddtree": "DDTREE", "dflash": "DFLASH", "ar": None}
    assert arguments.get("speculative_algorithm") == (None if machine.cpu else algorithms[mode])
    assert arguments["tp_size"] == 1


def test_the_largest_load_is_the_largest_captured_batch() -> None:
    config = load_config(tree(GPU, "ddtree"), use_env=False)
    assert config.engine.max_running == config.sglang.server_args["cuda_graph_max_bs_decode"] == 64


def test_more_arguments_reach_every_engine_beside_its_own() -> None:
    more = {"enable_prefill_delayer": True, "max_total_tokens": 5}
    plain = tree(GPU, "ar")["sglang"]["server_args"]
    assert tree(replace(GPU, server_args=more), "ar")["sglang"]["server_args"] == plain | more


def test_prefill_graphs_are_full_unless_asked_otherwise() -> None:
    assert tree(GPU, "dflash")["sglang"]["prefill_graphs"] == "full"
    pieces = tree(replace(GPU, prefill_graphs="auto"), "dflash")["sglang"]
    assert pieces["prefill_graphs"] == "auto" and pieces["server_args"]["cuda_graph_max_bs_prefill"] == 512
    assert tree(CPU, "ar")["sglang"]["prefill_graphs"] == "auto"


def test_two_gpus_get_one_replica_on_each_node_and_one_over_both() -> None:
    found = {phase.name: phase for phase in phases(GPU, STAGES)}
    nodes = load_config(found["two-nodes"].tree, use_env=False)
    assert nodes.placement.whole_node and nodes.replica.num_replicas == 2
    assert [node["env"]["CUDA_VISIBLE_DEVICES"] for node in found["two-nodes"].nodes] == ["0", "1"]
    both = load_config(found["tp2-app"].tree, use_env=False)
    assert server_arguments(both, Path("/m"), None, both.sglang.server_args)["tp_size"] == 2
    halves = load_config(found["two"].tree, use_env=False).replica
    assert (halves.num_replicas, halves.num_gpus) == (2, 0.5)


def test_two_ranks_serve_the_model_with_heads_that_they_can_share() -> None:
    assert (one := load_config(tree(GPU, "ddtree"), use_env=False).model).source == "/m" and one.drafter == "/d"
    two = load_config(tree(GPU, "ddtree", num_gpus=2), use_env=False).model
    assert (two.source, two.drafter) == ("/two", "/two-d")


def test_every_stage_belongs_to_a_phase() -> None:
    assert sorted(stage for phase in phases(GPU, STAGES) for stage in phase.stages) == sorted(STAGES)
    assert [phase.name for phase in phases(GPU, ["kill", "ar"])] == ["two", "ar"]


# -- the cluster -------------------------------------------------------------------------------------------------------


def test_a_cluster_has_the_nodes_that_were_asked_for_wherever_ray_has_not_run_before() -> None:
    """Ray's class for clusters fails there after it has started the first node, and a second attempt made two."""
    with tempfile.TemporaryDirectory(prefix="e2e-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        elsewhere = Path(directory) / "unused"
        elsewhere.mkdir()
        environment = {name: value for name, value in os.environ.items() if name != "RAY_TMPDIR"}
        spec = json.dumps({"directory": directory, "nodes": [{"num_cpus": 1, "num_gpus": 0}]})
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "deploy.gpu_e2e.cluster", spec], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**environment, "TMPDIR": str(elsewhere)},
        )  # fmt: skip
        with process:
            line = process.stdout.readline()  # type: ignore[union-attr]
            try:
                nodes = GcsClient(address=json.loads(line)["address"]).get_all_node_info(timeout=60)
                assert len(nodes) == 1
                assert not list(elsewhere.iterdir()), "nobody else is told of it"
            finally:
                process.stdin.close()  # type: ignore[union-attr]
                process.wait(120)


# -- panels ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selector", "labels", "expected"),
    [
        ('m{job=~".*"}', {"job": "x"}, True),
        ('m{job=~".*"}', {}, True),
        ('m{job="x",role!="draft"}', {"job": "x", "role": "target"}, True),
        ('m{role!="draft"}', {"role": "draft"}, False),
        ('m{reason!~"no_cuda|mode.*"}', {"reason": "mode_not_graphable"}, False),
        ('m{status=~"5.."}', {"status": "5000"}, False),
        ("m", {"a": "b"}, True),
    ],
)
def test_selectors_match_by_promqls_rules(selector: str, labels: dict[str, str], expected: bool) -> None:
    assert panels.matches(selector, labels) == expected


def series(**values: float) -> panels.Scrape:
    return {(name, frozenset({("job", "ddtree")})): value for name, value in values.items()}


def judged(text: str, before: panels.Scrape, after: panels.Scrape) -> panels.Finding:
    (found,) = panels.judge(before, after, [Expression("board", "panel", text, "")])
    return found


def test_a_panel_needs_a_series_and_where_it_divides_growth() -> None:
    one, two = series(a_total=1, b_total=5, c_bucket=2), series(a_total=1, b_total=6, c_bucket=2)
    assert judged('sum(rate(a_total{job=~"$job"}[$__rate_interval]))', one, two).state == "data"
    assert judged('sum(rate(d_total{job=~"$job"}[1m]))', one, two).why == "d_total is not exported"
    assert "has no series" in judged('sum(rate(a_total{job="other"}[1m]))', one, two).why
    quotient = "sum (rate({}[1m])) / (sum (rate({}[1m])) > 0)"
    assert judged(quotient.format("a_total", "b_total"), one, two).state == "data"
    assert "b_total did not grow" in judged(quotient.format("b_total", "a_total"), two, two).why.replace("a_", "b_")
    either = "sum(rate(a_total[1m])) / (sum(rate(a_total[1m])) + sum(rate(b_total[1m])) > 0)"
    assert judged(either, one, two).state == "data", "a part of a divisor may lie still"
    assert "did not grow" in judged("histogram_quantile(0.5, sum by (le) (rate(c_bucket[1m])))", one, two).why


def test_every_expression_of_the_dashboards_is_judged_and_only_dcgms_are_foreign() -> None:
    findings = panels.judge({}, {})
    assert len(findings) == len(list(expressions()))
    assert {finding.state for finding in findings} == {"empty", "foreign"}
    found = panels.summarise(findings, "test")
    assert found["with_data"] == 0 and all("DCGM" in why for why in found["foreign"].values())


def test_a_panel_that_lacks_one_of_its_lines_is_without_data() -> None:
    findings = [
        panels.Finding("b", "p", "data"),
        panels.Finding("b", "p", "empty", "x"),
        panels.Finding("b", "q", "data"),
    ]
    assert panels.summarise(findings, "test") == {
        "how": "test", "with_data": 1, "without_data": {"b/p": "x"}, "foreign": {}, "still": {},
    }  # fmt: skip


# -- the report --------------------------------------------------------------------------------------------------------


def level(http: float, engine: float, added: float) -> dict[str, Any]:
    def side(rate: float, ttft: float) -> dict[str, Any]:
        spread = {"p50": ttft, "p95": ttft, "p99": ttft}
        return {"requests": 3, "tok_s": rate, "ttft_ms": spread, "itl_ms": spread, "tpot_ms": spread,
                "tokens_per_chunk": 3.0, "acceptance_length": 4.2}  # fmt: skip

    found = {"http": side(http, 10 + added), "engine": side(engine, 10)}
    found["http"]["work"] = {"batches": {"prompts": 7}}
    return found | {"compared": report.compare(found["http"], found["engine"])}


def test_targets_are_judged_and_what_was_not_measured_is_neither() -> None:
    stages: dict[str, Any] = {
        "throughput": {
            "levels": {"1": level(96, 100, 2.0), "16": level(94, 100, 3.5), "64": {"compared": report.compare({}, {})}},
            "http_counters": {"replays": 90, "fallbacks": {"target/bs_exceeds_max": 2.0}},
        },
        "panels": {"without_data": {}},
    }
    found = [(row["value"], row["met"]) for row in report.targets({"stages": stages})]
    assert found == [
        (0.96, True), (0.94, False), (None, None), (2.0, True), (3.5, False), (None, None), (2.0, False), (None, None),
        (0, True),
    ]  # fmt: skip
    assert {row["met"] for row in report.targets({"stages": {}})} == {None}


def test_drafts_that_change_the_answers_are_a_miss() -> None:
    shares = {
        "throughput": {"1": {"equal": 10, "of": 10}, "16": {"equal": 120, "of": 160}},
        "dflash": {"1": {"equal": 6, "of": 10}, "16": {"equal": 11, "of": 160}},
    }
    stages: dict[str, Any] = {
        name: {"levels": {streams: level(96, 100, 2.0) | {"as_ar": share} for streams, share in levels.items()}}
        for name, levels in shares.items()
    }
    stages["ar"] = {"levels": {"16": level(50, 51, 0.5)}}
    found = [row for row in report.targets({"stages": stages}) if "AR's" in row["what"]]
    assert [(row["what"][-6:], row["value"], row["met"]) for row in found] == [
        ("DDTREE", 0.75, True), ("DFLASH", 0.069, False)
    ]  # fmt: skip
    assert "| 16 | 96 (120 of 160) | 96 (11 of 160) | 50 |" in report.page(
        {"facts": {}, "targets": [], "stages": stages, "seconds": {}}
    )


@pytest.mark.parametrize(("replays", "met"), [(0, None), (5, True)])
def test_no_fallback_among_no_forwards_proves_nothing(replays: int, met: bool | None) -> None:
    stages = {"throughput": {"levels": {}, "http_counters": {"replays": replays, "fallbacks": {}}}}
    (row,) = [row for row in report.targets({"stages": stages}) if row["what"].startswith("fallbacks")]
    assert row["met"] is met


def test_the_page_shows_numbers_failures_and_misses(tmp_path: Path) -> None:
    stages = {
        "throughput": {"levels": {"16": level(94, 100, 3.5)}, "failed": "OutOfTime"},
        "openai": {"checks": {"chat": "ok", "n": "AssertionError: two alike"}},
        "kill": {"identical": 7, "streams": 8},
        "ar": {"levels": {"16": level(50, 51, 0.5)}},
    }
    report.write({"facts": {"gpu": "x"}, "stages": stages, "seconds": {}}, tmp_path)
    page = (tmp_path / "report.md").read_text()
    for wanted in (
        "**missed**",
        "not measured",
        "× 0.94",
        "+3.5 ms",
        "OutOfTime",
        "1 of 2",
        "two alike",
        "| 16 | 94 | 50 |",
        "| 16 | http | {batches: {prompts: 7}} |",
        '"identical": 7',
    ):
        assert wanted in page
    assert json.loads((tmp_path / "report.json").read_text())["targets"]


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


# -- the run -----------------------------------------------------------------------------------------------------------


def options(tmp_path: Path, seconds: float) -> Options:
    return Options(tmp_path / "out", tmp_path / "work", seconds, ["x"], [1], 8, 1, 3, 1.0, 1.0)


def test_a_stage_that_hangs_or_fails_costs_itself_alone(tmp_path: Path) -> None:
    made = Run(GPU, options(tmp_path, 60), {})
    signal.signal(signal.SIGALRM, run._ring)
    assert not made._stage("hangs", lambda: time.sleep(30) or {}, 3.05)
    assert not made._stage("fails", lambda: 1 / 0, 10)
    assert made._stage("works", lambda: {"n": 1}, 10)
    saved = json.loads((tmp_path / "out" / "report.json").read_text())["stages"]
    assert "not done within 3 s" in saved["hangs"]["failed"] and "ZeroDivisionError" in saved["fails"]["failed"]
    assert saved["works"] == {"n": 1}


@pytest.mark.parametrize("plain_last", [True, False])
def test_answers_are_compared_with_those_of_a_token_a_step_whichever_came_first(
    tmp_path: Path, plain_last: bool
) -> None:
    texts = {"throughput": ["a", "b", "c"], "ar": ["a", "b", "d"]}
    made = Run(GPU, options(tmp_path, 60), {})
    for name in sorted(texts, reverse=plain_last):
        made._first[name] = {"1": [replace(timing(0, 0.0, end=1.0, tokens=1), text=text) for text in texts[name]]}
        made._note(name, {"levels": {"1": level(96, 100, 2.0)}}, 1.0)
    saved = json.loads((tmp_path / "out" / "report.json").read_text())["stages"]
    assert saved["throughput"]["levels"]["1"]["as_ar"] == {"equal": 2, "of": 3}
    assert "as_ar" not in saved["ar"]["levels"]["1"]


def test_a_run_that_is_told_to_end_begins_nothing_more(tmp_path: Path) -> None:
    made = Run(GPU, options(tmp_path, 60), {})
    signal.signal(signal.SIGTERM, made._terminate)

    def told() -> dict[str, Any]:
        signal.raise_signal(signal.SIGTERM)
        return {}

    assert not made._stage("told", told, 10)
    assert not made._stage("next", lambda: {"n": 1}, 10)
    made.run([Phase("p", {}, [], True, ["throughput"])])
    saved = json.loads((tmp_path / "out" / "report.json").read_text())["stages"]
    assert [stage["failed"] for stage in saved.values()][1:] == ["TimeoutError: no time left", "no time left"]


def test_a_run_without_time_starts_nothing_and_still_reports(tmp_path: Path) -> None:
    made = Run(GPU, options(tmp_path, 31), {})
    made.run([Phase("p", {}, [], True, ["throughput"])])
    assert "no time left" in (tmp_path / "out" / "report.md").read_text()
    assert (tmp_path / "out" / "logs.tar.xz").exists()


def test_the_alarm_is_no_exception_that_a_stage_could_swallow() -> None:
    assert not issubclass(OutOfTime, Exception)


def test_logs_are_packed_within_a_limit_and_keep_their_ends(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "short.log").write_text("all of it")
    (logs / "long.log").write_bytes(b"begin" + b"x" * 300_000 + b"end")
    archive = tmp_path / "logs.tar.xz"
    pack(logs, archive, 10_000_000, each=100_000)
    with tarfile.open(archive) as tar:
        long = tar.extractfile("long.log").read()  # type: ignore[union-attr]
    assert long.startswith(b"begin") and long.endswith(b"end") and len(long) < 130_000
    pack(logs, archive, 250)
    with tarfile.open(archive) as tar:
        assert tar.getnames() == ["short.log"]


def test_where_two_texts_part() -> None:
    assert kill.first_difference("abcd", "abXd") == {"at": 2, "undisturbed": "cd", "disturbed": "Xd"}
    assert kill.first_difference("ab", "abc")["at"] == 2
    assert kill.first_difference([1, 2], [1, 3])["at"] == 1


# -- packages ----------------------------------------------------------------------------------------------------------


def test_the_packages_to_carry_are_those_that_are_tested() -> None:
    lines = (ROOT / "deploy" / "gpu_e2e" / "packages.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    constraints = (ROOT / "deploy" / "constraints.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in constraints if "==" in line and not line.startswith("#"))
    same = {re.sub(r"[-_.]", "-", name): version for name, version in tested.items()}
    assert {name: same.get(name) for name in pins} == pins
    assert {"ray", "locust", "httptools"} <= set(pins)


# -- the chat template -------------------------------------------------------------------------------------------------


def rendered(text: str, **variables: Any) -> str:
    from jinja2 import Environment

    return Environment().from_string(text).render(add_generation_prompt=True, **variables)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    ],
)
def test_chats_without_tools_are_rendered_as_by_the_models_own_template(messages: list[Any]) -> None:
    assert rendered(template(SMOLLM2), messages=messages) == rendered(SMOLLM2, messages=messages)


def test_tools_and_calls_are_in_the_prompt() -> None:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = rendered(template(SMOLLM2), messages=messages, tools=tools)
    assert text.startswith('<|im_start|>system\nYou may call these functions:\n{"name": "f"}\n')
    assert '<tool_call>\n{"arguments": {"x": 1}, "name": "f"}\n</tool_call><|im_end|>' in text


def test_the_directory_has_the_models_files_and_the_template(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": SMOLLM2, "eos_token": "e"}))
    for _ in range(2):  # a run may find the folder of an earlier one
        made = with_tools(model, tmp_path / "made")
    assert (made / "config.json").read_text() == "{}"
    assert json.loads((made / "tokenizer_config.json").read_text()) == {
        "chat_template": template(SMOLLM2),
        "eos_token": "e",
    }
    with pytest.raises(ValueError, match="not the one"):
        template("{{ messages }}")
