"""The replica's engine without HTTP and Ray, in a process driven by JSON lines as `benchmarks/sglang_child.py` is.

Its argument is the configuration that the application gets too. {"do": "load", "through": "engine" | "sglang",
"streams": …, "requests": …, "tokens": …, "stagger_s": …, "questions": […]} runs a closed loop through the engine's
seam, as a replica does, or through SGLang's own tokenizer manager, on token ids; {"do": "counters"} gives the text of
its metrics.

What this program does not do: judge.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from typing import Any

from benchmarks.sglang_child import take_stdout
from deploy.gpu_e2e.closed_loop import Timing, closed_loop
from serve_app.config import load_config
from serve_app.engines import create_engine
from serve_app.engines.base import GenerateRequest, SamplingParams


def main() -> None:
    reply = take_stdout()
    from prometheus_client import CollectorRegistry

    from serve_app.multiprocess import EngineFiles

    registry = CollectorRegistry()
    registry.register(EngineFiles())
    engine = create_engine(load_config(json.loads(sys.argv[1]), use_env=False), registry)
    with asyncio.Runner() as runner:
        began = time.monotonic()
        try:
            runner.run(engine.start())
        except BaseException:
            reply(ok=False, error=traceback.format_exc()[-4000:])
            raise
        reply(ok=True, start_s=round(time.monotonic() - began, 1))
        for line in sys.stdin:
            request = json.loads(line)
            try:
                if request["do"] == "counters":
                    reply(ok=True, text=_page(registry))
                else:
                    timings = runner.run(_load(engine, request))
                    reply(ok=True, timings=[timing.as_dict() for timing in timings])
            except Exception:
                reply(ok=False, error=traceback.format_exc()[-4000:])
        runner.run(engine.stop())


def _page(registry: Any) -> str:
    from prometheus_client import generate_latest

    return str(generate_latest(registry).decode())


async def _load(engine: Any, request: dict[str, Any]) -> list[Timing]:
    how = request["streams"], range(request["requests"]), request["stagger_s"]
    if request["through"] == "engine":
        return await closed_loop(through_engine(engine, request["questions"], request["tokens"]), *how)
    host = engine._host
    one = await through_sglang(engine, request["questions"], request["tokens"])
    # Its own event loop, where the engine's requests run too.
    return await asyncio.wrap_future(host.call(closed_loop(one, *how)))


def through_engine(engine: Any, questions: list[str], tokens: int) -> Callable[[int], Any]:
    """As a replica asks: messages in, chunks of text out."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)

    async def one(number: int) -> Timing:
        message = {"role": "user", "content": questions[number % len(questions)]}
        timing, texts = Timing(number, time.perf_counter()), []
        async for chunk in engine.submit(GenerateRequest(uuid.uuid4().hex, sampling, messages=[message])):
            if chunk.text:
                timing.stamps.append(time.perf_counter())
                texts.append(chunk.text)
            if chunk.usage is not None:
                timing.tokens = chunk.usage.completion_tokens
        timing.end, timing.text = time.perf_counter(), "".join(texts)
        return timing

    return one


async def through_sglang(engine: Any, questions: list[str], tokens: int) -> Callable[[int], Any]:
    """SGLang by itself: token ids in and out, nothing of ours around it. `steps` of a Timing are SGLang's count."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    manager = engine._host.manager
    sampling = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    prompts = []
    for question in questions:
        message = {"role": "user", "content": question}
        prompts.append(await engine.tokenize(GenerateRequest("t", SamplingParams(), messages=[message])))

    async def one(number: int) -> Timing:
        asked = {"rid": uuid.uuid4().hex, "input_ids": list(prompts[number % len(prompts)]), "stream": True}
        timing = Timing(number, time.perf_counter())
        async for output in manager.generate_request(GenerateReqInput(**asked, sampling_params=dict(sampling)), None):
            if output["output_ids"]:
                timing.stamps.append(time.perf_counter())
                timing.tokens += len(output["output_ids"])
            timing.steps = output["meta_info"].get("spec_verify_ct") or timing.steps
        timing.end = time.perf_counter()
        return timing

    return one


if __name__ == "__main__":
    main()
