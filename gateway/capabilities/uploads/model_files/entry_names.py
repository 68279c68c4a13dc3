"""Names of models and of the files in their folders, which clients choose."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from gateway.capabilities.uploads.errors import InvalidModelFile
from gateway.errors import MalformedRequest, TooLarge
from gateway.messages import normalize_version, quote_text

STORABLE_MODEL_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")
CONFIG_FILE: Final = "config.pbtxt"
CONFIGS_FOLDER: Final = "configs"
LABELS_SUFFIX: Final = ".txt"
MAX_ARCHIVE_ENTRIES: Final = 10_000
MAX_VERSION: Final = (1 << 63) - 1


def is_storable_name(model: str) -> bool:
    return STORABLE_MODEL_NAME.fullmatch(model) is not None


def check_storable_name(model: str) -> None:
    if not is_storable_name(model):
        raise MalformedRequest(
            "the name of an uploaded model consists of up to 128 letters, digits and the characters _ . + -, "
            "and begins with a letter, a digit or _"
        )


def parse_version_number(version: str) -> int:
    number = int(normalize_version(version) or "0")
    if not 0 < number <= MAX_VERSION:
        raise MalformedRequest("a version must be a number from 1")
    return number


def is_version_name(name: str) -> bool:
    return normalize_version(name) == name != "0"


NEXT_VERSION: Final = 0  # the number that a version gets when it is published


@dataclass(frozen=True)
class FolderEntry:
    """The place of an entry in a model's folder: in the folder itself (None), or in a version's folder."""

    version: int | None
    path: str


def arrange_entries(names: Iterable[str]) -> dict[str, FolderEntry]:
    """Return the place of each file of an archive. Names that end with / are folders.

    A folder around everything is left out. Without a version folder, the files but for configs and labels
    belong to the version. The number of a single version does not matter; several keep theirs. Raises
    `InvalidModelFile`.
    """
    paths = list(names)
    top_level = {path.partition("/")[0] for path in paths}
    (only,) = top_level if len(top_level) == 1 else ("",)
    is_around_all = bool(only) and all("/" in path for path in paths)
    if is_around_all and not is_version_name(only) and only != CONFIGS_FOLDER:
        prefix = f"{only}/"
        inner = arrange_entries(path.removeprefix(prefix) for path in paths if path != prefix)
        return {f"{prefix}{path}": entry for path, entry in inner.items()}
    folders = {path.partition("/")[0] for path in paths if "/" in path}
    names_of_versions = sorted(filter(is_version_name, folders))
    if len(names_of_versions) == 1:
        versions = {names_of_versions[0]: NEXT_VERSION}
    else:
        versions = {name: int(name) for name in names_of_versions}
    if max(versions.values(), default=0) > MAX_VERSION:
        raise InvalidModelFile("the archive contains a version whose number is too large")
    return {path: place_entry(path, versions) for path in paths if not path.endswith("/")}


def check_folders(paths: Collection[str]) -> None:
    """Check the folders of files: their number, and that none of them is a file.

    Raises `TooLarge` or `InvalidModelFile`.
    """
    folders: set[str] = set()
    for path in paths:
        folder = path
        while (folder := folder.rpartition("/")[0]) and folder not in folders:
            folders.add(folder)
    if len(folders) > MAX_ARCHIVE_ENTRIES:
        raise TooLarge(f"the archive contains more than {MAX_ARCHIVE_ENTRIES} folders")
    if both := folders.intersection(paths):
        raise InvalidModelFile(f"the archive contains {quote_text(min(both))} as file and folder")


def place_entry(path: str, versions: Mapping[str, int]) -> FolderEntry:
    folder, slash, rest = path.partition("/")
    if slash and folder in versions:
        return FolderEntry(versions[folder], rest)
    if versions:
        return FolderEntry(None, path)
    is_shared = path == CONFIG_FILE or path.startswith(f"{CONFIGS_FOLDER}/")
    return FolderEntry(None if is_shared or path.endswith(LABELS_SUFFIX) else NEXT_VERSION, path)
