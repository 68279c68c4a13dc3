"""Files, model folders and repositories as arguments of `up`, and its temporary repository of links."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.embedded.model_paths import resolve_model_paths
from gateway.embedded.options import CannotStart


def write_file(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("net.onnx", "net"),
        ("NET.ONNX", "NET"),
        ("my net (v1.2).onnx", "my_net_v1.2_"),
        ("né$t.onnx", "n_t"),
        ("...onnx", "model"),
        ("../up/net-3_b.onnx", "net-3_b"),
    ],
)
def test_file_is_served_as_a_model_of_its_name(tmp_path: Path, file: str, name: str) -> None:
    graph = write_file(tmp_path / file, "a graph")
    with resolve_model_paths([graph]) as (repository,):
        (linked,) = Path(repository).rglob("model.onnx")
        assert linked == Path(repository, name, "1", "model.onnx")
        assert linked.read_text() == "a graph"
    assert not Path(repository).exists()
    assert graph.exists()


def test_repositories_are_kept_and_models_share_a_temporary_one(tmp_path: Path) -> None:
    graph = write_file(tmp_path / "net.onnx")
    configured = write_file(tmp_path / "a" / "configured" / "config.pbtxt").parent
    versioned = write_file(tmp_path / "b" / "versioned" / "3" / "model.onnx").parents[1]
    # Its model has the name of a version.
    own = write_file(tmp_path / "own" / "1" / "2" / "model.onnx").parents[2]
    places: list[Path | str] = [own, graph, "s3://bucket/models", configured, versioned]
    with resolve_model_paths(places) as (*repositories, links):
        assert repositories == [own, "s3://bucket/models"]
        models = {path.name for path in Path(links).iterdir()}
        assert models == {"net", "configured", "versioned"}
        assert Path(links, "versioned", "3", "model.onnx").exists()
    assert versioned.is_dir()
    with resolve_model_paths([own]) as unchanged:
        assert unchanged == (own,)


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (("missing.onnx",), "model file not found: .*/missing.onnx"),
        (("net.pt",), "cannot serve '.*/net.pt': the embedded Triton runs .onnx files.*torch.onnx.export"),
        (("a/net.onnx", "b/net.onnx"), "a/net.onnx and .*b/net.onnx would both be served as net; rename"),
    ],
)  # fmt: skip
def test_path_that_cannot_be_served_is_refused(
    tmp_path: Path, files: tuple[str, ...], sentence: str
) -> None:
    paths = [tmp_path / file for file in files]
    for path in paths:
        if path.stem != "missing":
            write_file(path)
    with pytest.raises(CannotStart, match=sentence), resolve_model_paths(paths):
        pytest.fail("the paths were accepted")
