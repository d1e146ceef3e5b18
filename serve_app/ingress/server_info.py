"""`GET /server_info`: what benchmark tools ask a server about itself, acceptance length first.

The shape is the one that SGLang's serving benchmark reads: `internal_states`, one per engine, each with
`avg_spec_accept_length`. The mean is over the engine's whole life, Σ tokens over Σ verify steps; for a window, take the
difference of the two counters on /metrics.

What this module does not do: gather pages (see `routes`).
"""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from serve_app import __version__
from serve_app.config import Config
from serve_app.engines.base import ModelInfo

ACCEPTANCE = "ddtree_acceptance_length"


def server_info(config: Config, info: ModelInfo, page: str) -> dict[str, Any]:
    """`page`: /metrics of all processes, each sample labelled with its replica."""
    return {
        "version": __version__,
        "model_path": config.model.source,
        "served_model_name": info.id,
        "max_model_len": info.max_model_len,
        "speculation": config.speculation.model_dump(),
        "engine": config.engine.model_dump(),
        "num_replicas": config.replica.num_replicas,
        "internal_states": _states(page),
    }


def _states(page: str) -> list[dict[str, Any]]:
    sums: dict[str, dict[str, float]] = {}
    # Parsing a page of 64 engines whole would hold up the event loop for a quarter of a second.
    lines = "".join(line for line in page.splitlines(keepends=True) if ACCEPTANCE in line)
    for family in text_string_to_metric_families(lines):
        if family.name == ACCEPTANCE:
            for sample in family.samples:
                engine = sums.setdefault(sample.labels["replica"], {})
                engine[sample.name] = engine.get(sample.name, 0.0) + sample.value
    return [
        {
            "replica": replica,
            "verify_steps": int(steps := engine.get(f"{ACCEPTANCE}_count", 0.0)),
            "avg_spec_accept_length": engine.get(f"{ACCEPTANCE}_sum", 0.0) / steps if steps else None,
        }
        for replica, engine in sorted(sums.items())
    ]
