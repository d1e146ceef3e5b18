"""Choosing a replica. `scoring` decides, `prefixes` remembers, `serve_router` plugs both into Ray Serve.

What this package does not do: admit or retry requests.
"""
