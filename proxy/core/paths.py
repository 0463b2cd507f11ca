"""Is a path a control path, a data path, or a control path in disguise?

The question is settled on the bytes of the request target. A control path counts only in its plain spelling (a
trailing slash is tolerated, because TRL and SkyRL send one). Anything that some server could *read* as a control path
although it is not spelled like one is refused: percent-encoding (once or many times over), dot segments, empty
segments, backslashes, path parameters, and the line end that ``$`` of a route pattern tolerates (Starlette takes
``/pause%0a`` for ``/pause``). Otherwise a client of the data plane could pause one engine behind the proxy's back.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from proxy.core.calls import CALLS, OWN_PATHS, OWN_PREFIXES
from proxy.core.routes import GENERATION
from proxy.core.spelling import normal_form


class Route(StrEnum):
    """Where a request goes."""

    CONTROL = "control"
    DATA = "data"
    REFUSE = "refuse"


class PathTable:
    """Which paths are control paths.

    Args:
        fanout: further exact paths, or prefixes when they end with ``*`` (setting ``fanout_paths``).
    """

    def __init__(self, fanout: Iterable[str] = ()) -> None:
        exact = {path.encode("ascii") for path in (*CALLS, *OWN_PATHS)}
        prefixes = [prefix.encode("ascii") for prefix in OWN_PREFIXES]
        for path in fanout:
            raw = path.encode("ascii")
            if raw.endswith(b"*"):
                prefixes.append(raw[:-1])
            else:
                exact.add(raw.rstrip(b"/") or b"/")
        self._exact = frozenset(exact)
        self._prefixes = tuple(prefixes)

    def is_control(self, path: bytes) -> bool:
        """Whether this plain spelling is a control path.

        A prefix such as ``/skyrl/*`` does not take routes that run the model: one engine answers those.
        """
        return path in self._exact or (path.startswith(self._prefixes) and path not in GENERATION)

    def classify(self, target: bytes) -> Route:
        """Where a request with this target (path, with or without a query) goes."""
        path = target.partition(b"?")[0]
        plain = path.rstrip(b"/") if len(path) > 1 else path
        if path in (plain, plain + b"/") and self.is_control(plain) and self._is_plain(plain):
            return Route.CONTROL
        normal = normal_form(path)
        if normal is None or self.is_control(normal):
            return Route.REFUSE
        return Route.DATA

    def _is_plain(self, path: bytes) -> bool:
        """An exact path is plain by itself; under a prefix nothing may hide behind the wildcard."""
        return path in self._exact or normal_form(path) == path


DEFAULT = PathTable()


def classify(target: bytes, table: PathTable = DEFAULT) -> Route:
    """Where a request with this target goes; see `PathTable.classify`."""
    return table.classify(target)
