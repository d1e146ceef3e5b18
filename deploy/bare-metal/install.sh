#!/usr/bin/env bash
# Installs a release beside the others, as root, on every node: install.sh WHEEL [extra,extra]. Starts nothing and
# switches nothing: `release.sh VERSION` does. Existing files in /etc/ddtree are kept.
set -euo pipefail
umask 022

usage="usage: install.sh ddtree_serve-VERSION-py3-none-any.whl [extras, such as gpu,sglang]"
wheel=${1:?$usage}
extras=${2:-gpu}
if [[ $wheel == -h || $wheel == --help ]]; then
  echo "$usage"
  exit
fi
# Before anything is changed.
version=$(basename -- "$wheel" | cut -d- -f2)
if [[ ! -f $wheel || $(basename -- "$wheel") != ddtree_serve-"$version"-*.whl ]]; then
  echo "$wheel is no wheel of this package; $usage" >&2
  exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
root=${ROOT:-/opt/ddtree}
release=$root/releases/$version
if [[ $(id -u) != 0 ]]; then
  echo "install.sh makes a user and writes to $root and /etc/ddtree: run it as root" >&2
  exit 1
fi
if [[ -e $release ]]; then
  echo "$release is there already" >&2
  exit 1
fi
if ! command -v "${PYTHON:-python3.11}" >/dev/null; then
  echo "${PYTHON:-python3.11} is not there; PYTHON names another" >&2
  exit 1
fi

id ddtree >/dev/null 2>&1 || useradd --system --create-home --home-dir /var/lib/ddtree --shell /usr/sbin/nologin ddtree
install -d -m 0755 "$root/releases"
install -d -m 0750 -o root -g ddtree /etc/ddtree
install -d -m 0750 -o ddtree -g ddtree /var/cache/ddtree
partial=$release.partial
rm -rf "$partial"
"${PYTHON:-python3.11}" -m venv "$partial"
# Pins every package. SGLang wants another torch than the embedded engine's, and so a file of its own, which no
# checkout has.
constraints=$here/../constraints.txt
if [[ ,$extras, == *,sglang,* ]]; then constraints=$here/../constraints-sglang.txt; fi
pins=()
if [[ -f $constraints ]]; then pins=(-c "$constraints"); else echo "no $constraints: what pip resolves today" >&2; fi
"$partial/bin/python" -m pip install --no-cache-dir "${pins[@]}" "${wheel}[${extras}]"
# Scripts of a virtual environment name its path: move only after rewriting them.
grep -rlI "$partial" "$partial/bin" | xargs -r sed -i "s#$partial#$release#g"
mv "$partial" "$release"
"$release/bin/python" -m serve_app.proxy "$release/bin" ||
  echo "without HAProxy: set RAY_SERVE_ENABLE_HA_PROXY=0 in /etc/ddtree/ray.env, on all nodes" >&2
install -d "$release/deploy"
cp -r "$here/../serve" "$here/../sglang" "$here" "$release/deploy/"

[[ -e /etc/ddtree/ray.env ]] || install -m 0640 -g ddtree "$here/ray.env" /etc/ddtree/ray.env
[[ -e /etc/ddtree/keys.yaml ]] || install -m 0640 -g ddtree /dev/null /etc/ddtree/keys.yaml
echo "installed $release"
