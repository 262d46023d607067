"""The published schemas of what cluster=kubernetes creates; a field that a schema does not know is an error.

Kubernetes drops unknown fields silently, unless a request asks it not to.
"""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path
from typing import Any

import jsonschema

FOLDER = Path(__file__).parent / "launch" / "schemas"


def closed(schema: Any) -> Any:
    """Forbid additional properties wherever a schema lists properties and does not allow others."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    is_open = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    return found | (
        {"additionalProperties": False} if isinstance(schema.get("properties"), dict) and not is_open else {}
    )


@functools.cache
def validator(kind: str) -> Any:
    schema = json.loads(gzip.decompress((FOLDER / f"{kind.lower()}.json.gz").read_bytes()))
    if kind == "compose":  # it says itself what it forbids
        return jsonschema.Draft7Validator(schema)
    whole = closed(schema)
    whole["properties"]["metadata"] = closed(json.loads(gzip.decompress((FOLDER / "job.json.gz").read_bytes())))[
        "properties"
    ]["metadata"]  # a CRD says only that it is an object
    return jsonschema.Draft7Validator(whole)


def problems(document: dict[str, Any], kind: str | None = None) -> list[str]:
    """What the schema of the document's kind does not allow."""
    return [
        f"{error.json_path}: {error.message}" for error in validator(kind or document["kind"]).iter_errors(document)
    ]
