#!/bin/sh
# Starts HAPROXY_BINARY, else the PATH's, in Serve's service, after changes to what Serve wrote for it, for which Serve
# has no settings.
# Its error pages take OpenAI's shape: where no ingress answers, and where a request broke off or its client closed its side
# while it waited. For a head that is no HTTP, or too large, HAProxy has a page of its own that cannot be changed.
# Where there is no application, yet or any more, a client may come again: Serve would say in plain text that there is no such path.
# A client has 30 s for the head of a request: without a limit connections that say nothing hold all places for an hour.
# A check that is not answered within 2 s has failed: Serve's wait for as long as they are apart.
# An ingress whose machine or network is gone is known by its silence after 25 s; otherwise its answers would wait on it
# until `hard-stop-after`, since an HAProxy that a reload replaced makes no checks.
# Where ingresses run on its own node (Serve names them by 127.0.0.1), those elsewhere take what those cannot, as with
# Serve's own proxy: a client whom one node serves does not need another.
# Offers to change the protocol, which Java's client makes with every request, are not passed on: uvicorn takes the body
# of such a request for the new protocol's, and it would arrive without one.
# A request's body is not spliced: HAProxy 2.8 then looks no more at a client whose body came apart from its head, as that of
# most libraries does, and its whole answer is generated to the end when it has left.
# A client's first request gets a connection of its own to an ingress: where that dies before it answers, HAProxy closes a
# client's connection without a word if another client used the ingress's before.
# With HAPROXY_PAGES_HOST its metrics and statistics, which Serve binds to all addresses, listen on that one alone.
set -eu
# It may be a link.
here=$(dirname "$(readlink -f "$0")")
defaults="timeout http-request 30s
    errorfile 400 \"$here/broken.http\"
    timeout check 2s
    option srvtcpka
    srvtcpka-idle 10s
    srvtcpka-intvl 5s
    srvtcpka-cnt 3"
previous=
for argument do
  if [ "$previous" = -f ]; then
    cp "$here/unavailable.http" "$(dirname "$argument")/500.http"
    # At the top, so that one of Serve's own, should it write any, wins.
    printf '%s\n' "    $defaults" | sed -i '/^defaults$/r /dev/stdin' "$argument"
    rest="status 503 errorfile \"$here/unavailable.http\""
    if sed -n '/^frontend http_frontend$/,/^backend/p' "$argument" | grep -q '^ *use_backend '; then
      rest="status 404 errorfile \"$here/nowhere.http\""
    fi
    printf '%s\n' "    http-request return $rest" | sed -i '/^backend default_backend$/r /dev/stdin' "$argument"
    awk -f "$here/near.awk" "$argument" >"$argument.new"
    mv "$argument.new" "$argument"
    sed -i '/^ *option splice-request$/d; s/^\( *http-reuse \)always$/\1safe/' "$argument"
    sed -i 's/^frontend http_frontend$/&\n    http-request del-header Upgrade/' "$argument"
    if [ -n "${HAPROXY_PAGES_HOST:-}" ]; then
      # In their sections alone: the service's own line may look the same.
      sed -i "/^frontend prometheus/,/^ *bind/s/^\( *bind \):/\1$HAPROXY_PAGES_HOST:/
        /^listen stats/,/^ *bind/s/^\( *bind \)\*:/\1$HAPROXY_PAGES_HOST:/" "$argument"
    fi
  fi
  previous=$argument
done
exec "${HAPROXY_BINARY:-haproxy}" "$@"
