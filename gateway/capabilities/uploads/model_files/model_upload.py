"""The files of a model's folder, made from received files: kinds, names, config, and their validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from gateway.capabilities.uploads.errors import InvalidModelFile
from gateway.capabilities.uploads.model_files.entry_names import (
    CONFIG_FILE,
    CONFIGS_FOLDER,
    LABELS_SUFFIX,
    MAX_ARCHIVE_ENTRIES,
    NEXT_VERSION,
    arrange_entries,
    check_folders,
)
from gateway.capabilities.uploads.model_files.kinds import (
    ARCHIVE_SUFFIXES,
    DATA_BACKENDS,
    FILE_KINDS,
    FileKind,
    find_suffix,
    identify_content,
    identify_file,
)
from gateway.capabilities.uploads.model_files.model_config import (
    CODE_ADVICE,
    MAX_CONFIG_BYTES,
    check_config_limits,
    check_config_name,
    check_data_config,
    declare_backend,
    encode_model_config,
    find_backend,
    is_plain_file_name,
    list_label_files,
    parse_model_config,
)
from gateway.capabilities.uploads.model_files.received_body import (
    CONFIG_FIELD,
    LABELS_FIELD,
    MODEL_FIELD,
    ReceivedFile,
)
from gateway.capabilities.uploads.model_files.staging import StagedFile, Staging
from gateway.capacity.archives import ArchiveLimits, InvalidArchive, read_archive
from gateway.errors import MalformedRequest
from gateway.messages import join_names, quote_text

# Files that are or may contain code, by suffix and by their first bytes.
CODE_SUFFIXES: Final = (
    ".py", ".pyc", ".pyd", ".so", ".dll", ".dylib", ".sh", ".exe", ".pt", ".pt2", ".pth", ".pkl", ".pickle",
    ".joblib", ".jar", ".whl",
)  # fmt: skip
LIBRARY_MARK: Final = ".so."
CODE_MAGICS: Final = (b"\x7fELF", b"MZ", b"#!", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
MAGIC_BYTES: Final = 8
DEFAULT_LABELS_FILE: Final = "labels.txt"
MAX_CONFIGS_BYTES: Final = 2 * MAX_CONFIG_BYTES  # protobuf parses them in Python
ARTIFACTS_ONLY: Final = "GATEWAY_MODEL_UPLOADS=artifacts accepts data only"

Files = dict[str, StagedFile]
Versions = dict[int, Files]


@dataclass(frozen=True)
class UploadRules:
    model: str
    accepts_code: bool
    max_bytes: int  # limit for all files together, after decompression
    max_tensor_bytes: int  # of a config's warm-up inputs and states, if the upload is data only


@dataclass(frozen=True)
class ModelUpload:
    """The files of a model's versions, by their paths in the folder of the model and of the version."""

    shared_files: Files = field(default_factory=dict)
    versions: Versions = field(default_factory=dict)
    sha256: str = ""  # checksum of the model file or archive that the client sent
    size: int = 0

    def assign_version(self, number: int | None, next_number: int) -> ModelUpload:
        """Return the upload with the number of its only version; several versions keep theirs.

        Raises `InvalidModelFile` for a number and several versions.
        """
        if NEXT_VERSION in self.versions:
            return replace(self, versions={number or next_number: self.versions[NEXT_VERSION]})
        if number is not None:
            raise InvalidModelFile(
                "the archive contains several versions, which keep their numbers; upload it without a version"
            )
        return self

    @property
    def all_files(self) -> list[tuple[str, StagedFile]]:
        groups = (self.shared_files, *self.versions.values())
        return [item for files in groups for item in files.items()]


def build_upload(
    received: Sequence[ReceivedFile],
    staging: Staging,
    rules: UploadRules,
    existing_config: bytes | None,
) -> ModelUpload:
    """Return the validated upload. A model that exists already has an `existing_config`.

    Raises `InvalidModelFile`, `MalformedRequest` or `TooLarge`.
    """
    models = [each for each in received if each.field == MODEL_FIELD]
    if not models:
        raise MalformedRequest(f"the form has no field {MODEL_FIELD!r} with the model file")
    configs = [each for each in received if each.field == CONFIG_FIELD]
    if len(configs) > 1:
        raise MalformedRequest(f"the form has several fields {CONFIG_FIELD!r}")
    config = read_staged_config(configs[0].content) if configs else None
    suffix = identify_archive(models)
    upload = ModelUpload(versions={NEXT_VERSION: {}})
    if suffix:
        try:
            upload = extract_files(models[0].content, suffix, staging, rules=rules)
        except InvalidArchive as exc:
            raise InvalidModelFile(exc.detail) from None
        if config is None and CONFIG_FILE in upload.shared_files:
            config = read_staged_config(upload.shared_files[CONFIG_FILE])
    builder = UploadBuilder(
        staging, rules, upload, config_text=config, existing_config=existing_config
    )
    if not suffix:
        builder.add_files(models)
    builder.check_files()
    builder.write_config()
    builder.add_labels([each for each in received if each.field == LABELS_FIELD])
    total = sum(each.content.size for each in models)
    # Of several files, the first is the model; the others are its weights.
    content = models[0].content
    return replace(upload, sha256=content.sha256, size=content.size if suffix else total)


def read_staged_config(file: StagedFile) -> bytes:
    return file.read_start(MAX_CONFIG_BYTES + 1)  # the parser rejects a longer config


def identify_archive(models: Sequence[ReceivedFile]) -> str:
    """Return the suffix of the archive that is the only file; empty if there is no archive."""
    for model in models:
        if identify_content(model.content) in ARCHIVE_SUFFIXES:
            if len(models) > 1:
                raise InvalidModelFile("an archive must be the only model file of an upload")
            return identify_file(model.content, model.name)
    return ""


def extract_files(
    archive: StagedFile, suffix: str, staging: Staging, *, rules: UploadRules
) -> ModelUpload:
    files: Files = {}
    names: list[str] = []
    with archive.path.open("rb") as stream:
        limits = ArchiveLimits(rules.max_bytes, MAX_ARCHIVE_ENTRIES, staging.check_open)
        for name, pieces in read_archive(stream, suffix, limits):
            names.append(name)
            if name.endswith("/"):
                continue
            if name in files:
                raise InvalidModelFile(f"the archive contains {quote_text(name)} twice")
            writer = staging.create_file()
            for piece in pieces:
                writer.write(piece)
            files[name] = writer.finish()
    archive.path.unlink()  # its content needs the space
    check_folders(files)
    shared: Files = {}
    versions: Versions = {}
    for name, place in arrange_entries(names).items():
        folder = shared if place.version is None else versions.setdefault(place.version, {})
        folder[place.path] = files[name]
    if not files:
        raise InvalidModelFile("the archive contains no files")
    return ModelUpload(shared, versions or {NEXT_VERSION: {}})


class UploadBuilder:
    """Names and validates the files of an upload, and writes its config."""

    def __init__(
        self,
        staging: Staging,
        rules: UploadRules,
        upload: ModelUpload,
        *,
        config_text: bytes | None,
        existing_config: bytes | None,
    ) -> None:
        self._staging = staging
        self._rules = rules
        self._upload = upload
        self._shared = upload.shared_files
        self._config_text = config_text
        self._is_existing = config_text is None and existing_config is not None
        text = existing_config if config_text is None else config_text
        self._config: Any = None if text is None else self._parse_config(text)
        self._kind: FileKind | None = None

    def _parse_config(self, text: bytes) -> Any:
        accepts_code = self._rules.accepts_code
        config = parse_model_config(text, allow_unknown_fields=accepts_code)
        check_config_name(config, self._rules.model)
        if not accepts_code:
            check_data_config(config)
            check_config_limits(config, self._rules.max_tensor_bytes)
        return config

    @property
    def _backend(self) -> str:
        return "" if self._config is None else find_backend(self._config)

    @property
    def _declared_file_name(self) -> str:
        name = "" if self._config is None else self._config.default_model_filename
        if name and not is_plain_file_name(name):
            raise InvalidModelFile("default_model_filename in the config must be a file name")
        return str(name)

    def add_files(self, models: Sequence[ReceivedFile]) -> None:
        """Name the files of a version that were sent without a folder."""
        version = self._upload.versions[NEXT_VERSION]
        is_openvino = any(find_suffix(model.name) == ".xml" for model in models)
        for model in models:
            name = model.name
            is_companion = len(models) > 1 and find_suffix(name) not in FILE_KINDS
            if not is_companion:
                suffix = identify_file(model.content, name, self._backend)
                if self._kind is not None:
                    raise InvalidModelFile("the form contains two model files")
                self._kind = FILE_KINDS[suffix]
                name = self._declared_file_name or self._kind.file_name
            elif is_openvino and name.lower().endswith(".bin"):
                name = "model.bin"
            if not name or name in version:
                raise InvalidModelFile("each model file of a form needs a file name of its own")
            version[name] = model.content
        if self._kind is None:
            raise InvalidModelFile(f"the form contains no model file: {join_names(FILE_KINDS)}")

    def check_files(self) -> None:
        """Find the model files, and compare them with the config. Raises `InvalidModelFile`."""
        if self._kind is None:
            kinds = {self._find_model_file(files) for files in self._upload.versions.values()}
            if len(kinds) > 1:
                raise InvalidModelFile("the versions in the archive are models of different kinds")
            (self._kind,) = kinds
        kind = self._kind
        accepts_code = self._rules.accepts_code
        if not accepts_code:
            self._check_data_files(kind)
        if kind is not None and self._backend not in ("", kind.backend):
            place = "the existing config of the model" if self._is_existing else "the config"
            raise InvalidModelFile(
                f"{place} has the backend {quote_text(self._backend)}, but the file is a model for "
                f"{quote_text(kind.backend)}"
            )
        if self._config is None and (kind is None or kind.needs_config):
            raise InvalidModelFile(
                f"a config is required, because Triton derives none from these files; add {CONFIG_FILE}, or "
                f"send it in the field {CONFIG_FIELD!r} of a form"
            )

    def _find_model_file(self, version: Files) -> FileKind | None:
        kinds = {kind.file_name: (suffix, kind) for suffix, kind in FILE_KINDS.items()}
        names = [self._declared_file_name] if self._declared_file_name else list(kinds)
        found = next((name for name in names if name in version), "")
        if not found:
            candidates = [name for name in version if find_suffix(name) in FILE_KINDS]
            if len(candidates) != 1 or "/" in candidates[0]:
                return None
            found = FILE_KINDS[find_suffix(candidates[0])].file_name
            version[found] = version.pop(candidates[0])
        known = found if find_suffix(found) in FILE_KINDS else ""
        return FILE_KINDS.get(identify_file(version[found], known, self._backend))

    def _check_data_files(self, kind: FileKind | None) -> None:
        if kind is None or not kind.is_data:
            backends = join_names(sorted(DATA_BACKENDS))
            problem = "no model file" if kind is None else f"a model for {kind.backend}"
            raise InvalidModelFile(
                f"the upload contains {problem}; {ARTIFACTS_ONLY}: models for {backends}; {CODE_ADVICE}"
            )
        for path, file in self._upload.all_files:
            check_data_file(path, file)
        configs = {
            path: file
            for path, file in self._shared.items()
            if path.startswith(f"{CONFIGS_FOLDER}/") or path.endswith(".pbtxt")
            if path != CONFIG_FILE
        }
        if sum(file.size for file in configs.values()) > MAX_CONFIGS_BYTES:
            raise InvalidModelFile(f"the configs together exceed {MAX_CONFIGS_BYTES} bytes")
        for path, file in configs.items():
            self._staging.check_open()
            config = self._parse_config(read_staged_config(file))
            if find_backend(config) not in ("", kind.backend):
                raise InvalidModelFile(f"{path} has another backend than the model file")

    def write_config(self) -> None:
        backend = "" if self._kind is None else self._kind.backend
        if self._config_text is not None:
            content = encode_model_config(self._config_text, self._config, backend)
        elif self._config is None and self._kind is not None:
            content = declare_backend(backend)
        else:
            return
        self._shared[CONFIG_FILE] = self._staging.write_file(content)

    def add_labels(self, labels: Sequence[ReceivedFile]) -> None:
        names = [] if self._config is None else list_label_files(self._config)
        for label in labels:
            name = names[0] if len(names) == 1 else label.name or DEFAULT_LABELS_FILE
            if name not in names or not is_plain_file_name(name):
                raise InvalidModelFile(
                    f"no output in the config has the label_filename {quote_text(name)}; send a config with "
                    f'output [ {{ … label_filename: "{DEFAULT_LABELS_FILE}" }} ]'
                )
            if not (self._rules.accepts_code or name.endswith(LABELS_SUFFIX)):
                raise InvalidModelFile(f"the name of a labels file must end with {LABELS_SUFFIX}")
            self._shared[name] = label.content


def check_data_file(path: str, file: StagedFile) -> None:
    name = path.lower()
    is_program = file.read_start(MAGIC_BYTES).startswith(CODE_MAGICS)
    if name.endswith(CODE_SUFFIXES) or LIBRARY_MARK in name or is_program:
        raise InvalidModelFile(
            f"the upload contains {quote_text(path)}, which is code; {ARTIFACTS_ONLY}; {CODE_ADVICE}"
        )
