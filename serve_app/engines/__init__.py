"""Engines: what turns a request into tokens. `base` is the protocol; each engine is imported only when chosen."""
