"""Pictures of the dashboards over a Prometheus's data, drawn by a page of our own in headless Chromium.

The page draws what the JSON's panels ask for in the way Grafana would; it is no Grafana.
"""
