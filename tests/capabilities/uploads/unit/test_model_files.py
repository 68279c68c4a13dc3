"""Uploaded files without a server: kinds, archives, places in the folder, configs and checksums."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from gateway.capabilities.uploads.errors import InvalidModelFile
from gateway.capabilities.uploads.model_files.entry_names import (
    NEXT_VERSION,
    arrange_entries,
    check_storable_name,
)
from gateway.capabilities.uploads.model_files.kinds import identify_content, identify_file
from gateway.capabilities.uploads.model_files.model_config import parse_model_config
from gateway.capabilities.uploads.model_files.model_upload import (
    ModelUpload,
    UploadRules,
    build_upload,
)
from gateway.capabilities.uploads.model_files.received_body import (
    FormBody,
    ReceivedFile,
    parse_sha256_digest,
)
from gateway.capabilities.uploads.model_files.staging import Staging, UploadAborted
from gateway.capabilities.uploads.settings import UploadSettings
from gateway.config.settings import read_settings
from gateway.errors import MalformedRequest, TooLarge
from tests.support import network
from tests.support.archives import tarred, zipped

ONNX = network.texts()
LABELED = b'output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "classes.txt" } ]'
CACHE_PATH = (
    'optimization { execution_accelerators { gpu_execution_accelerator { name: "x" '
    'parameters { key: "trt_engine_cache_path" value: "x" } } } }'
)
MIB = 1 << 20


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    folder, numbers = tmp_path / "staging", count()
    folder.mkdir()
    staging = Staging(lambda: folder / f"{next(numbers)}")
    yield staging
    staging.discard()
    assert not list(folder.iterdir())


def received(
    staging: Staging, content: bytes, name: str = "", field: str = "model"
) -> ReceivedFile:
    return ReceivedFile(field, name, staging.write_file(content))


def upload(
    staging: Staging,
    *files: ReceivedFile,
    code: bool = False,
    existing: bytes | None = None,
    max_bytes: int = MIB,
) -> ModelUpload:
    return build_upload(files, staging, UploadRules("mine", code, max_bytes, MIB), existing)


def config_of(found: ModelUpload) -> str:
    return found.shared_files["config.pbtxt"].path.read_text()


# Kinds.


@pytest.mark.parametrize(
    ("content", "suffix"),
    [
        pytest.param(ONNX, ".onnx", id="network"),
        pytest.param(network.classifier(), ".onnx", id="larger network"),
        (b"\x08\x08\x12\x07pytorch", ".onnx"),  # truncated: Triton tells
        (b"ftrt" + b"\0" * 60, ".plan"),
        (b'<?xml version="1.0"?>\n<net name="m" version="11">', ".xml"),
        pytest.param(zipped({"archive/data.pkl": b"x", "archive/version": b"3"}), ".pt", id="pt"),
        pytest.param(zipped({"mine/archive_format": b"pt2"}), ".pt2", id="pt2"),
        pytest.param(zipped({"1/model.onnx": ONNX}), ".zip", id="zip"),
        pytest.param(tarred({"1/model.onnx": ONNX}), ".tar.gz", id="tar.gz"),
        pytest.param(tarred({"1/model.onnx": ONNX}, "w"), ".tar", id="tar"),
        (b"", ""),
        (b"<html></html>", ""),
        (b"\x89PNG\r\n\x1a\n", ""),
        (b"\x08\x08", ""),
    ],
)
def test_kind_is_recognized_by_the_first_bytes(
    staging: Staging, content: bytes, suffix: str
) -> None:
    assert identify_content(staging.write_file(content)) == suffix


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        pytest.param(ONNX, "model.plan", "its content is that of a .onnx file", id="plan"),
        (b"nothing", "model.onnx", "'model.onnx' is not a .onnx file"),
        (b"nothing", "model.bin", "not a model of a known kind"),
        (b"nothing", "", "not a model of a known kind"),
        (b"", "", "the file is empty"),
    ],
)
def test_name_that_contradicts_the_content_is_refused(
    staging: Staging, content: bytes, name: str, words: str
) -> None:
    with pytest.raises(InvalidModelFile, match=words):
        identify_file(staging.write_file(content), name)


# Folders.


@pytest.mark.parametrize(
    ("names", "shared", "version"),
    [
        (["model.onnx"], [], ["model.onnx"]),
        (["1/model.onnx", "config.pbtxt"], ["config.pbtxt"], ["model.onnx"]),
        (["mine/7/model.onnx", "mine/labels.txt"], ["labels.txt"], ["model.onnx"]),
        (["mine/", "mine/1/", "mine/1/a/b"], [], ["a/b"]),
        (["model.onnx", "model.onnx.data", "a.txt"], ["a.txt"], ["model.onnx", "model.onnx.data"]),
        (["configs/a.pbtxt", "model.onnx"], ["configs/a.pbtxt"], ["model.onnx"]),
    ],
)
def test_each_file_belongs_to_the_model_or_a_version(
    names: list[str], shared: list[str], version: list[str]
) -> None:
    found = arrange_entries(names).values()
    assert sorted(place.path for place in found if place.version is None) == sorted(shared)
    assert sorted(place.path for place in found if place.version is not None) == sorted(version)


@pytest.mark.parametrize("name", ["..", ".hidden", "a/b", "a b", "ü", "", "x" * 129, "a\n", "-a"])
def test_invalid_name_of_a_model_is_refused(name: str) -> None:
    with pytest.raises(MalformedRequest):
        check_storable_name(name)


# Archives.


def test_upload_ends_when_its_client_has_left(staging: Staging) -> None:
    archives = [
        tarred({"__MACOSX/ignored": bytes(MIB)}),
        tarred(dict.fromkeys(("1/a", "1/b"), b"")),
    ]
    files = [received(staging, archive) for archive in archives]
    staging.stop()
    for file in files:
        with pytest.raises(UploadAborted):
            upload(staging, file)


def test_archive_of_too_many_folders_is_refused(staging: Staging) -> None:
    archive = zipped({f"{number}/{'a/' * 14}b": b"" for number in range(700)})
    with pytest.raises(TooLarge, match="more than 10000 folders"):
        upload(staging, received(staging, archive))


REFUSED_FOLDERS: list[tuple[dict[str, bytes], str]] = [
    ({"1/model.onnx": ONNX, "2/model.plan": b"ftrt"}, "of different kinds"),
    ({"1/model.onnx": ONNX, "2/readme": b"text"}, "of different kinds"),
    ({"1/model.onnx": ONNX, f"{1 << 63}/model.onnx": ONNX}, "number is too large"),
    ({"1/model.onnx": ONNX, "2/model.onnx": ONNX, "2/a.py": b"import os"}, "which is code"),
    ({"1/model.onnx/x": ONNX, "1/model.onnx": ONNX}, "as file and folder"),
    ({"1/": b""}, "no files"),
    ({"1/model.onnx": b"nothing"}, "not a .onnx file"),
    ({"1/model.onnx": ONNX, "1/model.py": b"import os"}, "which is code"),
    ({"1/model.onnx": ONNX, "1/libx.so.1": b""}, "which is code"),
    ({"1/model.onnx": ONNX, "1/weights": b"\x7fELF\x02\x01\x01\0"}, "which is code"),
    ({"1/model.py": b"import os", "config.pbtxt": b'backend: "python"'}, "backend 'python'"),
    ({"1/weights": b"1234"}, "no model file"),
    ({"1/model.onnx": ONNX, "configs/a.pbtxt": b'backend: "python"'}, "backend 'python'"),
    ({"1/model.onnx": ONNX, "configs/a.pbtxt": b'backend: "tensorrt"'}, "another backend"),
    (
        {"1/model.onnx": ONNX, **dict.fromkeys(("a.pbtxt", "b.pbtxt", "c.pbtxt"), b"#" * 200_000)},
        "together",
    ),
    ({"1/model.onnx": ONNX, "config.pbtxt": b'name: "other"'}, "that of model 'other'"),
    ({"1/model.onnx": ONNX, "config.pbtxt": b"nonsense {"}, "not a valid model configuration"),
]


REFUSED_CONFIGS = (
    ('backend: "python"', "backend 'python'"),
    ('platform: "ensemble"', "backend 'ensemble'"),
    ('runtime: "libcustom.so"', "contains runtime"),
    ('model_operations { op_library_filename: "a.so" }', "op_library_filename"),
    ('model_repository_agents { agents { name: "x" } }', "model_repository_agents"),
    ('default_model_filename: "../../other/1/model.onnx"', "default_model_filename"),
    ('output { label_filename: "/etc/passwd" }', "label_filename"),
    ('cc_model_filenames { key: "7.5" value: "/x/y" }', "cc_model_filenames"),
    ('parameters { key: "x" value { string_value: "/etc" } }', "names a path"),
    ('parameters { key: "EXECUTION_ENV_PATH" value { string_value: "env" } }', "names a path"),
    ('parameters { key: "x" value { string_value: "$$TRITON" } }', "names a path"),
    (CACHE_PATH, "names a path"),
    (
        'model_warmup { name: "a" inputs { key: "X" value { input_data_file: "../x" } } }',
        "input_data_file",
    ),
)


USUAL_CONFIG = b"""
    backend: "onnxruntime" max_batch_size: 8 dynamic_batching { }
    input { name: "/layer/X" data_type: TYPE_FP32 dims: [ -1 ] }
    output { name: "/layer/Y" data_type: TYPE_FP32 dims: [ -1 ] label_filename: "labels.txt" }
    parameters { key: "gateway.content_type.Y" value { string_value: "application/json" } }
    parameters { key: "intra_op_thread_count" value { string_value: "2" } }
    version_policy { latest { num_versions: 2 } }
"""


def test_archive_that_is_no_model_of_data_is_refused(
    staging: Staging, subtests: pytest.Subtests
) -> None:
    entry = tarred({"1/model.onnx": ONNX}, "w").rstrip(b"\0")
    twice = entry + b"\0" * (-len(entry) % 512) + tarred({"1/model.onnx": ONNX}, "w")
    folder = {"1/model.onnx": ONNX, "labels.txt": b""}
    upload(staging, received(staging, zipped({**folder, "config.pbtxt": USUAL_CONFIG})))
    configs = [
        ({**folder, "config.pbtxt": each.encode()}, words) for each, words in REFUSED_CONFIGS
    ]
    archives = [(zipped(files), words) for files, words in [*REFUSED_FOLDERS, *configs]]
    for archive, words in [*archives, (twice, "twice")]:
        with subtests.test(words), pytest.raises(InvalidModelFile, match=words):
            upload(staging, received(staging, archive))


def test_code_is_accepted_with_a_config_if_it_is_allowed(staging: Staging) -> None:
    config = (
        b'backend: "python"\nparameters { key: "EXECUTION_ENV_PATH" value { string_value: "/x" } }'
    )
    files = {"m/config.pbtxt": config, "m/1/model.py": b"import os", "m/1/lib.so": b"\x7fELF"}
    found = upload(staging, received(staging, tarred(files)), code=True)
    assert set(found.versions[NEXT_VERSION]) == {"model.py", "lib.so"}
    assert config_of(found) == config.decode()
    for name in ("model.pt", "model.pt2", "model.py"):
        with pytest.raises(
            InvalidModelFile, match=r"accepts data only: .*GATEWAY_MODEL_UPLOADS=code .* up FOLDER"
        ):
            upload(staging, received(staging, b"x", name))
        with pytest.raises(InvalidModelFile, match="a config is required"):
            upload(staging, received(staging, b"x", name), code=True)


def test_several_versions_keep_their_numbers_and_a_single_one_gets_the_next(
    staging: Staging,
) -> None:
    files = {"m/3/model.onnx": ONNX, "m/12/any.onnx": ONNX, "m/config.pbtxt": b""}
    found = upload(staging, received(staging, tarred(files)))
    assert {number: set(each) for number, each in found.versions.items()} == {
        3: {"model.onnx"},
        12: {"model.onnx"},
    }
    assert found.assign_version(None, 13) is found
    with pytest.raises(InvalidModelFile, match="keep their numbers"):
        found.assign_version(4, 13)
    single = upload(staging, received(staging, tarred({"m/3/model.onnx": ONNX})))
    assert list(single.assign_version(None, 13).versions) == [13]
    assert list(single.assign_version(4, 13).versions) == [4]


# Single files and forms.


def test_uploaded_files_get_their_names_and_a_config(staging: Staging) -> None:
    found = upload(staging, received(staging, ONNX))
    assert set(found.versions[NEXT_VERSION]) == {"model.onnx"}
    assert config_of(found) == 'backend: "onnxruntime"\n'
    assert found.sha256 == hashlib.sha256(ONNX).hexdigest()
    assert found.size == len(ONNX)
    weights = received(staging, b"1234", "net.onnx.data")
    found = upload(staging, received(staging, ONNX, "net.onnx"), weights)
    assert set(found.versions[NEXT_VERSION]) == {"model.onnx", "net.onnx.data"}
    graph = received(staging, b'<?xml version="1.0"?><net name="m">', "net.xml")
    found = upload(staging, graph, received(staging, b"1234", "net.bin"))
    assert set(found.versions[NEXT_VERSION]) == {"model.xml", "model.bin"}


def test_existing_config_is_kept_and_compared(staging: Staging) -> None:
    existing = b'backend: "onnxruntime" default_model_filename: "net.onnx"'
    found = upload(staging, received(staging, ONNX), existing=existing)
    assert set(found.versions[NEXT_VERSION]) == {"net.onnx"}
    assert not found.shared_files
    for other in (b'backend: "python"', b'platform: "tensorrt_plan"'):
        with pytest.raises(InvalidModelFile, match="backend"):
            upload(staging, received(staging, ONNX), existing=other)


def test_form_has_a_config_and_labels(staging: Staging) -> None:
    for config in (LABELED, b'{"output": [{"name": "Y", "label_filename": "classes.txt"}]}'):
        found = upload(
            staging,
            received(staging, ONNX, "whatever.onnx"),
            received(staging, config, field="config"),
            received(staging, b"a\nb", "any.txt", field="labels"),
        )
        assert set(found.shared_files) == {"config.pbtxt", "classes.txt"}
        assert config_of(found).startswith('backend: "onnxruntime"')
        parsed = parse_model_config(config_of(found).encode(), allow_unknown_fields=False)
        assert parsed.output[0].label_filename == "classes.txt"
    for existing in (b'backend: "onnxruntime"', None):
        labels = received(staging, b"", field="labels")
        with pytest.raises(InvalidModelFile, match="send a config with output"):
            upload(staging, received(staging, ONNX), labels, existing=existing)


WARMUP = (
    'model_warmup {{ name: "a" {} '
    'inputs {{ key: "X" value {{ data_type: TYPE_FP32 {} zero_data: true }} }} }}'
)
STATE = "sequence_batching {{ state {{ input_name: 'a' data_type: TYPE_FP32 {} }} }}"
LARGE = "dims: [ 9223372036854775807, 0 ]"


@pytest.mark.fault("an uploaded config of a million instances")
@pytest.mark.parametrize(
    ("accepted", "refused", "words"),
    [
        ("instance_group { count: 64 }", "instance_group { count: 1000000 }", "1000000 instances"),
        ("instance_group { gpus: [ 0, 1 ] }", "instance_group { count: 33 gpus: [ 0, 0 ] }", "66 inst"),
        ("instance_group { } " * 64, "instance_group { } " * 65, "65 instances"),
        (WARMUP.format("count: 5000 batch_size: 2", ""), WARMUP.format("count: 4294967295", ""), "up requ"),
        (WARMUP.format("", ""), WARMUP.format("batch_size: 4294967295", ""), "warm-up requests"),
        (WARMUP.format("", "dims: [ -1, 9999 ]"), WARMUP.format("", LARGE), "bytes of warm-up inputs"),
        (WARMUP.format("", "dims: 99999"), WARMUP.format("", "dims: 99999 ") * 3, "1199988 bytes"),
        (STATE.format("dims: 9999"), STATE.format("dims: 999999"), "sequence states"),
        (
            STATE.format("dims: 9999"),
            STATE.format(f"initial_state {{ name: 'a' data_type: TYPE_BOOL {LARGE} zero_data: true }}"),
            "sequence states",
        ),
        (
            "sequence_batching { oldest { max_candidate_sequences: 10000 } }",
            "sequence_batching { oldest { max_candidate_sequences: 2147483647 } }",
            "2147483647 sequences",
        ),
        (
            "sequence_batching { } max_batch_size: 5000 instance_group { count: 2 }",
            "sequence_batching { } max_batch_size: 5001 instance_group { count: 2 }",
            "10002 sequences",
        ),
        (
            "dynamic_batching { priority_levels: 9 }",
            "dynamic_batching { priority_levels: 18446744073709551615 }",
            "priority levels",
        ),
        (
            'parameters { key: "intra_op_thread_count" value { string_value: "8" } }',
            'parameters { key: "intra_op_thread_count" value { string_value: " +1000000" } }',
            "1000000 threads",
        ),
    ],
)  # fmt: skip
def test_config_that_costs_triton_much_is_refused(
    staging: Staging, accepted: str, refused: str, words: str
) -> None:
    def build(config: str, *, code: bool = False) -> None:
        fields = [received(staging, ONNX), received(staging, config.encode(), field="config")]
        upload(staging, *fields, code=code)

    build(accepted)
    build(refused, code=True)  # whoever may upload code can start anything
    with pytest.raises(InvalidModelFile, match=words):
        build(refused)


def read_form(staging: Staging, body: bytes, size: int) -> FormBody:
    """Feed a form in pieces of this size."""
    form = FormBody(staging, "multipart/form-data; boundary=b")
    for start in range(0, len(body), size):
        form.feed(body[start : start + size])
    return form


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_form_in_pieces_of_any_size_is_read_or_refused(staging: Staging, size: int) -> None:
    head = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n'
    model = b"\r\n--other\r\n--" * 1000
    body = head % b"config" + LABELED + b"\r\n"
    body += head % 'model"; filename="folder/ä.onnx'.encode() + model + b"\r\n--b--\r\n"
    form = read_form(staging, body, size)
    config, file = form.finish()
    assert (config.field, config.content.path.read_bytes()) == ("config", LABELED)
    assert (file.field, file.name) == ("model", "ä.onnx")
    assert file.content.path.read_bytes() == model
    assert form.digest == hashlib.sha256(body).digest()
    with pytest.raises(MalformedRequest, match="fields of an upload"):
        read_form(staging, head % b"other" + b"x\r\n--b--\r\n", size)
    with pytest.raises(MalformedRequest, match="before its closing boundary"):
        read_form(staging, head % b"model" + b"x", size).finish()


def test_digest_header_is_read_or_refused() -> None:
    digest = hashlib.sha256(b"x").digest()
    encoded = base64.b64encode(digest).decode()
    assert parse_sha256_digest(f"sha-512=:AAAA:, sha-256=:{encoded}:") == digest
    for header in ("", "sha-512=:AAAA:", "sha-256=:AAAA:", f"sha-256={encoded}", "sha-256=:A=A:"):
        with pytest.raises(MalformedRequest):
            parse_sha256_digest(header)


def test_flag_of_a_capability_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_MAX_MODEL_BYTES", "3")
    assert read_settings(max_model_bytes=5).read(UploadSettings).max_model_bytes == 5
