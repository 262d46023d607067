"""Make the schemas of this folder from clones of the projects that publish them: `python make.py FOLDER_OF_CLONES`.

What only people read is left out. `x-kubernetes-preserve-unknown-fields` stays: there, and only there, any field is
allowed.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

CRDS = {
    "jobset": ("jobset", "v0.12.0", "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"),
    "pytorchjob": ("trainer", "v1.9.3", "manifests/base/crds/kubeflow.org_pytorchjobs.yaml"),
    "trainjob": ("trainer", "v2.3.0", "manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml"),
    "trainingruntime": ("trainer", "v2.3.0", "manifests/base/crds/trainer.kubeflow.org_trainingruntimes.yaml"),
}
OPENAPI = ("python", "v36.0.3", "kubernetes/swagger.json.unprocessed")
CORE = {"job": "io.k8s.api.batch.v1.Job", "configmap": "io.k8s.api.core.v1.ConfigMap"}
COMPOSE = ("compose-spec", "170098ba07d9f53c383a41bfd4c5166b0a4529a6", "schema/compose-spec.json")
FOR_PEOPLE = (
    "description",
    "title",
    "example",
    "externalDocs",
    "x-kubernetes-validations",
    "deprecated",
    "patternErrors",
)


def show(clones: Path, repository: str, version: str, path: str) -> str:
    command = ["git", "-C", str(clones / repository), "show", f"{version}:{path}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def stripped(node: Any, is_schema: bool = True) -> Any:
    """Leave out texts; in `properties`, description is the name of a field."""
    if isinstance(node, list):
        return [stripped(item) for item in node]
    if not isinstance(node, dict):
        return node
    names = ("properties", "patternProperties", "definitions")
    return {k: stripped(v, k not in names) for k, v in node.items() if not (is_schema and k in FOR_PEOPLE)}


def inlined(node: Any, definitions: dict[str, Any]) -> Any:
    """Replace references by what they refer to; those of a schema to itself do not occur in a Job."""
    if isinstance(node, list):
        return [inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return inlined(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {key: inlined(value, definitions) for key, value in node.items()}


def write(name: str, schema: Any) -> None:
    data = json.dumps(stripped(schema), sort_keys=True, separators=(",", ":")).encode()
    Path(__file__).with_name(f"{name}.json.gz").write_bytes(gzip.compress(data, 9, mtime=0))


def main(clones: Path) -> None:
    definitions = json.loads(show(clones, *OPENAPI))["definitions"]
    for name, definition in CORE.items():
        write(name, inlined(definitions[definition], definitions))
    for name, place in CRDS.items():
        documents = [d for d in yaml.safe_load_all(show(clones, *place)) if d]
        versions = documents[0]["spec"]["versions"]
        write(name, next(v for v in versions if v["storage"])["schema"]["openAPIV3Schema"])
    write("compose", json.loads(show(clones, *COMPOSE)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
