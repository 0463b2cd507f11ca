"""What the control plane has of the data plane, where that is in workers: the gate, the requests, the sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.data.gate import Gate
from proxy.fleet.engine import Engine
from proxy.fleet.registry import Fleet
from proxy.workers.link import Message

if TYPE_CHECKING:
    from proxy.workers.director import Worker, Workers

MAX_SESSIONS_TOLD = 100_000
"""Sessions whose engine the director remembers, to answer ``/finish_session`` and to tell new workers."""


class FleetGate(Gate):
    """The gate of all workers."""

    def __init__(self, workers: Workers) -> None:
        super().__init__(max_requests=0, max_bytes=0, can_pass=lambda: True)
        self._workers = workers

    @property
    def held(self) -> int:
        """Requests held by all workers, as last told."""
        return sum(worker.told.get("held", 0) for worker in self._workers.living)

    def close(self, by: str) -> None:
        """Tell every worker; `settled` waits until all did it."""
        super().close(by)
        self._workers.close_gates(by)

    def open(self) -> None:
        """Tell every worker."""
        super().open()
        for worker in self._workers.living:
            worker.link.send("open")

    async def settled(self) -> None:
        """Every worker holds new requests now."""
        await self._workers.acknowledged()


class RemoteRequest:
    """A request that a worker holds or runs."""

    def __init__(self, worker: Worker, told: Message, engine: Engine | None) -> None:
        self.request_id: str = told["id"]
        self.route: str = told["route"]
        self.prompts: int = told["prompts"]
        self.engine = engine
        self._worker = worker
        self._order: int = told["order"]

    def abort(self) -> None:
        """End it while it is held."""
        self._worker.link.send("abort", order=self._order)


class RemoteTracker:
    """Requests of all workers, as of the last `refresh`."""

    def __init__(self, workers: Workers, fleet: Fleet) -> None:
        self._workers = workers
        self._fleet = fleet
        self._requests: list[RemoteRequest] = []

    async def refresh(self) -> None:
        """Ask every worker."""
        found: list[RemoteRequest] = []
        for worker, answer in await self._workers.ask_all("running"):
            for told in answer["requests"]:
                engine = self._fleet.engines.get(told["engine"]) if told["engine"] else None
                found.append(RemoteRequest(worker, told, engine))
        self._requests = found

    def find(self, request_id: str) -> list[RemoteRequest]:
        """Requests that carry this id."""
        return [request for request in self._requests if request.request_id == request_id]

    def all(self) -> list[RemoteRequest]:
        """Every request."""
        return list(self._requests)


class RemoteSessions:
    """What the control plane asks of the balancing policy, which lives in the workers."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.known: dict[str, str] = {}

    def placed(self, key: str, engine: str, by: Worker) -> None:
        """A worker gave a session an engine; the others keep it there."""
        self.known.pop(key, None)
        self.known[key] = engine
        if len(self.known) > MAX_SESSIONS_TOLD:
            del self.known[next(iter(self.known))]
        for worker in self._workers.living:
            if worker is not by:
                worker.link.send("session", key=key, engine=engine)

    def finish(self, key: bytes) -> bool:
        """A session is over."""
        name = key.decode("latin-1")
        for worker in self._workers.living:
            worker.link.send("finish_session", key=name)
        return self.known.pop(name, None) is not None

    def forget(self, engine_id: str) -> None:
        """An engine left."""
        for worker in self._workers.living:
            worker.link.send("forget", engine=engine_id)
        self.known = {key: engine for key, engine in self.known.items() if engine != engine_id}
