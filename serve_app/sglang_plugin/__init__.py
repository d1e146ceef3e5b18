"""DDTREE as an out-of-tree SGLang speculative algorithm.

Submodules: `plugin` (entry point), `algo` and `args` (what SGLang asks of an algorithm), `hooks` (where it offers no
seam), `prepare`, `topk`, `tree`, `commit`, `sampling` (one step's arithmetic), `inputs`, `graph` and `worker` (the step
in SGLang's terms), `metrics`. This module imports nothing: SGLang loads plugins in every one of its processes.
"""
