"""Files that were made to cost much, on a real gateway before a real Triton.

Each is refused or served, and the gateway answers others meanwhile.
"""

from __future__ import annotations

import io
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import NamedTuple

import httpx
import numpy as np
import pytest
from PIL import Image

from gateway.embedded.supervisor import EmbeddedTriton
from tests.support import hostile_files as hostile
from tests.support.hostile_files import MIB
from tests.support.images import encoded
from tests.support.measurements import assert_number, memory_bytes
from tests.support.model_zoo.zoo import AS_WRITTEN, Zoo
from tests.support.servers import Command, gateway
from tests.support.wait import TIMEOUT_S

MODELS = (
    "nhwc",
    "nhwc_free",
    "plain_FP32",
    "plain_vector_FP32",
    "plain_BYTES",
    "single_BYTES",
    "plain_single_BYTES",
)
JPEG, PNG, JSON = "image/jpeg", "image/png", "application/json"
NPY, NPZ, TEXT = "application/x-npy", "application/x-npz", "text/plain"
FORM = f"multipart/form-data; boundary={hostile.BOUNDARY}"


class Attack(NamedTuple):
    """A request to a model, and the statuses that it may have.

    Bodies are hundreds of MiB together, so that each is made by the test that sends it.
    """

    name: str
    model: str
    content_type: str
    make_body: Callable[[], bytes]
    statuses: tuple[int, ...]
    accept: str = "*/*"


def bzip2_bomb() -> bytes:
    """Less than a kilobyte that inflates to 96 MiB, and says that it does not."""
    zeros = hostile.npy(np.zeros(96 * MIB, np.uint8))
    return hostile.claiming_size(hostile.archive([("x.npy", zeros)], zipfile.ZIP_BZIP2), 100)


def tiny_images(count: int) -> bytes:
    image = encoded(Image.new("L", (1, 1)))
    return hostile.json_of([hostile.b64(image)] * count)


def many_images() -> bytes:
    return hostile.json_of([hostile.b64(encoded(Image.new("L", (5000, 5000))))] * 40)


def exif_blocks() -> Iterator[tuple[str, bytes]]:
    for name, entry in {
        "a text": (0x0112, 2, 4, b"abc\0"),
        "bytes": (0x0112, 7, 4, b"\xff\xff\xff\xff"),
        "a huge number": (0x0112, 4, 1, b"\xff\xff\xff\xff"),
        "a rational out of the file": (0x0112, 5, 1, b"\xff\xff\xff\x7f"),
    }.items():
        yield name, hostile.exif(entry)
    yield "a loop", b"II*\0\x08\0\0\0\xff\xff"


def image_attacks() -> Iterator[Attack]:
    makers: tuple[tuple[str, str, Callable[[], bytes], tuple[int, ...]], ...] = (
        ("1 MiB of padding in a JPEG", JPEG, partial(hostile.padded_jpeg, MIB), (413,)),
        ("48 MiB of padding in a JPEG", JPEG, partial(hostile.padded_jpeg, 48 * MIB), (413,)),
        ("padding in a JPEG's data", JPEG, partial(hostile.padded_data, 32 * MIB), (413,)),
        ("5,000 scans of 25 megapixels", JPEG, partial(hostile.jpeg_of_scans, 5000, 5000), (413,)),
        ("64 scans of 25 megapixels", JPEG, partial(hostile.jpeg_of_scans, 64, 5000), (200,)),
        ("a million PNG chunks", PNG, partial(hostile.png_of_chunks, MIB), (413,)),
        ("a PNG without its palette", PNG, hostile.png_without_palette, (422,)),
        ("PNG texts that inflate", PNG, inflating_texts, (200,)),
        ("a PNG profile that inflates", PNG, inflating_profile, (200,)),
    )
    for name, content_type, make_body, statuses in makers:
        yield Attack(name, "nhwc", content_type, make_body, statuses)
    for name, block in exif_blocks():
        make_body = partial(hostile.with_exif, hostile.jpeg(), block)
        yield Attack(f"EXIF: {name}", "nhwc", JPEG, make_body, (200,))
    yield Attack("50,000 tiny images", "nhwc", JSON, partial(tiny_images, 50_000), (413,))
    yield Attack("40 images of 25 megapixels", "nhwc_free", JSON, many_images, (413,))


def inflating_texts() -> bytes:
    text = hostile.chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(MIB)))
    return hostile.after_size(hostile.png(), text * 50)


def inflating_profile() -> bytes:
    profile = hostile.chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(50 * MIB)))
    return hostile.after_size(hostile.png(), profile)


@cache
def archived_zeros() -> bytes:
    return hostile.archive([("x.npy", hostile.npy(np.zeros(96 * MIB, np.uint8)))])


def overlapping_entries() -> bytes:
    archived = hostile.archive([("x.npy", hostile.npy(np.zeros(3, np.float32)))])
    return hostile.overlapping(archived, 9)


def numpy_attacks() -> Iterator[Attack]:
    for name, body in hostile.NPY_HEADERS.items():
        yield Attack(f".npy: {name}", "plain_BYTES", NPY, partial(bytes, body), (400,))
    makers: tuple[tuple[str, Callable[[], bytes], tuple[int, ...]], ...] = (
        (".npz: bzip2", bzip2_bomb, (400,)),
        (".npz: a bomb", archived_zeros, (413,)),
        (
            ".npz: a bomb of a small size",
            lambda: hostile.claiming_size(archived_zeros(), 100),
            (400,),
        ),
        (".npz: overlapping entries", overlapping_entries, (400,)),
        (".npz: a directory of 48 MiB", partial(directory, 48 * MIB), (400, 413)),
    )
    for name, make_body, statuses in makers:
        yield Attack(name, "plain_vector_FP32", NPZ, make_body, statuses)


def directory(size: int) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as written:
        written.writestr("x", b"")
    archived = file.getvalue()
    start, end = archived.rindex(b"PK\1\2"), archived.rindex(b"PK\5\6")
    return archived[:start] + archived[start:end] * (size // (end - start)) + archived[end:]


def text_attacks() -> Iterator[Attack]:
    deep = hostile.field(b"[" * 64 + b"1" + b"]" * 64, headers=[f"Content-Type: {JSON}"])
    field = b'--b\r\nContent-Disposition: form-data; name="X"\r\n\r\n'
    long_type = TEXT + '; a="' + ";" * 60_000 + '"'
    makers: tuple[tuple[str, str, str, Callable[[], bytes], tuple[int, ...]], ...] = (
        (
            "a data: URI without a comma",
            "single_BYTES",
            JSON,
            lambda: hostile.json_of({"b64": "data:" + ";" * (8 * MIB)}),
            (400,),
        ),
        (
            "a data: URI of escapes",
            "single_BYTES",
            JSON,
            lambda: hostile.json_of({"b64": "data:," + "%41" * (8 * MIB)}),
            (200,),
        ),
        ("a Content-Type of 60 KB", "single_BYTES", long_type, lambda: b"x", (415,)),
        (
            "a form's header of 48 MiB",
            "single_BYTES",
            FORM,
            lambda: b"--b\r\nX: " + b"y" * (48 * MIB),
            (413,),
        ),
        (
            "a form's million headers",
            "single_BYTES",
            FORM,
            lambda: b"--b\r\n" + b"X: y\r\n" * (8 * MIB),
            (413,),
        ),
        (
            "a form's padding of 48 MiB",
            "single_BYTES",
            FORM,
            lambda: b"--b\r\n\r\n\r\n--b" + b" " * (48 * MIB),
            (400,),
        ),
        (
            "a form of almost delimiters",
            "single_BYTES",
            FORM,
            lambda: field + b"\r\n--bX" * (8 * MIB),
            (400,),
        ),
        (
            "a form's lists of 64 dimensions",
            "plain_FP32",
            FORM,
            lambda: hostile.form(deep, deep),
            (422,),
        ),
        (
            "escapes of ISO-2022-JP",
            "single_BYTES",
            f"{TEXT}; charset=iso-2022-jp",
            lambda: b"\x1b$" * MIB,
            (400,),
        ),
        (
            "a text of GB 18030",
            "single_BYTES",
            f"{TEXT}; charset=gb18030",
            lambda: "한".encode("gb18030") * MIB,
            (200,),
        ),
        (
            "a batch of a million texts",
            "single_BYTES",
            JSON,
            lambda: hostile.json_of([""] * MIB),
            (413,),
        ),
    )
    for name, model, content_type, make_body, statuses in makers:
        yield Attack(name, model, content_type, make_body, statuses)
    accept = "a/b;q=0.1," * 6000
    yield Attack("an Accept of 60 KB", "single_BYTES", TEXT, lambda: b"x", (400,), accept=accept)


ATTACKS = [*image_attacks(), *numpy_attacks(), *text_attacks()]


@pytest.fixture(scope="module")
def served(zoo_triton: EmbeddedTriton) -> Iterator[tuple[httpx.Client, Command]]:
    """A gateway whose memory and time no other test uses."""
    with gateway(zoo_triton.options.url, connect_timeout_s="10") as (client, command):
        Zoo(client, AS_WRITTEN).load(*MODELS)
        yield client, command


@pytest.mark.long
@pytest.mark.fault(
    "images, NumPy files, archives and forms that contradict themselves, or are small"
)
@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.name for attack in ATTACKS])
def test_hostile_file_is_refused_or_served_and_delays_no_other_request(
    served: tuple[httpx.Client, Command], attack: Attack
) -> None:
    client, command = served
    headers = {"Content-Type": attack.content_type, "Accept": attack.accept}
    path, waits = f"/v1/models/{attack.model}/infer", list[float]()
    body = attack.make_body()
    before = most = memory_bytes(command.pid)

    def send(_: int) -> httpx.Response:
        return client.post(path, content=body, headers=headers, timeout=TIMEOUT_S)

    with ThreadPoolExecutor(2) as pool, httpx.Client(base_url=client.base_url) as prober:
        began = time.monotonic()
        calls = [pool.submit(send, number) for number in range(2)]
        while not all(call.done() for call in calls) or not waits:
            answer = prober.get("/livez", timeout=TIMEOUT_S)
            assert answer.status_code == 200
            waits.append(answer.elapsed.total_seconds())
            most = max(most, memory_bytes(command.pid))
            time.sleep(0.02)
        answers = [call.result() for call in calls]
    assert_number("two of them", time.monotonic() - began, "s", at_most=5)
    assert_number("the slowest /livez", max(waits) * 1000, "ms", at_most=250)
    assert_number("more memory", (most - before) / MIB, "MiB", at_most=1000)
    for answer in answers:
        assert answer.status_code in attack.statuses, answer.text[:500]
