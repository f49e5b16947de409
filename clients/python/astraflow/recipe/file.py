"""Reading recipe folders: YAML with line numbers, files that extend others, `--set` overrides, prescriptive errors, and
the code bundle.

The result is a frozen `LoadedRecipe` whose `yaml_text` reproduces the validated recipe with all overrides
applied; that text is what the dataflow server stores and hands to nodes. Called by the launcher, by daemons
started alone, and by tests.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from astraflow._contract.rpcs import bounds_of
from astraflow.dataflow.v1 import run_pb2
from astraflow.errors import RecipeError
from astraflow.recipe import SCHEMA_VERSION, Recipe
from astraflow.recipe.algorithm import REPLACED_KEYS
from astraflow.recipe.document import Document, line_of, read_document
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow.recipe.section import kind_of
from astraflow.recipe.shipped import find_shipped, shipped_recipes

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = [
    "CodeFile",
    "LoadedRecipe",
    "bundle_digest",
    "load_recipe",
    "parse_recipe",
    "place_of",
    "read_code",
]

MAX_CODE_BYTES = 1024 * 1024
"""Of all files of a recipe's code together."""
MAX_CODE_FILES = 500
_MAX_ERRORS = 20
_EXTENDS = "extends"
MAX_EXTENDED = 8
"""Files that a recipe may extend, one through the other."""
_SAFE_PATH = re.compile(bounds_of(run_pb2.CodeFile, "path").pattern)


@dataclass(frozen=True)
class CodeFile:
    """One file of the recipe's own code: path relative to the folder, and its bytes."""

    path: str
    content: bytes


@dataclass(frozen=True)
class LoadedRecipe:
    """A validated recipe with the text that reproduces it and the folder's code."""

    recipe: Recipe
    yaml_text: str
    code: tuple[CodeFile, ...]
    file: Path | None
    """The YAML file; None for text."""
    document: Document
    """What the files and options say, and where."""

    @property
    def written(self) -> str:
        """What files and options say, as JSON: the same however it is spaced, ordered and commented."""
        return json.dumps(self.document.values, sort_keys=True, default=str)

    @property
    def own_text(self) -> tuple[str, str]:
        """The text that errors of plug-ins count lines in, and its name: the file, or where that extends another, what
        `astraflow recipe show` prints.
        """
        if self.file is None or self.document.num_texts > 1:
            return self.yaml_text, f"{self.file or 'recipe'}, resolved"
        return self.file.read_text(encoding="utf-8"), str(self.file)

    @property
    def folder(self) -> Path | None:
        """Where the file lies."""
        return self.file.parent if self.file is not None else None

    @property
    def code_sha256(self) -> bytes:
        """The digest that pins the code bundle; 32 bytes."""
        return bundle_digest(self.code)


def load_recipe(
    folder: Path, *, overrides: Sequence[str] = (), options: Mapping[str, str] = MappingProxyType({})
) -> LoadedRecipe:
    """Read and validate `folder/recipe.yaml` with `key.path=value` overrides applied.

    `folder` may also be the path of a YAML file, or the name of a recipe that comes with this release. `options` are
    those that stand for a key: errors name them, as they name `--set` for the others. The code is that beside the file,
    or, where no recipe.py is, beside the first of those it extends that has one.

    Raises RecipeError naming file and line, or option, nearest key and remedy.
    """
    path = _recipe_path(folder)
    document = Document()
    layers = _extended(path)
    for layer, text in reversed(layers):
        document.lay(text, source=str(layer))
    document.values.pop(_EXTENDS, None)
    recipe = _validated(document, overrides=overrides, options=options)
    code = next(filter(None, (read_code(layer.parent) for layer, _ in layers)), ())
    return LoadedRecipe(recipe, _dump(recipe), code, path, document)


def parse_recipe(
    text: str,
    *,
    source: str = "recipe",
    overrides: Sequence[str] = (),
    options: Mapping[str, str] = MappingProxyType({}),
) -> LoadedRecipe:
    """Validate recipe text (no code bundle). Raises RecipeError."""
    document, given = Document(), _parse_yaml(text, source)
    if _EXTENDS in given:
        raise RecipeError(
            f"{source}:{line_of(given, _EXTENDS)}: `{_EXTENDS}` names a file beside this one, and this text is in "
            "none; resolve it first: astraflow recipe show FILE"
        )
    document.lay(given, source=source)
    recipe = _validated(document, overrides=overrides, options=options)
    return LoadedRecipe(recipe, _dump(recipe), (), None, document)


def place_of(plugin: PluginSettings, text: str, *, source: str, keys: Sequence[str | int] = ()) -> str:
    """Return `source:line: key.path` of a plug-in in recipe text, or of `keys` within its settings.

    Two equal plug-ins have one place, the first. Without one in `text`, only `source` is known.
    """
    document, given = Document(), read_document(text, source=source)
    document.lay(given if isinstance(given, Mapping) else {}, source=source)
    for path, node in _nodes(document.values, ()):
        if _is_plugin(node, plugin):
            location = [*path, "with", *keys] if keys else path
            return f"{document.place(location)}: {'.'.join(map(str, location))}"
    return source


def bundle_digest(files: Iterable[CodeFile]) -> bytes:
    """sha256 over `path NUL length NUL content` of every file in ascending path order; 32 bytes."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.path):
        digest.update(file.path.encode() + b"\0" + str(len(file.content)).encode() + b"\0" + file.content)
    return digest.digest()


def _recipe_path(given: Path) -> Path:
    path = given if given.suffix in {".yaml", ".yml"} else given / "recipe.yaml"
    if path.is_file():
        return path
    if len(path.parts) == 2 and (shipped := find_shipped(path.parts[0])) and (shipped / path.name).is_file():
        return shipped / path.name
    raise RecipeError(
        f"no recipe at {path}: give a folder that holds recipe.yaml, the path of a YAML file, or the name of a recipe "
        f"of this release ({', '.join(shipped_recipes()) or 'none is installed'})"
    )


def read_code(folder: Path) -> tuple[CodeFile, ...]:
    """recipe.py and the files beside and below it, by path; nothing without a recipe.py.

    Hidden files, `__pycache__`, YAML files and READMEs beside recipe.py do not travel. Raises RecipeError naming the
    file with which they are more than may travel with a run.
    """
    if not (folder / "recipe.py").is_file():
        return ()
    files: list[CodeFile] = []
    size = 0
    for path in _travelling(folder):
        name = path.relative_to(folder).as_posix()
        size += path.stat().st_size  # before it is read: it may be anything
        if size > MAX_CODE_BYTES or len(files) == MAX_CODE_FILES:
            raise RecipeError(
                f"{path}: with this file of {path.stat().st_size:,} bytes the recipe has {len(files) + 1} files of "
                f"{size:,} bytes to send with the run; the limits are {MAX_CODE_FILES} files and {MAX_CODE_BYTES:,} "
                "bytes. Keep large data where every machine reads it; a file with a leading dot is left out"
            )
        if not _SAFE_PATH.fullmatch(name):
            raise RecipeError(
                f"{path}: its name cannot travel with the run; use letters, digits, space and `_.-` only"
            )
        files.append(CodeFile(name, path.read_bytes()))
    return tuple(files)


def _travelling(folder: Path) -> Iterator[Path]:
    """Python files first, so that what breaks the bound is rather data."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        paths = [Path(parent, name) for name in names if not name.startswith(".")]
        found += [path for path in paths if path.parent != folder or not _stays(path)]
    yield from sorted(found, key=lambda path: (path.suffix != ".py", path))


def _stays(path: Path) -> bool:
    return path.suffix in {".yaml", ".yml"} or path.stem == "README"


def _parse_yaml(text: str, source: str) -> Any:  # noqa: ANN401 - a YAML document has no static type
    document = read_document(text, source=source)
    if not isinstance(document, Mapping):
        raise RecipeError(
            f"{source}:1: a recipe is a mapping with the sections {', '.join(Recipe.model_fields)}"
        )
    return document


def _extended(path: Path) -> list[tuple[Path, Mapping[str, Any]]]:
    """The file and those that it extends, each with its text, the file itself first."""
    found: list[tuple[Path, Mapping[str, Any]]] = []
    while True:
        text = _parse_yaml(path.read_text(encoding="utf-8"), str(path))
        found.append((path, text))
        if (base := text.get(_EXTENDS)) is None:
            return found
        place = f"{path}:{line_of(text, _EXTENDS)}: {_EXTENDS}"
        if not isinstance(base, str):
            raise RecipeError(f"{place}: {base!r} is not the path of one file; write for example recipe.yaml")
        following = Path(os.path.normpath(path.parent / base))
        if not following.is_file():
            raise RecipeError(f"{place}: there is no file {following}; give its path from this file's folder")
        circle = [layer for layer, _ in found if layer.samefile(following)]
        if circle or len(found) > MAX_EXTENDED:
            names = " → ".join(str(layer) for layer in (*(layer for layer, _ in found), following))
            problem = "leads in a circle" if circle else f"goes through more than {MAX_EXTENDED} files"
            raise RecipeError(f"{place} {problem}: {names}")
        path = following


def _validated(document: Document, *, overrides: Sequence[str], options: Mapping[str, str]) -> Recipe:
    for override in overrides:
        key, _, value = override.partition("=")
        option = f"{options[key]} {value}" if key in options else f"--set {override}"
        _override(document, override, option=option)
    try:
        return Recipe.model_validate(document.values)
    except ValidationError as error:
        shown = [_describe(detail, document) for detail in error.errors()[:_MAX_ERRORS]]
        more = [f"… and {left} more"] if (left := error.error_count() - len(shown)) else []
        raise RecipeError("\n".join([*shown, *more])) from error


def _override(document: Document, override: str, *, option: str) -> None:
    path, separator, value = override.partition("=")
    if not separator or not path:
        raise RecipeError(f"{option}: not of the form key.path=value, for example run.steps=20")
    try:
        parsed = YAML(typ="safe").load(value)
    except YAMLError as error:
        raise RecipeError(f"{option}: not valid YAML; quote text that YAML would read otherwise") from error
    document.set(path.split("."), parsed, option=option)


def _where(location: Sequence[str | int], document: Document) -> str:
    """The option that brought the key, or file and line; with the options that changed what lies below it."""
    keys = tuple(map(str, location))
    name, place = ".".join(keys) or "recipe", document.place(keys)
    if place in document.options.values():
        return f"{place}: {name}"
    below = [option for path, option in document.options.items() if path[: len(keys)] == keys]
    with_options = f" (with {' '.join(below)})" if below else ""
    return f"{place}: {name}{with_options}"


def _describe(detail: ErrorDetails, document: Document) -> str:
    location, tagged = _location(detail, document.values)
    message = detail["msg"].removeprefix("Value error, ")
    if not location:
        location, message = _named_place(message)
    where = _where(location, document)
    if detail["type"] == "extra_forbidden":
        return f"{where}: unknown key; {_about_unknown(location, tagged)}"
    if detail["type"] == "missing":
        return f"{where}: this key is required"
    if location == ["schema_version"]:
        return (
            f"{where}: the recipe has schema version {detail['input']!r}, this release reads {SCHEMA_VERSION}; use the "
            "release it was written for"
        )
    got = "" if isinstance(detail["input"], Mapping | list) else f" (got {detail['input']!r})"
    return f"{where}: {message}{got}"


def _named_place(message: str) -> tuple[list[str | int], str]:
    """Return the key that a message about the whole recipe begins with, as in `roles.critic: …`, and what follows."""
    path, separator, rest = message.partition(": ")
    keys: list[str | int] = [*path.split(".")]
    return (keys, rest) if separator and keys[0] in Recipe.model_fields else ([], message)


def _location(detail: ErrorDetails, document: Any) -> tuple[list[str | int], list[str | int]]:  # noqa: ANN401
    """Return where the document has the error, and the same with the kinds that pydantic names in between."""
    location: list[str | int] = []
    tagged = [part for part in detail["loc"] if not str(part).startswith("function-")]
    node: Any = document
    for position, part in enumerate(tagged):
        is_last_missing = detail["type"] == "missing" and position == len(tagged) - 1
        is_absent = isinstance(node, str) or (isinstance(node, Mapping) and part not in node)
        if is_absent and not is_last_missing:
            continue  # the kind of a union's member
        location.append(part)
        is_inner = isinstance(node, Mapping | list) and not is_last_missing
        node = node[part] if is_inner else None
    return location, tagged


def _about_unknown(location: Sequence[str | int], tagged: Sequence[str | int]) -> str:
    name, known = str(location[-1]), _known_keys(tagged[:-1])
    if "algorithm" in location and name in REPLACED_KEYS:
        return REPLACED_KEYS[name]
    if location[0] == "policies" and name in _known_keys(location[2:-1]):
        return f"it holds for all policies; set it in `{'.'.join(map(str, location[2:-1]))}`"
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean `{near[0]}`?" if near else f"known keys: {', '.join(known)}"


def _known_keys(location: Sequence[str | int]) -> list[str]:
    annotation: Any = Recipe
    for part in location:
        annotation = _descend(annotation, part)
    if not _is_section(annotation):
        return []
    return [field.alias or name for name, field in annotation.model_fields.items()]


def _descend(annotation: Any, part: str | int) -> Any:  # noqa: ANN401 - walks typing constructs
    """Return what the schema expects at key `part` below `annotation`, or None."""
    if _is_section(annotation):
        field = annotation.model_fields.get(str(part))
        return None if field is None else _without_none(field.annotation)
    options: tuple[Any, ...] = getattr(annotation, "__args__", ())
    if getattr(annotation, "__origin__", None) in (dict, tuple):
        return options[isinstance(part, str)]
    return next((option for option in options if kind_of(option) == part), None)


def _without_none(annotation: Any) -> Any:  # noqa: ANN401
    if getattr(annotation, "__origin__", None) in (dict, tuple):
        return annotation
    # A union that is told apart by kind is inside an `Annotated` where it may be left out.
    options = [getattr(option, "__origin__", option) for option in getattr(annotation, "__args__", ())]
    found = [option for option in options if _is_section(option) or hasattr(option, "__args__")]
    return found[0] if len(found) == 1 else annotation


def _is_section(annotation: Any) -> bool:  # noqa: ANN401
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _nodes(node: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:  # noqa: ANN401
    yield path, node
    inner = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for key, value in inner:
        yield from _nodes(value, (*path, key))


def _is_plugin(node: Any, plugin: PluginSettings) -> bool:  # noqa: ANN401
    if isinstance(node, Mapping):
        return node.get("use") == plugin.use and (node.get("with") or {}) == plugin.settings
    return not plugin.settings and bool(node == plugin.use)


def _dump(recipe: Recipe) -> str:
    stream = io.StringIO()
    yaml = YAML(typ="safe")
    yaml.default_flow_style = False
    # Through JSON so that tuples become lists and only plain YAML types remain.
    yaml.dump(json.loads(recipe.model_dump_json(exclude_none=True)), stream)
    return stream.getvalue()
