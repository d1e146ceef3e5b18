"""Memory that new lengths of prompt cost the embedded engine on a CPU, with prompts padded as they are and unpadded.

    python -m benchmarks.prompt_memory

Each case runs in a process of its own: 25 lengths, the same again, 25 others. The last line is JSON, MiB added.

What this program does not do: measure time.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path

CASES = {"padded": None, "unpadded": 1}


def rss_mib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4 // 1024


async def added(step: int | None) -> dict[str, int]:
    from prometheus_client import CollectorRegistry

    from serve_app.config import load_config
    from serve_app.engines import create_engine
    from serve_app.engines.base import GenerateRequest, SamplingParams
    from serve_app.engines.local import runner

    if step is not None:
        runner._PREFILL_STEP = step
    engine = create_engine(load_config({"engine": {"threads": 1}}, use_env=False), CollectorRegistry())
    await engine.start()
    rng = random.Random(1)

    async def ask(*lengths: int) -> int:
        for length in lengths:
            prompt = tuple(rng.randrange(100, 40000) for _ in range(length))
            sampling = SamplingParams(max_tokens=2, temperature=0)
            async for _ in engine.submit(GenerateRequest(str(rng.random()), sampling, prompt_token_ids=prompt)):
                pass
        return rss_mib()

    marks = [await ask(304, 304)]  # the longest first: what it touches of the cache is not a shape's
    marks += [await ask(*range(first, first + 200, 8)) for first in (100, 100, 104)]
    await engine.stop()
    names = ("new", "again", "other")
    return {name: after - before for name, before, after in zip(names, marks[:-1], marks[1:], strict=True)}


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(asyncio.run(added(CASES[sys.argv[1]]))))
        return
    found = {}
    for case in CASES:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.prompt_memory", case], capture_output=True, text=True, check=True
        )
        found[case] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
