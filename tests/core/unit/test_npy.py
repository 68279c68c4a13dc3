"""NumPy's files of one array: read as NumPy reads them, if their header matches their size."""

from __future__ import annotations

from contextlib import suppress

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import GatewayError, MalformedRequest
from gateway.media_types import NPY
from gateway.tensors.inputs import read_payload, to_inputs
from gateway.tensors.npy import read_npy
from gateway.tensors.payload import PayloadLimits
from gateway.tensors.signature import build_signature
from tests.support.hostile_files import NPY_HEADERS, npy, npy_of, npy_with

ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array(5, np.int64),
    np.zeros((0, 3)),
    np.zeros((1,) * 32, np.int8),
    np.array([True, False]),
    np.arange(4, dtype=">i2"),
    np.array(["é ☕", "\U0001f600"]),
    np.array(["é", "b"], ">U3"),
    np.array([b"a", b"bc"]),
    np.array([1j]),
    np.ones(3, ml_dtypes.bfloat16).view("V2"),
    np.array([1, np.nan, np.inf], np.float16),
]
HEADERS = [
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }          \n",
    b"{'shape': (2L,), 'fortran_order': False, 'descr': '<f4'}",
    b'{"descr":"<f4","fortran_order":False,"shape":(2,)}',
    b"{ 'descr' : '<f4' , 'fortran_order' : False , 'shape' : ( 2 , ) , } ",
]


def test_files_of_numpy_and_other_programs_are_read() -> None:
    for array in ARRAYS:
        for version in ((1, 0), (2, 0), (3, 0)):
            read = read_npy(npy(array, version))
            assert (read.dtype, read.shape) == (array.dtype, array.shape)
            assert read.tobytes() == array.tobytes()
    for header in HEADERS:
        file = npy_with(header, np.array([1, 2], np.float32).tobytes())
        assert read_npy(file).tolist() == [1, 2]


INVALID_HEADERS = (
    b"",
    b"{}",
    b"{'descr': '<f4', 'fortran_order': False}",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'more': ()}",
    b"{'descr': '<f4' 'fortran_order': False, 'shape': (2,)}",
    b"{'descr': True, 'fortran_order': False, 'shape': (2,)}",
    b"{'descr': '<f4', 'fortran_order': 0, 'shape': (2,)}",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': '2'}",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (2)}",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (,2)}",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (1 2,)}",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (-2,)}",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (2,)} + {}",
    b"{'descr': '<f16', 'fortran_order': False, 'shape': (2,)}",
    b"{'descr': '<M8[s]', 'fortran_order': False, 'shape': (1,)}",
    b"{'descr': '|S9999999999', 'fortran_order': False, 'shape': (0,)}",
)


@pytest.mark.fault(
    "images, NumPy files, archives and forms that contradict themselves, or are small"
)
def test_invalid_file_is_malformed(subtests: pytest.Subtests) -> None:
    complete = npy(np.zeros(3, np.float32))
    truncated = [complete[:length] for length in (-1, 5, 9, 20, 0)]
    files = [*NPY_HEADERS.values(), *truncated, complete + b"x"]
    files += [npy_with(header, bytes(8)) for header in INVALID_HEADERS]
    for file in files:
        with subtests.test(str(file[:100])), pytest.raises(MalformedRequest, match=r"\.npy "):
            read_npy(file)
    with pytest.raises(
        MalformedRequest, match="declares 10000000000 × 4 bytes of data; the file has 0"
    ):
        read_npy(npy_of("(100000, 100000)"))


def test_array_takes_no_memory_beside_its_file() -> None:
    data = npy(np.zeros(1000))
    assert np.shares_memory(read_npy(data), np.frombuffer(data, np.uint8))
    # No elements, however wide.
    assert read_npy(npy_of("(0,)", "'|S999999999'")).nbytes == 0


# Whatever is done to a sound file, for every datatype of a model.

MODELS = [
    build_signature(
        {"name": "m", "inputs": [{"name": "X", "datatype": datatype, "shape": [-1, -1]}]}, {}
    )
    for datatype in ("BOOL", "INT8", "UINT64", "FP16", "BF16", "FP32", "BYTES")
]


@st.composite
def mutated_files(draw: st.DrawFn) -> bytes:
    data = bytearray(npy(draw(st.sampled_from(ARRAYS))))
    for _ in range(draw(st.integers(1, 5))):
        data[draw(st.integers(6, len(data) - 1))] = draw(
            st.sampled_from(list(b"0123456789(),'{}<>|=bifuSUVO: \xff")) | st.integers(0, 255)
        )
    return bytes(data)


@pytest.mark.fault(
    "images, NumPy files, archives and forms that contradict themselves, or are small"
)
@given(mutated_files(), st.sampled_from(MODELS))
def test_mutated_file_is_converted_or_refused(data: bytes, model: object) -> None:
    with suppress(GatewayError):
        to_inputs(read_payload(data, NPY, PayloadLimits()), model, PayloadLimits())  # type: ignore[arg-type]


@given(st.text(alphabet="{}()':, 0123456789TrueFalsdcihp_on<f4\\\"", max_size=80))
def test_drawn_header_is_read_or_malformed(header: str) -> None:
    with suppress(MalformedRequest):
        read_npy(npy_with(header.encode(), bytes(4)))
