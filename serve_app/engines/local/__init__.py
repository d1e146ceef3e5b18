"""The embedded engine: PyTorch on this machine's CPU or GPU. `engine.LocalEngine` is its only public name.

Importing it sets how OpenMP threads wait, before torch loads OpenMP and unless the environment says so already.
"""

import os

# A step is hundreds of short parallel regions. By default a thread that waits for its sibling spins for milliseconds;
# where other processes want the cores too (the ingress, a client), it spins while the sibling cannot run, and a step
# takes ten times as long. A spin of some microseconds bridges the gaps between regions and then sleeps.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
