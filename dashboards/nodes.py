"""The machines: what the processes use, and what NVIDIA's DCGM exporter says about the GPUs where there is one.

The names and units are those of dcgm-exporter's own list of counters.
"""

from __future__ import annotations

from dashboards.grafana import Dashboard, Panel, Query, Variable
from dashboards.promql import ALL_UP, JOB, PROCESS, rate, select

HOST = Variable("host", "GPU host", "label_values(DCGM_FI_DEV_GPU_TEMP, Hostname)")
GPUS = 'Hostname=~"$host"'
GPU = "{{Hostname}} GPU {{gpu}}"


def gpu(title: str, name: str, what: str, unit: str, *, factor: str = "", ceiling: float | None = None) -> Panel:
    query = Query(f"max by (Hostname, gpu) ({select(name, GPUS)}){factor}", GPU)
    return Panel("timeseries", title, what, [query], unit=unit, ceiling=ceiling)


PROCESSES = [
    Panel("timeseries", "CPU by node", "CPU time of this application's processes, in cores.",
          [Query(rate("process_cpu_seconds_total", PROCESS, "node, deployment"), "{{deployment}} {{node}}")],
          stacked=True),
    Panel("timeseries", "Memory by node", "Resident memory of this application's processes. Growth without growth of "
          "traffic is a leak: note the replica, and restart it.",
          [Query(f"sum by (node, deployment) ({select('process_resident_memory_bytes', PROCESS)})",
                 "{{deployment}} {{node}}")], unit="bytes", stacked=True),
    Panel("timeseries", "Processes by node", "Exporters that answer. Engines spread one to a node.",
          [Query(f"sum by (node, deployment) ({ALL_UP})",
                 "{{deployment}} {{node}}")], stacked=True),
]  # fmt: skip

DEVICES = [
    gpu("GPU busy", "DCGM_FI_DEV_GPU_UTIL", "Share of time with any kernel running. Full under load; a GPU of a node "
        "below the others waits for them.", "percent", ceiling=100),
    gpu("Tensor cores", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "Share of cycles with the tensor pipe active. Low while "
        "busy: decoding is bound by memory, and a larger tree budget is nearly free.", "percentunit", ceiling=1),
    gpu("Memory bandwidth", "DCGM_FI_PROF_DRAM_ACTIVE", "Share of cycles with device memory active.", "percentunit",
        ceiling=1),
    gpu("GPU memory used", "DCGM_FI_DEV_FB_USED", "Weights, KV cache and graphs.", "bytes", factor=" * 1048576"),
    gpu("Power", "DCGM_FI_DEV_POWER_USAGE", "At the limit the clock falls: compare with the clock.", "watt"),
    gpu("SM clock", "DCGM_FI_DEV_SM_CLOCK", "A fall under load is throttling by power or heat.", "hertz",
        factor=" * 1000000"),
    gpu("Temperature", "DCGM_FI_DEV_GPU_TEMP", "Beyond about 85 °C GPUs throttle: look at the node's cooling.",
        "celsius"),
    gpu("Last XID error", "DCGM_FI_DEV_XID_ERRORS", "0 is none. Any other: drain the node and look the number up in "
        "NVIDIA's list.", "none"),
]  # fmt: skip

NVLINK = [
    Panel("timeseries", "NVLink traffic", "Both directions of each GPU. One tensor-parallel group loads all GPUs "
          "alike; "
          "one that is lower has a link down.",
          [Query(f"max by (Hostname, gpu) ({select('DCGM_FI_PROF_NVLINK_TX_BYTES', GPUS)})", f"{GPU} sent"),
           Query(f"max by (Hostname, gpu) ({select('DCGM_FI_PROF_NVLINK_RX_BYTES', GPUS)})", f"{GPU} received")],
          unit="Bps", width=12),
    Panel("timeseries", "Power by node", "All GPUs of a node together.",
          [Query(f"sum by (Hostname) ({select('DCGM_FI_DEV_POWER_USAGE', GPUS)})", "{{Hostname}}")], unit="watt",
          width=12),
]  # fmt: skip

NODES = Dashboard(
    "ddtree-nodes", "DDTree / Nodes", "Processes, GPUs, NVLink and power of the machines.", (JOB, HOST),
    {"Processes": PROCESSES, "GPUs": DEVICES, "NVLink and power": NVLINK},
)  # fmt: skip
