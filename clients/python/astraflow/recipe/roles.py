"""Roles: which policy plays which part in the workflow.

Invariant: after `resolve_roles` every role has a policy of the recipe, every policy has a role, and every policy that
is trained has a role that is; so a daemon never asks for a policy that nobody gave, nor waits for groups that nobody
makes. A workflow may declare the roles it plays (`roles`); `workflow_roles` holds that against the recipe. Used by
`settings`, by nodes and by `astraflow recipe check`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, GetJsonSchemaHandler, model_serializer, model_validator

from astraflow.recipe.advantage import AnyAdvantage
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow.recipe.section import BY_KIND, Section

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

__all__ = [
    "PolicyName",
    "ResolvedRole",
    "RoleName",
    "RoleSettings",
    "declared_roles",
    "require_policy",
    "resolve_roles",
    "workflow_roles",
]

_NAME = r"^[a-z0-9][a-z0-9_-]{0,63}$"
PolicyName = Annotated[str, Field(pattern=_NAME)]
RoleName = Annotated[str, Field(pattern=_NAME)]


class RoleSettings(Section):
    """Who plays a role: the name of a policy, or `{policy: NAME, …}` where more is to be said."""

    policy: PolicyName
    """The policy."""
    train: bool = True
    """Whether the policy is trained on what it does in this role; false where the workflow only asks it."""
    advantage: Annotated[AnyAdvantage | PluginSettings, BY_KIND] | None = None
    """Instead of the policy's `trainer.algorithm.advantage`."""

    @model_validator(mode="before")
    @classmethod
    def _either_form(cls, given: object) -> object:
        return {"policy": given} if isinstance(given, str) else given

    @model_serializer
    def _shortest_form(self) -> object:
        more: dict[str, object] = {} if self.train else {"train": False}
        if self.advantage is not None:
            more["advantage"] = self.advantage
        return {"policy": self.policy, **more} if more else self.policy

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core_schema))
        # One schema for both forms: `pattern` is for text, the rest for the mapping.
        schema |= {"type": ["string", "object"], "pattern": _NAME}
        return schema


@dataclass(frozen=True)
class ResolvedRole:
    """One role of a run."""

    name: str
    policy_id: str
    is_trained: bool
    """Whether its trajectories are trained on."""


def resolve_roles(
    roles: Mapping[str, RoleSettings], *, trained: Mapping[str, bool], unasked: Collection[str] = ()
) -> Mapping[str, ResolvedRole]:
    """Return the roles of a recipe; `trained` says of each of its policies whether it is trained, and `unasked` are
    those that need no role.

    Raises ValueError, naming the role or policy, its nearest name and the remedy.
    """
    given = roles or {
        policy_id: RoleSettings(policy=policy_id) for policy_id in trained if policy_id not in unasked
    }
    for name, role in given.items():
        require_policy(role.policy, trained, place=f"roles.{name}")
    resolved = {
        name: ResolvedRole(name, role.policy, role.train and trained[role.policy])
        for name, role in given.items()
    }
    for name, role in given.items():
        if role.advantage is not None and not resolved[name].is_trained:
            raise ValueError(
                f"roles.{name} has an advantage and is not trained; take `advantage` from it, or train it"
            )
    for policy_id, is_trained in trained.items():
        own = [role for role in resolved.values() if role.policy_id == policy_id]
        if not own and policy_id in unasked:
            continue
        if not own:
            raise ValueError(
                f"no role is played by policy {policy_id!r}; name it in `roles`, or take it out of `policies`"
            )
        if is_trained and not any(role.is_trained for role in own):
            raise ValueError(
                f"policy {policy_id!r} is trained, but none of its roles is; take `train: false` from one of "
                f"{', '.join(role.name for role in own)}, or set policies.{policy_id}.train to false"
            )
    return resolved


def require_policy(name: str, known: Collection[str], *, place: str, kind: str = "policy") -> None:
    """Raise ValueError with the nearest name unless a recipe has the policy, or role, that `place` names."""
    if name not in known:
        raise ValueError(f"{place}: there is no {kind} {name!r}; {_near(name, known)}")


def declared_roles(workflow: object, reward: object) -> Any:  # noqa: ANN401 - what a plug-in wrote
    """What a workflow declares, None when it declares nothing, with the roles that its reward asks."""
    declared, asked = getattr(workflow, "roles", None), getattr(reward, "roles", ())
    return declared if declared is None or isinstance(declared, str | property) else (*declared, *asked)


def workflow_roles(
    declared: Iterable[str] | None, *, roles: Mapping[str, ResolvedRole], are_given: bool
) -> Mapping[str, ResolvedRole]:
    """Return the run's roles by the names that the workflow uses.

    `declared` are the workflow's `roles`, None when it declares none; `are_given` tells whether the recipe has a
    section `roles`. Without one, the only policy plays the only role whatever its name. Raises ValueError for a role
    that one side has and the other has not.
    """
    if declared is None:
        return roles
    if isinstance(declared, str):
        raise ValueError(f"`roles` is the text {declared!r}, not a sequence of names; write ({declared!r},)")
    names = tuple(dict.fromkeys(declared))
    if len(roles) == len(names) == 1 and not are_given:
        return dict(zip(names, roles.values(), strict=True))
    missing = [name for name in names if name not in roles]
    unknown = [name for name in roles if name not in names]
    if missing:
        plays = "; ".join(f"{name!r}: {_near(name, unknown or roles)}" for name in missing)
        example = next(iter(roles.values())).policy_id
        section = ", ".join(
            f"{name}: {roles[name].policy_id if name in roles else example}" for name in names
        )
        raise ValueError(
            f"the workflow plays roles that the recipe gives to no policy ({plays}); write for example "
            f"`roles: {{{section}}}`"
        )
    if unknown:
        plays = "; ".join(f"{name!r}: {_near(name, names)}" for name in unknown)
        raise ValueError(f"the recipe names roles that the workflow does not play ({plays}); take them out")
    return roles


def _near(name: str, known: Collection[str]) -> str:
    close = get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
