"""A small cache of objects that own host memory, one per thread, most recently used first."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

_CAPACITY = 16
_local = threading.local()

Owner = TypeVar("Owner")


def cached(key: Hashable, make: Callable[[], Owner]) -> Owner:
    """The object of this thread for `key`, made if there is none."""
    owners: OrderedDict[Hashable, Any] | None = getattr(_local, "owners", None)
    if owners is None:
        owners = _local.owners = OrderedDict()
    owner = owners.get(key)
    if owner is None:
        owner = owners[key] = make()
        if len(owners) > _CAPACITY:
            owners.popitem(last=False)
    else:
        owners.move_to_end(key)
    return owner
