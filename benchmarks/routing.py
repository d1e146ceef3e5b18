"""Which router sends requests where their prompt is cached, and at what price: a simulation of replicas and chats.

Multi-turn chats of growing length share some system prompts. Each replica prefills one prompt at a time (what its
prefix cache holds is free), decodes in a batch whose step grows with its size, and forgets the oldest blocks. The
routers are the real ones: this product's table and fleet, and Ray's prefix tree under the policy of its
PrefixCacheAffinityRouter; power of two choices is two lines. Several ingresses share the load, each with a router of
its own, except for Ray's, whose tree is one actor for all.

    python -m benchmarks.routing [--replicas 8] [--chats 1500] [--rate 6] [--seeds 3] [--systems 4] [--cache 400000]

Prints a table, the cost of one decision by the number of replicas, and JSON on the last line.

What it does not do: measure the routers' network, or real processes (see `served_routing`).
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

from benchmarks.prefix_cache import BLOCK_CHARS, CHARS_PER_TOKEN, TOKENS_PER_BLOCK, BlockCache, words
from serve_app.engines.base import GenerateRequest, SamplingParams
from serve_app.router.fleet import Fleet
from serve_app.router.prefixes import PrefixTable, beginning, blocks_of, common_blocks, home_key
from serve_app.router.scoring import Candidate, Policy
from serve_app.router.scoring import choose as choose_plainly

PREFILL_TOKENS_S, STEP_S, STEP_PER_REQUEST_S = 8000.0, 0.015, 0.0004
SLOTS = 48
INGRESSES = 2
Router = Callable[[GenerateRequest, list["Replica"], int], "Replica"]


@dataclass
class Replica:
    name: str
    cache: BlockCache
    ongoing: int = 0
    prefill_free: float = 0.0
    served: int = 0

    def prefill(self, blocks: list[int], now: float) -> tuple[float, int]:
        """When the first token is there, and how many blocks were cached."""
        hit = self.cache.use(blocks)
        tokens = (len(blocks) - hit) * TOKENS_PER_BLOCK
        self.prefill_free = max(self.prefill_free, now) + tokens / PREFILL_TOKENS_S
        return self.prefill_free + self.step(), hit

    def step(self) -> float:
        """A step of the batch; beyond the slots a request waits for its share of them."""
        crowd = max(1.0, self.ongoing / SLOTS)
        return (STEP_S + STEP_PER_REQUEST_S * min(self.ongoing, SLOTS)) * crowd


@dataclass
class Chat:
    key: int
    system: str
    turns: int
    messages: list[dict[str, str]]


@dataclass(frozen=True)
class Load:
    """Chats, how many begin in a second, and with how many different system prompts; replicas and their caches."""

    replicas: int
    chats: int
    rate: float
    systems: int
    cache_tokens: int


def workload(load: Load, rng: random.Random) -> list[tuple[float, int, Chat]]:
    """(arrival, tie-break, chat): Poisson arrivals of chats."""
    systems = [f"System prompt {i}. " + words(rng, 6000) for i in range(load.systems)]
    now, events = 0.0, []
    for key in range(load.chats):
        now += rng.expovariate(load.rate)
        system = rng.choice(systems)
        events.append((now, key, Chat(key, system, rng.randint(2, 8), [{"role": "system", "content": system}])))
    return events


def simulate(router: Router, load: Load, seed: int) -> dict[str, float]:
    rng = random.Random(seed)
    fleet = [Replica(f"replica{i}", BlockCache(load.cache_tokens // TOKENS_PER_BLOCK)) for i in range(load.replicas)]
    order = load.chats
    queue: list[tuple[float, int, Chat | Replica]] = [*workload(load, rng)]
    heapq.heapify(queue)
    ttfts, hits, blocks_seen, spread = [], 0, 0, []
    while queue:
        now, _, event = heapq.heappop(queue)
        if isinstance(event, Replica):
            event.ongoing -= 1
            continue
        event.messages.append({"role": "user", "content": words(rng, rng.randint(100, 1500))})
        request = GenerateRequest("r", SamplingParams(), messages=[dict(m) for m in event.messages])
        chosen = router(request, fleet, rng.randrange(INGRESSES))
        chosen.ongoing += 1
        chosen.served += 1
        prompt = blocks_of(request, BLOCK_CHARS)
        first, hit = chosen.prefill(prompt, now)
        ttfts.append(first - now)
        hits, blocks_seen = hits + hit, blocks_seen + len(prompt)
        loads = [r.ongoing for r in fleet]
        spread.append(max(loads) / (sum(loads) / len(loads)))
        answer = rng.randint(50, 300)
        done = first + answer * chosen.step()
        order += 1
        heapq.heappush(queue, (done, order, chosen))
        event.messages.append({"role": "assistant", "content": words(rng, answer * CHARS_PER_TOKEN)})
        event.turns -= 1
        if event.turns:
            order += 1
            heapq.heappush(queue, (done + rng.expovariate(1 / 8), order, event))
    ttfts.sort()
    return {
        "hit_rate": hits / blocks_seen,
        "ttft_p50_ms": 1000 * ttfts[len(ttfts) // 2],
        "ttft_p99_ms": 1000 * ttfts[len(ttfts) * 99 // 100],
        "imbalance": statistics.mean(spread),
    }


def power_of_two() -> Router:
    rng = random.Random(7)
    return lambda request, fleet, ingress: min(rng.sample(fleet, 2), key=lambda r: r.ongoing)


def prefix() -> Router:
    fleets = [Fleet(Policy(), PrefixTable(65536)) for _ in range(INGRESSES)]

    def choose(request: GenerateRequest, replicas: list[Replica], ingress: int) -> Replica:
        fleet, by_name = fleets[ingress], {replica.name: replica for replica in replicas}
        fleet.become(by_name, replicas[0].cache.most * BLOCK_CHARS / 256)
        for replica in replicas:
            fleet.set_load(replica.name, replica.ongoing, 0)
        blocks, common, start = blocks_of(request, 256), common_blocks(request, 256), beginning(request)
        name = fleet.choose(blocks, common, home_key(request, ""), (), start)
        fleet.sent(blocks, common, name, start)
        return by_name[name]

    return choose


def ray_prefix(imbalanced_threshold: float) -> Router:
    """As `ray.serve.llm.request_router.PrefixCacheAffinityRouter` decides (without eviction, its default)."""
    tree, known, rng = PrefixTree(), set[str](), random.Random(7)

    def choose(request: GenerateRequest, fleet: list[Replica], ingress: int) -> Replica:
        by_name = {replica.name: replica for replica in fleet}
        if not known:
            tree.add_tenants(list(by_name), 0.0)
            known.update(by_name)
        text = "".join(str(message["content"]) for message in request.messages or ())
        loads = [replica.ongoing for replica in fleet]
        names = [replica.name for replica in rng.sample(fleet, 2)]
        if max(loads) - min(loads) <= imbalanced_threshold:
            matched, holders = tree.prefix_match(text, list(by_name))
            rare = len(matched) / len(text) < 0.1
            names = list((tree.get_smallest_tenants() if rare else holders) or names)
        chosen = min(names, key=lambda name: by_name[name].ongoing)
        tree.insert(text, chosen, time.monotonic())
        return by_name[chosen]

    return choose


class Decider:
    """One router among so many replicas, and prompts of 10,000 characters, 8,000 of them a system prompt, each of
    which some replica was sent before. Loads change as they do in service: once sent, once accepted, once done."""

    def __init__(self, replicas: int) -> None:
        rng = random.Random(1)
        self.table = PrefixTable(65536)
        self.fleet = Fleet(Policy(), self.table)
        self.names = [f"replica{i}" for i in range(replicas)]
        self.fleet.become(self.names)
        for name in self.names:
            self.fleet.set_load(name, rng.randrange(8), 0)
        system = {"role": "system", "content": words(rng, 8000)}
        self.requests = [
            GenerateRequest("r", SamplingParams(), messages=[system, {"role": "user", "content": words(rng, 2000)}])
            for _ in range(50)
        ]
        for request in self.requests:
            self.fleet.sent(*self.cut(request), rng.choice(self.names))

    @staticmethod
    def cut(request: GenerateRequest) -> tuple[list[int], int]:
        return blocks_of(request, 256), common_blocks(request, 256)

    def decide(self, request: GenerateRequest) -> str:
        (blocks, common), start = self.cut(request), beginning(request)
        name = self.fleet.choose(blocks, common, home_key(request, ""), (), start)
        self.fleet.sent(blocks, common, name, start)
        load = self.fleet.load(name)
        for now in (load + 1, load + 1, load):
            self.fleet.set_load(name, now, 0)
        return name

    def plainly(self, request: GenerateRequest) -> str:
        blocks, common = self.cut(request)
        overlaps = self.table.overlaps(blocks, self.names, common)
        candidates = [Candidate(n, self.fleet.load(n), overlaps.get(n, 0.0)) for n in self.names]
        return choose_plainly(candidates, home_key(request, ""), Policy(), self.fleet.homes(beginning(request)))

    def check(self) -> None:
        for request in self.requests:
            expected = self.plainly(request)
            assert self.decide(request) == expected

    def us(self) -> float:
        """Microseconds of a decision, now."""
        started = time.perf_counter()
        for request in self.requests:
            self.decide(request)
        return (time.perf_counter() - started) / len(self.requests) * 1e6


def decision_costs(sizes: tuple[int, ...] = (1, 4, 16, 64), repeats: int = 100) -> dict[int, float]:
    """Median microseconds of one decision by the number of replicas, which take turns."""
    deciders = {size: Decider(size) for size in sizes}
    for decider in deciders.values():
        decider.check()
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(repeats):
        for size, decider in deciders.items():
            times[size].append(decider.us())
    return {size: statistics.median(seen) for size, seen in times.items()}


ROUTERS: dict[str, Callable[[], Router]] = {
    "power of two": power_of_two,
    "Ray's prefix tree, defaults": lambda: ray_prefix(float("inf")),
    "Ray's prefix tree, threshold 10": lambda: ray_prefix(10),
    "prefix under a load bound": prefix,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--chats", type=int, default=1500)
    parser.add_argument("--rate", type=float, default=6.0, help="new chats per second")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--systems", type=int, default=4, help="system prompts")
    parser.add_argument("--cache", type=int, default=400_000, help="tokens in each replica's prefix cache")
    options = parser.parse_args()
    load = Load(options.replicas, options.chats, options.rate, options.systems, options.cache)
    table: dict[str, dict[str, float]] = {}
    print(f"{'':34}{'hit rate':>10}{'TTFT p50':>10}{'p99 ms':>10}{'max/mean load':>15}")
    for name, make in ROUTERS.items():
        runs = [simulate(make(), load, seed) for seed in range(options.seeds)]
        row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        table[name] = row
        print(
            f"{name:34}{row['hit_rate']:10.2f}{row['ttft_p50_ms']:10.0f}{row['ttft_p99_ms']:10.0f}"
            f"{row['imbalance']:15.2f}",
            flush=True,
        )
    costs = decision_costs()
    print("µs per decision:", ", ".join(f"{n} replicas {cost:.0f}" for n, cost in costs.items()))
    print(json.dumps({"table": table, "decision_us": costs}))


if __name__ == "__main__":
    main()
