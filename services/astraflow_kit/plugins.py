"""Loading plug-ins named `module.path:Name` in a recipe.

Invariant: what `load` returns has every member of its Protocol with a compatible signature, so a wrong
plug-in stops a daemon at start and not in the middle of a run. `recipe:Name` means the `recipe.py` beside
the recipe; it is executed once per content. Daemons call `load` for every plug-in when they read their
recipe.
"""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import cast

from typing_extensions import get_protocol_members

from astraflow.errors import PluginError
from astraflow_kit.nearest import did_you_mean

RECIPE_MODULE = "recipe"


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
    if inspect.iscoroutinefunction(wanted) != inspect.iscoroutinefunction(function):
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
        if module_name == RECIPE_MODULE:
            return _import_recipe(spec, recipe_dir=recipe_dir)
        return importlib.import_module(module_name)
    except PluginError:
        raise
    except ModuleNotFoundError as error:
        remedy = "install the package that holds it, or put the code into the recipe's own recipe.py"
        raise PluginError(f"plug-in {spec!r}: no module named {error.name!r}; {remedy}") from error
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__}: {error}"
        raise PluginError(f"plug-in {spec!r} raised at {frame.filename}:{frame.lineno}: {cause}") from error


def _import_recipe(spec: str, *, recipe_dir: Path | None) -> ModuleType:
    path = (recipe_dir or Path()) / f"{RECIPE_MODULE}.py"
    if recipe_dir is None or not path.is_file():
        where = f"{recipe_dir} has none" if recipe_dir else "this recipe came without a folder"
        raise PluginError(f"plug-in {spec!r} needs a recipe.py beside the recipe, but {where}; add it")
    digest = hashlib.sha256(bytes(path.resolve()) + b"\0" + path.read_bytes()).hexdigest()[:16]
    unique_name = f"astraflow_recipe_{digest}"
    if unique_name in sys.modules:
        return sys.modules[unique_name]
    source = importlib.util.spec_from_file_location(unique_name, path)
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
