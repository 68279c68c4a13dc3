"""The HTTP/1.1 server protocol: bytes of a client on one side, ASGI on the other.

uvicorn's own protocol costs 1.35 times as much per request, knows no limits of a header, and waits for a
slow client for ever. This one has two parts:

* `parser`: bytes in, requests out, without I/O. httptools (llhttp) reads the grammar. What it lacks is
  checked here: the size of a header, of a URL and of what frames chunks, and everything that two servers
  could read differently (RFC 9112, sections 3.2, 6.1 and 6.3).
* `connection`: the transport, the order of the requests, slow and surplus clients; each request and its
  response are a `RequestCycle`, as `scope`, `receive` and `send`.

How a connection works

A connection has a queue of request cycles. The first runs the application; those behind it were pipelined
and wait, because responses have the order of their requests (RFC 9112, section 9.3.2). While one waits,
nothing more is read. If more than `MAX_PIPELINED` wait nevertheless, because they came in one read, the
next one is refused. The request whose body is being received is the last in the queue, or one that was
answered early and has left it.

The application starts when a request is complete, when `EARLY_START_BYTES` of its body have arrived, when
its Content-Length is above the limit, or when the client waits for 100 Continue. A thousand clients that
send slowly are a thousand lists of bytes, not a thousand tasks. From then on the body is passed as it
arrives, and reading pauses while more than `REQUEST_HIGH_WATER_BYTES` wait for the application.

The head of a response is held until its first body message, as ASGI requires, and written with it.

A request that cannot be read ends the connection, since nothing tells where the next one would begin. If
earlier requests are unanswered, they get their responses, the last with `Connection: close`; if the
response of the invalid one has begun, the connection is closed; otherwise the client gets the error, in the
same form as all others, and the rest of what it sends is discarded for a second: closing at once would
reset the connection, and lose the response.

A header that is repeated byte for byte, alone in its read, is not parsed again, which saves a tenth of what
the gateway does for a request.

Slow clients

One sweep a second looks at all connections of the process. A header must be complete within a fixed time. A
body, and the reading of a response, must keep an average rate: what is moved earns time, at most the time
for which a client may stall (`Patience`). Time in which reading is paused, or in which the client waits for
100 Continue, is not the client's.

Surplus clients

A connection above the limits may send one health probe, so that a full gateway is not restarted; far above
them it is refused at once.
"""
