#!/bin/sh
# Starts HAPROXY_BINARY in Serve's service, after three changes to what Serve wrote for it.
# Its error page, which clients get where no ingress answers, takes OpenAI's shape (Serve offers no setting for that).
# A client has 30 s for the head of a request: without a limit connections that say nothing hold all places for an hour.
# With HAPROXY_PAGES_HOST its metrics and statistics, which Serve binds to all addresses, listen on that one alone.
set -eu
here=$(dirname "$0")
previous=
for argument do
  if [ "$previous" = -f ]; then
    cp "$here/unavailable.http" "$(dirname "$argument")/500.http"
    # At the top, so that one of Serve's own, should it write any, wins.
    sed -i 's/^defaults$/&\n    timeout http-request 30s/' "$argument"
    if [ -n "${HAPROXY_PAGES_HOST:-}" ]; then
      sed -i "s/^\( *bind \)\*\{0,1\}:\([0-9]*\)\$/\1$HAPROXY_PAGES_HOST:\2/" "$argument"
    fi
  fi
  previous=$argument
done
exec "${HAPROXY_BINARY:-haproxy}" "$@"
