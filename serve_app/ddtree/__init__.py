"""The DDTree algorithm (arXiv 2604.12989): build a draft tree, mask it, walk it, commit it. torch only.

Submodules: `tree` (build), `mask` (attention and positions), `accept` (sample-and-match walk), `kv` (index moves
after acceptance), `budget` (how many nodes pay). Nothing here runs a model, samples, or owns a KV cache.
"""
