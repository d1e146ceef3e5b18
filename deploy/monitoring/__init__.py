"""A Prometheus with this repository's rules, and Grafana's provisioning files."""
