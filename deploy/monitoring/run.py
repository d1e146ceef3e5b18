"""Runs a Prometheus with this repository's rules against an application, without containers.

    python -m deploy.monitoring.run --application http://127.0.0.1:8000 --port 9090 --data /var/lib/ddtree-prometheus

What this module does not do: run Grafana; `grafana/provisioning` and `dashboards/grafana` are for one that is there.
"""

from __future__ import annotations

import argparse
import http.client
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

import yaml

from deploy.monitoring.binaries import Unavailable, find

HERE = Path(__file__).resolve().parent
RULES = HERE.parent.parent / "dashboards" / "rules"


def configuration(application: str, interval: str | None = None) -> str:
    """prometheus.yml for an application's URL, with absolute paths.

    Args:
        interval: of scrapes, evaluations and discovery, instead of the file's own.
    """
    config = yaml.safe_load((HERE / "prometheus.yml").read_text())
    config["rule_files"] = [str(path) for path in sorted(RULES.glob("*.yml"))]
    discovery, dcgm = config["scrape_configs"][0]["http_sd_configs"][0], config["scrape_configs"][1]
    discovery["url"] = f"{application.rstrip('/')}/-/prometheus/targets"
    dcgm["file_sd_configs"][0]["files"] = [str(HERE / "dcgm" / "*.json")]
    if interval is not None:
        config["global"] = {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval}
        discovery["refresh_interval"] = interval
    return yaml.safe_dump(config, sort_keys=False)


def command(prometheus: Path, data: Path, listen: str) -> list[str]:
    """The server's command line; its configuration is in `data`."""
    return [
        str(prometheus), f"--config.file={data / 'prometheus.yml'}", f"--storage.tsdb.path={data / 'tsdb'}",
        f"--web.listen-address={listen}", "--storage.tsdb.retention.time=30d", "--enable-feature=exemplar-storage",
    ]  # fmt: skip


def answers(application: str) -> bool:
    """Whether it is there, whatever proxy the environment names."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{application.rstrip('/')}/health", timeout=5):
            return True
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError):
        return False


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.monitoring.run", description=__doc__)
    parser.add_argument("--application", default="http://127.0.0.1:8000", help="URL of any ingress")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9090)
    parser.add_argument("--data", type=Path, default=Path("prometheus-data"), help="default: %(default)s")
    parser.add_argument("--interval", help="of scrapes, such as 5s; default: the one in prometheus.yml")
    options = parser.parse_args(argv)
    try:
        prometheus = find("prometheus")
    except Unavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    options.data.mkdir(parents=True, exist_ok=True)
    (options.data / "prometheus.yml").write_text(configuration(options.application, options.interval))
    line = command(prometheus, options.data.resolve(), f"{options.host}:{options.port}")
    if not answers(options.application):
        print(f"no application answers on {options.application}; targets appear when one does", file=sys.stderr)
    print(f"Prometheus on http://{options.host}:{options.port}", flush=True)
    os.execv(line[0], line)


if __name__ == "__main__":
    sys.exit(main())
