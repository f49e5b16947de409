"""What every section of a recipe is, and unions of sections that are told apart by `kind`.

Invariant: a section is frozen and takes no key it does not know. A union marked `BY_KIND` takes a bare name for
`{kind: name}`, which means the defaults of that class; a member without a `kind` is a plug-in, `module:Name` or
`{use: module:Name, with: {...}}`. Used by `recipe` and `algorithm`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaValue

__all__ = ["BY_KIND", "Kind", "Section", "kind_of", "merged"]

SectionT = TypeVar("SectionT", bound="Section")


class Section(BaseModel):
    """A mapping of a recipe."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, ser_json_inf_nan="constants"
    )


class Kind(Section):
    """A section that is given as a whole: one member of a union, which its field `kind` names, or a plug-in."""


_PLUGIN = "plugin"


class _ByKind:
    """Lets a name stand for the member of that name, and names the nearest one for a name that is unknown."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:  # noqa: ANN401
        members = {str(kind_of(member)): handler.generate_schema(member) for member in get_args(source)}
        union = core_schema.tagged_union_schema(members, discriminator=_kind_in)
        return core_schema.no_info_before_validator_function(
            lambda value: _mapping(value, kinds=list(members)), union, metadata={"kinds": list(members)}
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        union = handler(schema)
        names = [kind for kind in schema["metadata"]["kinds"] if kind != _PLUGIN]
        return {"anyOf": [{"enum": names}, *union["oneOf"]]}


BY_KIND = _ByKind()


def kind_of(member: Any) -> str | None:  # noqa: ANN401 - any annotation
    """Return the kind of a union's member, None for anything else."""
    if not (isinstance(member, type) and issubclass(member, Kind)):
        return None
    return str(member.model_fields["kind"].default) if "kind" in member.model_fields else _PLUGIN


def merged(base: Section, over: SectionT) -> SectionT:
    """Return what `over` was given, and the rest from `base`: sections key by key, all else as a whole.

    `base` has every field of `over`.
    """
    values: dict[str, Any] = {}
    for name in type(over).model_fields:
        own, value = getattr(base, name), getattr(over, name)
        if name not in over.model_fields_set:
            values[name] = own
        elif isinstance(value, Section) and isinstance(own, type(value)) and not isinstance(value, Kind):
            values[name] = merged(own, value)
        else:
            values[name] = value
    return type(over).model_validate(values)


def _mapping(value: Any, *, kinds: list[str]) -> Any:  # noqa: ANN401 - what a YAML document holds
    if isinstance(value, str) and ":" not in value:
        value = {"kind": value}
    kind = _kind_in(value)
    if kind not in kinds:
        known = [name for name in kinds if name != _PLUGIN]
        near = difflib.get_close_matches(kind, known, n=1) if kind else []
        hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(known)}"
        what = f"unknown kind {kind!r}" if kind else "give a name, or a mapping with `kind`"
        raise ValueError(f"{what}; {hint}")
    return value


def _kind_in(value: Any) -> str | None:  # noqa: ANN401
    if isinstance(value, Kind):
        return kind_of(type(value))
    if isinstance(value, str) or (isinstance(value, Mapping) and "use" in value):
        return _PLUGIN
    return str(value["kind"]) if isinstance(value, Mapping) and "kind" in value else None
