"""SGLang's series of this process, for this process's page.

Its tokenizer manager counts in prometheus_client's own registry, which nobody serves here; its other processes write
files, which `serve_app.multiprocess` reads.

What this module does not do: series of ours.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.registry import Collector

PREFIX = "sglang:"


class OwnSeries(Collector):
    """Passes on the families of `source` whose names are SGLang's."""

    def __init__(self, source: CollectorRegistry = REGISTRY) -> None:
        self._source = source

    def describe(self) -> Iterable[Metric]:
        return []  # they come and go with the engine

    def collect(self) -> Iterable[Metric]:
        return [family for family in self._source.collect() if family.name.startswith(PREFIX)]


def forget_series(source: CollectorRegistry = REGISTRY) -> None:
    """Take SGLang's series out of a registry, so that another engine of this process can declare them."""
    for collector, names in list(source._collector_to_names.items()):
        if any(name.startswith(PREFIX) for name in names):
            source.unregister(collector)
