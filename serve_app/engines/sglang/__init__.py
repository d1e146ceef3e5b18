"""SGLang in the replica's own process: its scheduler is a child, no HTTP server is started.

Submodules: `arguments` (configuration → ServerArgs), `host` (the thread and processes that SGLang is), `requests` (what
may be asked of it, in its words), `tooling` (tools and reasoning, by its parsers), `choice` (what it answers, in ours),
`parsed` and `reading` (calls and reasoning in it), `engine` (the seam), `exposition` (its series).
This module imports nothing: SGLang is an extra.
"""
