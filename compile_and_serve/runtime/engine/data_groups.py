"""`DataGroups`: a scheduler for each data group of an engine, with the interface of one scheduler.

The groups' ranks hold the same attention weights and compute different requests (data-parallel attention). They step together: a step has a
part for each group, all parts have one shape (`StepShape`), and a group without requests computes padding. So collectives over all groups
need no protocol: one process schedules for all.

A request goes to the least loaded group, or to one that has more of its prompt in its prefix cache (`Router`). It stays there until it has
ended. A request that waits in one group moves to another one that has a free batch slot and nothing to do for it.
"""

from __future__ import annotations

import time
from collections import ChainMap, Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec

from compile_and_serve.runtime.connector.messages import FinishedTransfers
from compile_and_serve.runtime.engine.router import Router
from compile_and_serve.runtime.ledger.records import Preparation
from compile_and_serve.runtime.messages import NOBODY, EngineRequest, EngineStats, RequestOutput, Tenant, TenantStats
from compile_and_serve.runtime.scheduler.adapter_slots import AdapterSlots
from compile_and_serve.runtime.scheduler.move_requests import adopt, take_all
from compile_and_serve.runtime.scheduler.request import NOTHING, Request
from compile_and_serve.runtime.scheduler.request_checks import check_places
from compile_and_serve.runtime.scheduler.scheduler import Scheduler
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, SchedulerOutput, StepShape, step_without_tokens

NO_STEP = -1  # number of a part in which its group computes padding


class MovedRequest(NamedTuple):
    """A sequence between two engines' schedulers. source: as it came."""

    request: Request
    tenant: Tenant
    source: EngineRequest


class DataGroups:
    """Call it as a `Scheduler`. The steps that it returns have `groups`, and so have the results that `update` takes.

    members: the groups' schedulers. router: of as many replicas.
    """

    encoder = None

    def __init__(self, members: Sequence[Scheduler], router: Router) -> None:
        self.members = list(members)
        self._router = router
        self.requests: Mapping[str, Request] = ChainMap(*(one.requests for one in members))
        self.adapter_slots = GroupAdapterSlots([one.adapter_slots for one in members])
        self.max_num_seqs = sum(one.max_num_seqs for one in members)
        self.max_len = min(one.max_len for one in members)
        self._structured: set[str] = set()  # unfinished requests with structured output
        self._movable: dict[str, EngineRequest] = {}  # of each unfinished sequence
        self._has_limits = False  # a key has a limit of running sequences
        self._next_step = 0

    def add_request(self, request: EngineRequest, waits_for: Mapping[Future[Any], Preparation] = NOTHING) -> None:
        """Queue all sequences of a request in one group. See `Scheduler.add_request`."""
        self._check_places(request)
        for index, member in enumerate(self.members):
            self._router.observe(index, member.stats())
        taken = [request_id for request_id in request.request_ids if request_id in self.requests]
        group = None if not taken else self._router.replica_of(taken[0])  # which refuses it
        if group is None:
            group = self._router.route(request)
        try:
            self.members[group].add_request(request, waits_for)
        except BaseException:
            if not taken:
                self._forget(request.request_ids)
            raise
        if request.sampling_params.structured_outputs is not None:
            self._structured.update(request.request_ids)
        self._movable |= {one.request_id: one for one in request.sequences()}
        self._has_limits |= request.tenant is not None and request.tenant.max_running is not None

    def _check_places(self, request: EngineRequest) -> None:
        """Raise `QueueFullError` if the sequences would be beyond the limits of all groups together."""
        tenant, unfinished, others = request.tenant or NOBODY, Counter[str](), dict[str, Tenant]()
        for member in self.members:
            for name, account in member.waiting.accounts.items():
                unfinished[name] += account.num_unfinished
                others[name] = account.tenant
        limits = [member.config.max_in_flight for member in self.members]
        limit = None if limits[0] is None else sum(one or 0 for one in limits)
        found = [(others[name], count) for name, count in unfinished.items() if name != tenant.name]
        check_places(tenant, len(request.request_ids), unfinished[tenant.name], found, limit, self.max_num_seqs)

    def abort(self, request_ids: Iterable[str]) -> None:
        """See `Scheduler.abort`."""
        request_ids = list(request_ids)
        for member in self.members:
            member.abort(request_ids)
        self._forget(request_ids)

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._router.finish(request_id)
            self._structured.discard(request_id)
            self._movable.pop(request_id, None)

    def fail_all(self, reason: str) -> list[RequestOutput]:
        """See `Scheduler.fail_all`."""
        outputs = [output for member in self.members for output in member.fail_all(reason)]
        self._forget([output.request_id for output in outputs])
        self._router.forget_prefixes()
        return outputs

    def fail_group(self, group: int | None, reason: str) -> list[RequestOutput]:
        """End the requests of one group with the error `reason`; None: of all."""
        members = self.members if group is None else [self.members[group]]
        outputs = [output for member in members for output in member.fail_all(reason)]
        self._forget([output.request_id for output in outputs])
        return outputs

    def take_all(self) -> list[MovedRequest]:
        """Take all unfinished requests out, in the order of their arrival. Other groups may `adopt` them."""
        taken = [pair for member in self.members for pair in take_all(member)]
        taken.sort(key=lambda pair: (*pair[0].key[:-1], pair[0].arrival_time))
        return [MovedRequest(request, tenant, self._movable[request.request_id]) for request, tenant in taken]

    def adopt(self, moved: MovedRequest) -> RequestOutput | None:
        """Queue a request that other groups had. → its end, if it is too long for this KV cache."""
        index = self._router.route(moved.source)
        request_id = moved.request.request_id
        output = adopt(self.members[index], moved.request, moved.tenant)
        if output is not None:
            self._router.finish(request_id)
            return output
        self._movable[request_id] = moved.source
        if moved.source.sampling_params.structured_outputs is not None:
            self._structured.add(request_id)
        self._has_limits |= moved.tenant.max_running is not None
        return None

    @property
    def unfinished_keys(self) -> Collection[str]:
        """Names of the API keys that have unfinished requests."""
        return {name for member in self.members for name in member.unfinished_keys}

    def has_work(self) -> bool:
        """See `Scheduler.has_work`."""
        return any(member.has_work() for member in self.members)

    def forget_device_memory(self) -> None:
        """See `Scheduler.forget_device_memory`."""
        for member in self.members:
            member.forget_device_memory()
        self._router.forget_prefixes()

    def reset_prefix_cache(self) -> bool:
        """Forget the cached prefixes of all groups; False while a request of any holds blocks, whose group then keeps its own."""
        is_reset = [member.reset_prefix_cache() for member in self.members]
        self._router.forget_prefixes()
        return all(is_reset)

    def schedule(self) -> SchedulerOutput | None:
        """The next step of all groups; None when none can run anything."""
        parts: list[SchedulerOutput | None] = []
        for member in self.members:
            if self._has_limits:
                self._count_tenants()
            parts.append(member.schedule())
        self._move_waiting()
        found = [part for part in parts if part is not None]
        if not found:
            return None
        rows = [member.last_step.num_rows for member, part in zip(self.members, parts, strict=True) if part is not None]
        shape = StepShape(
            tokens=max(part.total_num_scheduled_tokens for part in found),
            rows=max(1, *rows),
            is_decode=all(len(part.num_scheduled_tokens) == part.num_decodes == part.total_num_scheduled_tokens for part in found),
            is_apart=bool(self._structured),
            group_tokens=tuple([0 if part is None else part.total_num_scheduled_tokens for part in parts]),
        )
        for index, part in enumerate(parts):
            parts[index] = part = step_without_tokens(NO_STEP, None) if part is None else part
            part.shape = shape
        self._next_step += 1
        whole = step_without_tokens(self._next_step - 1, None)
        whole.num_scheduled_tokens = {name: count for part in found for name, count in part.num_scheduled_tokens.items()}
        whole.total_num_scheduled_tokens = sum(part.total_num_scheduled_tokens for part in found)
        whole.num_decodes = sum(part.num_decodes for part in found)
        whole.groups = [part for part in parts if part is not None]
        return whole

    def _move_waiting(self) -> None:
        """Let requests that could not start in their group wait in groups that have room for them in the next step."""
        for index, member in enumerate(self.members):
            if member.waiting:
                continue
            for donor in self.members:
                while len(member.requests) < member.max_num_seqs and (first := donor.waiting.first_to_move()) is not None:
                    request = self._movable.get(first.request_id)
                    if donor is member or request is None:
                        break
                    clock = first.clock
                    donor.abort([first.request_id])
                    self._router.finish(first.request_id)
                    self._router.assign(request, index)
                    member.add_request(request)
                    if clock is not None:
                        moved = member.requests[first.request_id]
                        clock.move(moved.share.account.clock, time.monotonic())
                        moved.clock = clock

    def _count_tenants(self) -> None:
        """Let a key's limit of running sequences hold for all groups together."""
        accounts = [member.waiting.accounts for member in self.members]
        limited = {name for one in accounts for name, account in one.items() if account.tenant.max_running is not None}
        for name in limited:
            held = [one[name] for one in accounts if name in one]
            total = sum(account.num_running for account in held)
            for account in held:
                account.num_elsewhere = total - account.num_running

    def update(self, scheduled: SchedulerOutput, result: ModelRunnerOutput, seconds: float = 0.0) -> list[RequestOutput]:
        """See `Scheduler.update`."""
        outputs: list[RequestOutput] = []
        for member, part, own in zip(self.members, scheduled.groups, result.groups, strict=True):
            if part.step != NO_STEP:
                outputs += member.update(part, own, seconds)
        self._forget([output.request_id for output in outputs if output.finish_reason is not None])
        return outputs

    def end_transfers(self, transfers: FinishedTransfers | None) -> None:
        """There are none: connectors know one group."""
        assert transfers is None

    @property
    def misses(self) -> Mapping[str, int]:
        """See `Scheduler.misses`."""
        return sum((Counter(member.misses) for member in self.members), Counter())

    def stats(self) -> EngineStats:
        """The groups' stats together."""
        return joined_stats([member.stats() for member in self.members])


class GroupAdapterSlots:
    """The adapter slots of all groups: each group's ranks have their own."""

    def __init__(self, members: Sequence[AdapterSlots]) -> None:
        self._members = members

    def is_used(self, adapter: int) -> bool:
        """Whether an unfinished request of any group uses the adapter, or it is pinned."""
        return any(one.is_used(adapter) for one in self._members)

    def is_pinned(self, adapter: int) -> bool:
        """Whether the adapter keeps its slots."""
        return self._members[0].is_pinned(adapter)

    def pin(self, adapter: int) -> None:
        """See `AdapterSlots.pin`."""
        for one in self._members:
            one.pin(adapter)

    def unpin(self, adapter: int) -> None:
        """See `AdapterSlots.unpin`."""
        for one in self._members:
            one.unpin(adapter)


def joined_stats(parts: Sequence[EngineStats]) -> EngineStats:
    """The state of several schedulers as that of one: sums, and the mean of the KV cache's usage."""
    whole = msgspec.structs.replace(parts[0])
    for name in (
        "num_running",
        "num_waiting",
        "num_free_blocks",
        "num_total_blocks",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
    ):
        setattr(whole, name, sum(getattr(part, name) for part in parts))
    whole.kv_cache_usage = sum(part.kv_cache_usage for part in parts) / len(parts)
    whole.waiting_for = dict(sum((Counter(part.waiting_for) for part in parts), Counter()))
    tenants: dict[str, TenantStats] = {}
    for part in parts:
        for name, one in part.tenants.items():
            before = tenants.get(name, TenantStats(0, 0, 0.0))
            running, waiting = before.num_running + one.num_running, before.num_waiting + one.num_waiting
            tenants[name] = TenantStats(running, waiting, before.served + one.served)
    whole.tenants = tenants
    return whole
