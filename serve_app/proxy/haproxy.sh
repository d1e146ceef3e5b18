#!/bin/sh
# Starts HAPROXY_BINARY in Serve's service, after two changes to what Serve wrote for it.
# Its error page, which clients get where no ingress answers, takes OpenAI's shape (Serve offers no setting for that).
# With HAPROXY_PAGES_HOST its metrics and statistics, which Serve binds to all addresses, listen on that one alone.
set -eu
here=$(dirname "$0")
previous=
for argument do
  if [ "$previous" = -f ]; then
    cp "$here/unavailable.http" "$(dirname "$argument")/500.http"
    if [ -n "${HAPROXY_PAGES_HOST:-}" ]; then
      sed -i "s/^\( *bind \)\*\{0,1\}:\([0-9]*\)\$/\1$HAPROXY_PAGES_HOST:\2/" "$argument"
    fi
  fi
  previous=$argument
done
exec "${HAPROXY_BINARY:-haproxy}" "$@"
