"""The whole stack on a GPU machine without a network: `python -m deploy.gpu_e2e`, or `make gpu-e2e`.

Submodules: `settings` (which application each phase serves), `cluster` and `application` (processes), `in_process` (the
same engine without HTTP) and `closed_loop` (the load on both), `checks` and `cases` (what answers must be), `kill`,
`panels`, `stages` and `phases` (what is asked of which application), `run` (in which order and time), `report`.
"""
