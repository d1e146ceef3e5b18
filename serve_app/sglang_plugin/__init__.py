"""DDTREE as an out-of-tree SGLang speculative algorithm.

Submodules: `plugin` (entry point), `algo` and `args` (what SGLang asks of an algorithm), `hooks` (where SGLang offers no
seam), `tree`, `topk`, `commit`, `sampling` (one verify step's arithmetic), `inputs`, `graph` and `worker` (the step in
SGLang's terms), `metrics`. This module imports nothing: SGLang loads plugins in every one of its processes.
"""
