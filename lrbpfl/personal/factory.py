"""Somebody's own network by the name of what makes it: `package.module:make`."""

from importlib import import_module

from torch import nn

from lrbpfl.errors import BadInput


def model_from(name: str) -> nn.Module:
    """What the named callable returns when it is called without arguments, or the named module itself."""
    place, colon, attribute = name.partition(":")
    if not (colon and place and attribute):
        raise BadInput(f"{name!r} names no model: write it as package.module:callable")
    try:
        found = import_module(place)
    except Exception as error:  # the module is somebody else's code
        raise BadInput(f"the module of model {name!r} cannot be imported: {_short(error)}") from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise BadInput(f"{place} has no {attribute!r} that could make a model")
        found = getattr(found, part)
    return _made(name, found)


def _made(name: str, found: object) -> nn.Module:
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise BadInput(f"{name!r} is a {type(found).__name__}: name a callable that returns a torch.nn.Module")
    try:
        made = found()
    except Exception as error:
        raise BadInput(f"{name!r} cannot be called without arguments: {_short(error)}") from None
    if not isinstance(made, nn.Module):
        raise BadInput(f"{name!r} returns a {type(made).__name__}, and a torch.nn.Module is needed")
    return made


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
