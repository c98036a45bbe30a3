"""The tree drawn at the top of core/errors.py is the tree of classes."""

import inspect
import re

import core.errors
from core.errors import InvalidRequest, ServeError


def drawn_tree():
    """(class, parent) pairs from the drawing, by indentation."""
    lines = re.findall(r"^    ([| `-]*)(\w+)", core.errors.__doc__, flags=re.MULTILINE)
    pairs, path = set(), []
    for prefix, name in lines:
        depth = len(prefix) // 4
        path = [*path[:depth], name]
        pairs.add((name, path[depth - 1] if depth else "Exception"))
    return pairs


def test_drawing_and_classes_agree():
    classes = inspect.getmembers(core.errors, inspect.isclass)
    assert drawn_tree() == {(name, kind.__base__.__name__) for name, kind in classes}


def test_an_error_carries_its_message_and_field():
    error = InvalidRequest("n must be in [1, 128], got 0", param="n")
    assert (error.message, error.param, str(error)) == (
        str(error),
        "n",
        "n must be in [1, 128], got 0",
    )
    assert isinstance(error, ServeError)
