# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The engine's scheduler, which does not see a request before its blended prefill is done."""

from typing import Any

from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from .prefills import BlendedPrefills

__all__ = ["BlendedScheduler"]


class BlendedScheduler(FIFOScheduler):
    """First come, first served, but for requests whose blocks are being filled.

    As `BlendedPagedCache` it is made of the engine's own, because the engine knows its schedulers by name.
    """

    prefills: BlendedPrefills

    @classmethod
    def adopt(cls, scheduler: FIFOScheduler, prefills: BlendedPrefills) -> "BlendedScheduler":
        """Turn the scheduler that the engine made into one of this class.

        Args:
            scheduler: that has no request yet.
            prefills: holds requests back.
        """
        scheduler.__class__ = cls
        adopted: BlendedScheduler = scheduler  # type: ignore[assignment]
        adopted.prefills = prefills
        return adopted

    def add_waiting_request(self, state: Any) -> None:
        """Take up a request; it is held back if it may reuse chunks.

        Args:
            state: of the request.
        """
        super().add_waiting_request(state)
        self.prefills.offer(state)

    def finish_request(self, request_id: str) -> None:
        """Let go of the blocks of a request, and of what was known of its chunks.

        Args:
            request_id: of the request; the engine may add it again at once, to compute it later.
        """
        super().finish_request(request_id)
        self.prefills.finish(request_id)

    def clear_cancelled_requests(self) -> list[Any]:
        """Let go of the requests that were cancelled, also of one whose blocks are being filled.

        Returns:
            Their states.
        """
        with self._cancellation_lock:
            cancelled = set(self._requests_to_cancel)
        for request_id in cancelled:
            self.prefills.drop(request_id)
        states: list[Any] = super().clear_cancelled_requests()
        return states

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        """Choose the requests of the next step, as the base class does.

        After requests had to give up their blocks it lets no new one in until another has finished. If those were all
        cancelled none ever would, and the engine would wait for ever.

        Args:
            token_budget: of the step.
            cache_budget: cache entries that the step may read.
        """
        if not self.active_requests:
            self.block_new_requests = False
        return super().schedule_batch(token_budget, cache_budget)

    def may_grow(self) -> bool:
        """Whether another prompt may take blocks: enough are left for those that decode, or nobody does."""
        return not self.active_requests or bool(self._try_to_meet_safety_margin())

    def _get_waiting_candidates(self) -> list[Any]:
        return [state for state in super()._get_waiting_candidates() if not self.prefills.holds(state.request_id)]
