"""The HTTP/1.1 server protocol: httptools on the client side, ASGI on the other.

It replaces uvicorn's own, which spends as much time on a small request as the rest of the gateway. The head
of a response is held until its first body message, as ASGI requires, and sent with it in one write.
Rejected requests get the same error body as all others.
"""
