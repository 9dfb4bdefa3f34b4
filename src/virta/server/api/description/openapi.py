"""`/openapi.json`: the table of operations as an OpenAPI document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from virta import __version__
from virta.server.api.description.operations import COMMON, JSON, OPERATIONS
from virta.server.api.observe.operations import OBSERVING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from virta.server.api.description.operations import Answer, Operation, Parameter

Schema = dict[str, Any]


class Components:
    """Schemas of types; those of structs are collected under `schemas`, and referred to."""

    def __init__(self) -> None:
        self.schemas: dict[str, Schema] = {}

    def schema(self, kind: Any) -> Schema:
        (made,), found = msgspec.json.schema_components(
            [kind], ref_template="#/components/schemas/{name}"
        )
        self.schemas |= found
        return made

    def content(self, types: Mapping[str, Any]) -> Schema:
        """Return a body's schemas by content type; None is any body."""
        return {
            name: {} if kind is None else {"schema": self.schema(kind)}
            for name, kind in types.items()
        }


def openapi() -> Schema:
    """Return the whole document."""
    components = Components()
    paths: dict[str, Schema] = {}
    for operation in (*OPERATIONS, *OBSERVING):
        method, path = operation.route.split()
        paths.setdefault(path, {})[method.lower()] = _operation(operation, components)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Virta",
            "version": __version__,
            "description": "Publish once, and every live query receives it.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        # Relative to the document's own address: right for any name and port.
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": components.schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _operation(operation: Operation, components: Components) -> Schema:
    answers = (COMMON if operation.errors is None else operation.errors) | operation.answers
    made: Schema = {
        "operationId": operation.id,
        "responses": {str(s): _response(a, components) for s, a in sorted(answers.items())},
    }
    if operation.summary:
        made["summary"] = operation.summary
    if operation.public:
        made["security"] = [{}]
    if operation.parameters:
        made["parameters"] = [_parameter(one, components) for one in operation.parameters]
    if operation.body is not None:
        types = operation.body if isinstance(operation.body, dict) else {JSON: operation.body}
        made["requestBody"] = {
            "required": operation.body_required,
            "content": components.content(types),
        }
    return made


def _response(answer: Answer, components: Components) -> Schema:
    made: Schema = {"description": answer.text}
    if answer.content:
        made["content"] = components.content(answer.content)
    if answer.headers:
        made["headers"] = {
            name: {"schema": components.schema(kind), "description": text}
            for name, (kind, text) in answer.headers.items()
        }
    return made


def _parameter(parameter: Parameter, components: Components) -> Schema:
    return {
        "name": parameter.name,
        "in": parameter.place,
        "required": parameter.required or parameter.place == "path",
        "schema": components.schema(parameter.type),
        "description": parameter.text,
    }
