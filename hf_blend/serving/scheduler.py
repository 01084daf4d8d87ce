# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The engine's scheduler, which does not see a request before its blended prefill is done."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from transformers.generation.continuous_batching.requests import FutureRequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from .prefills import BlendedPrefills

__all__ = ["BlendedScheduler"]

SHARED_STEP_S = 0.05  # which a step is to take while several tenants ask: how long one waits for a step of another
LEAST_STEP = 32  # tokens of such a step; on a CPU a prompt costs half as much again in them


class BlendedScheduler(FIFOScheduler):
    """First come, first served, but for requests whose blocks are being filled, and among tenants.

    The tenant that has had least of the model goes first. While it has prompts, those of others wait. Others that
    decode stay in its steps as long as there is room, but in the step that brings its first tokens.
    """

    prefills: BlendedPrefills
    in_step: list[FutureRequestState]  # what the last step ran, or was about to
    suspects: set[str]  # requests of a step that failed: each is computed alone until it has a token
    begin: Callable[[], Any]  # called when new requests were taken up, before the next step is chosen
    shared_step: int  # tokens of a step while several tenants ask
    tokens: Counter[str]  # of each tenant in the last step
    took: float  # seconds of it that were charged

    @classmethod
    def adopt(cls, scheduler: Any, prefills: BlendedPrefills, begin: Callable[[], Any]) -> None:
        """Turn the scheduler that the engine made into one of this class."""
        scheduler.__class__ = cls
        scheduler.prefills, scheduler.begin, scheduler.in_step, scheduler.suspects = prefills, begin, [], set()
        scheduler.shared_step, scheduler.tokens, scheduler.took = LEAST_STEP, Counter[str](), 0.0

    def add_waiting_request(self, state: Any) -> None:
        """Take up a request; it is held back if it may reuse chunks."""
        super().add_waiting_request(state)
        self.prefills.offer(state)

    def finish_request(self, request_id: str) -> None:
        """Let go of the blocks of a request, and of what was known of its chunks."""
        super().finish_request(request_id)
        self.suspects.discard(request_id)
        self.prefills.finish(request_id)

    def passed(self) -> None:
        """A step did not fail: who got a token in it is no suspect."""
        self.suspects -= {one.state.request_id for one in self.in_step if one.has_new_token}

    def charge(self, seconds: float) -> None:
        """Charge the tenants of the step so many more seconds of it."""
        tokens, self.took = sum(self.tokens.values()), self.took + seconds
        for tenant, own in self.tokens.items():
            self.prefills.shares.add(tenant, seconds * own / tokens)

    def fit(self) -> None:
        """Let the next steps be shorter if the last one took long, or longer if it did not and was full."""
        if self.took > SHARED_STEP_S:
            self.shared_step = max(LEAST_STEP, self.shared_step // 2)
        elif self.tokens.total() >= self.shared_step:
            self.shared_step *= 2

    def unfinished(self) -> list[FutureRequestState]:
        """What was in the last step and is not over."""
        alive = {**self.active_requests, **self.waiting_requests}
        return [one for one in self.in_step if one.state.request_id in alive]

    def drop(self, request_id: str) -> None:
        """Let go of a request, wherever it is."""
        self.waiting_requests.pop(request_id, None)
        self._cleanup_waiting_queue(set(self.waiting_requests_order) - set(self.waiting_requests))
        self.finish_request(request_id)

    def take_up(self, state: Any) -> None:
        """Move a request from those that wait to those that are computed."""
        del self.waiting_requests[state.request_id]
        self._cleanup_waiting_queue({state.request_id})
        self.active_requests[state.request_id] = state

    def put_back(self, state: Any, is_suspect: bool) -> None:
        """Have a request computed again, up to the tokens that it has."""
        self.drop(state.request_id)
        self.add_waiting_request(state.create_equivalent_initial_request())
        if is_suspect:
            self.suspects.add(state.request_id)

    def clear_cancelled_requests(self) -> list[Any]:
        """Let go of the requests that were cancelled, also of one whose blocks are being filled."""
        with self._cancellation_lock:
            cancelled = set(self._requests_to_cancel)
        self.suspects -= cancelled
        for request_id in cancelled:
            self.prefills.drop(request_id)
        states: list[Any] = super().clear_cancelled_requests()
        return states

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        """Choose the requests of the next step, as the base class does.

        After requests had to give up their blocks it lets no new one in until another has finished. If those were all
        cancelled none ever would, and the engine would wait for ever.
        """
        if not self.active_requests:
            self.block_new_requests = False
        self.begin()
        budget = min(token_budget, self.shared_step) if self.prefills.shares.are_several else token_budget
        found = super().schedule_batch(budget, cache_budget)
        self.in_step, self.tokens, self.took = found[0] or [], Counter(), 0.0
        for one in self.in_step:
            self.tokens[self.prefills.tenant_of(one.state.request_id)] += one.query_length
        return found

    def may_grow(self) -> bool:
        """Whether another prompt may take blocks: enough are left for those that decode, or nobody does."""
        return not self.active_requests or bool(self._try_to_meet_safety_margin())

    def _process_candidates(self, candidates: list[Any], token_budget: int, *budgets: Any) -> Any:
        """Choose among the requests as the base class does, but one suspect alone, if it has room."""
        suspect = [state for state in candidates if state.request_id in self.suspects][:1]
        others = [state for state in candidates if state.request_id not in self.suspects]
        choices = [one for one in (suspect, *self._in_turn(others, token_budget)) if one] or [[]]
        for chosen in choices:
            self.in_step = [FutureRequestState(state, False, {}, 0) for state in chosen]
            found = super()._process_candidates(chosen, token_budget, *budgets)
            if found[0]:
                break
        return found

    def _in_turn(self, states: list[Any], token_budget: int) -> list[list[Any]]:
        """Requests of the next step in their order, and those to choose from if none of these has room."""
        had = {
            state.request_id: self.prefills.shares.of(self.prefills.tenant_of(state.request_id)) for state in states
        }
        least = min(had.values(), default=0.0)
        first = [state for state in states if had[state.request_id] == least]
        rows = [state for state in states if had[state.request_id] != least and _decodes(state)]
        staying = {state.request_id for state in (*first, *rows)[: max(len(first), self.max_requests_per_batch)]}
        turn = lambda state: (state.request_id not in staying, not _decodes(state), had[state.request_id])  # noqa: E731
        ordered = sorted(states, key=turn)
        prompts = [state for state in first if not _decodes(state)]
        if not prompts or len(first) == len(states):
            return [ordered]
        tokens = len(first) - len(prompts) + sum(map(self.prefills.left, prompts))
        ahead = first if tokens <= token_budget else [*first, *rows]
        return [sorted(ahead, key=turn), ordered]

    def _get_waiting_candidates(self) -> list[Any]:
        return [state for state in super()._get_waiting_candidates() if not self.prefills.holds(state.request_id)]


def _decodes(state: Any) -> bool:
    return bool(state.status == RequestStatus.DECODING)
