"""Turn pydantic's JSON schema into a structural schema that the API server accepts unchanged.

The API server rejects references, unions with null and types inside `anyOf`. It drops `const` and `examples` with only
a warning header. This converter raises an error for each construct that it cannot translate, so nothing is lost
silently.
"""

from typing import Any

KEPT = (
    "type",
    "format",
    "description",
    "default",
    "enum",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "maxProperties",
    "x-kubernetes-validations",
    "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
)
TRANSLATED = ("$ref", "$defs", "title", "anyOf", "properties", "required", "items", "additionalProperties")


class NotStructuralError(ValueError):
    """A model uses a construct without an exact structural schema, or lacks a bound."""


def to_structural(schema: dict[str, Any], *, written_by_users: bool = True) -> dict[str, Any]:
    """Return the structural schema of a model.

    Args:
        schema: result of `model_json_schema(by_alias=True)`.
        written_by_users: if true, integers must have both bounds, and defaults are kept. In a status, a default would
            state something that was never observed.

    Raises:
        NotStructuralError: the message has the path of the construct.
    """
    return _Converter(schema.get("$defs", {}), written_by_users).convert(schema, "")


class _Converter:
    def __init__(self, definitions: dict[str, Any], written_by_users: bool) -> None:
        self._definitions = definitions
        self._written_by_users = written_by_users

    def convert(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        node = self._resolve(node, path)
        unknown = [key for key in node if key not in KEPT and key not in TRANSLATED]
        if unknown:
            raise NotStructuralError(f"{path or '.'}: {', '.join(unknown)} cannot be expressed in a structural schema")
        result = {key: node[key] for key in KEPT if key in node}
        if result.get("default", ...) is None or not self._written_by_users:
            result.pop("default", None)
        if "properties" in node:
            result["properties"] = {
                name: self._property(name, child, path) for name, child in node["properties"].items()
            }
            required = node.get("required", [])
            if required:
                result["required"] = sorted(required)
        if isinstance(node.get("additionalProperties"), dict):
            result["additionalProperties"] = self.convert(node["additionalProperties"], f"{path}[]")
        if "items" in node:
            result["items"] = self.convert(node["items"], f"{path}[]")
        self._check(result, path)
        return result

    def _property(self, name: str, child: dict[str, Any], path: str) -> dict[str, Any]:
        result = self.convert(child, f"{path}.{name}")
        # The API server fills in defaults of an absent object only if the object itself has a default.
        if "default" not in result and _fills_itself(result):
            result["default"] = {}
        return result

    def _resolve(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        """Inline a reference, and drop null from `T | None`, which "not required" already covers.

        Keys beside the reference take precedence.
        """
        if "$ref" in node:
            target = self._definitions[node["$ref"].removeprefix("#/$defs/")]
            beside = {key: value for key, value in node.items() if key != "$ref"}
            return self._resolve({**target, **beside}, path)
        if "anyOf" in node:
            members = [member for member in node["anyOf"] if member.get("type") != "null"]
            if len(members) != 1:
                raise NotStructuralError(f"{path}: a union of several types has no structural schema")
            beside = {key: value for key, value in node.items() if key != "anyOf"}
            return self._resolve({**members[0], **beside}, path)
        return node

    def _check(self, node: dict[str, Any], path: str) -> None:
        kind = node.get("type")
        missing: list[str] = []
        if kind is None:
            missing.append("type")
        elif kind == "string" and "enum" not in node and node.get("format") != "date-time":
            missing += [key for key in ("maxLength",) if key not in node]
        elif kind == "array":
            missing += [key for key in ("maxItems", "items") if key not in node]
        elif kind == "integer" and self._written_by_users:
            missing += [key for key in ("minimum", "maximum") if key not in node]
        elif kind == "object" and "additionalProperties" in node:
            missing += [key for key in ("maxProperties",) if key not in node]
        elif kind == "object" and "properties" not in node and "x-kubernetes-preserve-unknown-fields" not in node:
            missing.append("properties")
        if path and "[]" not in path and "description" not in node:
            missing.append("description")
        if missing:
            raise NotStructuralError(f"{path or '.'}: lacks {', '.join(missing)}")


def _fills_itself(node: dict[str, Any]) -> bool:
    return "required" not in node and any("default" in child for child in node.get("properties", {}).values())
