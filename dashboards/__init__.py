"""Grafana dashboards from Python, and Prometheus rules. `python -m dashboards` writes the JSON that is checked in.

What this package does not do: talk to Grafana or Prometheus.
"""
