#!/usr/bin/env bash
# Runs Ray on this node in the foreground: start-ray.sh head|worker. The environment is ray.env's.
# Ports are fixed, so that a firewall can name them (docs/deploy.md); the variables exist for tests on one
# machine. DRY_RUN=1 prints the command instead.
set -euo pipefail

usage="usage: start-ray.sh head|worker"
role=${1:?$usage}
gcs_port=${GCS_PORT:-6379}
options=(
  --block
  --disable-usage-stats
  --node-manager-port="${NODE_MANAGER_PORT:-6701}"
  --object-manager-port="${OBJECT_MANAGER_PORT:-6702}"
  --runtime-env-agent-port="${RUNTIME_ENV_AGENT_PORT:-6703}"
  --dashboard-agent-grpc-port="${AGENT_GRPC_PORT:-6704}"
  --dashboard-agent-listen-port="${AGENT_PORT:-52365}"
  --metrics-export-port="${METRICS_PORT:-8080}"
  --min-worker-port="${MIN_WORKER_PORT:-10002}"
  --max-worker-port="${MAX_WORKER_PORT:-10999}"
)
case $role in
  head)
    # No CPU and no GPU: nothing that serves is placed here. The dashboard runs code for whoever reaches it.
    options+=(--head --port="$gcs_port" --num-cpus=0 --num-gpus=0)
    options+=(--dashboard-host=127.0.0.1 --dashboard-port="${DASHBOARD_PORT:-8265}")
    options+=(--ray-client-server-port="${CLIENT_PORT:-10001}")
    if [[ -n ${CLUSTER_REDIS:-} ]]; then
      export RAY_REDIS_ADDRESS=$CLUSTER_REDIS
      # Ray takes it as an argument alone: whoever may list this machine's processes can read it.
      options+=(--redis-password="$(cat "${REDIS_PASSWORD_FILE:-/etc/ddtree/redis-password}")")
    fi
    ;;
  worker)
    options+=(--address="${CLUSTER_HEAD:?the head, in ray.env}:$gcs_port")
    ;;
  -h | --help)
    echo "$usage"
    exit
    ;;
  *)
    echo "unknown role $role; $usage" >&2
    exit 2
    ;;
esac
if [[ ${DRY_RUN:-} == 1 ]]; then
  printf '%s\n' ray start "${options[@]}"
else
  exec ray start "${options[@]}"
fi
