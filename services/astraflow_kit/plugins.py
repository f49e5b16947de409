"""Loading and making the plug-ins that a recipe names.

Invariant: what `make` returns has every member of its Protocol with a compatible signature and has settings that fit
its own, so a wrong plug-in stops a daemon at start and not in the middle of a run. `recipe:Name` means the
`recipe.py` beside the recipe; it is executed once per content. Daemons make every plug-in when they read their recipe.
"""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NotRequired, TypeVar, cast, get_type_hints

from pydantic import BaseModel, PydanticUserError, TypeAdapter, ValidationError
from typing_extensions import TypedDict, get_protocol_members

from astraflow.errors import PluginError
from astraflow.recipe.file import place_of
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_kit.nearest import did_you_mean

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

RAISED = (Exception, SystemExit)
"""What is caught of a plug-in: one that calls `exit` must not end a daemon either."""
RECIPE_MODULE = "recipe"
_MAX_MESSAGE = 500
LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
"""Folders of code that is nobody's mistake here."""

P = TypeVar("P")
_BUSY: dict[int, str] = {}
"""What of a recipe each thread imports or makes."""


@dataclass(frozen=True, kw_only=True)
class RecipeSource:
    """The recipe that names plug-ins, as a daemon has it."""

    name: str = "recipe"
    """What errors call the text: a file, or whose recipe it is."""
    text: str = ""
    """The YAML."""
    folder: Path | None = None
    """Where its recipe.py lies; None when it has none, or when this daemon may not run it."""


def make(plugin: PluginSettings, *, protocol: type[P], source: RecipeSource, **offered: object) -> P:
    """Return the plug-in with its settings. Raises PluginError with the place in the recipe and the remedy.

    A class is called with its settings and with those of the `offered` values that its constructor names. A function
    gets its settings as keywords at every call.
    """
    found, settings = resolve(plugin, protocol=protocol, source=source, offered=offered)
    if not isinstance(found, type):
        function = cast("Callable[..., object]", found)
        return cast("P", partial(function, **settings) if settings else found)
    parameters, takes_any = _parameters(found, protocol=protocol)
    taken = {name: value for name, value in offered.items() if takes_any or name in parameters}
    try:
        with _busy(f"{plugin.use}: its constructor"):
            return cast("P", found(**settings, **taken))
    except RAISED as error:  # the plug-in's own constructor may raise anything
        given = ", ".join(f"{name}=…" for name in (*settings, *taken))
        place = place_of(plugin, source.text, source=source.name)
        raise PluginError(
            f"{place}: plug-in {plugin.use!r} cannot be made with {found.__name__}({given}): {describe(error)}"
        ) from error


def resolve(
    plugin: PluginSettings, *, protocol: type, source: RecipeSource, offered: Collection[str] = ()
) -> tuple[object, dict[str, Any]]:
    """Find the plug-in and check its settings without making it; return it with the checked settings.

    Settings are checked against the annotations of the constructor, or of a function's keyword-only parameters; a
    parameter `settings` annotated with a pydantic model stands for all of them. `offered` names what the daemon
    gives, and the recipe may not. Raises PluginError.
    """
    place = partial(place_of, plugin, source.text, source=source.name)
    try:
        found = load(plugin.use, protocol=protocol, recipe_dir=source.folder)
        parameters, takes_any = _parameters(found, protocol=protocol)
        own = {name: parameter for name, parameter in parameters.items() if name not in offered}
        kind = _settings_type(found, own)
        adapter = TypeAdapter[Any](kind)
    except PluginError as error:
        raise PluginError(f"{place()}: {error.message}") from error
    except (NameError, PydanticUserError) as error:
        raise PluginError(
            f"{place()}: plug-in {plugin.use!r}: the annotations of its settings cannot be used: {error}; "
            "import at run time what they name, and use types that YAML can hold"
        ) from error
    is_model = issubclass(kind, BaseModel)
    known = [field.alias or name for name, field in kind.model_fields.items()] if is_model else list(own)
    takes_any = kind.model_config.get("extra") == "allow" if is_model else takes_any
    try:
        values = adapter.validate_python(plugin.settings, extra="allow" if takes_any else "forbid")
    except ValidationError as error:
        problems = [_problem(detail, known=known) for detail in error.errors()]
        lines = (f"{place(keys=keys)}: plug-in {plugin.use!r} {text}" for keys, text in problems)
        raise PluginError("\n".join(lines)) from error
    return found, {"settings": values} if is_model else values


def made_in(thread: int | None) -> str:
    """`NAME: its import` or `NAME: its constructor` of the plug-in that a thread is making now; empty for none."""
    return _BUSY.get(thread or 0, "")


@contextmanager
def _busy(doing: str) -> Iterator[None]:
    thread = threading.get_ident()
    before, _BUSY[thread] = _BUSY.get(thread, ""), doing
    try:
        yield
    finally:
        _BUSY[thread] = before
        if not before:
            del _BUSY[thread]


def describe(error: BaseException) -> str:
    """`Type: message (file:line in function)`: the last line of the traceback that is not a library's.

    A long message is cut, so that the place stays within what reports carry.
    """
    message = str(error)
    text = (
        f"{type(error).__name__}: {message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + '…'}"
    )
    if isinstance(error, SyntaxError):  # its message has the place
        return text
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    for frame in (own or frames)[-1:]:
        return f"{text} ({Path(frame.filename).name}:{frame.lineno} in {frame.name})"
    return text


def place_of_code(found: object) -> str:
    """`file:line in function` of a function, or of what calling an object runs; empty for one without Python code."""
    function = found.func if isinstance(found, partial) else found
    function = function if inspect.isroutine(function) else type(function).__call__
    code = getattr(inspect.unwrap(function), "__code__", None)
    return (
        f"{Path(code.co_filename).name}:{code.co_firstlineno} in {code.co_name}" if code is not None else ""
    )


def _parameters(found: object, *, protocol: type) -> tuple[dict[str, inspect.Parameter], bool]:
    """What a recipe or a daemon may give by name, and whether it takes any name."""
    if not isinstance(found, type) and not inspect.isroutine(found):
        return {}, False
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except ValueError:  # a class made in C without a constructor of its own
        return {}, False
    if not isinstance(found, type):
        wanted = _class_member(protocol, "__call__")
        called_with = _signature(wanted, drop_self=True).parameters if wanted else {}
        parameters = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in called_with]
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _settings_type(found: object, parameters: Mapping[str, inspect.Parameter]) -> type[Any]:
    """The model of the parameter `settings`, or a mapping with the annotations of all parameters."""
    function = getattr(found, "__init__") if isinstance(found, type) else found  # noqa: B009 - mypy refuses the attribute
    names = getattr(inspect.unwrap(cast("Callable[..., object]", function)), "__globals__", {})
    written = {n: Any if p.annotation is p.empty else p.annotation for n, p in parameters.items()}
    types: dict[str, Any] = get_type_hints(
        SimpleNamespace(__annotations__=written), names, include_extras=True
    )
    model = types.get("settings")
    if isinstance(model, type) and issubclass(model, BaseModel):
        return model
    types |= {n: NotRequired[types[n]] for n, p in parameters.items() if p.default is not p.empty}
    return cast("type[Any]", cast("Any", TypedDict)("Settings", types))


def _problem(detail: "ErrorDetails", *, known: Collection[str]) -> tuple[Sequence[str | int], str]:
    """Keys within the settings, and what is wrong there."""
    *outer, name = detail["loc"]
    if detail["type"] == "missing":
        return outer, f"needs the setting {name!r}; add it under `with`"
    if detail["type"] == "extra_forbidden":
        hint = "" if outer else f". {did_you_mean(str(name), known)}" if known else "; it takes none"
        return detail["loc"], f"has no setting {name!r}{hint}"
    return detail["loc"], f"refuses {detail['input']!r}: {detail['msg']}"


def load(spec: str, *, protocol: type, recipe_dir: Path | None = None) -> object:
    """Return the class, function or object that `spec` names, checked against `protocol`.

    A class is checked as its instances will be. Raises PluginError with the remedy.
    """
    module_name, _, name = spec.partition(":")
    if not module_name or not name.isidentifier():
        raise PluginError(f"plug-in {spec!r} is not `module.path:Name`; write for example `recipe:MyReward`")
    module = _import(module_name, spec=spec, recipe_dir=recipe_dir)
    if not hasattr(module, name):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise PluginError(f"plug-in {spec!r}: {module_name!r} has no {name!r}. {did_you_mean(name, public)}")
    found: object = getattr(module, name)
    complaint = mismatch(found, protocol=protocol)
    if complaint:
        raise PluginError(f"plug-in {spec!r} is not a {protocol.__name__}: {complaint}")
    return found


def mismatch(found: object, *, protocol: type) -> str | None:
    """Why `found` does not satisfy `protocol`, naming the member and the remedy; None when it does."""
    for member in sorted(get_protocol_members(protocol)):
        wanted = _class_member(protocol, member)
        is_method = inspect.isfunction(wanted)
        complaint = _method_mismatch(found, member, wanted=wanted) if is_method else _lacks(found, member)
        if complaint:
            return complaint
    return None


def _class_member(owner: type, member: str) -> object | None:
    """What the class body of `owner` or its bases defines; not what its metaclass does."""
    return next((vars(base)[member] for base in owner.__mro__ if member in vars(base)), None)


def _lacks(found: object, member: str) -> str | None:
    bases = found.__mro__ if isinstance(found, type) else type(found).__mro__
    annotated = any(member in vars(base).get("__annotations__", {}) for base in bases)
    if annotated or hasattr(found, member):
        return None
    return f"it lacks the attribute `{member}`; declare it in the class body"


def _method_mismatch(found: object, member: str, *, wanted: object) -> str | None:
    expected = _signature(wanted, drop_self=True)
    keyword = "async def" if inspect.iscoroutinefunction(wanted) else "def"
    form = f"`{keyword} {member}{expected}`"
    if isinstance(found, type):
        given = _class_member(found, member)
    else:
        given = found if inspect.isroutine(found) and member == "__call__" else getattr(found, member, None)
    if given is None:
        return f"it lacks `{member}`; define {form}"
    function = given.__func__ if isinstance(given, staticmethod | classmethod) else given
    if not callable(function):
        return f"its `{member}` is not a function; define {form}"
    may_be_async = "Awaitable" in str(expected.return_annotation)
    if not may_be_async and inspect.iscoroutinefunction(wanted) != inspect.iscoroutinefunction(function):
        return f"its `{member}` is {'not ' if keyword == 'async def' else ''}async; define {form}"
    actual = _signature(function, drop_self=isinstance(found, type) and not isinstance(given, staticmethod))
    return _call_mismatch(actual, expected, member=member, form=form)


def _signature(function: object, *, drop_self: bool) -> inspect.Signature:
    signature = inspect.signature(cast("Callable[..., object]", function))
    return signature.replace(parameters=list(signature.parameters.values())[drop_self:])


def _call_mismatch(
    actual: inspect.Signature, expected: inspect.Signature, *, member: str, form: str
) -> str | None:
    parameters = expected.parameters.values()
    positional = [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    keywords = {p.name: p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    try:
        actual.bind(*positional, **keywords)
    except TypeError as error:
        return f"its `{member}` cannot be called as {form}: {error}"
    return None


def _import(module_name: str, *, spec: str, recipe_dir: Path | None) -> ModuleType:
    try:
        with _busy(f"{spec}: its import"):
            if module_name == RECIPE_MODULE:
                return _import_recipe(spec, recipe_dir=recipe_dir)
            return importlib.import_module(module_name)
    except PluginError:
        raise
    except ModuleNotFoundError as error:
        remedy = "install the package that holds it, or put the code into the recipe's own recipe.py"
        raise PluginError(f"plug-in {spec!r}: no module named {error.name!r}; {remedy}") from error
    except RAISED as error:
        raise PluginError(f"plug-in {spec!r} cannot be imported: {describe(error)}") from error


def _import_recipe(spec: str, *, recipe_dir: Path | None) -> ModuleType:
    if recipe_dir is None:
        raise PluginError(
            f"plug-in {spec!r} is code of the run's recipe, which this daemon may not run, as it is no recipe of this "
            "release; start it with --allow-recipe-code if you trust whoever created the run, or install the code as a "
            "package"
        )
    path = recipe_dir / f"{RECIPE_MODULE}.py"
    if not path.is_file():
        raise PluginError(
            f"plug-in {spec!r} needs a recipe.py beside the recipe, but {recipe_dir} has none; add it"
        )
    digest = hashlib.sha256(bytes(path.resolve()) + b"\0" + path.read_bytes()).hexdigest()[:16]
    unique_name = f"astraflow_recipe_{digest}"
    if unique_name in sys.modules:
        return sys.modules[unique_name]
    # A package, so that it may import the modules beside it: `from .grading import check`.
    source = importlib.util.spec_from_file_location(
        unique_name, path, submodule_search_locations=[str(path.parent)]
    )
    if source is None or source.loader is None:
        raise PluginError(f"plug-in {spec!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(source)
    sys.modules[unique_name] = module  # before it runs: dataclasses look their own module up
    try:
        source.loader.exec_module(module)
    except BaseException:
        del sys.modules[unique_name]
        raise
    return module
