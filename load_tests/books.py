"""Three sets of books over the same requests: what clients saw, what the gateway counted, what the engines counted.

What this module does not do: wait; the caller reads the books when nothing runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from load_tests.scrape import Page, by_label, grown, total
from load_tests.timeline import Outcome

ROUTE = "/v1/chat/completions"
LEFT = "499"
BROKE = "broke"


@dataclass
class Books:
    """Counts of one stretch of time. `statuses`: requests by status; `tokens`: emitted after
    each request's first, of answers that were read to the end."""

    statuses: dict[str, int] = field(default_factory=dict)
    finished: int = 0
    aborted: int = 0
    tokens: int = 0


def of_clients(outcomes: Iterable[Outcome], invalid: Counter[str]) -> Books:
    """`invalid`: requests that had to be refused, by the status they got."""
    statuses = Counter(invalid)
    books = Books()
    for outcome in outcomes:
        whole = outcome.status != 200 or outcome.ok
        statuses[LEFT if outcome.abandoned else str(outcome.status) if whole else BROKE] += 1
        books.finished += outcome.ok
        books.aborted += outcome.abandoned
        books.tokens += max(0, (outcome.completion_tokens or 0) - 1) if outcome.ok else 0
    books.statuses = dict(statuses)
    return books


def of_server(before: Page, after: Page) -> Books:
    """From two pages of the same processes."""

    def grew(name: str, **labels: str) -> int:
        return round(total(after, name, **labels) - total(before, name, **labels))

    ended = {name: grew("ddtree_requests_total", outcome=name) for name in ("stop", "length", "abort")}
    return Books(
        statuses={status: round(n) for status, n in grown(_statuses(before), _statuses(after)).items()},
        finished=ended["stop"] + ended["length"],
        aborted=ended["abort"],
        tokens=grew("ddtree_emitted_tokens_total", phase="verify"),
    )


def _statuses(page: Page) -> dict[str, float]:
    mine = {"gateway_requests_total": [s for s in page["gateway_requests_total"] if s[0].get("route") == ROUTE]}
    return by_label(mine, "gateway_requests_total", "status")


def disagreements(clients: Books, server: Books, *, engines: bool, tokens: bool) -> list[str]:
    """What does not agree exactly. `engines`: no engine was lost meanwhile; `tokens`: nobody left in mid-answer, as
    only then the clients know how many there were."""
    found = []
    if _comparable(clients.statuses) != _comparable(server.statuses):
        found.append(f"requests by status: clients {clients.statuses}, gateway {server.statuses}")
    if engines and clients.finished != server.finished:
        found.append(f"finished: clients {clients.finished}, engines {server.finished}")
    if engines and clients.aborted != server.aborted:
        found.append(f"aborted: clients {clients.aborted}, engines {server.aborted}")
    if engines and tokens and clients.tokens != server.tokens:
        found.append(f"tokens after the first: clients {clients.tokens}, engines {server.tokens}")
    return found


def _comparable(statuses: dict[str, int]) -> dict[str, int]:
    """A stream that broke has status 200 on the wire and its error's at the gateway: failures are compared as one."""
    merged: Counter[str] = Counter()
    for status, count in statuses.items():
        merged[status if status[0] in "24" else BROKE] += count
    return dict(merged)


def still_held(page: Page) -> list[str]:
    """Slots, tokens and requests that should be free when nothing runs."""
    names = ("ddtree_running_requests", "ddtree_queued_requests", "ddtree_kv_tokens_used", "gateway_inflight_requests")
    return [f"{name} is {total(page, name):g}" for name in names if total(page, name)]
