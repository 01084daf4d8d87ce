# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The engine's scheduler: it does not see a request before its blended prefill is done."""

from typing import Any

from transformers.generation.continuous_batching.requests import FutureRequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from .healing import HEALING, Healing
from .prefills import BlendedPrefills
from .turns import Rounds

__all__ = ["BlendedScheduler"]


class BlendedScheduler(FIFOScheduler):
    """Schedules requests that decode first, then prompts, round robin by tenant, but none that is held back."""

    in_step: list[FutureRequestState]  # what the last step ran, or was about to run
    suspects: set[str]  # requests of a step that failed: each is computed alone until it has a token
    healing: Healing | None = None  # what remembers blended answers

    def __init__(self, prefills: BlendedPrefills, **settings: Any) -> None:
        """Make a scheduler from which `prefills` hold requests back; `settings` are as in transformers."""
        self.prefills, self._rounds = prefills, Rounds()
        super().__init__(**settings)

    def reset(self) -> None:
        """Begin without requests."""
        super().reset()
        self.in_step, self.suspects = [], set()

    def add_waiting_request(self, state: Any) -> None:
        """Queue a request; it is held back if it may reuse chunks."""
        super().add_waiting_request(state)
        self.prefills.offer(state)

    def finish_request(self, request_id: str) -> None:
        """Free the blocks of a request, and forget its chunks."""
        state = self.active_requests.get(request_id)
        if state is not None and state.status == RequestStatus.FINISHED:
            self._note_answer(request_id)
        super().finish_request(request_id)
        self.suspects.discard(request_id)
        self.prefills.finish(request_id)

    def passed(self) -> None:
        """Note that a step did not fail: a request that has a token of it is no suspect."""
        self.suspects -= {request.state.request_id for request in self.in_step if request.has_new_token}

    def unfinished(self) -> list[FutureRequestState]:
        """Return the requests of the last step that are not over."""
        alive = {**self.active_requests, **self.waiting_requests}
        return [request for request in self.in_step if request.state.request_id in alive]

    def drop(self, request_id: str) -> None:
        """Remove a request, wherever it is."""
        self.waiting_requests.pop(request_id, None)
        self._cleanup_waiting_queue(set(self.waiting_requests_order) - set(self.waiting_requests))
        self.finish_request(request_id)

    def activate(self, state: Any) -> None:
        """Move a request from the queue to those that decode."""
        del self.waiting_requests[state.request_id]
        self._cleanup_waiting_queue({state.request_id})
        self.active_requests[state.request_id] = state

    def put_back(self, state: Any, is_suspect: bool = False) -> None:
        """Queue a request again, to be computed up to the tokens that it has."""
        self.drop(state.request_id)
        self.add_waiting_request(state.create_equivalent_initial_request())
        if is_suspect:
            self.suspects.add(state.request_id)

    def clear_cancelled_requests(self) -> list[Any]:
        """Remove the requests that were cancelled, also one whose blocks are being filled."""
        with self._cancellation_lock:
            cancelled = set(self._requests_to_cancel)
        self.suspects -= cancelled
        for request_id in cancelled:
            self._note_answer(request_id)  # as it is so far: a stop text in it cancels its request, too
            self.prefills.finish(request_id)
        states: list[Any] = super().clear_cancelled_requests()
        return states

    def _note_answer(self, request_id: str) -> None:
        """Let what heals conversations know of an answer."""
        request = self.prefills.requests.get(request_id)
        if self.healing is not None and request is not None and request.state.generated_tokens:
            self.healing.note(request)

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        """Choose the requests of the next step, as the base class does.

        After it has taken blocks from requests, the base class admits no new one until another has finished. If all of
        them were cancelled, none ever would.
        """
        if not self.active_requests:
            self.block_new_requests = False
        batch = super().schedule_batch(token_budget, cache_budget)
        self.in_step = batch[0] or []
        states = [request.state for request in self.in_step if request.state.request_id != HEALING]
        prompts = [state for state in states if not state.generated_tokens]
        for tenant in {self._tenant_of(state) for state in prompts}:
            self._rounds.serve(tenant)
        return batch

    def may_grow(self) -> bool:
        """Return whether another prompt may take blocks: no request decodes, or enough blocks are left for those."""
        return not self.active_requests or bool(self._try_to_meet_safety_margin())

    def _process_candidates(self, candidates: list[Any], *budgets: Any) -> Any:
        """Choose among the requests as the base class does; a suspect is computed alone, if there is room for it."""
        suspect = [state for state in candidates if state.request_id in self.suspects][:1]
        others = [state for state in candidates if state.request_id not in self.suspects]
        decoding = [state for state in others if state.status == RequestStatus.DECODING]
        prompts = [state for state in others if state.status != RequestStatus.DECODING]
        ordered = [*decoding, *self._rounds.order(prompts, self._tenant_of)]
        for chosen in [suspect, ordered] if suspect and ordered else [suspect or ordered]:
            self.in_step = [FutureRequestState(state, False, {}, 0) for state in chosen]
            batch = super()._process_candidates(chosen, *budgets)
            if batch[0]:
                break
        return batch

    def _tenant_of(self, state: Any) -> str:
        return self.prefills.tenant_of(state.request_id)

    def _get_waiting_candidates(self) -> list[Any]:
        return [state for state in super()._get_waiting_candidates() if not self.prefills.holds(state.request_id)]
