#!/usr/bin/env bash
# Makes a release and its units the current ones on this node, as root: release.sh VERSION. Going back is the same
# with the older version. Running processes keep theirs until their unit is restarted (docs/deploy.md, "Upgrade").
set -euo pipefail

version=${1:?usage: release.sh VERSION}
if [[ $version == -h || $version == --help ]]; then
  echo "usage: release.sh VERSION"
  exit
fi
root=${ROOT:-/opt/ddtree}
units=${UNITS:-/etc/systemd/system}
if [[ ! -x $root/releases/$version/bin/python ]]; then
  echo "no release $version in $root/releases" >&2
  exit 1
fi
before=$(readlink "$root/current" || true)
# One rename, so that `current` is never missing.
ln -sfn "releases/$version" "$root/current.new"
mv -T "$root/current.new" "$root/current"
# The units are the release's, too. Their processes are not restarted by this.
install -m 0644 "$root/current"/deploy/bare-metal/systemd/*.service "$units"
if [[ -d /run/systemd/system ]]; then systemctl daemon-reload; fi
echo "current: $version (before: ${before:-none})"
