"""Requests whose framing can be read in two ways, and odd ones that can be read in one."""

from __future__ import annotations


def request(*lines: bytes, first: bytes = b"POST / HTTP/1.1", body: bytes = b"") -> bytes:
    return b"\r\n".join((first, *lines, b"", body))


HOST_LINE = b"Host: x"
CL2 = b"Content-Length: 2"
CL3 = b"Content-Length: 3"
TE = b"Transfer-Encoding: chunked"
END = b"0\r\n\r\n"
OLD = b"POST / HTTP/1.0"
AMBIGUOUS = {
    "no Host": request(CL2, body=b"ok"),
    "two Hosts": request(HOST_LINE, HOST_LINE),
    "two Hosts on 1.0": request(HOST_LINE, b"host: y", first=OLD),
    "a Host with a path": request(b"Host: x/y"),
    "a Host with a space": request(b"Host: x y"),
    "a Host with a user": request(b"Host: a@b"),
    "two lengths": request(HOST_LINE, CL2, CL3, body=b"okk"),
    "one length twice": request(HOST_LINE, CL2, CL2, body=b"ok"),
    "a list of lengths": request(HOST_LINE, b"Content-Length: 2, 2", body=b"ok"),
    "a length with a sign": request(HOST_LINE, b"Content-Length: +2", body=b"ok"),
    "a negative length": request(HOST_LINE, b"Content-Length: -2", body=b"ok"),
    "a length in base 16": request(HOST_LINE, b"Content-Length: 0x2", body=b"ok"),
    "a length with a gap": request(HOST_LINE, b"Content-Length: 1 2", body=b"ok"),
    "an empty length": request(HOST_LINE, b"Content-Length:", body=b"ok"),
    "an absurd length": request(HOST_LINE, b"Content-Length: " + b"9" * 30),
    "a length and chunks": request(HOST_LINE, CL2, TE, body=END),
    "chunks and a length": request(HOST_LINE, TE, CL2, body=END),
    "chunks twice": request(HOST_LINE, TE, TE, body=END),
    "chunks of chunks": request(HOST_LINE, b"Transfer-Encoding: chunked, chunked", body=END),
    "chunks and identity": request(HOST_LINE, TE, b"Transfer-Encoding: identity", body=END),
    "identity and chunks": request(HOST_LINE, b"Transfer-Encoding: identity", TE, body=END),
    "identity": request(HOST_LINE, b"Transfer-Encoding: identity", body=b"ok"),
    "another coding": request(HOST_LINE, b"Transfer-Encoding: gzip", body=b"ok"),
    "another coding before": request(HOST_LINE, b"Transfer-Encoding: gzip, chunked", body=END),
    "another coding after": request(HOST_LINE, b"Transfer-Encoding: chunked, gzip", body=END),
    "a coding of a kind": request(HOST_LINE, b"Transfer-Encoding: xchunked", body=END),
    "a coding with a tab": request(HOST_LINE, b"Transfer-Encoding: \x0bchunked", body=END),
    "a quoted coding": request(HOST_LINE, b'Transfer-Encoding: "chunked"', body=END),
    "a coding with parameters": request(HOST_LINE, b"Transfer-Encoding: chunked;a=b", body=END),
    "an empty coding": request(HOST_LINE, b"Transfer-Encoding:", body=END),
    "a comma after the coding": request(HOST_LINE, b"Transfer-Encoding: chunked,", body=END),
    "a space after the name": request(HOST_LINE, b"Transfer-Encoding : chunked", body=END),
    "a NUL after the name": request(HOST_LINE, b"Transfer-Encoding\x00: chunked", body=END),
    "a coding over two lines": request(HOST_LINE, b"Transfer-Encoding:\r\n chunked", body=END),
    "a coding behind a folded line": request(HOST_LINE, b"X: y\r\n Transfer-Encoding: chunked"),
    "a coding behind a bare LF": request(HOST_LINE, b"X: y\nTransfer-Encoding: chunked", body=END),
    "a coding behind a bare CR": request(HOST_LINE, b"X: y\rTransfer-Encoding: chunked", body=END),
    "lines that end in LF": b"POST / HTTP/1.1\nHost: x\n\n",
    "a header that ends in LF": b"POST / HTTP/1.1\r\nHost: x\r\n\n",
    "a line that begins with a space": b"POST / HTTP/1.1\r\n Host: x\r\n\r\n",
    "a line without a colon": request(HOST_LINE, b"X"),
    "a line without a name": request(HOST_LINE, b": x"),
    "a NUL in a value": request(HOST_LINE, b"X: a\x00b"),
    "a NUL in the target": request(HOST_LINE, first=b"GET /\x00 HTTP/1.1"),
    "a control in the target": request(HOST_LINE, first=b"GET /\x01 HTTP/1.1"),
    "a space in the target": request(HOST_LINE, first=b"GET /a b HTTP/1.1"),
    "chunks on 1.0": request(HOST_LINE, TE, first=OLD, body=END),
    "chunks and a length on 1.0": request(HOST_LINE, TE, CL2, first=OLD, body=END),
    "a chunk's size with a sign": request(HOST_LINE, TE, body=b"+2\r\nok\r\n" + END),
    "a chunk's size in C": request(HOST_LINE, TE, body=b"0x2\r\nok\r\n" + END),
    "a negative chunk": request(HOST_LINE, TE, body=b"-2\r\nok\r\n" + END),
    "a chunk without a size": request(HOST_LINE, TE, body=b"\r\nok\r\n" + END),
    "a chunk of 2⁶⁴ and two": request(HOST_LINE, TE, body=b"10000000000000002\r\nok\r\n" + END),
    "a space before a chunk's size": request(HOST_LINE, TE, body=b" 2\r\nok\r\n" + END),
    "a chunk's size that ends in LF": request(HOST_LINE, TE, body=b"2\nok\r\n" + END),
    "a chunk that ends in LF": request(HOST_LINE, TE, body=b"2\r\nok\n" + END),
    "a chunk without an end": request(HOST_LINE, TE, body=b"2\r\nok" + END),
    "a chunk that is longer": request(HOST_LINE, TE, body=b"2\r\nokk\r\n" + END),
    "a bare LF in an extension": request(HOST_LINE, TE, body=b"2;a\nb\r\nok\r\n" + END),
    "the last chunk ends in LF": request(HOST_LINE, TE, body=b"0\r\n\n"),
    "a trailer over two lines": request(HOST_LINE, TE, body=b"0\r\nX: y\r\n z\r\n\r\n"),
}
UNAMBIGUOUS = {
    "a length with spaces": request(HOST_LINE, b"Content-Length:   2 ", body=b"ok"),
    "a length with zeros": request(HOST_LINE, b"Content-Length: 0002", body=b"ok"),
    "capitals": request(b"HOST: x", b"TRANSFER-ENCODING: CHUNKED", body=b"2\r\nok\r\n" + END),
    "chunks": request(HOST_LINE, TE, body=b"2\r\nok\r\n" + END),
    "an extension": request(HOST_LINE, TE, body=b'2;a="b;c"\r\nok\r\n0;d\r\n\r\n'),
    "zeros before a chunk's size": request(HOST_LINE, TE, body=b"0000002\r\nok\r\n000\r\n\r\n"),
    "a trailing length": request(HOST_LINE, TE, body=b"2\r\nok\r\n0\r\nX-Length: 40\r\n\r\n"),
    "a body on GET": request(HOST_LINE, CL2, first=b"GET / HTTP/1.1", body=b"ok"),
    "a length that only looks like one": request(HOST_LINE, CL2, b"Content_Length: 40", body=b"ok"),
    "a coding that only looks like one": request(
        HOST_LINE, CL2, b"Transfer_Encoding: x", body=b"ok"
    ),
}
