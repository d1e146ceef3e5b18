"""HTTP's clients, several processes of them: one of Python reads more slowly than a GPU answers 64 streams.

`python -m deploy.gpu_e2e.clients {"url": …}` is one, driven by JSON lines as `benchmarks/sglang_child.py` is:
{"do": "connect", "streams": n} opens connections; {"do": "load", "streams": n, "numbers": […], "tokens": …,
"began": t, "stagger_s": s} runs a closed loop whose first stream begins at t.

What this module does not do: know an answer's parts (`connections` does), or sum up timings (`closed_loop` does).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.sglang_child import take_stdout
from benchmarks.sglang_fleet import Child, questions
from deploy.gpu_e2e.closed_loop import Timing, closed_loop
from deploy.gpu_e2e.connections import Pool, http_stream
from deploy.gpu_e2e.settings import MODEL_ID

QUESTIONS = questions(200)
# From when all have connected to the first stream's begin.
LEAD_S = 0.05


class Clients:
    """So many client processes of one address, started at once; a context, at whose end they end.

    Args:
        url: without a trailing slash. logs: folder for what they print.

    Attributes:
        busiest: the largest share of a core that a client process needed in a load so far; near 1 it was the limit.
    """

    def __init__(self, url: str, logs: Path, count: int) -> None:
        self.busiest = 0.0
        self._children = [
            Child(f"client {n}", {"url": url}, logs / f"client-{n}.log", program=("-m", "deploy.gpu_e2e.clients"))
            for n in range(count)
        ]
        self._pool = ThreadPoolExecutor(count)

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False)
        for child in self._children:
            child.close()

    def load(self, streams: int, requests: int, tokens: int, timeout_s: float, stagger_s: float = 0.0) -> list[Timing]:
        """As `closed_loop`; streams and requests are dealt to the clients.

        Raises:
            RuntimeError: an answer was no whole 200, or a client did not answer in time.
        """
        used = self._children[: min(streams, requests)]
        for child in used:
            if child.start_s is None:
                child.wait_ready(timeout_s)
        shares = [len(range(n, streams, len(used))) for n in range(len(used))]
        self._each(used, timeout_s, [{"do": "connect", "streams": share} for share in shares])
        began = time.perf_counter() + LEAD_S
        # Streams of one client begin as far apart as there are clients, so that all together keep their distance.
        jobs = [
            {
                "do": "load", "streams": share, "numbers": list(range(n, requests, len(used))), "tokens": tokens,
                "began": began + n * stagger_s, "stagger_s": stagger_s * len(used),
            }
            for n, share in enumerate(shares)
        ]  # fmt: skip
        answers = self._each(used, timeout_s, jobs)
        self.busiest = max(self.busiest, *(answer["busy"] for answer in answers))
        timings = [Timing(**timing) for answer in answers for timing in answer["timings"]]
        return sorted(timings, key=lambda timing: timing.number)

    def _each(self, used: Sequence[Child], timeout_s: float, jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        asked = [
            self._pool.submit(child.ask, job.pop("do"), timeout_s, **job) for child, job in zip(used, jobs, strict=True)
        ]
        return [future.result() for future in asked]


async def _serve(url: str) -> None:
    reply = take_stdout()
    pool = Pool(url)
    reply(ok=True, start_s=0.0)
    # The event loop runs on: it must see connections that the server closes.
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            reply(ok=True, **await _do(pool, json.loads(line)))
        except Exception:
            reply(ok=False, error=traceback.format_exc()[-4000:])
    pool.close()


async def _do(pool: Pool, job: dict[str, Any]) -> dict[str, Any]:
    if job["do"] == "connect":
        # In process there are no connections to make, so that here none are made while the clock runs.
        await pool.connect(job["streams"])
        return {}
    one = http_stream(pool, MODEL_ID, QUESTIONS, job["tokens"])
    began, cpu = time.perf_counter(), time.process_time()
    timings = await closed_loop(one, job["streams"], job["numbers"], job["stagger_s"], job["began"])
    busy = (time.process_time() - cpu) / (time.perf_counter() - began)
    return {"timings": [timing.as_dict() for timing in timings], "busy": round(busy, 3)}


if __name__ == "__main__":
    asyncio.run(_serve(json.loads(sys.argv[1])["url"]))
