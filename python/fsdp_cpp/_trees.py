"""The nodes of argument trees that C++ does not walk by itself: all but tuple, list and dict."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree


def children(node: Any, in_results: bool) -> tuple[list[Any], Any] | None:
    """Returns the children of a node and what `rebuild` needs beside them, or None for a leaf.

    A registered node is a leaf in arguments: a module may write to it, for example to a cache of keys and values, and
    a copy would lose that. torch's FSDP2 does the same.
    """
    if isinstance(node, type):
        return None
    if dataclasses.is_dataclass(node):
        names = [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
        return [getattr(node, name) for name in names], names
    if isinstance(node, PackedSequence):
        return [node.data], None
    if isinstance(node, (tuple, list, set, frozenset)):
        return list(node), None
    if isinstance(node, dict):
        return list(node.values()), list(node.keys())
    known = _pytree.SUPPORTED_NODES.get(type(node)) if in_results else None
    if known is None:
        return None
    values, context = known.flatten_fn(node)
    return list(values), context


def rebuild(node: Any, values: list[Any], context: Any) -> Any:
    """Returns a copy of the node with other children."""
    if dataclasses.is_dataclass(node):
        made = copy.copy(node)
        for name, value in zip(context, values):
            if isinstance(made, dict) and name in made:  # transformers' ModelOutput is both, and has no update()
                made[name] = value
            object.__setattr__(made, name, value)  # also in a frozen one
        return made
    if isinstance(node, PackedSequence):
        return node._replace(data=values[0])
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*values)
    if isinstance(node, (tuple, list, set, frozenset)):
        return type(node)(values)
    if isinstance(node, dict):
        tree = copy.copy(node)
        tree.update(zip(context, values))
        return tree
    return _pytree.SUPPORTED_NODES[type(node)].unflatten_fn(values, context)
