"""One client's connection: HTTP/1.1 on httptools on one side, ASGI on the other.

In place of uvicorn's own, which spends on a small request as much as the rest of the gateway does. An
answer's head is held until its first body, as ASGI asks, and leaves with it in one write.

httptools knows no limits and takes more than one meaning of a request's length: both are seen to here,
while the bytes come in. What is refused is answered in the shape of every other error.
"""
