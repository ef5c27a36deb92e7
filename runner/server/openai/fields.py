"""What requests are made of: strict fields, fields that may be null, and fields that are taken at one value only.

A field that OpenAI documents and this server does not offer is accepted only at values that change nothing
(`best_of=1`). A field that is null counts as absent.
"""

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    model_validator,
)

TOKEN_ID_FORMAT, MODEL_NAME_FORMAT = "token-id", "model-name"
"""Formats in the JSON schemas, whose limits only a server of one model knows."""


class Strict(BaseModel):
    """Fields are taken as they are or refused, and no other fields are taken."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class NotOfferedError(ValueError):
    """A value of a field that is taken only where it changes nothing."""


class Only:
    """A field that OpenAI documents and this server does not offer: null and `values` change nothing, and are taken."""

    def __init__(self, *values: Any) -> None:
        self._values = values

    def _check(self, value: Any) -> Any:
        # 1, 1.0 and true are equal in Python.
        if not any(type(value) is type(allowed) and value == allowed for allowed in self._values):
            raise NotOfferedError("is not offered by this server; leave it out")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return PlainValidator(self._check).__get_pydantic_core_schema__(source, handler)

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [*self._values]} if self._values else {"type": "null"}


ServedModel = Annotated[str, Field(json_schema_extra={"format": MODEL_NAME_FORMAT})]
"""The model's name, of which there is one."""
TokenId = Annotated[int, Field(json_schema_extra={"format": TOKEN_ID_FORMAT})]
Text = Annotated[str, Field(min_length=1)]
Schema = dict[str, Any]


def _without_nulls(given: Any) -> Any:
    """A field that is null counts as absent."""
    return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


def _nullable(schema: dict[str, Any]) -> None:
    """Says in a JSON schema what `Lenient` does."""
    for name in set(schema["properties"]) - set(schema.get("required", ())):
        described = schema["properties"][name]
        if not any(branch.get("type") == "null" for branch in (described, *described.get("anyOf", ()))):
            schema["properties"][name] = {"anyOf": [described, {"type": "null"}]}


class Lenient(Strict):
    """An object whose fields clients may write as null where they mean nothing by them, unknown ones too."""

    model_config = ConfigDict(json_schema_extra=_nullable)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        return _without_nulls(given)
