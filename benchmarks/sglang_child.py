"""One SGLang engine in its own process, driven by JSON lines: requests on stdin, replies on stdout, logs on stderr.

Requests: {"do": "generate", "prompts": [...], "params": {...}, "logprobs": n?}, {"do": "time", "prompts": [...],
"params": {...}}, {"do": "metrics"}, {"do": "pool"}, {"do": "stop"}. Every reply has "ok"; a failure has "error".

What this program does not do: choose modes or judge results (`sglang_fleet`, the tests and the benchmark do).
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints goes to the log

    def reply(**fields: Any) -> None:
        replies.write(json.dumps(fields) + "\n")

    arguments = json.loads(sys.argv[1])
    began = time.monotonic()
    try:
        import sglang

        engine = sglang.Engine(**arguments)
    except BaseException:
        reply(ok=False, error=traceback.format_exc()[-4000:])
        raise
    reply(ok=True, start_s=round(time.monotonic() - began, 1))
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "stop":
            break
        try:
            reply(ok=True, **ACTIONS[request["do"]](engine, request))
        except Exception:
            reply(ok=False, error=traceback.format_exc()[-4000:])
    engine.shutdown()


def generate(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Token ids, finish reasons and verify steps of every prompt; logprobs of `logprobs` alternatives if asked."""
    top = request.get("logprobs")
    asked = {"return_logprob": True, "top_logprobs_num": top, "logprob_start_len": -1} if top is not None else {}
    prompts = request["prompts"]
    which = {"input_ids": prompts} if isinstance(prompts[0], list) else {"prompt": prompts}
    outputs = engine.generate(**which, sampling_params=request["params"], **asked)
    results = []
    for output in outputs:
        meta = output["meta_info"]
        kept = {"ids": output["output_ids"], "text": output["text"], "finish": meta["finish_reason"]}
        kept["prompt_tokens"], kept["cached"] = meta["prompt_tokens"], meta["cached_tokens"]
        kept["verify_steps"] = meta.get("spec_verify_ct", 0)
        if top is not None:
            kept["logprobs"] = [value for value, _, _ in meta["output_token_logprobs"]]
            kept["top"] = [[(value, token) for value, token, _ in row] for row in meta["output_top_logprobs"] or []]
        results.append(kept)
    return {"results": results}


def timed(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The prompts as one batch: seconds, tokens, verify steps."""
    began = time.perf_counter()
    outputs = generate(engine, request)["results"]
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "tokens": sum(len(output["ids"]) for output in outputs),
        "verify_steps": sum(output["verify_steps"] for output in outputs),
        "longest_steps": max(output["verify_steps"] for output in outputs),
    }


def metrics(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The ddtree_* samples of all processes, summed by Prometheus's own merge."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    samples = {}
    for family in registry.collect():
        if family.name.startswith("ddtree_"):
            for sample in family.samples:
                labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in ("model", "pid"))
                samples[f"{sample.name}{{{labels}}}"] = sample.value
    return {"metrics": samples}


def pool(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Free KV slots as the scheduler reports them, after the prefix cache was dropped."""
    engine.flush_cache()
    time.sleep(0.5)
    state = engine.get_server_info()["internal_states"][0]
    return {"state": {key: value for key, value in state.items() if isinstance(value, (int, float, str))}}


ACTIONS = {"generate": generate, "time": timed, "metrics": metrics, "pool": pool}

if __name__ == "__main__":
    main()
