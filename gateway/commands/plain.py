"""The plain commands: each is one request, whose response is shown as a sentence or a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import typer

from gateway.commands.flags import JsonOption, ModelArgument, TimeoutOption, add_target
from gateway.commands.resources import JOBS, LABELS, Resource
from gateway.commands.target import COMMAND_TIMEOUT_S, Target
from gateway.messages import escape_unprintable

# The client waits longer than the gateway, whose own message then arrives.
TIMEOUT_MARGIN_S: Final = 10.0
REPLICA_STATE: Final = "{outstanding} requests and {sequences} sequences in flight"
AddressArgument = Annotated[
    str, typer.Argument(metavar="ADDRESS", help="Address of the replica, as HOST:PORT.")
]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="ID of the job.")]
LabelName = Annotated[str, typer.Argument(metavar="LABEL", help="Name of the label.")]
# The arguments in the paths.
ARGUMENT: Final = re.compile(r"{(\w+)}")
ARGUMENTS: Final[Mapping[str, Any]] = {
    "address": AddressArgument,
    "job": JobId,
    "label": LabelName,
    "model": ModelArgument,
}


def option(name: str, default: Any, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


JSON: Final = option("json", False, JsonOption)
LIST_JOBS: Final = (
    option("state", "", Annotated[str, typer.Option(help="Only jobs in this state.")]),
    option("model", "", Annotated[str, typer.Option(help="Only jobs of this model.")]),
    option("limit", 100, Annotated[int, typer.Option(min=1, max=1000, help="Number of jobs.")]),
)


@dataclass(frozen=True)
class PlainCommand:
    """A command. The values of its options are the query of the request, but for the time limit."""

    name: str
    verb: str
    path: str
    show: Resource | str
    help: str
    options: tuple[Parameter, ...] = ()

    def run(self, target: Target, **values: Any) -> None:
        from gateway.client.calls import quote_part
        from gateway.commands import tables

        json = values.pop("json", False)
        timeout_s = values.pop("timeout", COMMAND_TIMEOUT_S)
        quoted = {name: quote_part(values.pop(name)) for name in ARGUMENT.findall(self.path)}
        path = self.path.format_map(quoted)
        if query := urlencode({name: value for name, value in values.items() if value}):
            path = f"{path}?{query}"
        if isinstance(self.show, Resource):
            self.show.show(target, self.verb, path, json=json)
            return
        with target.connect(timeout_s + TIMEOUT_MARGIN_S) as client:
            headers = {"x-request-timeout": f"{timeout_s:g}"}
            document = client.request(self.verb, path, headers=headers)
        if json:
            tables.print_json(document)
        else:
            typer.echo(escape_unprintable(self.show.format_map(document)))

    def create(self) -> Callable[..., None]:
        """Return the function from whose signature Typer reads the arguments and options."""

        def run(target: Target, /, **values: Any) -> None:
            self.run(target, **values)

        parameters = (
            Parameter("target", Parameter.POSITIONAL_ONLY, annotation=Target),
            *(
                option(name, Parameter.empty, ARGUMENTS[name])
                for name in ARGUMENT.findall(self.path)
            ),
            *self.options,
        )
        vars(run)["__signature__"] = Signature(parameters)
        return add_target(run)


# The commands, with their verbs, paths and what they show.
PLAIN_COMMANDS: Final = (
    PlainCommand(
        "replicas cordon", "POST", "/v1/replicas/{address}/cordon",
        f"{{address}} is cordoned: {REPLICA_STATE}", "Send no new requests to a replica.",
    ),
    PlainCommand(
        "replicas uncordon", "POST", "/v1/replicas/{address}/uncordon",
        f"{{address}} is in service: {REPLICA_STATE}", "Send requests to a replica again.",
    ),
    PlainCommand(
        "replicas drain", "POST", "/v1/replicas/{address}/drain",
        f"{{address}} is cordoned: {REPLICA_STATE}",
        "Cordon a replica, and wait until its requests and sequences have finished.",
        (option("timeout", 300.0, TimeoutOption),),
    ),
    PlainCommand(
        "label list", "GET", "/v1/models/{model}/labels", LABELS, "List the labels of a model.", (JSON,)
    ),
    PlainCommand(
        "label delete", "DELETE", "/v1/models/{model}/labels/{label}", "deleted {label}",
        "Delete a label of a model.", (JSON,),
    ),
    PlainCommand(
        "jobs list", "GET", "/v1/jobs", JOBS,
        "List the jobs of the key, the newest first; an admin sees those of all keys.", (*LIST_JOBS, JSON),
    ),
    PlainCommand(
        "jobs get", "GET", "/v1/jobs/{job}", JOBS,
        "Show a job: its state, its place in the queue and its progress.", (JSON,),
    ),
    PlainCommand(
        "jobs cancel", "DELETE", "/v1/jobs/{job}", JOBS,
        "Cancel a job; delete one that has ended, with its result.", (JSON,),
    ),
)  # fmt: skip


def add_plain_commands(group_name: str, group: typer.Typer) -> None:
    for plain in PLAIN_COMMANDS:
        first, _, name = plain.name.partition(" ")
        if first == group_name:
            group.command(name, help=plain.help)(plain.create())
