"""One connection from each ingress process to each replica carries the items of all streams between them.

A stream is opened, counted, cancelled and lost as a call of a Serve handle, which costs about the same for every item
that it carries. So the items leave by another way: a TCP connection on which everything that became ready in one turn
of the replica's event loop is one message. The call stays pending meanwhile, and carries the items itself wherever
there is no connection: until the first is made, where none can be made, and for an item too large for a message.

`wire` is what travels, `framed` one end of a connection, `outlets` the replica's side, `inlets` the ingress's.

What this package does not do: HTTP, routing, or deciding what a loss means (see `ingress.failover`).
"""

from serve_app.channel.inlets import Inlet, Inlets
from serve_app.channel.outlets import Outlets
from serve_app.channel.wire import Offer, Parcel, Ticket

__all__ = ["Inlet", "Inlets", "Offer", "Outlets", "Parcel", "Ticket"]
