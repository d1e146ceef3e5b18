#!/usr/bin/env bash
# What a node must have before Ray starts on it: preflight.sh head|worker [serve-config.yaml]. Prints every miss; exit
# code 1 where there is any. `python -m serve_app.topology` checks the GPUs against the Serve configuration.
set -uo pipefail

usage="usage: preflight.sh head|worker [serve-config.yaml]"
role=${1:?$usage}
case $role in
  head | worker) ;;
  -h | --help)
    echo "$usage"
    exit
    ;;
  *)
    echo "unknown role $role; $usage" >&2
    exit 2
    ;;
esac
config=${2:-}
etc=${ETC:-/etc/ddtree}
python=${PYTHON:-python3}
misses=0

miss() {
  echo "miss: $*"
  misses=$((misses + 1))
}
ok() { echo "ok: $*"; }
check() { # what, command…
  local what=$1
  shift
  if "$@" >/dev/null 2>&1; then ok "$what"; else miss "$what"; fi
}
listens() { ss -Hltn "sport = :$1" | grep -q .; }
reaches() { timeout 3 bash -c "exec 3<>/dev/tcp/$1/$2"; }
compiles() { # Python's headers, and a compiler that takes them: triton's launchers are made of both
  local include
  include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))') &&
    echo '#include <Python.h>' | "${CC:-gcc}" -I"$include" -fsyntax-only -x c -
}
sglang() { # the configuration asks for it
  local kind='import sys, yaml; print(yaml.safe_load(open(sys.argv[1])).get("engine", {}).get("kind"))'
  [[ $("$python" -c "$kind" "$1") == sglang ]]
}
secret() { # readable by its user alone
  [[ -s $1 && $(stat -c %a "$1") =~ ^[46]00$ ]]
}

check "the application is installed" "$python" -c 'import ray, serve_app'
if [[ ${RAY_SERVE_ENABLE_HA_PROXY:-0} == 1 ]]; then
  check "HAProxy can be used" "${RAY_SERVE_HAPROXY_BINARY_PATH:-haproxy}" -v
  for port in 8404 9101; do if listens "$port"; then miss "port $port is taken"; fi; done
fi
check "$etc/ray-token is there, mode 0400 or 0600" secret "$etc/ray-token"
check "$etc/keys.yaml is there" test -r "$etc/keys.yaml"
files=$(ulimit -n)
if [[ $files == unlimited || $files -ge 65536 ]]; then
  ok "open files: $files"
else
  miss "open files: $files, 65536 are needed"
fi
if command -v timedatectl >/dev/null; then
  check "the clock is synchronised" test "$(timedatectl show -p NTPSynchronized --value 2>/dev/null)" = yes
fi
for port in 6701 6702 6703 6704 8080 52365 8000; do
  if listens "$port"; then miss "port $port is taken"; fi
done

case $role in
  head)
    for port in 6379 8265 8500 10001; do if listens "$port"; then miss "port $port is taken"; fi; done
    if [[ -n ${CLUSTER_REDIS:-} ]]; then
      check "$etc/redis-password is there, mode 0400 or 0600" secret "$etc/redis-password"
      check "Redis answers at $CLUSTER_REDIS" reaches "${CLUSTER_REDIS%:*}" "${CLUSTER_REDIS##*:}"
    fi
    ;;
  worker)
    check "the head answers at ${CLUSTER_HEAD:?the head, in ray.env}:6379" reaches "$CLUSTER_HEAD" 6379
    if command -v nvidia-smi >/dev/null; then
      errors=$(nvidia-smi --query-gpu=ecc.errors.uncorrected.volatile.total --format=csv,noheader | grep -cv '^0$')
      if [[ $errors -gt 0 ]]; then
        miss "$errors GPUs have uncorrected memory errors"
      else
        ok "no uncorrected memory errors"
      fi
      if [[ $(nvidia-smi -L | wc -l) -ge 8 ]]; then
        check "the fabric manager runs" systemctl is-active nvidia-fabricmanager
      fi
    fi
    if [[ -n $config ]]; then
      # The first application's arguments are a configuration file of their own.
      arguments=$(mktemp)
      trap 'rm -f "$arguments"' EXIT
      taken='import sys, yaml; print(yaml.safe_dump(yaml.safe_load(open(sys.argv[1]))["applications"][0]["args"]))'
      "$python" -c "$taken" "$config" >"$arguments"
      if [[ -s $arguments ]] && sglang "$arguments"; then
        check "SGLang is installed" "$python" -c 'from importlib.metadata import version; version("sglang")'
        check "gcc and Python's headers are there" compiles
        check "CUDA's compiler is there" test -x "$(PATH=/usr/local/cuda/bin:$PATH command -v nvcc)"
      fi
      if [[ -s $arguments ]] && DDTREE_CONFIG=$arguments "$python" -m serve_app.topology >/dev/null; then
        ok "this node is what $config asks for"
      else
        miss "this node is not what $config asks for (above)"
      fi
    fi
    ;;
esac
echo "$misses misses"
[[ $misses -eq 0 ]]
