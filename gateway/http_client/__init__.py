"""An HTTP/1.1 client for one server: a replica, a server of completions, a webhook.

A general client costs 60 µs (aiohttp) to 1 ms (httpx) per request, as much as the rest of the gateway or
more. This one has three parts:

* `response`: bytes in, one response out, without I/O. httptools (llhttp) reads the grammar; the limits of a
  header and of trailers are checked here.
* `connection`: the transport of one connection, the deadline of its exchange, and back-pressure.
* `client`: the pool. A stack, so that few connections are used, and the others expire.

An exchange

A connection has one exchange at a time. Its response is read in the states `HEAD`, `BODY` and `DONE`;
interim responses leave it in `HEAD`. Between two exchanges it is `IDLE`, and whatever arrives then closes
it: late data must never become the response to another client's request. For the same reason a connection
is used again only if the response was complete and valid, the request was sent completely, and neither side
holds unsent or unread data of it (RFC 9112, section 9.3).

A request that did not reach the server raises `RequestNotSent`, and may be sent to another one. After that
it may have run, and each failure is `BadUpstream` or `DeadlinePassed`, also while the body is read.

The deadline limits the wait for the next data; a stream moves it. A timer per exchange would cost more than
reading its response: a running timer is kept, and looks at the deadline when it fires.

When the deadline of an inference has passed, the server still works on it: its connection stays open until
it answers, so that its place can be held so long (`work_ended`).
"""
