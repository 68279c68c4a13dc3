"""Record the public interface: `make interface`. A change that breaks clients needs ARGS=--breaking."""

from __future__ import annotations

import sys

from tests.interface import names, openapi


def main(arguments: list[str]) -> int:
    document = openapi.build_document()
    current = names.list_names(document)
    breaks: list[str] = []
    if openapi.DOCUMENT_FILE.exists() and names.NAMES_FILE.exists():
        breaks += openapi.find_breaks(openapi.read_recorded_document(), document)
        breaks += [f"{name}: removed" for name in sorted(names.read_recorded_names() - current)]
    for line in breaks:
        print(line, file=sys.stderr)
    if breaks and "--breaking" not in arguments:
        print(
            "nothing was recorded; ARGS=--breaking records the removals, each of which needs a line in "
            "CHANGELOG.md",
            file=sys.stderr,
        )
        return 1
    openapi.DOCUMENT_FILE.write_text(openapi.format_document(document))
    names.NAMES_FILE.write_text(names.format_names(current))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
