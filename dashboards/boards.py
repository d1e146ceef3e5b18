"""All dashboards, and what a machine without GPUs cannot show of them.

What this module does not do: define panels.
"""

from __future__ import annotations

from dashboards.graphs import GRAPHS
from dashboards.nodes import DEVICES, NODES, NVLINK
from dashboards.overview import OVERVIEW
from dashboards.speculation import SPECULATION

BOARDS = (OVERVIEW, SPECULATION, GRAPHS, NODES)

_DCGM = "comes from NVIDIA's DCGM exporter"
_REPLAY = "counts rows of graph replays, and nothing replays without CUDA"
# (dashboard, panel) → why there is no data on a CPU. A test fails when one of them has data after all.
ABSENT_ON_CPU: dict[tuple[str, str], str] = {
    **{(NODES.uid, panel.title): _DCGM for panel in (*DEVICES, *NVLINK)},
    (GRAPHS.uid, "Padding waste"): _REPLAY,
    (GRAPHS.uid, "Padding waste by bucket"): _REPLAY,
    (GRAPHS.uid, "Rows by bucket"): _REPLAY,
}
