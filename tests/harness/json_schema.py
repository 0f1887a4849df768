"""A judge of JSON documents by the part of JSON Schema that docs/compare.schema.json uses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_TYPES = {
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: type(value) is int,
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "null": lambda value: value is None,
}
_KNOWN = {
    "$schema", "$defs", "$ref", "title", "description", "type", "enum", "anyOf", "properties", "required",
    "additionalProperties", "items",
}  # fmt: skip


class Schema:
    """A schema from a file."""

    def __init__(self, path: Path) -> None:
        self._root = json.loads(path.read_text())

    def problems(self, document: object) -> list[str]:
        """What of a document the schema does not allow, each with its place."""
        return list(self._problems(document, self._root, "document"))

    def _problems(self, value: Any, schema: Mapping[str, Any], where: str) -> Iterator[str]:
        unknown = set(schema) - _KNOWN
        assert not unknown, f"this judge does not know {unknown}"
        if "$ref" in schema:
            yield from self._problems(value, self._root["$defs"][schema["$ref"].rpartition("/")[2]], where)
        if "anyOf" in schema:
            attempts = [list(self._problems(value, option, where)) for option in schema["anyOf"]]
            if all(attempts):
                yield from min(attempts, key=len)
        if "enum" in schema and value not in schema["enum"]:
            yield f"{where}: {value!r} is none of {schema['enum']}"
        if "type" in schema and not _TYPES[schema["type"]](value):
            yield f"{where}: {value!r:.60} is no {schema['type']}"
            return
        if isinstance(value, list):
            for index, entry in enumerate(value):
                yield from self._problems(entry, schema.get("items", {}), f"{where}[{index}]")
        if isinstance(value, dict):
            yield from self._object_problems(value, schema, where)

    def _object_problems(self, value: dict[str, Any], schema: Mapping[str, Any], where: str) -> Iterator[str]:
        properties = schema.get("properties", {})
        yield from (f"{where} has no {name}" for name in schema.get("required", ()) if name not in value)
        for name, entry in value.items():
            if name in properties:
                yield from self._problems(entry, properties[name], f"{where}.{name}")
            elif schema.get("additionalProperties") is False:
                yield f"{where}.{name} is not described"
