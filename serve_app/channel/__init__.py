"""One connection from each ingress process to each replica carries the items of all streams between them.

A stream is counted, limited, cancelled and lost as a call of a Serve handle. Sent as Serve sends it, by gRPC, such a
call costs a millisecond, and every item that it carries some tenths of one. So where there is a TCP connection both go
there: `router.opening` hands Serve's call to it, and everything that became ready in one turn of an event loop is one
message. A call goes as Serve sends it, and carries its items itself, until the first connection is made and where none
can be made.

`wire` is what travels, `jobs` its largest part, `framed` one end of a connection, `outlets` the replica's side,
`inlets` the ingress's.

What this package does not do: HTTP, routing, or deciding what a loss means (see `ingress.failover`).
"""

from serve_app.channel.inlets import Inlet, Inlets, Opened
from serve_app.channel.outlets import Entrance, Outlets
from serve_app.channel.wire import About, Offer, Parcel, Ticket

__all__ = ["About", "Entrance", "Inlet", "Inlets", "Offer", "Opened", "Outlets", "Parcel", "Ticket"]
