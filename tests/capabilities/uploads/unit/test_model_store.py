"""The store of uploaded models upon a folder: changes, their end, and what is left of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from gateway.capabilities.uploads.errors import RepositoryFull, RepositoryUnavailable
from gateway.capabilities.uploads.model_files.folder import ModelFolder
from gateway.capabilities.uploads.model_files.model_upload import ModelUpload
from gateway.capabilities.uploads.model_files.staging import Staging, remove_leftovers
from gateway.capabilities.uploads.model_files.store import ModelStore
from gateway.errors import Conflict, NotFound

# Versions 1 and 2, of which the second has two files, and a link that an operator has made.
BEFORE = {
    "config.pbtxt": "old",
    "1/model.onnx": "old",
    "2/model.onnx": "old",
    "2/weights": "old",
    "9": "a link",
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ModelStore]:
    for path, text in BEFORE.items():
        file = tmp_path / "mine" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if text == "old":
            file.write_text(text)
        else:
            file.symlink_to(tmp_path / "elsewhere")
    store = ModelStore(ModelFolder(tmp_path))
    yield store
    store.close()
    assert not list(tmp_path.glob(".*"))


def tree(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): "a link" if path.is_symlink() else path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def build(staging: Staging, *paths: str) -> ModelUpload:
    """Return an upload of files of the model, and of versions by their number."""
    files = {path: staging.write_file(b"new") for path in paths}
    versions: dict[int, dict[str, object]] = {}
    for path, file in files.items():
        version, slash, name = path.partition("/")
        if slash and version.isdecimal():
            versions.setdefault(int(version), {})[name] = file
    shared = {path: file for path, file in files.items() if not path[0].isdecimal()}
    return ModelUpload(shared, versions)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("paths", "changes"),
    [
        (["3/model.onnx"], {"3/model.onnx": "new"}),
        (["1/model.onnx"], {"1/model.onnx": "new"}),
        (["2/model.onnx"], {"2/model.onnx": "new", "2/weights": ""}),
        (["2/model.onnx", "2/a/b"], {"2/model.onnx": "new", "2/a/b": "new", "2/weights": ""}),
        (
            ["config.pbtxt", "configs/a.pbtxt", "2/weights", "4/model.onnx"],
            {
                "config.pbtxt": "new",
                "configs/a.pbtxt": "new",
                "2/weights": "new",
                "2/model.onnx": "",
                "4/model.onnx": "new",
            },
        ),
    ],
)
def test_change_of_a_model_is_complete_or_reverted(
    store: ModelStore, tmp_path: Path, paths: list[str], changes: Mapping[str, str]
) -> None:
    """A version that is replaced has the files of the upload alone."""
    staging = store.create_staging()
    store.install("mine", build(staging, *paths)).revert()
    assert tree(tmp_path / "mine") == BEFORE
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {"config.pbtxt", "1", "2", "9"}
    store.install("mine", build(staging, *paths)).commit()
    expected = {path: text for path, text in {**BEFORE, **changes}.items() if text}
    assert tree(tmp_path / "mine") == dict(sorted(expected.items()))
    assert (tmp_path / "mine" / paths[-1]).stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("paths", "obstacle"),
    [
        (["config.pbtxt", "1/model.onnx", "configs/a.pbtxt"], "configs"),
        (["1/model.onnx", "3/model.onnx"], "3"),
    ],
)
def test_change_that_fails_in_the_middle_leaves_the_files_as_they_were(
    store: ModelStore, tmp_path: Path, paths: list[str], obstacle: str
) -> None:
    """A file is where the change needs a folder."""
    (tmp_path / "mine" / obstacle).parent.mkdir(exist_ok=True)
    (tmp_path / "mine" / obstacle).write_text("in the way")
    before = tree(tmp_path / "mine")
    staging = store.create_staging()
    with pytest.raises(OSError, match=r"exists|directory"):
        store.install("mine", build(staging, *paths))
    staging.discard()
    assert tree(tmp_path / "mine") == before


def test_change_of_a_store_that_closes_is_reverted(store: ModelStore, tmp_path: Path) -> None:
    staging = store.create_staging()
    store.stop()
    with pytest.raises(RepositoryUnavailable, match="shutting down"):
        store.install("mine", build(staging, "2/model.onnx"))
    with pytest.raises(RepositoryUnavailable, match="shutting down"):
        store.remove_version("mine", 1)
    staging.discard()
    assert tree(tmp_path / "mine") == BEFORE


def test_versions_and_models_are_removed_with_their_bytecode(
    store: ModelStore, tmp_path: Path
) -> None:
    (tmp_path / "mine" / "2" / "__pycache__").mkdir()
    (tmp_path / "mine" / "2" / "__pycache__" / "model.pyc").touch()
    assert store.list_versions("mine") == [1, 2, 9]
    assert {file.path for file in store.list_files("mine", "2")} == {"2/model.onnx", "2/weights"}
    store.remove_version("mine", 2).revert()
    assert tree(tmp_path / "mine") == BEFORE
    store.remove_version("mine", 2).commit()
    assert store.list_versions("mine") == [1, 9]
    assert not (tmp_path / "mine" / "2").exists()
    store.remove_model("mine")
    assert not (tmp_path / "mine").exists()
    with pytest.raises(NotFound):
        store.list_files("mine")


def test_bytecode_of_a_file_does_not_outlive_it(store: ModelStore, tmp_path: Path) -> None:
    """Python would use it for another file of the same size and second."""
    bytecode = tmp_path / "mine" / "1" / "__pycache__"
    bytecode.mkdir()
    change = store.install("mine", build(store.create_staging(), "1/model.onnx"))
    assert not bytecode.exists()
    bytecode.mkdir()
    change.revert()
    assert not bytecode.exists()
    change.commit()


@pytest.mark.parametrize("linked", ["linked", "mine/9"])
def test_folder_that_is_a_link_is_not_changed(
    store: ModelStore, tmp_path: Path, linked: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "model.onnx").write_text("another's")
    (tmp_path / linked).unlink(missing_ok=True)
    (tmp_path / linked).symlink_to(elsewhere)
    model, _, version = linked.partition("/")
    staging = store.create_staging()
    with pytest.raises(Conflict, match="symbolic link"):
        store.install(model, build(staging, f"{version or 1}/model.onnx"))
    if not version:
        with pytest.raises(Conflict, match="symbolic link"):
            store.remove_model(model)
    with pytest.raises(NotFound):
        store.open_file("mine", "9/model.onnx")
    staging.discard()
    assert (elsewhere / "model.onnx").read_text() == "another's"


def test_quota_counts_what_is_stored_and_what_is_staged(tmp_path: Path) -> None:
    store = ModelStore(ModelFolder(tmp_path), max_bytes=10)
    staging = store.create_staging()
    store.install("mine", build(staging, "1/model.onnx")).commit()
    store.check_quota(7)
    other = store.create_staging()
    other.write_file(b"123")
    store.check_quota(4)
    with pytest.raises(RepositoryFull, match="whose limit is 10 bytes"):
        store.check_quota(5)
    other.write_file(b"12345")
    with pytest.raises(RepositoryFull):
        store.install("mine", build(staging, "2/model.onnx"))
    assert store.list_versions("mine") == [1]
    store.close()


def test_temporary_files_are_removed_when_nobody_has_changed_them_for_a_day(
    tmp_path: Path,
) -> None:
    """By the time of their entry: the copy of an old file is a link to it."""
    model, copy = tmp_path / "model.onnx", tmp_path / ".triton-gateway-1"
    model.touch()
    os.utime(model, (0, 0))
    os.link(model, copy)
    ModelFolder(tmp_path).open()
    assert copy.exists()
    remove_leftovers(tmp_path, ".triton-gateway-", max_age_s=-1)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.fault("a small archive of 10,000 files or folders")
def test_upload_of_many_files_waits_once_for_the_disk(tmp_path: Path) -> None:
    store = ModelStore(ModelFolder(tmp_path))
    staging = store.create_staging()
    names = [f"1/{number}/weights" for number in range(500)]
    store.install("many", build(staging, *names)).commit()
    assert len(store.list_files("many")) == 500
    store.close()
