"""The flags of the embedded Triton, which `triton-gateway up` and `triton-gateway triton` share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import typer

from gateway.embedded.demonstration import DEFAULT_REPOSITORY
from gateway.embedded.options import LOAD_ALL, ModelControl, TritonOptions

DEFAULT_MODELS: Final = ("ensemble", "text_ensemble")


@dataclass(frozen=True)
class TritonFlags:
    """The values of the flags; each field defines a flag of the same name."""

    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="ONNX files, model folders or model repositories to serve, instead of "
            f"{DEFAULT_REPOSITORY}. A file is served under its name.",
            show_default=False,
        ),
    ] = None
    triton_http_port: Annotated[int, typer.Option(help="Triton's HTTP port.")] = 8000
    triton_grpc_port: Annotated[int, typer.Option(help="Triton's gRPC port.")] = 8001
    triton_metrics_port: Annotated[int, typer.Option(help="Triton's metrics port.")] = 8002
    model_repository: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder, or s3://, gs:// or as:// URL; may be repeated. "
            f"Default: {DEFAULT_REPOSITORY}."
        ),
    ] = None
    model_control: Annotated[ModelControl, typer.Option(help="Triton's model control mode.")] = (
        ModelControl.explicit
    )
    poll_secs: Annotated[
        int | None,
        typer.Option(
            min=1, help="In mode poll: seconds between scans of the repository. Default: 15."
        ),
    ] = None
    load: Annotated[
        list[str] | None,
        typer.Option(
            help="In mode explicit: model to load at startup; may be repeated, * loads all. "
            "Default: the two ensembles of triton_repo, or all models of another repository."
        ),
    ] = None
    exit_on_error: Annotated[
        bool, typer.Option(help="Exit if a model fails to load at startup.")
    ] = True
    start_timeout: Annotated[
        int,
        typer.Option(
            min=1, help="Seconds within which Triton and its startup models must be ready."
        ),
    ] = 120
    backend_config: Annotated[
        list[str] | None,
        typer.Option(
            help="Setting of a backend, such as python,shm-default-byte-size=4194304; "
            "may be repeated."
        ),
    ] = None
    log_verbose: Annotated[
        int, typer.Option(min=0, help="Triton's verbosity; above 0, its complete log is shown.")
    ] = 0
    triton_arg: Annotated[
        list[str] | None,
        typer.Option(
            help="Additional argument of tritonserver, such as --pinned-memory-pool-byte-size=0; "
            "may be repeated."
        ),
    ] = None

    def to_options(self) -> TritonOptions:
        paths = [*(self.model_repository or ()), *(self.models or ())]
        startup_models: Sequence[str] = self.load or ()
        if not startup_models and self.model_control is ModelControl.explicit:
            startup_models = [LOAD_ALL] if paths else DEFAULT_MODELS
        return TritonOptions(
            tuple(paths or [DEFAULT_REPOSITORY]),
            tuple(startup_models),
            self.model_control,
            self.poll_secs,
            self.exit_on_error,
            tuple(self.backend_config or ()),
            self.log_verbose,
            tuple(self.triton_arg or ()),
            http_port=self.triton_http_port,
            grpc_port=self.triton_grpc_port,
            metrics_port=self.triton_metrics_port,
            start_timeout_s=self.start_timeout,
        )
