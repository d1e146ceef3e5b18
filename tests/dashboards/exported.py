"""What the application exports: every name with its labels, from the declarations themselves."""

from functools import cache

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics import MetricWrapperBase

from dashboards.expressions import boards
from serve_app.metrics import EngineMetrics, GatewayMetrics, ProcessMetrics

# Put on every series by the scrape: service discovery's labels, and Prometheus's own.
TARGET = frozenset({"job", "instance", "deployment", "node", "replica", "model"})
DCGM_LABELS = frozenset({"job", "instance", "Hostname", "gpu"})
# Names of dcgm-exporter's counters that exist; the exporter itself needs a GPU.
DCGM = frozenset(
    f"DCGM_FI_{name}"
    for name in (
        "DEV_GPU_UTIL", "DEV_FB_USED", "DEV_POWER_USAGE", "DEV_SM_CLOCK", "DEV_GPU_TEMP", "DEV_XID_ERRORS",
        "PROF_PIPE_TENSOR_ACTIVE", "PROF_DRAM_ACTIVE", "PROF_NVLINK_TX_BYTES", "PROF_NVLINK_RX_BYTES",
    )
)  # fmt: skip


@cache
def exported() -> dict[str, frozenset[str]]:
    """Series name → its labels, those of the target included."""
    registry = CollectorRegistry()
    EngineMetrics(registry, "m", 4, ["no_cuda"])
    GatewayMetrics(registry)
    ProcessMetrics(registry)
    found: dict[str, frozenset[str]] = {"up": TARGET}
    for collector, its_names in registry._collector_to_names.items():
        labels = frozenset(collector._labelnames) if isinstance(collector, MetricWrapperBase) else frozenset()
        for name in its_names:
            found[name] = labels | TARGET
            if isinstance(collector, Histogram) and name.endswith("_bucket"):
                found[name] |= {"le"}
            elif isinstance(collector, (Counter, Histogram)) and not name.endswith(("_total", "_count", "_sum")):
                del found[name]
    # prometheus_client's own collector names its series only when it collects.
    own = [sample.name for family in registry.collect() for sample in family.samples if sample.name[:8] == "process_"]
    return found | dict.fromkeys(own, TARGET) | dict.fromkeys(DCGM, DCGM_LABELS)


def uids() -> set[str]:
    return set(boards())
