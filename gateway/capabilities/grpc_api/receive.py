"""The messages of clients while they arrive: how long each may take, and how many arrive at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Any, Final, Protocol
from weakref import WeakValueDictionary

from gateway.errors import RequestTooSlow
from gateway.memory import MemoryBudget, MemoryBudgetExceeded, resident_bytes
from gateway.tasks import TaskSet, follow

# A message that takes longer to arrive is large or slow, and may use the memory budget.
FAST_RECEIVE_S: Final = 0.1
# So many messages of one caller may arrive at a time without a slot, and more if a share of the memory budget
# has room for what gRPC receives of each at once. The event loop can be late to see that they need a slot,
# and gRPC's threads go on receiving meanwhile.
MIN_FAST_MESSAGES: Final = 16
FAST_MESSAGE_BYTES: Final = 1 << 20
FAST_MESSAGES_SHARE: Final = 1 / 16
# How often the size of the process is looked at while more messages arrive than there are slots.
CHECK_PERIOD_S: Final = 0.05
MAX_RESPONSE_SIZES: Final = 1024
# Smaller responses are not recorded until the caller has had a larger one of the model.
MIN_RECORDED_BYTES: Final = 64 << 10
# The share of a size that is left after the next response.
SIZE_DECAY: Final = 0.9


class StreamIdle(MemoryBudgetExceeded):
    message = "the stream was idle, and other calls need its share of the memory; open it again"


class MessageStalled(MemoryBudgetExceeded):
    message = (
        "the message was not complete, and other calls need its share of the memory; send it again"
    )


class NoReceiveSlot(MemoryBudgetExceeded):
    message = (
        "memory is scarce, and too many messages are arriving; try again shortly, or raise "
        "GATEWAY_MAX_BYTES_IN_FLIGHT, which has room for so many of GATEWAY_MAX_BODY_BYTES"
    )


class Receiver(Protocol):
    """A call or a stream that may have a slot."""

    caller: str  # the key, or the address of a client without one

    @property
    def can_end(self) -> bool: ...

    def end_for_others(self) -> None: ...


class ReceiveSlots:
    """Limits how many messages that are large or slow are received at a time while memory is scarce.

    gRPC tells the size of a message only when it is complete, and nothing before. So each message counts as
    one of maximum size, and is stalled when it has had a slot for `stall_s`. Most of them are small, or are
    not sent yet: there may be more than slots while requests use little of the budget, and the process has
    grown by little more than they are charged for. Otherwise the caller that has most loses those without a
    slot. If another call needs a slot then, that caller loses that of a stalled message; or of any message,
    if it has more than a quarter of the slots and the other caller less.
    """

    def __init__(
        self, memory: MemoryBudget, budget_bytes: int, message_bytes: int, stall_s: float
    ) -> None:
        self._memory = memory
        self._count = max(budget_bytes // message_bytes, 1)
        self._free = self._count  # less than 0: how many messages have no slot
        self._share = max(self._count // 4, 1)
        fast_count = int(budget_bytes * FAST_MESSAGES_SHARE / FAST_MESSAGE_BYTES)
        self._fast_count = max(fast_count, MIN_FAST_MESSAGES)
        self._stall_s = stall_s
        # Those that receive a message, of each caller, in the order in which they began, and when.
        self._receivers: dict[str, dict[Receiver, float]] = {}
        # How many of them cannot end for others, of each caller.
        self._ahead: Counter[str] = Counter()
        self._check: asyncio.TimerHandle | None = None
        self._fast: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def get_fast_limit(self, caller: str) -> asyncio.Semaphore:
        """Return what limits the messages of a caller that arrive without a slot."""
        limit = self._fast.get(caller)
        if limit is None:
            self._fast[caller] = limit = asyncio.Semaphore(self._fast_count)
        return limit

    def try_read_ahead(self, receiver: Receiver) -> bool:
        """Add a receiver that may be unable to end for another one, if there are few of these."""
        ahead = self._ahead
        if ahead.total() >= self._count or ahead[receiver.caller] >= self._share:
            return False
        ahead[receiver.caller] += 1
        self._add(receiver)
        return True

    def end_read_ahead(self, receiver: Receiver) -> None:
        self._ahead[receiver.caller] -= 1
        if not self._ahead[receiver.caller]:
            del self._ahead[receiver.caller]
        self.release(receiver)

    def acquire(self, receiver: Receiver) -> None:
        """Add a receiver, if need be in the place of another caller's. Raises `NoReceiveSlot`."""
        if self._free <= 0 and not self._memory.has_room_for_unknown_messages:
            victim = self._find_victim(receiver.caller)
            if victim is None:
                raise NoReceiveSlot
            self._end(victim)
        self._add(receiver)

    def release(self, receiver: Receiver) -> None:
        receivers = self._receivers.get(receiver.caller, {})
        if receivers.pop(receiver, None) is not None:
            self._free += 1
            if not receivers:
                del self._receivers[receiver.caller]

    def _add(self, receiver: Receiver) -> None:
        receivers = self._receivers.setdefault(receiver.caller, {})
        receivers[receiver] = asyncio.get_running_loop().time()
        self._free -= 1
        if self._check is None:
            self._plan_check()

    def _end(self, receiver: Receiver) -> None:
        self.release(receiver)
        receiver.end_for_others()

    def _plan_check(self) -> None:
        self._check = None
        self._memory.has_unknown_messages = self._free < 0
        if self._free < 0:
            loop = asyncio.get_running_loop()
            self._check = loop.call_later(CHECK_PERIOD_S, self._end_excess)

    def _end_excess(self) -> None:
        """End the receivers without a slot if memory is scarce, and check again later."""
        self._memory.update_excess(resident_bytes())
        if self._free < 0 and not self._memory.has_room_for_unknown_messages:
            for receiver in self._list_newest(-self._free):
                self._end(receiver)
        self._plan_check()

    def _list_newest(self, count: int) -> list[Receiver]:
        """Return the newest receivers that can end, one by one of the caller that then has most."""
        by_caller = [
            [each for each in receivers if each.can_end] for receivers in self._receivers.values()
        ]
        callers = [
            (-len(receivers), number) for number, receivers in enumerate(by_caller) if receivers
        ]
        heapify(callers)
        newest: list[Receiver] = []
        while callers and len(newest) < count:
            negative_size, number = callers[0]
            newest.append(by_caller[number].pop())
            if by_caller[number]:
                heapreplace(callers, (negative_size + 1, number))
            else:
                heappop(callers)
        return newest

    def _find_victim(self, caller: str) -> Receiver | None:
        own = self._receivers.get(caller, {})
        count = len(own)
        # The caller itself comes before others that have as many.
        for receivers in sorted((own, *self._receivers.values()), key=len, reverse=True):
            if len(receivers) < count:
                break
            ending = [receiver for receiver in receivers if receiver.can_end]
            if not ending:
                continue
            if receivers[ending[0]] <= asyncio.get_running_loop().time() - self._stall_s:
                return ending[0]
            if len(receivers) > self._share > count:
                return ending[-1]  # the newest one, of which least has arrived
        return None


@dataclass(slots=True)
class ResponseSize:
    """The largest recent response of a model to a caller, in bytes and as a multiple of its request."""

    size_bytes: float = 0.0
    ratio: float = 0.0


class ResponseSizes:
    """The likely sizes of responses.

    The size of a gRPC response is known only when it is complete. So requests are charged for it in advance:
    many large responses to small requests could arrive at the same time. The responses of one caller must not
    have the requests of others refused.
    """

    def __init__(self) -> None:
        self._by_model_and_caller: dict[tuple[str, str], ResponseSize] = {}

    def expect(self, model: str, caller: str, request_bytes: int) -> int:
        seen = self._by_model_and_caller.get((model, caller))
        return 0 if seen is None else int(min(seen.size_bytes, seen.ratio * request_bytes))

    def add(self, model: str, caller: str, request_bytes: int, response_bytes: int) -> None:
        sizes = self._by_model_and_caller
        seen = sizes.pop((model, caller), None)
        if seen is None:
            if response_bytes < MIN_RECORDED_BYTES:
                return
            seen = ResponseSize()
        seen.size_bytes = max(response_bytes, SIZE_DECAY * seen.size_bytes)
        seen.ratio = max(response_bytes / max(request_bytes, 1), SIZE_DECAY * seen.ratio)
        sizes[model, caller] = seen
        if len(sizes) > MAX_RESPONSE_SIZES:
            del sizes[next(iter(sizes))]  # the one with the least recent response


# Reads and writes of messages. grpc.aio frees a message where the coroutine that reads or writes it ends:
# cancelled, it would leak the whole message (https://github.com/grpc/grpc/issues/43360). So nobody cancels
# one: whoever waits for it follows it, and it ends by itself or with its call.
grpc_operations: Final = TaskSet()


class FastReceive:
    """Receives one message, and calls a function if it takes longer than a message without a slot may.

    One pass of the event loop goes by first: if the loop was busy, the message may have arrived, but its
    reader did not run yet.
    """

    def __init__(
        self, limit: asyncio.Semaphore, delay_s: float, on_slow: Callable[[], None]
    ) -> None:
        self._limit = limit
        self._delay_s = delay_s
        self._on_slow = on_slow
        self._reading: asyncio.Task[Any] | None = None
        self._timer: asyncio.Handle | None = None

    async def start(self, context: Any) -> asyncio.Future[Any]:
        """Return the future message, once few enough others of the caller arrive."""
        await self._limit.acquire()
        self._timer = asyncio.get_running_loop().call_later(self._delay_s, self._yield)
        self._reading = grpc_operations.start(context.read())
        return follow(self._reading)

    def _yield(self) -> None:
        self._timer = asyncio.get_running_loop().call_soon(self._end_slow)

    def _end_slow(self) -> None:
        self.end()
        if self._reading is not None and not self._reading.done():
            self._on_slow()

    def end(self) -> None:
        """Let another message of the caller arrive."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._limit.release()


class MessageReader:
    """Receives one message, and ends the waiting for what takes too long.

    The message has a slot from when it is slow until it has arrived, or the slot is needed by another.
    """

    can_end = True

    def __init__(self, context: Any, slots: ReceiveSlots, caller: str, timeout_s: float) -> None:
        self.caller = caller
        self._context = context
        self._slots = slots
        self._timeout_s = timeout_s
        self._message: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._deadline: asyncio.TimerHandle | None = None

    async def read(self) -> Any:
        """Return the message or EOF. Raises `RequestTooSlow`, or `MemoryBudgetExceeded` without a slot."""
        limit = self._slots.get_fast_limit(self.caller)
        fast = FastReceive(limit, min(FAST_RECEIVE_S, self._timeout_s), self._take_slot)
        try:
            self._message = await fast.start(self._context)
            return await self._message
        finally:
            fast.end()
            if self._deadline is not None:
                self._deadline.cancel()
            self._slots.release(self)

    def end_for_others(self) -> None:
        self._end(MessageStalled())

    def _end(self, failure: Exception) -> None:
        if not self._message.done():
            self._message.set_exception(failure)

    def _take_slot(self) -> None:
        try:
            self._slots.acquire(self)
        except MemoryBudgetExceeded as exc:
            self._end(exc)
            return
        remaining_s = max(self._timeout_s - FAST_RECEIVE_S, 0)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(remaining_s, self._end, RequestTooSlow())


class StreamReader:
    """Receives the messages of one stream.

    A stream may wait for its next message as long as nobody else needs its slot. While its requests are in
    progress, it reads ahead only if a slot is free, because it could not be ended then. The requests are
    the stream's, which starts and ends them; here they are only waited for. `end` ends the stream.
    """

    def __init__(
        self,
        context: Any,
        slots: ReceiveSlots,
        caller: str,
        requests_in_progress: Collection[asyncio.Task[None]],
        end: Callable[[BaseException], None],
    ) -> None:
        self.caller = caller
        self._context = context
        self._slots = slots
        self._requests_in_progress = requests_in_progress
        self._end = end

    @property
    def can_end(self) -> bool:
        return not self._requests_in_progress

    async def read(self) -> Any:
        while self._requests_in_progress:
            if self._slots.try_read_ahead(self):
                try:
                    return await follow(grpc_operations.start(self._context.read()))
                finally:
                    self._slots.end_read_ahead(self)
            await asyncio.wait(self._requests_in_progress, return_when=asyncio.FIRST_COMPLETED)
        limit = self._slots.get_fast_limit(self.caller)
        fast = FastReceive(limit, FAST_RECEIVE_S, self._take_slot)
        try:
            return await (await fast.start(self._context))
        finally:
            fast.end()
            self._slots.release(self)

    def end_for_others(self) -> None:
        self._end(StreamIdle())

    def _take_slot(self) -> None:
        try:
            self._slots.acquire(self)
        except MemoryBudgetExceeded as exc:
            self._end(exc)
