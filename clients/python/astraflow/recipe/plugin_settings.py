"""How a recipe names a plug-in: `module:Name`, or `{use: module:Name, with: {...}}` where it takes settings.

Invariant: both forms are one frozen value, written back in the shortest form. What stands under `with` is checked by
the daemon that makes the plug-in (`astraflow_kit.plugins`). Used by `recipe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    Field,
    GetJsonSchemaHandler,
    JsonValue,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

from astraflow.recipe.section import Kind

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

__all__ = ["DataPluginSettings", "PluginSettings"]


class PluginSettings(Kind):
    """A plug-in: `module.path:Name`, or `{use: module.path:Name, with: {...}}` where it takes settings."""

    use: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    """The class, function or object; the module `recipe` is the recipe folder's own recipe.py."""
    settings: Annotated[dict[str, JsonValue], WithJsonSchema({"type": "object"})] = Field(
        default_factory=dict, alias="with"
    )
    """Its settings, checked against its signature when a daemon loads it."""

    @model_validator(mode="before")
    @classmethod
    def _either_form(cls, given: object) -> object:
        if isinstance(given, str):
            return {"use": given}
        if not isinstance(given, Mapping | PluginSettings):
            raise ValueError("write `module.path:Name`, or `{use: module.path:Name, with: {...}}`")
        return given

    @model_serializer
    def _shortest_form(self) -> object:
        return {"use": self.use, "with": self.settings} if self.settings else self.use

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core_schema))
        # One schema for both forms: `pattern` is for text, the rest for the mapping.
        schema |= {"type": ["string", "object"], "pattern": schema["properties"]["use"]["pattern"]}
        return schema


class DataPluginSettings(PluginSettings):
    """A plug-in of the data path, which may be a shadow: `{use: module.path:Name, with: {...}, shadow: true}`."""

    shadow: bool = False
    """It is asked, and what it decides is counted beside what happens, but nobody obeys it."""

    @model_serializer
    def _shortest_form(self) -> object:
        settings = {"with": self.settings} if self.settings else {}
        return {"use": self.use, **settings, "shadow": True} if self.shadow else super()._shortest_form()
